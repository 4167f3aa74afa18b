"""YAML and JSON as people meant them: a key that is written twice in one mapping is a mistake, not its last value."""

from __future__ import annotations

import json
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, SequenceNode

from headway.account.errors import UserError


def yaml_of(text: str, where: str) -> Any:
    """The value of a YAML text. Raises UserError naming `where` for what is not YAML, and for a key given twice."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        _no_key_twice(root, where, set())
        return yaml.safe_load(text)
    except (LookupError, AttributeError):  # how the library refuses `!!bool maybe` and `!!timestamp today`
        raise UserError(f"{where}: not YAML (a value that its tag cannot have)") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:  # ValueError: 2026-02-30
        raise UserError(f"{where}: not YAML ({str(error).splitlines()[0]})") from error


def json_of(content: bytes | str, where: str) -> Any:
    """The value of a JSON text. Raises UserError naming `where` for what is not JSON, and for a key given twice."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) < len(items):
            keys = [key for key, _ in items]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise UserError(f"{where}: key {twice!r} is given twice")
        return found

    try:
        return json.loads(content, object_pairs_hook=pairs)
    except UserError:
        raise
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not JSON ({error})") from error


def _no_key_twice(node: Node | None, where: str, seen: set[int]) -> None:
    """`seen`: nodes that were looked at; aliases are the same node again, and nested ones would take for ever."""
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, SequenceNode):
        for one in node.value:
            _no_key_twice(one, where, seen)
    if isinstance(node, MappingNode):
        lines: dict[str, int] = {}
        for key, value in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in lines:
                raise UserError(f"{where}: key {name!r} is given twice, in lines {lines[name]} and {line}")
            lines[name] = line
            _no_key_twice(value, where, seen)
