"""Where agents meet: one of them opens the store, the others come to it; when it fails, they go to the next one's.

The run folder's `meeting.json` says where the leading agent is now, so that an agent that comes back does not open a
second meeting beside it.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from headway.account.errors import UserError
from headway.guard import launch
from headway.guard.address import own_address
from headway.guard.nodes.leader import Limits
from headway.guard.nodes.link import Link
from headway.guard.nodes.messages import Order
from headway.guard.rendezvous import store
from headway.record.files import read_json, write_json

LOST_S = 1.5
_ANSWER_S = 0.05
_OPEN_ANYWHERE = "0.0.0.0"  # the other machines must reach it


@dataclass(frozen=True)
class Meeting:
    """`address`, `port`: where the first agent of this run opens the store. `host`: what this machine is called.

    `lost_s`: seconds without a sign of life after which a machine counts as lost, and one that is cut off stops its
    ranks. `patience_s`: how long an agent looks for the others. `place`: the file that says where they are now.
    """

    address: str
    port: int
    limits: Limits
    host: str
    place: Path
    lost_s: float = LOST_S
    patience_s: float = 600.0


@dataclass
class Joined:
    """This agent's place in a meeting: `number` counts all that ever came to this store."""

    link: Link
    address: str
    port: int
    number: int
    leads: bool


class Door:
    """Opens and joins meetings; keeps the stores of this agent open until it is closed."""

    def __init__(self, meeting: Meeting) -> None:
        self.meeting = meeting
        self._stores = ExitStack()
        self.own_address = _route(meeting.address, meeting.port)
        self.standby = self._stores.enter_context(store())
        """The port of this agent's own store, for when the leader's fails."""

    def close(self) -> None:
        self._stores.close()

    def first(self, stopped: Callable[[], bool] = lambda: False) -> Joined | None:
        """Joins the run's meeting where it is now, else opens it here, else comes to where it will be opened. None when
        it was `stopped` while it waited."""
        deadline = time.monotonic() + self.meeting.patience_s
        said = False
        while time.monotonic() < deadline:
            if stopped():
                return None
            for address, port in self._known():
                joined = self.join(address, port)
                if joined is not None:
                    return joined
            joined = self.join(self.meeting.address, self.meeting.port, leads=self._open())
            if joined is not None:
                return joined
            if not said:
                launch.say(f"waiting for the first agent at {self.meeting.address}:{self.meeting.port}")
                said = True
            time.sleep(0.2)
        raise UserError(
            f"no agent opened {self.meeting.address}:{self.meeting.port} within {self.meeting.patience_s:g} s: start "
            "`headway launch` on that machine, or check --rdzv and the firewall"
        )

    def again(self, last: Order, round_: int) -> Joined | None:
        """After the leader was not heard of: one try of one place. First where it was, then the others in turn."""
        seats = [seat for seat in last.team if seat.host != last.leader]
        turn = round_ % (len(seats) + 1)
        if turn == 0:
            former = dict.fromkeys((*self._known(), (self.meeting.address, self.meeting.port)))
            return next(filter(None, (self.join(*place) for place in former)), None)
        seat = seats[turn - 1]
        if seat.host == self.meeting.host:
            return self.join(self.own_address, self.standby, leads=True)
        return self.join(seat.address, seat.standby)

    def join(self, address: str, port: int, *, leads: bool = False) -> Joined | None:
        """None when nobody answers there in time."""
        try:
            socket.create_connection(
                (address, port), self.meeting.lost_s
            ).close()  # the store's own client tries longer
        except OSError:
            return None
        link = Link(address, port, self.meeting.lost_s)
        deadline = time.monotonic() + self.meeting.lost_s
        while time.monotonic() < deadline and not link.closed:
            answer = link.exchange({}, [], _ANSWER_S, add="joined")
            if answer is not None:
                return Joined(link, address, port, answer[1], leads)
        link.close()
        return None

    def tell(self, joined: Joined) -> None:
        """Says in the run folder where the meeting is."""
        with contextlib.suppress(OSError):
            write_json(self.meeting.place, {"address": joined.address, "port": joined.port, "host": self.meeting.host})

    def forget(self) -> None:
        """The meeting is over."""
        with contextlib.suppress(OSError):
            self.meeting.place.unlink()

    def _known(self) -> list[tuple[str, int]]:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            known = read_json(self.meeting.place)
            return [(str(known["address"]), int(known["port"]))]
        return []

    def _open(self) -> bool:
        """Opens the store, if its address is this machine's and the port is free."""
        with socket.socket(socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((self.meeting.address, self.meeting.port))
            except socket.gaierror as problem:
                raise UserError(f"--rdzv {self.meeting.address}: {problem.strerror}") from problem
            except OSError as problem:
                if problem.errno in (errno.EADDRNOTAVAIL, errno.EADDRINUSE):
                    return False
                raise UserError(f"--rdzv {self.meeting.address}:{self.meeting.port}: {problem.strerror}") from problem
        with contextlib.suppress(OSError, RuntimeError):  # another agent of this machine was faster
            self._stores.enter_context(store(self.meeting.address, self.meeting.port))
            return True
        return False


def agentless(env: Mapping[str, str]) -> dict[str, str]:
    """The environment without what srun and Kubernetes' operators say about this agent among the agents: a rank would
    take it for its own."""
    if "LOCAL_RANK" in env:
        return dict(env)  # a rank of torchrun: to be refused
    drop = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID", "SLURM_LOCALID")
    mpi = ("OMPI_COMM_WORLD_", "PMI_")
    return {name: value for name, value in env.items() if name not in drop and not name.startswith(mpi)}


def interface_of(address: str) -> str | None:
    """The network interface that has this address, for gloo."""
    import psutil

    for name, found in psutil.net_if_addrs().items():
        if any(one.address == address for one in found):
            return name
    return None


def _route(address: str, port: int) -> str:
    try:
        return own_address(address, port)
    except socket.gaierror as problem:
        raise UserError(f"--rdzv {address}: {problem.strerror}") from problem
    except OSError as problem:
        raise UserError(f"--rdzv {address}: no route ({problem.strerror})") from problem
