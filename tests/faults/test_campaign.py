"""The campaign: every row of the catalogue of faults, one seed each, in one process that imports the trainer once."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.account.errors import UserError
from headway.bench.faults.campaign import Entry, line, read_manifest, rows, run_entry
from headway.bench.faults.case import Case, Result
from headway.bench.faults.material import make_material

pytestmark = pytest.mark.timeout(900)
ENTRIES = read_manifest()


@pytest.fixture(scope="session")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_material(tmp_path_factory.mktemp("faults") / "material")


@pytest.mark.parametrize("entry", ENTRIES, ids=[f"row_{entry.row:02d}" for entry in ENTRIES])
def test_row(entry: Entry, material: Path, tmp_path: Path) -> None:
    result = run_entry(entry, material, tmp_path)
    if result.outcome == "skipped":
        pytest.skip("; ".join(result.why))
    assert result.outcome == "right", f"{line(result)}\n{(tmp_path / 'log.txt').read_text()[-4000:]}"


def test_every_row_is_in_the_manifest() -> None:
    assert sorted(entry.row for entry in ENTRIES) == sorted(rows())


def test_a_planted_wrong_outcome_and_a_case_that_dies_are_wrong(
    material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(case: Case) -> None:
        case.expect(1 + 1 == 3, "planted")

    def dies(case: Case) -> None:
        import os

        os.kill(os.getpid(), 9)

    def silent(case: Case) -> None: ...

    said = {wrong: "planted", dies: "the case died", silent: "expects nothing"}
    for number, (row, why) in enumerate(said.items()):
        monkeypatch.setattr("headway.bench.faults.campaign.rows", lambda row=row: {1: row})
        result = run_entry(Entry(1, "x", 0, "", ""), material, tmp_path / str(number))
        assert result.outcome == "wrong" and why in result.why[0]


def test_a_manifest_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "campaign.json"
    with pytest.raises(UserError, match="No such file"):
        read_manifest(path)
    path.write_text('[{"row": 1}]')
    with pytest.raises(UserError, match="not a campaign"):
        read_manifest(path)
    path.write_text('[{"row": 99, "name": "", "seed": 0, "injection": "", "expected": ""}]')
    with pytest.raises(UserError, match="no row 99"):
        read_manifest(path)


def test_the_table_has_a_line_and_reasons() -> None:
    text = line(Result(5, "hang", 1, "wrong", ("because",), 2.0, 1.234, None, 3))
    assert text.splitlines()[1].strip() == "because" and "1.23" in text and " 3" in text
