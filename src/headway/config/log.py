"""The run file's `log` and `hardware` sections."""

from __future__ import annotations

from pydantic import Field

from headway.config.base import Section


class LogConfig(Section):
    """What is shown while training. The run folder's records are complete whatever is set here."""

    every: int = Field(
        default=1,
        ge=1,
        description="Optimizer steps between updates of the live line; 1 shows every step.",
    )
    tensorboard: bool = Field(
        default=False,
        description="Also write TensorBoard files into the run folder (needs the sinks extra).",
    )
    profile_every: int | None = Field(
        default=1000,
        ge=1,
        description="Optimizer steps between periodic traces, each diagnosed in a process of its own; null for none. "
        "From 100 on, a run of one rank leaves out those that would make their cost more than 1 % of the wall clock.",
    )
    profile_steps: int = Field(
        default=3,
        ge=1,
        description="Steps that a periodic trace covers; 3 show whether steps are alike, in a file still small.",
    )
    quiet: bool = Field(
        default=False,
        description="Print no live line, only the start, warnings and the end.",
    )


class HardwareConfig(Section):
    """What the machine can do, where it cannot be looked up."""

    peak_flops: float | None = Field(
        default=None,
        gt=0,
        description="Peak of one device in FLOP/s at the run's precision, the base of MFU; null takes the "
        "published one, else the one measured on this machine, and no MFU where neither is known.",
    )
