"""Kernels against the NumPy reference, to the last bit: rounding, containers, strides."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernel_inputs import draw, grids_for, quiet
from oracle import assert_same, fits, tensor

import halfulp as hu
from halfulp import kernels
from halfulp.kernels import reference


def test_what_a_tile_is_padded_to() -> None:
    """The next of 3, 6, 12, 24, ..."""
    sizes = [3 * 2**k for k in range(10)]
    for tile in range(1, 1000):
        assert reference.tree_size(tile) == min(n for n in sizes if n >= tile)


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
