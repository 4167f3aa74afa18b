"""A link that moves bytes far below what the device's links can."""

from __future__ import annotations

from collections.abc import Iterator

from headway.diagnose.case import Case
from headway.diagnose.facts import NONE, Collective
from headway.diagnose.finding import Finding
from headway.diagnose.findings.communication import size_of
from headway.diagnose.view import ms

SLOW, LARGE = 0.25, 4 << 20
NOTABLE = 0.03
# One direction, bytes/s a device: vendors' NVLink and Infinity Fabric figures halved where they state both directions.
LINKS = {
    "V100": 150e9,
    "A100": 300e9,
    "H100": 450e9,
    "H200": 450e9,
    "GH200": 450e9,
    "B200": 900e9,
    "MI250": 250e9,
    "MI300": 448e9,
    "MI325": 448e9,
}  # fmt: skip
# Between nodes: one 200 Gbit/s port a device, the least that clusters for training are built with.
BETWEEN_NODES = 25e9
NODE = 8


def bus_bandwidth(one: Collective, seconds: float) -> float:
    """Bytes/s each device's link carries (nccl-tests' busbw): 2(n-1)/n of the message for all_reduce, (n-1)/n of the
    whole for gather, scatter and all_to_all."""
    n = max(2, one.group_size) if one.group_size != NONE else 2
    factor = {"all_reduce": 2 * (n - 1) / n, "broadcast": 1.0, "send": 1.0, "recv": 1.0, "send_recv": 1.0}
    return size_of(one) * factor.get(one.name, (n - 1) / n) / seconds if seconds > 0 else 0.0


def find(case: Case) -> Iterator[Finding]:
    """Upper bound: the exposed communication over the expected bandwidth. Surely won: the same, at half of it.

    Waiting for other ranks is no slow link, so the fastest of the large messages counts.
    """
    view = case.view
    device = next((name for name in sorted(LINKS, key=len, reverse=True) if name in view.device.name.upper()), None)
    large = [one for one in view.collectives if one.elements != NONE and size_of(one) >= LARGE and one.duration_ns > 0]
    exposed = view.device.shares.exposed_comm_ns
    if not large or not view.on_gpu or exposed < NOTABLE * view.wall_ns:
        return
    best = max(large, key=lambda one: bus_bandwidth(one, one.duration_ns / 1e9))
    seen = bus_bandwidth(best, best.duration_ns / 1e9)
    inside = best.group_size == NONE or best.group_size <= NODE
    expected = LINKS.get(device or "", BETWEEN_NODES) if inside else BETWEEN_NODES
    if seen >= SLOW * expected:
        return
    upper = int(exposed * (1 - seen / expected))
    yield Finding(
        name="slow-link",
        title="the link is far slower than it should be",
        claims={"comm": upper},
        lower_ns=max(0, int(exposed * (1 - 2 * seen / expected))),
        wall_ns=view.wall_ns,
        evidence=(
            f"the fastest of {len(large):,} large messages, {best.name} of {size_of(best) / 2**20:,.0f} MiB over "
            f"{best.group_size if best.group_size != NONE else 'an unknown number of'} ranks, took "
            f"{ms(best.duration_ns)}: bus bandwidth {seen / 1e9:.3g} GB/s",
            f"expected about {expected / 1e9:.0f} GB/s "
            + (f"({device}, inside a node)" if inside and device else "(a 200 Gbit/s port a device)"),
        ),
        check="NCCL_DEBUG=INFO: lines with NET/Socket instead of NET/IB or P2P name the fallback",
        remedy="mend-link",
        symptom="multi-node collapse" if not inside else "communication share too high",
    )
