"""``hu.AdamW``, ``Adam``, ``SGD`` and ``Lion``: torch's options, defaults, rates, resumed runs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from onepass_cases import real
from onepass_models import adamw, assert_same_dicts, give_gradients, kept_of, model_of

import halfulp as hu
from halfulp.writeback import WriteBackOptions


def test_a_resumed_adamw_goes_on_bit_for_bit() -> None:
    models = [model_of(torch.bfloat16), model_of(torch.bfloat16)]
    opts = [adamw(m) for m in models]
    for step in range(6):
        if step == 3:
            weights, state = models[1].state_dict(), opts[1].state_dict()
            models[1] = model_of(torch.bfloat16)
            models[1].load_state_dict(weights)
            opts[1] = adamw(models[1])
            opts[1].load_state_dict(state)
        for model, opt in zip(models, opts, strict=True):
            give_gradients(model, step)
            opt.step()
    assert_same_dicts([models[0].state_dict()], [models[1].state_dict()])
    assert_same_dicts(kept_of(opts[0]), kept_of(opts[1]))
    assert {x.dtype for s in kept_of(opts[0])[len(opts[0].slots) :] for k, x in s.items() if k != "step"} == {
        torch.bfloat16
    }


def test_defaults_are_torchs() -> None:
    """Who puts one in the place of torch's own gets the same run, weight decay included."""
    for ours, theirs in ((hu.AdamW, torch.optim.AdamW), (hu.Adam, torch.optim.Adam)):
        mine, plain = (
            make(torch.nn.Linear(4, 4).named_parameters()).param_groups[0] for make in (ours, theirs)
        )
        assert {key: mine[key] for key in ("lr", "betas", "eps", "weight_decay")} == {
            key: plain[key] for key in ("lr", "betas", "eps", "weight_decay")
        }


def test_a_bfloat16_model_has_its_norms_on_the_grid() -> None:
    """Gains of exactly 1 do not move under nearest at a small rate; under sr they do."""
    still, moving = {}, {}
    for policy, found in (("rne", still), ("sr", moving)):
        model = torch.nn.Sequential(torch.nn.LayerNorm(768)).bfloat16()
        opt = hu.AdamW(model.named_parameters(), lr=6e-4, grid="bf16", policy=policy, select=["0.weight"])
        for step in range(100):
            give_gradients(model, step)
            opt.step()
        found["moved"] = int((model[0].weight != 1).sum())
    assert still["moved"] == 0
    assert moving["moved"] > 500


OPTIMIZERS = (hu.AdamW, hu.Adam, hu.SGD, hu.Lion)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_options_of_torchs_that_change_nothing(kind: Any) -> None:
    results = []
    for options in (
        {},
        {"fused": True, "capturable": False, "amsgrad": False},
        {"foreach": True, "maximize": False},
    ):
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 8).bfloat16()
        opt = kind(model.named_parameters(), lr=1e-2, **options)
        model(torch.ones(2, 8).bfloat16()).sum().backward()
        opt.step()
        results.append(model.weight.detach().clone())
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, True) for name in ("amsgrad", "maximize", "capturable", "differentiable", "fuse")),
        ("decoupled_weight_decay", True),
        ("one_pass", False),
    ],
)
def test_options_that_one_pass_has_not(kind: Any, name: str, value: bool) -> None:
    model = torch.nn.Linear(8, 8).bfloat16()
    with pytest.raises(
        hu.UsageError, match=rf"halfulp\.{kind.__name__} does not support {name}={value}; .*WriteBack\("
    ):
        kind(model.named_parameters(), **{name: value})


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("rate", [real(1e-2), np.float64(1e-2), torch.tensor(1e-2), 1])
def test_a_rate_is_any_number(kind: Any, rate: Any) -> None:
    """Given, and set in mid-run as schedulers do; the biases here are not on the grid."""
    results = []
    for given in (rate, float(rate)):
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 8)
        opt = kind(model.named_parameters(), lr=given)
        for step in range(2):
            give_gradients(model, step)
            opt.param_groups[0]["lr"] = given
            opt.step()
        results.append(model.state_dict())
    assert_same_dicts(results[:1], results[1:])


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("rate", ["1e-2", torch.ones(2), math.inf, None])
def test_a_rate_that_is_no_number(kind: Any, rate: Any) -> None:
    model = torch.nn.Linear(8, 8)
    with pytest.raises(hu.UsageError, match="lr must be a number, such as 1e-5"):
        kind(model.named_parameters(), lr=rate)
    opt = kind(model.named_parameters(), lr=1e-2)
    give_gradients(model, 0)
    opt.param_groups[0]["lr"] = rate
    with pytest.raises(hu.UsageError, match="not plain finite numbers"):
        opt.step()


def test_options_of_a_write_back() -> None:
    model = torch.nn.Linear(8, 8).bfloat16()
    options = WriteBackOptions(telemetry=False)
    assert hu.AdamW(model.named_parameters(), project="none", options=options).project == "none"


@pytest.mark.parametrize("moments", ["bfloat16", torch.bfloat16, "BF16"])
def test_moments_take_any_spelling_of_their_type(moments: Any) -> None:
    opt = hu.AdamW([torch.nn.Parameter(torch.ones(4, 4).bfloat16())], moments=moments)
    assert opt.moments == hu.AdamW([torch.nn.Parameter(torch.ones(4, 4).bfloat16())], moments="bf16").moments
