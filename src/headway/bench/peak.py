"""`headway bench peak`: the best matmul rate and copy bandwidth this device reaches, saved for MFU on this machine.

A measured peak that is too low makes an impossible MFU (over 100 %). So several sizes are tried, those of a training
step among them and in the three layouts of forward, input gradient and weight gradient, on random numbers (zeros draw
less power and run faster), after a warm-up, with the number of threads that training uses.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Literal

import torch

from headway.account.errors import UserError
from headway.account.measured_peaks import MeasuredPeak, MeasuredPeaks, cpu_name, peaks_path, save_measured
from headway.account.peaks import device_row, tera

Layout = Literal["NN", "NT", "TN"]  # which operand is stored transposed: NT is y = x W', TN a weight gradient


@dataclass(frozen=True)
class Product:
    """A matrix product [m, k] x [k, n] and how its operands are stored."""

    m: int
    k: int
    n: int
    layout: Layout = "NN"

    @property
    def flops(self) -> int:
        return 2 * self.m * self.k * self.n

    def __str__(self) -> str:
        return f"{self.m}x{self.k}x{self.n} {self.layout}"


@dataclass(frozen=True)
class Rate:
    """FLOP/s of one product: the best and the median of `repeats` timed runs, on so many CPU threads."""

    product: Product
    best: float
    median: float
    repeats: int
    threads: int | None = None


@dataclass(frozen=True)
class PeakMeasurement:
    """FLOP/s (`flops`) and copy bandwidth (bytes/s) of one device, and every rate that was seen."""

    device: str
    dtype: str
    threads: int | None
    flops: float
    product: Product
    bandwidth: float
    rates: tuple[Rate, ...]
    seconds: float
    busy: str = ""

    def entry(self) -> MeasuredPeak:
        """As kept in the machine's file."""
        return MeasuredPeak(
            device=self.device,
            dtype=self.dtype,
            flops=self.flops,
            shape=(self.product.m, self.product.k, self.product.n),
            threads=self.threads,
            bandwidth=self.bandwidth,
            when=time.strftime("%Y-%m-%d %H:%M"),
            torch=torch.__version__,
            host=platform.node(),
        )

    def lines(self) -> list[str]:
        """The report: the answer, then every product tried."""
        threads = "" if self.threads is None else f", {self.threads} threads"
        rows = [
            f"{self.device}, {self.dtype}{threads}: {tera(self.flops)} ({self.product}), "
            f"memory copy {self.bandwidth / 1e9:.4g} GB/s, measured in {self.seconds:.1f} s"
        ]
        row = device_row(self.device)
        if row is not None and (sheet := row.rates.get(self.dtype)):
            rows.append(f"  {self.flops / sheet:.1%} of the datasheet's {tera(sheet)} ({row.source}), which MFU uses")
        for rate in sorted(self.rates, key=lambda rate: -rate.best):
            one = " on 1 thread" if rate.threads == 1 != self.threads else ""
            times = f"median {tera(rate.median)} of {rate.repeats}"
            rows.append(f"  {rate.product!s:>20}  best {tera(rate.best)}, {times}{one}")
        return [*rows, self.busy] if self.busy else rows


@dataclass(frozen=True)
class SavedPeak:
    """What was measured, the entry that the machine's file now holds, and where the file is."""

    found: PeakMeasurement
    kept: MeasuredPeak
    path: Path

    def lines(self) -> list[str]:
        higher = self.kept.flops > self.found.flops
        kept = f"kept the higher {tera(self.kept.flops)} {self.kept.how()}" if higher else "saved"
        return [*self.found.lines(), f"{kept}: {self.path}"]


_TORCH_DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# squares of several sizes in every layout, and tokens x hidden x MLP width of a small model's step
_CPU_PRODUCTS = (
    Product(256, 256, 256, "NT"),
    Product(512, 512, 512, "NN"),
    Product(512, 512, 512, "NT"),
    Product(512, 512, 512, "TN"),
    Product(1024, 1024, 1024, "NT"),
    Product(2048, 576, 576, "NT"),
    Product(2048, 576, 1536, "NT"),
    Product(2048, 1536, 576, "NN"),
    Product(1536, 2048, 576, "TN"),
    Product(2048, 2048, 2048, "NT"),
    Product(4096, 4096, 4096, "NT"),
)
_GPU_PRODUCTS = (
    Product(4096, 4096, 4096),
    Product(8192, 8192, 8192),
    Product(8192, 8192, 8192, "NT"),
    Product(16384, 8192, 16384, "NT"),
    Product(16384, 2560, 9728, "NT"),
    Product(16384, 9728, 2560, "NN"),
    Product(9728, 16384, 2560, "TN"),
    Product(8192, 4096, 14336, "NT"),
)


