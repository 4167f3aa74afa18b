"""What a run's first session decided by measurement, from its environment.json: a resume does as it did."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

FIRST = "as in this run's first session: "
T = TypeVar("T")


def decided(environment: Path, key: str, device: str, kind: type[T]) -> T | None:
    """The decision that stands under `key`, its `why` saying where it is from; None where there is none, or it was made
    on another device."""
    try:
        found: dict[str, Any] = json.loads(environment.read_text(encoding="utf-8"))[key]
        if found.pop("device") != device:
            return None
        return kind(**{**found, "why": f"{FIRST}{found['why'].removeprefix(FIRST)}"})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
