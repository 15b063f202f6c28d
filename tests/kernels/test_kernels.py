"""Kernels against the NumPy reference, to the last bit: every kernel, container, shape, stride and thread."""

from __future__ import annotations

import math
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from oracle import CONTAINERS, NUMPY, array, assert_same, fits, tensor

import halfulp as hu
from halfulp import kernels
from halfulp.kernels import native, reference
from halfulp.numbers import float_grid

STATIC = ["bf16", "fp16", "e5m2", "e4m3@128", "e2m1", "m0", "m3", "m10", "float32"]
STATIC += ["int4@16/asym", "int8@100", "int3@3/asym", "bf16@4"]
MOVING = ["int8", "int8/g48", "int3/dqt", "int8/row", "int4/absmean/row", "int5/asym"]
MOVING += ["mxfp8_e4m3", "mxfp6_e3m2", "mxfp4", "nvfp4"]
ODD = [
    float_grid(mantissa=3, emin=-60, largest=1.5 * 2.0**120, name="wide"),  # too wide for float32's shortcut
    float_grid(mantissa=22, emin=-60, largest=1.0, name="fine"),
]
SHAPES = [(), (0, 5), (1,), (769,), (7, 100), (3, 768), (2, 3, 520)]


@pytest.mark.parametrize(
    ("options", "written", "left"),
    [({}, 1 + 2**-7, -(2**-9)), ({"carry_in": True}, 1 + 2**-7, -(2**-9)), ({"carry_in": False}, 1.0, 2**-9)],
)
def test_what_is_carried_by_hand(options: dict[str, bool], written: float, left: float) -> None:
    """Beside 1.0 bfloat16 has gaps of 2**-7: a quarter of one is lost, three quarters are not."""
    q, z = torch.ones(1), torch.ones(1) + 2**-9
    carry = torch.full((1,), 2**-8)
    r, _ = reference.write_back(
        q.numpy(), z.numpy(), hu.grid("bf16"), carry=(rest := carry.numpy().copy()), **options
    )
    assert (r.item(), rest.item()) == (written, left)
    given = kernels.Carry(carry, options.get("carry_in", True))
    out = kernels.write_back(q, z, "bf16", carry=given).out
    assert (out.item(), carry.item()) == (written, left)


def test_a_carry_that_would_leave_the_range() -> None:
    """It is not added: the proposal is as it was, and what is summed of it is finite."""
    largest = float(np.finfo(np.float32).max)
    q, z = torch.ones(2), torch.tensor([largest, -largest])
    carry = torch.tensor([largest, -largest])
    r, facts = reference.write_back(
        q.numpy(), z.numpy(), hu.grid("bf16"), carry=(rest := carry.numpy().copy())
    )
    assert r.tolist() == [hu.grid("bf16").largest, -hu.grid("bf16").largest]
    assert np.isfinite(facts["sums"]).all()
    got = kernels.write_back(q, z, "bf16", carry=carry, sums=True)
    assert_same(got.out, r)
    assert_same(got.sums, facts["sums"])
    assert_same(carry, rest)


def test_what_a_tile_is_padded_to() -> None:
    """The next of 3, 6, 12, 24, ..."""
    sizes = [3 * 2**k for k in range(10)]
    for tile in range(1, 1000):
        assert reference.tree_size(tile) == min(n for n in sizes if n >= tile)


def test_a_sum_of_zeros_is_no_minus_zero() -> None:
    """In a whole tile, which no zeros are added to."""
    one, none = np.ones(768, np.float32), np.zeros(768, np.float32)
    assert not np.signbit(reference.arrival(one, one, -one)).any()
    grid = hu.grid("bf16")
    expected = reference.score(one, none, one, grid)
    assert not np.signbit(expected).any()
    assert_same(kernels.score(tensor(one), tensor(none), tensor(one), grid), expected)


def grids_for(dtype: torch.dtype) -> list[hu.Grid]:
    """Every kind of grid that fits a container."""
    fitting = []
    for g in (*(hu.grid(n) for n in STATIC + MOVING), *ODD):
        if (g.mantissa, dtype) == (0, torch.float16):
            continue  # refused: see test_errors
        if fits(g, dtype):
            fitting.append(g)
    return fitting


def draw(shape: tuple[int, ...], dtype: torch.dtype, seed: int, bad: bool = True) -> tuple[np.ndarray, ...]:
    """Weights, proposals and gradients: zeros, huge and tiny ones, ties, and (if ``bad``) non-finite ones."""
    rng = np.random.default_rng([seed, *shape])
    n = math.prod(shape)
    w, d, g = rng.standard_normal(n) * 0.05, rng.standard_normal(n) * 0.002, rng.standard_normal(n)
    w[rng.random(n) < 0.03] = 0
    w[rng.random(n) < 0.01] *= 1e5
    w[rng.random(n) < 0.01] *= 1e-30
    w[rng.random(n) < 0.05] = 0.5
    d[rng.random(n) < 0.1] = 0
    d[rng.random(n) < 0.02] *= 1e7
    d[rng.random(n) < 0.02] *= 1e-35
    d[rng.random(n) < 0.05] = 2.0 ** -rng.integers(3, 12)  # half gaps
    if bad and n > 10:
        for v in (np.nan, np.inf, -np.inf):
            for x in (w, d, g):
                x[rng.integers(0, n, 2)] = v
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return tuple(x.reshape(shape).astype(NUMPY[dtype]) for x in (w, d, g))


