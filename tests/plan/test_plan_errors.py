"""A user's mistakes: one line that names the key and the nearest valid values, exit code 2, never a traceback."""

from __future__ import annotations

import json
import random
import string
from pathlib import Path

import pytest
import yaml

from headway.cli.main import _run
from headway.plan.workload import model_presets
from plan_line import joined, refused  # noqa: F401 (joined is a fixture)

CONFIG = dict(model_presets()["llama3-8b"])
BASE = (
    "--model",
    "llama3-8b",
    "--cluster",
    "H100x8",
    "--fix",
    "pp=1,micro_batch=1,cp=1,zero=1,vpp=1,recompute=full",
    "--global-batch",
    "8",
)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--cluster", "H10Ox8"), "device 'H10O' is unknown; nearest: "),
        (("--cluster", "H100"), "say device and number, e.g. H100x1024"),
        (("--cluster", "H100x0"), "say device and number"),
        (("--cluster", "none.yaml"), "no such file"),
        (("--fix", "tp=3"), "tp=3 does not divide 32 heads; nearest: 1, 2, 4"),
        (("--fix", "pp=33"), "pp=33 is more than the model's 32 layers"),
        (("--fix", "ep=8"), "ep=8 needs a mixture of experts, and llama3-8b is none; nearest: 1"),
        (("--fix", "tp=16"), "the given degrees take 16 GPUs, not a divisor of 8; nearest: "),
        (("--fix", "micro_batch=3"), "does not divide global_batch 8"),
        (("--fix", "tq=2"), "no such key; nearest: tp"),
        (("--fix", "recompute=ful"), "nearest: full"),
        (("--fix", "zero=4"), "zero=4: give 0 or 1 or 2 or 3"),
        (("--fix", "tp=2,tp=4"), "tp is given twice"),
        (("--fix", "tp=two"), "tp=two: two is not a whole number"),
        (("--fix", "flash=maybe"), "give true or false"),
        (("--model", "llama3-7b"), "nearest presets: "),
        (("--model", "llama3.1-405b"), "no plan fits: the smallest"),
        (("--precision", "fp9"), "nearest: fp"),
        (("--objective", "speed"), "nearest: "),
        (("--fix", "recompute_share=2"), "recompute_share=2: 2 is not a share above 0 and at most 1"),
        (("--fix", "optimizer_bits=7"), "optimizer_bits=7: give 8 or 32"),
        (("--fix", "micro_batch=1e99"), "micro_batch=1e99: 1e99 is not a whole number"),
        (("--stack", "nemo"), "--stack 'nemo' needs --calibrate"),
        (("--seq", "0"), "'--seq': 0 is not"),
        (("--global-batch", "99999999999999"), "'--global-batch': 99999999999999 is not"),
        (("--cluster", "H100x99999999999"), "at most"),
        (("--global-batch", "-4"), "'--global-batch': -4 is not"),
        (("--tokens", "-1"), "'--tokens': -1 is not"),
        (("--tokens", "nan"), "'--tokens': nan is not"),
        (("--tokens", "1e12", "--deadline", "soon"), "--deadline 'soon'"),
        (("--tokens", "1e12", "--budget", "-5"), "'--budget': -5 is not"),
        (("--tokens", "1e12", "--price", "0"), "'--price': 0 is not"),
        (("--tokens", "1e12", "--ettr", "2"), "'--ettr': 2 is not a share"),
        (("--tokens", "1e12", "--rate", "llama4"), "known: "),
        (("--tokens", "1e12", "--power-share", "0"), "'--power-share': 0 is not a share"),
        (("--budget", "5"), "need --tokens"),
        (("--calibrate", "no.json"), "no such file"),
        (("--mean-square", "-1"), "'--mean-square': -1 is not"),
        (("--top", "0"), "Invalid value for '--top'"),
    ],
)
def test_mistakes_on_the_command_line(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], says: str
) -> None:
    assert says in refused(capsys, *BASE, *arguments)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hidden_size": None}, "key 'hidden_size' is missing"),
        ({"num_hidden_layers": 0}, "key 'num_hidden_layers' is 0"),
        ({"num_attention_heads": "many"}, "key 'num_attention_heads' is 'many'"),
        ({"model_type": "lama"}, "lama"),
        ({"model_type": None}, "model_type"),
        ({"vocab_size": -1}, "key 'vocab_size' is -1"),
    ],
)
def test_mistakes_in_a_models_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict, says: str
) -> None:
    content = {key: value for key, value in {**CONFIG, **change}.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert says in refused(capsys, *BASE, "--model", str(tmp_path))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("gpus: 8", "key 'device' is missing"),
        ("device: H100", "key 'gpus' is missing"),
        ("device: H100\ngpus: many", "key 'gpus' is 'many'"),
        ("device: H100\ngpus: 8\nlink_gb: 3", "key 'link_gb' is unknown; nearest: link_gbs"),
        ("device: H100\ngpus: 8\nprice_per_hour: -1", "key 'price_per_hour' is -1"),
        ("device: H100\ngpus: 0.5", "key 'gpus' is 0.5"),
        ("device: H100\ngpus: 8\nmemory_gb: 81920", "key 'memory_gb' is 81920; give GB from 1 to 10,000"),
        ("device: H100\ngpus: 8\nbf16_tflops: 989e12", "give TFLOP/s from 0.001 to 200,000"),
        ("device: H100\ngpus: 8\nprice_per_hour: 1e20", "give dollars a GPU and hour from 0.001 to 1,000"),
        ("device: H100\ngpus: 8\noversubscription: 0.25", "give a ratio (1: full bisection) from 1 to 1,000"),
        ("device: H100\ngpus: 8\ngpus_per_node: 100000", "give a whole number of GPUs from 1 to 1,024"),
        ("device: H100\ngpus: 8\nrail: -1", "key 'rail' is -1; give a whole number of GPUs from 0 to 10,000,000"),
        ("- H100", "give a mapping"),
        ("{", "not YAML"),
        ("", "give a mapping"),
    ],
)
def test_mistakes_in_a_clusters_file(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, says: str) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    assert says in refused(capsys, *BASE, "--cluster", str(path))


