"""The profiler's own log lines, kept out of what people read."""

from __future__ import annotations

import os

import torch

_NOTHING = "6"  # above the level of its begin and end lines, which it prints for every recording


def quiet_profiler() -> None:
    """Before the first recording of a process without a GPU: Kineto then prints nothing (`USDT:… profiler_start`). On a
    GPU its warnings may say why kernels are missing, and stay. A level that the user has set stays too."""
    if not torch.cuda.is_available():
        os.environ.setdefault("KINETO_LOG_LEVEL", _NOTHING)
