"""YAML nodes → assignments, guided by the typed sections.

The type of a field decides how its scalar is read: `name: 0012` is text although YAML would make it twelve.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_origin

from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from headway.account.errors import UserError
from headway.config.base import PathKind, Section
from headway.config.layers import Assignment, Origin
from headway.config.names import unknown_key
from headway.config.paths import resolve
from headway.config.schema import is_text, item_of, members, section_of
from headway.config.yaml_text import NULL, entries, line_of, scalar_value

_COLLECTIONS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")


_MOST_VALUES = 100_000


@dataclass
class Reader:
    """Reads nodes of one text: `kind` and `place` (of a line) say where values come from, paths start from `base`."""

    kind: Literal["file", "override"]
    place: Callable[[int], str]
    base: Path
    _open: set[int] = field(default_factory=set)
    _values: int = 0

    def origin(self, node: Node) -> Origin:
        return Origin(self.kind, self.place(line_of(node)))

    def section(self, node: Node, section: type[Section], prefix: str = "") -> Iterator[Assignment]:
        """The assignments of a mapping of this section's keys. Raises UserError for a key that it does not have."""
        for name, key_node, value_node in self._entries(node, section, prefix):
            yield from self.key(value_node, section, name, prefix, self.origin(key_node))

    def key(self, node: Node, section: type[Section], name: str, prefix: str, origin: Origin) -> Iterator[Assignment]:
        """The assignments of one key of a section."""
        key = prefix + name
        annotation = section.model_fields[name].annotation
        nested = section_of(annotation)
        if nested is not None and isinstance(node, MappingNode):
            yield Assignment(key, {}, {key: origin}, opens=True)
            yield from self.section(node, nested, key + ".")
        elif nested is not None and node.tag == NULL and type(None) not in members(annotation):
            if self.kind == "override":
                keys = ", ".join(f"{key}.{inner}" for inner in nested.model_fields)
                raise UserError(f"{self.origin(node)}: {key} is a section; set its keys: {keys}")
            return  # `log:` with every line below it commented out
        elif nested is not None and node.tag != NULL:
            keys = ", ".join(nested.model_fields)
            raise UserError(f"{self.origin(node)}: {key} is a section; write its keys inside it: {keys}")
        else:
            origins = {key: origin}
            value = self._value(node, annotation, key, origins, path_kind(section, name))
            yield Assignment(key, value, origins)

    def free(self, node: Node, key: str, origins: dict[str, Origin]) -> Any:
        """A value that no type guides, e.g. inside model.config."""
        return self._value(node, Any, key, origins, None)

    def _entries(self, node: Node, section: type[Section], prefix: str) -> Iterator[tuple[str, Node, Node]]:
        if not isinstance(node, MappingNode):
            raise UserError(
                f"{self.origin(node)}: a mapping of keys is expected here: {', '.join(section.model_fields)}"
            )
        for name, key_node, value_node in entries(node, self.place):
            if name not in section.model_fields:
                raise UserError(f"{self.origin(key_node)}: {unknown_key(prefix + name)}")
            yield name, key_node, value_node

    def _value(self, node: Node, annotation: Any, key: str, origins: dict[str, Origin], path: PathKind | None) -> Any:
        self._values += 1
        if self._values > _MOST_VALUES:  # a dozen lines of aliases of aliases can mean billions of values
            raise UserError(
                f"{self.origin(node)}: {key}: more than {_MOST_VALUES} values; write the file without aliases"
            )
        if isinstance(node, ScalarNode):
            return self._scalar(node, annotation, key, path)
        if node.tag not in _COLLECTIONS:
            raise UserError(f"{self.origin(node)}: {key}: the tag {node.tag} is not allowed in a run file")
        if id(node) in self._open:
            raise UserError(f"{self.origin(node)}: {key}: an alias inside its own anchor never ends")
        self._open.add(id(node))
        try:
            if isinstance(node, SequenceNode):
                return self._items(node, item_of(annotation), key, origins, path)
            section = section_of(annotation) or section_of(item_of(annotation))
            if section is not None:
                return self._fields(node, section, key, origins)
            return self._mapping(node, key, origins)  # type: ignore[arg-type]
        finally:
            self._open.discard(id(node))

    def _items(
        self, node: SequenceNode, item: Any, key: str, origins: dict[str, Origin], path: PathKind | None
    ) -> list[Any]:
        found = []
        for index, part in enumerate(node.value):
            inner = f"{key}[{index}]"
            origins[inner] = self.origin(part)
            found.append(self._value(part, item, inner, origins, path))
        return found

    def _fields(self, node: Node, section: type[Section], key: str, origins: dict[str, Origin]) -> dict[str, Any]:
        found = {}
        for name, key_node, value_node in self._entries(node, section, key + "."):
            inner = f"{key}.{name}"
            origins[inner] = self.origin(key_node)
            annotation = section.model_fields[name].annotation
            found[name] = self._value(value_node, annotation, inner, origins, path_kind(section, name))
        return found

    def _mapping(self, node: MappingNode, key: str, origins: dict[str, Origin]) -> dict[str, Any]:
        found = {}
        for name, key_node, value_node in entries(node, self.place):
            origins[f"{key}.{name}"] = self.origin(key_node)
            found[name] = self.free(value_node, f"{key}.{name}", origins)
        return found

    def _scalar(self, node: ScalarNode, annotation: Any, key: str, path: PathKind | None) -> Any:
        if node.tag == NULL:
            return None
        item = section_of(annotation) or section_of(item_of(annotation))
        if item is not None and item.shorthand is not None:
            return resolve(node.value, self.base, path_kind(item, item.shorthand) or "path")
        if path is not None:
            return resolve(node.value, self.base, path)
        if annotation is not Any and is_text(item_of(annotation) or annotation):
            return node.value
        try:
            return scalar_value(node)
        except ValueError as error:
            raise UserError(f"{self.origin(node)}: {key}: {error}") from None


def path_kind(section: type[Section], name: str) -> PathKind | None:
    """How the paths in a field are resolved, None where it holds no path."""
    extra = section.model_fields[name].json_schema_extra
    return extra.get("path") if isinstance(extra, dict) else None  # type: ignore[return-value]


def is_free_form(section: type[Section], name: str) -> bool:
    """Whether a field may hold a mapping whose keys Headway does not know."""
    return any(get_origin(part) is dict or part is dict for part in members(section.model_fields[name].annotation))
