"""The store as S3: the tests' own server speaks its protocol, the same code as for any fsspec URL speaks to it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from guard_helpers import same, snapshot, tiny_model, tiny_optimizer, train

pytest.importorskip("s3fs")
pytest.importorskip("flask_cors")
server_module = pytest.importorskip("moto.server")

from headway.guard.checkpoint import CheckpointStore  # noqa: E402
from headway.guard.finding import RemotePlace  # noqa: E402
from headway.guard.layout import CheckpointFailed  # noqa: E402
from headway.guard.manifest import MANIFEST  # noqa: E402
from headway.guard.object_store import ObjectStore  # noqa: E402
from headway.guard.remote import fetch_newest, read_remote_manifest  # noqa: E402
from headway.guard.tiers import Tiers  # noqa: E402
from headway.guard.training_state import buffer_keys, capture, restore  # noqa: E402


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """A bucket's URL; the credentials are what the protocol wants and nobody checks."""
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    patch = pytest.MonkeyPatch()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():
        patch.setenv(name, value)
    import fsspec

    fsspec.filesystem("s3").mkdir("runs")
    yield "s3://runs/a"
    patch.undo()
    server.stop()


def test_through_the_tiers_to_s3_and_back(bucket: str, tmp_path: Path) -> None:
    """The saver's process uploads; old ones go, foreign objects stay; a start on an empty machine goes on from it."""
    store = ObjectStore(bucket, 0)
    store.put_bytes(store.path("notes", "mine.txt"), b"keep me")
    place = RemotePlace(bucket, keep=2, budget_s=5)
    tiers = Tiers(CheckpointStore(tmp_path / "here", "run-a"), tmp_path, remote=place)
    model = tiny_model(0)
    optimizer = tiny_optimizer(model)
    for step in (1, 2, 3):
        train(model, optimizer, 1, step)
        seen = snapshot(model, optimizer)
        tree = capture(model, [optimizer])
        assert tiers.save(step, tree, {"step": step}, {"n": step}, moving=buffer_keys(model), disk=False, remote=True)
        assert tiers.settle(60)
        assert [(event.tier, event.ok, event.why) for event in tiers.poll()] == [
            ("memory", True, ""),
            ("remote", True, ""),
        ]
    tiers.close(over=True)
    names = ["step-00000002.g0002", "step-00000003.g0003"]
    assert [name for name in store.names() if read_remote_manifest(store, name)] == names and store.latest() == names[
        -1
    ]
    assert store.read(store.path("notes", "mine.txt")) == b"keep me"

    again = Tiers(CheckpointStore(tmp_path / "there", "run-a"), tmp_path, remote=place)
    found = again.newest()
    assert found is not None and (found.tier, found.ref.step) == ("remote", 3)
    other = tiny_model(5)
    other_optimizer = tiny_optimizer(other)
    restore(found.store, found.ref, other, [other_optimizer])
    assert same(seen, snapshot(other, other_optimizer)) == []
    again.abandon(3, again.newest(before_step=3).ref)  # type: ignore[union-attr]
    assert [name for name in store.names() if read_remote_manifest(store, name)] == names[:1]
    again.close(over=True)


def test_what_lies_damaged_in_s3_is_passed_over(bucket: str, tmp_path: Path) -> None:
    store = ObjectStore(bucket.replace("/a", "/b"), 0)
    source = CheckpointStore(tmp_path / "checkpoints", "run-a")
    model = tiny_model(0)
    optimizer = tiny_optimizer(model)
    refs = []
    for step in (1, 2):
        train(model, optimizer, 1, step)
        refs.append(source.save(step, capture(model, [optimizer]), {"step": step}, {}))
        for file in sorted(refs[-1].path.iterdir(), key=lambda file: file.name == MANIFEST):
            store.put_bytes(store.path(refs[-1].name, file.name), file.read_bytes())
    shard = next(refs[-1].path.glob("__*.distcp"))
    content = bytearray(shard.read_bytes())
    content[random.Random(3).randrange(len(content))] ^= 1
    store.put_bytes(store.path(refs[-1].name, shard.name), bytes(content))
    found, rejected = fetch_newest(store, [tmp_path / "back"], "run-a", above=0)
    assert found is not None and found.step == 1 and "XXH3-128" in rejected[0]


def test_a_bucket_of_a_misspelt_name_is_not_made(bucket: str) -> None:
    with pytest.raises(CheckpointFailed, match="nowhere"):
        ObjectStore("s3://nowhere/run", 0).put_bytes("nowhere/run/x", b"y")
