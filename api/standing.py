"""How rules stand: whether the gateways that they concern hold them, and if not, why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime

from netlimit.liveness import SILENCE, is_gone, is_recent, say_ahead
from netlimit.malformed import Malformed
from netlimit.records import Exceptional, HostStatus, State
from netlimit.rules import Action, Rule

from .representation import write_time

_BADNESS = {state.value: badness for badness, state in enumerate(State)}
_LAYERS = {"fake": "iptables"}
"""The back ends whose name is not the layer's: the fake plays iptables. What is shaped is in tc, whatever the rest."""

Standing = dict[str, object]


def is_live(host: HostStatus) -> bool:
    """Whether a gateway's controller had reported lately when its report was read."""
    return is_recent(host.silence, SILENCE)


def list_present(hosts: Sequence[HostStatus]) -> list[HostStatus]:
    """The gateways that are not gone: by them the whole is judged. Where all are, by all."""
    return [host for host in hosts if not is_gone(host.silence)] or list(hosts)


def describe_last(host: HostStatus) -> str:
    """When a gateway's controller was last heard of, to end a sentence."""
    return f"was last heard of at {write_time(host.seen_at)}{say_ahead(host.silence)}."


def describe_gone(host: HostStatus) -> str:
    """What an operator should know of a gateway that is gone."""
    return (
        f"The gateway {host.host} is gone: its controller {describe_last(host)} If it goes by another name now, let "
        f"rules that name it name that one; `netlimit gateway forget {host.host}` forgets it."
    )


def judge(rule: Rule, hosts: Sequence[HostStatus], exceptional: Mapping[str, Exceptional], now: datetime) -> Standing:
    """How a rule stands: the worst of its gateways, and each of them. One that is gone counts if the rule names it."""
    if isinstance(rule, Malformed):
        return _say(State.ERROR, rule.reason) | {"hosts": {}}
    if not rule.enabled:
        return _say(State.DISABLED, "It is switched off.") | {"hosts": {}}
    if rule.expired(now):
        return _say(State.EXPIRED, f"It ended at {write_time(rule.expires_at)}.") | {"hosts": {}}
    known = {host.host: host for host in hosts}
    each = {name: _judge_on(rule, known.get(name), exceptional.get(name)) for name in (rule.hosts or sorted(known))}
    if not each:
        return _say(State.PENDING, "No controller has reported yet; run `netlimit serve` on a gateway.") | {"hosts": {}}
    decisive = rule.hosts or [host.host for host in list_present(hosts)]
    worst = max((each[name] for name in sorted(decisive)), key=_weigh)
    name = next(name for name, standing in each.items() if standing is worst)
    message = worst["message"] and (f"{name}: {worst['message']}" if len(each) > 1 else worst["message"])
    return {**worst, "message": message, "hosts": each}


def _weigh(standing: Standing) -> tuple[int, bool]:
    """How bad it is; of those that are no worse than others, the one that there is something to say of."""
    return _BADNESS[str(standing["state"])], standing["message"] is not None


def find_state(rule: Rule, hosts: Sequence[HostStatus], exceptional: Mapping[str, Exceptional], now: datetime) -> State:
    """The state of a rule alone."""
    return State(str(judge(rule, hosts, exceptional, now)["state"]))


def find_worst(
    rules: Iterable[Rule],
    hosts: Sequence[HostStatus],
    exceptional: Mapping[int, Mapping[str, Exceptional]],
    now: datetime,
) -> State:
    """The worst state of many rules; those that can only stand alike are judged once."""
    states: dict[object, State] = {}
    for rule in rules:
        key = rule.id if rule.id in exceptional else (rule.revision, rule.enabled, rule.expired(now), rule.hosts)
        if key not in states:
            states[key] = find_state(rule, hosts, exceptional.get(rule.id, {}), now)
    return max(states.values(), key=lambda state: _BADNESS[state.value], default=State.APPLIED)


def _judge_on(rule: Rule, host: HostStatus | None, exceptional: Exceptional | None) -> Standing:
    if host is None:
        return _say(State.PENDING, "No controller has reported yet from this gateway.")
    if is_gone(host.silence) and (host.paused or host.applied_revision < rule.revision):
        return _say(State.ERROR, describe_gone(host))
    silence = "" if is_live(host) else f"Its controller {describe_last(host)}"
    if host.paused:
        return _say(State.PENDING, "A teardown has paused the controller; `netlimit apply` goes on.", silence)
    if host.refused is not None:
        return _say(State.PENDING, "The gateway does not go by this database; `netlimit status` says why.", silence)
    if host.applied_revision < rule.revision:
        return _say(State.PENDING, "The kernel does not hold it yet.", silence)
    layer = "tc" if rule.action is Action.SHAPE else _LAYERS.get(host.backend, host.backend)
    if exceptional is None:
        return _say(State.APPLIED, "", silence, layer)
    held = exceptional.state in (State.APPLIED, State.DEGRADED)
    return _say(exceptional.state, exceptional.message, silence, (exceptional.layer or layer) if held else None)


def _say(state: State, message: str, silence: str = "", enforced_by: str | None = None) -> Standing:
    words = " ".join(part for part in (message, silence) if part)
    return {"state": state.value, "enforced_by": enforced_by, "message": words or None}
