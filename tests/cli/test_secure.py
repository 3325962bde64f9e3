"""A gateway as it should be run: by TLS, with a key that only root may read; and no secret is anywhere to be seen."""

from __future__ import annotations

import os
import pwd
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from tests.api.test_tls import make_certificate, make_dated, run
from tests.cli.running import Netlimit, settings_in, until

TOKEN = "a-token-of-my-own-7f3a"


def test_tls_and_secrets(directory: Path) -> None:
    certificate, key = make_certificate(directory)
    key.chmod(0o600)
    settings = settings_in(
        directory,
        NETLIMIT_BOOTSTRAP_TOKEN=TOKEN,
        NETLIMIT_TOKEN=TOKEN,
        NETLIMIT_TLS_CERT=str(certificate),
        NETLIMIT_TLS_KEY=str(key),
        NETLIMIT_CA_FILE=str(certificate),
        NETLIMIT_LOG_LEVEL="debug",
    )
    settings["NETLIMIT_URL"] = settings["NETLIMIT_URL"].replace("http:", "https:")
    place = Netlimit(settings, cold=True)
    server = place.serve()
    if os.geteuid() == 0:
        # The API is nobody's, and has the key all the same.
        assert sorted(server.children.values()) == [0, 0, pwd.getpwnam("nobody").pw_uid]
    place.do("rule", "add", "10.1.2.3", "--rate", "200 packets/s")
    made = place.do("token", "create", "ci", "--role", "viewer").strip()
    until(lambda: place.run("rule", "list", NETLIMIT_TOKEN=made).returncode == 0)
    assert "No API answers" in place.refuse("rule", "list", NETLIMIT_CA_FILE="")
    bad = {"Authorization": f"Bearer {TOKEN}-wrong"}
    address = f"{settings['NETLIMIT_URL']}/api/v1/rules?token={TOKEN}"
    httpx.get(address, headers=bad, verify=False, trust_env=False, timeout=60)  # noqa: S501
    commands = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in (server.process.pid, *server.children)]
    server.end()
    said = server.said()
    assert "Traceback" not in said
    for secret in (TOKEN, made, key.read_text().splitlines()[1]):
        assert secret not in said
        assert not any(secret.encode() in command for command in commands)
    files = subprocess.run(["grep", "-rlF", "-e", TOKEN, "-e", made, str(directory)], capture_output=True, text=True)
    assert files.stdout == ""  # the database has their hashes, and no more


def test_what_will_not_do_for_tls_is_told_at_the_start(netlimit: Netlimit, directory: Path) -> None:
    certificate, _ = make_certificate(directory)
    assert "NETLIMIT_TLS_KEY is not" in netlimit.refuse(
        "serve", "--api-user", "root", NETLIMIT_TLS_CERT=str(certificate)
    )


def secure(netlimit: Netlimit, certificate: Path, key: Path, authority: Path) -> Netlimit:
    """The same place, by TLS."""
    environment = {
        **netlimit.environment,
        "NETLIMIT_TLS_CERT": str(certificate),
        "NETLIMIT_TLS_KEY": str(key),
        "NETLIMIT_CA_FILE": str(authority),
        "NETLIMIT_URL": netlimit.environment["NETLIMIT_URL"].replace("http:", "https:"),
    }
    return replace(netlimit, environment=environment)


@pytest.mark.parametrize(
    ("begins", "ends", "why"),
    [
        ("20200101000000Z", "20200201000000Z", "certificate has expired"),
        ("21000101000000Z", "21000201000000Z", "certificate is not yet valid"),
    ],
)
def test_a_certificate_that_has_ended_or_not_begun_keeps_nobody_but_the_api_from_running(
    netlimit: Netlimit, directory: Path, begins: str, ends: str, why: str
) -> None:
    """As after a boot with a clock that is wrong. Rules are kept meanwhile; and once there is another, the API runs."""
    old, new = make_dated(directory, "old", begins, ends), make_certificate(directory, "new")
    place = secure(netlimit, *old, authority=new[0])
    server = place.start("serve", "--api-user", "nobody")
    until(lambda: server.ended or len(server.children) == 2, server.said)
    until(lambda: server.ended or why in server.said(), server.said)
    assert not server.ended, server.said()
    for path, by in zip(old, new, strict=True):
        by.replace(path)
    until(lambda: server.ended or not place.run("status", NETLIMIT_CA_FILE=str(old[0])).returncode, server.said)
    assert not server.ended, server.said()
    assert len(server.children) == 3
    assert server.end() == 0
    assert server.said().count(why) == 1


def mismatch(directory: Path, key: Path) -> None:
    key.write_bytes(make_certificate(directory, "other")[1].read_bytes())


def encrypt(directory: Path, key: Path) -> None:
    run("ec", "-aes256", "-passout", "pass:x", "-in", key, "-out", directory / "locked.key")
    (directory / "locked.key").replace(key)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda directory: mismatch(directory, directory / "api.key"), "is not that of the certificate"),
        (lambda directory: (directory / "api.key").unlink(), "api.key cannot be read: No such file"),
        (lambda directory: (directory / "api.crt").unlink(), "api.crt cannot be read: No such file"),
        (lambda directory: (directory / "api.key").write_bytes(b""), "are no certificate and key in PEM"),
        (lambda directory: (directory / "api.crt").write_bytes(b""), "are no certificate and key in PEM"),
        (lambda directory: encrypt(directory, directory / "api.key"), "The key is encrypted"),
    ],
    ids=["another key", "no key", "no certificate", "empty key", "empty certificate", "encrypted key"],
)
def test_a_certificate_and_key_that_cannot_be_used_keep_nobody_but_the_api_from_running(
    netlimit: Netlimit, directory: Path, spoil: Callable[[Path], object], why: str
) -> None:
    """As where a renewal has written one of the two. Once it has written both, the API runs."""
    pair = make_certificate(directory)
    sound = [path.read_bytes() for path in pair]
    spoil(directory)
    place = secure(netlimit, *pair, authority=pair[0])
    server = place.start("serve", "--api-user", "nobody")
    until(lambda: server.ended or len(server.children) == 2, server.said)
    until(lambda: server.ended or why in server.said(), server.said)
    assert not server.ended, server.said()
    for path, content in zip(pair, sound, strict=True):
        path.write_bytes(content)
    until(lambda: server.ended or not place.run("status").returncode, server.said)
    assert not server.ended, server.said()
    assert len(server.children) == 3
    assert server.end() == 0
    assert server.said().count(why) == 1
    spoil(directory)
    assert why in place.refuse("api", "--user", "nobody")  # it does nothing else


def test_listening_to_all_without_tls_is_told_in_log_and_status(directory: Path) -> None:
    settings = settings_in(directory)
    port = settings["NETLIMIT_LISTEN"].partition(":")[2]
    place = Netlimit({**settings, "NETLIMIT_LISTEN": f"0.0.0.0:{port}"})
    server = place.serve()
    said = f"The API listens at 0.0.0.0:{port} without TLS"
    assert any(said in note for note in place.ask("status")["notes"])
    server.end()
    assert said in server.said()
