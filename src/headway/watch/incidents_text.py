"""The ledger in the terminal and as a post-mortem page."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Group as Lines
from rich.table import Table

from headway import __version__
from headway.record.files import write_atomic
from headway.record.folder import RunFolder
from headway.watch import format as fmt
from headway.watch.incidents import Group, Overview
from headway.watch.report import asset, page_template, when

_NEWEST = 20


def render_overview(found: Overview) -> Lines:
    """For a console: the figures, causes, hosts and the newest incidents."""
    parts: list[object] = [f"{found.run}: {fmt.plural(len(found.incidents), 'incident')}"]
    parts += [f"{name:<16} {value}" for name, value in figures(found)]
    if found.incidents:
        parts += ["", _table("cause", found.by_cause), "", _table("host", found.by_host), "", _newest(found)]
    return Lines(*parts)  # type: ignore[arg-type]


def figures(found: Overview) -> Iterator[tuple[str, str]]:
    """Name and value of what is known about the run as a whole."""
    yield "failures", f"{found.failures} that stopped the training"
    if found.mtbf_s is not None:
        yield "MTBF", f"{fmt.seconds(found.mtbf_s)} of wall clock between failures"
    if found.mttr_s is not None:
        yield "MTTR", f"{fmt.seconds(found.mttr_s)} from the fault to the first new step"
    yield "ETTR (goodput)", f"{fmt.percent(found.ettr)} of {fmt.seconds(found.wall_s)} of wall clock"
    if found.rest:
        yield "the rest", ", ".join(_share(path, took, found.wall_s) for path, took in found.rest.items())
    if found.restarts:
        took = f"{fmt.seconds(found.restart_s)} of start-up and compilation"
        yield "restarts", f"{fmt.plural(found.restarts, 'start')} after the first: {took}"
    if found.lost:
        yield "lost", ", ".join(f"{path} {fmt.seconds(seconds)}" for path, seconds in found.lost.items())
    for host in found.lemons:
        yield "lemon host", f"{host} fails far more often than the others; take it out and run `headway doctor --node`"
    if found.bad_lines:
        yield "damaged", f"{fmt.plural(found.bad_lines, 'line')} of incidents.jsonl cannot be read"


def _share(path: str, took: float, wall_s: float) -> str:
    name = {"startup": "start-up"}.get(path, path.replace("_", " "))
    return f"{name} {fmt.percent(took / wall_s)} ({fmt.seconds(took)})"


def _table(name: str, groups: tuple[Group, ...]) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in (name, "incidents", "steps lost", "time lost", "steps", "ranks"):
        table.add_column(title, justify="left" if title in (name, "ranks") else "right", overflow="fold")
    for group in groups:
        table.add_row(*row_of(group))
    return table


def row_of(group: Group) -> tuple[str, str, str, str, str, str]:
    span = str(group.first_step) if group.first_step == group.last_step else f"{group.first_step}–{group.last_step}"
    ranks = ", ".join(map(str, group.ranks[:8])) + (" …" if len(group.ranks) > 8 else "")
    return group.name, str(group.count), str(group.steps_lost), fmt.seconds(group.seconds_lost), span, ranks


def _newest(found: Overview) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("step", "when", "fault", "host", "rank", "evidence", "action"):
        table.add_column(title, justify="right" if title in ("step", "rank") else "left", overflow="fold")
    for item in found.incidents[-_NEWEST:]:
        rank = "" if item.rank is None else str(item.rank)
        table.add_row(str(item.step), when(item.time), item.fault, item.host, rank, item.evidence, item.action)
    return table


def write_post_mortem(run: RunFolder, found: Overview) -> Path:
    """Writes incidents.html into the run folder; one self-contained page."""
    path = run.root / "incidents.html"
    page = page_template("incidents.html.j2").render(
        name=run.root.resolve().name,
        css=asset("assets", "report.css"),
        o=found,
        figures=list(figures(found)),
        causes=[row_of(group) for group in found.by_cause],
        hosts=[row_of(group) for group in found.by_host],
        items=list(reversed(found.incidents))[:500],
        more=max(0, len(found.incidents) - 500),
        when=when,
        now=when(time.time()),
        version=__version__,
    )
    write_atomic(path, page)
    return path
