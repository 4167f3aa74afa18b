"""Headway as a contestant of `headway bench speed`: a whole run, made of the trainer's own parts, in its own process.

Usage: python -m headway.bench.speed_headway SETTINGS.json     commands on stdin, one JSON line each on stdout
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import torch

from headway.account.events import Flops
from headway.account.run_clock import RunClock
from headway.bench.speed_peer import Answers, core_seconds
from headway.config.load import load_run
from headway.config.run import RunConfig
from headway.data.global_batch import Position
from headway.train.build import build_run
from headway.train.data import make_stream, training_view
from headway.train.evaluate import Evaluator
from headway.train.run import Run
from headway.train.step_lines import StepLines, account_of


def main() -> None:
    answers = Answers()
    settings = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(settings["threads"])
    config = load_run(settings["run_file"]).config
    collected = StepLines()
    run = build_run(config, None, RunClock(), observers=lambda: [collected], say=_to_stderr)
    answers.say(
        event="ready",
        versions={"torch": torch.__version__},
        notes=[],
        peak_flops=run.session_start.peak_flops,
        peak_source=run.session_start.peak_source,
    )
    started = False
    for line in sys.stdin:
        command = line.strip()
        if command == "check":
            answers.say(event="check", **check(run, settings["check_documents"]))
        elif command == "round":
            if not started:
                run.start()
                started = True
            answers.say(event="round", **one_round(run, collected, settings["count"]))
        else:
            break
    run.close("done")


def check(run: Run, documents: str) -> dict[str, Any]:
    """The loss of the first documents with the first weights, as the run would compute it."""
    raw = run.config.model_dump()
    raw["data"]["sources"] = [{"path": documents}]
    config = RunConfig.model_validate(raw)
    stream = make_stream(config, training_view(config), run.config.sequences_per_step(1))
    found = Evaluator(stream, 0, 1, run.learner.device).run(run.learner.replicas)
    return {"nll": found.nll * found.tokens, "trained": found.tokens}


def one_round(run: Run, collected: StepLines, count: int) -> dict[str, Any]:
    """One epoch over the `count` documents, in the words of the loop."""
    collected.steps.clear()
    began, cores = time.perf_counter(), core_seconds()
    epoch = None
    while epoch is None or run.position < Position(epoch, count):
        run.clock.begin_step()
        run.tell_finished_steps()
        fed = run.next_batch()
        epoch = fed.batch.position.epoch
        run.learn(fed)
        run.collect_garbage()
    run.clock.end_step()
    run.reporter.tell_finished()
    seconds, cores = time.perf_counter() - began, core_seconds() - cores
    steps = collected.steps
    return {
        "seconds": seconds,
        "core_seconds": cores,
        "slots": sum(line.slots for line in steps),
        "tokens": sum(line.tokens for line in steps),
        "trained": sum(line.trained_tokens for line in steps),
        "steps": len(steps),
        "account": account_of(steps).to_dict(),
        "flops": msgspec.to_builtins(sum((line.flops for line in steps), Flops())),
    }


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
