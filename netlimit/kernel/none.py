"""A kernel that is left alone: it can nothing, so that whatever can be enforced elsewhere is enforced there."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from netlimit.conflicts import HostReport
from netlimit.errors import KernelError
from netlimit.kernel.addresses import read_own
from netlimit.kernel.background import Background
from netlimit.kernel.base import TURN_SECONDS, Addresses, Connection, HostFacts, Reading
from netlimit.kernel.capabilities import read_hz
from netlimit.kernel.lock import is_locked, locked
from netlimit.kernel.sessions import list_root_sockets, read_sessions
from netlimit.marks import MarkUse
from netlimit.plan import Step, SwitchTable
from netlimit.state import Structure
from netlimit.tree import Queues, SavedRoot, Topology, Usage
from netlimit.tunnels import Hop, Tunnels

REASON = "NETLIMIT_BACKEND is l7: the kernel of this host is left alone, and nothing is shaped."
_PURPOSE = "be the controller of this host"


class NoKernel:
    """See `base.Kernel` for the contract. Needs no rights. What an earlier run has left in the real kernel it neither
    sees nor removes. `directory` is the controller's own, for its lock."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._topology = Topology()
        self._sockets = Background(list_root_sockets)
        self._marks = MarkUse()

    def probe(self) -> HostFacts:
        """Nothing can be done here: every rule needs one of these."""
        return HostFacts(dict.fromkeys(("iptables", "ip6tables"), REASON), read_hz(), ())

    def survey(self, thorough: bool = True) -> HostReport:
        """Nothing gets in the way."""
        return HostReport()

    def marks(self, patience: float = 0.0) -> MarkUse:
        """Nobody's are in the way."""
        del patience
        return self._marks

    def addresses(self) -> Addresses:
        """Read whose addresses must not be cut off: they are safe from the limiter too."""
        try:
            return Addresses(read_own(), *read_sessions(self._sockets.get))
        except OSError as error:
            raise KernelError("read addresses", str(error)) from error

    def tunnels(self) -> Tunnels:
        """None: nothing here hits an address that is not one of a client's."""
        return Tunnels()

    def hops(
        self, addresses: Iterable[str], near: Mapping[str, Collection[str]] | None = None
    ) -> Mapping[str, tuple[Hop, ...]]:
        """Nobody asks."""
        del addresses, near
        return {}

    def connections(self, ports: Iterable[int], owners: Collection[int]) -> Iterable[Connection]:
        """None."""
        del ports, owners
        return ()

    def exclusive(self, patience: float = TURN_SECONDS) -> AbstractContextManager[None]:
        """Nobody writes."""
        del patience
        return nullcontext()

    @contextmanager
    def sole(self) -> Iterator[None]:
        """Be the one controller that keeps its own things in this directory."""
        with locked(self._find_lock(), _PURPOSE, keep=False):
            yield

    def controlled(self) -> bool:
        """Whether some process is that controller now."""
        return is_locked(self._find_lock(), "look for the controller")

    def put_off(self) -> AbstractContextManager[None]:
        """Nothing is written anyway."""
        return nullcontext()

    def is_put_off(self) -> bool:
        """Nobody needs to."""
        return False

    def end_hanging_writer(self) -> str | None:
        """Nobody writes."""
        return None

    def structure(self) -> Structure:
        """Nothing is there."""
        return Structure()

    def readings(self, names: Iterable[str]) -> dict[str, dict[str, Reading]]:
        """Nothing is there."""
        return {}

    def leftovers(self) -> tuple[str, ...]:
        """Nothing is there."""
        return ()

    def held(self) -> tuple[str, ...]:
        """Nothing is there."""
        return ()

    def counts(self, names: Iterable[str]) -> dict[str, int]:
        """Nothing is there."""
        return {}

    def translating(self) -> frozenset[int]:
        """It does not matter: there are no rules."""
        return frozenset()

    def topology(self) -> Topology:
        """No devices."""
        return self._topology

    def queues(self) -> Queues:
        """No queues."""
        return Queues()

    def usages(self, device: str) -> dict[int, Usage]:
        """Nothing is there."""
        return {}

    def save_root(self, device: str) -> SavedRoot:
        """Nothing is there."""
        raise KernelError(f"save the root qdisc of {device}", REASON)

    def refused_buckets(self, step: SwitchTable) -> Mapping[str, str]:
        """None."""
        return {}

    def ingress(self) -> Mapping[str, str]:
        """No programs."""
        return {}

    def barred(self) -> Mapping[str, str]:
        """None."""
        return {}

    def kept_clsacts(self) -> tuple[str, ...]:
        """Nothing is kept."""
        return ()

    def ingress_readings(self, names: Iterable[str]) -> dict[str, dict[str, Reading]]:
        """Nothing is there."""
        return {}

    def ingress_seen(self, names: Iterable[str]) -> dict[str, dict[str, int]]:
        """Nobody has been seen."""
        return {}

    def apply(self, step: Step) -> None:
        """Refused: nothing is ever to be done here."""
        raise KernelError(str(step), REASON)

    def _find_lock(self) -> str:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        return str(self._directory / "controller.lock")

    def reopened(self) -> NoKernel:
        """It has no sockets."""
        return self
