"""Cells of a row as people write them: `1,024`, `8k`, `~380`, `80 GB`, `yes`. What says nothing is blank; what says
something that cannot be is refused with its column, so that no row is predicted (or calibrates) with a guess for it."""

from __future__ import annotations

import re
from collections.abc import Mapping

from headway.plan.numbers import COUNT, GPUS, POSITIVE, WHOLE, Kind

Row = Mapping[str, str]
_NUMBER = re.compile(
    r"^[~≈≥>≤<\s]*(\d[\d,_ ]*(?:\.\d+)?(?:e[+-]?\d+)?)\s*([kmbt]?)(?:i?b|gb|gib|s|tok.*|tflop.*|seq.*)?\s*$"
)
_SCALE = {"": 1.0, "k": 1024.0, "m": 1e6, "b": 1e9, "t": 1e12}
_BLANK = {"", "-", "–", "—", "?", "na", "n/a", "none", "null", "unknown", "not stated", "not published", "unspecified"}
_YES = ("yes", "true", "on", "full", "full_shard")
_NO = ("no", "false", "off", "no_shard")
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
    """What a column of COLUMNS must hold, None where the cell is blank. `k` is 1,024, as in sequence lengths; m, b and
    t are decimal. Raises ValueError naming the column."""
    said = row.get(key, "").strip()
    text = said.casefold()
    if text in _BLANK or (key == "fsdp" and text in _YES + _NO):
        return None
    match = _NUMBER.match(text)
    plain = f"{float(re.sub(r'[,_ ]', '', match[1])) * _SCALE[match[2]]!r}" if match else said
    kind = COLUMNS.get(key, POSITIVE)
    try:
        return kind.read(plain) or None
    except ValueError:
        raise ValueError(f"column {key}: {said!r} is not {kind.says}") from None


def whole(row: Row, key: str) -> int | None:
    """The same as an int. Raises ValueError naming the column, also for 8.5."""
    value = number(row, key)
    if value is not None and value != int(value):
        raise ValueError(f"column {key}: {row[key]!r} is not a whole number")
    return None if value is None else int(value)


def yes(row: Row, key: str) -> bool:
    """Whether a cell says yes in words."""
    return row.get(key, "").strip().casefold() in _YES


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
