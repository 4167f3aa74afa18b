"""`headway verify` on the command line: exit codes, the page, JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import tiny
from headway.cli.main import main


def verify(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(["verify", *arguments, "--steps", "2", "--held-out", "1"])
    return int(end.value.code or 0)


def test_agreement_disagreement_and_nonsense(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_file = str(tiny.run_file(tmp_path))
    page = tmp_path / "verify.html"
    assert verify(run_file, "-c", "data.pack=none", "--html", str(page)) == 0
    assert "the same training: every difference" in capsys.readouterr().out
    text = page.read_text()
    assert text.count("<svg") + text.count("nothing differs") == 4 and "http" not in text  # self-contained

    assert verify(run_file, "-c", "optim.lr=2e-3", "--json") == 1
    record = json.loads(capsys.readouterr().out)
    assert record["same"] is False and record["differences"][0]["key"] == "optim.lr"

    assert verify(run_file) == 2
    assert "nothing to compare" in capsys.readouterr().err
