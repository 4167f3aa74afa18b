"""What a configuration's `auto` came to in its run: two whose answers agree compute the same, and differ by chance."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headway.config.diff import flatten
from headway.config.dump import as_plain
from headway.config.run import RunConfig
from headway.train.run import Run
from headway.train.update_case import DEFAULTS


@dataclass(frozen=True)
class Running:
    """key: equal for runs that do the same. why: what was decided, in words, by key of the run file."""

    key: str
    why: Mapping[str, str] = field(default_factory=dict, compare=False)

    def because(self, keys: Mapping[str, Any]) -> str:
        """Why nothing changed where these keys were given."""
        return "; ".join(self.why[key] for key in keys if key in self.why) or "what runs is the same"


def running(config: RunConfig, run: Run) -> Running:
    """The configuration with its decisions in place of `auto`: they rest on the length of the whole run, of which a
    profile makes a few steps."""
    values = flatten(as_plain(config))
    why = {"model.recompute": f"recompute {run.fit.level}"}
    values["model.recompute"] = run.fit.level
    if (compiled := run.decisions.get("compile")) is not None:
        values["train.compile"] = compiled["on"]
        why["train.compile"] = f"compile: {'on' if compiled['on'] else 'off'}, {compiled['why']}"
    if (kernels := run.decisions.get("kernels")) is not None:
        chosen = {choice["operation"]: choice["chosen"] for choice in kernels["choices"]}
        # Without `fuse` the update runs by its defaults, and the model by what is its own.
        values["model.fuse"] = "none" if chosen.items() <= DEFAULTS.items() else sorted(chosen.items())
        why["model.fuse"] = "kernels: " + (", ".join(f"{name} {by}" for name, by in chosen.items()) or "none")
    return Running(json.dumps(values, sort_keys=True, default=str), why)
