"""Other people's fused linear + cross entropy, each behind the same call and with its own list of what it cannot do."""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.data.batch import IGNORE


def torch_linear_loss(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, z_loss: float, label_smoothing: float
) -> tuple[Tensor, Tensor]:
    """`torch.nn.functional.linear_cross_entropy`, chunked by torch's own choice (torch >= 2.13)."""
    options: Any = torch.nn.LinearCrossEntropyOptions()
    hidden, weight, bias = _one_type(hidden, weight, bias)
    # Its sum is kept in the products' type: in bfloat16 a loss of thousands of tokens was one per cent off.
    wide = torch.promote_types(hidden.dtype, torch.float32)
    reduction = "sum" if hidden.dtype == wide else "none"
    found = F.linear_cross_entropy(
        hidden, weight, labels, linear_bias=bias, reduction=reduction, ignore_index=IGNORE, options=options
    ).to(wide)
    return found.sum(), found.detach()


def torch_cannot(z_loss: float, label_smoothing: float) -> str | None:
    if not hasattr(F, "linear_cross_entropy") or not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        return f"torch {torch.__version__} has no linear_cross_entropy"
    return _plain_only(z_loss, label_smoothing, "torch's linear_cross_entropy")


def liger_linear_loss(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, z_loss: float, label_smoothing: float
) -> tuple[Tensor, Tensor]:
    """Liger's fused linear cross entropy (Hsu et al., arXiv:2410.10989)."""
    function = importlib.import_module("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss
    hidden, weight, bias = _one_type(hidden, weight, bias)
    module = function(ignore_index=IGNORE, reduction="sum", lse_square_scale=z_loss, return_z_loss=z_loss > 0)
    found = module(weight, hidden, labels, bias)
    if z_loss == 0:
        loss = found[0] if isinstance(found, tuple) else found
        return loss, loss.detach()
    loss, z = (found.loss, found.z_loss) if hasattr(found, "z_loss") else found[:2]
    return loss, (loss - z).detach()


def liger_cannot(z_loss: float, label_smoothing: float) -> str | None:
    if label_smoothing:
        return "with label smoothing Liger gives no plain cross entropy beside the smoothed one"
    return missing_on_gpu("liger_kernel", "liger-kernel")


def cut_linear_loss(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, z_loss: float, label_smoothing: float
) -> tuple[Tensor, Tensor]:
    """Cut cross-entropy (Wijmans et al., arXiv:2411.09009): no chunk of logits ever reaches memory."""
    function = importlib.import_module("cut_cross_entropy").linear_cross_entropy
    hidden, weight, bias = _one_type(hidden, weight, bias)
    # Whatever type it returns: a sum over documents, and their count of tokens, are exact to 256 only in bfloat16.
    each = function(hidden, weight, labels, bias=bias, ignore_index=IGNORE, reduction="none").float()
    return each.sum(), each.detach()


def cut_cannot(z_loss: float, label_smoothing: float) -> str | None:
    plain = _plain_only(z_loss, label_smoothing, "cut-cross-entropy")
    return plain or missing_on_gpu("cut_cross_entropy", "cut-cross-entropy")


def _one_type(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The type autocast computes in; these kernels know nothing of it."""
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    return hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def _plain_only(z_loss: float, label_smoothing: float, name: str) -> str | None:
    if z_loss:
        return f"{name} has no z-loss"
    return f"{name} gives no plain cross entropy beside the smoothed one" if label_smoothing else None


def _missing(module: str, package: str) -> str | None:
    try:
        importlib.import_module(module)
    except Exception as error:  # a package built for another torch or CUDA raises whatever it likes
        return f"{package} cannot be imported ({type(error).__name__})"
    return None


def missing_on_gpu(module: str, package: str) -> str | None:
    """Why a CUDA package cannot be used here, in words, or None."""
    return _no_gpu() or _missing(module, package)


def _no_gpu() -> str | None:
    return None if torch.cuda.is_available() else "its kernels are for CUDA"
