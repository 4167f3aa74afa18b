"""Whose fault it was, on batches whose figures are a formula: the guilty by construction, whatever their number."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from headway.guard.spikes.cause import Look, Replay, by_suspicion, find_cause
from headway.guard.spikes.figures import Figures
from headway.guard.spikes.policy import Policy

USUAL = 2.0


def batch(losses: dict[int, float], gradients: dict[int, float]) -> Replay:
    """Loss: the mean. Gradient norm: 1 and what each document adds."""

    def replay(masked: frozenset[int]) -> Look | None:
        left = [raw for raw in losses if raw not in masked]
        if not left:
            return None
        figures = Figures(
            step=1,
            nll=sum(losses[raw] for raw in left) / len(left),
            grad_norm=1 + sum(gradients.get(raw, 0.0) for raw in left),
            finite=True,
        )
        return Look(figures, {raw: (losses[raw], 20) for raw in left})

    return replay


def clean(figures: Figures) -> bool:
    return figures.finite and figures.grad_norm < 2.0


@settings(max_examples=80, deadline=None)
@given(size=st.integers(4, 64), data=st.data())
def test_the_guilty_are_found_whether_their_loss_is_strange_or_not(size: int, data: st.DataObject) -> None:
    guilty = data.draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=max(1, size // 4)))
    strange = data.draw(st.sampled_from([0.01, 9.0]))
    losses = {raw: strange if raw in guilty else USUAL + raw / 1000 for raw in range(size)}
    found = find_cause(batch(losses, dict.fromkeys(guilty, 5.0)), clean, USUAL, most_share=0.25)
    assert found.kind == "documents" and set(found.documents) == guilty
    assert found.looks <= 4 + 3 * len(guilty) + 12


@given(size=st.integers(2, 64), data=st.data())
def test_one_document_with_an_ordinary_loss_is_found_by_halves(size: int, data: st.DataObject) -> None:
    guilty = data.draw(st.integers(0, size - 1))
    losses = dict.fromkeys(range(size), USUAL)
    found = find_cause(batch(losses, {guilty: 5.0}), clean, USUAL, most_share=0.25)
    # The whole batch, 1, 2, 4, … suspects up to a quarter of it, and both halves each time.
    most = 2 + (max(1, size // 4) - 1).bit_length() + 2 * (size - 1).bit_length()
    assert found.documents == (guilty,) and found.looks <= most


def test_a_batch_that_is_clean_the_second_time_was_a_passing_fault() -> None:
    assert find_cause(batch({1: 2.0, 2: 2.0}, {}), clean, USUAL, 0.25).kind == "transient"


def test_a_batch_that_is_all_bad_is_nobody_s_fault_in_particular() -> None:
    losses = dict.fromkeys(range(16), 9.0)
    found = find_cause(batch(losses, dict.fromkeys(range(16), 3.0)), clean, USUAL, 0.25)
    assert found.kind == "everything" and found.documents == ()


def test_planted_the_strange_but_innocent_are_taken_back() -> None:
    losses = {**dict.fromkeys(range(20), USUAL), 3: 9.5, 7: 9.0}
    found = find_cause(batch(losses, {7: 5.0}), clean, USUAL, 0.25)
    assert by_suspicion(Look(Figures(1, 2.0, 1.0, True), {raw: (losses[raw], 20) for raw in losses}), USUAL)[0] == 3
    assert found.documents == (7,), "document 3 is stranger, but the batch is as bad without it"


def test_a_policy_escalates_within_its_window_only() -> None:
    policy = Policy(("lower_lr", "skip"), 0.5, for_steps=10, within=100)
    assert policy.next_action(50) == "lower_lr" and policy.next_action(60) == "skip" and policy.next_action(70) is None
    again = Policy(("lower_lr", "skip"), 0.5, for_steps=10, within=100)
    again.load(policy.state())
    assert again.next_action(80) is None and again.next_action(400) == "lower_lr"


def test_offered_actions_end() -> None:
    policy = Policy(("lower_lr",), 0.5, for_steps=10, within=100)
    policy.lower_from(20)
    assert [policy.lr_factor(step) for step in (21, 30, 31)] == [0.5, 0.5, 1.0]
    policy.clip_from(20, 0.7)
    assert [policy.clip_at(step, 1.0) for step in (30, 31)] == [0.7, 1.0] and policy.clip_at(25, None) == 0.7
