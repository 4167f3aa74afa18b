"""`headway plan …`: step time, memory, money and dates of a training run, before a GPU is booked.

Each sub-command has a file of its own (`plan_NAME.py` with a `register(app)`), named in `COMMANDS`.
"""

from __future__ import annotations

from importlib import import_module

import typer

app = typer.Typer()

COMMANDS = ("main", "explain", "sweep", "shrink", "validate", "calibrate", "goodput", "check_claim")

for _name in COMMANDS:
    import_module(f"headway.cli.plan_{_name}").register(app)
