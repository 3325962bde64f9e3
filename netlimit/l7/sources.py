"""Where the limiter's rules come from: files and the database, followed as they change."""

from __future__ import annotations

import hashlib
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Event, Lock, Thread
from time import monotonic
from typing import Protocol

from netlimit.errors import LimitError, StoreError
from netlimit.l7.document import Document, parse_document
from netlimit.l7.files import Files
from netlimit.l7.losses import Losses
from netlimit.l7.rules import RuleSet
from netlimit.origins import Origin, Trace, has_older_limits, has_other_limits

SECONDS = 1.0
"""So often it is looked whether something has changed; a database that is watched tells at once."""
_BREATH = 0.05
"""Seconds between two looks at least, however often the database is written."""
_MOST_WARNINGS = 10
"""So many of a document are logged."""
log = logging.getLogger(__name__)


class KeptDocument(Protocol):
    """A document of the database: its text is JSON if its `content_type` says so, or else YAML."""

    @property
    def domain(self) -> str: ...  # noqa: D102

    @property
    def revision(self) -> int: ...  # noqa: D102

    @property
    def document(self) -> str: ...  # noqa: D102

    @property
    def content_type(self) -> str: ...  # noqa: D102


class Database(Protocol):
    """What keeps documents besides files. All raise StoreError while it cannot be asked."""

    def origin(self) -> Origin:
        """Which database it is."""
        ...

    def look_back(self, known: Trace | None) -> tuple[Trace, bool]:
        """What was changed last, and whether it has lost what is known to be changed last."""
        ...

    def limits_identity(self) -> object:
        """Another one whenever something has changed, also when another server has taken the place of the one that was
        asked before."""
        ...

    def limits(self) -> tuple[int, Sequence[KeptDocument]]:
        """The revision, and all documents."""
        ...


class Rows:
    """The documents of a database, by domain: `good` are the last that could be read, `troubles` what is wrong, and
    `losses` what it had and has no more. Those of another database, or of an older file, are read by who begins anew
    only: it may be in the place of the first by mistake."""

    def __init__(self, database: Database, is_absent: Callable[[], bool]) -> None:
        self.good: dict[str, Document] = {}
        self.troubles: dict[str, str] = {}
        self.losses = Losses()
        self._database = database
        self._is_absent = is_absent
        self._identity: object = None
        self._origin: Origin | None = None
        self._trace: Trace | None = None
        self._read: dict[str, bytes] = {}

    def refresh(self) -> None:
        """Read what has changed. While the database does not answer, all stays as it was."""
        try:
            identity = self._database.limits_identity()
            if identity != self._identity:
                origin = self._find_origin()
                trace, is_lost = self._database.look_back(self._trace)
                _, documents = self._database.limits()
                kept = {each.domain: each for each in documents}
                digests = {domain: _digest(each) for domain, each in kept.items()}
                if is_lost and self._origin is not None:
                    newest = self._origin.limits
                    old = [domain for domain, each in kept.items() if each.revision <= newest]
                    self.losses.note(self._read, digests, old, self.good)
                self.losses.heed(digests)
                self._take(kept, digests)
                self._origin, self._trace = origin, trace
                self._identity = identity  # asked first: what has changed since is read the next time
            self.troubles.pop("", None)
        except StoreError as error:
            if not self._is_absent():
                self.troubles[""] = str(error)

    def _find_origin(self) -> Origin:
        """Which database it is. Raises StoreError where it is another than the one whose documents are in force, or
        an older file of it."""
        origin, known = self._database.origin(), self._origin
        if known is None or not self.good:
            return origin
        if has_other_limits(known.identity, origin):
            raise StoreError(
                "This is another database than the one whose limits are in force: they stay so. Put that one back, or "
                "restore a backup of it; a limiter that is started anew goes by the one that is there."
            )
        if has_older_limits(known, origin) and not origin.is_server:
            raise StoreError(
                f"This database has an older state (revision {origin.limits}) of the limits than the one that is in "
                f"force (revision {known.limits}): that stays so. Put the newer file back, or restore a backup of it; "
                "a limiter that is started anew goes by the one that is there."
            )
        return origin

    def _take(self, kept: dict[str, KeptDocument], digests: dict[str, bytes]) -> None:
        for known in (self.good, self.troubles):
            for gone in known.keys() - kept.keys():
                del known[gone]
        for domain, each in kept.items():
            if self._read.get(domain) == digests[domain]:
                continue
            try:
                self.good[domain] = parse_document(each.document, each.content_type == "application/json")
                self.troubles.pop(domain, None)
            except LimitError as error:  # an older netlimit took it, or a newer one
                self.troubles[domain] = f"The limits of the domain {domain!r} in the database: {error}"
        self._read = digests


def _digest(kept: KeptDocument) -> bytes:
    """Of what is said. The number of a revision says nothing: another server may have given it to another text."""
    return hashlib.sha256(f"{kept.content_type}\n{kept.document}".encode("utf-8", "surrogatepass")).digest()


def _tell_warnings(document: Document) -> None:
    """Log what is understood in a document, and hardly as it was meant."""
    for place in document.warnings[:_MOST_WARNINGS]:
        log.warning("The limits of the domain %r: %s", document.domain, place)
    if more := len(document.warnings[_MOST_WARNINGS:]):
        log.warning(
            "The limits of the domain %r have %d more such places; `netlimit limits check` names them.",
            document.domain,
            more,
        )


