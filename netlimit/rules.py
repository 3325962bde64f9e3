"""A rule: who may send or receive how much. Parsing, validation and formatting; nothing here touches the outside."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from functools import lru_cache
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from typing import TypeVar

from netlimit.addresses import explain_unused, unmap
from netlimit.errors import RuleError
from netlimit.hashlimit import TABLE_MAX, Bucket, fit_bucket
from netlimit.htb import check_burst, check_rate
from netlimit.rates import EXAMPLES, Kind, Rate, parse_burst, parse_rate

T = TypeVar("T")
E = TypeVar("E", bound=StrEnum)
Target = IPv4Network | IPv6Network
PortRange = tuple[int, int]


class Direction(StrEnum):
    """Which end of a packet the target is."""

    FROM = "from"
    TO = "to"


class Action(StrEnum):
    """What happens to traffic that the rule is about."""

    DROP = "drop"
    REJECT = "reject"
    SHAPE = "shape"
    OBSERVE = "observe"
    ALLOW = "allow"
    BLOCK = "block"

    @property
    def limits(self) -> bool:
        """Whether the action needs a rate."""
        return self not in (Action.ALLOW, Action.BLOCK)


class Protocol(StrEnum):
    """The transport protocol; `icmp` means ICMPv6 for an IPv6 target."""

    ANY = "any"
    TCP = "tcp"
    UDP = "udp"
    ICMP = "icmp"


class OnFailure(StrEnum):
    """What stays in the kernel when the controller cannot do its work."""

    CLOSED = "closed"
    OPEN = "open"


HOST, TARGET, PEER = "host", "target", "peer"
MOST_PORTS = 15
"""What one `multiport` match holds; a range counts twice."""


@dataclass(frozen=True, slots=True)
class Selector:
    """Which of the target's traffic: protocol, destination and source ports, interface (entered or left by)."""

    protocol: Protocol = Protocol.ANY
    ports: tuple[PortRange, ...] = ()
    source_ports: tuple[PortRange, ...] = ()
    interface: str | None = None

    def __str__(self) -> str:
        words = [self.protocol.value]
        if self.ports:
            words.append("ports " + ",".join(map(format_port, self.ports)))
        if self.source_ports:
            words.append("source ports " + ",".join(map(format_port, self.source_ports)))
        if self.interface:
            words.append("on " + self.interface)
        return " ".join(words)

    def meets(self, other: Selector) -> bool:
        """Whether a packet can be of both, as far as protocol and ports tell."""
        if Protocol.ANY not in (self.protocol, other.protocol) and self.protocol is not other.protocol:
            return False
        return _meet(self.ports, other.ports) and _meet(self.source_ports, other.source_ports)


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule, as kept. `id` and `revision` are 0 until the store has given it one.

    `burst` is in the unit of the rate (packets, bytes, connections), None for the default. `per` is "host",
    "target", "peer" or "/n" for limits, None for `allow` and `block`. `expires_at` is aware, in UTC.
    `hosts` names the gateways that enforce the rule; empty means all. `forced_by` is the admin who forced it: only then
    it hits who is safe, and only where its target is that very address, or the gateway's own.
    """

    target: Target
    action: Action = Action.DROP
    direction: Direction = Direction.FROM
    selector: Selector = Selector()
    rate: Rate | None = None
    burst: int | None = None
    per: str | None = None
    ceil: Rate | None = None
    on_failure: OnFailure = OnFailure.CLOSED
    enabled: bool = True
    expires_at: datetime | None = None
    hosts: tuple[str, ...] = ()
    name: str | None = None
    labels: tuple[tuple[str, str], ...] = ()
    comment: str = ""
    forced_by: str | None = None
    id: int = 0
    revision: int = 0

    @property
    def family(self) -> int:
        """4 or 6."""
        return self.target.version

    @property
    def bucket(self) -> Bucket | None:
        """The bucket that the kernel holds for it; None where nothing is metered."""
        if self.rate is None or self.rate.kind is Kind.CONCURRENT or self.action is Action.SHAPE:
            return None
        return _fit(self.rate, self.burst)

    @property
    def identity(self) -> str:
        """The traffic and the limit it speaks of: two rules in force must not have the same."""
        kind = self.rate.kind.value if self.rate else "verdict"
        watched = f" observe {self.rate.text} {self.burst}" if self.rate and self.action is Action.OBSERVE else ""
        return f"{self.direction} {self.target} {self.selector} {kind} per {self.per}{watched}"

    def expired(self, now: datetime) -> bool:
        """Whether its time is over at `now` (aware)."""
        return self.expires_at is not None and self.expires_at <= now

    def in_force(self, now: datetime, host: str | None = None) -> bool:
        """Whether it is to be enforced at `now`, and on `host` if one is given."""
        return self.enabled and not self.expired(now) and (host is None or not self.hosts or host in self.hosts)

    def __str__(self) -> str:
        limit = f" {self.rate.text} per {self.per}" if self.rate else ""
        return f"{self.action} {self.direction} {format_target(self.target)} {self.selector}{limit}"


FIELDS = frozenset(
    [
        "name",
        "target",
        "direction",
        "protocol",
        "ports",
        "source_ports",
        "interface",
        "rate",
        "burst",
        "per",
        "action",
        "ceil",
        "on_failure",
        "enabled",
        "expires_at",
        "ttl",
        "hosts",
        "labels",
        "comment",
        "forced_by",
    ]
)
_NAME = re.compile(r"[a-z][a-z0-9._-]{0,62}")
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,62}")
_INTERFACE = re.compile(r"[A-Za-z0-9_.:@][A-Za-z0-9_.:@-]{0,14}")
_PREFIX = re.compile(r"[0-9]{1,3}")
_PORT = re.compile(r"[0-9]{1,5}")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_RESERVED = frozenset({"bulk"})
"""Names that mean something else in a path of the API."""
_TTL = re.compile(r"([0-9]{1,12})\s*(s|m|min|h|d|w)?")
_TTL_UNITS = {None: 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 604800}
MOST_LABELS, MOST_LETTERS, MOST_GATEWAYS = 128, 4096, 256
"""Of one rule: labels, letters of all of them, and gateways. Each change keeps what was before it, twice."""
_LONGEST_TTL = 10 * 366 * 86400


def parse_rule(fields: Mapping[str, object], now: datetime) -> Rule:
    """Build a rule from what a client sent (the fields of `FIELDS`).

    `now` (aware) turns `ttl` into `expires_at`. Raises RuleError for the first field that is wrong.
    """
    if not fields.keys() <= FIELDS:
        unknown, known = sorted(map(str, set(fields) - FIELDS))[0], ", ".join(sorted(FIELDS))
        raise RuleError(unknown, f"There is no field {unknown!r} in a rule; known are {known}.")
    target = parse_target(fields.get("target"))
    rate = _parse_optional("rate", fields, parse_rate)
    action = _parse_choice(Action, "action", fields.get("action"), Action.DROP)
    per = _parse_optional("per", fields, str.strip)
    rule = Rule(
        target=target,
        action=action,
        direction=_parse_choice(Direction, "direction", fields.get("direction"), Direction.FROM),
        selector=_parse_selector(fields),
        rate=rate,
        burst=_parse_burst(fields.get("burst"), rate),
        per=_fit_per(target, per, rate, action) if action.limits else per,
        ceil=_parse_optional("ceil", fields, _parse_ceil),
        on_failure=_parse_choice(OnFailure, "on_failure", fields.get("on_failure"), OnFailure.CLOSED),
        enabled=_parse_flag("enabled", fields.get("enabled"), True),
        expires_at=_parse_expiry(fields, now),
        hosts=_parse_hosts(fields.get("hosts")),
        name=_parse_optional("name", fields, _parse_name),
        labels=_parse_labels(fields.get("labels")),
        comment=_parse_comment(fields.get("comment")),
        forced_by=_parse_optional("forced_by", fields, _parse_actor),
    )
    _check(rule)
    return rule


def parse_target(value: object) -> Target:
    """Read an address or CIDR. Raises RuleError (field `target`) for host bits and what is no address."""
    if not isinstance(value, str) or not value.strip():
        raise RuleError("target", 'A rule needs a target: an address or CIDR such as "10.1.2.3" or "10.1.0.0/16".')
    text = value.strip()
    try:
        network = ip_network(text, strict=False)
    except ValueError:
        raise RuleError(
            "target",
            f'The target {text!r} is no IPv4 or IPv6 address or CIDR; write for example "10.1.0.0/16".',
        ) from None
    if "%" in text:
        raise RuleError("target", f"The target {text!r} has a zone; name the interface in `interface` instead.")
    address, _, prefix = text.partition("/")
    if prefix and not _PREFIX.fullmatch(prefix):
        raise RuleError("target", f"The target {text!r} has a mask; write it as {network}.")
    if prefix and ip_address(address) != network.network_address:
        raise RuleError(
            "target",
            f"The target {text!r} has host bits set; did you mean {network}, or the one address {address}?",
        )
    unused = explain_unused(network)
    if unused is not None:
        raise RuleError("target", f"The target {unused}")
    return unmap(network)


def format_target(target: Target) -> str:
    """Write a target as one would: an address, or a CIDR."""
    return str(target.network_address) if target.prefixlen == target.max_prefixlen else str(target)


def parse_ports(field: str, value: object) -> tuple[PortRange, ...]:
    """Read ports and ranges: 53, "80,443", [80, "8000-8100"]. The result is sorted and merged. Raises RuleError."""
    if value is None:
        return ()
    items = value if isinstance(value, list | tuple) else [value]
    ranges: list[PortRange] = []
    for item in items:
        if isinstance(item, bool) or not isinstance(item, int | str):
            raise RuleError(field, f'{item!r} is no port; write for example 53, "8000-8100" or [80, 443].')
        ranges += [_parse_port(field, part) for part in str(item).split(",")]
    merged: list[PortRange] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    if sum(1 if low == high else 2 for low, high in merged) > MOST_PORTS:
        raise RuleError(
            field,
            f"One rule holds at most {MOST_PORTS} ports (a range counts as two); split it into several rules.",
        )
    return tuple(merged)


def format_port(port: PortRange) -> str:
    """Write one port or a range with a dash."""
    return str(port[0]) if port[0] == port[1] else f"{port[0]}-{port[1]}"


@lru_cache(maxsize=4096)
def _fit(rate: Rate, burst: int | None) -> Bucket:
    return fit_bucket(rate, burst)


def _parse_ceil(text: str) -> Rate:
    try:
        return parse_rate(text)
    except RuleError as error:
        raise RuleError("ceil", str(error)) from None


def _check(rule: Rule) -> None:
    _check_selector(rule)
    if not rule.action.limits:
        for field, value in (
            ("rate", rule.rate),
            ("burst", rule.burst),
            ("per", rule.per),
            ("ceil", rule.ceil),
        ):
            if value is not None:
                raise RuleError(field, f'The action "{rule.action}" takes no {field}; leave it out.')
        return
    if rule.rate is None:
        raise RuleError("rate", f'The action "{rule.action}" needs a rate, for example {EXAMPLES}.')
    if rule.ceil is not None and rule.action is not Action.SHAPE:
        raise RuleError("ceil", 'Only the action "shape" takes a ceil; leave it out.')
    if rule.action is Action.SHAPE:
        _check_shape(rule, rule.rate)
        return
    if rule.rate.kind is Kind.CONCURRENT and rule.burst is not None:
        raise RuleError("burst", "Concurrent connections have no burst; leave it out.")
    if rule.rate.kind is Kind.CONCURRENT and rule.rate.amount > 2**32 - 1:
        raise RuleError("rate", f"The kernel cannot count {rule.rate.text}; the most that works is 4294967295.")
    if rule.rate.kind in (Kind.CONNECTIONS, Kind.CONCURRENT) and rule.selector.protocol is Protocol.ICMP:
        raise RuleError("rate", "ICMP has no connections; limit packets or bytes.")
    if rule.rate.kind is not Kind.CONCURRENT:
        _fit(rule.rate, rule.burst)


def _check_shape(rule: Rule, rate: Rate) -> None:
    if rate.kind is not Kind.BYTES:
        raise RuleError(
            "rate",
            f'The action "shape" queues bytes, and cannot count {rate.text}; give a rate in bits or bytes, such as '
            '"20 Mbit/s", or drop what is over (`action: "drop"`).',
        )
    check_rate("rate", rate)
    if rule.burst is not None:
        check_burst(rate, rule.burst)
    if rule.ceil is None:
        return
    if rule.ceil.kind is not Kind.BYTES:
        raise RuleError("ceil", f'The ceiling {rule.ceil.text} is not in bits or bytes; write for example "50 Mbit/s".')
    check_rate("ceil", rule.ceil)
    if rule.ceil.per_second < rate.per_second:
        raise RuleError(
            "ceil",
            f"The ceiling {rule.ceil.text} is below the rate {rate.text}: the rate is guaranteed, up to the ceiling is "
            "borrowed. Leave the ceiling out for a rate that is never exceeded.",
        )


def _check_selector(rule: Rule) -> None:
    selector = rule.selector
    for field, ports in (("ports", selector.ports), ("source_ports", selector.source_ports)):
        if ports and selector.protocol not in (Protocol.TCP, Protocol.UDP):
            raise RuleError(field, f'`{field}` needs the protocol "tcp" or "udp"; it is "{selector.protocol}".')


def _fit_per(target: Target, per: str | None, rate: Rate | None, action: Action) -> str:
    """Whose bucket it is; a subnet must say it, and the kernel must have room for that many."""
    length, longest = target.prefixlen, int(target.max_prefixlen)
    if per is None:
        if length != longest:
            raise RuleError(
                "per",
                f"{target} is a subnet: say whose bucket the rate is. `per: host` gives every address in it one, "
                "`per: target` one to all of them together, `per: /n` one to each block, `per: peer` one to every "
                "address that talks with it.",
            )
        return HOST
    if per == TARGET:
        # For one address both mean the same; a queue for a host is the lighter of the two.
        return HOST if action is Action.SHAPE and length == longest else TARGET
    if per == PEER and action is Action.SHAPE:
        raise RuleError(
            "per",
            'The action "shape" gives queues to a target and its hosts, not to peers; write `per: host`, `per: '
            "target` or `per: /n`, with the other direction for those who talk with it.",
        )
    if per == PEER:
        if length == 0:
            raise RuleError("per", 'Everything has no peers; give the other direction and "per: host" or "per: /n".')
        return PEER
    if per == HOST:
        bucket = longest
    elif per.startswith("/") and _PREFIX.fullmatch(per[1:]) and length <= int(per[1:]) <= longest:
        bucket = int(per[1:])
    else:
        raise RuleError(
            "per",
            f'`per` {per!r} is not known; write "host", "target", "peer", or "/n" with n from {length} to {longest}.',
        )
    table = rate is not None and rate.kind is not Kind.CONCURRENT and action is not Action.SHAPE
    if table and 2 ** (bucket - length) > TABLE_MAX:
        usual = 24 if longest == 32 else 64
        works = usual if length <= usual <= length + 20 else length + 20
        raise RuleError(
            "per",
            f"{target} has more than {TABLE_MAX} buckets `per: {per}`, the most that the kernel holds; a full "
            f"table would drop every new address. `per: /{works}` works, and so does a smaller target.",
        )
    return TARGET if bucket == length and per != HOST else f"/{bucket}" if per != HOST else HOST


def _meet(one: tuple[PortRange, ...], other: tuple[PortRange, ...]) -> bool:
    if not one or not other:
        return True
    return any(low <= top and bottom <= high for low, high in one for bottom, top in other)


def _parse_selector(fields: Mapping[str, object]) -> Selector:
    return Selector(
        protocol=_parse_choice(Protocol, "protocol", fields.get("protocol"), Protocol.ANY),
        ports=parse_ports("ports", fields.get("ports")),
        source_ports=parse_ports("source_ports", fields.get("source_ports")),
        interface=_parse_optional("interface", fields, _parse_interface),
    )


def _parse_choice(kind: type[E], field: str, value: object, default: E) -> E:
    if value is None:
        return default
    try:
        return kind(str(value))
    except ValueError:
        known = ", ".join(f'"{member}"' for member in kind)
        raise RuleError(field, f"`{field}` is {json.dumps(value, default=str)}; it can be {known}.") from None


def _parse_optional(field: str, fields: Mapping[str, object], parse: Callable[[str], T]) -> T | None:
    value = fields.get(field)
    if value is None:
        return None
    if isinstance(value, Mapping) and field in ("rate", "ceil"):
        value = value.get("text")
    if not isinstance(value, str):
        raise RuleError(field, f"`{field}` is {json.dumps(value, default=str)}; it must be text.")
    return parse(value)


def _parse_burst(value: object, rate: Rate | None) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise RuleError("burst", f'The burst {value!r} cannot be read; write for example 100, "100 packets" or "2 MB".')
    return parse_burst(value, rate.kind if rate else Kind.PACKETS)


def _parse_flag(field: str, value: object, default: bool) -> bool:
    if value is None:
        return default
    if not isinstance(value, bool):
        raise RuleError(field, f"`{field}` is {value!r}; it must be true or false.")
    return value


def _parse_expiry(fields: Mapping[str, object], now: datetime) -> datetime | None:
    ttl, at = fields.get("ttl"), fields.get("expires_at")
    if ttl is not None and at is not None:
        raise RuleError("ttl", "Give either `ttl` or `expires_at`, not both.")
    if ttl is not None:
        return now + timedelta(seconds=parse_ttl(ttl))
    if at is None:
        return None
    try:
        moment = at if isinstance(at, datetime) else datetime.fromisoformat(_moment_text(at))
        ending = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError):
        raise RuleError(
            "expires_at", f'`expires_at` {at!r} is no time; write it as "2030-01-31T18:00:00Z", or use `ttl`.'
        ) from None
    if ending <= _EPOCH:  # a program that says "never" so would have a rule that is over
        raise RuleError("expires_at", f"`expires_at` {at!r} is no end that a rule can have; leave it out for none.")
    return ending


def _moment_text(value: object) -> str:
    """A date with a time; fromisoformat would take a bare number for a date."""
    if not isinstance(value, str) or not re.match(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", value):
        raise ValueError("no date")
    return value


def parse_ttl(value: object) -> int:
    """Read a length of time: seconds, or a text with a unit, such as "90s", "10m", "30d". Raises RuleError (`ttl`)."""
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value) if abs(value) <= _LONGEST_TTL else "too long"
    match = _TTL.fullmatch(value.strip()) if isinstance(value, str) else None
    seconds = int(match[1]) * _TTL_UNITS[match[2]] if match else 0
    if not 1 <= seconds <= _LONGEST_TTL:
        raise RuleError(
            "ttl", f'`ttl` {str(value)[:40]!r} is no length of time; write seconds, or "90s", "10m", "2h", "7d".'
        )
    return seconds


def _parse_port(field: str, text: str) -> PortRange:
    low, dash, high = text.strip().replace(":", "-").partition("-")
    if _PORT.fullmatch(low) and (_PORT.fullmatch(high) if dash else True):
        first, last = int(low), int(high) if dash else int(low)
        if 0 <= first <= last <= 65535:
            return first, last
    raise RuleError(field, f'{text!r} is no port; ports are 0 to 65535, ranges are written "8000-8100".')


def is_interface(text: str) -> bool:
    """Whether a network device can have this name, of those that a rule may name."""
    return _INTERFACE.fullmatch(text) is not None and text not in (".", "..")


def _parse_interface(text: str) -> str:
    if not is_interface(text):
        raise RuleError("interface", f'{text!r} is no name of an interface; write for example "eth0".')
    return text


def _parse_name(text: str) -> str:
    if text in _RESERVED:
        raise RuleError("name", f"The name {text!r} has another meaning in the API; take another.")
    if not _NAME.fullmatch(text):
        raise RuleError(
            "name",
            f"The name {text!r} does not fit: a small letter first, then small letters, digits, . _ or -, 63 at most.",
        )
    return text


def _parse_hosts(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise RuleError("hosts", '`hosts` is a list of gateway names, such as ["gw1", "gw2"].')
    for item in value:
        if not isinstance(item, str) or not _LABEL.fullmatch(item):
            raise RuleError("hosts", f"{item!r} is no name of a gateway.")
    if len(set(value)) > MOST_GATEWAYS:
        raise RuleError(
            "hosts",
            f"`hosts` names {len(set(value))} gateways; {MOST_GATEWAYS} at most, or none for all of them.",
        )
    return tuple(sorted(set(value)))


def _parse_labels(value: object) -> tuple[tuple[str, str], ...]:
    if value is None:
        return ()
    if not isinstance(value, Mapping):
        raise RuleError("labels", '`labels` is an object of texts, such as {"customer": "acme"}.')
    for key, text in value.items():
        if not isinstance(key, str) or not _LABEL.fullmatch(key) or not _is_text(text, 255):
            raise RuleError(
                "labels",
                f"The label {key!r} does not fit: keys are words, values texts of at most 255 letters.",
            )
    letters = sum(len(key) + len(text) for key, text in value.items())
    if len(value) > MOST_LABELS or letters > MOST_LETTERS:
        raise RuleError(
            "labels",
            f"{len(value)} labels of {letters} letters are too many: {MOST_LABELS} at most, of {MOST_LETTERS} letters.",
        )
    return tuple(sorted(value.items()))


def _parse_comment(value: object) -> str:
    if value is None:
        return ""
    if not _is_text(value, 1000):
        raise RuleError("comment", "`comment` is a text of at most 1000 letters, without control characters.")
    return str(value)


def _parse_actor(text: str) -> str:
    if not text or not _is_text(text, 255):
        raise RuleError("forced_by", "`forced_by` is the name of who forced the rule, of at most 255 letters.")
    return text


def _is_text(value: object, longest: int) -> bool:
    """Whether every database can keep it and every terminal show it."""
    if not isinstance(value, str) or len(value) > longest:
        return False
    return value.isprintable() or all(letter.isprintable() or letter in "\n\t" for letter in value)
