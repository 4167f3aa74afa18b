"""`headway doctor --node` finds a wrong product, a stuck bit and a link that lies."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor

from headway.cli.main import main
from headway.guard import node_check
from headway.guard.node_check import check_link, check_matmul, check_memory

CPU = torch.device("cpu")


def test_a_good_machine_passes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["doctor", "--node", "--seconds", "0.1", "--memory-mib", "8", "--json"])
    assert end.value.code == 0
    found = json.loads(capsys.readouterr().out)
    assert [item["check"] for item in found if item["verdict"] == "good"][:2] == ["matmul cpu", "memory cpu"]


def test_one_wrong_number_in_one_product_is_found() -> None:
    calls = []

    def now_and_then(a: Tensor, b: Tensor) -> Tensor:
        calls.append(1)
        product = a @ b
        if len(calls) == 3:
            product[5, 7] += 1
        return product

    with pytest.raises(ValueError, match="1 of 1048576 numbers wrong in product 3"):
        check_matmul(CPU, 5.0, now_and_then)


@pytest.mark.parametrize("bit", [0, 31, 63])
def test_a_bit_that_does_not_hold_is_found(bit: int) -> None:
    def stuck(words: Tensor) -> None:
        words[1234] |= 1 << bit if bit < 63 else -(1 << 63)

    with pytest.raises(ValueError, match="words are not what was written"):
        check_memory(CPU, 1 << 20, stuck)


def test_an_address_line_that_is_stuck_is_found() -> None:
    def mirrored(words: Tensor) -> None:
        words[64:128] = words[:64].clone()  # patterns do not show it: all places hold the same

    with pytest.raises(ValueError, match="64 of"):
        check_memory(CPU, 1 << 20, mirrored)


def test_a_link_that_lies_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_check, "_LINK_NUMBERS", 1 << 10)
    assert check_link({}).verdict == "good"
    real = node_check.dist.all_reduce

    def lying(box: Tensor) -> None:
        real(box)
        box[3] += 1

    monkeypatch.setattr(node_check.dist, "all_reduce", lying)
    found = check_link({})
    assert found.verdict == "bad" and "not what it must be" in found.text
