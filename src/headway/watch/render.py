"""The end-of-run summary on a terminal, down to the waterfall. Fits 80 columns and uses up to 100."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.constrain import Constrain
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from headway.account.account import Account
from headway.account.events import EvalLine
from headway.account.tree import STEP, UNACCOUNTED
from headway.account.waterfall import Waterfall
from headway.watch import format as fmt
from headway.watch.bars import Bar
from headway.watch.palette import STEP_PAINT, waterfall_paint
from headway.watch.ranks import Ranks, uneven
from headway.watch.summary import RUNNING, Summary

_WIDTH = 100
_RANK_ROWS = 8
_SESSION_ROWS = 12
_STATUS = {"done": "bold green", "preempted": "bold yellow", RUNNING: "bold yellow"}


def render_summary(summary: Summary) -> RenderableType:
    """Everything a person wants to know at the end of a run, the waterfall last."""
    parts: list[RenderableType] = [_title(summary), _facts(summary), _tokens(summary)]
    if len(summary.sessions) > 1:
        parts.append(_sessions(summary))
    if summary.step_account is not None:
        parts.append(_step_account(summary.step_account, summary.kept.steps))
    if summary.ranks is not None and summary.ranks.world_size > 1 and summary.ranks.spread:
        parts.append(_ranks(summary.ranks))
    if summary.problems or summary.bad_lines:
        parts.append(_problems(summary))
    if summary.fall is not None:
        parts.append(_waterfall(summary.fall, summary))
    return Constrain(Group(*(Padding(part, (0, 0, 1, 0)) for part in parts)), _WIDTH)


def _title(summary: Summary) -> Text:
    title = Text(summary.run, style="bold")
    title.append(" · ", style="dim")
    title.append(summary.status, style=_STATUS.get(summary.status, "bold red"))
    title.append(f" at step {summary.step:,} of {summary.planned_steps:,}", style="default")
    return title


def _facts(summary: Summary) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts(summary):
        table.add_row(name, Text(value))
    return table


def facts(summary: Summary) -> Iterator[tuple[str, str]]:
    """Name and value of what the header shows, here and in the report."""
    run, use = summary.run_account, summary.utilisation
    if summary.sessions:
        last = summary.sessions[-1]
        yield "device", f"{last.device or fmt.UNKNOWN}, {fmt.plural(last.world_size, 'rank')}"
        yield "peak", fmt.peak(last.peak_flops, last.peak_source)
    if run is not None:
        yield "wall clock", f"{fmt.seconds(run.wall_ns / 1e9)} in {fmt.plural(len(summary.sessions), 'session')}"
        yield "goodput", f"{fmt.percent(summary.goodput)} of it in steps that are in the weights"
    if summary.first_loss is not None:
        mean = f"mean of the last {summary.last_loss_steps}" if summary.last_loss_steps > 1 else "last step"
        yield "loss", f"nll {fmt.loss(summary.first_loss)} → {fmt.loss(summary.last_loss)} ({mean})"
    if summary.evals:
        yield "evaluation", _evaluations(summary.evals)
    if use.mfu is None:
        yield "MFU", f"unknown: {use.reason}"
    else:
        yield "MFU", f"{fmt.percent(use.mfu)} while stepping, {fmt.percent(use.mfu_wall)} of the whole wall clock"
        yield "HFU", f"{fmt.percent(use.hfu)} with recompute; {fmt.percent(use.padded)} if padding counted as useful"
    if summary.peak_memory_bytes:
        yield "memory", f"{fmt.size(summary.peak_memory_bytes)} at most"
    if summary.checkpoints:
        mean_s = sum(line.seconds for line in summary.checkpoints) / len(summary.checkpoints)
        size = fmt.size(summary.checkpoints[-1].bytes)
        yield "checkpoints", f"{len(summary.checkpoints):,} of {size}, {fmt.seconds(mean_s)} each"
    yield from _losses_of_work(summary)
    if summary.account_cost is not None:
        yield "account", f"cost {_small_percent(summary.account_cost)} of the wall clock"


def _evaluations(evals: Sequence[EvalLine]) -> str:
    """From the first to the last, and the best where that is another."""
    first, last = evals[0], evals[-1]
    best = min(evals, key=lambda line: line.nll)
    text = f"nll {fmt.loss(last.nll)} at step {last.step:,}"
    if len(evals) > 1:
        text = f"nll {fmt.loss(first.nll)} at step {first.step:,} → {fmt.loss(last.nll)} at step {last.step:,}"
    return text if best.nll == last.nll else f"{text}, best {fmt.loss(best.nll)} at {best.step:,}"


def _losses_of_work(summary: Summary) -> Iterator[tuple[str, str]]:
    for reason, number in summary.skipped.items():
        yield "skipped", f"{fmt.plural(number, 'step')}: {reason}"
    if summary.idle_tail:
        steps = fmt.plural(summary.idle_tail, "step")
        yield "last update", f"step {summary.step - summary.idle_tail:,}; the last {steps} updated nothing"
    if summary.lost.steps:
        seconds = fmt.seconds(summary.lost.wall_ns / 1e9)
        tokens = f"{summary.lost.trained_tokens:,} trained tokens"
        yield "done again", f"{fmt.plural(summary.lost.steps, 'step')}, {seconds}, {tokens}: in no total but rework"
    if summary.incidents:
        yield "incidents", f"{len(summary.incidents):,}, see incidents.jsonl"
    if summary.quarantined:
        yield "quarantined", fmt.plural(summary.quarantined, "document")


def _small_percent(share: float) -> str:
    return f"{100 * share:.3f} %"


def _tokens(summary: Summary) -> Table:
    table = plain_table("tokens", "total", "/s of steps", "/s of the run", "share of slots")
    kept = summary.kept
    for kind, label in (("slots", "slots"), ("tokens", "real tokens"), ("trained_tokens", "trained tokens")):
        number = getattr(kept, kind)
        share = number / kept.slots if kept.slots else None
        rates = (fmt.count(summary.per_second(kind)), fmt.count(summary.per_second(kind, "run")))
        table.add_row(label, fmt.whole(number), *rates, fmt.percent(share))
    return table


def _sessions(summary: Summary) -> Table:
    table = plain_table("session", "from", "steps", "lost", "trained tokens", "wall clock", "before it", "ended")
    hidden = max(0, len(summary.sessions) - _SESSION_ROWS)
    for item in summary.sessions[hidden:]:
        table.add_row(
            str(item.session),
            fmt.whole(item.resumed_from),
            fmt.whole(item.kept.steps),
            fmt.whole(item.lost.steps),
            fmt.whole(item.kept.trained_tokens),
            fmt.seconds(item.wall_ns / 1e9),
            fmt.clock(item.gap_s) if item.gap_s else "",
            item.reason,
        )
    if hidden:
        table.caption = f"{fmt.plural(hidden, 'earlier session')} not shown"
    return table


def _step_account(account: Account, steps: int) -> Table:
    table = Table.grid(padding=(0, 2), expand=True)
    for justify in ("left", "right", "right"):
        table.add_column(justify=justify, no_wrap=True)
    table.add_column(ratio=1)
    table.add_row(Text("step account, rank 0", style="bold"), Text("share", "dim"), Text("a step", "dim"), "")
    for path in STEP.paths():
        if not account.sees(path) or not (account.total(path) or path == UNACCOUNTED):
            continue
        depth = path.count(".")
        share = account.share(path)
        bar: RenderableType = Bar(0, share, STEP_PAINT[path].dark)
        label = Text("  " * depth + STEP_PAINT[path].label, style="dim" if depth else "default")
        per_step = fmt.seconds(account.total(path) / 1e9 / steps) if steps else fmt.UNKNOWN
        table.add_row(label, fmt.percent(share), per_step, bar)
    table.add_row("", "", fmt.seconds(account.wall_ns / 1e9 / steps) if steps else "", Text("wall clock", style="dim"))
    return table


def _ranks(ranks: Ranks) -> Table:
    table = plain_table(f"{ranks.world_size} ranks", "mean a step", "slowest", "rank", "host", "spread")
    steps = len(ranks.steps)
    for row in uneven(ranks)[:_RANK_ROWS]:
        label = "step wall clock" if row.path == "wall" else STEP_PAINT[row.path].label
        times = (fmt.seconds(row.mean_ns / 1e9 / steps), fmt.seconds(row.slowest_ns / 1e9 / steps))
        host = ranks.hosts.get(row.slowest_rank) or fmt.UNKNOWN
        table.add_row(label, *times, str(row.slowest_rank), host, fmt.percent(row.spread))
    if ranks.left_out:
        table.caption = f"{fmt.plural(ranks.left_out, 'step')} left out: not every rank has a closed account of them"
    return table


def _problems(summary: Summary) -> Text:
    text = Text("does not add up, or could not be read", style="bold red")
    for problem in summary.problems:
        text.append(f"\n  {problem}", style="not bold red")
    for file, lines in summary.bad_lines.items():
        number, reason = lines[0]
        damaged = fmt.plural(len(lines), "damaged line")
        text.append(f"\n  {file}: {damaged}, first {number}: {reason}", style="not bold red")
    return text


def waterfall_table(fall: Waterfall) -> Table:
    """The waterfall's rows with their bars, each hanging where the one before it ended."""
    table = Table.grid(padding=(0, 2, 0, 0), expand=True)
    for justify in ("right", "right", "right"):
        table.add_column(justify=justify, no_wrap=True)
    table.add_column(ratio=1)
    for row in fall.rows:
        ends = row.path in ("top", "useful")
        start = 0.0 if ends else row.left
        bar = Bar(start, min(1.0, start + row.share), waterfall_paint(row.path).dark)
        style = "bold green" if row.path == "useful" else "bold" if ends else "default"
        table.add_row(Text(row.label, style), Text(fmt.percent(row.share), style), fmt.seconds(row.seconds), bar)
    return table


def _waterfall(fall: Waterfall, summary: Summary) -> Group:
    top = fmt.si(fall.top, "FLOP") if fall.peak_known else fmt.seconds(fall.top)
    title = Text("waterfall", style="bold")
    title.append(f"  from {top} paid for to what trained the model", style="not bold dim")
    note = Text(summary.utilisation.convention if fall.peak_known else "", style="dim")
    if not fall.peak_known:
        note.append(f"in seconds: {summary.utilisation.reason or 'the peak cannot be right, see above'}")
    return Group(title, waterfall_table(fall), note)


def plain_table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", title_justify="left", caption_justify="left")
    table.add_column(columns[0], no_wrap=True, header_style="bold")
    for column in columns[1:]:
        table.add_column(column, justify="right", no_wrap=True, header_style="dim")
    return table
