"""What failed on any rank, told to all of them: one small all-reduce a step, words only when something did."""

from __future__ import annotations

import torch
import torch.distributed as dist

from headway.guard.process_group import control, control_group


def first_failure(mine: str | None) -> str | None:
    """The first failing rank's words, on every rank (None: nothing failed). Collective, on the control channel: the
    host alone knows of a failed allocation, so nobody waits for a device."""
    group = control_group()
    if group is None:
        return mine
    failed = torch.tensor([int(mine is not None)])
    dist.all_reduce(failed, group=group)
    if not int(failed):
        return None
    words = control().gather(mine)
    return "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(words) if text is not None)
