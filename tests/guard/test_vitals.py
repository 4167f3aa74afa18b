"""What the machine says of itself: read where it is told, said where it explains, and never fatal."""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
import types
from pathlib import Path

import pytest
from supervised import Place as At
from supervised import supervise

from headway.guard import vitals_main
from headway.guard.beacon import VARIABLE, Pulse
from headway.guard.explain import Explainer, _Before
from headway.guard.generation import Place
from headway.guard.hang import HangJudge
from headway.guard.ledger import Ledger
from headway.guard.vitals import (
    FILE,
    RECENT_S,
    Card,
    Vitals,
    card_complaints,
    nic_complaints,
    nic_counters,
    read_card,
    read_vitals,
)
from headway.guard.vitals_main import Reader, _Disk, read_for_ever, write
from headway.guard.watching import Lost, Watch
from headway.record.incidents import read_incidents


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


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> types.ModuleType:
    module = fake()
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.setattr(vitals_main, "DRIVER", tmp_path)
    return module


def vitals(**more: object) -> Vitals:
    return Vitals(at_ns=time.monotonic_ns(), **more)  # type: ignore[arg-type]


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


def test_complaints_name_what_takes_speed_and_count_from_some_minutes_ago() -> None:
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
    assert card_complaints(first, Card(index=0)) == [], "a card that told nothing for a moment has lost nothing"


def test_network_counters_are_counted_from_some_minutes_ago(tmp_path: Path) -> None:
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


def test_what_a_counter_said_on_the_first_day_explains_nothing_later() -> None:
    before = _Before[int]()
    assert [before.of(4, 0.0), before.of(9, 1.0), before.of(9, RECENT_S)] == [4, 4, 4]
    assert before.of(9, 2 * RECENT_S + 1) == 9


def test_the_reading_process_writes_and_goes_on_without_a_driver(
    tmp_path: Path, cards: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake(nvmlInit=NvmlError("no driver")))
    read_for_ever(tmp_path, tmp_path, rounds=1, every_s=0)
    told = read_vitals(tmp_path)
    assert told is not None and told.cards == []
    event = types.SimpleNamespace(device="h", eventData=79)
    waits = iter([event, event, NvmlError("timeout")])

    def wait(*_: object) -> object:
        found = next(waits)
        if isinstance(found, Exception):
            raise found
        return found

    module = fake(nvmlDeviceGetIndex=1)
    module.nvmlEventSetWait_v2 = wait  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pynvml", module)
    read_for_ever(tmp_path, tmp_path, rounds=1, every_s=0)
    told = read_vitals(tmp_path)
    assert told is not None and [card.xids for card in told.cards] == [[], [79]]
    explainer = Explainer(tmp_path, {"CUDA_VISIBLE_DEVICES": "0,1"})
    said = explainer.of_ranks(Place(1, 4, first=2), {"CUDA_VISIBLE_DEVICES": "1"})
    assert "card 1: 91 °C" in said[2] and "XID 79" in said[2]
    assert "card 0: 91 °C" in explainer.of_ranks(Place(1, 4, first=2), {})[2]
    (tmp_path / FILE).write_text('{"at_ns": ')
    assert read_vitals(tmp_path) is None


