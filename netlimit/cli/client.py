"""The API, as commands use it."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import typer

from netlimit.cli.database import find_token_file
from netlimit.cli.errors import CommandError
from netlimit.cli.listeners import watch
from netlimit.cli.parts import read_settings
from netlimit.cli.privileges import USER, find_keepers
from netlimit.cli.tls import trust
from netlimit.custody import opened
from netlimit.settings import Settings

if TYPE_CHECKING:  # it takes long to load, and those who run here do not need it
    import httpx

ANSWER_SECONDS = 30.0
"""How long an answer may take, apart from what the API is asked to wait."""
BULK_SECONDS = 300.0
_WARNING = re.compile(r'299 netlimit "([^"]*)"')


class Client:
    """Speaks to the API, and on this host to nobody who has taken its place. Whatever is not an answer of success is
    raised as CommandError, in the API's sentences."""

    def __init__(self, settings: Settings) -> None:
        import httpx

        self._settings = settings
        self._url = settings.url
        self._token = find_token(settings)
        self._watch = watch(settings)
        self._http = httpx.Client(
            base_url=f"{settings.url}/api/v1",
            headers={"Authorization": f"Bearer {self._token}"} if self._token else {},
            timeout=ANSWER_SECONDS,
            verify=trust(settings),
            trust_env=not _is_loopback(settings.url),
        )

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def get(self, path: str, **query: object) -> Any:
        """Read something; query parameters that are None, or empty lists, are left out."""
        return self.call("GET", path, params={name: value for name, value in query.items() if value not in (None, [])})

    def read_text(self, path: str, accept: str) -> str:
        """Read something that is no JSON, or may be."""
        answer = self._ask("GET", path, headers={"Accept": accept})
        if not answer.is_success:
            self._read(answer)
        return answer.text

    def call(self, method: str, path: str, wait: int | None = None, **arguments: Any) -> Any:
        """Do something. `wait` are the seconds that the API may wait for the kernel; None: it answers at once."""
        return self._read(self._ask(method, path, wait, **arguments))

    def remove(self, path: str, wait: int | None = None, **arguments: Any) -> list[str]:
        """Remove something; what the API says besides."""
        answer = self._ask("DELETE", path, wait, **arguments)
        self._read(answer)
        return _WARNING.findall(answer.headers.get("Warning", ""))

    def _ask(self, method: str, path: str, wait: int | None = None, **arguments: Any) -> httpx.Response:
        import httpx

        headers = {**arguments.pop("headers", {}), **({} if wait is None else {"Prefer": f"wait={wait}"})}
        timeout = arguments.pop("timeout", ANSWER_SECONDS) + (wait or 0)
        try:
            return self._http.request(
                method, path, headers=headers, timeout=timeout, extensions={**self._watch}, **arguments
            )
        except httpx.TimeoutException:
            raise CommandError(f"The API at {self._url} did not answer in {timeout:g} seconds.") from None
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
            raise CommandError(
                f"No API answers at {self._url} ({error}). Is `netlimit serve` running? NETLIMIT_URL names another."
            ) from None

    def _read(self, answer: httpx.Response) -> Any:
        if answer.status_code == 204:
            return None
        try:
            document = answer.json()
        except ValueError:
            document = None
        if answer.is_success and document is not None:
            return document
        if not isinstance(document, dict) or "detail" not in document:
            raise CommandError(
                f"What answers at {self._url} (with status {answer.status_code}) is not netlimit's API; "
                "look at NETLIMIT_URL."
            )
        raise CommandError(self._word(answer.status_code, document))

    def _word(self, status: int, problem: Mapping[str, Any]) -> str:
        """A problem document as its sentences: of many lines that are wrong, every one."""
        if status == 401:
            return f"{problem['detail']} {_advise(self._settings, self._token is not None)}"
        lines = [f"Line {each['line']}: {each['detail']}" for each in problem.get("errors", ()) if "line" in each]
        if len(lines) < 2:
            return str(problem["detail"])
        number = len({each["line"] for each in problem["errors"] if "line" in each})
        wrong = "1 line is" if number == 1 else f"{number} lines are"
        return "\n".join([f"{wrong} wrong, and nothing was kept.", *lines])


@contextmanager
def open_client(context: typer.Context) -> Iterator[Client]:
    """The API that the settings name."""
    client = Client(read_settings(context))
    try:
        yield client
    finally:
        client.close()


def rule_path(key: str) -> str:
    """Where a rule is, by id or name."""
    return f"/rules/{quote(key, safe='')}"


def gateway_path(name: str) -> str:
    """Where a gateway is."""
    return f"/gateways/{quote(name, safe='')}"


def limits_path(domain: str) -> str:
    """Where the limits of a domain are."""
    return f"/limits/{quote(domain, safe='')}"


_LONGEST_TOKEN = 1000


def find_token(settings: Settings) -> str | None:
    """The token of the settings, or else the one that the first start of this host's own API has kept in a file."""
    if settings.token:
        return settings.token.get_secret_value()
    if not (_is_loopback(settings.url) or _find_host(settings.url) == settings.listen.host):
        return None
    try:
        # The API's user may write beside the database: no link of his must make root read another file.
        path = find_token_file(settings.database_url)
        with opened(path) as descriptor:
            found = os.fstat(descriptor)
            mine = found.st_uid in find_keepers(USER) and found.st_nlink == 1
            return (os.read(descriptor, _LONGEST_TOKEN).decode("ascii").strip() or None) if mine else None
    except (OSError, ValueError):
        return None


def _advise(settings: Settings, had_token: bool) -> str:
    """What helps who has no token that is good: as after a restore on another machine, whose tokens are in the database
    that was brought back, and in no file here."""
    known = "Set NETLIMIT_TOKEN to one that is good" if had_token else "Set NETLIMIT_TOKEN"
    path = find_token_file(settings.database_url)
    make = "root makes one on the gateway: `export NETLIMIT_TOKEN=$(netlimit token create NAME --role admin)`"
    try:
        there = stat.S_ISREG(path.lstat().st_mode)
    except FileNotFoundError:
        there = False
    except OSError:  # who may not look there is not root
        there = True
    if settings.token is None and had_token:
        return f"The one in {path} is not known to this database, as after a restore; {make}."
    if there and not had_token and os.geteuid() != 0:
        return f"{known}; root may read one in {path}, or {make}."
    return f"{known}; {make}."


def _is_loopback(url: str) -> bool:
    host = _find_host(url)
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def _find_host(url: str) -> str:
    import httpx

    return httpx.URL(url).host
