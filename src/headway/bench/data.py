"""How much of the tokenizer's own speed `headway data prepare` reaches, on the same text and cores.

Preparing reads, decompresses, parses, renders templates, finds labels, writes, hashes and syncs besides tokenising. The
measure is what `tokenizers` alone does with the rendered texts when they lie ready in memory, on as many threads as
`prepare` has processes. Both are timed in turn, several times in one run, by the clock and in core-seconds.

Each has a process of its own, newly started: what the tokenizer's threads leave behind (memory arenas full of holes)
made later rounds of `prepare` up to a fifth slower when both were timed in one process.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from headway.account.errors import UserError
from headway.data import manifest as manifests
from headway.data.convert import Converter
from headway.data.encode import Document, Encoded
from headway.data.options import PrepareOptions
from headway.data.prepare import prepare
from headway.data.readers import FileReader
from headway.data.sources import expand
from headway.data.tokenizer import TokenizerInfo, load_templates, open_tokenizer, take_apart
from headway.data.turns import BadRecord

#: Texts per call of the tokenizer alone; more or less of them made no difference.
_BATCH = 1024


@dataclass(frozen=True)
class Times:
    """Seconds by the clock, and seconds of all cores together, of one round each."""

    wall: list[float] = field(default_factory=list)
    cores: list[float] = field(default_factory=list)

    def add(self, seconds: tuple[float, float]) -> None:
        """Add a round."""
        self.wall.append(seconds[0])
        self.cores.append(seconds[1])


@dataclass(frozen=True)
class DataBench:
    """The size of the text, and rounds of both."""

    documents: int
    text_bytes: int
    tokens: int
    workers: int
    alone: Times
    prepare: Times

    @property
    def ratios(self) -> tuple[float, float, float]:
        """Throughput of prepare / tokenizers alone by the clock: smallest, median, largest of the rounds."""
        return _spread(self.alone.wall, self.prepare.wall)

    @property
    def core_ratios(self) -> tuple[float, float, float]:
        """The same per core-second."""
        return _spread(self.alone.cores, self.prepare.cores)

    def lines(self) -> list[str]:
        """The result for the terminal."""
        size = f"{self.documents} documents, {self.text_bytes / 1e6:.1f} MB of text, {self.tokens} tokens"
        rounds = f"{len(self.alone.wall)} rounds on {self.workers} cores"
        result = [f"{size}, {rounds}; prepare / tokenizers alone, smallest, median, largest:"]
        for name, (low, middle, high) in (("by the clock", self.ratios), ("per core-second", self.core_ratios)):
            result.append(f"  {name}: {low:.1%}  {middle:.1%}  {high:.1%}")
        for name, times in (("tokenizers alone", self.alone), ("prepare", self.prepare)):
            wall, cores = statistics.median(times.wall), statistics.median(times.cores)
            speed = f"{self.text_bytes / wall / 1e6:.2f} MB/s, {self.tokens / wall:,.0f} tokens/s"
            result.append(f"  {name}: median {wall:.2f} s ({speed}), {cores:.2f} core-seconds")
        return result


def bench_prepare(
    sources: str | Path | Sequence[str | Path],
    tokenizer: Any,
    *,
    options: PrepareOptions | None = None,
    workers: int | None = None,
    rounds: int = 5,
    scratch: Path | None = None,
) -> DataBench:
    """Time `prepare` and the tokenizer alone, in turn. ``scratch``: where shards are written and removed again.

    The tokenizer alone is given whichever of its two batch calls is faster here, and its ids are taken out as numbers;
    opening the tokenizer is in neither time, starting processes is in `prepare`'s.

    Raises:
        UserError: bad sources or options, or a tokenizer without a Rust backend.
    """
    options = options or PrepareOptions()
    workers = workers or len(os.sched_getaffinity(0))
    alone, ours = Times(), Times()
    folder = Path(tempfile.mkdtemp(prefix="headway-bench-", dir=scratch))
    context = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(1, context) as tokenizing, ProcessPoolExecutor(1, context) as preparing:
            size = tokenizing.submit(_open_alone, sources, tokenizer, options, workers).result()
            preparing.submit(_open_prepare, sources, tokenizer, options, workers).result()
            for number in range(rounds):
                alone.add(tokenizing.submit(_time_alone).result())
                ours.add(preparing.submit(_time_prepare, folder / str(number)).result())
                totals = manifests.read(folder / str(number)).totals
                shutil.rmtree(folder / str(number))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return DataBench(totals.documents, size, totals.tokens, workers, alone, ours)


# -- in the processes that are timed -----------------------------------------------------------------------------------

_ready: Callable[..., Any] | None = None


def _open_alone(sources: Any, tokenizer: Any, options: PrepareOptions, workers: int) -> int:
    """Have the texts and the tokenizer ready; the texts' size in bytes."""
    global _ready
    # Both are read by the library when its threads first start.
    os.environ.update(RAYON_NUM_THREADS=str(workers), TOKENIZERS_PARALLELISM="true")
    info = take_apart(open_tokenizer(tokenizer))
    if not info.spec:
        raise UserError("bench data: this tokenizer has no Rust backend to compare with")
    texts = rendered(sources, info, options)
    encode = _faster(Tokenizer.from_str(info.spec), texts)
    _ready = partial(count_tokens, encode, texts, info)
    return sum(len(text.encode()) for text in texts)


