"""The one place where a model is called for training, evaluation and proof.

Several plausible calls of a transformers model leak across packed documents without a word: `use_cache` left at its
default, an all-ones mask, `cu_seq_lens` without an attention that reads them, boolean 4-D masks with sliding windows.
Nothing else in Headway calls a model on a Batch.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from headway.data.batch import PADDING_DOC, Batch, sent_to
from headway.model.attention import NAME
from headway.model.head import Phase, loss_head, take_loss
from headway.model.loss import LossSum, loss_sum

TABLE_BUCKET = 64
LENGTH_BUCKET = 128


def forward_logits(model: nn.Module, batch: Batch) -> Tensor:
    """Logits [R, S, V] of every slot, in the model's compute dtype; a document's logits depend on that document alone.

    Works for packed and rectangular batches under every attention implementation, with LoRA, DDP, FSDP2, activation
    recompute and torch.compile. The logits of padding slots mean nothing (they are finite).
    """
    output = model(**call_arguments(attention_of(model), batch))
    return output.logits.view(*batch.input_ids.shape, -1)


def forward_loss(
    model: nn.Module,
    batch: Batch,
    *,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    phase: Phase = nullcontext,
) -> LossSum:
    """`loss_sum` of the batch's labels; `phase` is entered around the loss.

    With a loss head installed (`model/head.py`), only slots that have a label reach the head and no logits are kept;
    otherwise all logits are computed first.
    """
    head = loss_head(model)
    if head is None:
        logits = forward_logits(model, batch)
        with phase(), torch.autocast(logits.device.type, enabled=False):
            return loss_sum(logits, batch.labels, z_loss=z_loss, label_smoothing=label_smoothing)
    with head.expecting(batch, z_loss, label_smoothing, phase) as expected:
        return take_loss(expected, model(**call_arguments(attention_of(model), batch)))


def attention_of(model: nn.Module) -> str:
    """The attention implementation the model runs: headway, sdpa, eager, ..."""
    return inner_model(model).config.get_text_config()._attn_implementation


def inner_model(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside PEFT's, DDP's or torch.compile's wrappers."""
    return next(module for module in model.modules() if isinstance(module, PreTrainedModel))


def embedding_rows(model: nn.Module) -> int:
    """How many token ids the model knows."""
    embedding: Any = inner_model(model).get_input_embeddings()
    return embedding.weight.shape[0]


def call_arguments(attention: str, batch: Batch) -> dict[str, Any]:
    """Keyword arguments of the model call. The only three that are right:

    headway:                   one row of all slots, the document table, no mask
    sdpa/eager, packed:        no mask; transformers reads the documents off the restarting positions
    sdpa/eager, rectangular:   the ordinary 2-D mask of real tokens
    """
    arguments: dict[str, Any] = {
        "input_ids": batch.input_ids,
        "position_ids": batch.position_ids,
        "attention_mask": None,
        "use_cache": False,
        "return_dict": True,
    }
    if attention == NAME:
        arguments["input_ids"] = batch.input_ids.view(1, -1)
        arguments["position_ids"] = batch.position_ids.view(1, -1)
        table, longest = bucketed_table(batch)
        arguments["cu_seq_lens_q"] = arguments["cu_seq_lens_k"] = table
        arguments["max_length_q"] = arguments["max_length_k"] = longest
    elif not batch.packed:
        arguments["attention_mask"] = real_token_mask(batch)
    return arguments


def bucketed_table(batch: Batch) -> tuple[Tensor, int]:
    """The document table with empty documents at its end up to 64, 128, 256, … entries, and the longest length rounded
    up to a power of two (within the pack): a compiled layer, whose guards see both, meets a handful of cases."""
    entries, longest = TABLE_BUCKET, LENGTH_BUCKET
    while entries < len(batch.cu_seqlens):
        entries *= 2
    while longest < batch.max_seqlen:
        longest *= 2
    # The value is known here: no wait for the device.
    table = F.pad(batch.cu_seqlens, (0, entries - len(batch.cu_seqlens)), value=batch.slots)
    return table, min(longest, batch.slots)


def real_token_mask(batch: Batch) -> Tensor:
    """bool [R, S]: which slots hold a token, from the document table (one source of truth with the positions)."""
    lengths = batch.cu_seqlens.diff()
    real = sent_to(lengths.device, torch.from_numpy(batch.documents != PADDING_DOC))
    rows, slots = batch.input_ids.shape
    mask = torch.repeat_interleave(real, lengths, output_size=rows * slots).view(rows, slots)
    # A row of nothing but padding would attend to nothing at all: NaN in some kernels, and NaN gradients with it.
    mask[:, 0] = True
    return mask
