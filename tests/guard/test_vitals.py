"""What the machine says of itself: read where it is told, said where it explains, and never fatal."""

from __future__ import annotations

import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest
from supervised import Place as At
from supervised import supervise

from headway.guard import explain, vitals_main
from headway.guard.explain import Explainer
from headway.guard.generation import Place
from headway.guard.vitals import Card, card_complaints, nic_complaints, nic_counters, read_card, read_vitals
from headway.guard.vitals_main import read_for_ever


class NvmlError(Exception):
    pass


def fake(**answers: object) -> types.ModuleType:
    """A pynvml of two cards; a name that is given as an exception is a question that fails."""
    module = types.ModuleType("pynvml")
    known: dict[str, object] = {
        "nvmlInit": None, "nvmlDeviceGetCount": 2, "nvmlDeviceGetHandleByIndex": "h", "nvmlDeviceGetTemperature": 91,
        "nvmlDeviceGetPowerUsage": 350_000, "nvmlDeviceGetEnforcedPowerLimit": 700_000, "nvmlDeviceGetClockInfo": 1200,
        "nvmlDeviceGetMaxClockInfo": 1980, "nvmlDeviceGetCurrentClocksThrottleReasons": 0x40,
        "nvmlDeviceGetTotalEccErrors": 2, "nvmlDeviceGetPcieReplayCounter": 7, "nvmlEventSetCreate": "events",
        "nvmlDeviceRegisterEvents": None, "nvmlEventSetWait_v2": NvmlError("timeout"), **answers,
    }  # fmt: skip

    def answer(value: object) -> object:
        def asked(*_: object) -> object:
            if isinstance(value, Exception):
                raise value
            return value

        return asked

    for name, value in known.items():
        setattr(module, name, answer(value))
    constants = ("NVML_TEMPERATURE_GPU", "NVML_CLOCK_SM", "NVML_MEMORY_ERROR_TYPE_UNCORRECTED", "NVML_VOLATILE_ECC")
    for number, name in enumerate((*constants, "nvmlEventTypeXidCriticalError")):
        setattr(module, name, number)
    return module


def test_a_card_is_read_and_what_it_does_not_tell_is_absent() -> None:
    card = read_card(fake(), 1)
    assert (card.temperature, card.power, card.clock, card.ecc_uncorrected, card.pcie_replays) == (
        91,
        350.0,
        1200,
        2,
        7,
    )
    poor = read_card(fake(nvmlDeviceGetTotalEccErrors=NvmlError(), nvmlDeviceGetPowerUsage=NvmlError()), 0)
    assert (poor.temperature, poor.power, poor.ecc_uncorrected) == (91, None, None)
    assert read_card(fake(nvmlDeviceGetHandleByIndex=NvmlError("lost")), 0) == Card(index=0)


def test_complaints_name_what_takes_speed_and_count_from_the_start() -> None:
    first = Card(index=0, ecc_uncorrected=2, pcie_replays=7)
    hot = Card(
        index=0,
        temperature=91,
        clock=1200,
        clock_most=1980,
        throttle=0x41,
        ecc_uncorrected=3,
        pcie_replays=7,
        xids=[79],
    )
    assert card_complaints(hot, first) == [
        "91 °C", "throttled (hardware thermal slowdown)", "clock 1200 of 1980 MHz", "1 uncorrectable memory errors", "XID 79"
    ]  # fmt: skip
    idle = Card(index=0, temperature=40, clock=210, clock_most=1980, throttle=0x1)
    assert card_complaints(idle, idle) == [] and card_complaints(Card(index=0)) == []
    capped = Card(index=0, throttle=0x4, power=699.6, power_limit=700.0)
    assert card_complaints(capped) == ["throttled (power cap)", "700 of 700 W"]


def test_network_counters_are_counted_from_the_start(tmp_path: Path) -> None:
    (tmp_path / "ib0" / "statistics").mkdir(parents=True)
    (tmp_path / "lo" / "statistics").mkdir(parents=True)
    for place in ("ib0", "lo"):
        (tmp_path / place / "statistics" / "rx_errors").write_text("4\n")
    (tmp_path / "ib0" / "carrier_changes").write_text("nonsense")
    first = nic_counters(tmp_path)
    assert first == {"ib0 rx_errors": 4}
    (tmp_path / "ib0" / "statistics" / "rx_errors").write_text("9\n")
    assert nic_complaints(nic_counters(tmp_path), first) == ["ib0 rx_errors +5"]
    assert nic_complaints(first, first) == [] and nic_complaints({"new rx_errors": 3}, {}) == []


def test_the_reading_process_writes_and_ends_quietly_without_a_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake(nvmlInit=NvmlError("no driver")))
    read_for_ever(tmp_path, rounds=1, every_s=0)
    assert read_vitals(tmp_path) == []
    event = types.SimpleNamespace(device="h", eventData=79)
    waits = iter([event, NvmlError("timeout")])
    module = fake(nvmlDeviceGetIndex=1)

    def wait(*_: object) -> object:
        found = next(waits)
        if isinstance(found, Exception):
            raise found
        return found

    module.nvmlEventSetWait_v2 = wait  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pynvml", module)
    read_for_ever(tmp_path, rounds=1, every_s=0)
    assert [card.xids for card in read_vitals(tmp_path)] == [[], [79]]
    explainer = Explainer(tmp_path, tmp_path)
    told = explainer.of_ranks(Place(1, 4, first=2), {"CUDA_VISIBLE_DEVICES": "1"})
    assert "card 1: 91 °C" in told[2] and "XID 79" in told[2]
    (tmp_path / "vitals.json").write_text('[{"index": ')
    assert read_vitals(tmp_path) == []


def test_a_dead_rank_is_told_with_its_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole way: the reader's process, the supervisor, the ledger."""
    monkeypatch.setitem(sys.modules, "pynvml", fake())
    monkeypatch.setattr(vitals_main, "DRIVER", tmp_path)
    monkeypatch.setattr(explain, "_EVERY_S", 0.0)

    def seen(*args: Any, **options: Any) -> list[Card]:
        cards = read_vitals(*args, **options)
        if cards:
            (tmp_path / "seen").touch()
        return cards

    monkeypatch.setattr(explain, "read_vitals", seen)

    def fault(place: At) -> None:
        if place.rank == 1 and place.step == 7 and place.once("failed"):
            while not (tmp_path / "seen").exists():  # how fast the reader's process starts is not what is tested
                time.sleep(0.01)
            raise ValueError("a number came out wrong")

    ended = supervise(tmp_path, fault, hang_least_s=60.0)
    (incident,) = ended.incidents
    assert ended.code == 0 and "a number came out wrong" in incident.evidence
    assert "card 1: 91 °C, throttled (hardware thermal slowdown), clock 1200 of 1980 MHz" in incident.evidence
