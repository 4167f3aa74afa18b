"""The method: profile, apply the first remedy, profile again, keep or put back, until nothing gains; then the proof.

Proving costs three trainings, whatever was changed. So what was kept is proved once, all of it together, against the
user's own configuration; where the two are not the same training, halving finds the change at fault, it is put back,
and tuning goes on from what is proved.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from pydantic import ValidationError

from headway.account.errors import UserError
from headway.account.remedy import Remedy
from headway.config.diff import flatten
from headway.config.dump import as_plain
from headway.config.run import RunConfig
from headway.parallel.out_of_memory import free_memory, is_out_of_memory
from headway.tune.profile import Profile, Unchanged, spread
from headway.tune.registry import ranked

#: A change must win more than this to stay, and more than the spread of the steps it was measured by.
WORTH = 0.01
PROVISIONAL = "kept for now"
PROVED = "kept: the same training"

Measure = Callable[[RunConfig, Profile | None], Profile]
"""Profiles a configuration; the profile to beat, where there is one, lets a clear case end early."""
Check = Callable[[RunConfig, RunConfig], str | None]
"""Why the second configuration is not the same training as the first, or None."""


@dataclass(frozen=True)
class Round:
    """One remedy tried. measured: share of speed won (0.5: half as fast again), None where it did not run. spread: what
    it differs by from step to step, in the same unit."""

    remedy: Remedy
    measured: float | None
    mfu: float | None
    kept: bool
    verdict: str
    spread: float = 0.0

    @property
    def gain(self) -> str:
        """In words: `+12.3% ±4.5%`; empty where it did not run."""
        return "" if self.measured is None else f"{self.measured:+.1%} ±{self.spread:.1%}"


@dataclass
class State:
    """A configuration with its fastest profile, and the round (index) that made it; None is the user's own."""

    config: RunConfig
    profile: Profile
    made_by: int | None = None


@dataclass
class Tuned:
    """The run file's own profile, every round, and the configuration at the end."""

    states: list[State]
    rounds: list[Round] = field(default_factory=list)

    @property
    def first(self) -> Profile:
        return self.states[0].profile

    @property
    def config(self) -> RunConfig:
        return self.states[-1].config

    @property
    def last(self) -> Profile:
        return self.states[-1].profile

    @property
    def kept(self) -> list[Round]:
        return [each for each in self.rounds if each.kept]

    @property
    def speedup(self) -> float:
        return self.last.speed / self.first.speed


def tune(config: RunConfig, measure: Measure, check: Check, tell: Callable[[Round], None]) -> Tuned:
    """Tries remedies one at a time until none gains more than `WORTH` and than single steps differ by, then proves what
    was kept.

    A remedy that was put back is not tried again with the same values; one that stayed changes the account, from which
    the next are ranked. No configuration is proved twice, and none measured twice but what a change won against.
    """
    again, measure, proof = measure, _remembered(measure), _Proof(config, check)
    found = Tuned([State(config, measure(config, None))])
    at_fault: set[str] = set()
    tried: dict[str, State] = {}
    while True:
        _search(found, at_fault, tried, measure, again, tell)
        if len(found.states) == 1:
            return found
        proved, reason = _prove(found, proof)
        for state in found.states[1 : proved + 1]:
            _judge(found, state, PROVED, kept=True)
        if proved == len(found.states) - 1:
            return found
        for state in found.states[proved + 2 :]:
            _judge(found, state, "put back: it stood on a change that was put back", kept=False)
        culprit = found.states[proved + 1]
        _judge(found, culprit, f"put back: {reason}", kept=False)
        assert culprit.made_by is not None
        tell(found.rounds[culprit.made_by])
        at_fault.add(_key(found.rounds[culprit.made_by].remedy))
        del found.states[proved + 1 :]
        # What was tried on a configuration that is gone may do better without it; the rest has its verdict.
        standing = {id(state) for state in found.states}
        tried = {key: state for key, state in tried.items() if id(state) in standing}


def _search(
    found: Tuned,
    at_fault: set[str],
    tried: dict[str, State],
    measure: Measure,
    again: Measure,
    tell: Callable[[Round], None],
) -> None:
    """tried: remedies with the state that each was tried on."""
    while True:
        known = at_fault | tried.keys()
        waiting = [remedy for remedy in ranked(found.config, found.last) if _key(remedy) not in known]
        if not waiting:
            return
        tried[_key(waiting[0])] = found.states[-1]
        done, state = _try(found, waiting[0], measure, again)
        found.rounds.append(done)
        tell(done)
        if state is not None:
            found.states.append(state)


