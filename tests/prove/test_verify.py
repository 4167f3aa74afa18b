"""`headway verify`: every planted fault is found, and honest pairs pass."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import tiny
from headway.account.errors import UserError
from headway.config.load import load_run
from headway.config.run import RunConfig
from headway.data.batch import Batch
from headway.prove.coverage import other_step
from headway.prove.judge import judge
from headway.prove.rebatch import refuse_other_documents
from headway.prove.report import lines
from headway.prove.trainee import StepFigures, Trainee, prepared
from headway.prove.verify import ROUNDING, Verified, reference_of, verify
from headway.train.optim import gradient_norms, scale_gradients

STEPS = 3
GPT2 = {
    "model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "vocab_size": 320,
    "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
}  # fmt: skip


MOE = tiny.config(model_type="qwen3_moe", head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
WIDE_HEADS = tiny.config(
    hidden_size=128,
    head_dim=128,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    tie_word_embeddings=False,
)
ODD = tiny.config(hidden_size=160, head_dim=80, num_hidden_layers=1, num_attention_heads=2, vocab_size=331)
QKV_BIAS = tiny.config(model_type="qwen2", num_hidden_layers=1)


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.run_file(tmp_path_factory.mktemp("verify"), train={"steps": 50, "global_batch_sequences": 3})


def config(run_file: Path, *overrides: str) -> RunConfig:
    return load_run(run_file, overrides).config


def compare(
    a: RunConfig,
    b: RunConfig,
    scratch: Path,
    make_b: Callable[..., Trainee] = Trainee,
    make_a: Callable[..., Trainee] = Trainee,
) -> Verified:
    return verify(a, b, scratch, steps=STEPS, held_out=1, say=lambda text: None, make_a=make_a, make_b=make_b)


class Leaking(Trainee):
    """Attention crosses documents: the table of documents says that a pack is one."""

    def batches(self, *arguments: Any) -> list[Batch]:
        return [
            dataclasses.replace(
                batch, cu_seqlens=torch.tensor([0, batch.slots], dtype=torch.int32), max_seqlen=batch.slots
            )
            for batch in super().batches(*arguments)
        ]


class PositionsGoOn(Trainee):
    """Positions count on through the pack."""

    def batches(self, *arguments: Any) -> list[Batch]:
        return [
            dataclasses.replace(batch, position_ids=torch.arange(batch.slots).view(1, -1))
            for batch in super().batches(*arguments)
        ]


class MeanPerMicroBatch(Trainee):
    """Each micro-batch's loss is divided by its own tokens, then they are averaged."""

    def update(self, batches: Any) -> StepFigures:
        learner, weights = self.run.learner, list(self.module.parameters())
        learner.optimizers.set_lr(1.0)
        sums, grads = torch.zeros(2), [torch.zeros_like(weight) for weight in weights]
        for batch in batches:
            sums += learner.learn([batch], batch.trained_tokens * len(batches))
            grads = [
                grad if weight.grad is None else grad + weight.grad for grad, weight in zip(grads, weights, strict=True)
            ]
        for weight, grad in zip(weights, grads, strict=True):
            weight.grad = grad
        norm = scale_gradients(gradient_norms(self.module), learner.clip_norm, None)
        learner.optimizers.step(torch.isfinite(norm))
        loss, nll = (sums / sum(batch.trained_tokens for batch in batches)).tolist()
        return StepFigures(loss, nll, float(norm))


class NoLabelShift(Trainee):
    """Every slot must predict itself."""

    def batches(self, *arguments: Any) -> list[Batch]:
        found = []
        for batch in super().batches(*arguments):
            labels = torch.where(batch.labels != -100, batch.input_ids, batch.labels)
            found.append(dataclasses.replace(batch, labels=labels))
        return found


