"""Peaks: an exact name finds its row, anything else finds nothing; measured ones are kept per machine."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from types import SimpleNamespace

import pytest

from headway.account import peaks as peaks_module
from headway.account.errors import UserError
from headway.account.measured_peaks import MeasuredPeak, MeasuredPeaks, cpu_name, peaks_path, save_measured
from headway.account.peaks import DTYPES, device_row, normalise, resolve_peak
from headway.train.place import peak_of


@pytest.mark.parametrize(
    ("name", "dtype", "teraflops"),
    [
        ("NVIDIA H200", "bf16", 989),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA H100 NVL", "bf16", 835),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312),
        ("A100-SXM4-40GB", "bf16", 312),
        ("NVIDIA A100-SXM4-80GB", "tf32", 156),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
        ("NVIDIA L40S", "fp8", 733),
        ("NVIDIA B200", "bf16", 2250),
        ("NVIDIA GH200 480GB", "bf16", 989),
        ("AMD Instinct MI300X", "bf16", 1307),
        ("Tesla V100-SXM2-32GB", "fp16", 125),
    ],
)
def test_reported_names_find_their_own_row(name: str, dtype: str, teraflops: float) -> None:
    peak = resolve_peak(name, dtype)
    assert (peak.flops, peak.kind) == (pytest.approx(teraflops * 1e12), "datasheet")
    assert name in peak.line(8) and peak.source in peak.line(8) and "8 x" in peak.line(8)


def test_spelling_of_a_name_does_not_matter() -> None:
    assert device_row("nvidia  a100 sxm4 80GB") is device_row("NVIDIA A100-SXM4-80GB")
    assert normalise("NVIDIA(R) L40S") == normalise("NVIDIA L40S")


UNKNOWN = [
    "NVIDIA H100",  # SXM, PCIe or NVL?
    "H100",
    "NVIDIA H100 80GB HBM2e",
    "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
    "NVIDIA A100",
    "NVIDIA A100-SXM4-40GB MIG 3g.20gb",
    "NVIDIA H2000",
    "NVIDIA GeForce RTX 4090 Laptop GPU",
    "NVIDIA GeForce RTX 4090 D",
    "NVIDIA GeForce GTX 1080",
    "Some Future GPU",
    "",
]


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_device_has_no_peak_and_says_what_to_do(name: str) -> None:
    """R9: no neighbour's number, ever."""
    peak = resolve_peak(name, "bf16")
    assert peak.flops is None and peak.kind == "unknown"
    assert "headway bench peak" in peak.source and "no MFU" in peak.line()


def test_near_names_are_told_apart_in_the_message() -> None:
    assert "NVIDIA H100 PCIe" in resolve_peak("NVIDIA H100", "bf16").source
    assert "slice" in resolve_peak("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16").source


@pytest.mark.parametrize("name", [name for name in UNKNOWN if "H100" in name or "A100" in name])
def test_planted_guess_by_part_of_the_name_is_caught(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """What other trainers do: the first row whose chip appears in the name, else an A100."""
    rows = peaks_module._rows()

    def guess(device: str) -> peaks_module.DeviceRow:
        chip = "h100" if "H100" in device else "a100"
        return next(row for key, row in rows.items() if chip in key)

    monkeypatch.setattr(peaks_module, "device_row", guess)
    with pytest.raises(AssertionError):
        test_unknown_device_has_no_peak_and_says_what_to_do(name)


def test_missing_rate_is_not_taken_from_another_dtype() -> None:
    peak = resolve_peak("Tesla V100-SXM2-32GB", "bf16")
    assert peak.flops is None and "states no bf16 rate" in peak.source


def test_table_is_plausible() -> None:
    """Dense rates: fp8 about twice bf16, tf32 half of it; every row has a source and at least one rate."""
    rows = {id(row): row for row in peaks_module._rows().values()}.values()
    assert len(rows) >= 30
    for row in rows:
        assert row.source and row.rates, row.names
        if "fp8" in row.rates and "bf16" in row.rates:
            assert 1.9 < row.rates["fp8"] / row.rates["bf16"] < 2.1, row.names
        if "tf32" in row.rates and "bf16" in row.rates:
            assert 0.45 < row.rates["tf32"] / row.rates["bf16"] < 0.55, row.names
        assert row.bandwidth is None or 1e11 < row.bandwidth < 1e13, row.names
        assert row.memory is None or 8e9 < row.memory < 5e11, row.names


def test_names_are_unique() -> None:
    names = [
        normalise(name) for row in {id(r): r for r in peaks_module._rows().values()}.values() for name in row.names
    ]
    assert len(names) == len(set(names)) == len(peaks_module._rows())


def test_override_wins_and_the_datasheet_is_still_told() -> None:
    peak = resolve_peak("NVIDIA H200", "bf16", override=8e14)
    assert (peak.flops, peak.kind, peak.datasheet) == (8e14, "override", 989e12)
    assert "datasheet 989 TFLOP/s" in peak.line()
    assert resolve_peak("Some Future GPU", "bf16", override=1e15).flops == 1e15


@pytest.mark.parametrize("override", [0.0, -1.0, float("nan")])
def test_nonsense_override_is_refused(override: float) -> None:
    with pytest.raises(UserError, match="positive"):
        resolve_peak("NVIDIA H200", "bf16", override=override)


def test_unknown_dtype_is_refused() -> None:
    with pytest.raises(UserError, match=r"'int4'.*" + DTYPES[0]):
        resolve_peak("NVIDIA H200", "int4")


def entry(device: str = "cpu: X, 2 CPUs", flops: float = 1e11, threads: int | None = 2) -> MeasuredPeak:
    return MeasuredPeak(device, "fp32", flops, (512, 512, 512), threads, 1e10, "2026-01-01 12:00", "2.13.0", "host")


def test_cpu_peak_is_the_measured_one_at_these_threads() -> None:
    measured = MeasuredPeaks([entry(flops=1.2e11), entry(flops=7e10, threads=1)])
    peak = resolve_peak("cpu: X, 2 CPUs", "fp32", threads=2, measured=measured)
    assert (peak.flops, peak.kind, peak.measured) == (1.2e11, "measured", 1.2e11)
    assert "2 threads" in peak.line() and "512x512x512" in peak.line()
    other = resolve_peak("cpu: X, 2 CPUs", "fp32", threads=4, measured=measured)
    assert other.flops is None and "measured with 2, 1 threads, not with the 4 in use" in other.source


def test_datasheet_goes_before_a_measurement_and_both_are_told() -> None:
    """R5: a measured matmul is no published peak; MFU against it would look 20 % better."""
    measured = MeasuredPeaks([MeasuredPeak("NVIDIA H200", "bf16", 7.9e14, (8192, 8192, 8192))])
    peak = resolve_peak("NVIDIA H200", "bf16", measured=measured)
    assert (peak.flops, peak.kind, peak.measured) == (989e12, "datasheet", 7.9e14)
    assert "measured here 790 TFLOP/s" in peak.line()
    future = MeasuredPeaks([MeasuredPeak("Some Future GPU", "bf16", 7.9e14, (8192, 8192, 8192))])
    assert resolve_peak("Some Future GPU", "bf16", measured=future).kind == "measured"


def test_saved_peaks_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path / "home"))
    assert MeasuredPeaks.load().entries() == []
    assert save_measured(entry()) == peaks_path() == tmp_path / "home" / "peaks.json"
    save_measured(entry(threads=1, flops=6e10))
    save_measured(entry(flops=1.5e11))
    assert MeasuredPeaks.load().get("cpu: X, 2 CPUs", "fp32", 2) == entry(flops=1.5e11)
    assert len(MeasuredPeaks.load().entries()) == 2
    assert [path.name for path in peaks_path().parent.iterdir() if path.suffix == ".json"] == ["peaks.json"]


