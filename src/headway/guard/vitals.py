"""What the machine says of itself: cards (NVML), network counters, the disk. They explain a slow or dead rank.

Nothing here decides anything, and everything is optional: what cannot be read is absent. A process of its own asks
(`vitals_main.py`), because a driver in trouble, or a shared file system, answers late or never; the supervisor, which
must tell others four times a second that it lives, only reads what that wrote.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

FILE = "vitals.json"
RECENT_S = 300.0
"""What happened longer ago explains nothing: one rx error of the first day is not why a rank died on the ninth."""
_STALE_S = 10.0
_HOT_C = 87
"""Above it data-centre cards slow down by themselves (H100: 87 °C)."""
_CLOCK_SHARE = 0.8
_DISK_SHARE = 0.97
_NIC_COUNTERS = ("rx_errors", "tx_errors", "rx_dropped", "tx_dropped")
# nvmlClocksEventReasons: those that take speed away; idle and application clocks do not.
_THROTTLES = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}


class Card(msgspec.Struct, kw_only=True):
    """One GPU. Degrees Celsius, watts, MHz; counters since the driver was loaded. None: not told. xids: critical events
    of the last minutes."""

    index: int
    temperature: int | None = None
    power: float | None = None
    power_limit: float | None = None
    clock: int | None = None
    clock_most: int | None = None
    throttle: int | None = None
    ecc_uncorrected: int | None = None
    pcie_replays: int | None = None
    xids: list[int] = []


class Vitals(msgspec.Struct, kw_only=True):
    """What was told at `at_ns` (monotonic). nics: counters; disk: complaints."""

    at_ns: int
    cards: list[Card] = []
    nics: dict[str, int] = {}
    disk: list[str] = []


def read_card(nvml: Any, index: int) -> Card:
    """What NVML tells of a card; every question may fail by itself."""
    card = Card(index=index)
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
    except Exception:  # NVMLError of whichever binding; a card that fell off the bus
        return card
    questions: dict[str, Callable[[], Any]] = {
        "temperature": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
        "power": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        "power_limit": lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000,
        "clock": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
        "clock_most": lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM),
        "throttle": lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
        "ecc_uncorrected": lambda: nvml.nvmlDeviceGetTotalEccErrors(
            handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        ),
        "pcie_replays": lambda: nvml.nvmlDeviceGetPcieReplayCounter(handle),
    }
    for name, ask in questions.items():
        try:
            setattr(card, name, ask())
        except Exception:  # as above: a laptop has no ECC, a virtual card no power
            continue
    return card


def card_complaints(card: Card, first: Card | None = None) -> list[str]:
    """What is not as it should be; `first`: the card some minutes ago, by which counters are counted."""
    said = []
    if card.temperature is not None and card.temperature >= _HOT_C:
        said.append(f"{card.temperature} °C")
    reasons = [text for bit, text in _THROTTLES.items() if (card.throttle or 0) & bit]
    slowed = card.clock is not None and card.clock_most and card.clock < _CLOCK_SHARE * card.clock_most
    if reasons:
        said.append(f"throttled ({', '.join(reasons)})")
    if slowed and reasons:  # an idle card is slow, too
        said.append(f"clock {card.clock} of {card.clock_most} MHz")
    if card.power is not None and card.power_limit and "power cap" in reasons:
        said.append(f"{card.power:.0f} of {card.power_limit:.0f} W")
    for name, text in (("ecc_uncorrected", "uncorrectable memory errors"), ("pcie_replays", "PCIe replays")):
        now, before = getattr(card, name), getattr(first, name) if first is not None else 0
        if now is not None and before is not None and now > before:
            said.append(f"{now - before} {text}")
    if card.xids:
        said.append(f"XID {', '.join(map(str, card.xids))}")
    return said


def nic_counters(root: Path = Path("/sys/class/net")) -> dict[str, int]:
    """Errors, drops and lost carriers by interface and counter."""
    found = {}
    for folder in sorted(root.iterdir()) if root.is_dir() else ():
        files = [folder / "statistics" / name for name in _NIC_COUNTERS] + [folder / "carrier_changes"]
        for file in files if folder.name != "lo" else ():
            try:
                found[f"{folder.name} {file.name}"] = int(file.read_text())
            except (OSError, ValueError):
                continue
    return found


def nic_complaints(now: Mapping[str, int], first: Mapping[str, int]) -> list[str]:
    # A dropped packet now and then is life; errors and a cable that came loose are not.
    limits = {"rx_dropped": 1000, "tx_dropped": 1000}
    more = {name: count - first.get(name, count) for name, count in now.items()}
    return [f"{name} +{count}" for name, count in more.items() if count > limits.get(name.split()[-1], 0)]


def disk_complaints(folder: Path) -> list[str]:
    try:
        usage = shutil.disk_usage(folder)
    except OSError as problem:
        return [f"the disk of {folder}: {problem.strerror}"]
    full = 1 - usage.free / usage.total if usage.total else 0.0
    return [f"the disk is {full:.0%} full"] if full >= _DISK_SHARE else []


def read_vitals(folder: Path) -> Vitals | None:
    """What the reading process wrote last; None where there is none, or it has stood still since."""
    try:
        vitals = msgspec.json.decode((folder / FILE).read_bytes(), type=Vitals)
    except (OSError, msgspec.DecodeError):
        return None
    return vitals if time.monotonic_ns() - vitals.at_ns <= _STALE_S * 1e9 else None
