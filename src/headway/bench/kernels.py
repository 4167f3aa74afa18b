"""`headway bench kernels`: what `model.fuse: auto` would choose from, measured with time to spare, as a table."""

from __future__ import annotations

from collections.abc import Callable

from headway.config.run import RunConfig
from headway.model.kernels.case import Result
from headway.model.kernels.choose import Chosen, install_kernels
from headway.parallel.device import choose_device
from headway.train.data import prepare_sources, training_view
from headway.train.fusing import compute_dtype, measure, setting_of
from headway.train.model import build_model


def bench_kernels(config: RunConfig, seconds: float, say: Callable[[str], None]) -> Chosen:
    """Measures all candidates on the run's shapes and keeps the choices for later runs of the same shapes.

    The data is prepared where it is not yet: the share of trained tokens decides how many rows the head gets.
    """
    device = choose_device(config.device)
    prepare_sources(config, say)
    view = training_view(config)
    model = build_model(config).module.to(device.torch)
    setting = setting_of(config, view, device, compute_dtype(config.train.precision, device.type))
    return install_kernels(model, setting, measure(config, model, setting, seconds, fresh=True))


def lines(chosen: Chosen) -> list[str]:
    """A table: per operation the candidates, their errors against the reference and their times."""
    out = []
    for choice in (*chosen.choices, *chosen.update):
        out.append(f"{choice.operation}  {choice.shape}  {choice.dtype}: {choice.chosen}")
        out += [_line(result, result.name == choice.chosen) for result in choice.results]
    out += [f"WARNING {warning}" for warning in chosen.warnings]
    return [*out, f"measured in {chosen.seconds:.1f} s; kept for runs of these shapes on this machine"]


def _line(result: Result, used: bool) -> str:
    error, gradient = ("-" if value is None else f"{value:.1e}" for value in (result.error, result.gradient_error))
    seconds = "-" if result.seconds is None else f"{result.seconds * 1e3:.2f} ms"
    note = "used" if used else result.reason
    return f"  {result.name:<8} {seconds:>12}  error {error:>8}, of gradients {gradient:>8}  {note}"
