"""What a prepare found and did, in lines a person reads: counts are exact, and nothing is left out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from headway.data.inspect import InspectReport
from headway.data.options import PrepareReport


def report_lines(report: PrepareReport, files_shown: int = 12) -> Iterator[str]:
    """One line a source file with the format it was read as, then totals, then every warning."""
    for file in report.files[:files_shown]:
        counts = file.totals
        yield f"{file.path}: {file.format}, {counts.documents} documents, {counts.rejected} rejected"
    if len(report.files) > files_shown:
        yield f"… and {len(report.files) - files_shown} more files"
    for reason in report.reasons:
        yield f"made again: {reason}"
    for warning in report.warnings:
        yield f"note: {warning}"
    totals, verb = report.totals, "up to date" if report.reused else "prepared"
    resumed = f", {report.resumed} shards kept from before" if report.resumed else ""
    yield (
        f"{verb}: {totals.documents} documents, {totals.tokens} tokens, {totals.trained} trained, in {report.out} "
        f"({report.seconds:.1f} s, {report.workers} workers{resumed})"
    )


def report_record(report: PrepareReport) -> dict[str, Any]:
    """The same for machines."""
    return {
        "out": str(report.out),
        "reused": report.reused,
        "reasons": report.reasons,
        "resumed_shards": report.resumed,
        "warnings": report.warnings,
        "seconds": report.seconds,
        "files": [{"path": file.path, "format": file.format, **_counts(file.totals)} for file in report.files],
        **_counts(report.totals),
    }


def _counts(totals: Any) -> dict[str, int]:
    return {name: getattr(totals, name) for name in ("documents", "tokens", "trained", "untrained", "rejected")}


def inspect_lines(report: InspectReport, seq_len: int | None) -> Iterator[str]:
    """What a folder of shards holds; with `seq_len`, what is longer than that."""
    record = inspect_record(report, seq_len)
    share = record["trained"] / record["tokens"] if record["tokens"] else 0.0
    counts = f"{record['documents']} documents, {record['tokens']} tokens, {record['trained']} trained"
    yield f"{report.path}: {counts} ({share:.1%})"
    yield "length: min {} · median {} · p90 {} · p99 {} · max {} tokens".format(*report.lengths)
    if report.manifest is None:
        yield "a Megatron data set: every token is trained; it names no tokenizer, --tokenizer shows samples as text"
    else:
        yield f"tokenizer: {report.manifest.tokenizer.path}   formats: {', '.join(record['formats'])}"
    yield f"rejected: {record['rejected']}   without a trained token: {record['untrained']}"
    if seq_len is not None:
        yield (
            f"longer than {seq_len}: {record['overlong']} documents; truncating loses {record['truncated_tokens']} "
            f"tokens, dropping {record['dropped_tokens']}"
        )


def inspect_record(report: InspectReport, seq_len: int | None) -> dict[str, Any]:
    """The same for machines, samples included (trained text between ⟦ and ⟧)."""
    record: dict[str, Any] = {
        "path": str(report.path),
        **_counts(report.totals),
        "lengths": dict(zip(("min", "median", "p90", "p99", "max"), report.lengths, strict=True)),
        "formats": sorted({file.format for file in report.manifest.files}) if report.manifest else ["megatron"],
        "samples": [
            {"file": s.file, "line": s.line, "tokens": s.tokens, "trained": s.trained, "text": s.plain}
            for s in report.samples
        ],
    }
    if seq_len is not None:
        long = report.all_lengths[report.all_lengths > seq_len]
        record |= {
            "seq_len": seq_len,
            "overlong": len(long),
            "truncated_tokens": int((long - seq_len).sum()),
            "dropped_tokens": int(long.sum()),
        }
    return record
