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
    chunked_loss: bool = True
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
        hidden = self.forward(ids).flatten(0, 1)
        labels = ids.flatten()
        if self.form.chunked_loss:
            chunked_backward(hidden, self.model.head.weight, labels)
        else:
            functional.cross_entropy(self.model.head(hidden).float(), labels).backward()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


class _Chunked(torch.autograd.Function):
    """Mean cross entropy of hidden [N, width] @ weight.T over chunks of rows: logits of one chunk at a time, and the
    gradient made where the logits are still in the cache (as fused linear cross entropies do)."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        rows = max(1, (1 << 19) // weight.shape[0])
        total = hidden.new_zeros(())
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        for start in range(0, len(hidden), rows):
            part, wanted = hidden[start : start + rows], labels[start : start + rows]
            logits = part @ weight.T
            peak = logits.max(dim=-1, keepdim=True).values
            picked = logits.gather(1, wanted[:, None]) - peak
            logits.sub_(peak).exp_()
            sums = logits.sum(dim=-1, keepdim=True)
            total += (sums.log() - picked).sum()
            logits.div_(sums * len(hidden))
            logits.scatter_add_(1, wanted[:, None], logits.new_full((len(part), 1), -1.0 / len(hidden)))
            torch.mm(logits, weight, out=grad_hidden[start : start + rows])
            grad_weight.addmm_(logits.T, part)
        ctx.save_for_backward(grad_hidden, grad_weight)
        return total / len(hidden)

    @staticmethod
    def backward(ctx, grad: Tensor):
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grad, grad_weight * grad, None


def chunked_backward(hidden: Tensor, weight: Tensor, labels: Tensor) -> None:
    loss: Tensor = _Chunked.apply(hidden, weight, labels)
    loss.backward()
