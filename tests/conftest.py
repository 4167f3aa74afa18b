"""Fixtures every room shares."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from headway.guard.garbage import keep

# What the tests import stays: looking through it for garbage, again and again, is a tenth of the importing.
gc.disable()

# An example that takes long on a busy machine is no failure, and one that fails here must fail everywhere: the same
# examples each time. `--hypothesis-profile=search` looks for others.
settings.register_profile("search", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", settings.get_profile("search"), derandomize=True, database=None)
settings.load_profile("same")

# The library looks things up on a hub by default; a test must never wait for a network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Read when a library is loaded, which happens once, in the process that the tests' commands are forked from.
os.environ["OMP_NUM_THREADS"] = "1"

# Runs that tests kill leave memory checkpoints behind, as they should: all of them in one place, that goes at the end.
_MEMORY = Path(tempfile.mkdtemp(prefix="headway-tests-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
os.environ["HEADWAY_SHARED_MEMORY"] = str(_MEMORY)
# Neither peaks nor kernels that were measured here before may decide what a test sees.
_HOME = Path(tempfile.mkdtemp(prefix="headway-tests-home-"))
os.environ["HEADWAY_HOME"] = str(_HOME)
_MADE_BY = os.getpid()


def _tidy_up() -> None:
    if os.getpid() == _MADE_BY:  # a process that a test forks ends, too
        for folder in (_MEMORY, _HOME):
            shutil.rmtree(folder, ignore_errors=True)


atexit.register(_tidy_up)

ROOT = Path(__file__).resolve().parent.parent


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    try:
        return (yield)
    finally:
        keep()
        gc.enable()


# Files go to the workers whole and in this order: a long one begun last would leave the other worker idle.
_LONGEST_FIRST = ("train", "faults", "prove", "guard", "bench", "cli", "tune", "diagnose", "plan")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        room = item.path.parent.name
        return _LONGEST_FIRST.index(room) if room in _LONGEST_FIRST else len(_LONGEST_FIRST)

    items.sort(key=place)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    import torch

    # Two threads next to another test worker turned a 0.4 s step into 5 s on two cores.
    torch.set_num_threads(1)


_FROZEN = {"since the last look": 0}
_WORTH_A_LOOK = 300_000


@pytest.fixture(autouse=True, scope="module")
def _libraries_are_not_garbage() -> None:
    """Every run collects garbage when it starts, and would look through all that torch and transformers made."""
    _FROZEN["since the last look"] += len(gc.get_objects())  # those not frozen yet: counting the others takes long
    if _FROZEN["since the last look"] > _WORTH_A_LOOK:
        gc.unfreeze()  # the runs of earlier files left their models here
        gc.collect()
        _FROZEN["since the last look"] = 0
    keep()


@pytest.fixture
def shared() -> Path:
    """The folder of real data and cases beside the checkout; tests that need it skip where it is absent."""
    path = ROOT.parent / "shared"
    if not path.is_dir():
        pytest.skip("no shared/ folder beside the checkout")
    return path
