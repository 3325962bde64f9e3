"""Trees of queues, spoken to by `tc -batch`: one process for any number of classes."""

from __future__ import annotations

import errno
import os
import re
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from pyroute2 import IPRoute

from netlimit.errors import KernelError, LeadMissing
from netlimit.kernel import bpf, egress, queues, rtnetlink
from netlimit.kernel.assembly import Assembly
from netlimit.kernel.rtnetlink import TcMessage
from netlimit.kernel.tools import ToolMissing, is_shortage, run
from netlimit.plain import show_line
from netlimit.plan import WriteTree
from netlimit.tree import (
    BESIDE,
    BESIDE_HANDLE,
    FIRST_CHILD,
    INGRESS_DEVICE,
    LAST_CHILD,
    NEIGHBOURS,
    REST,
    SERVICES,
    TOP,
    QueueClass,
    SavedRoot,
    Tree,
    classid,
    format_classid,
    is_beside,
    major,
)

_FAILED = re.compile(r"^Command failed -:(\d+)$", re.MULTILINE)
PINNED = "/run/netlimit/bpf/nl_lead"
"""Where the program of root filters is pinned for a controller that may not load it."""

_BPF_CLASSID, _BPF_FD, _BPF_NAME, _BPF_FLAGS = 3, 6, 7, 8
_DIRECT = 1
"""TCA_BPF_FLAG_ACT_DIRECT: the program itself writes the minor of the class."""
_EVERY_PROTOCOL = 3
"""ETH_P_ALL."""
_PACKET = 1
_PROTOCOL, _PRIORITY, _CAME_BY, _CLASS = 16, 32, 36, 72
_UNSPECIFIED, _OK = -1, 0
"""The register of the packet, places in struct __sk_buff (protocol, priority, ingress_ifindex, tc_classid), and answers
(linux/bpf.h, linux/pkt_cls.h)."""
_LINK_PROTOCOLS = (0x0806, 0x888E, 0x88CC, 0x8809, 0x0004)
"""ARP, 802.1X, LLDP, LACP, and spanning tree (802.2): without them there is soon no link."""


class _Refusal(NamedTuple):
    line: str
    reason: str


def write_tree(step: WriteTree) -> None:
    """Write the queues of one device. Raises KernelError with the line that was refused; those before it stay."""
    if step.drop:
        _drop(step)
        return
    if step.device == INGRESS_DEVICE and (step.root or step.classes or step.children):
        _set_up_ingress_device()
    base, rest = _split(step)
    _release(step)
    refused = step.root is not None and _make_root(base, step.root.handle)
    if step.children or any(map(is_beside, step.classes)):
        _lead(step)
    if refused or _run(_render(rest)):
        # Perhaps it was done already. Looking first would cost more than the change of a single class.
        refusal = _run(list(_render_rest(step)))
        if refusal:
            raise KernelError(*refusal)


def _release(step: WriteTree) -> None:
    """Let what this host sends not be charged to its sockets while it waits. Before the root, for a device that gets
    its clsact stands still for a moment, and loses what waits. The class of everything comes with each tree, each
    change of its cap, and where this has got lost."""
    rest = classid(step.handle, REST)
    if step.device == INGRESS_DEVICE or (classid(step.handle, TOP) not in step.classes and rest not in step.gone):
        return
    index = _find(step)
    held = step.root is None and rest not in step.gone and queues.has_class(index, rest)
    egress.attach(step.device, index, capped=rest in step.classes or held)


def _split(step: WriteTree) -> tuple[WriteTree, WriteTree]:
    """What stands first, and the rest. A new root HTB lets everything through until it has the class for what nothing
    claims, so that one comes with it, in the same process, and so do the class above it and this host's own."""
    if step.root is None:
        return WriteTree(step.device, step.handle), step
    first = [classid(step.handle, minor) for minor in (TOP, REST, SERVICES, *BESIDE)]
    base = {name: step.classes[name] for name in first if name in step.classes}
    others = {name: each for name, each in step.classes.items() if name not in base}
    return replace(step, classes=base, children={}, gone=()), replace(step, root=None, classes=others)


def _render(step: WriteTree) -> list[str]:
    """Lines as `tc -batch` takes them."""
    return [line.removeprefix("tc ") for line in step.lines()]


# -- the root -------------------------------------------------------------------------------------------------------


def _make_root(step: WriteTree, handle: int) -> bool:
    """Write a root and the classes that come with it; whether one of those was refused."""
    index = _find(step)
    found = queues.read_root(index)
    lets_go = found is None or not found.handle or queues.is_own_root(found) or step.device == INGRESS_DEVICE
    if found is not None and not lets_go:
        _check_saved(step, found)
    # The kernel changes no HTB: one of this handle is as it should be.
    standing = found is not None and (major(found.handle), queues.kind(found)) == (handle, "htb")
    lines = _render(step)
    classes = lines[1:]
    refusal = _run(classes if standing else lines)
    if refusal and refusal.line.removeprefix("tc ") not in classes:
        raise KernelError(*refusal)
    return refusal is not None


