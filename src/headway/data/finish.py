"""The end of `prepare`: is the result acceptable, the manifest, publication, and what is said about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import orjson

from headway.account.errors import UserError
from headway.data import folder as folders
from headway.data import manifest as manifests
from headway.data.convert import NOTES
from headway.data.inspect import TOKENIZER, decoder_of, segments
from headway.data.job import PLAN, Job, remove_scaffolding
from headway.data.labels import NO_ASSISTANT
from headway.data.manifest import FileHash, Manifest, SourceFile, Totals
from headway.data.readers import FileReader
from headway.data.shards import write_bytes
from headway.data.store import ShardFolder, part_path
from headway.data.units import UnitRecord, rejected_path

_SHOWN = 400  # characters of the sample in an error
_LOOKED_AT = 200  # bad records among which the commonest reason is found


def publish(job: Job, readers: list[FileReader], records: list[UnitRecord]) -> Manifest:
    """Check the whole, write the manifest, and give the folder its name.

    Raises:
        UserError: too many bad records, no sample at all, or none with a trained token; nothing is published then.
    """
    totals = sum((t for record in records for t in record.files.values()), Totals())
    rejected = _write_rejected(job.partial, records)
    check_rejected(totals, job.options.max_bad, job.partial / manifests.REJECTED, job.paths)
    if job.info.spec:
        write_bytes(job.partial / TOKENIZER, [job.info.spec.encode()])
    manifest = _manifest(job, readers, records, totals, rejected)
    write_bytes(job.partial / manifests.NAME, [manifests.encode(manifest)])
    if totals.untrained == totals.documents:
        raise UserError(_nothing_trained(job, manifest))
    _remove_strays(job.partial, manifest)
    remove_scaffolding(job.partial)
    folders.publish(job.partial, job.out)
    return manifest


def check_rejected(totals: Totals, max_bad: float, rejected: Path, paths: list[str]) -> None:
    """Refuse a result with too many bad records, or without any good one.

    Raises:
        UserError: names the first bad record and where all of them are listed.
    """
    records = totals.documents + totals.rejected
    if not records:
        raise UserError(f"{', '.join(paths[:3])}: no records; the data is empty")
    if not totals.documents:
        # Not the first: a broken line at the head would hide what all the others lack.
        reason = Counter(bad["reason"] for bad in _rejected(rejected)).most_common(1)[0][0]
        where = next(f"{bad['file']}:{bad['line']}" for bad in _rejected(rejected) if bad["reason"] == reason)
        raise UserError(f"{where}: {reason}; none of {records} records can be used, all are listed in {rejected}")
    if totals.rejected > max_bad * records:
        bad = next(_rejected(rejected))
        raise UserError(
            f"{bad['file']}:{bad['line']}: {bad['reason']}; {totals.rejected} of {records} records are bad "
            f"({totals.rejected / records:.1%}, data.max_bad allows {max_bad:.1%}); all are listed in {rejected}"
        )


def warnings_of(manifest: Manifest, foreign: list[Path], out: Path) -> list[str]:
    """What the user should know about the result, one line each, with exact counts."""
    lines = [f"{file.path}: is empty" for file in manifest.files if not _records(file.totals)]
    if foreign:
        names = ", ".join(str(path) for path in foreign[:3]) + (", …" if len(foreign) > 3 else "")
        lines.append(f"{len(foreign)} files passed over (suffix not known, or no regular file): {names}")
    totals = manifest.totals
    if totals.rejected:
        lines.append(f"{totals.rejected} of {_records(totals)} records are bad, listed in {out / manifests.REJECTED}")
    if totals.untrained:
        lines.append(f"{totals.untrained} of {totals.documents} samples have no trained token")
    lines += [f"{count} samples: {NOTES.get(name, name)}" for name, count in manifest.notes.items()]
    return lines


def _manifest(
    job: Job, readers: list[FileReader], records: list[UnitRecord], totals: Totals, rejected: FileHash
) -> Manifest:
    shards = [record.shard for record in records]
    notes: dict[str, int] = {}
    per_file = [Totals()] * len(readers)
    for record in records:
        for name, count in record.notes.items():
            notes[name] = notes.get(name, 0) + count
        for index, part in record.files.items():
            per_file[index] = per_file[index] + part
    files = [SourceFile(str(r.source), r.size, r.sha256, r.format, t) for r, t in zip(readers, per_file, strict=True)]
    return Manifest(
        fingerprint=manifests.fingerprint(shards, job.info.vocab_size),
        totals=totals,
        notes=dict(sorted(notes.items())),
        tokenizer=job.tokenizer_record(),
        template=job.template_record(next((r.label_source for r in records if r.label_source != "none"), "none")),
        options=job.options.content(),
        files=files,
        shards=shards,
        rejected=rejected,
    )


def _remove_strays(partial: Path, manifest: Manifest) -> None:
    """Remove what an earlier, killed run left and this one did not write: shards past the end, temporary files."""
    kept = _ours(partial, manifest)
    for file in partial.iterdir():
        if file.is_file() and file.name not in kept:
            file.unlink()


def check_replaceable(folder: Path, manifest: Manifest) -> None:
    """A published folder is replaced whole, so that whatever else lies in it would go. Raises UserError then."""
    ours = _ours(folder, manifest)
    foreign = sorted(entry.name for entry in folder.iterdir() if entry.name not in ours)
    if foreign:
        raise UserError(
            f"{folder}: the shards are out of date, and {foreign[0]} beside them is not theirs and would be lost; "
            "move it away, or choose another --out"
        )


def _ours(folder: Path, manifest: Manifest) -> set[str]:
    parts = {part_path(folder, shard.name, part).name for shard in manifest.shards for part in shard.parts}
    return parts | {manifests.NAME, manifests.REJECTED, TOKENIZER, PLAN}


def _write_rejected(partial: Path, records: list[UnitRecord]) -> FileHash:
    parts = (rejected_path(partial, record.index).read_bytes() for record in records)
    return write_bytes(partial / manifests.REJECTED, parts)


def _rejected(path: Path) -> Iterator[dict[str, Any]]:
    """The first of the bad records that a file lists."""
    with path.open("rb") as file:
        for line in islice(file, _LOOKED_AT):
            yield orjson.loads(line)


def _nothing_trained(job: Job, manifest: Manifest) -> str:
    documents = manifest.totals.documents
    if manifest.notes.get(NO_ASSISTANT) == documents:
        cause = "no conversation has an assistant turn; are the roles named as the chat template expects?"
    elif manifest.template.labels == "generation":
        cause = "the chat template's generation blocks hold nothing"
    else:
        cause = "every answer is excluded (weight 0) or empty"
    store = ShardFolder(job.partial, manifest)
    file, line = store.source(0)
    shown = segments(decoder_of(job.info, job.tokenizer), store.tokens(0), store.mask(0))
    text = "".join(f"⟦{part}⟧" if trained else part for part, trained in shown)
    return f"none of {documents} samples has a trained token: {cause} {file}:{line} reads {text[:_SHOWN]!r}"


def _records(totals: Totals) -> int:
    return totals.documents + totals.rejected
