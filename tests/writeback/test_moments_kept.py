"""Moments of eight bits: a step is that of float32 moments between two codings, and a run goes on from its
state bit for bit, from its own and from others'."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import assert_same

import halfulp as hu
from halfulp.kernels import coded_moments
from halfulp.kernels.coded_moments import decode
from halfulp.numbers.streams import Stream
from halfulp.writeback import moments_kept
from halfulp.writeback.saving.one_file import load, save

RULES: dict[str, Any] = {"AdamW": hu.AdamW, "Adam": hu.Adam, "SGD": hu.SGD, "Lion": hu.Lion}


def made() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(64, 50), torch.nn.LayerNorm(50), torch.nn.Linear(50, 7)
    ).bfloat16()


def optimizer(model: torch.nn.Module, kind: str = "AdamW", moments: Any = "int8", **more: Any) -> Any:
    more |= {"momentum": 0.9} if kind == "SGD" else {}
    return RULES[kind](model.named_parameters(), lr=3e-3, weight_decay=0.1, seed=4, moments=moments, **more)


def train(model: torch.nn.Module, opt: Any, steps: range) -> None:
    for step in steps:
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step)).bfloat16()
        opt.zero_grad()
        model(x).float().square().mean().backward()
        opt.step()


def everything(opt: Any) -> dict[str, torch.Tensor]:
    """Weights, moments and what policies keep, by name."""
    found = {}
    for slot in opt.slots:
        found[slot.name] = slot.p.detach()
        for part in (slot.kept_tensors(), opt.optimizer.state[slot.stepped]):
            found.update({f"{slot.name} {k}": v for k, v in part.items()})
    return found


def assert_equal(a: Any, b: Any) -> None:
    ours, theirs = everything(a), everything(b)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert_same(ours[name], value, name)


@pytest.mark.parametrize("kind", RULES)
@pytest.mark.parametrize("policy", ["sr", "remainder8", "kahan"])
def test_a_step_is_that_of_float32_moments_between_codings(
    kind: str, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks of two tiles, so that tensors have several: decoded, stepped, coded by their draws."""
    coded, plain = made(), made()
    a, b = optimizer(coded, kind, policy=policy), optimizer(plain, kind, "fp32", policy=policy)
    for step in range(5):
        for slot, other in zip(a.slots, b.slots, strict=True):
            mine, theirs = a.optimizer.state[slot.stepped], b.optimizer.state[other.stepped]
            for key in (k for k in theirs if k != "step" and len(slot.shape) > 1):
                decode(moments_kept.coded(mine, key), theirs[key])
        train(coded, a, range(step, step + 1))
        train(plain, b, range(step, step + 1))
        assert a.events == b.events
        for slot, other in zip(a.slots, b.slots, strict=True):
            assert_same(slot.p.detach(), other.p.detach(), slot.name)
            mine, theirs = a.optimizer.state[slot.stepped], b.optimizer.state[other.stepped]
            for key in (k for k in theirs if k != "step"):
                if len(slot.shape) == 1:
                    assert_same(mine[key], theirs[key], f"{slot.name} {key}")
                    continue
                stream = Stream(seed=4, name=f"{slot.name}\0moments", step=step + 1, bits=16)
                second = key == "exp_avg_sq"
                codes, scales = coded_moments.encoded(
                    theirs[key].numpy().reshape(-1), stream.words(theirs[key].numel()), second=second
                )
                assert_same(mine[key + "_codes"].reshape(-1), torch.from_numpy(codes), key)
                assert_same(mine[key + "_scales"].reshape(-1), torch.from_numpy(scales), key)


def test_what_they_cost() -> None:
    """A byte each and a 16th for scales, beside bfloat16 weights; gains and biases keep float32 moments."""
    model = torch.nn.Linear(1024, 512).bfloat16()
    opt = hu.AdamW(model.named_parameters(), moments="int8")
    model(torch.ones(1, 1024).bfloat16()).sum().backward()
    opt.step()
    weight, bias = (opt.optimizer.state[slot.stepped] for slot in opt.slots)
    held = sum(x.nbytes for k, x in weight.items() if k != "step") + model.weight.nbytes
    assert held / model.weight.numel() == 4.125
    assert bias["exp_avg"].dtype == bias["exp_avg_sq"].dtype == torch.float32


