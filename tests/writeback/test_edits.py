"""Weights that somebody sets between steps: the next proposal starts from them, under masters too."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import assert_same
from writeback_models import Tied, masks, train

import halfulp as hu
from halfulp import kernels
from halfulp.writeback import Kahan, Master
from halfulp.writeback import slot as slots

STILL = {"lr": 0.0, "weight_decay": 0.0}
pytestmark = pytest.mark.usefixtures("one_thread")


def made(model: torch.nn.Module, policy: Any, fused: bool, grid: str, **options: Any) -> hu.WriteBack:
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    return hu.WriteBack(inner, grid, policy, model=model, params=lambda _, p: p.dim() >= 2, **options)


def policies() -> dict[str, Callable[[torch.nn.Module], Any]]:
    return {
        "master": lambda m: "master",
        "raw": lambda m: Master(start_from="raw"),
        "tiles": lambda m: hu.TileMaster(masks(m)),
        "kahan": lambda m: "kahan",
        "sr": lambda m: "sr",
    }


CASES = [("e4m3@16", "container"), ("bf16", "native"), ("e4m3@16", "packed")]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("grid", "storage"), CASES)
@pytest.mark.parametrize("kind", ["master", "raw", "tiles"])
def test_loaded_weights_are_where_the_next_step_starts(
    kind: str, grid: str, storage: Any, fused: bool
) -> None:
    model = Tied().bfloat16() if storage == "native" else Tied()
    opt = made(model, policies()[kind](model), fused, grid, storage=storage)
    best = copy.deepcopy(model.state_dict())
    train(model, opt, 3)
    assert any(not torch.equal(value, best[name]) for name, value in model.state_dict().items())
    model.load_state_dict(best)
    for group in opt.param_groups:
        group.update(STILL)
    train(model, opt, 1)
    for name, value in model.state_dict().items():
        assert torch.equal(value, best[name]), name  # a master of -0.1 may have been written as a zero


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("how", ["clamp", "data", "load", "detach"])
@pytest.mark.parametrize("kind", ["master", "raw", "tiles", "kahan", "sr"])
def test_an_edit_stays(kind: str, how: str, fused: bool) -> None:
    """At rate zero, a step after an edit leaves the weights as they were set, and masters where they were not
    touched."""
    model = Tied()
    opt = made(model, policies()[kind](model), fused, "e4m3@16")
    train(model, opt, 3)
    slot = next(s for s in opt.slots if s.name == "up.weight")
    kept = {k: v.clone() for k, v in slot.state.items()}
    p, old = model.up.weight, model.up.weight.detach().clone()
    wanted = old.clamp(-0.125, 0.125)
    with torch.no_grad():
        if how == "clamp":
            p.clamp_(-0.125, 0.125)
        elif how == "data":
            p.data = wanted.clone()
        elif how == "detach":
            p.detach().clamp_(-0.125, 0.125)
        else:
            model.load_state_dict({**model.state_dict(), "up.weight": wanted})
    for group in opt.param_groups:
        group.update(STILL)
    train(model, opt, 1)
    if kind != "kahan":  # a carry of half a gap may be written at once
        assert_same(p.detach(), wanted)
    if kind in ("master", "raw"):
        assert_same(slot.state["master"], torch.where(wanted == old, kept["master"], wanted))


@pytest.mark.parametrize("fused", [False, True])
def test_weights_off_the_grid_start_a_proposal_as_they_are(fused: bool) -> None:
    """As under sr and kahan: the step is made from what was set, and its result is on the grid."""
    for policy in ("master", "rne"):
        model = Tied()
        opt = made(model, policy, fused, "e4m3@16")
        train(model, opt, 2)
        torch.manual_seed(1)
        raw = torch.randn_like(model.up.weight) * 0.1
        with torch.no_grad():
            model.up.weight.copy_(raw)
        for group in opt.param_groups:
            group.update(STILL)
        train(model, opt, 1)
        assert_same(model.up.weight.detach(), kernels.round(raw, hu.grid("e4m3@16")))
        if policy == "master":
            slot = next(s for s in opt.slots if s.name == "up.weight")
            assert_same(slot.state["master"], raw)


@pytest.mark.parametrize("grid", ["e4m3@16", "int4", "int4/row", "mxfp8_e4m3", "nvfp4", "fp16"])
@pytest.mark.parametrize("storage", ["container", "packed"])
def test_what_was_only_written_is_no_edit(grid: str, storage: Any) -> None:
    """Other memory and other versions with the same values leave every master as it is."""
    model = Tied()
    opt = made(model, "master", False, grid, storage=storage)
    train(model, opt, 3)
    before = [slot.state["master"].clone() for slot in opt.slots]
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    for slot, was in zip(opt.slots, before, strict=True):
        slot.resync()
        assert_same(slot.state["master"], was, slot.name)


def test_an_edit_of_masters_in_tiles_on_a_moving_grid() -> None:
    """A scale is of whole rows, which tiles are not: masters are rounded where they belong."""
    model = Tied()
    opt = made(model, hu.TileMaster(masks(model)), False, "int8/row")
    train(model, opt, 3)
    slot = next(s for s in opt.slots if s.name == "up.weight")
    kept = slot.state["master"].clone()
    slot._written = None
    slot.resync()
    assert float((slot.state["master"] == kept).float().mean()) > 0.9
    with torch.no_grad():
        model.up.weight.fill_(0.25)
    slot.resync()
    assert bool((slot.state["master"] == 0.25).all())


@pytest.mark.parametrize("storage", ["container", "packed"])
@pytest.mark.parametrize("fused", [False, True])
def test_masters_are_compared_only_after_a_change(
    storage: Any, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison takes as long as a step: ordinary training makes none, and states neither."""
    model = Tied()
    opt = made(model, "master", fused, "e4m3@16", storage=storage)
    compared = []
    real = slots.kernels.round
    monkeypatch.setattr(slots.kernels, "round", lambda *a, **o: compared.append(1) or real(*a, **o))
    train(model, opt, 2)
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    compared.clear()
    model.state_dict()
    train(model, opt, 2)
    assert not compared
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    train(model, opt, 1)
    assert compared


