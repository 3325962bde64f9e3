"""What servers have said nothing remains of, and whom that concerns."""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b
from threading import Lock
from typing import NamedTuple, TypeVar

import httpx

from netlimit.client.advice import Advice, Quota
from netlimit.client.retry import REFUSALS

KEPT = 4096
"""Holds, and places of which is known what limits them; those of which nothing was heard for longest are forgotten."""
LONGEST = 600.0
"""Seconds that nothing is sent at most; then one may ask again, for what a server says can be a mistake (draft 11 of
RateLimit, 8.5.1). A client that is more patient waits longer."""
_CREDENTIALS = ("authorization", "x-api-key")
_UNNAMED = Quota("", "", 0, 0.0)
_Value = TypeVar("_Value")


class Place(NamedTuple):
    """Where a request goes, as digests, for what it is told by may be long and secret."""

    realm: bytes
    """The origin, and with what credentials it is asked: quotas are a client's."""
    resource: bytes
    """The method and the path there."""


class Hold(NamedTuple):
    """Nothing is to be sent before `until`, says the answer to a request that was sent at `since`."""

    until: float
    since: float


def locate(request: httpx.Request) -> Place:
    """The place of a request."""
    url = request.url
    secrets = (request.headers.get(name, "") for name in _CREDENTIALS)
    realm = _digest(url.scheme, url.host, str(url.port), *secrets)
    return Place(realm, _digest(request.method, url.path, key=realm))


class Holds:
    """Which requests are to wait, because the server said so. Times are those of one steady clock, in seconds.

    A quota is told apart by origin, credentials, policy and partition key. A request waits for those quotas that the
    last answer at its place has named; where nothing is known of the place, for those without a partition key that
    the origin has named last. A refusal that names no quota holds the place, and a 429 the origin. Bounded, and safe
    for threads.
    """

    def __init__(self, longest: float = LONGEST) -> None:
        self._longest = longest
        self._told: OrderedDict[bytes, tuple[bytes, ...]] = OrderedDict()
        self._holds: OrderedDict[bytes, Hold] = OrderedDict()
        self._lock = Lock()

    def wait(self, place: Place, now: float) -> float:
        """Seconds until a request may go there; 0 if it may now."""
        with self._lock:
            told = self._told.get(place.resource) or self._told.get(place.realm, ())
            return max(self._rest(key, now) for key in (place.resource, *told))

    def note(self, place: Place, status: int, advice: Advice, since: float, now: float) -> None:
        """Remember what the answer to a request says that was sent at `since`."""
        refused = status in REFUSALS and advice.retry_after is not None
        quotas = advice.quotas
        if refused and status == 429 and not quotas:
            quotas = (_UNNAMED._replace(reset=advice.retry_after or 0.0),)
        keys = [_digest(quota.policy, quota.partition, key=place.realm) for quota in quotas]
        with self._lock:
            if keys:
                shared = (key for key, quota in zip(keys, quotas, strict=True) if not quota.partition)
                _keep(self._told, place.resource, tuple(keys))
                _keep(self._told, place.realm, tuple(shared))
            for key, quota in zip(keys, quotas, strict=True):
                self._set(key, 0.0 if quota.remaining else quota.reset, since, now)
            self._set(place.resource, advice.retry_after or 0.0 if refused else 0.0, since, now)

    def _set(self, key: bytes, wait: float, since: float, now: float) -> None:
        hold = self._holds.get(key)
        if hold is not None and since < hold.since:
            return  # what was sent earlier knows less
        if wait > 0:
            _keep(self._holds, key, Hold(now + min(wait, self._longest), since))
        elif hold is not None:
            del self._holds[key]

    def _rest(self, key: bytes, now: float) -> float:
        hold = self._holds.get(key)
        if hold is None:
            return 0.0
        if hold.until <= now:
            del self._holds[key]
        return max(0.0, hold.until - now)

    def __len__(self) -> int:
        return len(self._holds) + len(self._told)


def _keep(kept: OrderedDict[bytes, _Value], key: bytes, value: _Value) -> None:
    kept[key] = value
    kept.move_to_end(key)
    if len(kept) > KEPT:
        kept.popitem(last=False)


def _digest(*texts: str, key: bytes = b"") -> bytes:
    """Different texts, different digests: each goes in with its length."""
    digest = blake2b(key=key, digest_size=16)
    for text in texts:
        raw = text.encode("utf-8", "surrogateescape")
        digest.update(len(raw).to_bytes(8, "big") + raw)
    return digest.digest()
