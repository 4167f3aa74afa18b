"""Imports everything a rank will need, so that ranks forked from this process import nothing themselves."""

from __future__ import annotations

import contextlib
import importlib
import json
from pathlib import Path

from headway.config.diff import identity
from headway.config.run import RunConfig
from headway.guard.code_identity import code_identity
from headway.guard.environment import package_versions

_ALWAYS = ("numpy.ma", "headway.train.build", "headway.train.loop", "headway.model.load", "torch.distributed.fsdp")


def preload(config: RunConfig) -> None:
    """Imports the trainer and the modules of the run's model. What cannot be imported is left to the ranks to tell."""
    for name in _ALWAYS:
        importlib.import_module(name)
    # Read once here, not by every rank after every death.
    code_identity()
    package_versions()
    identity(config)
    kind = _model_type(config)
    if kind:
        with contextlib.suppress(ImportError):
            from transformers.models.auto.configuration_auto import model_type_to_module_name

            module = model_type_to_module_name(kind)
            importlib.import_module(f"transformers.models.{module}.modeling_{module}")
            # A thousand patterns are compiled when first asked for: by every rank, when it loads or saves.
            from transformers.conversion_mapping import get_checkpoint_conversion_mapping

            get_checkpoint_conversion_mapping(kind)


def _model_type(config: RunConfig) -> str | None:
    given = config.model.config
    if isinstance(given, dict):
        kind = given.get("model_type")
    else:
        try:
            folder = Path(given or config.model.path or "")
            kind = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
        except (OSError, ValueError, AttributeError):
            return None
    return kind if isinstance(kind, str) else None