@pytest.mark.parametrize("policy", ["master", "remainder16"])
def test_edits_under_one_pass_adamw(policy: str) -> None:
    model = Tied().bfloat16()
    opt = hu.AdamW(model.parameters(), lr=1e-2, policy=policy, model=model)
    train(model, opt, 3)
    for group in opt.param_groups:
        group.update(STILL)
    with torch.no_grad():
        model.up.weight.fill_(0.5)
    train(model, opt, 1)
    assert bool((model.up.weight == 0.5).all())


# ---- what is kept beside a weight that was set --------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", ["remainder16", "remainder8"])
def test_remainders_of_weights_that_were_set(kind: str, fused: bool) -> None:
    """Pruned to zero, of either sign, or set to anything: they train on, and others keep their masters."""
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64, bias=False).bfloat16()
    inner = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.1, fused=fused)
    opt = hu.WriteBack(inner, "bf16", kind, model=model)
    for _ in range(2):
        model.weight.grad = torch.randn(64, 64).bfloat16()
        opt.step()
    (slot,) = opt.slots
    before = slot.state["remainder"].clone()
    with torch.no_grad():
        model.weight[:16] = 0.0
        model.weight[16:32] = -0.0
        model.weight[32:48] = 1.0
    start = model.weight.detach().clone()
    model.weight.grad = torch.zeros(64, 64).bfloat16()
    opt.param_groups[0]["momentum"] = 0.0 if not fused else 0.1
    opt.optimizer.state.clear()
    opt.step()
    assert opt.events.nonfinite == 0
    assert torch.equal(model.weight, start)
    if kind == "remainder16":
        assert torch.equal(slot.state["remainder"][48:], before[48:])
    model.weight.grad = torch.full((64, 64), -1.0).bfloat16()
    opt.step()
    assert bool((model.weight[:48] > start[:48]).all())


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_carries_of_weights_that_were_set(dtype: torch.dtype, fused: bool) -> None:
    """A carry that is too large for the new weight is another's; what is not touched keeps its own."""
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64, bias=False)
    inner = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.1, fused=fused)
    opt = hu.WriteBack(inner, "e4m3", Kahan(dtype), model=model)
    model.weight.grad = torch.randn(64, 64) * 0.01
    opt.step()
    (slot,) = opt.slots
    before = slot.state["carry"].clone()
    assert int((before[:32] != 0).sum()) > 1000
    with torch.no_grad():
        model.weight[:32] = 0.0
    start = model.weight.detach().clone()
    model.weight.grad = torch.zeros(64, 64)
    opt.optimizer.state.clear()
    opt.step()
    assert torch.equal(model.weight[:32], start[:32])
    if dtype == torch.float32:  # rounded to half a gap, a carry moves a weight whose code is odd
        assert torch.equal(model.weight, start)
        assert torch.equal(slot.state["carry"][32:], before[32:])


def test_weights_that_are_written_over_with_themselves_keep_everything() -> None:
    """As an evaluation on averaged weights does, which puts the others back."""
    ends = []
    for again in (False, True):
        torch.manual_seed(0)
        model = Tied()
        opts = made(model, "kahan", False, "e4m3@16")
        for _ in range(4):
            train(model, opts, 1)
            if again:
                with torch.no_grad():
                    for p in model.parameters():
                        p.copy_(p.clone())
        ends.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *ends))
