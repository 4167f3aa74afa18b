"""The loss and the gradient norm do not depend on how many ranks share the work, or how."""

from __future__ import annotations

from pathlib import Path

import pytest

from faults.two_ranks import ran_on_two
from headway.train.run import Run
from tiny import config, make_chats, run_file
from train.running import history, run

# Whole processes, several at once: on a busy machine each takes many times its own time.
pytestmark = pytest.mark.timeout(900)


def curve(path: Path, name: str) -> list[tuple[float, float, int, int]]:
    return [
        (line.loss or 0.0, line.grad_norm or 0.0, line.tokens, line.trained_tokens) for line in history(path, name).kept
    ]


def agree(one: list[tuple[float, float, int, int]], other: list[tuple[float, float, int, int]]) -> None:
    assert len(one) == len(other) > 0
    for left, right in zip(one, other, strict=True):
        assert left[0] == pytest.approx(right[0], rel=1e-5) and left[1] == pytest.approx(right[1], rel=1e-4)
        assert left[2:] == right[2:]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_file(tmp_path_factory.mktemp("ranks"), train={"steps": 5, "global_batch_sequences": 4})


@pytest.fixture(scope="module")
def single(path: Path) -> list[tuple[float, float, int, int]]:
    run(path, "name=single")
    return curve(path, "single")


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("fsdp2", ["parallel.ranks=2", "parallel.fsdp=2"]),
        ("ddp2", ["parallel.ranks=2", "parallel.replicate=2", "parallel.fsdp=1"]),
        ("hsdp4", ["parallel.ranks=4", "parallel.replicate=2", "parallel.fsdp=2"]),
    ],
)
def test_ranks_give_the_single_process_curve(
    path: Path, single: list[tuple[float, float, int, int]], name: str, overrides: list[str]
) -> None:
    run(path, f"name={name}", *overrides)
    agree(single, curve(path, name))


def test_torchrun_starts_the_ranks_too(path: Path, single: list[tuple[float, float, int, int]]) -> None:
    run(
        path,
        "name=torchrun",
        "parallel.ranks=2",
        "parallel.fsdp=2",
        torchrun=["--nproc-per-node", "2"],
    )
    agree(single, curve(path, "torchrun"))


def test_a_planted_mean_over_ranks_is_caught(path: Path, single: list[tuple[float, float, int, int]]) -> None:
    def mean(run: Run, rank: int) -> None:
        real = run.learner._accumulate
        run.learner._accumulate = lambda parts, trained, *rest: real(parts, 2 * trained, *rest)  # type: ignore[method-assign]

    ran_on_two(path, "name=mean", "parallel.replicate=2", "parallel.fsdp=1", plant=mean)
    with pytest.raises(AssertionError):
        agree(single, curve(path, "mean"))


def test_three_ranks_and_ten_documents_hang_nothing(tmp_path: Path) -> None:
    path = run_file(tmp_path, train={"steps": None, "epochs": 2, "global_batch_sequences": 4})
    make_chats(tmp_path / "chats.jsonl", count=10, longest=8)
    run(path, "parallel.ranks=3", "parallel.fsdp=3", "name=three")
    run(path, "name=one")
    agree(curve(path, "one"), curve(path, "three"))
    ranks = sorted((tmp_path / "runs" / "three" / "ranks").iterdir())
    assert len(ranks) == 3 and len({len(rank.read_text().splitlines()) for rank in ranks}) == 1


def test_experts_that_see_no_token_hang_nothing(tmp_path: Path) -> None:
    # P34: 16 experts and a few tokens a rank: some expert sees none on one rank and some on the other.
    experts = {
        "model_type": "qwen3_moe",
        "num_experts": 16,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 16,
        "head_dim": 8,
        "norm_topk_prob": True,
    }
    path = run_file(tmp_path, model={"config": config(**experts)}, train={"steps": 3, "global_batch_sequences": 2})
    make_chats(tmp_path / "chats.jsonl", count=6, longest=3)
    run(path, "name=one")
    run(path, "name=two", "parallel.ranks=2", "parallel.replicate=2", "parallel.fsdp=1")
    agree(curve(path, "one"), curve(path, "two"))
