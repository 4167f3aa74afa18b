"""What a mistyped or foreign key was likely meant to be."""

from __future__ import annotations

import difflib

from headway.config.schema import all_keys

# Keys of other trainers, for people who bring their run with them.
FOREIGN = {
    "learning_rate": "optim.lr",
    "max_grad_norm": "optim.clip_norm",
    "adam_epsilon": "optim.eps",
    "lr_scheduler_type": "schedule.kind",
    "lr_scheduler": "schedule.kind",
    "warmup_ratio": "schedule.warmup",
    "warmup_steps": "schedule.warmup",
    "num_train_epochs": "train.epochs",
    "num_epochs": "train.epochs",
    "max_steps": "train.steps",
    "batch_size": "train.global_batch_sequences",
    "micro_batch_size": "data.rows",
    "per_device_train_batch_size": "data.rows",
    "gradient_accumulation_steps": "train.global_batch_sequences",
    "bf16": "train.precision",
    "torch_compile": "train.compile",
    "label_smoothing_factor": "train.loss.label_smoothing",
    "max_seq_length": "data.seq_len",
    "max_length": "data.seq_len",
    "sequence_len": "data.seq_len",
    "cutoff_len": "data.seq_len",
    "packing": "data.pack",
    "sample_packing": "data.pack",
    "dataset": "data.sources",
    "datasets": "data.sources",
    "dataloader_num_workers": "data.workers",
    "model_name_or_path": "model.path",
    "base_model": "model.path",
    "attn_implementation": "model.attention",
    "gradient_checkpointing": "model.recompute",
    "activation_checkpointing": "model.recompute",
    "lora_r": "model.lora.rank",
    "lora_alpha": "model.lora.alpha",
    "output_dir": "out",
    "run_name": "name",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "resume_from_checkpoint": "checkpoint.resume",
    "eval_steps": "eval.every",
    "logging_steps": "log.every",
    "data_parallel_shard_degree": "parallel.fsdp",
    "data_parallel_replicate_degree": "parallel.replicate",
}


def nearest(name: str) -> str | None:
    """The key that an unknown dotted name most likely stands for, None where nothing is near."""
    known = list(all_keys())
    last = name.rpartition(".")[2]
    if last in FOREIGN:
        return FOREIGN[last]
    same_word = [key for key in known if key.rpartition(".")[2] == last and "[]" not in key]
    if same_word:
        return max(same_word, key=lambda key: difflib.SequenceMatcher(None, name, key).ratio())
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if close:
        return close[0]
    words = {key.rpartition(".")[2]: key for key in reversed(known)}
    close = difflib.get_close_matches(last, list(words), n=1, cutoff=0.75)
    return words[close[0]] if close else None


def unknown_key(name: str) -> str:
    """The message for an unknown dotted name."""
    if name in all_keys():
        # Written in one word at the top: `data.seq_len: 4096`.
        section, _, last = name.rpartition(".")
        return (
            f"unknown key {name!r}: in a file, write {last!r} inside the section {section!r} (dots are for overrides)"
        )
    suggestion = nearest(name)
    if suggestion is None:
        return f"unknown key {name!r}; `headway train --show` lists all keys"
    return f"unknown key {name!r}; did you mean {suggestion!r}?"
