"""Which steps are made in one pass, who sees them, and why others are not."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
from onepass_models import adamw, give_gradients, model_of, plain

import halfulp as hu
from halfulp.kernels import native, onepass


def test_what_cannot_be_one_pass_says_why(caplog: pytest.LogCaptureFixture) -> None:
    """The step is made all the same, in two passes, and the log says so once."""

    class Mine(torch.optim.AdamW):
        pass

    def reason(
        made: Any, grid: str = "bf16", policy: str = "rne", group: Any = None, **options: Any
    ) -> str | None:
        model = model_of(torch.float32)
        params = [{"params": list(model.parameters()), **(group or {})}]
        opt = hu.WriteBack(made(params, lr=1e-3, **options), grid, policy, model=model)
        give_gradients(model, 0)
        return next((r.reason for r in opt.routes.values() if not r.one_pass), None)

    assert "not torch's" in str(reason(Mine, fused=True))
    assert "not torch's" in str(reason(torch.optim.Adagrad))
    assert "arithmetic of fused=True" in str(reason(torch.optim.AdamW, policy="eco"))
    assert "foreach=True" in str(reason(torch.optim.SGD, group={"fused": True, "foreach": True}))
    assert "amsgrad" in str(reason(torch.optim.AdamW, fused=True, amsgrad=True))
    assert "maximize" in str(reason(torch.optim.AdamW, fused=True, maximize=True))
    for grid in ("int4", "nvfp4"):
        assert "whole tensor's maximum" in str(reason(torch.optim.AdamW, grid, fused=True))
    assert "plain finite" in str(reason(torch.optim.AdamW, fused=True, eps=math.inf))
    model = model_of(torch.float32)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    inner.register_step_pre_hook(lambda *_: None)
    opt = hu.WriteBack(inner, "bf16", "rne", model=model)
    with caplog.at_level(logging.WARNING, logger="halfulp"):
        for step in range(2):
            give_gradients(model, step)
            opt.step()
    told = [r.getMessage() for r in caplog.records if "two passes" in r.getMessage()]
    assert len(told) == 1
    assert "step hooks" in told[0]


@pytest.mark.parametrize("kind", ["WriteBack", "AdamW"])
def test_hooks_of_all_optimizers_see_the_step(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """``halfulp audit`` has such; the step is one pass all the same."""

    def weights(audited: bool) -> list[torch.Tensor]:
        model = model_of(torch.bfloat16)
        if kind == "AdamW":
            opt: hu.WriteBack = adamw(model, grid="bf16", policy="sr")
        else:
            opt = hu.WriteBack(torch.optim.AdamW(model.parameters(), fused=True), "bf16", "sr", model=model)
        audit = hu.Audit(None, ["bf16"], model=model)
        if audited:
            audit.start()
        for step in range(3):
            give_gradients(model, step)
            opt.step()
        if audited:
            audit.stop()
            assert audit.latest["step"] == 3
            lost = sum(row.frozen for row in opt.events.rows) / sum(p.numel() for p in model.parameters())
            assert audit.latest["frozen"]["bf16"] == lost
        return [p.detach() for p in model.parameters()]

    with caplog.at_level(logging.WARNING, logger="halfulp"):
        for alone, other in zip(weights(False), weights(True), strict=True):
            assert torch.equal(alone, other)
    assert not any("two passes" in r.getMessage() for r in caplog.records)


@pytest.mark.parametrize("what", ["the loop", "the step"])
@pytest.mark.parametrize("kind", ["WriteBack", "AdamW"])
def test_compiled_callers(kind: str, what: str) -> None:
    """torch.compile looks into what is called; steps in one pass are left as they are."""

    def weights(compiled: bool) -> list[torch.Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Linear(32, 16))
        if kind == "AdamW":
            opt: hu.WriteBack = hu.AdamW(model.named_parameters(), lr=1e-3, grid="bf16", policy="rne")
        else:
            inner = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
            opt = hu.WriteBack(inner, "bf16", "rne", model=model)
        step: Any = opt.step

        def loop(x: torch.Tensor) -> None:
            opt.zero_grad()
            (model(x) - x).square().mean().backward()
            step()

        train: Any = loop
        if compiled and what == "the loop":
            train = torch.compile(loop, backend="eager")
        elif compiled:
            step = torch.compile(opt.step, backend="eager")
        made = torch.Generator().manual_seed(1)
        for _ in range(4):
            train(torch.randn(8, 16, generator=made))
        return [p.detach() for p in model.parameters()]

    for alone, other in zip(weights(False), weights(True), strict=True):
        assert torch.equal(alone, other)


def test_where_torchs_root_is_not_known_steps_are_in_two_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another library's: only the fused step's arithmetic is the reference's then."""
    monkeypatch.setattr(native, "torchs_root", lambda: None)
    onepass.torchs_end.cache_clear()
    model = model_of(torch.float32)
    opt = hu.WriteBack(plain(model), "bf16", "rne", model=model)
    assert {route.reason for route in opt.routes.values()} == {
        "torch's step has another arithmetic on this machine"
    }
    assert onepass.torchs_end(onepass.ADAMW, fused=True) is not None
    onepass.torchs_end.cache_clear()
