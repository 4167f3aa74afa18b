"""Rows as other people write them: every one is scored by a stated rule, or says in a line why it is not."""

from __future__ import annotations

import csv
import random
from pathlib import Path

import pytest

from headway.account.errors import UserError
from headway.cli.main import _join_commands, _run
from headway.plan.cluster import devices, find_device
from headway.plan.device_names import match_device
from headway.plan.hybrid import hybrid_shape
from headway.plan.row_model import row_model
from headway.plan.row_rules import precision_of, recompute_of
from headway.plan.row_values import number
from headway.plan.rows import Case, Unscored, read_cases
from headway.plan.validate import validate

GOOD = {
    "source": "acme/train@1 README", "model": "Llama3-8B", "family": "dense", "params_total": "8030000000.0",
    "params_active": "8030000000.0", "layers": "32", "hidden": "4096", "ffn_hidden": "14336", "heads": "32", "kv_heads": "8",
    "vocab": "128256", "seq_len": "4096", "gpu": "H100-SXM-80GB", "gpus": "64", "gpus_per_node": "8", "interconnect": "", "dp": "",
    "fsdp": "", "tp": "2", "pp": "1", "cp": "1", "ep": "", "vpp": "", "micro_batch": "1", "global_batch": "128",
    "precision": "bf16", "recompute": "", "step_time_s": "1.4", "tokens_per_s_per_gpu": "", "tflops_per_gpu": "",
    "flops_convention": "", "notes": "", "row_id": "A1", "mem_gb": "", "flag": "", "role": "fit",
}  # fmt: skip
NO_MODEL = {"layers": "", "hidden": "", "ffn_hidden": "", "heads": "", "kv_heads": "", "vocab": ""}


def read(path: Path, *rows: dict[str, str]) -> tuple[list[Case], list[Unscored]]:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(GOOD))
        writer.writeheader()
        writer.writerows(rows)
    return read_cases(path)


def one(tmp_path: Path, **change: str) -> Case:
    cases, unscored = read(tmp_path / "rows.csv", {**GOOD, **change})
    assert not unscored, unscored[0].reason
    return cases[0]


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("NVIDIA H100 80GB HBM3", "H100-SXM-80GB"), ("H100-80GB-HBM3", "H100-SXM-80GB"), ("H100 SXM5", "H100-SXM-80GB"),
        ("8xH100", "H100-SXM-80GB"), ("DGX H100", "H100-SXM-80GB"), ("H100 PCIe", "H100-PCIe-80GB"),
        ("H100 NVL", "H100-NVL-94GB"), ("H100-SXM-64GB", "H100-SXM-80GB"), ("H200-141GB-HBM3e", "H200-SXM-141GB"),
        ("GB200", "GB200-NVL72"), ("GB200 NVL72", "GB200-NVL72"), ("gb300", "GB300-NVL72"), ("B300", "B300-SXM-288GB"),
        ("NVIDIA B200", "B200-SXM-180GB"), ("B200-192GB", "B200-SXM-180GB"), ("MI300X", "MI300X"),
        ("AMD Instinct MI300X OAM", "MI300X"), ("MI325X", "MI325X"), ("MI355X-288GB", "MI355X"), ("MI250X", "MI250X"),
        ("A100-40G", "A100-SXM-40GB"), ("A100 SXM4 40GB", "A100-SXM-40GB"), ("A100-SXM4-80GB", "A100-SXM-80GB"),
        ("A100-PCIE-40GB", "A100-PCIe-40GB"), ("a100", "A100-SXM-80GB"), ("A800-SXM4-80GB", "A800-SXM-80GB"), ("H20", "H20-96GB"),
        ("H800", "H800-SXM-80GB"), ("Tesla V100-SXM3-32GB", "V100-SXM2-32GB"), ("V100-16G", "V100-SXM2-16GB"),
        ("TPU v5p", "TPU-v5p"), ("v5e", "TPU-v5e"), ("TPUv6e", "TPU-v6e"), ("trn2", "Trainium2"), ("Gaudi 3", "Gaudi3"),
        ("NVIDIA GeForce RTX 4090", "RTX4090"), ("A10G", "A10G-24GB"), ("L4", "L4"), ("L40S", "L40S"), ("Ascend 910B", "Ascend-910B"),
    ],
)  # fmt: skip
def test_devices_by_any_name(name: str, device: str) -> None:
    assert find_device(name).name == device