class ScaledLayer(Trainee):
    """One matrix of one layer gets a gradient that is 2 % too large."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        weight = next(p for name, p in self.module.named_parameters() if "layers.1.mlp.up" in name)
        weight.register_hook(lambda grad: grad * 1.02)


class DoubledKeys(Trainee):
    """One small matrix of a layer gets twice its gradient: v and o are far longer."""

    matrix, factor = "layers.0.self_attn.k_proj", 2.0

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        weight = next(p for name, p in self.module.named_parameters() if self.matrix in name)
        weight.register_hook(lambda grad: grad * self.factor)


class SlightlyLongerKeys(DoubledKeys):
    factor = 1.005


class DoubledRouter(DoubledKeys):
    matrix = "layers.0.mlp.gate.weight"


class Rounded(Trainee):
    """Weights are kept in bfloat16; `stochastic` rounds up with the probability that keeps the mean."""

    stochastic, seed = False, 0

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._dice = torch.Generator().manual_seed(self.seed + self.reorder)

    def update(self, batches: Any) -> StepFigures:
        figures = super().update(batches)
        with torch.no_grad():
            for parameter in self.module.parameters():
                bits = parameter.view(torch.int32)
                noise = torch.full_like(bits, 0x8000)
                if self.stochastic:
                    noise = torch.randint(0, 0x10000, bits.shape, generator=self._dice, dtype=torch.int32)
                bits.add_(noise).bitwise_and_(-0x10000)
        return figures


class RoundedStochastically(Rounded):
    stochastic = True


class OtherDice(RoundedStochastically):
    seed = 99


FAULTS: dict[str, tuple[type[Trainee], tuple[str, ...], dict[str, Any] | None]] = {
    "attention leaks across documents": (Leaking, (), None),
    "attention leaks a little, in one pack of two documents": (Leaking, ("data.slots=130",), None),
    "positions are not reset (learned positions)": (PositionsGoOn, (), GPT2),
    "positions are not reset (documents read off them)": (PositionsGoOn, ("model.attention=sdpa",), None),
    "loss averaged per micro-batch": (MeanPerMicroBatch, (), None),
    "label shift dropped": (NoLabelShift, (), None),
    "one layer's gradient scaled by 1.02": (ScaledLayer, (), None),
    "one small matrix's gradient doubled, bf16": (DoubledKeys, ("train.precision=bfloat16",), None),
    "one small matrix's gradient scaled by 1.005": (SlightlyLongerKeys, (), None),
    "a router's gradient doubled, bf16": (DoubledRouter, ("train.precision=bfloat16",), MOE),
    "stochastic rounding off": (Rounded, ("optim.lr=2e-5", "model.dtype=float32"), None),
}


def of_model(run_file: Path, model: dict[str, Any]) -> Path:
    raw = yaml.safe_load(run_file.read_text())
    raw["model"]["config"] = model
    other = run_file.with_name("other-model.yaml")
    other.write_text(yaml.safe_dump(raw))
    return other


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, run_file: Path, tmp_path: Path) -> None:
    trainee, overrides, model = FAULTS[fault]
    a = config(run_file if model is None else of_model(run_file, model), *overrides)
    found = compare(a, a, tmp_path, trainee, RoundedStochastically if trainee is Rounded else Trainee)
    assert not found.verdict.same, found.verdict.tests


LORA = ("train.precision=bfloat16", "model.lora.rank=4", "optim.lr=1e-2")
HONEST: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "rows and packs": (("data.pack=none", "data.rows=4"), ("data.pack=best_fit", "data.slots=200")),
    "packs of two sizes": (("data.slots=130",), ("data.slots=400",)),
    "sdpa and headway": (("model.attention=sdpa",), ("model.attention=headway",)),
    "eager rows and headway packs": (("data.pack=none", "model.attention=eager"), ("model.attention=headway",)),
    "recompute": (("model.recompute=none",), ("model.recompute=full",)),
    "one row and eight, Muon": (
        ("data.pack=none", "data.rows=1", "optim.name=muon"),
        ("data.pack=none", "data.rows=8", "optim.name=muon"),
    ),
    "padded to the longest and to the length": (("data.pack=none",), ("data.pack=none", "data.pad_to=seq_len")),
    "bf16 and float32": (("train.precision=float32",), ("train.precision=bfloat16",)),
    "float16 and float32": (("train.precision=float32", "seed=3"), ("train.precision=float16", "seed=3")),
    "bf16 rows and bf16 packs, LoRA": ((*LORA, "data.pack=none"), LORA),
    "presets": (("preset=naive",), ("preset=fast",)),
}


@pytest.mark.parametrize("pair", HONEST)
def test_an_honest_pair_passes(pair: str, run_file: Path, tmp_path: Path) -> None:
    left, right = HONEST[pair]
    found = compare(config(run_file, *left), config(run_file, *right), tmp_path)
    assert found.verdict.same, found.verdict.failed


@pytest.mark.parametrize(
    ("model", "left", "right", "seed"),
    [
        (None, "model.fuse=none", "model.fuse=auto", 0),
        (None, "model.fuse=none", "model.fuse=auto", 1),
        (WIDE_HEADS, "preset=naive", "preset=fast", 1),
        (ODD, "model.fuse=none", "model.fuse=auto", 0),
        (QKV_BIAS, "data.pack=none", "data.pack=best_fit", 0),
        (MOE, "data.pack=none", "data.pack=best_fit", 0),
    ],
    ids=["fuse", "fuse, another seed", "heads of 128", "heads of 80", "biases of q, k, v", "experts"],
)
def test_an_honest_pair_in_bf16_passes(
    model: dict[str, Any] | None, left: str, right: str, seed: int, run_file: Path, tmp_path: Path
) -> None:
    """Fused and not, their gradients differ by a factor of up to 0.4 % that A's own second run does not show."""
    run_file = run_file if model is None else of_model(run_file, model)
    both = ("train.precision=bfloat16", f"seed={seed}")
    a, b = config(run_file, left, *both), config(run_file, right, *both)
    found = verify(a, b, tmp_path, steps=2, held_out=1, say=lambda text: None)
    assert found.verdict.same, found.verdict.failed


