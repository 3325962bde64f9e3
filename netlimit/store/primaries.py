"""Which of several servers this process uses: one, for all its connections. Each connection for itself would find the
first that takes changes, and where a former primary comes back as it was there are two of these."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, NamedTuple

from sqlalchemy.engine import URL

from netlimit.store.servers import Server, split_servers

LOOK_SECONDS = 30.0
"""So often the others are asked whether they take changes, too."""
GRACE_SECONDS = 0.5
"""So long the others may take to answer once one has that takes changes; one that is switched off never does."""
AWAY_SECONDS = 60.0
"""For so long nobody goes back to an older server, should the newer one just be started anew."""

Asked = Mapping[str, Any]
"""What the driver is told of a connection."""

log = logging.getLogger(__name__)


class Standing(NamedTuple):
    """How a server stands that takes changes: whose copy it is (`system`), how often a standby has become primary
    before it (`timeline`), and since when it runs (`started`). None where the server does not tell."""

    system: str | None
    timeline: int | None
    started: str | None

    def is_newer(self, other: Standing) -> bool:
        """Whether it became the primary after the other one of its kind."""
        if self.system != other.system or self.timeline is None or other.timeline is None:
            return False
        return self.timeline > other.timeline


class Chosen(NamedTuple):
    """The server that is used, as it stood when it was asked last."""

    server: Server
    standing: Standing


def choose_among(url: URL) -> Primaries | None:
    """What chooses, where the URL or the environment name several servers and ask for one that takes changes."""
    servers = split_servers(url)
    return Primaries(servers) if servers else None


class Primaries:
    """The servers of a database, and which one is used: the first that takes changes, unless another is of a newer
    timeline. It is used as long as it answers and takes changes, and no newer one does. Then others are asked, and an
    older one is used only when the newer has not come back for a minute.

    Threads share it without a lock (the process may be copied at any time): where two choose at once, the later choice
    stands, and connections that lead elsewhere are closed before they are used.
    """

    def __init__(self, servers: tuple[Server, ...]) -> None:
        self._servers = servers
        self._chosen: Chosen | None = None
        self._asked: Asked = {}
        self._looked = -math.inf
        self._looking: Thread | None = None
        self._away_since: float | None = None
        self.warning: str | None = None
        """A sentence for the operator while several take changes. It names hosts."""

    def connect(self, dial: Callable[..., Any], asked: Asked) -> tuple[Server, Any]:
        """A connection to the server that is used, by the driver's own `dial`. Raises its OperationalError."""
        from psycopg import OperationalError  # the driver is not everywhere

        self._asked = asked
        chosen = self._chosen
        if chosen is None:
            chosen = self._choose()
            return chosen.server, dial(**_aim(asked, chosen.server))
        try:
            connection = dial(**_aim(asked, chosen.server))
        except OperationalError as error:
            chosen = self._replace(chosen, error)
            return chosen.server, dial(**_aim(asked, chosen.server))
        self._away_since = None
        return chosen.server, connection

    def is_used(self, server: Server | None) -> bool:
        """Whether it is the one that all connections are to lead to."""
        return self._chosen is not None and self._chosen.server == server

    def note_answer(self) -> None:
        """The server that is used has answered, by whatever connection."""
        self._away_since = None

    def look(self) -> None:
        """Ask all servers beside the caller, if that is due. Only who has not asked for long waits, for a moment."""
        late = time.monotonic() - self._looked - LOOK_SECONDS
        if self._chosen is None or late < 0 or (self._looking is not None and self._looking.is_alive()):
            return
        self._looked = time.monotonic()
        looking = Thread(target=self._compare, name="comparing servers", daemon=True)
        try:
            looking.start()
        except RuntimeError:  # no room for a thread: the next who comes tries again
            return
        self._looking = looking
        if late > LOOK_SECONDS:
            looking.join(GRACE_SECONDS)

    def _choose(self) -> Chosen:
        from psycopg import OperationalError

        found, faults = self._ask(self._servers, GRACE_SECONDS)
        # Who has not answered in time is asked again soon.
        is_whole = len(found) + len(faults) == len(self._servers)
        self._looked = time.monotonic() - (0.0 if is_whole else LOOK_SECONDS)
        best = _find_newest(self._sort(found))
        if best is None:
            raise OperationalError("; ".join(faults))
        if self._chosen is not None:  # by another thread meanwhile
            return self._chosen
        self._chosen = best
        self._tell(found)
        return best

    def _replace(self, lost: Chosen, error: Exception) -> Chosen:
        """Another server than the one that could not be reached for this `error`, which is raised if there is none."""
        since = self._away_since = self._away_since or time.monotonic()
        found, _ = self._ask([each for each in self._servers if each != lost.server], GRACE_SECONDS)
        if self._chosen is not None and self._chosen.server != lost.server:
            return self._chosen
        is_away_for_long = time.monotonic() - since > AWAY_SECONDS
        fit = [each for each in self._sort(found) if is_away_for_long or not lost.standing.is_newer(each.standing)]
        best = _find_newest(fit)
        if best is None:
            raise (_say_older(error, found) if found else error) from error
        self._use(best, found)
        return best

    def _compare(self) -> None:
        found, _ = self._ask(self._servers, math.inf)
        chosen = self._chosen
        if chosen is None:
            return
        if chosen.server in found:
            self._away_since = None
        known = Chosen(chosen.server, found.get(chosen.server, chosen.standing))
        best = _find_newest([known, *self._sort(found)])
        if best is not None and best.server in found and self.is_used(chosen.server):
            self._use(best, found)

    def _use(self, best: Chosen, found: Mapping[Server, Standing]) -> None:
        if self._chosen is not None and best.server != self._chosen.server:
            log.warning("Of the servers of the database, %s is used from now on.", best.server)
            self._away_since = None
        self._chosen = best
        self._tell(found)

    def _sort(self, found: Mapping[Server, Standing]) -> list[Chosen]:
        """As they are named."""
        return [Chosen(each, found[each]) for each in self._servers if each in found]

    def _ask(self, servers: Iterable[Server], grace: float) -> tuple[dict[Server, Standing], list[str]]:
        """How those stand that take changes, and why others do not; of those that answer soon (`grace`, in seconds)
        once there is one of the former."""
        answers: SimpleQueue[tuple[Server, Standing | Exception]] = SimpleQueue()
        left = 0
        for server in servers:
            asking = Thread(target=_answer, args=(answers, server, self._asked), name="asking a server", daemon=True)
            try:
                asking.start()
            except RuntimeError as error:
                answers.put((server, error))
            left += 1
        found: dict[Server, Standing] = {}
        faults: list[str] = []
        end = math.inf
        for _ in range(left):
            try:
                wait = end - time.monotonic()
                server, said = answers.get(timeout=None if wait == math.inf else max(wait, 0.0))
            except Empty:
                break
            if isinstance(said, Standing):
                found[server] = said
                end = min(end, time.monotonic() + grace)
            else:
                faults.append(_first_line(said))
        return found, faults

    def _tell(self, found: Mapping[Server, Standing]) -> None:
        if self._chosen is None:
            return
        used, own = self._chosen
        others = [each for each in self._sort(found) if each.server != used and each.standing.started != own.started]
        said = None
        if others:
            named = ", ".join(f"{each.server}{_name_timeline(each.standing)}" for each in others)
            said = (
                f"Several servers of the database take changes: {used}{_name_timeline(own)}, which is used here, and "
                f"{named}. Stop the older, or make it a standby: what it is told alone is in force nowhere, and lost."
            )
        if said and said != self.warning:
            log.warning("%s", said)
        self.warning = said


