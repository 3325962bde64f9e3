"""Settings: from the environment (`NETLIMIT_…`), else from a TOML file, else the defaults."""

from __future__ import annotations

import os
import re
import socket
import tomllib
from collections.abc import Callable
from enum import StrEnum
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Annotated, Any, NamedTuple
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, PrivateAttr, SecretStr, ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from netlimit.addresses import explain_unused, unmap
from netlimit.errors import SettingsError
from netlimit.marks import is_run
from netlimit.plain import name_of
from netlimit.reading import read_whole
from netlimit.rules import Target
from netlimit.translation import TranslationPrefix, parse_prefixes

PREFIX = "NETLIMIT_"
DEFAULT_FILE = Path("/etc/netlimit/netlimit.toml")
STATE = Path("/var/lib/netlimit-controller")
"""The controller's directory where netlimit is installed: in one that only root may write."""
FORMER_STATE = Path("/var/lib/netlimit/controller")
"""Where it is without that, and was before: until it is moved, both names mean this one, and then the other."""
HEADERS = ("ietf", "retry-after", "x-ratelimit", "ratelimit")
"""The families of header fields that tell of limits; `netlimit.l7.headers` says what they are."""
USUAL_HEADERS = HEADERS[:3]
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,62}")
_LARGEST_SET = 2**32 - 1
_LARGEST_COUNT = 10**9
_LONGEST = 2**20
"""Bytes of a settings file."""
_LOCAL = "unix:"
_LONGEST_LOCAL = 107
"""Bytes of the path of a Unix socket (unix(7))."""


def _hostname() -> str:
    return name_of(socket.gethostname()) or "localhost"


class Backend(StrEnum):
    """What enforces the rules: the best that this host has (`auto`), or a particular one."""

    AUTO = "auto"
    IPTABLES = "iptables"
    L7 = "l7"
    FAKE = "fake"


class LogFormat(StrEnum):
    """How the parts log: lines to read (`console`), or a JSON object a line."""

    CONSOLE = "console"
    JSON = "json"


