"""What tensors are called: names given twice are told apart, and without names places serve."""

from __future__ import annotations

import copy
import json
import logging
from typing import Any

import pytest
import torch
from oracle import assert_same

import halfulp as hu
from halfulp.writeback import ECO, WriteBackOptions

STEPS, STOP = 4, 2


def layers(seed: int = 0) -> tuple[torch.nn.Linear, torch.nn.Linear]:
    """Two networks that are alike to the last bit, as an actor and a critic may be."""
    torch.manual_seed(seed)
    actor = torch.nn.Linear(16, 16)
    return actor, copy.deepcopy(actor)


def step(opt: torch.optim.Optimizer, number: int) -> None:
    """Give every parameter of one shape the same gradient, and step."""
    for p in (p for g in opt.param_groups for p in g["params"] if p.requires_grad):
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(number)).to(p.dtype)
    opt.step()


def names(opt: hu.WriteBack) -> list[str]:
    return [slot.name for slot in opt.slots]


def made(kind: str, groups: Any) -> hu.WriteBack:
    """A write-back of each kind, with nothing but parameters."""
    if kind == "WriteBack":
        return hu.WriteBack(torch.optim.AdamW(groups, lr=1e-2), "e4m3@16", "sr")
    one: Any = getattr(hu, kind)
    opt: hu.WriteBack = one(groups, lr=1e-2, grid="e4m3@16", select=lambda _n, p: p.dim() >= 2)
    return opt


KINDS = ["WriteBack", "AdamW", "Adam", "SGD", "Lion"]


# ---- one name twice ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_two_tensors_of_one_name_have_draws_of_their_own(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """As the audit calls them; the log says so, once."""
    actor, critic = layers()
    with caplog.at_level(logging.INFO, "halfulp"):
        opt = made(kind, [*actor.named_parameters(), *critic.named_parameters()])
        said = [r.getMessage() for r in caplog.records if "several tensors called" in r.getMessage()]
        assert len(said) == 1
        assert "'weight'" in said[0]
        assert "'weight#2'" in said[0]
        step(opt, 0)
    assert names(opt) == ["weight", "weight#2"]
    assert not torch.equal(actor.weight, critic.weight)
    assert_same(actor.bias.detach(), critic.bias.detach())  # not on the grid: nothing is drawn
    assert [r.name for r in opt.events.rows] == names(opt)
    with hu.Audit(opt, ["e4m3@16"]) as audit:
        step(opt, 1)
    assert audit.latest is not None
    assert set(audit.latest["tensors"]) >= {"weight", "weight#2"}


def test_the_first_of_a_name_draws_as_it_did_alone() -> None:
    """Whoever has names that differ sees no change; who has not, none in the first of them."""
    actor, critic = layers()
    alone, _ = layers()
    both, one = (
        made("WriteBack", p)
        for p in ([*actor.named_parameters(), *critic.named_parameters()], alone.named_parameters())
    )
    for number in range(STEPS):
        step(both, number)
        step(one, number)
    assert_same(actor.weight.detach(), alone.weight.detach())


@pytest.mark.parametrize("kind", KINDS)
def test_numbered_names_last_over_a_resume(kind: str) -> None:
    """Bit for bit, with one of the two frozen and unfrozen on the way, and a third added."""

    def begun() -> tuple[list[torch.nn.Linear], hu.WriteBack]:
        actor, critic = layers()
        third, _ = layers(1)
        actor.weight.requires_grad_(False)
        opt = made(kind, [*actor.named_parameters(), *critic.named_parameters()])
        opt.add_param_group({"params": list(third.named_parameters())})
        return [actor, critic, third], opt

    def run(nets: list[torch.nn.Linear], opt: hu.WriteBack, first: int, last: int) -> None:
        for number in range(first, last):
            nets[0].weight.requires_grad_(number > 0)
            step(opt, number)

    whole, opt = begun()
    assert names(opt) == ["weight#2", "weight#3"]  # the first is frozen, and has its name already
    run(whole, opt, 0, STEPS)
    assert sorted(names(opt)) == ["weight", "weight#2", "weight#3"]
    half, opt = begun()
    run(half, opt, 0, STOP)
    saved = copy.deepcopy((opt.state_dict(), [net.state_dict() for net in half]))
    nets, opt = begun()
    for net, state in zip(nets, saved[1], strict=True):
        net.load_state_dict(state)
    opt.load_state_dict(saved[0])
    run(nets, opt, STOP, STEPS)
    for a, b in zip(whole, nets, strict=True):
        assert_same(a.weight.detach(), b.weight.detach())


def test_a_state_from_before_names_were_numbered() -> None:
    """It goes on: the second tensor has draws of its own from there."""
    nets = layers()
    opt = made("WriteBack", [p for net in nets for p in net.named_parameters()])
    step(opt, 0)
    saved = copy.deepcopy(opt.state_dict())
    line = json.loads(saved["param_groups"][0]["halfulp"])
    line["parameters"]["2"][0] = "weight"
    saved["param_groups"][0]["halfulp"] = json.dumps({**line, "sha256": None})
    opt.load_state_dict(saved)
    assert names(opt) == ["weight", "weight#2"]
    line["parameters"]["2"][0] = "other"
    saved["param_groups"][0]["halfulp"] = json.dumps({**line, "sha256": None})
    with pytest.raises(hu.UsageError, match="the state has name 'other', this WriteBack 'weight#2'"):
        opt.load_state_dict(saved)