_COPY_BYTES = {"cpu": 2**27, "cuda": 2**30}


def device_name(device: str | torch.device) -> str:
    """The name peaks are looked up by: what CUDA reports, or `cpu_name()`."""
    device = torch.device(device)
    if device.type == "cpu":
        return cpu_name()
    if device.type == "cuda" and torch.cuda.is_available():
        return torch.cuda.get_device_name(device)
    raise UserError(f"cannot measure device {str(device)!r}; use cpu, or cuda where a GPU is visible")


def bench_peak(
    device: str | torch.device = "cpu",
    dtype: str = "fp32",
    threads: int | None = None,
    seconds: float = 3.0,
    path: Path | None = None,
) -> SavedPeak:
    """Measure and save to the machine's file (`$HEADWAY_HOME/peaks.json`).

    On a CPU a higher rate measured here before is kept: other work on the machine can only have lowered the new one,
    and a ceiling that is too low makes MFU impossible. Delete the file to start afresh.
    """
    found = measure_peak(device, dtype, threads, seconds)
    entry, before = found.entry(), MeasuredPeaks.load(path).get(found.device, dtype, found.threads)
    if found.threads is not None and before is not None and before.flops > entry.flops:
        return SavedPeak(found, before, path or peaks_path())
    return SavedPeak(found, entry, save_measured(entry, path))


def measure_peak(
    device: str | torch.device = "cpu",
    dtype: str = "fp32",
    threads: int | None = None,
    seconds: float = 3.0,
    products: tuple[Product, ...] | None = None,
) -> PeakMeasurement:
    """Best matmul rate over several products in about `seconds`, and the bandwidth of a large copy.

    On a CPU the best run counts: whatever else the machine does only slows a run down, and a ceiling must not be too
    low. On a GPU the median counts, since clocks fall under load. Measured with `threads` CPU threads (default: those
    in use). Raises UserError for a dtype or device that cannot be measured.
    """
    device = torch.device(device)
    name = device_name(device)
    if dtype not in _TORCH_DTYPES or (dtype == "tf32" and device.type == "cpu"):
        raise UserError(
            f"cannot measure {dtype!r} on {device.type}; use {', '.join(_TORCH_DTYPES)} (tf32 on CUDA only)"
        )
    on_cpu = device.type == "cpu"
    threads = (threads or torch.get_num_threads()) if on_cpu else None
    candidates = products or (_CPU_PRODUCTS if on_cpu else _GPU_PRODUCTS)
    start, busy = time.perf_counter(), _busy() if on_cpu else ""
    with _settings(threads, tf32=dtype == "tf32"):
        rates = _search(candidates, device, _TORCH_DTYPES[dtype], seconds)
        bandwidth = _copy_bandwidth(device)
    if threads is not None and threads > 1:
        # on a busy machine threads wait for each other, and several can look slower than one alone
        with _settings(1, tf32=False):
            rates += _search(candidates[:4], device, _TORCH_DTYPES[dtype], seconds / 4)
    value = (lambda rate: rate.best) if on_cpu else (lambda rate: rate.median)
    fastest = max(rates, key=value)
    spent = time.perf_counter() - start
    return PeakMeasurement(name, dtype, threads, value(fastest), fastest.product, bandwidth, rates, spent, busy)


def _busy() -> str:
    """One line where other work is using the CPUs now."""
    load, cpus = os.getloadavg()[0], os.cpu_count() or 1
    if load < 0.5 * cpus + 0.5:
        return ""
    return (
        f"the machine is busy (load {load:.1f} on {cpus} CPUs): the rate may be too low; measure again when it is quiet"
    )


