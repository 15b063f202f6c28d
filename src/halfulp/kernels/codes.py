"""Encode grid values as small integers, and decode them."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from halfulp.errors import UsageError
from halfulp.kernels import native, reference
from halfulp.kernels.plan import (
    Plan,
    as_floats,
    checked,
    flat_of,
    given_scales,
    plan_for,
    same_shape,
    scales_of,
    with_values,
)
from halfulp.kernels.reference import tiles_of
from halfulp.numbers.grids import Grid

Array = npt.NDArray[Any]


def encode(
    x: torch.Tensor,
    grid: Grid | str | torch.dtype,
    *,
    scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Encode the nearest grid values.

    Args:
        x: The values.
        grid: The grid.
        scale: Fixed scales, for a grid with scales; by default they are computed from ``x``.
        out: The tensor for the result; by default a new one.

    Returns:
        The codes: uint8 for grids of at most eight bits, int32 otherwise.

    Raises:
        UsageError: If a value is not finite, or the arguments do not fit together.

    >>> encode(torch.tensor([1.0, -448.0]), "e4m3")
    tensor([ 56, 254], dtype=torch.uint8)
    """
    x = checked(x, "x")
    plan = plan_for(grid, x.dtype)
    shape = tuple(x.shape)
    given = given_scales(scale, plan, shape)
    flat = flat_of(x)
    if plan.scaled:
        s = scales_of(flat, plan, shape, x.dtype) if given is None else given
        from halfulp.kernels import round as rounded_to

        rounded = rounded_to(
            x.cpu(), plan.grid, scale=None if plan.grid.scaling is None else torch.from_numpy(s)
        )
        each = _expand(s, plan, shape)
        flat = as_floats(flat_of(rounded)).astype(np.float64) / each
        plan = Plan(replace(plan.grid, scaling=None), "float64", False, plan.floats, plan.ints)
    dtype = torch.uint8 if plan.grid.bits <= 8 else torch.int32
    if out is not None:
        same_shape(x=x, out=out)
    direct = out is not None and out.dtype == dtype and out.is_contiguous() and out.device.type == "cpu"
    codes = out if out is not None and direct else torch.empty(shape, dtype=dtype, device="cpu")
    bad = _encode(flat, codes.view(-1).numpy(), plan)
    if bad:
        at = int(torch.nonzero(~torch.isfinite(x.reshape(-1)))[0])
        raise UsageError(
            f"cannot encode {bad} non-finite value(s), the first at flat index {at}: "
            f"grid {plan.grid.name} has no code for them."
        )
    if out is None:
        return codes.to(x.device)
    return out if codes is out else out.copy_(codes)


def _encode(x: Array, codes: Array, plan: Plan) -> int:
    """Encode flat values of a fixed grid; return how many were not finite."""
    if native.library() is None:
        wide = as_floats(x).astype(np.float64)
        fine = np.isfinite(wide)
        codes[:] = reference.encode(np.where(fine, wide, 0), plan.grid)
        return int((~fine).sum())
    bad = np.zeros(1, dtype=np.int64)
    call = native.call_of(
        "encode", **plan.numbers, stored=native.OF_ARRAY[x.dtype], bits=plan.grid.bits,
        integer=plan.grid.integer, x=x, codes=codes, size=x.size, bad=bad,
    )  # fmt: skip
    native.run("encode", tiles_of(x.size), call)
    return int(bad[0])


def _decode(codes: Array, table: Array, out: Array) -> int:
    """Look values up; return how many codes have none."""
    if native.library() is None:
        out[:] = table[codes]
        return int(np.isnan(out).sum())
    bad = np.zeros(1, dtype=np.int64)
    call = native.call_of(
        "decode", bytes=codes.itemsize, codes=codes, values=table, out=out, size=codes.size, bad=bad
    )
    native.run("decode", tiles_of(codes.size), call)
    return int(bad[0])


def _expand(scales: Array, plan: Plan, shape: tuple[int, ...]) -> Array:
    """The scale of every coordinate."""
    row, length = plan.layout(shape)
    each = np.repeat(scales.reshape(-1, -(-row // length)), length, axis=1)[:, :row]
    return np.asarray(np.broadcast_to(each, (math.prod(shape) // row, row)).reshape(-1))


def decode(
    codes: torch.Tensor,
    grid: Grid | str | torch.dtype,
    *,
    scale: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Decode codes to values of a container.

    Args:
        codes: The codes, as :func:`encode` returns them.
        grid: The grid.
        scale: The scales that the values were encoded with, for a grid with scales.
        dtype: The container of the values.

    Returns:
        The values.

    Raises:
        UsageError: If a code is outside the grid, or the arguments do not fit together.

    >>> decode(torch.tensor([56, 254], dtype=torch.uint8), "e4m3")
    tensor([   1., -448.])
    """
    if not isinstance(codes, torch.Tensor):
        raise UsageError(f"codes must be a tensor, not {type(codes).__name__}.")
    with_values(codes, "codes")
    if codes.dtype not in (torch.uint8, torch.int16, torch.int32, torch.int64):
        raise UsageError(
            f"codes must be integers, not {codes.dtype}. Those of a float8 tensor are x.view(torch.uint8)."
        )
    plan = plan_for(grid, dtype)
    shape = tuple(codes.shape)
    g = plan.grid if plan.grid.scaling is None else replace(plan.grid, scaling=None)
    if g.bits > 16:
        raise UsageError(f"grid {g.name} has {g.bits} bits; codes are for grids of at most 16.")
    if g.scaling is None and plan.grid.scaling is not None and scale is None:
        raise UsageError(f"grid {g.name} needs the scales that its codes were made with.")
    table = code_table(g)
    flat = codes.detach().cpu().contiguous().reshape(-1).numpy()
    low, high = (int(flat.min()), int(flat.max())) if flat.size else (0, 0)
    out = np.empty(flat.size)
    bad = _decode(flat, table, out) if low >= 0 and high < table.size else -1
    if bad:
        raise UsageError(
            f"not codes of grid {g.name}: they lie in [{low}, {high}], the grid's are those of "
            f"{g.bits} bits that decode to {g.lo:g} .. {g.largest:g}."
        )
    given = given_scales(scale, plan, shape)
    if given is not None:
        out = out * _expand(given, plan, shape)
    return torch.from_numpy(out).to(dtype).reshape(shape).to(codes.device)


@lru_cache(maxsize=64)
def code_table(g: Grid) -> Array:
    """Return the values of all codes of the grid's width; NaN where a code does not exist."""
    codes = np.arange(2**g.bits, dtype=np.int64)
    values = np.full(codes.size, np.nan)
    values[reference.is_code(codes, g)] = reference.decode(codes[reference.is_code(codes, g)], g)
    return values
