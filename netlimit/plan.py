"""The steps from what the kernel holds to what it shall hold.

Make before break: chains lead to the new sets before entries come there, entries come before others go, and what is
old goes last. There is no moment without a limit, and none that drops what is allowed; for that, entries come in the
order in which the desired structure has its sets, and go in the reverse. Filling new sets before a chain names them
would not do: a block could come into force before its exception, if that goes into a set that is there already.
Trees take the longest: what blocks and limits comes before them, what leads to their classes behind them.
A plan is data that prints; the text is the dry run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from ipaddress import IPv4Network, IPv6Network, ip_network

from netlimit.ingress import Ingress
from netlimit.state import (
    CHAIN_PREFIX,
    SAFE_PREFIX,
    ChainId,
    ChainRule,
    Chains,
    Entries,
    Entry,
    IpSet,
    Jump,
    State,
    Structure,
    Table,
    chain_rule,
    exempts,
    leads,
    limits,
    show_entry,
)
from netlimit.tree import REST, QueueClass, SavedRoot, Tree, format_classid, format_handle, major
from netlimit.tree import alike as alike_class

TIMEOUT_SLACK = 3
"""Seconds by which an entry's end may differ: the kernel tells it as whole seconds from now."""
_LINES_SHOWN = 20
_LEAVING: tuple[Table, ...] = ("raw", "security", "filter", "mangle")
"""A limit may move from one table to another. While others come, blocks move from raw to mangle and connections from
security to filter; while others leave, they move back. The new place comes first. Filter rejects what mangle marks, and
mangle clears what others have marked so: it comes first and leaves last.
"""
_ARRIVING = _LEAVING[::-1]
_CLEARING = f"{CHAIN_PREFIX}CLEAR"
"""The chain that clears our bits for a hook until its own chain does."""
_FAMILIES = (4, 6)
_REJECTING: tuple[Table, ...] = ("filter", *(table for table in _ARRIVING if table != "filter"))
"""Where filter rejects already, and so mangle clears, filter knows of what is new before mangle leads there. Where it
does not, no entry leads to a limit before both do."""


@dataclass(frozen=True, slots=True)
class WriteSets:
    """Write sets, in this order: create, add (an entry that exists takes the new value), remove, destroy.

    `create` with a name that exists takes the place of a set of another kind in one go.
    """

    create: tuple[IpSet, ...] = ()
    add: Entries = field(default_factory=dict)
    remove: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    destroy: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.create or self.add or self.remove or self.destroy)

    def lines(self) -> Iterator[str]:
        """One line a change."""
        for ipset in self.create:
            yield f"ipset create {ipset}"
        for name, entries in self.add.items():
            for key, entry in entries.items():
                yield f"ipset add {name} {show_entry(key, entry)}"
        for name, keys in self.remove.items():
            for key in keys:
                yield f"ipset del {name} {key}"
        for name in self.destroy:
            yield f"ipset destroy {name}"

    def __str__(self) -> str:
        return _shorten(self.lines())


def are_displaced(found: tuple[ChainRule, ...], wanted: tuple[ChainRule, ...]) -> bool:
    """Whether just our rules of a hook are there, behind others, or between them."""
    return bool(wanted) and found != wanted and tuple(rule for rule in found if rule in wanted) == wanted


@dataclass(frozen=True, slots=True)
class SwitchTable:
    """Give one table new contents for some chains of ours, in one commit.

    `chains` are new or changed, `gone` are to be removed, `hooks` are the rules that shall stand first in the kernel's
    own chains (none: our jumps are removed). `before` is what stood there, for the text only.
    """

    family: int
    table: Table
    chains: Mapping[str, tuple[ChainRule, ...]]
    gone: tuple[str, ...]
    hooks: Mapping[str, tuple[ChainRule, ...]]
    before: Mapping[str, tuple[ChainRule, ...]] = field(default_factory=dict, compare=False)

    @property
    def only_moves(self) -> bool:
        """Whether all of ours is there, and rules of others have come before our jumps."""
        moves = (are_displaced(self.before.get(hook, ()), rules) for hook, rules in self.hooks.items())
        return not self.chains and not self.gone and all(moves)

    def lines(self) -> Iterator[str]:
        """One line for each rule that comes or goes."""
        tool = f"{'iptables' if self.family == 4 else 'ip6tables'} -t {self.table}"
        for name, rules in (*self.chains.items(), *self.hooks.items()):
            before = self.before.get(name)
            if before is None and name in self.chains:
                yield f"{tool} -N {name}"
            yield from (f"{tool} -D {name} {rule.text}" for rule in before or () if rule not in rules)
            verb = "-I" if name in self.hooks else "-A"
            yield from (f"{tool} {verb} {name} {rule.text}" for rule in rules if rule not in (before or ()))
            if before is not None and before != rules and set(before) == set(rules):
                yield f"{tool} (reorder) {name}"
        yield from (f"{tool} -X {name}" for name in self.gone)

    def __str__(self) -> str:
        return _shorten(self.lines())


