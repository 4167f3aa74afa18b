"""RUN.tuned.yaml: the user's own text with the kept changes in it, each with a comment that says what it won."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from yaml.nodes import MappingNode, Node

from headway.account.errors import UserError
from headway.config.dump import inline
from headway.config.yaml_text import compose


def tuned_path(run_file: Path) -> Path:
    """`run.yaml` -> `run.tuned.yaml`, beside it."""
    return run_file.with_name(f"{run_file.stem}.tuned{run_file.suffix}")


def tuned_text(text: str, changes: list[tuple[str, Any, str]]) -> str:
    """The text with (dotted key of two levels, value, comment) set one after the other; everything else stays."""
    for key, value, comment in changes:
        text = _set(text, key, value, comment)
    return text


def _set(text: str, key: str, value: Any, comment: str) -> str:
    section, name = key.split(".")
    root = compose(text, lambda line: f"line {line}")
    if not isinstance(root, MappingNode):
        raise UserError("the run file is not a mapping")
    note = f"# tuned: {comment}"
    inside = _value(root, section)
    if inside is None:
        return f"{text.rstrip()}\n\n{section}:\n  {note}\n  {name}: {inline(value)}\n"
    if not isinstance(inside, MappingNode):
        raise UserError(f"the run file's {section} is not a mapping")
    old = _value(inside, name)
    if inside.flow_style:
        return _in_flow(text, inside, old, name, value, note)
    if old is None:
        # Under the section's own line: before its first key there may be a comment that belongs to that key.
        header = next(node for node, _ in root.value if node.value == section)
        at = text.index("\n", header.end_mark.index) + 1
        indent = " " * inside.value[0][0].start_mark.column
        return f"{text[:at]}{indent}{note}\n{indent}{name}: {inline(value)}\n{text[at:]}"
    start, end = old.start_mark.index, old.end_mark.index
    written = text[start:end]
    end = start + len(written.rstrip())
    key_node = next(node for node, _ in inside.value if node.value == name)
    at = _line_start(text, key_node.start_mark.index)
    indent = " " * key_node.start_mark.column
    gap = "" if start > key_node.end_mark.index + 1 else " "
    return f"{text[:at]}{indent}{note}\n{text[at:start]}{gap}{inline(value)}{text[end:]}"


def _in_flow(text: str, inside: MappingNode, old: Node | None, name: str, value: Any, note: str) -> str:
    """A section written as `{…}`: no room for a comment in it, so it goes above."""
    if old is not None:
        text = f"{text[: old.start_mark.index]}{inline(value)}{text[old.end_mark.index :]}"
    else:
        brace = inside.start_mark.index + 1
        comma = ", " if inside.value else ""
        text = f"{text[:brace]}{name}: {inline(value)}{comma}{text[brace:]}"
    at = _line_start(text, inside.start_mark.index)
    return f"{text[:at]}{note} ({name})\n{text[at:]}"


def _value(mapping: MappingNode, key: str) -> Node | None:
    return next((value for node, value in mapping.value if node.value == key), None)


def _line_start(text: str, index: int) -> int:
    return text.rfind("\n", 0, index) + 1
