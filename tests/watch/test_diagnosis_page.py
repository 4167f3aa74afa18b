"""`headway diagnose --html`: one file, no network, names cannot speak as code, and its pictures add up."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from diagnose import causes
from diagnose.kineto_maker import Kineto, clean_step
from headway.cli.diagnose import register
from headway.diagnose.diagnosis import Diagnosis, diagnose_job, diagnose_run
from headway.diagnose.job import read_job
from headway.diagnose.run_facts import read_run
from headway.watch.device_timeline import timeline
from headway.watch.diagnosis_page import render_page
from headway.watch.rank_heat import job_heat
from watch.run_maker import plain_run
from watch.test_report import EVIL, FLAGS, Tags, data_of


def of(*paths: Path) -> Diagnosis:
    return diagnose_job(read_job(list(paths)))


def evil_trace() -> Kineto:
    """Kernels, steps and host events named by somebody who means harm."""

    def work(trace: Kineto, _: int) -> None:
        clean_step(trace)
        trace.kernel(EVIL, 400.0, EVIL)
        with trace.annotated(EVIL):
            trace.elementwise(300.0)

    return causes.each_step(work, device=EVIL)


@pytest.fixture(scope="module")
def late(tmp_path_factory: pytest.TempPathFactory) -> Diagnosis:
    """Four ranks, of which rank 2 comes late to every collective."""
    folder = tmp_path_factory.mktemp("ranks")
    return of(*causes.ranks(folder, lambda rank, step: 900.0 if rank == 2 else 0.0))


def check_page(text: str) -> Tags:
    found = Tags(text)
    assert found.open == []
    assert not re.search(r"https?://", re.sub(r"xmlns=\S+", "", text))
    anchors = {attrs["href"] for tag, attrs in found.tags if tag == "a"}
    ids = {f"#{attrs['id']}" for _, attrs in found.tags if attrs.get("id")}
    assert anchors <= ids
    return found


def test_every_kind_of_input_makes_one_closed_page_without_network(tmp_path: Path, late: Diagnosis) -> None:
    fragmented = of(causes.fragmented().write(tmp_path / "a.json.gz"))
    run = diagnose_run(read_run(plain_run(tmp_path / "run", world=3).root))
    for diagnosis in (fragmented, late, run):
        text = render_page(diagnosis)
        check_page(text)
        for item in diagnosis.findings:
            assert item.title in text
    assert "train.compile=true" in render_page(fragmented)


def test_names_of_a_trace_cannot_speak_as_code(tmp_path: Path) -> None:
    text = render_page(of(evil_trace().write(tmp_path / "evil.json.gz")))
    tags = check_page(text).tags
    assert sum(tag == "script" for tag, _ in tags) == 2 and not any(tag == "img" for tag, _ in tags)
    assert "&lt;/script&gt;" in text and EVIL not in text


def test_every_slice_of_the_timeline_adds_up(tmp_path: Path, late: Diagnosis) -> None:
    for diagnosis in (late, of(causes.loader([3000.0, 20.0]).write(tmp_path / "a.json.gz"))):
        assert diagnosis.rank is not None
        drawn = timeline(diagnosis.rank, diagnosis.rank.device())
        assert drawn is not None
        total = np.sum([layer["values"] for layer in drawn["layers"]], axis=0)
        assert np.abs(total - 1).max() < 2e-3
        assert len(drawn["steps"]) == len(diagnosis.rank.device().steps.rows)
        assert all(0 <= full <= 1 for lane in drawn["lanes"] for full in lane["full"])


def test_a_layer_holds_what_its_kind_took(tmp_path: Path) -> None:
    diagnosis = of(causes.loader([3000.0]).write(tmp_path / "a.json.gz"))
    assert diagnosis.rank is not None
    device = diagnosis.rank.device()
    drawn = timeline(diagnosis.rank, device)
    assert drawn is not None
    waited = next(layer for layer in drawn["layers"] if layer["name"] == "idle: waiting for data")
    assert np.mean(waited["values"]) == pytest.approx(device.shares.idle["data"] / device.window.wall_ns, rel=0.02)


def test_the_heat_map_shows_who_is_waited_for(late: Diagnosis) -> None:
    assert late.job is not None
    drawn = job_heat(late.job)
    assert drawn is not None and drawn["ranks"] == [0, 1, 2, 3]
    waits = next(one for one in drawn["maps"] if one["name"] == "waited in collectives")
    per_rank = np.array(waits["values"]).sum(axis=1)
    assert per_rank.argmin() == 2 and per_rank[2] < 0.1 * per_rank[0]
    assert len(waits["columns"]) == len(waits["values"][0]) == 12


def test_one_rank_has_no_heat_map(tmp_path: Path) -> None:
    diagnosis = of(causes.fragmented().write(tmp_path / "a.json.gz"))
    assert diagnosis.job is not None and job_heat(diagnosis.job) is None


def test_the_scripts_draw_in_a_browser_and_nothing_overflows(tmp_path: Path, late: Diagnosis) -> None:
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium to open the page with")
    check = (
        "<script>document.body.dataset.wide = document.documentElement.scrollWidth - innerWidth;"
        "document.getElementById('theme').click(); document.body.dataset.done = document.documentElement.dataset.theme"
        "</script>"
    )
    file = tmp_path / "page.html"
    text = render_page(late)
    file.write_text(text.replace("</body>", check + "</body>"))
    command = [browser, *FLAGS.split(), "--window-size=600,800", f"--user-data-dir={tmp_path / 'b'}", file.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert dom.count("<canvas") == 2  # the slices and the heat map
    assert 'data-done="dark"' in dom, "a script stopped at an error"
    wide = re.search(r'data-wide="(-?\d+)"', dom)
    assert wide is not None and int(wide[1]) <= 0
    assert dom.count('class="key"') > 3
    _colours(data_of(text))


def _colours(data: dict[str, Any]) -> None:
    """A light and a dark colour for everything that is drawn."""
    for layer in [*data["timeline"]["layers"], *data["kinds"]]:
        assert len(layer["color"]) == 2 and all(re.fullmatch(r"#[0-9a-f]{6}", one) for one in layer["color"])


def test_the_command_writes_it_and_a_wrong_place_is_a_users_mistake(tmp_path: Path) -> None:
    app = typer.Typer()
    register(app)
    path = causes.fragmented().write(tmp_path / "trace.json.gz")
    page = tmp_path / "out" / "page.html"
    assert CliRunner().invoke(app, [str(path), "--html", str(page)]).exit_code == 0
    assert "fragmentation" in page.read_text()
    failed = CliRunner().invoke(app, [str(path), "--html", str(path / "x.html")])
    assert failed.exit_code == 2 and "--html" in failed.output
