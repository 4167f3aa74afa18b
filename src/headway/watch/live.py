"""What a person sees while a run trains: one updating line on a terminal, a quiet line now and then elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from headway.account.events import CheckpointLine, EvalLine, Line, SessionEnd, SessionStart, StepLine, TraceLine
from headway.watch import format as fmt
from headway.watch.console import make_console
from headway.watch.rates import Rates, TimeLeft, Window

_PLAIN_SECONDS = 10.0
_REFRESH_SECONDS = 0.1
_WINDOW_SECONDS = 10.0
_SKIPS_SHOWN = 5


class LiveLine:
    """Observer that prints the start, the progress, evaluations, checkpoints, skipped steps and the end.

    Args:
        every: steps between updates of the line.
        quiet: only the start, warnings and the end.
        console: where to print; whether it is a terminal decides between one updating line and plain lines.
        now: seconds of a clock that never goes back, for how often to print. Rates never use it: they come from
            the lines' own wall clocks.
    """

    def __init__(
        self,
        every: int = 1,
        quiet: bool = False,
        console: Console | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._every = every
        self._quiet = quiet
        self._console = console or make_console()
        self._now = now
        self._live: Live | None = None
        self._skips = 0

    def tell(self, line: Line) -> None:
        if isinstance(line, SessionStart):
            self._begin(line)
        elif isinstance(line, StepLine):
            self._step(line)
        elif isinstance(line, EvalLine):
            self._note(_eval_text(line))
        elif isinstance(line, CheckpointLine):
            self._note(_checkpoint_text(line))
        elif isinstance(line, TraceLine):
            self._note(_trace_text(line))
        elif isinstance(line, SessionEnd):
            self._end(line)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _begin(self, start: SessionStart) -> None:
        self._start = start
        self._plain = not self._console.is_terminal
        self._window = Window(math.inf if self._plain else _WINDOW_SECONDS)
        self._time_left = TimeLeft(start.steps)
        self._shown_at = -math.inf
        for text in banner(start):
            self._print(text)
        if not self._plain and not self._quiet:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()

    def _step(self, line: StepLine) -> None:
        self._window.add(line)
        self._time_left.add(line)
        if line.skipped is not None:
            self._skip(line)
        if self._quiet or not self._due(line):
            return
        self._shown_at = self._now()
        rates = self._window.rates(self._start.peak_flops)
        left = fmt.clock(self._time_left.seconds(line)) + " left"
        progress = Progress(self._start, line, rates, left if self._time_left.settled else f"≤ {left}")
        if self._live is not None:
            self._live.update(progress, refresh=True)
        else:
            self._print(progress.plain())
            self._window.clear()

    def _due(self, line: StepLine) -> bool:
        if line.step >= self._start.steps or self._shown_at == -math.inf:
            return True
        period = _PLAIN_SECONDS if self._plain else _REFRESH_SECONDS
        return line.step % self._every == 0 and self._now() - self._shown_at >= period

    def _skip(self, line: StepLine) -> None:
        self._skips += 1
        if self._skips <= _SKIPS_SHOWN or self._skips % 100 == 0:
            text = Text(f"step {line.step} skipped: {line.skipped}", style="yellow")
            if self._skips >= _SKIPS_SHOWN:
                text.append(f" ({self._skips} so far; every one is in metrics.jsonl)")
            self._print(text)

    def _note(self, text: Text) -> None:
        if not self._quiet:
            self._print(text)

    def _end(self, end: SessionEnd) -> None:
        self.close()
        style = {"done": "bold green", "preempted": "bold yellow"}.get(end.reason, "bold red")
        text = Text(end.reason, style=style)
        after = fmt.clock(end.wall_ns / 1e9)
        text.append(f" at step {end.step:,} of {self._start.steps:,} after {after}", style="default")
        if self._skips:
            text.append(f", {fmt.plural(self._skips, 'step')} skipped", style="yellow")
        if end.reason == "interrupted":
            text.append("; the same command goes on from the newest checkpoint", style="default")
        self._print(text)

    def _print(self, text: Text) -> None:
        # soft_wrap: a log file must get whole lines whatever its supposed width.
        self._console.print(text, soft_wrap=True)


def banner(start: SessionStart) -> list[Text]:
    """What the session stands on, before its first step."""
    head = Text(f"step {start.resumed_from:,} → {start.steps:,}", style="bold")
    ranks = fmt.plural(start.world_size, "rank")
    head.append(f" · session {start.session} · {ranks} · {start.device}", style="default")
    rows = [head]
    if start.resumed_from:
        rows.append(_fact("resumed", f"after step {start.resumed_from:,}; nothing counts twice"))
    rows.append(_fact("peak", fmt.peak(start.peak_flops, start.peak_source)))
    rows += [_fact(name.replace("_", " "), fmt.fact(value)) for name, value in start.facts.items()]
    return rows


def _fact(name: str, value: str) -> Text:
    return Text.assemble((f"  {name:<18} ", "dim"), value)


def _eval_text(line: EvalLine) -> Text:
    perplexity = f"{math.exp(line.nll):.2f}" if line.nll < 700 else "∞"
    over = f"{line.tokens:,} tokens of {fmt.plural(line.documents, 'document')} in {fmt.seconds(line.seconds)}"
    return Text.assemble(
        ("eval ", "cyan"), f"step {line.step:,}: nll {fmt.loss(line.nll)}, perplexity {perplexity}, over {over}"
    )


def _checkpoint_text(line: CheckpointLine) -> Text:
    return Text.assemble(
        ("saved ", "cyan"),
        f"step {line.step:,}: {line.path} ({fmt.size(line.bytes)} in {fmt.seconds(line.seconds)})",
    )


def _trace_text(line: TraceLine) -> Text:
    head = ("trace ", "cyan")
    if not line.wall_ns:
        return Text.assemble(head, f"step {line.step:,}: {line.note}")
    shares = sorted(line.account.items(), key=lambda item: -item[1])[:3]
    parts = ", ".join(f"{path} {fmt.percent(ns / line.wall_ns)}" for path, ns in shares if ns)
    first = f"; first {line.findings[0][0]}, {fmt.percent(line.findings[0][2])} to win" if line.findings else ""
    return Text.assemble(head, f"step {line.step:,}: {parts}{first} ({line.path})")


class Progress:
    """The line itself. On a terminal it drops its less urgent fields until it fits."""

    def __init__(self, start: SessionStart, line: StepLine, rates: Rates, time_left: str) -> None:
        self.share = line.step / start.steps if start.steps else 1.0
        self.step = f"step {line.step:,}/{start.steps:,}"
        loss = f"loss {fmt.loss(line.loss)}" if line.skipped is None else "skipped"
        # In the order in which they are read; the number says which goes first when space is short.
        self.fields: list[tuple[int, str]] = [
            (0, loss),
            (6, f"grad {fmt.loss(line.grad_norm)}"),
            (7, f"lr {fmt.rate(line.lr)}"),
            (1, fmt.per_second(rates.trained_per_s, "trained tok")),
            (2, f"MFU {fmt.percent(rates.mfu)}"),
            (3, f"data {fmt.percent(rates.data_share)}"),
            (0, time_left),
        ]

    def plain(self) -> Text:
        return Text("  ".join([self.step, fmt.percent(self.share), *(text for _, text in self.fields)]))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for drop in (8, 7, 6, 3, 2, 1, 0):
            kept = [text for rank, text in self.fields if rank < drop or rank == 0]
            text = Text.assemble((self.step, "bold"), *(part for field in kept for part in ((" · ", "dim"), field)))
            room = options.max_width - text.cell_len
            if room >= 8 or drop == 0:
                break
        if room >= 8:
            # Few widths, so that the bar does not twitch with every digit of the text.
            width = next(width for width in (24, 16, 10, 7) if room > width)
            text = Text.assemble(_bar(self.share, width), " ", text)
        text.truncate(options.max_width, overflow="ellipsis")
        yield text


def _bar(share: float, width: int) -> Text:
    done = min(width, int(share * width))
    return Text.assemble(("━" * done, "green"), ("━" * (width - done), "bright_black"))
