"""TLS: with a certificate that is made here, to a client that knows who signed it."""

from __future__ import annotations

import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest

from netlimit.cli.tls import CertificateError, _try_handshake, check_certificate, trust
from netlimit.errors import SettingsError
from netlimit.settings import Settings
from netlimit.store import Store
from tests.api.server import TOKENS, get, serve

NOW = datetime.now(UTC)
NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout")
SUBJECT = "subjectAltName=IP:127.0.0.1"
AUTHORITY = """
[ca]
default_ca = here
[here]
database = {directory}/{name}.index
new_certs_dir = {directory}
rand_serial = yes
default_md = sha256
policy = any
[any]
commonName = supplied
"""


def make_certificate(directory: Path, name: str = "api") -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that signs itself, for a month, and its key."""
    certificate, key = directory / f"{name}.crt", directory / f"{name}.key"
    run("req", "-x509", *NEW_KEY, key, "-subj", f"/CN={name}", "-addext", SUBJECT, "-days", "30", "-out", certificate)
    return certificate, key


def make_dated(directory: Path, name: str, begins: str, ends: str) -> tuple[Path, Path]:
    """The same from one time to another, such as 20300131000000Z."""
    certificate, key, request = directory / f"{name}.crt", directory / f"{name}.key", directory / f"{name}.csr"
    authority = directory / f"{name}.conf"
    (directory / f"{name}.index").touch()
    authority.write_text(AUTHORITY.format(directory=directory, name=name))
    run("req", "-new", *NEW_KEY, key, "-subj", f"/CN={name}", "-out", request)
    dates = ("-startdate", begins, "-enddate", ends)
    run("ca", "-selfsign", "-batch", "-config", authority, "-keyfile", key, "-in", request, *dates, "-out", certificate)
    return certificate, key


def run(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_certificate(tmp_path_factory.mktemp("tls"))


def settings_with(certificate: Path | None, key: Path | None, **others: object) -> Settings:
    return Settings(tls_cert=certificate, tls_key=key, **others)  # type: ignore[arg-type]


def refuse(certificate: Path | None, key: Path | None) -> str:
    with pytest.raises(SettingsError) as refused:
        check_certificate(settings_with(certificate, key), NOW)
    return str(refused.value)


def test_the_api_answers_by_tls_and_who_signed_it_counts(
    settings: Settings, store: Store, made: tuple[Path, Path]
) -> None:
    secured = settings.model_copy(update={"tls_cert": made[0], "tls_key": made[1]})
    headers = {"Authorization": f"Bearer {TOKENS['admin']}"}
    with serve(secured, store) as url:
        assert url.startswith("https://")
        known = trust(settings.model_copy(update={"url": url, "ca_file": made[0]}))
        answer = get(f"{url}/api/v1/rules", headers=headers, verify=known)
        assert answer.status_code == 200
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            get(f"{url}/api/v1/rules", verify=trust(settings.model_copy(update={"url": url})))
        with pytest.raises(httpx.HTTPError):
            get(f"{url.replace('https', 'http')}/healthz")


def test_a_certificate_that_will_do_is_silent(made: tuple[Path, Path]) -> None:
    assert check_certificate(settings_with(*made), NOW) is None
    assert check_certificate(settings_with(*made, listen="0.0.0.0:8750"), NOW) is None


def test_one_that_ends_soon_is_told_of(made: tuple[Path, Path]) -> None:
    said = check_certificate(settings_with(*made), NOW + timedelta(days=20))
    assert said is not None
    assert "renew it" in said


def test_tokens_in_the_clear_are_told_of() -> None:
    assert check_certificate(Settings(), NOW) is None
    said = check_certificate(Settings(listen="0.0.0.0:8750"), NOW)  # type: ignore[arg-type]
    assert said is not None
    assert "0.0.0.0:8750 without TLS" in said


def test_what_will_not_do_is_refused_in_words(made: tuple[Path, Path], tmp_path: Path) -> None:
    certificate, key = made
    other_certificate, other_key = make_certificate(tmp_path, "other")
    nonsense = tmp_path / "nonsense"
    nonsense.write_text("nonsense")
    locked = tmp_path / "locked.key"
    run("ec", "-aes256", "-passout", "pass:x", "-in", key, "-out", locked)
    assert "NETLIMIT_TLS_KEY is not" in refuse(certificate, None)
    assert "NETLIMIT_TLS_CERT is not" in refuse(None, key)
    assert "cannot be read: No such file" in refuse(tmp_path / "none", key)
    assert "cannot be read: Is a directory" in refuse(certificate, tmp_path)
    assert f"The key {other_key} is not that of the certificate {certificate}." in refuse(certificate, other_key)
    assert "is not that of" in refuse(other_certificate, key)
    assert "no certificate and key in PEM" in refuse(nonsense, key)
    assert "in PEM" in refuse(certificate, nonsense)
    assert "encrypted" in refuse(certificate, locked)
    for setting in (nonsense, tmp_path / "none"):
        with pytest.raises(SettingsError):
            trust(Settings(url="https://127.0.0.1", ca_file=setting))


def test_one_that_is_gone_by_the_time_it_is_tried_is_refused_in_words(made: tuple[Path, Path], tmp_path: Path) -> None:
    for pair in ((made[0], tmp_path / "none"), (tmp_path / "none", made[1])):
        with pytest.raises(CertificateError, match="cannot be read: No such file"):
            _try_handshake(*pair)


def test_one_that_has_ended_or_not_begun_is_refused(tmp_path: Path) -> None:
    ended = make_dated(tmp_path, "ended", "20200101000000Z", "20200201000000Z")
    later = make_dated(tmp_path, "later", "20990101000000Z", "20990201000000Z")
    assert "certificate has expired" in refuse(*ended)
    assert "not yet valid" in refuse(*later)
