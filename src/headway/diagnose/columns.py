"""The pieces of a trace joined into tables, so that a trace costs about fifty bytes an event."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.diagnose.facts import NONE
from headway.diagnose.piece import CommArgs, Index, Piece


@dataclass
class _Table:
    """Columns in pieces, one array per stretch; joined once at the end, each column's pieces freed as it is."""

    pieces: dict[str, list[NDArray[Any]]] = field(default_factory=dict)
    rows: int = 0

    def add(self, columns: dict[str, NDArray[Any]]) -> None:
        for name, column in columns.items():
            self.pieces.setdefault(name, []).append(column)
        self.rows += len(columns["start"])

    def joined(self, name: str, dtype: type) -> NDArray[Any]:
        pieces = self.pieces.pop(name, [])
        return np.concatenate(pieces).astype(dtype, copy=False) if pieces else np.empty(0, dtype)


class Columns:
    """The tables of one trace: `gpu` and `host` hold the columns of `Piece`, numbered over the whole trace.

    Numbers are given in the order of first appearance in the file, whatever process made the pieces.
    """

    def __init__(self) -> None:
        self.names, self.threads, self.shapes = Index(), Index(), Index()
        self.comm: dict[str, dict[int, CommArgs]] = {"gpu": {}, "host": {}}  # row as read → metadata
        self.thread_names: dict[tuple[str, str], str] = {}
        self.spans: list[tuple[int, int]] = []
        self.other_phases = 0
        self.gpu, self.host = _Table(), _Table()

    def add(self, piece: Piece) -> None:
        """The next stretch in file order."""
        for key, text in piece.thread_names.items():
            self.thread_names.setdefault(key, text)
        self.spans += piece.spans
        self.other_phases += piece.other_phases
        names = self.names.column(piece.names, len(piece.names))
        if piece.gpu:
            self.comm["gpu"] |= {row + self.gpu.rows: args for row, args in piece.gpu_comm.items()}
            self.gpu.add(piece.gpu | {"name": names[piece.gpu["name"]]})
        if piece.host:
            self.comm["host"] |= {row + self.host.rows: args for row, args in piece.host_comm.items()}
            threads = self.threads.column(piece.threads, len(piece.threads))
            shapes = np.append(self.shapes.column(piece.shapes, len(piece.shapes)), np.int32(NONE))  # [NONE] is NONE
            self.host.add(
                piece.host
                | {
                    "name": names[piece.host["name"]],
                    "thread": threads[piece.host["thread"]],
                    "shapes": shapes[piece.host["shapes"]],
                    "types": shapes[piece.host["types"]],
                }
            )
