"""python-iptables gives extensions memory for their notes that is freed before they write into it."""

from __future__ import annotations

import ctypes
import gc
from typing import Any

from netlimit.kernel import libiptc


def find_notes(extension: Any) -> int:
    """Where an extension is to write its notes."""
    return int(extension._module.udata or 0)


def test_the_notes_of_an_extension_outlive_the_reading_of_its_options(root: None) -> None:
    iptc = libiptc._iptc()
    match = iptc.Match(iptc.Rule(), "hashlimit")
    places = [find_notes(match)]
    for _ in range(3):  # as `final_check` does
        match.reset()
        gc.collect()
        others = [(ctypes.c_ubyte * 8)() for _ in range(1000)]  # which would take the place of what was freed
        assert find_notes(match) not in map(ctypes.addressof, others)
        places.append(find_notes(match))
    assert places[0] != 0
    assert len(set(places)) == 1
    (kept,) = (notes for notes in libiptc._NOTES.values() if ctypes.addressof(notes) == places[0])
    assert len(kept) >= 4
