"""One-pass steps of single tensors: the kernel equals the reference, and the reference torch, bit for bit."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from onepass_cases import CASES, Case, real

import halfulp as hu
from halfulp.kernels import native, onepass, onepass_reference, reference
from halfulp.kernels.plan import plan_for
from halfulp.kernels.reference import STOCHASTIC
from halfulp.numbers.streams import Stream


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_equals_the_reference(name: str) -> None:
    """Weights, moments, what is kept, counts and sums; with gradients that are not finite, too."""
    given, options = CASES[name]
    for evil in (False, True):
        case = Case(*given, **options)
        for t in range(1, 4):
            case.step(t, evil)


STEPS: dict[str, dict[str, bool]] = {"fused": {"fused": True}, "plain": {}, "foreach": {"foreach": True}}
"""Torch's own steps of one optimizer."""


@pytest.mark.parametrize("how", STEPS)
@pytest.mark.parametrize("adam", [False, True])
@pytest.mark.parametrize("size", [5, 31, 1000, 999])
def test_the_reference_equals_torchs_adam(size: int, adam: bool, how: str) -> None:
    """Ends of tensors included, over steps; on a torch whose arithmetic is known."""
    fused = how == "fused"
    width = onepass.torchs_end(onepass.ADAM if adam else onepass.ADAMW, fused=fused)
    if width is None:
        pytest.skip("this torch has another arithmetic; write-backs are made in two passes")
    made = torch.Generator().manual_seed(size)
    p = torch.nn.Parameter(torch.randn(size, generator=made) * 0.02)
    kind = torch.optim.Adam if adam else torch.optim.AdamW
    optimizer = kind([p], lr=6e-4, weight_decay=0.1, **STEPS[how])
    w, m, v = p.detach().numpy().copy(), np.zeros(size, real), np.zeros(size, real)
    for t in range(1, 12):
        p.grad = torch.randn(size, generator=made) * 1e-3
        optimizer.step()
        s = onepass.Settings(
            lr=6e-4,
            weight_decay=0.1,
            rule=onepass.ADAM if adam else onepass.ADAMW,
            t=t,
            torchs_root=not fused,
        )
        w, m, v = onepass_reference.moments(w, p.grad.numpy(), m, v, s, size - size % width)
        w = onepass_reference.proposed(w, m, v, s)
        state = optimizer.state[p]
        for mine, theirs in ((w, p.detach()), (m, state["exp_avg"]), (v, state["exp_avg_sq"])):
            np.testing.assert_array_equal(mine.view(np.int32), theirs.numpy().view(np.int32))


@pytest.mark.parametrize("how", STEPS)
@pytest.mark.parametrize("rule", [onepass.SGD, onepass.NESTEROV, onepass.PLAIN])
@pytest.mark.parametrize(("size", "decay", "dampening"), [(5, 0.1, 0.0), (1000, 0.0, 0.3), (999, 0.1, 0.3)])
def test_the_reference_equals_torchs_sgd(
    size: int, decay: float, dampening: float, rule: int, how: str
) -> None:
    """From the first step on, ends of tensors and zeros of either sign included."""
    nesterov, momentum = rule == onepass.NESTEROV, 0.0 if rule == onepass.PLAIN else 0.9
    width = onepass.torchs_end(rule, fused=how == "fused")
    if width is None:
        pytest.skip("this torch has another arithmetic; write-backs are made in two passes")
    dampening = 0.0 if nesterov else dampening  # torch has not both
    made = torch.Generator().manual_seed(size)
    p = torch.nn.Parameter(torch.randn(size, generator=made) * 0.02)
    optimizer = torch.optim.SGD(
        [p],
        lr=1e-2,
        momentum=momentum,
        dampening=dampening,
        weight_decay=decay,
        nesterov=nesterov,
        **STEPS[how],
    )
    w, m = p.detach().numpy().copy(), np.zeros(size, real)
    for t in range(1, 12):
        p.grad = torch.randn(size, generator=made) * 1e-2
        p.grad[:3] = torch.tensor([-0.0, 0.0, -0.0])
        grad = p.grad.numpy().copy()  # foreach Nesterov writes over it
        optimizer.step()
        s = onepass.Settings(
            lr=1e-2, betas=(momentum, 0.0), weight_decay=decay, rule=rule, t=t, dampening=dampening
        )
        w, m = onepass_reference.one_moment(w, grad, m, s, size - size % width)
        for mine, theirs in (
            (w, p.detach()),
            (m, optimizer.state[p].get("momentum_buffer", torch.zeros(size))),
        ):
            np.testing.assert_array_equal(mine.view(np.int32), theirs.numpy().view(np.int32))


