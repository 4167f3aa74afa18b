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
    slow_rank: float | None = Field(
        default=0.15,
        gt=0,
        description="How much slower than the others a rank must be to be named in the ledger, as a share of its own "
        "work in a step; a host is blamed only for all of it, 16 noisy steps show it from 0.76 of it on; null to look "
        "for none.",
    )
