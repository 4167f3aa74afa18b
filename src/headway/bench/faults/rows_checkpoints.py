"""Rows about saves that are disturbed: deaths at every moment, stuck processes, deletions."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

from headway.bench.faults.case import Case
from headway.bench.faults.small_state import (
    SmallState,
    end_quietly,
    forget_memory,
    in_process,
    own_memory,
    whole_losses,
)
from headway.guard import layout
from headway.guard.crash import VARIABLE
from headway.guard.memory import SHARED_MEMORY

# (phase, what is committed of the step that dies, is it in the saver?)
PHASES = [
    ("before-stage", None, False),
    ("mid-stage", None, False),
    ("staged", None, False),
    ("memory-before-manifest", None, True),
    ("memory-before-publish", None, True),
    ("memory-after-publish", "memory", True),
    ("before-write", "memory", True),
    ("mid-write", "memory", True),
    ("before-manifest", "memory", True),
    ("before-publish", "memory", True),
    ("after-publish", "memory", True),
    ("mid-prune", "memory", True),
]


def row_02(case: Case) -> None:
    """kill -9 of trainer and saver at each phase of a save: the newest committed one loads, losses go on hex-equal."""
    own_memory(case)
    twin = whole_losses(case.folder / "twin", 8)
    for phase, committed, in_saver in PHASES:
        folder = case.folder / phase

        def die(folder: Path = folder, phase: str = phase, in_saver: bool = in_saver) -> None:
            state = SmallState(folder)
            for step in (1, 2, 3):
                state.train(step)
                state.save()
            state.train(4)
            os.environ[VARIABLE] = f"{phase}@{2 if phase == 'mid-prune' else 4}{'+trainer' if in_saver else ''}"
            state.tiers.saver.close()  # the next saver inherits the crash point
            state.save(wait=False)
            state.train(8)
            state.settle()
            time.sleep(60)

        code = in_process(die)
        case.expect(code == -signal.SIGKILL, f"{phase}: killed, not exit code {code}")
        _wait_for_death(folder)
        for tier in ("memory", "disk"):
            if tier == "disk":
                _lose_memory()
            again = SmallState(folder)
            expected = 4 if committed and (tier == "memory" or phase in ("after-publish", "mid-prune")) else 3
            case.expect(again.step == expected, f"{phase}: {tier} goes on from {expected}, not {again.step}")
            case.expect(
                again.found is not None and again.found.ref.rejected == (), f"{phase}: nothing half is a candidate"
            )
            begun = again.step
            again.train(8)
            case.expect(
                again.losses == {step: twin[step] for step in range(begun + 1, 9)}, f"{phase}: {tier} hex-equal losses"
            )
            again.tiers.close(over=False)
        left = [path.name for path in (folder / "checkpoints").iterdir() if path.name.startswith(".")]
        case.expect(left == [], f"{phase}: what was half is swept, not {left}")
    case.measured(steps_lost=1)
    forget_memory()


def row_03(case: Case) -> None:
    """kill -9 of the saver alone: training goes on, the save is marked, tried again, and succeeds."""
    own_memory(case)
    os.environ[VARIABLE] = "mid-write@2"
    state = SmallState(case.folder)
    state.train(2)
    begun = time.monotonic()
    state.save(wait=False)
    state.train(3)
    while not state.told("saver") and time.monotonic() < begun + 100:
        state.train(state.step + 1)
        time.sleep(0.001)
    case.measured(detect_s=time.monotonic() - begun)
    state.settle()
    case.measured(recover_s=time.monotonic() - begun)
    why = [event.why for event in state.events if event.tier == "saver"]
    case.expect(len(why) == 1 and "SIGKILL" in why[0], f"one incident that names the signal, not {why}")
    case.expect(
        state.told("disk") == [(2, True)] and state.told("memory") == [(2, True)], "published by the second try"
    )
    case.expect(state.tiers.disk.list(verify=True)[0].verified is True, "and whole")
    os.environ.pop(VARIABLE)
    state.tiers.close(over=True)
    forget_memory()


def row_04(case: Case) -> None:
    """The trainer dies, its saver lives: it commits its own generation only, and nobody else's folder."""
    own_memory(case)
    twin = whole_losses(case.folder / "twin", 6)
    said = case.folder / "saver.pid"

    def die() -> None:
        state = SmallState(case.folder)
        state.train(1)
        state.save()
        state.train(2)
        end_quietly(state.tiers.saver.pid, signal.SIGSTOP)
        said.write_text(str(state.tiers.saver.pid))
        state.save(wait=False)
        state.train(3)
        os.kill(os.getpid(), signal.SIGKILL)

    case.expect(in_process(die) == -signal.SIGKILL, "the trainer is killed")
    orphan = int(said.read_text())
    root = case.folder / "checkpoints"
    state = SmallState(case.folder)
    case.expect(state.step == 1, f"it goes on from what was committed, step 1, not {state.step}")
    state.train(3)
    state.save()
    mine = [info.ref.name for info in state.tiers.disk.list()]
    os.kill(orphan, signal.SIGCONT)
    deadline = time.monotonic() + 60
    while _alive(orphan) and time.monotonic() < deadline:
        time.sleep(0.01)
    infos = state.tiers.disk.list(verify=True)
    case.expect(all(info.verified for info in infos), "every folder is whole")
    case.expect(set(mine) <= {info.ref.name for info in infos}, "the new run's stay")
    generations = [info.ref.generation for info in infos]
    case.expect(len(generations) == len(set(generations)), f"no generation is used twice: {generations}")
    case.expect(state.tiers.disk.newest_verified().step == 3, "the newest is the new run's")  # type: ignore[union-attr]
    state.train(6)
    case.expect(state.losses == {step: twin[step] for step in range(2, 7)}, "losses hex-equal")
    state.tiers.close(over=True)
    left = [path.name for path in root.iterdir() if path.name.startswith(layout.PARTIAL)]
    after = SmallState(case.folder)
    case.expect(not any(path.name.startswith(".") for path in root.iterdir()), f"what the orphan left is swept: {left}")
    after.tiers.close(over=True)
    forget_memory()


