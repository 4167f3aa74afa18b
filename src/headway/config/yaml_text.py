"""YAML as the run file means it: the numbers and words of YAML 1.2, duplicate keys refused, lines remembered.

PyYAML reads YAML 1.1, in which `1e-5` is text, `no` is false, `010` is eight and `12:30` is 750.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode

from headway.account.errors import UserError

NULL, BOOL, INT, FLOAT, STR = (f"tag:yaml.org,2002:{kind}" for kind in ("null", "bool", "int", "float", "str"))

_INT = re.compile(r"[-+]?[0-9]+(?:_[0-9]+)*|0x[0-9a-fA-F]+|0o[0-7]+")
_FLOAT = re.compile(
    r"[-+]?(?:\.[0-9]+|[0-9]+(?:_[0-9]+)*(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)
_CORE = {
    NULL: (re.compile(r"~|null|Null|NULL|"), ["~", "n", "N", ""]),
    BOOL: (re.compile(r"true|True|TRUE|false|False|FALSE"), list("tTfF")),
    INT: (_INT, list("-+0123456789")),
    FLOAT: (_FLOAT, list("-+0123456789.")),
}


class CoreLoader(yaml.SafeLoader):
    """Composes nodes with YAML 1.2's core schema (and 1_000 for 1000)."""

    yaml_implicit_resolvers: dict = {}  # noqa: RUF012  (PyYAML's own way of replacing the table in a subclass)


for _tag, (_pattern, _first) in _CORE.items():
    CoreLoader.add_implicit_resolver(_tag, re.compile(f"(?:{_pattern.pattern})\\Z"), _first)


def core_tag(text: str) -> str:
    """What a plain scalar of these characters is in the run file."""
    return next((tag for tag, (pattern, _) in _CORE.items() if pattern.fullmatch(text)), STR)


def compose(text: str, place: Callable[[int], str]) -> Node | None:
    """The YAML tree of a text, None when it is empty. `place` names a 1-based line in messages.

    Raises UserError for what is not YAML or holds more than one document.
    """
    loader = None
    try:
        loader = CoreLoader(text)
        return loader.get_single_node()
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise UserError(f"{place(line)}: character {error.character:#x} is not allowed in YAML") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark is not None else 1
        problem = " ".join(part for part in (error.context, error.problem) if part)
        if "'\\t'" in problem:
            problem += " (indent with spaces, not tabs)"
        raise UserError(f"{place(line)}: not valid YAML: {problem}") from None
    except RecursionError:
        raise UserError(f"{place(1)}: nested too deeply to be a run file") from None
    finally:
        if loader is not None:
            loader.dispose()


def line_of(node: Node) -> int:
    """The 1-based line that a node starts on."""
    return node.start_mark.line + 1


def scalar_value(node: ScalarNode) -> bool | int | float | str | None:
    """The value of a scalar by its tag. Raises ValueError for a tag or number that cannot be read."""
    text = node.value.replace("_", "")
    if node.tag == NULL:
        return None
    if node.tag == BOOL and core_tag(node.value) == BOOL:
        return text.lower() == "true"
    if node.tag == INT:
        return int(text, 0) if text[:2] in ("0x", "0o") else int(text)
    if node.tag == FLOAT:
        return float(re.sub(r"\.(?=inf|nan)", "", text.lower()))
    if node.tag == STR:
        return str(node.value)
    raise ValueError(f"the tag {node.tag.replace('tag:yaml.org,2002:', '!!')} is not allowed in a run file")


def entries(node: MappingNode, place: Callable[[int], str]) -> list[tuple[str, Node, Node]]:
    """(key, key node, value node) of a mapping, in order.

    Raises UserError for a key that is no plain name, and for one that is written twice (both lines are named).
    """
    found: dict[str, tuple[str, Node, Node]] = {}
    for key_node, value_node in node.value:
        if not isinstance(key_node, ScalarNode):
            raise UserError(f"{place(line_of(key_node))}: a key must be a plain name")
        key = key_node.value
        if key in found:
            first = line_of(found[key][1])
            raise UserError(f"{place(line_of(key_node))}: the key {key!r} is given twice (first on line {first})")
        found[key] = (key, key_node, value_node)
    return list(found.values())
