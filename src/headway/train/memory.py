"""How the model is made to fit: a recompute level from the estimate, confirmed on the worst pack, raised on failure.

Every decision is made from what all ranks know alike, so that all of them go to the same next level.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from headway.account.errors import UserError
from headway.data.batch import Batch
from headway.data.split import most_parts, split_batch
from headway.model.recompute import set_recompute
from headway.plan.activations import Level
from headway.train.step import OutOfMemory

T = TypeVar("T")
Told = Callable[[str, str, float], None]
"""evidence, action, seconds lost"""


@dataclass
class Fit:
    """The recompute level in force, and the levels and smaller micro-batches that are left.

    levels: those that may still be tried, the present one first (one only where the run file fixes it).
    most: over all ranks, the most parts into which a micro-batch of a step can be cut (collective); 1 forbids cutting.
    """

    module: torch.nn.Module
    levels: list[Level]
    most: Callable[[int], int]
    tell: Told
    parts: int = 1
    _tried: list[str] = field(default_factory=list)

    @property
    def level(self) -> Level:
        return self.levels[0]

    def run(self, work: Callable[[Sequence[Batch]], T], micro_batches: Sequence[Batch]) -> T:
        """`work(micro_batches)`, again on the next level for as long as some rank runs out of memory.

        Each attempt starts from the same random state, so dropout draws what it would have drawn.

        Raises:
            UserError: on all ranks, when nothing smaller is left.
        """
        while True:
            began = time.perf_counter()
            random = random_state()
            try:
                return work([part for batch in micro_batches for part in split_batch(batch, self.parts)])
            except OutOfMemory as short:
                evidence = str(short)
            set_random_state(random)
            self._go_further(evidence, micro_batches, time.perf_counter() - began)

    def _go_further(self, evidence: str, micro_batches: Sequence[Batch], seconds: float) -> None:
        self._tried.append(f"recompute {self.level}" + (f", {self.parts} parts" if self.parts > 1 else ""))
        if len(self.levels) > 1:
            self.levels.pop(0)
            set_recompute(self.module, self.level)
            self.tell(evidence, f"model.recompute goes to {self.level}; the step is made again", seconds)
            return
        most = self.most(max(most_parts(batch) for batch in micro_batches))
        if self.parts < most:
            self.parts = min(most, 2 * self.parts)
            self.tell(evidence, f"micro-batches are cut into {self.parts}; the step is made again", seconds)
            return
        raise UserError(
            f"{evidence}; tried {', then '.join(self._tried)}: lower data.slots, shard over more ranks "
            "(parallel.fsdp), or set model.recompute=auto and model.offload=activations"
        )


@contextmanager
def keep_random_state() -> Iterator[None]:
    """Afterwards torch's generators of this rank's devices are as they were."""
    state = random_state()
    try:
        yield
    finally:
        set_random_state(state)


def random_state() -> tuple[torch.Tensor, torch.Tensor | None]:
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
    return torch.get_rng_state(), cuda


def set_random_state(state: tuple[torch.Tensor, torch.Tensor | None]) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1])
