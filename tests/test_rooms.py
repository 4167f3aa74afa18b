"""The house: a room imports only from rooms above it, and account, record, config and plan never import torch."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parent.parent / "src" / "headway"
ROOMS = (
    "account", "record", "config", "plan", "data", "model", "parallel", "guard",
    "train", "prove", "diagnose", "tune", "bench", "serve", "watch", "cli",
)  # fmt: skip
WITHOUT_TORCH = ("account", "record", "config", "plan")


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every module that a file imports, also inside functions: (line, dotted name)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"line {node.lineno}: a relative import hides its room"
            yield node.lineno, node.module or ""
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def violations(room: str, text: str) -> list[str]:
    found = []
    for line, name in imports(ast.parse(text)):
        parts = name.split(".")
        if parts[0] == "headway" and len(parts) > 1 and parts[1] in ROOMS and ROOMS.index(parts[1]) > ROOMS.index(room):
            found.append(f"line {line}: {room} imports {parts[1]}, which is below it")
        if parts[0] == "torch" and room in WITHOUT_TORCH:
            found.append(f"line {line}: {room} imports torch")
    return found


def test_rooms_import_only_upwards() -> None:
    bad = [
        f"{path.relative_to(SOURCE)} {problem}"
        for path in sorted(SOURCE.rglob("*.py"))
        if (room := path.relative_to(SOURCE).parts[0]) in ROOMS
        for problem in violations(room, path.read_text(encoding="utf-8"))
    ]
    assert not bad, "\n".join(bad)


def test_every_folder_is_a_known_room() -> None:
    folders = {path.name for path in SOURCE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders <= set(ROOMS)


@pytest.mark.parametrize(
    ("room", "planted"),
    [
        ("guard", "from headway.train.loop import train"),
        ("account", "import torch"),
        ("plan", "def f():\n    from torch import nn"),
        ("data", "from headway import cli"),
        ("train", "import headway.watch.report"),
    ],
)
def test_planted_violations_are_caught(room: str, planted: str) -> None:
    assert violations(room, planted)