def test_the_supervisor_asks_no_disk_and_old_words_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that does not answer must not make a machine that lives look lost."""

    def hangs(*_: object) -> None:
        raise AssertionError("asked by the supervisor")

    monkeypatch.setattr(shutil, "disk_usage", hangs)
    explainer, place = Explainer(tmp_path, {}), Place(2, 2)
    assert explainer.of_ranks(place, {}) == {}
    write(tmp_path, vitals(disk=["the disk is 98% full"]))
    explainer.said = {1: "of a generation before", 2: "of another machine"}
    explainer.look(place, {})
    assert explainer.said == dict.fromkeys((0, 1), "the disk is 98% full") | {2: "of another machine"}
    write(tmp_path, Vitals(at_ns=time.monotonic_ns() - 60 * 10**9, disk=["the disk is 98% full"]))
    explainer.look(place, {})
    assert explainer.said == {2: "of another machine"}


def test_a_disk_that_does_not_answer_holds_up_nothing_and_is_said_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = threading.Event()
    monkeypatch.setattr(vitals_main, "_ORDINARY_S", 0.01)
    monkeypatch.setattr(vitals_main, "disk_complaints", lambda folder: [str(answer.wait(60))])
    disk = _Disk(tmp_path)
    assert disk.complaints() == [] == disk.complaints()
    monkeypatch.setattr(vitals_main, "_SILENT_S", 0.0)
    assert "has not answered for" in disk.complaints()[0]
    answer.set()
    assert disk._thread is not None
    disk._thread.join()
    monkeypatch.setattr(vitals_main, "_ORDINARY_S", 60.0)
    assert disk.complaints() == ["True"]


def test_the_reader_is_there_without_cards_and_goes_with_its_context(tmp_path: Path) -> None:
    with Reader(tmp_path, tmp_path / "not there") as reader:
        until = time.monotonic() + 60
        while (told := read_vitals(tmp_path)) is None and time.monotonic() < until:
            time.sleep(0.01)
    assert told is not None and "No such file" in told.disk[0]
    assert reader._process is not None and reader._process.returncode is not None


def test_what_a_card_says_after_the_death_is_added_to_it(tmp_path: Path) -> None:
    """Of the card on which the dead rank ran, whatever number its rank has now."""
    ledger, said = Ledger(tmp_path / "incidents.jsonl"), {0: "card of another", 1: "card 2: XID 79"}
    known = dict.fromkeys(Pulse.__dataclass_fields__, 0) | {"phase": "step", "durations": (), "first_ns": 5}
    for then, now, which in (
        (["n/cuda:0", "n/cuda:1", "n/cuda:2"], ["n/cuda:1", "n/cuda:2"], 2),
        (["a", "a", "b", "b"], ["b", "b"], 3),
    ):
        incident = ledger.record("rank killed", 7, rank=which, evidence="killed")
        lost = Lost.of(incident, 1, {}, then)
        Watch(now, HangJudge(), ledger, lost, None, lambda: said).settle({0: Pulse(**known)})  # type: ignore[arg-type]
        assert lost.rank_in(now) == 1 and lost.rank_in(["c"]) is None and lost.rank_in(then[:which]) is None
    assert [item.evidence for item in read_incidents(ledger.path).items] == ["killed; later card 2: XID 79"] * 2


def told_by_the_reader(word: str) -> None:
    """Waits, in a rank, until the reader has written this down."""
    file = Path(os.environ[VARIABLE]).parent / FILE
    until = time.monotonic() + 30
    while not (file.is_file() and word in file.read_text()) and time.monotonic() < until:
        time.sleep(0.01)


def test_a_dead_rank_is_told_with_its_card_and_the_xid_that_killed_it(tmp_path: Path, cards: types.ModuleType) -> None:
    """The whole way: the reader's process, the supervisor, the ledger. The event comes a moment before the death."""

    def wait(_events: object, milliseconds: int) -> object:
        until = time.monotonic() + milliseconds / 1000
        while time.monotonic() < until:
            if (tmp_path / "failed").exists() and not (tmp_path / "told").exists():
                (tmp_path / "told").touch()
                return types.SimpleNamespace(device="h", eventData=79)
            time.sleep(0.01)
        raise NvmlError("timeout")

    cards.nvmlEventSetWait_v2 = wait  # type: ignore[attr-defined]
    cards.nvmlDeviceGetIndex = lambda device: 1  # type: ignore[attr-defined]

    def fault(place: At) -> None:
        if place.rank == 1 and place.step == 7 and place.once("failed"):
            told_by_the_reader('"xids":[79]')
            raise ValueError("a number came out wrong")

    ended = supervise(tmp_path, fault)
    (incident,) = ended.incidents
    assert ended.code == 0 and "a number came out wrong" in incident.evidence
    assert "card 1: 91 °C, throttled (hardware thermal slowdown), clock 1200 of 1980 MHz" in incident.evidence
    assert "XID 79" in incident.evidence