def _aim(asked: Asked, server: Server) -> dict[str, Any]:
    return {**asked, **server.parameters}


def _find_newest(servers: Iterable[Chosen]) -> Chosen | None:
    """The first, unless a later one is newer."""
    best = None
    for each in servers:
        if best is None or each.standing.is_newer(best.standing):
            best = each
    return best


def _answer(answers: SimpleQueue[tuple[Server, Standing | Exception]], server: Server, asked: Asked) -> None:
    try:
        answers.put((server, _ask_standing(_aim(asked, server))))
    except Exception as error:
        answers.put((server, error))


def _ask_standing(aimed: dict[str, Any]) -> Standing:
    """How a server stands; any user may ask that. Raises the driver's error for one that takes no changes."""
    from netlimit.store.silence import ImpatientConnection  # the driver is not everywhere

    connection = ImpatientConnection.connect(**aimed | {"autocommit": True})
    try:
        log_file = _read(connection, "SELECT pg_walfile_name(pg_current_wal_lsn())")
        return Standing(
            _read(connection, "SELECT system_identifier::text FROM pg_control_system()"),
            int(log_file[:8], 16) if log_file else None,
            _read(connection, "SELECT pg_postmaster_start_time()::text"),
        )
    finally:
        connection.close()


def _read(connection: Any, question: str) -> str | None:
    """An answer; None where the server, or whom it belongs to, has taken the function away."""
    from psycopg import DatabaseError, OperationalError

    try:
        row = connection.execute(question).fetchone()
    except OperationalError:
        raise
    except DatabaseError:
        return None
    return str(row[0])


def _say_older(error: Exception, found: Mapping[Server, Standing]) -> Exception:
    from psycopg import OperationalError

    named = ", ".join(map(str, found))
    return OperationalError(
        f"{_first_line(error)}; {named} takes changes, but is older, and is used once this one has been away for "
        f"{AWAY_SECONDS:g} seconds"
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _name_timeline(standing: Standing) -> str:
    return "" if standing.timeline is None else f" (timeline {standing.timeline})"
