"""Who talks with a target that is limited `per: peer`: how many peers are remembered, and for how long.

Anybody can feign to be a million peers. A table of hashlimit that is full drops every address that is new to it, so it
must never be: a set remembers the peers that have a bucket, and who finds no room in it is asked for nothing. So a
flood of feigned peers makes a limit miss newcomers, and shuts nobody out; who is known stays limited.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from netlimit.conflicts import PEERS_NEARLY
from netlimit.hashlimit import TABLE_MAX, WIDE, Bucket, fit_bucket
from netlimit.limits import Group, Profile, digest
from netlimit.state import PEER_PREFIX, SLOT_ROOM, Above, IpSet

LONGEST_EXPIRE = 3_601_000
"""Milliseconds for which an idle peer is remembered at most. Who is forgotten has his whole burst again: a limit that
takes longer to fill lets a peer who waits that long have its burst once an hour. (Of an hour sharp iptables prints
nothing for some rates.)"""
BLOCK6 = 64
"""An IPv6 peer is a network of this prefix length: one host has all the addresses in it."""
_SLACK = 2
_SHARE, _MOST_SLOTS, _LEAST_SLOTS, _FEWEST = 64, 65_536, 64, 16


def find_peer_slots(targets: int, set_size: int) -> int:
    """How many slots the set of peers of a group with so many targets has. In a table there is room beside their
    buckets for some of targets that have gone."""
    slots = min(_MOST_SLOTS, max(_LEAST_SLOTS, _halve_to_power(set_size // _SHARE)))
    fewest = max(_LEAST_SLOTS, slots // _FEWEST)
    while slots > fewest and slots * SLOT_ROOM * targets > TABLE_MAX - WIDE:
        slots //= 2
    return slots


def fit_peer_bucket(profile: Profile) -> Bucket:
    """The bucket of each peer."""
    bucket = fit_bucket(profile.rate, profile.burst)
    return replace(bucket, expire_ms=min(bucket.expire_ms, LONGEST_EXPIRE))


def block_of(family: int) -> int:
    """The prefix length of a peer."""
    return 32 if family == 4 else BLOCK6


def peer_set(group: Group, profiles: Iterable[Profile], slots: int) -> IpSet:
    """The set of the peers that have a bucket: each stays in it longer than any of its buckets stays in a table, so
    there are never more buckets for a target than entries."""
    longest = max(fit_peer_bucket(profile).expire_ms for profile in profiles)
    seconds = -(-(longest + Above.COLLECT_MS) // 1000) + _SLACK
    name = f"{PEER_PREFIX}{group.family}-{digest(f'{group.key} {seconds} {slots}')}"
    netmask = BLOCK6 if group.family == 6 else 0
    return IpSet(name, group.family, "ip", timeout=seconds, size=TABLE_MAX, netmask=netmask, slots=slots)


def find_crowded(sets: Mapping[str, IpSet], counts: Mapping[str, int]) -> dict[str, str]:
    """What is to be said of sets of peers that have hardly any room left, by name."""
    found = {}
    for name, ipset in sets.items():
        held = counts.get(name, 0)
        if ipset.slots and held >= PEERS_NEARLY * ipset.room:
            found[name] = (
                f"Of {ipset.room} peers that there is room for, more than half are remembered: new ones may pass "
                "unlimited, those that are known stay limited. A flood with feigned addresses may be the reason. A "
                "budget beside it (`per: target`) bounds all of them together; NETLIMIT_SET_SIZE makes more room."
            )
    return found


def _halve_to_power(number: int) -> int:
    """The largest power of two that is not above a number."""
    return 1 << max(0, number.bit_length() - 1)
