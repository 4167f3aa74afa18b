"""Keeps what libraries say about themselves off the terminal, so that what matters can be seen."""

from __future__ import annotations

import logging
import os
import warnings


def quiet_libraries() -> None:
    """Progress bars of weight loading, import notes of optional extensions, deprecations that only we can mend."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(transformers|torch)(\..*)?$")
    for name in ("torchao", "torch.utils._pytree", "torch.distributed.checkpoint"):
        logging.getLogger(name).setLevel(logging.ERROR)
