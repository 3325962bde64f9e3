"""Programs on the ingress of devices, which lead traffic for this host over an IFB device; attached by tc.

Nothing is pinned: a filter holds its program, which holds the maps. They are found from there, and a new program takes
over the maps of the old one, so that entries, counters and what was seen outlive it.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import NamedTuple

from pyroute2 import IPRoute

from netlimit.errors import KernelError
from netlimit.ingress import Ingress, IngressLane
from netlimit.kernel import clsact, egress, queues, rtnetlink
from netlimit.kernel.base import Reading
from netlimit.kernel.bpf import load_program, read_program
from netlimit.kernel.maps import Kind, Map
from netlimit.kernel.names import read_name, read_names
from netlimit.kernel.nft_ingress import EarlyChainReader, EarlyChains
from netlimit.kernel.program import (
    KEY,
    MAPPED,
    MAPPED_BITS,
    SEEN_KEY,
    SEEN_VALUE,
    TAG_BITS,
    VALUE,
    tag,
    write_program,
)
from netlimit.kernel.queues import is_up
from netlimit.kernel.rtnetlink import TcMessage, decode, encode
from netlimit.plain import decode_name
from netlimit.plan import WriteIngress
from netlimit.several import name_some
from netlimit.state import Entry
from netlimit.tree import INGRESS_DEVICE, Device

log = logging.getLogger(__name__)

_WHAT = "shape what ends on this host"
_PROGRAM_PREFIX = "nl_"
_FILTER = INGRESS_DEVICE
_WITHOUT = " without "
"""Behind this a former version told in the name of a filter which devices it had left out."""
_UNASKED = 28268
"""The chain, which nobody asks, of the filter that says that an empty clsact is one of ours."""
_PRIORITY = 0xFFFF
"""The last among the filters of a device: what ours redirects is not seen by those behind it."""
_HANDLE = 1
_INFO = _PRIORITY << 16 | socket.htons(3)
"""The priority, and all protocols (ETH_P_ALL)."""
_INGRESS, _EGRESS = clsact.INGRESS, clsact.EGRESS
_ROOT_QDISC = 0
"""As the parent of filters: those of the root qdisc, whatever its handle."""
_UNFILTERED = ("noqueue", "pfifo_fast", "mq", "tbf")
"""What most devices have for a root, and takes no filters."""
_KIND, _OPTIONS, _CHAIN = 1, 2, 11
_BPF_ACTION, _BPF_LENGTH, _BPF_CODE, _BPF_FD, _BPF_NAME, _BPF_ID = 1, 4, 5, 6, 7, 11
_KEEPER = struct.pack("=HBBIHBBI", 0, 0, 0, int.from_bytes(b"nl-k"), 6, 0, 0, 0)
"""The program of that filter: it loads a number by which it is known, for classic ones have no name, and returns 0."""
_FIRST_ACTION = 1
_ACTIONS = {"bpf": 1, "cgroup": 1, "matchall": 2, "flower": 3, "basic": 3, "fw": 4, "route": 6, "u32": 7, "flow": 9}
"""Where each kind of filter has its actions (TCA_…_ACT)."""
_MIRRED_PARAMETERS, _MIRRED_BLOCK = 2, 4
_MIRRED = struct.Struct("=IIiiiiI")
_LOOPBACK = "lo"
_REDIRECT, _HANDS_ON, _HANDS_COPY, _STOLEN = 1, 3, 4, 4
"""What a filter and its action "mirred" are made of (linux/pkt_cls.h, linux/tc_act/tc_mirred.h)."""
_CT_ACTION, _CT_NAT, _FLAGS = 3, 8, struct.Struct("=H")
"""What an action "ct" is told to do (linux/tc_act/tc_ct.h)."""
_ENTRIES, _SEEN = "nl_in_entries", "nl_in_seen"
_MOST_ENTRIES, _MOST_SEEN = 1 << 20, 1 << 16


class Hooks(NamedTuple):
    """What is on the ingress of devices: `programs` are ours, by their digests, and `barred` the devices that can have
    none, with what is in the way and what to do."""

    programs: dict[str, str]
    barred: dict[str, str]


class _Filter(NamedTuple):
    """A filter of ours: on which device, in which kind of qdisc, at which place (priority and protocol) and under which
    number there, with which program, and where it redirects to."""

    device: int
    qdisc: str
    place: int
    handle: int
    program: int
    target: int


class _Maps(NamedTuple):
    """What all programs of a namespace share."""

    entries: Map
    seen: Map


def read_ingress(early: EarlyChains) -> Hooks:
    """The devices that have our program, with its digest; empty where it redirects to what is not there any more, or
    not up. Which others can have none depends on where chains of nftables stand (`early`), too."""
    names, target = read_names(), _find_target()
    qdiscs = clsact.read_all()
    found: dict[str, str] = {}
    for each in _find_filters(qdiscs):
        works = target is not None and target.up and (each.target, each.place) == (target.index, _INFO)
        if each.device in names:  # one that has just gone is no more to be told
            found[names[each.device]] = _read_digest(each.program) if works else ""
    return Hooks(found, {names[index]: why for index, why in _find_barred(qdiscs, names, early).items()})


def find_ahead() -> dict[str, str]:
    """The devices on whose ingress filters of others come before ours, with their kinds and priorities."""
    names, found = read_names(), {}
    for each in _find_filters():
        filters = rtnetlink.read_all(rtnetlink.GET_FILTER, each.device, _INGRESS)
        places = {(other.info >> 16, _read_text(other.attributes[_KIND])) for other in filters if _is_asked(other)}
        before = sorted(place for place in places if place[0] < each.place >> 16)
        if before and each.device in names:
            found[names[each.device]] = ", ".join(f"{kind}, pref {priority}" for priority, kind in before)
    return found


def find_redirecting() -> dict[str, str]:
    """The devices on whose ingress a filter leads packets out by a device from which they do not come back, with the
    kind and priority of the filter. What programs (bpf) redirect by themselves is not seen."""
    return _find_leading(_INGRESS)


def find_diverting() -> dict[str, str]:
    """The devices on whose egress, which comes before the root qdisc, or in the root qdisc itself a filter does so."""
    return _find_leading(_EGRESS)


def find_rewriting() -> dict[str, str]:
    """The devices on whose ingress a filter translates addresses, with the kind and priority of the filter."""
    return _find_acting(_INGRESS, _translates)


def find_editing() -> dict[str, str]:
    """The devices on whose ingress a filter writes something into packets."""
    return _find_acting(_INGRESS, lambda kind, _: kind == "pedit")


def read_ifbs() -> frozenset[str]:
    """The devices of the kind ifb."""
    with IPRoute() as ipr:
        return frozenset(read_name(each.get_attr("IFLA_IFNAME") or b"") for each in ipr.get_links(kind="ifb"))


def find_handing() -> dict[str, str]:
    """The devices on whose ingress a filter hands packets to another device, as if they came in there: to one of the
    kind ifb, too, which gives back only what leaves by it."""
    return _find_acting(_INGRESS, lambda kind, told: kind == "mirred" and _leads(told, _HANDS_ON))


def find_mirroring() -> dict[str, str]:
    """The devices on whose ingress a filter hands a copy of packets to another device, as if it came in there."""
    return _find_acting(_INGRESS, lambda kind, told: kind == "mirred" and _leads(told, _HANDS_COPY))


def find_looping() -> dict[str, str]:
    """The devices on whose ingress a filter hands packets, or a copy, to loopback, as if they came in there: as if this
    host had sent them to itself."""
    loops = {index for index, name in read_names().items() if name == _LOOPBACK}
    return _find_acting(
        _INGRESS, lambda kind, told: kind == "mirred" and _leads(told, _HANDS_ON, _HANDS_COPY, only=loops)
    )


def find_returning() -> dict[str, str]:
    """The devices on whose egress, or in whose root qdisc, a filter hands packets, or copies, to another device, as if
    they came in there."""
    return _find_acting(_EGRESS, lambda kind, told: kind == "mirred" and _leads(told, _HANDS_ON, _HANDS_COPY))


def _find_leading(hook: int) -> dict[str, str]:
    backs = read_ifbs()
    ifbs = {index for index, name in read_names().items() if name in backs}
    return _find_acting(hook, lambda kind, told: kind == "mirred" and _leads(told, _REDIRECT, harmless=ifbs))


def _find_acting(hook: int, matches: Callable[[str, bytes], bool]) -> dict[str, str]:
    """The devices on which a filter at a hook has an action (its kind, and what it is told) that `matches`."""
    names, found = read_names(), dict[str, str]()
    for device, each in _read_filters(hook):
        kind = _read_text(each.attributes.get(_KIND, b""))
        actions = _read_actions(kind, each.attributes.get(_OPTIONS, b""))
        if device in names and any(matches(*action) for action in actions):
            found.setdefault(names[device], f"{kind}, pref {each.info >> 16}")
    return found


def _read_filters(hook: int) -> Iterator[tuple[int, TcMessage]]:
    """All filters at a hook, each with its device, which one of a block that is shared does not tell itself; what
    leaves comes to those of the root qdisc next. An "ingress" has none there, but names those it has for any hook."""
    hanging = (clsact.CLSACT, rtnetlink.ROOT) if hook == _EGRESS else clsact.HELD
    without = (*_UNFILTERED, "ingress") if hook == _EGRESS else _UNFILTERED
    for qdisc in rtnetlink.read_all(rtnetlink.GET_QDISC, 0, hanging_on=hanging):
        kind = _read_text(qdisc.attributes.get(_KIND, b""))
        where = hook if kind in ("clsact", "ingress") else _ROOT_QDISC
        if kind not in without:
            for each in rtnetlink.read_all(rtnetlink.GET_FILTER, qdisc.device, where):
                yield qdisc.device, each


def _read_actions(kind: str, options: bytes) -> Iterator[tuple[str, bytes]]:
    """The actions of a filter, each with what it is told."""
    for action in decode(decode(options).get(_ACTIONS.get(kind, -1), b"")).values():
        said = decode(action)
        yield _read_text(said.get(_KIND, b"")), said.get(_OPTIONS, b"")


def _translates(kind: str, told: bytes) -> bool:
    """Whether an action writes other addresses: "nat" always does, "ct" where it is told to."""
    flags = decode(told).get(_CT_ACTION, b"")
    return kind == "nat" or (kind == "ct" and len(flags) == _FLAGS.size and bool(_FLAGS.unpack(flags)[0] & _CT_NAT))


def _leads(told: bytes, *ways: int, harmless: Collection[int] = (), only: Collection[int] | None = None) -> bool:
    """Whether packets, or copies, are led one of these ways to a device that is there (0: gone) and not harmless, and
    among these where there are `only` some; or to those of a block, whichever they are."""
    said = decode(told)
    parameters = said.get(_MIRRED_PARAMETERS, b"")
    if len(parameters) < _MIRRED.size:
        return False
    *_, how, target = _MIRRED.unpack_from(parameters)
    is_meant = target not in {0, *harmless} and (only is None or target in only)
    return how in ways and (any(said.get(_MIRRED_BLOCK, b"")) or is_meant)


def _is_asked(each: TcMessage) -> bool:
    """Whether a filter is asked about all that comes in; those of other chains are where one of these leads there."""
    return not any(each.attributes.get(_CHAIN, b""))


def read_entries(names: Iterable[str]) -> dict[str, dict[str, Reading]]:
    """The entries of lanes with their counters (packets as the device hands them over, IP bytes)."""
    lanes = {tag(name): name for name in names}
    found: dict[str, dict[str, Reading]] = {}
    alike: dict[tuple[int, int, int], Entry] = {}
    with _open_maps(_find_filters()) as maps:
        for key, value in maps.entries.read() if maps is not None else ():
            length, lane, address = KEY.unpack(key)
            if lane in lanes:
                prio, mark, mask, _, packets, size = VALUE.unpack(value)
                entry = alike.setdefault((prio, mark, mask), Entry(mark, mask, 0, prio))
                reading = Reading(entry, packets, size)
                found.setdefault(lanes[lane], {})[_show_key(length - TAG_BITS, address)] = reading
    return found


def read_seen(names: Iterable[str]) -> dict[str, dict[str, int]]:
    """The addresses that packets have brought to entries with a mark, and the mark; they are forgotten."""
    lanes = {tag(name): name for name in names}
    found: dict[str, dict[str, int]] = {}
    with _open_maps(_find_filters()) as maps:
        if maps is None:
            return {}
        read = []
        for key, value in maps.seen.read():
            lane, address = SEEN_KEY.unpack(key)
            if lane in lanes:
                read.append(key)
                found.setdefault(lanes[lane], {})[_show_key(128, address)] = SEEN_VALUE.unpack(value)[0]
        maps.seen.delete(read)
    return found


def write_ingress(step: WriteIngress) -> None:
    """Take the step. Entries are left out where no program is yet that would look at them, as before a network is up:
    with the first one all are written. Raises KernelError."""
    filters = list(_find_filters())
    if step.drop:
        _detach(filters)
        if step.whole:
            for index in egress.find_devices():
                egress.withdraw(index)
            _clear({*_find_kept(), *(each.device for each in filters)})
        return
    with _open_maps(filters) as held, ExitStack() as made:
        maps = held or (_make_maps(made) if step.ingress is not None else None)
        if maps is not None:
            _write(step, filters, maps)
        elif step.add:
            log.info("What ends on this host is not shaped yet: there is no device by which it would come in.")


def try_ingress(device: str) -> None:
    """Put a program on a device, with an entry, and take it away. Raises KernelError, or OSError with the kernel's
    words. For a network namespace of one's own, in which the IFB device is."""
    lane = IngressLane("probe", 4, "src", "udp", ((53, 53),))
    structure = Ingress((device,), ("192.0.2.1",), (lane,))
    write_ingress(WriteIngress(structure, {lane.name: {"192.0.2.0/24": Entry(prio=1)}}))
    read_entries([lane.name])
    write_ingress(WriteIngress(drop=True, whole=True))