@pytest.mark.parametrize("kind", RULES)
def test_a_resumed_run_goes_on_bit_for_bit(kind: str, tmp_path: Path) -> None:
    """From torch's file and from ours."""
    whole = made()
    one = optimizer(whole, kind)
    train(whole, one, range(3))
    file, weights = io.BytesIO(), copy.deepcopy(whole.state_dict())
    torch.save(one.state_dict(), file)
    save(one, tmp_path / "state.safetensors")
    train(whole, one, range(3, 6))
    for how in ("torch", "ours"):
        model = made()
        model.load_state_dict(weights)
        opt = optimizer(model, kind)
        if how == "torch":
            file.seek(0)
            opt.load_state_dict(torch.load(file, weights_only=True))
        else:
            load(opt, tmp_path / "state.safetensors")
        train(model, opt, range(3, 6))
        assert_equal(opt, one)


@pytest.mark.parametrize("other", ["fp32", "bf16", "WriteBack"])
def test_a_run_goes_on_with_moments_of_another_form(other: str) -> None:
    """Codes become the values that they stand for, and values become codes."""
    model = made()
    opt = optimizer(model)
    train(model, opt, range(3))
    there = copy.deepcopy(model)
    if other == "WriteBack":
        inner = torch.optim.AdamW(there.named_parameters(), lr=3e-3, weight_decay=0.1, fused=True)
        wide: Any = hu.WriteBack(inner, "bf16", "sr", seed=4)
    else:
        wide = optimizer(there, moments=other)
    wide.load_state_dict(opt.state_dict())
    slot, mine = wide.slots[0], opt.slots[0]
    values = torch.empty(mine.shape)
    decode(moments_kept.coded(opt.optimizer.state[mine.stepped], "exp_avg"), values)
    dtype = torch.bfloat16 if other == "bf16" else torch.float32
    assert_same(wide.optimizer.state[slot.stepped]["exp_avg"], values.to(dtype), "decoded")
    train(there, wide, range(3, 6))
    back = optimizer(copy.deepcopy(there))
    back.load_state_dict(wide.state_dict())
    entry = back.optimizer.state[back.slots[0].stepped]
    assert entry["exp_avg_codes"].dtype == torch.int8
    assert entry["exp_avg_sq_codes"].dtype == torch.uint8
    decode(moments_kept.coded(entry, "exp_avg"), values)
    now = wide.optimizer.state[slot.stepped]["exp_avg"].float()
    assert float((values - now).norm() / now.norm()) < 0.02


def test_a_plain_state_is_taken_over() -> None:
    model = made()
    plain = torch.optim.AdamW(model.parameters(), lr=3e-3)
    train(model, plain, range(3))
    opt = optimizer(model)
    opt.load_state_dict(plain.state_dict())
    assert set(opt.optimizer.state[opt.slots[0].stepped]) == {
        "step", "exp_avg_codes", "exp_avg_scales", "exp_avg_sq_codes", "exp_avg_sq_scales"
    }  # fmt: skip
    train(model, opt, range(3, 5))


def test_steps_inside_the_backward() -> None:
    a, b = made(), made()
    inside, outside = optimizer(a), optimizer(b)
    inside.in_backward()
    train(a, inside, range(3))
    train(b, outside, range(3))
    assert_equal(inside, outside)


def test_codes_are_no_moments_of_anybody_else() -> None:
    """Plain torch does not find the moments, rather than taking codes for them."""
    model = made()
    opt = optimizer(model)
    train(model, opt, range(2))
    saved = opt.state_dict()
    plain = torch.optim.AdamW(model.parameters(), lr=3e-3)
    plain.load_state_dict(saved)
    with pytest.raises(KeyError, match="exp_avg"):
        plain.step()


def test_what_is_refused() -> None:
    with pytest.raises(hu.UsageError, match="one of fp32, bf16, int8, not 'int4'"):
        optimizer(made(), moments="int4")
