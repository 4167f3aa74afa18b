"""A node's part in another node's memory: taken only when it is whole, given only to whoever knows the secret."""

from __future__ import annotations

import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from headway.guard import peers
from headway.guard.hashing import hash_file
from headway.guard.layout import CheckpointFailed, published_name
from headway.guard.manifest import Manifest, write_manifest
from headway.guard.parts import Part, choose
from headway.guard.peers import PEERS, Peer, fetch_part, send_part


def part(root: Path, generation: int, content: bytes = b"numbers") -> Path:
    folder = root / published_name(10 * generation, generation)
    folder.mkdir(parents=True)
    (folder / "rank-00000.pt").write_bytes(content)
    files = {"rank-00000.pt": hash_file(folder / "rank-00000.pt")}
    write_manifest(
        folder,
        Manifest(
            step=10 * generation, generation=generation, run_id="r", created="", world_size=1, headway="", torch="",
            parts={}, files=files,
        ),
    )  # fmt: skip
    return folder


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[Peer]:
    (tmp_path / "b").mkdir()
    with peers.serve(tmp_path / "b", "b", "secret") as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield Peer(address="127.0.0.1", port=server.server_address[1], secret="secret", node="a")
        server.shutdown()
        thread.join()


def test_a_part_goes_over_and_comes_back_and_older_ones_go(tmp_path: Path, keeper: Peer) -> None:
    for generation in (1, 2):
        send_part(keeper, part(tmp_path / "a", generation, b"x" * 3_000_000))
    held = tmp_path / "b" / PEERS / "a"
    assert [path.name for path in held.iterdir()] == ["step-00000020.g0002"]
    manifest = fetch_part(keeper, "step-00000020.g0002", tmp_path / "back" / "step-00000020.g0002")
    assert manifest.step == 20 and (tmp_path / "back/step-00000020.g0002/rank-00000.pt").stat().st_size == 3_000_000
    own = part(tmp_path / "b", 3)
    own_part = msgspec.structs.replace(keeper, node="b")
    assert fetch_part(own_part, own.name, tmp_path / "back" / own.name).generation == 3


def test_what_is_not_as_its_manifest_says_is_neither_taken_nor_given(tmp_path: Path, keeper: Peer) -> None:
    folder = part(tmp_path / "a", 1)
    (folder / "rank-00000.pt").write_bytes(b"numberz")
    with pytest.raises(CheckpointFailed, match=r"did not take it.*XXH3-128"):
        send_part(keeper, folder)
    assert list((tmp_path / "b" / PEERS / "a").iterdir()) == []
    shutil.copytree(folder, tmp_path / "b" / PEERS / "a" / folder.name)
    with pytest.raises(CheckpointFailed, match=r"does not give.*XXH3-128"):
        fetch_part(keeper, folder.name, tmp_path / "back" / folder.name)


def test_strangers_and_paths_out_of_the_folder_are_turned_away(tmp_path: Path, keeper: Peer) -> None:
    folder = part(tmp_path / "a", 1)
    with pytest.raises((CheckpointFailed, OSError)):
        send_part(msgspec.structs.replace(keeper, secret="guess"), folder)
    for node in ("..", "../x", ""):
        with pytest.raises(CheckpointFailed, match="no node's name"):
            send_part(msgspec.structs.replace(keeper, node=node), folder)
    assert list((tmp_path / "b").iterdir()) == []


def test_a_sender_that_dies_half_way_leaves_nothing(tmp_path: Path, keeper: Peer) -> None:
    head = peers._Head(secret="secret", op="put", node="a", name="step-00000010.g0001", files=[("x", 10)])
    with socket.create_connection((keeper.address, keeper.port)) as connection:
        connection.sendall(msgspec.json.encode(head) + b"\n12345")
        connection.shutdown(socket.SHUT_WR)
        assert b"the connection ended in x" in connection.recv(1000)
    assert list((tmp_path / "b" / PEERS / "a").iterdir()) == []


def a_part(generation: int, owner: str, node: str, ranks: set[int], step: int = 5) -> Part:
    return Part(f"step-{step}", step, generation, 3, frozenset(ranks), owner, node, 1)


def test_the_newest_save_that_is_whole_is_chosen_with_every_place_of_its_parts() -> None:
    old = [a_part(1, "a", "a", {0, 1}), a_part(1, "b", "c", {2})]
    new = [a_part(2, "a", "a", {0, 1}), a_part(2, "a", "b", {0, 1})]
    assert choose([*old, *new]) == [[old[0]], [old[1]]]
    last = a_part(2, "b", "b", {2})
    assert choose([*old, *new, last]) == [new, [last]]
    assert choose(new) == [] and choose([*new, a_part(2, "b", "b", {2}, step=6)]) == []