@dataclass(frozen=True, slots=True)
class WriteTree:
    """Change the queues of one device, in this order: the root, then classes with child HTBs (one that exists takes the
    new values and keeps its queue), then their queues, then what goes. Queues come after all classes, for the kernel
    finds a qdisc by going through the device's others: of 16,000 hosts that saves a quarter of the time.

    `root` is a tree whose root qdisc takes the place of whatever is there, in one go; its classes are not looked at.
    A class goes with all that hangs on it. With `drop`, all of ours goes. `put_back` is the root qdisc of somebody else
    that a new root may take the place of, and that takes the place of ours with `drop`; None: what the kernel itself
    puts there.
    """

    device: str
    handle: int
    root: Tree | None = None
    classes: Mapping[int, QueueClass] = field(default_factory=dict)
    children: Mapping[int, int] = field(default_factory=dict)
    gone: tuple[int, ...] = ()
    drop: bool = False
    put_back: SavedRoot | None = None

    def __bool__(self) -> bool:
        return bool(self.root or self.classes or self.children or self.gone or self.drop)

    @property
    def resizes(self) -> bool:
        """Whether classes get other values, and nothing else comes or goes."""
        return not (self.root or self.children or self.gone or self.drop)

    def lines(self) -> Iterator[str]:
        """One line a change, as `tc -batch` takes it; `replace` keeps the queue of what is there."""
        where = f"dev {self.device}"
        if self.root is not None:
            direct = f" direct_qlen {self.root.direct}" if self.root.direct else ""
            yield f"tc qdisc replace {where} root handle {format_handle(self.root.handle)} htb default {REST:x}{direct}"
        hanging = {classid: handle for handle, classid in self.children.items()}
        for classid, each in self.classes.items():
            name = format_classid(classid)
            yield f"tc class replace {where} parent {format_classid(each.parent)} classid {name} {each}"
            if classid in hanging:
                yield f"tc qdisc add {where} parent {name} handle {format_handle(hanging[classid])} htb"
        for classid, each in self.classes.items():
            if each.leaf is not None:
                yield f"tc qdisc replace {where} parent {format_classid(classid)} {each.leaf}"
        yield from (f"tc class del {where} classid {format_classid(classid)}" for classid in self.gone)
        if self.drop:
            yield f"tc qdisc del {where} root"

    def __str__(self) -> str:
        return _shorten(self.lines())


@dataclass(frozen=True, slots=True)
class WriteIngress:
    """Change what is shaped of the traffic that ends on this host: first entries that come (one that exists takes the
    new value), then the program on the devices, then entries that go. `ingress` is the new structure (None: as it is),
    and the entries of lanes that it does not have go; with `drop`, all of ours goes: programs, entries, and what was
    seen, and only if that is `whole`, the clsact qdiscs too: what waits on a device is lost when its own goes. Entries
    here do not end by themselves."""

    ingress: Ingress | None = None
    add: Entries = field(default_factory=dict)
    remove: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    drop: bool = False
    whole: bool = False

    def __bool__(self) -> bool:
        return bool(self.ingress or self.add or self.remove or self.drop)

    def lines(self) -> Iterator[str]:
        """One line a change."""
        for name, entries in self.add.items():
            yield from (f"ingress add {name} {show_entry(key, entry)}" for key, entry in entries.items())
        if self.ingress is not None:
            yield from (f"ingress {line}" for line in self.ingress.lines())
        for name, keys in self.remove.items():
            yield from (f"ingress del {name} {key}" for key in keys)
        if self.drop:
            yield "ingress drop" + " with its qdiscs" * self.whole

    def __str__(self) -> str:
        return _shorten(self.lines())


Step = WriteSets | SwitchTable | WriteTree | WriteIngress


