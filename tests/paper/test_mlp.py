"""Small networks: sums against NumPy in the stated order, rounding against the grid, chunks and resume."""

from __future__ import annotations

import runpy
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from locked_cells import Alone, InterruptedCellError

import halfulp as hu
from halfulp.errors import UsageError
from halfulp.measures import events
from halfulp.paper.models import mlp_kernels as compiled
from halfulp.paper.models import rounding_kernels
from halfulp.paper.models.mlp import Examples, Net, Series, Trainer, run
from halfulp.paper.models.rounding_kernels import patterns
from halfulp.paper.models.teacher import Testbed, classification, frozen_features, teacher_student

Array = npt.NDArray[Any]


def draw(*seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(list(seed)))


# ---- the obvious twin: NumPy, in the order that the kernels' docstring states ---------------------------


def expm1_parts(y: Array) -> tuple[Array, Array]:
    """2**k and expm1(r) of y = k ln 2 + r."""
    k = compiled
    n = (y * k.LOG2E + k.ROUND) - k.ROUND
    r = (y - n * k.LN2_HI) - n * k.LN2_LO
    p: Any = k.C13
    for c in (k.C12, k.C11, k.C10, k.C9, k.C8, k.C7, k.C6, k.C5, k.C4, k.C3, k.C2):
        p = c + r * p
    return np.ldexp(1.0, n.astype(np.int64)), r + (r * r) * p


def tanh(x: Array) -> Array:
    s, p = expm1_parts(2 * np.minimum(np.abs(x.astype(np.float64)), 22.0))
    e = s * p + (s - 1.0)
    return np.where(x < 0, -1.0, 1.0) * (e / (e + 2.0))


def exp(x: Array) -> Array:
    s, p = expm1_parts(np.maximum(x.astype(np.float64), -700.0))
    return np.asarray(s + s * p)


def mixed(start: Array, coefficients: Array, rows: Array) -> Array:
    """start[o] + sum over j of coefficients[o, j] rows[j], in the order of j."""
    out = start
    for j in range(len(rows)):
        out = out + coefficients[:, j : j + 1] * rows[j]
    return out


def summed(products: Array) -> Array:
    """The sum over the last axis: in eight lanes, then by halving."""
    lanes = np.zeros((*products.shape[:-1], 8), products.dtype)
    for start in range(0, products.shape[-1], 8):
        lanes = lanes + products[..., start : start + 8]
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    return np.asarray(lanes[..., 0])


def gradient(net: Net, w: Array, batch: Examples) -> tuple[Array, Array]:
    """Outputs and gradient."""
    n, dtype = batch.n, w.dtype
    acts, before = [batch.x], batch.x
    for layer in range(1, len(net.sizes)):
        matrix = w[net.part(f"W{layer}")].reshape(net.sizes[layer], net.sizes[layer - 1])
        bias = w[net.part(f"b{layer}")] if net.biased else np.zeros(len(matrix), dtype)
        before = mixed(np.repeat(bias[:, None], batch.x.shape[1], axis=1), matrix, before)
        if layer < len(net.sizes) - 1:
            before = tanh(before).astype(dtype)
        acts.append(before)
    out = acts[-1]
    if net.loss == "cross-entropy":
        e = exp(out - out.max(axis=0)).astype(dtype)
        norm = np.zeros(out.shape[1], dtype)
        for row in e:
            norm = norm + row
        delta = e / norm - batch.y
    else:
        delta = out - batch.y
    count = n if net.loss == "cross-entropy" else n / 2
    delta = np.where(np.arange(delta.shape[1]) < n, delta, 0).astype(dtype) / dtype.type(count)
    g = np.zeros_like(w)
    for layer in range(len(net.sizes) - 1, 0, -1):
        below = acts[layer - 1]
        g[net.part(f"W{layer}")] = summed(delta[:, None, :] * below[None]).ravel()
        if net.biased:
            g[net.part(f"b{layer}")] = summed(delta)
        if layer > 1:
            matrix = w[net.part(f"W{layer}")].reshape(net.sizes[layer], net.sizes[layer - 1])
            back = mixed(np.zeros_like(below), matrix.T, delta)
            delta = back - back * (below * below)
    return out, g


NETS = [
    (Net(sizes=(8, 64, 1)), 512),
    (Net(sizes=(3, 7, 2)), 45),
    (Net(sizes=(8, 16), biased=False), 64),
    (Net(sizes=(5, 9, 6, 4), loss="cross-entropy"), 100),
    (Net(sizes=(4, 3), loss="cross-entropy"), 33),
]


