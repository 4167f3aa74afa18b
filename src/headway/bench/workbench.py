"""A small transformer and its training loop for planting causes: every part has a slow and a fast form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Form:
    """How the workbench computes. The defaults are the fast forms."""

    vocabulary: int = 512
    width: int = 128
    layers: int = 2
    heads: int = 4
    sequence: int = 128
    rows: int = 2
    sdpa: bool = True
    fused_optimizer: bool = True
    copied_logits: bool = False
    recompute: bool = False


class Attention(nn.Module):
    def __init__(self, form: Form) -> None:
        super().__init__()
        self.form = form
        self.qkv = nn.Linear(form.width, 3 * form.width, bias=False)
        self.out = nn.Linear(form.width, form.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, sequence, width] to the same."""
        rows, length, width = x.shape
        shape = (rows, length, self.form.heads, width // self.form.heads)
        q, k, v = (part.view(shape).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        if self.form.sdpa:
            mixed = functional.scaled_dot_product_attention(q, k, v)
        else:
            scores = (q @ k.transpose(-1, -2)) * (q.shape[-1] ** -0.5)
            mixed = torch.softmax(scores, dim=-1) @ v
        return self.out(mixed.transpose(1, 2).reshape(rows, length, width))


class Block(nn.Module):
    def __init__(self, form: Form) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(form.width), nn.LayerNorm(form.width)
        self.attention = Attention(form)
        self.up = nn.Linear(form.width, 4 * form.width, bias=False)
        self.down = nn.Linear(4 * form.width, form.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """Token ids [rows, sequence] to hidden states [rows, sequence, width]; `head` makes logits of them."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.form = form
        self.embedding = nn.Embedding(form.vocabulary, form.width)
        self.blocks = nn.ModuleList(Block(form) for _ in range(form.layers))
        self.norm = nn.LayerNorm(form.width)
        self.head = nn.Linear(form.width, form.vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.form.recompute else block(x)
        return self.norm(x)


class Loop:
    """A training loop; `step` is one optimizer step on whatever `batches` gives (ids int64 [rows, sequence])."""

    def __init__(self, form: Form, batches: Callable[[], Tensor] | None = None) -> None:
        torch.manual_seed(0)
        self.form = form
        self.model = Model(form)
        parameters = self.model.parameters()
        fused = form.fused_optimizer
        self.optimizer = torch.optim.AdamW(parameters, lr=1e-4, foreach=False if not fused else None, fused=fused)
        self.forward: Callable[[Tensor], Tensor] = self.model
        ids = torch.randint(form.vocabulary, (form.rows, form.sequence))
        self._batches = batches or (lambda: ids)

    def step(self) -> None:
        self.train_on(self._batches())

    def train_on(self, ids: Tensor) -> None:
        self.backward(ids)
        self.update()

    def backward(self, ids: Tensor) -> None:
        """Next-token loss. With `copied_logits` all logits are made, widened, cut to shape and copied, as many loops
        do; without, only those that have a label, once."""
        hidden = self.forward(ids)
        labels = ids[:, 1:].flatten()
        if self.form.copied_logits:
            logits = self.model.head(hidden).float()
            logits = logits[:, :-1].contiguous().view(-1, self.form.vocabulary).clone()
        else:
            logits = self.model.head(hidden[:, :-1].flatten(0, 1))
        functional.cross_entropy(logits, labels).backward()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
