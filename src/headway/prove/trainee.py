"""One configuration's training, step by step, on batches that are handed to it: exactly what `headway train` runs."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from headway.account.events import Observer
from headway.account.run_clock import RunClock
from headway.config.run import RunConfig
from headway.data.batch import Batch
from headway.data.view import View
from headway.guard.memory import SHARED_MEMORY
from headway.model.dropout import silence
from headway.prove.rebatch import micro_batches
from headway.train.build import build_run
from headway.train.evaluate import held_out_sums
from headway.train.run import Run

MUON = 2.0**-8
"""One unit of rounding of bfloat16, which Muon computes in."""


@dataclass(frozen=True)
class StepFigures:
    """What a step says of itself: nll in nats per trained token, and the global gradient norm before clipping."""

    loss: float
    nll: float
    grad_norm: float


class Trainee:
    """A run built from its configuration and driven by hand. `noise`: how far its first weights are shaken, relative.

    reorder > 0 puts the documents of every step in another order: the same training, summed differently.
    """

    def __init__(self, config: RunConfig, scratch: Path, *, noise: float = 0.0, reorder: int = 0) -> None:
        self.config, self.reorder = config, reorder
        self.run = build_apart(config, scratch)
        self.run.supply.close()  # its batches are not wanted
        if noise:
            self._shake(noise)
            self._shake_what_muon_rounds()
        silence(self.module)  # dropout's draws depend on the batches' shape: no two layouts could agree

    @property
    def module(self) -> nn.Module:
        return self.run.learner.replicas.module

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    def batches(self, view: View, pieces: np.ndarray) -> list[Batch]:
        """These documents as this configuration's micro-batches, on its device."""
        trim = self.run.spikes.stream.options.trim
        made = micro_batches(self.config, view, pieces, reorder=self.reorder, trim=trim)
        return [batch.to(self.device) for batch in made]

    def update(self, batches: Sequence[Batch]) -> StepFigures:
        """One optimizer step at the full learning rate. Gradients stay on the parameters, clipped."""
        self.run.learner.optimizers.set_lr(1.0)
        trained = sum(batch.trained_tokens for batch in batches)
        made = self.run.fit.run(lambda parts: self.run.learner.update(parts, trained), batches)
        loss, nll, norm, *_ = made.tolist()
        return StepFigures(loss, nll, norm)

    def evaluate(self, batches: Sequence[Batch]) -> tuple[float, int]:
        """(sum of nll, trained tokens) without a gradient."""
        nll, tokens, _ = held_out_sums(self.run.learner.replicas, batches, self.device).tolist()
        return nll, int(tokens)

    def close(self) -> None:
        """Lets go of the folder and of the signals. The process stays usable for the next trainee."""
        self.run.lock.release()
        self.run.reporter.rank_file.close()

    def _shake(self, noise: float) -> None:
        generator = torch.Generator().manual_seed(1 + self.reorder)
        with torch.no_grad():
            for parameter in self.module.parameters():
                if parameter.requires_grad and parameter.is_floating_point():
                    by = torch.rand(parameter.shape, generator=generator).sub_(0.5).mul_(2 * noise).add_(1.0)
                    parameter.mul_(by.to(parameter.device, parameter.dtype))

    def _shake_what_muon_rounds(self) -> None:
        """One unit of rounding of bfloat16 on the gradients that Muon takes: it orthogonalises in bfloat16 whatever the
        run's precision (torch.optim.Muon), where what two runs share or not is a matter of single roundings."""
        generator = torch.Generator().manual_seed(1 + self.reorder)
        kept: list[tuple[Tensor, Tensor]] = []

        def shake(optimizer: torch.optim.Optimizer, *_: object) -> None:
            for parameter in (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
                kept.append((parameter, parameter.grad))
                by = torch.rand(parameter.shape, generator=generator).sub_(0.5).mul_(2 * MUON).add_(1.0)
                parameter.grad = parameter.grad * by.to(parameter.device, parameter.grad.dtype)

        def put_back(*_: object) -> None:
            for parameter, grad in kept:
                parameter.grad = grad
            kept.clear()

        for optimizer in self.run.learner.optimizers.items:
            if isinstance(optimizer, torch.optim.Muon):
                optimizer.register_step_pre_hook(shake)
                optimizer.register_step_post_hook(put_back)


def build_apart(config: RunConfig, scratch: Path, observers: Callable[[], Sequence[Observer]] = list) -> Run:
    """A run that leaves nothing outside `scratch`, whatever ends it: its memory tier is claimed there, not in /dev/shm.

    Nothing looks at its signals: one ends the command, as before.
    """
    memory = scratch / "memory"
    memory.mkdir(parents=True, exist_ok=True)
    former = os.environ.get(SHARED_MEMORY)
    os.environ[SHARED_MEMORY] = str(memory)
    try:
        run = build_run(prepared(config, scratch), None, RunClock(), observers=observers, say=lambda text: None)
    finally:
        os.environ.pop(SHARED_MEMORY)
        if former is not None:
            os.environ[SHARED_MEMORY] = former
    run.stop.close()
    if run.stop.requested:  # it came while the run was built
        run.lock.release()
        signal.raise_signal(run.stop.signal)
    return run


def prepared(config: RunConfig, scratch: Path) -> RunConfig:
    """The configuration for a run that is driven by hand: nothing saved, nothing shown, one rank."""
    values = config.model_dump()
    values["out"], values["name"] = scratch, "trainee"
    values["data"]["shards"] = config.shards
    values["log"].update(quiet=True, tensorboard=False)
    values["checkpoint"].update(every=None, memory_every=None, at_end=False, resume="auto", remote=None)
    values["parallel"].update(ranks=1, replicate=1, fsdp=None)
    if values["model"]["offload"] == "optimizer":  # one rank has no shards; where they lie changes no number
        values["model"]["offload"] = "none"
    return RunConfig.model_validate(values)