def _try(found: Tuned, remedy: Remedy, measure: Measure, again: Measure) -> tuple[Round, State | None]:
    """again: measures anew. What a change is held against was measured before it: a machine that grew quieter since
    would win for any change. So the former is measured once more after one that wins, and its faster profile counts."""
    try:
        candidate = changed(found.config, dict(remedy.change))
        after = measure(candidate, found.last)
        if _wins(found.last, after):
            found.states[-1].profile = max(found.last, again(found.config, None), key=lambda seen: seen.speed)
    except Unchanged as same:
        return Round(remedy, None, None, False, f"changes nothing here: {same.now.because(remedy.change)}"), None
    except (UserError, ValidationError, MemoryError, RuntimeError) as error:
        return Round(remedy, None, None, False, f"put back: {_why(error)}"), None
    won = after.speed / found.last.speed - 1
    noise = spread(found.last, after)
    if not _wins(found.last, after):
        little = "gains too little" if won <= WORTH else "gains no more than single steps differ by"
        return Round(remedy, won, after.mfu, False, f"put back: {little}", noise), None
    return Round(remedy, won, after.mfu, True, PROVISIONAL, noise), State(candidate, after, len(found.rounds))


def _wins(before: Profile, after: Profile) -> bool:
    return after.speed / before.speed - 1 > max(WORTH, spread(before, after))


@dataclass
class _Proof:
    """Why a configuration is not the user's own training, or None; asked once for each: it costs three trainings."""

    own: RunConfig
    check: Check
    _known: dict[str, str | None] = field(default_factory=dict)

    def reason(self, config: RunConfig) -> str | None:
        key = _text_of(config)
        if key not in self._known:
            try:
                self._known[key] = self.check(self.own, config)
            except (UserError, MemoryError, RuntimeError) as error:
                self._known[key] = f"not proven: {_why(error)}"
        return self._known[key]


def _why(error: Exception) -> str:
    """Why a configuration does not run. Raises what no configuration is at fault for."""
    if isinstance(error, MemoryError) or is_out_of_memory(error):
        error.__traceback__ = None  # its frames hold the tensors that filled the memory
        free_memory("cuda" if torch.cuda.is_available() else "cpu")
        return "does not fit into memory"
    if isinstance(error, RuntimeError):
        raise error
    return str(error).splitlines()[0][:160]


def _prove(found: Tuned, proof: _Proof) -> tuple[int, str]:
    """How many of the kept changes are, together, the same training as the user's own, and why the next is not."""
    same, other = 0, len(found.states) - 1
    reason = proof.reason(found.states[other].config)
    if reason is None:
        return other, ""
    while other - same > 1:
        middle = (same + other) // 2
        why = proof.reason(found.states[middle].config)
        if why is None:
            same = middle
        else:
            other, reason = middle, why
    return same, reason


def _judge(found: Tuned, state: State, verdict: str, *, kept: bool) -> None:
    assert state.made_by is not None
    found.rounds[state.made_by] = replace(found.rounds[state.made_by], verdict=verdict, kept=kept)


def _remembered(measure: Measure) -> Measure:
    known: dict[str, Profile] = {}

    def remembering(config: RunConfig, rival: Profile | None) -> Profile:
        key = _text_of(config)
        if key not in known:
            known[key] = measure(config, rival)
        return known[key]

    return remembering


def _text_of(config: RunConfig) -> str:
    """Equal for equal configurations."""
    return json.dumps(as_plain(config), sort_keys=True, default=str)


def changed(config: RunConfig, change: dict[str, Any]) -> RunConfig:
    """The configuration with some dotted keys set. Raises pydantic's ValidationError where they do not fit."""
    values = flatten(as_plain(config)) | change
    if "train.global_batch_sequences" in change:
        values["train.global_batch_tokens"] = None
    nested: dict[str, Any] = {}
    for key, value in values.items():
        *outer, last = key.split(".")
        inside = nested
        for part in outer:
            inside = inside.setdefault(part, {})
        inside[last] = value
    return RunConfig.model_validate(nested)


def beside(found: Tuned, other: RunConfig, measure: Measure, turns: int = 2) -> list[float]:
    """Speed of what was found over another configuration's, turn by turn, in packs of the same size and number."""
    sizes = {
        "data.slots": found.config.data.slots,
        "train.global_batch_sequences": found.config.sequences_per_step(1),
    }
    other = changed(other, sizes if other.data.packed == found.config.data.packed else {})
    return [measure(found.config, None).speed / measure(other, None).speed for _ in range(turns)]


def _key(remedy: Remedy) -> str:
    return f"{remedy.name} {sorted(remedy.change.items())!r}"


def table(found: Tuned) -> Iterator[str]:
    """The round table."""
    yield f"{'change':<26}{'predicted':>16}{'measured':>17}{'MFU':>8}  verdict"
    yield f"{'as it is':<26}{'':>16}{'':>17}{_percent(found.first.mfu):>8}  {found.first.speed:,.1f} tokens/s"
    for each in found.rounds:
        low, high = (_as_speed(share) for share in each.remedy.gain)
        yield (
            f"{each.remedy.name:<26}{f'{low:+.0%} to {high:+.0%}':>16}{each.gain:>17}{_percent(each.mfu):>8}  "
            f"{each.verdict}"
        )
        yield from (f"    {key} = {value}" for key, value in each.remedy.change.items())
    yield f"{found.last.speed:,.1f} tokens/s, {found.speedup:.2f} x"


def _as_speed(share: float) -> float:
    """A share of the wall clock won back, as a gain in speed."""
    return 1 / (1 - min(share, 0.99)) - 1


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"
