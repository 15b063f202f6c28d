"""Codes of values and values of codes: kernels against the NumPy reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernel_inputs import draw, grids_for, quiet
from oracle import NUMPY, assert_same, tensor

import halfulp as hu
from halfulp import kernels
from halfulp.kernels import reference


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
