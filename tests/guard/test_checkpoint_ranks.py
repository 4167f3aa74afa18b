"""Several ranks: FSDP2 and DDP, saved on two, loaded on one, two and four; failures reach all ranks alike."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from guard_helpers import on_ranks, same, snapshot, tiny_model, tiny_optimizer, train

from headway.account.errors import Refused, UserError
from headway.guard.checkpoint import CheckpointFailed, CheckpointStore
from headway.guard.process_group import is_main
from headway.guard.rng import rng_state, set_rng_state
from headway.guard.training_state import capture, restore


def save(rank: int, root: Path, kind: str) -> tuple[Any, list[str]]:
    model = tiny_model(0, kind)
    optimizer = tiny_optimizer(model)
    torch.manual_seed(100 + rank)
    train(model, optimizer, 3)
    store = CheckpointStore(root, "run-a")
    store.save(3, capture(model, [optimizer]), {"step": 3}, rng_state())
    seen = snapshot(model, optimizer)
    drawn = float(torch.rand(()))
    return seen, [*train(model, optimizer, 3, 3), drawn.hex()]


def load(rank: int, root: Path, kind: str, chain: int = 1) -> tuple[Any, list[str], list[str]]:
    """Loads, steps, saves and loads again `chain` times; then goes on to step 6."""
    store = CheckpointStore(root, "run-a")
    losses: list[str] = []
    for link in range(chain):
        model = tiny_model(7 + link, kind)
        optimizer = tiny_optimizer(model, initial_lr=False)  # as a new scheduler would find it
        ref = store.newest_verified()
        assert ref is not None
        loaded = restore(store, ref, model, [optimizer])
        if link == 0:
            seen, notes = snapshot(model, optimizer), loaded.notes
        if loaded.rank_state is not None:
            set_rng_state(loaded.rank_state)
        if link == 0:
            drawn = float(torch.rand(())).hex()
        if link + 1 < chain:
            step = loaded.meta["step"]
            losses += train(model, optimizer, 1, step)
            store.save(step + 1, capture(model, [optimizer]), {"step": step + 1}, rng_state())
    losses += train(model, optimizer, 6 - store.read_meta(ref)["step"], store.read_meta(ref)["step"])
    return seen, [*losses, drawn], notes


@pytest.fixture(scope="module")
def saved_once(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list]:
    """One save on two FSDP2 ranks; tests work on a copy."""
    root = tmp_path_factory.mktemp("saved") / "checkpoints"
    return root, on_ranks(2, save, root, "fsdp")


@pytest.fixture
def fsdp_saved(saved_once: tuple[Path, list], tmp_path: Path) -> tuple[Path, list]:
    root, saved = saved_once
    return Path(shutil.copytree(root, tmp_path / "checkpoints")), saved


@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_saved_on_two_ranks_loaded_on_one_two_and_four(
    tmp_path: Path, fsdp_saved: tuple[Path, list], kind: str
) -> None:
    root, saved = fsdp_saved
    if kind == "ddp":
        root = tmp_path / "ddp"
        saved = on_ranks(2, save, root, kind)
    for ranks in (1, 2, 4):
        loaded = on_ranks(ranks, load, root, kind if ranks > 1 else "plain")
        for rank, (seen, losses, notes) in enumerate(loaded):
            assert same(seen, saved[0][0]) == [], f"{ranks} ranks"
            missing = [note for note in notes if "has no state of rank" in note]
            assert len(missing) == (1 if rank >= 2 else 0)
            assert len([note for note in notes if "initial_lr" in note]) == 2
            if ranks == 2:  # same topology: the same bits, and each rank its own random numbers
                assert losses == saved[rank][1]
    assert saved[0][1][-1] != saved[1][1][-1]


def test_second_and_third_resume_are_bitwise_too(fsdp_saved: tuple[Path, list]) -> None:
    root, saved = fsdp_saved
    loaded = on_ranks(2, load, root, "fsdp", 3)
    assert [losses for _, losses, _ in loaded] == [losses for _, losses in saved]
    # A shard of another step, of the same length: found by the rank that hashes it, told to both.
    infos = CheckpointStore(root, "run-a").list()
    assert [info.ref.step for info in infos] == [3, 4, 5]
    older, newer, shard = infos[1].ref, infos[2].ref, "__1_0.distcp"
    assert (older.path / shard).stat().st_size == (newer.path / shard).stat().st_size
    (newer.path / shard).write_bytes((older.path / shard).read_bytes())
    for found in on_ranks(2, find, root):
        assert found == older and f"{shard} does not match" in found.rejected[0]


def find(rank: int, root: Path) -> Any:
    return CheckpointStore(root, "run-a").newest_verified()


def export_and_partly_load(rank: int, root: Path) -> tuple[dict, dict]:
    store = CheckpointStore(root, None)
    ref = store.newest_verified()
    assert ref is not None
    return store.load_full_model(ref), store.list()[0].parts


def test_the_full_model_comes_out_of_shards(fsdp_saved: tuple[Path, list]) -> None:
    root, saved = fsdp_saved
    seen, _ = saved[0]
    weights, parts = on_ranks(1, export_and_partly_load, root)[0]
    expected = {key.removeprefix("model."): value for key, value in seen["tensors"].items() if key.startswith("model.")}
    assert weights.keys() == expected.keys() and all(torch.equal(weights[key], expected[key]) for key in expected)
    assert parts["model"] == sum(tensor.nbytes for tensor in expected.values())
    optimizer_bytes = [tensor.nbytes for key, tensor in seen["tensors"].items() if key.startswith("optimizer.")]
    assert parts["optimizer"] == sum(optimizer_bytes)


def fail_on_one_rank(rank: int, root: Path) -> list[str]:
    """One rank fails in different ways; every rank must get the same answer, and be able to go on."""
    model = tiny_model(0, "fsdp")
    optimizer = tiny_optimizer(model)
    train(model, optimizer, 1)
    store = CheckpointStore(root, "run-a")
    good = store.save(1, capture(model, [optimizer]), {"step": 1}, {})
    said = []

    opened = Path.open

    def failing(path: Path, *args: Any, **kwargs: Any) -> Any:
        if rank == 1 and path.name.startswith(failing.name) and args and args[0] in ("xb", "wb"):
            raise OSError(errno.EIO, "Input/output error")
        return opened(path, *args, **kwargs)

    for failing.name in ("rank-00001", "__1_0"):
        Path.open = failing  # type: ignore[method-assign]
        try:
            store.save(2, capture(model, [optimizer]), {}, {})
        except CheckpointFailed as problem:
            said.append(str(problem))
        Path.open = opened  # type: ignore[method-assign]
    try:
        store.save(2, capture(model, [optimizer]), {}, {"bad": object()} if rank == 1 else {})
    except (TypeError, RuntimeError) as problem:
        said.append(f"{type(problem).__name__} {problem}")
    tree = capture(model, [optimizer])
    if rank == 1:
        tree["model"]["only.here"] = torch.zeros(2)
    try:
        store.load(good, tree)
    except UserError as problem:
        said.append(str(problem))
    store.save(3, capture(model, [optimizer]), {}, {})
    newest = store.newest_verified()
    assert newest is not None
    said.append(newest.name)
    if is_main():
        os.truncate(newest.path / "__1_0.distcp", 10)
        (good.path / "manifest.json").unlink()
    store._control.gather(None)
    try:
        store.newest_verified()
    except Refused as problem:
        said.append(str(problem))
    return said


def test_a_failure_on_one_rank_is_the_same_failure_on_all(tmp_path: Path) -> None:
    first, second = on_ranks(2, fail_on_one_rank, tmp_path / "checkpoints")
    assert len(first) == 6
    assert "rank 1: OSError: [Errno 5]" in first[0] and "rank 1: OSError: [Errno 5]" in first[1]
    assert first[2].startswith("RuntimeError rank 1") and second[2].startswith("TypeError rank_state holds")
    assert "rank 1:" in first[3] and "it lacks model.only.here" in first[3]
    assert first[4] == "step-00000003.g0005"
    assert "__1_0.distcp has 10 bytes" in first[5] and "manifest.json is missing" in first[5]
    assert first[:2] + first[3:] == second[:2] + second[3:]
