"""Rows about silent faults: a collective left out, a flipped bit in weights."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from headway.bench.faults.case import Case
from headway.bench.faults.small_run import SmallRun, Strike, train_small, twin

_DDP = "parallel.replicate={n}"


def row_07(case: Case) -> None:
    """One rank leaves a collective out: found in that step by the number of collectives; the step is not committed."""
    step, victim = case.dice.randint(5, 11), case.dice.randrange(2)
    overrides = (_DDP.format(n=2), "parallel.fsdp=1")

    def fault(at: Strike) -> None:
        if (at.rank, at.step) == (victim, step) and at.once("skip"):
            _leave_one_out()

    run = train_small(case, "skipped", fault, *overrides, hang_least_s=20.0)
    case.expect(run.code == 0, f"exit code 0, not {run.code}")
    case.expect(run.faults() == ["collective mismatch"], f"one incident, a collective mismatch, not {run.faults()}")
    case.expect(run.losses() == twin(case, *overrides).losses(), "nothing is committed: losses as the twin's")
    for incident in run.incidents[:1]:
        case.expect((incident.rank, incident.step) == (victim, step), f"rank {victim} and step {step} are named, not "
                    f"{incident.rank}, {incident.step}")  # fmt: skip
        case.from_incident(incident)
    _two_change_places(case, overrides)


def _two_change_places(case: Case, overrides: tuple[str, ...]) -> None:
    """One rank makes the step's last collective before all others: as many as the other rank, in another order."""
    step, victim = case.dice.randint(5, 11), case.dice.randrange(2)

    def fault(at: Strike) -> None:
        if (at.rank, at.step) == (victim, step) and at.once("reordered"):
            _make_the_last_one_first(at.run.learner.replicas.module)

    run = train_small(case, "reordered", fault, *overrides, hang_least_s=3.0)
    case.expect(run.code == 0, f"exit code 0, not {run.code}")
    found = [(item.fault, item.step) for item in run.incidents]
    case.expect(len(found) == 1 and found[0][1] == step, f"one incident, in that step: {found}")
    case.expect(found[:1] != [] and found[0][0] in ("rank failed", "hang", "collective mismatch"), f"told as: {found}")
    case.expect(
        run.losses() == twin(case, *overrides).losses(), "nothing of the step is committed: losses as the twin's"
    )


def _make_the_last_one_first(module: torch.nn.Module) -> None:
    real: Any = dist.all_gather_into_tensor

    def early(*_: Any) -> None:
        hook.remove()
        real(torch.zeros(16), torch.zeros(8))

        def already_made(*args: Any, **keywords: Any) -> Any:
            dist.all_gather_into_tensor = real

        dist.all_gather_into_tensor = already_made

    hook = module.register_forward_pre_hook(early)


def _leave_one_out() -> None:
    """The next small collective of the default kind, whichever the trainer uses, is not entered by this rank."""
    for name in ("all_reduce", "all_gather_into_tensor"):
        real = getattr(dist, name)

        def skipping(*args: Any, real: Any = real, name: str = name, **keywords: Any) -> Any:
            if keywords.get("group") is not None:
                return real(*args, **keywords)  # the control channel's
            setattr(dist, name, real)
            return None

        setattr(dist, name, skipping)


def row_25(case: Case) -> None:
    """A bit of one weight flips on one of three replicas: the vote names the rank, the run goes on from before it.

    With two replicas they are only said to disagree.
    """
    step = case.dice.randint(5, 7)
    for ranks, victim in ((3, case.dice.randrange(3)), (2, case.dice.randrange(2))):
        overrides = (_DDP.format(n=ranks), "parallel.fsdp=1", "health.digest_every=2")
        run = train_small(case, f"flipped-{ranks}", _flip(case, victim, step, f"flip-{ranks}"), *overrides, ranks=ranks)
        _corrupted(case, run, ranks, victim, step)
        undisturbed = twin(case, *overrides[:2], ranks=ranks)
        case.expect(run.losses() == undisturbed.losses(), f"{ranks} replicas: losses hex-equal to the twin's")


def _flip(case: Case, victim: int, step: int, name: str) -> Any:
    bit = case.dice.choice([22, 30])

    def fault(at: Strike) -> None:
        if (at.rank, at.step) == (victim, step) and at.once(name):
            weight = next(at.run.learner.replicas.module.parameters())
            with torch.no_grad():
                weight.view(torch.int32).view(-1)[3] ^= 1 << bit

    return fault


def _corrupted(case: Case, run: SmallRun, ranks: int, victim: int, step: int) -> None:
    case.expect(run.code == 0, f"{ranks} replicas: exit code 0, not {run.code}")
    case.expect(run.faults() == ["silent corruption"], f"{ranks} replicas: one incident, not {run.faults()}")
    for incident in run.incidents[:1]:
        if ranks > 2:
            case.expect(incident.rank == victim, f"the vote names rank {victim}, not {incident.rank}")
            case.expect(incident.step <= step + 2, f"found at the next check, not in step {incident.step}")
            case.from_incident(incident)
        else:
            case.expect(incident.rank is None and "disagree" in incident.evidence, "two disagree, none is named")


def row_26(case: Case) -> None:
    """A bit of one gradient flips on one rank in one backward pass: the step is held back, computed again, clean."""
    step, victim = case.dice.randint(6, 11), case.dice.randrange(2)
    overrides = (_DDP.format(n=2), "parallel.fsdp=1", "checkpoint.every=2")

    def fault(at: Strike) -> None:
        if (at.rank, at.step) == (victim, step) and at.once("gradient"):
            _flip_a_gradient(next(at.run.learner.replicas.module.parameters()))

    run = train_small(case, "gradient", fault, *overrides)
    case.expect(run.code == 0 and len(run.history.sessions) == 1, f"no restart, exit code 0, not {run.code}")
    case.expect(len(run.incidents) == 1, f"one incident, not {run.faults()}")
    for incident in run.incidents[:1]:
        case.expect(incident.step == step, f"held back in step {step}, not {incident.step}")
        case.expect(incident.action.startswith("transient"), f"computed again and found clean: {incident.action}")
    case.expect(run.losses() == twin(case, *overrides[:2]).losses(), "nothing of it is kept: losses as the twin's")
    case.measured(steps_lost=0)


def _flip_a_gradient(weight: torch.Tensor) -> None:
    """The exponent's highest bit of one number, once, before the gradient leaves the rank."""

    def flip(gradient: torch.Tensor) -> torch.Tensor:
        handle.remove()
        flipped = gradient.contiguous().clone()
        flat = flipped.view(-1)
        place = int(flat.abs().argmax())
        flat.view(torch.int32)[place] ^= 1 << 30
        return flipped

    handle = weight.register_hook(flip)
