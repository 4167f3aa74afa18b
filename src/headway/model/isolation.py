"""Proof, on the actual model before the first step, that packed documents do not see each other."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from headway.account.errors import Refused
from headway.data.batch import IGNORE, PADDING_DOC, Batch
from headway.model.forward import attention_of, embedding_rows, forward_logits, inner_model
from headway.model.leak import locate_leak

SPAN = 16
"""Differences are taken over this many tokens at a time: a leak into a few tokens of a long document stands out, and
one token that rounding sends to another expert does not."""

SAME_SHAPE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Allowed between two calls of the same shape: the same kernels run, so nearly nothing."""

OTHER_SHAPE = {torch.float64: 1e-10, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Allowed between calls of other shapes or another attention: every sum may run in another order."""


@dataclass(frozen=True)
class IsolationReport:
    """All differences: root mean square over the worst 16 tokens, as a share of the logits' root mean square."""

    attention: str
    packed: bool
    lengths: tuple[int, ...]
    window: int | None  # the smallest sliding window of the model
    window_covered: bool  # whether a document was longer than it
    tolerance: float  # of leak and lookahead
    tolerance_other_shape: float  # of alone and reference
    leak: float  # of one document when another one's tokens change
    lookahead: float  # of a document's first half when its second half changes
    alone: float  # of a document among others against the same document alone
    reference: float | None  # of the long document against the model's own eager attention, alone
    context: float  # of a document's last token when its own earlier tokens change: the size that a leak would have

    @property
    def conclusive(self) -> bool:
        """Whether a leak would have stood out. False for, e.g., a model whose outputs hardly depend on context yet."""
        return self.context > 10 * self.tolerance

    def summary(self) -> str:
        parts = [
            f"documents of {'+'.join(map(str, self.lengths))} tokens are isolated under {self.attention} attention",
            f"another's change moves one by {max(self.leak, self.lookahead):.1e} (its own: {self.context:.1e})",
        ]
        if self.window is not None and not self.window_covered:
            parts.append(f"the sliding window of {self.window} was not reached")
        if not self.conclusive:
            parts.append("inconclusive: the model's outputs hardly depend on context yet")
        return "; ".join(parts)


def prove_isolation(
    model: nn.Module,
    *,
    device: torch.device | str = "cpu",
    vocab_size: int | None = None,
    packed: bool = True,
    max_tokens: int | None = None,
    seed: int = 0,
) -> IsolationReport:
    """Run four short documents of random tokens through `forward_logits` as training will, and change them in turn.

    A document's logits must not move when another document changes (before or after it), nor its first half when its
    second half changes, must equal those of the document alone (which also proves that positions restart) and those of
    the model's own eager attention. One document is longer than the model's smallest sliding window
    if the pack stays within `max_tokens` (default 4096 on CUDA, 1024 elsewhere); the report says whether.
    Nine short forwards without gradient, in eval mode (the mode is put back). Call it before compiling the model, with
    the same seed on every rank. vocab_size: ids are drawn below it, default the embedding's rows.

    Raises Refused naming the leaking module, or the property that does not hold.
    """
    if max_tokens is None:
        max_tokens = 4096 if torch.device(device).type == "cuda" else 1024
    rows = vocab_size or embedding_rows(model)
    window = _smallest_window(model)
    lengths = _lengths(window, max_tokens)
    with _quiet(model):
        return _Proof(model, torch.device(device), rows, packed, lengths, window, seed).run()


FIRST, LONG, SINGLE, LAST = range(4)
"""The four documents of the proof, in this order."""


class _Proof:
    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        rows: int,
        packed: bool,
        lengths: tuple[int, ...],
        window: int | None,
        seed: int,
    ) -> None:
        self.model, self.device, self.packed, self.lengths, self.window = model, device, packed, lengths, window
        self.rows = rows
        self.name = type(inner_model(model)).__name__
        self.attention = attention_of(model)
        self.random = torch.Generator().manual_seed(seed)
        self.documents = [torch.randint(rows, (n,), generator=self.random) for n in lengths]
        self.base = self.base_logits()
        self.scale = _root_mean_square(torch.cat(self.base))
        if not math.isfinite(self.scale):
            raise Refused(f"{self.name}: logits of random tokens are not finite; the model's weights are damaged")
        dtype = self.base[0].dtype
        self.tolerance = SAME_SHAPE[dtype]
        self.tolerance_other_shape = OTHER_SHAPE[_matmul_dtype(dtype, self.device)]

    def run(self) -> IsolationReport:
        leak, lookahead, context = self.change_in_turn()
        return IsolationReport(
            attention=self.attention,
            packed=self.packed,
            lengths=self.lengths,
            window=self.window,
            window_covered=self.window is not None and max(self.lengths) > self.window,
            tolerance=self.tolerance,
            tolerance_other_shape=self.tolerance_other_shape,
            leak=leak,
            lookahead=lookahead,
            alone=self.alone(),
            reference=self.reference(),
            context=context,
        )

    def base_logits(self) -> list[Tensor]:
        try:
            return self.logits(self.documents)
        except (ValueError, NotImplementedError, ImportError) as error:
            # Some models know themselves that they cannot (e.g. linear attention without its kernels).
            reason = str(error).strip().splitlines()[0]
            raise Refused(f"{self.name}: {reason}; {self.advice()}") from error

    def change_in_turn(self) -> tuple[float, float, float]:
        """(leak, lookahead, context) from changing all of a document, a second half, and all but the last token."""
        half = self.lengths[LONG] // 2
        leak = lookahead = context = 0.0
        for which, start, stop in ((FIRST, 0, None), (LONG, half, None), (LAST, 0, -1)):
            changed = self.change(which, start, stop)
            logits = self.logits(changed)
            for other in (FIRST, LONG, SINGLE, LAST):
                if other != which:
                    difference = self.difference(logits[other], self.base[other])
                    if difference > self.tolerance:
                        self.refuse_leak(difference, changed, other)
                    leak = max(leak, difference)
            if which == LONG:
                lookahead = self.difference(logits[LONG][:half], self.base[LONG][:half])
                self.check(lookahead, self.tolerance, "a token sees later tokens of its own document")
            if which == LAST:
                context = self.difference(logits[LAST][-1:], self.base[LAST][-1:])
        return leak, lookahead, context

    def alone(self) -> float:
        """Each document on its own: positions must restart and boundaries must lie where the table says."""
        worst = 0.0
        for document, logits in zip(self.documents, self.base, strict=True):
            worst = max(worst, self.difference(self.logits([document])[0], logits))
        what = "a document among others is not computed as it is alone (wrong positions or boundaries)"
        self.check(worst, self.tolerance_other_shape, what)
        return worst

    def reference(self) -> float | None:
        """The long document under the model's own eager attention, which all others must reproduce."""
        if self.attention == "eager":
            return None
        inner = inner_model(self.model)
        inner.set_attn_implementation("eager")
        try:
            difference = self.difference(self.logits([self.documents[LONG]])[0], self.base[LONG])
        finally:
            inner.set_attn_implementation(self.attention)
        if difference > self.tolerance_other_shape:
            what = f"attention {self.attention} does not compute what the model's own eager attention computes"
            raise Refused(self.message(difference, self.tolerance_other_shape, what, "set model.attention to eager"))
        return difference

    def change(self, which: int, start: int, stop: int | None) -> list[Tensor]:
        """The documents with every token of documents[which][start:stop] replaced by another one."""
        changed = [document.clone() for document in self.documents]
        part = changed[which][start:stop]
        part.add_(torch.randint(1, self.rows, part.shape, generator=self.random)).remainder_(self.rows)
        return changed

    def logits(self, documents: list[Tensor]) -> list[Tensor]:
        """Logits [length, V] of each document."""
        batch = make_batch(documents, packed=self.packed).to(self.device)
        flat = forward_logits(self.model, batch).flatten(0, 1)
        starts = _starts(documents, self.packed)
        return [flat[start : start + len(document)] for start, document in zip(starts, documents, strict=True)]

    def difference(self, a: Tensor, b: Tensor) -> float:
        """[n, V] and [n, V] -> the largest root mean square over SPAN tokens, as a share of the logits' own."""
        pairs = zip(a.split(SPAN), b.split(SPAN), strict=True)  # a span at a time: no float32 copy of all logits
        spans = [_root_mean_square(x.float() - y.float()) for x, y in pairs]
        return max(spans) / max(self.scale, 1e-30) if all(map(math.isfinite, spans)) else math.inf

    def check(self, difference: float, allowed: float, what: str) -> None:
        if difference > allowed:
            raise Refused(self.message(difference, allowed, what, self.advice()))

    def message(self, difference: float, allowed: float, what: str, advice: str) -> str:
        size = f"logits differ by {difference:.1e} of their size (rounding: up to {allowed:.0e})"
        return f"{self.name}: {what}: {size}; {advice}"

    def refuse_leak(self, difference: float, changed: list[Tensor], other: int) -> None:
        before, after = (
            make_batch(documents, packed=self.packed).to(self.device) for documents in (self.documents, changed)
        )
        start = _starts(changed, self.packed)[other]
        slots = slice(start, start + self.lengths[other])
        where = locate_leak(self.model, before, after, slots, self.tolerance)
        self.check(difference, self.tolerance, f"documents see each other through {where}")

    def advice(self) -> str:
        if self.packed:
            return "set data.pack to none and model.attention to sdpa, or use another model"
        return "set model.attention to sdpa or eager"


