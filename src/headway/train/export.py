"""The trained model as a folder that Hugging Face tools load, from the live model or from a checkpoint."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from headway.account.errors import UserError
from headway.config.load import load_run
from headway.config.run import RunConfig
from headway.guard.checkpoint import CheckpointRef, CheckpointStore
from headway.guard.process_group import is_main
from headway.model.export import save_model
from headway.model.forward import inner_model
from headway.model.load import DTYPES, load_tokenizer
from headway.model.lora import merge_lora, save_adapter
from headway.record.folder import RunFolder
from headway.train.model import BuiltModel, build_model


def export_live(config: RunConfig, model: BuiltModel, out: Path) -> None:
    """Collective: gathers the whole state on rank 0's CPU and writes it there; an earlier export is moved aside."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state: dict[str, Any] = get_model_state_dict(model.module, options=options)
    if is_main():
        for old in (out, out.with_name(f"{out.name}-adapter")):
            _move_aside(old)
        _write(config, model, state, out)


def _move_aside(path: Path) -> None:
    """Somebody may have put files beside ours: nothing is deleted."""
    if path.exists():
        number = next(n for n in itertools.count(1) if not path.with_name(f"{path.name}-before-{n}").exists())
        path.rename(path.with_name(f"{path.name}-before-{number}"))


def export_checkpoint(run_dir: Path, out: Path, step: int | None) -> CheckpointRef:
    """Exports the newest verified checkpoint, or that of `step`. One process, no process group.

    Raises:
        UserError: no such checkpoint, a damaged one, or `out` exists.
    """
    if out.exists():
        raise UserError(f"{out} exists; give a folder that does not")
    folder = RunFolder.open(run_dir, for_checkpoints=True)
    store = CheckpointStore(folder.checkpoints, None)
    ref = _choose(store, step)
    config = load_run(folder.config).config
    model = build_model(config)
    state = {**model.module.state_dict(), **store.load_full_model(ref)}
    _write(config, model, state, out)
    return ref


def _choose(store: CheckpointStore, step: int | None) -> CheckpointRef:
    if step is None:
        newest = store.newest_verified()
        if newest is None:
            raise UserError(f"{store.root}: there is no checkpoint")
        return newest
    found = [info.ref for info in store.list() if info.ref.step == step]
    if not found:
        there = ", ".join(str(info.ref.step) for info in store.list()) or "none"
        raise UserError(f"{store.root}: no checkpoint of step {step}; there are: {there}")
    return found[-1]


def _write(config: RunConfig, model: BuiltModel, state: dict[str, Tensor], out: Path) -> None:
    """The model in its training dtype, so that nothing is rounded; LoRA's adapters are merged, and kept beside it."""
    tokenizer = None
    if config.model.tokenizer is not None:
        tokenizer = load_tokenizer(config.model.tokenizer, trust_remote_code=config.model.trust_remote_code)
        if config.data.chat_template is not None:  # served with the prompt that it was trained on
            tokenizer.chat_template = config.data.chat_template.read_text(encoding="utf-8")
    if config.model.lora is not None:
        save_adapter(model.module, out.with_name(f"{out.name}-adapter"), state)
        state = merge_lora(state, model.config, config.model.lora)
    save_model(
        state,
        model.config,
        tokenizer,
        out,
        dtype=DTYPES[config.model.dtype],
        generation_config=inner_model(model.module).generation_config,
    )
