"""Do the replicas still agree? A digest of what must be equal bit for bit finds a flipped bit in one of them.

With three replicas or more the majority names the rank; with two it can only be said that they disagree. Collectives
are compared by their number: a rank that left one out, or made one too many, is found in the same step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from headway.guard.process_group import control
from headway.guard.tree import Tree, flatten

_MODULUS = 1 << 64


class _OfRanks(Exception):
    """Raised on all ranks alike. rank: whose fault it is, None where nobody can be named."""

    def __init__(self, message: str, rank: int | None) -> None:
        super().__init__(message)
        self.rank = rank


class ReplicasDiffer(_OfRanks):
    """Some replica's state is not what the others have: memory or arithmetic went wrong silently."""


class CollectiveMismatch(_OfRanks):
    """The ranks have not entered the same collectives in this step; it must not be committed."""


def digest(tensors: Iterable[Tensor]) -> int:
    """The sum of all bits read as integers, each tensor weighted by its place, modulo 2⁶⁴; a flipped bit changes it.

    Reads every byte once where it lies (an int64 sum reads memory as fast as it comes) and waits for one number each.
    Of a DTensor the local shard counts.
    """
    with torch.no_grad():
        sums = [_sum(tensor.to_local() if isinstance(tensor, DTensor) else tensor) for tensor in tensors]
        if not sums:
            return 0
        values = torch.stack([one.to(sums[0].device) for one in sums]).tolist()
    return sum((2 * place + 1) * value for place, value in enumerate(values)) % _MODULUS


def _sum(tensor: Tensor) -> Tensor:
    """Of 8-byte words, which need no conversion (a sum of narrower ones with a wider result copies first), and of the
    bytes that are left over."""
    flat = tensor.detach().contiguous().reshape(-1)
    raw = flat.view(torch.uint8)
    whole = raw.numel() // 8 * 8
    if raw.storage_offset() % 8:  # a word must lie where words lie
        raw = raw.clone()
    words = raw[:whole].view(torch.int64).sum()
    return words if whole == raw.numel() else words + raw[whole:].sum(dtype=torch.int64)


def state_tensors(state: Tree) -> list[Tensor]:
    """The tensors of a captured state, in the order of their keys: the same on every rank."""
    flat = flatten(state)
    return [flat.tensors[key] for key in sorted(flat.tensors)]


def odd_ones_out(digests: Mapping[int, object]) -> list[int]:
    """The ranks outside the majority; empty when all agree or none has one (then nobody can be named)."""
    counts = Counter(digests.values())
    (most, votes), *others = counts.most_common()
    if not others or 2 * votes <= len(digests) or len(digests) < 3:
        return []
    return sorted(rank for rank, value in digests.items() if value != most)


def check_replicas(state: Tree, shards: int, step: int) -> None:
    """Compares the replicas' states. Collective over all ranks; raises ReplicasDiffer on all of them.

    `shards`: ranks that share one replica (FSDP); ranks with equal `rank % shards` hold the same. A state that exists
    once (no replica) says nothing.
    """
    ranks = control()
    if ranks.size // shards < 2:
        return
    found = ranks.gather(digest(state_tensors(state)))
    problems: list[str] = []
    blamed: list[int] = []
    for shard in range(shards):
        group = {rank: found[rank] for rank in range(shard, ranks.size, shards)}
        if len(set(group.values())) > 1:
            odd = odd_ones_out(group)
            blamed += odd
            problems.append(_named(odd, list(group), "state"))
    if problems:
        raise ReplicasDiffer(f"step {step}: {'; '.join(problems)}", blamed[0] if len(blamed) == 1 else None)


def check_collectives(counts: Sequence[int]) -> None:
    """Raises CollectiveMismatch unless all ranks entered equally many collectives (`counts`, by rank)."""
    if len(set(counts)) > 1:
        odd = odd_ones_out(dict(enumerate(counts)))
        named = _named(odd, list(range(len(counts))), "number of collectives")
        told = f"{named} ({', '.join(map(str, counts))} by rank)"
        raise CollectiveMismatch(told, odd[0] if len(odd) == 1 else None)


def _named(odd: Sequence[int], group: Sequence[int], what: str) -> str:
    if odd:
        return f"rank {', '.join(map(str, odd))} differs from the majority in {what}"
    return f"ranks {', '.join(map(str, group))} disagree in {what}; with this many, none can be named"
