"""Triton's interpreter for this process, which must be asked for before anything imports Triton."""

from __future__ import annotations

import os
import sys

import pytest


def ask_for_the_interpreter() -> None:
    """Skips the module where another test's imports came first: Triton's own functions are then compiled ones."""
    if os.environ.get("TRITON_INTERPRET") != "1" and "triton" in sys.modules:
        pytest.skip(
            "Triton was imported without its interpreter; `make test-kernels` runs this", allow_module_level=True
        )
    os.environ["TRITON_INTERPRET"] = "1"  # read where kernels are decorated, Triton's own among them
