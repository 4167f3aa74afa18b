"""A wrong key or value is refused in one line: the place, the key, what was given, what is allowed."""

from __future__ import annotations

import pytest

from headway.config.names import nearest
from headway.config.problems import as_user_error
from run_files import LEAST, load, refusal, without


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("  seqlen: 4", "run.yaml:5: unknown key 'data.seqlen'; did you mean 'data.seq_len'?"),
        ("seq_len: 4", "run.yaml:5: unknown key 'seq_len'; did you mean 'data.seq_len'?"),
        ("lr: 4", "run.yaml:5: unknown key 'lr'; did you mean 'optim.lr'?"),
        ("optimizer: {}", "run.yaml:5: unknown key 'optimizer'; did you mean 'optim'?"),
        ("learning_rate: 4", "run.yaml:5: unknown key 'learning_rate'; did you mean 'optim.lr'?"),
        ("max_grad_norm: 1", "run.yaml:5: unknown key 'max_grad_norm'; did you mean 'optim.clip_norm'?"),
        ("qwertyuiop: 4", "run.yaml:5: unknown key 'qwertyuiop'; `headway train --show` lists all keys"),
        (
            "data.seq_len: 4",
            "run.yaml:5: unknown key 'data.seq_len': in a file, write 'seq_len' inside the section 'data' "
            "(dots are for overrides)",
        ),
        ("<<: {seed: 1}", "run.yaml:5: unknown key '<<'; `headway train --show` lists all keys"),
    ],
)  # fmt: skip
def test_unknown_keys_get_their_line_and_the_nearest_name(line: str, message: str) -> None:
    assert refusal(text=LEAST.replace("train:", f"{line}\ntrain:")) == message


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("data.seqlen", "data.seq_len"),
        ("model.lora.rnk", "model.lora.rank"),
        ("checkpoint.evry", "checkpoint.every"),
        ("optim.learning_rate", "optim.lr"),
        ("paralel.fsdp", "parallel.fsdp"),
        ("fsdp", "parallel.fsdp"),
        ("train.z_loss", "train.loss.z_loss"),
        ("xyz.qqq", None),
    ],
)
def test_nearest_name(wrong: str, right: str | None) -> None:
    assert nearest(wrong) == right


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.seqlen=4", "unknown key 'data.seqlen'; did you mean 'data.seq_len'?"),
        ("data.seq_len=long", "data.seq_len: given long; allowed: a whole number ≥ 2"),
        ("data.seq_len=true", "data.seq_len: given true (a truth value); allowed: a whole number ≥ 2"),
        ("data.seq_len=1.5", "data.seq_len: given 1.5; allowed: a whole number ≥ 2"),
        ("data.seq_len=null", "data.seq_len: given null; allowed: a whole number ≥ 2"),
        ("data.seq_len=", "data.seq_len: given null; allowed: a whole number ≥ 2"),
        ("data.seq_len=[1,2]", "data.seq_len: given [1, 2]; allowed: a whole number ≥ 2"),
        ("data.overlong=cut", "data.overlong: given cut; allowed: truncate, split or drop"),
        ("data.max_bad=1.5", "data.max_bad: given 1.5; allowed: a number ≥ 0, ≤ 1"),
        ("optim.lr=-1e-3", "optim.lr: given -0.001; allowed: a number > 0"),
        ("optim.lr=.nan", "optim.lr: given .nan; allowed: a number > 0"),
        ("optim.lr=.inf", "optim.lr: given .inf; allowed: a number > 0"),
        ("optim.clip_norm=0", "optim.clip_norm: given 0; allowed: a number > 0 or null"),
        ("optim.betas=[0.9]", "optim.betas: given [0.9]; allowed: two numbers in [0, 1), e.g. [0.9, 0.95]"),
        ("optim.betas=[0.9, 2]", "optim.betas: given [0.9, 2]; allowed: two numbers in [0, 1), e.g. [0.9, 0.95]"),
        ("deterministic=maybe", "deterministic: given maybe; allowed: true or false"),
        ("deterministic=2", "deterministic: given 2; allowed: true or false"),
        ("preset=quick", "preset: given quick; allowed: none, naive or fast"),
        ("model.recompute=null", "model.recompute: given null; allowed: auto, none, selective, full, or a number of layers"),
        ("model.lora=16", "model.lora is a section; write its keys inside it: rank, alpha, dropout, targets"),
        ("model.lora.targets=[]", "model.lora.targets: the list of modules is empty, so nothing would be trained"),
        ("data=x", "data is a section; write its keys inside it: sources, shards"),
        ("data.sources=[]", "data.sources: given []; allowed: a list of paths or of {path, weight, format}, at"),
        ("data.sources=[{path: a, weight: -3}]", "data.sources[0].weight: given -3; allowed: a number > 0"),
        ("data.sources=[a, {weight: 3}]", "data.sources[1].path is required: File, folder or glob"),
        ("data.sources=[{pth: a}]", "unknown key 'data.sources[0].pth'; did you mean 'data.sources[].path'?"),
        ("data.sources[0].weight=2", "single items of a list cannot be set; give the whole list, data.sources=[…]"),
        ("data.sources=[*.jsonl]", "not valid YAML: while scanning an alias expected alphabetic or numeric character"),
        ("parallel.tp=2", "parallel.tp: given 2 (tensor parallelism is not yet supported; only 1 is allowed"),
        ("parallel.ep=8", "parallel.ep: given 8 (expert parallelism is not yet supported"),
        ("schedule.warmup=1.0", "schedule.warmup: given 1.0 (1.0 could be one step (write 1) or all of the training"),
        ("schedule.warmup=2.5", "schedule.warmup: given 2.5 (not a whole number of steps); allowed: a whole number"),
        ("schedule.warmup=-1", "schedule.warmup: given -1 (negative or not a number)"),
        ("schedule.warmup=soon", "schedule.warmup: given soon (neither a number of steps nor a fraction)"),
        ("version=2", "version: given 2 (this Headway reads format 1; use the version that wrote this"),
        ("name=a/b", "name: given a/b (not a folder name"),
        ("name=..", "name: given .. (not a folder name"),
        ("alerts.to=[{webhook: notaurl}]", "alerts.to[0].webhook: given notaurl (no http:// or https:// address of a host); allowed"),
        ("alerts.to=[{webhook: 'https://'}]", "alerts.to[0].webhook: given https:// (no http:// or https:// address of a"),
        ("alerts.to=[{command: []}]", "alerts.to[0].command: given [] (names no program); allowed: a list of a program"),
        ("alerts.to=[{command: [' ']}]", "alerts.to[0].command: given [' '] (names no program)"),
        ("alerts.to=[{command: [a], faults: [hag]}]", "alerts.to[0].faults: given [hag] (no fault is called 'hag'; did you mean 'hang'?)"),
        ("alerts.to=[{command: [a], faults: [zz]}]", "alerts.to[0].faults: given [zz] (no fault is called 'zz'); allowed: a list of names of faults: hang,"),
        ("checkpoint.allow=[optim.lrr]", "checkpoint.allow: optim.lrr is no key that a resume compares; did you mean optim.lr?"),
        ("checkpoint.allow=[log.every]", "checkpoint.allow: log.every may differ anyway: no resume compares it"),
        ("checkpoint.allow=[content of data]", "checkpoint.allow: content of data is no key that"),
        ("checkpoint.remote.url=notaurl", "checkpoint.remote.url: given notaurl (no URL: it has no protocol://); allowed: a URL like s3://"),
        ("checkpoint.remote.url=s3:/b", "checkpoint.remote.url: given s3:/b (no URL"),
        ("checkpoint.remote.url=nosuch://b", "checkpoint.remote.url: given nosuch://b (no protocol is called nosuch); allowed"),
        ("checkpoint.remote.url=gss://b", "checkpoint.remote.url: given gss://b (no protocol is called gss; did you mean gs?)"),
        ("seed=-1", "seed: given -1; allowed: a whole number ≥ 0, < 2^63"),
    ],
)  # fmt: skip
def test_wrong_values_name_the_override(override: str, message: str) -> None:
    assert refusal(override).startswith(f"override {override}: {message}")


