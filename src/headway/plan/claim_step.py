"""Checks of what is claimed about one step: the sum, MFU, the bubble, communication, what tuning can win."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from headway.plan.claim import Claim, Finding, rate_of
from headway.plan.cluster import Device, find_device

# Width over depth of large published dense models (GPT-3 175B: 12288 / 96; Llama-3 405B: 16384 / 126).
_ASPECT = 128


def check_step(claim: Claim) -> Iterator[Finding]:
    """Every check whose figures the claim holds."""
    device = find_device(claim.device) if claim.device else None
    yield from _sum(claim)
    yield from _mfu(claim, device)
    yield from _bubble(claim)
    yield from _bubble_in_account(claim)
    yield from _tensor_parallel(claim)
    yield from _traffic(claim, device)
    yield from _data(claim)
    yield from _later(claim, device)


def ring_ratio(before: int, after: int) -> float:
    """How a ring collective's bytes per rank grow from `before` to `after` ranks: (n-1)/n over (n-1)/n."""
    return ((after - 1) / after) / ((before - 1) / before)


def bubble_ratio(stages: float, micro_batches: float, vpp: float = 1) -> float:
    """1F1B's waiting over its ideal time, (p-1)/(v m) (Narayanan et al. 2021)."""
    return (stages - 1) / (vpp * micro_batches)


def flops_per_token(parameters: float, seq: float) -> tuple[float, float]:
    """6 N, and 6 N with full attention of a model as wide for its depth as published ones are."""
    layers = (parameters / (12 * _ASPECT**2)) ** (1 / 3)
    return 6 * parameters, 6 * parameters + 12 * layers * (_ASPECT * layers) * seq


def _sum(claim: Claim) -> Iterator[Finding]:
    step = claim.get("step_s")
    if not step or not claim.account:
        return
    total = sum(claim.account.values())
    parts = " + ".join(f"{name} {seconds:g}" for name, seconds in claim.account.items())
    good = abs(total - step[0]) <= 0.005 * step[0]
    yield Finding("the parts", "fits" if good else "does not fit", f"{parts} = {total:.1f} s; claimed {step[0]:g} s")


def _mfu(claim: Claim, device: Device | None) -> Iterator[Finding]:
    known = claim.get("gpus", "parameters", "global_batch", "seq", "step_s")
    if not known or device is None:
        return
    gpus, parameters, batch, seq, step = known
    active = claim.numbers.get("active_parameters", parameters)
    low, high = flops_per_token(active, seq)
    tokens, paid = batch * seq, gpus * rate_of(device, claim.precision) * step
    shares = low * tokens / paid, high * tokens / paid
    says = (
        f"6 x {active:.3g} x {tokens:,.0f} tokens = {low * tokens:.3g} FLOPs of {paid:.3g} paid for ({gpus:,.0f} x "
        f"{rate_of(device, claim.precision) / 1e12:.4g} TFLOP/s x {step:g} s): MFU {shares[0]:.1%}"
    )
    if high / low > 1.003:
        says += f", {shares[1]:.1%} if attention counts in full"
    compute = claim.account.get("compute")
    if compute:
        says += f"; {shares[0] * step / compute:.1%} of the {compute:g} s of compute alone"
    claimed = claim.numbers.get("mfu")
    if shares[0] > 1 or (compute and shares[0] * step > compute):
        yield Finding("MFU", "does not fit", f"{says}: no device runs above its peak")
        return
    if claimed is None:
        yield Finding("MFU", "follows", says)
        return
    fits = shares[0] - 0.01 <= claimed <= shares[1] + 0.01
    yield Finding("MFU", "fits" if fits else "does not fit", f"{says}; claimed {claimed:.1%}")


def _micro_batches(claim: Claim, plan: Mapping[str, float]) -> float | None:
    """Of one replica: as claimed, or from the batch and the GPUs that are left for data parallelism."""
    if "micro_batches" in claim.numbers:
        return claim.numbers["micro_batches"]
    known = claim.get("gpus", "global_batch")
    if known is None or "pp" not in plan:
        return None
    dp = plan.get("dp") or known[0] / (plan.get("tp", 1) * plan["pp"])
    return known[1] / dp / claim.numbers.get("micro_batch", 1) if dp >= 1 else None


