"""The list of faults against the source that writes them down."""

from __future__ import annotations

import re
from pathlib import Path

import headway
from headway.account.faults import FAULTS

_TOLD = (
    r"(?:\bincident|\b_?tell|\brecord|\bVerdict)\(\s*\"([a-z][a-z ]+)\",",
    r"\bfault(?:, action)? = \"([a-z ]+)\"",
    r"return \"([a-z ]+)\", at\.step",
    r"^KILLED = \"([a-z ]+)\"",
    r"^SLOW = \"([a-z ]+)\"",
    r"^BUSY = \"([a-z ]+)\"",
)
_DEATHS = re.compile(r"^[A-Z]+(?:, [A-Z_]+)+ = (\".*\")$", re.MULTILINE)


def _told(source: str) -> set[str]:
    found = {name for pattern in _TOLD for name in re.findall(pattern, source, re.MULTILINE)}
    return found


def test_the_list_has_every_fault_that_is_written_down_and_no_other() -> None:
    root = Path(headway.__file__).parent
    found = set[str]()
    for room in ("guard", "train", "cli"):
        for file in (root / room).rglob("*.py"):
            found |= _told(file.read_text(encoding="utf-8"))
    deaths = (root / "guard" / "deaths.py").read_text(encoding="utf-8")
    found |= {name for line in _DEATHS.findall(deaths) for name in re.findall(r"\"([a-z ]+)\"", line)}
    assert found == set(FAULTS), (found - set(FAULTS), set(FAULTS) - found)


def test_a_planted_fault_is_found() -> None:
    assert _told('        self.incident(\n            "planted fault",\n            3)') == {"planted fault"}
