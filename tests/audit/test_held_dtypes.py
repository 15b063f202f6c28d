"""The dtypes that an optimizer holds, as the manifest states them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from word_model import Words

import halfulp as hu
from halfulp.report.page import page


def test_dtypes_that_the_optimizer_holds(tmp_path: Path) -> None:
    model = Words().bfloat16()
    model.head.float()
    opts = [
        torch.optim.AdamW(list(model.words.parameters()), lr=1e-3),
        torch.optim.SGD(model.head.parameters(), lr=1e-3, momentum=0.9),
    ]
    with hu.Audit(opts, ["e5m2"], model=model, out=tmp_path / "run"):
        for _ in range(2):
            model.head(model.words(torch.tensor([1, 2])).float()).square().mean().backward()
            for opt in opts:
                opt.step()
                opt.zero_grad()
    trace = hu.Trace.open(tmp_path / "run")
    adam, sgd = (o["holds"] for o in trace.manifest["optimizers"])
    n, m = 60 * 24, 24 * 24 + 24
    assert adam == {
        "parameters": {"bfloat16": n},
        "gradients": {"bfloat16": n},
        "states": {"exp_avg": {"bfloat16": n}, "exp_avg_sq": {"bfloat16": n}},
    }
    assert sgd == {
        "parameters": {"float32": m},
        "gradients": {"float32": m},
        "states": {"momentum_buffer": {"float32": m}},
    }
    said = (
        "The optimizer holds: parameters bfloat16 (71%), float32 (29%); gradients bfloat16 (71%), float32 "
        "(29%); exp_avg, exp_avg_sq bfloat16; momentum_buffer float32."
    )
    assert said in hu.verdict(trace).details
    assert said in page([tmp_path / "run"])


def test_states_of_eight_bits_are_what_they_are() -> None:
    torchao = pytest.importorskip("torchao.optim", reason="needs torchao")
    model = torch.nn.Linear(256, 256).bfloat16()
    opt, memory = torchao.AdamW8bit(model.parameters(), lr=1e-3), hu.Memory()
    with hu.Audit(opt, ["bf16"], model=model, out=memory):
        model(torch.ones(1, 256).bfloat16()).sum().backward()
        opt.step()
    states = memory.trace.manifest["optimizers"][0]["holds"]["states"]
    assert states["exp_avg"] == {"uint8": 256 * 256, "bfloat16": 256}


# ---- whose roles they are --------------------------------------------------------------------------------
