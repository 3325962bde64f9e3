"""TLS, at both ends: whether the API's certificate will do, and whom the command line trusts."""

from __future__ import annotations

import errno
import os
import ssl
from datetime import UTC, datetime
from pathlib import Path

from netlimit.custody import opened
from netlimit.errors import SettingsError
from netlimit.settings import PREFIX, Settings

SOON_DAYS = 14
"""So many days before a certificate ends, the log begins to say so."""
_STEPS = 10


class CertificateError(SettingsError):
    """A certificate and key that cannot be used now: files that can be, or the right time, may come."""


def check_tls(settings: Settings) -> None:
    """Raise SettingsError where one of certificate and key is set, and the other is not. Opens no file."""
    certificate, key = settings.tls_cert, settings.tls_key
    if (certificate is None) != (key is None):
        missing, given = ("TLS_CERT", "TLS_KEY") if certificate is None else ("TLS_KEY", "TLS_CERT")
        raise SettingsError(PREFIX + missing, f"{PREFIX}{given} is set, but {PREFIX}{missing} is not; TLS takes both.")


def check_certificate(settings: Settings, now: datetime) -> str | None:
    """Try the API's certificate and key, with a handshake that never leaves this process.

    Returns what an operator should be told, if there is something. Raises SettingsError where one of the two is not
    set, and CertificateError where they cannot be used, which may pass.
    """
    check_tls(settings)
    certificate, key = settings.tls_cert, settings.tls_key
    if certificate is None or key is None:
        if not settings.is_open:
            return None
        return (
            f"The API listens at {settings.listen} without TLS: whoever is on the way can read the tokens. "
            f"Set {PREFIX}TLS_CERT and {PREFIX}TLS_KEY."
        )
    for setting, path in (("TLS_CERT", certificate), ("TLS_KEY", key)):
        _check_readable(setting, path, CertificateError)
    ends = _try_handshake(certificate, key)
    if (ends - now).days < SOON_DAYS:
        return f"The API's certificate {certificate} ends at {ends:%Y-%m-%d %H:%M} UTC; renew it and restart the API."
    return None


def trust(settings: Settings) -> ssl.SSLContext:
    """Whom the command line trusts to be the API: whose certificate `ca_file` has signed, or one that the system
    trusts. Raises SettingsError."""
    if not settings.url.startswith("https:"):
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # not asked; to fill one takes a while
    if settings.ca_file is not None:
        _check_readable("CA_FILE", settings.ca_file, SettingsError)
    try:
        return ssl.create_default_context(cafile=settings.ca_file)
    except ssl.SSLError:
        raise SettingsError(f"{PREFIX}CA_FILE", f"{settings.ca_file} holds no certificate in PEM.") from None


def _check_readable(setting: str, path: Path, kind: type[SettingsError]) -> None:
    """A plain file, or a link to one: whatever else has its name may keep who opens it waiting for ever."""
    try:
        with opened(path.resolve()) as descriptor, open(descriptor, "rb", closefd=False) as file:
            file.read()
    except OSError as error:
        reason = os.strerror(errno.EISDIR) if path.is_dir() else error.strerror
        raise kind(PREFIX + setting, f"{path} cannot be read: {reason}.") from None


def _try_handshake(certificate: Path, key: Path) -> datetime:
    """Let a server with this certificate meet a client that trusts it; when the certificate ends. Raises
    CertificateError."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # the certificate itself will do as an authority
    try:
        client.load_verify_locations(certificate)
        server.load_cert_chain(certificate, key, password=_refuse_password)
    except ssl.SSLError as error:
        if "MISMATCH" in (error.reason or ""):
            raise _wrong("TLS_KEY", f"The key {key} is not that of the certificate {certificate}.") from None
        raise _wrong("TLS_CERT", f"{certificate} and {key} are no certificate and key in PEM.") from None
    except OSError as error:  # a renewal has moved one of them since it was looked at
        raise _wrong("TLS_CERT", f"{certificate} or {key} cannot be read: {error.strerror}.") from None
    try:
        ends = _shake_hands(server, client)
    except ssl.SSLCertVerificationError as error:
        raise _wrong("TLS_CERT", f"The certificate {certificate} cannot be used: {error.verify_message}.") from None
    except ssl.SSLError as error:
        raise _wrong("TLS_CERT", f"The certificate {certificate} cannot be used: {error.reason}.") from None
    return ends


def _shake_hands(server: ssl.SSLContext, client: ssl.SSLContext) -> datetime:
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    asking = client.wrap_bio(back, there)
    answering = server.wrap_bio(there, back, server_side=True)
    for _ in range(_STEPS):
        for end in (asking, answering):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
        if asking.version() and asking.getpeercert():
            break
    found = asking.getpeercert() or {}
    return datetime.fromtimestamp(ssl.cert_time_to_seconds(str(found["notAfter"])), UTC)


def _refuse_password() -> str:
    raise _wrong("TLS_KEY", "The key is encrypted, and there is nobody to ask for its password; decrypt the file.")


def _wrong(setting: str, sentence: str) -> CertificateError:
    return CertificateError(PREFIX + setting, sentence)