def _search(
    candidates: tuple[Product, ...], device: torch.device, dtype: torch.dtype, seconds: float
) -> tuple[Rate, ...]:
    """A short look at every product, small ones first, then the rest of the time on the three fastest.

    A product that would take an eighth of the time once, judged by its layout's rate so far, is left out: a CPU that
    has no bf16 instructions would spend minutes on the large ones.
    """
    rates: dict[Product, Rate] = {}
    by_layout: dict[Layout, float] = {}
    for product in sorted(candidates, key=lambda product: product.flops):
        so_far = by_layout.get(product.layout)
        if so_far is not None and product.flops / so_far > seconds / 8:
            continue
        rates[product] = _rate(product, device, dtype, seconds / (2 * len(candidates)))
        by_layout[product.layout] = max(so_far or 0.0, rates[product].best)
    leaders = sorted(rates, key=lambda product: -rates[product].best)[:3]
    for product in leaders:
        again, first = _rate(product, device, dtype, seconds / (2 * len(leaders))), rates[product]
        rates[product] = replace(again, best=max(first.best, again.best), repeats=first.repeats + again.repeats)
    return tuple(rates.values())


def _rate(product: Product, device: torch.device, dtype: torch.dtype, budget: float) -> Rate:
    """Time `product` for about `budget` seconds, at least twice, after a warm-up that is not counted."""
    left, right = _operands(product, device, dtype)
    out = torch.empty(product.m, product.n, device=device, dtype=dtype)

    def run() -> None:
        torch.mm(left, right, out=out)

    times = _cuda_times(run, budget) if device.type == "cuda" else _cpu_times(run, budget)
    threads = None if device.type == "cuda" else torch.get_num_threads()
    return Rate(product, product.flops / min(times), product.flops / statistics.median(times), len(times), threads)


def _operands(product: Product, device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator(device=device).manual_seed(0)

    def noise(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, device=device, generator=generator).to(dtype)

    m, k, n = product.m, product.k, product.n
    left = noise(k, m).t() if product.layout == "TN" else noise(m, k)
    right = noise(n, k).t() if product.layout == "NT" else noise(k, n)
    return left, right


def _cpu_times(run: Callable[[], None], budget: float) -> list[float]:
    """Seconds per call; short calls are timed in groups of about 2 ms.

    That is long enough for the clock, and short enough to fall between the time slices of other processes.
    """
    run()
    begin = time.perf_counter()
    run()
    group = max(1, int(0.002 / max(time.perf_counter() - begin, 1e-7)))
    times: list[float] = []
    deadline = time.perf_counter() + budget
    while len(times) < 2 or time.perf_counter() < deadline:
        begin = time.perf_counter()
        for _ in range(group):
            run()
        times.append((time.perf_counter() - begin) / group)
    return times


def _cuda_times(run: Callable[[], None], budget: float) -> list[float]:
    """Seconds per call from CUDA events; calls are queued in groups so that launching is hidden."""
    for _ in range(5):
        run()
    torch.cuda.synchronize()
    times: list[float] = []
    deadline = time.perf_counter() + budget
    while len(times) < 2 or time.perf_counter() < deadline:
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(11)]
        marks[0].record()
        for mark in marks[1:]:
            run()
            mark.record()
        torch.cuda.synchronize()
        times += [begin.elapsed_time(end) / 1e3 for begin, end in pairwise(marks)]
    return times


def _copy_bandwidth(device: torch.device) -> float:
    """Bytes read and written per second by a copy far larger than the caches."""
    size = _COPY_BYTES[device.type]
    source, target = (torch.full((size,), value, dtype=torch.uint8, device=device) for value in (1, 2))

    def run() -> None:
        target.copy_(source)

    times = _cuda_times(run, 0.2) if device.type == "cuda" else _cpu_times(run, 0.2)
    return 2 * size / min(times)


@contextmanager
def _settings(threads: int | None, tf32: bool) -> Iterator[None]:
    """Threads and TF32 for the measurement, put back afterwards."""
    before = torch.get_num_threads(), torch.backends.cuda.matmul.allow_tf32
    try:
        if threads is not None:
            torch.set_num_threads(threads)
        torch.backends.cuda.matmul.allow_tf32 = tf32
        yield
    finally:
        torch.set_num_threads(before[0])
        torch.backends.cuda.matmul.allow_tf32 = before[1]
