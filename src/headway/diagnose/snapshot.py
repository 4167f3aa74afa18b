"""A PyTorch memory snapshot (`torch.cuda.memory._dump_snapshot`): fragmentation, largest free block, who holds what.

A snapshot is a pickle. It is read with an unpickler that builds plain containers and nothing else: a pickle that names
any class or function is refused, so that reading one can run no code.
"""

from __future__ import annotations

import io
import pickle
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.account.errors import UserError

_LIBRARY = re.compile(r"(^|/)(torch|transformers|accelerate|peft)/|site-packages|<string>|\?\?|\.(cpp|cu|h|c|so)$")
_KINDS = (
    ("optimizer state", re.compile(r"optim/|adam|optimizer", re.IGNORECASE)),
    ("gradients and backward", re.compile(r"autograd|backward", re.IGNORECASE)),
    ("KV cache", re.compile(r"kv_?cache|cache_utils|cache_engine", re.IGNORECASE)),
    ("loss, logits", re.compile(r"cross_entropy|loss", re.IGNORECASE)),
    ("attention", re.compile(r"attention|sdpa|softmax", re.IGNORECASE)),
    ("parameters", re.compile(r"from_pretrained|Parameter|module\.py.*_apply|to_empty|load_state_dict")),
)


@dataclass(frozen=True)
class Holder:
    """Memory allocated at one place. kind is a guess from the stack's names, "" where nothing tells."""

    where: str
    kind: str
    bytes: int
    blocks: int


@dataclass(frozen=True)
class MemoryFacts:
    """One device's caching allocator, in bytes. failed: size of the allocation that ran out of memory, 0 for none."""

    path: str
    reserved: int
    allocated: int
    segments: int
    free_blocks: int
    largest_free: int
    holders: tuple[Holder, ...]
    failed: int
    expandable: bool
    with_stacks: bool

    @property
    def fragmentation(self) -> float:
        """Share of the reserved memory's free part that its largest block does not hold, 0 to 1."""
        free = self.reserved - self.allocated
        return 1 - self.largest_free / free if free else 0.0


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}, and a snapshot holds only plain values")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to storage outside of itself")


def read_snapshot(path: Path | str) -> MemoryFacts:
    """Reads a snapshot without running anything that is in it.

    Raises:
        UserError: no such file, no snapshot, or a pickle that would run code.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise UserError(
            f"{path}: {error.strerror}; give the file that torch.cuda.memory._dump_snapshot wrote"
        ) from error
    try:
        value = _Plain(io.BytesIO(content)).load()
    except Exception as error:  # a damaged pickle may raise nearly anything
        raise UserError(f"{path}: not a memory snapshot: {error}") from error
    if not isinstance(value, Mapping) or not isinstance(value.get("segments"), Sequence):
        raise UserError(f"{path}: not a memory snapshot: it has no list of segments")
    try:
        return _facts(str(path), value)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path}: a damaged memory snapshot: {error!r}") from error


def _facts(path: str, value: Mapping[str, Any]) -> MemoryFacts:
    held: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    reserved = allocated = largest = free = 0
    stacks = expandable = False
    segments = list(value["segments"])
    for segment in segments:
        reserved += int(segment["total_size"])
        expandable |= bool(segment.get("is_expandable"))
        for block in segment["blocks"]:
            size = int(block["size"])
            if block["state"] == "active_allocated":
                allocated += size
                frames = _frames(block)
                stacks |= bool(frames)
                entry = held[_place(frames)]
                entry[0] += size
                entry[1] += 1
            elif block["state"] == "inactive":
                free += 1
                largest = max(largest, size)
    holders = [Holder(where, kind, size, blocks) for (where, kind), (size, blocks) in held.items()]
    holders.sort(key=lambda item: -item.bytes)
    return MemoryFacts(
        path=path,
        reserved=reserved,
        allocated=allocated,
        segments=len(segments),
        free_blocks=free,
        largest_free=largest,
        holders=tuple(holders),
        failed=_failed(value.get("device_traces") or []),
        expandable=expandable,
        with_stacks=stacks,
    )


def _frames(block: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The stack of an allocation: on the block itself since torch 2.1, in its history before."""
    if block.get("frames"):
        return list(block["frames"])
    history = block.get("history") or []
    return list(history[-1].get("frames") or []) if history else []


def _place(frames: list[Mapping[str, Any]]) -> tuple[str, str]:
    """(where, kind): the innermost frame of the user's own code, and what the stack's names say it is."""
    if not frames:
        return "unknown (record with torch.cuda.memory._record_memory_history())", ""
    texts = [f"{frame.get('filename', '')}:{frame.get('line', 0)} {frame.get('name', '')}" for frame in frames]
    own = next((i for i, frame in enumerate(frames) if not _LIBRARY.search(str(frame.get("filename", "")))), 0)
    stack = "\n".join(texts)
    kind = next((name for name, pattern in _KINDS if pattern.search(stack)), "")
    name, file = frames[own].get("name", ""), str(frames[own].get("filename", "")).rsplit("/", 1)[-1]
    return f"{file}:{frames[own].get('line', 0)} {name}", kind


def _failed(traces: Sequence[Any]) -> int:
    """Size of the last allocation that failed."""
    sizes = [int(event.get("size", 0)) for trace in traces for event in trace if event.get("action") == "oom"]
    return sizes[-1] if sizes else 0
