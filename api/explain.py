"""Which rules hit a packet, and why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from itertools import chain
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import Field

from netlimit.addresses import read_address
from netlimit.errors import RuleError
from netlimit.explain import Explanation, Step, explain
from netlimit.packet import Address, Packet
from netlimit.records import L7, Exceptional, HostStatus, SafeReason, State
from netlimit.rules import Action, Protocol, Rule
from netlimit.safety import is_needed
from netlimit.store import Store

from . import schemas
from .context import StoreOf
from .problems import responses
from .turns import InTurn
from .waiting import choose_hosts

router = APIRouter(tags=["kernel"], route_class=InTurn)
_AT_ONCE = 1000
_HARSHEST = ("blocked", "limited", "shaped", "passes", "allowed")
"""Verdicts, the one first that leaves least of a packet."""
_NAMED = 3


class ExplainQuery(schemas.Strict):
    """A packet, as far as rules can tell."""

    src: str = Field(description="Its source address.", examples=["10.1.2.3"])
    dst: str = Field(description="Its destination address.", examples=["198.51.100.7"])
    protocol: Protocol = Field(Protocol.UDP, description="Its protocol; `any` is one that no rule selects.")
    port: int | None = Field(None, ge=0, le=65535, description="Its destination port.")
    source_port: int | None = Field(None, ge=0, le=65535, description="Its source port.")
    in_interface: str | None = Field(None, alias="in", description="Where it enters; nowhere, if this host sends it.")
    out_interface: str | None = Field(None, alias="out", description="Where it leaves; nowhere, if it ends here.")
    established: schemas.Flag = Field(
        False, description="It belongs to a TCP connection that is open and has an end on this host."
    )
    host: str | None = Field(None, description="Only the rules of this gateway.")


@router.get(
    "/explain",
    summary="Explain what happens to a packet",
    response_model=None,
    responses={200: {"model": schemas.Explanation}, **responses(401, 403, 404, 422, 503)},
)
def explain_packet(query: Annotated[ExplainQuery, Query()], store: StoreOf) -> dict[str, Any]:
    """The rules that hit this packet, in the order in which they are asked, and which do not and why."""
    packet = Packet(
        src=_read_address("src", query.src),
        dst=_read_address("dst", query.dst),
        protocol=query.protocol.value,
        port=query.port,
        source_port=query.source_port,
        in_interface=query.in_interface,
        out_interface=query.out_interface,
        established=query.established,
    )
    if packet.src.version != packet.dst.version:
        raise RuleError("dst", f"{packet.src} and {packet.dst} are not of one family: no packet has both.")
    every = store.hosts()
    hosts = choose_hosts(every, query.host)
    found = _explain_on(store, packet, query.host, hosts, every)
    if query.host is None and len(hosts) > 1:
        found = _tell_apart({each.host: _explain_on(store, packet, each.host, [each], every) for each in hosts}, found)
    return _write(found)


def _explain_on(
    store: Store, packet: Packet, host: str | None, hosts: list[HostStatus], every: list[HostStatus]
) -> Explanation:
    """What these gateways make of a packet, taken as one; `host` is the only one that is asked for."""
    others = {address for host in every if host not in hosts for address in host.own}
    own = frozenset(address for host in hosts for address in host.own)
    rules = _find_rules(store, packet, host)
    refused, moved, noted = _find_exceptional(store, rules, hosts)
    enforced = [rule for rule in rules if rule.id not in refused]
    management = {port for host in hosts for port in host.management}
    local = {network for host in hosts for network in host.local}
    beside = _find_beside(store, packet, host, hosts)
    safe = _merge_safe(hosts)
    needed = [network for network, reason in safe.items() if is_needed(reason)]
    explanation = explain(enforced, packet, own, safe, management, others - own, local, beside, needed)
    misses = [Step(rule, False, f"not enforced: {refused[rule.id]}") for rule in rules if rule.id in refused]
    steps = (_say_layer(step) if step.rule and step.rule.id in moved else step for step in explanation.steps)
    steps = (_say_pending(step) if step.rule and not _is_held(step.rule, hosts) else step for step in steps)
    told = tuple(_say_note(step, noted.get(step.rule.id)) if step.rule else step for step in steps)
    degraded = {rule_id for rule_id, each in noted.items() if each.state is State.DEGRADED}
    doubtful = any(step.hits and step.rule and step.rule.id in degraded for step in told)
    return replace(explanation, steps=(*told, *misses), doubtful=doubtful)


def _tell_apart(found: dict[str, Explanation], together: Explanation) -> Explanation:
    """What all gateways make of a packet: who is safe on one of them, or whose address is its own, is not so on others.
    Where they differ, the one is told that leaves least of it."""
    verdicts = {explanation.verdict for explanation in found.values()}
    if verdicts == {together.verdict}:
        return together
    worst = min(found, key=lambda host: _HARSHEST.index(found[host].verdict))
    if len(verdicts) == 1:
        return found[worst]
    by_verdict = sorted(verdicts, key=_HARSHEST.index)
    told = "; ".join(f"{each} on {_name(host for host in found if found[host].verdict == each)}" for each in by_verdict)
    notice = f"Gateways differ: {told}. This is what {worst} does; ask for another by its name (`host`, `--host`)."
    return replace(found[worst], steps=(Step(None, False, notice), *found[worst].steps))


def _name(hosts: Iterable[str]) -> str:
    named = [*hosts]
    more = f" and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
    return f"{', '.join(named[:_NAMED])}{more}"


def _find_rules(store: Store, packet: Packet, host: str | None) -> list[Rule]:
    """The rules in force that one of the packet's ends is a target of, and those for all that leaves by a device."""
    found: dict[int, Rule] = {}
    pages = [_select(store, host, contains=str(end)) for end in (packet.src, packet.dst)]
    pages += [_select(store, host, target=every, action=Action.SHAPE) for every in ("0.0.0.0/0", "::/0")]
    for rules in chain.from_iterable(pages):
        found.update((rule.id, rule) for rule in rules)
    return [found[number] for number in sorted(found)]


