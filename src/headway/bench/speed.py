"""`headway bench speed`: Headway's presets and other trainers side by side on the same documents, in turn.

Every contestant has a process of its own and trains the same list of documents once a round; the rounds go round the
contestants, so that a machine that slows down slows all of them (on a GPU, which holds one training and is nobody
else's, each makes all its rounds in one go). The first round warms up and is not counted. Before the first, each
contestant's own loss over a few documents is held against one document at a time in float32: one that leaks across
documents or trains other tokens is named as wrong.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from headway.account.errors import UserError
from headway.bench.speed_documents import Chosen, choose, short_ones
from headway.bench.speed_process import Contestant, Round, headway_command, peer_command, reference_check
from headway.config.diff import flatten
from headway.config.dump import as_plain, dump_yaml
from headway.config.load import load_run
from headway.config.presets import PRESETS
from headway.config.run import RunConfig
from headway.data.stream import Stream, StreamOptions
from headway.data.view import View
from headway.parallel.device import choose_device
from headway.train.data import prepare_sources, training_view

_TRAINER = ("numpy", "torch", "transformers", "accelerate", "psutil")
PACKAGES = {"hf": _TRAINER, "trl": (*_TRAINER, "trl", "datasets")}
PEERS = tuple(PACKAGES)
ROWS = 8
#: What float32 sums in another order may differ by; a leak or a shifted label differs by percents.
SAME = {"fp32": 1e-4, "bf16": 1e-2}
_CHECK_DOCUMENTS, _CHECK_LONGEST = 6, 256
Say = Callable[[str], None]


@dataclass(frozen=True)
class SpeedOptions:
    """presets and peers compete; documents a round; rounds that count; warm_up: one round before them.

    resident: processes live through all rounds; otherwise each round has new ones, which warm up each time.
    one_by_one: a contestant makes all its rounds before the next one starts; None: on a GPU.
    """

    presets: tuple[str, ...] = ("naive", "fast")
    peers: tuple[str, ...] = ()
    peer_python: str | None = None
    documents: int = 32
    rounds: int = 3
    warm_up: bool = True
    threads: int | None = None
    resident: bool = True
    one_by_one: bool | None = None


@dataclass(frozen=True)
class SpeedResult:
    """What was measured, and on what. padding: of all documents of the data, in rows of eight."""

    contestants: list[Contestant]
    documents: Chosen
    population_padding: float
    seq_len: int
    device: str
    threads: int
    precision: str
    one_by_one: bool


def bench_speed(run_file: Path, options: SpeedOptions, scratch: Path, say: Say) -> SpeedResult:
    """Runs the comparison; `scratch` is a folder for everything that is written.

    Raises:
        UserError: anything wrong with the run file or a peer's interpreter, or a contestant that dies.
    """
    _refuse_unknown(options)
    config = load_run(run_file).config
    _refuse_unequal(run_file, config)
    prepare_sources(config, say)
    view = training_view(config)
    chosen = choose(view, options.documents, config.seed)
    settings = _write_settings(config, view, chosen, options, scratch)
    contestants = _contestants(config, options, settings, scratch)
    say(f"documents: {options.documents} of {chosen.population}, {chosen.tokens} tokens, {chosen.trained} trained")
    expected = reference_check(settings, scratch / "reference.log")
    device = choose_device(config.device)
    values = json.loads(settings.read_text(encoding="utf-8"))
    alone = device.type == "cuda" if options.one_by_one is None else options.one_by_one
    race = Race(expected, chosen.trained, SAME[values["precision"]], options, say)
    race.all(contestants, alone)
    return SpeedResult(
        contestants,
        chosen,
        _padding(view),
        config.data.seq_len,
        device.name,
        values["threads"],
        values["precision"],
        alone,
    )


@dataclass(frozen=True)
class Race:
    """expected: the reference's check. trained: labels of a round. tolerance: of the check's loss."""

    expected: dict[str, Any]
    trained: int
    tolerance: float
    options: SpeedOptions
    say: Say

    def all(self, contestants: Sequence[Contestant], one_by_one: bool) -> None:
        """The whole race; no contestant lives when it ends."""
        for group in [[each] for each in contestants] if one_by_one else [contestants]:
            try:
                self._run(group)
            finally:
                for contestant in group:
                    contestant.end()

    def _run(self, contestants: Sequence[Contestant]) -> None:
        """Checks these, then takes them round by round, in turn."""
        for contestant in contestants:
            self._if_alive(contestant, self._check)
        first = 0 if self.options.warm_up and self.options.resident else 1
        for number in range(first, self.options.rounds + 1):
            for contestant in contestants:
                self._if_alive(contestant, partial(self._round, number))

    def _if_alive(self, contestant: Contestant, step: Callable[[Contestant], None]) -> None:
        """A peer that dies is out of the race, which goes on; one of Headway's own ends it."""
        if contestant.died:
            return
        try:
            step(contestant)
        except UserError as error:
            if contestant.name not in PEERS:
                raise
            contestant.died = str(error).removeprefix("bench speed: ")
            contestant.end()
            self.say(f"OUT: {contestant.died}")

    def _check(self, contestant: Contestant) -> None:
        contestant.start()
        contestant.wrong += differences(contestant.check(), self.expected, self.tolerance)
        for note in [*contestant.ready["notes"], *(f"WRONG: {text}" for text in contestant.wrong)]:
            self.say(f"{contestant.name}: {note}")
        if not self.options.resident:
            contestant.end()

    def _round(self, number: int, contestant: Contestant) -> None:
        done = self._one_round(contestant)
        if done.trained != self.trained:
            contestant.wrong.append(f"trained {done.trained} tokens in a round of {self.trained}")
        if number:
            contestant.rounds.append(done)
        self.say(
            f"{f'round {number}' if number else 'warm-up'}  {contestant.name:<8} {done.speed:8.1f} tokens/s  "
            f"{done.seconds:7.1f} s  {done.steps} steps  {done.padding:5.1%} padding"
        )

    def _one_round(self, contestant: Contestant) -> Round:
        if self.options.resident:
            return contestant.round()
        contestant.start()
        if self.options.warm_up:
            contestant.round()
        done = contestant.round()
        contestant.end()
        return done