def test_right_addresses_and_permissions_pass() -> None:
    for url in ("s3://b/a", "gs://b", "file:///a", "/a/b", "simplecache::s3://b"):
        load(f"checkpoint.remote.url={url}")
    load("checkpoint.allow=[seed, optim, data.sources, model.lora.rank, code.torch, content of data source 0, eval]")
    load("alerts.to=[{webhook: 'http://h:80/x', faults: [hang, slow rank]}]")


def test_wrong_values_name_their_line() -> None:
    assert refusal(text=LEAST.replace("128", "long")) == (
        "run.yaml:4: data.seq_len: given long; allowed: a whole number ≥ 2"
    )
    text = LEAST.replace("[a.jsonl]", "\n  - a.jsonl\n  - path: b\n    weight: 0")
    assert refusal(text=text) == "run.yaml:6: data.sources[1].weight: given 0; allowed: a number > 0, ≤ 1000"


def test_the_line_is_the_value_s_own_and_not_its_section_s() -> None:
    # The planted fault: without the line of the key itself the message would point at the section.
    from headway.config.layers import Origin, Provenance

    provenance = Provenance({"data": Origin("file", "run.yaml:2"), "data.seq_len": Origin("file", "run.yaml:4")})
    assert str(provenance.nearest("data.seq_len")) == "run.yaml:4"
    assert str(provenance.nearest("data.rows")) == "run.yaml:2"
    assert provenance.nearest("optim.lr") is None


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("seq_len", "run.yaml:2: data.seq_len is required: Longest training document"),
        ("sources", "run.yaml:2: data.sources is required: Where documents come from"),
        ("optim", "run.yaml: optim.lr is required: Peak learning rate; no default because none fits all"),
        ("model", "run.yaml: model.path: give exactly one of model.path (start from its weights) and model.config"),
        (
            "steps",
            "run.yaml: train.steps: give exactly one of train.steps, train.epochs and train.tokens; none is given",
        ),
    ],
)
def test_required_keys_are_asked_for_by_name(missing: str, message: str) -> None:
    assert refusal(text=without(missing)).startswith(message)


