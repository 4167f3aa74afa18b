"""Devices and clusters: hardware facts with a source each, and what a user may say about his own machines."""

from __future__ import annotations

import csv
import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

from headway.account.errors import UserError
from headway.plan.cluster_keys import KEYS, NUMBERS
from headway.plan.device_names import match_device
from headway.plan.numbers import GPUS
from headway.plan.reading import yaml_of

# One GPU's share of a node's network where no figure is known: one 400 Gb/s port, what an H100 node commonly has.
_INTER_NODE = 50e9
_ABOVE_PEAK = 1.05  # clocks may exceed what a datasheet promises, not by more


@dataclass(frozen=True)
class Device:
    """One accelerator. Rates are dense FLOP/s, memory in bytes (vendors write GB and mean GiB), bandwidths in bytes/s
    per direction.

    `measured` are matrix rates really reached (FLOP/s), where somebody published them; `domain` is how many devices the
    fast link joins (a DGX: 8, NVL72: 72). Prices are US dollars per device and hour (None where no band is known).
    """

    name: str
    rates: Mapping[str, float]
    measured: Mapping[str, float]
    memory: float
    bandwidth: float
    link: float
    domain: int
    inter_node: float
    tdp_w: float | None
    price_low: float | None
    price: float | None
    price_high: float | None
    source: str
    price_source: str = ""

    def __hash__(self) -> int:  # the rates are mappings; the name stands for them
        return hash((self.name, self.memory, self.bandwidth))