def row_10(case: Case) -> None:
    """The disk hangs: training is not held up, the save is given up in time, the memory copy serves."""
    own_memory(case)
    state = SmallState(case.folder)
    state.train(1)
    state.save()
    state.tiers.saver.close()
    os.environ[VARIABLE] = "before-write@2+stop"
    state.train(2)
    state.tiers.saver.timeout_s = 3.0
    state.save(wait=False)
    begun = time.monotonic()
    steps = 0
    while state.tiers.saver.busy and time.monotonic() < begun + 60:
        state.train(state.step + 1)
        steps += 1
    case.measured(detect_s=time.monotonic() - begun)
    state.settle()
    case.expect(steps > 1, f"training went on while the disk hung: {steps} steps")
    why = [event.why for event in state.events if event.tier == "disk" and not event.ok]
    case.expect(len(why) == 1 and "not done within" in why[0], f"the save is given up, not {why}")
    found = state.tiers.newest()
    case.expect(
        found is not None and (found.tier, found.ref.step) == ("memory", 2), "the memory copy of that step serves"
    )
    state.tiers.saver.timeout_s = 600.0
    os.environ.pop(VARIABLE)
    case.expect(state.save() and state.told("disk")[-1] == (state.step, True), "the next save succeeds")
    state.tiers.close(over=True)
    forget_memory()


def row_17(case: Case) -> None:
    """Deleting races with deaths and readers: verified ones stay, one being read stays, foreign files stay."""
    own_memory(case)
    state = SmallState(case.folder)
    for step in range(1, 6):
        state.train(step)
        state.save()
        steps = [info.ref.step for info in state.tiers.disk.list(verify=True) if info.verified]
        case.expect(steps == list(range(max(1, step - 1), step + 1)), f"after step {step} two verified stay: {steps}")
    store = state.tiers.disk
    oldest = store.list()[0].ref
    with layout.in_use(oldest.path):
        for step in (6, 7):
            state.train(step)
            state.save()
        case.expect(oldest.path.is_dir() and not store.verify(oldest), "one that is being read stays, whole")
        case.expect(any(not ok for _, ok in state.told("prune")), "and that is said")
    # Damage to the newest: nothing that is older goes while it would be the last that holds.
    newest = store.list()[-1].ref
    shard = newest.path / "__0_0.distcp"
    content = bytearray(shard.read_bytes())
    content[case.dice.randrange(len(content))] ^= 1
    shard.write_bytes(content)
    before = [info.ref.name for info in store.list()]
    store.prune(1)
    sound = [info for info in store.list(verify=True) if info.verified]
    case.expect(len(sound) >= 1, f"of {before} the last one that holds is never deleted")
    state.tiers.close(over=True)
    forget_memory()


def _lose_memory() -> None:
    for root in Path(os.environ[SHARED_MEMORY]).iterdir():
        shutil.rmtree(root)


def _wait_for_death(folder: Path) -> None:
    """Until no process holds one of the folder's partial saves."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if all(layout.claimed_elsewhere(work.path) is None for work in layout.work_folders(folder / "checkpoints")):
            return
        time.sleep(0.01)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