def differences(found: dict[str, Any], expected: dict[str, Any], tolerance: float) -> list[str]:
    """What is wrong with a contestant's check, in words."""
    problems = []
    if found["trained"] != expected["trained"]:
        problems.append(f"trains {found['trained']} tokens of the check's documents, {expected['trained']} are labels")
    apart = abs(found["nll"] - expected["nll"]) / abs(expected["nll"])
    if not apart <= tolerance:
        problems.append(
            f"its loss over the check's documents is {apart:.2%} off (summed nll {found['nll']:.3f}, one document at a "
            f"time {expected['nll']:.3f}): documents leak, or labels or positions differ"
        )
    return problems


def _refuse_unknown(options: SpeedOptions) -> None:
    for name in options.presets:
        if name not in PRESETS:
            raise UserError(f"bench speed: no preset {name!r}; known: {', '.join(PRESETS)}")
    for name in options.peers:
        if name not in PEERS:
            raise UserError(f"bench speed: no peer {name!r}; known: {', '.join(PEERS)}")
    if options.peer_python is not None and not Path(options.peer_python).is_file():
        raise UserError(f"bench speed: --peer-python {options.peer_python}: there is no such interpreter")
    python = options.peer_python or sys.executable
    for name in options.peers:
        missing = _missing(python, PACKAGES[name])
        if missing:
            raise UserError(
                f"bench speed: {python} cannot run the peer {name}: it lacks {', '.join(missing)}; install it there "
                "(torch pinned in the same command), or name an interpreter that has it: --peer-python"
            )


def _missing(python: str, packages: Sequence[str]) -> list[str]:
    """What of it the interpreter cannot find, in a tenth of a second; importing it takes many."""
    code = "import sys, importlib.util as u; print(*(name for name in sys.argv[1:] if u.find_spec(name) is None))"
    done = subprocess.run([python, "-c", code, *packages], capture_output=True, text=True)
    return done.stdout.split() if done.returncode == 0 else [f"a Python that runs ({done.stderr.strip()[-200:]})"]


def _refuse_unequal(run_file: Path, config: RunConfig) -> None:
    """Raises UserError for what would not be the same work for all."""
    if config.model.path is None:
        raise UserError(f"{run_file}: bench speed needs model.path: every contestant starts from the same weights")
    if config.model.lora is not None:
        raise UserError(f"{run_file}: bench speed trains all weights: leave model.lora out")
    if config.train.precision not in ("auto", "float32", "bfloat16"):
        raise UserError(
            f"{run_file}: train.precision is {config.train.precision}: bench speed compares auto, float32 or bfloat16"
        )


