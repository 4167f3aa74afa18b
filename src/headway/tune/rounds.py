"""The method: profile, apply the first remedy, profile again, verify, keep or put back, until nothing gains."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from headway.account.errors import UserError
from headway.account.remedy import Remedy
from headway.config.diff import flatten
from headway.config.dump import as_plain
from headway.config.run import RunConfig
from headway.tune.profile import Profile
from headway.tune.registry import ranked

#: A change must win more than this to stay: less is within what two measurements of the same thing differ by.
WORTH = 0.01

Measure = Callable[[RunConfig], Profile]
Check = Callable[[RunConfig, RunConfig], str | None]
"""Why the second configuration is not the same training as the first, or None."""


@dataclass(frozen=True)
class Round:
    """One remedy tried. measured: share of speed won (0.5: half as fast again), None where it did not run."""

    remedy: Remedy
    measured: float | None
    mfu: float | None
    kept: bool
    verdict: str


@dataclass
class Tuned:
    """The run file's own profile, every round, and the configuration at the end."""

    first: Profile
    config: RunConfig
    last: Profile
    rounds: list[Round] = field(default_factory=list)

    @property
    def kept(self) -> list[Round]:
        return [each for each in self.rounds if each.kept]

    @property
    def speedup(self) -> float:
        return self.last.speed / self.first.speed


def tune(config: RunConfig, measure: Measure, check: Check, tell: Callable[[Round], None]) -> Tuned:
    """Tries remedies one at a time until none is left that gains more than `WORTH`.

    A remedy that was put back is not tried again with the same values; one that stayed changes the account, from which
    the next are ranked.
    """
    base = measure(config)
    found = Tuned(base, config, base)
    tried: set[str] = set()
    while True:
        waiting = [remedy for remedy in ranked(found.config, found.last) if _key(remedy) not in tried]
        if not waiting:
            return found
        tried.add(_key(waiting[0]))
        done, candidate, after = _try(found, waiting[0], measure, check)
        found.rounds.append(done)
        tell(done)
        if done.kept and candidate is not None and after is not None:
            found.config, found.last = candidate, after


def _try(
    found: Tuned, remedy: Remedy, measure: Measure, check: Check
) -> tuple[Round, RunConfig | None, Profile | None]:
    try:
        candidate = changed(found.config, dict(remedy.change))
        after = measure(candidate)
    except (UserError, ValidationError, MemoryError) as error:
        return Round(remedy, None, None, False, f"put back: {str(error).splitlines()[0][:160]}"), None, None
    won = after.speed / found.last.speed - 1
    if won <= WORTH:
        return Round(remedy, won, after.mfu, False, "put back: gains too little"), None, None
    try:
        reason = check(found.config, candidate)
    except UserError as error:
        reason = f"not proven: {str(error).splitlines()[0][:160]}"
    if reason is not None:
        return Round(remedy, won, after.mfu, False, f"put back: {reason}"), None, None
    return Round(remedy, won, after.mfu, True, "kept: the same training"), candidate, after


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
    return [measure(found.config).speed / measure(other).speed for _ in range(turns)]


def _key(remedy: Remedy) -> str:
    return f"{remedy.name} {sorted(remedy.change.items())!r}"


def table(found: Tuned) -> Iterator[str]:
    """The round table."""
    yield f"{'change':<26}{'predicted':>16}{'measured':>10}{'MFU':>8}  verdict"
    yield f"{'as it is':<26}{'':>16}{'':>10}{_percent(found.first.mfu):>8}  {found.first.speed:,.1f} tokens/s"
    for each in found.rounds:
        low, high = (_as_speed(share) for share in each.remedy.gain)
        measured = "" if each.measured is None else f"{each.measured:+.1%}"
        yield (
            f"{each.remedy.name:<26}{f'{low:+.0%} to {high:+.0%}':>16}{measured:>10}{_percent(each.mfu):>8}  "
            f"{each.verdict}"
        )
        yield from (f"    {key} = {value}" for key, value in each.remedy.change.items())
    yield f"{found.last.speed:,.1f} tokens/s, {found.speedup:.2f} x"


def _as_speed(share: float) -> float:
    """A share of the wall clock won back, as a gain in speed."""
    return 1 / (1 - min(share, 0.99)) - 1


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"