def read_clsacts() -> tuple[str, ...]:
    """The devices, but our own, with a clsact in which a program of ours is, or that is kept for the next one."""
    names = {index: name for index, name in read_names().items() if name != INGRESS_DEVICE}
    used = {each.device for each in _find_filters() if each.qdisc == "clsact"} | egress.find_devices()
    return tuple(sorted(names[index] for index in used.union(_find_kept()) if index in names))


def read_kept() -> tuple[str, ...]:
    """The devices whose clsact is kept for the next program, or holds one on the egress whose tree has gone."""
    names, left = read_names(), {index for index in egress.find_devices() if not queues.has_own_root(index)}
    return tuple(sorted(names[index] for index in left.union(_find_kept()) if index in names))


# -- programs -------------------------------------------------------------------------------------------------------


def _write(step: WriteIngress, filters: list[_Filter], maps: _Maps) -> None:
    maps.entries.update(
        (_make_key(lane, key), VALUE.pack(entry.prio, entry.mark, entry.mask, 0, 0, 0))
        for lane, entries in ((tag(name), entries) for name, entries in step.add.items())
        for key, entry in entries.items()
    )
    if step.ingress is not None:
        _attach(step.ingress, filters, maps)
        lanes = {tag(lane.name) for lane in step.ingress.lanes}
        maps.entries.delete([key for key, _ in maps.entries.read() if KEY.unpack(key)[1] not in lanes])
    maps.entries.delete(_make_key(tag(name), key) for name, keys in step.remove.items() for key in keys)


