"""What the user knows beside the files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Said:
    """Each is None where the user did not say it.

    Attributes:
        tokens: real tokens of one rank in the window.
        slots: slots computed in it, where the trace does not tell.
        memory: a PyTorch memory snapshot.
        model: a Hugging Face config.json, or the folder that holds it.
        sequence: the typical length of a document, for the model's attention.
        device: the device's exact name, where the trace lacks it or is wrong.
    """

    tokens: int | None = None
    slots: int | None = None
    memory: Path | None = None
    model: Path | None = None
    sequence: int | None = None
    device: str | None = None

    def about_traces(self) -> list[str]:
        """The options that were said and that only a trace needs."""
        said = {
            "--tokens": self.tokens, "--slots": self.slots, "--model": self.model, "--seq-len": self.sequence,
            "--device": self.device,
        }  # fmt: skip
        return [name for name, value in said.items() if value is not None]
