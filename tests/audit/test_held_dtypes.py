"""The dtypes that an optimizer holds, as the manifest states them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

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


class Beside(torch.optim.Optimizer):
    """Steps 16-bit weights, and keeps a wider tensor for each under a name that says nothing."""

    def __init__(self, params: Iterable[torch.Tensor], lr: float, kind: str) -> None:
        super().__init__(params, {"lr": lr})
        self.kind = kind

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"]):
            x = self.state[p].setdefault("x", p.float().clone())
            change = self.param_groups[0]["lr"] * p.grad.float().sign()
            if self.kind == "master":
                p.copy_(x.sub_(change))
                continue
            p.copy_(p.float() - change)
            if self.kind == "average":
                x.lerp_(p.float(), 0.9 if self.state[p].get("steps", 0) < 2 else 0.1)
            self.state[p]["steps"] = self.state[p].get("steps", 0) + 1


@pytest.mark.parametrize("warmup", [0, 2])
@pytest.mark.parametrize(("kind", "steps"), [("master", 1), ("master", 9), ("average", 9), ("start", 9)])
def test_a_wider_state_is_a_master_only_if_it_moves_where_the_weights_do_not(
    kind: str, steps: int, warmup: int
) -> None:
    """A copy of the start and an average have the weights' values as well while these hardly move."""
    torch.manual_seed(0)
    model, memory = torch.nn.Linear(40, 40).bfloat16(), hu.Memory()
    opt = Beside(model.parameters(), 1e-5, kind)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: float(step >= warmup))
    with hu.Audit(opt, "bf16", model=model, out=memory):
        for _ in range(warmup + steps):
            opt.zero_grad()
            model(torch.randn(8, 40).bfloat16()).square().mean().backward()
            opt.step()
            schedule.step()
    (holds,) = (o["holds"] for o in memory.trace.manifest["optimizers"])
    assert holds.get("keeps") == (["x"] if kind == "master" else None)
    assert hu.verdict(memory.trace).headline.startswith(
        "Nothing lost" if kind == "master" else "This run LOST"
    )
