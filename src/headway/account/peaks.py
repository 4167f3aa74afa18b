"""Peak FLOP/s of the device in use: from a datasheet row by its exact reported name, or measured on this machine.

A device that is not known has no peak, and so no MFU: a neighbour's number would make a wrong MFU look right.
"""

from __future__ import annotations

import csv
import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Literal

from headway.account.errors import UserError
from headway.account.measured_peaks import MeasuredPeaks

DTYPES = ("bf16", "fp16", "fp8", "tf32", "fp32")
Kind = Literal["override", "datasheet", "measured", "unknown"]


@dataclass(frozen=True)
class DeviceRow:
    """A datasheet row. Rates are dense FLOP/s of one device as PyTorch counts devices; bytes and bytes/s."""

    names: tuple[str, ...]
    rates: Mapping[str, float]
    memory: float | None
    bandwidth: float | None
    source: str


@dataclass(frozen=True)
class Peak:
    """The peak used for MFU (`flops`, FLOP/s of one device, None when unknown), where it is from, and the other one."""

    device: str
    dtype: str
    flops: float | None
    source: str
    kind: Kind
    datasheet: float | None = None
    measured: float | None = None

    def line(self, devices: int = 1) -> str:
        """`peak 2 x 989 TFLOP/s bf16 (NVIDIA H200; datasheet: …)`, with the measured rate where both are known."""
        if self.flops is None:
            return f"peak unknown, so no MFU: {self.source}"
        also = ""
        if self.kind != "measured" and self.measured is not None:
            also = f"; measured here {tera(self.measured)}"
        elif self.kind == "override" and self.datasheet is not None:
            also = f"; datasheet {tera(self.datasheet)}"
        source = self.source if self.kind == "measured" else f"{self.kind}: {self.source}"
        return f"peak {devices} x {tera(self.flops)} {self.dtype} ({self.device}; {source}{also})"


def tera(flops: float) -> str:
    """`989 TFLOP/s`, or GFLOP/s where that reads better."""
    return f"{flops / 1e12:.4g} TFLOP/s" if flops >= 1e12 else f"{flops / 1e9:.4g} GFLOP/s"


def device_row(name: str) -> DeviceRow | None:
    """The datasheet row of the device that reports `name` (`torch.cuda.get_device_name()`), or None.

    The whole name must match, apart from case, spaces, hyphens and a trademark sign: "NVIDIA H100" may be three
    different parts, and a MIG slice is not the card.
    """
    return _rows().get(normalise(name))


def normalise(name: str) -> str:
    """`NVIDIA A100-SXM4-80GB` and `nvidia a100 sxm4 80gb` are the same device."""
    return re.sub(r"[\s_\-]+", " ", re.sub(r"\((?:r|tm)\)|[®™]", "", name, flags=re.IGNORECASE)).strip().casefold()


def resolve_peak(
    device: str,
    dtype: str,
    *,
    override: float | None = None,
    threads: int | None = None,
    measured: MeasuredPeaks | None = None,
) -> Peak:
    """The peak MFU is computed with: the one given, else the datasheet's, else the one measured on this machine.

    `device` is the exact reported name (`cpu_name()` for a CPU), `dtype` that of the matrix products, `threads` the
    number in use on a CPU, `override` FLOP/s of one device. Unknown: `flops` is None and `source` says why and what
    to do. Raises UserError for an unknown dtype or an override that is not positive.
    """
    if dtype not in DTYPES:
        raise UserError(f"no peaks are kept for dtype {dtype!r}; known: {', '.join(DTYPES)}")
    row = device_row(device)
    sheet = row.rates.get(dtype) if row else None
    found = measured.get(device, dtype, threads) if measured else None
    rate = found.flops if found else None
    if override is not None:
        if not override > 0:
            raise UserError(f"peak override {override!r} must be a positive number of FLOP/s of one device")
        return Peak(device, dtype, float(override), "given by the user", "override", sheet, rate)
    if row is not None and sheet is not None:
        return Peak(device, dtype, sheet, row.source, "datasheet", sheet, rate)
    if found is not None:
        return Peak(device, dtype, found.flops, found.how(), "measured", None, found.flops)
    return Peak(device, dtype, None, _why_unknown(device, dtype, threads, row, measured), "unknown")


def _why_unknown(
    device: str, dtype: str, threads: int | None, row: DeviceRow | None, measured: MeasuredPeaks | None
) -> str:
    todo = "`headway bench peak` measures it, or give it in the run file"
    others = measured.of_device(device, dtype) if measured else []
    if others:
        seen = ", ".join(str(other.threads) for other in others)
        return f"{device!r} was measured with {seen} threads, not with the {threads} in use; {todo}"
    if row is not None:
        return f"the datasheet of {device!r} states no {dtype} rate; {todo}"
    if " mig " in f" {normalise(device)} ":
        return f"{device!r} is a slice of a card and has no datasheet; {todo}"
    near = _near(normalise(device))
    alike = f" (not the same as: {', '.join(near)})" if near else ""
    return f"no datasheet row for device {device!r}{alike}; {todo}"


def _near(name: str) -> list[str]:
    """Devices whose name continues this one or begins it, then those spelled alike."""
    rows = _rows()
    related = [key for key in rows if name and (key.startswith(f"{name} ") or name.startswith(f"{key} "))]
    alike = difflib.get_close_matches(name, list(rows), n=3, cutoff=0.6)
    return list(dict.fromkeys(rows[key].names[0] for key in [*related, *alike]))[:4]


@lru_cache(maxsize=1)
def _rows() -> dict[str, DeviceRow]:
    text = resources.files("headway.account").joinpath("peaks.csv").read_text(encoding="utf-8")
    rows: dict[str, DeviceRow] = {}
    for line in csv.DictReader(text.splitlines()):
        names = tuple(line["names"].split("|"))
        row = DeviceRow(
            names=names,
            rates={dtype: float(line[dtype]) * 1e12 for dtype in DTYPES if line[dtype]},
            memory=float(line["memory_gb"]) * 1e9 if line["memory_gb"] else None,
            bandwidth=float(line["bandwidth_gbs"]) * 1e9 if line["bandwidth_gbs"] else None,
            source=line["source"],
        )
        for name in names:
            rows[normalise(name)] = row
    return rows