def _write_settings(config: RunConfig, view: View, chosen: Chosen, options: SpeedOptions, scratch: Path) -> Path:
    import torch

    scratch.mkdir(parents=True, exist_ok=True)
    check = chosen.part(short_ones(chosen, _CHECK_DOCUMENTS, _CHECK_LONGEST))
    vocabulary = max(store.vocab_size for store in view.stores)
    chosen.write_arrays(scratch / "documents.npz")
    check.write_arrays(scratch / "check.npz")
    chosen.write_shards(scratch / "documents", vocabulary)
    check.write_shards(scratch / "check", vocabulary)
    device = choose_device(config.device).type
    bf16 = config.train.precision == "bfloat16" or (config.train.precision == "auto" and device == "cuda")
    steps = -(-options.documents // ROWS)
    settings = {
        "model": config.model.path,
        "tokenizer": config.model.tokenizer,
        "documents": str(scratch / "documents.npz"),
        "check": str(scratch / "check.npz"),
        "check_documents": str(scratch / "check"),
        "scratch": str(scratch / "peers"),
        "count": options.documents,
        "rows": ROWS,
        "packs_per_step": max(1, round(chosen.tokens / config.data.seq_len / steps)),
        # One pack a step, no larger than its share of the documents: so few of them would leave a pack of a real run's
        # size half empty, which no real run's is.
        "slots": max(config.data.seq_len, _up(1.01 * chosen.tokens / steps, 64)),
        "seq_len": config.data.seq_len,
        # A card's layers are compiled where a run is long enough: the race is of the run that it stands for, which is.
        "epochs": 10_000 if device == "cuda" else options.rounds + 2,
        "lr": config.optim.lr,
        "seed": config.seed,
        "device": device,
        "precision": "bf16" if bf16 else "fp32",
        "dtype": config.model.dtype,
        "threads": options.threads or torch.get_num_threads(),
    }
    path = scratch / "settings.json"
    path.write_text(json.dumps(settings, indent=1), encoding="utf-8")
    return path


def _contestants(config: RunConfig, options: SpeedOptions, settings: Path, scratch: Path) -> list[Contestant]:
    values = json.loads(settings.read_text(encoding="utf-8"))
    found = []
    for name in options.presets:
        run_file = scratch / f"{name}.yaml"
        run_file.write_text(dump_yaml(_preset_config(config, name, values, scratch)), encoding="utf-8")
        own = scratch / f"{name}.json"
        own.write_text(json.dumps({**values, "run_file": str(run_file)}), encoding="utf-8")
        found.append(Contestant(name, headway_command(own), scratch / f"{name}.log"))
    python = options.peer_python or sys.executable
    for name in options.peers:
        found.append(Contestant(name, peer_command(python, name, settings), scratch / f"{name}.log"))
    return found


def _preset_config(config: RunConfig, preset: str, settings: dict[str, Any], scratch: Path) -> RunConfig:
    """The run file's training over the fixed documents, with every key of the preset, whatever the run file says."""
    values = flatten(as_plain(config))
    values |= PRESETS[preset]
    packed = values["data.pack"] != "none"
    values |= {
        "preset": preset,
        "name": preset,
        "out": str(scratch / "runs"),
        "data.sources": [{"path": str(scratch / "documents")}],
        "data.shards": None,
        "data.overlong": "truncate",
        "train.steps": None,
        "train.tokens": None,
        "train.epochs": settings["epochs"],
        "train.precision": {"bf16": "bfloat16", "fp32": "float32"}[settings["precision"]],
        "train.global_batch_tokens": None,
        "train.global_batch_sequences": 1 if packed else ROWS,
        "eval.every": None,
        "eval.data": None,
        "eval.holdout": 0,
        "checkpoint.every": None,
        "checkpoint.memory_every": None,
        "checkpoint.at_end": False,
        "parallel.ranks": 1,
        "parallel.replicate": 1,
        "parallel.fsdp": None,
    }
    if packed:
        values["data.slots"] = settings["slots"]
    return RunConfig.model_validate(nested(values))


def _up(value: float, unit: int) -> int:
    return -(-math.ceil(value) // unit) * unit


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    """Dotted keys as nested mappings."""
    values: dict[str, Any] = {}
    for key, value in flat.items():
        *outer, last = key.split(".")
        inside = values
        for part in outer:
            inside = inside.setdefault(part, {})
        inside[last] = value
    return values


def _padding(view: View) -> float:
    """Share of padding over all documents in rows of eight, each padded to the longest of its micro-batch."""
    return 1 - Stream(view, StreamOptions(rows=ROWS, pack="none", sequences_per_step=ROWS)).efficiency(0).fill
