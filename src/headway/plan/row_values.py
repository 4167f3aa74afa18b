"""Cells of a row as people write them: `1,024`, `8k`, `~380`, `80 GB`, `yes`. Unreadable ones count as blank."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

Row = Mapping[str, str]
_NUMBER = re.compile(
    r"^[~≈≥>≤<\s]*(\d[\d,_ ]*(?:\.\d+)?(?:e[+-]?\d+)?)\s*([kmbt]?)(?:i?b|gb|gib|s|tok.*|tflop.*|seq.*)?\s*$"
)
_SCALE = {"": 1.0, "k": 1024.0, "m": 1e6, "b": 1e9, "t": 1e12}


def number(row: Row, key: str) -> float | None:
    """A positive finite number, or None. `k` is 1,024, as in sequence lengths; m, b and t are decimal."""
    text = row.get(key, "").strip().casefold()
    try:
        value = float(text)
    except ValueError:
        match = _NUMBER.match(text)
        if not match:
            return None
        value = float(re.sub(r"[,_ ]", "", match[1])) * _SCALE[match[2]]
    return value if math.isfinite(value) and value > 0 else None


def whole(row: Row, key: str) -> int | None:
    """The nearest whole number of at least 1, or None."""
    value = number(row, key)
    return round(value) if value is not None and 0.5 <= value < 1e18 else None


def yes(row: Row, key: str) -> bool:
    """Whether a cell says yes in words."""
    return row.get(key, "").strip().casefold() in ("yes", "true", "on", "full", "full_shard")
