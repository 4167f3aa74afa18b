"""The device in use, by its own name: nothing is guessed from another machine's."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headway.account.errors import UserError
from headway.account.measured_peaks import cpu_name


@dataclass(frozen=True)
class Device:
    """One rank's device. name is what the device reports of itself; threads is 0 on CUDA."""

    type: str
    index: int
    name: str
    threads: int = 0

    @property
    def torch(self) -> torch.device:
        return torch.device(self.type, self.index) if self.type == "cuda" else torch.device("cpu")


def choose_device(wanted: str, local_rank: int = 0) -> Device:
    """The device for a local rank; `wanted` is ``auto``, ``cpu`` or ``cuda``. Makes a CUDA device current.

    Raises:
        UserError: CUDA is asked for and there is none, or there are fewer GPUs than local ranks.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cpu" or (wanted == "auto" and not gpus):
        return Device("cpu", 0, cpu_name(), torch.get_num_threads())
    if not gpus:
        raise UserError("device: cuda, but torch sees no GPU; set device=cpu or install a CUDA build of torch")
    if local_rank >= gpus:
        raise UserError(f"local rank {local_rank} has no GPU: {gpus} are visible; lower parallel.ranks")
    torch.cuda.set_device(local_rank)
    return Device("cuda", local_rank, torch.cuda.get_device_name(local_rank))
