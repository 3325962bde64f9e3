"""Plans: what must be true of every way from one state to another."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from netlimit.compile import MOST_FEW, Compilation, compile_rules
from netlimit.kernel.base import observe
from netlimit.limits import Facts
from netlimit.plan import Plan, SwitchTable, WriteSets, diff
from netlimit.rules import parse_rule
from netlimit.state import ChainId, Entry, IpSet, State, Structure
from tests.unit.histories import Change, apply, bring, changes, converge, frozen_kernel, plan_for, settled
from tests.unit.strategies import NOW, facts, rule_sets


@settings(max_examples=50)
@given(rule_sets())
def test_there_is_nothing_to_do_where_all_is_as_it_should_be(rules: list) -> None:
    compilation = Compilation(facts)
    bring(compilation, rules)
    plan = diff(compilation.state, compilation.state)
    assert not plan
    assert str(plan) == "Nothing to do."


@settings(max_examples=50)
@given(changes())
def test_a_plan_leads_to_what_is_desired(change: Change) -> None:
    compilation, kernel = settled(change.before)
    bring(compilation, change.after)
    apply(plan_for(compilation, kernel), kernel)
    assert observe(kernel) == compilation.state
    compilation.settle()
    assert not plan_for(compilation, kernel)
    assert not diff(compilation.state, observe(kernel))


@settings(max_examples=50)
@given(changes())
def test_what_changed_is_enough_to_know(change: Change) -> None:
    """The controller's quick pass looks only at the keys that were touched; it comes to the same."""
    compilation, kernel = settled(change.before)
    known = State(compilation.structure, {})
    bring(compilation, change.after)
    apply(diff(compilation.state, known, compilation.transition(known.structure), compilation.touched), kernel)
    assert observe(kernel) == compilation.state


def test_a_faster_rate_of_peers_brings_the_set_in_which_they_are_remembered_less_long() -> None:
    compilation, kernel = settled([])
    for rate in ("1 packets/min", "30 packets/min", "1 packets/min"):
        known = State(compilation.structure, {})
        fields = {"target": "10.0.0.0/8", "rate": rate, "per": "peer"}
        assert compilation.put(replace(parse_rule(fields, NOW), id=1)) is None
        apply(diff(compilation.state, known, compilation.transition(known.structure), compilation.touched), kernel)
        assert observe(kernel) == compilation.state
        compilation.settle()


def test_the_order_in_which_rules_came_is_no_drift() -> None:
    wanted = [
        {"target": "10.1.0.2", "rate": "1 packets/min", "action": "reject", "per": per} for per in ("target", "host")
    ]
    rules = [replace(parse_rule(fields, NOW), id=number) for number, fields in enumerate(wanted, start=1)]
    one, other = Compilation(facts), Compilation(facts)
    for compilation, some in ((one, rules), (other, rules[::-1])):
        for rule in some:
            assert compilation.put(rule) is None
    assert one.structure == other.structure


@settings(max_examples=50)
@given(st.data(), changes())
def test_after_a_failure_at_any_step_one_more_pass_converges(data: st.DataObject, change: Change) -> None:
    compilation, kernel = settled(change.before)
    bring(compilation, change.after)
    steps = len(plan_for(compilation, kernel).steps)
    kernel.fail_at(data.draw(st.integers(0, max(0, steps - 1))))
    converge(compilation, kernel)
    assert observe(kernel) == compilation.state


@settings(max_examples=50)
@given(st.data(), changes())
def test_a_controller_that_dies_at_any_step_converges_when_it_starts_again(data: st.DataObject, change: Change) -> None:
    compilation, kernel = settled(change.before)
    bring(compilation, change.after)
    plan = plan_for(compilation, kernel)
    done = data.draw(st.integers(0, len(plan.steps)))
    apply(Plan(plan.steps[:done]), kernel)

    again = Compilation(facts, compilation.numbers.kept)
    bring(again, change.after)
    apply(plan_for(again, kernel), kernel)
    assert observe(kernel) == again.state


