"""ECO: the error goes into the first moment, only where there is one and only what could be brought back.

That every step equals the published rule, to the last bit, is in test_writeback_reference.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from writeback_reference import AdamW, gradients, weights

import halfulp as hu
from halfulp.writeback import ECO, WriteBackOptions

ULP = 2.0**-24  # a float32 operation's relative error
pytestmark = pytest.mark.usefixtures("one_thread")


def single(w: Any) -> torch.nn.Linear:
    w = torch.as_tensor(w, dtype=torch.float32)
    model = torch.nn.Linear(w.shape[1], w.shape[0], bias=False)
    with torch.no_grad():
        model.weight.copy_(w)
    return model


def step(opt: torch.optim.Optimizer, model: torch.nn.Linear, g: Any) -> None:
    model.weight.grad = torch.as_tensor(g, dtype=torch.float32).clone()
    opt.step()


def test_a_frozen_coordinate_without_decay_has_its_momentum_divided_by_beta() -> None:
    """m = m~ / b1. The float32 sum q - u loses up to half an ulp of q, which comes back multiplied by
    (c1 / lr) (1 / b1 - 1) D; the formula itself rounds eight times."""
    w = weights((16, 16))
    base = AdamW(lr=1e-4, weight_decay=0.0)
    model = single(w)
    opt = hu.WriteBack(base.torch(model.parameters()), "e4m3", "eco", model=model)
    checked = 0
    for g in gradients(w.shape, 5):
        base.m = opt.state[model.weight]["exp_avg"].numpy().copy() if base.t else base.m
        before = model.weight.detach().numpy().copy()
        base.step(before, g)  # m~ and v
        step(opt, model, g)
        frozen = model.weight.detach().numpy() == before
        m, b1 = opt.state[model.weight]["exp_avg"].numpy(), base.betas[0]
        c1 = 1 - b1**base.t
        d = np.sqrt(base.v / (1 - base.betas[1] ** base.t)) + base.eps
        bound = c1 / base.lr * (1 / b1 - 1) * d * ULP * np.abs(before) + 8 * ULP * np.abs(base.m / b1)
        error = np.abs(m.astype(np.float64) - base.m.astype(np.float64) / b1)
        assert (error[frozen] <= bound[frozen]).all()
        checked += int(frozen.sum())
    assert checked > 1000


def test_sgd_momentum_is_divided_by_its_factor() -> None:
    """The same for SGD: m = m~ / b. With powers of two nothing is rounded, so it is exact."""
    model = single(torch.ones(4, 4))
    opt = hu.WriteBack(
        torch.optim.SGD(model.parameters(), lr=2.0**-10, momentum=0.5), "e4m3", "eco", model=model
    )
    expected = torch.zeros(4, 4)
    for _ in range(4):
        expected = 2 * (expected / 2 + 1)
        step(opt, model, torch.ones(4, 4))
        assert torch.equal(opt.state[model.weight]["momentum_buffer"], expected)
        assert torch.equal(model.weight.detach(), torch.ones(4, 4))


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_a_proposal_below_half_a_gap_gets_through(kind: str) -> None:
    """Steps of a fortieth of a gap: nearest loses every one, eco keeps up with the unrounded run.

    How far behind it may be: the moment grows until one step crosses half a gap, and a moment that makes a
    step of u will have moved u b / (1 - b) more when it has decayed. That is nine half gaps, and one gap.
    """
    gap, moved = 2.0**-8, {}  # bf16's below 1
    for policy in ("rne", "eco"):
        model = single(torch.ones(8, 8))
        base = (
            torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)
            if kind == "adamw"
            else torch.optim.SGD(model.parameters(), lr=1e-5, momentum=0.9)
        )
        opt = hu.WriteBack(base, "bf16", policy, model=model)
        for _ in range(1000):
            step(opt, model, torch.ones(8, 8))
        moved[policy] = float(model.weight.detach().mean())
    assert moved["rne"] == 1.0
    assert abs(moved["eco"] - 0.9) <= 9 * gap / 2 + gap


def test_sgd_conserves_where_the_moment_leads() -> None:
    """q - lr b / (1 - b) m, where the moment ends if gradients stop, is the unrounded run's, step by step.

    In float64 and with gradients that do not depend on the weights, up to the rounding of 200 steps of
    numbers below 8 by a few operations each: 200 * 8 * 2**-53 * 8.
    """
    lr, b = 1e-3, 0.9
    w, plain = (torch.nn.Linear(8, 8, bias=False).double() for _ in range(2))
    plain.load_state_dict({"weight": hu.grid("e4m3").round(w.weight.detach())})
    opt = hu.WriteBack(torch.optim.SGD(w.parameters(), lr, b), "e4m3", "eco", model=w)
    alone = torch.optim.SGD(plain.parameters(), lr, b)
    for g in gradients((8, 8), 200):
        leads = []
        for m, o in ((w, opt), (plain, alone)):
            m.weight.grad = torch.from_numpy(g).double()
            o.step()
            leads.append(m.weight.detach() - lr * b / (1 - b) * o.state[m.weight]["momentum_buffer"])
        assert float((leads[0] - leads[1]).abs().max()) <= 200 * 8 * 2.0**-53 * 8
    assert not torch.equal(w.weight, plain.weight)


def test_a_rate_of_zero_feeds_nothing_back() -> None:
    """c1 / lr has no value; the moments are the plain optimizer's."""
    w, plain = weights((8, 8)), single(weights((8, 8)))
    model = single(w)
    for m, wrap in ((model, True), (plain, False)):
        base: Any = torch.optim.AdamW(m.parameters(), lr=0.0)
        opt = hu.WriteBack(base, "e4m3", "eco", model=m) if wrap else base
        for g in gradients(w.shape, 3):
            step(opt, m, g)
        m.moments = base.state[m.weight]
    assert torch.equal(model.moments["exp_avg"], plain.moments["exp_avg"])
    assert torch.equal(model.weight.detach(), hu.grid("e4m3").round(torch.from_numpy(w)))