def test_several_problems_are_told_in_one_line() -> None:
    line = refusal("data.seq_len=x", "optim.lr=0", "seed=no")
    assert line == (
        'override seed=no: seed: given "no"; allowed: a whole number ≥ 0, < 2^63 '
        "(also wrong: data.seq_len, optim.lr)"
    )  # fmt: skip


def test_a_long_value_is_cut_in_the_message() -> None:
    line = refusal("data.overlong=" + "x" * 500)
    assert line.endswith("…; allowed: truncate, split or drop") and line.count("x") < 600


def test_python_callers_get_pydantic_errors_for_unknown_keys() -> None:
    from pydantic import ValidationError

    from headway.config.layers import Provenance
    from headway.config.run import RunConfig

    raw = {"model": {"path": "m"}, "data": {"sources": ["a"], "seq_len": 8}, "train": {"steps": 1}, "optim": {"lr": 1}}
    assert RunConfig.model_validate(raw).data.slots == 8
    with pytest.raises(ValidationError) as caught:
        RunConfig.model_validate(raw | {"optim": {"lr": "fast"}})
    line = as_user_error(caught.value, raw | {"optim": {"lr": "fast"}}, Provenance(), "here")
    assert str(line) == "here: optim.lr: given fast; allowed: a number > 0"
