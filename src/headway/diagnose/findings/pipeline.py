"""The pipeline bubble: a stage waits for its neighbour's activations or gradients."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from headway.account.intervals import intersect, measure, subtract
from headway.diagnose.case import Case
from headway.diagnose.facts import NONE
from headway.diagnose.finding import Finding
from headway.diagnose.view import ms

NOTABLE = 0.05
_P2P = r"SendRecv|ncclDevKernel_(Send|Recv)|nccl:(send|recv|coalesced)|gloo:(send|recv)"
# NCCL runs an all-to-all as sends and receives under one kernel's name: then only metadata tells them apart.
_ALL_TO_ALL = re.compile(r"all_?to_?all", re.IGNORECASE)


def find(case: Case) -> Iterator[Finding]:
    """Upper bound: bare time in sends and receives, less the transfer itself. Surely won: half, since twice the
    micro-batches halve the bubble."""
    view = case.view
    ambiguous = any(_ALL_TO_ALL.search(name) for name in view.rank.names)
    points = [
        one
        for one in view.collectives
        if one.name in ("send", "recv", "send_recv") and not (ambiguous and one.elements == NONE)
    ]
    named = view.union(view.named(r"nccl:(send|recv)\b|gloo:(send|recv)" if ambiguous else _P2P))
    rows = np.array([(one.start_ns, one.end_ns) for one in points], np.int64).reshape(-1, 2)
    spans = np.concatenate((named, rows)) if len(named) or len(rows) else rows
    if not len(spans):
        return
    window = np.array([[view.device.window.start_ns, view.device.window.end_ns]], np.int64)
    bare = measure(subtract(intersect(spans, window), view.union(view.computing)))
    lengths = [one.duration_ns for one in points] or [int(end - start) for start, end in named]
    transfer = min(lengths) * len(lengths)  # the shortest waited for nobody
    waited = min(max(0, bare - transfer), view.device.shares.exposed_comm_ns)
    if waited < NOTABLE * view.wall_ns:
        return
    yield Finding(
        name="pipeline-bubble",
        title="pipeline stages wait for each other",
        claims={"comm": waited},
        lower_ns=waited // 2,
        wall_ns=view.wall_ns,
        evidence=(
            f"{len(lengths):,} sends and receives lie bare for {ms(bare)}; the transfers themselves take about "
            f"{ms(min(transfer, bare))}",
        ),
        check="the first stage idles at the end of a step and the last at its start, each for about the same time",
        remedy="fill-pipeline",
    )