@pytest.mark.parametrize("rate", [1e-40, 1e-38, 1e-30, 1e-310])
@pytest.mark.parametrize("kind", ["SGD", "AdamW", "Adam"])
@pytest.mark.parametrize("grid", ["bf16", "mxfp8_e4m3"])
def test_what_a_moment_cannot_hold_is_not_fed_back(grid: str, kind: str, rate: float) -> None:
    """Moments stay finite, element by element; in one pass, in pieces and in two passes they are the same.

    Weights of a million have errors that 1 / rate makes infinite; those of zero have tiny ones.
    """
    options: dict[str, Any] = {"lr": rate} | ({"momentum": 0.9} if kind == "SGD" else {"eps": 1.0})
    found: dict[str, torch.Tensor] = {}
    for way in ("two passes", "one pass", "nearest", "not fused", "halfulp"):
        model = single(torch.from_numpy(weights((33, 64))) * 1e6)
        policy = "rne" if way == "nearest" else "eco"
        if way == "halfulp":
            opt: Any = getattr(hu, kind)(model.named_parameters(), grid="bf16", policy=policy, **options)
        else:
            base = getattr(torch.optim, kind)(model.parameters(), fused=way != "not fused", **options)
            opt = hu.WriteBack(
                base, grid, policy, model=model, options=WriteBackOptions(one_pass=way == "one pass")
            )
        with torch.no_grad():  # somebody leaves the grid, so that there are errors
            model.weight.add_(torch.from_numpy(weights((33, 64))) * 1e3)
        off = hu.grid(grid).round(model.weight.detach()) != model.weight.detach()
        step(opt, model, torch.full((33, 64), 0.5))
        found[way] = opt.state[model.weight]["momentum_buffer" if kind == "SGD" else "exp_avg"].clone()
        assert bool(torch.isfinite(found[way]).all())
        step(opt, model, torch.full((33, 64), 0.5))
        assert not opt.events.nonfinite
    assert torch.equal(found["one pass"], found["two passes"])
    fed = found["one pass"] != found["nearest"]
    assert bool(off.any())
    assert bool(fed.any()) == (rate > 1e-40 or (rate == 1e-40 and kind != "SGD"))


def test_a_saturated_error_is_not_fed_back() -> None:
    """Beyond the largest code the error grows without bound and could never be written."""
    model, plain = single(torch.full((2, 2), 448.0)), single(torch.full((2, 2), 448.0))
    opt = hu.WriteBack(torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9), "e4m3", "eco", model=model)
    alone = torch.optim.SGD(plain.parameters(), lr=1.0, momentum=0.9)
    g = torch.tensor([[-100.0, -1.0], [1.0, 100.0]])
    for _ in range(3):
        step(opt, model, g)
        step(alone, plain, g)
    fed = opt.state[model.weight]["momentum_buffer"]
    assert torch.equal(fed[0], alone.state[plain.weight]["momentum_buffer"][0])  # outwards: as without eco
    assert bool((fed[1] != alone.state[plain.weight]["momentum_buffer"][1]).all())  # inwards: fed back
    assert torch.equal(model.weight.detach()[0], torch.full((2,), 448.0))


