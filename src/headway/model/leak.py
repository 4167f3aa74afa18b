"""Which module lets one packed document see another."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from headway.data.batch import Batch
from headway.model.forward import forward_logits, inner_model


def locate_leak(model: nn.Module, before: Batch, after: Batch, slots: slice, tolerance: float) -> str:
    """Name the first module, in order of execution, whose output over `slots` differs between the two batches.

    The batches differ only in documents outside `slots` (of the flattened R * S). Looks at the decoder layers and their
    direct children. Returns, e.g., "model.layers.0.mamba (JambaMambaMixer; the model has 3)".
    """
    watched = _watched(model)
    recordings = [_record(model, batch, slots, watched) for batch in (before, after)]
    for name, output in recordings[0].items():
        other = recordings[1].get(name)
        if other is None or other.shape != output.shape:
            continue
        if float((output - other).abs().max()) > tolerance * max(float(output.abs().max()), 1e-30):
            return _describe(name, watched)
    return "its output head"


def _watched(model: nn.Module) -> dict[str, nn.Module]:
    """Children before their layer: the most precise name first."""
    inner = inner_model(model)
    count = inner.config.get_text_config().num_hidden_layers
    modules: dict[str, nn.Module] = {}
    for name, stack in inner.named_modules():
        if isinstance(stack, nn.ModuleList) and len(stack) == count:
            for index, layer in enumerate(stack):
                for child, module in layer.named_children():
                    modules[f"{name}.{index}.{child}"] = module
                modules[f"{name}.{index}"] = layer
    return modules


def _record(model: nn.Module, batch: Batch, slots: slice, watched: dict[str, nn.Module]) -> dict[str, Tensor]:
    """Outputs over the slots, in order of execution."""
    outputs: dict[str, Tensor] = {}

    def hook(name: str) -> Any:
        def keep(module: nn.Module, inputs: Any, output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple) else output
            if isinstance(tensor, Tensor) and tensor.ndim >= 2 and tensor.shape[:2].numel() == batch.slots:
                outputs[name] = tensor.flatten(0, 1)[slots].double().cpu()

        return keep

    handles = [module.register_forward_hook(hook(name)) for name, module in watched.items()]
    try:
        forward_logits(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    return outputs


def _describe(name: str, watched: dict[str, nn.Module]) -> str:
    kind = type(watched[name]).__name__
    same = sum(type(module).__name__ == kind for module in watched.values())
    return f"{name} ({kind}; the model has {same})"
