"""report.html: one self-contained file that says what a run did. No network, no server, light and dark."""

from __future__ import annotations

import datetime
import functools
import time
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import orjson
from jinja2 import Environment, FunctionLoader, StrictUndefined, Template
from markupsafe import Markup, escape

from headway import __version__
from headway.account.account import Account
from headway.account.tree import UNACCOUNTED, Tree
from headway.account.waterfall import Waterfall
from headway.record.files import read_json, write_atomic
from headway.record.folder import RunFolder
from headway.record.sessions import History, read_history
from headway.watch import format as fmt
from headway.watch.curves import Axis, account_over_time, charts, rank_map
from headway.watch.palette import RUN_PAINT, STEP_PAINT, Paint, waterfall_paint
from headway.watch.ranks import uneven
from headway.watch.render import facts
from headway.watch.summary import Summary, read_summary

_CONFIG_LIMIT = 200_000
_ROWS = 200


def write_report(run_dir: Path | str) -> Path:
    """Reads a run folder and writes report.html into it.

    Returns:
        The path of the report.

    Raises:
        UserError: there is no run folder.
    """
    run = RunFolder.open(run_dir)
    history = read_history(run)
    write_atomic(run.report, render_html(run, history, read_summary(run, history)))
    return run.report


def render_html(run: RunFolder, history: History, summary: Summary) -> str:
    """The report as text. Everything that comes from the run is escaped."""
    template = page_template("report.html.j2")
    start = history.sessions[-1].start if history.sessions else None
    began = history.sessions[0].start.time if history.sessions else 0.0
    return template.render(
        s=summary,
        name=run.root.resolve().name,
        css=asset("assets", "uPlot.min.css") + asset("assets", "report.css"),
        uplot=_uplot(),
        script=asset("assets", "heat.js") + asset("assets", "report.js"),
        data=json_for_html(_data(history, summary, began)),
        tiles=list(_tiles(summary)),
        facts=list(facts(summary)),
        fall=fall_rows(summary.fall) if summary.fall else [],
        run_rows=account_rows(summary.run_account, RUN_PAINT) if summary.run_account else [],
        step_rows=account_rows(summary.step_account, STEP_PAINT) if summary.step_account else [],
        uneven=[row for row in uneven(summary.ranks) if row.path != "wall"][:12] if summary.ranks else [],
        labels={path: paint.label for path, paint in STEP_PAINT.items()},
        start_facts=[(key.replace("_", " "), fmt.fact(value)) for key, value in start.facts.items()] if start else [],
        when=when,
        now=when(time.time()),
        version=__version__,
        config=_text(run.config),
        environment=_environment(run.environment),
        limit=_ROWS,
    )


