"""What `headway bench peak --json` and `headway bench comm --json` measured, as the keys of a cluster's file.

The planner takes a share of a link (`intra`, `inter` of constants.csv) and of the memory bandwidth (`hbm`) as what real
programs reach; a measurement is that already, so it is written as the datasheet figure that would give it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headway.account.errors import UserError
from headway.plan.cluster import Cluster, find_device
from headway.plan.constants import Constants
from headway.plan.numbers import POSITIVE
from headway.plan.reading import json_of

# Bytes on the wire of a rank over the buffer's, for n ranks (see collectives.py).
_VOLUME = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
}
# How far above a datasheet a measurement may lie: clocks; the share of a link it is divided by; other network cards.
_ABOVE, _SHARES, _PORTS = 1.05, 1.6, 8.0
_DTYPES = {"bf16": "measured_bf16_tflops", "fp16": "measured_bf16_tflops", "fp8": "measured_fp8_tflops"}


def read_bench(path: Path) -> list[dict[str, Any]]:
    """The entries of such a file (or of the machine's peaks.json). Raises UserError naming the file."""
    content = json_of(path.read_bytes(), str(path))
    if isinstance(content, dict):
        content = content.get("peaks", content.get("entries", [content]))
    known = isinstance(content, list) and content and all(isinstance(item, dict) for item in content)
    if not known or not any("flops" in item or "op" in item for item in content):
        raise UserError(f"{path}: nothing that `headway bench peak --json` or `headway bench comm --json` writes")
    return list(content)


def cluster_keys(entries: Sequence[Mapping[str, Any]], constants: Constants, where: str) -> dict[str, float]:
    """Keys of a cluster's file: measured matrix rates, memory bandwidth, links. Raises UserError for a bad entry."""
    found: dict[str, float] = {}
    for item in entries:
        if "flops" in item:
            key = _DTYPES.get(str(item.get("dtype")))
            if key:
                found[key] = max(found.get(key, 0.0), _positive(item, "flops", where) / 1e12)
            if item.get("bandwidth"):
                reach = _positive(item, "bandwidth", where) / 1e9 / constants.hbm
                found["bandwidth_gbs"] = max(found.get("bandwidth_gbs", 0.0), reach)
    for key, share, inside in (("link_gbs", constants.intra, True), ("inter_node_gbs", constants.inter, False)):
        mine = [
            item
            for item in entries
            if "op" in item and (_positive({"nodes": 1, **item}, "nodes", where) <= 1) == inside
        ]
        speed = _bus(mine, where)
        if speed:
            found[key] = speed / 1e9 / share
            latency = _latency(mine, speed, where)
            if latency:
                found["link_latency_us" if inside else "inter_node_latency_us"] = latency * 1e6
    if not found:
        raise UserError(f"{where}: no rate of bf16, fp16 or fp8, no bandwidth and no collective")
    return {key: round(value, 4) for key, value in found.items()}


def _bus(entries: Sequence[Mapping[str, Any]], where: str) -> float | None:
    """Median bus bandwidth of the messages that are at least half as large as the largest, bytes/s."""
    rates = []
    for item in entries:
        op, ranks = str(item["op"]), _positive(item, "ranks", where)
        if op not in _VOLUME:
            raise UserError(f"{where}: op {op!r} is unknown; nearest: {', '.join(_VOLUME)}")
        size, seconds = _positive(item, "bytes", where), _positive(item, "seconds", where)
        if ranks > 1:
            rates.append((size, _wire(item, where) * size / seconds))
    largest = max((size for size, _ in rates), default=0.0)
    large = [rate for size, rate in rates if size >= largest / 2]
    return statistics.median(large) if large else None


def _wire(item: Mapping[str, Any], where: str) -> float:
    """Bytes through one rank's link over the buffer's. Between nodes a ring runs over the ports of all its ranks on a
    node at once, and an all-to-all sends only what leaves the node through its own (collectives.py)."""
    op, ranks = str(item["op"]), _positive(item, "ranks", where)
    nodes = _positive({"nodes": 1, **item}, "nodes", where)
    if nodes <= 1:
        return _VOLUME[op](ranks)
    inside = max(1.0, ranks / nodes)
    return (ranks - inside) / ranks if op == "all_to_all" else _VOLUME[op](ranks) / inside


def check_measured(
    entries: Sequence[Mapping[str, Any]], keys: Mapping[str, float], cluster: Cluster, where: str
) -> None:
    """Raises UserError where the entries are of another device than the cluster's, or faster than its datasheet."""
    device = cluster.device
    for item in entries:
        name = str(item.get("device") or "")
        found = _device_called(name)
        if name and found != device.name:
            known = f"which is {found}" if found else "no device that is known"
            raise UserError(
                f"{where}: measured on {name!r}, {known}; --cluster says {device.name}: give the one it was"
            )
        if item.get("backend") == "gloo":
            raise UserError(
                f"{where}: collectives over gloo, between CPUs; --cluster says {device.name}: measure with nccl"
            )
    sheet = {
        "measured_bf16_tflops": (_ABOVE, device.rates.get("bf16", 0) / 1e12),
        "measured_fp8_tflops": (_ABOVE, device.rates.get("fp8", 0) / 1e12),
        "bandwidth_gbs": (_SHARES, device.bandwidth / 1e9),
        "link_gbs": (_SHARES, device.link / 1e9),
        "inter_node_gbs": (_PORTS, cluster.inter_node / 1e9),
    }
    for key, (times, most) in sheet.items():
        if keys.get(key, 0.0) > times * most:
            said = f"{device.name} has {most:,.0f}" if most else f"{device.name} has none"
            raise UserError(f"{where}: {key} of {keys[key]:,.0f} cannot be, {said}; is it of another machine?")


def _device_called(name: str) -> str | None:
    try:
        return find_device(name).name
    except UserError:
        return None


def _latency(entries: Sequence[Mapping[str, Any]], speed: float, where: str) -> float | None:
    """Seconds of a doubling of ranks: the median over messages too small for bandwidth to matter, each its time without
    its bytes' over log2(ranks), and over two for an all-reduce, which is two. None without any."""
    found = []
    for item in entries:
        ranks, size, seconds = (_positive(item, key, where) for key in ("ranks", "bytes", "seconds"))
        moving = _wire(item, where) * size / speed
        if ranks > 1 and moving < seconds / 4:
            found.append((seconds - moving) / math.log2(ranks) / (2 if item["op"] == "all_reduce" else 1))
    return statistics.median(found) if found else None


def _positive(item: Mapping[str, Any], key: str, where: str) -> float:
    value = item.get(key)
    try:
        return POSITIVE.read(value)
    except ValueError:
        raise UserError(f"{where}: key {key!r} is {value!r}; give {POSITIVE.says}") from None
