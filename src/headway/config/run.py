"""The whole run file as one value: every section together."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from headway.config.alerts import AlertsConfig
from headway.config.base import Section, marks
from headway.config.between import check_between_sections
from headway.config.checkpoint import CheckpointConfig
from headway.config.data import DataConfig
from headway.config.evaluate import EvalConfig
from headway.config.guard import GuardConfig
from headway.config.health import HealthConfig
from headway.config.log import HardwareConfig, LogConfig
from headway.config.model import ModelConfig
from headway.config.optim import OptimConfig, ScheduleConfig
from headway.config.parallel import ParallelConfig
from headway.config.train import TrainConfig

FORMAT_VERSION = 1


class RunConfig(Section):
    """A training run, completely described."""

    version: int = Field(
        default=FORMAT_VERSION,
        description="Format of the run file; a file without it is of the current format.",
        json_schema_extra=marks(allowed=str(FORMAT_VERSION)),
    )
    name: str = Field(
        default="run",
        description="Name of the run and of its folder.",
        json_schema_extra=marks(allowed="a folder name", derived="the run file's name without its ending"),
    )
    out: Path = Field(
        default=Path("runs"),
        description="Folder that run folders are made in; the default is relative to the current folder.",
        json_schema_extra=marks(path="path"),
    )
    seed: int = Field(
        default=0,
        ge=0,
        lt=2**63,
        description="Seed of everything random: data order, dropout, new weights.",
        json_schema_extra=marks(identity=True),
    )
    preset: Literal["none", "naive", "fast"] = Field(
        default="none",
        description="Named set of values below the run file's own: `naive` is what trainers commonly run, "
        "`fast` is what Headway recommends; none because a preset may change between versions.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto",
        description="Where to compute; `auto` is CUDA when a GPU is visible, else the CPU.",
    )
    deterministic: bool = Field(
        default=False,
        description="Use only kernels that give the same bits every time; off because some are slower.",
    )
    model: ModelConfig = Field(
        description="The model that is trained.",
    )
    data: DataConfig = Field(
        description="The documents it is trained on.",
    )
    train: TrainConfig = Field(
        description="How long, how much per step, in which precision.",
    )
    optim: OptimConfig = Field(
        description="How weights are updated.",
    )
    schedule: ScheduleConfig = Field(
        default_factory=ScheduleConfig,
        description="The learning rate over the training.",
    )
    parallel: ParallelConfig = Field(
        default_factory=ParallelConfig,
        description="The ranks and what each holds.",
    )
    checkpoint: CheckpointConfig = Field(
        default_factory=CheckpointConfig,
        description="Saving and resuming the training state.",
    )
    guard: GuardConfig = Field(
        default_factory=GuardConfig,
        description="Spikes, and documents that cause them.",
    )
    eval: EvalConfig = Field(
        default_factory=EvalConfig,
        description="Loss on held-out documents.",
    )
    health: HealthConfig = Field(
        default_factory=HealthConfig,
        description="How closely the ranks are watched.",
    )
    alerts: AlertsConfig = Field(
        default_factory=AlertsConfig,
        description="Who is told of incidents.",
    )
    log: LogConfig = Field(
        default_factory=LogConfig,
        description="What is shown while training.",
    )
    hardware: HardwareConfig = Field(
        default_factory=HardwareConfig,
        description="What the machine can do, where it cannot be looked up.",
    )

    @field_validator("version", mode="after")
    @classmethod
    def _known_version(cls, value: int) -> int:
        if value != FORMAT_VERSION:
            raise ValueError(f"this Headway reads format {FORMAT_VERSION}; use the version that wrote this file")
        return value

    @field_validator("name", mode="after")
    @classmethod
    def _folder_name(cls, value: str) -> str:
        if not value.strip() or value in {".", ".."} or any(sign in value for sign in "/\\\0\n"):
            raise ValueError("not a folder name (it must not be empty, . or .., nor contain a slash)")
        return value

    @model_validator(mode="before")
    @classmethod
    def _sections_with_required_keys_exist(cls, value: Any) -> Any:
        # Without this a missing section is reported as such, instead of by the keys that must be written.
        return {"model": {}, "data": {}, "train": {}, "optim": {}} | value if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _sections_agree(self) -> RunConfig:
        check_between_sections(self)
        return self

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.out / self.name

    @property
    def shards(self) -> Path:
        """The folder that keeps prepared documents."""
        return self.data.shards if self.data.shards is not None else self.out / "shards"

    def sequences_per_step(self, data_parallel: int) -> int:
        """Packs (rows when `data.pack` is none) of one global batch over `data_parallel` ranks."""
        if self.train.global_batch_sequences is not None:
            return self.train.global_batch_sequences
        if self.train.global_batch_tokens is not None:
            return self.train.global_batch_tokens // self.slots_per_sequence
        return data_parallel * (1 if self.data.packed else self.data.rows)

    @property
    def slots_per_sequence(self) -> int:
        """Slots of a pack; without packs, of a row of full length."""
        return self.data.slots if self.data.packed else self.data.seq_len