class Sources:
    """The rules of a file or folder, and of a database; either may be missing.

    What is wrong takes no rules away: a bad file leaves those that it had. Where two files have the same domain, the
    domain keeps the rules that it had, or none. Where a file and the database have it, the file counts.

    `refresh` is for one thread, before `run`; `rules` and `troubles` may be read by any.
    """

    def __init__(
        self,
        path: Path | None = None,
        database: Database | None = None,
        clock: Callable[[], float] = monotonic,
        is_absent: Callable[[], bool] = lambda: False,
    ) -> None:
        """`is_absent` says whether there is no database, and none is expected: files count alone for now."""
        self.rules = RuleSet({})
        """The rules of the moment. Another RuleSet takes its place when they change."""
        self.troubles: tuple[str, ...] = ()
        """What is wrong, as sentences; nothing while all is well."""
        self._files = Files(path, clock) if path is not None else None
        self._rows = Rows(database, is_absent) if database is not None else None
        self._used: dict[str, Document] = {}
        self._twice: list[str] = []
        self._told: tuple[str, ...] = ()
        self._lock = Lock()

    def start(self) -> None:
        """Read everything for the first time. Raises LimitError where something that is to be in force cannot be: who
        began without it would let pass what it limits."""
        self.refresh()
        lacking = [*self._twice]
        if self._rows is not None:
            troubles = self._rows.troubles.items()
            lacking += [trouble for domain, trouble in troubles if domain not in self._used]
        if self._files is not None:
            lacking += self._files.troubles.values()
        if lacking:
            raise LimitError("limits", " ".join(lacking))

    def follow(self, ending: Event | None = None) -> None:
        """Start, and read what changes until the end, or that of the process, in a thread. Raises as `start`."""
        self.start()
        Thread(target=self.run, args=(ending or Event(),), name="limits", daemon=True).start()

    def refresh(self) -> None:
        """Read what has changed, and put it in force. What is wrong is logged when it begins, and when it ends."""
        for source in (self._rows, self._files):
            if source is not None:
                source.refresh()
        self._put_in_force()

    def _put_in_force(self) -> None:
        with self._lock:
            self._combine()

    def _combine(self) -> None:
        troubles: list[str] = []
        self._twice = []
        used: dict[str, Document] = {}
        if self._rows is not None:
            used |= self._rows.good
            troubles += self._rows.troubles.values()
        if self._files is not None:
            used |= self._choose(self._files.good, used, troubles)
            troubles += [*self._twice, *self._files.troubles.values()]
        if used != self._used:
            self.rules = RuleSet({domain: document.root for domain, document in used.items()})
            for domain, document in used.items():
                if document != self._used.get(domain):
                    _tell_warnings(document)
            self._used = used
            log.info("The limits of these domains are in force: %s", ", ".join(sorted(used)) or "none")
        self._report(tuple(troubles))
        lost = self._rows.losses.list_troubles() if self._rows is not None else []  # they are logged when they begin
        self.troubles = (*lost, *troubles)

    def run(self, ending: Event, wait: Callable[[float], object] | None = None) -> None:
        """Follow the sources until the end, in a thread of its own; files in one more, for a database may hang. `wait`
        comes back early when the database was written, and raises StoreError when it is gone: `Watch.wait`."""
        if self._files is not None and self._rows is not None:
            following = (self._files.refresh, ending, ending.wait)
            Thread(target=self._run, args=following, name="files of limits", daemon=True).start()
            self._run(self._rows.refresh, ending, wait or ending.wait)
        else:
            source = self._files or self._rows
            self._run(source.refresh if source is not None else lambda: None, ending, wait or ending.wait)

    def _run(self, read: Callable[[], None], ending: Event, wait: Callable[[float], object]) -> None:
        while not ending.wait(_BREATH):
            read()
            self._put_in_force()
            try:
                wait(SECONDS)
            except StoreError:
                ending.wait(SECONDS)

    def _choose(
        self, good: dict[Path, Document], below: dict[str, Document], troubles: list[str]
    ) -> dict[str, Document]:
        """The documents of files, by domain."""
        claims: defaultdict[str, list[Path]] = defaultdict(list)
        for path, document in sorted(good.items()):
            claims[document.domain].append(path)
        chosen = {}
        for domain, paths in claims.items():
            if len(paths) == 1:
                chosen[domain] = good[paths[0]]
            else:
                named = ", ".join(map(str, paths))
                self._twice.append(
                    f"The domain {domain!r} is in several files: {named}. Put its limits into one of them."
                )
                if domain in self._used:
                    chosen[domain] = self._used[domain]
            if domain in below:
                troubles.append(
                    f"The limits of the domain {domain!r} in the database do not count: {paths[0]} has some, too."
                )
        return chosen

    def _report(self, troubles: tuple[str, ...]) -> None:
        for trouble in troubles:
            if trouble not in self._told:
                log.warning(trouble)
        for trouble in self._told:
            if trouble not in troubles:
                log.info("This is over: %s", trouble)
        self._told = troubles