def test_files_that_are_not_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "c.yaml").write_bytes(b"\xff\xfe\x00\x01")
    assert "not JSON" in refused(capsys, *BASE, "--model", str(tmp_path / "config.json"))
    assert "c.yaml" in refused(capsys, *BASE, "--cluster", str(tmp_path / "c.yaml"))


WORDS = ["", "0", "-1", "1", "2", "3", "8", "7", "1e400", "nan", "inf", "99999999999999999999", "H100", "tp=2", "tp=2,pp=2", "zero=3", "dp=0", "=", ",",
         "full", "30d", "d", "x", "H100x8", "8xA100", "H100x3", "H100x99999999", "llama3-8b", "/", ".", "\0", "ü", "a" * 300, "1,2", "8,16,…,64", "--", "{}"]  # fmt: skip
OPTIONS = ["--seq", "--global-batch", "--precision", "--fix", "--objective", "--tokens", "--deadline", "--budget", "--price", "--rate", "--ettr",
           "--mean-square", "--trained-share", "--cluster", "--model", "--top", "--stack", "--power-share"]  # fmt: skip


def fuzzed(draw: random.Random) -> list[str]:
    """A command line with a few values replaced by nonsense; the search stays short."""
    arguments = list(BASE)
    for _ in range(draw.randint(1, 3)):
        arguments += [
            draw.choice(OPTIONS),
            draw.choice(WORDS) if draw.random() < 0.8 else "".join(draw.choices(string.printable, k=6)),
        ]
    kind = draw.choice(["", "", "explain", "sweep", "goodput", "shrink"])
    if kind in ("explain", "sweep"):
        arguments = [word for pair in zip(arguments[::2], arguments[1::2], strict=True) for word in pair
                     if pair[0] in ("--model", "--cluster", "--seq", "--global-batch", "--precision", "--fix")]  # fmt: skip
    if kind == "sweep":
        arguments += ["--gpus", draw.choice(["8", "8,16", "x", "16,8,…,2", "0", ""])]
    if kind == "goodput":
        arguments = [
            draw.choice(["--gpus", "--days", "--save", "--lag", "--rate", "--tier", "--interval", "--step"]),
            draw.choice(WORDS),
        ]
    if kind == "shrink":
        arguments = [
            "--target",
            "llama3-8b",
            *BASE[2:],
            "--gpus",
            draw.choice(["1", "2", "3", "8", "0", "x"]),
            "--lr",
            draw.choice(WORDS),
        ]
    return [kind, *arguments] if kind else arguments


def file_of(draw: random.Random, folder: Path) -> list[str]:
    """A model's or a cluster's file with a few keys replaced, removed or added."""
    values = [None, 0, -1, 1, 2, 7, 1e30, 2**70, "x", "", True, [], [1], {}, {"a": 1}, 0.5, float("nan")]
    if draw.random() < 0.5:
        content = dict(
            draw.choice(
                [
                    CONFIG,
                    model_presets()["mixtral-8x7b"],
                    model_presets()["deepseek-v2-lite"],
                    model_presets()["nemotron-3-nano"],
                ]
            )
        )
        for _ in range(draw.randint(1, 3)):
            content[draw.choice([*content, "text_config", "num_experts", "layer_types"])] = draw.choice(values)
        path = folder / "config.json"
        path.write_text(json.dumps(content) if draw.random() < 0.9 else json.dumps(content)[: draw.randint(0, 40)])
        return [*BASE, "--model", str(path), "--fix", "pp=1,micro_batch=1,cp=1,ep=1,zero=1,recompute=full"]
    keys = [
        "device",
        "gpus",
        "gpus_per_node",
        "domain",
        "inter_node_gbs",
        "rail",
        "memory_gb",
        "bf16_tflops",
        "price_per_hour",
        "storage_gbs",
        "odd",
    ]
    content = {
        "device": "H100",
        "gpus": 8,
        **{draw.choice(keys): draw.choice(values) for _ in range(draw.randint(1, 3))},
    }
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump(content) if draw.random() < 0.9 else "".join(draw.choices(":-{}[] \n&*!a1", k=20)))
    return [*BASE, "--cluster", str(path), "--tokens", "1e10"]


