"""Keeps a run alive: starts its ranks, watches their beacons, and starts them anew where the newest checkpoint ends.

A restart costs nothing from any budget as long as the run gets further. It stops where it cannot: a user's mistake, the
same death twice at one step, several starts without a new step. SIGTERM is not a failure: the ranks save and leave
with 75, and so does the supervisor.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from headway.account.events import Incident
from headway.account.run_clock import LOST
from headway.guard import launch
from headway.guard.beacon import STACK_SIGNAL, Pulse, read_pulse, stack_path
from headway.guard.deaths import HANG, Death, Judgement, examine
from headway.guard.generation import CLEAN, EXIT_USER, Ended, Place, Rank, Signals, Watched, run_generation, store
from headway.guard.hang import Hang, HangJudge
from headway.guard.ledger import Ledger
from headway.guard.oom import OomCounter
from headway.guard.processes import Start
from headway.guard.signals import EXIT_PREEMPTED

RESTART = "restarted from the newest verified checkpoint"
_STACK_WAIT_S = 0.5
_FRAMES = 3


@dataclass
class Supervisor:
    """Runs `ranks` ranks of `start` until they are done. `ledger`: where deaths are written down."""

    start: Start
    ranks: int
    ledger: Ledger
    logs: Path
    env: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    hang_least_s: float = 5.0
    judgement: Judgement = field(default_factory=Judgement)

    def run(self) -> int:
        """The exit code: 0, 75 when preempted with the state saved, 2 for a user's mistake, else of what failed."""
        base = launch.rankless(self.ranks, self.env)
        with launch.work_folder() as work, launch.received() as signals:
            generation = 0
            lost: _Lost | None = None
            while True:
                folder = work.path / f"g{generation:04d}"
                folder.mkdir()
                oom = OomCounter()
                watch = _Watch(folder, self.ranks, HangJudge(least_s=self.hang_least_s), self.ledger, lost)
                settings = base if lost is None else {**base, LOST: lost.to_json()}
                with store() as port:
                    place = Place(self.ranks, self.ranks, port=port)
                    ended = run_generation(
                        self.start, place, settings, self.logs, folder, signals,
                        generation=generation, at_once=True, watch=watch,
                    )  # fmt: skip
                code = self._final(ended, signals)
                if code is not None:
                    watch.settle()
                    return code
                pulses = watch.pulses()
                watch.settle()
                death = examine(ended, pulses, oom)
                hopeless = self.judgement.hopeless(death, max((pulse.step for pulse in pulses.values()), default=0))
                incident = self._write_down(death, folder, hopeless)
                if hopeless is not None:
                    launch.say(f"stopped: {hopeless}; the newest checkpoint is kept")
                    return _exit_code(ended)
                lost = _Lost.of(incident, ended, pulses)
                generation += 1
                if signals.received:  # it came while nothing ran: all there is to save is saved
                    return EXIT_PREEMPTED

    def _final(self, ended: Ended, signals: Signals) -> int | None:
        """The code of a generation after which none follows; None to judge its death."""
        mistake = ended.code == EXIT_USER or (ended.cause is not None and ended.cause.user)
        if ended.first is None or mistake or signals.received:
            return launch.verdict(ended, signals)
        return None

    def _write_down(self, death: Death, folder: Path, hopeless: str | None) -> Incident:
        link = self._keep_stack(death, folder)
        return self.ledger.record(
            death.fault,
            death.step,
            rank=death.rank,
            phase=death.phase,
            evidence=death.evidence,
            action=RESTART if hopeless is None else "stopped the run",
            detect_s=death.detect_s,
            link=link,
        )

    def _keep_stack(self, death: Death, folder: Path) -> str:
        """Keeps what a hung rank wrote of its threads; returns where, empty when it wrote nothing."""
        stack = stack_path(folder, death.rank or 0)
        if death.fault != HANG or not stack.is_file() or not stack.stat().st_size:
            return ""
        kept = self.logs / f"hang-{death.step:08d}-rank-{death.rank or 0:05d}.stack"
        kept.write_bytes(stack.read_bytes())
        return f"{self.logs.name}/{kept.name}"


