"""The one list of documents that every contestant of `headway bench speed` trains on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headway.account.errors import UserError
from headway.data import manifest as manifests
from headway.data.encode import Encoded
from headway.data.manifest import Manifest, TemplateRecord, TokenizerRecord, Totals
from headway.data.shards import ShardBuilder, write_bytes
from headway.data.store import ShardFolder
from headway.data.view import View


@dataclass(frozen=True)
class Chosen:
    """ids int32 [T] and mask uint8 [T] of all documents, offsets int64 [D + 1]; documents are cut to the view's length.

    population: documents they were chosen from; tokenizer: what made the ids, where it is known.
    """

    ids: np.ndarray
    mask: np.ndarray
    offsets: np.ndarray
    population: int
    tokenizer: TokenizerRecord | None = None

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    @property
    def tokens(self) -> int:
        return len(self.ids)

    @property
    def trained(self) -> int:
        """Labels; no document's first token is one."""
        return int(self.mask.sum())

    def part(self, documents: np.ndarray) -> Chosen:
        """Some of the documents (their numbers), in that order."""
        spans = [slice(int(self.offsets[d]), int(self.offsets[d + 1])) for d in documents]
        lengths = self.lengths[documents]
        return Chosen(
            np.concatenate([self.ids[s] for s in spans]),
            np.concatenate([self.mask[s] for s in spans]),
            np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            self.population,
            self.tokenizer,
        )

    def write_arrays(self, path: Path) -> None:
        """For peers, which read numpy."""
        np.savez(path, ids=self.ids, mask=self.mask, offsets=self.offsets)

    def write_shards(self, folder: Path, vocab_size: int) -> None:
        """For Headway: a folder of shards with one shard."""
        folder.mkdir(parents=True)
        dtype = np.uint16 if vocab_size <= 2**16 else np.uint32
        builder = ShardBuilder("shard-00000", dtype)
        for line, (a, b) in enumerate(zip(self.offsets[:-1], self.offsets[1:], strict=True), 1):
            builder.add(Encoded(self.ids[a:b].astype(dtype), self.mask[a:b]), 0, line)
        shard, *_ = builder.write(folder)
        totals = Totals(documents=shard.documents, tokens=shard.tokens, trained=shard.trained)
        manifest = Manifest(
            fingerprint=manifests.fingerprint([shard], vocab_size),
            totals=totals,
            notes={},
            tokenizer=self.tokenizer or TokenizerRecord("", "", vocab_size, None),
            template=TemplateRecord("none", "", "none"),
            options={},
            files=[manifests.SourceFile("bench speed", 0, "", "tokens", totals)],
            shards=[shard],
            rejected=write_bytes(folder / manifests.REJECTED, []),
        )
        write_bytes(folder / manifests.NAME, [manifests.encode(manifest)])


def choose(view: View, count: int, seed: int) -> Chosen:
    """`count` documents that stand for all: sorted by length, one from every `len / count`-th place, then shuffled.

    A plain random sample of a few dozen would often miss the few long documents that decide how much is padding.
    Raises UserError where the view has fewer documents.
    """
    pieces = view.pieces
    if len(pieces) < count:
        raise UserError(
            f"bench speed: {count} documents are asked for and the data holds {len(pieces)}; lower --documents"
        )
    rng = np.random.default_rng(seed)
    order = np.argsort(pieces.length, kind="stable")
    step = len(order) / count
    picked = rng.permutation(order[((np.arange(count) + rng.random()) * step).astype(np.int64)])
    ids, masks = [], []
    for piece in picked.tolist():
        store, begin = view.stores[int(pieces.store[piece])], int(pieces.start[piece])
        stop = begin + int(pieces.length[piece])
        mask = np.array(store.mask(int(pieces.doc[piece]), begin, stop), dtype=np.uint8)
        mask[0] = 0  # nothing precedes it
        ids.append(np.asarray(store.tokens(int(pieces.doc[piece]), begin, stop), dtype=np.int32))
        masks.append(mask)
    offsets = np.concatenate([[0], np.cumsum([len(each) for each in ids])]).astype(np.int64)
    first = view.stores[0]
    record = first.manifest.tokenizer if isinstance(first, ShardFolder) else None
    return Chosen(np.concatenate(ids), np.concatenate(masks), offsets, len(pieces), record)


def short_ones(chosen: Chosen, count: int, longest: int) -> np.ndarray:
    """Numbers of up to `count` documents with a label, no longer than `longest`, longer ones first: for the check."""
    lengths = chosen.lengths
    trained = np.add.reduceat(chosen.mask, chosen.offsets[:-1])
    fit = np.flatnonzero((lengths <= longest) & (trained > 0))
    if len(fit) < 2:  # a leak needs two
        fit = np.flatnonzero(trained > 0)
        return fit[np.argsort(lengths[fit], kind="stable")][:count]
    return fit[np.argsort(-lengths[fit], kind="stable")][:count]
