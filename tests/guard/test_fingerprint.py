"""A changed configuration or data set is refused, with every difference in one line."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.account.errors import Refused, UserError
from headway.guard.fingerprint import refuse_changed

SAVED = {
    "data": {"fingerprint": "aa", "seq_len": 4096, "files": ["a", "b"]},
    "optim": {"betas": [0.9, 0.95], "lr": 1e-4},
}

values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats() | st.text("abc", max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", min_size=1, max_size=2), inner, max_size=3)
    ),
    max_leaves=8,
)
fingerprints = st.dictionaries(st.text("abc", min_size=1, max_size=2), values, max_size=4)


def test_every_difference_is_shown_in_one_line() -> None:
    now = {
        "data": {"fingerprint": "bb", "seq_len": 2048, "files": ["a", "b"]},
        "optim": {"betas": (0.9, 0.95)},
        "new": 1,
    }
    with pytest.raises(Refused) as caught:
        refuse_changed(SAVED, now)
    text = str(caught.value)
    assert "data.fingerprint: aa → bb" in text and "data.seq_len: 4096 → 2048" in text
    assert "optim.lr: 0.0001 → (absent)" in text and "new: (absent) → 1" in text
    assert "betas" not in text and "files" not in text and "\n" not in text  # a tuple came back as a list: no change


def test_allowed_differences_are_returned_and_the_others_still_refused() -> None:
    now = json.loads(json.dumps(SAVED))
    now["data"]["seq_len"] = 2048
    now["optim"]["lr"] = 1e-3
    assert refuse_changed(SAVED, now, allow=True) == ["data.seq_len: 4096 → 2048", "optim.lr: 0.0001 → 0.001"]
    assert len(refuse_changed(SAVED, now, allow={"data", "optim.lr"})) == 2
    with pytest.raises(Refused) as caught:
        refuse_changed(SAVED, now, allow={"data"})
    assert "optim.lr" in str(caught.value) and "seq_len" not in str(caught.value)
    with pytest.raises(Refused):
        refuse_changed(SAVED | {"dat": 1}, now | {"dat": 1}, allow={"dat", "optim"})  # not what only starts like it


def test_a_misspelt_permission_is_an_error_not_a_permission_for_nothing() -> None:
    with pytest.raises(UserError, match=r"data\.seqlen is no key that a resume compares; did you mean data\.seq_len"):
        refuse_changed(SAVED, SAVED, allow={"data.seqlen"})


def test_look_alikes_are_differences() -> None:
    for old, new in [(True, 1), (1, 1.0), ("1", 1), (None, "None"), ([], {}), (0.1, 0.1 + 2**-55)]:
        with pytest.raises(Refused):
            refuse_changed({"key": old}, {"key": new})
    assert refuse_changed({"key": float("nan")}, {"key": float("nan")}) == []


@settings(deadline=None)
@given(fingerprints)
def test_nothing_differs_from_itself_after_json(values: dict) -> None:
    assert refuse_changed(json.loads(json.dumps(values)), values) == []