def test_an_fma_is_rounded_once() -> None:
    """Against rational arithmetic, near ties as well."""
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 2000)).astype(real)
    near = -(a.astype(np.float64) * b).astype(real)
    c = np.where(np.arange(2000) % 2 == 0, near, rng.standard_normal(2000).astype(real)).astype(real)
    made = onepass_reference.fma(a, b, c)
    for x, y, z, r in zip(a, b, c, made, strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        below, above = np.nextafter(r, real(-np.inf)), np.nextafter(r, real(np.inf))
        error = abs(Fraction(float(r)) - exact)
        assert error <= min(abs(Fraction(float(n)) - exact) for n in (below, above))


def test_shards_of_a_tensor_give_the_whole() -> None:
    """Cut anywhere, streams of weights and moments included."""
    n, cut = 768 * 2 + 101, 701
    made = torch.Generator().manual_seed(0)
    whole = [
        (torch.randn(n, generator=made) * 0.02).bfloat16(),
        *(torch.zeros(n).bfloat16() for _ in range(2)),
    ]
    parts = [[x[:cut].clone(), x[cut:].clone()] for x in whole]
    grid = plan_for(hu.grid("bf16"), torch.float32).grid
    for t in range(1, 4):
        g = (torch.randn(n, generator=made) * 1e-3).bfloat16()
        s = onepass.Settings(lr=1e-3, weight_decay=0.1, t=t)

        def step(x: list[torch.Tensor], g: torch.Tensor, offset: int, s: Any = s, t: int = t) -> None:
            streams = [Stream(seed=0, name=k, step=t, offset=offset, bits=16) for k in "wm"]
            onepass.step(
                x[0],
                g,
                x[1],
                x[2],
                grid,
                s,
                onepass.Policy(STOCHASTIC, stream=streams[0], drawing=streams[1]),
            )

        step(whole, g, 0)
        for i, (a, b) in enumerate(((0, cut), (cut, n))):
            step([p[i] for p in parts], g[a:b].clone(), a)
    for x, pair in zip(whole, parts, strict=True):
        assert torch.equal(x, torch.cat(list(pair)))


def test_second_moments_in_bfloat16_need_draws() -> None:
    """Ten thousand steps at beta2 = .999: nearest stays far below the float32 moment, draws match it."""
    n, steps = 768, 10_000
    rng = np.random.default_rng(0)
    grid = plan_for(hu.grid("bf16"), torch.float32).grid
    w = (torch.randn(n, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    drawn = [w.clone(), torch.zeros(n).bfloat16(), torch.zeros(n).bfloat16()]
    wide, narrow = np.zeros(n, real), np.zeros(n, real)
    for t in range(1, steps + 1):
        g = rng.standard_normal(n).astype(real)
        wide = wide * real(0.999) + real(0.001) * g * g
        u = (narrow * real(0.999) + real(0.001) * g * g).view(np.uint32)
        narrow = ((u + 0x7FFF + ((u >> 16) & 1)) & np.uint32(0xFFFF0000)).view(real)
        streams = [Stream(seed=0, name=k, step=t, bits=16) for k in "wm"]
        onepass.step(
            drawn[0], torch.from_numpy(g), drawn[1], drawn[2], grid, onepass.Settings(lr=1e-5, t=t),
            onepass.Policy(STOCHASTIC, stream=streams[0], drawing=streams[1]),
        )  # fmt: skip
    exact = float(wide.mean())
    assert abs(float(drawn[2].float().mean()) - exact) < 0.02 * exact
    assert abs(float(narrow.mean()) - exact) > 0.15 * exact


def test_remainders_keep_masters() -> None:
    """Every upper half with lower halves around its ends and middle: the master comes back exactly, the
    weight is
    the nearest, ties away from zero; nearest even differs where a tie lies above an even weight."""
    upper = np.arange(0x7F7F, dtype=np.uint32)
    for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        master = ((upper << 16) | np.uint32(low)).view(real)
        weight = onepass_reference.away(master)
        rest = (master.view(np.int32) - weight.view(np.int32)).astype(np.int16)
        assert np.array_equal(
            onepass_reference.composed(weight, rest).view(np.uint32), master.view(np.uint32)
        )
        even = reference.round(master, hu.grid("bf16"))
        differs = (weight != even) & np.isfinite(weight)
        expected = (upper % 2 == 0) if low == 0x8000 else np.zeros(upper.size, bool)
        assert np.array_equal(differs, expected & np.isfinite(weight))


def test_remainder8_stays_within_its_bound() -> None:
    """One step is off by less than 2**-15 of the master, and right on average."""
    rng = np.random.default_rng(0)
    z = (rng.standard_normal(200_000) * 0.02).astype(real)
    kept = onepass_reference.kept_master(z, np.dtype(np.int8), Stream(seed=0, name="x", bits=16))
    error = (kept.astype(np.float64) - z) / np.abs(z)
    assert np.max(np.abs(error)) < 2.0**-15
    assert abs(error.mean()) < 4 * error.std() / math.sqrt(z.size)


def test_torchs_root_is_told_from_the_rounded_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch without MKL rounds its roots, and needs no function of another library."""
    assert native.torchs_root() is not None
    monkeypatch.setattr(torch.Tensor, "sqrt", lambda x: torch.from_numpy(np.sqrt(x.numpy())))
    assert native.torchs_root.__wrapped__() == native.ROUNDED
    monkeypatch.setattr(torch.Tensor, "sqrt", lambda x: x**0.5 + 1)
    assert native.torchs_root.__wrapped__() is None
