"""The same documents, step by step, under another configuration's way of making batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from headway.account.errors import UserError
from headway.config.run import RunConfig
from headway.data.batch import Batch, BatchBuilder
from headway.data.global_batch import Position
from headway.data.pack import best_fit
from headway.data.store import is_store
from headway.data.tokenizer import TokenizerInfo, open_tokenizer, read_template, take_apart
from headway.data.view import View
from headway.train.data import make_stream, training_view

#: Keys that decide which documents there are. Two configurations with others cannot be compared step by step.
SAME_DOCUMENTS = (
    "data.sources",
    "data.seq_len",
    "data.overlong",
    "data.labels",
    "data.keep_untrained",
    "data.keep_tails",
    "eval.holdout",
)

SAMPLE = 20_000
"""Documents that tell the tokens of a mean step."""


@dataclass(frozen=True)
class Steps:
    """pieces[k] int64: rows of `view.pieces` of step k; the first `trained` steps train, the rest evaluate.

    unseen: no document of the rest is among those that train.
    """

    view: View
    pieces: tuple[np.ndarray, ...]
    trained: int
    unseen: bool = True

    @property
    def held_out(self) -> tuple[np.ndarray, ...]:
        return self.pieces[self.trained :]


def documents_of(config: RunConfig, steps: int, held_out: int) -> Steps:
    """The documents of the configuration's own first steps, and of `held_out` steps after them.

    Where the data ends, the next epoch's follow; held-out documents have then been seen (`Steps.unseen` is false).
    """
    view = training_view(config)
    stream = make_stream(config, view, config.sequences_per_step(1))
    found: list[np.ndarray] = []
    position = Position()
    unseen = True
    while len(found) < steps + held_out:
        batch = stream.global_batch(position)
        found.append(np.concatenate([micro.pieces for micro in batch.micro]))
        unseen = unseen and batch.position.epoch == 0
        position = batch.next
    return Steps(view, tuple(found), steps, unseen)


def micro_batches(
    config: RunConfig, view: View, pieces: np.ndarray, *, reorder: int = 0, trim: bool = False
) -> list[Batch]:
    """These documents as the configuration's micro-batches. reorder > 0: in another order, so that sums differ.
    trim: packs end with their last document (`StreamOptions.trim`)."""
    if reorder:
        pieces = np.random.default_rng(reorder).permutation(pieces)
    builder, lengths = BatchBuilder(view), view.pieces.length
    if config.data.packed:
        packs = best_fit(lengths[pieces], config.data.slots, seed=config.seed + reorder)
        spans = zip(packs.offsets[:-1].tolist(), packs.offsets[1:].tolist(), strict=True)
        groups = [pieces[packs.order[a:b]] for a, b in spans]
        return [
            builder.packed(group, np.zeros(len(group), bool), int(lengths[group].sum()) if trim else config.data.slots)
            for group in groups
        ]
    if config.data.group_by_length:
        pieces = pieces[np.argsort(lengths[pieces], kind="stable")]
    rows = config.data.rows
    groups = [pieces[start : start + rows] for start in range(0, len(pieces), rows)]
    fixed = config.data.pad_to == "seq_len"
    return [
        builder.rectangular(
            group,
            np.zeros(len(group), bool),
            rows if fixed else len(group),
            config.data.seq_len if fixed else int(lengths[group].max()),
        )
        for group in groups
    ]


def refuse_other_documents(a: RunConfig, b: RunConfig) -> None:
    """Raises UserError where two configurations do not train on the same documents."""
    pairs = [(key, _value(a, key), _value(b, key)) for key in SAME_DOCUMENTS]
    for key, left, right in (*pairs, *_read_otherwise(a, b)):
        if left != right:
            raise UserError(f"verify: {key} differs ({left} and {right}): these are not the same documents")


def _read_otherwise(a: RunConfig, b: RunConfig) -> Iterator[tuple[str, str, str]]:
    """The keys by which two configurations make other tokens of one text; copies of one file in two places do not."""
    how = [(config.model.tokenizer, config.data.chat_template) for config in (a, b)]
    if how[0] == how[1] or all(is_store(source.path) for source in a.data.sources):
        return
    infos = [_tokenizer(config) for config in (a, b)]
    if infos[0] and infos[1] and infos[0].sha256 != infos[1].sha256:
        yield "model.tokenizer", str(how[0][0]), str(how[1][0])
    templates = [
        {"default": read_template(given)} if given else info.templates if info else {}
        for (_, given), info in zip(how, infos, strict=True)
    ]
    if templates[0] != templates[1]:
        left, right = (str(given or f"that of {tokenizer}") for tokenizer, given in how)
        yield "data.chat_template", left, right


def _tokenizer(config: RunConfig) -> TokenizerInfo | None:
    if (given := config.model.tokenizer) is None:
        return None
    opened = open_tokenizer(given, key="model.tokenizer", trust_remote_code=config.model.trust_remote_code)
    return take_apart(opened, given)


def tokens_per_step(config: RunConfig, view: View) -> float:
    """Real tokens of a mean step of the configuration's own training, with its own global batch; from a sample of the
    documents where there are many."""
    lengths = view.pieces.length
    if len(lengths) > SAMPLE:
        lengths = lengths[np.random.default_rng(0).integers(len(lengths), size=SAMPLE)]
    packs = len(best_fit(lengths, config.data.slots).offsets) - 1 if config.data.packed else len(lengths)
    return float(lengths.sum() / packs * config.sequences_per_step(config.parallel.local_ranks(0)))


def _value(config: RunConfig, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)