@settings(max_examples=50)
@given(st.data(), changes())
def test_whatever_is_damaged_is_put_right(data: st.DataObject, change: Change) -> None:
    compilation, kernel = settled(change.before)
    for name in data.draw(st.sets(st.sampled_from(sorted(kernel.sets) or [""]))):
        if name:
            kernel.damage(set_name=name)
    for chain in data.draw(st.sets(st.sampled_from(sorted(kernel.chains) or [None]))):
        if chain:
            kernel.damage(chain=chain)
    bring(compilation, change.after)
    apply(plan_for(compilation, kernel), kernel)
    assert observe(kernel) == compilation.state


@settings(max_examples=50)
@given(changes())
def test_teardown_leaves_nothing(change: Change) -> None:
    _, kernel = settled(change.before)
    apply(diff(State(), observe(kernel)), kernel)
    assert (kernel.sets, kernel.elements, kernel.chains, kernel.hooks) == ({}, {}, {}, {})


@settings(max_examples=50)
@given(st.randoms(use_true_random=False), rule_sets(14))
def test_one_rule_at_a_time_comes_to_the_same_as_all_from_nothing(randomness: random.Random, rules: list) -> None:
    compilation = Compilation(facts)
    live: dict[int, object] = {}
    for _ in range(2):
        for rule in randomness.sample(rules, len(rules)):
            if rule.id in live and randomness.random() < 0.6:
                compilation.drop(rule.id)
                del live[rule.id]
            else:
                compilation.put(rule)
                live[rule.id] = rule
        if randomness.random() < 0.5:
            compilation.settle()
    compilation.settle()
    state, numbering, problems = compile_rules(live.values(), facts, compilation.numbers.kept)
    assert compilation.state == state
    assert compilation.numbers.kept == numbering
    assert not problems


@settings(max_examples=50)
@given(changes())
def test_numbers_stay_put(change: Change) -> None:
    compilation, _ = settled(change.before)
    before = dict(compilation.numbers.kept)
    bring(compilation, change.after)
    assert before.items() <= compilation.numbers.kept.items(), "what may be in the kernel keeps its number"
    compilation.settle()
    assert compilation.numbers.kept.items() <= {**compilation.numbers.kept, **before}.items()


def test_the_number_of_chain_rules_depends_on_limits_not_on_rules() -> None:
    def count(hosts: int) -> tuple[int, int]:
        compilation = Compilation(Facts())
        for number in range(hosts):
            address = f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}"
            for offset, fields in enumerate(({"rate": "100 packets/s"}, {"rate": "5 Mbit/s"}, {"action": "block"})):
                rule = parse_rule({"target": address, **fields}, NOW)
                compilation.put(replace(rule, id=3 * number + offset + 1))
        structure = compilation.structure
        return sum(map(len, structure.chains.values())), len(structure.sets)

    assert count(1) == count(1000)


def test_a_set_of_another_kind_under_our_name_takes_its_entries_at_once() -> None:
    """Nobody is without a limit while the set is made anew."""
    compilation, kernel = settled([replace(parse_rule({"target": "10.1.0.2", "rate": "5 packets/s"}, NOW), id=1)])
    name = compilation.sets_of(1)[0]
    kernel.sets[name] = replace(kernel.sets[name], timeout=300)
    kernel.elements[name] = {}
    first = plan_for(compilation, kernel).steps[0]
    assert isinstance(first, WriteSets)
    assert first.create == (compilation.structure.sets[name],)
    assert "10.1.0.2" in first.add[name]
    apply(plan_for(compilation, kernel), kernel)
    assert observe(kernel) == compilation.state


def test_foreign_rules_survive() -> None:
    compilation, kernel = settled([replace(parse_rule({"target": "10.1.0.2", "action": "block"}, NOW), id=1)])
    hook = ChainId(4, "mangle", "FORWARD")
    kernel.foreign[hook] = 3
    bring(compilation, [])
    plan = plan_for(compilation, kernel)
    apply(plan, kernel)
    assert kernel.foreign == {hook: 3}
    assert all("NL-" in line or "nl-" in line for line in plan.lines())