def problem(net: Net, n: int, *seed: int, dtype: npt.DTypeLike = np.float64) -> tuple[Examples, Array]:
    rng = draw(*seed)
    x = rng.standard_normal((n, net.sizes[0]))
    y = rng.standard_normal((n, net.sizes[-1]))
    if net.loss == "cross-entropy":
        y = np.eye(net.sizes[-1])[y.argmax(axis=1)]
    return Examples.of(x, y, dtype), (rng.standard_normal(net.count) / 2).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize(("net", "n"), NETS)
def test_gradient_is_the_stated_sums(net: Net, n: int, dtype: Any) -> None:
    batch, w = problem(net, n, 1, n, dtype=dtype)
    _, expected = gradient(net, w, batch)
    found = Trainer(net, batch, w, rate=0.1).gradient()
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(("net", "n"), NETS)
def test_gradient_and_loss_against_autograd(net: Net, n: int) -> None:
    """Rounding: a sum of at most 512 terms of order one, in another order, and a tanh one digit apart: the
    difference is a few hundred times 1.1e-16 at the most."""
    batch, w = problem(net, n, 2, n)
    flat = torch.from_numpy(w).requires_grad_()
    h = torch.from_numpy(batch.x[:, :n].T.copy())
    for layer in range(1, len(net.sizes)):
        h = h @ flat[net.part(f"W{layer}")].view(net.sizes[layer], net.sizes[layer - 1]).T
        h = h + flat[net.part(f"b{layer}")] if net.biased else h
        h = torch.tanh(h) if layer < len(net.sizes) - 1 else h
    y = torch.from_numpy(batch.y[:, :n].T.copy())
    squared = net.loss == "squared"
    loss = (h - y).square().sum(1).mean() if squared else torch.nn.functional.cross_entropy(h, y)
    loss.backward()  # type: ignore[no-untyped-call]
    trainer = Trainer(net, batch, w, rate=0.1)
    assert flat.grad is not None
    np.testing.assert_allclose(trainer.gradient(), flat.grad.numpy(), rtol=0, atol=1e-13)
    assert trainer.error(batch) == pytest.approx(loss.item(), rel=1e-13)


def test_tanh() -> None:
    """Below 4e-16 of the true value (80-bit arithmetic, itself good to 1e-19), odd, and 1 at the ends."""
    rng = draw(3)
    x = np.concatenate([rng.standard_normal(300_000) * s for s in (1e-300, 1e-9, 1e-3, 0.2, 1, 5, 30)])
    x = np.concatenate([x, [np.inf, 22.0, 19.0, 1e-320, 0.0]])
    found, negative = x.copy(), -x
    compiled.tanh_row(found)
    compiled.tanh_row(negative)
    np.testing.assert_array_equal(found, -negative)
    np.testing.assert_array_equal(found, tanh(x))
    true = np.tanh(x.astype(np.longdouble))
    scale = np.maximum(np.abs(true), np.finfo(np.float64).tiny)  # a subnormal has fewer digits
    assert float(np.max(np.abs(found - true) / scale)) < 4e-16
    missing = np.array([np.nan])
    compiled.tanh_row(missing)
    assert np.isnan(missing[0])


# ---- rounding is the grid's -----------------------------------------------------------------------------


def hard_values(grid: hu.Grid, dtype: Any, seed: int) -> Array:
    """Random bit patterns (all exponents, subnormals), codes, midpoints and their neighbours, zeros."""
    rng = draw(4, seed)
    wide = np.dtype(dtype).itemsize * 8
    patterns = rng.integers(0, 2**wide, 400_000, dtype=f"uint{wide}").view(dtype)
    usual = (rng.standard_normal(200_000) * 0.3).astype(dtype)
    codes = grid.round(torch.from_numpy(np.concatenate([patterns, usual]))).numpy()
    codes = codes[np.isfinite(codes)]
    above = grid.neighbours(torch.from_numpy(codes))[1].numpy()
    with np.errstate(over="ignore", invalid="ignore"):
        ties = (codes + (above - codes) / 2).astype(dtype)
    near = [np.nextafter(ties, dtype(side)) for side in (-np.inf, np.inf)]
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, np.finfo(dtype).max, np.finfo(dtype).tiny], dtype)
    return np.concatenate([patterns, usual, codes, ties, *near, special])


