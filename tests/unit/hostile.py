"""Inputs that somebody has damaged, on purpose or not."""

from __future__ import annotations

from hypothesis import strategies as st

SNIPPETS = (
    "", " ", "\0", "\n", "\r\n", "\t", "'", '"', "\\", "/", "//", "/0", "/33", "/129", ":", "::", ",", ";", "-", "--",
    "+", ".", "..", "%", "%00", "%eth0", "*", "=", "{", "}", "[", "]", "$(id)", "`id`", "' OR 1=1 --", "<script>",
    "../../etc", "-1", "0", "00", "1e999", "NaN", "Infinity", "null", "true", "0x10", "1_000", "9" * 25, "9" * 400,
    "\u0663", "\u00bd", "\u00b2", "\uff11", "\u202e", "\u200b", "\ufeff", "\ud800", "🦊", "é", "ﬀ", "İ",
    "\x1b[31m", "\x7f",
    "packets/s", "bit/s", "host",
)  # fmt: skip


def damaged(*good: str) -> st.SearchStrategy[str]:
    """One of these texts with something put into it, cut out of it, or put in another place; or any text at all."""
    junk = st.sampled_from(SNIPPETS) | st.text(max_size=4)
    cuts = st.builds(_damage, st.sampled_from(good), st.integers(0, 40), st.integers(0, 6), junk)
    twice = st.builds(_damage, cuts, st.integers(0, 40), st.integers(0, 6), junk)
    return cuts | twice | st.text(max_size=12) | st.sampled_from(SNIPPETS)


def _damage(text: str, at: int, cut: int, junk: str) -> str:
    at %= len(text) + 1
    return text[:at] + junk + text[at + cut :]


VALUES: st.SearchStrategy[object] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([2**31, 2**63, -(2**63) - 1, 10**30])
    | st.floats()
    | damaged("10.1.2.3", "200 packets/s"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)
"""Whatever JSON can say, and a little more."""
