"""A resume under other code: another release is refused, an edited checkout is told, an old checkpoint says nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headway.account.errors import Refused
from headway.guard.code_identity import _source_digest, code_identity
from headway.guard.ranks import is_prepared
from headway.train.resume import compare


def identity(**code: str) -> dict[str, Any]:
    return {"optim.lr": 1e-3, "code": {**code_identity(), **code}}


def test_another_release_is_refused_and_allowed_by_key() -> None:
    assert compare(identity(), identity(), set()) == []
    with pytest.raises(Refused, match=r"code.torch: 2.0.0 → "):
        compare(identity(torch="2.0.0"), identity(), set())
    assert compare(identity(torch="2.0.0"), identity(), {"code"})[0].startswith("code.torch: 2.0.0 → ")


def test_an_edited_checkout_is_told_and_an_old_checkpoint_is_taken() -> None:
    assert compare(identity(source="before"), identity(source="now"), set()) == ["code.source: before → now"]
    assert compare({"optim.lr": 1e-3}, identity(), set()) == []
    with pytest.raises(Refused, match=r"optim.lr"):
        compare({"optim.lr": 2e-3}, identity(), set())


def test_other_data_is_refused_by_its_files_name() -> None:
    """Two cut hashes told nobody which of the run's files has changed."""
    old, new = ({**identity(), "content of data source 1": content} for content in ("a" * 64, "b" * 64))
    with pytest.raises(
        Refused, match=r"content of data source 1 \(b/chats\.jsonl\): aa.*allow=\[content of data source 1\]"
    ):
        compare(old, new, set(), ["a/chats.jsonl", "b/chats.jsonl"])
    (allowed,) = compare(old, new, {"content of data source 1"}, ["a/chats.jsonl", "b/chats.jsonl"])
    assert allowed.startswith("content of data source 1 (b/chats.jsonl): ")


def test_the_digest_changes_with_a_byte_of_what_computes(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "watch").mkdir()
    (tmp_path / "model" / "loss.py").write_text("a")
    before = _source_digest(tmp_path)
    (tmp_path / "watch" / "page.py").write_text("a")
    assert _source_digest(tmp_path) == before
    (tmp_path / "model" / "loss.py").write_text("b")
    assert _source_digest(tmp_path) != before


def test_only_ranks_whose_launcher_looked_or_that_start_again_trust_the_data() -> None:
    ours = {"HEADWAY_LAUNCHER": "local", "HEADWAY_GENERATION": "0"}
    assert not is_prepared({}) and not is_prepared(ours) and not is_prepared({"TORCHELASTIC_RESTART_COUNT": "1"})
    assert is_prepared({**ours, "HEADWAY_PREPARED": "1"}) and is_prepared({**ours, "HEADWAY_GENERATION": "1"})
    assert not is_prepared({"HEADWAY_PREPARED": "1"}), "a variable that was left behind in a shell"


def test_looking_at_checkpoints_imports_no_torch() -> None:
    code = "import sys, headway.train.look, headway.cli.checkpoint; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
