"""How often the guard sees a poisoned document, and names it: seeded injections into a small real training."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from headway.account.run_clock import RunClock
from headway.bench.spike_streams import NOISES, score
from headway.config.run import RunConfig
from headway.prove.trainee import prepared
from headway.train.build import build_run
from headway.train.loop import train
from headway.train.memory import random_state
from headway.train.run import Run
from headway.train.spikes import Launched

KINDS = ("garbage tokens", "one token repeated")


@dataclass
class Injections:
    """seen: beyond the limits at its own step. named: exactly the poisoned document set aside, of those seen."""

    made: Counter[str] = field(default_factory=Counter)
    seen: Counter[str] = field(default_factory=Counter)
    named: Counter[str] = field(default_factory=Counter)
    looks: list[int] = field(default_factory=list)
    false_alarms: int = 0
    clean_steps: int = 0

    def lines(self) -> list[str]:
        text = [f"clean steps {self.clean_steps}, false alarms {self.false_alarms}"]
        for kind in self.made:
            text.append(
                f"{kind}: {self.made[kind]} injected, {self.seen[kind]} seen at their step, "
                f"{self.named[kind]} of them named exactly ({self.named[kind] / self.made[kind]:.1%} of all)"
            )
        if self.looks:
            low, middle, high = (int(np.quantile(self.looks, q, method="nearest")) for q in (0, 0.5, 1))
            text.append(f"looks at a batch to find the cause: {low}–{middle}–{high}")
        return text


def inject(config: RunConfig, scratch: Path, steps: int, injections: int, seed: int = 0) -> Injections:
    """Trains `steps` steps, then poisons one document of each of the batches that would come, one after the other.

    The weights stay those behind the last step, and each batch is looked at as training would look at it: clean first.
    Documents of at least 32 tokens are poisoned, of which enough are trained on for a loss of their own.
    """
    found = Injections(clean_steps=steps)
    values = prepared(config, scratch).model_dump()
    values["train"].update(steps=steps, epochs=None, tokens=None)
    values["name"] = "spikes"
    run = build_run(RunConfig.model_validate(values), None, RunClock(), observers=list, say=lambda text: None)
    run.export = lambda: None
    told = run.spikes.tell

    def tell(*said: Any) -> None:
        found.false_alarms += 1
        told(*said)

    run.spikes.tell = tell
    train(run)
    dice = np.random.default_rng(seed)
    for number in range(injections):
        _inject(run, KINDS[number % len(KINDS)], dice, found)
    return found


def _inject(run: Run, kind: str, dice: np.random.Generator, found: Injections) -> None:
    spikes = run.spikes
    batch = spikes.stream.global_batch(run.position)
    run.position = batch.next
    step = run.step + 1
    at = Launched(step, batch, spikes.watcher.limits(step, spikes.kind), random_state())
    whole = spikes.look(at, frozenset())
    assert whole is not None
    found.clean_steps += 1
    found.false_alarms += bool(at.limits.beyond(whole.figures.watched()))
    # What is hardly trained on can neither be seen nor do harm.
    long = [
        int(raw)
        for raw, length in zip(batch.documents, batch.lengths, strict=True)
        if length >= 32 and whole.documents[int(raw)][1]
    ]
    if not long:
        return
    raw = int(dice.choice(long))
    number, document = spikes.stream.view.locate(raw)
    store = spikes.stream.view.stores[number]
    read, vocabulary, token = store.tokens, store.vocab_size, int(dice.integers(store.vocab_size))

    def planted(doc: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        ids = read(doc, start, stop)
        if doc != document:
            return ids
        if kind == "one token repeated":
            return np.full_like(ids, token)
        return np.random.default_rng(raw).integers(0, vocabulary, len(ids)).astype(ids.dtype)

    found.made[kind] += 1
    store.tokens = planted  # type: ignore[method-assign]
    try:
        look = spikes.look(at, frozenset())
        assert look is not None
        if not at.limits.beyond(look.figures.watched()) and look.figures.finite:
            return
        found.seen[kind] += 1
        cause = spikes.cause(at)
        found.looks.append(cause.looks)
        found.named[kind] += cause.documents == (raw,)
    finally:
        del store.tokens


def stream_lines(steps: int, seed: int = 0) -> list[str]:
    """False alarms on clean generated courses, by how the gradient norm scatters."""
    lines = []
    for noise in NOISES:
        found = score(noise, steps, seed)
        by = f" ({', '.join(f'{name} {count}' for name, count in found.by_figure.items())})" if found.by_figure else ""
        lines.append(f"{noise}: {found.false_alarms} false alarms in {found.steps} clean steps{by}")
    return lines
