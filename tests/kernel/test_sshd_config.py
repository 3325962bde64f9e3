"""The ports that a configuration of sshd names are those that OpenSSH would take from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from netlimit.kernel.sshd_config import read_ports


@pytest.mark.parametrize(
    ("text", "ports"),
    [
        ("", set()),
        ("#Port 2222\n", set()),
        ("Port 2222\nPort 2200\n", {2200, 2222}),
        ("  pOrT\t2222  # not 22\n", {2222}),
        ("Port=2222\n", {2222}),
        ("Port = 2222\n", {2222}),
        ('Port "2222"\n', {2222}),
        ("Port 0\nPort 70000\nPort ssh\nPort\n", set()),
        ("ListenAddress 0.0.0.0:2222\n", {2222}),
        ("ListenAddress [2001:db8::1]:2222 rdomain red\n", {2222}),
        ("ListenAddress=gw.example:2222\n", {2222}),
        ("ListenAddress 192.0.2.1\nListenAddress 192.0.2.2:2222\n", {22, 2222}),
        ("ListenAddress 2001:db8::1\nListenAddress [fe80::1]\n", {22}),
        ("Port 2222\nListenAddress 192.0.2.1\n", {2222}),
        ("Port 2222\nMatch User a\n Port 2200\nMatch all\nPort 2201\n", {2222}),
        ("Include more.conf\n", {2201}),
        ('include=/dev/null "m*.conf" # both\nPort 2222\n', {2201, 2202, 2222}),
        ("Include matching.conf\nPort 2222\n", {2203, 2222}),
        ("Include itself\nInclude missing\nPort 2222\n", {2222}),
        ("Match all\nInclude more.conf\n", set()),
    ],
)  # fmt: skip
def test_the_ports_of_a_configuration(tmp_path: Path, text: str, ports: set[int]) -> None:
    for name, included in {
        "more.conf": "Port 2201\n", "mine.conf": "Port 2202\n", "itself": "Include itself\n",
        "matching.conf": "Port 2203\nMatch all\nPort 2204\n",
    }.items():  # fmt: skip
        (tmp_path / name).write_text(included)
    (tmp_path / "sshd_config").write_text(text)
    if "m*.conf" in text:
        (tmp_path / "matching.conf").unlink()
    assert read_ports(tmp_path / "sshd_config", tmp_path) == ports


def test_one_that_cannot_be_read_names_none(tmp_path: Path) -> None:
    assert read_ports(tmp_path / "sshd_config", tmp_path) == set()
