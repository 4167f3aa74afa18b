"""This machine's address, as another one sees it."""

from __future__ import annotations

import socket


def own_address(address: str, port: int) -> str:
    """The local address of the route to `address`. Raises OSError (`socket.gaierror` for a name nobody knows)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, port))
        return str(probe.getsockname()[0])