def _root_mean_square(x: Tensor) -> float:
    total = sum((rows.float().square().sum() for rows in x.split(SPAN)), torch.zeros((), device=x.device))
    return float((total / x.numel()).sqrt())


def make_batch(documents: list[Tensor], *, packed: bool) -> Batch:
    """A Batch of whole documents (int64 [n] each) with no labels: one pack without padding, or one row a document."""
    lengths = np.array([len(document) for document in documents], dtype=np.int64)
    rows, width = (1, int(lengths.sum())) if packed else (len(documents), int(lengths.max()))
    ids = torch.zeros(rows * width, dtype=torch.int64)
    starts = _starts(documents, packed)
    for start, document in zip(starts, documents, strict=True):
        ids[start : start + len(document)] = document
    ends = [start + len(document) for start, document in zip(starts, documents, strict=True)]
    table = np.unique([*starts, *ends, rows * width])
    owners = np.full(len(table) - 1, PADDING_DOC, dtype=np.int64)
    owners[np.searchsorted(table, starts)] = np.arange(len(documents))
    positions = np.arange(rows * width) - np.repeat(table[:-1], np.diff(table))
    return Batch(
        input_ids=ids.view(rows, width),
        labels=torch.full((rows, width), IGNORE),
        position_ids=torch.from_numpy(positions).view(rows, width),
        cu_seqlens=torch.from_numpy(table.astype(np.int32)),
        max_seqlen=int(np.diff(table).max()),
        packed=packed,
        documents=owners,
        lengths=lengths,
        tokens=int(lengths.sum()),
        trained_tokens=0,
    )


def _starts(documents: list[Tensor], packed: bool) -> list[int]:
    lengths = [len(document) for document in documents]
    if packed:
        return [sum(lengths[:i]) for i in range(len(lengths))]
    return [i * max(lengths) for i in range(len(lengths))]


def _lengths(window: int | None, max_tokens: int) -> tuple[int, ...]:
    """A short document, the long one, a single token, and one more: neighbours of every kind."""
    long = 25
    if window is not None and window + 8 + 17 <= max_tokens:
        long = max(long, window + 8)
    return 5, long, 1, 11


def _smallest_window(model: nn.Module) -> int | None:
    config = inner_model(model).config.get_text_config()
    types = getattr(config, "layer_types", None)
    if types is not None and "sliding_attention" not in types:
        return None
    window = getattr(config, "sliding_window", None)
    return window if isinstance(window, int) and getattr(config, "use_sliding_window", True) else None


def _matmul_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """float32 products on CUDA may be computed in TF32, whose mantissa is float16's."""
    tf32 = device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"
    return torch.float16 if dtype == torch.float32 and tf32 else dtype


@contextmanager
def _quiet(model: nn.Module) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)
