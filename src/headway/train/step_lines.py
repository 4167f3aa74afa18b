"""Steps kept in memory, for those who run a few and read them at once."""

from __future__ import annotations

from collections.abc import Iterable

from headway.account.account import Account, sum_accounts
from headway.account.events import Line, StepLine
from headway.account.tree import STEP


class StepLines:
    """An observer that keeps the step lines it hears."""

    def __init__(self) -> None:
        self.steps: list[StepLine] = []

    def tell(self, line: Line) -> None:
        if isinstance(line, StepLine):
            self.steps.append(line)

    def close(self) -> None:
        pass


def account_of(steps: Iterable[StepLine]) -> Account:
    """One or more steps as one account. Raises ValueError for none."""
    return sum_accounts([Account(STEP, line.wall_ns, line.account) for line in steps])