@functools.cache
def page_template(name: str) -> Template:
    """A page of watch/templates. Everything that is put into it is escaped, whatever the page is called."""
    environment = Environment(
        loader=FunctionLoader(lambda file: asset("templates", file)),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["fmt"] = fmt
    environment.filters["code"] = _code
    return environment.get_template(name)


def _code(text: str) -> Markup:
    """Text with what stands between backticks as code. Both are escaped."""
    parts = text.split("`")
    if len(parts) % 2 == 0:  # a backtick without its other one is itself
        parts[-2:] = ["`".join(parts[-2:])]
    marked = [Markup("<code>{}</code>").format(part) if place % 2 else escape(part) for place, part in enumerate(parts)]
    return Markup("").join(marked)


def asset(folder: str, name: str) -> str:
    return files("headway.watch").joinpath(folder, name).read_text(encoding="utf-8")


def _uplot() -> str:
    """uPlot with its license in place of its banner, whose address would be the page's only one."""
    code = asset("assets", "uPlot.iife.min.js")
    return f"/*! uPlot\n{asset('assets', 'uPlot.LICENSE')}\n*/\n" + code.partition("*/")[2].lstrip()


def json_for_html(value: Any) -> str:
    """JSON that cannot end the script element it stands in, whatever a name in it says."""
    text = orjson.dumps(value).decode()
    for mark in "<>&\u2028\u2029":
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    return text


def _data(history: History, summary: Summary, began: float) -> dict[str, Any]:
    kept = history.kept
    axis = Axis(kept, history.lost, summary.evals, began)
    peak_known = any(line.mfu is not None for line in kept)
    marks = [{"step": item.resumed_from, "label": f"session {item.session}"} for item in summary.sessions[1:]]
    marks += [{"step": item.step, "label": item.fault} for item in summary.incidents[:_ROWS]]
    return {
        "charts": charts(axis, peak_known) if len(axis.steps) else [],
        "account": account_over_time(kept),
        "ranks": rank_map(summary.ranks),
        "marks": marks,
    }


def _tiles(summary: Summary) -> Iterator[tuple[str, str, str]]:
    """The few figures of the header: name, value, what it is."""
    use = summary.utilisation
    if use.mfu is not None:
        yield "MFU", fmt.percent(use.mfu), f"{fmt.percent(use.mfu_wall)} of the whole wall clock"
    else:
        yield "MFU", fmt.UNKNOWN, "the peak is unknown"
    others = f"{fmt.count(summary.per_second('tokens'))} real, {fmt.count(summary.per_second('slots'))} slots"
    yield "Trained tokens/s", fmt.count(summary.per_second("trained_tokens")), others
    lost = f"{fmt.plural(summary.lost.steps, 'step')} done again" if summary.lost.steps else "no step done again"
    yield "Goodput", fmt.percent(summary.goodput), lost
    if summary.evals:
        best = min(line.nll for line in summary.evals)
        yield "Evaluation loss", fmt.loss(summary.evals[-1].nll), f"best {fmt.loss(best)}"
    yield "Training loss", fmt.loss(summary.last_loss), f"from {fmt.loss(summary.first_loss)}"
    yield "Trained tokens", fmt.count(summary.kept.trained_tokens), f"{fmt.plural(summary.kept.steps, 'step')}"


def fall_rows(fall: Waterfall) -> list[dict[str, Any]]:
    rows = []
    for row in fall.rows:
        ends = row.path in ("top", "useful")
        start = 0.0 if ends else row.left
        amount = fmt.si(row.share * fall.top, "FLOP") if fall.peak_known else ""
        rows.append(
            {
                "label": row.label,
                "share": fmt.percent(row.share),
                "seconds": fmt.seconds(row.seconds),
                "amount": amount,
                "start": f"{100 * start:.3f}",
                "width": f"{100 * row.share:.3f}",
                "end": ends,
                "last": row.path == "useful",
                "paint": waterfall_paint(row.path),
            }
        )
    return rows


def account_rows(account: Account, paints: dict[str, Paint]) -> list[dict[str, Any]]:
    rows = []
    for path in account.tree.paths():
        if path in paints and (account.total(path) or path == UNACCOUNTED):
            share = account.share(path)
            rows.append(
                {
                    "label": paints[path].label,
                    "meaning": _meaning(account.tree, path),
                    "child": "." in path,
                    "share": fmt.percent(share),
                    "seconds": fmt.seconds(account.total(path) / 1e9),
                    "width": f"{100 * share:.3f}",
                    "paint": paints[path],
                }
            )
    return rows


def _meaning(tree: Tree, path: str) -> str:
    return tree.meanings.get(path) or ", ".join(child.partition(".")[2] for child in tree.children(path))


def when(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")


def _text(path: Path) -> str:
    if not path.is_file():
        return ""
    text = path.read_text(encoding="utf-8", errors="replace")
    rest = len(text) - _CONFIG_LIMIT
    return text if rest <= 0 else text[:_CONFIG_LIMIT] + f"\n… {rest:,} characters more"


def _environment(path: Path) -> list[tuple[str, str]]:
    """environment.json, flattened; a damaged one says so."""
    if not path.is_file():
        return []
    try:
        return list(_flat("", read_json(path)))[:_ROWS]
    except orjson.JSONDecodeError as error:
        return [("environment.json", f"cannot be read: {error}")]


def _flat(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, below in value.items():
            yield from _flat(f"{name}.{key}" if name else str(key), below)
    else:
        yield name, str(value)
