"""Where things are in a run folder. One place knows the names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from headway.account.errors import UserError


@dataclass(frozen=True)
class RunFolder:
    """Paths below ``runs/NAME``. Making the object touches nothing; :meth:`create` makes the folder."""

    root: Path

    @property
    def config(self) -> Path:
        return self.root / "run.yaml"

    @property
    def environment(self) -> Path:
        return self.root / "environment.json"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def incidents(self) -> Path:
        return self.root / "incidents.jsonl"

    @property
    def quarantine(self) -> Path:
        return self.root / "quarantine.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def traces(self) -> Path:
        return self.root / "traces"

    @property
    def report(self) -> Path:
        return self.root / "report.html"

    @property
    def tensorboard(self) -> Path:
        return self.root / "tensorboard"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def final_model(self) -> Path:
        return self.root / "model"

    def rank(self, rank: int) -> Path:
        return self.root / "ranks" / f"{rank:05d}.jsonl"

    def ranks(self) -> dict[int, Path]:
        """The per-rank files that exist, by rank."""
        found = sorted((self.root / "ranks").glob("[0-9]*.jsonl"))
        return {int(path.stem): path for path in found if path.stem.isdigit()}

    def create(self) -> RunFolder:
        try:
            (self.root / "ranks").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            reason = f"cannot make the run folder ({error.strerror}); set `out` elsewhere"
            raise UserError(f"{self.root}: {reason}") from error
        return self

    @classmethod
    def open(cls, root: Path | str, *, for_checkpoints: bool = False, for_incidents: bool = False) -> RunFolder:
        """An existing run folder. Raises UserError where there is none.

        `for_checkpoints`, `for_incidents`: one that has those will do, whatever else was lost.
        """
        folder = cls(Path(root))
        if not folder.root.is_dir():
            raise UserError(f"{root}: no such folder; give a run folder such as runs/NAME")
        enough = (for_checkpoints and folder.checkpoints.is_dir()) or (for_incidents and folder.incidents.is_file())
        if not folder.metrics.is_file() and not enough:
            raise UserError(f"{root}: not a run folder (it has no metrics.jsonl)")
        return folder
