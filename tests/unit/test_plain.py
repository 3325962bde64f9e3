"""Nothing that is read from a host is text until it has been decoded without failing."""

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netlimit import plain

ROOT = Path(__file__).parents[2]
READERS = {"netlimit/plain.py", "netlimit/kernel/tools.py"}
"""Where bytes become text."""
TRUSTED = {
    "netlimit/l7/redis/script.py": "our own scripts, beside the code",
    "netlimit/settings.py": "the settings: what is no UTF-8 is refused with a sentence",
    "netlimit/cli/client.py": "a file with a token",
    "netlimit/l7/pressure.py": "numbers of the kernel",
    "netlimit/kernel/marks.py": "netlimit itself, in a process of its own",
}
NAMES = {"if_nameindex", "if_indextoname", "gethostname", "getfqdn", "getlogin"}


def find_reads(source: str) -> Iterator[tuple[int, str]]:
    """What may fail over bytes: text mode of tools and files, and names as Python reads them."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        owner = ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else ""
        words = {each.arg for each in node.keywords}
        if owner == "subprocess":
            yield node.lineno, "a tool that is not run by netlimit.kernel.tools"
        if words & {"text", "universal_newlines"} and called in ("run", "Popen", "check_output"):
            yield node.lineno, "text=True"
        if called == "read_text" and owner not in ("", "client"):
            yield node.lineno, "Path.read_text()"
        if called in NAMES and "name_of" not in source:
            yield node.lineno, f"{called}() as it is"


def test_nothing_undecoded_is_read() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {what}"
        for part in ("netlimit", "api")
        for path in sorted((ROOT / part).rglob("*.py"))
        if str(path.relative_to(ROOT)) not in READERS | TRUSTED.keys()
        for line, what in find_reads(path.read_text("utf-8"))
    ]
    assert found == []


def test_the_kernel_modules_decode_nothing_by_themselves() -> None:
    for path in sorted((ROOT / "netlimit/kernel").glob("*.py")):
        calls = [node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Call)]
        named = [node for node in calls if isinstance(node.func, ast.Attribute) and node.func.attr == "decode"]
        wild = [node.lineno for node in named if ast.unparse(node.func).startswith(("rtnetlink.",)) is False]
        assert wild == [], path


@given(st.binary(max_size=200))
def test_any_bytes_are_text_that_terminals_and_databases_bear(raw: bytes) -> None:
    for text in (plain.decode(raw), plain.decode_name(raw)):
        assert all(letter.isprintable() or letter in "\n\t" for letter in text)
        assert json.loads(json.dumps(text)) == text
        assert text.encode("utf-8").decode("utf-8") == text
    assert len(plain.decode_name(raw).splitlines()) <= 1


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"\xff", "\\xff"),
        ("가나다라마".encode()[:14], "가나다라\\xeb\\xa7"),
        ("ключ".encode(), "ключ"),
        (b"\x1b]0;owned\x07", "\\x1b]0;owned\\x07"),
        ("a\u202egnp.exe".encode(), "a\\u202egnp.exe"),
        (b"one\ntwo\tthree", "one\\ntwo\\tthree"),
        (b"kept\0cut", "kept"),
        (b"\xed\xa0\x80", "\\xed\\xa0\\x80"),
        ("\u2028\x85".encode(), "\\u2028\\x85"),
    ],
)
def test_a_name_is_shown_as_one_line(raw: bytes, text: str) -> None:
    assert plain.decode_name(raw) == text


def test_a_name_that_python_has_read_is_shown_too() -> None:
    assert plain.name_of("/sys/class/net/\udcff0") == "\\xff0"


@given(st.text() | st.text(alphabet=st.characters(codec=None, categories=("Cc", "Cf", "Cs", "Zs", "Zl", "Zp"))))
def test_any_text_can_be_shown(text: str) -> None:
    shown = plain.show_text(text)
    assert all(letter.isprintable() or letter in "\n\t" for letter in shown)
    assert plain.show_text(shown) == shown


_LETTERS = st.text(alphabet=st.characters(codec=None))


@given(
    st.recursive(_LETTERS | st.none() | st.integers(), lambda inner: st.lists(inner) | st.dictionaries(_LETTERS, inner))
)
def test_json_that_is_shown_is_the_same_document(document: object) -> None:
    for indent in (None, 2):
        shown = plain.show_text(json.dumps(document, ensure_ascii=False, indent=indent))
        assert json.loads(shown) == json.loads(json.dumps(document))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("one\r\ntwo\tthree\n", "one\ntwo\tthree\n"),
        ("\x1b[31mred\x9b", "\\u001b[31mred\\u009b"),
        ("a\rb\x7f\u202e", "a\\u000db\\u007f\\u202e"),
        ("\ud800\U000e0041", "\\ud800\\udb40\\udc41"),
        ("München … 猫", "München … 猫"),
    ],
)
def test_a_text_is_shown_in_its_lines(text: str, shown: str) -> None:
    assert plain.show_text(text) == shown