def test_amsgrad_divides_by_the_largest_second_moment() -> None:
    """A large first gradient keeps D large; the frozen coordinate's moment is still m~ / b1."""
    model = single(torch.ones(2, 2))
    base = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0, amsgrad=True, betas=(0.5, 0.5))
    opt = hu.WriteBack(base, "e4m3", "eco", model=model)
    m = 0.0
    for g in (8.0, 1.0, 1.0):
        step(opt, model, torch.full((2, 2), g))
        m = (0.5 * m + 0.5 * g) / 0.5
    # The update is near 1e-4, so half an ulp of 1 is 6e-4 of the error that is fed back.
    assert opt.state[model.weight]["exp_avg"].flatten().tolist() == pytest.approx([m] * 4, rel=2e-3)


REFUSED = {
    "betas[0] = 0": (lambda p: torch.optim.AdamW(p, betas=(0.0, 0.95)), r"AdamW.*betas\[0\] = 0"),
    "plain SGD": (lambda p: torch.optim.SGD(p, lr=0.1), "momentum=0"),
    "nesterov": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True), "nesterov=True"),
    "Adagrad": (torch.optim.Adagrad, "Adagrad"),
    "RMSprop": (torch.optim.RMSprop, "RMSprop"),
    "RMSprop with momentum": (lambda p: torch.optim.RMSprop(p, momentum=0.9), "RMSprop"),
    "Adamax": (torch.optim.Adamax, "Adamax"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_an_optimizer_without_such_a_moment_is_refused(kind: str) -> None:
    """Before anything is changed, with the optimizer's name."""
    make, match = REFUSED[kind]
    model = single(weights((4, 4)))
    before = model.weight.detach().clone()
    with pytest.raises(hu.UsageError, match=match):
        hu.WriteBack(make(model.parameters()), "e4m3", "eco", model=model)
    assert torch.equal(model.weight.detach(), before)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD])
def test_exact_decay_needs_decoupled_decay(kind: Any) -> None:
    """Coupled decay passes through the gradient: there is no factor 1 - lr * weight_decay to make exact."""
    model = single(weights((4, 4)))
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    with pytest.raises(hu.UsageError, match=f"decay_exact.*{kind.__name__}"):
        hu.WriteBack(kind(model.parameters(), lr=0.1, **options), "e4m3", ECO(decay_exact=True), model=model)


def test_exact_decay_of_an_adam_whose_decay_is_decoupled() -> None:
    """torch's Adam has the option: then it is AdamW, by another name."""
    ends = []
    for kind, options in ((torch.optim.Adam, {"decoupled_weight_decay": True}), (torch.optim.AdamW, {})):
        model = single(weights((4, 4)))
        inner = kind(model.parameters(), lr=0.1, weight_decay=0.1, **options)
        opt = hu.WriteBack(inner, "e4m3", ECO(decay_exact=True), model=model)
        for _ in range(3):
            opt.zero_grad()
            model(torch.ones(1, 4)).sum().backward()
            opt.step()
        ends.append(model.weight.detach())
    assert torch.equal(*ends)


def test_adam_with_coupled_decay_and_maximize() -> None:
    """Adam's moments are AdamW's; a maximised objective only turns the gradient."""
    w = weights((8, 8))
    runs = []
    for maximize, sign in ((False, 1), (True, -1)):
        model = single(w)
        base = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=0.0, maximize=maximize)
        opt = hu.WriteBack(base, "bf16", "eco", model=model)
        for g in gradients(w.shape, 20):
            step(opt, model, sign * g)
        runs.append((model.weight.detach(), base.state[model.weight]["exp_avg"]))
    assert torch.equal(runs[0][0], runs[1][0])
    assert torch.equal(runs[0][1], runs[1][1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_single_number(dtype: torch.dtype) -> None:
    """As the temperature of a contrastive loss, which a bfloat16 model has on the grid by default."""
    p = torch.nn.Parameter(torch.tensor(1.5, dtype=dtype))
    optimizer = hu.WriteBack(
        torch.optim.AdamW([("s", p)], lr=1e-2), "bf16", "eco", params=lambda _n, _p: True
    )
    for _ in range(3):
        optimizer.zero_grad()
        p.square().backward()
        optimizer.step()
    assert 1.4 < p.item() < 1.5
