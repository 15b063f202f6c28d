"""An interrupt anywhere in a step: the next loop works as ever, and every weight is on its grid."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import assert_same
from writeback_models import Tied, train, written_back

import halfulp as hu
from halfulp import kernels
from halfulp.writeback import WriteBackOptions
from halfulp.writeback.policies import Step
from halfulp.writeback.telemetry import StepEvents

KINDS = {"container": ("e4m3@128", None), "native": ("bf16", None), "packed": ("e4m3@128", "packed")}
STRIDE = 11
GRID = "e4m3@16"
pytestmark = pytest.mark.usefixtures("one_thread")


def interrupted(call: Callable[[], Any], at: int) -> int:
    """Call with a KeyboardInterrupt at the at-th line of halfulp.writeback; how many lines there were."""
    seen = 0

    def line(_frame: Any, event: str, _arg: Any) -> Any:
        nonlocal seen
        if event == "line":
            seen += 1
            if seen == at:
                raise KeyboardInterrupt
        return line

    def entered(frame: Any, _event: str, _arg: Any) -> Any:
        return line if "/halfulp/writeback/" in frame.f_code.co_filename else None

    before = sys.gettrace()
    sys.settrace(entered)
    try:
        call()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return seen


def trained(model: torch.nn.Module, opt: hu.WriteBack, dtype: torch.dtype, *, step: bool = True) -> None:
    opt.zero_grad()
    model(torch.ones(2, 6, dtype=dtype)).square().sum().backward()
    if step:
        opt.step()


def assert_on_grid(model: torch.nn.Module, opt: hu.WriteBack, what: str) -> None:
    held = model.state_dict()
    for slot in opt.slots:
        value = held[slot.name].float()
        assert bool(torch.isfinite(value).all()), what
        scaling = slot.grid.scaling
        if scaling is None or not scaling.moves:
            assert torch.equal(kernels.round(value, slot.grid), value), (what, slot.name)
        assert slot.shadow is None or (slot.shadow.numel() == 0 and slot.shadow.grad is None), what


@pytest.mark.parametrize("way", ["tensor", "all", "fused"])
@pytest.mark.parametrize("policy", ["sr", "kahan", "master"])
@pytest.mark.parametrize("kind", KINDS)
def test_at_a_line_of_a_step(kind: str, policy: str, way: Any) -> None:
    """One optimizer, interrupted again and again, each time at a later line: here at one line of eleven,
    others for each policy. (With a stride of one it passes, too, and takes minutes.)"""
    grid, storage = KINDS[kind]
    options: Any = {"storage": storage}
    dtype = torch.bfloat16 if kind == "native" else torch.float32
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Linear(5, 6)).to(dtype)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=way == "fused")
    options["options"] = WriteBackOptions(materialise="all" if way == "all" else "tensor")
    opt = hu.WriteBack(inner, grid, policy, model=model, **options)
    trained(model, opt, dtype)
    trained(model, opt, dtype, step=False)
    lines = interrupted(opt.step, 0)
    assert lines > 2 * STRIDE
    for at in range(1 + 3 * len(policy) % STRIDE, lines + 1, STRIDE):
        trained(model, opt, dtype, step=False)
        # A step that finds everything as it was has a few lines less than the first that is counted.
        assert interrupted(opt.step, at) >= min(at, lines - STRIDE)
        assert_on_grid(model, opt, f"interrupted at line {at}")
        steps = opt.steps
        trained(model, opt, dtype)
        assert opt.steps == steps + 1
        assert_on_grid(model, opt, f"after line {at}")


@pytest.mark.parametrize("storage", ["container", "packed"])
def test_in_pieces(storage: Any) -> None:
    """Grids with a scale a block: codes and scales are of one step, and values on the grid."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 32))
    inner = torch.optim.AdamW(model.parameters(), lr=0.5, fused=True)
    opt = hu.WriteBack(inner, "mxfp8_e4m3", "rne", model=model, storage=storage)
    slot = opt.slots[0]
    assert slot.two_passes is None

    def backward() -> None:
        opt.zero_grad()
        model(torch.ones(2, 32)).square().sum().backward()

    backward()
    opt.step()
    backward()
    lines = interrupted(opt.step, 0)
    for at in range(1, lines + 1, 2):
        backward()
        interrupted(opt.step, at)
        value = slot.values()
        assert torch.equal(kernels.round(value, slot.grid), value), at
        assert float(value.abs().max()) < 1e3, at
        backward()
        opt.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("policy", ["sr", "kahan"])
def test_an_interrupt_after_all_tensors_are_written(
    policy: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C after the one call that writes them: what is left to do is done, and nothing twice."""
    runs = []
    for interrupts in (False, True):
        model = Tied().to(dtype)
        opt = written_back(model, GRID, policy, options=WriteBackOptions(one_pass=False))
        train(model, opt, 2)
        noting = StepEvents.__init__
        calls: list[int] = []

        def interrupted(
            events: StepEvents, noting: Any = noting, calls: list[int] = calls, **given: Any
        ) -> None:
            noting(events, **given)
            calls.append(events.step)
            if len(calls) == 1:
                raise KeyboardInterrupt

        if interrupts:
            monkeypatch.setattr(StepEvents, "__init__", interrupted)
            with pytest.raises(KeyboardInterrupt):
                train(model, opt, 1, start=2)
            monkeypatch.undo()
            assert calls == [3, 3]
            assert opt.steps == 2
            opt.steps = 3  # the weights have moved
        else:
            train(model, opt, 1, start=2)
        opt.zero_grad()
        train(model, opt, 2, start=3)
        runs.append((model.state_dict(), opt.events))
    assert runs[0][1] == runs[1][1]
    for name, value in runs[0][0].items():
        assert_same(runs[1][0][name], value, name)


def test_an_interrupt_between_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while tensors are written: the others are written too, so that all weights are on the grid."""
    model = Tied()
    opt = written_back(model, GRID, "master", options=WriteBackOptions(one_pass=False))
    train(model, opt, 2)
    finish, calls = Step.finish, []

    def interrupted(step: Step) -> None:
        finish(step)
        calls.append(step.name)
        if len(calls) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(Step, "finish", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(model, opt, 1)
    monkeypatch.undo()
    for slot in opt.slots:
        assert_same(slot.p.detach(), hu.grid(GRID).round(slot.p.detach()))
    train(model, opt, 1)