def quiet(call: Any, *args: Any, **kwargs: Any) -> Any:
    """The reference, without NumPy's remarks on overflow, which it means to meet."""
    with np.errstate(all="ignore"):
        return call(*args, **kwargs)


@pytest.fixture(params=CONTAINERS, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(params=SHAPES, ids=str)
def shape(request: pytest.FixtureRequest) -> tuple[int, ...]:
    return request.param


# ---- kernel against reference ---------------------------------------------------------------------


def test_round(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Nearest and stochastic rounding, and the scales, of every kind of grid."""
    w, _, _ = draw(shape, dtype, seed=1)
    for g in grids_for(dtype):
        stream = hu.Stream(seed=1, name=g.name, step=2, offset=37)
        assert_same(kernels.round(tensor(w), g), quiet(reference.round, w, g), g.name)
        expected = quiet(reference.round, w, g, reference.STOCHASTIC, stream)
        assert_same(kernels.round(tensor(w), g, stream), expected, f"{g.name} stochastic")
        if g.scaling is not None:
            assert_same(kernels.scales(tensor(w), g), reference.scales(w, g), f"{g.name} scales")


def test_codes(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Codes of values and values of codes, of every kind of grid that has codes."""
    w, _, _ = draw(shape, dtype, seed=13, bad=False)
    for g in (g.within(dtype) for g in grids_for(dtype)):
        if g.bits > 16:
            continue
        scale = None if g.scaling is None else reference.scales(w, g)
        given = None if scale is None else torch.from_numpy(scale)
        codes = quiet(reference.encode, w, g, scale)
        assert_same(kernels.encode(tensor(w), g, scale=given).long(), codes, f"{g.name} codes")
        with np.errstate(over="ignore"):
            values = quiet(reference.decode, codes, g, scale).astype(NUMPY[dtype])
        assert_same(kernels.decode(torch.from_numpy(codes), g, scale=given, dtype=dtype), values, g.name)


@pytest.mark.parametrize("name", ["e2m1", "e4m3@128", "m0", "int4@16/asym", "int3@4", "int2@1"])
def test_what_is_a_code(name: str) -> None:
    """Every value of a grid has one, the largest and the lowest included; no other integer is one."""
    g = hu.grid(name).within(torch.float32)
    every = np.arange(-5, 2 ** (min(g.bits, 14) + 2))
    codes = every[reference.is_code(every, g)]
    assert codes.min() == 0
    assert codes.max() < 2**g.bits
    values = reference.decode(codes, g)
    assert (values.min(), values.max()) == (g.lo, g.largest) or g.bits > 14
    assert np.array_equal(reference.encode(values, g), codes)
    with pytest.raises(
        hu.UsageError, match=r"1 code\(s\) are not of grid .*; the first is -1 at flat index 1"
    ):
        reference.decode(np.array([0, -1]), g)


def test_a_sum_of_nothing_is_not_negative() -> None:
    """What arrives of proposals that all vanish is 0, not -0: kernels and ranks add in other orders."""
    q, d = np.ones(5, dtype=np.float32), np.full(5, -1e-9, dtype=np.float32)
    found = reference.arrival(q, q, d)
    assert not found.any()
    assert not np.signbit(found).any()


@pytest.mark.parametrize(("kind", "least"), [(np.float32, 1e-40), (np.float64, 1e-310)])
def test_what_arrives_of_the_smallest_proposals(kind: Any, least: float) -> None:
    """Where the inverse of their binade is beyond the type: all of it arrives, to a subnormal's digits."""
    d = np.full(5, least, dtype=kind)
    dot, square = reference.arrival(np.zeros_like(d), d, d)[0]
    assert dot == square == pytest.approx(5 * float(d[0]) ** 2, rel=1e-3, abs=0)


@pytest.mark.parametrize("bad", [False, True], ids=["finite", "non-finite"])
def test_audit(dtype: torch.dtype, shape: tuple[int, ...], bad: bool) -> None:
    """Counts, shared counts, sums and phase sums of all grids in one pass."""
    w, d, _ = draw(shape, dtype, seed=2, bad=bad)
    grids = grids_for(dtype)
    for chosen in (
        grids,
        [g for g in grids if g.scaling is None][:1],
        [g for g in grids if g.scaling][-1:],
        [],
    ):
        expected = quiet(reference.audit, w, d, chosen)
        got = kernels.audit(tensor(w), tensor(d), chosen)
        for field, value in expected.items():
            assert_same(getattr(got, field), value, f"{field} of {[g.name for g in chosen]}")
        assert got.numel == w.size
        frozen = expected["counts"][:, :, 0].sum(axis=0)
        assert np.allclose(got.frozen().numpy() * max(w.size, 1), frozen, rtol=2.0**-22, atol=0)  # a float32
        without = kernels.audit(tensor(w), tensor(d), chosen, phase=False)
        assert_same(without.counts, got.counts)
        assert not without.phase.any()


@pytest.mark.parametrize("odds", [False, True], ids=["moved", "moved and odds"])
def test_audit_that_follows_coordinates(dtype: torch.dtype, shape: tuple[int, ...], odds: bool) -> None:
    """Over three steps: what ever moved, and how probably stochastic rounding never moved it."""
    grids, n = grids_for(dtype), math.prod(shape)
    moved = np.zeros((len(grids), (n + 7) // 8), dtype=np.uint8)
    stay = np.ones((len(grids), n), dtype=np.float64 if dtype == torch.float64 else np.float32)
    followed = {"moved": moved, "stay": stay} if odds else {"moved": moved}
    kept = {name: tensor(x) for name, x in followed.items()}
    for seed in range(3):
        w, d, _ = draw(shape, dtype, seed=20 + seed, bad=seed > 0)
        expected = quiet(reference.audit, w, d, grids, **followed)
        got = kernels.audit(tensor(w), tensor(d), grids, **kept)
        for field, value in expected.items():
            assert_same(getattr(got, field), value, f"{field} at step {seed}")
        for name, x in followed.items():
            assert_same(kept[name], x, name)


@pytest.mark.parametrize("bad", [False, True], ids=["finite", "non-finite"])
@pytest.mark.parametrize("mode", reference.MODES)
def test_write_back(dtype: torch.dtype, shape: tuple[int, ...], mode: str, bad: bool) -> None:
    """New values, counts, sums and moved bits, over two steps, so that moved bits accumulate."""
    w, d, _ = draw(shape, dtype, seed=3, bad=bad)
    for g in grids_for(dtype):
        q = quiet(reference.round, w, g)
        q = np.where(np.isfinite(q), q, 0).astype(q.dtype)
        moved = np.zeros((q.size + 7) // 8, dtype=np.uint8)
        moved_kernel = tensor(moved)
        for step in range(2):
            stream = hu.Stream(seed=4, name=g.name, step=step, offset=2**33 + 5 * step)
            z = quiet(lambda q, step: (q + (d if step == 0 else -d)).astype(q.dtype), q, step)
            r, facts = quiet(reference.write_back, q, z, g, reference.MODES[mode], stream, moved=moved)
            proposed = tensor(z)
            got = kernels.write_back(tensor(q), proposed, g, mode, stream, moved=moved_kernel, sums=True)
            what = f"{g.name} {mode} step {step}"
            assert got.out.data_ptr() == proposed.data_ptr()
            assert_same(proposed, r, what)
            assert_same(got.counts, facts["counts"], f"{what} counts")
            assert_same(got.sums, facts["sums"], f"{what} sums")
            assert_same(moved_kernel, moved, f"{what} moved")
            plain = kernels.write_back(tensor(q), tensor(z), g, mode, stream, out=torch.empty_like(proposed))
            assert_same(plain.out, r, f"{what} out=")
            assert_same(plain.counts[:, :4], facts["counts"][:, :4], f"{what} without moved bits")
            assert not plain.counts[:, 4].any()
            assert not plain.sums.any()
            q = r


@pytest.mark.parametrize("bad", [False, True], ids=["finite", "non-finite"])
@pytest.mark.parametrize("mode", reference.MODES)
def test_write_back_over_what_is_stored(mode: str, bad: bool) -> None:
    """The result may go where the stored values were."""
    w, d, _ = draw((2000,), torch.float32, seed=31, bad=bad)
    q = np.where(np.isfinite(w), quiet(reference.round, w, hu.grid("bf16")), 0).astype(np.float32)
    stream = hu.Stream(seed=1, name="over", step=1)
    aside = kernels.write_back(tensor(q), tensor(q + d), "bf16", mode, stream, out=torch.empty(2000))
    stored = tensor(q)
    over = kernels.write_back(stored, tensor(q + d), "bf16", mode, stream, out=stored)
    assert_same(stored, aside.out.numpy(), mode)
    assert_same(over.counts, aside.counts.numpy(), mode)


@pytest.mark.parametrize("static", [n for n in STATIC if n != "float32"])
def test_write_back_of_any_finite_value_rounds_it(static: str) -> None:
    """All bit patterns' kinds, in whole tiles: the one-pass loop writes what rounding alone gives."""
    bits = np.random.default_rng(5).integers(0, 2**32, 768 * 300, dtype=np.uint32)
    z = np.where(np.isfinite(bits.view(np.float32)), bits.view(np.float32), np.float32(0.1))
    q, stream = torch.zeros(z.size), hu.Stream(seed=1, name=static, step=1)
    for mode, drawn in (("nearest", None), ("stochastic", stream)):
        expected = kernels.round(tensor(z), static, drawn)
        assert_same(kernels.write_back(q, tensor(z), static, mode, stream).out, expected.numpy(), mode)


@pytest.mark.parametrize("bad", [False, True], ids=["finite", "non-finite"])
@pytest.mark.parametrize("carry_in", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_write_back_with_a_carry(
    dtype: torch.dtype, shape: tuple[int, ...], carry_in: bool, bad: bool
) -> None:
    """What is not written is kept in the carry and, if asked, proposed again."""
    w, d, _ = draw(shape, dtype, seed=30, bad=bad)
    for g in grids_for(dtype):
        q = quiet(reference.round, w, g)
        q = np.where(np.isfinite(q), q, 0).astype(q.dtype)
        carry = np.zeros(q.shape, dtype=q.dtype)
        for step in range(2):
            mode = ("nearest", "stochastic")[step]
            stream = hu.Stream(seed=4, name=g.name, step=step)
            z, kept = quiet(lambda q: (q + d).astype(q.dtype), q), tensor(carry)
            r, facts = quiet(
                reference.write_back, q, z, g, reference.MODES[mode], stream, carry=carry, carry_in=carry_in
            )
            given = kernels.Carry(kept, add=carry_in)
            got = kernels.write_back(tensor(q), tensor(z), g, mode, stream, sums=True, carry=given)
            what = f"{g.name} {mode}"
            assert_same(got.out, r, what)
            assert_same(kept, carry, f"{what} carry")
            assert_same(got.counts, facts["counts"], f"{what} counts")
            assert_same(got.sums, facts["sums"], f"{what} sums")
            q = r


@pytest.mark.parametrize("bad", [False, True], ids=["finite", "non-finite"])
@pytest.mark.parametrize("n", [1, 767, 768, 5000])
def test_two_byte_companions(n: int, bad: bool) -> None:
    """Stored values in bfloat16 are those in float32; a short carry is the exact one, rounded at the end."""
    w, d, _ = draw((n,), torch.float32, seed=31, bad=bad)
    tiny = np.float32(1e-39) * np.arange(n, dtype=np.float32)  # subnormal carries are rounded too
    for name in ("bf16", "e4m3@128", "m3", "int4@16/asym", "mxfp4"):
        rounded = kernels.round(tensor(np.where(np.isfinite(w), w, 0).astype(np.float32)), name)
        for mode in reference.MODES:
            stream, z = hu.Stream(seed=4, name=name), rounded + tensor(d)
            carries = (torch.float32, torch.bfloat16, torch.float16) if mode == "nearest" else ()
            for dtype in (None, *carries):
                start = None if dtype is None else tensor(tiny).to(dtype)
                exact = None if start is None else start.float().clone()
                wide = kernels.write_back(rounded, z.clone(), name, mode, stream, sums=True, carry=exact)
                short = kernels.write_back(
                    rounded.bfloat16(), z.clone(), name, mode, stream, sums=True, carry=start
                )
                for field in ("out", "counts", "sums"):
                    assert_same(getattr(short, field), getattr(wide, field), f"{name} {mode} {dtype}")
                if exact is not None and start is not None:
                    assert_same(start, exact.to(start.dtype), f"{name} {mode} {dtype}")


def test_prepared_is_work_still_to_be_done() -> None:
    """Everything is checked at once, nothing written before the work is called."""
    q = torch.zeros(1000)
    z, view = torch.ones(1000), torch.ones(1000, 2)[:, 0]
    carry = torch.zeros(1000, dtype=torch.float16)
    prepared = [kernels.prepare(q, x, "e4m3", carry=carry) for x in (z, view)]
    with pytest.raises(hu.UsageError, match="must match"):
        kernels.prepare(q[:5], z, "e4m3")
    assert not any(p.written.counts.any() for p in prepared)
    for call in [call for p in prepared for call in p.work]:
        call()
    assert [p.written.counts[:, 0].sum() for p in prepared] == [0, 0]
    assert bool((z == 1).all() and (view == 1).all())


@pytest.mark.parametrize("n", [0, 1, 15, 16, 768, 100_001])
def test_set_aside(n: int) -> None:
    """The bfloat16 values of a tensor, and whether they are all of it: in one value of any position not."""
    x = torch.randn(n).bfloat16().float()
    off = x.clone()
    off[-1:] = 1.0 + 2.0**-9
    places = [torch.empty(n, dtype=torch.bfloat16), torch.empty(n + 1, dtype=torch.bfloat16)[1:]]
    assert kernels.set_aside([x, off], places) == [True, n == 0]
    assert_same(places[0], x.bfloat16())
    column = torch.stack([x, x], dim=1)[:, 0]
    assert kernels.set_aside([column], places[1:]) == [True]
    assert_same(places[1], x.bfloat16())
    with pytest.raises(hu.UsageError, match="float32 into contiguous bfloat16 of the same shape"):
        kernels.set_aside([x.double()], places[:1])


def test_score(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """The eight sums of every tile."""
    w, u, g = draw(shape, dtype, seed=5)
    for grid in grids_for(dtype):
        expected = quiet(reference.score, w, g, u, grid)
        assert_same(kernels.score(tensor(w), tensor(g), tensor(u), grid), expected, grid.name)


def plain_scores(w: Any, g: Any, u: Any, grid: Any, tile: int) -> Any:
    """Scores by loops over tiles: padded to 3 * 2**k, halved, and the last three from left to right."""
    columns = reference.score(w, g, u, grid, tile=1)  # a coordinate a tile: its eight values
    size = 3
    while size < tile:
        size *= 2
    rows = []
    for first in range(0, w.size, tile):
        part = np.zeros((size, 8))
        part[: len(columns[first : first + tile])] = columns[first : first + tile]
        while len(part) > 3:
            part = part[: len(part) // 2] + part[len(part) // 2 :]
        rows.append(part[0] + part[1] + part[2])
    return np.array(rows)


@pytest.mark.parametrize("tile", [1, 5, 96, 100, 768, 1000, 1536, 5000])
def test_scores_of_tiles_of_any_size(dtype: torch.dtype, tile: int) -> None:
    """Tiles of any size, the last one short or not, on fixed and moving grids, before and after a step."""
    for shape in ((5, 700), (2,)):
        w, u, g = draw(shape, dtype, seed=15)
        after = quiet(lambda w=w, u=u: (w + u).astype(w.dtype))
        work = np.float64 if dtype == torch.float64 else np.float32
        change = quiet(lambda w=w, a=after, to=work: a.astype(to) - w.astype(to))
        for grid in grids_for(dtype):
            expected = quiet(reference.score, w, g, u, grid, tile)
            assert expected.shape == (-(-w.size // tile), 8)
            assert_same(kernels.score(tensor(w), tensor(g), tensor(u), grid, tile=tile), expected, grid.name)
            expected = quiet(reference.score, w, g, change, grid, tile)
            found = kernels.score(tensor(w), tensor(g), tensor(after), grid, after=True, tile=tile)
            assert_same(found, expected, grid.name)


@pytest.mark.parametrize("tile", [1, 5, 96, 100, 768, 1000, 1536])
def test_scores_are_plain_sums(tile: int) -> None:
    """The reference itself, against loops over tiles."""
    w, u, g = draw((5, 700), torch.float32, seed=16)
    for name in ("e5m2", "int4/g128"):
        grid = hu.grid(name)
        assert_same(
            torch.from_numpy(quiet(reference.score, w, g, u, grid, tile)),
            quiet(plain_scores, w, g, u, grid, tile),
        )


@pytest.mark.parametrize("tile", [0, -1, 1.5, True, None, "96"])
def test_what_is_not_the_size_of_a_tile(tile: Any) -> None:
    x = torch.ones(10)
    with pytest.raises(hu.UsageError, match="a tile is a whole number of coordinates, 1 or more"):
        kernels.score(x, x, x, "e5m2", tile=tile)


def test_after_mode(dtype: torch.dtype) -> None:
    """after=True takes weights after the step: the proposal is their difference, in at least float32."""
    w, d, g = draw((5, 700), dtype, seed=6)
    after = quiet(lambda: (w + d).astype(w.dtype))
    work = np.float64 if dtype == torch.float64 else np.float32
    change = quiet(lambda: after.astype(work) - w.astype(work))
    grids = grids_for(dtype)
    expected = quiet(reference.audit, w, change, grids)
    got = kernels.audit(tensor(w), tensor(after), grids, after=True)
    for field, value in expected.items():
        assert_same(getattr(got, field), value, field)
    for grid in grids:
        want = quiet(reference.score, w, g, change, grid)
        assert_same(kernels.score(tensor(w), tensor(g), tensor(after), grid, after=True), want, grid.name)


def test_float64_values_that_float32_cannot_hold() -> None:
    """A float64 container: 53-bit mantissas, magnitudes beyond float32's, subnormals; phase sums too."""
    rng = np.random.default_rng(7)
    n = 5000
    w = rng.standard_normal(n) * 2.0 ** rng.integers(-1060, 900, n)
    d = w * 2.0 ** -rng.integers(0, 12, n) * rng.standard_normal(n)
    w[:50] = 5e-324 * rng.integers(0, 5, 50)
    grids = [
        hu.grid(n) for n in ("bf16", "e4m3", "m7", "m3", "m24", "m51", "int8@100", "int8", "mxfp4", "nvfp4")
    ]
    expected = quiet(reference.audit, w, d, grids)
    got = kernels.audit(tensor(w), tensor(d), grids)
    for field, value in expected.items():
        assert_same(getattr(got, field), value, field)
    for g in grids:
        assert_same(kernels.round(tensor(w), g), quiet(reference.round, w, g), g.name)
        stream = hu.Stream(seed=7, name=g.name)
        expected_random = quiet(reference.round, w, g, reference.STOCHASTIC, stream)
        assert_same(kernels.round(tensor(w), g, stream), expected_random, g.name)


def test_proposals_in_a_wider_container() -> None:
    """float32 proposals for bfloat16 weights: the sum is rounded to the container once."""
    w, _, _ = draw((3000,), torch.bfloat16, seed=8)
    _, d, _ = draw((3000,), torch.float32, seed=8)
    grids = grids_for(torch.bfloat16)
    expected = quiet(reference.audit, w, d, grids)
    got = kernels.audit(tensor(w), tensor(d), grids)
    for field, value in expected.items():
        assert_same(getattr(got, field), value, field)
    q = hu.grid("e4m3").round(tensor(np.where(np.isfinite(w), w, 0).astype(w.dtype)))
    one = kernels.audit(q, tensor(d), ["e4m3"])
    assert int(one.counts[:, 0, 0].sum()) == int(hu.frozen(q, tensor(d), "e4m3").sum())


# ---- definitions, without the reference -------------------------------------------------------------


def test_counts_by_definition() -> None:
    """What the counts mean, spelled out once on a tile: frozen, endpoint, subnormal, zero, non-finite."""
    w = torch.tensor([1.0, 1.0, 448.0, -1000.0, 2.0**-8, 2.0**-11, 0.0, math.nan, 1.0])
    d = torch.tensor([0.05, 0.07, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, math.inf])
    a = kernels.audit(w, d, ["e4m3"])
    assert dict(zip(kernels.AUDIT_COUNTS, a.counts[0, 0].tolist(), strict=True)) == {
        "frozen": 5, "symmetric": 5, "endpoint": 2, "subnormal": 1, "zero_code": 2, "never_moved": 0,
        "dragged": 0,
    }  # fmt: skip
    assert dict(zip(kernels.SHARED_COUNTS, a.shared[0].tolist(), strict=True)) == {
        "zero_proposal": 3,
        "nonfinite": 2,
    }
    moved = torch.zeros(2, dtype=torch.uint8)
    q = torch.tensor([1.0, 1.0, 448.0, -448.0, 2.0**-8, 0.0, 0.0, 3.0, 1.0])
    z = torch.tensor([1.05, 1.07, 448.0, -447.0, 2.0**-8, 2.0**-11, 1.0, math.nan, math.inf])
    r = kernels.write_back(q, z, "e4m3", moved=moved, sums=True)
    assert r.out.tolist() == [1.0, 1.125, 448.0, -448.0, 2.0**-8, 0.0, 1.0, 3.0, 1.0]
    assert dict(zip(kernels.WRITE_COUNTS, r.counts[0].tolist(), strict=True)) == {
        "frozen": 5, "zero_proposal": 2, "endpoint": 2, "nonfinite": 2, "never_moved": 7,
    }  # fmt: skip
    assert moved.tolist() == [0b01000010, 0]


def test_deadzone_is_nearest_except_where_nearest_loses() -> None:
    """Dead-zone mode: nearest where that moves the code, stochastic where a proposal would vanish."""
    w, d, _ = draw((20_000,), torch.float32, seed=9, bad=False)
    for name in ("e4m3", "bf16", "int4@16"):
        stream = hu.Stream(seed=9, name=name)
        q = hu.grid(name).round(tensor(w))
        z = q + tensor(d)
        modes = {m: kernels.write_back(q, z.clone(), name, m, stream).out for m in reference.MODES}
        lost = (modes["nearest"] == q) & (z != q)
        assert lost.any()
        expected = torch.where(lost, modes["stochastic"], modes["nearest"])
        assert_same(modes["deadzone"], expected)


# ---- strides ----------------------------------------------------------------------------------------


def views(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same 40 by 60 values, held in other ways."""
    held = torch.zeros(80, 180, dtype=x.dtype)
    held[::2, ::3] = x
    return {
        "transposed": x.t().contiguous().t(),
        "strided": held[::2, ::3],
        "offset": torch.cat([x.new_zeros(7), x.reshape(-1)])[7:].reshape(x.shape),
        "reversed axes": x.reshape(5, 8, 60).permute(2, 1, 0).contiguous().permute(2, 1, 0).reshape(40, 60),
        "grad": x.clone().requires_grad_(),
    }


@pytest.mark.parametrize("name", ["e4m3", "bf16", "int8/row", "mxfp4"])
def test_strides_do_not_matter(dtype: torch.dtype, name: str) -> None:
    """Transposed, strided and offset inputs and outputs give the results of contiguous ones."""
    if not fits(name, dtype):
        name = {"bf16": "fp16", "int8/row": "nvfp4"}[name]
    w, d, g = (tensor(x) for x in draw((40, 60), dtype, seed=10))
    stream = hu.Stream(seed=10, name=name)
    rounded, random = kernels.round(w, name), kernels.round(w, name, stream)
    q = torch.where(torch.isfinite(rounded), rounded, 0)
    audit, score = kernels.audit(w, d, [name]), kernels.score(w, g, d, name)
    written = kernels.write_back(q, q + d, name, "stochastic", stream, sums=True)
    for label in views(w):
        v, p, h, s, z = (views(x)[label] for x in (w, d, g, q, q + d))
        out = views(torch.zeros_like(w))[label].detach()
        assert_same(kernels.round(v, name), rounded, label)
        assert kernels.round(v, name, stream, out=out) is out
        assert_same(out, random, label)
        again = kernels.audit(v, p, [name])
        for field in ("counts", "shared", "sums", "phase", "expected"):
            assert_same(getattr(again, field), getattr(audit, field), label)
        assert_same(kernels.score(v, h, p, name), score, label)
        aside = kernels.write_back(s, z, name, "stochastic", stream, out=out)
        assert_same(aside.out, written.out, label)
        over = z.detach()
        got = kernels.write_back(s, over, name, "stochastic", stream, sums=True)
        assert got.out.data_ptr() == over.data_ptr()
        for a, b in ((over, written.out), (got.counts, written.counts), (got.sums, written.sums)):
            assert_same(a, b, label)


def test_expanded_inputs_and_rounding_in_place() -> None:
    """Expanded tensors are read as the values they show; x may be its own output."""
    row = torch.linspace(-1, 1, 60)
    wide = row.expand(40, 60)
    stream = hu.Stream(seed=1, name="x")
    for name in ("e4m3", "int8/row"):
        assert_same(kernels.round(wide, name, stream), kernels.round(wide.contiguous(), name, stream))
        assert_same(
            kernels.audit(wide, wide, [name]).counts, kernels.audit(wide.contiguous(), wide, [name]).counts
        )
        x = wide.contiguous()
        expected = kernels.round(x, name, stream)
        assert_same(kernels.round(x, name, stream, out=x), expected)
    zero = torch.tensor(0.3)
    assert kernels.round(zero, "e4m3").shape == ()


# ---- threads and processes --------------------------------------------------------------------------


def inputs(seed: int, n: int = 450_000) -> dict[str, Any]:
    """Tensors large enough to be split between two threads."""
    w, d, g = (tensor(x) for x in draw((n // 50, 50), torch.float32, seed=seed))
    codes = {name: kernels.round(torch.nan_to_num(w, 0, 1, -1), name) for name in MANY}
    return {"w": w, "d": d, "g": g, "codes": codes, "next": {name: q + d for name, q in codes.items()}}


MANY = ("e4m3", "bf16", "int8", "int8/row", "mxfp4")


def everything(x: dict[str, Any]) -> list[np.ndarray]:
    """What every kernel makes of such tensors. No operation of torch's own is needed."""
    stream, found, w = hu.Stream(seed=1, name="w"), [], x["w"]
    for name in MANY:
        q, z = x["codes"][name], x["next"][name]
        moved, out = np.zeros((w.numel() + 7) // 8, dtype=np.uint8), torch.empty(w.shape)
        written = kernels.write_back(
            q, z, name, "deadzone", stream, moved=torch.from_numpy(moved), sums=True, out=out
        )
        found += [written.out, written.counts, written.sums, torch.from_numpy(moved)]
        found += [kernels.round(w, name), kernels.round(w, name, stream), kernels.scales(w, name)]
        found += [kernels.score(w, x["g"], x["d"], name), kernels.encode(q, name)]
    audit = kernels.audit(w, x["d"], list(MANY))
    return [array(v) for v in (*found, audit.counts, audit.shared, audit.sums, audit.phase)]


def test_one_thread_or_two(threads: None) -> None:
    """The number of threads does not change a bit."""
    found = []
    for count in (1, 2):
        torch.set_num_threads(count)
        found.append(everything(inputs(seed=11)))
    for one, two in zip(*found, strict=True):
        assert_same(two, one)


def test_ranges_are_shared_out(threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every range is done once, whatever the number of threads: the sums say so."""
    codes = torch.zeros(100_000, dtype=torch.uint8).numpy()
    table, out = np.full(1, np.nan), np.empty(100_000)
    tiles = kernels.tiles_of(codes.size)
    bad = np.zeros(1, dtype=np.int64)
    call = native.call_of("decode", bytes=1, codes=codes, values=table, out=out, size=codes.size, bad=bad)
    for team in (native.ALONE, native.torchs_team()):
        monkeypatch.setattr(native, "torchs_team", lambda team=team: team)
        for count in (1, 2, 3, 7):
            torch.set_num_threads(count)
            bad[0] = 0
            native.run("decode", tiles, call, grain=1)
            assert bad[0] == codes.size


def test_two_python_threads(threads: None) -> None:
    """Two Python threads in the kernels at once, each of which uses two more, get what one alone gets."""
    torch.set_num_threads(2)
    work = [inputs(seed=12), inputs(seed=13)]
    alone = [everything(x) for x in work]
    with ThreadPoolExecutor(2) as pool:
        for _ in range(2):
            for results, expected in zip(pool.map(everything, work), alone, strict=True):
                for got, want in zip(results, expected, strict=True):
                    assert_same(got, want)


def test_plain_threads(threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch has no team, threads of our own do the work."""
    torch.set_num_threads(3)
    x = inputs(seed=14)
    expected = everything(x)
    monkeypatch.setattr(native, "_forked", True)
    for got, want in zip(everything(x), expected, strict=True):
        assert_same(got, want)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_forked_child(threads: None) -> None:
    """A child forked after the parent used its threads can use its own, and gets the same. (torch's own
    parallel operations may hang in such a child, so the kernels must not need any.)"""
    torch.set_num_threads(2)
    x = inputs(seed=14)
    expected = everything(x)
    child = os.fork()
    if child == 0:  # no pytest from here on: the exit code tells
        status = 1
        try:
            signal.alarm(60)
            for got, want in zip(everything(x), expected, strict=True):
                assert_same(got, want)
            status = 0
        finally:
            os._exit(status)
    for _ in range(600):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        time.sleep(0.1)
    else:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        pytest.fail("the forked child hung")
    assert os.waitstatus_to_exitcode(status) == 0


# ---- more than 2**31 elements -----------------------------------------------------------------------


def test_indices_beyond_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels on the last three tiles of tensors of more than 2**31 elements. Elsewhere the tensors
    are zeros that nobody reads or writes, so the system never gives them memory."""
    calls = []

    def last_native(kernel: Any, count: int, call: Any, grain: int = 0) -> None:
        calls.append(kernel)
        whole(kernel, count, call, first=max(count - 3, 0))

    whole = native.run
    monkeypatch.setattr(native, "run", last_native)
    n = 2**31 + 1000
    first = (reference.tiles_of(n) - 3) * reference.TILE
    assert first < 2**31 < n
    w, d, g = draw((n - first,), torch.bfloat16, seed=15)
    q = np.where(np.isfinite(w), w, 0).astype(w.dtype)
    z = quiet(lambda: (q + d).astype(q.dtype))

    def tail_of(values: np.ndarray) -> torch.Tensor:
        flat = np.zeros(n, dtype=np.int16)
        flat[first:] = values.view(np.int16)
        return torch.from_numpy(flat).view(torch.bfloat16)

    big = {name: tail_of(x) for name, x in {"w": w, "d": d, "g": g, "q": q, "z": z}.items()}
    stream, grid = hu.Stream(seed=15, name="w"), hu.grid("e4m3")
    rounded = kernels.round(big["w"], grid, stream)
    expected = quiet(reference.round, w, grid, reference.STOCHASTIC, stream.at(first))
    assert_same(rounded[first:], expected, "round")

    moved = torch.from_numpy(np.zeros((n + 7) // 8, dtype=np.uint8))
    written = kernels.write_back(big["q"], big["z"], grid, "deadzone", stream, moved=moved, sums=True)
    bits = np.zeros((n - first + 7) // 8, dtype=np.uint8)
    r, facts = quiet(reference.write_back, q, z, grid, reference.DEADZONE, stream.at(first), moved=bits)
    assert_same(written.out[first:], r, "write_back")
    assert_same(written.counts[-3:], facts["counts"], "counts")
    assert_same(written.sums[-3:], facts["sums"], "sums")
    assert_same(moved[first // 8 :], bits, "moved")

    audited, audit = kernels.audit(big["w"], big["d"], [grid]), quiet(reference.audit, w, d, [grid])
    for name, want in audit.items():
        assert_same(getattr(audited, name)[-3:], want, name)
    score = kernels.score(big["w"], big["g"], big["d"], grid)
    assert_same(score[-3:], quiet(reference.score, w, g, d, grid), "score")
    assert len(calls) == 4  # none of them went over the whole tensors


@pytest.mark.large
def test_more_than_two_to_the_31_elements() -> None:
    """The public calls on more than 2**31 bfloat16 values (nine gigabytes in all): beginning, middle, end."""
    n = 2**31 + 10_000
    x = torch.zeros(n, dtype=torch.bfloat16)
    values, _, _ = draw((5000,), torch.bfloat16, seed=16, bad=False)
    starts = (0, 2**31 - 2500, n - 5000)
    for start in starts:
        x[start : start + 5000] = tensor(values)
    stream = hu.Stream(seed=16, name="x")
    expected = [kernels.round(x[s : s + 5000].clone(), "e4m3", stream.at(s)) for s in starts]
    q = x.clone()
    kernels.round(x, "e4m3", stream, out=x)
    for start, want in zip(starts, expected, strict=True):
        assert_same(x[start : start + 5000], want)
    moved = torch.zeros((n + 7) // 8, dtype=torch.uint8)
    written = kernels.write_back(q, x, "e4m3", moved=moved)
    frozen, never = (int(written.counts[:, c].sum(dtype=torch.int64)) for c in (0, 4))
    pieces = zip(q.split(2**26), x.split(2**26), strict=True)  # the sum of booleans makes a copy of int64s
    assert frozen == never == sum(int((a == b).sum()) for a, b in pieces)
    assert int(written.counts[:, 3].sum()) == 0
    audit = kernels.audit(q, x, ["e4m3"], after=True)
    assert int(audit.counts[:, 0, 4].sum(dtype=torch.int64)) > 2**31 - 20_000
