"""Copies of a node's memory checkpoints in another node's memory: sent by the saver, held by a keeper. No torch.

A keeper is a small server beside the ranks of a node, for as long as they run; what it took lies in shared memory and
survives it. Both sides know a secret that the ranks agreed on at their start. A part is taken when all its files are as
its manifest says, and appears by one rename; then older ones go.
"""

from __future__ import annotations

import contextlib
import hmac
import shutil
import socket
import socketserver
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from headway.guard import layout
from headway.guard.layout import CheckpointFailed, CheckpointRef
from headway.guard.manifest import Damaged, Manifest, hash_problems, read_manifest, size_problems

PEERS = ".peers"
"""In a node's memory folder: a folder for every other node whose part it holds."""
_CHUNK = 1 << 20
_TIMEOUT_S = 30.0
_LINE = 1 << 20


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """Where a keeper listens. `node`: whose part is sent there or asked for."""

    address: str
    port: int
    secret: str
    node: str


class _Head(msgspec.Struct, kw_only=True):
    """The first line of a request or an answer; files follow, one after the other."""

    secret: str = ""
    op: str = ""
    node: str = ""
    name: str = ""
    files: list[tuple[str, int]] = []
    why: str = ""


def send_part(peer: Peer, folder: Path) -> int:
    """Sends a published memory folder. Returns its bytes; raises CheckpointFailed, OSError."""
    files = _files(folder)
    head = _Head(secret=peer.secret, op="put", node=peer.node, name=folder.name, files=files)
    with _connected(peer) as stream:
        _send_files(stream, head, folder)
        answer = _read_head(stream)
    if answer.why:
        raise CheckpointFailed(f"{peer.address} did not take it: {answer.why}")
    return sum(size for _, size in files)


def fetch_part(peer: Peer, name: str, into: Path) -> Manifest:
    """Fetches the part `name` of `peer.node`, whoever's memory it lies in, into a new folder, and verifies it.

    Raises CheckpointFailed, OSError.
    """
    with _connected(peer) as stream:
        stream.write(msgspec.json.encode(_Head(secret=peer.secret, op="get", node=peer.node, name=name)) + b"\n")
        stream.flush()
        answer = _read_head(stream)
        if answer.why:
            raise CheckpointFailed(f"{peer.address} does not give {name} of {peer.node}: {answer.why}")
        into.mkdir(parents=True)
        _receive_files(stream, answer.files, into)
    return verified_part(CheckpointRef(into, *_numbers(name)))


def verified_part(ref: CheckpointRef) -> Manifest:
    """The manifest of a part all of whose files are as they were written. Raises CheckpointFailed."""
    try:
        manifest = read_manifest(ref)
    except Damaged as problem:
        raise CheckpointFailed(f"{ref.name}: {problem}") from problem
    problems = size_problems(ref.path, manifest) or hash_problems(ref.path, manifest, sorted(manifest.files))
    if problems:
        raise CheckpointFailed(f"{ref.name}: {problems[0]}")
    return manifest


def serve(root: Path, node: str, secret: str) -> socketserver.ThreadingTCPServer:
    """A keeper for the memory folder `root` of `node`, listening; run its `serve_forever`."""

    class Handler(socketserver.StreamRequestHandler):
        timeout = _TIMEOUT_S

        def handle(self) -> None:
            with contextlib.suppress(OSError, msgspec.DecodeError):
                _answer(self, root, node, secret)

    class Server(socketserver.ThreadingTCPServer):
        allow_reuse_address = True
        daemon_threads = True

    return Server(("", 0), Handler)


def _answer(stream: Any, root: Path, node: str, secret: str) -> None:
    head = msgspec.json.decode(stream.rfile.readline(_LINE), type=_Head)
    if not hmac.compare_digest(head.secret.encode(), secret.encode()):
        return
    try:
        _numbers(head.name)
        if "/" in head.node or head.node in ("", ".", ".."):
            raise CheckpointFailed(f"{head.node!r} is no node's name")
        if head.op == "put":
            _take(stream.rfile, head, root)
            answer = _Head()
        else:
            folder = (root if head.node == node else root / PEERS / head.node) / head.name
            verified_part(CheckpointRef(folder, *_numbers(head.name)))
            _send_files(stream.wfile, _Head(files=_files(folder)), folder)
            return
    except (OSError, CheckpointFailed) as problem:
        answer = _Head(why=str(problem))
    stream.wfile.write(msgspec.json.encode(answer) + b"\n")


def _take(stream: Any, head: _Head, root: Path) -> None:
    held = root / PEERS / head.node
    partial, final = held / f".partial-{head.name}", held / head.name
    need, free = sum(size for _, size in head.files), shutil.disk_usage(root).free
    if free < need + need // 10:
        raise CheckpointFailed(f"too little memory: {need / 1e6:,.0f} MB needed, {free / 1e6:,.0f} MB free in {root}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        _receive_files(stream, head.files, partial)
        verified_part(CheckpointRef(partial, *_numbers(head.name)))
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
    except (OSError, CheckpointFailed):
        shutil.rmtree(partial, ignore_errors=True)
        raise
    for other in held.parent.iterdir():
        for ref in layout.published(other):
            if ref.generation < _numbers(head.name)[1]:
                shutil.rmtree(ref.path, ignore_errors=True)


@contextlib.contextmanager
def _connected(peer: Peer) -> Iterator[Any]:
    with (
        socket.create_connection((peer.address, peer.port), timeout=_TIMEOUT_S) as connection,
        connection.makefile("rwb") as stream,
    ):
        yield stream


def _files(folder: Path) -> list[tuple[str, int]]:
    return sorted((entry.name, entry.stat().st_size) for entry in folder.iterdir())


def _send_files(stream: Any, head: _Head, folder: Path) -> None:
    stream.write(msgspec.json.encode(head) + b"\n")
    for name, size in head.files:
        left = size
        with (folder / name).open("rb") as file:
            while left:
                chunk = file.read(min(_CHUNK, left))
                if not chunk:
                    raise CheckpointFailed(f"{name} became shorter")
                stream.write(chunk)
                left -= len(chunk)
    stream.flush()


def _receive_files(stream: Any, files: list[tuple[str, int]], folder: Path) -> None:
    for name, size in files:
        if "/" in name or name in ("", ".", ".."):
            raise CheckpointFailed(f"{name!r} is no file's name")
        left = size
        with (folder / name).open("xb") as file:
            while left:
                chunk = stream.read(min(_CHUNK, left))
                if not chunk:
                    raise CheckpointFailed(f"the connection ended in {name}")
                file.write(chunk)
                left -= len(chunk)


def _read_head(stream: Any) -> _Head:
    line = stream.readline(_LINE)
    if not line:
        raise CheckpointFailed("the connection ended")
    return msgspec.json.decode(line, type=_Head)


def _numbers(name: str) -> tuple[int, int]:
    """Step and generation of a checkpoint's name. Raises CheckpointFailed."""
    step, _, generation = name.removeprefix("step-").partition(".g")
    if not step.isdigit() or not generation.isdigit():
        raise CheckpointFailed(f"{name!r} is no checkpoint's name")
    return int(step), int(generation)
