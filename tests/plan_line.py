"""`headway plan …` in this process: the command line built once, and what every refusal has in common."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import typer

from headway.cli import main as command_line
from headway.cli.main import _join_commands, _run


@pytest.fixture(scope="module", autouse=True)
def joined() -> Iterator[None]:
    """The command line, built once: typer would read every command's signature again on each of 300 calls."""
    if not command_line.app.registered_groups:
        _join_commands()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command_line, "app", typer.main.get_command(command_line.app))
        yield


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that `headway plan ARGUMENTS` ends in, with exit code 2."""
    code = _run(["plan", *arguments], debug=False)
    captured = capsys.readouterr()
    assert code == 2, (arguments, code, captured.out[-300:])
    assert captured.err.count("\n") == 1 and captured.err.startswith("headway: "), captured.err
    return captured.err