def test_250_odd_inputs_end_in_an_answer_or_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draw = random.Random(6)
    codes = []
    for number in range(250):
        arguments = file_of(draw, tmp_path) if number % 2 else fuzzed(draw)
        code = _run(["plan", *arguments], debug=False)  # anything but an exit code is a traceback here
        captured = capsys.readouterr()
        assert code in (0, 1, 2), (arguments, code)
        assert "Traceback" not in captured.err
        if code == 2:
            assert captured.err.startswith("headway: ") and captured.err.count("\n") == 1, (arguments, captured.err)
        codes.append(code)
    assert codes.count(2) > 60 and codes.count(0) > 20  # the fuzz reaches both


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--seq", "nan"), "'--seq'"),
        (("--top", "0"), "'--top'"),
        (("--tpo", "3"), "No such option: --tpo"),
        (("frobnicate",), "No such command 'frobnicate'"),
    ],
)
def test_usage_errors_are_one_line_with_the_way_to_help(
    arguments: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(capsys, *arguments)
    assert says in said and "`headway plan --help`" in said


@pytest.mark.parametrize("factor", ["NaN", "-1", "0", "true", '"x"', "null", "1e9", "[]"])
def test_factors_that_are_no_positive_number_are_refused(
    factor: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "factors.json"
    path.write_text(
        f'{{"groups": [{{"stack": "x", "device": "H100-SXM-80GB", "precision": "bf16", "factor": {factor}}}]}}'
    )
    assert "factors.json: not what" in refused(capsys, *BASE, "--calibrate", str(path))
    for text, says in (
        ("[]", "'groups' is missing"),
        ('{"x": 1}', "'groups' is missing"),
        ('{"groups": [3]}', "'stack' is"),
        ("[" * 9**5, "not JSON"),
    ):
        path.write_text(text)
        assert says in refused(capsys, *BASE, "--calibrate", str(path))


def test_what_cannot_be_written_is_said_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("x")
    bench = tmp_path / "bench.json"
    bench.write_text('[{"dtype": "bf16", "flops": 1e15}]')
    where = str(blocked / "out")
    assert "--html" in refused(capsys, *BASE, "--html", where)
    assert "--out" in refused(capsys, "calibrate", str(bench), "--cluster", "H100x8", "--out", where)
    shrink = ("shrink", "--target", "llama3-8b", "--cluster", "H100x64", "--gpus", "8")
    assert "--write-config" in refused(capsys, *shrink, "--write-config", where)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--fix", "etp=4"), "etp=4 does not divide a model without experts; nearest: 1"),
        (("--model", "mixtral-8x7b", "--fix", "etp=3"), "etp=3 does not divide an expert's width of 14336; nearest: 1, 2, 4"),
        (("--model", "mixtral-8x7b", "--fix", "tp=2,dp=32,ep=8,etp=16,micro_batch=1"), "ep·etp = 128 does not divide"),
        (("--global-batch", "5", "--fix", "pp=1,tp=1"), "does not divide global_batch 5"),
        (("--cluster", "%%x8"), "nearest: A100, H100, H200, B200, GB200, MI300X"),
        (("--model", "zzzz"), "nearest presets: llama3-8b"),
    ],
)  # fmt: skip
def test_reasons_name_what_stands_in_the_way(
    arguments: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert says in refused(capsys, "--model", "llama3-8b", "--cluster", "H100x64", *arguments)


def test_a_folder_or_a_config_that_names_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "a folder without config.json" in refused(capsys, "--model", str(tmp_path), "--cluster", "H100x8")
    (tmp_path / "config.json").write_text('{"hidden_size": 64}')
    assert "config.json: key 'model_type' is missing" in refused(
        capsys, "--model", str(tmp_path), "--cluster", "H100x8"
    )
    cluster = tmp_path / "c.yaml"
    cluster.write_text("device: H100\ngpus: 99999999999\n")
    assert "key 'gpus' is 99999999999; give a whole number of GPUs from 1 to 10,000,000" in refused(
        capsys, "--model", "llama3-8b", "--cluster", str(cluster)
    )
