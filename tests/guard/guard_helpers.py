"""Several gloo ranks inside one test: forked, so that they start in milliseconds, with a watchdog."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # optimizers import it at their first step: once here, not in every forked rank
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from headway.guard.training_state import capture
from headway.guard.tree import flatten


@dataclass
class Outcome:
    """`value`: what the rank's function returned; `code`: exit code, negative for a signal; `error`: its traceback."""

    value: Any
    code: int | None
    error: str


def run_ranks(
    n: int, work: Callable[..., Any], *args: Any, timeout: float = 60.0, env: dict | None = None
) -> list[Outcome]:
    """Runs `work(rank, *args)` on `n` forked gloo ranks; kills what is left after `timeout` seconds (code None)."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_rank_main, args=(rank, n, Path(folder), work, args, env or {})) for rank in range(n)
        ]
        for process in processes:
            process.start()
        try:
            deadline = time.monotonic() + timeout
            for process in processes:
                process.join(max(0.0, deadline - time.monotonic()))
            codes = [process.exitcode for process in processes]
        finally:
            for process in processes:  # also when the test's own watchdog raises
                process.kill()
                process.join()
        outcomes = []
        for rank, code in enumerate(codes):
            path = Path(folder, f"result-{rank}")
            value, error = pickle.loads(path.read_bytes()) if path.exists() else (None, "")
            outcomes.append(Outcome(value, code, error))
        return outcomes


def on_ranks(n: int, work: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
    """The same, for work that must succeed on every rank: returns the values."""
    outcomes = run_ranks(n, work, *args, timeout=timeout)
    for rank, outcome in enumerate(outcomes):
        assert outcome.code == 0, f"rank {rank} ended with {outcome.code}\n{outcome.error}"
    return [outcome.value for outcome in outcomes]


def _rank_main(rank: int, n: int, folder: Path, work: Callable[..., Any], args: tuple[Any, ...], env: dict) -> None:
    os.environ.update(env)
    torch.set_num_threads(1)
    try:
        if n > 1:
            dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=n)
        result, code = (work(rank, *args), ""), 0
    except BaseException:
        result, code = (None, traceback.format_exc()), 1
    Path(folder, f"result-{rank}.part").write_bytes(pickle.dumps(result))
    os.replace(Path(folder, f"result-{rank}.part"), Path(folder, f"result-{rank}"))
    os._exit(code)


class Tiny(nn.Module):
    """Odd sizes, so that shards are uneven and, on four ranks, some are empty; one parameter that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 3)])
        self.unused = nn.Parameter(torch.zeros(5))
        self.register_buffer("counter", torch.zeros(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return hidden


def tiny_model(seed: int = 0, kind: str = "plain") -> nn.Module:
    torch.manual_seed(seed)
    model: nn.Module = Tiny()
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    if kind == "fsdp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def tiny_optimizer(model: nn.Module, initial_lr: bool = True) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "lr": 0.1, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.95))
    if initial_lr:
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
    return optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> list[str]:
    """Steps on data that depends only on the step's number; returns the losses as hex, exactly."""
    losses = []
    for step in range(first, first + steps):
        ids = torch.randint(0, 7, (20,), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = (model(ids) - 0.3).pow(2).sum() + 0.1 * torch.rand(()) * 0  # the rand moves the generator
        loss.backward()
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * 0.9
        losses.append(float(loss.detach()).hex())
    return losses


def full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Everything that a resume must bring back, unsharded (collective for sharded models)."""
    flat = flatten(capture(model, [optimizer]))
    tensors = {key: full(tensor) for key, tensor in flat.tensors.items()}
    return {"tensors": tensors, "values": dict(flat.values)}


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)  # so that nan equals itself, and -0 is not 0


def same(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Keys whose bits differ; empty when the snapshots are equal."""
    keys = one["tensors"].keys() | other["tensors"].keys()
    odd = [key for key in keys if key not in one["tensors"] or key not in other["tensors"]]
    for key in keys - set(odd):
        a, b = one["tensors"][key], other["tensors"][key]
        if a.dtype != b.dtype or a.shape != b.shape or not torch.equal(_bits(a), _bits(b)):
            odd.append(key)
    values = one["values"].keys() | other["values"].keys()
    odd += [key for key in values if one["values"].get(key, ...) != other["values"].get(key, ...)]
    return odd
