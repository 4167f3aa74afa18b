"""What a save costs: how long training stands still, what it loses to saves, and whether damage is ever accepted."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch
from torch import nn

from headway.guard.checkpoint import CheckpointStore
from headway.guard.layout import CheckpointRef
from headway.guard.tiers import Tiers
from headway.guard.training_state import Capture
from headway.guard.upkeep import Keep

_WIDTH = 2048
_ROWS = 16
_STEPS = 4
_RUN = f"bench-{os.getpid()}"  # two benches at once must not meet in shared memory


@dataclass
class SaveCost:
    """Seconds per save. `blocked`: in the call (`blocked_cpu`: of them this thread's), `fenced`: at the optimizer.

    `lost`: what a window of steps with one save took over the windows without next to it.
    """

    tier: str
    blocked: list[float] = field(default_factory=list)
    blocked_cpu: list[float] = field(default_factory=list)
    fenced: list[float] = field(default_factory=list)
    published: list[float] = field(default_factory=list)
    lost: list[float] = field(default_factory=list)
    saver_cpu: list[float] = field(default_factory=list)

    def lines(self, gigabytes: float) -> list[str]:
        still = [a + b for a, b in zip(self.blocked, self.fenced, strict=True)]
        lost = statistics.median(self.lost)
        cpu = statistics.median(self.saver_cpu)
        return [
            f"{self.tier}: stands still {_spread(still)} s a save of {gigabytes:.2f} GB "
            f"(the call {_spread(self.blocked)}, of which the processor worked {_spread(self.blocked_cpu)}, "
            f"the fence {_spread(self.fenced)})",
            f"{self.tier}: published after {_spread(self.published)} s; the saver's CPU {cpu:.2f} s",
            f"{self.tier}: lost {_spread(self.lost)} s a save = {lost / 60:.1%} of a minute "
            f"({cpu / 60 / (os.cpu_count() or 1):.1%} of all cores' time in the saver)",
        ]


@dataclass
class CheckpointReport:
    """`copy_s`: the same bytes copied in memory; `dcp_s`: a blocking save of DCP's to the disk, with our guarantees."""

    gigabytes: float
    first_s: float
    copy_s: float
    dcp_s: float
    step_s: float
    costs: list[SaveCost]

    def lines(self) -> list[str]:
        return [
            f"state {self.gigabytes:.2f} GB, step {self.step_s:.2f} s; one copy in memory {self.copy_s:.3f} s "
            f"({self.gigabytes / self.copy_s:.1f} GB/s); a blocking save to the disk {self.dcp_s:.2f} s",
            f"the first save (plans the files, takes the memory) {self.first_s:.2f} s",
            *(line for cost in self.costs for line in cost.lines(self.gigabytes)),
        ]


def bench_saves(gigabytes: float, rounds: int, threads: int, folder: Path | None = None) -> CheckpointReport:
    """Trains a stack of linear layers with AdamW whose state is `gigabytes`, with and without saves, in turn."""
    torch.set_num_threads(threads)
    with scratch(folder) as root:
        trained = Trained(gigabytes, root)
        model, optimizer, tiers, state = trained.model, trained.optimizer, trained.tiers, trained.state
        step, waited, size, first_s = trained.step, trained.waited, trained.gigabytes, trained.first_s
        costs = [SaveCost("memory"), SaveCost("disk")]
        plain: list[float] = []
        number = 10
        for _ in range(rounds):
            for cost in costs:
                before = _window(step)
                number += 1
                _measure(cost, number, tiers, state, step, waited, before, plain)
        copy_s = _copy_s(model, optimizer)
        started = time.perf_counter()
        tiers.disk.save(number + 1, state.tree(), {}, {}, above=number + 10)
        dcp_s = time.perf_counter() - started
        tiers.close(over=True)
        return CheckpointReport(size, first_s, copy_s, dcp_s, statistics.median(plain) / _STEPS, costs)


class Trained:
    """A stack of linear layers under AdamW with a state of `gigabytes`, whose saves have taken their memory.

    waited: seconds at the fence, a step. first_s: of the first save, which plans the files and takes the memory.
    """

    def __init__(self, gigabytes: float, root: Path) -> None:
        layers = max(1, round(gigabytes * 1e9 / 12 / _WIDTH / _WIDTH))
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(layers)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.tiers = Tiers(CheckpointStore(root / "checkpoints", _RUN), root)
        if self.tiers.off:
            raise RuntimeError(self.tiers.off)
        self.state = Capture(self.model, [self.optimizer])
        self.gigabytes = sum(p.nbytes for p in self.model.parameters()) * 3 / 1e9
        self.waited: list[float] = []
        self._batch = torch.randn(_ROWS, _WIDTH)
        self.step()
        started = time.perf_counter()
        self.save(1, disk=False)
        self.first_s = time.perf_counter() - started
        for number in (2, 3):  # the second room is taken with the second save
            self.tiers.settle()
            self.tiers.poll()
            self.save(number, disk=False)
            self.step()
        self.tiers.settle()
        self.tiers.poll()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self._batch).square().mean().backward()
        started = time.perf_counter()
        self.tiers.fence()
        self.waited.append(time.perf_counter() - started)
        self.optimizer.step()

    def save(self, number: int, *, disk: bool, keep: Keep | None = None) -> None:
        if not self.tiers.save(number, self.state.tree(), {}, {}, disk=disk, keep=keep):
            raise RuntimeError("the save before is still under way")


