"""A resume with other data or another configuration is refused with a readable difference."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Set
from types import MappingProxyType
from typing import Any

from headway.account.errors import Refused, UserError

_ABSENT = "(absent)"
_SHOWN = 60


def refuse_changed(
    saved: dict[str, Any],
    now: dict[str, Any],
    *,
    allow: set[str] | bool = False,
    known: Set[str] = frozenset(),
    meant: Mapping[str, str] = MappingProxyType({}),
) -> list[str]:
    """Compares two fingerprints (nested dicts of JSON values) and refuses differences that were not allowed.

    Returns the differences that were allowed, each as "key: saved → now", so that the caller can record them.
    `allow` is True (everything), or a set of dotted keys; a key allows everything below it. `known`: names in `allow`
    that are right although neither side has them (keys that have no effect here). `meant`: the file that
    a key speaks of whose name and value tell a user little.

    Raises Refused, one line listing every difference that is not allowed; UserError for a key in `allow` that neither
    side has, because a misspelt one would allow nothing without a word.
    """
    old, new = dict(_leaves(_as_json(saved))), dict(_leaves(_as_json(now)))
    if not isinstance(allow, bool):
        _check_names(allow - known, old.keys() | new.keys())
    changed = [
        key for key in sorted(old.keys() | new.keys()) if not _same(old.get(key, _ABSENT), new.get(key, _ABSENT))
    ]
    refused = [key for key in changed if not _allowed(key, allow)]
    if refused:
        shown = "; ".join(_line(key, old, new, meant) for key in refused)
        leave = f"'checkpoint.allow=[{', '.join(refused)}]'"
        raise Refused(
            f"this run is not the one in the checkpoint: {shown}. Undo it, allow it ({leave}), or give it another name"
        )
    return [_line(key, old, new, meant) for key in changed]


def _as_json(values: dict[str, Any]) -> dict[str, Any]:
    # The saved side went through JSON: a tuple came back as a list, which is no change.
    return json.loads(json.dumps(values))


def _leaves(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _same(old: Any, new: Any) -> bool:
    # Through text: True is not 1, 1 is not 1.0, and nan is the same value as nan.
    return json.dumps(old, sort_keys=True) == json.dumps(new, sort_keys=True)


def _allowed(key: str, allow: set[str] | bool) -> bool:
    if isinstance(allow, bool):
        return allow
    return any(key == one or key.startswith(f"{one}.") for one in allow)


def _check_names(allow: set[str], keys: set[str]) -> None:
    sections = {key[:end] for key in keys for end, sign in enumerate(key) if sign == "."}
    for name in sorted(allow - keys - sections):
        near = difflib.get_close_matches(name, sorted(keys | sections), n=1)
        meant = f"; did you mean {near[0]}?" if near else ""
        raise UserError(f"checkpoint.allow: {name} is no key that a resume compares{meant}")


def _line(key: str, old: dict[str, Any], new: dict[str, Any], meant: Mapping[str, str]) -> str:
    name = f"{key} ({meant[key]})" if key in meant else key
    return f"{name}: {_short(old.get(key, _ABSENT))} → {_short(new.get(key, _ABSENT))}"


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"
