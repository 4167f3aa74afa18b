"""The run file's `data` section."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from headway.config.base import Section, fault, marks

SourceFormat = Literal["auto", "messages", "sharegpt", "alpaca", "prompt_completion", "text"]


class Source(Section):
    """One place that documents come from. A plain string stands for its `path`."""

    shorthand: ClassVar[str | None] = "path"

    path: str = Field(
        min_length=1,
        description="File, folder or glob of documents (.json, .jsonl, .gz, .zst, Parquet, Arrow, .txt), a "
        "prepared shards folder, or the prefix of a Megatron .bin/.idx pair.",
        json_schema_extra=marks(identity=True, path="path", allowed="a file, folder or glob"),
    )
    weight: float = Field(
        default=1.0,
        gt=0,
        le=1000,
        description="How often each document of this source is seen per epoch: 2 is twice, 0.5 is half of "
        "them and the other half in the next epoch; 1 sees every document once.",
        json_schema_extra=marks(identity=True),
    )
    format: SourceFormat = Field(
        default="auto",
        description="How documents are written; `auto` detects it per file and prints what it found.",
        json_schema_extra=marks(identity=True),
    )

    @model_validator(mode="before")
    @classmethod
    def _bare_path(cls, value: Any) -> Any:
        return {"path": str(value)} if isinstance(value, str | Path) else value


def _one_or_many(value: Any) -> Any:
    return [value] if isinstance(value, str | Path | dict | Source) else value


Sources = Annotated[list[Source], BeforeValidator(_one_or_many), Field(min_length=1)]


class DataConfig(Section):
    """Which documents are trained on, and how they become batches."""

    sources: Sources = Field(
        description="Where documents come from: paths, or mappings with path, weight and format.",
        json_schema_extra=marks(identity=True, allowed="a list of paths or of {path, weight, format}, at least one"),
    )
    shards: Path | None = Field(
        default=None,
        description="Folder that keeps the prepared (tokenized) documents for this and later runs.",
        json_schema_extra=marks(path="path", derived="<out>/shards"),
    )
    chat_template: Path | None = Field(
        default=None,
        description="File with a Jinja chat template that replaces the tokenizer's own; null uses the tokenizer's.",
        json_schema_extra=marks(identity=True, path="path"),
    )
    labels: Literal["all", "last"] = Field(
        default="all",
        description="Which assistant turns of a chat are trained: every one, or only the last; all because "
        "each is an example.",
        json_schema_extra=marks(identity=True),
    )
    max_bad: float = Field(
        default=0.01,
        ge=0,
        le=1,
        description="Largest share of unreadable input records (they go to rejected.jsonl) before it is an "
        "error; 1 % because more means a wrong format, not a stray line.",
    )
    seq_len: int = Field(
        ge=2,
        description="Longest training document, in tokens; no default because model, memory and data decide it.",
        json_schema_extra=marks(identity=True),
    )
    overlong: Literal["truncate", "split", "drop"] = Field(
        default="truncate",
        description="What happens to documents above seq_len: cut the end off, split into pieces (a chat's "
        "later pieces lack their prompt), or drop; truncate keeps every prompt. Samples and tokens affected are "
        "always counted.",
        json_schema_extra=marks(identity=True),
    )
    pack: Literal["best_fit", "none"] = Field(
        default="best_fit",
        description="Put whole documents together into packs of `slots` (they never attend to one another), "
        "or `none`: one document a row, padded; best_fit because padding is paid for like data.",
        json_schema_extra=marks(identity=True),
    )
    slots: int = Field(
        default_factory=lambda data: data["seq_len"],
        ge=2,
        description="Size of a pack in token slots, at least seq_len; one pack is one micro-batch, so memory "
        "bounds it.",
        json_schema_extra=marks(identity=True, derived="data.seq_len", allowed="a whole number of at least seq_len"),
    )
    rows: int = Field(
        default=8,
        ge=1,
        description="Documents a micro-batch when pack is none; 8 is what trainers commonly run.",
        json_schema_extra=marks(identity=True),
    )
    pad_to: Literal["longest", "seq_len"] = Field(
        default="longest",
        description="Length that rows are padded to when pack is none: the micro-batch's longest document, "
        "or always seq_len (one shape, most padding).",
    )
    group_by_length: bool = Field(
        default=False,
        description="When pack is none, put documents of like length into one micro-batch (less padding); "
        "off because batches then are no longer random.",
        json_schema_extra=marks(identity=True),
    )
    workers: int | None = Field(
        default=None,
        ge=1,
        description="Processes that prepare data; null is one per available core.",
    )
    prefetch: int = Field(
        default=2,
        ge=1,
        description="Global batches built ahead of the step; 2 hides a slow one without holding much memory.",
    )
    loader: Literal["thread", "process"] = Field(
        default="thread",
        description="What builds batches ahead of the step: a thread, or a forked process, which takes no turns with "
        "the training's Python; thread because building is numpy, which lets other threads run.",
    )
    keep_untrained: bool = Field(
        default=False,
        description="Keep documents without any trained token in the batches; off because they cost time and "
        "teach nothing (they are counted either way).",
        json_schema_extra=marks(identity=True),
    )
    keep_tails: bool = Field(
        default=False,
        description="Keep what stands behind the last trained token of a document that was cut at seq_len; off "
        "because no loss and no gradient depends on it (what is left out is counted and printed).",
    )

    @model_validator(mode="after")
    def _pack_holds_a_document(self) -> DataConfig:
        if self.pack != "none" and self.slots < self.seq_len:
            raise fault(
                "data.slots",
                f"a pack of {self.slots} slots cannot hold a document of data.seq_len = {self.seq_len} tokens; "
                f"set data.slots to {self.seq_len} or more (null makes it data.seq_len)",
            )
        return self

    @property
    def packed(self) -> bool:
        return self.pack != "none"