def _open_prepare(sources: Any, tokenizer: Any, options: PrepareOptions, workers: int) -> None:
    global _ready
    _ready = partial(prepare, sources, tokenizer=open_tokenizer(tokenizer), options=options, workers=workers)


def _time_alone() -> tuple[float, float]:
    assert _ready is not None
    return _timed(_ready)


def _time_prepare(out: Path) -> tuple[float, float]:
    assert _ready is not None
    return _timed(partial(_ready, out=out))


def _timed(action: Callable[[], Any]) -> tuple[float, float]:
    """Seconds by the clock, and of all cores, child processes that have ended included."""
    wall, cores = time.perf_counter(), _core_seconds()
    action()
    return time.perf_counter() - wall, _core_seconds() - cores


def _core_seconds() -> float:
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


@dataclass
class _Collector:
    """In the place of an encoder: keeps the texts it is given."""

    texts: list[str] = field(default_factory=list)

    def encode(self, documents: Sequence[Document]) -> list[Encoded | BadRecord]:
        self.texts += [piece for document in documents for piece in document.pieces]
        return [BadRecord("only collected") for _ in documents]

    def decode(self, ids: Sequence[int]) -> str:
        """Nothing is encoded here, so there is nothing that could be decoded."""
        raise NotImplementedError


def rendered(sources: Any, info: TokenizerInfo, options: PrepareOptions) -> list[str]:
    """The texts that `prepare` tokenises, in its order."""
    files, _ = expand([sources] if isinstance(sources, (str, Path)) else sources)
    _, templates = load_templates(info, options.chat_template, options.template_options, options.template_date)
    collector = _Collector()
    paths = [str(file) for file in files]
    converter = Converter(info, collector, templates, options.labels, options.text_eos, paths)
    for index, file in enumerate(files):
        for chunk in FileReader(file, index, fmt=options.format).chunks():
            for _ in converter.convert([chunk]):
                pass
    if not collector.texts:
        raise UserError(f"bench data: the sources hold no text ({', '.join(paths[:3])})")
    return collector.texts


def _faster(backend: Any, texts: list[str]) -> Callable[..., list[Any]]:
    some = texts[: 4 * _BATCH]
    calls = (backend.encode_batch, backend.encode_batch_fast)
    return min(calls, key=lambda call: min(_timed(lambda: call(some, add_special_tokens=False))[1] for _ in range(2)))


def count_tokens(encode: Callable[..., list[Any]], texts: list[str], info: TokenizerInfo) -> int:
    """Tokenise all texts and take their ids out as numbers."""
    total = 0
    for start in range(0, len(texts), _BATCH):
        encodings = encode(texts[start : start + _BATCH], add_special_tokens=False)
        count = sum(map(len, encodings))
        np.fromiter(chain.from_iterable(e.ids for e in encodings), dtype=info.dtype, count=count)
        total += count
    return total


def _spread(alone: list[float], ours: list[float]) -> tuple[float, float, float]:
    each = [a / b for a, b in zip(alone, ours, strict=True)]
    return min(each), statistics.median(each), max(each)
