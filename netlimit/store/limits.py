"""The limiter's rules: a document for each domain, kept as it was given."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, delete, func, insert, select, update

from netlimit.records import Actor
from netlimit.store import audit, clock
from netlimit.store.errors import ABSENT, DocumentChanged, NoDocument
from netlimit.store.tables import clock as clock_table
from netlimit.store.tables import limit_documents as documents

_LONGEST_NOTE = 8 * 2**10
"""Bytes, as JSON, of a document that the audit quotes; of longer ones it keeps the digest."""


@dataclass(frozen=True, slots=True)
class LimitHead:
    """What is known of a document but for its text: `revision` is that of all documents when it came, `actor` who gave
    it, `letters` how long it is."""

    domain: str
    content_type: str
    revision: int
    created_at: datetime
    updated_at: datetime
    actor: str
    letters: int


@dataclass(frozen=True, slots=True)
class LimitDocument:
    """The document of a domain; its text is YAML or JSON, as `content_type` says."""

    domain: str
    document: str
    content_type: str
    revision: int
    created_at: datetime
    updated_at: datetime
    actor: str

    def describe(self) -> dict[str, Any]:
        """What the audit says of one that comes."""
        if len(json.dumps(self.document)) > _LONGEST_NOTE:
            return self.identify()
        return {"domain": self.domain, "content_type": self.content_type, "document": self.document}

    def identify(self) -> dict[str, Any]:
        """What it says of one that goes: of a short one an earlier line has the text, as long as that is kept."""
        digest = hashlib.sha256(self.document.encode()).hexdigest()
        said = {"domain": self.domain, "content_type": self.content_type}
        return said | {"letters": len(self.document), "sha256": digest}


def revision(connection: Connection) -> int:
    """The revision of the last change of documents; 0 when there was none yet."""
    number: int = connection.execute(select(clock_table.c.limits)).scalar_one()
    return number


def identity(connection: Connection) -> tuple[str | None, int, int]:
    """What no other state of the documents has, also where another server has given the same revision."""
    row = connection.execute(select(clock_table.c.identity, clock_table.c.limits, clock_table.c.limits_stamp)).one()
    return row.identity, row.limits, row.limits_stamp


def find(connection: Connection, domain: str) -> LimitDocument | None:
    """The document of a domain."""
    row = connection.execute(select(documents).where(documents.c.domain == domain)).mappings().one_or_none()
    return LimitDocument(**row) if row else None


def every(connection: Connection) -> list[LimitDocument]:
    """All documents, by domain."""
    wanted = select(documents).order_by(documents.c.domain)
    return [LimitDocument(**row) for row in connection.execute(wanted).mappings()]


def heads(connection: Connection) -> list[LimitHead]:
    """All documents without their texts, by domain."""
    columns = [column for column in documents.c if column.name != "document"]
    wanted = select(*columns, func.length(documents.c.document).label("letters")).order_by(documents.c.domain)
    return [LimitHead(**row) for row in connection.execute(wanted).mappings()]


def put(
    connection: Connection,
    domain: str,
    text: str,
    content_type: str,
    actor: Actor,
    now: datetime,
    expected_revision: int | None = None,
) -> tuple[LimitDocument, bool]:
    """Keep a document in the place of the domain's, if it has one; whether it had none. The same text again changes
    nothing, not even the revision. Raises DocumentChanged unless the former is at `expected_revision`, if given,
    or there is none, for ABSENT."""
    clock.lock(connection)
    before = find(connection, domain)
    _check(domain, before, expected_revision)
    if before and (before.document, before.content_type) == (text, content_type):
        return before, False
    number = _take_revision(connection)
    after = LimitDocument(domain, text, content_type, number, before.created_at if before else now, now, actor.name)
    _write(connection, after)
    told = before.identify() if before else None
    audit.note_other(connection, "put-limits", actor, now, before=told, after=after.describe())
    return after, before is None


def remove(
    connection: Connection, domain: str, actor: Actor, now: datetime, expected_revision: int | None = None
) -> None:
    """Forget the document of a domain. Raises NoDocument, and DocumentChanged as `put` does."""
    clock.lock(connection)
    before = find(connection, domain)
    if before is None:
        raise NoDocument(domain)
    _check(domain, before, expected_revision)
    _take_revision(connection)
    connection.execute(delete(documents).where(documents.c.domain == domain))
    audit.note_other(connection, "remove-limits", actor, now, before=before.identify())


def find_lost(connection: Connection, backup: Connection) -> list[LimitDocument]:
    """The documents whose texts `bring_back` takes away, by domain."""
    then = {each.domain: (each.document, each.content_type) for each in every(backup)}
    return [each for each in every(connection) if then.get(each.domain) != (each.document, each.content_type)]


def bring_back(connection: Connection, backup: Connection, actor: Actor, now: datetime) -> None:
    """Let the documents be those of a backup. Whoever knows a revision, of here or of there, reads them all anew."""
    newest = max(revision(connection), revision(backup)) + 1
    connection.execute(update(clock_table).values(limits=newest, limits_stamp=clock.make_stamp()))
    present, then = ({each.domain: each for each in every(source)} for source in (connection, backup))
    for domain in sorted(present.keys() | then.keys()):
        before, after = present.get(domain), then.get(domain)
        if before == after:
            continue
        if after is None:
            connection.execute(delete(documents).where(documents.c.domain == domain))
        else:
            _write(connection, LimitDocument(**asdict(after) | {"revision": newest}))
        told = before.identify() if before else None, after.describe() if after else None
        audit.note_other(connection, "put-limits" if after else "remove-limits", actor, now, *told)


def _write(connection: Connection, document: LimitDocument) -> None:
    connection.execute(delete(documents).where(documents.c.domain == document.domain))
    connection.execute(insert(documents), [asdict(document)])


def _take_revision(connection: Connection) -> int:
    values = {"limits": clock_table.c.limits + 1, "limits_stamp": clock.make_stamp()}
    number: int = connection.execute(update(clock_table).values(values).returning(clock_table.c.limits)).scalar_one()
    return number


def _check(domain: str, before: LimitDocument | None, expected: int | None) -> None:
    if expected is not None and (before.revision if before else ABSENT) != expected:
        raise DocumentChanged(domain, expected, before.revision if before else None)
