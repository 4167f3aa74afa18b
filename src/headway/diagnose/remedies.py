"""The registered remedies: what to change for each cause, in Headway and outside of it.

A remedy is registered once, without a gain; a finding gives it one (`predict`). `tune` tries them by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headway.account.remedy import Remedy

SAME_DATA = "the same data must give the same losses: `headway verify` of both runs"
SAME_MATH = "same losses within rounding, same gradient norms: `headway verify` of both runs"
NO_MATH = "nothing that is computed changes; losses stay equal bit for bit"


@dataclass(frozen=True)
class Registered:
    """A remedy without its gain. change: run-file keys; setting: the same outside Headway; check: see `Remedy`."""

    name: str
    shrinks: tuple[str, ...]
    change: Mapping[str, Any]
    setting: str
    check: str


REMEDIES: dict[str, Registered] = {}


def register(name: str, shrinks: tuple[str, ...], change: Mapping[str, Any], setting: str, check: str) -> None:
    """Adds a remedy to the registry.

    Raises:
        ValueError: the name is taken.
    """
    if name in REMEDIES:
        raise ValueError(f"remedy {name!r} is registered twice")
    REMEDIES[name] = Registered(name, shrinks, change, setting, check)


def predict(
    name: str, gain: tuple[float, float], evidence: tuple[str, ...], change: Mapping[str, Any] | None = None
) -> Remedy:
    """A registered remedy with a gain (share of the wall clock, low and high) and what it rests on.

    `change` replaces the registered run-file change where the finding knows exact values.
    """
    kind = REMEDIES[name]
    return Remedy(name, kind.shrinks, gain, evidence, change or kind.change, kind.check, kind.setting)


register(
    "pack",
    ("compute", "flops.padding"),
    {"data.pack": "best_fit"},
    "pack documents into full rows and hand the boundaries (cu_seqlens) to attention: TRL `packing=True` with "
    "flash attention, Megatron `--dataloader-type` packed SFT; at the least sort by length and pad to the longest row",
    "the loss of each document must not change: `headway train` proves isolation at start; compare losses by trained "
    "token, not by step",
)
register(
    "compile",
    ("host.launch", "compute"),
    {"train.compile": True},
    "`torch.compile(block)` for each transformer block (mode='reduce-overhead' adds CUDA graphs); or fused kernels "
    "for norm, rotary and SwiGLU (liger-kernel)",
    SAME_MATH,
)
register(
    "fuse-loss",
    ("compute.loss", "compute.forward", "compute.backward", "copy"),
    {"model.fuse": "auto"},
    "a fused linear cross entropy that never makes the logits: liger-kernel LigerFusedLinearCrossEntropyLoss, "
    "cut-cross-entropy `linear_cross_entropy`; or compute the loss over chunks of tokens",
    "loss and gradient of the head against plain float32 cross entropy, every reduction and mask in use: 1e-5",
)
register(
    "fuse-optimizer",
    ("compute.optimizer", "host.launch"),
    {"optim.name": "adamw"},
    "`torch.optim.AdamW(params, ..., fused=True)`",
    "same losses within rounding over 20 steps",
)
register(
    "fuse-attention",
    ("compute.forward", "compute.backward"),
    {"model.attention": "headway"},
    '`F.scaled_dot_product_attention`, or `attn_implementation="sdpa"` / `"flash_attention_2"` in transformers; a '
    "mask that is dense forces the slow path: use is_causal or varlen",
    "logits against the eager path in float32: 1e-5 relative",
)
register(
    "no-host-sync",
    ("host.sync",),
    {"log.every": 10},
    "keep `.item()`, `.cpu()`, `print(tensor)`, `if tensor:` and `torch.cuda.synchronize()` out of the step; read "
    "scalars one step late (`tensor.to('cpu', non_blocking=True)` and an event); find them with "
    "`torch.cuda.set_sync_debug_mode('warn')`",
    NO_MATH,
)
register(
    "keep-memory",
    ("host.sync",),
    {},
    "PYTORCH_ALLOC_CONF=expandable_segments:True (PYTORCH_CUDA_ALLOC_CONF before torch 2.9); never call "
    "`torch.cuda.empty_cache()` in the loop, and leave the caching allocator on (unset PYTORCH_NO_CUDA_MEMORY_CACHING)",
    NO_MATH,
)
register(
    "defragment-memory",
    ("host.sync",),
    {},
    "PYTORCH_ALLOC_CONF=expandable_segments:True (PYTORCH_CUDA_ALLOC_CONF before torch 2.9)",
    NO_MATH,
)
register(
    "use-memory",
    ("compute", "host.launch", "comm"),
    {},
    "free what holds the memory (see who holds it), then raise the micro-batch: memory that is full of cached blocks, "
    "optimizer state or an unshrunk KV cache computes nothing",
    SAME_MATH,
)
register(
    "load-ahead",
    ("data",),
    {"data.prefetch": 4, "data.workers": 4},
    "`DataLoader(num_workers=4, prefetch_factor=4, persistent_workers=True, pin_memory=True)`; tokenize once, offline",
    SAME_DATA,
)
register(
    "steady-loading",
    ("data",),
    {"data.prefetch": 16},
    "a deeper queue: `DataLoader(prefetch_factor=16, persistent_workers=True)`; move slow samples (downloads, large "
    "files, tokenizing) out of the loop",
    SAME_DATA,
)
register(
    "overlap-gradients",
    ("comm.dp",),
    {"parallel.reshard_after_forward": False},
    "`DistributedDataParallel(bucket_cap_mb=100, gradient_as_bucket_view=True, static_graph=True)`; FSDP2: "
    "`set_modules_to_backward_prefetch`, `reshard_after_forward=False` where memory allows; `no_sync()` while "
    "gradients accumulate",
    SAME_MATH,
)
register(
    "coalesce-collectives",
    ("comm",),
    {},
    "one collective instead of many: larger DDP buckets (`bucket_cap_mb`), "
    "`torch.distributed._coalescing_manager`, or stack the tensors (metrics, gradient norms) into one",
    SAME_MATH,
)
register(
    "change-plan",
    ("comm",),
    {"parallel.reshard_after_forward": False},
    "less communication a token: more gradient accumulation, tensor parallel inside one node only, shard inside a node "
    "and replicate between nodes (HSDP), a larger micro-batch",
    "a larger global batch changes training; another plan of the same batch must not: `headway verify`",
)
register(
    "mend-link",
    ("comm",),
    {},
    "NCCL_DEBUG=INFO says which transport is in use (NET/Socket is the slow one): set NCCL_IB_HCA and "
    "NCCL_SOCKET_IFNAME, unset NCCL_IB_DISABLE and NCCL_P2P_DISABLE, look at `nvidia-smi topo -m`; measure with "
    "nccl-tests all_reduce_perf",
    NO_MATH,
)
register(
    "replace-rank",
    ("straggler", "comm"),
    {},
    "take the slow rank's host out of the job; before, look at its clocks and throttling (`nvidia-smi -q -d "
    "PERFORMANCE,CLOCK`), its CPU load and its disk",
    NO_MATH,
)
register(
    "balance-ranks",
    ("straggler", "comm"),
    {"data.pack": "best_fit"},
    "give every rank the same work: packs of equal length, balanced by attention cost; collect garbage at fixed steps "
    "on all ranks; log and save at the same steps",
    SAME_DATA,
)
register(
    "fill-pipeline",
    ("bubble", "comm.pp"),
    {},
    "more micro-batches (bubble share is (p-1)/(m+p-1)), or an interleaved or zero-bubble schedule "
    "(`torch.distributed.pipelining.ScheduleInterleaved1F1B`, `ScheduleInterleavedZeroBubble`)",
    SAME_MATH,
)
register(
    "larger-micro-batch",
    ("compute.forward", "compute.backward", "host.launch"),
    {},
    "the same global batch in fewer, larger micro-batches (`per_device_train_batch_size`, fewer accumulation steps)",
    SAME_MATH,
)
register(
    "less-recompute",
    ("flops.recompute", "compute.recompute"),
    {"model.recompute": "auto"},
    "turn activation checkpointing off (`gradient_checkpointing=False`), or keep matmul outputs: "
    "`torch.utils.checkpoint.create_selective_checkpoint_contexts`",
    NO_MATH,
)
register(
    "bf16",
    ("compute",),
    {"train.precision": "bfloat16"},
    "`torch.autocast('cuda', dtype=torch.bfloat16)` over float32 master weights; at the least "
    "`torch.set_float32_matmul_precision('high')` (TF32)",
    "loss curves over some hundred steps within run-to-run noise: `headway verify`",
)
register(
    "fp16",
    ("compute",),
    {"train.precision": "float16"},
    "`torch.autocast('cuda', dtype=torch.float16)` over float32 master weights, with `torch.amp.GradScaler('cuda')`: "
    "this device multiplies float16 fast, and bfloat16 not at all",
    "loss curves over some hundred steps within run-to-run noise, few steps skipped by the scaler: `headway verify`",
)
register(
    "stop-recompiling",
    ("host.other",),
    {"train.compile": False},
    "`torch._dynamo.mark_dynamic(x, 0)` or `torch.compile(dynamic=True)`, pad lengths to a few buckets, keep scalars "
    "out of the compiled function; TORCH_LOGS=recompiles names the guard that fails",
    NO_MATH,
)
register(
    "collect-at-fixed-steps",
    ("host.gc",),
    {},
    "`gc.collect(); gc.freeze(); gc.disable()` after start-up, then `gc.collect(1)` every 50 steps, on all ranks",
    NO_MATH,
)
register(
    "move-off-the-loop",
    ("host.other", "host.logging"),
    {},
    "do it beside the loop (a queue to a writer thread, a process of its own, "
    "`torch.distributed.checkpoint.async_save`), or every hundredth step instead of each",
    NO_MATH,
)
register(
    "mend-rank",
    ("straggler", "comm"),
    {},
    "look first at what this rank runs before it arrives (see the evidence): logging, saving and checks under "
    "`if rank == 0`, its own shard of the data; give it to all ranks, to another process, or to fewer steps. Only "
    "where nothing of the kind explains it, look at its host: `nvidia-smi -q -d PERFORMANCE,CLOCK`, CPU load, disk",
    NO_MATH,
)
register(
    "log-less",
    ("host.logging",),
    {"log.every": 10},
    "log every tenth step, and hand metrics to a thread",
    NO_MATH,
)
register(
    "split-prefill",
    ("compute.forward",),
    {},
    "vLLM: `--enable-chunked-prefill --max-num-batched-tokens 2048` and `--enable-prefix-caching`; long prompts on "
    "instances of their own (prefill/decode disaggregation)",
    "the same outputs at temperature 0",
)
register(
    "checkpoint-asynchronously",
    ("checkpoint",),
    {},
    "`torch.distributed.checkpoint.async_save`, from pinned memory",
    NO_MATH,
)
register(
    "steady-steps",
    ("host", "data", "straggler"),
    {},
    "look at the slow steps' own account: the category that grows in them names the cause",
    NO_MATH,
)
register(
    "find-pauses",
    ("host", "unaccounted"),
    {},
    "the time passes outside the loop's own work: other processes on the machine (`top`, `uptime`), swapping "
    "(`vmstat 1`), or Python that no phase covers: `py-spy dump --pid PID` in a slow step names the line",
    NO_MATH,
)
register(
    "less-compression",
    (),
    {},
    "error feedback on (PowerSGD `use_error_feedback=True`, warm start), a higher rank, `start_powerSGD_iter` after "
    "warm-up; or bf16 instead of PowerSGD or 8 bits",
    "held-out loss at the same number of trained tokens: `headway verify`",
)
register(
    "same-convergence",
    (),
    {},
    "put back, one at a time, the settings that differ between the two runs",
    "held-out loss at the same number of trained tokens: `headway verify`",
)
