"""Memory snapshots: fragmentation, the largest free block, who holds what; and no pickle may run code."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from headway.account.errors import UserError
from headway.diagnose.findings.memory import of_snapshot
from headway.diagnose.snapshot import read_snapshot

MIB = 2**20


def block(size: int, state: str, *names: str) -> dict[str, Any]:
    frames = [
        {"filename": file, "line": line, "name": name} for file, line, name in (text.split(":") for text in names)
    ]
    return {"address": 0, "size": size, "requested_size": size, "state": state, "frames": frames}


def snapshot(path: Path, blocks: list[dict[str, Any]], oom: int = 0, expandable: bool = False) -> Path:
    """In the form that torch.cuda.memory._dump_snapshot writes."""
    segment = {
        "device": 0, "address": 0, "total_size": sum(item["size"] for item in blocks), "stream": 0,
        "segment_type": "large", "is_expandable": expandable, "blocks": blocks,
        "allocated_size": sum(item["size"] for item in blocks if item["state"] == "active_allocated"),
    }  # fmt: skip
    trace = [{"action": "alloc", "size": MIB}] + ([{"action": "oom", "size": oom, "device_free": 0}] if oom else [])
    path.write_bytes(pickle.dumps({"segments": [segment], "device_traces": [trace], "allocator_settings": {}}))
    return path


ADAM = "torch/optim/adam.py:120:_init_group"
LOOP = "train.py:31:main"


def broken(path: Path, oom: int = 600 * MIB) -> Path:
    return snapshot(path, [block(100 * MIB, "active_allocated", ADAM, LOOP), block(40 * MIB, "inactive")] * 20, oom)


def test_fragmented_memory_is_found(tmp_path: Path) -> None:
    facts = read_snapshot(broken(tmp_path / "a.pickle"))
    assert (facts.reserved, facts.allocated) == (2800 * MIB, 2000 * MIB)
    assert (facts.free_blocks, facts.largest_free, facts.failed) == (20, 40 * MIB, 600 * MIB)
    assert facts.fragmentation == pytest.approx(0.95)
    finding = next(item for item in of_snapshot(facts) if item.name == "memory-fragmentation")
    assert finding.proposal().setting.startswith("PYTORCH_ALLOC_CONF=expandable_segments:True")
    assert finding.symptom == "low utilisation with full memory"


def test_free_memory_in_one_block_is_no_fragmentation(tmp_path: Path) -> None:
    whole = [block(2000 * MIB, "active_allocated"), block(800 * MIB, "inactive")]
    assert [item.name for item in of_snapshot(read_snapshot(snapshot(tmp_path / "a.pickle", whole)))] == []


def test_it_says_who_holds_what(tmp_path: Path) -> None:
    facts = read_snapshot(broken(tmp_path / "a.pickle"))
    assert (facts.holders[0].where, facts.holders[0].kind) == ("train.py:31 main", "optimizer state")
    names = [item.name for item in of_snapshot(facts)]
    assert "memory-held" in names
    calm = read_snapshot(broken(tmp_path / "b.pickle", oom=0))
    assert "memory-held" not in [item.name for item in of_snapshot(calm)]


def test_blocks_without_stacks_say_how_to_get_them(tmp_path: Path) -> None:
    facts = read_snapshot(snapshot(tmp_path / "a.pickle", [block(MIB, "active_allocated")]))
    assert "_record_memory_history" in facts.holders[0].where and not facts.with_stacks


class Evil:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.target}",)


def test_a_planted_pickle_that_would_run_code_is_refused(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    path = tmp_path / "evil.pickle"
    path.write_bytes(pickle.dumps({"segments": [Evil(mark)], "device_traces": []}))
    with pytest.raises(UserError, match="system"):
        read_snapshot(path)
    assert not mark.exists()


@pytest.mark.parametrize(
    "content",
    [b"", b"no pickle", pickle.dumps([1, 2]), pickle.dumps({"segments": 3}), pickle.dumps({"segments": [{"x": 1}]}),
     pickle.dumps({"segments": [{"total_size": "a", "blocks": []}]})],
)  # fmt: skip
def test_what_is_no_snapshot_is_a_users_mistake(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.pickle"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"a\.pickle"):
        read_snapshot(path)
    with pytest.raises(UserError, match="_dump_snapshot"):
        read_snapshot(tmp_path / "missing.pickle")
