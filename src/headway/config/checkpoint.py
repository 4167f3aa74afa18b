"""The run file's `checkpoint` section."""

from __future__ import annotations

import difflib
import re
from typing import Annotated, Literal

from pydantic import Field, field_validator

from headway.config.base import Section, marks


class RemoteConfig(Section):
    """Checkpoints in an object store."""

    shorthand = "url"

    url: str = Field(
        min_length=1,
        description="Any fsspec URL, e.g. s3://bucket/runs; the run's name is added. The library of its protocol "
        "(s3fs, gcsfs, …) must be installed.",
        json_schema_extra=marks(allowed="a URL like s3://bucket/folder or file:///folder, or an absolute path"),
    )
    every: int | None = Field(
        default=None,
        ge=1,
        description="Optimizer steps between uploads; null uploads every checkpoint that goes to the disk.",
    )
    keep: int = Field(
        default=2,
        ge=1,
        description="Newest checkpoints that stay in the store. The newest with 32 clean steps behind it stays in any "
        "case.",
    )
    budget_s: float = Field(
        default=300.0,
        ge=0,
        description="Seconds that one upload may wait between retries before it is given up.",
    )

    @field_validator("url")
    @classmethod
    def _is_a_place(cls, value: str) -> str:
        # fsspec takes any other text for a folder below the current one.
        if value.startswith("/"):
            return value
        protocols = re.match(r"(?:[\w.+-]+::)*[\w.+-]+(?=://.)", value)
        if protocols is None:
            raise ValueError("no URL: it has no protocol://")
        for protocol in protocols.group().split("::"):
            if protocol not in known_protocols():
                near = difflib.get_close_matches(protocol, known_protocols(), n=1)
                raise ValueError(f"no protocol is called {protocol}{f'; did you mean {near[0]}?' if near else ''}")
        return value


def known_protocols() -> list[str]:
    """The protocols of URLs that fsspec knows, installed or not."""
    import fsspec

    return list(fsspec.available_protocols())


class CheckpointConfig(Section):
    """When the training state is saved, and what a start continues from."""

    every: Annotated[int, Field(ge=1)] | Literal["auto"] | None = Field(
        default=None,
        description="Optimizer steps between checkpoints; `auto` finds them from what saves cost and how often the run "
        "fails; null saves only at the end and when the run is stopped.",
    )
    memory_every: Annotated[int, Field(ge=1)] | Literal["auto"] | None = Field(
        default="auto",
        description="Optimizer steps between checkpoints in the node's shared memory, for spikes and killed processes; "
        "`auto` as often as pays, within half of the free memory; null only those on their way to the disk.",
    )
    keep_memory: int = Field(
        default=1,
        ge=1,
        description="Newest memory checkpoints that stay while the next is made; host memory holds one more.",
    )
    copies: bool = Field(
        default=True,
        description="On several nodes: each node's part of a memory checkpoint also goes to the next node's memory, so "
        "that it survives the node; takes that much memory again.",
    )
    keep: int = Field(
        default=2,
        ge=1,
        description="Newest checkpoints that are kept; 2 so that one remains should the newest be damaged. "
        "The newest with 32 clean steps behind it stays in any case; with the one being written, the disk holds up to "
        "two more.",
    )
    keep_every: int | None = Field(
        default=None,
        ge=1,
        description="Also keep every checkpoint whose step this divides; null keeps only the newest.",
    )
    max_failures: int | None = Field(
        default=5,
        ge=0,
        description="Saves in a row that may fail before the run stops; null goes on without a checkpoint for ever.",
    )
    timeout_s: float = Field(
        default=600.0,
        gt=0,
        description="Seconds after which a save that is not on the disk is given up; training goes on meanwhile.",
    )
    remote: RemoteConfig | None = Field(
        default=None,
        description="An object store for checkpoints; null for none.",
    )
    at_end: bool = Field(
        default=True,
        description="Save a checkpoint after the last step.",
    )
    resume: str = Field(
        default="auto",
        min_length=1,
        description="What to continue from: `auto` takes the newest verified checkpoint in the run folder "
        "(or starts anew), `never` refuses a run folder that has one, a path names one.",
        json_schema_extra=marks(path="checkpoint", allowed="auto, never, or a checkpoint's folder"),
    )
    allow: list[str] = Field(
        default_factory=list,
        description="Keys that may differ from the checkpoint's run without the resume being refused, e.g. "
        "[train.steps].",
        json_schema_extra=marks(
            allowed="a list of keys that are marked ● or sections, or of names that a refusal gave"
        ),
    )


COMPARED_BESIDES = re.compile(
    r"(?:(?:number|content|documents|weight) of data sources?( \d+)?|sequences per step|frozen base weights"
    r"|version of the order of documents|eval\.holdout seed|(?:code|architecture)(\..+)?)"
)
"""What a resume compares and is no key of the run file: names in the identity of `train.resume`."""