def _check_saved(step: WriteTree, found: TcMessage) -> None:
    """A foreign root makes way only if it is the one that was saved."""
    if step.put_back is None or step.put_back != queues.save_root(step.device):
        reason = f"{step.device} has the root qdisc {queues.show_root(found)} of somebody else, which stays"
        raise KernelError(str(step), reason)


def _lead(step: WriteTree) -> None:
    """Attach the root filter, if it is not there, in the place of one that an earlier version may have left: an HTB
    finds its own classes by `skb->priority`, but not those of an HTB that hangs on one of them."""
    index = _find(step)
    root = queues.read_root(index)
    if root is None or major(root.handle) != step.handle or queues.is_filtered(root):
        return
    program = open_lead()
    try:
        options = rtnetlink.encode(_BPF_FD, program.to_bytes(4, sys.byteorder))
        options += rtnetlink.encode(_BPF_NAME, f"{queues.FILTER}\0".encode())
        options += rtnetlink.encode(_BPF_CLASSID, (root.handle & 0xFFFF0000).to_bytes(4, sys.byteorder))
        options += rtnetlink.encode(_BPF_FLAGS, _DIRECT.to_bytes(4, sys.byteorder))
        attributes = {queues.KIND: b"bpf\0", queues.OPTIONS: options}
        # Priority 1, for every protocol.
        message = TcMessage(index, 1, root.handle, 1 << 16 | socket.htons(_EVERY_PROTOCOL), attributes)
        rtnetlink.write_one(rtnetlink.NEW_FILTER, rtnetlink.CREATE, message)
    finally:
        os.close(program)


def open_lead() -> int:
    """The program for root filters, as a file descriptor that the caller closes: loaded, or the one that root has
    pinned for those who may not load any. Raises LeadMissing, and KernelError where at another moment it can be had."""
    try:
        return bpf.load_program(write_lead(), "nl_lead")
    except KernelError as refused:
        if is_shortage(refused):
            raise
        try:
            return open_pinned_lead()
        except LeadMissing as missing:
            if isinstance(refused.__cause__, PermissionError):
                raise
            raise LeadMissing(refused.step, refused.reason) from missing


def open_pinned_lead() -> int:
    """The one that root has pinned. Raises as `open_lead`."""
    try:
        return bpf.open_pinned(PINNED)
    except OSError as error:
        old = "a kernel from before 6.0 opens it for CAP_BPF alone (docs/install.md)"
        helps = old if error.errno == errno.EPERM else "`netlimit prepare`, as root, leaves it there"
        reason = f"the program that leads packets to classes cannot be opened at {PINNED} ({error.strerror}): {helps}"
        raise (KernelError if is_shortage(error) else LeadMissing)("lead packets to classes", reason) from error


def pin_lead() -> None:
    """Leave the program where a controller that has no CAP_BPF finds it; as root. Raises KernelError, OSError."""
    program = bpf.load_program(write_lead(), "nl_lead")
    try:
        bpf.pin(program, PINNED)
    finally:
        os.close(program)


def write_lead() -> bytes:
    """The program: where a packet goes by its priority, and without one.

    Children: from the handle of a child HTB to the class on which it hangs. 7001: hangs on 6e01:1, 7002: on 6e01:2, and
    so on; the filter knows the root's handle, so that one program does for all. To the classes of this host's own: what
    says so, and what it sends to find neighbours and keep its links. Whatever has come in by a device, such as the ARP
    of others on a bridge, goes on, as all else does.
    """
    text = Assembly()
    priority, upper, found = 2, 3, 4
    text.load(priority, _PACKET, _PRIORITY)
    text.copy(upper, priority)
    text.change(upper, ">>", 16)
    text.jump_if(upper, "==", BESIDE_HANDLE, "beside")
    text.jump_if(upper, "<", FIRST_CHILD, "unclaimed")
    text.jump_if(upper, "<=", LAST_CHILD, "child")
    text.place("unclaimed")
    text.load(found, _PACKET, _CAME_BY)
    text.jump_if(found, "!=", 0, "go on")
    text.load(found, _PACKET, _PROTOCOL)
    for number in _LINK_PROTOCOLS:
        text.jump_if(found, "==", socket.htons(number), "neighbours")
    text.place("go on")
    text.leave(_UNSPECIFIED)
    text.place("beside")
    text.change(priority, "&", 0xFFFF)
    text.store(_PACKET, _CLASS, priority)
    text.leave(_OK)
    text.place("child")
    text.change(upper, "&", 0xFFF)
    text.store(_PACKET, _CLASS, upper)
    text.leave(_OK)
    text.place("neighbours")
    text.set(found, NEIGHBOURS)
    text.store(_PACKET, _CLASS, found)
    text.leave(_OK)
    return text.finish()


