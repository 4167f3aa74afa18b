"""The run file's `parallel` section, and the arithmetic of its dimensions."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator, model_validator

from headway.account.errors import UserError
from headway.config.base import Section, fault, marks

_LATER = {"tp": "tensor", "pp": "pipeline", "cp": "context", "ep": "expert"}


class ParallelConfig(Section):
    """How many ranks train together, and what each of them holds."""

    ranks: int | None = Field(
        default=None,
        ge=1,
        description="Processes to start on this machine; null is replicate × fsdp where those are given, "
        "else one per visible GPU (one on CPU). Under torchrun its world size counts.",
    )
    replicate: int = Field(
        default=1,
        ge=1,
        description="Copies of the model that each see other data (DDP; with fsdp above 1, HSDP's outer dimension).",
    )
    fsdp: int | None = Field(
        default=None,
        ge=1,
        description="Ranks that one copy of the model is sharded over (FSDP2); null takes all ranks that "
        "replicate leaves.",
    )
    reshard_after_forward: bool = Field(
        default=True,
        description="Free gathered weights after forward and gather them again in backward (less memory, "
        "more communication).",
    )
    tp: int = Field(
        default=1,
        ge=1,
        description="Tensor-parallel ranks; only 1 in this version.",
        json_schema_extra=marks(allowed="1"),
    )
    pp: int = Field(
        default=1,
        ge=1,
        description="Pipeline stages; only 1 in this version.",
        json_schema_extra=marks(allowed="1"),
    )
    cp: int = Field(
        default=1,
        ge=1,
        description="Context-parallel ranks; only 1 in this version.",
        json_schema_extra=marks(allowed="1"),
    )
    ep: int = Field(
        default=1,
        ge=1,
        description="Expert-parallel ranks; only 1 in this version.",
        json_schema_extra=marks(allowed="1"),
    )

    @field_validator(*_LATER, mode="after")
    @classmethod
    def _not_yet(cls, value: int, info: Any) -> int:
        if value > 1:
            name = _LATER[info.field_name]
            raise ValueError(
                f"{name} parallelism is not yet supported; only 1 is allowed, use parallel.fsdp or parallel.replicate"
            )
        return value

    @model_validator(mode="after")
    def _dimensions_fill_the_ranks(self) -> ParallelConfig:
        if self.ranks is not None:
            problem = self._problem(self.ranks, f"parallel.ranks is {self.ranks}")
            if problem:
                raise fault("parallel.ranks", problem)
        return self

    def _problem(self, world: int, given: str) -> str | None:
        if self.fsdp is None:
            if world % self.replicate:
                return f"{given}, which parallel.replicate = {self.replicate} does not divide"
        elif self.replicate * self.fsdp != world:
            product = self.replicate * self.fsdp
            return (
                f"{given}, but parallel.replicate × parallel.fsdp = {self.replicate} × {self.fsdp} = {product}; "
                f"they must be equal (parallel.fsdp=null fills what is left)"
            )
        return None

    def fits(self, world: int) -> bool:
        """Whether `world` ranks can fill the dimensions."""
        return self._problem(world, "") is None

    def local_ranks(self, gpus: int) -> int:
        """Ranks to start on a machine with `gpus` visible GPUs (0 when training on CPU)."""
        if self.ranks is not None:
            return self.ranks
        if self.fsdp is not None:
            return self.replicate * self.fsdp
        return max(gpus - gpus % self.replicate, self.replicate)

    def dims(self, world: int) -> tuple[int, int]:
        """(replicate, fsdp) for a world of `world` ranks. Raises UserError when they do not fill it."""
        problem = self._problem(world, f"the world has {world} ranks")
        if problem:
            raise UserError(f"parallel: {problem}")
        return self.replicate, self.fsdp if self.fsdp is not None else world // self.replicate
