"""Compares a value with a committed golden file; set HEADWAY_UPDATE_GOLDEN=1 to rewrite it on purpose."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).parent / "golden"


def assert_golden(name: str, value: Any) -> None:
    path = GOLDEN / name
    text = json.dumps(value, indent=1, sort_keys=False, ensure_ascii=False) + "\n"
    # A test that plants a change must never write it down.
    planted = "planted" in os.environ.get("PYTEST_CURRENT_TEST", "")
    if os.environ.get("HEADWAY_UPDATE_GOLDEN") and not planted:
        path.write_text(text)
    assert path.is_file(), f"{path} is missing; create it with HEADWAY_UPDATE_GOLDEN=1 and review it"
    assert text == path.read_text(), f"{name} changed: a frozen schema needs a migration, not an edit"