def _set_up_ingress_device() -> None:
    """Make it, or set it up if somebody has set it down: what is sent to it is lost meanwhile."""
    obstacle = find_foreign_device()
    if obstacle is not None:
        raise KernelError(f"set up {INGRESS_DEVICE}", obstacle)
    index = queues.find_index(INGRESS_DEVICE)
    if index is not None and queues.is_up(INGRESS_DEVICE):
        return
    with IPRoute() as ipr:
        if index is None:
            ipr.link("add", ifname=INGRESS_DEVICE, kind="ifb", state="up")
        else:
            ipr.link("set", index=index, state="up")


def find_foreign_device() -> str | None:
    """Why our device for what comes in cannot be made, if another one that is none of ours has its name."""
    index = queues.find_index(INGRESS_DEVICE)
    if index is None or _is_ifb(index):
        return None
    return (
        f"There is a device {INGRESS_DEVICE} that is none of netlimit's (no ifb), where the one would be by which what "
        f"ends on this host is shaped. Give it another name (`ip link set {INGRESS_DEVICE} name …`)."
    )


def _is_ifb(index: int) -> bool:
    with IPRoute() as ipr:
        return any(each["index"] == index for each in ipr.get_links(kind="ifb"))


def _find(step: WriteTree) -> int:
    index = queues.find_index(step.device)
    if index is None:
        raise KernelError(str(step), f"there is no device {step.device}")
    return index


# -- the end --------------------------------------------------------------------------------------------------------


def _drop(step: WriteTree) -> None:
    index = queues.find_index(step.device)
    if index is not None and step.device != INGRESS_DEVICE:
        egress.withdraw(index)
    root = queues.read_root(index) if index else None
    if index is None or root is None or not queues.is_own_root(root):
        return
    if step.device == INGRESS_DEVICE and _is_ifb(index):
        with IPRoute() as ipr:
            ipr.link("del", index=index)
    elif step.put_back is not None:
        _put_back(index, step.put_back)
    else:
        refusal = _run([f"qdisc del dev {step.device} root"])
        if refusal:
            raise KernelError(*refusal)


def _put_back(index: int, saved: SavedRoot) -> None:
    """In one go: the kernel's own qdisc does not stand there in between."""
    attributes = {queues.KIND: f"{saved.kind}\0".encode()}
    if saved.options:
        attributes[queues.OPTIONS] = bytes.fromhex(saved.options)
    message = TcMessage(index, saved.handle << 16, rtnetlink.ROOT, 0, attributes)
    rtnetlink.write_one(rtnetlink.NEW_QDISC, rtnetlink.CREATE | rtnetlink.REPLACE, message)


# -- what is left to do ---------------------------------------------------------------------------------------------


def _render_rest(step: WriteTree) -> Iterator[str]:
    """The lines for what is not as it should be: the kernel makes no child twice, and removes nothing that is gone."""
    index = queues.find_index(step.device)
    if index is None and not (step.classes or step.children):
        return
    found = (queues.read_tree(index) if index else None) or Tree(step.handle)
    held = _find_leaves(step.classes, found)
    rest = replace(
        step,
        root=None,
        classes={name: each._replace(leaf=None) if name in held else each for name, each in step.classes.items()},
        children={name: where for name, where in step.children.items() if found.children.get(name) != where},
        gone=tuple(_expand(step.gone, found.classes)),
    )
    yield from _render(rest)
    yield from (f"qdisc change dev {step.device} parent {format_classid(name)} {leaf}" for name, leaf in held.items())


def _find_leaves(classes: Mapping[int, QueueClass], found: Tree) -> dict[int, str]:
    """The queues that are of the right kind already: an fq_codel can have another limit, but not be told its flows."""
    leaves = {}
    for name, each in classes.items():
        there = found.classes.get(name)
        if each.leaf and there and there.leaf and there.leaf.kind == each.leaf.kind:
            leaves[name] = f"{each.leaf.kind} limit {each.leaf.limit}"
    return leaves


def _expand(gone: Iterable[int], classes: Mapping[int, QueueClass]) -> Iterator[int]:
    """Classes with all that stand below them, in the order in which the kernel lets go of them: from the leaves up."""
    below: dict[int, list[int]] = {}
    for name, each in classes.items():
        below.setdefault(each.parent, []).append(name)
    left = set(classes)

    def leave(name: int) -> Iterator[int]:
        for each in below.get(name, ()):
            yield from leave(each)
        if name in left:
            left.discard(name)
            yield name

    for name in gone:
        yield from leave(name)


def _run(lines: Sequence[str]) -> _Refusal | None:
    """Run them up to the first that is refused."""
    if not lines:
        return None
    strange = next((line for line in lines if not line.isprintable()), None)
    if strange is not None:
        return _Refusal(f"tc {show_line(strange)}", "it has letters that would end the line; rename the device")
    try:
        done = run("tc", "-batch", "-", script="\n".join(lines) + "\n")
    except ToolMissing as error:
        return _Refusal("tc", error.reason)
    if not done.status:
        return None
    failed = _FAILED.search(done.errors)
    words = done.errors[: failed.start() if failed else None].strip().rpartition("\n")[2]
    return _Refusal(f"tc {lines[int(failed[1]) - 1]}" if failed else "tc -batch -", words.removeprefix("Error: "))