def test_default_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("HEADWAY_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert peaks_path() == tmp_path / ".headway" / "peaks.json"


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"version": 1}',
        '{"version": 2, "peaks": []}',
        '{"version": 1, "peaks": [{"device": "x"}]}',
        '{"version": 1, "peaks": [{"device":"x","dtype":"fp32","flops":0,"shape":[1,1,1]}]}',
        '{"version": 1, "peaks": [{"device":"x","dtype":"fp32","flops":"fast","shape":[1,1,1]}]}',
    ],
)
def test_damaged_file_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "peaks.json"
    path.write_text(content)
    with pytest.raises(UserError, match=r"peaks\.json.*delete it"):
        MeasuredPeaks.load(path)
    with pytest.raises(UserError):
        save_measured(entry(), path)
    assert path.read_text() == content


@pytest.mark.parametrize("damage", ["home is a file", "torn", "not text", "a folder"])
def test_training_goes_on_without_a_file_that_cannot_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    home = tmp_path / "home"
    monkeypatch.setenv("HEADWAY_HOME", str(home))
    if damage == "home is a file":
        home.write_text("")
    elif damage == "a folder":
        peaks_path().mkdir(parents=True)
    else:
        home.mkdir()
        peaks_path().write_bytes(b'{"version": 1, "pea' if damage == "torn" else b"\xff\xfe")
    with pytest.raises(UserError, match=r"peaks\.json"):
        MeasuredPeaks.load()
    known, problem = MeasuredPeaks.usable()
    assert known.entries() == [] and "peaks.json" in problem
    said: list[str] = []
    for name, flops in (("NVIDIA H200", 989e12), ("cpu: X", None)):
        device = SimpleNamespace(name=name, threads=None)
        place = SimpleNamespace(device=device, dtype_name="bf16")
        config = SimpleNamespace(hardware=SimpleNamespace(peak_flops=None))
        assert peak_of(config, place, said.append).flops == flops  # type: ignore[arg-type]
    assert "going on without it: peak 1 x 989 TFLOP/s" in said[0] and "peak unknown, so no MFU" in said[1]


def test_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "peaks.json"
    save_measured(entry(), path)
    before = path.read_text()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        save_measured(entry(flops=2e11), path)
    assert path.read_text() == before
    assert sorted(item.name for item in tmp_path.iterdir()) == [".peaks.json.lock", "peaks.json"]


def _save_many(path: Path, threads: int) -> None:
    for repeat in range(5):
        save_measured(entry(threads=threads, flops=1e10 + repeat), path)


def test_parallel_writers_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "peaks.json"
    workers = [multiprocessing.get_context("fork").Process(target=_save_many, args=(path, n)) for n in range(1, 5)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert len(json.loads(path.read_text())["peaks"]) == 4


def test_cpu_name_is_stable_and_says_how_many() -> None:
    assert cpu_name() == cpu_name()
    assert cpu_name().startswith("cpu: ") and cpu_name().endswith("CPUs")
