"""Counters of a run, for this session and over all sessions. A resume adds; it never counts anything twice."""

from __future__ import annotations

from typing import Any

import msgspec

from headway.account.events import Flops, StepLine


class Totals(msgspec.Struct, kw_only=True):
    """What a run has done. Saved in every checkpoint; the time of steps that a stop lost is not in here.

    trained_tokens: of steps that updated the weights.
    """

    steps: int = 0
    skipped_steps: int = 0
    documents: int = 0
    slots: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    step_wall_ns: int = 0
    flops: Flops = Flops()

    def add(self, line: StepLine, documents: int) -> None:
        self.steps += 1
        self.skipped_steps += line.skipped is not None
        self.documents += documents
        self.slots += line.slots
        self.tokens += line.tokens
        self.trained_tokens += line.trained_tokens if line.skipped is None else 0
        self.step_wall_ns += line.wall_ns
        self.flops = self.flops + line.flops

    def copy(self) -> Totals:
        return msgspec.structs.replace(self)

    def to_dict(self) -> dict[str, Any]:
        return msgspec.to_builtins(self)

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> Totals:
        return msgspec.convert(value, cls)
