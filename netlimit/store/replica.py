"""The copy that a gateway keeps of its own rules: what was applied last, at hand without the database."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from itertools import dropwhile, islice
from pathlib import Path
from secrets import token_hex
from typing import TypeVar

from sqlalchemy import Connection, delete, func, insert, select, update

from netlimit.confirmed import Ending, is_confirmed, read_ending
from netlimit.custody import acting_for
from netlimit.errors import Slow, StoreError
from netlimit.forgotten import NOTHING, Held, find_forgotten
from netlimit.origins import Origin, has_word, is_same
from netlimit.records import Actor, Changes, Exceptional, HostStatus, Pause, Reception, Request, RuleCounters, Window
from netlimit.rules import Rule
from netlimit.stalls import Stalled, find_disk
from netlimit.store import audit, clock, endings, hosts, numbers, roots, rules, tables, windows
from netlimit.store.engine import MEMORY
from netlimit.store.errors import NoSuchRevision
from netlimit.store.faults import Damaged, TooNew
from netlimit.store.room import Leave, bound_growth
from netlimit.store.rows import Kept
from netlimit.store.store import Store
from netlimit.tree import SavedRoot

log = logging.getLogger(__name__)
_AT_ONCE = 5000
FILE = "applied.db"
"""The name of the copy in its directory."""
_COPIED, _DOUBTED = "copy", "doubt"
"""What a copy says of the revision that it holds."""
_MOST_PAUSES = 1000
"""So many pauses, and ends of pauses, are known, or a few more."""
_SHORT_SECONDS = 1.0
_LOOK_SECONDS = 5.0
"""How long a copy works at what others ask it of itself."""
T = TypeVar("T")


@dataclass(frozen=True)
class Snapshot:
    """The rules of one gateway at a revision, and what a controller must know to write the very same objects again;
    and what the gateway said of itself last, which tells who is safe (None: nothing). `stamp` tells the revision from
    others of its number; 0: that is not known."""

    revision: int
    rules: tuple[Rule, ...]
    numbering: Mapping[tuple[str, str], int]
    roots: Mapping[str, SavedRoot]
    paused: bool
    status: HostStatus | None = None
    identity: str | None = None
    stamp: int = 0


def take_snapshot(store: Store, host: str, revision: int, paused: bool) -> Snapshot:
    """The rules of a revision that concern a gateway. Raises StoreError, NoSuchRevision."""
    here = tuple(k.rule for k in store.rules_at(revision) if not k.rule.hosts or host in k.rule.hosts)
    status = next((each for each in store.hosts() if each.host == host), None)
    origin = store.origin(revision)
    return Snapshot(
        revision, here, store.numbering(host), store.saved_roots(host), paused, status, origin.identity, origin.past[1]
    )


class Replica(Store):
    """A store in a SQLite file of one gateway alone, on which its controller can run while the database is gone, and
    when the machine starts. `follow` brings it up to date.

    What a controller says of itself is kept too, for who asks on the gateway; but that it cannot be kept (the disk is
    full, say) is no error here: nothing of it keeps the kernel from being right.
    """

    tells_of_others = False

    def __init__(self, path: Path | None, host: str, patience: float | None = None) -> None:
        """Without a `path` it is in memory, gone when it is closed, and never said to be lost."""
        url = f"sqlite:///{path}" if path else MEMORY
        super().__init__(url, wal=False, patience=patience)  # it must be there on a full disk
        self._host = host
        self._path = path
        self._file: tuple[int, int] | None = None
        self._damaged = False
        self._copied = -1
        self._stamp = 0
        self._paused = False
        self._roots: dict[str, SavedRoot] = {}
        self._held = NOTHING
        self._ended: tuple[Window, Ending | None] | None = None

    def follow(self, source: Store) -> bool:
        """Take over the rules of this gateway, and what a controller must know to write the very same objects again:
        numbers, the roots it took the place of, whether it is paused. All or nothing. Not while a window of
        confirmation is open: then False, and this comes to hold what the window brings back, if it does not yet: also
        that the gateway is paused, if its end pauses it. Of all else the pause alone is taken over. False, too, where a
        window opens or ends meanwhile. Raises StoreError, also where the source is another database than the one of
        which rules are held here, or an older state of it."""
        try:
            return self._follow(source)
        except Damaged:
            self._damaged = True
            raise

    def _follow(self, source: Store) -> bool:
        own = self.held()
        origin = source.origin(own.origin.revision)
        forgotten = find_forgotten(origin, own)
        if forgotten is not None:
            raise StoreError(forgotten)
        self.note_ends(source)
        before = source.window()
        self.note_window(source, before)
        numbering, saved = source.numbering(self._host), source.saved_roots(self._host)
        paused, kept = source.paused(self._host), self.numbering(self._host)
        pause = source.last_pause(self._host) if paused else None
        known = self._copied >= 0 and self._is_at(self._copied)
        changes = source.changes(self._copied, self._host, self._stamp) if known else None
        with ExitStack() as stack:
            if changes is not None:
                revision, stamp, every = changes.revision, changes.stamp, None
            else:
                revision, stamp, every = source.load_stamped(self._host)
                stack.enter_context(closing(every))
            window = source.window()  # asked last: all of this was so before it opened
            if window is not None and window.outcome is None:
                if is_confirmed(source, window, self.find_ending(window)):
                    return False  # by whoever confirms it anew; what was before it is not to come back
                paused = paused or self._host in window.paused
                self._hold_base(source, window, paused, changes is not None)
                self.follow_pause(paused, pause)
                return False
            if window != before:  # some of this was so in it, and its end may have undone that
                return False
            identity = origin.identity if has_word(origin.identity) else _name(source, own.origin.identity)
            connection = stack.enter_context(self._writing())
            if changes is not None:
                rules.erase(connection, (*changes.removed, *(rule.id for rule in changes.rules)))
                self._write(connection, changes.rules)
            else:
                connection.execute(delete(tables.rules))
                self._write(connection, every or ())
            # Of what is removed nothing is remembered, so whoever knows an older revision must load all.
            values = {"revision": revision, "pruned": revision, "identity": identity}
            connection.execute(update(tables.clock).values(values))
            _note_stamp(connection, revision, stamp)
            self._write_rest(connection, kept, numbering, saved, paused, pause)
        self._copied, self._stamp, self._paused, self._roots = revision, stamp, paused, saved
        return True

    @contextmanager
    def _writing(self) -> Iterator[Connection]:
        """A transaction that leaves of the disk what is kept for who takes back what fills it."""
        try:
            with self._database.writing() as connection:
                if self._path:
                    bound_growth(connection, self._path, Leave.HALF)
                yield connection
        except StoreError:
            # Where the disk was full, SQLite gives back what was written in vain when it looks at the file again.
            with suppress(StoreError):
                self.revision()
            raise

    def _write_rest(
        self,
        connection: Connection,
        kept: Mapping[tuple[str, str], int],
        numbering: Mapping[tuple[str, str], int],
        saved: Mapping[str, SavedRoot],
        paused: bool,
        pause: Pause | None = None,
    ) -> None:
        """All but the rules; the numbers are those that were `kept` so far."""
        added = {key: number for key, number in numbering.items() if kept.get(key) != number}
        numbers.number(connection, self._host, added, kept.keys() - numbering.keys())
        connection.execute(delete(tables.saved_roots))
        for device, root in saved.items():
            roots.save(connection, self._host, device, root)
        self._write_pause(connection, paused, pause)
        self._sign(connection)

    def _hold_base(self, source: Store, window: Window, paused: bool, known: bool) -> None:
        """A window may open before what comes back was copied: at once after a change, or another window's end. Where
        the source has `known` what this holds, it costs what differs: kernel and changes wait for it."""
        if self._is_at(window.base):
            return
        if known:
            with suppress(NoSuchRevision):
                self._step(source, window.base, paused)
                return
        with suppress(NoSuchRevision):
            self.hold(take_snapshot(source, self._host, window.base, paused), None)

    def _step(self, source: Store, revision: int, paused: bool) -> None:
        """Go to another revision than the one that was copied last. Raises StoreError, NoSuchRevision."""
        differing, stamp = source.difference(self._copied, revision), source.stamp_of(revision)
        if stamp is None:
            raise NoSuchRevision(revision, f"Of revision {revision} it is not known any more which one it was.")
        wanted = [each.after for each in differing if each.after is not None]
        numbering, saved = source.numbering(self._host), source.saved_roots(self._host)
        kept = self.numbering(self._host)
        with self._writing() as connection:
            rules.erase(connection, [each.rule_id for each in differing])
            self._write(connection, (rule for rule in wanted if not rule.hosts or self._host in rule.hosts))
            connection.execute(update(tables.clock).values(revision=revision, pruned=revision))
            _note_stamp(connection, revision, stamp)
            self._write_rest(connection, kept, numbering, saved, paused)
        self._copied, self._stamp, self._paused, self._roots = revision, stamp, paused, saved

    @property
    def copied(self) -> tuple[int, int] | None:
        """The revision that was copied last, with its stamp; None if that is not known."""
        return (self._copied, self._stamp) if self._copied >= 0 else None

    def keep(self, since: int, changes: Changes) -> bool:
        """Take over what somebody else has read, if this holds the revision `since`; whether it did. Raises
        StoreError."""
        if self._copied != since or not self._is_at(since):
            return False
        with self._writing() as connection:
            rules.erase(connection, (*changes.removed, *(rule.id for rule in changes.rules)))
            self._write(connection, changes.rules)
            connection.execute(update(tables.clock).values(revision=changes.revision, pruned=changes.revision))
            _note_stamp(connection, changes.revision, changes.stamp)
        self._copied, self._stamp = changes.revision, changes.stamp
        return True

    def _is_at(self, revision: int) -> bool:
        """Whether the file holds the rules of this gateway at a revision. A guard may have put another in its place, or
        another gateway that has the same directory."""
        return self.revision() == revision and self.owner == self._host

    def held(self) -> Held:
        """How many rules are in force as this tells, and of which state of which database; none if a teardown has
        taken them out. Under whatever name the gateway goes now: it is the copy of this machine. As it was known last
        where this cannot be read."""
        self._held = _try(self._read_held, self._held)
        return self._held

    def _read_held(self) -> Held:
        with self._database.reading() as connection:
            origin = clock.origin(connection)
            stamp, is_doubted = _read_stamp(connection, origin.revision)
            origin = origin._replace(past=(origin.revision, stamp))
            names = {self._host, *connection.scalars(select(tables.hosts.c.host))}
            is_torn_down = any(hosts.paused(connection, name) for name in names)
            number = connection.execute(select(func.count()).select_from(tables.rules)).scalar_one()
        return Held(number if origin.revision and not is_torn_down else 0, origin, is_doubted, is_torn_down)

    def doubt(self) -> None:
        """Keep that a database was found which is not gone by, until one is: it may forget what tells it from that of
        which rules are held here, as more is changed there. Where this cannot be written, that is not known."""
        held = self.held()

        def write() -> None:
            with self._writing() as connection:
                _note_stamp(connection, *held.origin.past, _DOUBTED)

        if not held.is_doubted:
            _try(write, None)

    def take(self, origin: Origin) -> None:
        """Let what is held here be of this state of this database from now on, which is gone by then. Raises
        StoreError."""
        revision, stamp = origin.past
        with self._writing() as connection:
            connection.execute(update(tables.clock).values(identity=origin.identity, revision=revision))
            _note_stamp(connection, revision, stamp)

    def is_lost(self) -> bool:
        """Whether what is written comes to no boot: its file was found damaged, is gone, or another than at the first
        look."""
        if self._path is None:
            return False
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return True
        except OSError:  # whoever writes will be told
            return self._damaged
        file = found.st_dev, found.st_ino
        self._file = self._file or file
        return self._damaged or file != self._file

    def keep_report(self, status: HostStatus) -> None:
        """Keep what the controller says of itself, as `report` does. Raises StoreError where that cannot be kept."""
        super().report(status)

    def follow_pause(self, paused: bool, pause: Pause | None = None) -> None:
        """Take over the pause alone, and which one it is (None: that is not known). A controller that runs on this copy
        hears of it; and so does a machine that starts, which goes by the name that the copy was written by. Raises
        StoreError."""
        names = {self._host, self.owner or self._host} if paused else {self._host}
        is_known = pause is None or pause == _try(self._read_pause, None)
        if not is_known or any(self.paused(name) != paused for name in names):
            with self._writing() as connection:
                self._write_pause(connection, paused, pause)
                for name in names - {self._host}:
                    hosts.pause(connection, name, paused)
            self._paused = paused

    def _write_pause(self, connection: Connection, paused: bool, pause: Pause | None = None) -> None:
        """Whoever is paused by nobody knows which pause is so by none of those that are known from before."""
        was_paused = hosts.paused(connection, self._host)
        hosts.pause(connection, self._host, paused)
        if paused and not (was_paused if pause is None else pause == audit.last_pause(connection, self._host)):
            if pause is not None:
                audit.note_pause(connection, self._host, Actor(self._host), pause)
            else:
                said = {"host": self._host}
                audit.note_other(connection, audit.PAUSE, Actor(self._host), datetime.now(UTC), after=said)
            audit.prune(connection, _MOST_PAUSES)

    def _read_pause(self) -> Pause | None:
        with self._database.reading() as connection:
            return audit.last_pause(connection, self._host) if hosts.paused(connection, self._host) else None

    def known_pause(self) -> Pause | None:
        """The pause of this gateway, if it is paused as this tells, and which one that is was told, too; not one that
        was ended here. None where that cannot be read."""
        pause = _try(self._read_pause, None)
        return None if pause is None or self.has_resumed(pause) else pause

    def find_unheard(self, source: Store) -> Pause | None:
        """The same, if the source has not heard of it, though it is the database of which rules are held here, and
        nobody has restored a backup into it since: a teardown holds until `netlimit apply`, whatever state of its
        database comes. Raises StoreError."""
        pause = self.known_pause()
        if pause is None:
            return None
        known = self.held().origin
        is_lost = is_same(known, source.origin(known.revision)) and not source.may_have_heard(pause)
        return pause if is_lost else None

    def note_resumed(self, *pauses: Pause) -> None:
        """Keep that pauses were ended here: they may be there again, in a database that takes this one's place and is
        of an older state. Raises StoreError."""
        with self._database.reading() as connection:
            untold = {pause.word for pause in pauses} - audit.list_resumed(connection)
        if not untold:
            return
        with self._writing() as connection:
            for word in untold:
                said = {"host": self._host, audit.PAUSE: word}
                audit.note_other(connection, audit.RESUME, Actor(self._host), datetime.now(UTC), after=said)
            audit.prune(connection, _MOST_PAUSES)

    def note_ends(self, source: Store) -> None:
        """Keep which pauses are over, as their database tells, if this gateway is paused as this tells. So are those
        that only this was told of, if they came before one that is over; a later one the source has not heard of.
        Raises StoreError."""
        ended = source.list_ended_pauses(self._host) if self.paused(self._host) else []
        words = {pause.word for pause in ended}
        former = dropwhile(lambda pause: pause.word not in words, self.list_pauses(self._host) if ended else ())
        self.note_resumed(*ended, *former)

    def has_resumed(self, pause: Pause) -> bool:
        """Whether a pause is known to have been ended here; false where that cannot be read."""

        def read() -> bool:
            with self._database.reading() as connection:
                return audit.has_resumed(connection, pause)

        return _try(read, False)

    def note_window(self, source: Store, window: Window | None) -> None:
        """Keep how the last window of the database has ended, if it has: it may be open again in an older state of it.
        Raises StoreError."""
        if window is None or window.outcome is None or (self._ended is not None and self._ended[0] == window):
            return
        ending = read_ending(source, window)
        if ending is not None and ending != self.find_ending(window):
            with self._writing() as connection:
                endings.note(connection, self._host, ending)
        self._ended = window, ending

    def find_ending(self, window: Window) -> Ending | None:
        """How that window has ended, if this knows; as it was noted last where this cannot be read."""

        def read() -> Ending | None:
            with self._database.reading() as connection:
                return endings.find(connection, window)

        noted = self._ended[1] if self._ended is not None else None
        return _try(read, noted if noted is not None and noted.is_of(window) else None)

    def hold(self, snapshot: Snapshot, window: Window | None) -> None:
        """Hold what a snapshot says, instead of all else: as it is applied, or the rules from before a window that has
        expired. A controller that runs on this copy hears of it by `window`. Raises StoreError."""
        with self._writing() as connection:
            connection.execute(delete(tables.rules))
            self._write(connection, snapshot.rules)
            held = {"revision": snapshot.revision, "pruned": snapshot.revision, "oldest": snapshot.revision}
            connection.execute(update(tables.clock).values(held))
            _note_stamp(connection, snapshot.revision, snapshot.stamp)
            if snapshot.identity is not None:
                connection.execute(update(tables.clock).values(identity=snapshot.identity))
            connection.execute(delete(tables.numbers))
            numbers.number(connection, self._host, snapshot.numbering, ())
            connection.execute(delete(tables.saved_roots))
            for device, root in snapshot.roots.items():
                roots.save(connection, self._host, device, root)
            self._write_pause(connection, snapshot.paused)
            self._sign(connection, snapshot.status)
            if window is not None:
                windows.write(connection, window)
        self._copied = -1

    def _sign(self, connection: Connection, status: HostStatus | None = None) -> None:
        """Keep whose copy it is: a machine that starts may not have its name yet. And what it is known to have said."""
        connection.execute(delete(tables.hosts).where(tables.hosts.c.host != self._host))
        if connection.execute(select(tables.hosts.c.host)).first() is None:
            hosts.report(connection, _take(status) if status else HostStatus(self._host, ""))

    @property
    def owner(self) -> str | None:
        """The name of the gateway whose copy it is; None if it does not say."""
        names = {each.host for each in self.hosts()}
        return names.pop() if len(names) == 1 else None

    # What a controller goes on with even when the copy is gone too: as it was known last, and what it says is lost.

    def paused(self, host: str) -> bool:
        """Whether the controller is to keep its hands off."""
        self._paused = _try(partial(super().paused, host), self._paused)
        return self._paused

    def saved_roots(self, host: str) -> dict[str, SavedRoot]:
        """The root qdiscs of others that are kept."""
        self._roots = _try(partial(super().saved_roots, host), self._roots)
        return self._roots

    def window(self) -> Window | None:
        """The window that has expired without the database, if its rule set is what is held here."""
        return _try(super().window, None)

    def find(self, key: int | str) -> Kept | None:
        """A rule, unless the copy is older than it."""
        return _try(partial(super().find, key), None)

    def find_some(self, keys: Sequence[str]) -> dict[str, Kept]:
        """Those of these rules that are no newer than the copy."""
        return _try(partial(super().find_some, keys), {})

    def clients(self, host: str, at: datetime | None = None) -> dict[str, float]:
        """Who has spoken to the API lately: it cannot be known here."""
        return {}

    def hosts(self) -> list[HostStatus]:
        """What the controller said of itself last."""
        return _try(super().hosts, [])

    def report(self, status: HostStatus, at: datetime | None = None) -> Reception:
        """Keep what the controller says of itself."""
        return _try(partial(super().report, _take(status), at), Reception(at or datetime.now(UTC), None))

    def mark(self, host: str, exceptional: Sequence[Exceptional], cleared: Iterable[int]) -> None:
        """Keep the states of rules."""
        _try(partial(super().mark, host, exceptional, cleared), None)

    def number(self, host: str, added: Mapping[tuple[str, str], int], removed: Iterable[tuple[str, str]]) -> None:
        """Keep mark numbers. If that fails, the next controller that knows better writes entries anew."""
        _try(partial(super().number, host, added, removed), None)

    def repaired(self, host: str, kind: str, found: str, took: float, now: datetime) -> None:
        """Keep what was put right."""
        _try(partial(super().repaired, host, kind, found, took, now), None)

    def count(self, host: str, counts: Sequence[RuleCounters]) -> None:
        """Keep nothing: the database hears of the whole count once it is back."""

    def questions(self, host: str) -> list[Request]:
        """None: whoever asks, asks in the database."""
        return []

    def answer(self, request_id: int, answer: Mapping[str, object]) -> None:
        """Nobody asks here."""

    def _write(self, connection: Connection, written: Iterable[Rule]) -> None:
        now, stream = datetime.now(UTC), iter(written)
        while some := list(islice(stream, _AT_ONCE)):
            rules.write_rules(connection, some, now, now)


def _take(status: HostStatus) -> HostStatus:
    """What the controller says, taken as it is: the copy may be behind it."""
    return replace(status, stamp=None)


def _name(source: Store, identity: str | None) -> str | None:
    """Give a database that nobody has named the name by which this gateway knows it; how it is named then. One that
    takes nothing, for its disk is full, is followed all the same."""
    name = identity if identity and has_word(identity) else token_hex(16)
    return _try(partial(source.identify, name), identity)


def _note_stamp(connection: Connection, revision: int, stamp: int, said: str = _COPIED) -> None:
    """Keep which revision of its number a copy holds. Beside the number, for an older netlimit writes that alone."""
    connection.execute(delete(tables.revisions))
    row = {"revision": revision, "at": datetime.now(UTC), "actor": "", "action": said, "rules": 0, "stamp": stamp}
    connection.execute(insert(tables.revisions), [row])


def _read_stamp(connection: Connection, revision: int) -> tuple[int, bool]:
    """Which revision of its number a copy holds (0: unknown), and whether what is there is doubted."""
    kept = tables.revisions.c
    row = connection.execute(select(kept.stamp, kept.action).where(kept.revision == revision)).one_or_none()
    return (row.stamp, row.action == _DOUBTED) if row is not None else (0, False)


def _try(do: Callable[[], T], otherwise: T) -> T:
    """What `do` gives, or something else when the copy cannot do its part."""
    try:
        return do()
    except StoreError as error:
        log.debug("%s", error)
        return otherwise


def open_replica(directory: Path, host: str, allowed: float | None = None) -> Replica:
    """The copy in a directory (made with mode 0700 where it is missing). One that is damaged, or of a newer version, is
    begun anew: it is a copy. One that cannot be written (the disk is full, or it is busy) is taken as it is. The
    calling thread may have it work for so long as is `allowed`, in seconds, in all. Raises StoreError."""
    path = directory / FILE
    try:
        if not directory.is_dir():
            find_disk(directory).call(partial(directory.mkdir, mode=0o700, parents=True, exist_ok=True))
    except (OSError, Stalled) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise StoreError(
            f"The copy of the applied rules cannot be kept in {directory}: {reason}. "
            "Set NETLIMIT_STATE_DIRECTORY to a directory of the controller's own."
        ) from error
    if path.is_symlink():  # root must not write where the controller's user has led it
        raise StoreError(f"The copy of the applied rules {path} is a link to another file; remove it.")
    replica = Replica(path, host)
    replica.allow(allowed)
    try:
        replica.upgrade()
    except Slow:
        replica.close()
        raise
    except (Damaged, TooNew) as error:
        log.warning("%s It is a copy, and begun anew.", error)
        replica.close()
        _remove(path)
        replica = _begin(path, host)
    except StoreError as error:
        try:
            with closing(Replica(path, host, _SHORT_SECONDS)) as read:  # who is busy was waited for already
                read.revision()
        except StoreError:
            replica.close()
            raise
        log.warning("%s The copy is taken as it is.", error)
    return replica


def _begin(path: Path, host: str) -> Replica:
    replica = Replica(path, host)
    try:
        replica.upgrade()
    except StoreError:
        replica.close()
        raise
    return replica


def read_revision(directory: Path) -> int | None:
    """The revision of which a directory has the copy; None where there is none that tells. Changes nothing."""
    path = directory / FILE
    if path.is_symlink() or not path.is_file():
        return None
    with closing(Replica(path, "")) as replica:
        replica.allow(_LOOK_SECONDS)
        return _try(replica.revision, None)


def read_owner(directory: Path) -> str | None:
    """The name of the gateway whose copy is in a directory; None where there is none, or none that says so. Changes
    nothing."""
    path = directory / FILE
    if path.is_symlink() or not path.is_file():
        return None
    with closing(Replica(path, "")) as replica:
        replica.allow(_LOOK_SECONDS)
        return replica.owner


def read_held(directory: Path, host: str) -> Held:
    """How many rules a gateway holds as the copy in a directory tells, and of which database; nothing where there is
    none that tells. Changes nothing, but for the tables of an older netlimit."""
    path = directory / FILE
    if path.is_symlink() or not path.is_file():
        return NOTHING
    with closing(Replica(path, host)) as replica:
        replica.allow(_LOOK_SECONDS)
        if _try(replica.revision, None) is None:
            _try(replica.upgrade, None)
        return replica.held()


def read_pause(directory: Path, host: str, source: Store) -> tuple[Pause | None, bool]:
    """The pause of a gateway that the copy in a directory knows (None where there is none that tells), and whether its
    database has not heard of it. Changes nothing. Raises StoreError where that does not answer."""
    path = directory / FILE
    if path.is_symlink() or not path.is_file():
        return None, False
    with closing(Replica(path, host)) as replica:
        replica.allow(_LOOK_SECONDS)
        pause = replica.known_pause()
        return pause, pause is not None and replica.find_unheard(source) == pause


def _remove(path: Path) -> None:
    try:
        with acting_for(path):
            for name in (path, Path(f"{path}-wal"), Path(f"{path}-shm"), Path(f"{path}-journal")):
                name.unlink(missing_ok=True)
    except OSError as error:
        raise StoreError(f"The damaged copy {path} cannot be removed: {error.strerror}.") from error
