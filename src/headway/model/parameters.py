"""What each parameter is, by the type of the module that owns it: for weight decay and for choosing an optimizer."""

from __future__ import annotations

from typing import Literal, NamedTuple

from torch import nn

Role = Literal["norm", "bias", "embedding", "head", "matrix", "other"]

_NORMS = (
    nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm,
)  # fmt: skip


class DecayGroups(NamedTuple):
    decay: list[str]
    no_decay: list[str]


def parameter_roles(model: nn.Module) -> dict[str, Role]:
    """Role of every trainable parameter, in `named_parameters` order (a tied weight appears once, as the embedding).

    norm: owned by a normalisation module. bias: named so. embedding, head: owned by the input embedding, the output
    head. matrix: anything else of two or more dimensions. other: what is left (attention sinks, state-space scalars).
    """
    owners = {name: module for name, module in model.named_modules(remove_duplicate=False)}
    heads = {id(module) for module in _output_heads(model)}
    roles: dict[str, Role] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        owner_name, _, leaf = name.rpartition(".")
        owner = owners[owner_name]
        if is_norm(owner):
            roles[name] = "norm"
        elif leaf == "bias" or leaf.endswith("_bias"):
            roles[name] = "bias"
        elif isinstance(owner, nn.Embedding):
            roles[name] = "embedding"
        elif id(owner) in heads:
            roles[name] = "head"
        else:
            roles[name] = "matrix" if parameter.ndim >= 2 else "other"
    return roles


def decay_groups(model: nn.Module) -> DecayGroups:
    """Names of the trainable parameters with and without weight decay.

    No decay for norms, biases and single vectors or scalars: pulling them to zero changes what the layer computes
    rather than how large it is. Matrices decay, the embedding and the head among them (as in GPT-3 and Llama).
    """
    roles = parameter_roles(model)
    spared = ("norm", "bias", "other")
    return DecayGroups(
        [name for name, role in roles.items() if role not in spared],
        [name for name, role in roles.items() if role in spared],
    )


def is_norm(module: nn.Module) -> bool:
    """Whether a module normalises (its parameters are scales and shifts)."""
    # Most models bring an RMSNorm class of their own, which shares nothing with torch's but the word.
    return isinstance(module, _NORMS) or "norm" in type(module).__name__.lower()


def _output_heads(model: nn.Module) -> list[nn.Module]:
    find = getattr(model, "get_output_embeddings", None)
    head = find() if find is not None else None
    return [head] if head is not None else []
