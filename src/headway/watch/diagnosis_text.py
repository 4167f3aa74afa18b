"""A diagnosis on a terminal: the account, the findings, the waterfall and, last, what to do. Fits 80 columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.constrain import Constrain
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from headway.account.account import Account
from headway.account.tree import UNACCOUNTED
from headway.diagnose.compare import Change, Comparison
from headway.diagnose.diagnosis import Diagnosis
from headway.diagnose.facts import DeviceFacts, Efficiency, RankComparison
from headway.diagnose.finding import SURE, Finding, top_remedies
from headway.diagnose.shape_flops import CONVENTION
from headway.diagnose.snapshot import MemoryFacts
from headway.diagnose.view import short
from headway.watch import format as fmt
from headway.watch.bars import Bar
from headway.watch.palette import STEP_PAINT
from headway.watch.render import plain_table, waterfall_table
from headway.watch.trace_palette import paint_of

_WIDTH = 100
_ROWS = 8
_NAMES = 6  # communication kernels that are named


def render_diagnosis(item: Diagnosis) -> RenderableType:
    """Everything at a glance; ends with the waterfall and the first three remedies."""
    parts: list[RenderableType] = [_title(item), _facts(item)]
    device = item.rank.device() if item.rank and not item.run else None
    if item.account is not None:
        parts.append(_account(item.account, item.idle))
    if device is not None and device.by_kind:
        parts.append(_kinds(device))
    if device is not None and len(device.steps.rows) > 1:
        parts.append(_steps(device))
    if item.job is not None and len(item.job.ranks) > 1:
        parts.append(_ranks(item))
    if item.memory is not None:
        parts.append(_memory(item.memory))
    if item.findings:
        parts.append(_findings(item))
    if item.fall is not None:
        title = Text("waterfall", style="bold")
        title.append("  of the window, in " + ("FLOPs" if item.fall.peak_known else "seconds"), style="not bold dim")
        parts.append(Group(title, waterfall_table(item.fall)))
    parts.append(_remedies(item))
    return Constrain(Group(*(Padding(part, (0, 0, 1, 0)) for part in parts)), _WIDTH)


def _title(item: Diagnosis) -> Group:
    style = "bold green" if item.clean else "bold yellow"
    head = Text(item.source, style="bold", overflow="fold")
    head.append(f" · {item.device}", style="default")
    return Group(head, Text(item.verdict, style=style))


def _facts(item: Diagnosis) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts(item):
        table.add_row(name, Text(value))
    return table


def facts(item: Diagnosis) -> Iterator[tuple[str, str]]:
    """Name and value of what stands at the head, on the terminal and on the page."""
    yield "window", f"{item.window}, {fmt.seconds(item.wall_ns / 1e9)}"
    if item.rank is not None and not item.run:
        yield from _trace_facts(item.rank.device())
        yield from _counted_as_communication(item)
    yield from _damage(item)
    if item.run is not None:
        rate = item.run.tokens_per_second()
        ranks = fmt.plural(item.run.world_size, "rank")
        yield "steps", f"{len(item.run.steps):,}, {fmt.per_second(rate, 'real tok')}, {ranks}"
        yield (
            "MFU",
            fmt.percent(item.run.mfu) if item.run.mfu is not None else "unknown: the device's peak is not known",
        )
    for note in item.notes:
        yield "note", note


def _counted_as_communication(item: Diagnosis) -> Iterator[tuple[str, str]]:
    """By name or metadata: who sees one missing adds it with --comm-kernel."""
    names = item.job.comm_names if item.job else ()
    if names:
        more = f" and {len(names) - _NAMES:,} more" if len(names) > _NAMES else ""
        yield (
            "comm. names",
            ", ".join(short(name, 48) for name in names[:_NAMES]) + more + " (--comm-kernel adds names)",
        )


def _trace_facts(device: DeviceFacts) -> Iterator[tuple[str, str]]:
    shares, parts = device.shares, device.fragmentation
    if device.kind == "gpu":
        compute = fmt.percent(shares.compute_ns / shares.wall_ns) if shares.wall_ns else fmt.UNKNOWN
        yield "utilisation", f"{fmt.percent(shares.utilisation)} as nvidia-smi would show it; {compute} computing"
    overlap = shares.overlap
    yield (
        "communication",
        "none in this trace"
        if overlap is None
        else (f"{fmt.seconds(shares.comm_ns / 1e9)}, {fmt.percent(overlap)} of it hidden under compute"),
    )
    what = "kernels" if device.kind == "gpu" else "operators"
    per_step = f", {parts.kernels_per_step:,.0f} a step" if parts.kernels_per_step else ""
    yield (
        what,
        (
            f"{parts.kernels:,}{per_step}; median {parts.median_ns / 1e3:.1f} µs; under 10 µs: "
            f"{fmt.percent(parts.short_by_count)} by count, {fmt.percent(parts.short_by_time)} by time"
        ),
    )
    if device.efficiency is not None:
        yield from _efficiency(device.efficiency)


def _efficiency(found: Efficiency) -> Iterator[tuple[str, str]]:
    by_shapes = found.convention.startswith(CONVENTION)
    covered = f"shapes cover {fmt.percent(found.coverage)} of compute" if by_shapes else "FLOPs of --model"
    if found.mfu is not None:
        again = (
            f", HFU {fmt.percent(found.hfu)}" if found.hfu is not None else ", HFU unknown: no backward in the trace"
        )
        yield "MFU", f"{fmt.percent(found.mfu)}{again}; {found.peak_text}; {covered}"
        yield "convention", found.convention
    else:
        yield "MFU", f"unknown: {found.why}" + (f"; {covered}" if "shapes cover" not in found.why else "")
    if found.padding is not None and found.tokens is not None and found.slots is not None:
        yield "padding", f"{fmt.percent(found.padding)}: {found.tokens:,} tokens in {found.slots:,} slots"


def _damage(item: Diagnosis) -> Iterator[tuple[str, str]]:
    for rank in item.job.ranks if item.job else ():
        damage = rank.damage
        lost = [f"{count:,} {reason}" for reason, count in damage.lost.items() if count]
        mended = [f"{count:,} {reason}" for reason, count in damage.mended.items() if count]
        if lost or mended or damage.truncated:
            words = [f"lost {', '.join(lost)}"] * bool(lost) + [f"mended {', '.join(mended)}"] * bool(mended)
            words += [damage.truncated] * bool(damage.truncated)
            yield "damage", f"{rank.path}: kept {damage.kept:,} events; " + "; ".join(words)


def _account(account: Account, idle: Mapping[str, int]) -> Table:
    table = Table.grid(padding=(0, 2), expand=True)
    for justify in ("left", "right", "right"):
        table.add_column(justify=justify, no_wrap=True)
    table.add_column(ratio=1)
    table.add_row(Text("account", style="bold"), Text("share", "dim"), Text("time", "dim"), "")
    for path in account.tree.paths():
        if account.sees(path) and (account.total(path) or path == UNACCOUNTED):
            depth = path.count(".")
            label = Text("  " * depth + STEP_PAINT[path].label, style="dim" if depth else "default")
            time = fmt.seconds(account.total(path) / 1e9)
            table.add_row(
                label, fmt.percent(account.share(path)), time, Bar(0, account.share(path), STEP_PAINT[path].dark)
            )
    table.add_row("", "", fmt.seconds(account.wall_ns / 1e9), Text("the window", style="dim"))
    return table


def _kinds(device: DeviceFacts) -> Table:
    busy = max(1, sum(device.by_kind.values()))
    table = Table.grid(padding=(0, 2), expand=True)
    table.add_column(no_wrap=True)
    for _ in range(3):
        table.add_column(justify="right", no_wrap=True)
    table.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    heads = (Text(name, "dim") for name in ("share", "time", "events", "most of it"))
    table.add_row(Text("device time by kind", style="bold"), *heads)
    for kind, ns in list(device.by_kind.items())[:_ROWS]:
        rows = [row for row in device.table if row.kind == kind]
        number, first = sum(row.count for row in rows), rows[0].name if rows else ""
        table.add_row(
            paint_of(kind).label, fmt.percent(ns / busy), fmt.seconds(ns / 1e9), f"{number:,}", Text(first, style="dim")
        )
    return table


def _steps(device: DeviceFacts) -> Text:
    steps = device.steps
    text = Text("steps  ", style="bold")
    text.append(
        f"{len(steps.rows)} complete, median {fmt.seconds(steps.median_ns / 1e9)}, spread {fmt.percent(steps.spread)}",
        style="not bold",
    )
    for index in steps.outliers[:4]:
        row = steps.rows[index]
        text.append(f"\n  {row.name}: {fmt.seconds((row.end_ns - row.start_ns) / 1e9)}", style="not bold yellow")
    if steps.without_gpu:
        text.append(f"\n  {len(steps.without_gpu)} steps without any event on the device", style="not bold yellow")
    return text


def _ranks(item: Diagnosis) -> Table:
    assert item.job is not None
    found: RankComparison = item.job.comparison or RankComparison()
    table = plain_table(f"{len(item.job.ranks)} ranks", "compute", "bare comm", "idle", "last", "waited", "caused")
    shown = sorted(item.job.ranks, key=lambda rank: -found.last_arrivals.get(rank.rank, 0))[:_ROWS]
    for rank in shown:
        shares = rank.device().shares
        wall = max(1, shares.wall_ns)
        table.add_row(
            f"rank {rank.rank}",
            fmt.percent(shares.compute_ns / wall),
            fmt.percent(shares.exposed_comm_ns / wall),
            fmt.percent(shares.idle_ns / wall),
            f"{found.last_arrivals.get(rank.rank, 0):,}×" if found.matched else fmt.UNKNOWN,
            fmt.seconds(found.wait_ns[rank.rank] / 1e9) if rank.rank in found.wait_ns else fmt.UNKNOWN,
            fmt.seconds(found.caused_ns[rank.rank] / 1e9) if rank.rank in found.caused_ns else fmt.UNKNOWN,
        )
    more = len(item.job.ranks) - len(shown)
    captions = [f"{len(found.matched):,} collectives matched, {found.unmatched:,} not"] if found.matched else []
    captions += [f"not compared: {found.refused}"] * bool(found.refused) + [f"{more} more ranks"] * bool(more)
    table.caption = "; ".join(captions) or None
    return table


def _memory(memory: MemoryFacts) -> Table:
    table = plain_table("memory snapshot", "held", "blocks", "kind")
    for holder in memory.holders[:_ROWS]:
        table.add_row(
            Text(holder.where, overflow="ellipsis"), fmt.size(holder.bytes), f"{holder.blocks:,}", holder.kind
        )
    table.caption = (
        f"{fmt.size(memory.allocated)} of {fmt.size(memory.reserved)} reserved are in use; the largest free block is "
        f"{fmt.size(memory.largest_free)}, fragmentation {fmt.percent(memory.fragmentation)}"
    )
    return table


def _findings(item: Diagnosis) -> Group:
    title = Text("findings", style="bold")
    title.append("  share of the time that is surely won, and at most", style="not bold dim")
    if item.run is not None and any(found.of_trace for found in item.findings):
        title.append("; what a trace shows is scaled to the run", style="not bold dim")
    return Group(title, *(_finding(found) for found in item.findings))


def _finding(found: Finding) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="right", no_wrap=True, width=14)
    table.add_column(overflow="fold")
    gain = Text(gain_text(found.gain, found.gain_known), style="dim" if found.within else "bold yellow")
    text = Text(found.title, style="bold" if not found.within else "default")
    if found.within:
        text.append(f"  (part of {found.within})", style="dim")
    if found.symptom:
        text.append(f"  · {found.symptom}", style="not bold dim")
    if found.of_trace:
        text.append("  · in the newest trace", style="not bold dim")
    for line in found.evidence:
        text.append(f"\n{line}", style="not bold dim")
    table.add_row(gain, text)
    return table


def gain_text(gain: tuple[float, float], known: bool = True) -> str:
    """``2.1–31.7 %``: what is surely won, and at most; ``up to 31.7 %`` where nothing is sure."""
    if not known:
        return "gain unknown"
    low, high = 100 * gain[0], 100 * gain[1]
    if f"{low:.1f}" == f"{high:.1f}":
        return f"{high:.1f} %"
    return f"up to {high:.1f} %" if low < 0.05 else f"{low:.1f}–{high:.1f} %"


def _remedies(item: Diagnosis) -> Group:
    rows: list[RenderableType] = [Text("what to do first", style="bold")]
    for number, (remedy, found) in enumerate(top_remedies(item.findings), 1):
        known = any(one.gain_known for one in found)
        table = Table.grid(padding=(0, 2))
        table.add_column(no_wrap=True, style="bold")
        table.add_column(no_wrap=True, style="dim", width=7)
        table.add_column(overflow="fold")
        text = Text(remedy.name, style="bold green")
        text.append(
            f"  {'wins' if remedy.gain[0] >= SURE else 'may win'} {gain_text(remedy.gain, known)} of the time"
            if known
            else "  gain unknown",
            style="default",
        )
        text.append(f"  for {', '.join(one.name for one in found)}", style="dim")
        table.add_row(f"{number}.", "remedy", text)
        if remedy.change:
            table.add_row("", "Headway", Text(change_text(remedy.change), style="bold"))
        table.add_row("", "PyTorch", Text(remedy.setting))
        table.add_row("", "check", Text(remedy.check, style="dim"))
        rows.append(table)
    if item.advice:
        rows.append(Text(item.advice, style="yellow"))
    elif len(rows) == 1:
        rows.append(Text("nothing: no cause was found that is worth a change", style="green"))
    return Group(*rows)


def change_text(change: Mapping[str, Any]) -> str:
    """Run-file keys as they are given on the command line."""
    return " ".join(
        f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in change.items()
    )


def render_comparison(item: Comparison) -> RenderableType:
    """What became slower, most first."""
    head = Text(f"{item.source} against {item.against}: ", style="bold")
    said = {True: ("slower", "bold red"), False: ("not slower", "bold green"), None: ("not comparable", "bold yellow")}
    head.append(*said[item.slower])
    parts: list[RenderableType] = [head]
    parts += [Text(f"note: {note}", style="yellow") for note in item.notes]
    if item.rate is not None:
        parts.append(Text(f"{fmt.per_second(item.rate[0], 'tok')} against {fmt.per_second(item.rate[1], 'tok')}"))
    table = plain_table(f"a {item.per}", "this", "other", "difference")
    for row in (item.wall, *item.account):
        if max(row.ns, row.against_ns) >= 0.0005 * item.wall.ns:
            label = STEP_PAINT[row.label].label if row.label in STEP_PAINT else row.label
            table.add_row(Text(label, style="bold" if row is item.wall else "default"), *_change(row))
    parts.append(table)
    if item.kernels:
        kernels = plain_table("kernels that changed most", "this", "other", "difference")
        for row in item.kernels[:_ROWS]:
            kernels.add_row(Text(short(row.label, 38)), *_change(row))
        parts.append(kernels)
    if item.settings:
        parts.append(Text("settings that differ\n  " + "\n  ".join(item.settings[:12]), style="default"))
    parts += [_finding(found) for found in item.findings]
    return Constrain(Group(*(Padding(part, (0, 0, 1, 0)) for part in parts)), _WIDTH)


def _change(row: Change) -> tuple[str, str, Text]:
    style = "red" if row.delta_ns > 0 else "green"
    sign = "+" if row.delta_ns > 0 else ""
    return (
        fmt.seconds(row.ns / 1e9),
        fmt.seconds(row.against_ns / 1e9),
        Text(sign + fmt.seconds(row.delta_ns / 1e9), style),
    )
