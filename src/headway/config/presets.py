"""Named sets of values that stand between the defaults and the run file."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

PRESETS: MappingProxyType[str, MappingProxyType[str, Any]] = MappingProxyType(
    {
        "none": MappingProxyType({}),
        # What fine-tuning scripts commonly run: the reference that speed is compared with.
        "naive": MappingProxyType(
            {
                "model.attention": "sdpa",
                "model.recompute": "full",
                "data.pack": "none",
                "data.rows": 8,
                "data.pad_to": "longest",
                "data.group_by_length": False,
                "train.compile": False,
            }
        ),
        # Only what leaves the training's meaning as it is and needs no measurement on the machine first.
        "fast": MappingProxyType(
            {
                "model.attention": "headway",
                "model.recompute": "auto",
                "data.pack": "best_fit",
                "data.prefetch": 2,
                "train.precision": "auto",
            }
        ),
    }
)
