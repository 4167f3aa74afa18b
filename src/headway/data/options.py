"""What a user chooses when preparing data, and what is told while and after it is done."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from headway.account.errors import UserError
from headway.data.formats import FORMATS
from headway.data.manifest import Manifest, SourceFile, Totals


@dataclass(frozen=True)
class PrepareOptions:
    """How sources are read and labelled.

    ``format``: "auto" finds it per file; else one of `FORMATS` for all. ``labels``: train every assistant turn, or the
    last. ``max_bad``: share of bad records, 0 to 1, above which it is an error. ``chat_template``: path of a Jinja file
    to use in place of the tokenizer's. ``template_options``: variables for the template (``enable_thinking``…).
    ``template_date``: the date, YYYY-MM-DD, that a template prints which prints one; fixed, so that the same data gives
    the same shards on any day. ``text_eos``: put the end token behind plain texts.
    """

    format: str = "auto"
    labels: Literal["all", "last"] = "all"
    max_bad: float = 0.01
    chat_template: str | None = None
    template_options: dict[str, Any] = field(default_factory=dict)
    template_date: str = "2025-01-01"
    text_eos: bool = True

    def __post_init__(self) -> None:
        if self.format != "auto" and self.format not in FORMATS:
            raise UserError(f"data.format: {self.format!r} is not one of auto, {', '.join(FORMATS)}")
        if self.labels not in ("all", "last"):
            raise UserError(f"data.labels: {self.labels!r} is not one of all, last")
        if not 0 <= self.max_bad <= 1:
            raise UserError(f"data.max_bad: {self.max_bad} is not a share between 0 and 1")

    def content(self) -> dict[str, Any]:
        """The options that decide what the shards hold (``max_bad`` only decides whether that is acceptable)."""
        return {name: value for name, value in asdict(self).items() if name not in ("max_bad", "chat_template")}


@dataclass(frozen=True)
class Progress:
    """How far long work on data is. ``stage``: "comparing" (hashing sources against a folder that is there),
    "tokenising", or "verifying" (hashing shards).

    ``bytes_done`` of ``bytes_total``, of sources or shards, in ``seconds`` of this stage; ``reasons``: why a folder
    that was there is made again.
    """

    stage: str
    bytes_done: int
    bytes_total: int
    totals: Totals
    seconds: float
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class PrepareReport:
    """What was prepared.

    ``reused``: the folder was there and up to date, nothing was done. ``reasons``: why it was made again, if it was.
    ``resumed``: shards kept from a run that had been stopped. ``warnings``: one line each.
    """

    out: Path
    manifest: Manifest
    reused: bool
    reasons: list[str]
    resumed: int
    warnings: list[str]
    seconds: float
    workers: int

    @property
    def totals(self) -> Totals:
        return self.manifest.totals

    @property
    def files(self) -> list[SourceFile]:
        """The source files with the format each was read as and its counts."""
        return self.manifest.files
