"""Every key with its value, where the value came from, and what it means."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from headway.config.dump import as_plain, inline
from headway.config.layers import Origin
from headway.config.load import LoadedRun
from headway.config.schema import all_keys


@dataclass(frozen=True)
class Row:
    """One value as `headway train --show` prints it; `value` is plain (as in JSON)."""

    key: str
    value: Any
    origin: Origin
    description: str


def show_rows(run: LoadedRun) -> list[Row]:
    """One row a value, in the order of the reference."""
    return list(_rows(run, as_plain(run.config), ""))


def show_records(run: LoadedRun) -> list[dict[str, Any]]:
    """The rows as plain values, for `--json`."""
    return [asdict(row) for row in show_rows(run)]


def show_text(run: LoadedRun) -> str:
    """The run file with every key written out, descriptions and origins as comments: it can be used as a run file."""
    return "\n".join(_lines(run, as_plain(run.config), "", "")) + "\n"


def _rows(run: LoadedRun, values: dict[str, Any], prefix: str) -> Iterator[Row]:
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from _rows(run, value, f"{prefix}{name}.")
        else:
            yield _row(run, prefix + name, value)


def _lines(run: LoadedRun, values: dict[str, Any], prefix: str, indent: str) -> Iterator[str]:
    for name, value in values.items():
        row = _row(run, prefix + name, value)
        if isinstance(value, dict) and value:
            yield from ([""] if not indent else [])
            yield f"{indent}{inline(name)}:" + (f"  # {row.description}" if row.description else "")
            yield from _lines(run, value, f"{prefix}{name}.", indent + "  ")
        else:
            yield from ([f"{indent}# {row.description}"] if row.description else [])
            yield f"{indent}{inline(name)}: {inline(value)}  # {' '.join(row.origin.where.split())}"


def _row(run: LoadedRun, key: str, value: Any) -> Row:
    spec = all_keys().get(key)
    origin = run.provenance.of(key)
    if spec is not None and origin.kind == "default" and "derived" in spec.marks:
        origin = Origin("default", f"default (= {spec.marks['derived']})")
    return Row(key, value, origin, spec.description if spec is not None else "")
