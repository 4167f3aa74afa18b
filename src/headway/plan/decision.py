"""Which plan to buy: the cheapest that meets a date, the fastest within a budget, the frontier between them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headway.account.errors import UserError
from headway.plan.cluster import Cluster
from headway.plan.money import days
from headway.plan.predict import Prediction
from headway.plan.search import search
from headway.plan.whole_run import RunTerms, run_of
from headway.plan.workload import Workload

_HALVINGS = 10  # a thousandth of the cluster is another question


@dataclass(frozen=True, slots=True)
class Option:
    """One thing that could be bought: seconds of wall clock and typical dollars, both of the whole run."""

    label: str
    gpus: int
    wall_s: float
    dollars: float | None
    detail: Any = None

    def line(self) -> str:
        money = "price unknown" if self.dollars is None else f"{self.dollars:,.0f} dollars"
        return f"{days(self.wall_s)} · {money} · {self.label}"

    def to_dict(self) -> dict[str, Any]:
        plan = self.detail.layout.to_dict() if isinstance(self.detail, Prediction) else None
        wall, dollars = self.wall_s, self.dollars
        return {"label": self.label, "gpus": self.gpus, "days": wall / 86400, "dollars": dollars, "plan": plan}


def _costs(options: Iterable[Option]) -> list[tuple[float, Option]]:
    """Options that can be compared by money, with it; where none has a price, all of them with their GPU-seconds."""
    every = list(options)
    priced = [(option.dollars, option) for option in every if option.dollars is not None]
    return priced or [(option.wall_s * option.gpus, option) for option in every]


def cheapest_by(options: Sequence[Option], deadline_s: float) -> Option | None:
    """The cheapest option that is done in time; ties go to the faster. None when none is."""
    fits = [(cost, option) for cost, option in _costs(options) if option.wall_s <= deadline_s]
    return min(fits, key=lambda pair: (pair[0], pair[1].wall_s))[1] if fits else None


def fastest_within(options: Sequence[Option], budget: float) -> Option | None:
    """The fastest option that costs no more than the budget; ties go to the cheaper. None when none does."""
    fits = [option for option in options if option.dollars is not None and option.dollars <= budget]
    return min(fits, key=lambda option: (option.wall_s, option.dollars or 0.0), default=None)


def frontier(options: Iterable[Option]) -> list[Option]:
    """Options that no other beats in both time and money, fastest first."""
    found: list[Option] = []
    least = math.inf
    for cost, option in sorted(_costs(options), key=lambda pair: (pair[1].wall_s, pair[0])):
        if cost < least:
            found.append(option)
            least = cost
    return found


def options_of(
    work: Workload,
    clusters: Sequence[tuple[Cluster, float]],
    tokens: float,
    terms: RunTerms,
    fixed: Mapping[str, Any] | None = None,
) -> list[Option]:
    """The best plan of each cluster and of each half, quarter, … of it that some plan runs on, as what it buys.

    `clusters` come with their calibration factors.
    """
    found = []
    for cluster, factor in clusters:
        for gpus in _sizes(cluster):
            try:
                best = search(work, cluster.with_gpus(gpus), fixed, top=1, factor=factor).plans[0]
            except UserError:
                continue  # too few for the memory, or no degrees divide them: nothing that could be bought
            cost = run_of(best, tokens, terms)
            dollars = cost.dollars[1] if cost.dollars else None
            label = f"{gpus:,} × {cluster.device.name}: {best.layout.describe()}"
            found.append(Option(label, gpus, cost.wall_s, dollars, best))
    return found


def _sizes(cluster: Cluster) -> list[int]:
    """The whole cluster and its halves down to one node."""
    least = min(cluster.gpus, cluster.gpus_per_node)
    sizes = {cluster.gpus // 2**power for power in range(_HALVINGS + 1) if cluster.gpus % 2**power == 0}
    return sorted((size for size in sizes if size >= least), reverse=True)
