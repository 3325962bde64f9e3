"""The names of counters in Redis."""

from __future__ import annotations

from hashlib import blake2b

from netlimit.l7.limit import Algorithm, Limit, Refill
from netlimit.l7.rules import Rule, join_key

LONGEST = 200
"""Bytes of a key; of longer ones the name has a digest."""


def make_prefix(rule: Rule, limit: Limit) -> bytes:
    """What the names of all counters of a rule and a limit begin with, up to the key: `nl:gcra:60:10:{domain|rule`.

    A limit that is counted in another way has another prefix, so no script ever meets what another one keeps. The
    amount is not part of it, nor is how long a lease lasts: what is in flight stays so when that changes. The braces
    are what Redis Cluster hashes. Domain and rule are escaped, so that what joins them does not occur in them.
    """
    kind = "interval_bucket" if limit.refill is Refill.INTERVAL else limit.algorithm
    burst = "" if limit.burst is None else f":{limit.burst}"
    length = "" if limit.algorithm is Algorithm.CONCURRENCY else f":{limit.seconds}"
    return f"nl:{kind}{length}{burst}:{{{join_key((rule.domain, rule.name))}".encode("utf-8", "surrogatepass")


def make_name(prefix: bytes, key: str) -> bytes:
    """The name of the counter of `key`. What is long, or would end the hash tag before its time, is hashed."""
    raw = key.encode("utf-8", "surrogatepass")
    if len(raw) > LONGEST or b"}" in raw:
        return b"%b#%b}" % (prefix, blake2b(raw, digest_size=20).hexdigest().encode())
    return b"%b|%b}" % (prefix, raw)