def _attach(ingress: Ingress, filters: list[_Filter], maps: _Maps) -> None:
    """Put a program on the devices; one that has ours changes from one packet to the next. A device may have gone
    meanwhile, or somebody may have come in the way: the others have their program all the same."""
    target = _bring_up_target()
    indices = {device: index for device in ingress.devices if (index := _find_device(device))}
    _leave_out(indices)
    if not indices:
        indices = {INGRESS_DEVICE: target}  # no packet comes in there: the program does nothing but hold the maps
    own = {each.device: each.handle for each in filters if each.place == _INFO}
    program = _load(ingress, target, maps)
    refused: list[OSError] = []
    try:
        for index in indices.values():
            try:
                _write_filter(index, own.get(index), program, target)
            except OSError as error:
                if index in read_names():
                    refused.append(error)
    finally:
        os.close(program)
    _detach(each for each in filters if each.device not in indices.values() or each.place != _INFO)
    if refused:
        raise refused[0]


def _leave_out(indices: dict[str, int]) -> None:
    """Take away devices on which no filter of ours can be put; tell an operator."""
    barred = _find_barred(clsact.read_all(), read_names(), EarlyChainReader().read())
    for device in [device for device, index in indices.items() if index in barred]:
        why = barred[indices.pop(device)]
        log.warning("What comes in by %s and ends on this host is not shaped: %s", device, why)


