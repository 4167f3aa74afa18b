"""Documents set aside: which, why, since when, until when. The ledger is quarantine.jsonl in the run folder.

What counts is the checkpoint's list joined with the ledger: a checkpoint may be older than the ledger, and somebody may
have removed the file; neither may bring a document back without a word.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from headway.account.events import Quarantined
from headway.data.aside import FOREVER, Key, Spans, is_aside, released, set_aside
from headway.data.global_batch import Position
from headway.data.stream import Stream
from headway.data.view import View
from headway.record.jsonl import JsonlWriter, Lines, PatientWriter, read_jsonl

_EXCERPT_TOKENS, _EXCERPT = 120, 240
RELEASED = "released"
"""The reason of a line that takes an earlier one back."""


@dataclass(frozen=True)
class Why:
    """Why one raw document is set aside; loss in nats per trained token, where one is known."""

    reason: str
    loss: float | None = None


@dataclass
class Quarantine:
    """The documents that a run does without. Every rank keeps the same list; rank 0 writes the ledger.

    decode: token ids to text, for the excerpt. aside: also of documents that came back.
    """

    path: Path
    view: View
    writes: bool
    decode: Callable[[list[int]], str] | None = None
    aside: dict[Key, Spans] = field(default_factory=dict)
    _writer: PatientWriter | None = None

    def flush(self) -> None:
        """Writes lines that a full disk did not take; costs nothing where none waits."""
        if self._writer is not None and self._writer.waiting:
            self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def stream(self, stream: Stream) -> Stream:
        """The same stream without these documents."""
        return stream.setting_aside(self.aside)

    def join(self, saved: Sequence[Sequence[int]], ledger: Iterable[Quarantined], epoch: int) -> list[str]:
        """Takes in a checkpoint's list (`state`) and the ledger as a run starts in `epoch`. Returns notes for the user.

        A release that no checkpoint knows yet counts from the next epoch on: the present plan has, or lacks, the
        document already.
        """
        notes: list[str] = []
        for store, document, since, until in saved:
            spans = self.aside.get((store, document), ())
            self.aside[store, document] = (*spans, (since, until if until >= 0 else FOREVER))
        known = dict(self.aside)
        told: set[Key] = set()
        dated: set[Key] = set()
        for line in ledger:
            key = self._key(line)
            if key is None:
                notes.append(f"quarantine: {line.source}:{line.line} belongs to data that this run does not have")
                continue
            spans = self.aside.get(key, ())
            if line.reason == RELEASED:
                # It bears the epoch of the line that it takes back, which may be an earlier one than what stands.
                if is_aside(spans) and line.epoch >= spans[-1][0]:
                    self.aside[key] = released(spans, epoch)
                    dated.add(key)
                    notes.append(f"quarantine: {line.source}:{line.line} is released from epoch {epoch + 1} on")
            else:
                told.add(key)
                # Else the checkpoint knows the line, and what came after it.
                if not spans or key in dated or line.epoch > spans[-1][1]:
                    self.aside[key] = set_aside(spans, line.epoch)
        missing = sorted(key for key, spans in known.items() if is_aside(spans) and key not in told)
        if missing:
            notes.append(
                f"quarantine: {len(missing)} documents that {self.path.name} does not list stay set aside, as the "
                "checkpoint says; `headway data quarantine release` brings them back"
            )
            for key in missing:
                self._write(*key, Why("set aside before; the ledger's line was lost"), 0, known[key][-1][0])
        if self.aside:
            notes.append(f"quarantine: {sum(map(is_aside, self.aside.values()))} documents are set aside")
        return notes

    def add(self, documents: Iterable[tuple[int, Why]], position: Position, step: int) -> None:
        """Sets raw documents aside from this epoch on."""
        for raw, why in documents:
            key = self.view.locate(raw)
            self.aside[key] = set_aside(self.aside.get(key, ()), position.epoch)
            self._write(*key, why, step, position.epoch, position.documents)

    def state(self) -> list[list[int]]:
        """For a checkpoint: (source, document, since, until or -1) of every span, sorted."""
        return [
            [*key, since, until if until < FOREVER else -1]
            for key, spans in sorted(self.aside.items())
            for since, until in spans
        ]

    def _key(self, line: Quarantined) -> Key | None:
        stores = [store.fingerprint for store in self.view.stores]
        if 0 <= line.number < len(stores) and stores[line.number] == line.store:
            return line.number, line.document
        return (stores.index(line.store), line.document) if line.store in stores else None

    def _write(self, store: int, document: int, why: Why, step: int, epoch: int, at: int = 0) -> None:
        if not self.writes:
            return
        source, line = self.view.stores[store].source(document)
        if self._writer is None:
            self._writer = PatientWriter(self.path)
        self._writer.append(
            Quarantined(
                store=self.view.stores[store].fingerprint,
                document=document,
                source=source,
                line=line,
                reason=why.reason,
                time=time.time(),
                step=step,
                loss=why.loss if why.loss is not None and np.isfinite(why.loss) else None,
                excerpt=self._excerpt(store, document),
                number=store,
                epoch=epoch,
                position=at,
            )
        )
        self._writer.sync()

    def _excerpt(self, store: int, document: int) -> str:
        try:
            known = self.view.stores[store]
            # Not past its end: a store refuses that. As far as it can be read, where it cannot be read whole.
            shown = min(_EXCERPT_TOKENS, int(known.lengths[document]))
            ids = np.asarray(known.tokens(document, 0, shown)).tolist()
            text = self.decode(ids) if self.decode is not None else " ".join(map(str, ids))
        except Exception as error:  # ids that no tokenizer knows are why it is here
            return f"(cannot be decoded: {type(error).__name__})"
        return text[:_EXCERPT]


def read_ledger(path: Path) -> list[Quarantined]:
    return read_lines(path).items


def read_lines(path: Path) -> Lines[Quarantined]:
    """The ledger, and which of its lines cannot be read."""
    return read_jsonl(path, Quarantined)


def append(path: Path, line: Quarantined) -> None:
    writer = JsonlWriter(path)
    writer.append(line)
    writer.sync()
    writer.close()


def numbered(lines: Iterable[Quarantined]) -> dict[int, Quarantined]:
    """The newest line of every document by its number, from 1 on: in the order in which they first came.

    A released one keeps its number, or a command repeated would name another document than the first time.
    """
    newest = {(line.store, line.document): line for line in lines}
    return dict(enumerate(newest.values(), 1))


def standing(lines: Iterable[Quarantined]) -> list[Quarantined]:
    """The lines that are in force: the newest of every document, without those that were released."""
    return [line for line in numbered(lines).values() if line.reason != RELEASED]


def release(path: Path, lines: Iterable[Quarantined]) -> None:
    """Takes lines back; a run heeds it when it starts the next time."""
    for line in lines:
        append(
            path,
            Quarantined(
                store=line.store,
                document=line.document,
                source=line.source,
                line=line.line,
                reason=RELEASED,
                time=time.time(),
                step=line.step,
                number=line.number,
                epoch=line.epoch,
            ),
        )
