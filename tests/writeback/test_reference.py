"""Every policy against the same in plain NumPy, bit for bit: weights, moments, carries, masters, counts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from oracle import assert_same
from writeback_reference import OPTIMIZERS, AdamW, Momentum, Twin, gradients, weights

import halfulp as hu
from halfulp.kernels import reference
from halfulp.writeback import ECO, Kahan, Master

SHAPE = (37, 45)  # two whole tiles and a part of one
STEPS = 50

SOME_TILES = hu.TileMaster({"weight": torch.tensor([False, True, True])})
POLICIES = {
    "rne": "rne",
    "sr": "sr",
    "deadzone-sr": "deadzone-sr",
    "eco": "eco",
    "eco, stochastic": ECO(rounding="stochastic"),
    "kahan": "kahan",
    "master": "master",
    "master from raw": Master(start_from="raw"),
    "some tiles": SOME_TILES,
    "some tiles from raw": hu.TileMaster(SOME_TILES.mask, start_from="raw"),
}
COUNTS = ("frozen", "zero_proposal", "endpoint", "nonfinite", "never_moved")
pytestmark = pytest.mark.usefixtures("one_thread")


def linear(w: np.ndarray) -> torch.nn.Linear:
    model = torch.nn.Linear(w.shape[1], w.shape[0], bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.from_numpy(w))
    return model


def assert_equal_runs(base: AdamW | Momentum, policy: Any, grid: str, **options: Any) -> np.ndarray:
    """Step WriteBack and its twin side by side; how often each coordinate was frozen."""
    w = weights(SHAPE)
    model, twin = linear(w), Twin(w, grid, policy, base, seed=7)
    opt = hu.WriteBack(base.torch(model.parameters()), grid, policy, model=model, seed=7, **options)
    assert_same(model.weight.detach(), twin.q, "projection")
    frozen = np.zeros(SHAPE, int)
    for t, g in enumerate(gradients(SHAPE, STEPS), start=1):
        before = twin.q.copy()
        model.weight.grad = torch.from_numpy(g.copy())
        opt.step()
        expected = twin.step(g)
        row = opt.events["weight"]
        assert {k: getattr(row, k) for k in COUNTS} == expected, f"counts of step {t}"
        assert opt.events.step == t
        assert_same(model.weight.detach(), twin.q, f"weights of step {t}")
        kept = opt.slots[0].state
        assert set(kept) == set(twin.kept())
        for key, value in twin.kept().items():
            assert_same(kept[key], value, f"{key} of step {t}")
        for key, value in twin.optimizer.moments().items():
            assert_same(opt.state[model.weight][key], value, f"{key} of step {t}")
        assert torch.equal(opt.slots[0].moved, torch.from_numpy(np.packbits(twin.moved, bitorder="little")))
        frozen += twin.q == before
    return frozen


@pytest.mark.parametrize("grid", ["bf16", "e4m3@128", "e2m3@16", "int8", "mxfp4"])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("base", OPTIMIZERS)
def test_fifty_steps(base: str, policy: Any, grid: str) -> None:
    """Weights, moments, what the policy keeps, and every count of every step."""
    frozen = assert_equal_runs(OPTIMIZERS[base](), policy, grid)
    # Coordinates without a gradient move by weight decay alone, the others by much more.
    assert 0 < frozen.sum() < STEPS * frozen.size


@pytest.mark.parametrize("policy", [ECO(decay_exact=True), ECO(rounding="stochastic", decay_exact=True)])
def test_eco_with_exact_decay(policy: ECO) -> None:
    """The variant multiplies what is fed back by 1 - lr * weight_decay."""
    assert_equal_runs(AdamW(weight_decay=0.5), policy, "bf16")


@pytest.mark.parametrize(
    "base",
    [AdamW(weight_decay=0.0), AdamW(lr=3e-2, betas=(0.5, 0.999), eps=1e-6), Momentum(0.01, 0.9, 0.0)],
    ids=["no decay", "large rate", "common constants"],
)
@pytest.mark.parametrize("policy", ["rne", "sr", "eco", "kahan", "master"])
def test_other_constants(base: AdamW | Momentum, policy: str) -> None:
    """Rates, betas and decays beyond the defaults of this file."""
    fresh = type(base)(**{k: getattr(base, k) for k in type(base)().__dict__ if k not in ("t", "m", "v")})
    assert_equal_runs(fresh, policy, "e5m2")


@pytest.mark.parametrize("rule", ["int3/dqt", "int4/dqt"])
@pytest.mark.parametrize("kind", ["both signs", "negative", "shrinking"])
def test_dqt_as_published(rule: str, kind: str) -> None:
    """Absmean start, then stochastic rounding at the step of the old signed maximum, clamped at both ends.

    Transcribed on integers. Where the signed maximum is not positive the largest magnitude serves; where
    weights shrink and none is left at the largest code, the step shrinks with them.
    """
    bits = int(rule[3])
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    keep = 24 - (bits - 1)  # bits of a step, so that code * step is exact in float32

    def step_of(size: float) -> float:
        fraction, exponent = np.frexp(size)
        return float(np.ldexp(np.rint(np.ldexp(fraction, keep)), exponent - keep))

    w, grads = weights((6, 8)), gradients((6, 8), 30)
    if kind != "both signs":
        w = np.abs(w) if kind == "shrinking" else -np.abs(w)
    if kind == "shrinking":
        grads = [np.abs(g) + np.float32(1) for g in grads]
    s = step_of(np.abs(w.astype(np.float64)).sum() / w.size / high)
    ratio = w.astype(np.float64) / s
    q = (np.clip(np.rint(ratio), low, high) * s).astype(np.float32)
    model = linear(w)
    base = AdamW(lr=5e-2, eps=1e-6)
    opt = hu.WriteBack(base.torch(model.parameters()), rule, "dqt", model=model, seed=3)
    assert torch.equal(model.weight.detach(), torch.from_numpy(q))
    shrank = 0
    for t, g in enumerate(grads, start=1):
        model.weight.grad = torch.from_numpy(g.copy())
        opt.step()
        z = base.step(q, g)
        peak = q.max() if q.max() > 0 else np.abs(q).max()
        fresh = step_of(float(peak) / high)
        shrank += fresh < s
        s = fresh
        x = np.clip(z.astype(np.float64) / s, low, high)
        a, sign = np.abs(x), np.sign(x)
        words = hu.Stream(seed=3, name="weight", step=t).words(w.size).reshape(w.shape)
        up = words < np.floor((a - np.floor(a)) * 2.0**32)  # the first 32 digits decide here
        q = (sign * (np.floor(a) + up) * s).astype(np.float32)
        assert torch.equal(model.weight.detach(), torch.from_numpy(q)), f"step {t}"
    assert len(np.unique(q)) > 2
    assert shrank or kind == "both signs"


def test_dqt_of_an_all_zero_tensor_stays_at_step_one() -> None:
    """Nothing to take a step from: all codes are zero, and proposals are rounded at step 1."""
    model = linear(np.zeros((4, 4), np.float32))
    opt = hu.WriteBack(torch.optim.SGD(model.parameters(), lr=1.0), "int3/dqt", "dqt", model=model)
    assert model.weight.detach().count_nonzero() == 0
    model.weight.grad = torch.full((4, 4), -2.0)
    opt.step()
    assert torch.equal(model.weight.detach(), torch.full((4, 4), 2.0))


# ---- nothing is lost ------------------------------------------------------------------------------


@pytest.mark.parametrize("grid", ["bf16", "e4m3@128", "e5m2", "int4@16"])
def test_kahan_conserves(grid: str) -> None:
    """stored + carry == fl32(proposal + old carry), exactly, inside the range; it stays within half a gap."""
    w = weights(SHAPE)
    w = np.clip(w, -0.4, 0.4)
    model, seen = linear(w), {}
    base = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    opt = hu.WriteBack(base, grid, "kahan", model=model)
    base.register_step_post_hook(lambda *_: seen.update(z=model.weight.detach().clone()))
    carried = 0.0
    for g in gradients(SHAPE, STEPS):
        old = opt.slots[0].state["carry"].clone()
        model.weight.grad = torch.from_numpy(g)
        opt.step()
        q, carry = model.weight.detach(), opt.slots[0].state["carry"]
        whole = seen["z"] + old  # the one rounding there is
        inside = whole.abs() <= hu.grid(grid).largest
        assert inside.all()
        assert torch.equal(q.double() + carry.double(), whole.double())
        below, above = hu.grid(grid).neighbours(q)
        half = torch.where(carry < 0, q - below, above - q) / 2
        assert bool((carry.abs() <= half).all())
        carried = max(carried, float(carry.abs().max()))
    assert carried > 0


def test_kahan_beyond_the_ends_carries_nothing() -> None:
    """What lies beyond the largest code could never be written: it is dropped, not accumulated."""
    model = linear(np.full((2, 2), 448.0, np.float32))
    opt = hu.WriteBack(torch.optim.SGD(model.parameters(), lr=1.0), "e4m3", "kahan", model=model)
    for _ in range(3):
        model.weight.grad = torch.tensor([[-100.0, 100.0], [-1.0, 1.0]])
        opt.step()
    assert torch.equal(opt.slots[0].state["carry"][:, 0], torch.zeros(2))
    assert torch.equal(model.weight.detach(), torch.tensor([[448.0, 144.0], [448.0, 448.0]]))
    assert opt.slots[0].state["carry"].tolist() == [[0.0, 4.0], [0.0, -3.0]]


def test_kahan_in_bfloat16() -> None:
    """A carry of two bytes is the exact one rounded to bfloat16."""
    w = weights(SHAPE)
    model, twin = linear(w), Twin(w, "e4m3", "kahan", AdamW())
    opt = hu.WriteBack(twin.optimizer.torch(model.parameters()), "e4m3", Kahan(torch.bfloat16), model=model)
    for g in gradients(SHAPE, 20):
        model.weight.grad = torch.from_numpy(g)
        opt.step()
        twin.step(g)
        short = torch.from_numpy(twin.carry).to(torch.bfloat16)
        twin.carry = short.float().numpy()
        assert_same(opt.slots[0].state["carry"], short)
        assert_same(model.weight.detach(), twin.q)


@pytest.mark.parametrize("start", ["code", "raw"])
@pytest.mark.parametrize("grid", ["bf16", "e4m3@128"])
def test_a_master_is_the_unrounded_run(grid: str, start: str) -> None:
    """The master is what the optimizer alone would have; the stored value is its nearest code."""
    w = np.clip(weights(SHAPE), -0.9, 0.9)
    model, plain = linear(w), linear(w if start == "raw" else reference.round(w, hu.grid(grid)))
    make = AdamW().torch
    opt, alone = (
        hu.WriteBack(make(model.parameters()), grid, Master(start), model=model),
        make(plain.parameters()),
    )
    for g in gradients(SHAPE, STEPS):
        for m, o in ((model, opt), (plain, alone)):
            m.weight.grad = torch.from_numpy(g.copy())
            o.step()
        master, q = opt.slots[0].state["master"], model.weight.detach()
        assert_same(master, plain.weight.detach())
        assert_same(q, hu.grid(grid).round(master))
        below, above = hu.grid(grid).neighbours(q)
        assert bool((master >= (below + q) / 2).all() & (master <= (above + q) / 2).all())