@dataclass(frozen=True)
class Cluster:
    """`gpus` devices in nodes of `gpus_per_node`; `inter_node` bytes/s per GPU and direction leave the node.

    `domain`: GPUs joined by the fast link. `oversubscription`: how much less the spine carries than the leaves (1: full
    bisection); beyond `rail` GPUs traffic crosses the spine. `host` and `nvme`: bytes/s per GPU for offload.
    `onloaded`: the network's protocol runs on the CPU (Omni-Path). `storage_total`: bytes/s of all nodes together.
    `in_network`: switches add up all-reduces (SHARP, NVLS), so that each rank sends and receives its buffer once.
    `hop_inside`, `hop`: measured seconds of latency of a doubling of ranks inside the fast domain and beyond it (None:
    the planner's constants).
    """

    device: Device
    gpus: int
    gpus_per_node: int
    domain: int
    inter_node: float
    oversubscription: float = 1.0
    rail: int = 0
    host: float = 25e9
    nvme: float = 3e9
    onloaded: bool = False
    price_per_hour: float | None = None
    storage_total: float | None = None
    in_network: bool = False
    hop_inside: float | None = None
    hop: float | None = None

    @property
    def storage(self) -> float:
        """bytes/s that checkpoints are written with: as given, else 1 GB/s a node, what Llama 3's cluster had (2 TB/s
        for 2,048 nodes, arXiv 2407.21783)."""
        return self.storage_total or 1e9 * self.nodes

    @property
    def nodes(self) -> int:
        return -(-self.gpus // self.gpus_per_node)

    @property
    def price(self) -> float | None:
        """US dollars per GPU and hour: the one given, else the typical published one, else None."""
        return self.price_per_hour if self.price_per_hour is not None else self.device.price

    def with_gpus(self, gpus: int) -> Cluster:
        """The same machines, another number of them."""
        if gpus < 1:
            raise UserError(f"gpus {gpus}: give at least 1")
        return replace(self, gpus=gpus)


def devices() -> dict[str, Device]:
    """Every device with enough facts to plan with, by its name."""
    return dict(_table()[0])


def find_device(name: str) -> Device:
    """The device called `name` (H100, H100-SXM-80GB, …), or that it means (`device_names` has the rule).

    Raises UserError with the nearest names.
    """
    by_name, aliases = _table()
    key = _key(name)
    full = aliases.get(key) or match_device(name, {one: device.memory / 2**30 for one, device in by_name.items()})
    if full is None:
        near = difflib.get_close_matches(key, list(aliases), n=4, cutoff=0.4)
        known = sorted({aliases[one] for one in near}) or ["A100", "H100", "H200", "B200", "GB200", "MI300X"]
        raise UserError(f"cluster device {name!r} is unknown; nearest: {', '.join(known)}")
    return by_name[full]


def check_precision(device: Device, precision: str, where: str = "") -> None:
    """Raises UserError naming what the device has, and `where` it was said. fp16 goes with bf16: whoever has one has
    the other, tables leave it out (TPUs and Trainium apart)."""
    if precision in device.rates or (precision == "fp16" and "bf16" in device.rates):
        return
    said = f" ({where})" if where else ""
    raise UserError(f"{device.name} has no {precision} units; it has {', '.join(device.rates)}{said}")


def make_cluster(device: Device, gpus: int, gpus_per_node: int | None = None, **changes: Any) -> Cluster:
    """A cluster of known devices; what is not said comes from the device's row."""
    per_node = gpus_per_node or (4 if device.domain > 8 else max(device.domain, min(8, gpus)))
    domain = device.domain if device.domain > 8 else min(device.domain, per_node)
    base = Cluster(device, gpus, per_node, max(1, domain), device.inter_node)
    return replace(base, **changes)


def load_cluster(spec: str) -> Cluster:
    """`H100x1024`, `8xA100`, or a YAML file with the keys device and gpus (and what differs from the usual machine).

    Raises UserError naming the key, for unknown devices and keys, and for numbers that are not positive.
    """
    path = Path(spec)
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise UserError(f"--cluster {spec}: no such file")
        try:
            content = yaml_of(path.read_text(encoding="utf-8"), f"--cluster {spec}")
        except UnicodeDecodeError as error:
            raise UserError(f"--cluster {spec}: not YAML ({str(error).splitlines()[0]})") from error
        if not isinstance(content, dict):
            raise UserError(f"--cluster {spec}: give a mapping with the keys device and gpus")
        return cluster_from(content, str(path))
    name, gpus = _split(spec)
    return make_cluster(find_device(name), gpus)


def cluster_from(content: Mapping[str, Any], where: str = "cluster") -> Cluster:
    """A cluster from a mapping; the keys are those of docs/plan.md."""
    for key in content:
        if key not in KEYS:
            near = difflib.get_close_matches(str(key), KEYS, n=3, cutoff=0.4) or KEYS
            raise UserError(f"{where}: key {key!r} is unknown; nearest: {', '.join(near)}")
    for key in ("device", "gpus"):
        if key not in content:
            raise UserError(f"{where}: key {key!r} is missing; e.g. device: H100, gpus: 1024")
    device = find_device(str(content["device"]))
    rates, measured = _rates(device, content, where)
    device = replace(
        device,
        rates=rates,
        measured=measured,
        memory=_number(content, "memory_gb", where, device.memory / 2**30) * 2**30,
        bandwidth=_number(content, "bandwidth_gbs", where, device.bandwidth / 1e9) * 1e9,
        link=_number(content, "link_gbs", where, device.link / 1e9) * 1e9,
    )
    per_node = _whole(content, "gpus_per_node", where, 0) or None
    gpus = _whole(content, "gpus", where)
    cluster = make_cluster(device, gpus, per_node)
    return replace(
        cluster,
        domain=_whole(content, "domain", where, cluster.domain),
        inter_node=_number(content, "inter_node_gbs", where, cluster.inter_node / 1e9) * 1e9,
        oversubscription=_number(content, "oversubscription", where, 1.0),
        rail=_whole(content, "rail", where, 0),
        host=_number(content, "host_gbs", where, cluster.host / 1e9) * 1e9,
        nvme=_number(content, "nvme_gbs", where, cluster.nvme / 1e9) * 1e9,
        price_per_hour=_number(content, "price_per_hour", where, 0) or None,
        storage_total=_number(content, "storage_gbs", where, 0) * 1e9 or None,
        in_network=_flag(content, "in_network_reduction", where),
        hop_inside=_number(content, "link_latency_us", where, 0) * 1e-6 or None,
        hop=_number(content, "inter_node_latency_us", where, 0) * 1e-6 or None,
    )


def _rates(device: Device, content: Mapping[str, Any], where: str) -> tuple[dict[str, float], dict[str, float]]:
    """Peaks and measured ceilings with what the file says. A given peak takes the device's ceiling along; fp16 goes
    with bf16, whose units it runs on. Raises UserError for a ceiling above its peak."""
    rates, measured = dict(device.rates), dict(device.measured)
    for precision in ("bf16", "fp8", "fp4"):
        if f"{precision}_tflops" in content:
            rates[precision] = _number(content, f"{precision}_tflops", where) * 1e12
            share = rates[precision] / device.rates.get(precision, rates[precision])
            if precision in measured:
                measured[precision] *= share
            if precision == "bf16" and "fp16" in rates:
                rates["fp16"] *= share
    for precision in ("bf16", "fp8"):
        key = f"measured_{precision}_tflops"
        if key not in content:
            continue
        measured[precision] = _number(content, key, where) * 1e12
        if measured[precision] > _ABOVE_PEAK * rates.get(precision, math.inf):
            peak = f"{precision}_tflops is {rates[precision] / 1e12:g}"
            raise UserError(f"{where}: key {key!r} is {content[key]}, above the peak ({peak}): one of them is wrong")
    return rates, measured


def _number(content: Mapping[str, Any], key: str, where: str, default: float | None = None) -> float:
    """What a key holds; text too, for YAML takes 1e3 for a word. Raises UserError with what is possible."""
    if key not in content and default is not None:
        return default
    kind = NUMBERS[key]
    try:
        return kind.read(content[key])
    except ValueError:
        raise UserError(f"{where}: key {key!r} is {content[key]!r}; give {kind.says}") from None


def _flag(content: Mapping[str, Any], key: str, where: str) -> bool:
    value = content.get(key, False)
    if not isinstance(value, bool):
        raise UserError(f"{where}: key {key!r} is {value!r}; give true or false")
    return value


def _whole(content: Mapping[str, Any], key: str, where: str, default: int | None = None) -> int:
    return int(_number(content, key, where, default))


def _split(spec: str) -> tuple[str, int]:
    """`H100x1024` and `1024xH100`."""
    after = re.fullmatch(r"\s*(.+?)\s*[x×*]\s*(\d+)\s*", spec)
    before = re.fullmatch(r"\s*(\d+)\s*[x×*]\s*(.+?)\s*", spec)
    found = (before[2], before[1]) if before else (after[1], after[2]) if after else (spec, "0")
    name, gpus = found[0], int(found[1][:12])
    twice = re.fullmatch(r"(.+?)\s*[x×*]\s*\d+|\d+\s*[x×*]\s*(.+)", name)
    if twice and _is_known(twice[1] or twice[2]):
        raise UserError(f"--cluster {spec!r}: two numbers; give all GPUs at once, e.g. H100x64 (8 to a node)")
    if gpus < 1:
        raise UserError(f"--cluster {spec!r}: say device and number, e.g. H100x1024, or name a .yaml file")
    if gpus > GPUS.most:
        raise UserError(f"--cluster {spec!r}: at most {GPUS.most:,} GPUs")
    return name, gpus


def _is_known(name: str) -> bool:
    try:
        return bool(find_device(name))
    except UserError:
        return False


def _key(name: str) -> str:
    return re.sub(r"[\s_\-]+", "", name.removeprefix("NVIDIA ")).casefold()


@lru_cache(maxsize=1)
def _table() -> tuple[dict[str, Device], dict[str, str]]:
    text = resources.files("headway.plan").joinpath("hardware.csv").read_text(encoding="utf-8")
    by_name: dict[str, Device] = {}
    aliases: dict[str, str] = {}
    for row in csv.DictReader(text.splitlines()):
        device = _device(row)
        if device is None:
            continue
        by_name[device.name] = device
        for name in (device.name, *filter(None, row["aliases"].split("|"))):
            aliases[_key(name)] = device.name
    return by_name, aliases


def _device(row: Mapping[str, str]) -> Device | None:
    """A row's device; None where memory or its bandwidth is not known, without which no plan can be made."""
    rates = {name: float(row[name]) * 1e12 for name in ("bf16", "fp16", "fp8", "fp4") if row[name]}
    if not rates or not row["memory_gb"] or not row["bandwidth_gbs"]:
        return None
    measured = {name: float(row[f"measured_{name}"]) * 1e12 for name in ("bf16", "fp8") if row[f"measured_{name}"]}
    prices = [float(row[key]) if row[key] else None for key in ("price_low", "price_typical", "price_high")]
    return Device(
        name=row["name"],
        rates=rates,
        measured=measured,
        memory=float(row["memory_gb"]) * 2**30,
        bandwidth=float(row["bandwidth_gbs"]) * 1e9,
        link=float(row["link_gbs"] or 50) * 1e9,
        domain=int(row["domain"] or 8),
        inter_node=float(row["inter_gbs"]) * 1e9 if row["inter_gbs"] else _INTER_NODE,
        tdp_w=float(row["tdp_w"]) if row["tdp_w"] else None,
        price_low=prices[0],
        price=prices[1],
        price_high=prices[2],
        source=row["source"],
        price_source=row["price_source"],
    )
