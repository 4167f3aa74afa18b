"""Every cause has a trace that must trigger its finding and one that looks like it and must not."""

from __future__ import annotations

import dataclasses
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
from headway.diagnose.facts import HostKind
from headway.diagnose.finding import SYMPTOMS, Finding
from headway.diagnose.findings.data_loading import data_finding
from headway.diagnose.findings.ranks import _own_code, straggler
from headway.diagnose.job import read_job
from headway.diagnose.passes import _queries_and_keys, passes_of
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
        lambda: causes.saving("[pl][profile][Callback]ModelCheckpoint.on_train_batch_end"),
        lambda: causes.saving("[pl][profile][Strategy]DDPStrategy.training_step"),
    ),
    ("allocator", lambda: causes.frees(4), causes.first_use),
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
    stack = causes.saving("")
    stack.host_event("python_function", "loop.py(7): <module>", 0.0, stack.now)
    bare = causes.saving("")
    bare.events = [event for event in bare.events if event["cat"] == "kernel"]
    for trace, wanted in (
        (causes.saving(""), "with_stack=True"),
        (causes.writing_on_cpu(""), "with_stack=True"),
        (stack, "no Python function of the trace fills it"),
        (bare, "ProfilerActivity.CPU"),
    ):
        unnamed = diagnosed(tmp_path / "b", trace)
        assert not unnamed.clean and wanted in unnamed.advice
        assert ("with_stack" in unnamed.advice) == ("with_stack" in wanted)
        assert "which no finding claims" in render_page(unnamed)
        assert "No cause was found" not in render_page(unnamed)
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
        ({}, None, {7: 5000}, "rank 7 is always the slow one", "replace-rank"),  # no step has a name
        ({}, None, {7: 40}, "rank 7 comes last most often", "mend-rank"),
    ],
)
def test_a_straggler_is_judged_by_what_was_seen(
    own: dict[int, str], steps: int | None, last: dict[int, int], title: str, remedy: str
) -> None:
    finding = straggler(last, 100, dict.fromkeys(range(8), 10), 1000, {7: "compute 3 ms"}, "collective", own, steps)
    assert (finding.title, finding.remedy) == (title, remedy)
    few = steps == 1 or (steps is None and last == {7: 40})
    assert any("record some more" in line for line in finding.evidence) == few
    assert any("the traces name no steps" in line for line in finding.evidence) == (steps is None)
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


@pytest.mark.parametrize(
    ("did", "code"),
    [
        ({"idle: host": 90, "compute": 10, "host code: save": 80}, "save"),
        ({"compute": 100, "host code: save": 60}, ""),  # saving under kernels holds nobody up
        ({"compute": 40, "idle: host": 60, "host code: forward": 100}, ""),
        ({"compute": 40, "idle: host": 60, "host code: [pl][profile][Strategy]DDPStrategy.training_step": 100}, ""),
        ({"host code: forward": 100}, ""),  # of a CPU
        ({"host code: headway.data": 100}, "headway.data"),
    ],
)
def test_a_late_ranks_own_code_is_what_its_device_waits_for(did: dict[str, int], code: str) -> None:
    assert _own_code(did) == code


def test_a_rank_whose_device_is_slow_is_not_blamed_for_its_annotated_loop(tmp_path: Path) -> None:
    diagnosis = diagnose_job(read_job(causes.throttled(tmp_path)))
    finding = found(diagnosis, "straggler-constant")
    assert finding is not None and "host code: forward" in " ".join(finding.evidence)
    assert finding.remedy == "replace-rank" and "forward" not in finding.check


def test_what_all_ranks_do_is_not_hidden_behind_one_that_does_a_little_more_of_it(tmp_path: Path) -> None:
    job = read_job(causes.ranks(tmp_path, lambda rank, step: 4400.0 if rank == 2 else 4000.0))
    diagnosis = diagnose_job(job)
    assert [item.name for item in diagnosis.findings if not item.within] == ["host-busy", "straggler-constant"]
    assert diagnosis.findings[0].gain[1] > 0.5 and "slow_host_work" in diagnosis.verdict


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


