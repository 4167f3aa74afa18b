"""Follows the ranks' own files while they grow: every step's account of every rank, without disturbing them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from headway.account.events import RankLine

_DECODER = msgspec.json.Decoder(RankLine)


class RankLines:
    """Reads what was appended to one rank's file since the last call; starts at the file's end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = path.stat().st_size if path.is_file() else 0

    def new(self) -> Iterator[RankLine]:
        """Whole lines only; a damaged one is passed over."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._at)
                content = file.read()
        except OSError:
            return
        whole = content[: content.rfind(b"\n") + 1]
        self._at += len(whole)
        for raw in whole.splitlines():
            try:
                yield _DECODER.decode(raw)
            except msgspec.DecodeError:
                continue
