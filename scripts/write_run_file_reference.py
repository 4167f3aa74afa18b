"""Writes docs/run-file.md from the typed configuration. `--check` only says whether it is up to date."""

from __future__ import annotations

import sys
from pathlib import Path

from headway.config.reference import reference_markdown

TARGET = Path(__file__).resolve().parent.parent / "docs" / "run-file.md"


def main(arguments: list[str]) -> int:
    text = reference_markdown()
    if "--check" in arguments:
        if TARGET.is_file() and TARGET.read_text(encoding="utf-8") == text:
            return 0
        print(f"{TARGET.name} is out of date: run python scripts/write_run_file_reference.py", file=sys.stderr)
        return 1
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