def _load(ingress: Ingress, target: int, maps: _Maps) -> int:
    return load_program(write_program(ingress, target, *maps), _PROGRAM_PREFIX + ingress.digest)


def _write_filter(index: int, own: int | None, program: int, target: int) -> None:
    """Put a program on a device, in the place of `own`, the number of ours. Where there is none, nothing makes way: who
    has just come first is refused here, and found the next time."""
    with suppress(FileExistsError):  # an older "ingress" does as well
        clsact.add(index)
    mirred = encode(_MIRRED_PARAMETERS, _MIRRED.pack(0, 0, _STOLEN, 0, 0, _REDIRECT, target))
    action = encode(_KIND, b"mirred\0") + encode(_OPTIONS, mirred)
    options = (
        encode(_BPF_FD, struct.pack("=I", program))
        + encode(_BPF_NAME, _FILTER.encode() + b"\0")
        + encode(_BPF_ACTION, encode(_FIRST_ACTION, action))
    )
    wanted = TcMessage(index, own or _HANDLE, _INGRESS, _INFO, {_KIND: b"bpf\0", _OPTIONS: options})
    how = rtnetlink.REPLACE if own else rtnetlink.EXCLUSIVE
    rtnetlink.write_one(rtnetlink.NEW_FILTER, rtnetlink.CREATE | how, wanted)


