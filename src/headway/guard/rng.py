"""The random state of one rank: torch's CPU and CUDA generators, numpy's global one, Python's."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch


def rng_state(devices: Iterable[int] | None = None) -> dict[str, Any]:
    """The state of every global generator, as tensors and plain values (readable with `torch.load(weights_only=True)`).

    `devices`: the CUDA devices that this rank uses; None means the current one if CUDA is in use, else none.
    Asking for every visible device would create a context (about 0.5 GB) on the other ranks' devices.
    """
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": [torch.cuda.get_rng_state(index) for index in _cuda_devices(devices)],
        "numpy": {
            "name": str(name),
            "keys": torch.from_numpy(np.asarray(keys).astype(np.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
    }


def set_rng_state(state: dict[str, Any], devices: Iterable[int] | None = None) -> list[str]:
    """Puts back what `rng_state` returned, exactly; CUDA states go to `devices` (as in `rng_state`) in order.

    Returns what could not be put back, in words (more CUDA states than devices, or fewer); empty is normal.
    """
    lost = []
    torch.set_rng_state(state["torch"])
    here = _cuda_devices(devices)
    # By position, not by index: the same rank may use another card after a restart.
    for index, value in zip(here, state["cuda"], strict=False):
        torch.cuda.set_rng_state(value, index)
    if len(here) != len(state["cuda"]):
        lost.append(f"random state of CUDA: saved for {len(state['cuda'])} devices, this rank uses {len(here)}")
    numpy_state = state["numpy"]
    keys = numpy_state["keys"].numpy().astype(np.uint32)
    np.random.set_state(
        (numpy_state["name"], keys, numpy_state["position"], numpy_state["has_gauss"], numpy_state["cached"])
    )
    python_state = state["python"]
    random.setstate((python_state["version"], tuple(python_state["words"].tolist()), python_state["gauss"]))
    return lost


def _cuda_devices(devices: Iterable[int] | None) -> list[int]:
    if devices is not None:
        return list(devices)
    return [torch.cuda.current_device()] if torch.cuda.is_available() and torch.cuda.is_initialized() else []
