"""The API, as commands use it."""

from __future__ import annotations

import os
import re
import stat
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from ipaddress import ip_address
from typing import Any
from urllib.parse import quote, urlsplit

import typer

from netlimit.cli.asking import PLAIN, Answer, ask
from netlimit.cli.database import find_token_file
from netlimit.cli.errors import CommandError, note_speaker
from netlimit.cli.listeners import watch
from netlimit.cli.parts import read_settings
from netlimit.cli.privileges import USER, find_keepers
from netlimit.cli.tls import trust
from netlimit.custody import opened
from netlimit.settings import Settings

ANSWER_SECONDS = 30.0
"""How long a question and its whole answer may take, apart from what the API is asked to wait."""
BULK_SECONDS = 300.0
PAGE = 1000
"""So many things of a list are read at once."""
LIST_SECONDS = 900.0
"""How long a whole list may take to come; a hundred thousand rules take a minute on a busy machine."""
MOST_LISTED = 2_000_000
"""So many things a list has at most: no gateway keeps a tenth of that in its kernel."""
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
            headers={**PLAIN, **({"Authorization": f"Bearer {self._token}"} if self._token else {})},
            verify=trust(settings),
            trust_env=not _is_loopback(settings.url),
        )

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def get(self, path: str, **query: object) -> Any:
        """Read something; query parameters that are None, or empty lists, are left out."""
        return self.call("GET", path, params={name: value for name, value in query.items() if value not in (None, [])})

    def walk(self, path: str, query: Mapping[str, object], most: int = sys.maxsize) -> Iterator[Any]:
        """Read a list page by page, until so many things were read. Raises CommandError for one that has no end."""
        cursor, read = None, 0
        end = time.monotonic() + LIST_SECONDS
        while True:
            page = self.get(path, **query, limit=max(1, min(most - read, PAGE)), cursor=cursor)
            yield page
            cursor, read = page["next"], read + len(page["items"])
            if cursor is None or read >= most:
                return
            if not page["items"]:
                raise CommandError(
                    f"What answers at {self._url} tells of more, and shows none; it is not netlimit's API."
                )
            if read >= MOST_LISTED or time.monotonic() > end:
                raise CommandError(
                    f"What answers at {self._url} has told of {read} things and goes on; a list has {MOST_LISTED} at "
                    f"most, and comes in {LIST_SECONDS:g} seconds. What was read is not all of it."
                )

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

    def _ask(self, method: str, path: str, wait: int | None = None, **arguments: Any) -> Answer:
        import httpx

        headers = {**arguments.pop("headers", {}), **({} if wait is None else {"Prefer": f"wait={wait}"})}
        seconds = arguments.pop("timeout", ANSWER_SECONDS) + (wait or 0)
        try:
            return ask(
                self._http,
                method,
                f"{self._url}/api/v1{path}",
                seconds,
                headers=headers,
                extensions={**self._watch},
                **arguments,
            )
        except httpx.TimeoutException:
            raise CommandError(f"The API at {self._url} did not answer in {seconds:g} seconds.") from None
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
            if isinstance(error, UnicodeEncodeError) and error.encoding == "utf-8":  # what was typed is no text
                raise
            raise CommandError(
                f"No API answers at {self._url} ({error}). Is `netlimit serve` running? NETLIMIT_URL names another."
            ) from None

    def _read(self, answer: Answer) -> Any:
        if answer.status == 204:
            return None
        try:
            document = answer.read_json()
        except ValueError:
            document = None
        if answer.is_success and document is not None:
            return document
        if not isinstance(document, dict) or "detail" not in document:
            raise CommandError(
                f"What answers at {self._url} (with status {answer.status}) is not netlimit's API; "
                "look at NETLIMIT_URL."
            )
        raise CommandError(self._word(answer.status, document))

    def _word(self, status: int, problem: Mapping[str, Any]) -> str:
        """A problem document as its sentences: of many lines that are wrong, every one."""
        if status == 401:
            return f"{problem['detail']} {advise(self._settings, self._token is not None)}"
        lines = [f"Line {each['line']}: {each['detail']}" for each in problem.get("errors", ()) if "line" in each]
        if len(lines) < 2:
            return str(problem["detail"])
        number = len({each["line"] for each in problem["errors"] if "line" in each})
        wrong = "1 line is" if number == 1 else f"{number} lines are"
        return "\n".join([f"{wrong} wrong, and nothing was kept.", *lines])


@contextmanager
def open_client(context: typer.Context) -> Iterator[Client]:
    """The API that the settings name."""
    settings = read_settings(context)
    note_speaker(context, f"at {settings.url} is not netlimit's API, or that of another version; look at NETLIMIT_URL")
    client = Client(settings)
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


def advise(settings: Settings, had_token: bool) -> str:
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
    return urlsplit(url).hostname or ""
