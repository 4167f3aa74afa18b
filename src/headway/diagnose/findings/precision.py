"""Matrix products in float32 on a device that has faster units for 16 bits."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from headway.account.peaks import DeviceRow, device_row
from headway.diagnose.case import Case
from headway.diagnose.facts import NONE
from headway.diagnose.finding import Finding
from headway.diagnose.view import Mask, View, ms, short

NOTABLE = 0.05
_VOLTA, _AMPERE = 7, 8  # compute capabilities from which NVIDIA's units multiply float16, bfloat16
_FLOAT32 = r"sgemm|s1688gemm|_f32f32_|gemm_f32|simt_sgemm|tf32|_S_.*_SB_|Cijk_.*_SB_"


def find(case: Case) -> Iterator[Finding]:
    """Upper bound: by the ratio of the device's peaks. Surely won: half, since half the bytes move even where a product
    is bound by memory."""
    view = case.view
    if not view.on_gpu:
        return
    products = _float32(view)
    spent = view.time(products)
    if spent < NOTABLE * view.wall_ns:
        return
    row = device_row(view.device.name)
    slow = row and (row.rates.get("tf32" if view.named(r"tf32|s1688").any() else "fp32"))
    half = _half(view, row)
    fast = row and (row.rates.get(half) or row.rates.get("fp16"))
    if not half or (row is not None and not fast):
        return
    ratio = min(0.97, 1 - slow / fast) if slow and fast else 0.75
    yield Finding(
        name="float32-matmuls",
        title="matrix products run in float32",
        claims={"device.matmul": int(spent * max(0.5, ratio))},
        lower_ns=int(spent * 0.5),
        wall_ns=view.wall_ns,
        evidence=(
            f"{ms(spent)} in {int(products.sum()):,} float32 products: "
            + ", ".join(f"{short(name)} {count:,}×" for name, count, _ in view.top_names(products)),
        ),
        check="kernel names: bf16 products say bf16 or s16816 (CUDA), BBS or BSS (ROCm); sgemm and s1688 are float32",
        remedy=half,
    )


def _half(view: View, row: DeviceRow | None) -> str:
    """The 16-bit dtype whose products are fast: by the compute capability that the trace's header tells, else by the
    datasheet; bf16 where nothing is known, "" where there is none."""
    listed = view.rank.metadata.get("deviceProperties")
    for item in listed if isinstance(listed, list) else ():
        major = item.get("computeMajor") if isinstance(item, dict) and item.get("name") == view.device.name else None
        if isinstance(major, int):
            return "bf16" if major >= _AMPERE else "fp16" if major >= _VOLTA else ""
    return "bf16" if row is None or "bf16" in row.rates else "fp16" if "fp16" in row.rates else ""


def _float32(view: View) -> Mask:
    """Products whose operator was given float32, by recorded types; by kernel name where none were recorded."""
    events, host = view.device.events, view.rank.host
    matmul = view.of_kind("matmul") & view.computing
    typed = np.zeros(len(events), bool)
    result = matmul & view.named(_FLOAT32)
    known = np.flatnonzero(matmul & (events.op >= 0))
    for row in known:
        types = host.types[events.op[row]]
        if types != NONE:
            typed[row] = True
            result[row] = bool(re.match(r'\["float"', view.rank.shapes[types]))
    return result
