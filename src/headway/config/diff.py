"""What differs between two configurations, and whether it makes another training of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from headway.config.dump import as_plain, inline
from headway.config.layers import is_within
from headway.config.run import RunConfig
from headway.config.schema import all_keys

ABSENT = "(absent)"


@dataclass(frozen=True)
class Change:
    """One key with different values. `identity`: the training is another one (a resume needs leave to change it)."""

    key: str
    before: Any
    after: Any
    identity: bool

    def __str__(self) -> str:
        return f"{self.key}: {_shown(self.before)} → {_shown(self.after)}"


def config_diff(before: RunConfig, after: RunConfig) -> list[Change]:
    """Every key whose value differs, in the order of the reference."""
    return list(_changes(as_plain(before), as_plain(after), ""))


def identity(config: RunConfig) -> dict[str, Any]:
    """The values that make the training what it is, as plain values by dotted key (for a checkpoint's manifest)."""
    return {key: value for key, value in flatten(as_plain(config)).items() if is_identity(key)}


def without_effect(before: Mapping[str, Any], after: Mapping[str, Any]) -> set[str]:
    """Identity keys that need not agree: in both trainings, nothing uses them, or they follow another key's value (and
    that one is compared)."""
    return _silent(before) & _silent(after)


def _silent(values: Mapping[str, Any]) -> set[str]:
    following = ((key, str(spec.marks.get("derived", ""))) for key, spec in all_keys().items() if key in values)
    found = {key for key, source in following if source in values and values[key] == values[source]}
    if values.get("optim.name") != "muon":
        found |= {"optim.muon_lr", "optim.momentum"}
    if values.get("schedule.kind") != "wsd":
        found.add("schedule.decay")
    if values.get("schedule.kind") == "constant":
        found.add("schedule.min_ratio")
    return found


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one mapping by dotted key; lists and empty mappings stay values."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            found |= flatten(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = value
    return found


@lru_cache(maxsize=4096)
def is_identity(key: str) -> bool:
    """Whether a key is marked as part of the identity, or lies inside a marked one."""
    return any(spec.identity and is_within(key, name) for name, spec in all_keys().items())


def _changes(before: Mapping[str, Any], after: Mapping[str, Any], prefix: str) -> Iterator[Change]:
    for name in [*before, *(name for name in after if name not in before)]:
        old, new, key = before.get(name, ABSENT), after.get(name, ABSENT), prefix + name
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from _changes(old, new, key + ".")
        elif type(old) is not type(new) or old != new:
            yield Change(key, old, new, is_identity(key))


def _shown(value: Any) -> str:
    return value if value is ABSENT else inline(value)
