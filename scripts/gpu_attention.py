"""TF/s of every way to attend over packed documents, forward and backward apart, on documents of real lengths.

python scripts/gpu_attention.py RUN.yaml [KEY=VALUE ...]     (heads of Qwen3-4B, or of the run's own model with --model)
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import torch

from headway.account.flops import attended_pairs
from headway.config.load import load_run
from headway.model.attention import PATHS
from headway.model.kernels.attention import Kind, attention_case, documents
from headway.model.kernels.case import Candidate
from headway.model.kernels.measure import values_and_gradients
from headway.parallel.device import choose_device
from headway.train.data import prepare_sources, training_view
from headway.train.fusing import compute_dtype, setting_of

TURNS = 9
PRODUCTS = 2.5
"""Of a backward pass, in forward passes, as the field counts it: five products for two, however many a kernel makes."""


def main(arguments: list[str]) -> None:
    own = "--model" in arguments
    run_file, *overrides = [each for each in arguments if each != "--model"]
    config = load_run(run_file, overrides).config
    prepare_sources(config, lambda text: None)
    device = choose_device(config.device)
    setting = setting_of(config, training_view(config), device, compute_dtype(config.train.precision, device.type))
    heads, kv_heads, head_dim = 32, 8, 128
    if own and config.model.config:
        names = ("num_attention_heads", "num_key_value_heads", "head_dim")
        heads, kv_heads, head_dim = (int(config.model.config[name]) for name in names)
    kind = Kind(heads, kv_heads, head_dim, head_dim**-0.5, None, None, False)
    case = attention_case(kind, setting.slots, setting.lengths, setting.compute_dtype, device.torch)
    sizes = documents(setting.slots, setting.lengths)
    flops = 4.0 * heads * head_dim * attended_pairs(sizes)
    print(
        f"{case.shape}, {len(sizes)} documents, longest {max(sizes)}, {str(setting.compute_dtype)[6:]}, {device.name}"
    )
    inputs = case.inputs(setting.slots)
    for candidate in case.candidates:
        print(f"  {candidate.name:<10}{_line(candidate, inputs, flops, device.torch)}", flush=True)
    assert [candidate.name for candidate in case.candidates] == list(PATHS)


def _line(candidate: Candidate, inputs: tuple[Any, ...], flops: float, device: torch.device) -> str:
    if reason := candidate.cannot():
        return reason
    try:
        started = time.perf_counter()
        values_and_gradients(candidate.run, inputs)
        _wait(device)
        first = time.perf_counter() - started
        with torch.no_grad():
            forward = _seconds(lambda: candidate.run(*inputs), device)
        leaves = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]
        out = candidate.run(*inputs)
        grad = torch.randn_like(out)
        backward = _seconds(lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True), device)
    except Exception as failure:  # one that cannot run here must not hide the others' figures
        return f"fails: {type(failure).__name__}: {' '.join(str(failure).split())[:100]}"
    return (
        f"forward {forward * 1e3:8.3f} ms {flops / forward / 1e12:6.1f} TF/s   "
        f"backward {backward * 1e3:8.3f} ms {PRODUCTS * flops / backward / 1e12:6.1f} TF/s   first call {first:.1f} s"
    )


def _seconds(call: Any, device: torch.device) -> float:
    """The median of TURNS calls, each waited for."""
    times = []
    for _ in range(TURNS if device.type == "cuda" else 2):
        _wait(device)
        started = time.perf_counter()
        call()
        _wait(device)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main(sys.argv[1:])