def same_bits(a: Array, b: Array) -> None:
    unsigned = f"u{a.dtype.itemsize}"
    np.testing.assert_array_equal(a.view(unsigned), b.view(unsigned))


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("name", ["m1", "m2", "m5", "m7", "m10", "m16"])
def test_write_back_is_the_grids_rounding(name: str, dtype: Any) -> None:
    """Bit for bit, on three million values a grid: w is -0, so that z = w + d is d with its sign."""
    grid = hu.grid(name).within(dtype)
    d = hard_values(grid, dtype, grid.mantissa)
    w, z, found = np.full_like(d, -0.0), np.zeros_like(d), np.zeros_like(d)
    k = patterns(name, dtype)
    key = np.array(hu.Stream(seed=5, name="weights", step=7).key, dtype=np.uint32)
    compiled.write(w, d, z, found, compiled.NEAREST, k, key)
    proposed = torch.from_numpy(z)
    np.testing.assert_array_equal(np.signbit(z), np.signbit(d))
    same_bits(found, grid.round(proposed).numpy())
    compiled.write(w, d, z, found, compiled.STOCHASTIC, k, key)
    drawn = grid.round(proposed, stochastic=hu.Stream(seed=5, name="weights", step=7))
    same_bits(found, drawn.numpy())


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_audit_counts_are_the_events(dtype: Any) -> None:
    """Frozen at Q(w) by code, and by symmetric spacing at w, for proposals of every relative size."""
    names = ("m1", "m4", "m7", "m12")
    rng = draw(5)
    w = (rng.standard_normal(40_000) * np.exp2(rng.integers(-40, 3, 40_000))).astype(dtype)
    w[:2000] = np.exp2(rng.integers(-9, 3, 2000))  # codes with unequal gaps
    w[2000:2100] = 0
    d = (w * np.exp2(-rng.random(w.size) * 16) * rng.choice([-1, 1], w.size)).astype(dtype)
    d[:4000] = w[:4000] * 2.0 ** -rng.integers(1, 14, 4000) * rng.choice([-1, 1], 4000)  # ties
    d[4000:4100] = 0
    net = Net(sizes=(199, 200), biased=True)
    assert net.count == w.size
    trainer = Trainer(
        net, Examples.of(np.zeros((1, 199)), np.zeros((1, 200)), dtype), w, rate=0.0, audit=names
    )
    counts = np.zeros((len(names), 2), np.int32)
    compiled.audit(w, d, *trainer._grids, counts)
    weights, proposals = torch.from_numpy(w), torch.from_numpy(d)
    for name, (frozen, symmetric) in zip(names, counts, strict=True):
        assert frozen == int(events.frozen(hu.grid(name).round(weights), proposals, name).sum())
        assert symmetric == int(events.symmetric_frozen(weights, proposals, name).sum())


# ---- steps ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("optimizer", ["gd", "adam"])
def test_a_run_is_its_steps(rounding: Any, optimizer: Any) -> None:
    """Weights, events and never-moved counts of 30 steps, one by one with the public functions."""
    net = Net(sizes=(4, 6, 2))
    batch, start = problem(net, 50, 6)
    grid = hu.grid("m4").within(np.float64)
    stochastic = rounding == "stochastic"
    trainer = Trainer(
        net,
        batch,
        start,
        rate=0.05,
        optimizer=optimizer,
        store="m4",
        stochastic=9 if stochastic else None,
        audit=["m4"],
    )
    series = trainer.advance(30)

    def stored(z: Array, step: int) -> Array:
        stream = hu.Stream(seed=9, name="weights", step=step) if stochastic else None
        return grid.round(torch.from_numpy(z), stochastic=stream).numpy()

    w, m, v, moved = stored(start, 0), 0.0, 0.0, np.zeros(net.count, bool)
    for t in range(1, 31):
        _, g = gradient(net, w, batch)
        d = -0.05 * g
        if optimizer == "adam":
            m, v = 0.9 * m + (1 - 0.9) * g, 0.999 * v + (1 - 0.999) * (g * g)
            d = -(0.05 / (1 - 0.9**t)) * m / (np.sqrt(v) / np.sqrt(1 - 0.999**t) + 1e-8)
        new = stored(w + d, t)
        moved |= new != w
        assert series.frozen[t - 1] == (new == w).sum()
        assert series.never[t - 1] == (~moved).sum()
        assert series.audited("m4")[t - 1] == int(
            events.frozen(torch.from_numpy(w), torch.from_numpy(d), "m4").sum()
        )
        w = new
    same_bits(trainer.weights, w)
    same_bits(trainer.proposal, d)


