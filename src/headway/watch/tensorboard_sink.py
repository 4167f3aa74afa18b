"""TensorBoard as a further sink. metrics.jsonl stays the complete record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headway.account.errors import UserError
from headway.account.events import CheckpointLine, EvalLine, Line, SessionStart, StepLine, TraceLine


class TensorboardSink:
    """Writes scalars into a folder that `tensorboard --logdir` reads.

    After a resume, the points of steps that are done again are purged from the view, so that no curve runs twice.

    Raises:
        UserError: TensorBoard is not installed.
    """

    def __init__(self, folder: Path) -> None:
        try:
            import tensorboard  # noqa: F401
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UserError(
                "log.tensorboard: TensorBoard is not installed; `pip install headway[sinks]`, or set it to false"
            ) from error
        self._make = SummaryWriter
        self._folder = folder
        self._writer: Any = None

    def tell(self, line: Line) -> None:
        if isinstance(line, SessionStart):
            purge = line.resumed_from + 1 if line.resumed_from else None
            # The default queue of 10 blocks the training thread as soon as the disk is slow.
            self._writer = self._make(str(self._folder), purge_step=purge, max_queue=10_000, flush_secs=10)
        elif self._writer is None:
            raise RuntimeError("an observer is told SessionStart before any other line")
        elif isinstance(line, StepLine):
            self._scalars(step_scalars(line), line.step, line.time)
        elif isinstance(line, EvalLine):
            self._scalars({"eval/nll": line.nll}, line.step, line.time)
        elif isinstance(line, CheckpointLine):
            self._scalars({"checkpoint/seconds": line.seconds}, line.step, line.time)
        elif isinstance(line, TraceLine):
            self._scalars(trace_scalars(line), line.step, line.time)

    def _scalars(self, values: dict[str, float | None], step: int, time: float) -> None:
        for tag, value in values.items():
            if value is not None:
                self._writer.add_scalar(tag, value, step, walltime=time)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def trace_scalars(line: TraceLine) -> dict[str, float | None]:
    """The shares of a periodic trace, by category and by cause of idling; nothing where it could not be read."""
    if not line.wall_ns:
        return {}
    values: dict[str, float | None] = {"trace/utilisation": line.utilisation, "trace/kernels": line.kernels or None}
    values |= {f"trace/account/{path}": ns / line.wall_ns for path, ns in line.account.items()}
    values |= {f"trace/idle/{cause}": ns / line.wall_ns for cause, ns in line.idle.items()}
    return values


def step_scalars(line: StepLine) -> dict[str, float | None]:
    """The scalars of a step by tag; None is not written. Rates are per second of this step's own wall clock."""
    seconds = line.wall_ns / 1e9
    values: dict[str, float | None] = {
        "train/loss": line.loss,
        "train/nll": line.nll,
        "train/grad_norm": line.grad_norm,
        "train/lr": line.lr,
        "throughput/mfu": line.mfu,
        "throughput/hfu": line.hfu,
        "memory/bytes": line.memory_bytes or None,
        "step/seconds": seconds,
    }
    if seconds:
        values["throughput/slots_per_s"] = line.slots / seconds
        values["throughput/tokens_per_s"] = line.tokens / seconds
        values["throughput/trained_tokens_per_s"] = line.trained_tokens / seconds
        shares: dict[str, float] = {}
        for path, ns in line.account.items():
            top = f"account/{path.partition('.')[0]}"
            shares[top] = shares.get(top, 0.0) + ns / line.wall_ns
        values.update(shares)
    return values
