"""Every cause has a trace that must trigger its finding and one that looks like it and must not."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest
import torch
from rich.console import Console
from torch.profiler import ProfilerActivity, profile, record_function

import tiny
from diagnose import causes
from diagnose.kineto_maker import Kineto, clean
from headway.diagnose import compare, findings
from headway.diagnose.case import case_of
from headway.diagnose.diagnosis import Diagnosis, diagnose_job
from headway.diagnose.efficiency import with_efficiency
from headway.diagnose.finding import SYMPTOMS, Finding
from headway.diagnose.findings.data_loading import data_finding
from headway.diagnose.findings.ranks import straggler
from headway.diagnose.job import read_job
from headway.diagnose.passes import passes_of
from headway.diagnose.said import Said
from headway.watch.diagnosis_page import render_page
from headway.watch.diagnosis_text import render_diagnosis

Make = Callable[[], Kineto]

PAIRS: list[tuple[str, Make, Make]] = [
    ("fragmentation", causes.fragmented, clean),
    ("fragmentation", causes.unfused_but_busy, causes.few_elementwise),
    (
        "optimizer-not-fused",
        lambda: causes.optimizer(causes.FOREACH, "aten::_foreach_addcdiv_", 12),
        lambda: causes.optimizer(causes.FUSED, "aten::_fused_adamw_", 4),
    ),
    ("optimizer-not-fused", lambda: causes.optimizer(causes.EAGER, "aten::addcdiv_", 60), clean),
    ("loss-unfused", lambda: causes.loss(151_936), lambda: causes.loss(1_000)),
    ("attention-unfused", causes.eager_attention, causes.router_softmax),
    ("attention-unfused", causes.eager_attention, causes.large_softmax_beside_flash),
    ("attention-unfused", lambda: causes.on_cpu(causes.CPU_SCORES), lambda: causes.on_cpu(causes.CPU_LOSS)),
    ("host-sync", causes.reads_every_layer, causes.reads_once_a_step),
    ("allocator", lambda: causes.frees(4), lambda: causes.frees(0)),
    ("data-starvation", lambda: causes.loader([3000.0]), lambda: causes.loader([20.0])),
    ("data-jitter", lambda: causes.loader([20.0] * 7 + [9000.0]), lambda: causes.loader([3000.0])),
    ("gradient-sync-exposed", lambda: causes.gradients(3000.0, False), lambda: causes.gradients(3000.0, True)),
    (
        "small-collectives",
        lambda: causes.small_messages(60, 2000, 20.0),
        lambda: causes.small_messages(2, 20_000_000, 120.0),
    ),
    ("communication-heavy-plan", lambda: causes.heavy_plan(900.0), lambda: causes.heavy_plan(60.0)),
    ("slow-link", lambda: causes.link(9000.0), lambda: causes.link(1000.0)),
    ("slow-link", lambda: causes.link(70_000.0, ranks=64), lambda: causes.link(16_000.0, ranks=64)),
    ("pipeline-bubble", lambda: causes.pipeline(3000.0), lambda: causes.pipeline(0.0)),
    ("pipeline-bubble", lambda: causes.pipeline(3000.0), lambda: causes.all_to_all(3000.0)),
    (
        "float32-matmuls",
        lambda: causes.products("sm80_xmma_gemm_f32f32_f32f32_f32_tn_n", ["float", "float"]),
        lambda: causes.products("nvjet_sm90_tst_128x256", ["c10::BFloat16", "c10::BFloat16"]),
    ),
    (
        "float32-matmuls",
        lambda: causes.products("sm80_xmma_gemm_f32f32_f32f32_f32_tn_n", ["float", "float"]),
        lambda: causes.products("fbgemm_gpu::split_embedding_backward_codegen_rowwise_adagrad", ["float", "float"]),
    ),
    ("recompilation-storm", lambda: causes.compiling({2, 3, 4}), lambda: causes.compiling({1})),
    ("garbage-collection", lambda: causes.collecting(1500.0), lambda: causes.collecting(5.0)),
    (
        "garbage-collection",
        lambda: causes.collecting(1500.0, "<built-in function collect>"),
        lambda: causes.collecting(1500.0, "<built-in method collect of Metrics object at 0x7f>"),
    ),
    ("host-busy", lambda: causes.saving("save_state"), lambda: causes.saving("")),
    ("host-busy", lambda: causes.saving("<built-in function fsync>", cat="python_function"), causes.fragmented),
    ("host-busy", lambda: causes.writing_on_cpu("<built-in function urandom>"), lambda: causes.writing_on_cpu("")),
    ("host-busy", lambda: causes.writing_on_cpu("evaluate"), causes.pausing_in_forward),
    (
        "host-busy",
        lambda: causes.saving("save_state"),
        lambda: causes.saving("<built-in function collect>", cat="python_function"),
    ),
    ("host-busy", lambda: causes.saving("save_state"), lambda: causes.saving("aten::mul", cat="cpu_op")),
    ("host-busy", lambda: causes.saving("save_state"), lambda: causes.saving("Optimizer.step#AdamW.step")),
    ("host-busy", lambda: causes.saving("save_state"), lambda: causes.saving("## backward ##")),
    ("prefill-dominates", lambda: causes.serving(40_000.0, 4), lambda: causes.serving(2_000.0, 40)),
    ("unstable-steps", lambda: causes.uneven_steps({4, 9}), lambda: causes.uneven_steps(set())),
]


def diagnosed(path: Path, trace: Kineto) -> Diagnosis:
    return diagnose_job(read_job([trace.write(path / "trace.json.gz")]))


def found(diagnosis: Diagnosis, name: str) -> Finding | None:
    return next((item for item in diagnosis.findings if item.name == name), None)


@pytest.mark.parametrize(("name", "bad", "good"), PAIRS, ids=[f"{i}-{pair[0]}" for i, pair in enumerate(PAIRS)])
def test_the_cause_is_found_and_its_likeness_is_not(name: str, bad: Make, good: Make, tmp_path: Path) -> None:
    finding = found(diagnosed(tmp_path / "bad", bad()), name)
    assert finding is not None
    low, high = finding.gain
    assert 0 <= low <= high <= 1 and high > 0
    assert finding.evidence and finding.check and finding.proposal().setting
    assert found(diagnosed(tmp_path / "good", good()), name) is None


def test_the_host_range_is_named_with_what_calls_it_and_what_is_not_named_is_asked_for(tmp_path: Path) -> None:
    name = "<built-in method write of _io.BufferedWriter object at 0x7f00>"
    named = diagnosed(tmp_path / "a", causes.saving(name, cat="python_function"))
    finding = found(named, "host-busy")
    assert finding is not None and finding.upper_ns == pytest.approx(4 * 4_000_000, rel=0.05)
    assert finding.evidence[0].startswith("<built-in method write of _io.BufferedWriter object>: 4×")
    assert finding.evidence[0].endswith("in loop.py(7): <module>") and named.advice == ""
    for trace in (causes.saving(""), causes.writing_on_cpu("")):
        unnamed = diagnosed(tmp_path / "b", trace)
        assert not unnamed.clean and "with_stack=True" in unnamed.advice
        assert "with_stack=True" in render_page(unnamed) and "No cause was found" not in render_page(unnamed)
        shown = Console(width=80, file=io.StringIO(), force_terminal=False)
        shown.print(render_diagnosis(unnamed))
        assert "no cause was found that is worth a change" not in shown.file.getvalue()  # type: ignore[attr-defined]


def test_a_script_gets_what_the_terminal_prints(tmp_path: Path) -> None:
    diagnosis = diagnose_job(read_job(causes.ranks(tmp_path, lambda rank, step: 900.0 if rank == 2 else 0.0)))
    read = orjson.loads(orjson.dumps(diagnosis.to_dict(), option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS))
    trace, device = read["trace"], diagnosis.rank.device()  # type: ignore[union-attr]
    assert trace["utilisation"] == device.shares.utilisation and trace["overlap"] == device.shares.overlap
    parts = ("compute_ns", "exposed_comm_ns", "exposed_mem_ns", "idle_ns")
    assert sum(trace[part] for part in parts) == read["wall_ns"]
    assert len(trace["steps"]["rows"]) == 12 and trace["steps"]["rows"][0]["wall_ns"] > 0
    assert trace["kernels"][0]["total_ns"] > 0 and trace["kinds"] and trace["fragmentation"]["kernels"] > 0
    assert [row["rank"] for row in trace["ranks"]] == [0, 1, 2, 3]
    assert (
        trace["ranks"][2]["last"] == 12 and trace["ranks"][0]["waited_ns"] > 0 and trace["collectives"]["matched"] == 12
    )


@pytest.mark.parametrize(
    ("own", "steps", "last", "title", "remedy"),
    [
        ({7: "slow_host_work"}, 1, {7: 5, 1: 3}, "rank 7 comes last most often", "mend-rank"),
        ({}, 1, {7: 8}, "rank 7 comes last most often", "mend-rank"),
        ({}, 12, {7: 96}, "rank 7 is always the slow one", "replace-rank"),
        ({7: "save"}, 12, {7: 96}, "rank 7 is always the slow one", "mend-rank"),
        ({}, 12, {7: 65, 1: 31}, "rank 7 comes last most often", "replace-rank"),
        ({7: "save"}, 12, {7: 12, 1: 13, 2: 12}, "another rank is slow each time", "balance-ranks"),
    ],
)
def test_a_straggler_is_judged_by_what_was_seen(
    own: dict[int, str], steps: int, last: dict[int, int], title: str, remedy: str
) -> None:
    finding = straggler(last, 100, dict.fromkeys(range(8), 10), 1000, {7: "compute 3 ms"}, "collective", own, steps)
    assert (finding.title, finding.remedy) == (title, remedy)
    assert any("record some more" in line for line in finding.evidence) == (steps == 1)
    assert ("leave `" in finding.check) == (7 in own and remedy != "balance-ranks")


@pytest.mark.parametrize(
    ("wait", "on_gpu", "least"), [(0.84, True, 0.475), (0.84, False, 0.25), (0.3, True, 0.285), (0.3, False, 0.15)]
)
def test_a_loader_that_takes_most_of_the_step_is_surely_worth_more_than_one_that_takes_a_little(
    wait: float, on_gpu: bool, least: float
) -> None:
    waits = [int(wait * 1e9)] * 4
    finding = data_finding(waits, [10**9] * 4, 4 * 10**9, sum(waits), "data", "", on_gpu)
    assert finding.gain[0] == pytest.approx(least, abs=1e-3)


def test_a_clean_step_has_no_finding(tmp_path: Path) -> None:
    diagnosis = diagnosed(tmp_path, clean(12))
    assert diagnosis.findings == () and diagnosis.clean and diagnosis.verdict.startswith("clean")


def test_what_the_planted_cause_costs_lies_in_the_range(tmp_path: Path) -> None:
    """The synthetic host of `frees` loses exactly 150 µs a call, and a launch after it."""
    planted = diagnosed(tmp_path / "bad", causes.frees(4))
    finding = found(planted, "allocator")
    assert finding is not None
    lost = 4 * 4 * 150_000
    assert finding.lower_ns <= lost <= finding.upper_ns * 1.05


@pytest.mark.parametrize(
    ("late", "name"),
    [
        (lambda rank, step: 900.0 if rank == 2 else 0.0, "straggler-constant"),
        (lambda rank, step: 900.0 if rank == step % 4 else 0.0, "straggler-wandering"),
        (lambda rank, step: 0.0, None),
    ],
    ids=["constant", "wandering", "none"],
)
def test_stragglers(late: Callable[[int, int], float], name: str | None, tmp_path: Path) -> None:
    diagnosis = diagnose_job(read_job(causes.ranks(tmp_path, late)))
    stragglers = [item.name for item in diagnosis.findings if item.name.startswith("straggler")]
    assert stragglers == ([name] if name else [])
    if name == "straggler-constant":
        finding = found(diagnosis, name)
        assert finding is not None and "rank 2" in finding.title
        assert "slow_host_work" in " ".join(finding.evidence) and finding.remedy == "mend-rank"


def test_a_compilation_counts_once_under_however_many_names(tmp_path: Path) -> None:
    """PyTorch writes each as nested ranges and an annotation about them; one of three is what a dynamic shape leaves."""
    finding = found(diagnosed(tmp_path, causes.compiling({2, 3, 4})), "recompilation-storm")
    assert finding is not None and finding.evidence[0].startswith("3 compilations, 12.0 ms, in 3 of 4 steps")
    assert finding.upper_ns == pytest.approx(3 * 4_000_000, rel=0.01)
    assert finding.lower_ns == pytest.approx(2 * 4_000_000, rel=0.01)


def test_on_a_cpu_the_optimizers_own_python_may_be_won_too(tmp_path: Path) -> None:
    layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(30))
    optimizer = torch.optim.AdamW(layers.parameters(), foreach=False)
    for parameter in layers.parameters():
        parameter.grad = torch.ones_like(parameter)
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        for step in range(3):
            with record_function(f"ProfilerStep#{step}"):
                optimizer.step()
    recorded.export_chrome_trace(str(tmp_path / "t.json"))
    finding = found(diagnose_job(read_job([tmp_path / "t.json"])), "optimizer-not-fused")
    assert finding is not None and finding.claims["idle.host"] > 0.2 * finding.upper_ns


def test_recompute_is_a_finding_only_where_memory_is_known_to_be_free(tmp_path: Path) -> None:
    again = read_job([causes.recomputing(True).write(tmp_path / "a.json")])
    without = read_job([causes.recomputing(False).write(tmp_path / "b.json")])
    name = "recompute-with-free-memory"
    assert found(diagnose_job(again, memory_free=0.6), name) is not None
    assert found(diagnose_job(again, memory_free=0.05), name) is None
    assert found(diagnose_job(again), name) is None
    assert found(diagnose_job(without, memory_free=0.6), name) is None


def test_padding_is_found_from_the_tokens_and_full_rows_are_not_accused(tmp_path: Path) -> None:
    job = read_job([clean().write(tmp_path / "t.json.gz")])
    name = "padding"
    bad = found(diagnose_job(with_efficiency(job, Said(tokens=4_000, slots=10_000))), name)
    assert bad is not None and bad.gain[0] == pytest.approx(0.58 * 0.97, abs=0.03) and bad.gain[1] <= 0.6
    assert found(diagnose_job(with_efficiency(job, Said(tokens=9_800, slots=10_000))), name) is None
    assert found(diagnose_job(job), name) is None


@pytest.mark.parametrize(("prompt", "tokens"), [(384, 3), (6, 8)])
def test_first_token_latency_of_a_recorded_generation(prompt: int, tokens: int, tmp_path: Path) -> None:
    """Two requests to a small model of Hugging Face's, recorded here; nobody annotates what is prefill."""
    from transformers import LlamaForCausalLM
    from transformers.models.llama import LlamaConfig

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**tiny.config(max_position_embeddings=1024))).eval()
    ids = torch.randint(320, (4, prompt))
    with torch.no_grad(), profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
        for _ in range(2):
            model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0)
    recorded.export_chrome_trace(str(tmp_path / "t.json"))
    job = read_job([tmp_path / "t.json"])
    passes = passes_of(case_of(job).view)
    assert passes is not None and passes.positions == (prompt, prompt)
    assert (passes.prefills, passes.decodes) == (2, 2 * (tokens - 1))
    finding = found(diagnose_job(job), "prefill-dominates")
    assert (finding is not None) == (prompt > 100)
    assert finding is None or finding.symptom == "high first-token latency"


@pytest.mark.parametrize(("queries", "keys", "told"), [(1, 400, True), (400, 400, False)])
def test_prefill_alone_and_training_are_no_generation(queries: int, keys: int, told: bool, tmp_path: Path) -> None:
    """A prompt beside single queries is one; with a backward pass in the trace, or prompts only, there is none."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
        for length in (keys, queries):
            q, k = torch.ones(1, 2, length, 8, requires_grad=not told), torch.ones(1, 2, keys, 8)
            torch.nn.functional.scaled_dot_product_attention(q, k, k)
    recorded.export_chrome_trace(str(tmp_path / "t.json"))
    assert (passes_of(case_of(read_job([tmp_path / "t.json"])).view) is not None) == told


def test_every_symptom_is_on_a_finding_that_real_inputs_reach() -> None:
    """Each is tested with its own input; here no symptom may be without one."""
    source = "".join(path.read_text() for path in Path(findings.__path__[0]).glob("*.py"))
    source += Path(compare.__file__).read_text()
    for symptom in SYMPTOMS:
        assert f'"{symptom}"' in source, symptom
