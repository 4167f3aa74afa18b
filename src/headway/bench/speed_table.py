"""What `headway bench speed` prints: the ratio table, what is wrong with whom, and both waterfalls."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from headway.account.account import Account, sum_accounts
from headway.account.events import Flops
from headway.account.tree import RUN
from headway.account.waterfall import Waterfall, render, waterfall
from headway.bench.speed import SpeedResult
from headway.bench.speed_process import Contestant


def ratios(of: Contestant, over: Contestant, by: str = "speed") -> tuple[float, float, float]:
    """Effective tokens/s (or core_speed) of one over those of the other, by round: smallest, median, largest."""
    each = [getattr(a, by) / getattr(b, by) for a, b in zip(of.rounds, over.rounds, strict=True)]
    return min(each), statistics.median(each), max(each)


def lines(result: SpeedResult) -> list[str]:
    """The whole report as text."""
    return [*_head(result), "", *_table(result), "", *_ratio_table(result), *_wrong(result), *_waterfalls(result)]


def record(result: SpeedResult) -> dict[str, Any]:
    """The same for --json."""
    last = _headway(result)[-1] if _headway(result) else None
    return {
        "documents": len(result.documents.lengths),
        "tokens": result.documents.tokens,
        "trained_tokens": result.documents.trained,
        "seq_len": result.seq_len,
        "padding_of_all_documents": result.population_padding,
        "device": result.device,
        "threads": result.threads,
        "precision": result.precision,
        "one_by_one": result.one_by_one,
        "contestants": [
            {
                "name": each.name,
                "versions": each.ready.get("versions"),
                "notes": each.ready.get("notes"),
                "wrong": each.wrong,
                "died": each.died or None,
                "rounds": [
                    {
                        "tokens_per_second": done.speed,
                        "tokens_per_core_second": done.core_speed,
                        "seconds": done.seconds,
                        "slots": done.slots,
                        "steps": done.steps,
                    }
                    for done in each.rounds
                ],
            }
            for each in result.contestants
        ],
        "ratios": {
            f"{last.name}/{each.name}": ratios(last, each)
            for each in result.contestants
            if last is not None and each is not last and not each.died
        },
    }


def _head(result: SpeedResult) -> Iterator[str]:
    chosen = result.documents
    yield (
        f"{len(chosen.lengths)} documents of {chosen.population}, cut at {result.seq_len}: {chosen.tokens:,} tokens, "
        f"{chosen.trained:,} trained, once a round"
    )
    order = "one contestant after the other" if result.one_by_one else "the contestants in turn"
    yield f"{result.device}, {result.threads} threads, {result.precision}, {order}"
    yield (
        f"in rows of eight padded to the longest, {result.population_padding:.1%} of the slots of all "
        f"{chosen.population:,} documents are padding"
    )


def _table(result: SpeedResult) -> Iterator[str]:
    yield f"{'':<10}{'effective tokens/s (min median max)':>38}{'padding':>9}{'steps':>7}  versions"
    for each in result.contestants:
        if each.died:
            continue
        speeds = [done.speed for done in each.rounds]
        spread = f"{min(speeds):.1f}  {statistics.median(speeds):.1f}  {max(speeds):.1f}"
        padding = statistics.median(done.padding for done in each.rounds)
        versions = ", ".join(f"{name} {number}" for name, number in each.ready["versions"].items())
        name = each.name + (" (wrong)" if each.wrong else "")
        yield f"{name:<10}{spread:>38}{padding:>9.1%}{each.rounds[-1].steps:>7}  {versions}"


def _ratio_table(result: SpeedResult) -> Iterator[str]:
    ours = _headway(result)
    if not ours:
        return
    best = ours[-1]
    yield f"{best.name} over …, round by round:    by the clock (min median max)    per core-second"
    for each in result.contestants:
        if each is not best and not each.died:
            clock, cores = (
                "".join(f"{value:6.2f} x" for value in ratios(best, each, by)) for by in ("speed", "core_speed")
            )
            yield f"  {each.name:<32}{clock}    {cores}"


def _wrong(result: SpeedResult) -> Iterator[str]:
    for each in result.contestants:
        yield from (f"{each.name} is WRONG: {problem}" for problem in dict.fromkeys(each.wrong))
        yield from (f"{each.name}: {note}" for note in each.ready.get("notes", ()))
        if each.died:
            yield f"out of the race: {each.died}"


def _waterfalls(result: SpeedResult) -> Iterator[str]:
    for each in _headway(result):
        fall, note = fall_of(each)
        yield ""
        yield f"{each.name}: where the time of {len(each.rounds)} rounds went{note}"
        yield from render(fall)


def fall_of(contestant: Contestant) -> tuple[Waterfall, str]:
    """The waterfall of the counted rounds, and a remark on its base."""
    steps = sum_accounts([Account.from_dict(done.account) for done in contestant.rounds if done.account])
    flops = sum((msgspec.convert(done.flops, Flops) for done in contestant.rounds if done.flops), Flops())
    wall = round(sum(done.seconds for done in contestant.rounds) * 1e9)
    run = Account.close(RUN, wall, {"productive": min(wall, steps.wall_ns)})
    peak = contestant.ready.get("peak_flops")
    if peak is None:
        return waterfall(run, steps, flops, None), f"; {contestant.ready.get('peak_source')}"
    try:
        return waterfall(run, steps, flops, peak), ""
    except ValueError as error:
        return waterfall(run, steps, flops, None), f"; without a peak: {error}"


def _headway(result: SpeedResult) -> Sequence[Contestant]:
    return [each for each in result.contestants if any(done.account for done in each.rounds)]
