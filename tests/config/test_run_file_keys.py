"""The keys, their defaults and their reference are frozen; each says what it means."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from golden_file import assert_golden
from headway.config.base import Section
from headway.config.names import FOREIGN
from headway.config.presets import PRESETS
from headway.config.reference import reference_markdown
from headway.config.schema import all_keys
from run_files import config, load

ROOT = Path(__file__).resolve().parents[2]


def frozen() -> dict[str, str]:
    return {
        key.name: f"{key.allowed} | {key.default}" + (" | identity" if key.identity else "")
        for key in all_keys().values()
        if key.nested is None
    }


def test_keys_defaults_and_limits_are_frozen() -> None:
    assert_golden("run_file_keys.json", frozen())


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("optim.weight_decay", {"default": 0.01}),
        ("data.overlong", {"default": "split"}),
        ("data.seq_len", {"metadata": []}),
        ("seed", {"json_schema_extra": {}}),
    ],
)
def test_the_frozen_keys_catch_a_planted_change(monkeypatch: pytest.MonkeyPatch, key: str, change: dict) -> None:
    field = all_keys()[key].field
    for name, value in change.items():
        monkeypatch.setattr(field, name, value)
    with pytest.raises(AssertionError, match="changed"):
        assert_golden("run_file_keys.json", frozen())


def test_the_committed_reference_is_up_to_date() -> None:
    script = ROOT / "scripts" / "write_run_file_reference.py"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_reference_holds_every_key_and_catches_a_planted_change(monkeypatch: pytest.MonkeyPatch) -> None:
    text = reference_markdown()
    assert [key for key in all_keys() if f"`{key}`" not in text and not key.startswith("eval.data[]")] == []
    monkeypatch.setattr(all_keys()["data.rows"].field, "default", 9)
    assert reference_markdown() != text


@pytest.mark.parametrize("key", [key for key in all_keys().values()], ids=lambda key: key.name)
def test_every_key_has_one_clear_sentence(key: object) -> None:
    description = key.description  # type: ignore[attr-defined]
    assert description.endswith(".") and description[0].isupper() and 10 < len(description) < 260
    assert "  " not in description


def test_sections_are_frozen_and_strict() -> None:
    sections = {key.section for key in all_keys().values()}
    assert all(issubclass(section, Section) for section in sections) and len(sections) == 19
    run = config()
    with pytest.raises(Exception, match="frozen"):
        run.data.seq_len = 4  # type: ignore[misc]
    with pytest.raises(Exception, match=r"[Ee]xtra"):
        type(run.log)(evry=3)  # type: ignore[call-arg]


def test_every_foreign_name_leads_to_a_key_that_exists() -> None:
    assert set(FOREIGN.values()) <= set(all_keys())
    assert not set(FOREIGN) & set(all_keys())


def test_presets_name_existing_keys_and_load() -> None:
    for name, values in PRESETS.items():
        assert set(values) <= set(all_keys())
        run = load(f"preset={name}")
        assert run.warnings == ()
        origins = {key: str(run.provenance.of(key)) for key in values}
        assert set(origins.values()) <= {f"preset {name}"}


def test_the_presets_mean_what_they_say() -> None:
    naive, fast = config("preset=naive"), config("preset=fast")
    assert (naive.data.pack, naive.data.rows, naive.model.recompute) == ("none", 8, "full")
    assert (fast.data.pack, fast.model.attention, fast.model.recompute) == ("best_fit", "headway", "auto")


def test_importing_the_room_imports_no_torch() -> None:
    code = "import sys, headway.config, headway.config.reference; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_the_reference_names_the_least_that_loads() -> None:
    example = re.search(r"```yaml\n(.*?)```", reference_markdown(), re.DOTALL)
    assert example and load(text=example[1]).config.optim.lr == 2e-5