class LogLevel(StrEnum):
    """What is worth a line in the log, and all that is worse."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class Listen(NamedTuple):
    """Where a server listens; `str` is the form that it is written in."""

    host: str
    port: int

    @property
    def is_open(self) -> bool:
        """Whether others than this host can connect to it."""
        literal = self.host[0].isdigit() or ":" in self.host
        return self.host != "localhost" and not (literal and ip_address(self.host).is_loopback)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_listen(value: object) -> Listen:
    """Read "host:port"; an IPv6 address stands in brackets. Raises ValueError with a sentence."""
    if isinstance(value, Listen):
        return value
    match = re.fullmatch(r"(\[[0-9A-Fa-f:]*:[0-9A-Fa-f:.]*\]|[^\s:\[\]]+):(\d{1,5})", str(value).strip())
    if match is None or int(match[2]) > 65535:
        raise ValueError(
            f'{value!r} is no place to listen at; write host:port, such as "127.0.0.1:8750", "[::1]:8750".'
        )
    return Listen(match[1].strip("[]"), int(match[2]))


class LocalListen(NamedTuple):
    """The Unix socket at which a server listens; `str` is the form that it is written in."""

    path: str
    """Absolute, and short enough for a socket."""

    @property
    def is_open(self) -> bool:
        """Whether others than this host can connect to it."""
        return False

    def __str__(self) -> str:
        return f"{_LOCAL}{self.path}"


AnyListen = Listen | LocalListen


def parse_any_listen(value: object) -> AnyListen:
    """Read "host:port", or "unix:/absolute/path". Raises ValueError with a sentence."""
    if isinstance(value, LocalListen):
        return value
    scheme, local, path = str(value).strip().partition(_LOCAL)
    if isinstance(value, Listen) or scheme or not local or re.fullmatch(r"\d+", path):  # a host may be called so
        return parse_listen(value)
    name = path.rpartition("/")[2]
    if not path.startswith("/") or name in ("", ".", "..") or "\0" in path:
        raise ValueError(
            f"{value!r} is no place to listen at; a Unix socket is written with its whole path, such as "
            f'"{_LOCAL}/run/netlimit-limiter/http.sock".'
        )
    if len(os.fsencode(path)) > _LONGEST_LOCAL:
        raise ValueError(f"{value!r} is too long; the path of a Unix socket has {_LONGEST_LOCAL} bytes at most.")
    return LocalListen(path)


def parse_mark_mask(value: object) -> int | None:
    """Read the bits of the packet mark that netlimit may use; None for those that are free (`auto`). Raises ValueError
    with a sentence."""
    if value is None or str(value).strip().lower() == "auto":
        return None
    try:
        mask = value if isinstance(value, int) else int(str(value), 0)
    except ValueError:
        raise ValueError(f'{value!r} is no number; write "auto", or a mask such as "0xff000000".') from None
    if not 0 < mask < 2**32:
        raise ValueError(f"{value!r} does not fit into the 32 bits of a packet mark.")
    if not is_run(mask):
        raise ValueError(f'{value!r} is not one run of at least two neighbouring bits, such as "0xff000000" has.')
    return mask


def parse_safe(value: object) -> tuple[Target, ...]:
    """Read a list of addresses and CIDRs, or a text with commas between them. Raises ValueError with a sentence."""
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, list | tuple):
        raise ValueError('it is a list of addresses and CIDRs, such as ["192.0.2.1", "10.0.0.0/24"].')
    return tuple(_parse_network(str(item).strip()) for item in items if str(item).strip())


def _parse_network(text: str) -> Target:
    try:
        if "%" in text:
            raise ValueError("it has a zone, which no packet carries")
        network = ip_network(text)
        if unused := explain_unused(network):
            raise ValueError(unused.rstrip("."))
        return unmap(network)
    except ValueError as error:
        raise ValueError(f"{text!r} is no address or CIDR ({error}).") from None


def _parse_backend(value: object) -> Backend:
    try:
        return Backend(str(value))
    except ValueError:
        known = ", ".join(f'"{backend}"' for backend in Backend)
        raise ValueError(f"{value!r} is no backend; it can be {known}.") from None


def _parse_word(words: type[StrEnum]) -> Callable[[object], StrEnum]:
    """Read one of a few words. What it returns raises ValueError with a sentence."""

    def parse(value: object) -> StrEnum:
        try:
            return words(str(value))
        except ValueError:
            known = ", ".join(f'"{word}"' for word in words)
            raise ValueError(f"{value!r} is none of {known}.") from None

    return parse


def _parse_host(value: object) -> str:
    if not isinstance(value, str) or not _HOST.fullmatch(value):
        raise ValueError(f"{value!r} is no name for a gateway: letters, digits, . _ / and -, 63 at most.")
    return value


def _parse_set_size(value: object) -> int:
    text = str(value)
    if not text.isdecimal() or not 1 <= int(text) <= _LARGEST_SET:
        raise ValueError(f"{value!r} is no size of a set; it is a number of addresses, such as 1048576.")
    return int(text)


def _parse_count(value: object) -> int:
    text = str(value)
    if not text.isdecimal() or not 1 <= int(text) <= _LARGEST_COUNT:
        raise ValueError(f"{value!r} is no whole number from 1 to {_LARGEST_COUNT}, such as 500.")
    return int(text)


def _parse_seconds(value: object) -> float:
    try:
        seconds = float(str(value))
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= 86400:
        raise ValueError(f"{value!r} is no number of seconds from 0 to 86400, such as 60.")
    return seconds


def _parse_directory(value: object) -> Path | None:
    path = None if value is None else Path(str(value))
    if path is not None and not path.is_absolute():
        raise ValueError(
            f"{str(value)!r} is a directory from wherever a command is started, so that each would have another; write "
            f"its path from the root, such as {STATE}."
        )
    return path


def _parse_url(value: object) -> str:
    try:
        parts = urlsplit(value if isinstance(value, str) and value.isprintable() and " " not in value else "")
        host = parts.hostname or ""
        known = parts.scheme in ("http", "https") and _is_host(host) and parts.port != 0
    except ValueError:  # brackets or a port that are none
        known = False
    if any(sign in str(value) for sign in "@?#"):
        raise ValueError(
            "it has a user, a query or a fragment, and is not shown, for there may be a secret in them; an API is "
            'named by its address alone, for example "http://127.0.0.1:8750", and asked with a token (NETLIMIT_TOKEN).'
        )
    if not known:
        raise ValueError(f'{value!r} is no address of an API; write for example "http://127.0.0.1:8750".')
    return str(value).rstrip("/")


def _find_url(known: dict[str, Any]) -> str:
    """Where the API of these settings is found on its own host."""
    listen: Listen = known.get("listen", Listen("127.0.0.1", 8750))
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(listen.host, listen.host)  # noqa: S104 - who listens at all addresses
    port = listen.port or 8750  # 0: any that is free, which nobody knows before it listens
    return f"{'https' if known.get('tls_cert') else 'http'}://{Listen(host, port)}"


def _is_host(text: str) -> bool:
    """Whether it may be a name or an address; what is none of either is left to who looks it up."""
    return bool(re.fullmatch(r"[\w.-]+|[0-9a-f:.]+(%[\w.-]+)?", text)) and (text.isascii() or bool(text.encode("idna")))


def _parse_families(value: object) -> tuple[str, ...]:
    items = value.split(",") if isinstance(value, str) else value
    words = [str(item).strip() for item in items] if isinstance(items, list | tuple) else [str(value)]
    for word in words:
        if word not in HEADERS:
            raise ValueError(f"{word!r} names no header fields; it can be {', '.join(HEADERS)}.")
    return tuple(words)


class Settings(BaseSettings):
    """All settings. `load_settings` makes them; in the environment their names have the prefix NETLIMIT_."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="forbid", frozen=True, env_ignore_empty=True)

    database_url: str = Field("sqlite:////var/lib/netlimit/netlimit.db", repr=False)
    """Where rules are kept; it may hold a password."""
    counters_url: str = Field("memory://", repr=False)
    """Where the limiter counts; it may hold a password."""
    limiter_memory: Annotated[int, BeforeValidator(_parse_count)] = 256
    """MiB that the limiter's counters take in its memory, of all rules together."""
    limits: Path | None = None
    """A file with limits of the limiter, or a folder of such files, besides those in the database."""
    listen: Annotated[Listen, BeforeValidator(parse_listen), NoDecode] = Listen("127.0.0.1", 8750)
    """Where the API listens."""
    limiter_listen: Annotated[AnyListen, BeforeValidator(parse_any_listen), NoDecode] = Listen("127.0.0.1", 8751)
    """Where the limiter listens for HTTP."""
    limiter_grpc_listen: Annotated[AnyListen, BeforeValidator(parse_any_listen), NoDecode] = Listen("127.0.0.1", 8752)
    """Where the limiter listens for gRPC."""
    limiter_token: SecretStr | None = None
    """What proxies and applications show so that limits with `escalate` block whom they tell of; without it none do."""
    limiter_headers: Annotated[tuple[str, ...], BeforeValidator(_parse_families), NoDecode] = USUAL_HEADERS
    """Which header fields tell clients of their limits."""
    bootstrap_token: SecretStr | None = None
    """The admin's token; without it the first start makes one."""
    backend: Annotated[Backend, BeforeValidator(_parse_backend)] = Backend.AUTO
    mark_mask: Annotated[int | None, BeforeValidator(parse_mark_mask)] = None
    """The bits of the packet mark that are netlimit's."""
    safe: Annotated[tuple[Target, ...], BeforeValidator(parse_safe), NoDecode] = ()
    """Addresses that no rule may touch."""
    host: Annotated[str, BeforeValidator(_parse_host)] = Field(default_factory=_hostname)
    """This gateway's name."""
    set_size: Annotated[int, BeforeValidator(_parse_set_size)] = 1048576
    """The most addresses that one ipset may hold (`maxelem`)."""
    state_directory: Annotated[Path | None, BeforeValidator(_parse_directory)] = None
    """Where the controller keeps its copy of what it applied last; by default STATE where netlimit is installed with
    its database in the usual place, else a directory `controller` beside the database."""
    failure_seconds: Annotated[float, BeforeValidator(_parse_seconds)] = 60.0
    """After so long without a database, rules with `on_failure: open` are taken out of force."""
    tls_cert: Path | None = None
    """The API's certificate (PEM), with those of the authorities between it and a known one; only with `tls_key`."""
    tls_key: Path | None = None
    """Its private key (PEM), which only root need be able to read."""
    trusted_proxies: Annotated[tuple[Target, ...], BeforeValidator(parse_safe), NoDecode] = ()
    """Proxies whose X-Forwarded-For is believed: who speaks to the API through them is whom they name."""
    translators: Annotated[tuple[TranslationPrefix, ...], BeforeValidator(parse_prefixes), NoDecode] = ()
    """Prefixes of translators by which clients of IPv4 come as those of IPv6, beside the well-known ones."""
    request_rate: Annotated[int, BeforeValidator(_parse_count)] = 500
    """Requests a second that a token, or an address without one, may send to the API; twice as many at once."""
    audit_length: Annotated[int, BeforeValidator(_parse_count)] = 100_000
    """So many lines of the audit are kept, or a few more."""
    revisions: Annotated[int, BeforeValidator(_parse_count)] = 1000
    """So many changes of rules can be undone."""
    url: Annotated[str, BeforeValidator(_parse_url)] = Field(default_factory=_find_url)
    """Where the command line finds the API: by default where that listens on this host."""
    token: SecretStr | None = None
    """What the command line shows to the API."""
    ca_file: Path | None = None
    """Who is to have signed the API's certificate, for the command line (PEM); by default whom the system trusts."""
    log_format: Annotated[LogFormat, BeforeValidator(_parse_word(LogFormat))] = LogFormat.CONSOLE
    """How the parts log."""
    log_level: Annotated[LogLevel, BeforeValidator(_parse_word(LogLevel))] = LogLevel.INFO
    """What they log."""
    _written: frozenset[str] = PrivateAttr(frozenset())

    @property
    def written(self) -> frozenset[str]:
        """The names of those that the settings file states, whether or not the environment wins over it."""
        return self._written

    @property
    def is_open(self) -> bool:
        """Whether others than this host can connect to the API."""
        return self.listen.is_open

    @property
    def state(self) -> Path:
        """The directory of the controller's own."""
        place = self.state_directory or self._place_beside()
        if place not in (STATE, FORMER_STATE):
            return place
        return next((each for each in (STATE, FORMER_STATE) if os.path.isdir(each)), place)

    def _place_beside(self) -> Path:
        scheme, _, rest = self.database_url.partition(":///")
        beside = Path(rest.partition("?")[0]).parent if scheme.startswith("sqlite") else FORMER_STATE.parent
        return beside / "controller"

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The environment wins over what `load_settings` has read from the file."""
        return env_settings, init_settings


class RecalledSettings(Settings):
    """Settings as they were once, whatever the environment says now."""

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, *others: Any, **named: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """What they are made of."""
        return (init_settings,)


def find_file(config: Path | None = None) -> Path:
    """The settings file that counts: the one that is named, or /etc/netlimit/netlimit.toml."""
    return config or DEFAULT_FILE


def load_settings(config: Path | None = None) -> Settings:
    """Read the settings. `config` must exist if it is given; else /etc/netlimit/netlimit.toml is read if it exists.

    Raises SettingsError for the first setting that is wrong.
    """
    path = find_file(config)
    written = _read_file(path, required=config is not None)
    try:
        settings = Settings(**written)
    except ValidationError as error:
        raise _in_words(error.errors()[0], path) from None
    settings._written = frozenset(written)
    return settings


def read_stated() -> tuple[dict[str, str], dict[str, Any]]:
    """What environment and file say, each as far as it can be read: by the names of settings, values of any kind, which
    may be wrong."""
    try:
        return read_environment(), _read_file(find_file(), required=False)
    except SettingsError:
        return read_environment(), {}


def read_environment() -> dict[str, str]:
    """What the environment says, by the names of settings; it may be wrong."""
    return {name: value for name in Settings.model_fields if (value := os.environ.get(PREFIX + name.upper()))}


def _read_file(path: Path, required: bool) -> dict[str, Any]:
    try:
        return tomllib.loads(read_whole(path, _LONGEST).decode("utf-8"))
    except FileNotFoundError:
        if not required:
            return {}
        raise SettingsError("--config", f"There is no settings file {path}.", path) from None
    except OSError as error:
        raise SettingsError(
            "--config",
            f"The settings file {path} cannot be read: {error.strerror}. Run as root, or name another with --config.",
            path,
        ) from None
    except (ValueError, RecursionError) as error:
        raise SettingsError("--config", f"The settings file {path} is not valid TOML: {error}.", path) from None


def _in_words(error: ErrorDetails, path: Path) -> SettingsError:
    field = str(error["loc"][0])
    setting = PREFIX + field.upper()
    if error["type"] == "extra_forbidden":
        known = ", ".join(sorted(Settings.model_fields))
        return SettingsError(field, f"There is no setting {field!r}, which {path} has; known are {known}.", path)
    is_stated = bool(os.environ.get(setting))
    place = setting if is_stated else f"{field} in {path}"
    # What it is instead is not shown: only tokens come to this.
    sentence = str(error["ctx"]["error"]) if error["type"] == "value_error" else "it must be text."
    return SettingsError(setting, f"The setting {place} cannot be used: {sentence}", None if is_stated else path)
