"""What each key of a cluster's file may hold. The bounds leave room for ten years of machines, and none for a slip of
units: megabytes for gigabytes, FLOP/s for TFLOP/s, a price of the node's life for that of an hour."""

from __future__ import annotations

from collections.abc import Mapping

from headway.plan.numbers import GPUS, Kind


def _from_to(least: float, most: float, what: str, whole: bool = False) -> Kind:
    return Kind(least, most, f"{what} from {least:,g} to {most:,.0f}", whole)


_TFLOPS = _from_to(0.001, 200_000, "TFLOP/s")
_MICROSECONDS = _from_to(0.001, 1_000_000, "microseconds")
NUMBERS: Mapping[str, Kind] = {
    "gpus": GPUS,
    "gpus_per_node": _from_to(1, 1024, "a whole number of GPUs", whole=True),
    "domain": _from_to(1, 100_000, "a whole number of GPUs", whole=True),  # a TPU v5p pod joins 8,960
    "inter_node_gbs": _from_to(0.001, 10_000, "GB/s a GPU"),
    "oversubscription": _from_to(1, 1000, "a ratio (1: full bisection)"),
    "rail": _from_to(0, GPUS.most, "a whole number of GPUs", whole=True),
    "memory_gb": _from_to(1, 10_000, "GB"),
    "bandwidth_gbs": _from_to(1, 1_000_000, "GB/s"),
    "link_gbs": _from_to(0.001, 100_000, "GB/s a direction"),
    **dict.fromkeys(("bf16_tflops", "fp8_tflops", "fp4_tflops"), _TFLOPS),
    "price_per_hour": _from_to(0.001, 1000, "dollars a GPU and hour"),
    **dict.fromkeys(("host_gbs", "nvme_gbs"), _from_to(0.001, 10_000, "GB/s a GPU")),
    "storage_gbs": _from_to(0.001, 1_000_000, "GB/s of all nodes together"),
    **dict.fromkeys(("measured_bf16_tflops", "measured_fp8_tflops"), _TFLOPS),
    **dict.fromkeys(("link_latency_us", "inter_node_latency_us"), _MICROSECONDS),
}
KEYS = ("device", *NUMBERS, "in_network_reduction")
