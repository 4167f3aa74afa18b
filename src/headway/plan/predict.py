"""`predict`: one step of a plan as a closed account over the STEP tree, with its memory and its named terms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headway.account.account import Account
from headway.account.flops import document_flops
from headway.account.tree import STEP
from headway.plan.cluster import Cluster
from headway.plan.constants import Constants, default_constants
from headway.plan.layout import Layout
from headway.plan.memory import Memory, memory
from headway.plan.profile import profile
from headway.plan.step import step_terms
from headway.plan.workload import Workload

# Which node of the account each term falls into.
ACCOUNT_OF = {
    "forward": "compute.forward",
    "backward": "compute.backward",
    "recompute": "compute.recompute",
    "loss": "compute.loss",
    "optimizer": "compute.optimizer",
    "tp": "comm.tp",
    "dp": "comm.dp",
    "pp": "comm.pp",
    "cp": "comm.cp",
    "ep": "comm.ep",
    "bubble": "bubble",
    "straggler": "straggler",
    "offload": "copy",
    "launch": "host.launch",
    "host": "host.other",
}


@dataclass(frozen=True)
class Prediction:
    """One optimizer step of one plan.

    Attributes:
        account: the slowest stage's rank, closed; subtract it from a measured or traced one.
        terms: seconds by name (the keys of ACCOUNT_OF), which sum to `step_s`.
        facts: ratios worth showing: the bubble both ways, hidden communication, micro-batches.
        memory: bytes on the fullest device.
    """

    workload: Workload
    layout: Layout
    cluster: Cluster
    account: Account
    terms: Mapping[str, float]
    facts: Mapping[str, float]
    memory: Memory

    @property
    def step_s(self) -> float:
        """Seconds of one optimizer step."""
        return sum(self.terms.values())

    @property
    def tokens_per_s(self) -> float:
        return self.workload.tokens / self.step_s

    @property
    def tokens_per_s_per_gpu(self) -> float:
        return self.tokens_per_s / self.cluster.gpus

    @property
    def flops_per_token(self) -> float:
        """Useful FLOPs of a token, causal attention (docs/flops.md), exact for a sequence that is one document."""
        work = self.workload
        return document_flops(work.shape, [round(work.attended)]).total / round(work.attended)

    @property
    def peak_name(self) -> str:
        """Whose peak MFU is a share of: the precision's, or bf16's where the device has none of its own (fp16)."""
        rates, precision = self.cluster.device.rates, self.workload.precision
        return precision.upper() if precision in rates else "BF16" if "bf16" in rates else next(iter(rates)).upper()

    @property
    def mfu(self) -> float:
        """Useful FLOPs over the peak of the precision's products, causal convention."""
        rates = self.cluster.device.rates
        peak = rates.get(self.workload.precision) or rates.get("bf16") or next(iter(rates.values()))
        return self.flops_per_token * self.tokens_per_s_per_gpu / peak

    @property
    def conventions(self) -> dict[str, float]:
        """The same speed as published "MFU"s count it: causal, full attention (Megatron, PaLM), and hardware FLOPs,
        which add what is computed again (full attention, as such tables do). They differ by a third."""
        length = round(self.workload.attended)
        full = document_flops(self.workload.shape, [length], convention="full-attention").total / length
        full *= self.mfu / self.flops_per_token
        layout = self.layout
        again = layout.recompute_share / 3 if layout.recompute == "full" else 0.0
        return {"causal": self.mfu, "full_attention": full, "hardware": full * (1 + again)}

    def run_seconds(self, tokens: float) -> float:
        """Seconds of steps for that many tokens, nothing lost to failures."""
        return tokens / self.tokens_per_s

    def to_dict(self) -> dict[str, Any]:
        return {
            "plan": self.layout.to_dict(),
            "step_s": self.step_s,
            "tokens_per_s_per_gpu": self.tokens_per_s_per_gpu,
            "mfu": self.mfu,
            "mfu_of_peak": self.peak_name,
            "mfu_by_convention": self.conventions,
            "terms_s": dict(self.terms),
            "facts": dict(self.facts),
            "memory_bytes": self.memory.to_dict(),
            "fits": self.memory.fits,
            "account": self.account.to_dict(),
        }


def predict(
    workload: Workload, layout: Layout, cluster: Cluster, constants: Constants | None = None, factor: float = 1.0
) -> Prediction:
    """Step time, account and memory of a plan. `factor` multiplies every term: a software stack's calibration.

    Nothing is searched and nothing raised: whether the plan may run is `layout.check`'s question, whether it fits
    `memory.fits`'s.
    """
    model = profile(workload.shape)
    terms, facts = step_terms(model, workload, layout, cluster, constants or default_constants())
    if factor != 1.0:
        terms = {name: seconds * factor for name, seconds in terms.items()}
    parts: dict[str, int] = {}
    for name, seconds in terms.items():
        parts[ACCOUNT_OF[name]] = parts.get(ACCOUNT_OF[name], 0) + round(seconds * 1e9)
    account = Account.close(STEP, sum(parts.values()), parts)
    return Prediction(workload, layout, cluster, account, terms, facts, memory(model, workload, layout, cluster))
