"""`measure_peak` on this machine's CPU: it finds the fastest product it tried, saves it, and leaves torch as it was."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.account.errors import UserError
from headway.account.measured_peaks import MeasuredPeaks, cpu_name, save_measured
from headway.account.peaks import resolve_peak
from headway.bench import peak as bench
from headway.bench.peak import Product, Rate, bench_peak, device_name, measure_peak

SMALL = (Product(64, 64, 64), Product(96, 64, 128, "NT"), Product(128, 96, 64, "TN"))


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_CPU_PRODUCTS", SMALL)
    monkeypatch.setitem(bench._COPY_BYTES, "cpu", 2**20)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_best_of_several_products(dtype: str) -> None:
    found = measure_peak("cpu", dtype, threads=1, seconds=0.05)
    assert {rate.product for rate in found.rates} == set(SMALL)
    assert found.flops == max(rate.best for rate in found.rates) > 0
    assert all(rate.best >= rate.median > 0 and rate.repeats >= 2 for rate in found.rates)
    assert found.bandwidth > 0 and (found.device, found.threads) == (cpu_name(), 1)
    assert "1 threads" in found.lines()[0] and len(found.lines()) == 1 + len(SMALL) + bool(found.busy)


@pytest.mark.parametrize("product", SMALL, ids=str)
def test_layouts_multiply_what_they_say(product: Product) -> None:
    left, right = bench._operands(product, torch.device("cpu"), torch.float32)
    assert torch.mm(left, right).shape == (product.m, product.n)
    assert (left.is_contiguous(), right.is_contiguous()) == (product.layout != "TN", product.layout != "NT")
    assert float(left.abs().min()) >= 0 and float(left.std()) > 0.5  # zeros would run faster than training does
    assert product.flops == 2 * product.m * product.k * product.n


def test_settings_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    real = bench._rate
    monkeypatch.setattr(bench, "_rate", lambda *args: (seen.append(torch.get_num_threads()), real(*args))[1])
    measure_peak("cpu", "fp32", threads=2, seconds=0.05)
    assert seen[0] == 2 and seen[-1] == 1 and torch.get_num_threads() == 1


def test_several_threads_are_never_said_to_be_slower_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine two threads waited for each other and reached a tenth of what one did."""
    real = bench._rate

    def contended(*args: Any) -> Rate:
        rate = real(*args)
        return replace(rate, best=1.0, median=1.0) if torch.get_num_threads() > 1 else rate

    monkeypatch.setattr(bench, "_rate", contended)
    found = measure_peak("cpu", "fp32", threads=2, seconds=0.05)
    assert found.flops > 1e6 and found.threads == 2
    assert any("on 1 thread" in line for line in found.lines())


def test_a_busy_machine_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (9.5, 1.0, 1.0))
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert "busy (load 9.5 on 2 CPUs)" in measure_peak("cpu", "fp32", threads=1, seconds=0.05).lines()[-1]
    monkeypatch.setattr("os.getloadavg", lambda: (0.3, 1.0, 1.0))
    assert measure_peak("cpu", "fp32", threads=1, seconds=0.05).busy == ""


def test_saved_peak_makes_an_mfu_possible(tmp_path: Path) -> None:
    path = tmp_path / "peaks.json"
    saved = bench_peak("cpu", "fp32", threads=1, seconds=0.05, path=path)
    peak = resolve_peak(cpu_name(), "fp32", threads=1, measured=MeasuredPeaks.load(path))
    assert peak.flops == saved.found.flops and peak.kind == "measured"
    assert resolve_peak(cpu_name(), "bf16", threads=1, measured=MeasuredPeaks.load(path)).flops is None
    assert str(path) in saved.lines()[-1]


def test_a_busy_machine_does_not_lower_the_ceiling(tmp_path: Path) -> None:
    path = tmp_path / "peaks.json"
    first = bench_peak("cpu", "fp32", threads=1, seconds=0.05, path=path)
    quiet = type(first.kept)(**{**first.kept.__dict__, "flops": 1e15})
    save_measured(quiet, path)
    again = bench_peak("cpu", "fp32", threads=1, seconds=0.05, path=path)
    assert again.kept == quiet and MeasuredPeaks.load(path).get(cpu_name(), "fp32", 1) == quiet
    assert "kept the higher 1000 TFLOP/s" in again.lines()[-1]


def test_products_that_would_take_too_long_are_left_out() -> None:
    slow = (Product(32, 32, 32), Product(100_000, 1000, 100_000))
    found = measure_peak("cpu", "fp32", threads=1, seconds=0.05, products=slow)
    assert [rate.product for rate in found.rates] == [slow[0]]


def test_planted_too_small_peak_is_noticed(tmp_path: Path) -> None:
    """A peak from one slow product would let a step pass 100 %: the best of several is what must be kept."""
    found = measure_peak("cpu", "fp32", threads=1, seconds=0.05)
    slowest = min(found.rates, key=lambda rate: rate.best)
    assert found.product != slowest.product and found.flops > slowest.median


@pytest.mark.parametrize(("device", "dtype"), [("cpu", "tf32"), ("cpu", "fp8"), ("cpu", "int8"), ("meta", "fp32")])
def test_what_cannot_be_measured_is_said(device: str, dtype: str) -> None:
    with pytest.raises(UserError, match="cannot measure"):
        measure_peak(device, dtype)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_no_gpu_is_said() -> None:
    with pytest.raises(UserError, match="cannot measure device 'cuda'"):
        device_name("cuda")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_peak_stays_below_its_datasheet() -> None:
    found = measure_peak("cuda", "bf16", seconds=2.0)
    sheet = resolve_peak(found.device, "bf16").flops
    assert found.threads is None and found.flops > 1e12
    assert sheet is None or found.flops < 1.05 * sheet
