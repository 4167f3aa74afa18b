"""Memory that is full or broken into pieces while the device computes little."""

from __future__ import annotations

from collections.abc import Iterator

from headway.diagnose.finding import Finding
from headway.diagnose.snapshot import MemoryFacts

FRAGMENTED, LARGEST, CACHED_SHARE, MUCH = 0.15, 0.5, 0.10, 0.5
_GIB = 2**30


def full_memory(used: int, total: int, mfu: float, wall_ns: int, source: str) -> Finding:
    """Memory is full and utilisation low: what fills it is worth a look; the gain is not known before."""
    return Finding(
        name="memory-full-low-utilisation",
        title="memory is full, and the device computes little",
        claims={},
        lower_ns=0,
        wall_ns=wall_ns,
        evidence=(f"{used / _GIB:.1f} of {total / _GIB:.1f} GiB in use ({source}), MFU {mfu:.1%}",),
        check="record a snapshot (torch.cuda.memory._record_memory_history) and give it with --memory",
        remedy="use-memory",
        symptom="low utilisation with full memory",
        gain_known=False,
    )


def of_snapshot(memory: MemoryFacts, wall_ns: int = 0) -> Iterator[Finding]:
    """Findings of a memory snapshot: reserved memory that no request can use, and who holds the rest."""
    loose = memory.reserved - memory.allocated
    if memory.reserved and loose >= FRAGMENTED * memory.reserved and memory.largest_free < LARGEST * loose:
        yield Finding(
            name="memory-fragmentation",
            title="device memory is fragmented",
            claims={},
            lower_ns=0,
            wall_ns=wall_ns,
            evidence=(
                f"{loose / _GIB:.2f} GiB of {memory.reserved / _GIB:.2f} reserved are free "
                f"({loose / memory.reserved:.0%}), in {memory.free_blocks:,} blocks; "
                f"the largest is {memory.largest_free / _GIB:.2f} GiB",
                *_failed(memory),
            ),
            check="torch.cuda.memory_stats()['inactive_split_bytes.all.current'] against reserved_bytes",
            remedy="defragment-memory",
            symptom="low utilisation with full memory",
            gain_known=False,
        )
    holder = memory.holders[0] if memory.holders else None
    if holder is not None and memory.allocated and holder.bytes >= MUCH * memory.allocated and memory.failed:
        yield Finding(
            name="memory-held",
            title=f"one place holds most of the memory: {holder.where}",
            claims={},
            lower_ns=0,
            wall_ns=wall_ns,
            evidence=(
                f"{holder.bytes / _GIB:.2f} of {memory.allocated / _GIB:.2f} GiB in {holder.blocks:,} blocks "
                f"({holder.kind or 'of unknown use'})",
                *_failed(memory),
            ),
            check="the snapshot in pytorch.org/memory_viz: colour by stack",
            remedy="use-memory",
            symptom="low utilisation with full memory",
            gain_known=False,
        )


def _failed(memory: MemoryFacts) -> list[str]:
    return [f"an allocation of {memory.failed / _GIB:.2f} GiB failed"] if memory.failed else []
