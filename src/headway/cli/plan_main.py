"""`headway plan --model … --cluster …`: the plan itself (the command without a sub-command)."""

from __future__ import annotations

import typer


def register(app: typer.Typer) -> None:
    @app.callback(invoke_without_command=True)
    def plan(context: typer.Context) -> None:
        """Choose a parallel plan; say how long, how much and why."""
        if context.invoked_subcommand is None:
            print(context.get_help())