@dataclass(frozen=True, slots=True)
class Plan:
    """Steps in the order in which they must be taken. Empty when there is nothing to do."""

    steps: tuple[Step, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.steps)

    @property
    def resizes(self) -> bool:
        """Whether classes of queues get other values, and all else stays as it is."""
        return all(isinstance(step, WriteTree) and step.resizes for step in self.steps)

    def lines(self) -> Iterator[str]:
        """Every change, a line each."""
        for step in self.steps:
            yield from step.lines()

    def __str__(self) -> str:
        return "\n".join(map(str, self.steps)) if self.steps else "Nothing to do."


def diff(
    desired: State,
    observed: State,
    transition: Structure | None = None,
    touched: Mapping[str, Collection[str]] | None = None,
    touched_classes: Mapping[str, Collection[int]] | None = None,
    put_back: Mapping[str, SavedRoot] | None = None,
) -> Plan:
    """Plan the way from `observed` to `desired`.

    `transition` is the structure to pass through, in which what comes and what goes are both there (default: the
    desired one). With `touched` (keys by set), only those entries of sets that exist already are looked at, and
    written whether they are there or not; `touched_classes` (classids by device) says the same of classes. `put_back`
    are the root qdiscs that were there before ours. Trees grow before anything leads to them, and lose what nothing
    leads to any more.
    """
    trees = list(_diff_trees(desired.trees, observed.trees, touched_classes, put_back or {}))
    grown = [each for each, _ in trees if each]
    between = transition or desired.structure
    have = observed.structure.sets
    # A set of peers has another name beside a limit that leaves than without it.
    coming = {**desired.structure.sets, **between.sets}
    create = tuple(ipset for name, ipset in coming.items() if have.get(name) != ipset)
    # What takes the place of a set in use must not be empty, and where nothing of ours is yet, all can come at once. So
    # can limits, of which none but they themselves make an exception: those of another set may take their places. But
    # where filter does not reject yet, mangle would let pass what is over one that rejects.
    old = _families(observed.structure)
    early = {family for family in _FAMILIES if not _begins_to_reject(family, observed.structure, between)}
    full = {
        each.name
        for each in create
        if each.name in have
        or (each.family not in old and not (grown and leads(each.name)))
        or (limits(each.name) and each.family in early)
    }
    # What takes the place of a set that leads to classes must find them there.
    first = grown if any(leads(name) for name in full) else []
    fill = {name: desired.entries[name] for name in between.sets if name in full and desired.entries.get(name)}
    add, remove = _diff_entries(desired, observed, between, touched)
    add = {name: entries for name, entries in add.items() if name not in full}
    # A set that is nearly full has no room for old and new at once.
    crowded = {
        name: keys for name, keys in remove.items() if len(desired.entries.get(name, ())) + len(keys) > have[name].size
    }
    # Chains that come may name a block that is there already, whose exception somebody has taken away.
    exceptions = {name: entries for name, entries in add.items() if exempts(name) and name not in crowded}
    add = {name: entries for name, entries in add.items() if name not in exceptions}
    late = _find_late(exceptions, _list_moving(desired, create, remove), have)
    for name, entries in late.items():
        exceptions[name] = {key: entry for key, entry in exceptions[name].items() if key not in entries}
    add |= late
    if not late and not crowded:  # all exceptions are there before chains lead to what is new: so can be blocks
        new = {
            each.name
            for each in create
            if each.name not in have
            and (each.family in early or not limits(each.name))
            and not (grown and leads(each.name))
        }
        fill |= {name: entries for name, entries in add.items() if name in new}
        add = {name: entries for name, entries in add.items() if name not in new}
    remove = {name: keys for name, keys in remove.items() if name not in crowded}
    destroy = tuple(sorted(name for name in {*have, *between.sets} if name not in desired.structure.sets))
    early_add = {name: entries for name, entries in add.items() if grown and not first and not leads(name)}
    add = {name: entries for name, entries in add.items() if name not in early_add}
    steps: list[Step] = [
        *first,
        WriteSets(create=create, add=exceptions | fill),
        *_switch(between, observed.structure, _find_orders(observed.structure)),
        WriteSets(remove=crowded),
        WriteSets(add=early_add),
        *(grown if not first else ()),
        WriteSets(add=add, remove=remove),
        *_switch(desired.structure, between, dict.fromkeys(_FAMILIES, _LEAVING)),
        WriteSets(destroy=destroy),
        _diff_ingress(desired, observed, touched),
        *(pruned for _, pruned in trees),
    ]
    return Plan(tuple(step for step in steps if isinstance(step, SwitchTable) or step))