def test_every_device_is_found_by_its_own_name_and_none_by_a_neighbours() -> None:
    known = {name: device.memory for name, device in devices().items()}
    assert all(find_device(name).name == name for name in known)
    for stranger in ("", "Z900", "H101", "cpu", "p4d.24xlarge", "xh100", "MI999X"):
        assert match_device(stranger, known) is None


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("seq_len", "1,024", 1024), ("seq_len", "8k", 8192), ("seq_len", "8 192 tokens", 8192), ("global_batch", "1k", 1024),
        ("vocab", "128k", 128_000), ("vocab", "32.001k", 32_001), ("gpus", "1_024 GPUs", 1024), ("tflops_per_gpu", "~380", 380), ("tflops_per_gpu", "380 TFLOP/s", 380),
        ("mem_gb", "80 GB", 80), ("mem_gb", "61440 MiB", 60), ("params_total", "1e12", 1e12), ("params_total", "7.5B", 7.5e9),
        ("tokens_per_s_per_gpu", "12.5k tok/s", 12_500), ("tokens_per_s_per_gpu", "12,500", 12_500), ("params_total", "1,234,567.5", 1234567.5),
        ("step_time_s", "350 ms", 0.35), ("step_time_s", "1.4s", 1.4), ("step_time_s", ".5", 0.5), ("step_time_s", "1e-1", 0.1),
        ("step_time_s", "", None), ("step_time_s", "n/a", None), ("fsdp", "0", None),
    ],
)  # fmt: skip
def test_cells_as_people_write_them(key: str, text: str, value: float | None) -> None:
    assert number({key: text}, key) == (value if value is None else pytest.approx(value, rel=1e-12))


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("step_time_s", "12,5"), ("step_time_s", "0,25"), ("step_time_s", "0,250"), ("seq_len", "1,28,256"), ("seq_len", "12_5"),
        ("step_time_s", "3m"), ("step_time_s", "5k s"), ("step_time_s", "350 GB"), ("mem_gb", "80k"), ("global_batch", "4M tokens"),
        ("tp", "8 GB"), ("tokens_per_s_per_gpu", "1,2345"), ("gpus", "64 8"), ("params_total", "7 x"),
    ],
)  # fmt: skip
def test_cells_that_could_be_read_as_another_number_are_refused(key: str, text: str) -> None:
    with pytest.raises(ValueError, match=f"column {key}: '{text}' is not"):
        number({key: text}, key)


