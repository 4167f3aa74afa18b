"""Follows the ranks' own files while they grow: every step's account of every rank, without disturbing them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
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


class AllLines:
    """The new lines of all ranks' files. apart: a thread that comes and goes reads them, because a shared file system
    may not answer for seconds, in which the machine that leads would look lost to the others. A process with a thread
    forks nothing: `rest` before that."""

    def __init__(self, files: Sequence[Path], apart: bool = False) -> None:
        self._files, self._apart = files, apart
        self._readers: list[RankLines] = []
        self._found: list[tuple[int, RankLine]] = []
        self._thread: threading.Thread | None = None
        self._ask()

    def new(self) -> list[tuple[int, RankLine]]:
        """(rank, line), with `apart` what the last call has asked for; nothing while that is not answered."""
        if self._thread is not None and self._thread.is_alive():
            return []
        if not self._apart:
            self._read()
        found, self._found = self._found, []
        if self._apart:
            self._ask()
        return found

    def rest(self, timeout_s: float = 0.5) -> None:
        """Waits for what is being read."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _ask(self) -> None:
        if not self._apart:
            self._read()
            return
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        self._readers = self._readers or [RankLines(path) for path in self._files]
        self._found += [(rank, line) for rank, reader in enumerate(self._readers) for line in reader.new()]
