"""The host's own addresses."""

from __future__ import annotations

from pyroute2 import IPRoute

from netlimit.tree import INGRESS_DEVICE


def read_own() -> tuple[str, ...]:
    """The addresses of every device but ours, by netlink."""
    with IPRoute() as ipr:
        ours = ipr.link_lookup(ifname=INGRESS_DEVICE)
        messages = [message for message in ipr.get_addr() if message["index"] not in ours]
    return tuple(sorted({message.get_attr("IFA_LOCAL") or message.get_attr("IFA_ADDRESS") for message in messages}))
