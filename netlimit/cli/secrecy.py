"""Keeping tokens and passwords out of the log. Nothing logs them on purpose; this is for what quotes them by chance."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, MutableMapping
from typing import Any
from urllib.parse import unquote, unquote_plus

from netlimit.settings import Settings

HIDDEN = "***"
_SHORTEST = 6
"""A shorter secret of the settings is not looked for letter by letter: it would be found in ordinary words."""
_NAMED = re.compile(r"authorization|cookie|password|passwd|secret|token|api[_-]?key", re.IGNORECASE)
_PASSWORDS = (re.compile(r"://[^/?#@]*?:(.+)@"), re.compile(r"[?&](?:ssl)?password=([^&#]+)"))
_WORDS = r"pass(?:word|wd)|secret|token|api[_-]?key"
_SAID = (
    (re.compile(r"\b(Bearer|Basic)(\\?['\"]?[ +:=]+)[^\s,;'\"\\\])}]+", re.IGNORECASE), rf"\1\2{HIDDEN}"),
    (re.compile(r"\bnl_[A-Za-z0-9_-]{16,}"), f"nl_{HIDDEN}"),
    (re.compile(r"(://[^\s:/?#@]*:)[^\s/]+@"), rf"\1{HIDDEN}@"),
    (re.compile(rf"\b((?:{_WORDS})['\"]?\s?[=:]\s?['\"]?)[^\s&;,'\"]+", re.IGNORECASE), rf"\1{HIDDEN}"),
)


class Secrecy:
    """Hides what looks like a secret, and the `secrets` themselves, in everything that a line says."""

    def __init__(self, secrets: Collection[str]) -> None:
        known = sorted((re.escape(secret) for secret in secrets if len(secret) >= _SHORTEST), key=len, reverse=True)
        self._known = re.compile("|".join(known)) if known else None

    def __call__(self, logger: object, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        """Hide them in a line's fields."""
        for key, value in event.items():
            event[key] = self.hide(value, key)
        return event

    def hide(self, value: Any, name: str = "") -> Any:
        """The same value without secrets; `name` is what it is called."""
        if isinstance(value, bool | int | float | None):
            return value
        if _NAMED.search(name):
            return HIDDEN
        if isinstance(value, Mapping):
            return {key: self.hide(each, str(key)) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [self.hide(each) for each in value]
        return self._hide_in(value if isinstance(value, str) else str(value))

    def _hide_in(self, text: str) -> str:
        if self._known is not None:
            text = self._known.sub(HIDDEN, text)
        for pattern, instead in _SAID:
            text = pattern.sub(instead, text)
        return text


def list_secrets(settings: Settings) -> set[str]:
    """The secrets that the settings hold, also as a URL spells them."""
    tokens = settings.bootstrap_token, settings.token, settings.limiter_token
    found = {token.get_secret_value() for token in tokens if token}
    for pattern in _PASSWORDS:
        for password in pattern.findall(settings.database_url) + pattern.findall(settings.counters_url):
            found |= {password, unquote(password), unquote_plus(password)}
    return found
