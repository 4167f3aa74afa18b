"""The run file's keys, read off the typed sections: one entry for every key that can be written."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from headway.config.base import Section
from headway.config.dump import inline
from headway.config.run import RunConfig


@dataclass(frozen=True)
class Key:
    """One key of the run file. `name` is dotted from the top; a list item's key is like `data.sources[].path`."""

    name: str
    field: FieldInfo
    section: type[Section]
    nested: type[Section] | None
    """The section that this key opens, None for a value."""

    @property
    def description(self) -> str:
        return self.field.description or ""

    @property
    def marks(self) -> Mapping[str, Any]:
        extra = self.field.json_schema_extra
        return extra if isinstance(extra, dict) else {}

    @property
    def identity(self) -> bool:
        return bool(self.marks.get("identity"))

    @property
    def required(self) -> bool:
        return self.field.is_required()

    @property
    def default(self) -> str:
        """The default in words: as YAML where it is a value."""
        if self.required:
            return "required"
        if "derived" in self.marks:
            return f"= {self.marks['derived']}"
        factory = self.field.default_factory
        return in_words(self.field.default if factory is None else factory())  # type: ignore[call-arg]

    @property
    def allowed(self) -> str:
        """What may be written, in words."""
        if "allowed" in self.marks:
            return str(self.marks["allowed"])
        return allowed_in_words(self.field.annotation, self.field.metadata)


def members(annotation: Any) -> tuple[Any, ...]:
    """The alternatives of a union, without `Annotated`; the annotation itself where it is no union."""
    if get_origin(annotation) is Annotated:
        return members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(part for option in get_args(annotation) for part in members(option))
    return (annotation,)


def section_of(annotation: Any) -> type[Section] | None:
    """The section among an annotation's alternatives."""
    return next((part for part in members(annotation) if isinstance(part, type) and issubclass(part, Section)), None)


def item_of(annotation: Any) -> Any:
    """The annotation of a list's items, None where no alternative is a list."""
    return next((get_args(part)[0] for part in members(annotation) if get_origin(part) in (list, tuple)), None)


def is_text(annotation: Any) -> bool:
    """Whether every alternative but null is text, so that a bare scalar means its own characters."""
    parts = [part for part in members(annotation) if part is not type(None)]
    return all(
        part in (str, Path) or (get_origin(part) is Literal and all(isinstance(x, str) for x in get_args(part)))
        for part in parts
    )


def keys_of(section: type[Section], prefix: str = "") -> Iterator[Key]:
    """Every key of a section and of what is nested in it, in the order of definition."""
    for name, field in section.model_fields.items():
        nested = section_of(field.annotation)
        yield Key(prefix + name, field, section, nested)
        if nested is not None:
            yield from keys_of(nested, f"{prefix}{name}.")
            continue
        item = section_of(item_of(field.annotation))
        if item is not None:
            yield from keys_of(item, f"{prefix}{name}[].")


@lru_cache(maxsize=1)
def all_keys() -> Mapping[str, Key]:
    """Every key of the run file by its dotted name."""
    return types.MappingProxyType({key.name: key for key in keys_of(RunConfig)})


def allowed_in_words(annotation: Any, metadata: list[Any]) -> str:
    """What a value of this annotation within these limits may be, e.g. `a whole number ≥ 1 or null`."""
    options: list[str] = []
    for part in members(annotation):
        if get_origin(part) is Literal:
            options += [str(choice) for choice in get_args(part)]
        elif part is type(None):
            options.append("null")
        elif part is bool:
            options += ["true", "false"]
        elif part is int:
            options.append("a whole number" + _limits(metadata))
        elif part is float:
            options.append("a number" + _limits(metadata))
        elif part is str:
            options.append("text")
        elif part is Path:
            options.append("a path")
        elif get_origin(part) is list:
            options.append("a list")
        elif isinstance(part, type) and issubclass(part, Section):
            options.append("a mapping of " + ", ".join(part.model_fields))
        else:
            options.append(str(part))
    return " or ".join([", ".join(options[:-1]), options[-1]]) if len(options) > 1 else options[0]


_SIGNS = {annotated_types.Ge: ("ge", "≥"), annotated_types.Gt: ("gt", ">"), annotated_types.Le: ("le", "≤")}


def _limits(metadata: list[Any]) -> str:
    limits = []
    for limit in metadata:
        if isinstance(limit, annotated_types.Lt):
            limits.append("< 2^63" if limit.lt == 2**63 else f"< {limit.lt}")
        elif type(limit) in _SIGNS:
            attribute, sign = _SIGNS[type(limit)]
            limits.append(f"{sign} {getattr(limit, attribute)}")
    return (" " + ", ".join(limits)) if limits else ""


def in_words(value: Any) -> str:
    """A default as it would be written in the run file."""
    return "" if value is PydanticUndefined else inline(value)
