"""Run folders made for the test: what their own records show, and what they must not accuse."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from diagnose.causes import fragmented
from diagnose.kineto_maker import clean
from headway.account.errors import UserError
from headway.account.events import Flops, RankLine, SessionStart, StepLine, TraceLine
from headway.cli.diagnose import diagnose
from headway.diagnose.compare import compare
from headway.diagnose.diagnosis import Diagnosis, diagnose_run
from headway.diagnose.finding import Finding
from headway.diagnose.job import Options
from headway.diagnose.open import open_diagnosis
from headway.diagnose.run_facts import read_run
from headway.diagnose.said import Said
from headway.record.files import write_json
from headway.record.folder import RunFolder
from headway.record.jsonl import JsonlWriter
from headway.watch.diagnosis_text import facts
from watch.run_maker import S, plain_run, rewrite

Change = Callable[[StepLine], StepLine]


def made(
    root: Path,
    change: Change | None = None,
    rank_change: Callable[[RankLine], RankLine] | None = None,
    config: dict[str, Any] | None = None,
    gib: float | None = 141.0,
    **options: Any,
) -> RunFolder:
    folder = plain_run(root, **options)
    if change is not None:
        rewrite(folder, lambda line: change(line) if isinstance(line, StepLine) else line)
    if rank_change is not None:
        for path in folder.ranks().values():
            rewrite(folder, rank_change, path, RankLine)
    folder.config.write_text(yaml.safe_dump(config or {"name": "made", "model": {"recompute": "none"}}))
    if gib is not None:
        write_json(folder.environment, {"gpus": [{"name": "NVIDIA H200", "memory_bytes": int(gib * 2**30)}]})
    return folder


def moved(line: Any, to: str, share: float, source: str = "compute.forward") -> Any:
    """`share` of the line's wall clock goes from one category to another."""
    account = dict(line.account)
    ns = min(int(share * line.wall_ns), account[source])
    account[source] -= ns
    account[to] = account.get(to, 0) + ns
    return msgspec.structs.replace(line, account=account)


def longer(line: Any, to: str, seconds: float) -> Any:
    ns = int(seconds * S)
    account = {**line.account, to: line.account.get(to, 0) + ns}
    return msgspec.structs.replace(line, account=account, wall_ns=line.wall_ns + ns)


def with_(line: StepLine, **values: Any) -> StepLine:
    return msgspec.structs.replace(line, **values)


def diagnosed(folder: RunFolder) -> Diagnosis:
    return diagnose_run(read_run(folder.root))


def found(diagnosis: Diagnosis, name: str) -> Finding | None:
    return next((item for item in diagnosis.findings if item.name == name), None)


def every(number: int, hit: Change) -> Change:
    return lambda line: hit(line) if line.step % number == 0 else line