def test_adam_is_torchs() -> None:
    """The same gradients to torch.optim.Adam: the moments are updated in another order, a few roundings of
    2**-53 a step for 40 steps."""
    net = Net(sizes=(4, 6, 2))
    batch, start = problem(net, 50, 7)
    trainer = Trainer(net, batch, start, rate=0.01, optimizer="adam")
    weights = torch.nn.Parameter(torch.from_numpy(start.copy()))
    optimizer = torch.optim.Adam([weights], lr=0.01)
    for _ in range(40):
        weights.grad = torch.from_numpy(trainer.gradient(weights.detach().numpy()))
        optimizer.step()
    trainer.advance(40)
    np.testing.assert_allclose(trainer.weights, weights.detach().numpy(), rtol=0, atol=1e-13)


def same_series(a: Series, b: Series) -> None:
    for name in ("loss", "test", "frozen", "counts", "squares", "never"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name))


@pytest.mark.parametrize("options", [{}, {"store": "m5"}, {"store": "m5", "stochastic": 0}])
def test_chunks_and_resume_change_nothing(options: dict[str, Any]) -> None:
    p = teacher_student(11, width=5, examples=40, tests=30)

    def made() -> Trainer:
        return Trainer(
            p.net, p.train, p.start, rate=0.1, optimizer="adam", audit=["m3", "m5"], test=p.test, **options
        )

    whole = made()
    expected = whole.advance(60)
    for stop in (1, 2, 5):
        fake = Alone("cell", {}, {}, dies_after=stop)
        with pytest.raises(InterruptedCellError):
            run(made(), 60, fake, chunk=7)  # type: ignore[arg-type]
        again = made()
        same_series(run(again, 60, fake, chunk=13), expected)  # type: ignore[arg-type]
        same_bits(again.weights, whole.weights)
        same_bits(again.proposal, whole.proposal)


def test_a_span_counts_its_part_only() -> None:
    p = teacher_student(12, width=6, examples=40, tests=8)
    part = p.net.part("W1")
    all_of_it = Trainer(p.net, p.train, p.start, rate=0.1, store="m5", audit=["m5"])
    only = Trainer(p.net, p.train, p.start, rate=0.1, store="m5", audit=["m5"], span=part)
    before = only.weights[part].copy()
    wide, narrow = all_of_it.advance(1), only.advance(1)
    same_bits(all_of_it.weights, only.weights)
    assert narrow.size == 48
    assert narrow.frozen[0] == narrow.audited("m5")[0] == (only.weights[part] == before).sum()
    assert wide.frozen[0] >= narrow.frozen[0]
    assert narrow.squares[0, 0] == pytest.approx(np.square(before).sum(), rel=1e-14)  # 48 terms


def test_divergence_stops_a_run() -> None:
    p = teacher_student(13, width=8, examples=64, tests=64)
    trainer = Trainer(p.net, p.train, p.start, rate=500.0, test=p.test)
    series = trainer.advance(4000)
    assert trainer.diverged
    assert len(series) == len(series.test) == trainer.step < 4000
    assert not np.all(np.abs(trainer.weights) < compiled.LIMIT)
    with pytest.raises(UsageError, match="diverged at step"):
        trainer.advance(1)


def test_float32_is_float32() -> None:
    p = teacher_student(14, width=8, examples=64, tests=64)
    trainer = Trainer(p.net, p.train, p.start.astype(np.float32), rate=0.1, audit=["m7"])
    trainer.advance(50)
    assert trainer.weights.dtype == trainer.proposal.dtype == np.float32
    double = Trainer(p.net, p.train, p.start, rate=0.1)
    double.advance(50)
    apart = np.abs(trainer.weights - double.weights).max()
    assert 0 < apart < 1e-4  # 50 steps of 2**-24, far from a step of the descent


# ---- testbeds and mistakes ------------------------------------------------------------------------------


