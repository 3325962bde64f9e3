"""What strangers name: processes, comments of rules, interfaces and their aliases. Nothing of it ends anything, and
limits hold all the same."""

import ctypes
import json
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from netlimit.conflicts import find_conflicts
from netlimit.kernel.linux import LinuxKernel
from netlimit.kernel.rtnetlink import encode
from netlimit.kernel.survey import look_round
from tests.kernel.worker import RemoteKernel

CUT = "가나다라마".encode()[:14]
NAMES = [b"\xff", CUT, b"\x1b[31mred", b"two\nlines", b"sshd: x@pts/0) R", b"a\xc3", b"(\xff) S 1"]
WILD = (b"+", b"wan+", b"twelve-letter+", b"-tun0", b"!wan", b"a\\b")
"""To iptables these stand for several devices, or for an option, or something else."""
_PR_SET_NAME = 15
_NEWNET, _NEWNS = 0x40000000, 0x20000
_NEWLINK, _IFNAME, _LINKINFO, _INFO_KIND, _IFALIAS = 16, 3, 18, 1, 20
_REQUEST_NEW = 0x1 | 0x4 | 0x200 | 0x400


@contextmanager
def named(name: bytes, namespace: str = "") -> Iterator[int]:
    """A process of nobody that is called like that."""
    script = (
        "import ctypes, os, sys, time; os.setgid(65534); os.setuid(65534); name = bytes.fromhex(sys.argv[1])\n"
        f"ctypes.CDLL(None).prctl({_PR_SET_NAME}, name); print('here', flush=True); time.sleep(60)"
    )
    within = ("ip", "netns", "exec", namespace) if namespace else ()
    process = subprocess.Popen([*within, sys.executable, "-c", script, name.hex()], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"here\n"
        yield process.pid
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("name", NAMES)
def test_no_name_of_a_process_disturbs_a_look_round(linux: RemoteKernel, name: bytes) -> None:
    with named(name, linux.namespace):
        report = linux.survey()
        assert not any("programs" in each for each in report.unknown)
        assert all(each.isprintable() for each in report.programs)
        json.dumps(sorted(report.programs))
        linux.addresses()


def test_comments_in_rules_of_others_are_shown_and_end_nothing(linux: RemoteKernel) -> None:
    comment = b"\xff\x1b[2J\xe2\x80\xae"
    for program in ("iptables-legacy", "ip6tables-legacy"):
        command = [program, "-w", "-t", "mangle", "-A", "OUTPUT", "-m", "comment", "--comment", comment, "-j", "ACCEPT"]
        subprocess.run(["ip", "netns", "exec", linux.namespace, *command], check=True)
    ruleset = b'table inet odd {\n chain c {\n type filter hook input priority 0\n counter comment "\xff\x1b"\n }\n}\n'
    subprocess.run(["ip", "netns", "exec", linux.namespace, "nft", "-f", "-"], input=ruleset, check=True)
    try:
        report = linux.survey()
        assert report.unknown == ()
        assert sum("\\xff\\x1b[2J" in each for each in report.legacy) == 2
        assert "table inet odd" in report.nftables
        assert str(find_conflicts(report)).isprintable()
        assert linux.probe().capabilities["iptables"] is None
        assert linux.structure().chains == {}
    finally:
        linux.run("nft", "delete", "table", "inet", "odd")


def add_link(name: bytes, alias: bytes) -> None:
    """A bridge in this thread's namespace, by netlink: tools refuse such names."""
    info = encode(_INFO_KIND, b"bridge\0")
    attributes = encode(_IFNAME, name + b"\0") + encode(_IFALIAS, alias) + encode(_LINKINFO, info)
    body = struct.pack("=BxHiII", 0, 0, 0, 1, 1) + attributes
    message = struct.pack("=IHHII", 16 + len(body), _NEWLINK, _REQUEST_NEW, 1, 0) + body
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as sock:
        sock.send(message)
        error = struct.unpack_from("=i", sock.recv(4096), 16)[0]
    assert error == 0, os.strerror(-error)


def look_at_odd_links(answer: int) -> None:
    """In a namespace of its own: what every reader makes of such devices."""
    assert ctypes.CDLL(None, use_errno=True).unshare(_NEWNET | _NEWNS) == 0
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "sysfs", "none", "/sys"], check=True)
    for name in (b"\xff\xfe", CUT, b"q\"u'o#te", b"\x1b[7m", *WILD, b"plain0"):
        add_link(name, alias=b"\xff alias \xe2\x80\xae")
    kernel = LinuxKernel()
    topology, queues, survey = kernel.topology(), kernel.queues(), look_round(250, {})
    notes = kernel.probe().notes
    told = [str(each) for each in find_conflicts(look_round(250, {}, read_topology=kernel.topology))]
    said = {
        "devices": sorted(topology.devices),
        "unspeakable": sorted(topology.unspeakable),
        "told": [each for each in told if "wan+" in each],
        "bridges": sorted(survey.bridges),
        "unknown": survey.unknown,
        "plain": all(each.isprintable() for each in (*queues.foreign, *queues.trees, *notes, *kernel.addresses().own)),
        "ingress": dict(kernel.ingress()),
    }
    os.write(answer, json.dumps(said).encode())


def test_odd_names_of_interfaces_are_read_and_given_no_queues(root: None) -> None:
    asked, answer = os.pipe()
    child = os.fork()
    if not child:
        try:
            look_at_odd_links(answer)
        except BaseException as error:
            os.write(answer, repr(error).encode())
        finally:
            os._exit(0)
    os.close(answer)
    with os.fdopen(asked, "rb") as pipe:
        said = json.loads(pipe.read())
    os.waitpid(child, 0)
    assert said["devices"] == ["plain0"]
    odd = ["\\xff\\xfe", "가나다라\\xeb\\xa7", "q\"u'o#te", "\\x1b[7m", *map(bytes.decode, WILD)]
    assert said["unspeakable"] == sorted(odd)
    assert len(said["told"]) == 1
    assert said["bridges"] == sorted([*odd, "plain0"])
    assert (said["unknown"], said["plain"], said["ingress"]) == ([], True, {})
