"""Going back inside the process: the newest checkpoint of an earlier step, in whichever tier, into the live model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headway.account.errors import Refused
from headway.guard.rng import set_rng_state
from headway.guard.tiers import Tiers
from headway.guard.training_state import restore
from headway.train.step import Learner


@dataclass(frozen=True)
class Went:
    """Where training stands after going back: the state behind this step, and what its checkpoint says.

    rank_state: this rank's own state (random generators); None on a rank that did not exist then.
    """

    step: int
    meta: dict[str, Any]
    rank_state: dict[str, Any] | None
    tier: str

    def put_random_state_back(self) -> None:
        """Looking at batches draws numbers; training must go on with those that the checkpoint had."""
        if self.rank_state is not None:
            set_rng_state(self.rank_state["rng"])


def go_back(
    tiers: Tiers, learner: Learner, before_step: int, *, trainable_only: bool, say: Callable[[str], None]
) -> Went | None:
    """Collective. None, and nothing is changed, where no checkpoint of an earlier step holds.

    Those of `before_step` and later steps are deleted: were the process to end now, a start would take the newest.
    """
    tiers.settle()  # a save may be under way, of the very step
    try:
        found = tiers.newest(before_step=before_step)
    except Refused:
        return None
    if found is None:
        return None
    loaded = restore(
        found.store, found.ref, learner.replicas.module, learner.optimizers.items, trainable_only=trainable_only
    )
    for left in tiers.abandon(before_step, found.ref):
        say(f"checkpoints: not removed: {left}")
    if learner.scale is not None and loaded.meta.get("loss_scale") is not None:
        learner.scale.load(loaded.meta["loss_scale"])
    went = Went(found.ref.step, loaded.meta, loaded.rank_state, found.tier)
    went.put_random_state_back()
    return went