# name, what is planted in each step, what is like it and must not trigger
STEP_PAIRS: list[tuple[str, Change, Change]] = [
    ("padding", lambda line: with_(line, tokens=line.slots // 3), lambda line: with_(line, tokens=int(line.slots * 0.98))),
    ("data-starvation", lambda line: moved(line, "data", 0.15), lambda line: line),
    ("data-jitter", every(7, lambda line: longer(line, "data", 1.5)), lambda line: moved(line, "data", 0.15)),
    ("garbage-collection", lambda line: moved(line, "host.gc", 0.05), lambda line: line),
    ("logging", lambda line: moved(line, "host.logging", 0.05), lambda line: line),
    ("gradient-sync-exposed", lambda line: moved(line, "comm.dp", 0.1), lambda line: with_(line)),
    ("communication-heavy-plan", lambda line: moved(line, "comm.dp", 0.4, "compute.backward"), lambda line: line),
    (
        "recompilation-storm",
        every(3, lambda line: with_(longer(line, "host.other", 2.0), recompiles=1)),
        lambda line: with_(line, recompiles=int(line.step == 1)),
    ),
    ("unstable-steps", every(9, lambda line: longer(line, "unaccounted", 1.0)), lambda line: line),
    (
        "recompute-with-free-memory",
        lambda line: with_(line, memory_bytes=40 * 2**30),
        lambda line: with_(line, memory_bytes=130 * 2**30),
    ),
    (
        "memory-full-low-utilisation",
        lambda line: with_(line, memory_bytes=139 * 2**30, flops=Flops(useful=line.flops.useful // 4)),
        lambda line: with_(line, memory_bytes=139 * 2**30, flops=Flops(useful=line.flops.useful)),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "bad", "good"), STEP_PAIRS, ids=[pair[0] for pair in STEP_PAIRS])
def test_the_cause_is_found_and_its_likeness_is_not(name: str, bad: Change, good: Change, tmp_path: Path) -> None:
    finding = found(diagnosed(made(tmp_path / "bad", bad)), name)
    assert finding is not None and finding.evidence
    low, high = finding.gain
    assert 0 <= low <= high <= 1
    assert found(diagnosed(made(tmp_path / "good", good)), name) is None


@pytest.mark.parametrize(
    ("late", "name"),
    [
        (lambda line: line.rank == 2, "straggler-constant"),
        (lambda line: line.rank == line.step % 4, "straggler-wandering"),
        (lambda line: False, None),
    ],
    ids=["constant", "wandering", "none"],
)
def test_stragglers(late: Callable[[RankLine], bool], name: str | None, tmp_path: Path) -> None:
    def change(line: RankLine) -> RankLine:
        return moved(line, "compute.forward", 0.12, "compute.backward") if late(line) else line

    diagnosis = diagnosed(made(tmp_path, rank_change=change, world=4))
    assert [item.name for item in diagnosis.findings if item.name.startswith("straggler")] == ([name] if name else [])
    if name == "straggler-constant":
        finding = found(diagnosis, name)
        assert finding is not None and "rank 2" in finding.title and "node-0" in " ".join(finding.evidence)


@pytest.mark.parametrize(
    ("change", "meanwhile", "remedy"),
    [
        (lambda line: longer(line, "data", 0.2), "data takes", "mend-rank"),
        (lambda line: longer(line, "host.launch", 0.2), "host.launch takes", "replace-rank"),
        (lambda line: longer(line, "unaccounted", 0.2), "unaccounted takes", "replace-rank"),
        (
            lambda line: msgspec.structs.replace(longer(line, "host.other", 0.2), waited_ns=int(0.15 * S)),
            "others had its CPU", "replace-rank",
        ),
        (
            lambda line: longer(longer(longer(line, "unaccounted", 0.1), "data", 0.07), "host.launch", 0.06),
            "unaccounted takes", "replace-rank",
        ),
    ],
    ids=["loader", "launches", "unknown", "robbed", "a little of each"],
)  # fmt: skip
def test_a_late_rank_is_blamed_on_its_program_only_where_that_explains_it(
    change: Callable[[RankLine], RankLine], meanwhile: str, remedy: str, tmp_path: Path
) -> None:
    folder = made(tmp_path, rank_change=lambda line: change(line) if line.rank == 2 else line, world=4)
    finding = found(diagnosed(folder), "straggler-constant")
    assert finding is not None and meanwhile in finding.evidence[2] and finding.remedy == remedy
    assert "leave `" not in finding.check
    assert ("compare `data` of the ranks" in finding.check) == (remedy == "mend-rank")


def test_what_is_sure_of_a_collection_is_not_less_for_what_it_leaves_cold(tmp_path: Path) -> None:
    folder = made(tmp_path, lambda line: moved(line, "host.gc", 0.05), gib=None)
    rewrite(folder, lambda line: msgspec.structs.replace(line, device="some CPU") if hasattr(line, "device") else line)
    diagnosis = diagnosed(folder)
    finding = found(diagnosis, "garbage-collection")
    assert finding is not None and not diagnosis.run.on_gpu  # type: ignore[union-attr]
    cost = diagnosis.run.total("host.gc")  # type: ignore[union-attr]
    assert finding.lower_ns == int(0.9 * cost) and finding.upper_ns > cost


def test_a_runs_headline_says_what_is_of_its_trace(tmp_path: Path) -> None:
    folder = made(tmp_path / "run")
    fragmented().write(folder.traces / "step-00000100" / "rank-00000.json.gz")
    diagnosis = open_diagnosis([folder.root], Options(), Said())
    assert diagnosis.verdict.endswith("(seen in its newest trace)") and diagnosis.findings[0].of_trace
    clean(4).write(folder.traces / "step-00000100" / "rank-00000.json.gz")
    diagnosis = open_diagnosis([folder.root], Options(), Said())
    assert "beside matrix products in its newest trace: " in diagnosis.verdict


def test_the_newest_trace_of_all_ranks_is_taken(tmp_path: Path) -> None:
    """While one rank was still diagnosing, the others recorded the next trace."""
    folder = made(tmp_path / "run", world=2)
    for step, ranks in ((100, (0, 1)), (200, (1,))):
        for rank in ranks:
            clean(4, rank=rank, world=2).write(folder.traces / f"step-{step:08d}" / f"rank-{rank:05d}.json.gz")
    diagnosis = open_diagnosis([folder.root], Options(), Said())
    assert any(note.startswith("step-00000200: newer, but not all ranks") for note in diagnosis.notes)
    assert any("kernels from 2 ranks" in note and "step-00000100" in note for note in diagnosis.notes)
    assert not diagnosis.partial
    (folder.traces / "step-00000100" / "rank-00000.json.gz").unlink()
    diagnosis = open_diagnosis([folder.root], Options(), Said())
    assert diagnosis.partial and any("has the traces of 1 of 2 ranks only" in note for note in diagnosis.notes)


def test_float32_on_a_device_with_faster_units(tmp_path: Path) -> None:
    def precision(name: str) -> Callable[[Any], Any]:
        def change(line: Any) -> Any:
            if not isinstance(line, SessionStart):
                return line
            return msgspec.structs.replace(line, facts={**line.facts, "precision": name})

        return change

    for name, wanted in (("fp32", True), ("bf16", False)):
        folder = made(tmp_path / name)
        rewrite(folder, precision(name))
        assert (found(diagnosed(folder), "float32-matmuls") is not None) == wanted


def test_a_memory_of_unknown_size_accuses_nobody(tmp_path: Path) -> None:
    folder = made(tmp_path, lambda line: with_(line, memory_bytes=139 * 2**30), gib=None)
    rewrite(folder, lambda line: msgspec.structs.replace(line, device="toaster") if hasattr(line, "device") else line)
    assert found(diagnosed(folder), "memory-full-low-utilisation") is None


def test_the_account_and_the_waterfall_close(tmp_path: Path) -> None:
    diagnosis = diagnosed(made(tmp_path))
    assert diagnosis.account is not None and sum(diagnosis.account.parts.values()) == diagnosis.wall_ns
    assert diagnosis.fall is not None
    assert sum(row.share for row in diagnosis.fall.rows[1:]) == pytest.approx(1.0)
    assert diagnosis.to_dict()["verdict"]


def test_damage_is_said_and_makes_the_answer_partial(tmp_path: Path) -> None:
    folder = made(tmp_path, world=2)
    with folder.metrics.open("ab") as file:
        file.write(b'{"v":1,"event":"step","sess')
    folder.config.write_text("a: [")
    folder.environment.write_text("{")
    diagnosis = diagnosed(folder)
    assert diagnosis.partial
    for word in ("metrics.jsonl", "run.yaml", "environment.json"):
        assert any(word in note for note in diagnosis.notes), word


def test_a_run_without_a_step_says_so(tmp_path: Path) -> None:
    folder = made(tmp_path)
    rewrite(folder, lambda line: None if isinstance(line, StepLine) else line)
    diagnosis = diagnosed(folder)
    assert diagnosis.findings == () and any("no step" in note for note in diagnosis.notes)
    assert diagnosis.partial and diagnosis.verdict.startswith("nothing can be said")
    folder.metrics.write_bytes(b"")
    with pytest.raises(UserError, match=r"metrics\.jsonl: is empty"):
        read_run(folder.root)


def traced_at(folder: RunFolder, first: int, told: bool) -> None:
    """Three steps recorded, the fourth paid for the writing; `told`: the diagnosis ended and left its line."""
    folder.traces.joinpath(f"step-{first:08d}").mkdir(parents=True)
    if told:
        line = TraceLine(session=0, step=first, time=0.0, traced_steps=3, path="x", cost_ns=2 * S)
        JsonlWriter(folder.metrics).append(line)


@pytest.mark.parametrize("told", [True, False], ids=["told", "folder alone"])
def test_what_a_trace_costs_is_no_finding_about_the_run(told: bool, tmp_path: Path) -> None:
    def recorded(line: StepLine) -> StepLine:
        if line.step == 20:
            return longer(line, "host.logging", 60.0)
        return longer(line, "unaccounted", 20.0) if 20 < line.step <= 23 else line

    folder = made(tmp_path / "a", recorded)
    assert found(diagnosed(folder), "unstable-steps") is not None
    traced_at(folder, 20, told)
    diagnosis = diagnosed(folder)
    assert found(diagnosis, "unstable-steps") is None and found(diagnosis, "logging") is None
    assert [line.step for line in diagnosis.run.traced] == [20, 21, 22, 23]  # type: ignore[union-attr]
    said = next(note for note in diagnosis.notes if "periodic traces are left out" in note)
    assert said.startswith("4 steps") and ("took the loop 2000.0 ms" in said) == told


def test_a_run_of_nothing_but_traced_steps_keeps_them(tmp_path: Path) -> None:
    folder = made(tmp_path)
    for first in range(1, 200, 3):
        folder.traces.joinpath(f"step-{first:08d}").mkdir(parents=True)
    run = read_run(folder.root)
    assert len(run.steps) > 10 and run.traced == ()


def test_what_no_category_explains_is_not_called_a_category(tmp_path: Path) -> None:
    finding = found(
        diagnosed(made(tmp_path / "a", every(9, lambda line: longer(line, "unaccounted", 1.0)))), "unstable-steps"
    )
    assert finding is not None and finding.remedy == "find-pauses" and "in them grows" not in finding.evidence[1]
    finding = found(
        diagnosed(made(tmp_path / "b", every(9, lambda line: longer(line, "host.other", 1.0)))), "unstable-steps"
    )
    assert finding is not None and finding.remedy == "steady-steps" and "host.other" in finding.evidence[1]


def test_a_damaged_periodic_trace_is_said_and_makes_the_answer_partial(tmp_path: Path) -> None:
    folder = made(tmp_path / "run")
    trace = clean(4).write(folder.traces / "step-00000100" / "rank-00000.json.gz")
    assert not open_diagnosis([folder.root], Options(), Said()).partial
    whole = trace.read_bytes()
    trace.write_bytes(whole[: len(whole) // 2])
    half = open_diagnosis([folder.root], Options(), Said())
    assert half.partial and any(name == "damage" and "rank-00000" in text for name, text in facts(half))
    trace.write_bytes(b"nothing")
    none = open_diagnosis([folder.root], Options(window="gpu"), Said())
    assert none.partial and any("step-00000100 is left out" in note for note in none.notes)
    assert any(note.startswith("--window: not used") for note in none.notes)
    trace.write_bytes(whole)
    good = open_diagnosis([folder.root], Options(comm_kernels=("flash",)), Said())
    assert any(note.startswith("--comm-kernel: used on the folder's newest trace alone") for note in good.notes)


def test_no_run_folder_is_a_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        read_run(tmp_path / "nowhere")


def worse(line: StepLine) -> StepLine:
    assert line.nll is not None
    return with_(line, nll=line.nll + 0.25 * min(1.0, line.step / 10))


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"parallel": {"compression": "powersgd"}}, "slower-convergence-compressed"),
        ({"optim": {"lr": 3e-5}}, "slower-convergence"),
    ],
)
def test_slower_convergence_is_found_against_another_run(config: dict[str, Any], name: str, tmp_path: Path) -> None:
    mine = diagnosed(made(tmp_path / "a", worse, config=config))
    other = diagnosed(made(tmp_path / "b", config={"parallel": {}, "optim": {"lr": 3e-4}}))
    compared = compare(mine, other)
    assert [item.name for item in compared.findings] == [name] and compared.slower
    same = compare(diagnosed(made(tmp_path / "c", seed=5)), other)
    assert same.findings == () and not same.slower


def test_a_run_without_a_step_is_neither_slower_nor_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, empty = made(tmp_path / "good"), made(tmp_path / "empty")
    rewrite(empty, lambda line: None if isinstance(line, StepLine) else line)
    for mine, other in ((empty, good), (good, empty)):
        compared = compare(diagnosed(mine), diagnosed(other))
        assert compared.slower is None and compared.to_dict()["slower"] is None
        assert any("no step was finished" in note and "neither" in note for note in compared.notes)
    page = tmp_path / "page.html"
    assert diagnose([good.root], against=empty.root, html=page) == 3
    said = " ".join(capsys.readouterr().out.split())
    assert "not comparable" in said and "not slower" not in said
    assert "Not comparable" in page.read_text() and "neither of the two" in page.read_text()


def test_what_became_slower_comes_first(tmp_path: Path) -> None:
    mine = diagnosed(made(tmp_path / "a", lambda line: longer(line, "data", 0.3)))
    compared = compare(mine, diagnosed(made(tmp_path / "b")))
    assert compared.account[0].label == "data" and compared.slower
    assert compared.account[0].delta_ns == pytest.approx(0.3 * S, rel=0.1)
    assert compared.to_dict()["slower"] is True


def test_a_collapse_over_more_ranks_is_found_against_the_smaller_run(tmp_path: Path) -> None:
    small = diagnosed(made(tmp_path / "small", world=2))
    large = diagnosed(made(tmp_path / "large", lambda line: longer(line, "comm.dp", 0.9), world=8))
    names = [item.name for item in compare(large, small).findings]
    assert "multi-node-collapse" in names
    fine = diagnosed(made(tmp_path / "fine", world=8))
    assert "multi-node-collapse" not in [item.name for item in compare(fine, small).findings]
