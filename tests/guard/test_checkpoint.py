"""One process: saved exactly, found, verified before anything is touched, refused when it does not fit."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from guard_helpers import same, snapshot, tiny_model, tiny_optimizer, train

from headway.account.errors import Refused, UserError
from headway.guard import layout, writing
from headway.guard.checkpoint import CheckpointFailed, CheckpointRef, CheckpointStore
from headway.guard.manifest import MANIFEST
from headway.guard.training_state import capture
from headway.guard.tree import Tree, flatten


def state(value: float = 1.0) -> Tree:
    return {
        "model": {"w.weight": torch.full((40, 30), value), "b": torch.tensor([value, -0.0, float("nan")])},
        "optimizer": {
            "state": {"w.weight": {"step": torch.tensor(value), "exp_avg": torch.full((40, 30), value / 3)}},
            "param_groups": [{"lr": value / 7, "betas": (0.9, 0.95), "fused": None, "params": ["w.weight"]}],
        },
        "extra": {"count": 3, "none": None, "big": 2**70, "half": torch.ones(2, dtype=torch.bfloat16)},
    }


def bits(tree: Any) -> Any:
    """A tree that compares equal exactly when every bit is equal."""
    if isinstance(tree, dict):
        return {key: bits(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [bits(value) for value in tree]
    if isinstance(tree, torch.Tensor):
        return (tree.dtype, tuple(tree.shape), tree.reshape(-1).view(torch.uint8).tolist())
    return (type(tree), repr(tree))


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", "run-a")


def save(store: CheckpointStore, step: int, value: float | None = None) -> CheckpointRef:
    value = float(step) if value is None else value
    return store.save(step, state(value), {"step": step}, {"rng": torch.tensor([step])})


def test_everything_comes_back_bit_for_bit(store: CheckpointStore) -> None:
    meta = {
        "position": {"epoch": 1, "documents": 7},
        "loss": 0.1 + 0.2,
        "nan": None,
        "text": "ä→",
        "list": [1, 2.5, True],
    }
    rank_state = {"rng": torch.arange(5, dtype=torch.uint8), "nested": {"x": (1, 2.5, None, "s")}}
    ref = store.save(100, state(0.1), meta, rank_state)
    assert ref.name == "step-00000100.g0001"
    target = state(9.0)
    loaded = store.load(ref, target)
    assert bits(target) == bits(state(0.1))
    assert loaded.meta == meta and store.read_meta(ref) == meta
    assert bits(loaded.rank_state) == bits(rank_state)
    assert loaded.notes == [] and loaded.world_size == 1


def test_the_folder_is_published_whole(store: CheckpointStore) -> None:
    ref = save(store, 100)
    assert [entry.name for entry in store.root.iterdir()] == [ref.name]
    manifest = json.loads((ref.path / MANIFEST).read_text())
    present = {entry.name for entry in ref.path.iterdir()}
    assert present == manifest["files"].keys() | {MANIFEST}
    assert present >= {"__0_0.distcp", ".metadata", "values.pt", "meta.json", "rank-00000.pt", "writer.json"}
    assert all((ref.path / name).stat().st_size == entry["size"] for name, entry in manifest["files"].items())
    assert (manifest["step"], manifest["generation"], manifest["run_id"], manifest["world_size"]) == (
        100,
        1,
        "run-a",
        1,
    )
    info = store.list()[0]
    assert info.parts["model"] == 40 * 30 * 4 + 3 * 4 and info.parts["optimizer"] == 40 * 30 * 4 + 4
    assert sum(info.parts.values()) == sum(entry["size"] for entry in manifest["files"].values())
    assert info.verified is None and store.list(verify=True)[0].verified is True


def test_dcp_itself_can_read_our_folder(store: CheckpointStore) -> None:
    ref = save(store, 1)
    target = {"model": {"w.weight": torch.zeros(40, 30)}}
    dcp.load(target, checkpoint_id=ref.path, no_dist=True)
    assert torch.equal(target["model"]["w.weight"], state(1.0)["model"]["w.weight"])


def test_generations_only_rise_and_the_newest_counts_not_the_highest_step(store: CheckpointStore) -> None:
    names = [save(store, step).name for step in (100, 200, 50, 50)]
    assert names == ["step-00000100.g0001", "step-00000200.g0002", "step-00000050.g0003", "step-00000050.g0004"]
    newest = store.newest_verified()
    assert newest is not None and newest.name == names[-1]
    layout.work_path(store.root, layout.PARTIAL, layout.published_name(9, 17), "other").mkdir()
    assert save(store, 60).generation == 18  # folders being written count too, whoever writes them


def test_an_empty_folder_has_no_checkpoint_and_a_file_is_refused(store: CheckpointStore, tmp_path: Path) -> None:
    assert store.newest_verified() is None and store.list() == []
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file"):
        CheckpointStore(tmp_path / "file", "r")
    for bad in ("", "a/b", "../x", "-a", "a b", "x" * 65):
        with pytest.raises(ValueError, match="run id"):
            CheckpointStore(tmp_path, bad)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def zero_hole(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[: len(content) // 2] = bytes(len(content) // 2)
    path.write_bytes(content)


DAMAGES = {
    "flip": flip,
    "zeros": zero_hole,
    "truncate-1": lambda path: os.truncate(path, path.stat().st_size - 1),
    "truncate-half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path: os.truncate(path, 0),
    "missing": lambda path: path.unlink(),
}
FILES = ["__0_0.distcp", ".metadata", "values.pt", "meta.json", "rank-00000.pt", "writer.json", MANIFEST]


@pytest.mark.parametrize("damage", DAMAGES)
def test_every_damage_to_every_file_is_rejected_before_a_tensor_is_touched(store: CheckpointStore, damage: str) -> None:
    older, newer = save(store, 1), save(store, 2)
    spare = store.root.parent / "spare"
    shutil.copytree(newer.path, spare)
    for name in FILES:
        fresh = CheckpointStore(store.root, "run-a")
        DAMAGES[damage](newer.path / name)
        assert fresh.verify(newer), name
        found = fresh.newest_verified()
        assert (
            found == older
            and len(found.rejected) == 1
            and name in found.rejected[0]
            and newer.name in found.rejected[0]
        )
        target = state(9.0)
        with pytest.raises((UserError, CheckpointFailed)):
            fresh.load(newer, target)
        assert bits(target) == bits(state(9.0)), name
        with pytest.raises((UserError, CheckpointFailed)):
            fresh.load_full_model(newer)
        shutil.rmtree(newer.path)
        shutil.copytree(spare, newer.path)
    assert CheckpointStore(store.root, "run-a").newest_verified() == newer  # the good copy is not rejected


def test_a_shard_of_another_step_is_rejected(store: CheckpointStore) -> None:
    older, newer = save(store, 1), save(store, 2)
    shutil.copy(older.path / "__0_0.distcp", newer.path / "__0_0.distcp")
    # The plant: DCP reads the mixture without a word.
    target = {"model": {"w.weight": torch.zeros(40, 30)}}
    dcp.load(target, checkpoint_id=newer.path, no_dist=True)
    assert float(target["model"]["w.weight"][0, 0]) == 1.0
    found = CheckpointStore(store.root, "run-a").newest_verified()
    assert found == older and "__0_0.distcp does not match its XXH3-128" in found.rejected[0]
    # A whole older checkpoint under a newer name, with its own sound manifest, too.
    shutil.rmtree(newer.path)
    shutil.copytree(older.path, newer.path)
    found = CheckpointStore(store.root, "run-a").newest_verified()
    assert found == older and "not this folder's" in found.rejected[0]


def test_damage_is_seen_by_the_process_that_wrote(store: CheckpointStore) -> None:
    ref = save(store, 1)
    assert store.verify(ref) == []
    flip(ref.path / "__0_0.distcp")
    assert store.verify(ref) != []


def test_old_trust_is_hashed_again(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    ref = save(store, 1)
    stat = (ref.path / "__0_0.distcp").stat()
    flip(ref.path / "__0_0.distcp")
    os.utime(ref.path / "__0_0.distcp", ns=(stat.st_atime_ns, stat.st_mtime_ns))  # as when the disk rots
    monkeypatch.setattr("headway.guard.checkpoint._TRUST_S", -1.0)
    assert store.verify(ref) != []


def test_when_nothing_holds_the_run_does_not_start_from_random(store: CheckpointStore) -> None:
    for step in (1, 2):
        flip(save(store, step).path / ".metadata")
    with pytest.raises(Refused) as caught:
        CheckpointStore(store.root, "run-a").newest_verified()
    assert "step-00000001.g0001" in str(caught.value) and "step-00000002.g0002" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_another_runs_checkpoints_are_not_loaded(store: CheckpointStore) -> None:
    mine = save(store, 1)
    theirs = save(CheckpointStore(store.root, "run-b"), 2)
    found = store.newest_verified()
    assert found == mine and "belongs to run run-b" in found.rejected[0]
    with pytest.raises(UserError, match="belongs to run run-b"):
        store.load(theirs, state())
    anyone = CheckpointStore(store.root, None)
    assert anyone.newest_verified() == theirs
    for act in (anyone.sweep, lambda: anyone.prune(1), lambda: save(anyone, 3)):
        with pytest.raises(ValueError, match="only reads"):
            act()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t["model"].pop("b"), "it has model.b, which this model lacks"),
        (lambda t: t["model"].update(new=torch.zeros(1)), "it lacks model.new"),
        (
            lambda t: t["model"].update(b=torch.zeros(4)),
            r"model.b is \[3\] torch.float32 there and \[4\] torch.float32 here",
        ),
        # DCP would convert it silently.
        (lambda t: t["model"].update(b=t["model"]["b"].bfloat16()), "torch.float32 there and .* torch.bfloat16 here"),
        (lambda t: t["optimizer"]["param_groups"].append({"lr": 1.0}), "param_groups has 1 entries there and 2 here"),
        (
            lambda t: t["optimizer"]["param_groups"][0].update(params=["b"]),
            r"params is \['w.weight'\] there and \['b'\]",
        ),
        (lambda t: t["extra"].update(count=torch.zeros(())), "it lacks extra.count"),
        (lambda t: t.pop("extra"), "it has extra.half"),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_is_touched(store: CheckpointStore, change: Any, words: str) -> None:
    ref = save(store, 1)
    target = state(9.0)
    change(target)
    before = bits(target)
    with pytest.raises(UserError, match=words) as caught:
        store.load(ref, target)
    assert bits(target) == before and "\n" not in str(caught.value)


def test_values_of_the_checkpoint_win_and_differences_are_told(store: CheckpointStore) -> None:
    saved = state(1.0)
    saved["optimizer"]["param_groups"][0]["initial_lr"] = 0.125
    ref = store.save(1, saved, {}, {})
    target = state(9.0)
    target["optimizer"]["param_groups"][0]["decoupled"] = True
    notes = store.load(ref, target).notes
    group = target["optimizer"]["param_groups"][0]
    assert group["initial_lr"] == 0.125 and group["lr"] == 1 / 7 and group["decoupled"] is True
    assert len(notes) == 2 and "initial_lr = 0.125 is taken" in notes[0] and "decoupled = True is kept" in notes[1]


def test_a_read_that_fails_half_way_leaves_the_model_alone(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = save(store, 1)
    calls = []
    read = torch.load

    def failing(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) == 5:  # some tensors have been read by then
            raise OSError(errno.EIO, "Input/output error")
        return read(*args, **kwargs)

    target = state(9.0)
    monkeypatch.setattr("torch.load", failing)
    with pytest.raises(CheckpointFailed, match="Input/output error"):
        store.load(ref, target)
    monkeypatch.undo()
    assert len(calls) == 5 and bits(target) == bits(state(9.0))
    # The plant: the same failure in DCP's own load leaves a mixture.
    flat = {"model.w.weight": torch.zeros(40, 30), "optimizer.state.w.weight.exp_avg": torch.zeros(40, 30)}
    calls[:] = [()] * 3
    monkeypatch.setattr("torch.load", failing)
    with pytest.raises(BaseException, match="Input/output error"):
        dcp.load(flat, checkpoint_id=ref.path, no_dist=True)
    assert sorted(float(tensor.sum()) == 0.0 for tensor in flat.values()) == [False, True]


@pytest.mark.parametrize(
    ("meta", "rank_state", "words"),
    [
        ({"a": (1, 2)}, {}, "meta.a is a tuple"),
        ({"a": {1: 2}}, {}, "key 1: JSON has only text keys"),
        ({"a": [torch.zeros(1)]}, {}, r"meta.a\[0\] is a Tensor"),
        ({}, {"a": Path("x")}, "rank_state holds something"),
    ],
)
def test_what_could_not_be_loaded_again_is_not_saved(
    store: CheckpointStore, meta: dict, rank_state: dict, words: str
) -> None:
    with pytest.raises(TypeError, match=words):
        store.save(1, state(), meta, rank_state)
    assert list(store.root.iterdir()) == []


def test_too_little_space_is_found_before_writing(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    old = save(store, 1)
    usage = shutil.disk_usage(store.root)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage._replace(free=10_000))
    with pytest.raises(CheckpointFailed, match="too little space"):
        save(store, 2)
    assert [entry.name for entry in store.root.iterdir()] == [old.name] and store.verify(old) == []


def test_the_estimate_covers_what_is_written(store: CheckpointStore) -> None:
    model = tiny_model()
    optimizer = tiny_optimizer(model)
    train(model, optimizer, 1)
    for tree in (state(), capture(model, [optimizer])):
        ref = store.save(1, tree, {}, {})
        need = writing.bytes_needed(flatten(tree), 1)
        written = sum(entry.stat().st_size for entry in ref.path.iterdir())
        assert written < need < written + 2_000_000


@pytest.fixture
def small_disk(tmp_path: Path) -> Any:
    path = tmp_path / "small"
    path.mkdir()
    if os.geteuid() != 0 or os.system(f"mount -t tmpfs -o size=6m tmpfs {path} 2>/dev/null") != 0:
        pytest.skip("mounting a small file system is not permitted here")
    yield path
    os.system(f"umount {path}")


def test_a_disk_that_fills_while_writing(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(small_disk / "checkpoints", "run-a")
    old = save(store, 1)
    big = {"model": {f"w{i}": torch.zeros(250_000) for i in range(8)}}
    with pytest.raises(CheckpointFailed, match="too little space"):
        store.save(2, big, {}, {})
    monkeypatch.setattr(writing, "_check_space", lambda *_: None)  # e.g. another job takes the space meanwhile
    with pytest.raises(CheckpointFailed, match="the disk is full"):
        store.save(2, big, {}, {})
    assert [entry.name for entry in store.root.iterdir()] == [old.name]  # the space is given back
    assert store.newest_verified() == old
    assert save(store, 3).step == 3  # and the next one, that fits, succeeds


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("name", ["rank-00000.pt", "meta.json", MANIFEST, "writer.json"])
def test_failing_writes_leave_what_was_there(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, name: str, code: int
) -> None:
    old = save(store, 1)
    opened = Path.open

    def failing(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path.name == name and args and "x" in args[0]:
            raise OSError(code, os.strerror(code))
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", failing)
    with pytest.raises(CheckpointFailed, match="full" if code != errno.EIO else "Input/output"):
        save(store, 2)
    monkeypatch.undo()
    assert store.newest_verified() == old
    assert [entry.name for entry in store.root.iterdir()] == [old.name]


def test_full_model_for_export(store: CheckpointStore) -> None:
    weights = store.load_full_model(save(store, 3))
    assert bits(weights) == bits(state(3.0)["model"])


def test_planted_change_is_seen_by_the_comparison_used_here() -> None:
    model = tiny_model()
    optimizer = tiny_optimizer(model)
    train(model, optimizer, 1)
    one = snapshot(model, optimizer)
    assert same(one, snapshot(model, optimizer)) == []
    optimizer.param_groups[0]["lr"] *= 1 + 2**-52
    assert same(one, snapshot(model, optimizer)) == ["optimizer.param_groups.0.lr"]
