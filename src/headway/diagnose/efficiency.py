"""MFU and HFU of a trace, where they mean something: enough shapes or a model, and a device whose peak is known."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import numpy as np

from headway.account.errors import UserError
from headway.account.events import Flops
from headway.account.flops import FlopCount, describe, document_flops
from headway.account.measured_peaks import MeasuredPeaks
from headway.account.mfu import ImpossibleMfu, hfu, mfu
from headway.account.peaks import DTYPES, Peak, device_row, resolve_peak
from headway.account.shape import ModelShape
from headway.diagnose.facts import DeviceFacts, Efficiency, JobFacts, RankFacts
from headway.diagnose.padding import slots_of_grids, slots_of_shapes
from headway.diagnose.said import Said
from headway.diagnose.shape_flops import CONVENTION, count
from headway.diagnose.view import View

COVERED = 0.80
_MOST_DEVICES = 10_000  # that one replica of a model is split over
_FP8 = r"fp8|e4m3|e5m2|float8|_f8"
_FLOAT32 = r"sgemm|_f32f32_|gemm_f32|simt_sgemm|Cijk_.*_SB_"
_TF32 = r"tf32|s1688"


def with_efficiency(job: JobFacts, said: Said) -> JobFacts:
    """The job with what each rank's devices made of their window.

    Raises:
        UserError: the model's configuration cannot be used, nothing is known of the device that was named, or no
            number of devices computes the model on so many tokens in that time.
    """
    if said.device is not None:
        _known_device(said.device)
    shape = read_model(said.model) if said.model else None
    ranks = tuple(_with_efficiency(rank, said, shape) for rank in job.ranks)
    return dataclasses.replace(job, ranks=ranks)


def read_model(path: Path) -> ModelShape:
    """The shape of a Hugging Face config.json (or of the folder that holds it)."""
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"--model {path}: no Hugging Face config.json: {error}") from None
    if not isinstance(config, dict):
        raise UserError(f"--model {path}: a config.json holds an object, this one a {type(config).__name__}")
    try:
        return ModelShape.from_config(config)
    except UserError as error:
        raise UserError(f"--model {path}: {error}") from None


def _known_device(name: str) -> None:
    """A name given for its peak must have one, for some dtype."""
    measured, problem = MeasuredPeaks.usable()
    if device_row(name) is None and not any(measured.of_device(name, dtype) for dtype in DTYPES):
        why = resolve_peak(name, "bf16", measured=measured).source
        raise UserError(f"--device {name!r}: {why}" + (f"; {problem}" if problem else ""))


def _with_efficiency(rank: RankFacts, said: Said, shape: ModelShape | None) -> RankFacts:
    busiest = rank.device()
    slots, notes = None, rank.notes
    if said.tokens is not None or shape is not None:
        slots = said.slots or slots_of_shapes(rank, busiest) or slots_of_grids(Path(rank.path))
        if not slots or slots < (said.tokens or 0):
            why = (
                "no operator shapes (record_shapes=True) and no softmax over the vocabulary"
                if not slots
                else f"the trace computes {slots:,} slots, fewer than the {said.tokens:,} tokens given"
            )
            slots, notes = None, (*notes, f"padding is not known: {why}; give --slots")
    if shape is not None and said.tokens is None and slots is None:
        raise UserError(f"{rank.path}: --model needs --tokens: the trace does not tell how many slots it computes")
    devices = tuple(
        dataclasses.replace(item, efficiency=_efficiency(rank, item, said, slots, shape)) for item in rank.devices
    )
    return dataclasses.replace(rank, devices=devices, notes=notes)


def _efficiency(
    rank: RankFacts, device: DeviceFacts, said: Said, slots: int | None, shape: ModelShape | None
) -> Efficiency:
    tokens = said.tokens
    filled = tokens / slots if tokens is not None and slots else 1.0
    dtype = product_dtype(View(rank, device))
    measured, problem = MeasuredPeaks.usable()
    peak = resolve_peak(said.device or device.name or "unknown", dtype, measured=measured)
    counted = count(rank, device)
    if shape is not None:
        flops, says = _of_model(shape, tokens or slots or 0, slots, said.sequence, device)
    else:
        flops, says = counted.flops(filled), CONVENTION
    unknown = Efficiency(
        mfu=None, hfu=None, flops=None, coverage=counted.coverage, tokens=tokens, slots=slots,
        padding=None if tokens is None or not slots else 1 - filled, padding_is_hint=False,
        peak_text=peak.line() + (f"; {problem}" if problem else ""), convention=says, peak_flops=peak.flops,
    )  # fmt: skip
    if shape is None and counted.coverage < COVERED:
        why = f"shapes cover {counted.coverage:.0%} of compute, {COVERED:.0%} are needed"
        return dataclasses.replace(
            unknown, why=f"{why}: record them (record_shapes=True), or give --model and --tokens"
        )
    if tokens is None:
        says = f"{says}; padding counts as useful (give --tokens)"
    if slots is None and tokens is not None:
        says = f"{says}; padding is not known"
    found = _utilised(dataclasses.replace(unknown, flops=flops, convention=says), device, peak)
    if found.flops is not None or shape is None or tokens is None:
        return found
    seconds = device.window.wall_ns / 1e9
    if flops.useful > _MOST_DEVICES * (peak.flops or 0.0) * seconds:
        raise UserError(
            f"--tokens {tokens:,}: too many for {rank.path} and --model, over however many devices (real tokens of one "
            f"rank in the window of {seconds:.3g} s): {found.why}"
        )
    why = "the tokens are too many for this window, or the model is split over several devices and this one has a part"
    return dataclasses.replace(found, why=f"{found.why}; {why}")


def _utilised(known: Efficiency, device: DeviceFacts, peak: Peak) -> Efficiency:
    """HFU only where the trace tells a backward, and with it the recompute inside."""
    if peak.flops is None or known.flops is None:
        return dataclasses.replace(known, why=peak.line())
    seconds = device.window.wall_ns / 1e9
    try:
        share = mfu(known.flops.useful, seconds, peak.flops)
        again_known = "compute.backward" in device.account.parts
        with_again = hfu(known.flops.useful, known.flops.recompute, seconds, peak.flops)
    except ImpossibleMfu as error:
        return dataclasses.replace(known, flops=None, why=str(error))
    return dataclasses.replace(known, mfu=share, hfu=with_again if again_known else None)


def _of_model(
    shape: ModelShape, tokens: int, slots: int | None, sequence: int | None, device: DeviceFacts
) -> tuple[Flops, str]:
    """FLOPs of training on so many tokens. Recompute is scaled from forward by the time that it took in the trace."""
    length = max(1, min(sequence or 1, tokens))
    useful, computed = _documents(shape, tokens, length)
    filler, computed_too = _documents(shape, (slots or tokens) - tokens, length)
    forward = device.account.total("compute.forward")
    again = device.account.total("compute.recompute") / forward if forward else 0.0
    flops = Flops(useful=useful, padding=filler, recompute=round(again * (computed + computed_too)))
    says = describe() + (f"; sequences of {length:,}" if sequence else "; attention is not counted (give --seq-len)")
    return flops, says.replace("; no recompute", "")


def _documents(shape: ModelShape, total: int, length: int) -> tuple[int, int]:
    """FLOPs of training on `total` tokens as documents of `length`, the last one shorter: (all, of the forward pass).

    Each whole document costs the same, so that one is counted, however many there are.
    """
    whole, rest = divmod(total, length)
    one = document_flops(shape, [length])
    last = document_flops(shape, [rest]) if rest else FlopCount()
    return whole * one.total + last.total, whole * one.forward + last.forward


def product_dtype(view: View) -> str:
    """The dtype in which most time of the matrix products passes, by recorded types, else by kernel names."""
    products = view.of_kind("matmul") & view.computing
    total = view.time(products)
    for dtype, pattern in (("fp8", _FP8), ("tf32", _TF32), ("fp32", _FLOAT32)):
        if total and view.time(products & view.named(pattern)) * 2 > total:
            return dtype
    events, host = view.device.events, view.rank.host
    rows = np.flatnonzero(products & (events.op >= 0))
    of = {"fp32": 0, "fp16": 0, "bf16": 0}
    for row in rows.tolist():
        types = view.types_of(int(events.op[row])) if len(host) else ""
        match = re.search(r'"(float|c10::Half|c10::BFloat16)"', types)
        if match:
            of[{"float": "fp32", "c10::Half": "fp16"}.get(match[1], "bf16")] += int(view.spent[row])
    best = max(of, key=lambda name: of[name])
    return best if of[best] else "bf16" if view.on_gpu else "fp32"
