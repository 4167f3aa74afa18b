"""The run file's `guard` section."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from headway.config.base import Section, marks


class GuardConfig(Section):
    """What is done about spikes of loss and gradient, and about documents that cause them (docs/spikes.md)."""

    spikes: Literal["act", "watch", "off"] = Field(
        default="act",
        description="What a spike leads to: `act` holds a bad step back on all ranks, finds out whose fault it was and "
        "goes on without it; "
        "`watch` only writes incidents; `off` skips what is not finite, and nothing else.",
    )
    quarantine: bool = Field(
        default=True,
        description="Set aside documents that cause a spike; with false the run stops and names them.",
    )
    most_share: float = Field(
        default=0.25,
        gt=0,
        le=1,
        description="Largest share of a batch's documents that may be set aside as the cause; more is a change of the "
        "data, which is accepted, not a few bad documents.",
    )
    most_batches: float = Field(
        default=2.0,
        gt=0,
        description="Documents that may be set aside within `within` steps, in batches of the size met; then the run "
        "stops, since the data as a whole is at fault.",
    )
    actions: list[Literal["lower_lr", "clip", "skip"]] = Field(
        default=["lower_lr", "skip"],
        description="After going back, for spikes that are not the data's fault: the first for the first, the next one "
        "when it comes again within `within` steps; when none is left the run stops with a report.",
        json_schema_extra=marks(allowed="a list of lower_lr, clip and skip"),
    )
    lower_lr: float = Field(
        default=0.5,
        gt=0,
        lt=1,
        description="Factor on the learning rate under the action lower_lr.",
    )
    for_steps: int = Field(
        default=100,
        ge=1,
        description="Steps that lower_lr and clip last.",
    )
    within: int = Field(
        default=500,
        ge=1,
        description="Steps within which another spike counts as the same one coming again.",
    )
