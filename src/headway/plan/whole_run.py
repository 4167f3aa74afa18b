"""From one step to the whole run: failures and checkpoints make its wall clock, prices and watts its cost."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from headway.account.errors import UserError
from headway.plan.failure_rates import FailureRate, estimate
from headway.plan.goodput import Reliability, Tier
from headway.plan.goodput import predict as predict_goodput
from headway.plan.money import POWER_SHARE, RunCost, run_cost
from headway.plan.predict import Prediction

# What `headway plan goodput` starts from too: seconds to notice a failure, and until ranks run again.
DETECT_S, RESTART_S = 300.0, 300.0
# bf16 weights, fp32 master and two moments: what a checkpoint holds of each parameter.
STATE_BYTES = 14


@dataclass(frozen=True, slots=True)
class RunTerms:
    """What is assumed of a run beside its plan. `ettr` overrules `rate`; without either the published prior is used.

    trained_share: tokens with a label over all tokens; power_share: average draw over TDP; both 0 to 1.
    """

    rate: FailureRate | None = None
    ettr: float | None = None
    trained_share: float = 1.0
    power_share: float = POWER_SHARE


DEFAULT_TERMS = RunTerms()


def reliability_of(found: Prediction, rate: FailureRate) -> Reliability:
    """The plan's job as failures see it: its state is copied to host memory while training waits, then written out."""
    cluster, state = found.cluster, STATE_BYTES * found.workload.shape.parameters
    stop, written = state / cluster.gpus / cluster.host, state / cluster.storage
    tier = Tier("storage", save_s=stop, lag_s=written, load_s=written)
    return Reliability(cluster.gpus, rate, DETECT_S, RESTART_S, (tier,), step_s=found.step_s)


def run_of(found: Prediction, tokens: float, terms: RunTerms) -> RunCost:
    """Time, money and energy of `tokens` by this plan. Raises UserError for shares and tokens that cannot be."""
    cluster = found.cluster
    cost = partial(
        run_cost,
        cluster,
        found.step_s,
        found.workload.tokens,
        tokens,
        trained_share=terms.trained_share,
        power_share=terms.power_share,
    )
    if terms.ettr is not None:
        return cost(ettr=terms.ettr)
    rate = terms.rate or estimate()
    job = reliability_of(found, rate)
    goodput = predict_goodput(job)
    if goodput.ettr < 1e-3:
        raise UserError(f"failures every {1 / job.per_s:,.0f} s: such a run never gets on; see headway plan goodput")
    tier, kept = job.tiers[0], goodput.intervals[0].used_s
    notes = (
        f"{rate.mean:.2g} failures per GPU-day ({rate.basis}), {DETECT_S:g} s to notice, {RESTART_S:g} s to restart",
        f"a save every {kept / 60:.3g} min of {STATE_BYTES} bytes a parameter: {tier.save_s:.3g} s blocking, "
        f"{tier.lag_s:.3g} s to storage at {cluster.storage / 1e9:,.0f} GB/s",
    )
    return cost(ettr=goodput.ettr, notes=notes)
