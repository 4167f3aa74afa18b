"""What `headway plan` answers: the best plans, what the run takes with each, what to buy, what improvements are worth.

One value for the terminal, for JSON and for the page.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from headway.account.errors import UserError
from headway.plan.cluster import Cluster
from headway.plan.decision import Option, cheapest_by, fastest_within, frontier, options_of
from headway.plan.explain import bottlenecks, communication, idle
from headway.plan.money import Gain, RunCost, days, worth
from headway.plan.predict import Prediction
from headway.plan.search import NothingFits, Objective, search
from headway.plan.smallest_change import smallest_change
from headway.plan.whole_run import DEFAULT_TERMS, RunTerms, run_of
from headway.plan.workload import Workload


@dataclass(frozen=True)
class Question:
    """What was asked. `clusters` come with the calibration factor that holds there; `tokens` 0: no run, only steps."""

    work: Workload
    clusters: Sequence[tuple[Cluster, float]]
    tokens: float = 0.0
    fixed: Mapping[str, Any] | None = None
    objective: Objective = "time"
    top: int = 5
    deadline_s: float | None = None
    budget: float | None = None
    terms: RunTerms = DEFAULT_TERMS


@dataclass(frozen=True)
class Answer:
    """`costs` belong to `plans`, and are empty without tokens, as `options`, `edge` (the frontier) and `gains` are."""

    question: Question
    plans: tuple[Prediction, ...]
    priced: int
    removed: Mapping[str, int]
    costs: tuple[RunCost, ...]
    options: tuple[Option, ...]
    edge: tuple[Option, ...]
    cheapest: Option | None
    fastest: Option | None
    gains: tuple[Gain, ...]

    @property
    def late(self) -> bool:
        """No plan meets the deadline."""
        return self.question.deadline_s is not None and self.cheapest is None

    @property
    def dear(self) -> bool:
        """No plan stays within the budget."""
        return self.question.budget is not None and self.fastest is None

    @property
    def torn(self) -> bool:
        """Some plan is in time and some within the budget, none both: the cheapest in time costs too much."""
        budget, cheap = self.question.budget, self.cheapest
        return not self.dear and budget is not None and cheap is not None and (cheap.dollars or 0.0) > budget

    @property
    def good(self) -> bool:
        return not (self.late or self.dear or self.torn)

    def to_dict(self) -> dict[str, Any]:
        plans = [{"cluster": f"{one.cluster.device.name}x{one.cluster.gpus}", **one.to_dict()} for one in self.plans]
        for entry, cost in zip(plans, self.costs, strict=False):
            entry["run"] = cost.to_dict()
        return {
            "plans": plans,
            "priced": self.priced,
            "without_effect": idle(self.plans[0], self.question.fixed or {}),
            "removed": dict(self.removed),
            "factors": [factor for _, factor in self.question.clusters],
            "frontier": [option.to_dict() for option in self.edge],
            "cheapest_by_deadline": self.cheapest.to_dict() if self.cheapest else None,
            "fastest_within_budget": self.fastest.to_dict() if self.fastest else None,
            "worth": [asdict(gain) for gain in self.gains],
        }

    def lines(self) -> Iterator[str]:
        yield self._title()
        for cluster, factor in self.question.clusters:
            if factor != 1.0:
                where = f"{cluster.device.name} · {self.question.work.precision}"
                yield f"every time × {factor:.3f}, what --calibrate says of {where}"
        for rank, one in enumerate(self.plans, 1):
            where = f"{one.cluster.device.name}: " if len(self.question.clusters) > 1 else ""
            memory = f"needs {one.memory.needed / 2**30:.1f} of {one.memory.capacity / 2**30:.1f} GiB"
            yield f"{rank}. {where}{one.layout.describe()}"
            speed = f"step {one.step_s:.3f} s · {one.tokens_per_s_per_gpu:,.0f} tokens/s/GPU"
            yield f"   {speed} · MFU {one.mfu:.1%} of {one.peak_name} (causal) · {memory}"
            if self.costs:
                yield f"   {self.costs[rank - 1].line()}"
        yield from idle(self.plans[0], self.question.fixed or {})
        shares = " · ".join(f"{name} {share:.1%}" for name, share in bottlenecks(self.plans[0])[:6])
        yield f"where the first one's step goes: {shares}"
        ruled_out = Counter(self.removed).most_common(4)
        if ruled_out:
            yield "ruled out: " + "; ".join(f"{reason} ({count})" for reason, count in ruled_out)
        if self.costs:
            yield from self._run_lines()

    def _title(self) -> str:
        work = self.question.work
        size = f"{work.shape.parameters / 1e9:.2f}B parameters, {work.seq} × {work.global_batch} tokens a step"
        machines = " or ".join(f"{cluster.gpus:,} × {cluster.device.name}" for cluster, _ in self.question.clusters)
        return f"{work.name}: {size}, {work.precision}, {machines} ({self.priced} plans fit)"

    def _run_lines(self) -> Iterator[str]:
        yield "the run with the first plan:"
        yield from (f"  {line}" for line in self.costs[0].lines())
        yield from (f"  worth: {gain.line()}" for gain in self.gains)
        yield "frontier of time and money (whole clusters and their halves):"
        yield from (f"  {option.line()}" for option in self.edge)
        unpriced = sorted({one.detail.cluster.device.name for one in self.options if one.dollars is None})
        if unpriced and any(one.dollars is not None for one in self.options):
            yield f"  not compared, no price known (price_per_hour in the cluster's file): {', '.join(unpriced)}"
        yield from self.limits()

    def limits(self) -> Iterator[str]:
        """What --deadline and --budget come to: the plan to buy, or how far the nearest one is from them."""
        deadline, budget = self.question.deadline_s, self.question.budget
        if deadline is not None:
            soonest = min(self.options, key=lambda option: option.wall_s)
            text = f"no plan meets the deadline of {days(deadline)}: the fastest takes {days(soonest.wall_s)}"
            yield f"cheapest in time: {self.cheapest.line()}" if self.cheapest else text
        if budget is not None:
            costs = [option.dollars for option in self.options if option.dollars is not None]
            text = f"the cheapest costs {min(costs):,.0f} dollars" if costs else "no price is known (--price)"
            fastest = self.fastest
            yield (
                f"fastest within the budget: {fastest.line()}"
                if fastest
                else f"no plan meets the budget of {budget:,.0f} dollars: {text}"
            )
        if self.torn:
            yield "no plan meets both: the cheapest in time costs more than the budget"


def answer(question: Question) -> Answer:
    """Searches every cluster, prices the run, weighs the options. Raises UserError when nothing runs on any of them."""
    plans: list[Prediction] = []
    priced, removed, failures = 0, Counter[str](), []
    for cluster, factor in question.clusters:
        try:
            found = search(
                question.work, cluster, question.fixed, objective=question.objective, top=question.top, factor=factor
            )
        except NothingFits as error:
            change = smallest_change(question.work, cluster, question.fixed or {})
            failures.append(UserError(f"{error}; smallest change: {change}"))
            continue
        except UserError as error:
            failures.append(error)
            continue
        plans += found.plans
        priced += found.priced
        removed.update(found.removed)
    if not plans:
        raise failures[0]
    tokens, terms = question.tokens, question.terms
    pairs = [(one, run_of(one, tokens, terms) if tokens else None) for one in plans]
    pairs.sort(key=lambda pair: _order(question.objective, *pair))
    pairs = pairs[: question.top]
    costs = tuple(cost for _, cost in pairs if cost is not None)
    first = pairs[0][0]
    options = options_of(question.work, question.clusters, tokens, terms, question.fixed) if tokens else []
    deadline, budget = question.deadline_s, question.budget
    return Answer(
        question=question,
        plans=tuple(one for one, _ in pairs),
        priced=priced,
        removed=removed,
        costs=costs,
        options=tuple(options),
        edge=tuple(frontier(options)),
        cheapest=cheapest_by(options, deadline) if deadline is not None else None,
        fastest=fastest_within(options, budget) if budget is not None else None,
        gains=worth(costs[0], first.mfu, first.step_s, communication(first)) if costs else (),
    )


def _order(objective: Objective, one: Prediction, cost: RunCost | None) -> tuple[float, ...]:
    """Best first; by cost, plans without a price come last, by GPU-seconds a token."""
    if objective == "memory":
        return one.memory.needed, one.step_s
    if objective == "cost":
        work = 1 / one.tokens_per_s_per_gpu / (cost.ettr if cost else 1.0)
        price = one.cluster.price
        return (1.0, work) if price is None else (0.0, work * price)
    return 1 / one.tokens_per_s, one.memory.needed
