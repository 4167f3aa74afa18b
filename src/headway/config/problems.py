"""What pydantic found wrong → one line that names the place, the key, what was given and what is allowed."""

from __future__ import annotations

import re
from typing import Any

from pydantic import ValidationError

from headway.account.errors import UserError
from headway.config.base import Section
from headway.config.dump import inline
from headway.config.layers import Provenance
from headway.config.run import RunConfig
from headway.config.schema import Key, all_keys, item_of, section_of

_LONGEST_VALUE = 60


def as_user_error(error: ValidationError, values: dict[str, Any], provenance: Provenance, label: str) -> UserError:
    """The first problem in full, the other keys by name. `values` are the raw values that were validated."""
    found: dict[str, str] = {}
    for problem in error.errors(include_url=False):
        if problem["type"] == "default_factory_not_called":
            continue  # the key that the default comes from is the one that is wrong
        context = problem.get("ctx", {})
        key = context["key"] if problem["type"] == "between_keys" else key_of(problem["loc"])
        found.setdefault(key, _line(key, problem, values))
    first, *others = found
    origin = provenance.nearest(first)
    line = f"{label if origin is None else origin}: {found[first]}"
    return UserError(f"{line} (also wrong: {', '.join(others)})" if others else line)


def key_of(location: tuple[int | str, ...]) -> str:
    """The dotted key of a pydantic location, without the names of union alternatives that pydantic puts into it."""
    key = ""
    section: type[Section] | None = RunConfig
    item: Any = None
    for part in location:
        if isinstance(part, int):
            section = section_of(item)
            key += f"[{part}]" if section is not None else ""  # plain items are one value with their list
        elif section is not None and part in section.model_fields:
            key = f"{key}.{part}" if key else str(part)
            annotation = section.model_fields[part].annotation
            section, item = section_of(annotation), item_of(annotation)
    return key


def _line(key: str, problem: Any, values: dict[str, Any]) -> str:
    if problem["type"] == "between_keys":
        return f"{key}: {problem['msg']}"
    spec = _spec(key)
    if problem["type"] == "missing" and _value(key, values) is None:
        return f"{key} is required: {spec.description}"
    line = f"{key}: given {_given(key, values)}"
    reason = problem.get("ctx", {}).get("error") if problem["type"] == "value_error" else None
    return f"{line}{f' ({reason})' if reason else ''}; allowed: {spec.allowed}"


def _spec(key: str) -> Key:
    """The schema's entry of a key; of the list where the key is one of its items."""
    return all_keys()[re.sub(r"\[\d+\]", "[]", key).removesuffix("[]")]


def _value(key: str, values: dict[str, Any]) -> Any:
    """The raw value of a key, None where it was not written."""
    value: Any = values
    for part in key.replace("[", ".[").split("."):
        if isinstance(value, dict):
            value = value.get(part)
        elif isinstance(value, list) and part.startswith("["):
            value = value[int(part[1:-1])]
        else:
            return None
    return value


def _given(key: str, values: dict[str, Any]) -> str:
    value = _value(key, values)
    text = inline(value)
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 1] + "…"