def _bubble(claim: Claim) -> Iterator[Finding]:
    claimed = [plan for plan in claim.plans if "bubble" in plan and "pp" in plan]
    for plan in claimed:
        m, vpp = _micro_batches(claim, plan), plan.get("vpp", 1)
        if m is None:
            continue
        ratio = bubble_ratio(plan["pp"], m, vpp)
        fraction = ratio / (1 + ratio)
        met = [name for name, value in (("ratio", ratio), ("fraction", fraction)) if _rounds(plan["bubble"], value)]
        says = (
            f"{plan['pp']:.0f} stages and {m:.0f} micro-batches a replica: {plan['pp'] - 1:.0f}/{m * vpp:.0f} = "
            f"{ratio:.1%} as a ratio to the ideal time, {fraction:.1%} as a fraction of the step; claimed "
            f"{plan['bubble']:.0%}" + (f" (the {met[0]})" if met else "")
        )
        yield Finding(f"bubble at PP{plan['pp']:.0f}", "fits" if met else "does not fit", says)
    if len(claimed) == 2:
        yield _bubbles_together(claimed[0], claimed[1])


def _bubbles_together(one: Mapping[str, float], two: Mapping[str, float]) -> Finding:
    """Which number of micro-batches, under which definition, gives both claimed shares."""
    need = {kind: (_needed(one, kind), _needed(two, kind)) for kind in ("ratio", "fraction")}
    same = [kind for kind, (a, b) in need.items() if max(a[0], b[0]) <= min(a[1], b[1])]
    ranges = "; ".join(
        f"{plan['bubble']:.0%} at PP{plan['pp']:.0f} needs {low:.0f}"
        + (f"-{high:.0f} as a {kind}" if math.isfinite(high) else f" or more as a {kind}")
        for kind, both in need.items()
        for plan, (low, high) in zip((one, two), both, strict=True)
    )
    if same:
        return Finding("both bubbles", "fits", f"with one number of micro-batches, as a {same[0]} ({ranges})")
    return Finding(
        "both bubbles", "does not fit", f"no number of micro-batches gives both under one definition: {ranges}"
    )


def _needed(plan: Mapping[str, float], kind: str) -> tuple[float, float]:
    """Fewest and most micro-batches that give the claimed share, which may have been rounded or cut off to whole
    percent: any number where it was rounded to the whole step, or to nothing."""
    ends = []
    for share in (plan["bubble"] + 0.00999, plan["bubble"] - 0.005):
        ratio = share if kind == "ratio" else share / (1 - share) if share < 1 else math.inf
        ends.append((plan["pp"] - 1) / (plan.get("vpp", 1) * ratio) if ratio > 1e-9 else math.inf)
    return ends[0], ends[1]


def _rounds(claimed: float, value: float) -> bool:
    """Whether the value, rounded or cut off to whole percent, reads as claimed."""
    return claimed - 0.005 <= value < claimed + 0.01


def _bubble_in_account(claim: Claim) -> Iterator[Finding]:
    shares = [plan["bubble"] for plan in claim.plans if "bubble" in plan]
    step = claim.get("step_s")
    if not shares or not claim.account or not step or "bubble" in claim.account:
        return
    waiting = claim.account.get("idle", 0.0) + claim.account.get("comm.pp", 0.0)
    least = min(shares) * step[0]
    most = max(shares) * step[0]
    good = waiting >= most
    yield Finding(
        "the bubble's place",
        "fits" if good else "does not fit",
        f"a bubble of {min(shares):.0%} to {max(shares):.0%} is {least:.1f} to {most:.1f} s of the step, but idle and "
        f"pipeline time together are {waiting:.1f} s"
        + ("" if good else ": at the deeper pipeline part of it must sit in what is called compute"),
    )


