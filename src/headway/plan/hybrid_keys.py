"""What the hybrids' configs have in common: keys that must be there, and whole numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headway.account.errors import UserError


def refuse_missing(family: str, config: Mapping[str, Any], needed: tuple[str, ...]) -> None:
    """Raises UserError naming the first key that is missing, null or 0."""
    for key in needed:
        if not config.get(key):
            raise UserError(f"config.json ({family}): key {key!r} is missing; the size needs it")


def whole(family: str, config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A whole number of at least 1. Raises UserError naming the key."""
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"config.json ({family}): key {key!r} is {value!r}; give a whole number of at least 1")
    return value
