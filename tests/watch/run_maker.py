"""Makes run folders as the trainer would: closed accounts, consistent counts, several sessions, lost steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from headway.account.events import (
    CheckpointLine,
    EvalLine,
    Flops,
    Line,
    RankLine,
    SessionEnd,
    SessionStart,
    StepLine,
)
from headway.record.folder import RunFolder
from headway.record.jsonl import JsonlWriter, read_jsonl

S = 10**9
DEVICE = "NVIDIA H200"
PEAK = 989e12
SHARES = {
    "compute.forward": 0.22,
    "compute.backward": 0.43,
    "compute.recompute": 0.08,
    "compute.loss": 0.07,
    "compute.optimizer": 0.05,
    "comm.dp": 0.04,
    "copy": 0.005,
    "data": 0.02,
    "host.launch": 0.03,
    "host.gc": 0.004,
    "host.logging": 0.003,
}


@dataclass
class Maker:
    """Writes lines of one run. Times are simulated; every account closes exactly."""

    root: Path
    world: int = 1
    steps: int = 200
    peak: float | None = PEAK
    step_s: float = 0.8
    spike_at: int | None = None
    skip_at: int | None = None
    slow_rank: int | None = None
    seed: int = 0
    now: float = 1_796_000_000.0
    lines: list[Line] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder = RunFolder(self.root).create()
        self.metrics = JsonlWriter(self.folder.metrics)
        self.ranks = [JsonlWriter(self.folder.rank(rank)) for rank in range(self.world)]
        self.rng = np.random.default_rng(self.seed)
        self.session = -1

    def put(self, line: Line) -> None:
        self.lines.append(line)
        self.metrics.append(line)

    def start(self, resumed_from: int = 0, gap_s: float = 0.0) -> None:
        self.now += gap_s
        self.session += 1
        self.run_ns = {"startup.launch": 4 * S, "startup.model": 9 * S, "startup.data": 2 * S}
        self.first = True
        self.at = resumed_from
        self.now += 15
        self.put(
            SessionStart(
                session=self.session, time=self.now, resumed_from=resumed_from, world_size=self.world, steps=self.steps,
                device=DEVICE, peak_flops=self.peak and self.peak * self.world,
                peak_source="published: bf16 dense" if self.peak else "",
                facts={"parameters": "135M", "global batch": "16 packs of 8,192 slots"},
            )
        )  # fmt: skip

    def run(self, until: int, eval_every: int = 0, save_every: int = 0) -> None:
        while self.at < until:
            self.at += 1
            self.step(self.at, saving=bool(save_every) and self.at % save_every == 0)
            if eval_every and self.at % eval_every == 0:
                self.evaluate(self.at)

    def step(self, number: int, saving: bool = False) -> StepLine:
        wall = self.step_s * (1 + 0.03 * abs(self.rng.standard_normal())) + (30 * self.step_s if self.first else 0)
        parts = {path: int(share * wall * S * self.rng.uniform(0.96, 1.0)) for path, share in SHARES.items()}
        wall_ns = int(wall * S)
        if saving:
            parts["checkpoint"] = int(1.4 * S)
            wall_ns += parts["checkpoint"]
        account = {**parts, "unaccounted": wall_ns - sum(parts.values())}
        slots = 16 * 8192 * self.world
        tokens = int(slots * self.rng.uniform(0.985, 0.999))
        skipped = "no trained token in the global batch" if number == self.skip_at else None
        trained = 0 if skipped else int(tokens * self.rng.uniform(0.5, 0.6))
        nll = 1.35 + 1.9 * float(np.exp(-number / 60)) + 0.05 * float(self.rng.standard_normal())
        norm = 0.8 + 2.0 * float(np.exp(-number / 30)) + 0.1 * abs(float(self.rng.standard_normal()))
        if number == self.spike_at:
            nll, norm = nll + 4.0, 41.0
        useful = int(0.48 * PEAK * self.world * self.step_s)
        flops = Flops(useful=useful, padding=useful // 100, recompute=useful // 8)
        self._count(wall_ns, parts.get("checkpoint", 0))
        self.now += wall_ns / S
        paid = wall_ns / S * (self.peak or 0) * self.world
        line = StepLine(
            session=self.session, step=number, time=self.now, epoch=0, documents=number * 40 * self.world,
            loss=None if skipped else nll, nll=None if skipped else nll, grad_norm=None if skipped else norm,
            lr=3e-4 * min(1.0, number / 20) * (0.55 + 0.45 * float(np.cos(np.pi * number / self.steps))),
            skipped=skipped, sequences=16 * self.world, slots=slots, tokens=tokens, trained_tokens=trained,
            wall_ns=wall_ns, account=account, flops=flops, mfu=useful / paid if paid else None,
            hfu=(useful + flops.recompute) / paid if paid else None, run_ns=self._run_ns(),
            memory_bytes=int(71.3 * 2**30), micro_batches=2,
        )  # fmt: skip
        self.put(line)
        self._rank_lines(line)
        return line

    def _rank_lines(self, line: StepLine) -> None:
        for rank, writer in enumerate(self.ranks):
            account = dict(line.account)
            # On the slow rank compute takes the time that the others spend waiting for it in communication.
            moved = account["comm.dp"] // 2
            slow, other = ("comm.dp", "compute.backward"), ("compute.forward", "comm.dp")
            source, target = slow if rank == self.slow_rank else other
            moved = int(moved * self.rng.uniform(0.2, 0.5)) if rank != self.slow_rank else moved
            account[source] -= moved
            account[target] += moved
            writer.append(
                RankLine(
                    session=line.session, step=line.step, rank=rank, wall_ns=line.wall_ns, account=account,
                    tokens=line.tokens // self.world, trained_tokens=line.trained_tokens // self.world,
                    memory_bytes=line.memory_bytes, host=f"node-{rank // 4}",
                )
            )  # fmt: skip

    def _count(self, wall_ns: int, checkpoint_ns: int) -> None:
        productive = wall_ns - checkpoint_ns
        if self.first:
            warm_up = max(0, productive - int(self.step_s * S))
            self.run_ns["compile"] = warm_up
            productive -= warm_up
            self.first = False
        self.run_ns["productive"] = self.run_ns.get("productive", 0) + productive
        if checkpoint_ns:
            self.run_ns["checkpoint_stall"] = self.run_ns.get("checkpoint_stall", 0) + checkpoint_ns

    def _run_ns(self) -> dict[str, int]:
        known = sum(self.run_ns.values())
        return {**self.run_ns, "unaccounted": known // 500}

    def evaluate(self, number: int, nll: float | None = None) -> None:
        self.run_ns["evaluation"] = self.run_ns.get("evaluation", 0) + 6 * S
        self.now += 6
        value = 1.42 + 1.8 * float(np.exp(-number / 60)) if nll is None else nll
        self.put(
            EvalLine(
                session=self.session, step=number, time=self.now, nll=value, tokens=81_234, documents=200, seconds=6.0
            )
        )  # fmt: skip

    def save(self, number: int) -> None:
        self.put(
            CheckpointLine(
                session=self.session, step=number, time=self.now, path=f"checkpoints/step-{number:08d}.g0001",
                bytes=int(1.61e9), seconds=1.4,
            )
        )  # fmt: skip

    def end(self, reason: str = "done") -> None:
        run_ns = self._run_ns()
        wall_ns = sum(run_ns.values())
        self.put(
            SessionEnd(
                session=self.session, time=self.now, step=self.at, reason=reason, wall_ns=wall_ns, run_ns=run_ns,
                account_cost_ns=wall_ns // 2000,
            )
        )  # fmt: skip

    def close(self) -> RunFolder:
        for writer in (self.metrics, *self.ranks):
            writer.close()
        return self.folder


def plain_run(root: Path, steps: int = 40, **options: object) -> RunFolder:
    """One session, start to end."""
    maker = Maker(root, steps=steps, **options)  # type: ignore[arg-type]
    maker.start()
    maker.run(steps, eval_every=10)
    maker.save(steps)
    maker.end()
    return maker.close()


def killed_and_resumed(root: Path, **options: object) -> RunFolder:
    """Killed after step 30, with its last checkpoint at 20; resumed there and done at 40."""
    maker = Maker(root, steps=40, **options)  # type: ignore[arg-type]
    maker.start()
    maker.run(20, eval_every=10, save_every=20)
    maker.save(20)
    maker.run(30)
    maker.start(resumed_from=20, gap_s=600.0)
    maker.run(40, eval_every=10)
    maker.end()
    return maker.close()


def rewrite(folder: RunFolder, change: Callable[[Any], Any], path: Path | None = None, kind: Any = None) -> None:
    """Plants a fault: changes (or drops, with None) lines of a file."""
    path = path or folder.metrics
    lines = [change(line) for line in read_jsonl(path, kind or Line).items]
    path.unlink()
    writer = JsonlWriter(path)
    for line in lines:
        for item in line if isinstance(line, list) else [line]:
            if item is not None:
                writer.append(item)
    writer.close()