def _diff_ingress(desired: State, observed: State, touched: Mapping[str, Collection[str]] | None) -> WriteIngress:
    if desired.ingress is None:
        return WriteIngress(drop=bool(observed.programs))
    lanes = {lane.name: lane.copies or lane.name for lane in desired.ingress.lanes}
    known = touched is not None and bool(observed.programs)
    add: dict[str, Mapping[str, Entry]] = {}
    remove: dict[str, tuple[str, ...]] = {}
    for name in sorted(lanes.keys() | {name for name in observed.entries if name not in observed.structure.sets}):
        want = desired.entries.get(name, {}) if name in lanes else {}
        have = observed.entries.get(name, {})
        new = observed.ingress is not None and all(lane.name != name for lane in observed.ingress.lanes)
        written = None if touched is None or not known or new else touched.get(lanes.get(name, name), ())
        keys = want.keys() | have.keys() if written is None else set(written)
        add[name] = {key: want[key] for key in keys if key in want and not same_place(want[key], have.get(key))}
        remove[name] = tuple(key for key in keys if key not in want)
    same = desired.programs == observed.programs
    return WriteIngress(
        ingress=None if same else desired.ingress,
        add={name: entries for name, entries in add.items() if entries},
        remove={name: keys for name, keys in remove.items() if keys},
    )


def follow(step: Step, held: Structure) -> Structure:
    """What there is of sets, chains and hooks after a step."""
    if isinstance(step, WriteSets):
        sets = {**held.sets, **{ipset.name: ipset for ipset in step.create}}
        return replace(held, sets={name: ipset for name, ipset in sets.items() if name not in step.destroy})
    if not isinstance(step, SwitchTable):
        return held
    after, gone = _after(step, held), {ChainId(step.family, step.table, name) for name in step.gone}
    chains = {chain: rules for chain, rules in after.chains.items() if chain not in gone}
    return replace(after, chains=chains, hooks={hook: rules for hook, rules in after.hooks.items() if rules})


def drifted(desired: Mapping[str, Tree], observed: Mapping[str, Tree]) -> str | None:
    """The first device whose tree is not as it should be; None if all are."""
    trees = _diff_trees(desired, observed, None, {})
    return next((grown.device for grown, pruned in trees if grown or pruned), None)


def _diff_trees(
    desired: Mapping[str, Tree],
    observed: Mapping[str, Tree],
    touched: Mapping[str, Collection[int]] | None,
    put_back: Mapping[str, SavedRoot],
) -> Iterator[tuple[WriteTree, WriteTree]]:
    """What grows and what is pruned, for each device."""
    for device in sorted({*desired, *observed}):
        want, have = desired.get(device), observed.get(device)
        if want is None:
            assert have is not None
            yield (
                WriteTree(device, have.handle),
                WriteTree(device, have.handle, drop=True, put_back=put_back.get(device)),
            )
        elif have is None or want.handle != have.handle:
            classes = _order(want, want.classes)
            grown = WriteTree(device, want.handle, want, classes, want.children, put_back=put_back.get(device))
            yield grown, WriteTree(device, want.handle)
        else:
            yield _diff_tree(device, want, have, None if touched is None else touched.get(device, ()))


def _diff_tree(device: str, want: Tree, have: Tree, touched: Collection[int] | None) -> tuple[WriteTree, WriteTree]:
    known = touched is not None
    numbers = touched if touched is not None else want.classes.keys() | have.classes.keys()
    changed = [
        number
        for number in numbers
        if number in want.classes and (known or not alike_class(want.classes[number], _find_class(number, want, have)))
    ]
    children = {handle: number for handle, number in want.children.items() if have.children.get(handle) != number}
    changed += [number for number in children.values() if number not in changed]
    gone = [number for number in numbers if number not in want.classes]
    # A child HTB goes with the class that it hangs on, and its hosts with it.
    falling = {handle for handle, number in have.children.items() if number in gone}
    gone = sorted((number for number in gone if major(number) not in falling), reverse=True)
    return (
        WriteTree(device, want.handle, None, _order(want, changed), children),
        WriteTree(device, want.handle, gone=tuple(gone)),
    )


