"""What a run really took, for the planner: the mean step of a Headway run folder, or an account in a JSON file."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from headway.account.account import Account, NotClosed, sum_accounts
from headway.account.errors import UserError
from headway.account.events import StepLine
from headway.account.tree import STEP
from headway.record.folder import RunFolder
from headway.record.sessions import History, read_history

_WARM_SHARE, _WARM_STEPS = 0.2, 10  # the first fifth of the steps, at most ten: compilation, allocator, caches


@dataclass(frozen=True)
class MeasuredRun:
    """A mean optimizer step, closed; how many steps it is the mean of; what else the folder says of the run.

    low_s and high_s are the 10th and 90th percentile of a step's seconds. slots are token slots of a step over all
    ranks (None where the file does not say), gpus the ranks.
    """

    account: Account
    steps: int
    low_s: float
    high_s: float
    gpus: int | None = None
    device: str = ""
    slots: float | None = None
    micro_batches: int | None = None

    @property
    def step_s(self) -> float:
        return self.account.wall_ns / 1e9


def read_measured(path: Path) -> MeasuredRun:
    """A run folder (metrics.jsonl) or a JSON file with an account. Raises UserError naming the file."""
    if path.is_dir():
        folder = RunFolder(path)
        if not folder.metrics.is_file():
            raise UserError(f"{path}: no metrics.jsonl; give the folder of a Headway run (runs/NAME)")
        return _of_history(read_history(folder), path)
    if not path.is_file():
        raise UserError(f"{path}: no such file or folder")
    try:
        content = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as error:
        raise UserError(f"{path}: not JSON ({error})") from error
    account = account_of(content, str(path))
    return MeasuredRun(account, 1, account.wall_ns / 1e9, account.wall_ns / 1e9, gpus=_gpus_of(content))


def _gpus_of(content: Any) -> int | None:
    """GPUs of the plan that `headway plan --json` writes beside an account."""
    plan = content.get("plan") if isinstance(content, dict) else None
    if not isinstance(plan, dict):
        return None
    degrees = [one for key in ("dp", "tp", "pp", "cp") if isinstance(one := plan.get(key), int)]
    return math.prod(degrees) if len(degrees) == 4 else None


def account_of(content: Any, where: str) -> Account:
    """The step account in a JSON value: itself, or below `account` (what `headway plan --json` writes of a plan)."""
    inside = content.get("account", content) if isinstance(content, dict) else None
    if not isinstance(inside, dict) or not {"tree", "wall_ns", "parts"} <= set(inside):
        raise UserError(f"{where}: no account; give an object with tree, wall_ns and parts, or a run folder")
    try:
        account = Account.from_dict(inside)
    except (NotClosed, KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{where}: the account does not close ({error})") from error
    if account.tree != STEP or account.wall_ns <= 0:
        raise UserError(f"{where}: give the account of a step (tree 'step', wall_ns above zero)")
    return account


def _of_history(history: History, path: Path) -> MeasuredRun:
    lines = [line for line in history.kept if line.skipped is None and line.wall_ns > 0]
    if not lines:
        raise UserError(f"{path}: no finished step in metrics.jsonl")
    warm = min(_WARM_STEPS, int(len(lines) * _WARM_SHARE) or (len(lines) > 1))
    lines = lines[warm:]
    try:
        whole = sum_accounts(Account.close(STEP, line.wall_ns, _without_rest(line)) for line in lines)
    except (NotClosed, KeyError) as error:
        raise UserError(f"{path}: a step's account in metrics.jsonl does not close ({error})") from error
    mean = _mean(whole, len(lines))
    start = history.sessions[-1].start
    walls = sorted(line.wall_ns / 1e9 for line in lines)
    return MeasuredRun(
        account=_split_by_trace(mean, history),
        steps=len(lines),
        low_s=_quantile(walls, 0.1),
        high_s=_quantile(walls, 0.9),
        gpus=start.world_size or None,
        device=start.device,
        slots=statistics.fmean(line.slots for line in lines),
        micro_batches=round(statistics.median(line.micro_batches for line in lines)) or None,
    )


def _without_rest(line: StepLine) -> dict[str, int]:
    return {path: ns for path, ns in line.account.items() if path != "unaccounted"}


def _mean(whole: Account, steps: int) -> Account:
    parts = {path: ns // steps for path, ns in whole.parts.items() if path != "unaccounted"}
    return Account.close(STEP, whole.wall_ns // steps, parts)


def _split_by_trace(mean: Account, history: History) -> Account:
    """The same step with the split of the run's last trace, which sees communication that the loop's clock cannot."""
    traces = [line for line in history.traces if line.wall_ns > 0 and line.account]
    if not traces:
        return mean
    last = traces[-1]
    scale = mean.wall_ns / last.wall_ns
    parts = {path: int(ns * scale) for path, ns in last.account.items() if path != "unaccounted"}
    try:
        return Account.close(STEP, mean.wall_ns, parts)
    except (NotClosed, KeyError):
        return mean


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[round(share * (len(ordered) - 1))]
