"""`key=value` from the command line → assignments."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import yaml
from yaml.nodes import Node, ScalarNode

from headway.account.errors import UserError
from headway.config.base import Section
from headway.config.layers import Assignment, Origin
from headway.config.names import unknown_key
from headway.config.reader import Reader, is_free_form
from headway.config.run import RunConfig
from headway.config.schema import is_text, section_of
from headway.config.yaml_text import NULL, STR, compose, core_tag

_START = yaml.Mark("", 0, 0, 0, "", 0)


def override_layer(overrides: Iterable[str], base: Path) -> list[Assignment]:
    """The assignments of `key=value` strings; values are YAML, relative paths start from `base`.

    Raises UserError that names the override for an unknown key, a missing `=`, or a value that is not YAML.
    """
    return [assignment for text in overrides for assignment in _override(text, base)]


def _override(text: str, base: Path) -> list[Assignment]:
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not key:
        raise UserError(f"override {text!r}: write it as key=value, e.g. data.seq_len=4096")
    origin = Origin("override", f"override {text}")
    reader = Reader("override", lambda line: origin.where, base)
    section, name, prefix, free = _locate(key, origin)
    if free:
        origins = {key: origin}
        return [Assignment(key, reader.free(_node(value, origin), key, origins), origins)]
    field = section.model_fields[name]
    is_plain_text = section_of(field.annotation) is None and is_text(field.annotation)
    node = _text_node(value, origin) if is_plain_text else _node(value, origin)
    return list(reader.key(node, section, name, prefix, origin))


def _locate(key: str, origin: Origin) -> tuple[type[Section], str, str, bool]:
    """(section, field, dotted prefix, whether the key lies inside a free-form mapping) of a dotted key."""
    section: type[Section] = RunConfig
    prefix = ""
    parts = key.split(".")
    for position, name in enumerate(parts):
        if "[" in name and name.partition("[")[0] in section.model_fields:
            whole = prefix + name[: name.index("[")]
            raise UserError(f"{origin}: single items of a list cannot be set; give the whole list, {whole}=[…]")
        if name not in section.model_fields:
            break
        if position == len(parts) - 1:
            return section, name, prefix, False
        nested = section_of(section.model_fields[name].annotation)
        if nested is None:
            if is_free_form(section, name) and all(parts[position + 1 :]):
                return section, name, prefix, True
            break
        section, prefix = nested, f"{prefix}{name}."
    raise UserError(f"{origin}: {unknown_key(key)}")


def _node(value: str, origin: Origin) -> Node:
    try:
        node = compose(value, lambda line: origin.where)
    except UserError as error:
        raise UserError(
            f"{error}; put text with special characters in double quotes inside single ones: 'key=\"*.jsonl\"'"
        ) from None
    return node if node is not None else _null(value)


def _text_node(value: str, origin: Origin) -> Node:
    """Text means its own characters (`out=*x`, `name=001`), unless it is quoted or null."""
    if core_tag(value.strip()) == NULL:
        return _null(value)
    if value.lstrip()[:1] in {'"', "'"}:
        return _node(value, origin)
    return ScalarNode(STR, value.strip(), _START, _START)


def _null(value: str) -> Node:
    return ScalarNode(NULL, value, _START, _START)
