"""From the run file's sources to the stream that the loop reads: prepare, open, view, check."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from headway.account.errors import UserError
from headway.config.data import Source
from headway.config.run import RunConfig
from headway.data.manifest import Totals
from headway.data.prepare import PrepareOptions, Progress, prepare
from headway.data.report_text import report_lines
from headway.data.store import ShardFolder, is_store, open_store
from headway.data.stream import Stream, StreamOptions
from headway.data.tokenizer import open_tokenizer
from headway.data.view import View, ViewOptions, Weighted
from headway.train.prepared import Prepared, check_prepared

Say = Callable[[str], None]

_MOST_EPOCHS = 10_000  # each is planned before the first step, to know the length of the schedule


def prepare_sources(config: RunConfig, say: Say, progress: Callable[[Progress], None] | None = None) -> None:
    """Prepares every source (training and evaluation) that is not prepared yet; verifies every shard by its hash.

    Raises:
        UserError: a source, an option or a shard is wrong, or a source that is prepared contradicts the run file.
    """
    ready = [
        Prepared(f"{section}[{number}]", source, open_store(source.path))
        for section, sources in (("data.sources", config.data.sources), ("eval.data", config.eval.data or []))
        for number, source in enumerate(sources)
        if is_store(source.path)
    ]
    for line in check_prepared(config, ready):
        say(f"data: {line}")
    _tokenise(config, [source for source in _all_sources(config) if not is_store(source.path)], say, progress)
    stores = [weighted.store for weighted in open_sources(config, _all_sources(config))]
    # A flipped bit would train without a word; hashing costs a second a gigabyte, once a start.
    _verify([store for store in stores if isinstance(store, ShardFolder)], progress)


def _verify(stores: Sequence[ShardFolder], progress: Callable[[Progress], None] | None) -> None:
    total, done, began = sum(store.size for store in stores), 0, time.monotonic()

    def hashed(size: int) -> None:
        nonlocal done
        done += size
        if progress:
            progress(Progress("verifying", done, total, Totals(), time.monotonic() - began))

    for store in stores:
        store.verify(hashed)


def _tokenise(config: RunConfig, raw: Sequence[Source], say: Say, progress: Callable[[Progress], None] | None) -> None:
    if raw and config.model.tokenizer is None:
        raise UserError(f"model.tokenizer is not given, and {raw[0].path} must be tokenised; name a tokenizer's folder")
    for source in raw:
        report = prepare(
            [source.path],
            _shard_folder(config, source),
            config.model.tokenizer,
            options=PrepareOptions(
                format=source.format,
                labels=config.data.labels,
                max_bad=config.data.max_bad,
                chat_template=str(config.data.chat_template) if config.data.chat_template else None,
            ),
            workers=config.data.workers,
            progress=progress,
            tokenizer_key="model.tokenizer",
        )
        for line in report_lines(report):
            say(f"data: {line}")


def open_sources(config: RunConfig, sources: Sequence[Source]) -> list[Weighted]:
    """Opens prepared sources; :func:`prepare_sources` must have run."""
    return [
        Weighted(open_store(source.path if is_store(source.path) else _shard_folder(config, source)), source.weight)
        for source in sources
    ]


def training_view(config: RunConfig) -> View:
    """What the run trains on, with the overlong policy applied and the held-out documents taken out."""
    return View(
        open_sources(config, config.data.sources),
        ViewOptions(
            seq_len=config.data.seq_len,
            overlong=config.data.overlong,
            holdout=config.eval.holdout,
            holdout_seed=config.seed,
            keep_untrained=config.data.keep_untrained,
            keep_tails=config.data.keep_tails,
            default_overlong=not config.data.chose("overlong"),
        ),
    )


def evaluation_view(config: RunConfig, training: View) -> View | None:
    """The held-out documents, or the evaluation sources; None where there is nothing to evaluate on."""
    if config.eval.holdout:
        try:
            return training.held_out()
        except UserError as error:
            raise UserError(f"eval.holdout: of the {config.eval.holdout} documents held out: {error}") from error
    if config.eval.data is None:
        return None
    options = ViewOptions(
        seq_len=config.data.seq_len,
        overlong=config.data.overlong,
        default_overlong=not config.data.chose("overlong"),
    )
    return View(open_sources(config, config.eval.data), options)


def make_stream(config: RunConfig, view: View, sequences_per_step: int) -> Stream:
    return Stream(
        view,
        StreamOptions(
            seed=config.seed,
            pack=config.data.pack,
            slots=config.data.slots,
            rows=config.data.rows,
            sequences_per_step=sequences_per_step,
            pad_to_seq_len=config.data.pad_to == "seq_len",
            group_by_length=config.data.group_by_length,
        ),
    )


def decoder(config: RunConfig) -> Callable[[list[int]], str]:
    """Token ids to text by the run's tokenizer, opened when first asked for (few runs ever show a document)."""
    opened: list[Any] = []

    def decode(ids: list[int]) -> str:
        if not opened:
            opened.append(open_tokenizer(str(config.model.tokenizer or config.model.path), key="model.tokenizer"))
        return str(opened[0].decode(ids, skip_special_tokens=False))

    return decode


def total_steps(config: RunConfig, stream: Stream) -> int:
    """The run's length in optimizer steps, from steps, epochs or tokens; at least 1."""
    if config.train.steps is not None:
        return config.train.steps
    if config.train.epochs is not None:
        whole, part = divmod(config.train.epochs, 1)
        steps = sum(stream.steps_in_epoch(epoch) for epoch in range(int(whole)))
        return max(1, steps + round(part * stream.steps_in_epoch(int(whole))) if part else steps)
    assert config.train.tokens is not None
    return _steps_for_tokens(stream, config.train.tokens)


def _steps_for_tokens(stream: Stream, tokens: int) -> int:
    """Steps until `tokens` real tokens have passed: whole epochs at once, the last one step by step."""
    steps, left, epoch = 0, tokens, 0
    if tokens > _MOST_EPOCHS * (first := stream.efficiency(0).tokens):
        raise UserError(
            f"train.tokens={tokens} is more than {_MOST_EPOCHS} passes over the data ({first} tokens a pass); lower it"
        )
    while (in_epoch := stream.efficiency(epoch).tokens) < left:
        steps, left, epoch = steps + stream.steps_in_epoch(epoch), left - in_epoch, epoch + 1
    for batch in stream.epoch(epoch):
        if left <= 0:
            break
        steps, left = steps + 1, left - batch.tokens
    return max(1, steps)


def _all_sources(config: RunConfig) -> list[Source]:
    return [*config.data.sources, *(config.eval.data or [])]


def _shard_folder(config: RunConfig, source: Source) -> Path:
    """One folder a source and way of reading it: runs that label the same file differently do not fight over one."""
    path, data = Path(source.path), config.data
    how = (path.resolve(), source.format, config.model.tokenizer, data.labels, data.chat_template)
    name = "".join(letter if letter.isalnum() or letter in "-_" else "_" for letter in path.name)[:40]
    return config.shards / f"{name}-{hashlib.sha256(repr(how).encode()).hexdigest()[:8]}"
