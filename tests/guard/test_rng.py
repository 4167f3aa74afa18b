"""Random state: put back exactly, for every generator."""

from __future__ import annotations

import io
import random

import numpy as np
import pytest
import torch

from headway.guard.rng import rng_state, set_rng_state


def draw() -> list[float]:
    return [
        float(torch.rand(())),
        float(torch.randn(())),
        float(np.random.rand()),
        float(np.random.randn()),  # the second of a pair comes from the generator's cache
        random.random(),
        random.gauss(0, 1),
    ]


def through_a_file(state: dict) -> dict:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def test_the_same_numbers_come_again() -> None:
    draw()  # odd position: the normal caches of numpy and Python are full
    state = through_a_file(rng_state())
    expected = [draw(), draw()]
    draw()
    assert set_rng_state(state) == []
    assert [draw(), draw()] == expected


@pytest.mark.parametrize("generator", ["torch", "numpy", "python"])
def test_catches_a_planted_generator_that_was_left_out(generator: str) -> None:
    draw()
    state = rng_state()
    expected = draw()
    draw()
    state[generator] = rng_state()[generator]  # as it is now, not as it was
    set_rng_state(state)
    assert draw() != expected


def test_state_of_devices_that_are_not_here_is_reported() -> None:
    state = rng_state(devices=[])
    state["cuda"] = [torch.get_rng_state()]
    assert set_rng_state(state, devices=[]) == ["random state of CUDA: saved for 1 devices, this rank uses 0"]