def _window(step: Callable[[], None]) -> float:
    started = time.perf_counter()
    for _ in range(_STEPS):
        step()
    return time.perf_counter() - started


def _measure(
    cost: SaveCost,
    number: int,
    tiers: Tiers,
    state: Capture,
    step: Callable[[], None],
    waited: list[float],
    before: float,
    plain: list[float],
) -> None:
    """A window of steps that begins with a save and lasts until it is published, against one without."""
    assert tiers.saver.pid is not None
    saver = psutil.Process(tiers.saver.pid)
    cpu = sum(saver.cpu_times()[:2])
    waited.clear()
    worked = time.thread_time()
    started = time.perf_counter()
    keep = Keep(last=1)
    begun = tiers.save(number, state.tree(), {}, {}, disk=cost.tier == "disk", keep=keep)
    assert begun
    cost.blocked.append(time.perf_counter() - started)
    cost.blocked_cpu.append(time.thread_time() - worked)
    steps = 0
    while tiers.saver.busy or steps < _STEPS:
        step()
        steps += 1
    with_save = time.perf_counter() - started
    after = _window(step)
    cost.fenced.append(sum(waited))
    cost.saver_cpu.append(sum(saver.cpu_times()[:2]) - cpu)
    (event,) = [event for event in tiers.poll() if event.tier == cost.tier]
    if not event.ok:
        raise RuntimeError(event.why)
    cost.published.append(event.seconds)
    each = (before + after) / 2 / _STEPS
    cost.lost.append(with_save - steps * each)
    plain += [before, after]


