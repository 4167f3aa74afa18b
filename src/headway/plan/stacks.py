"""What is known about the software a published row ran on: facts of the releases, none of them fitted."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Stack:
    """A training stack: how rows name it (lower-case pieces of `source`), and what it does unless a row denies it."""

    name: str
    pieces: tuple[str, ...]
    defaults: Mapping[str, Any]


_MEGATRON_NEW = {"zero": 1, "overlap_tp": True, "fused_accumulate": True, "overlap_wgrad": True}
_NEMO = {**_MEGATRON_NEW, "grad_bytes": 2}  # its performance recipes reduce and accumulate in bf16
# Before FlashAttention (2022): fused softmax kernels, gradients reduced after the last backward, no sharding.
_MEGATRON_OLD = {
    "zero": 0, "flash": False, "overlap_dp": False, "sequence_parallel": False, "grad_bytes": 4,
}  # fmt: skip
_DEEPSPEED = {
    "zero": 1,
    "flash": False,
    "overlap_dp": False,
    "sequence_parallel": False,
    "grad_bytes": 2,
    "buckets": True,
}

# The order matters: the first whose piece occurs in the source is taken.
STACKS: tuple[Stack, ...] = (
    Stack("maxtext", ("maxtext",), {"zero": 3}),
    Stack("nemo", ("nvidia/nemo", "nvidia-nemo", "dgxc-benchmarking"), _NEMO),
    Stack("llm-foundry", ("llm-foundry",), {"zero": 3, "compiled": False, "grad_bytes": 2, "native_attention": False}),
    Stack("megatron-deepspeed", ("bigscience", "mt-nlg", "glm-130b"), _DEEPSPEED),
    Stack("internevo", ("internevo",), {"zero": 1, "grad_bytes": 2, "compiled": False, "native_attention": False}),
    Stack("torchtitan", ("torchtitan",), {"zero": 3, "compiled": False, "native_attention": False}),
    # The paper's Megatron-LM baseline: its table 3 counts whatever of TP is overlapped among what MegaScale adds.
    Stack("megascale", ("megascale",), {**_MEGATRON_NEW, "overlap_tp": False, "overlap_wgrad": False}),
    Stack("metaseq", ("metaseq",), {"zero": 3, "flash": False, "sequence_parallel": False}),
    Stack("megatron-lm", ("megatron-lm", "narayanan", "korthikanti", "herd of models"), _MEGATRON_NEW),
)
_OTHER = Stack("", (), {})


def stack_of(source: str) -> Stack:
    """The stack a row's `source` names; an unknown one is called by the source's first word."""
    text = source.casefold()
    for stack in STACKS:
        if any(piece in text for piece in stack.pieces):
            return stack
    name = source.split("@")[0].split()[0] if source.split() else "unknown"
    return Stack(name.casefold(), (), _OTHER.defaults)


def layout_defaults(stack: Stack, device: str, precision: str, notes: str, source: str = "") -> dict[str, Any]:
    """What the stack does on that device; notes that state a fact win over the stack's habit."""
    facts = dict(stack.defaults)
    said = notes.casefold()
    if stack.name == "megatron-lm" and precision == "fp16" and device.startswith(("A100", "V100")):
        # Korthikanti et al. 2022 ran the release that adds up gradients inside their products and sends TP's slices
        # of backward beside them (one autograd function does both).
        new = "korthikanti" in source.casefold()
        facts = {**_MEGATRON_OLD, "fused_accumulate": new, "overlap_wgrad": new}
    if stack.name == "megatron-deepspeed" and precision == "bf16":
        facts["grad_bytes"] = 6  # DeepSpeed's bf16 optimizer: bf16 gradients and their fp32 accumulation
    if "sequence parallel" in said:
        facts["sequence_parallel"] = "no sequence parallel" not in said
    if stack.name == "torchtitan":
        facts["compiled"] = "compile" in said
        facts["overlap_tp"] = "async tp" in said or "asynctp" in said
    if "megascale includes" in said:
        facts["overlap_tp"] = True
    stated = re.search(r"\betp ?= ?(\d{1,3})|\betp(\d{1,3})", said)
    if stated:
        facts["etp"] = int(stated[1] or stated[2])
    elif "megatron-bridge" in source.casefold():
        facts["etp"] = 1  # all its recipes set expert_tensor_parallel_size to 1
    if "dualpipe" in said:
        facts["schedule"] = "dualpipe"
    if "mixed-precision mode default" in said:
        facts["grad_bytes"] = 4
    for stage in (1, 2, 3):
        if f"zero stage {stage}" in said or f"zero-{stage}" in said:
            facts["zero"] = stage
    return facts