def _detach(filters: Iterable[_Filter]) -> None:
    """Take our filters away. A clsact stays, marked as one to be taken away in the end: when one comes or goes, the
    kernel takes the device down for a moment, and all that waits in its queues is lost, whoever it is of."""
    target = _find_device(INGRESS_DEVICE)
    for each in filters:
        if each.qdisc == "clsact" and each.device != target:
            _keep(each.device)
        ours = TcMessage(each.device, each.handle, _INGRESS, each.place, {_KIND: b"bpf\0"})
        with clsact.unless_gone():
            rtnetlink.write_one(clsact.DELETE_FILTER, 0, ours)
    _clear({target})  # nothing of others waits there


def _keep(index: int) -> None:
    """Mark a clsact as one of ours, unless it is marked; of what passes nothing is asked about that."""
    options = encode(_BPF_LENGTH, struct.pack("=H", len(_KEEPER) // 8)) + encode(_BPF_CODE, _KEEPER)
    attributes = {_KIND: b"bpf\0", _CHAIN: struct.pack("=I", _UNASKED), _OPTIONS: options}
    with clsact.unless_gone(), suppress(FileExistsError):
        wanted = TcMessage(index, _HANDLE, _INGRESS, _INFO, attributes)
        rtnetlink.write_one(rtnetlink.NEW_FILTER, rtnetlink.CREATE | rtnetlink.EXCLUSIVE, wanted)


def _clear(devices: Collection[int]) -> None:
    """Take away what marks a clsact as ours, and the clsact if it has no other filters."""
    for index in clsact.find_devices() & {*devices}:
        unasked = {_KIND: b"bpf\0", _CHAIN: struct.pack("=I", _UNASKED)}
        with clsact.unless_gone():
            rtnetlink.write_one(clsact.DELETE_FILTER, 0, TcMessage(index, _HANDLE, _INGRESS, _INFO, unasked))
        clsact.remove_unused(index)


def _find_kept() -> Iterator[int]:
    """The devices whose clsact is marked as ours."""
    for index in clsact.find_devices():
        if any(map(_is_keeper, rtnetlink.read_all(rtnetlink.GET_FILTER, index, _INGRESS))):
            yield index


def _is_keeper(each: TcMessage) -> bool:
    options = decode(each.attributes.get(_OPTIONS, b""))
    return _read_text(each.attributes[_KIND]) == "bpf" and options.get(_BPF_CODE) == _KEEPER


def _find_filters(qdiscs: Iterable[TcMessage] | None = None) -> Iterator[_Filter]:
    for qdisc in clsact.read_all() if qdiscs is None else qdiscs:
        kind = _read_text(qdisc.attributes[_KIND])
        if kind in ("clsact", "ingress"):
            for each in rtnetlink.read_all(rtnetlink.GET_FILTER, qdisc.device, _INGRESS):
                options = decode(each.attributes.get(_OPTIONS, b""))
                if _read_text(each.attributes[_KIND]) != "bpf":
                    continue
                if _read_text(options.get(_BPF_NAME, b"")).partition(_WITHOUT)[0] == _FILTER:
                    program, target = struct.unpack("=I", options[_BPF_ID])[0], _read_target(options[_BPF_ACTION])
                    yield _Filter(qdisc.device, kind, each.info, each.handle, program, target)


def _find_barred(qdiscs: Iterable[TcMessage], names: Mapping[int, str], early: EarlyChains) -> dict[int, str]:
    """The devices on whose ingress no filter of ours can be put, with the reason: it would be one of many devices, or
    somebody else has the last place, or a chain of nftables. To stand before him is no way, for what ours leads to the
    IFB device he would not see. Where it is not known who stands there, ours does not come, and does not go."""
    own = {each.device for each in _find_filters(qdiscs) if each.place == _INFO}
    found: dict[int, str] = {}
    for index, name in names.items():
        if chains := early.find(name):
            found[index] = _say_chained(chains)
        elif early.unread is not None and index not in own:
            found[index] = (
                f"whether a chain of nftables stands on its ingress is not known ({early.unread}). It would not "
                "be asked about what netlimit leads to its queues, so that netlimit puts nothing there meanwhile."
            )
    for qdisc in (each for each in qdiscs if each.device in names):
        name, kind = names[qdisc.device], _read_text(qdisc.attributes[_KIND])
        if clsact.INGRESS_BLOCK in qdisc.attributes:
            found[qdisc.device] = (
                "its ingress has a filter block that is shared between devices, on which netlimit puts nothing. "
                f"Without the block (tc qdisc del dev {name} {kind}) it would be."
            )
        elif qdisc.device not in own and (last := _find_last(qdisc.device)) is not None:
            found[qdisc.device] = (
                f"a filter of somebody else ({last}, pref {_PRIORITY}) has the last place on its ingress, and netlimit "
                f"puts nothing before it or in its stead. With a lower pref (tc filter show dev {name} ingress) it "
                "would still be asked first, and both would hold."
            )
    return found


def _say_chained(chains: list[str]) -> str:
    return (
        f"a chain of nftables ({name_some(chains, 1)}) stands on its ingress. It would not be asked about what "
        "netlimit leads to its queues, nor drop it, so that netlimit puts nothing there. In prerouting (`type filter "
        "hook prerouting priority raw`) that chain sees all; or limit what ends here instead (`action: drop`)."
    )


def _find_last(index: int) -> str | None:
    """The kind of filter of others that is at our place on a device. Of one of ours nothing is left there: what the
    kernel tells without a number, if it is of our kind, only stands for those that have one."""
    for each in rtnetlink.read_all(rtnetlink.GET_FILTER, index, _INGRESS):
        kind = _read_text(each.attributes[_KIND])
        if each.info >> 16 == _PRIORITY and _is_asked(each) and (each.handle or kind != "bpf"):
            return kind
    return None


def _read_target(actions: bytes) -> int:
    """The index of the device to which the first action redirects; the kernel says 0 for one that has gone."""
    mirred = decode(decode(decode(actions)[_FIRST_ACTION])[_OPTIONS])
    target: int = _MIRRED.unpack(mirred[_MIRRED_PARAMETERS])[-1]
    return target


def _read_text(value: bytes) -> str:
    return decode_name(value)


def _read_digest(program: int) -> str:
    return read_program(program).name.removeprefix(_PROGRAM_PREFIX)


def _find_target() -> Device | None:
    """The IFB device, None if there is none."""
    with suppress(OSError):  # it may go between the two questions
        return Device(socket.if_nametoindex(INGRESS_DEVICE), is_up(INGRESS_DEVICE), "ifb")
    return None


def _bring_up_target() -> int:
    """Set the IFB device up, for it drops all that comes while it is down. Raises KernelError if there is none."""
    target = _find_target()
    if target is None:
        raise KernelError(_WHAT, f"there is no device {INGRESS_DEVICE}; it comes with its tree")
    if not target.up:
        with IPRoute() as ipr:
            ipr.link("set", index=target.index, state="up")
    return target.index


def _find_device(name: str) -> int:
    """The index of a device, 0 if there is none."""
    try:
        return socket.if_nametoindex(name)
    except OSError:
        return 0


# -- maps and keys --------------------------------------------------------------------------------------------------


def _make_maps(made: ExitStack) -> _Maps:
    """Maps that go with the last program that uses them."""
    return _Maps(
        made.enter_context(Map.create(Kind.LPM_TRIE, _ENTRIES, KEY.size, VALUE.size, _MOST_ENTRIES)),
        made.enter_context(Map.create(Kind.LRU_HASH, _SEEN, SEEN_KEY.size, SEEN_VALUE.size, _MOST_SEEN)),
    )


@contextmanager
def _open_maps(filters: Iterable[_Filter]) -> Iterator[_Maps | None]:
    """Open the maps of the program that is there; None if there is none, or one that has nothing to do."""
    first = next(iter(filters), None)
    if first is None:
        yield None
        return
    with ExitStack() as opened:
        maps = [opened.enter_context(Map.open(number)) for number in read_program(first.program).maps]
        named = {each.name: each for each in maps}
        yield _Maps(named[_ENTRIES], named[_SEEN]) if named else None


def _make_key(lane: bytes, key: str) -> bytes:
    """A key as ipset prints it, as a program looks for it."""
    address, _, length = key.partition("/")
    if ":" in address:
        return KEY.pack(TAG_BITS + int(length or 128), lane, socket.inet_pton(socket.AF_INET6, address))
    bits = TAG_BITS + MAPPED_BITS + int(length or 32)
    return KEY.pack(bits, lane, MAPPED + socket.inet_pton(socket.AF_INET, address))


def _show_key(length: int, address: bytes) -> str:
    family, longest = socket.AF_INET6, 128
    if address.startswith(MAPPED) and length >= MAPPED_BITS:
        family, longest, length, address = socket.AF_INET, 32, length - MAPPED_BITS, address[len(MAPPED) :]
    text = socket.inet_ntop(family, address)
    return text if length == longest else f"{text}/{length}"
