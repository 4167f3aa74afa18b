"""What is to be written is looked at before the work: one line, nothing replaced."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import typer

from headway.account.errors import UserError
from headway.cli.diagnose import diagnose
from headway.cli.paths import is_no_input, out_path
from headway.record.files import write_atomic


def test_paths_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    os.mkfifo(tmp_path / "pipe")
    for value, why in {
        "": "an empty name",
        "a\0b": "an empty name",
        str(tmp_path): "is a folder",
        f"{tmp_path}/new/": "is a folder",
        f"{tmp_path}/file/x.html": "is no folder",
        f"{tmp_path}/pipe": "is no regular file",
        f"{tmp_path}/{'n' * 300}": "cannot be written",
    }.items():
        with pytest.raises(typer.BadParameter, match=why):
            out_path(value)
    for good in (tmp_path / "file", tmp_path / "new" / "deep" / "x.html"):
        assert out_path(str(good)) == good
    with pytest.raises(OSError, match="no regular file"):
        write_atomic(tmp_path / "pipe", "x")
    assert (tmp_path / "pipe").is_fifo() and (tmp_path / "file").read_text() == "mine"


def test_an_input_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text("{}")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    (tmp_path / "run" / "diagnosis.html").write_text("")
    inputs = (tmp_path / "t.json", tmp_path / "run", None)
    for name in ("t.json", "run/../t.json", "run/metrics.jsonl"):
        with pytest.raises(UserError, match=r"--html .*is one of the files to read"):
            is_no_input("--html", tmp_path / name, inputs)
    for name in ("other.json", "run/diagnosis.html", "run/new.html"):
        is_no_input("--html", tmp_path / name, inputs)
    is_no_input("--html", None, inputs)
    with pytest.raises(UserError, match="would be replaced"):
        diagnose([tmp_path / "t.json"], html=tmp_path / "t.json")
    assert (tmp_path / "t.json").read_text() == "{}"