def _tensor_parallel(claim: Claim) -> Iterator[Finding]:
    found = claim.tp_communication
    if not {"from", "to", "ratio"} <= set(found):
        return
    before, after = int(found["from"]), int(found["to"])
    ratio = ring_ratio(before, after)
    layers = found["pp_from"] / found["pp_to"] if {"pp_from", "pp_to"} <= set(found) else 1.0
    expected = ratio * layers
    halved = ratio * after / before
    says = (
        f"a ring moves (n-1)/n of a message, ({after}-1)/{after} over ({before}-1)/{before} = {ratio:.2f} times "
        f"as much; if the pipeline gives up what TP takes (PP {after / before:g} times shallower, so as many times the "
        f"layers on a GPU) {halved:.2f}; claimed {found['ratio']:g}"
    )
    near = abs(found["ratio"] / expected - 1) <= 0.05
    note = "" if near else f": {expected:.2f} with the same pipeline"
    if not near and abs(found["ratio"] / halved - 1) <= 0.05:
        note = ": only with the shallower pipeline, or with TP leaving the fast links"
    name = f"TP{after} / TP{before} communication"
    yield Finding(name, "fits" if near else "does not fit", says + note)


def _traffic(claim: Claim, device: Device | None) -> Iterator[Finding]:
    """Bandwidth that the claimed communication times imply, against the links."""
    known = claim.get("gpus", "parameters")
    plan = next((plan for plan in claim.plans if {"tp", "pp"} <= set(plan)), None)
    seconds = claim.account.get("comm.dp")
    if not known or plan is None or device is None or not seconds:
        return
    dp = plan.get("dp") or known[0] / (plan["tp"] * plan["pp"])
    if dp < 2:
        return
    held = known[1] / (plan["tp"] * plan["pp"])
    low, high = (2 * (dp - 1) / dp * held * width for width in (2, 4))
    yield Finding(
        "DP communication",
        "follows",
        f"TP{plan['tp']:.0f} PP{plan['pp']:.0f} DP{dp:.0f}: {held / 1e9:.2f}B parameters a GPU, gradients reduced and "
        f"weights gathered in 2 to 4 bytes: {low / 1e9:.1f}-{high / 1e9:.1f} GB, {low / device.inter_node:.2f}-"
        f"{high / device.inter_node:.2f} s at {device.inter_node / 1e9:g} GB/s; the claimed {seconds:g} s is "
        f"{low / seconds / 1e9:.2g}-{high / seconds / 1e9:.2g} GB/s: "
        + ("as fast as the network" if seconds < 2 * high / device.inter_node else "waiting, not traffic"),
    )


def _data(claim: Claim) -> Iterator[Finding]:
    known = claim.get("global_batch", "seq")
    seconds = claim.account.get("data")
    if not known or not seconds:
        return
    size = known[0] * known[1] * 4
    yield Finding(
        "data",
        "follows",
        f"a step reads {known[0] * known[1]:,.0f} tokens, {size / 1e6:.1f} MB of 4-byte ids in the whole cluster; "
        f"{seconds:g} s for that is a loader without prefetch, not bandwidth: all of it can go",
    )


def _later(claim: Claim, device: Device | None) -> Iterator[Finding]:
    known = claim.get("step_s", "later_step_s")
    compute = claim.account.get("compute")
    if not known:
        return
    before, after = known
    says = f"{before:g} -> {after:g} s is {before / after:.2f} times as fast"
    sizes = claim.get("gpus", "parameters", "global_batch", "seq")
    if sizes and device is not None:
        low, _ = flops_per_token(claim.numbers.get("active_parameters", sizes[1]), sizes[3])
        share = low * sizes[2] * sizes[3] / (sizes[0] * rate_of(device, claim.precision) * after)
        says += f", MFU {share:.1%}"
        if share > 1:
            yield Finding("after tuning", "does not fit", f"{says}: no device runs above its peak")
            return
    if not compute:
        yield Finding("after tuning", "follows", says)
        return
    rest_before, rest_after = before - compute, after - compute
    if rest_before > 0:
        says += (
            f"; with compute at {compute:g} s everything else must shrink from {rest_before:.1f} to {rest_after:.1f} s"
            f" ({1 - rest_after / rest_before:.0%} of it gone)"
        )
    else:
        says += f"; compute at {compute:g} s leaves nothing else that could shrink"
    ok = rest_after >= 0
    yield Finding("after tuning", "fits" if ok else "does not fit", says if ok else f"{says}: less than compute alone")