@pytest.mark.parametrize(
    ("calls", "training", "told"),
    [
        ([(400, 400), (1, 401), (1, 402)], False, True),
        ([(400, 512), (1, 512), (1, 512), (1, 512)], False, True),  # a cache of fixed size
        ([(400, 400), (1, 401), (1, 402)], True, False),
        ([(197, 197)] * 6 + [(1, 197)] * 2, False, False),  # an image encoder that pools
        ([(197, 197), (1, 197), (196, 196), (1, 196)], False, False),
        ([(400, 400), (400, 400)], False, False),
    ],
    ids=["generation", "fixed cache", "training", "pooling", "pooling of two sizes", "prefill alone"],
)
def test_prefill_alone_pooling_and_training_are_no_generation(
    calls: list[tuple[int, int]], training: bool, told: bool, tmp_path: Path
) -> None:
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
        for queries, keys in calls:
            q, k = torch.ones(1, 2, queries, 8, requires_grad=training), torch.ones(1, 2, keys, 8)
            out = torch.nn.functional.scaled_dot_product_attention(q, k, k)
            if training:
                out.sum().backward()
    recorded.export_chrome_trace(str(tmp_path / "t.json"))
    assert (passes_of(case_of(read_job([tmp_path / "t.json"])).view) is not None) == told


def test_documents_packed_end_to_end_do_not_tell_their_lengths(tmp_path: Path) -> None:
    trace = Kineto()
    trace.matmul(5.0)
    for shapes in ([[4096, 8, 64]] * 3, [[1, 4096, 8, 64]] * 3 + [[], [9], [9]], [[2, 400, 8, 64]] * 3 + [[], []]):
        trace.kernel("flash_fwd", 9.0, "aten::_flash_attention_forward", shapes=shapes)
    view = case_of(read_job([trace.write(tmp_path / "t.json")])).view
    rows = view.host_rows("_flash_attention_forward", (HostKind.OP,))
    assert [_queries_and_keys(view, int(row)) for row in rows] == [(0, 0), (0, 0), (400, 400)]


@pytest.mark.parametrize(("major", "remedy"), [(9, "bf16"), (7, "fp16"), (6, None)])
def test_bfloat16_is_for_devices_that_multiply_it(major: int, remedy: str | None, tmp_path: Path) -> None:
    trace = causes.products("volta_sgemm_128x64_nn", ["float", "float"]).to_dict()
    trace["deviceProperties"] = [{"id": 0, "name": "NVIDIA Some Card", "computeMajor": major}]
    (tmp_path / "t.json").write_bytes(orjson.dumps(trace))
    finding = found(diagnose_job(read_job([tmp_path / "t.json"])), "float32-matmuls")
    assert (finding.remedy if finding else None) == remedy


def test_a_first_use_is_said_and_is_no_idle_without_a_cause(tmp_path: Path) -> None:
    diagnosis = diagnosed(tmp_path, causes.first_use())
    assert any("the first cudaFree takes 2000.0 ms" in note and "set up" in note for note in diagnosis.notes)
    assert diagnosis.unexplained < 0.05 and diagnosis.advice == ""


def test_a_collection_leaves_a_cpu_cold_and_no_gpu(tmp_path: Path) -> None:
    on_gpu = found(diagnosed(tmp_path / "a", causes.collecting(1500.0)), "garbage-collection")
    on_cpu = found(diagnosed(tmp_path / "b", causes.writing_on_cpu("gc_collect")), "garbage-collection")
    assert on_gpu is not None and list(on_gpu.claims) == ["host.gc"]
    assert on_cpu is not None and sorted(on_cpu.claims) == ["caches", "host.gc"]


@pytest.mark.parametrize("refused", ["", "clocks drift"])
def test_ranks_that_were_not_compared_make_no_plan_surely_bad(refused: str, tmp_path: Path) -> None:
    job = read_job([causes.heavy_plan(900.0).write(tmp_path / f"rank{number}.json.gz") for number in range(2)])
    assert job.comparison is not None
    job = dataclasses.replace(job, comparison=dataclasses.replace(job.comparison, refused=refused))
    finding = found(diagnose_job(job), "communication-heavy-plan")
    assert finding is not None and (finding.lower_ns == 0) == bool(refused)
    assert any("could not be compared" in line for line in finding.evidence) == bool(refused)


def test_idle_that_two_findings_of_one_cause_claim_is_explained_once(tmp_path: Path) -> None:
    bare = diagnosed(tmp_path, causes.saving(""))
    outer = Finding("a", "a", {"idle.host": bare.wall_ns // 8}, 0, bare.wall_ns, (), "", "pack")
    inner = dataclasses.replace(outer, name="b", within="a", claims={"idle.host": bare.wall_ns // 16})
    alone = dataclasses.replace(bare, findings=(outer,)).unexplained
    assert bare.unexplained - alone == pytest.approx(1 / 8, abs=1e-6)
    assert dataclasses.replace(bare, findings=(outer, inner)).unexplained == alone


def test_every_symptom_is_on_a_finding_that_real_inputs_reach() -> None:
    """Each is tested with its own input; here no symptom may be without one."""
    source = "".join(path.read_text() for path in Path(findings.__path__[0]).glob("*.py"))
    source += Path(compare.__file__).read_text()
    for symptom in SYMPTOMS:
        assert f'"{symptom}"' in source, symptom
