"""How numbers are written for people: one place, so that the live line, the terminal and the report agree.

Every function takes None (and NaN) for "not known" and writes an en dash for it.
"""

from __future__ import annotations

import math
from typing import Any

UNKNOWN = "–"
_SI = ("", "k", "M", "G", "T", "P", "E", "Z", "Y")


def _scaled(value: float, base: float, steps: int) -> tuple[str, int]:
    """Three significant digits and the power of `base`. Rounding up may reach the next unit: 999,950 is 1.00M."""
    power = 0
    while power < steps and _three_digits(abs(value)) >= base:
        value /= base
        power += 1
    decimals = 2 if _three_digits(abs(value)) < 10 else 1 if _three_digits(abs(value)) < 100 else 0
    return f"{value:.{decimals}f}", power


def _three_digits(value: float) -> float:
    return float(f"{value:.3g}") if value < 1000 else round(value)


def count(value: float | None) -> str:
    """A number of things: ``842``, ``12.3k``, ``1.85M``."""
    if value is None or math.isnan(value):
        return UNKNOWN
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if abs(value) < 1000 and float(value).is_integer():
        return f"{int(value)}"
    text, power = _scaled(value, 1000.0, 4)
    return text + ("", "k", "M", "B", "T")[power]


def whole(value: int | None) -> str:
    """An exact count with thousands separated: ``1,234,567``."""
    return UNKNOWN if value is None else f"{value:,}"


def si(value: float | None, unit: str) -> str:
    """With an SI prefix and a unit: ``989 TFLOP/s``, ``1.24 PFLOP``."""
    if value is None or math.isnan(value):
        return UNKNOWN
    text, power = _scaled(value, 1000.0, len(_SI) - 1)
    return f"{text} {_SI[power]}{unit}"


def size(value: float | None) -> str:
    """Bytes in binary units: ``512 B``, ``1.50 GiB``."""
    if value is None or math.isnan(value):
        return UNKNOWN
    if value < 1024:
        return f"{int(value)} B"
    text, power = _scaled(value, 1024.0, 5)
    return f"{text} {('B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB')[power]}"


def percent(share: float | None) -> str:
    """A share of 1 as percent: ``47.9 %``; what is there but too small to show reads ``<0.1 %``."""
    if share is None or math.isnan(share):
        return UNKNOWN
    if 0 < share < 0.0005:
        return "<0.1 %"
    return f"{100 * share:.1f} %"


def seconds(value: float | None) -> str:
    """A measured time with three digits or so: ``0.8 ms``, ``3.21 s``, ``12 min 05 s``, ``3 h 07 min``."""
    if value is None or math.isnan(value) or math.isinf(value):
        return UNKNOWN
    if value < 0:
        return "-" + seconds(-value)
    if value < 0.9995:
        if 0 < value < 0.00005:
            return "<0.1 ms"
        return f"{value * 1000:.0f} ms" if value >= 0.0995 else f"{value * 1000:.1f} ms" if value else "0 s"
    if value < 9.995:
        return f"{value:.2f} s"
    if value < 99.95:
        return f"{value:.1f} s"
    return clock(value)


def clock(value: float | None) -> str:
    """A duration or time left, to the second: ``45 s``, ``12 min 05 s``, ``3 h 07 min``, ``2 d 04 h``."""
    if value is None or math.isnan(value) or math.isinf(value):
        return UNKNOWN
    whole_seconds = round(value)
    if whole_seconds < 60:
        return f"{whole_seconds} s"
    if whole_seconds < 3600:
        return f"{whole_seconds // 60} min {whole_seconds % 60:02d} s"
    whole_minutes = round(whole_seconds / 60)
    if whole_minutes < 24 * 60:
        return f"{whole_minutes // 60} h {whole_minutes % 60:02d} min"
    whole_hours = round(whole_minutes / 60)
    return f"{whole_hours // 24} d {whole_hours % 24:02d} h"


def loss(value: float | None) -> str:
    """A loss or a norm: four decimals, or four digits where that would say nothing; NaN is an event and reads nan."""
    if value is None:
        return UNKNOWN
    if not math.isfinite(value):
        return str(value)
    if value and (abs(value) < 0.001 or abs(value) >= 10000):
        return f"{value:.3e}"
    return f"{value:.4f}" if abs(value) < 100 else f"{value:.1f}"


def rate(value: float | None) -> str:
    """A learning rate: ``3.00e-04``."""
    return UNKNOWN if value is None or math.isnan(value) else f"{value:.2e}"


def per_second(value: float | None, unit: str = "tok") -> str:
    """``18.2k tok/s``."""
    return UNKNOWN if value is None or math.isnan(value) else f"{count(value)} {unit}/s"


def plural(number: int, noun: str) -> str:
    """``1 step``, ``2 steps``."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def peak(flops: float | None, source: str) -> str:
    """The peak with where it is from. `source` is a `Peak.line` of the account, or a word such as ``datasheet``."""
    if source.startswith("peak "):
        return source.removeprefix("peak ")
    if not flops:
        return "unknown, so no MFU; `headway bench peak` measures it"
    return si(flops, "FLOP/s") + (f" ({source})" if source else "")


def fact(value: Any) -> str:
    """One of the facts a session starts with, whatever type it has."""
    if isinstance(value, bool) or value is None:
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list | tuple):
        return "; ".join(fact(item) for item in value)
    return str(value)
