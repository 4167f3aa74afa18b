"""MFU and HFU. FLOPs, seconds and devices always belong to the same steps; over 100 % is an error, never a result."""

from __future__ import annotations

import math
from dataclasses import dataclass

from headway.account.errors import UserError
from headway.account.events import Flops
from headway.account.flops import Convention, Trainable, describe
from headway.account.peaks import Peak


class ImpossibleMfu(UserError):
    """More FLOPs than the devices can do in that time: the FLOPs, the peak or the seconds are wrong."""


def mfu(useful_flops: float, seconds: float, peak_flops: float, devices: int = 1) -> float:
    """Model FLOPs utilisation (PaLM, arXiv 2204.02311, appendix B), 0 to 1: useful FLOPs over what was paid for.

    `useful_flops` are summed over all devices, `peak_flops` is FLOP/s of one. Raises ImpossibleMfu over 100 %,
    ValueError where seconds, peak or devices are not positive.
    """
    return _share("MFU", useful_flops, seconds, peak_flops, devices)


def hfu(useful_flops: float, recompute_flops: float, seconds: float, peak_flops: float, devices: int = 1) -> float:
    """Hardware FLOPs utilisation (Korthikanti et al., arXiv 2205.05198), 0 to 1: useful FLOPs and recompute."""
    return _share("HFU", useful_flops + recompute_flops, seconds, peak_flops, devices)


@dataclass(frozen=True)
class Utilisation:
    """What `utilisation` found, 0 to 1. Values are None where the peak is unknown or the result impossible.

    `padded` counts padding as if it were useful, as many trainers do; it is shown only to compare with them.
    """

    mfu: float | None
    hfu: float | None
    padded: float | None
    peak: Peak
    devices: int
    convention: str
    problem: str = ""

    def lines(self) -> list[str]:
        """The report: values, peak with its source, convention; one loud line first where something is impossible."""
        head = [f"ERROR: {self.problem}"] if self.problem else []
        padded = f"padding counted as useful {_percent(self.padded)}"
        values = f"MFU {_percent(self.mfu)} · HFU {_percent(self.hfu)} · {padded}"
        return [*head, values, self.peak.line(self.devices), self.convention]


def utilisation(
    flops: Flops,
    seconds: float,
    peak: Peak,
    devices: int = 1,
    convention: Convention = "causal",
    trainable: Trainable = "full",
) -> Utilisation:
    """MFU, HFU and the padded figure of some steps, for a run that must go on: an impossible value becomes `problem`.

    `flops` and `seconds` (wall clock) must be of the same steps, over all `devices`.
    """
    says = describe(convention, trainable)
    if peak.flops is None:
        return Utilisation(None, None, None, peak, devices, says)
    try:
        return Utilisation(
            mfu(flops.useful, seconds, peak.flops, devices),
            hfu(flops.useful, flops.recompute, seconds, peak.flops, devices),
            (flops.useful + flops.padding) / (seconds * peak.flops * devices),
            peak,
            devices,
            says,
        )
    except ImpossibleMfu as error:
        return Utilisation(None, None, None, peak, devices, says, str(error))


def _share(name: str, flops: float, seconds: float, peak_flops: float, devices: int) -> float:
    if not (seconds > 0 and peak_flops > 0 and devices > 0 and math.isfinite(seconds) and math.isfinite(peak_flops)):
        raise ValueError(f"{name} needs positive seconds, peak and devices, not {seconds}, {peak_flops}, {devices}")
    share = flops / (seconds * peak_flops * devices)
    if share > 1:
        raise ImpossibleMfu(
            f"{name} of {share:.1%} is impossible: {flops:.4g} FLOPs in {seconds:.4g} s on {devices} x "
            f"{peak_flops:.4g} FLOP/s; measure the peak again (headway bench peak) or check the FLOPs"
        )
    return share


def _percent(share: float | None) -> str:
    return "unknown" if share is None else f"{share:.1%}"