def test_a_plan_prints_one_line_a_change() -> None:
    compilation = Compilation(Facts())
    compilation.put(replace(parse_rule({"target": "10.1.2.0/24", "action": "block"}, NOW), id=1))
    lines = list(diff(compilation.state, State()).lines())
    assert all(line.startswith(("ipset create nl-", "ipset add nl-", "iptables -t ")) for line in lines)
    assert sum(line.endswith(" 10.1.2.0/24") for line in lines) == 2
    assert any("-I PREROUTING -j NL-PREROUTING" in line for line in lines)
    gone = list(diff(State(), compilation.state).lines())
    assert any("-D PREROUTING -j NL-PREROUTING" in line for line in gone)
    assert gone[-1].startswith("ipset destroy nl-")


def test_a_long_step_is_cut_short_in_print_but_not_in_lines() -> None:
    entries = {f"10.0.0.{n}": Entry() for n in range(100)}
    step = WriteSets(add={"nl-x": entries})
    assert len(str(step).splitlines()) == 20
    assert str(step).splitlines()[-1] == "… and 81 lines like these"
    assert len(list(step.lines())) == 100


def test_an_end_that_differs_by_what_rounding_makes_of_it_is_the_same() -> None:
    structure = Structure({"nl-x": IpSet("nl-x", 4)})
    wanted = State(structure, {"nl-x": {"10.0.0.1": Entry(expires=1000)}})

    def found(expires: int) -> State:
        return State(structure, {"nl-x": {"10.0.0.1": Entry(expires=expires)}})

    assert not diff(wanted, found(998))
    assert not diff(wanted, found(1003))
    assert diff(wanted, found(990))
    assert diff(wanted, found(0)), "an entry that would stay for ever is not one that ends"


def test_a_set_that_is_nearly_full_makes_room_first() -> None:
    compilation = Compilation(Facts(set_size=2))
    kernel = frozen_kernel()
    rules = [replace(parse_rule({"target": f"10.0.0.{n}", "action": "block"}, NOW), id=n) for n in (1, 2, 3)]
    bring(compilation, rules[:2])
    apply(plan_for(compilation, kernel), kernel)
    compilation.settle()
    compilation.drop(1)
    compilation.put(rules[2])
    apply(plan_for(compilation, kernel), kernel)
    assert observe(kernel) == compilation.state


def test_a_rule_for_which_no_set_has_room_is_a_problem_of_its_own() -> None:
    """Two kinds of blocks share the set that tells what needs a closer look: it must not overflow either."""
    compilation = Compilation(Facts(set_size=3))
    kernel = frozen_kernel()
    problems = []
    for number, protocol in enumerate(["tcp", "tcp", "udp", "udp", "icmp"], start=1):
        rule = parse_rule({"target": f"10.0.0.{number}", "action": "block", "protocol": protocol}, NOW)
        problems.append(compilation.put(replace(rule, id=number)))
    apply(plan_for(compilation, kernel), kernel)
    assert observe(kernel) == compilation.state
    assert problems[:3] == [None] * 3
    assert all("is full" in str(problem) for problem in problems[3:])


def test_steps_that_would_do_nothing_are_left_out() -> None:
    many = [parse_rule({"target": f"10.1.0.{n}", "action": "block"}, NOW) for n in range(1, MOST_FEW + 2)]
    compilation, kernel = settled([replace(rule, id=number) for number, rule in enumerate(many, start=1)])
    compilation.put(replace(parse_rule({"target": "10.1.0.77", "action": "block"}, NOW), id=77))
    plan = plan_for(compilation, kernel)
    assert not any(isinstance(step, SwitchTable) for step in plan.steps)
    assert [line.split()[:2] for line in plan.lines()] == [["ipset", "add"]] * 2