def test_another_learning_rate_is_another_training(run_file: Path, tmp_path: Path) -> None:
    found = compare(config(run_file), config(run_file, "optim.lr=1.2e-3"), tmp_path)
    assert not found.verdict.same
    assert [str(change) for change in found.differences][:1] == ["optim.lr: 0.001 → 0.0012"]


def test_the_reference_of_a_fast_run_agrees_with_it(run_file: Path, tmp_path: Path) -> None:
    fast = config(run_file, "preset=fast")
    assert compare(fast, reference_of(fast), tmp_path).verdict.same


def test_other_documents_are_refused(run_file: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data\.seq_len differs"):
        compare(config(run_file), config(run_file, "data.seq_len=64"), tmp_path)


def test_text_read_by_another_tokenizer_or_template_is_other_documents(run_file: Path, tmp_path: Path) -> None:
    """B was trained on A's shards, and called the same training; its own run would read others."""
    a, ours = config(run_file), run_file.with_name("tokenizer")
    copy = shutil.copytree(ours, tmp_path / "copy")
    refuse_other_documents(a, config(run_file, f"model.tokenizer={copy}"))  # in another place, the same
    same = tmp_path / "same.jinja"
    same.write_text(tiny.CHATML)
    refuse_other_documents(a, config(run_file, f"data.chat_template={same}"))
    other = tmp_path / "other.jinja"
    other.write_text(tiny.CHATML.replace("user", "human") + " ")
    with pytest.raises(UserError, match=r"data\.chat_template differs \(that of .*tokenizer and .*other\.jinja\)"):
        refuse_other_documents(a, config(run_file, f"data.chat_template={other}"))
    spec = json.loads((copy / "tokenizer.json").read_text())
    spec["model"]["ignore_merges"] = True
    (copy / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(UserError, match=r"model\.tokenizer differs .*copy"):
        refuse_other_documents(a, config(run_file, f"model.tokenizer={copy}"))


def test_another_global_batch_is_said_to_be_not_compared(run_file: Path, tmp_path: Path) -> None:
    a, b = (
        config(run_file, "parallel.fsdp=2", "parallel.ranks=null"),
        config(run_file, "train.global_batch_sequences=1"),
    )
    found = verify(a, b, tmp_path, steps=1, held_out=1, say=lambda text: None)
    assert found.verdict.same and "the global batch is not compared" in "\n".join(lines(found))
    assert 2.5 < found.own_steps[0] / found.own_steps[1] < 3.5
    rows = config(run_file, "data.pack=none")
    assert found.exit_code == 3 and other_step(a, rows, (100.0, 130.0)) and not other_step(a, rows, (100.0, 120.0))
    larger = config(run_file, "data.slots=480", "train.global_batch_sequences=1")
    assert not other_step(a, larger, found.own_steps), "as tune makes it: the same slots in fewer packs"


def test_a_run_of_many_ranks_is_driven_by_one(run_file: Path, tmp_path: Path) -> None:
    """`parallel.fsdp: 2` stayed, beside one rank: a traceback."""
    many = config(run_file, "parallel.ranks=8", "parallel.replicate=2", "parallel.fsdp=4", "model.offload=optimizer")
    made = prepared(many, tmp_path)
    assert made.parallel.dims(1) == (1, 1) and made.model.offload == "none"


def test_two_runs_with_stochastic_rounding_are_the_same_training(run_file: Path, tmp_path: Path) -> None:
    a = config(run_file, "optim.lr=2e-5")
    found = compare(a, a, tmp_path, OtherDice, RoundedStochastically)
    verdict = judge(found.a, found.b, found.twin, rounding=ROUNDING["bfloat16"])  # which these weights are kept in
    assert verdict.same, verdict.failed


def test_the_seed_moves_the_loss_further_than_rounding(run_file: Path, tmp_path: Path) -> None:
    a = config(run_file)
    found = verify(a, a, tmp_path, steps=2, held_out=1, say=lambda text: None, seed_band=True)
    assert found.verdict.seed_band is not None
    assert found.verdict.seed_band > max(band for _, band in found.verdict.loss)