def _find_class(number: int, want: Tree, have: Tree) -> QueueClass | None:
    """A class as it was found. HTB lets nobody change the quantum of a class that others lie in, and needs it for none
    of them: it counts as what it should be."""
    wanted, found = want.classes[number], have.classes.get(number)
    inner = wanted.leaf is None and number not in want.children.values()
    return found._replace(quantum=wanted.quantum) if found is not None and inner else found


def _order(tree: Tree, numbers: Iterable[int]) -> dict[int, QueueClass]:
    """Classes with those above them first."""

    def depth(number: int) -> int:
        parent = tree.classes[number].parent
        if parent & 0xFFFF:
            return 1 + depth(parent)
        return 0 if major(parent) == tree.handle else 1 + depth(tree.children[major(parent)])

    return {number: tree.classes[number] for number in sorted(numbers, key=lambda each: (depth(each), each))}


def _diff_entries(
    desired: State, observed: State, between: Structure, touched: Mapping[str, Collection[str]] | None
) -> tuple[dict[str, Mapping[str, Entry]], dict[str, tuple[str, ...]]]:
    add: dict[str, Mapping[str, Entry]] = {}
    remove: dict[str, tuple[str, ...]] = {}
    staying = _families(desired.structure)
    for name, ipset in between.sets.items():
        want, have = desired.entries.get(name, {}), observed.entries.get(name, {})
        if name not in observed.structure.sets:
            if want:
                add[name] = want
            continue
        if ipset != observed.structure.sets[name] or ipset.lives or ipset.family not in staying:
            continue
        if touched is not None and name not in touched:
            continue
        keys = touched[name] if touched is not None else want.keys() | have.keys()
        changed = {key: want[key] for key in keys if key in want and not alike(want[key], have.get(key))}
        gone = tuple(key for key in keys if key not in want and (touched is not None or key in have))
        if changed:
            add[name] = changed
        if gone:
            remove[name] = gone
    return add, dict(reversed(remove.items()))


def _list_moving(
    desired: State, create: Iterable[IpSet], remove: Mapping[str, Collection[str]]
) -> set[IPv4Network | IPv6Network]:
    """The single addresses that leave a block or limit for a set that is new: those of a rule that was forced, once
    the address is protected."""
    leave = {key for name, keys in remove.items() if not exempts(name) for key in keys if not {*"/,"} & {*key}}
    come = (desired.entries.get(ipset.name, {}) for ipset in create if not exempts(ipset.name))
    return {ip_network(key) for entries in come for key in leave & entries.keys()}


def _find_late(
    exceptions: Mapping[str, Mapping[str, Entry]],
    moving: Collection[IPv4Network | IPv6Network],
    have: Mapping[str, IpSet],
) -> dict[str, Mapping[str, Entry]]:
    """Who becomes safe, but is hit by a rule that was forced all the same: he is spared by others only once that rule
    stands before them."""
    found: dict[str, Mapping[str, Entry]] = {}
    for name, entries in exceptions.items() if moving else ():
        if name.startswith(SAFE_PREFIX) and name in have:
            nets = {key: ip_network(key) for key in entries}
            late = {k: entries[k] for k, net in nets.items() if any(net.overlaps(each) for each in moving)}
            found |= {name: late} if late else {}
    return found


def _families(structure: Structure) -> set[int]:
    """The address families of which anything is there."""
    return {ipset.family for ipset in structure.sets.values()}


def same_place(wanted: Entry, found: Entry | None) -> bool:
    """Whether an entry of the ingress is as it should be; there is no end to those, the controller takes them away."""
    return found is not None and (wanted.mark, wanted.mask, wanted.prio) == (found.mark, found.mask, found.prio)


def alike(wanted: Entry, found: Entry | None) -> bool:
    """Whether an entry is as it should be; ends may differ by what rounding makes of them."""
    if found is None:
        return False
    if wanted == found:
        return True
    same = wanted._replace(expires=found.expires) == found and bool(wanted.expires) == bool(found.expires)
    return same and abs(wanted.expires - found.expires) <= TIMEOUT_SLACK


def _find_orders(found: Structure) -> dict[int, tuple[Table, ...]]:
    """The order in which tables are switched to what is there in between, by address family. Where raw holds nothing,
    what comes there is new, or comes from mangle: it holds before mangle knows what it lets pass instead."""
    return {family: _find_order(family, found) for family in _FAMILIES}