def _copy_s(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    sources = [t for p in model.parameters() for t in (p.detach(), *optimizer.state[p].values()) if t.numel() > 1]
    targets = [torch.empty_like(source) for source in sources[: len(model) * 3 // 4 or 1]]  # type: ignore[arg-type]
    best = float("inf")
    for _ in range(3):
        started = time.perf_counter()
        for index, source in enumerate(sources):
            targets[index % len(targets)].copy_(source)
        best = min(best, time.perf_counter() - started)
    return best


@dataclass
class Damage:
    """`accepted`: damaged checkpoints that were believed; `rejected_good`: whole ones that were not."""

    injected: int
    accepted: int
    good_checked: int
    rejected_good: int
    kinds: dict[str, int]

    def lines(self) -> list[str]:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.kinds.items()))
        return [
            f"{self.injected} injected corruptions ({kinds}): {self.accepted} accepted; "
            f"{self.good_checked} good ones checked: {self.rejected_good} rejected"
        ]


def bench_damage(count: int, seed: int = 0) -> Damage:
    """Damages one file of a small checkpoint at a time, in both tiers, and asks whether it is still believed."""
    dice = random.Random(seed)
    found = Damage(0, 0, 0, 0, {})
    with scratch(None) as root:
        for tier, store in _small_checkpoints(root).items():
            older, newer = (info.ref for info in store.list())
            for _ in range(count // 2 if tier == "memory" else count - count // 2):
                kind = _damage(dice, older, newer, lambda ref=newer, at=store: _believed(at, ref), found)  # type: ignore[misc]
                found.kinds[kind] = found.kinds.get(kind, 0) + 1
                found.good_checked += 1
                found.rejected_good += not _believed(store, newer)
    return found


def _believed(store: CheckpointStore, ref: CheckpointRef) -> bool:
    return not CheckpointStore(store.root, store.run_id).verify(ref)  # a new store trusts nothing


def _small_checkpoints(root: Path) -> dict[str, CheckpointStore]:
    """Two checkpoints of equal layout in memory and on the disk."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    state = Capture(model, [optimizer])
    tiers = Tiers(CheckpointStore(root / "checkpoints", _RUN), root)
    for number in (1, 2):
        model(torch.ones(2, 64)).sum().backward()
        tiers.fence()
        optimizer.step()
        tiers.save(number, state.tree(), {"step": number}, {})
        tiers.settle()
        tiers.poll()
    assert tiers.memory is not None
    copy = CheckpointStore(root / "memory-copy", _RUN)
    shutil.copytree(tiers.memory.root, copy.root)
    tiers.close(over=True)
    return {"memory": copy, "disk": tiers.disk}


def _damage(
    dice: random.Random, older: CheckpointRef, newer: CheckpointRef, believed: Callable[[], bool], found: Damage
) -> str:
    """Injects one damage, counts, and undoes it. Returns its kind."""
    while True:
        file = dice.choice(sorted(newer.path.iterdir()))
        content = file.read_bytes()
        kind = dice.choice(("bit flip", "zeroed hole", "truncation", "missing file", "file of another step"))
        changed = bytearray(content)
        if kind == "bit flip":
            changed[dice.randrange(len(changed))] ^= 1 << dice.randrange(8)
        elif kind == "zeroed hole":
            at = dice.randrange(len(changed))
            size = min(len(changed) - at, dice.choice((1, 512, 4096, 65536)))
            changed[at : at + size] = bytes(size)
        elif kind == "truncation":
            del changed[dice.choice((0, len(changed) // 2, len(changed) - 1)) :]
        elif kind == "file of another step":
            changed = bytearray((older.path / file.name).read_bytes())
        if kind == "missing file" or changed != content:
            break
    file.unlink()
    if kind != "missing file":
        file.write_bytes(changed)
    found.injected += 1
    found.accepted += believed()
    file.write_bytes(content)
    return kind


@dataclass
class Growth:
    """Before and after `saves` saves: resident bytes of this process and of its saver, shared memory, open files.

    Without what the allocator keeps for later: a freed gradient goes back to the system in one step and not in another.
    """

    saves: int
    resident: tuple[int, int]
    saver: tuple[int, int]
    shared: tuple[int, int]
    files: tuple[int, int]

    def lines(self) -> list[str]:
        mb = [f"{a / 1e6:.1f} → {b / 1e6:.1f} MB" for a, b in (self.resident, self.saver, self.shared)]
        return [
            f"{self.saves} saves: resident {mb[0]}, saver {mb[1]}, shared memory {mb[2]}, "
            f"open files {self.files[0]} → {self.files[1]}"
        ]


def bench_growth(saves: int = 100, megabytes: float = 24.0) -> Growth:
    """Saves again and again, to memory and disk, and looks at what the processes hold."""
    with scratch(None) as root:
        width = int((megabytes * 1e6 / 12) ** 0.5)
        model = nn.Linear(width, width, bias=False)
        optimizer = torch.optim.AdamW(model.parameters())
        tiers = Tiers(CheckpointStore(root / "checkpoints", _RUN), root)
        state = Capture(model, [optimizer])
        seen = []
        for number in range(1, saves + 11):
            model(torch.ones(1, width)).sum().backward()
            tiers.fence()
            optimizer.step()
            tiers.save(number, state.tree(), {}, {}, keep=Keep(last=1))
            tiers.settle()
            tiers.poll()
            if number in (10, saves + 10):  # ten to warm up
                seen.append(_held(tiers))
        tiers.close(over=True)
        first, last = seen
        return Growth(saves, *zip(first, last, strict=True))


def _held(tiers: Tiers) -> tuple[int, int, int, int]:
    assert tiers.saver.pid is not None and tiers.memory is not None
    with contextlib.suppress(AttributeError):  # glibc's
        ctypes.CDLL(None).malloc_trim(0)
    process = psutil.Process()
    shared = sum(file.stat().st_blocks * 512 for file in tiers.memory.root.rglob("*") if file.is_file())
    return process.memory_info().rss, psutil.Process(tiers.saver.pid).memory_info().rss, shared, process.num_fds()


def _spread(values: list[float]) -> str:
    return f"{min(values):.3f}–{statistics.median(values):.3f}–{max(values):.3f}"


@contextlib.contextmanager
def scratch(folder: Path | None) -> Iterator[Path]:
    root = Path(tempfile.mkdtemp(prefix="headway-bench-", dir=folder))
    try:
        yield root
    finally:
        shutil.rmtree(root, ignore_errors=True)
