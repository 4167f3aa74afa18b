"""The collector's pen: a rank that is forked keeps what it shares, and its parent's pen is as it was."""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Sequence

import pytest

from headway.guard import garbage
from headway.guard.processes import Start


def _starts_a_rank(kept: bool) -> None:
    """Exits with 0 where the rank has a pen that is kept, and this process the one that it had before."""
    gc.unfreeze()
    garbage._kept = False
    if kept:
        gc.freeze()  # somebody who does not say so

    def rank(argv: Sequence[str]) -> int:
        return 0 if garbage._kept and gc.get_freeze_count() > 1000 else 1

    code = Start([], entry=rank).rank(dict(os.environ), None).wait()
    os._exit(code or (garbage.is_kept() != kept) * 2)


@pytest.mark.parametrize("kept", [True, False])
def test_a_forked_rank_keeps_what_it_shares_and_its_parents_pen_is_left_alone(kept: bool) -> None:
    process = multiprocessing.get_context("fork").Process(target=_starts_a_rank, args=(kept,))
    process.start()
    process.join(60)
    process.kill()
    assert process.exitcode == 0
