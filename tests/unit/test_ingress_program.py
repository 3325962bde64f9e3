"""The program on the ingress: what it does is told by a revision, for one of before must give way to one of now."""

from __future__ import annotations

from hashlib import sha256
from types import SimpleNamespace
from typing import Any

from netlimit.ingress import REVISION, Ingress, IngressLane
from netlimit.kernel.program import write_program

OWN = ("10.1.0.1", "fd00:1::1")
LANES = tuple(
    lane
    for family in (4, 6)
    for lane in (
        IngressLane(f"to{family}", family, "dst"),
        IngressLane(f"dns{family}", family, "src", "udp", ((53, 53),)),
    )
)
WRITTEN = {
    2: "0ddb93a7449165e1",
    3: "31da11de3f88b5e8",
    4: "fc88b9d71b85c7cf",
    5: "ef43c6437fbda0b4",
    6: "709027bafab4abae",
    7: "b749e788cdfa994b",
    8: "39fb855fb858e06a",
}
"""By revision, what is written for the same lanes. Another program needs another revision."""


def test_another_program_has_another_revision() -> None:
    entries, seen = SimpleNamespace(fd=3), SimpleNamespace(fd=4)
    maps: Any = entries, seen
    ingresses = Ingress(("lan",), OWN, LANES), Ingress(("lan",), OWN, LANES, (4, 6), (9,))
    written = (write_program(each, 7, *maps) for each in ingresses)
    text = b"".join(written)
    assert sha256(text).hexdigest()[:16] == WRITTEN[REVISION]
