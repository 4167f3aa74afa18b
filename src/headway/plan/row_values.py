"""Cells of a row as people write them: `1,024`, `8k`, `~380`, `80 GB`, `yes`. What says nothing is blank; what says
something that cannot be is refused with its column, so that no row is predicted (or calibrates) with a guess for it."""

from __future__ import annotations

import re
from collections.abc import Mapping

from headway.plan.numbers import COUNT, GPUS, POSITIVE, WHOLE, Kind

Row = Mapping[str, str]
# Thousands are set off by one sign throughout, three digits each: 12,5 is no 125.
_NUMBER = re.compile(
    r"[~≈≥>≤<+\s]*([1-9]\d{0,2}(?:(?P<sign>[,_ \u00a0\u202f])\d{3})(?:(?P=sign)\d{3})*(?:\.\d+)?|\d+(?:\.\d*)?|\.\d+)"
    r"(e[+-]?\d+)?\s*(.*?)\s*"
)
_DECIMAL = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_UNITS: Mapping[str, Mapping[str, float]] = {
    "step_time_s": {**dict.fromkeys(("", "s", "sec", "secs", "second", "seconds"), 1.0), "ms": 1e-3},
    "mem_gb": {**dict.fromkeys(("", "gb", "gib"), 1.0), **dict.fromkeys(("mb", "mib"), 2.0**-10)},
}
_BLANK = {"", "-", "–", "—", "?", "na", "n/a", "none", "null", "unknown", "not stated", "not published", "unspecified"}
_YES = ("yes", "true", "on", "full", "full_shard")
_NO = ("no", "false", "off", "no_shard")
# What may follow a number and its scale: a batch of 4M tokens is no batch of 4M sequences.
_WORDS: Mapping[str, str] = {
    "seq_len": r"tok(en)?s?",
    "gpus": r"gpus?",
    "global_batch": r"seqs?|sequences?|samples?",
    "tokens_per_s_per_gpu": r"(tok|tokens?)\b.*",
    "tflops_per_gpu": r"tflop.*",
    **dict.fromkeys(("params_total", "params_active"), r"param(eter)?s?"),
}
# Powers of two by habit, where 8k is 8,192; in vocabularies, parameters and speeds k is 1,000.
_BINARY = ("seq_len", "hidden", "ffn_hidden", "gpus", "global_batch")
# What each column must hold. Degrees of 0 say that there is none of it, as a blank does.
COLUMNS: Mapping[str, Kind] = {
    **dict.fromkeys(("layers", "hidden", "ffn_hidden", "vocab", "seq_len"), COUNT),
    **dict.fromkeys(("dp", "tp", "pp", "micro_batch", "global_batch"), COUNT),
    **dict.fromkeys(("heads", "kv_heads", "gpus_per_node", "fsdp", "cp", "sp", "ep", "vpp"), WHOLE),
    "gpus": GPUS,
    **dict.fromkeys(("params_total", "params_active", "step_time_s", "tokens_per_s_per_gpu"), POSITIVE),
    **dict.fromkeys(("tflops_per_gpu", "mem_gb"), POSITIVE),
}


def number(row: Row, key: str) -> float | None:
    """What a column of COLUMNS must hold, None where the cell is blank. Raises ValueError naming the column."""
    said = row.get(key, "").strip()
    text = said.casefold()
    if text in _BLANK or (key == "fsdp" and text in _YES + _NO):
        return None
    kind = COLUMNS.get(key, POSITIVE)
    try:
        return kind.read(_plain(text, key)) or None
    except ValueError:
        comma = "; write decimals with a point" if re.fullmatch(r"\d+,\d+\D*", text) else ""
        raise ValueError(f"column {key}: {said!r} is not {kind.says}{comma}") from None


def _plain(text: str, key: str) -> float:
    """The number of a cell with its unit applied. Raises ValueError."""
    match = _NUMBER.fullmatch(text)
    scale = _scale(match[4], key) if match else None
    if match is None or scale is None:
        raise ValueError(text)
    value = float(re.sub(r"[^\d.]", "", match[1]) + (match[3] or "")) * scale
    return round(value, 3) if scale > 1 else value  # 128.256k is a whole number


def _scale(unit: str, key: str) -> float | None:
    """What a number of that column is multiplied by for what stands behind it; None where that cannot be."""
    if key in _UNITS:
        return _UNITS[key].get(unit)
    words = _WORDS.get(key, "")
    if re.fullmatch(words, unit) or not unit:
        return 1.0
    letter, rest = unit[0], unit[1:].strip()
    if letter not in _DECIMAL or (rest and not re.fullmatch(words, rest)):
        return None
    return 1024.0 if letter == "k" and key in _BINARY else _DECIMAL[letter]


def whole(row: Row, key: str) -> int | None:
    """The same as an int. Raises ValueError naming the column, also for 8.5."""
    value = number(row, key)
    if value is not None and value != int(value):
        raise ValueError(f"column {key}: {row[key]!r} is not a whole number")
    return None if value is None else int(value)


def yes(row: Row, key: str) -> bool:
    """Whether a cell says yes in words."""
    return row.get(key, "").strip().casefold() in _YES


def check_commas(row: Row) -> None:
    """Raises ValueError for 2,125 where a fraction may stand, in a table of semicolons: such tables are written where
    the comma is the decimal sign, and nothing tells 2.125 from 2125."""
    for key, kind in COLUMNS.items():
        if not kind.whole and re.fullmatch(r"\s*[1-9]\d{0,2},\d{3}\D*", row.get(key, "")):
            raise ValueError(
                f"column {key}: {row[key]!r} has a decimal comma or sets off thousands; write a point or none"
            )


def check_cells(row: Row) -> None:
    """Raises ValueError naming the first column whose cell cannot be, also one that no rule would have read."""
    for key in COLUMNS:
        number(row, key)
    heads, kv_heads, tp, hidden = (whole(row, key) for key in ("heads", "kv_heads", "tp", "hidden"))
    if heads and tp and heads % tp:
        raise ValueError(f"column tp: {tp} does not divide {heads} heads")
    if heads and kv_heads and heads % kv_heads:
        raise ValueError(f"column kv_heads: {kv_heads} does not divide {heads} heads")
    if heads and hidden and heads > hidden:
        raise ValueError(f"column heads: {heads} heads of a hidden size of {hidden}")