def test_a_comma_in_a_table_of_semicolons_is_not_guessed_at(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    head = "model;gpu;gpus;seq_len;step_time_s"
    path.write_text(f"{head}\nLlama3-8B;H100;8;8,192;2.125\nLlama3-8B;H100;8;8192;2,125\nLlama3-8B;H100;8;8192;2,1\n")
    cases, unscored = read_cases(path)
    assert [case.step_s for case in cases] == [2.125] and cases[0].work.seq == 8192
    assert "'2,125' has a decimal comma or sets off thousands" in unscored[0].reason
    assert "'2,1' is not a positive number; write decimals with a point" in unscored[1].reason


@pytest.mark.parametrize(
    ("text", "precision"),
    [
        ("MXFP8", "fp8"), ("FP8-CS", "fp8"), ("float8 rowwise", "fp8"), ("NVFP4", "fp4"), ("mxfp4", "fp4"), ("bfloat16", "bf16"),
        ("BF16", "bf16"), ("mixed fp16", "fp16"), ("half", "fp16"), ("", "bf16"), ("int1", "bf16"), ("tf32", "bf16"),
    ],
)  # fmt: skip
def test_precisions(text: str, precision: str) -> None:
    assumed: list[str] = []
    assert precision_of({"precision": text}, "acme", find_device("H100"), assumed) == precision
    assert bool(assumed) == (text in ("", "int1", "tf32"))


def test_a_guessed_precision_is_one_that_the_device_has(tmp_path: Path) -> None:
    for gpu in ("V100-SXM2-16GB", "T4"):
        case = one(tmp_path, gpu=gpu, precision="", tp="8")
        assert case.group[2] == "fp16" and "precision fp16" in case.assumed
    _, (refused,) = read(tmp_path / "rows.csv", {**GOOD, "gpu": "V100", "precision": "bf16"})
    assert refused.reason == "V100-SXM2-32GB has no bf16 units; it has fp16 (column precision)"


def test_recompute_in_any_words() -> None:
    found = {
        text: recompute_of({"recompute": text})
        for text in ("full", "Selective", "none", "no", "yes", "SAC", "block", "?", "")
    }
    assert found == {
        "full": "full", "Selective": "selective", "none": "none", "no": "none", "yes": "full", "SAC": "selective",
        "block": "full", "?": None, "": None,
    }  # fmt: skip


def test_blank_sequence_and_batch_follow_from_the_speed_or_a_stated_rule(tmp_path: Path) -> None:
    tokens = 128 * 4096
    both = {"step_time_s": "1.4", "tokens_per_s_per_gpu": str(tokens / 1.4 / 64)}
    assert one(tmp_path, **both, seq_len="").work.seq == 4096
    assert one(tmp_path, **both, global_batch="").work.global_batch == 128
    assert one(tmp_path, seq_len="").work.seq == 2048
    assert one(tmp_path, global_batch="").work.global_batch == 32 * 8
    assert one(tmp_path, global_batch="", notes="grad_accum 4; x").work.global_batch == 32 * 4
    only_rate = one(tmp_path, step_time_s="", tokens_per_s_per_gpu="6000")
    assert only_rate.step_s == pytest.approx(tokens / 6000 / 64)
    assert one(tmp_path, gpus="", dp="32").cluster.gpus == 64
    assert any("seq_len 2048" in text for text in one(tmp_path, seq_len="").assumed)


def test_a_plan_that_is_not_published_is_the_best_one_and_is_not_called_complete(tmp_path: Path) -> None:
    case = one(tmp_path, tp="", pp="", micro_batch="")
    assert any(text.startswith("plan not published") for text in case.assumed) and not case.complete
    sharded = one(tmp_path, tp="", pp="", fsdp="64")
    assert (sharded.layout.tp, sharded.layout.pp, sharded.layout.zero) == (1, 1, 3)
    assert one(tmp_path, tp="", pp="4").layout.pp == 4
    assert one(tmp_path, fsdp="yes").layout.zero == 3
    uneven = one(tmp_path, gpus="65")
    assert uneven.layout.dp == 32 and any("does not divide 65" in text for text in uneven.assumed)


def test_context_and_sequence_parallel_are_read(tmp_path: Path) -> None:
    assert one(tmp_path, cp="4").layout.cp == 4
    path = tmp_path / "rows.csv"
    path.write_text("Model,GPU,GPUs,seq len,TP,PP,SP,global batch,step time s\nLlama3-8B,H100,16,8192,1,1,2,16,1.0\n")
    (case,), _ = read_cases(path)
    assert case.layout.cp == 2 and case.step_s == 1.0  # names of columns in any case, with spaces
    assert one(tmp_path, notes="no sequence parallel").layout.sequence_parallel is False


def test_adapters_are_told_by_any_name(tmp_path: Path) -> None:
    for change in ({"notes": "QLoRA r=16"}, {"notes": "PEFT"}, {"model": "Llama3-8B LoRA"}, {"family": "dense-lora"}):
        assert one(tmp_path, **change).work.lora, change
    for change in ({"notes": "explorations"}, {"notes": "SFT"}, {}):
        assert not one(tmp_path, **change).work.lora


def test_mixtures_without_a_known_name_or_a_stated_ep(tmp_path: Path) -> None:
    unknown = {
        "model": "Secret-MoE", "family": "moe", "params_total": "46.7e9", "params_active": "12.9e9", "vocab": "32000",
    }  # fmt: skip
    case = one(tmp_path, **unknown)
    mlp = case.work.shape.layers[0].mlp
    assert mlp is not None and (mlp.experts, mlp.top_k) == (8, 2)  # Mixtral's, from its parameters
    assert case.layout.ep == 8 and any(text == "ep 8" for text in case.assumed)
    assert one(tmp_path, **unknown, fsdp="64").layout.ep == 1
    assert one(tmp_path, **unknown, ep="4").layout.ep == 4
    none = one(tmp_path, **{**unknown, **NO_MODEL})
    assert none.work.shape.parameters == pytest.approx(12.9e9, rel=0.15)  # a dense decoder of the active parameters


def test_hybrids_are_known_by_name_and_match_transformers(tmp_path: Path) -> None:
    unnamed = {**NO_MODEL, "params_total": "", "params_active": ""}
    case = one(tmp_path, **unnamed, model="Nemotron_3_Nano", family="hybrid-moe")
    assert case.work.shape.parameters == 31_577_937_344  # transformers 5.24's num_parameters() of that config
    large = one(tmp_path, **unnamed, model="Nemotron-H-56B-Base", family="hybrid").work.shape
    assert large.parameters == pytest.approx(56e9, rel=0.02)
    strange = one(tmp_path, model="Jamba-9B", family="hybrid")
    assert any("a dense decoder of its active parameters" in text for text in strange.assumed)
    written = {"layers_block_type": ["mamba", "moe", "attention", "mlp"] * 2, "hidden_size": 512, "vocab_size": 1024, "num_attention_heads": 8,
               "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 256, "moe_intermediate_size": 128, "n_routed_experts": 16,
               "num_experts_per_tok": 4, "moe_shared_expert_intermediate_size": 256, "mamba_num_heads": 16, "ssm_state_size": 64, "n_groups": 4}  # fmt: skip
    assert hybrid_shape(written).parameters == 11_327_072  # as transformers' meta model of it
    assert hybrid_shape({**written, "moe_latent_size": 96}).parameters == 8_115_808


def test_sizes_from_parameters_keep_them() -> None:
    for total in (1.3e8, 7e9, 52e9, 5.3e11):
        shape, assumed = row_model({"model": "GPT2", "params_total": str(total), **NO_MODEL})
        assert shape.parameters == pytest.approx(total, rel=0.5 if total < 1e9 else 0.1)
        assert any("from params_total" in text for text in assumed)


def test_names_with_makers_releases_and_endings() -> None:
    for name, parameters in (
        ("meta-llama/Meta-Llama-3-70B", 70.55e9), ("Llama-3.1-70B-Instruct", 70.55e9), ("Llama 3.3 70B", 70.55e9), ("DeepSeek V3", 671e9),
        ("DeepSeek-V2-Lite", 15.7e9), ("Qwen3_30B_A3B", 30.5e9), ("NVIDIA Nemotron-3-Nano-30B-A3B", 31.6e9), ("GLM-4.5-Air", 107e9),
        ("Llama4-Scout-17B-16E", 108e9), ("Mixtral-8x7B-v0.1", 46.7e9), ("gpt_oss_120b", 117e9), ("Kimi K2", 1.03e12), ("Qwen3-VL-30B-A3B-Instruct", 30.5e9),
        ("Qwen3-Next-80B-A3B", 79.7e9),
    ):  # fmt: skip
        shape, _ = row_model({"model": name.split("/")[-1], "family": "moe", **NO_MODEL})
        assert shape.parameters == pytest.approx(parameters, rel=0.02), name


def test_random_oddities_never_crash_and_always_say_something(tmp_path: Path) -> None:
    """Rows with several oddities at once: scored with a finite time, or refused with a reason."""
    odd = {
        "gpu": ["H100-80GB-HBM3", "GB200", "B300", "MI300X", "A100-40G", "H20", "TPU v5p", "", "Z900"],
        "precision": ["fp8", "MXFP4", "NVFP4", "int8", "", "BF16+FP8"], "recompute": ["", "full", "sel", "?"],
        "seq_len": ["", "8k", "131072"], "global_batch": ["", "1", "1,024", "7"], "tp": ["", "8", "3"], "pp": ["", "2", "5"],
        "cp": ["", "8"], "ep": ["", "8", "7"], "model": ["Nemotron-H-8B", "Mixtral-8x22B", "Foo"], "family": ["dense", "moe", "hybrid-moe", "mamba"],
        "hidden": ["", "4096", "5000"], "layers": ["", "61"], "params_active": ["", "3e9"], "params_total": ["", "30e9"], "gpus": ["8", "64", "72", "100"],
        "fsdp": ["", "8", "full"], "notes": ["", "LoRA", "OOM", "grad_accum 2", "zero stage 3"], "micro_batch": ["", "4"], "vpp": ["", "3"],
        "step_time_s": ["", "2.0"], "tokens_per_s_per_gpu": ["", "5000"], "source": ["", "hf/trl", "torchtune", "AMD Primus", "x y z"],
    }  # fmt: skip
    draw = random.Random(0)
    rows = [
        {**GOOD, **{key: draw.choice(odd[key]) for key in draw.sample(sorted(odd), 5)}, "row_id": f"R{n}"}
        for n in range(250)
    ]
    _, unscored = read(tmp_path / "odd.csv", *rows)
    found = validate(tmp_path / "odd.csv")
    assert len(found.scored) + len(found.unscored) == 250
    assert all(0 < item.predicted_s < 1e9 for item in found.scored)
    assert all(item.reason and "\n" not in item.reason for item in unscored)
    assert len(found.scored) > 150


def test_every_device_says_where_its_facts_are_from_or_that_it_does_not_know() -> None:
    for name, device in devices().items():
        assert len(device.source) > 15, name
        assert device.price is None or len(device.price_source) > 15, name


@pytest.mark.parametrize("sign", [",", ";", "\t"])
def test_separators_of_spreadsheets(tmp_path: Path, sign: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(
        sign.join(("model", "gpu", "gpus", "notes")) + "\n" + sign.join(("Llama3-8B", "H100", "8", "x")) + "\n"
    )
    assert read_cases(path)[0][0].cluster.gpus == 8


def test_every_row_is_judged_or_left_out_once_with_its_reason_and_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {**GOOD, "row_id": "ok"}, {**GOOD, "row_id": "dev", "gpu": "Z900"}, {**GOOD, "row_id": "speed", "step_time_s": ""},
        {**GOOD, "row_id": "flag", "flag": "weak"}, {**GOOD, "row_id": "oom", "notes": "OOM here", "step_time_s": ""},
    ]  # fmt: skip
    read(tmp_path / "rows.csv", *rows)
    found = validate(tmp_path / "rows.csv")
    left = [row for ids in found.left_out().values() for row in ids]
    assert sorted(left + [one.case.row_id for one in found.judged()]) == sorted(row["row_id"] for row in rows)
    _join_commands()
    assert _run(["plan", "validate", str(tmp_path / "rows.csv")], debug=False) == 0
    said = capsys.readouterr().out
    assert "rows: 5 read, 1 judged, 1 skipped because they cannot be predicted, 3 predicted but not judged" in said
    assert "device 'Z900' is unknown" in said and "(dev in line 3)" in said and "flagged: weak (flag)" in said


def test_a_file_without_rows_is_refused(tmp_path: Path) -> None:
    for text, says in (("", "empty"), ("model,gpu,gpus\n", "a header and no rows")):
        (tmp_path / "rows.csv").write_text(text)
        with pytest.raises(UserError, match=says):
            validate(tmp_path / "rows.csv")
