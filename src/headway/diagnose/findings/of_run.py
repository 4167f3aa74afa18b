"""Findings that a Headway run folder shows by itself: its step accounts, token counts, memory and settings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np

from headway.account.account import Account
from headway.account.events import RankLine
from headway.account.peaks import device_row
from headway.diagnose.finding import Finding
from headway.diagnose.findings.data_loading import data_finding
from headway.diagnose.findings.garbage import gc_finding
from headway.diagnose.findings.memory import full_memory
from headway.diagnose.findings.ranks import COMPARE, straggler
from headway.diagnose.findings.recompiles import recompile_finding
from headway.diagnose.findings.recompute import FREE, recompute_finding
from headway.diagnose.findings.steps import unstable
from headway.diagnose.run_facts import RunFacts
from headway.diagnose.view import ms

PADDING, DATA, STRAGGLER, COMM, MUCH_COMM, GC, LOGGING, RECOMPUTE = 0.05, 0.02, 0.03, 0.05, 0.30, 0.01, 0.02, 0.03
FULL, LOW_MFU = 0.90, 0.25
_PACK_FILL = 0.98


def findings_of_run(run: RunFacts) -> list[Finding]:
    if not run.steps or run.account is None:
        return []
    return [finding for find in FINDERS for finding in find(run)]


def _padding(run: RunFacts) -> Iterator[Finding]:
    slots, tokens = sum(line.slots for line in run.steps), sum(line.tokens for line in run.steps)
    share = 1 - tokens / slots if slots else 0.0
    if share < PADDING or run.account is None:
        return
    claims = {path: int(share * ns) for path, ns in _classes(run.account).items() if ns}
    compute = run.total("compute") - run.total("compute.optimizer")
    yield Finding(
        name="padding",
        title="padding is computed",
        claims=claims,
        lower_ns=min(int(max(0.0, share - (1 - _PACK_FILL)) * compute), sum(claims.values())),
        wall_ns=run.wall_ns,
        evidence=(f"{tokens:,} tokens in {slots:,} slots: {share:.1%} of what is computed is padding",),
        check="`headway report`: real tokens a slot",
        remedy="pack",
    )


def _data(run: RunFacts) -> Iterator[Finding]:
    waited = run.total("data")
    if waited >= DATA * run.wall_ns:
        waits = [line.account.get("data", 0) for line in run.steps]
        walls = [line.wall_ns for line in run.steps]
        seen = f"{ms(waited)} of waiting for batches"
        yield data_finding(waits, walls, run.wall_ns, waited, "data", seen, run.on_gpu)


def _straggler(run: RunFacts) -> Iterator[Finding]:
    """Ranks by their own work before they meet: what a rank does in backward already waits for the others."""
    if len(run.ranks) < 2 or not next(iter(run.ranks.values())):
        return
    order = sorted(run.ranks)
    own = np.array([[_own_work(line) for line in run.ranks[rank]] for rank in order], np.int64)
    slowest = own.argmax(axis=0)
    waited = np.median(own.max(axis=0) - own, axis=0)  # what the typical rank waits, step by step
    total = int(waited.sum())
    if total < STRAGGLER * sum(line.wall_ns for line in run.ranks[order[0]]):
        return
    last = Counter(order[int(i)] for i in slowest)
    caused = {rank: int(waited[slowest == i].sum()) for i, rank in enumerate(order)}
    doing: dict[int, str] = {}
    own_code: dict[int, str] = {}
    for i, rank in enumerate(order):
        more, robbed = _more_than_others(run, rank, np.flatnonzero(slowest == i).tolist())
        late = sum(more.values())
        if late <= 0:
            continue
        # Half of it explains it; less is only listed.
        first, longest = more.most_common(1)[0]
        told = more.most_common(1) if 2 * longest >= late else more.most_common(3)
        host = run.ranks[rank][-1].host
        doing[rank] = ", ".join(f"{path} takes {ms(ns)}" for path, ns in told if ns > 0)
        doing[rank] += f" more than on the others{' on ' + host if host else ''}"
        if 2 * robbed >= late:
            doing[rank] += f"; for {ms(robbed)} of it others had its CPU"
        elif 2 * longest >= late and first in _OF_THE_PROGRAM:
            own_code[rank] = first
    yield straggler(last, total, caused, run.wall_ns, doing, "step", own_code, len(run.ranks[order[0]]), COMPARE)


# Where a rank waits for others. All else is its own, and what of it its program (and not a busy host) makes longer.
_WAITING = ("compute.backward", "compute.optimizer", "comm", "comm.dp", "straggler", "bubble", "host.sync")
_OF_THE_PROGRAM = ("data", "checkpoint", "host.gc", "host.logging", "host.other")


def _more_than_others(run: RunFacts, rank: int, steps: list[int]) -> tuple[Counter[str], int]:
    """What these steps took longer on this rank than on the mean of the others, ns: by category of its own work, and
    of it ready without a CPU."""
    others = len(run.ranks) - 1
    more: Counter[str] = Counter()
    robbed = 0
    for one, lines in run.ranks.items():
        weight = others if one == rank else -1
        for line in (lines[step] for step in steps):
            robbed += weight * line.waited_ns
            for path, ns in line.account.items():
                if path not in _WAITING:
                    more[path] += weight * ns
    return Counter({path: ns // others for path, ns in more.items()}), robbed // others


def _own_work(line: RankLine) -> int:
    return line.wall_ns - sum(line.account.get(path, 0) for path in _WAITING)


def _communication(run: RunFacts) -> Iterator[Finding]:
    exposed, wall = run.total("comm"), run.wall_ns
    if exposed < COMM * wall:
        return
    heavy = exposed >= MUCH_COMM * wall
    hosts = sorted({lines[-1].host for lines in run.ranks.values() if lines and lines[-1].host})
    between = len(hosts) > 1
    yield Finding(
        name="communication-heavy-plan" if heavy else "gradient-sync-exposed",
        title="the parallel plan communicates more than it computes" if heavy else
        "gradient communication is not hidden under backward",
        claims={"comm": exposed},
        lower_ns=max(0, exposed - run.total("compute")) // 2 if heavy else exposed // 4,
        wall_ns=wall,
        evidence=(
            f"{ms(exposed)} ({exposed / wall:.1%}) of rank 0's steps is exposed communication, "
            f"{run.world_size} ranks on {max(1, len(hosts))} hosts",
        ),
        check="the newest periodic trace: `headway diagnose` of its folder shows overlap and bandwidth",
        remedy="change-plan" if heavy else "overlap-gradients",
        symptom="multi-node collapse" if heavy and between else "communication share too high",
    )  # fmt: skip


def _recompiles(run: RunFacts) -> Iterator[Finding]:
    hit = [line for line in run.steps if line.recompiles]
    calm = [line.wall_ns for line in run.steps if not line.recompiles]
    if len(hit) < 2 or not calm:
        return
    typical = float(np.median(calm))
    spent = int(sum(max(0.0, line.wall_ns - typical) for line in hit))
    number = sum(line.recompiles for line in hit)
    if spent > 0.01 * run.wall_ns:
        yield recompile_finding(spent, number, run.wall_ns, f"{len(hit):,} of {len(run.steps):,} steps")


def _garbage(run: RunFacts) -> Iterator[Finding]:
    cost = run.total("host.gc")
    if cost >= GC * run.wall_ns:
        hit = sum(1 for line in run.steps if line.account.get("host.gc"))
        seen = f"{ms(cost)} in the collector, in {hit:,} of {len(run.steps):,} steps"
        yield gc_finding(cost, run.wall_ns, seen, run.on_gpu)


def _logging(run: RunFacts) -> Iterator[Finding]:
    cost = run.total("host.logging")
    if cost >= LOGGING * run.wall_ns:
        yield Finding(
            name="logging",
            title="logging holds up the loop",
            claims={"host.logging": cost},
            lower_ns=int(cost * 0.5),
            wall_ns=run.wall_ns,
            evidence=(f"{ms(cost)} ({cost / run.wall_ns:.1%}) in sinks and the live line",),
            check="the same run with log.quiet=true and without further sinks",
            remedy="log-less",
        )


def _recompute(run: RunFacts) -> Iterator[Finding]:
    free, text = run.memory_free
    computed = sum(line.flops.computed for line in run.steps)
    again = sum(line.flops.recompute for line in run.steps)
    if not again or free is None or free < FREE:
        return
    spent = int(run.total("compute") * again / computed)
    if spent >= RECOMPUTE * run.wall_ns:
        text = f"{text} (model.recompute={run.setting('model.recompute')})"
        yield recompute_finding(spent, run.wall_ns, free, text, {"compute": spent})


def _memory(run: RunFacts) -> Iterator[Finding]:
    total, used = run.device_memory, run.memory_bytes
    if run.on_gpu and total and used >= FULL * total and run.mfu is not None and run.mfu < LOW_MFU:
        yield full_memory(used, total, run.mfu, run.wall_ns, "peak of metrics.jsonl")


def _precision(run: RunFacts) -> Iterator[Finding]:
    row = device_row(run.device)
    start = run.history.sessions[-1].start
    half = next((name for name in ("bf16", "fp16") if row is not None and row.rates.get(name)), None)
    if start.facts.get("precision") != "fp32" or row is None or half is None:
        return
    compute = run.total("compute") - run.total("compute.optimizer")
    slow = row.rates.get("fp32") or row.rates[half] / 2
    yield Finding(
        name="float32-matmuls",
        title="matrix products run in float32",
        claims={"compute": int(compute * min(0.97, max(0.5, 1 - slow / row.rates[half])))},
        lower_ns=int(compute * 0.3),
        wall_ns=run.wall_ns,
        evidence=(f"train.precision={run.setting('train.precision', 'float32')} on {run.device}",),
        check="kernel names in a trace: sgemm is float32",
        remedy=half,
    )


def _steps(run: RunFacts) -> Iterator[Finding]:
    yield from unstable(
        [line.wall_ns for line in run.steps],
        [line.account for line in run.steps],
        [f"step {line.step:,}" for line in run.steps],
        run.wall_ns,
        run.on_gpu,
    )


def _classes(account: Account) -> dict[str, int]:
    """Time by top-level category, what cannot be claimed left out."""
    return {path: account.total(path) for path in account.tree.tops() if path != "unaccounted"}


def available(run: RunFacts) -> dict[str, int]:
    """What there is of each class of time that a run's findings claim."""
    if run.account is None:
        return {}
    return {path: run.account.total(path) for path in run.account.tree.paths() if run.account.sees(path)}


FINDERS: tuple[Callable[[RunFacts], Iterator[Finding]], ...] = (
    _padding,
    _data,
    _straggler,
    _communication,
    _recompiles,
    _garbage,
    _logging,
    _recompute,
    _memory,
    _precision,
    _steps,
)
