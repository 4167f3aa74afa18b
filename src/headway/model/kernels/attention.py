"""Attention over packed documents as a choice: every path that can compute the model's own kinds of call."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headway.model.attention import CHOSEN, NAME, PATHS, Path, attend, path_cannot
from headway.model.forward import attention_of
from headway.model.kernels.case import Candidate, Case, Choice
from headway.model.kernels.dice import Dice
from headway.model.kernels.lookup import looks_up

CHECK_SLOTS = 512
REGISTRY = "ALL_ATTENTION_FUNCTIONS"


@dataclass(frozen=True)
class Kind:
    """What the layers' calls differ in. sinks: whether each head has a learned extra score."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float | None
    window: int | None
    softcap: float | None
    sinks: bool

    def name(self) -> str:
        parts = ["attention", f"window {self.window}" if self.window else "", "softcap" if self.softcap else ""]
        return " ".join(part for part in [*parts, "sinks" if self.sinks else ""] if part)


def attentions_of(model: nn.Module) -> dict[Kind, list[nn.Module]]:
    """Modules that attend through transformers' registry under our name, by kind of call; without attention dropout."""
    if attention_of(model) != NAME:
        return {}
    found: dict[Kind, list[nn.Module]] = {}
    for module in model.modules():
        kind = _kind(module) if looks_up(module, REGISTRY) else None
        if kind is not None:
            found.setdefault(kind, []).append(module)
    return found


def _kind(module: Any) -> Kind | None:
    config = getattr(module, "config", None)
    head_dim = getattr(module, "head_dim", None) or getattr(module, "head_size", None)
    heads = getattr(config, "num_attention_heads", None)
    if heads is None or not isinstance(head_dim, int) or float(getattr(module, "attention_dropout", 0.0) or 0.0) > 0:
        return None
    scale = getattr(module, "scaling", None)
    return Kind(
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=head_dim,
        scale=float(scale) if isinstance(scale, float | int) else None,
        window=getattr(module, "sliding_window", None) or None,
        softcap=getattr(module, "attn_logit_softcapping", None) or None,
        sinks=isinstance(getattr(module, "sinks", None), Tensor),
    )


def attention_case(kind: Kind, rows: int, lengths: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Case:
    """Queries, keys and values as projections leave them, over documents of the user's own lengths.

    One document at a time is the plain candidate: it computes in float64 and on every device.
    """

    def inputs(count: int) -> tuple[Any, ...]:
        dice = Dice(31, device)
        heads = (kind.heads, kind.kv_heads, kind.kv_heads)
        qkv = [dice.normal(1, count, n, kind.head_dim).to(dtype) for n in heads]
        sizes = documents(count, lengths if count >= rows else ())
        table = torch.tensor([0, *sizes]).cumsum(0).to(device, torch.int32)
        sinks = torch.linspace(-1, 1, kind.heads).to(device, dtype).requires_grad_() if kind.sinks else None
        return (*(x.transpose(1, 2).requires_grad_() for x in qkv), table, max(sizes), sinks)

    options: dict[str, Any] = {"scale": kind.scale, "window": kind.window, "softcap": kind.softcap}

    def run(path: Path, q: Tensor, k: Tensor, v: Tensor, table: Tensor, longest: int, sinks: Tensor | None) -> Tensor:
        return attend(path, q, k, v, table, longest, sinks=sinks, **options)

    def cannot(path: Path) -> str | None:
        q, k, v, _, _, sinks = inputs(1)
        return path_cannot(path, q, k, v, sinks=sinks, **options)

    candidates = [Candidate(path, partial(run, path), partial(cannot, path), compiles=path == "flex") for path in PATHS]
    mean = sum(lengths) // max(1, len(lengths))
    shape = f"{rows}x({kind.heads}+{kind.kv_heads})x{kind.head_dim} in documents of about {_power(mean)}"
    return Case(kind.name(), shape, candidates, inputs, rows, min(rows, CHECK_SLOTS))


def documents(count: int, lengths: tuple[int, ...] = ()) -> list[int]:
    """Lengths that fill `count` slots: the given ones over and over; for checking a long, a tiny and two other ones."""
    if not lengths:
        first = (count * 5 + 8) // 9
        wanted = [first, 1, (count - first) // 2, count]
    else:
        wanted = list(lengths) * (1 + count // max(1, sum(lengths)))
    sizes: list[int] = []
    for length in wanted:
        length = min(length, count - sum(sizes))
        if length > 0:
            sizes.append(length)
    return sizes


def settled(choice: Choice) -> Choice:
    """What was not measured for want of time does not change what is used: on CUDA the rule's own path stays."""
    results = {result.name: result for result in choice.results}
    for name in ("varlen", "flex") if choice.chosen == "documents" else ():
        if results[name].reason.startswith("not measured"):
            return replace(choice, chosen=name)
        if results[name].error is not None and not results[name].wrong:
            break  # it was measured, and is slower
    return choice


def use_attention(modules: list[nn.Module], name: str) -> None:
    """These instances attend by that path where it can; an empty name gives the choice back to the rule."""
    for module in modules:
        module.__dict__.pop(CHOSEN, None)
        if name:
            module.__dict__[CHOSEN] = name


def _power(length: int) -> int:
    return 1 << max(0, length - 1).bit_length()
