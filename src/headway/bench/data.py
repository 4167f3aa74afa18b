"""How much of the tokenizer's own speed `headway data prepare` reaches, on the same text and cores.

Preparing reads, decompresses, parses, renders templates, finds labels, writes, hashes and syncs besides tokenising. The
measure is what `tokenizers` alone does with the rendered texts when they lie ready in memory, on as many threads as
`prepare` has processes. Both are timed in turn, several times in one run, by the clock and in core-seconds: on a
machine that does other work as well the clock says little, the core-seconds still hold.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
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

    def add(self, action: Callable[[], Any]) -> None:
        """Time an action, its child processes included."""
        wall, cores = time.perf_counter(), _core_seconds()
        action()
        self.wall.append(time.perf_counter() - wall)
        self.cores.append(_core_seconds() - cores)


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
    # Read by the library when its threads first start, which must not have happened in this process.
    os.environ["RAYON_NUM_THREADS"] = str(workers)
    opened = open_tokenizer(tokenizer)
    info = take_apart(opened)
    if not info.spec:
        raise UserError("bench data: this tokenizer has no Rust backend to compare with")
    texts = _rendered(sources, info, options)
    backend = Tokenizer.from_str(info.spec)
    with _threads():
        encode = _faster(backend, texts)
    alone, ours = Times(), Times()
    folder = Path(tempfile.mkdtemp(prefix="headway-bench-", dir=scratch))
    try:
        for number in range(rounds):
            out = folder / str(number)
            with _threads():
                alone.add(lambda: _ids(encode, texts, info))
            ours.add(lambda out=out: prepare(sources, out, opened, options=options, workers=workers))  # type: ignore[misc]
            totals = manifests.read(out).totals
            shutil.rmtree(out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    size = sum(len(text.encode()) for text in texts)
    return DataBench(totals.documents, size, totals.tokens, workers, alone, ours)


@contextmanager
def _threads() -> Iterator[None]:
    """The library may use its threads, whatever the surroundings say."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before


@dataclass
class _Collector:
    """In the place of an encoder: keeps the texts it is given."""

    texts: list[str] = field(default_factory=list)

    def encode(self, documents: Sequence[Document]) -> list[Encoded | BadRecord]:
        self.texts += [piece for document in documents for piece in document.pieces]
        return [BadRecord("only collected") for _ in documents]


def _rendered(sources: Any, info: TokenizerInfo, options: PrepareOptions) -> list[str]:
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
        raise UserError("bench data: the sources hold no text")
    return collector.texts


def _faster(backend: Any, texts: list[str]) -> Callable[..., list[Any]]:
    some = texts[: 4 * _BATCH]
    calls = (backend.encode_batch, backend.encode_batch_fast)

    def seconds(call: Callable[..., list[Any]]) -> float:
        times = Times()
        for _ in range(2):
            times.add(lambda: call(some, add_special_tokens=False))
        return min(times.cores)

    return min(calls, key=seconds)


def _ids(encode: Callable[..., list[Any]], texts: list[str], info: TokenizerInfo) -> int:
    total = 0
    for start in range(0, len(texts), _BATCH):
        encodings = encode(texts[start : start + _BATCH], add_special_tokens=False)
        count = sum(map(len, encodings))
        np.fromiter(chain.from_iterable(e.ids for e in encodings), dtype=info.dtype, count=count)
        total += count
    return total


def _core_seconds() -> float:
    """Processor time of this process and of its children that have ended."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def _spread(alone: list[float], ours: list[float]) -> tuple[float, float, float]:
    each = [a / b for a, b in zip(alone, ours, strict=True)]
    return min(each), statistics.median(each), max(each)
