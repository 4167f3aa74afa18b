"""Documents that go bad and numbers that stop being numbers, planted into a run of the campaign."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from headway.data.store import ShardFolder
from headway.train.run import Run

Rewrite = Callable[[np.ndarray], np.ndarray]


def nan_in_a_gradient(run: Run) -> str:
    """One element of one weight's gradient, once; returns the weight's name."""
    name = "model.layers.0.mlp.up_proj.weight"

    def poison(gradient: torch.Tensor) -> torch.Tensor:
        hook.remove()
        gradient = gradient.clone()
        gradient[3, 4] = math.nan
        return gradient

    hook = run.learner.replicas.module.get_parameter(name).register_hook(poison)
    return name


def infinite_loss() -> None:
    """The next loss that this process computes is infinite."""
    from headway.train import step

    real: Any = step.forward_loss

    def overflow(*args: Any, **options: Any) -> Any:
        step.forward_loss = real
        found = real(*args, **options)
        return found._replace(loss=found.loss * math.inf)

    step.forward_loss = overflow


def longest_of(run: Run, step: int) -> int:
    """The raw document with the most tokens in the batch of a step (counted from 1)."""
    batch = run.spikes.stream.global_batch(run.position)
    for _ in range(step - run.step - 1):
        batch = run.spikes.stream.global_batch(batch.next)
    return int(batch.documents[np.argmax(batch.lengths)])


def rewrite(run: Run, raw: int, tokens: Rewrite) -> None:
    """From here on a document of this run has other tokens."""
    number, document = run.spikes.stream.view.locate(raw)
    store: Any = run.spikes.stream.view.stores[number]
    store.tokens = _other(store.tokens, document, tokens)


def rewrite_in_every_store(document: int, tokens: Rewrite) -> None:
    """The same for every folder of shards that this process and its children will read, from their first batch on."""
    real: Any = ShardFolder.tokens

    def planted(self: ShardFolder, doc: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        found: np.ndarray = real(self, doc, start, stop)
        return tokens(np.array(found)) if doc == document else found

    ShardFolder.tokens = planted  # type: ignore[method-assign]


def _other(read: Any, document: int, tokens: Rewrite) -> Any:
    def planted(doc: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        found: np.ndarray = read(doc, start, stop)
        return tokens(np.array(found)) if doc == document else found

    return planted


def garbage(seed: int, vocab: int) -> Rewrite:
    return lambda ids: np.random.default_rng(seed).integers(0, vocab, len(ids)).astype(ids.dtype)


def repeated(token: int) -> Rewrite:
    return lambda ids: np.full_like(ids, token)


def bad_id(ids: np.ndarray) -> np.ndarray:
    ids[len(ids) // 2] = 9999
    return ids


def ten_times_as_long(ids: np.ndarray) -> np.ndarray:
    return np.tile(ids, 10)


class TooHighARate:
    """The run's schedule, with a rate 300 times too high in `steps` the first `times` times that training is there."""

    def __init__(self, schedule: Any, steps: range, times: int) -> None:
        self._schedule, self._steps, self._times, self._came = schedule, steps, times, 0

    def factor(self, step: int) -> float:
        self._came += step == self._steps.start
        high = step in self._steps and self._came <= self._times
        return float(self._schedule.factor(step)) * (300.0 if high else 1.0)
