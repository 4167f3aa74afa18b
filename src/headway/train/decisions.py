"""What a run decided by measuring (kernels, compiling, float8): a resume does as the session that it goes on from did.

Other kernels add up in another order, so a decision made anew would part the curves. A checkpoint carries those that
its steps were computed by: whatever became of environment.json, or of what the machine remembers, they come with it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from headway.account.errors import UserError
from headway.guard.finding import Found
from headway.guard.process_group import control

Known = Mapping[str, Any]
"""Decisions by name, each a record with the `device` it was made on."""

KEY = "decisions"
"""Where a checkpoint's `meta` has them."""
FIRST = "as in this run's first session: "
T = TypeVar("T")


def known_decisions(environment: Path, found: Found | None, say: Callable[[str], None]) -> Known:
    """Those of the checkpoint that the run goes on from. Where there is none, or it is of before they were kept there,
    those in environment.json. Collective."""
    if found is not None and (kept := found.store.read_meta(found.ref).get(KEY)) is not None:
        return dict(kept)
    written = control().on_main(lambda: written_down(environment), UserError, ())
    if written is None and found is not None:
        say(
            f"WARNING: {environment} cannot be read, and {found.ref.name} is of a release that kept no kernels in it: "
            "what is chosen by measuring is chosen anew, and may round otherwise"
        )
    return written or {}


def written_down(environment: Path) -> dict[str, Any] | None:
    """What environment.json says; None where it is missing or damaged."""
    try:
        found = json.loads(environment.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def decided(known: Known, key: str, device: str, kind: type[T]) -> T | None:
    """The decision that stands under `key`, its `why` saying where it is from; None where there is none, or it was made
    on another device."""
    try:
        found = dict(known[key])
        if found.pop("device") != device:
            return None
        return kind(**{**found, "why": f"{FIRST}{found['why'].removeprefix(FIRST)}"})
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
