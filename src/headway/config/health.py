"""The run file's `health` section: how closely the ranks are watched while they train."""

from __future__ import annotations

from pydantic import Field

from headway.config.base import Section


class HealthConfig(Section):
    """Silent faults: replicas that drift apart, ranks that are slow."""

    digest_every: int | None = Field(
        default=100,
        ge=1,
        description="Optimizer steps between comparisons of the replicas' weights and optimizer state, bit for bit; "
        "they are compared before every checkpoint too, so that none is saved from a flipped bit. null for neither.",
    )
