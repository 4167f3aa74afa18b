"""Where values come from, and how one source of values is laid over another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from headway.config.presets import PRESETS


@dataclass(frozen=True)
class Origin:
    """Where a value was written. `where` is printed: `run.yaml:12`, `preset fast`, `override data.seq_len=4096`."""

    kind: Literal["default", "preset", "file", "override"]
    where: str

    def __str__(self) -> str:
        return self.where


DEFAULT = Origin("default", "default")


@dataclass(frozen=True)
class Assignment:
    """One value for one dotted key. `origins` holds the key's own origin and those of everything inside the value."""

    key: str
    value: Any
    origins: Mapping[str, Origin]
    opens: bool = False
    """True where the key is a section that is only opened: what is in it already stays."""


@dataclass
class Provenance:
    """The origin of every value that is not a default."""

    origins: dict[str, Origin] = field(default_factory=dict)

    def of(self, key: str) -> Origin:
        """The origin of exactly this key."""
        return self.origins.get(key, DEFAULT)

    def nearest(self, key: str) -> Origin | None:
        """The origin of this key, else of the newest value inside it, else of the innermost thing around it."""
        inside = [origin for known, origin in self.origins.items() if is_within(known, key)]
        if key not in self.origins and inside:
            return inside[-1]
        while key:
            if key in self.origins:
                return self.origins[key]
            key = key[: max(key.rfind("."), key.rfind("["), 0)]
        return None

    def forget(self, key: str) -> None:
        for known in [known for known in self.origins if is_within(known, key)]:
            del self.origins[known]


# Of each group one key counts. Who sets one in a run file can choose another on the command line without unsetting it.
EXCLUSIVE = (
    ("model.path", "model.config"),
    ("train.steps", "train.epochs", "train.tokens"),
    ("train.global_batch_tokens", "train.global_batch_sequences"),
    ("eval.data", "eval.holdout"),
)


def is_within(key: str, outer: str) -> bool:
    """Whether a dotted key is `outer` or lies inside it."""
    return key == outer or key.startswith((outer + ".", outer + "["))


def preset_layer(name: str) -> list[Assignment]:
    """The values of a preset; none for an unknown name (validation reports it)."""
    origin = Origin("preset", f"preset {name}")
    return [Assignment(key, value, {key: origin}) for key, value in PRESETS.get(name, {}).items()]


def last_value(layers: Iterable[Sequence[Assignment]], key: str) -> Any:
    """The value that wins for a key, None where nobody sets it."""
    values = [assignment.value for layer in layers for assignment in layer if assignment.key == key]
    return values[-1] if values else None


def combine(layers: Iterable[Sequence[Assignment]]) -> tuple[dict[str, Any], Provenance]:
    """Lays each layer over those before it: nested raw values, and where each of them was written."""
    values: dict[str, Any] = {}
    provenance = Provenance()
    for layer in layers:
        _clear_the_alternatives(values, provenance, layer)
        for assignment in layer:
            if not assignment.opens:
                provenance.forget(assignment.key)
            _assign(values, assignment)
            provenance.origins.update(assignment.origins)
    return values, provenance


def _clear_the_alternatives(values: dict[str, Any], provenance: Provenance, layer: Sequence[Assignment]) -> None:
    for group in EXCLUSIVE:
        chosen = [
            key for key in group if any(is_within(a.key, key) and a.value is not None and a.value != 0 for a in layer)
        ]
        for other in [key for key in group if chosen and key not in chosen]:
            section, _, name = other.partition(".")
            if isinstance(values.get(section), dict) and name in values[section]:
                del values[section][name]
                provenance.forget(other)


def _assign(values: dict[str, Any], assignment: Assignment) -> None:
    *outer, last = assignment.key.split(".")
    inside = values
    for name in outer:
        if not isinstance(inside.get(name), dict):
            inside[name] = {}
        inside = inside[name]
    if assignment.opens:
        if not isinstance(inside.get(last), dict):
            inside[last] = {}
    else:
        inside[last] = assignment.value
