"""The verdict as one self-contained page: curves of both sides, differences against the band, cosines by layer."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

from headway.prove.report import lines, words
from headway.prove.verify import Verified

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 460, 220, 64, 28
_STYLE = """
:root { color-scheme: light dark; --ink: #1c2330; --soft: #6a7385; --line: #d7dce5; --ground: #fff;
  --a: #3b6fd4; --b: #d2622f; --band: #9aa3b2; --good: #2c7a3f; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e7eaf0; --soft: #9aa3b2; --line: #39414f; --ground: #14181f;
  --a: #6b9bf2; --b: #ec8757; --band: #7a8496; --good: #6cc182; --bad: #f2857c; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--ground); max-width: 980px;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } .good { color: var(--good); } .bad { color: var(--bad); }
.charts { display: flex; flex-wrap: wrap; gap: 1rem; } svg text { fill: var(--soft); font: 11px system-ui, sans-serif; }
svg .title { fill: var(--ink); font-size: 13px; } table { border-collapse: collapse; margin: 1rem 0; }
td, th { padding: .2rem .8rem .2rem 0; text-align: right; border-bottom: 1px solid var(--line); }
td:first-child, th:first-child, td:last-child, th:last-child { text-align: left; }
pre { white-space: pre-wrap; color: var(--soft); }
"""
Curve = tuple[str, str, Sequence[float], str]
"""(name, colour, values, dash)"""


def page(found: Verified, a: str, b: str) -> str:
    """The page; `a` and `b` name the two sides."""
    verdict = found.verdict
    kind = "bad" if found.exit_code else "good"
    sides = [("A", "var(--a)", found.a, ""), ("B", "var(--b)", found.b, "5 4")]
    charts = [
        _chart("loss, nats per trained token", [(n, c, t.losses, d) for n, c, t, d in sides], log=False),
        _chart("global gradient norm", [(n, c, t.grad_norms, d) for n, c, t, d in sides], log=False),
        _chart("relative difference of the loss", _against_band(verdict.loss), log=True),
        _chart("relative difference of the gradient norm", _against_band(verdict.norm), log=True),
    ]
    rows = "".join(
        f"<tr><td class={'good' if t.passed else 'bad'}>{'✓' if t.passed else '✗'} {html.escape(t.name)}</td>"
        f"<td>{t.value:.3g}</td><td>{t.limit:.3g}</td><td>{t.band:.3g}</td><td>{html.escape(t.where)}</td></tr>"
        for t in verdict.tests
    )
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>headway verify</title><style>{_STYLE}</style>"
        f"<h1>{html.escape(a)} (A) and {html.escape(b)} (B): <span class={kind}>{html.escape(words(found))}</span></h1>"
        f"{_not_compared(found)}"
        f"<div class=charts>{''.join(charts)}</div>"
        "<table><tr><th>test</th><th>B against A</th><th>limit</th><th>band</th><th>worst at</th></tr>"
        f"{rows}</table>{_cosine_table(found)}<pre>{html.escape(chr(10).join(lines(found)))}</pre></html>\n"
    )


def _not_compared(found: Verified) -> str:
    rows = [f"differs, not compared: {change}" for change in found.uncompared]
    rows += [f"not the same steps: {found.other_step}"] if found.other_step else []
    return "".join(f"<p class=bad>{html.escape(row)}</p>" for row in rows)


def _against_band(pairs: Sequence[tuple[float, float]]) -> list[Curve]:
    return [
        ("B against A", "var(--b)", [value for value, _ in pairs], ""),
        ("band: A again", "var(--band)", [band for _, band in pairs], "2 3"),
    ]


def _chart(title: str, curves: Sequence[Curve], *, log: bool) -> str:
    values = [v for _, _, series, _ in curves for v in series if math.isfinite(v) and (v > 0 or not log)]
    if not values:
        return f"<p>{html.escape(title)}: nothing differs at all</p>"
    low, high = min(values), max(values)
    if log:
        low, high = 10 ** math.floor(math.log10(low)), 10 ** math.ceil(math.log10(high) + 1e-9)
    pad = 0.0 if log else 0.05 * ((high - low) or abs(high) or 1.0)
    low, high = (low, high * 10 if low == high else high) if log else (low - pad, high + pad)
    steps = max(len(series) for _, _, series, _ in curves)

    def x(number: int) -> float:
        return _LEFT + number / max(1, steps - 1) * (_WIDTH - _LEFT - 12)

    def y(value: float) -> float:
        place = (math.log10(max(value, low) / low) / math.log10(high / low)) if log else (value - low) / (high - low)
        return 34 + (1 - place) * (_HEIGHT - 34 - _BOTTOM)

    ticks = [low, math.sqrt(low * high) if log else (low + high) / 2, high]
    parts = [
        f'<line x1="{_LEFT}" x2="{_WIDTH - 12}" y1="{y(t):.1f}" y2="{y(t):.1f}" stroke="var(--line)"/>'
        f'<text x="{_LEFT - 6}" y="{y(t) + 4:.1f}" text-anchor="end">{t:.3g}</text>'
        for t in ticks
    ]
    for number, (name, colour, series, dash) in enumerate(curves):
        points = " ".join(f"{x(i):.1f},{y(v):.1f}" for i, v in enumerate(series) if math.isfinite(v))
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"/>'
        )
        left = _LEFT + 170 * number
        parts.append(
            f'<line x1="{left}" x2="{left + 18}" y1="{_HEIGHT - 6}" y2="{_HEIGHT - 6}" stroke="{colour}" '
            f'stroke-width="2" stroke-dasharray="{dash}"/>'
            f'<text x="{left + 24}" y="{_HEIGHT - 2}">{html.escape(name)}</text>'
        )
    parts.append(f'<text x="{_WIDTH - 12}" y="{_HEIGHT - 2}" text-anchor="end">step 1 to {steps}</text>')
    head = f'<text class="title" x="4" y="16">{html.escape(title)}</text>'
    return f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img">{head}{"".join(parts)}</svg>'


def _cosine_table(found: Verified) -> str:
    """The layers whose gradients point least alike, with what A's own second run reaches there."""
    worst = sorted(found.verdict.cosines, key=lambda row: row[2])[:12]
    rows = "".join(
        f"<tr><td>{html.escape(layer)}</td><td>{step}</td><td>{1 - cosine:.2e}</td><td>{1 - own:.2e}</td></tr>"
        for step, layer, cosine, own in worst
    )
    return (
        "<table><tr><th>layers whose gradients point least alike</th><th>step</th><th>1 − cosine, B</th>"
        f"<th>A again</th></tr>{rows}</table>"
    )
