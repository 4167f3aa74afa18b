"""A contestant of `headway bench speed` that is not Headway: the plain Hugging Face Trainer, or TRL's SFTTrainer.

The third name, reference, only checks. Runs in a process of its own under the peers' interpreter, which need not have
Headway: this file imports nothing of it.

Usage: python speed_peer.py NAME SETTINGS.json     commands on stdin (check, round, end), one JSON line each on stdout
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

if __name__ == "__main__":
    # Python puts a script's own folder first: our kernels.py would be taken for the package that transformers imports.
    _own = os.path.dirname(os.path.realpath(__file__))
    sys.path[:] = [folder for folder in sys.path if os.path.realpath(folder) != _own]

import numpy as np
import torch


def core_seconds() -> float:
    """Of this process, all threads together."""
    used = os.times()
    return used.user + used.system


class Answers:
    """JSON lines on what was stdout; whatever libraries print goes to stderr."""

    def __init__(self) -> None:
        self._file = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)

    def say(self, **values: Any) -> None:
        self._file.write(json.dumps(values) + "\n")


def documents(path: str) -> list[dict[str, list[int]]]:
    """Token ids, and labels that are not shifted: -100 where nothing is learned."""
    with np.load(path) as arrays:
        ids, mask, offsets = arrays["ids"], arrays["mask"], arrays["offsets"]
    labels = np.where(mask.astype(bool), ids, -100)
    spans = list(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True))
    return [{"input_ids": ids[a:b].tolist(), "labels": labels[a:b].tolist()} for a, b in spans]


def load_model(settings: dict[str, Any], dtype: torch.dtype | None = None) -> Any:
    """With weights in the run file's `model.dtype`, as Headway's."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(settings["model"], dtype=dtype or getattr(torch, settings["dtype"]))


@dataclass(frozen=True)
class Fit:
    """Rows of a batch that the memory holds, and whether only with gradient checkpointing. note: why, or None."""

    rows: int
    recompute: bool = False
    note: str | None = None


def arguments(settings: dict[str, Any], rows: int, accumulate: int, recompute: bool) -> dict[str, Any]:
    """What is the same for both trainers; all else is the library's default."""
    return {
        "output_dir": settings["scratch"],
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": accumulate,
        "num_train_epochs": settings["epochs"],
        "learning_rate": settings["lr"],
        "seed": settings["seed"],
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": settings["device"] == "cpu",
        "bf16": settings["precision"] == "bf16",
        "gradient_checkpointing": recompute,
    }