def _find_order(family: int, found: Structure) -> tuple[Table, ...]:
    usual = _REJECTING if _find_rejecting(family, found) else _ARRIVING
    if any((chain.family, chain.table) == (family, "raw") for chain in found.chains):
        return usual
    return "raw", *(table for table in usual if table != "raw")


def _begins_to_reject(family: int, found: Structure, wanted: Structure) -> bool:
    """Whether filter is to look for whom to reject, and does not yet."""
    return bool(_find_rejecting(family, wanted)) and not _find_rejecting(family, found)


def _find_rejecting(family: int, structure: Structure) -> set[str]:
    """The hooks' rules of filter by which it looks for whom to reject."""
    return {rule for at, rules in structure.hooks.items() for rule in _find_marked(family, at, rules)}


def _find_marked(family: int, at: ChainId, rules: Iterable[ChainRule]) -> set[str]:
    here = (at.family, at.table) == (family, "filter")
    return {rule.text for rule in rules if here and rule.text.startswith("-m mark")}


def _clear(family: int, wanted: Structure, found: Structure) -> SwitchTable | None:
    """Have mangle clear our bits wherever filter comes to look for them: they may be somebody else's. Where it has a
    chain already that does not, a chain for the moment does, for in a kernel's own only jumps to ours are known."""
    chains: dict[str, tuple[ChainRule, ...]] = {}
    hooks: dict[str, tuple[ChainRule, ...]] = {}
    for at, rules in wanted.hooks.items() if _find_rejecting(family, found) else ():
        if not _find_marked(family, at, rules) - _find_marked(family, at, found.hooks.get(at, ())):
            continue
        base = ChainId(family, "mangle", CHAIN_PREFIX + at.name)
        clearing, jumps = wanted.chains[base][:1], wanted.hooks[ChainId(family, "mangle", at.name)]
        if base not in found.chains:
            chains[base.name], hooks[at.name] = clearing, jumps
        elif found.chains[base][:1] != clearing:
            chains[_CLEARING] = clearing
            hooks[at.name] = (chain_rule(Jump(_CLEARING)), *jumps)
    before = _contents(family, "mangle", found.chains) | _contents(family, "mangle", found.hooks)
    return SwitchTable(family, "mangle", chains, (), hooks, before) if hooks else None


def _switch(wanted: Structure, found: Structure, orders: Mapping[int, tuple[Table, ...]]) -> Iterator[SwitchTable]:
    for family, tables in orders.items():
        cleared = _clear(family, wanted, found)
        if cleared is not None:
            yield cleared
            found = _after(cleared, found)
        for table in tables:
            chains = {
                chain.name: rules
                for chain, rules in wanted.chains.items()
                if (chain.family, chain.table) == (family, table) and found.chains.get(chain) != rules
            }
            gone = _names(family, table, found.chains, wanted.chains)
            hooks = {
                hook.name: rules
                for hook, rules in wanted.hooks.items()
                if (hook.family, hook.table) == (family, table) and found.hooks.get(hook) != rules
            }
            hooks |= dict.fromkeys(_names(family, table, found.hooks, wanted.hooks), ())
            if chains or gone or hooks:
                before = _contents(family, table, found.chains) | _contents(family, table, found.hooks)
                yield SwitchTable(family, table, chains, gone, hooks, before)


def _after(step: SwitchTable, found: Structure) -> Structure:
    def place(contents: Chains, come: Mapping[str, tuple[ChainRule, ...]]) -> Chains:
        return {**contents, **{ChainId(step.family, step.table, name): rules for name, rules in come.items()}}

    return replace(found, chains=place(found.chains, step.chains), hooks=place(found.hooks, step.hooks))


def _names(family: int, table: Table, found: Chains, wanted: Chains) -> tuple[str, ...]:
    """What is there and shall not be."""
    here = (chain for chain in found if (chain.family, chain.table) == (family, table))
    return tuple(sorted(chain.name for chain in here if chain not in wanted))


def _contents(family: int, table: Table, chains: Chains) -> dict[str, tuple[ChainRule, ...]]:
    return {c.name: rules for c, rules in chains.items() if (c.family, c.table) == (family, table)}


def _shorten(lines: Iterator[str]) -> str:
    every = list(lines)
    if len(every) <= _LINES_SHOWN:
        return "\n".join(every)
    return "\n".join([*every[: _LINES_SHOWN - 1], f"… and {len(every) - _LINES_SHOWN + 1} lines like these"])