def test_names_that_differ_are_not_spoken_of(caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.ModuleList(layers())
    with caplog.at_level(logging.INFO, "halfulp"):
        opt = hu.WriteBack(torch.optim.AdamW(model.parameters(), lr=1e-2), "e4m3@16", "sr", model=model)
    assert names(opt) == ["0.weight", "1.weight"]
    assert not caplog.records


# ---- no names ---------------------------------------------------------------------------------------


def groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    """With weight decay and without, as Trainer has them."""
    return [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_without_names_places_are_names(kind: str) -> None:
    """Group and place: two tensors of one shape draw differently, and the same after a resume."""

    def begun() -> tuple[torch.nn.Module, hu.WriteBack]:
        model = torch.nn.ModuleList(layers())
        return model, made(kind, groups(model))

    whole, opt = begun()
    assert names(opt) == ["0.0", "0.1"]
    for number in range(STEPS):
        step(opt, number)
    first, second = (p.detach() for p in whole.parameters() if p.dim() >= 2)
    assert not torch.equal(first, second)
    half, opt = begun()
    for number in range(STOP):
        step(opt, number)
    state, weights = copy.deepcopy((opt.state_dict(), half.state_dict()))
    rest, opt = begun()
    rest.load_state_dict(weights)
    opt.load_state_dict(state)
    for number in range(STOP, STEPS):
        step(opt, number)
    for a, b in zip(whole.parameters(), rest.parameters(), strict=True):
        assert_same(a.detach(), b.detach())


def test_a_place_is_the_key_of_a_stream() -> None:
    """The same tensor in another place draws otherwise; by its name it draws the same in any place."""
    found: dict[tuple[bool, int], torch.Tensor] = {}
    for named in (False, True):
        for turn in (1, -1):
            model = torch.nn.ModuleDict({"a": layers()[0], "b": layers(1)[0]})
            given: Any = list(model.named_parameters() if named else model.parameters())[::turn]
            opt = made("WriteBack", given)
            step(opt, 0)
            found[named, turn] = model["a"].weight.detach().clone()
    assert not torch.equal(found[False, 1], found[False, -1])
    assert_same(found[True, 1], found[True, -1])


@pytest.mark.parametrize("policy", ["sr", "deadzone-sr", ECO("stochastic"), "remainder8"], ids=str)
def test_every_policy_that_draws_does_without_names(policy: Any) -> None:
    weights = [torch.nn.Parameter(torch.ones(32, 32).bfloat16()) for _ in range(2)]
    opt = hu.WriteBack(torch.optim.AdamW(weights, lr=1e-3), "bf16", policy)
    step(opt, 0)
    step(opt, 1)
    assert not torch.equal(*(p.detach() for p in weights))


def test_a_stochastic_projection_without_names() -> None:
    weights = [torch.nn.Parameter(torch.full((32, 32), 1.01)) for _ in range(2)]
    hu.WriteBack(torch.optim.AdamW(weights), "e4m3", "rne", project="stochastic")
    assert not torch.equal(*(p.detach() for p in weights))


def test_names_of_the_model_come_first() -> None:
    model = torch.nn.ModuleList(layers())
    opt = hu.AdamW(model.parameters(), lr=1e-2, grid="e4m3@16", model=model)
    assert names(opt) == ["0.weight", "1.weight"]


def test_a_place_that_is_another_tensors_name() -> None:
    """The model's own 0.1 and the place 0.1 are told apart like any two of one name."""
    model = torch.nn.Sequential(torch.nn.ParameterList([torch.ones(4, 4), torch.ones(4, 4)]))
    other = torch.nn.Parameter(torch.ones(4, 4))
    opt = hu.WriteBack(torch.optim.AdamW([model[0][1], other], lr=1e-2), "e4m3@16", "sr", model=model)
    assert names(opt) == ["0.1", "0.1#2"]


# ---- a first gradient that comes later --------------------------------------------------------------


@pytest.mark.parametrize("dampening", [0.0, 0.25])
@pytest.mark.parametrize("kind", ["hu.SGD", "fused", "two passes"])
def test_a_bias_whose_first_gradient_comes_later(kind: str, dampening: float) -> None:
    """torch's fused SGD fails on it beside tensors with a momentum. Every number here is exact, so that the
    bias moves as under torch's plain SGD, bit for bit."""
    model, plain = (torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))
    other = torch.nn.Parameter(torch.ones(3))
    torch.nn.init.zeros_(model.bias)
    torch.nn.init.zeros_(plain.bias)
    options: dict[str, Any] = {"lr": 0.5, "momentum": 0.75, "dampening": dampening}
    params = [("other", other), *model.named_parameters()]
    opt: hu.WriteBack
    if kind == "hu.SGD":
        opt = hu.SGD(params, grid="e4m3@16", policy="rne", select=["weight"], **options)
    else:
        inner = torch.optim.SGD(params, fused=True, **options)
        opt = hu.WriteBack(
            inner, "e4m3@16", "rne", options=WriteBackOptions(one_pass=kind == "fused"), params=["weight"]
        )
    alone = torch.optim.SGD([plain.bias], foreach=False, **options)
    for number in range(3):
        model.weight.grad, other.grad = torch.ones(16, 16), torch.ones(3)
        g = torch.randint(-8, 8, (16,), generator=torch.Generator().manual_seed(number)) * 2.0**-5
        model.bias.grad, plain.bias.grad = (None, None) if number == 0 else (g, g.clone())
        opt.step()
        alone.step()
        if number:
            assert model.bias.grad is g
    assert_same(model.bias.detach(), plain.bias.detach())
    assert bool((plain.bias != 0).any())
