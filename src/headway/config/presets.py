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
                "model.fuse": "none",
                "model.recompute": "full",
                "data.pack": "none",
                "data.rows": 8,
                "data.pad_to": "longest",
                "data.group_by_length": False,
                "train.compile": False,
            }
        ),
        # Only what leaves the training's meaning as it is; kernels are measured on the machine when the run starts.
        "fast": MappingProxyType(
            {
                "model.attention": "headway",
                "model.fuse": "auto",
                "model.recompute": "auto",
                "data.pack": "best_fit",
                "data.prefetch": 2,
                "train.precision": "auto",
                "train.compile": "auto",
            }
        ),
    }
)
