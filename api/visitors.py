"""Who speaks to the API from elsewhere: such addresses join the safe set of the gateway that it runs on."""

from __future__ import annotations

import logging
import math
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from ipaddress import ip_address

from netlimit.errors import StoreError
from netlimit.safety import REMEMBERED_SECONDS
from netlimit.store import Store

EVERY_SECONDS = 60.0
"""An address is kept again after so long."""
_MOST = 1024

log = logging.getLogger(__name__)


class Visitors:
    """Keeps the addresses that show good tokens, each at most once a minute. Nobody waits for that."""

    def __init__(self, store: Store, host: str) -> None:
        self._store, self._host = store, host
        self._seen: OrderedDict[str, float] = OrderedDict()
        self._writer = ThreadPoolExecutor(1, "visitors")

    def see(self, address: str | None) -> None:
        """Keep an address, unless it is this host's own loopback."""
        now = time.monotonic()
        if address is None or now - self._seen.get(address, -EVERY_SECONDS) < EVERY_SECONDS:
            return
        if ip_address(address).is_loopback:
            return
        self._seen[address] = now
        self._seen.move_to_end(address)
        if len(self._seen) > _MOST:
            self._seen.popitem(last=False)
        self._writer.submit(self._keep, address)

    def knows(self, address: str) -> bool:
        """Whether an address has shown a good token lately."""
        return time.monotonic() - self._seen.get(address, -math.inf) < REMEMBERED_SECONDS

    def _keep(self, address: str) -> None:
        try:
            self._store.saw_client(self._host, address, datetime.now(UTC))
        except StoreError as error:
            log.warning("Cannot keep that %s speaks to the API: %s", address, error)
            self._seen.pop(address, None)
