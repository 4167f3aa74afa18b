"""Triton's interpreter, made fit for attention: in Triton 3.6 it has two faults that no kernel of ours can go round.

Loops up to a number that a kernel read fail under numpy 2.4, and products of bfloat16 multiply the bit patterns.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from triton import language as tl
from triton.runtime import interpreter

_patch = interpreter._patch_lang_tensor
_dot = interpreter.InterpreterBuilder.create_dot


def _with_bounds_of_loops(tensor: Any, scope: Any) -> None:
    _patch(tensor, scope)
    # Scalars are arrays of one element there, and numpy turns those into no number any more.
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def _of_bfloat16(self: Any, a: Any, b: Any, *rest: Any) -> Any:
    return _dot(self, _widened(a), _widened(b), *rest)


def _widened(x: Any) -> Any:
    if x.dtype.scalar != tl.bfloat16:
        return x
    wide = (x.data.astype(np.uint32) << 16).view(np.float32)
    return interpreter.TensorHandle(wide, tl.float32)


def mend() -> None:
    """Repeating it changes nothing."""
    interpreter._patch_lang_tensor = _with_bounds_of_loops
    interpreter.InterpreterBuilder.create_dot = _of_bfloat16