def _find_beside(store: Store, packet: Packet, host: str | None, hosts: list[HostStatus]) -> Iterator[Rule]:
    """The rules in force, whomever they are for, because of which a packet may be asked about later."""
    for action in (Action.ALLOW, Action.REJECT):
        for rules in _select(store, host, action=action):
            here = [rule for rule in rules if rule.family == packet.src.version]
            refused, *_ = _find_exceptional(store, here, hosts)
            yield from (rule for rule in here if rule.id not in refused)


def _select(
    store: Store,
    host: str | None,
    *,
    contains: str | None = None,
    target: str | None = None,
    action: Action | None = None,
) -> Iterator[list[Rule]]:
    """The rules in force that match everything given, a page at a time."""
    now, last = datetime.now(UTC), 0
    while page := store.select(contains=contains, target=target, action=action, after=last, limit=_AT_ONCE)[0]:
        last = page[-1].rule.id
        yield [kept.rule for kept in page if kept.rule.in_force(now, host)]


def _find_exceptional(
    store: Store, rules: list[Rule], hosts: list[HostStatus]
) -> tuple[dict[int, str], set[int], dict[int, Exceptional]]:
    """The rules that none of these gateways can enforce, with the sentence of one that should; those that the limiter
    of one enforces; and those of which one says something, first that its kernel does not enforce them quite as they
    say."""
    now, refused, moved, noted = datetime.now(UTC), dict[int, str](), set[int](), dict[int, Exceptional]()
    exceptional = store.exceptional([rule.id for rule in rules])
    for rule in rules:
        there = [host for host in hosts if rule.in_force(now, host.host)]
        here = [exceptional.get(rule.id, {}).get(host.host) for host in there]
        sentences = list(filter(None, map(_say_refusal, there, here)))
        if here and len(sentences) == len(here):
            refused[rule.id] = sentences[0]
        if any(each is not None and each.layer == L7 for each in here):
            moved.add(rule.id)
        notes = (each for each in here if each and each.message and each.state is not State.ERROR and each.layer != L7)
        if (note := min(notes, key=lambda each: each.state is not State.DEGRADED, default=None)) is not None:
            noted[rule.id] = note
    return refused, moved, noted


def _say_refusal(host: HostStatus, found: Exceptional | None) -> str | None:
    """Why a gateway does not enforce a rule; None if it does."""
    if host.paused:
        return f"{host.host} is paused by a teardown, until `netlimit apply`."
    return found.message if found is not None and found.state is State.ERROR else None


def _say_note(step: Step, note: Exceptional | None) -> Step:
    """What hits may miss the packet all the same, where it is degraded."""
    if note is None or not step.hits:
        return step
    kind = "degraded" if note.state is State.DEGRADED else "note"
    return replace(step, reason=f"{step.reason} ({kind}: {note.message})")


def _say_layer(step: Step) -> Step:
    """What hits, hits requests alone."""
    return replace(step, reason=f"{step.reason} (by the limiter, on HTTP requests)") if step.hits else step


def _is_held(rule: Rule, hosts: list[HostStatus]) -> bool:
    """Whether the kernel of any of these gateways has a rule as it is now."""
    concerned = [host for host in hosts if not rule.hosts or host.host in rule.hosts]
    return any(host.applied_revision >= rule.revision and not host.paused for host in concerned)


def _say_pending(step: Step) -> Step:
    """What hits will, once a gateway has it."""
    return replace(step, reason=f"{step.reason} (pending: no gateway holds it yet)") if step.hits else step


def _merge_safe(hosts: list[HostStatus]) -> dict[str, str]:
    """Every network that is safe on one of them, and why."""
    unknown = SafeReason("said by its controller")
    return {
        network: host.safe_reasons.get(network, unknown).text
        for host in reversed(hosts)
        for network in sorted(host.safe)
    }


def _read_address(field: str, text: str) -> Address:
    try:
        return read_address(text)
    except ValueError:
        raise RuleError(field, f'{text!r} is no IPv4 or IPv6 address; write for example "10.1.2.3".') from None


def _write(explanation: Explanation) -> dict[str, Any]:
    steps = [
        {
            "rule": step.rule.id if step.rule else None,
            "name": step.rule.name if step.rule else None,
            "summary": str(step.rule) if step.rule else None,
            "hits": step.hits,
            "reason": step.reason,
        }
        for step in explanation.steps
    ]
    return {"verdict": explanation.verdict, "text": explanation.text, "steps": steps}
