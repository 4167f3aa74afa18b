"""One call of `prepare` as data: what goes in, whether it was done before, and whether it was begun before."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from headway.account.errors import UserError
from headway.data import folder as folders
from headway.data import manifest as manifests
from headway.data.manifest import Manifest, TemplateRecord, TokenizerRecord
from headway.data.options import PrepareOptions
from headway.data.sources import Source
from headway.data.store import ShardFolder, hash_file
from headway.data.streams import reading
from headway.data.templates import ChatTemplate
from headway.data.tokenizer import TokenizerInfo, make_encoder
from headway.data.units import RECORDS, Recipe

PLAN = "plan.json"


@dataclass(frozen=True)
class Job:
    """What to prepare. ``unit_bytes``: source bytes per shard; ``total_bytes``: of all sources as they lie on disk."""

    out: Path
    sources: list[Source]
    total_bytes: int
    unit_bytes: int
    info: TokenizerInfo
    tokenizer: Any
    template_source: str
    templates: dict[str, ChatTemplate]
    options: PrepareOptions

    @property
    def partial(self) -> Path:
        return folders.partial_folder(self.out)

    @property
    def paths(self) -> list[str]:
        return [str(source.path) for source in self.sources]

    @property
    def template_sha256(self) -> str:
        return templates_sha256(self.templates)

    def recipe(self) -> Recipe:
        encoder = make_encoder(self.info, self.tokenizer)
        options = self.options
        return Recipe(self.partial, self.info, encoder, self.templates, options.labels, options.text_eos, self.paths)

    def tokenizer_record(self) -> TokenizerRecord:
        info = self.info
        return TokenizerRecord(info.path, info.sha256, info.vocab_size, info.eos_token_id)

    def template_record(self, labels: str) -> TemplateRecord:
        return TemplateRecord(self.template_source, self.template_sha256, labels)


def templates_sha256(templates: dict[str, ChatTemplate]) -> str:
    """One hash over all chat templates that may be used; "" without any."""
    if not templates:
        return ""
    named = "".join(f"{name} {template.sha256}\n" for name, template in sorted(templates.items()))
    return hashlib.sha256(named.encode()).hexdigest()


def size_of(sources: list[Source]) -> int:
    """Bytes of all sources on disk.

    Raises:
        UserError: one cannot be read.
    """
    total = 0
    for source in sources:
        with reading(source.path):
            total += source.path.stat().st_size
    return total


def reasons_to_rebuild(job: Job, manifest: Manifest, hashed: Callable[[int], None]) -> list[str]:
    """Why a published folder is not what this job would make; empty when it is. ``hashed`` is told bytes compared.

    The sources are hashed in full: a changed byte must be noticed, whatever the clock says.
    """
    reasons = []
    if manifest.tokenizer.sha256 != job.info.sha256:
        reasons.append(f"the tokenizer changed ({job.info.path})")
    if manifest.template.sha256 != job.template_sha256:
        reasons.append(f"the chat template changed ({job.template_source})")
    for name, value in job.options.content().items():
        if manifest.options.get(name) != value:
            reasons.append(f"data.{name} changed from {manifest.options.get(name)} to {value}")
    before = {file.path: file for file in manifest.files}
    reasons += [f"{path} is no longer among the sources" for path in before if path not in job.paths]
    reasons += [f"{path} is new" for path in job.paths if path not in before]
    if not reasons and [file.path for file in manifest.files] != job.paths:
        reasons.append("the order of the sources changed")
    for source in job.sources if not reasons else []:
        known = before[str(source.path)]
        with reading(source.path):
            size = source.path.stat().st_size
        if size != known.size or hash_file(source.path, hashed) != known.sha256:
            reasons.append(f"{source.path} changed")
    if not reasons:
        try:
            ShardFolder.open(job.out)
        except UserError as error:
            reasons.append(f"the folder is damaged: {error}")
    return reasons


def start_partial(job: Job) -> str:
    """Make the folder that shards are written to, or keep one that was begun for the same job.

    Returns why an earlier beginning was thrown away, or "".
    """
    plan = {
        "version": manifests.VERSION,
        "tokenizer": job.info.sha256,
        "template": job.template_sha256,
        "options": job.options.content(),
        "unit_bytes": job.unit_bytes,
        "files": job.paths,
    }
    path, why = job.partial / PLAN, ""
    if job.partial.exists():
        try:
            before = orjson.loads(path.read_bytes())
        except (OSError, orjson.JSONDecodeError):
            before = None
        if before == plan:
            return ""
        if before:
            changed = ", ".join(key for key in plan if before.get(key) != plan[key])
            why = f"an earlier prepare of this folder was stopped; it is begun again because it differed in: {changed}"
        shutil.rmtree(job.partial)
    (job.partial / RECORDS).mkdir(parents=True)
    path.write_bytes(orjson.dumps(plan))
    return why


def remove_scaffolding(partial: Path) -> None:
    """Remove what only the making of the folder needed."""
    shutil.rmtree(partial / RECORDS)
    (partial / PLAN).unlink()
