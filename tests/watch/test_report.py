"""report.html: one file, no network, nothing of the run can speak as code, and what happened is in the picture."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headway.account.errors import UserError
from headway.account.events import Incident, SessionStart, StepLine
from headway.record.folder import RunFolder
from headway.record.jsonl import JsonlWriter
from headway.record.sessions import read_history
from headway.watch.curves import LIMIT, Axis, account_over_time, charts, rank_map
from headway.watch.report import write_report
from headway.watch.summary import read_summary
from watch.run_maker import Maker, killed_and_resumed, plain_run, rewrite

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
VOID = {"meta", "img", "br", "rect", "line", "input", "hr", "link"}


class Tags(HTMLParser):
    """Start tags with attributes, and whether every element that opens also closes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes something else"


def page(folder: RunFolder) -> str:
    return write_report(folder.root).read_text()


def data_of(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    assert found is not None
    value: dict[str, Any] = json.loads(found[1])
    return value


def chart_of(data: dict[str, Any], name: str) -> dict[str, Any]:
    return next(chart for chart in data["charts"] if chart["id"] == name)


def test_it_is_one_file_that_asks_no_network(tmp_path: Path) -> None:
    text = page(killed_and_resumed(tmp_path, world=2))
    assert (tmp_path / "report.html").is_file()
    assert not re.findall(r"https?://(?!www\.w3\.org/)", text)
    assert not re.findall(r"@import|url\(\s*['\"]?//", text)
    for tag, attrs in Tags(text).tags:
        assert "src" not in attrs, f"<{tag}> loads something"
        assert tag != "link"
        assert (attrs.get("href") or "#").startswith("#")
    assert "Permission is hereby granted" in text, "uPlot's license must travel with its code"


def test_elements_close_and_anchors_lead_somewhere(tmp_path: Path) -> None:
    tags = Tags(page(killed_and_resumed(tmp_path, world=2, slow_rank=1)))
    assert tags.open == []
    ids = [attrs["id"] for _, attrs in tags.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    assert {attrs["href"] for tag, attrs in tags.tags if tag == "a"} <= {f"#{name}" for name in ids}


def test_names_cannot_speak_as_code(tmp_path: Path) -> None:
    folder = plain_run(tmp_path)

    def plant(line: Any) -> Any:
        if isinstance(line, SessionStart):
            return msgspec.structs.replace(line, device=EVIL, peak_source=EVIL, facts={EVIL: EVIL})
        if isinstance(line, StepLine) and line.step == 3:
            return msgspec.structs.replace(line, skipped=EVIL)
        return line

    rewrite(folder, plant)
    writer = JsonlWriter(folder.incidents)
    writer.append(
        Incident(
            id="a", fault=EVIL, step=5, time=0.0, monotonic_ns=0, host=EVIL, rank=1, evidence=EVIL, action=EVIL,
        )
    )  # fmt: skip
    writer.close()
    folder.config.write_text(f"model: {EVIL}\n")
    folder.environment.write_text(json.dumps({"versions": {EVIL: EVIL}}))
    folder.rank(0).write_text(EVIL + "\n")
    text = page(folder)
    scripts = [attrs for tag, attrs in Tags(text).tags if tag == "script"]
    assert len(scripts) == 3, "a planted <script> became an element"
    assert not any(tag == "img" for tag, _ in Tags(text).tags)
    assert data_of(text)["marks"] == [{"step": 5, "label": EVIL}], "escaping must not change the value"


def test_a_planted_unescaped_name_is_caught(tmp_path: Path) -> None:
    text = page(plain_run(tmp_path)).replace("NVIDIA H200", "<script>alert(1)</script>")
    assert len([tag for tag, _ in Tags(text).tags if tag == "script"]) > 3


def test_a_planted_spike_is_in_the_picture(tmp_path: Path) -> None:
    folder = plain_run(tmp_path, steps=3500, spike_at=3217, step_s=0.01)
    data = data_of(page(folder))
    spike = next(line for line in read_history(folder).kept if line.step == 3217)
    for name, value in (("loss", spike.nll), ("grad_norm", spike.grad_norm)):
        chart = chart_of(data, name)
        assert len(chart["x"]["step"]) <= LIMIT
        at = chart["x"]["step"].index(3217)
        assert chart["series"][0]["values"][at] == pytest.approx(value, rel=1e-5)
    assert (tmp_path / "report.html").stat().st_size < 400_000 + len(json.dumps(data))


def test_the_stack_is_closed_at_every_point(tmp_path: Path) -> None:
    data = data_of(page(plain_run(tmp_path, steps=1000, step_s=0.01)))
    account = data["account"]
    assert sum(account["steps"]) == 1000 and len(account["step"]) == 400
    for values in zip(*(series["values"] for series in account["series"]), strict=True):
        assert sum(values) == pytest.approx(1.0, abs=1e-4)
    total = sum(s * n for s, n in zip(account["seconds"], account["steps"], strict=True))
    assert total == pytest.approx(read_summary(RunFolder(tmp_path)).kept.wall_ns / 1e9, rel=1e-3)


def test_rolled_up_and_unknown_parts_are_in_the_stack_once(tmp_path: Path) -> None:
    folder = plain_run(tmp_path)

    def coarse(line: Any) -> Any:
        if not isinstance(line, StepLine) or line.step % 2:
            return line
        return msgspec.structs.replace(
            line, account={"compute": line.wall_ns // 2, "unaccounted": line.wall_ns - line.wall_ns // 2}
        )

    rewrite(folder, coarse)
    account = account_over_time(read_history(folder).kept)
    assert account is not None and "compute" in [series["name"] for series in account["series"]]
    for values in zip(*(series["values"] for series in account["series"]), strict=True):
        assert sum(values) == pytest.approx(1.0, abs=1e-4)


def test_steps_done_again_are_shown_and_no_total_holds_them(tmp_path: Path) -> None:
    folder = killed_and_resumed(tmp_path)
    history = read_history(folder)
    data = data_of(page(folder))
    loss = chart_of(data, "loss")
    again = next(series for series in loss["series"] if series["name"] == "done again")
    shown = [step for step, value in zip(loss["x"]["step"], again["values"], strict=True) if value is not None]
    assert shown == list(range(21, 31))
    assert data["marks"] == [{"step": 20, "label": "session 1"}]
    tokens = loss["x"]["tokens"]
    assert tokens[-1] == pytest.approx(sum(line.trained_tokens for line in history.kept), rel=1e-5)
    assert all(a <= b for a, b in itertools.pairwise(tokens))


def test_lost_steps_that_nobody_did_again_have_no_place_on_other_axes(tmp_path: Path) -> None:
    maker = Maker(tmp_path, steps=40)
    maker.start()
    maker.run(30)
    maker.start(resumed_from=10)
    maker.run(15)
    folder = maker.close()
    history = read_history(folder)
    axis = Axis(history.kept, history.lost, [], 0.0)
    loss = charts(axis, True)[0]
    assert loss["x"]["step"] == list(range(1, 31)) and loss["breaks"] == [10]
    assert [x is None for x in loss["x"]["hours"]] == [False] * 15 + [True] * 15


def test_the_rank_map_shows_the_slow_one(tmp_path: Path) -> None:
    data = data_of(page(plain_run(tmp_path, world=4, slow_rank=2)))
    backward = next(item for item in data["ranks"]["maps"] if item["name"] == "backward")
    for column in zip(*backward["values"], strict=True):
        assert max(range(4), key=lambda rank: column[rank]) == 2


def test_many_ranks_keep_the_one_that_differs(tmp_path: Path) -> None:
    summary = read_summary(plain_run(tmp_path, world=96, steps=3, slow_rank=91))
    found = rank_map(summary.ranks)
    assert found is not None and len(found["ranks"]) == 64 and 91 in found["ranks"] and found["world"] == 96


def test_no_step_one_step_and_a_torn_file(tmp_path: Path) -> None:
    empty = Maker(tmp_path / "none")
    empty.start()
    text = page(empty.close())
    assert Tags(text).open == [] and "charts" not in [attrs.get("id") for _, attrs in Tags(text).tags]
    one = page(plain_run(tmp_path / "one", steps=1, skip_at=1))
    assert data_of(one)["account"]["step"] == [1]
    torn = killed_and_resumed(tmp_path / "torn")
    raw = torn.metrics.read_bytes()
    torn.metrics.write_bytes(raw[: len(raw) * 2 // 3])
    torn.environment.write_text("{")
    text = page(torn)
    assert "1 damaged line" in text and "cannot be read" in text
    torn.metrics.write_bytes(b"")
    assert Tags(page(torn)).open == []


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a run folder"):
        write_report(tmp_path)


FLAGS = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
--disable-component-update --disable-sync --virtual-time-budget=3000 --window-size=1200,900 --dump-dom"""
CLICKS = """<script>
document.querySelectorAll("#axis button, .toggle, #theme, #heatpath button").forEach(button => button.click());
document.querySelectorAll(".key").forEach(key => key.click());
document.body.dataset.clicked = "all";
</script>"""


def test_the_script_draws_every_chart_in_a_browser(tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium to open the page with")
    folder = killed_and_resumed(tmp_path / "run", world=2, slow_rank=1)
    text = page(folder)
    clicked = tmp_path / "clicked.html"
    clicked.write_text(text.replace("</body>", CLICKS + "</body>"))
    for file in (folder.report, clicked):
        command = [browser, *FLAGS.split(), f"--user-data-dir={tmp_path / file.stem}", file.as_uri()]
        dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
        # One canvas a line chart, one for the stack, one for the rank map.
        assert dom.count("<canvas") == len(data_of(text)["charts"]) + 2
        assert ('data-clicked="all"' in dom) == (file == clicked), "the script stopped at an error"
