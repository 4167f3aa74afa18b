"""Who is there: when each agent was last heard of, by the listener's own monotonic clock."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from headway.guard.beacon import Pulse
from headway.guard.nodes.messages import Status

_DRIFT_NS = 500_000_000
_DOUBT_S = 0.5


@dataclass(slots=True)
class Heard:
    """`at`: seconds, when its beat last changed; `since`: when it was first heard. `offset_ns`: our clock less its
    clock."""

    status: Status
    at: float
    offset_ns: int
    since: float = 0.0

    def pulses(self) -> dict[int, Pulse]:
        """Its ranks' beacons in our clock."""
        shift = self.offset_ns
        return {
            rank: replace(
                pulse,
                beat_ns=pulse.beat_ns + shift,
                heard_ns=pulse.heard_ns + shift,
                told_ns=pulse.told_ns and pulse.told_ns + shift,
                first_ns=pulse.first_ns and pulse.first_ns + shift,
            )
            for rank, pulse in self.status.pulses.items()
        }


@dataclass
class Roll:
    """`lost_s`: seconds without a new beat after which an agent counts as gone. One that has gone stays so: when it
    comes back it joins anew, under another number."""

    lost_s: float
    heard: dict[int, Heard] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)

    def note(self, now: float, status: Status) -> None:
        if status.member in self.gone:
            return
        before = self.heard.get(status.member)
        if before is not None and before.status.beat == status.beat:
            return
        offset = round(now * 1e9) - status.now_ns
        # Kept while it holds: a beacon that did not move must not seem to, because a message took longer.
        if before is not None and abs(offset - before.offset_ns) < _DRIFT_NS:
            offset = before.offset_ns
        self.heard[status.member] = Heard(status, now, offset, before.since if before is not None else now)

    def silent_s(self, now: float, member: int) -> float:
        heard = self.heard.get(member)
        return now - heard.at if heard is not None else float("inf")

    def sweep(self, now: float) -> None:
        """Takes those out that are silent for too long or leave."""
        for member, heard in list(self.heard.items()):
            if now - heard.at > self.lost_s or heard.status.leaving:
                self.gone.add(member)

    def here(self) -> dict[int, Heard]:
        return {member: heard for member, heard in self.heard.items() if member not in self.gone}

    def by_host(self) -> dict[str, Heard]:
        """Who speaks for each host: of one agent that joined again its newest number; of several agents the first, for
        one that has just died is still here while the one started in its place speaks already."""
        found: dict[str, Heard] = {}
        for _, heard in sorted(self.here().items()):
            known = found.get(heard.status.host)
            if known is None or known.status.agent == heard.status.agent:
                found[heard.status.host] = heard
        return found

    def doubles(self, now: float) -> dict[int, str]:
        """Agents under the name of another one that lives: had it died, its silence would be known by now."""
        found = {}
        first = self.by_host()
        for member, heard in self.here().items():
            known = first[heard.status.host].status
            if known.agent != heard.status.agent and now - heard.since > self.lost_s + _DOUBT_S:
                found[member] = known.agent
        return found


def compact(pulse: Pulse) -> Pulse:
    """A pulse with three step times instead of all, that have the same median and 99th percentile."""
    known = (pulse.median_ns(), pulse.median_ns(), pulse.p99_ns()) if pulse.durations else ()
    return replace(pulse, durations=known)