def plain_trainer(settings: dict[str, Any], data: list[dict[str, list[int]]], fit: Fit) -> Any:
    """`transformers.Trainer`, batch 8 (smaller ones accumulated where they do not fit), padding to the longest, its
    defaults."""
    from transformers import AutoTokenizer, DataCollatorForSeq2Seq, Trainer, TrainingArguments

    tokenizer = AutoTokenizer.from_pretrained(settings["tokenizer"])
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    rows = [{**row, "attention_mask": [1] * len(row["input_ids"])} for row in data]
    return Trainer(
        model=load_model(settings),
        args=TrainingArguments(**arguments(settings, fit.rows, settings["rows"] // fit.rows, fit.recompute)),
        train_dataset=rows,
        data_collator=DataCollatorForSeq2Seq(tokenizer),
    )


def trl_trainer(settings: dict[str, Any], data: list[dict[str, list[int]]], fit: Fit) -> Any:
    """TRL's SFTTrainer: best-fit packs of the sequence length, no padding, no recompute where that fits; Liger's
    kernels on a GPU (where they can be imported), else its chunked loss."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    config = SFTConfig(
        **arguments(settings, 1, settings["packs_per_step"], fit.recompute),
        use_liger_kernel=uses_liger(settings),
        packing=True,
        packing_strategy="bfd",
        max_length=settings["seq_len"],
    )
    return SFTTrainer(
        model=load_model(settings),
        args=config,
        train_dataset=Dataset.from_list(data),
        processing_class=AutoTokenizer.from_pretrained(settings["tokenizer"]),
    )


BUILDERS = {"hf": plain_trainer, "trl": trl_trainer}
LIBRARIES = {"hf": ("transformers", "torch"), "trl": ("trl", "transformers", "torch")}


class Counter:
    """Counts what the model is really given, at the call of the loss."""

    def __init__(self, trainer: Any) -> None:
        self._compute = trainer.compute_loss
        trainer.compute_loss = self
        self.reset()

    def reset(self) -> None:
        self.slots = self.tokens = self.trained = 0

    def __call__(self, model: Any, inputs: dict[str, Any], *rest: Any, **options: Any) -> Any:
        mask = inputs.get("attention_mask")
        slots = inputs["input_ids"].numel()
        self.slots += slots
        self.tokens += slots if mask is None else int(mask.sum())
        self.trained += int((inputs["labels"][:, 1:] != -100).sum())
        return self._compute(model, inputs, *rest, **options)


def check(trainer: Any) -> dict[str, Any]:
    """Loss and trained tokens of the first documents with the first weights, by the trainer's own collator and loss."""
    nll, counter = 0.0, Counter(trainer)
    with torch.no_grad():
        for inputs in trainer.get_train_dataloader():
            inputs = trainer._prepare_inputs(inputs)
            nll += float(trainer.compute_loss(trainer.model, inputs, num_items_in_batch=torch.tensor(1)))
    return {"nll": nll, "trained": counter.trained}


def reference(settings: dict[str, Any]) -> dict[str, Any]:
    """The obvious computation that everybody is held against: one document at a time, float32, all logits."""
    model = load_model(settings, torch.float32).eval()
    if settings["device"] == "cuda":
        model.cuda()
    nll, trained = 0.0, 0
    with torch.no_grad():
        for row in documents(settings["check"]):
            ids = torch.tensor([row["input_ids"]], device=model.device)
            labels = torch.tensor(row["labels"][1:], device=model.device)
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1].double()
            nll += float(torch.nn.functional.cross_entropy(logits, labels, reduction="sum"))
            trained += int((labels != -100).sum())
    return {"nll": nll, "trained": trained}


def uses_liger(settings: dict[str, Any]) -> bool:
    return settings["device"] == "cuda" and importlib.util.find_spec("liger_kernel") is not None


def fit_of(name: str, settings: dict[str, Any], data: list[dict[str, list[int]]]) -> Fit:
    """The trainer's widest batch (rows as wide as the longest document, or one pack), or what memory holds of it."""
    rows = settings["rows"] if name == "hf" else 1
    if settings["device"] == "cpu":
        reason = needs_recompute(settings, data, rows)
        return Fit(rows, reason is not None, reason)
    longest = max(len(row["input_ids"]) for row in data)
    holds = Trial(settings, longest if name == "hf" else settings["seq_len"])
    try:
        return largest_fit(holds, rows)
    finally:
        del holds.model
        gc.collect()
        torch.cuda.empty_cache()


def largest_fit(holds: Callable[[int, bool], bool], rows: int) -> Fit:
    """All rows at once, else with gradient checkpointing, else ever fewer rows with it."""
    if holds(rows, False):
        return Fit(rows)
    smaller = rows
    while not holds(smaller, True):
        if smaller == 1:
            raise SystemExit(
                "one row of the longest document does not fit into the memory, with gradient checkpointing"
            )
        smaller //= 2
    note = "gradient checkpointing on: without it the widest batch does not fit"
    if smaller < rows:
        note += f"; {smaller} rows at a time, {rows // smaller} times a step"
    return Fit(smaller, True, note)


class Trial:
    """Whether forward and backward of rows of `width` slots fit beside weights, gradients and AdamW's two moments."""

    def __init__(self, settings: dict[str, Any], width: int) -> None:
        self.settings, self.width = settings, width
        self.model = load_model(settings).to(settings["device"]).train()

    def __call__(self, rows: int, recompute: bool) -> bool:
        if recompute:
            self.model.gradient_checkpointing_enable()
        loss = _moments = None  # held, or let go of, by name: the next try needs what they take
        try:
            batch = torch.zeros(rows, self.width, dtype=torch.int64, device=self.settings["device"])
            weights = sum(p.numel() for p in self.model.parameters())
            _moments = torch.empty(2 * weights, dtype=self.model.dtype, device=self.settings["device"])
            with torch.autocast(self.settings["device"], torch.bfloat16, enabled=self.settings["precision"] == "bf16"):
                loss = self.model(input_ids=batch, labels=batch, use_cache=False).loss
            loss.backward()
        except torch.OutOfMemoryError:
            return False
        finally:
            loss = _moments = None
            self.model.zero_grad()
            torch.cuda.empty_cache()  # else what a failed try left in pieces stands in the way of the next
        return True


def needs_recompute(settings: dict[str, Any], data: list[dict[str, list[int]]], rows: int) -> str | None:
    """Why the widest batch does not fit into a CPU's memory that is free, from a small batch that was run; or None."""
    import psutil

    model = load_model(settings).train()
    slots = 512
    before, peak = psutil.Process().memory_info().rss, 0

    def watch(*_: Any) -> None:
        nonlocal peak
        peak = max(peak, psutil.Process().memory_info().rss)

    ids = torch.tensor(data[0]["input_ids"][:1] * slots).view(1, -1)
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    watch()
    for module in model.modules():
        module.register_full_backward_hook(watch)
    loss.backward()
    watch()
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    per_slot = max(0, peak - before - weights) / slots
    needed = 4 * weights + per_slot * rows * max(len(row["input_ids"]) for row in data)
    free = psutil.virtual_memory().available
    if needed < 0.8 * free:
        return None
    return (
        f"gradient checkpointing on: without it the widest batch needs about {needed / 2**30:.0f} GiB, "
        f"{free / 2**30:.0f} are free"
    )


def main() -> None:
    answers = Answers()
    name = sys.argv[1]
    with open(sys.argv[2], encoding="utf-8") as file:
        settings = json.load(file)
    torch.set_num_threads(settings["threads"])
    if name == "reference":
        answers.say(event="check", **reference(settings))
        return
    data = documents(settings["documents"])
    fit = fit_of(name, settings, data)
    libraries = LIBRARIES[name] + (("liger-kernel",) if name == "trl" and uses_liger(settings) else ())
    notes = [fit.note] if fit.note else []
    answers.say(event="ready", versions={lib: version(lib) for lib in libraries}, notes=notes)
    build = BUILDERS[name]
    for line in sys.stdin:
        command = line.strip()
        if command == "check":
            answers.say(event="check", **check(build(settings, documents(settings["check"]), fit)))
        elif command == "round":
            train(build(settings, data, fit), answers)
            return
        elif command == "end":
            return


def train(trainer: Any, answers: Answers) -> None:
    """One epoch is one round; between epochs it waits for the next command. The command for the first has come."""
    from transformers import TrainerCallback

    counter = Counter(trainer)

    class Rounds(TrainerCallback):
        started = cores = 0.0
        steps = 0
        asked = True

        def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
            if not self.asked and sys.stdin.readline().strip() != "round":
                os._exit(0)
            self.asked = False
            counter.reset()
            self.steps = state.global_step
            self.started, self.cores = time.perf_counter(), core_seconds()
            return control

        def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            answers.say(
                event="round",
                seconds=time.perf_counter() - self.started,
                core_seconds=core_seconds() - self.cores,
                slots=counter.slots,
                tokens=counter.tokens,
                trained=counter.trained,
                steps=state.global_step - self.steps,
            )
            return control

    trainer.add_callback(Rounds())
    trainer.train()


if __name__ == "__main__":
    main()