def test_testbeds() -> None:
    p, bed = teacher_student(3), Testbed(hidden=0.1, output=0.3, teacher_hidden=1.0, teacher_output=1.0)
    assert (p.net.sizes, p.train.n, p.test.n) == ((8, 64, 1), 512, 512)
    start = teacher_student(3, testbed=bed).start
    assert 0.09 < start[p.net.part("W1")].std() < 0.11  # 512 draws: 0.1 to 3%
    assert 0.22 < start[p.net.part("W2")].std() < 0.38  # 64 draws: 0.3 to 9%
    assert not start[p.net.part("b1")].any()
    wide = teacher_student(3, testbed=replace(bed, by_inputs=True)).start
    np.testing.assert_allclose(wide[p.net.part("W1")] * np.sqrt(8), start[p.net.part("W1")], rtol=1e-15)
    np.testing.assert_allclose(wide[p.net.part("W2")] * 8, start[p.net.part("W2")], rtol=1e-15)
    c = classification(3, hidden=(32, 32))
    assert c.net.sizes == (8, 32, 32, 4)
    np.testing.assert_array_equal(c.train.y.sum(axis=0), np.ones(512))
    np.testing.assert_array_equal(c.train.x, p.train.x)  # the same data under another teacher
    f = frozen_features(3)
    assert f.net.sizes == (64, 8)
    assert not f.net.biased
    assert np.abs(f.train.x).max() < 1
    assert not np.array_equal(teacher_student(4).start, p.start)


def test_what_a_testbed_says_is_done() -> None:
    """Each field changes what it names, and nothing else."""
    bed = Testbed(hidden=0.1, output=0.1, teacher_hidden=1.0, teacher_output=1.0)
    assert Testbed.of(bed.json()) == bed
    plain = teacher_student(5, testbed=bed)
    quiet = teacher_student(5, testbed=replace(bed, quiet_tests=True))
    np.testing.assert_array_equal(quiet.train.y, plain.train.y)
    apart = (quiet.test.y - plain.test.y)[:, :512]
    assert 0.09 < apart.std() < 0.11  # the noise of 512 tests: 0.1 to 3%
    scaled = teacher_student(5, noise=0.0, testbed=replace(bed, standardised=True))
    both = np.concatenate([scaled.train.y[0, :512], scaled.test.y[0, :512]])
    assert both.std() == pytest.approx(1.0)
    assert np.abs(teacher_student(5, testbed=replace(bed, inputs="uniform")).train.x).max() <= 1
    assert teacher_student(5, testbed=replace(bed, outputs=4)).net.sizes == (8, 64, 4)
    assert teacher_student(5, testbed=replace(bed, factor=0.5)).factor == 0.5


def test_noisy_labels() -> None:
    """A share of labels is drawn anew, so three in four of it change; the others are the teacher's."""
    clean, noisy = (classification(3, label_noise=share).train.y[:, :512] for share in (0.0, 0.4))
    np.testing.assert_array_equal(noisy.sum(axis=0), np.ones(512))
    changed = float((clean != noisy).any(axis=0).mean())
    assert 0.24 < changed < 0.36  # 512 draws at 0.3: 2% either way


def test_mistakes_are_named() -> None:
    net = Net(sizes=(2, 3, 1))
    batch = Examples.of([[0.0, 1.0]], [[1.0]])
    with pytest.raises(UsageError, match=r"is 13 float64 or float32 numbers: found shape \(12,\)"):
        Trainer(net, batch, np.zeros(12), rate=0.1)
    with pytest.raises(UsageError, match="takes x of 2 and y of 1 columns: found 2 and 2"):
        Trainer(net, Examples.of([[0.0, 1.0]], [[1.0, 2.0]]), np.zeros(13), rate=0.1)
    with pytest.raises(UsageError, match="one example a row"):
        Examples.of([[0.0, 1.0]], [[1.0], [2.0]])
    with pytest.raises(UsageError, match="padded to whole 16s: found 17 and 17 columns for 17 of them"):
        Examples(np.zeros((2, 17)), np.zeros((1, 17)), 17)


def test_without_numba_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    with pytest.raises(hu.UsageError, match=r"halfulp\[paper\]"):
        runpy.run_path(rounding_kernels.__file__)


def test_a_grid_with_other_exponents_is_refused() -> None:
    for name in ("e4m3", "int4/g128", "m52"):
        with pytest.raises(hu.UsageError, match="such as m7"):
            patterns(name, np.float64)


def test_kernels_compile_where_nothing_can_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """numba refuses to keep code that has no file: the same function is compiled all the same."""

    compiled_with = rounding_kernels.njit

    def refuse(*, cache: bool = False, **options: Any) -> Any:
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return compiled_with(**options)

    def twice(x: int) -> int:
        return 2 * x

    monkeypatch.setattr(rounding_kernels, "njit", refuse)
    assert rounding_kernels.kernel(twice)(21) == 42
