"""The names that incidents have in the ledger: what alerts may ask for, and reports group by."""

from __future__ import annotations

FAULTS = (
    "hang",
    "rank killed",
    "killed for memory",
    "rank failed",
    "host lost",
    "network partition",
    "run killed",
    "stopped",
    "collective mismatch",
    "silent corruption",
    "slow rank",
    "machine busy",
    "spike",
    "not finite",
    "bad document",
    "out of memory",
    "recompiles",
    "slow data",
    "data reader failed",
    "checkpoint failed",
    "checkpoint rejected",
    "checkpoint saver died",
)
"""Every fault that Headway writes down. A test holds them against the source."""
