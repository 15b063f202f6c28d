"""Steps that are refused before anything changes: a model that was cast, settings that were changed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import assert_same
from writeback_models import Tied, train

import halfulp as hu

MAKERS: dict[str, Callable[[torch.nn.Module], Any]] = {
    **{
        policy: lambda m, policy=policy: hu.WriteBack(  # type: ignore[misc]  # the name of the case
            torch.optim.AdamW(m.parameters()), "e4m3@16", policy, model=m
        )
        for policy in ("rne", "sr", "deadzone-sr", "kahan", "master", "eco")
    },
    "packed": lambda m: hu.WriteBack(
        torch.optim.AdamW(m.parameters()), "e4m3@16", "sr", model=m, storage="packed"
    ),
    "plain SGD": lambda m: hu.WriteBack(torch.optim.SGD(m.parameters(), lr=1e-2), "bf16", "sr", model=m),
    "fused": lambda m: hu.WriteBack(torch.optim.AdamW(m.parameters(), fused=True), "bf16", "sr", model=m),
    "AdamW": lambda m: hu.AdamW(m.parameters(), model=m),
    "SGD": lambda m: hu.SGD(m.parameters(), model=m),
    "Lion": lambda m: hu.Lion(m.parameters(), model=m),
}


def with_gradients(model: torch.nn.Module) -> None:
    for p in model.parameters():
        p.grad = torch.ones(p.shape, dtype=p.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("kind", MAKERS)
def test_a_model_that_was_cast_after_the_wrapping(kind: str, dtype: torch.dtype) -> None:
    model = torch.nn.Linear(8, 8)
    opt = MAKERS[kind](model)
    model.to(dtype)
    with_gradients(model)
    before = copy.deepcopy({**model.state_dict(), "steps": opt.steps})
    now = str(dtype).removeprefix("torch.")
    with pytest.raises(
        hu.UsageError, match=f"'weight' was float32 when .* is {now} now.*Cast the model first"
    ):
        opt.step()
    for key, value in model.state_dict().items():
        assert_same(value, before[key], key)
    assert opt.steps == before["steps"] == 0
    assert not opt.optimizer.state
    model.float()
    opt.zero_grad()
    model(torch.ones(2, 8)).sum().backward()
    opt.step()
    assert opt.steps == 1


def test_a_narrow_model_that_was_widened_after_the_wrapping() -> None:
    model = torch.nn.Linear(8, 8).bfloat16()
    opt = hu.AdamW(model.parameters(), model=model)
    model.float()
    with_gradients(model)
    with pytest.raises(hu.UsageError, match="was bfloat16 when the AdamW was made and is float32 now"):
        opt.step()


def test_a_tensor_that_is_not_managed_and_was_cast() -> None:
    model = torch.nn.Linear(8, 8)
    opt = hu.WriteBack(torch.optim.SGD(model.named_parameters(), lr=1.0), "e4m3", "sr")
    model.bias.data = model.bias.data.bfloat16()
    with_gradients(model)
    weight = model.weight.detach().clone()
    with pytest.raises(hu.UsageError, match="'bias' was float32"):
        opt.step()
    assert_same(model.weight.detach(), weight)


def test_a_cast_under_steps_in_the_backward() -> None:
    model = torch.nn.Linear(8, 8)
    opt = hu.AdamW(model.parameters(), model=model, select=lambda n, p: True)
    opt.in_backward()
    model.bfloat16()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(hu.UsageError, match="was float32 when"):
        model(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()
    for key, value in model.state_dict().items():
        assert_same(value, before[key], key)


def test_what_was_frozen_may_be_cast_until_it_is_trained() -> None:
    model = Tied()
    model.up.requires_grad_(False)
    opt = hu.WriteBack(torch.optim.AdamW(model.parameters()), "bf16", "sr", model=model)
    model.up.bfloat16()
    model.up.float()  # and back
    train(model, opt, 1)
    model.up.requires_grad_(True)
    model.up.weight.data = model.up.weight.data.double()
    with_gradients(model)
    opt.step()
    assert opt._types[id(model.up.weight)] == torch.float64
    model.up.float()
    with_gradients(model)
    with pytest.raises(hu.UsageError, match=r"'up\.weight' was float64"):
        opt.step()


def test_a_move_to_other_memory_is_no_cast() -> None:
    model = torch.nn.Linear(8, 8)
    opt = MAKERS["sr"](model)
    for p in model.parameters():
        p.data = p.data.clone()
    with_gradients(model)
    opt.step()
    assert opt.steps == 1


# ---- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", ["container", "packed"])
@pytest.mark.parametrize("fused", [False, True])
def test_eco_whose_first_moment_was_taken_away(fused: bool, storage: Any) -> None:
    model = Tied()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    opt = hu.WriteBack(inner, "e4m3@16", "eco", model=model, storage=storage)
    train(model, opt, 1)
    saved = copy.deepcopy((model.state_dict(), opt.optimizer.state_dict()["state"]))
    for group in opt.param_groups:
        group["betas"] = (0.0, 0.9)
    with pytest.raises(hu.UsageError, match=r"betas\[0\] = 0 removes"):
        opt.step()
    for key, value in model.state_dict().items():
        assert_same(value, saved[0][key], key)
    for k, entry in opt.optimizer.state_dict()["state"].items():
        for name, value in entry.items():
            if not name.startswith("halfulp"):
                assert_same(value, saved[1][k][name], name)
    assert opt.steps == 1


def test_eco_whose_momentum_was_taken_away() -> None:
    model = Tied()
    inner = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    opt = hu.WriteBack(inner, "e4m3@16", "eco", model=model)
    train(model, opt, 1)
    for group in inner.param_groups:
        group["momentum"] = 0.0
    with pytest.raises(hu.UsageError, match=r"momentum=0\.0"):
        opt.step()


# ---- parameters that are not what they were ----------------------------------------------------------

ONE_PASS: dict[str, Callable[[torch.nn.Module], Any]] = {
    "AdamW": MAKERS["AdamW"],
    "fused": MAKERS["fused"],
    "two passes": lambda m: hu.WriteBack(torch.optim.AdamW(m.parameters()), "bf16", "sr", model=m),
}


@pytest.mark.parametrize("kind", ONE_PASS)
def test_a_parameter_that_was_laid_out_anew(kind: str) -> None:
    """Kernels go by addresses: what is not contiguous any more is stepped in two passes, or refused."""
    ends = []
    for again in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Conv2d(8, 8, 3).bfloat16()
        opt = ONE_PASS[kind](model)
        if again:
            model.to(memory_format=torch.channels_last)
        for step in range(3):
            for p in model.parameters():
                made = torch.Generator().manual_seed(step)
                p.grad = torch.empty_like(p).copy_(torch.randn(p.shape, generator=made))  # laid out as p is
            if again and kind == "AdamW":
                with pytest.raises(hu.UsageError, match="'weight' is not contiguous"):
                    opt.step()
                return
            opt.step()
        ends.append({n: p.detach().clone() for n, p in model.named_parameters()})
    for name, value in ends[0].items():
        assert torch.equal(value, ends[1][name]), name


@pytest.mark.parametrize("kind", ONE_PASS)
def test_a_parameter_of_another_size(kind: str) -> None:
    """Nothing is written, neither there nor behind it."""
    model = torch.nn.Linear(16, 16, bias=False).bfloat16()
    opt = ONE_PASS[kind](model)
    with_gradients(model)
    opt.step()
    room = torch.full((16, 16), 0.25).bfloat16()
    model.weight.grad = None
    model.weight.data = room[:4]
    model.weight.grad = torch.ones(4, 16).bfloat16()
    with pytest.raises(hu.UsageError, match=r"'weight' had shape \(16, 16\) when .* and has \(4, 16\) now"):
        opt.step()
    assert bool((room == 0.25).all())
    assert opt.steps == 1


@pytest.mark.parametrize("kind", ONE_PASS)
def test_a_parameter_that_was_replaced(kind: str) -> None:
    model = torch.nn.Linear(4, 4, bias=False).bfloat16()
    opt = ONE_PASS[kind](model)
    other = torch.nn.Parameter(torch.ones(4, 4).bfloat16())
    other.grad = torch.ones(4, 4).bfloat16()
    opt.param_groups[0]["params"][0] = other
    with pytest.raises(hu.UsageError, match=r"'weight' is not where it was .*: another is in its place"):
        opt.step()
    opt.param_groups.clear()
    with pytest.raises(hu.UsageError, match=r"'weight' is not where it was .*: it is gone"):
        opt.step()
    assert bool((other == 1).all())


def test_in_backward_with_what_it_cannot_move() -> None:
    """Sparse gradients are refused by name; a frozen parameter gets no hook, and moves at step() later."""
    model = torch.nn.Embedding(4, 4, sparse=True).bfloat16()
    hu.AdamW(model.parameters(), model=model).in_backward()
    with pytest.raises(hu.UsageError, match=r"'weight' cannot be moved inside the backward: .*sparse"):
        model(torch.tensor([1])).sum().backward()
    pair = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)).bfloat16()
    opt = hu.AdamW(pair.parameters(), lr=1e-2, model=pair)
    pair[1].requires_grad_(False)
    handle = opt.in_backward()
    first, second = (layer.weight.detach().clone() for layer in pair)
    pair(torch.ones(1, 4).bfloat16()).sum().backward()
    opt.step()
    assert not torch.equal(pair[0].weight, first)
    assert torch.equal(pair[1].weight, second)
    pair[1].requires_grad_(True)
    pair(torch.ones(1, 4).bfloat16()).sum().backward()
    opt.step()
    assert not torch.equal(pair[1].weight, second)
    handle.remove()


def test_a_state_without_a_rate_is_refused() -> None:
    model = torch.nn.Linear(4, 4)
    opt = MAKERS["sr"](model)
    state = opt.state_dict()
    del state["param_groups"][0]["lr"]
    with pytest.raises(hu.CorruptionError, match="has no lr, which AdamW needs"):
        opt.load_state_dict(state)
    with_gradients(model)
    opt.step()
