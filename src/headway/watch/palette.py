"""Names and colours of the account's categories: the same in the terminal and in the report, light and dark.

Compute is blue, what waits is warm, what became a parameter update is green. Nothing rests on colour alone: every
bar and every area has its name beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

from headway.account.tree import UNACCOUNTED


@dataclass(frozen=True)
class Paint:
    """label: what a person reads. light, dark: hex colours on a light and on a dark ground."""

    label: str
    light: str
    dark: str


STEP_PAINT = {
    "compute": Paint("compute", "#3b6fd4", "#6b9bf2"),
    "compute.forward": Paint("forward", "#3b6fd4", "#6b9bf2"),
    "compute.backward": Paint("backward", "#6f9ae6", "#4672c4"),
    "compute.recompute": Paint("recompute", "#8a63c9", "#a585e0"),
    "compute.loss": Paint("loss", "#1f8a9c", "#3fb3c6"),
    "compute.optimizer": Paint("optimizer", "#27406f", "#9cb4e0"),
    "comm": Paint("exposed communication", "#b4539f", "#d07cbd"),
    "bubble": Paint("pipeline bubble", "#c9547a", "#e07c9c"),
    "straggler": Paint("waiting for ranks", "#a8402f", "#d96b58"),
    "copy": Paint("copies", "#6b8e4e", "#93b874"),
    "data": Paint("waiting for data", "#e59a2f", "#f0b254"),
    "host": Paint("host", "#d2622f", "#ec8757"),
    "host.launch": Paint("launching kernels", "#d2622f", "#ec8757"),
    "host.sync": Paint("blocking calls", "#d2622f", "#ec8757"),
    "host.gc": Paint("garbage collection", "#d2622f", "#ec8757"),
    "host.logging": Paint("logging", "#d2622f", "#ec8757"),
    "host.other": Paint("loop's own Python", "#d2622f", "#ec8757"),
    "comm.tp": Paint("tensor parallel", "#b4539f", "#d07cbd"),
    "comm.dp": Paint("data parallel", "#b4539f", "#d07cbd"),
    "comm.pp": Paint("pipeline sends", "#b4539f", "#d07cbd"),
    "comm.cp": Paint("context parallel", "#b4539f", "#d07cbd"),
    "comm.ep": Paint("expert parallel", "#b4539f", "#d07cbd"),
    "checkpoint": Paint("checkpoint", "#8b7355", "#b89b78"),
    UNACCOUNTED: Paint("unaccounted", "#8a9099", "#8d949e"),
}

RUN_PAINT = {
    "productive": Paint("productive steps", "#2e9e62", "#4cc585"),
    "rework": Paint("rework", "#c0392b", "#e5695c"),
    "startup": Paint("start-up", "#7d8fb3", "#8fa3cb"),
    "compile": Paint("compilation, warm-up", "#8a63c9", "#a585e0"),
    "checkpoint_stall": Paint("checkpoint stall", "#8b7355", "#b89b78"),
    "evaluation": Paint("evaluation", "#1f8a9c", "#3fb3c6"),
    "downtime": Paint("downtime", "#a8402f", "#d96b58"),
    UNACCOUNTED: Paint("unaccounted", "#8a9099", "#8d949e"),
}

_WATERFALL_ONLY = {
    "top": Paint("purchased", "#3d4654", "#c3cad4"),
    "useful": Paint("useful", "#2e9e62", "#4cc585"),
    "compute.below_peak": Paint("kernels below peak", "#6f9ae6", "#5f8bdc"),
    "flops.recompute": Paint("recompute", "#8a63c9", "#a585e0"),
    "flops.padding": Paint("padding", "#cfae1f", "#e3c84a"),
}

# What the stacked areas draw: fine enough to act on, few enough to tell apart.
STACK = (
    "compute.forward",
    "compute.loss",
    "compute.backward",
    "compute.recompute",
    "compute.optimizer",
    "compute",
    "comm",
    "bubble",
    "straggler",
    "copy",
    "data",
    "host",
    "checkpoint",
    UNACCOUNTED,
)


def waterfall_paint(path: str) -> Paint:
    """The colour of a waterfall row, by its path."""
    if path in _WATERFALL_ONLY:
        return _WATERFALL_ONLY[path]
    if path.startswith("step."):
        return STEP_PAINT[path.removeprefix("step.")]
    return RUN_PAINT.get(path) or STEP_PAINT[path]
