"""What a GPU event is, by the communication metadata first and by its name where there is none."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from headway.account.errors import UserError
from headway.diagnose.facts import KINDS, NONE, GpuClass, Int8, Int32

COMM_PATTERNS = (
    r"nccl",
    r"rccl",
    r"hccl",
    r"oneccl|onccl",
    r"msccl",
    r"multimem_all_reduce|multimem_all_gather|multimem_reduce_scatter",
    r"cross_device_reduce",
    r"(?:one|two)_?shot_?(?:all_?reduce|all_?gather|reduce)",
    r"all_?reduce_?(?:one|two)_?shot",
    r"quick_?reduce|quickreduce|allreduce_prototype",
    r"trtllm_.*(?:all_?reduce|allgather|moe_?alltoall)|lamport",
    r"custom_?all_?reduce",
    r"nvshmem",
    r"deep_?ep::|internode::|intranode::",
    r"mscclpp|symm_mem.*(?:all|reduce)",
    r"^ncclDevKernel|sendrecv_kernel|ncclkernel",
    r"gloo:",
)  # fmt: skip
"""Names of communication kernels (case does not matter); `--comm-kernel REGEX` adds to the list."""

# First match wins: the more telling names stand first.
_KIND_RULES: tuple[tuple[str, str], ...] = (
    ("memset", r"^memset"),
    ("copy", r"^memcpy|^__amd_rocclr_copy|copy_?buffer|^copykernel"),
    (
        "attention",
        r"flash|fmha|attention|_attn|attn_|paged_?kv|mha_|\bmla\b|_mla_|sdpa|cutlass.*fmha|flex_attention|fav2|aotriton"
        r"|pytorch_flash|merge_attn|dot_do_o|convert_dq_to",
    ),
    (
        "loss",
        r"nll_?loss|cross_?entropy|liger_cross|\bcce\b|_cce_|linear_cross|log_?softmax|logsoftmax|_indexed_neg_dot",
    ),
    (
        "optimizer",
        r"adam|multi_?tensor_apply|lamb(?!da)|fused_?sgd|momentum|foreach|lion_|_adafactor|distributed_?fused|zero_?adam|muon",
    ),
    (
        "convolution",
        r"conv(?!ert)|cudnn::(?:cnn|ops)|winograd|implicit_gemm|miopen|cask_cudnn|dgrad|wgrad|igemm",
    ),
    (
        "matmul",
        r"(?<!fb)gemm|gemv|cublas|cutlass|nvjet|matmul|_mm_|xmma|splitk|split_k|cijk_|hipblaslt|tensile|wgmma|marlin|machete"
        r"|deep_gemm|addmm|bmm|\bdot_kernel|ampere_.*_(?:tn|nn|nt)|sm\d+_.*_(?:tn|nn|nt)",
    ),
    ("norm", r"norm"),
    ("softmax", r"softmax"),
    (
        "embedding",
        r"embedding|index_?select|gather_kernel|indexing_backward|permute_2d|krn_partial|sum_and_scatter",
    ),
    ("reduction", r"reduce_kernel|reduce_?\d|_red_|reduction|cub::|argmax|topk|sort|scan|cumsum|radix"),
    (
        "elementwise",
        r"elementwise|vectorized|unrolled|pointwise|triton_poi|triton_|distribution|fill|cat_?array|where|mask|gelu|silu"
        r"|swiglu|relu|dropout|copy_kernel|index|scatter|gather|rope|rotary|quant|cast|transpose|_add_|_mul_|arange|tril|triu",
    ),
)  # fmt: skip


_UNLIKE = ("gemm_kernel", "Memset (Device)", "void at::native::add<float, 4>(int*)", "triton_poi_fused_0", "Cijk_Ailk")


def comm_pattern(extra: Sequence[str] = ()) -> re.Pattern[str]:
    """The list of names with the user's own added.

    Raises:
        UserError: one is no regular expression, or matches where nothing stands, what is no part of a name, or names
            that have nothing in common: then every kernel would be communication.
    """
    for pattern in extra:
        try:
            found = re.compile(f"(?:{pattern})", re.IGNORECASE)
        except re.error as error:
            raise UserError(f"--comm-kernel {pattern!r} is not a regular expression: {error}") from None
        hits = [found.search(name) for name in ("", *_UNLIKE)]
        if all(hits[1:]) or any(hit is not None and not re.search(r"\w", hit[0]) for hit in hits):
            raise UserError(f"--comm-kernel {pattern!r} matches every name; give a part of the kernels' names")
    return re.compile("|".join(f"(?:{pattern})" for pattern in (*COMM_PATTERNS, *extra)), re.IGNORECASE)


_KINDS = [(KINDS.index(kind), re.compile(pattern, re.IGNORECASE)) for kind, pattern in _KIND_RULES]
_COLLECTIVE, _COPY, _MEMSET, _OTHER = (KINDS.index(kind) for kind in ("collective", "copy", "memset", "other"))


def kind_of(name: str) -> int:
    """Index into KINDS of a kernel that is neither communication nor a copy."""
    return next((kind for kind, pattern in _KINDS if pattern.search(name)), _OTHER)


# ROCm names some copies and fills as kernels (seen from ROCm 7.1 on): they move memory, they compute nothing.
_COPY_KERNEL = re.compile(r"^__amd_rocclr_(?:copy|fill)|^copyBuffer|^fillBuffer", re.IGNORECASE)


def classify(
    names: Sequence[str], name: Int32, code: Int8, with_comm_args: Sequence[int], comm: re.Pattern[str]
) -> tuple[Int8, Int8]:
    """(GpuClass, index into KINDS) of each event.

    `name` [N] indexes `names`; `code` [N] is 0 kernel, 1 memcpy, 2 memset; `with_comm_args` are rows that carry
    communication metadata.
    """
    used = np.unique(name)
    by_class = np.full(len(names), GpuClass.COMPUTE, np.int8)
    by_kind = np.full(len(names), _OTHER, np.int8)
    for index in used.tolist():
        text = names[index]
        if comm.search(text):
            by_class[index], by_kind[index] = GpuClass.COMM, _COLLECTIVE
        elif _COPY_KERNEL.search(text):
            by_class[index] = GpuClass.MEM
            by_kind[index] = _MEMSET if "fill" in text.lower() else _COPY
        else:
            by_kind[index] = kind_of(text)
    klass, kind = by_class[name], by_kind[name]
    klass[code > 0] = GpuClass.MEM
    kind[code == 1], kind[code == 2] = _COPY, _MEMSET
    rows = np.asarray(with_comm_args, np.int64)
    klass[rows], kind[rows] = GpuClass.COMM, _COLLECTIVE
    return klass, kind


def matched_names(names: Sequence[str], name: Int32, klass: Int8) -> tuple[str, ...]:
    """The distinct names that were counted as communication, for the user to check."""
    return tuple(sorted({names[index] for index in np.unique(name[klass == GpuClass.COMM]).tolist() if index != NONE}))
