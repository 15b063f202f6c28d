"""An interrupt anywhere in a step: the next loop works as ever, and every weight is on its grid."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import halfulp as hu
from halfulp import kernels
from halfulp.writeback import WriteBackOptions

KINDS = {"container": ("e4m3@128", None), "native": ("bf16", None), "packed": ("e4m3@128", "packed")}
STRIDE = 11


@pytest.fixture(autouse=True)
def one_thread(threads: None) -> None:
    """Small tensors: two threads would only wait for each other."""
    torch.set_num_threads(1)


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
