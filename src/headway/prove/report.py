"""What `headway verify` says: lines for the terminal, a record for machines."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from headway.prove.verify import Verified


def lines(found: Verified) -> Iterator[str]:
    """The verdict, every test with its limit, and what differs between the two configurations."""
    verdict = found.verdict
    yield from (
        f"differs{', not compared' if change in found.uncompared else ''}: {change}" for change in found.differences
    )
    yield f"{found.steps} steps; band: A again, its documents in another order, first weights shaken by one rounding"
    yield f"{'':<31}{'B against A':>14}{'limit':>12}{'band':>12}  where"
    for test in verdict.tests:
        mark = "ok " if test.passed else "BAD"
        yield f"{mark} {test.name:<27}{test.value:>14.3g}{test.limit:>12.3g}{test.band:>12.3g}  {test.where}"
    yield from (f"left out: {what}" for what in verdict.left_out)
    yield f"relative difference of the loss: {_spread(verdict.loss)}; of the gradient norm: {_spread(verdict.norm)}"
    if verdict.cosines:
        worst = min(verdict.cosines, key=lambda row: row[2])
        where = f"{worst[1]}, step {worst[0]}; A again {worst[3]:.6f}"
        yield f"smallest cosine of a layer's gradients: {worst[2]:.6f} ({where})"
    seen = "" if found.unseen else " (the data is short: over documents that were trained on)"
    yield f"held-out loss: A {verdict.held_out[0]:.5f}, B {verdict.held_out[1]:.5f} nats per token{seen}"
    if verdict.seed_band is not None:
        yield f"another seed moves the mean loss of these steps by {verdict.seed_band:.2%}"
    if verdict.same:
        yield f"{words(found)}: every difference is within what rounding and the order of sums do to A itself"
        if found.other_step:
            yield f"NOT the same steps: the global batch is not compared, both sides made A's steps; {found.other_step}"
    else:
        yield "NOT the same training: " + "; ".join(
            f"{test.name} is off by {test.value:.3g}, {test.limit:.3g} is allowed ({test.where})"
            for test in verdict.failed
        )


def _spread(pairs: Sequence[tuple[float, float]]) -> str:
    values = [value for value, _ in pairs if not math.isnan(value)]
    return f"max {max(values):.3g}, mean {sum(values) / len(values):.3g}" if values else "no step is finite"


def words(found: Verified) -> str:
    """The verdict in a few words, which promise no more than was compared."""
    if not found.verdict.same:
        return "not the same training"
    if found.other_step:
        return "the same from the same documents, but in steps of another size"
    if found.open:
        return f"the same training as far as compared (not {', '.join(change.key for change in found.open)})"
    return "the same training"


def record(found: Verified) -> dict[str, Any]:
    """Everything, as plain values."""
    verdict = found.verdict
    return {
        "same": found.exit_code == 0,
        "steps": found.steps,
        "differences": [{"key": change.key, "a": change.before, "b": change.after} for change in found.differences],
        "not_compared": [change.key for change in found.uncompared],
        "verdict": words(found),
        "other_step": found.other_step or None,
        "tests": [
            {
                "name": test.name,
                "passed": test.passed,
                "value": test.value,
                "limit": test.limit,
                "band": test.band,
                "where": test.where,
            }
            for test in verdict.tests
        ],
        "loss": {side.name: side.losses for side in (found.a, found.b, found.twin)},
        "grad_norm": {side.name: side.grad_norms for side in (found.a, found.b, found.twin)},
        "loss_difference": [{"b": value, "band": band} for value, band in verdict.loss],
        "grad_norm_difference": [{"b": value, "band": band} for value, band in verdict.norm],
        "gradient_cosines": [
            {"step": step, "layer": layer, "b": cosine, "a_again": own} for step, layer, cosine, own in verdict.cosines
        ],
        "held_out": {"a": verdict.held_out[0], "b": verdict.held_out[1], "unseen": found.unseen},
        "seed_band": verdict.seed_band,
        "left_out": list(verdict.left_out),
        "own_steps": {"a": found.own_steps[0], "b": found.own_steps[1]},
    }