@dataclass(frozen=True)
class _Lost:
    """What a death cost so far; the next generation's account begins where the dead one's ended."""

    incident: Incident
    told_ns: int
    detected_ns: int
    furthest: int
    step_ns: int

    @classmethod
    def of(cls, incident: Incident, ended: Ended, pulses: Mapping[int, Pulse]) -> _Lost:
        detected = round(ended.detected * 1e9)
        zero = pulses.get(0)
        return cls(
            incident,
            zero.told_ns if zero is not None and zero.told_ns else detected,
            detected,
            max((pulse.step for pulse in pulses.values()), default=0),
            zero.median_ns() if zero is not None else 0,
        )

    def to_json(self) -> str:
        return json.dumps({"told_ns": self.told_ns, "detected_ns": self.detected_ns})


class _Watch:
    """What the supervisor looks at while a generation runs: hangs, and when the loss of the last death is known."""

    def __init__(self, folder: Path, ranks: int, judge: HangJudge, ledger: Ledger, lost: _Lost | None) -> None:
        self._folder, self._ranks, self._judge, self._ledger, self._lost = folder, ranks, judge, ledger, lost

    def pulses(self) -> dict[int, Pulse]:
        found = {rank: read_pulse(self._folder, rank) for rank in range(self._ranks)}
        return {rank: pulse for rank, pulse in found.items() if pulse is not None}

    def __call__(self, alive: Sequence[Rank]) -> Watched | None:
        pulses = self.pulses()
        self._settle(pulses)
        living = {rank.rank: pulses[rank.rank] for rank in alive if rank.rank in pulses}
        if len(living) < self._ranks:  # some are still starting, or leaving
            return None
        hang = self._judge.judge(time.monotonic_ns(), living)
        if hang is None:
            return None
        process = next(rank for rank in alive if rank.rank == hang.rank)
        return Watched(hang.rank, with_stack(hang, self._folder, process))

    def settle(self) -> None:
        """The generation has ended: write down what the death before it had cost, if that is known by now."""
        self._settle(self.pulses())

    def _settle(self, pulses: Mapping[int, Pulse]) -> None:
        zero = pulses.get(0)
        if self._lost is None or zero is None or not zero.first_ns:
            return
        lost, self._lost = self._lost, None
        steps = max(0, lost.furthest - zero.resumed_from)
        recover_s = (zero.first_ns - lost.detected_ns) / 1e9
        seconds = (zero.first_ns - lost.told_ns + steps * lost.step_ns) / 1e9
        self._ledger.amend(lost.incident, steps_lost=steps, seconds_lost=seconds, recover_s=recover_s)


def with_stack(hang: Hang, folder: Path, rank: Rank) -> Hang:
    """The hang with what the rank's main thread was doing: from py-spy where it is, else written by the rank itself."""
    if _state(rank.process.pid) == "T":
        return replace(hang, evidence=f"{hang.evidence}; the process is stopped (SIGSTOP)")
    frames = _frames(folder, rank)
    told = f"{hang.evidence}; it is in {' < '.join(frames)}" if frames else hang.evidence
    return replace(hang, evidence=told)


def _frames(folder: Path, rank: Rank) -> list[str]:
    path = stack_path(folder, rank.rank)
    if not path.is_file():  # no handler is installed: the signal would kill it
        return []
    rank.send(STACK_SIGNAL)
    deadline = time.monotonic() + _STACK_WAIT_S
    text = ""
    while time.monotonic() < deadline and "most recent call first" not in text.rpartition("Current thread")[2]:
        time.sleep(0.02)
        text = path.read_text(errors="replace")
    text = text or _py_spy(rank.process.pid)
    main = text.rpartition("Current thread")[2] or text
    lines = [line.strip() for line in main.splitlines() if line.strip().startswith("File ")]
    return [_short(line) for line in lines[:_FRAMES]]


def _short(line: str) -> str:
    # File "/…/torch/distributed/x.py", line 12 in f
    path, _, rest = line.removeprefix('File "').partition('", line ')
    number, _, function = rest.partition(" in ")
    return f"{function} ({Path(path).name}:{number})"


def _py_spy(pid: int) -> str:
    try:
        done = subprocess.run(
            ["py-spy", "dump", "--nonblocking", "--pid", str(pid)], capture_output=True, text=True, timeout=5
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def _exit_code(ended: Ended) -> int:
    code = ended.code
    if code in CLEAN or (ended.condemned is not None):
        return 1
    return 128 - code if code < 0 else code
