"""What agents tell each other through the store: each its status, the leading one its order. Plain data."""

from __future__ import annotations

from typing import Literal

import msgspec

from headway.guard.beacon import Pulse
from headway.guard.hang import Hang
from headway.guard.report import Report

Phase = Literal["gather", "run", "end", "over"]


class Status(msgspec.Struct, kw_only=True):
    """One agent. `member` counts all that ever joined this store; `host`: the name its incidents are counted under, a
    label; `agent`: this process and no other, through all the meetings it joins.

    `beat` changes as long as the agent lives. `now_ns`: its monotonic clock. `generation`: the one that it runs or ran
    last, -1 before the first. `address`, `standby`: where its own store waits for the leader's to fail. `vitals`: what
    is wrong with its ranks' cards, network or disk, in words.
    """

    member: int
    host: str
    ranks: int
    address: str
    standby: int
    beat: int = 0
    now_ns: int = 0
    generation: int = -1
    running: bool = False
    leaving: bool = False
    report: Report | None = None
    pulses: dict[int, Pulse] = {}
    vitals: dict[int, str] = {}
    agent: str = ""


class Seat(msgspec.Struct, frozen=True, kw_only=True):
    """A machine of a generation: its ranks are `first` … `first + ranks - 1`."""

    member: int
    host: str
    ranks: int
    first: int
    address: str
    standby: int


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What all do.

    team: the machines of `generation`, the leading one first where it takes part. gather: wait. run: train as
    `generation`; with `pause`, save and stop: all start again with more machines, or without a slow one. end: stop
    `generation` at once (`condemned`: the rank whose fault it is, `why`: in words). over: leave with `code`. gone:
    agents that counted as lost; one that lives after all joins anew. lost_ago_ns: how long ago the dead generation's
    account ended, and its death was noticed. refused: agents that must leave, and why.
    """

    beat: int = 0
    phase: Phase = "gather"
    generation: int = -1
    leader: str = ""
    team: tuple[Seat, ...] = ()
    pause: bool = False
    condemned: Hang | None = None
    why: str = ""
    code: int = 0
    gone: tuple[int, ...] = ()
    lost_ago_ns: tuple[int, int] | None = None
    refused: dict[int, str] = {}


def places(team: tuple[Seat, ...]) -> list[str]:
    """The host of every rank."""
    return [seat.host for seat in team for _ in range(seat.ranks)]
