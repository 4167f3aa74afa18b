"""Run file and overrides → the configuration, and where each of its values came from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from headway.account.errors import UserError
from headway.config.between import surprises
from headway.config.layers import Assignment, Provenance, combine, last_value, preset_layer
from headway.config.overrides import override_layer
from headway.config.problems import as_user_error
from headway.config.reader import Reader
from headway.config.run import RunConfig
from headway.config.yaml_text import compose


@dataclass(frozen=True)
class LoadedRun:
    """A configuration with its provenance, and one line for every setting that is valid but surprising."""

    config: RunConfig
    provenance: Provenance
    warnings: tuple[str, ...]


def load_run(path: str | Path, overrides: Sequence[str] = (), *, cwd: Path | None = None) -> LoadedRun:
    """Reads a run file and lays presets below and overrides above it.

    Relative paths in the file start from the file's folder; those in overrides and in defaults from `cwd` (the current
    folder). Raises UserError with one line that names file and line, or the override, and the key.
    """
    path = Path(path)
    return load_text(
        _read(path), overrides, label=str(path), folder=path.resolve().parent, name=path.stem, cwd=cwd or Path.cwd()
    )


def load_text(text: str, overrides: Sequence[str] = (), *, label: str, folder: Path, name: str, cwd: Path) -> LoadedRun:
    """Like `load_run`, for a text that `label` names in messages and whose paths start from `folder`."""
    written = [_file_layer(text, label, folder), override_layer(overrides, cwd)]
    defaults = [Assignment("out", str(cwd / "runs"), {})]
    preset = preset_layer(str(last_value(written, "preset")))
    values, provenance = combine([defaults, preset, *written])
    if values.get("name") is None:
        values["name"] = name
    try:
        config = RunConfig.model_validate(values)
    except ValidationError as error:
        raise as_user_error(error, values, provenance, label) from None
    return LoadedRun(config, provenance, tuple(surprises(config)))


def _file_layer(text: str, label: str, folder: Path) -> list[Assignment]:
    node = compose(text, lambda line: f"{label}:{line}")
    if node is None:
        raise UserError(f"{label}: the run file is empty; write at least model, data, train and optim")
    reader = Reader("file", lambda line: f"{label}:{line}", folder)
    return list(reader.section(node, RunConfig))


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such run file") from None
    except IsADirectoryError:
        raise UserError(f"{path}: this is a folder; give the run file in it, e.g. {path / 'run.yaml'}") from None
    except OSError as error:
        raise UserError(f"{path}: the run file cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 (byte {error.start}); save the run file as UTF-8") from None
