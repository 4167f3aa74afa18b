"""CSV files as spreadsheets write them, read strictly: what a line holds too much or too little of is said with it."""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from pathlib import Path

from headway.account.errors import UserError


@dataclass(frozen=True, slots=True)
class Line:
    """One row: the line it begins on, its cells by column, what is wrong with its shape ("" where nothing is), and the
    sign between its cells."""

    number: int
    cells: dict[str, str]
    fault: str
    sign: str = ","


def read_table(path: Path, where: str, needed: tuple[str, ...], what: str) -> list[Line]:
    """Rows of a CSV (commas, semicolons or tabs), columns by their lower-case names, spaces and dashes as underscores.

    `where` begins every message, `what` says what to give instead. Raises UserError naming file and line when it is
    missing, is not text, lacks a column of `needed` or has one twice, holds no rows, or a quote is never closed.
    """
    if not path.name or "\0" in str(path):
        raise UserError(f"{where}: no file is named; {what}")
    if path.is_dir():
        raise UserError(f"{where}: a folder; {what}")
    if not path.is_file():
        raise UserError(f"{where}: no such file")
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            first = file.readline()
            file.seek(0)
            # Spreadsheets also write semicolons and tabs; the header says which.
            sign = max(",;\t", key=first.count)
            reader = csv.reader(file, delimiter=sign, strict=True)
            records = _records(reader, where)
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not a CSV in UTF-8 ({error})") from error
    if not records:
        raise UserError(f"{where}: empty; {what}")
    names = [column(name) for name in records[0][1]]
    for name in needed:
        if name not in names:
            raise UserError(f"{where}: column {name!r} is missing; {what}")
    twice = next((name for name in names if name and names.count(name) > 1), None)
    if twice:
        raise UserError(f"{where}: column {twice!r} is there twice; keep one of them")
    if len(records) == 1:
        raise UserError(f"{where}: a header and no rows")
    return [
        Line(number, dict(zip(names, cells, strict=False)), _fault(cells, names), sign) for number, cells in records[1:]
    ]


def _records(reader: csv._reader, where: str) -> list[tuple[int, list[str]]]:  # type: ignore[name-defined]
    """(line it begins on, cells) of every line that is not empty."""
    found: list[tuple[int, list[str]]] = []
    begin = 1
    try:
        for cells in reader:
            if cells:
                found.append((begin, cells))
            begin = reader.line_num + 1
    except csv.Error as error:
        raise UserError(f"{where}: line {begin}: {error}; is a quote not closed there?") from error
    return found


def _fault(cells: list[str], names: list[str]) -> str:
    if len(cells) == len(names):
        return ""
    return f"{len(cells)} fields under a header of {len(names)} (a separator too many or too few?)"


def column(name: str) -> str:
    """`Step time-s` as `step_time_s`."""
    return re.sub(r"[\s\-]+", "_", name.strip().casefold())
