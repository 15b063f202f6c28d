"""Codes: grid values as small integers, and back."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from halfulp.errors import UsageError
from halfulp.grids import Grid
from halfulp.kernels import reference
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
from halfulp.kernels.pool import run
from halfulp.kernels.reference import tiles_of

Array = npt.NDArray[Any]


def encode(
    x: torch.Tensor,
    grid: Grid | str | torch.dtype,
    *,
    scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Codes of the nearest grid values: uint8 for grids of at most eight bits, int32 otherwise."""
    from halfulp.kernels import cpu

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
    args = (
        flat,
        codes.reshape(-1).numpy(),
        plan.floats,
        plan.ints,
        plan.masks,
        plan.grid.bits,
        plan.grid.integer,
    )
    bad = run(cpu.encode_tiles, tiles_of(flat.size), *args)
    if bad:
        at = int(torch.nonzero(~torch.isfinite(x.reshape(-1)))[0])
        raise UsageError(
            f"cannot encode {bad} non-finite value(s), the first at flat index {at}: "
            f"grid {plan.grid.name} has no code for them."
        )
    if out is None:
        return codes.to(x.device)
    return out if codes is out else out.copy_(codes)


def _expand(scales: Array, plan: Plan, shape: tuple[int, ...]) -> Array:
    from halfulp.kernels import cpu_scaled

    each = np.empty(math.prod(shape))
    cpu_scaled.expand(scales, 0, *plan.layout(shape), each)
    return each


def decode(
    codes: torch.Tensor,
    grid: Grid | str | torch.dtype,
    *,
    scale: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Values of codes, in a container; codes outside the grid are refused."""
    from halfulp.kernels import cpu

    if not isinstance(codes, torch.Tensor):
        raise UsageError(f"codes must be a tensor, not {type(codes).__name__}.")
    with_values(codes, "codes")
    plan = plan_for(grid, dtype)
    shape = tuple(codes.shape)
    g = plan.grid if plan.grid.scaling is None else replace(plan.grid, scaling=None)
    if g.bits > 16:
        raise UsageError(f"grid {g.name} has {g.bits} bits; codes are for grids of at most 16.")
    if g.scaling is None and plan.grid.scaling is not None and scale is None:
        raise UsageError(f"grid {g.name} needs the scales that its codes were made with.")
    table = code_table(g)
    flat = codes.detach().cpu().contiguous().reshape(-1).numpy()
    if flat.dtype not in (np.uint8, np.int16, np.int32, np.int64):
        raise UsageError(f"codes must be integers, not {codes.dtype}.")
    low, high = (int(flat.min()), int(flat.max())) if flat.size else (0, 0)
    out = np.empty(flat.size)
    if low >= 0 and high < table.size:
        bad = run(cpu.decode_tiles, tiles_of(flat.size), flat, table, out)
    else:
        bad = -1
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
    """The values of all codes of as many bits as the grid has; not a number where there is no such code."""
    codes = np.arange(2**g.bits, dtype=np.int64)
    values = np.full(codes.size, np.nan)
    values[reference.is_code(codes, g)] = reference.decode(codes[reference.is_code(codes, g)], g)
    return values
