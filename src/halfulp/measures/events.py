"""The exact event and its approximations, coordinate by coordinate.

A coordinate is *frozen* when a write-back leaves it as it is (the paper, section 2):

    Q(q + d) == q        by decoded value, so that -0 equals +0

with q + d in the container's arithmetic; where scales move with the data, by code
(:mod:`halfulp.kernels.reference` has the definition). Everything else here approximates or explains that:
the symmetric spacing, rho and the phase (appendix A), the gap in the direction of a
proposal, and the margin to the nearest rounding boundary (appendix B).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from halfulp import kernels
from halfulp.errors import UsageError
from halfulp.kernels import reference
from halfulp.kernels.plan import checked, given_scales, plan_for, same_shape
from halfulp.kernels.unchanged import unchanged
from halfulp.numbers.elements import index_of, value_of
from halfulp.numbers.grids import Grid
from halfulp.numbers.grids import grid as named

Array = npt.NDArray[Any]
GridLike = Grid | str | torch.dtype


def written(q: torch.Tensor, z: torch.Tensor, grid: GridLike) -> torch.Tensor:
    """Return the values that a nearest write-back of z stores over q.

    Args:
        q: Stored values.
        z: Values to write.
        grid: The grid, by name or as a ``Grid``.
    """
    g = named(grid)
    return kernels.round(z, g, scale=_next_scales(q, z, g))


def _next_scales(q: torch.Tensor, z: torch.Tensor, g: Grid) -> torch.Tensor | None:
    """Return the scales of a write-back of z over q; None where they are fixed."""
    if g.scaling is None or not g.scaling.moves:
        return None
    return kernels.scales(q if g.scaling.from_old else z, g)


def frozen(q: torch.Tensor, d: torch.Tensor, grid: GridLike) -> torch.Tensor:
    """Return a mask of the stored values that a nearest write-back of q + d leaves unchanged.

    On a grid whose scales move with the data, these are the values whose code stays the same. Non-finite
    values are not frozen.

    Args:
        q: Stored values.
        d: The proposal.
        grid: The grid, by name or as a ``Grid``.

    Returns:
        A boolean tensor, True where the value is frozen.

    >>> q = torch.tensor([1.0, 1.0, 1.0, 0.0])
    >>> frozen(q, torch.tensor([0.06, 0.07, -0.04, 0.0]), "e4m3")
    tensor([ True, False, False,  True])
    >>> frozen(torch.tensor([127.0, 64.0]), torch.tensor([1.27, 0.0]), "int8")
    tensor([True, True])
    """
    g, z = named(grid), _sum(q, d)
    then = _next_scales(q, z, g)
    now = None if then is None else kernels.scales(q, reference.rule_of_stored(g))
    return unchanged(q, kernels.round(z, g, scale=then), d == 0, g, now, then) & torch.isfinite(z)


def _sum(q: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
    """Return q + d in the container's arithmetic."""
    q, d = checked(q, "q"), checked(d, "d")
    same_shape(q=q, d=d)
    return (q + d).to(q.dtype)


def symmetric_frozen(w: torch.Tensor, d: torch.Tensor, grid: GridLike) -> torch.Tensor:
    """Return the symmetric-spacing approximation: |d| < u(w) / 2, with one spacing on both sides.

    Args:
        w: Weights.
        d: The proposal.
        grid: The grid, by name or as a ``Grid``.

    Returns:
        A boolean per weight. Below a power of two it differs from :func:`frozen`, which is exact.

    >>> symmetric_frozen(torch.tensor([1.0, 1.0]), torch.tensor([0.06, -0.06]), "e4m3")
    tensor([True, True])
    """
    same_shape(w=checked(w, "w"), d=checked(d, "d"))
    g, x, scale = _numpy(w, grid)
    unit = reference._unit_at(x.reshape(-1), g, scale, x.shape).reshape(x.shape)
    small = np.abs(d.detach().double().cpu().numpy()) < unit / 2
    return torch.from_numpy(np.asarray(small)).to(w.device)


def rho(w: torch.Tensor, d: torch.Tensor, grid: GridLike) -> torch.Tensor:
    """Return |d| / (2**-(m+1) |w|) per coordinate.

    Args:
        w: Weights.
        d: The proposal.
        grid: The grid, by name or as a ``Grid``.

    Returns:
        The ratios; at a weight of zero, infinite for a proposal and NaN without one.

    >>> rho(torch.tensor([1.0, 0.5]), torch.tensor([0.0625, 0.0625]), "e4m3")
    tensor([1., 2.])
    """
    eps = named(grid).epsilon
    return checked(d, "d").abs() / (eps * checked(w, "w").abs())


def phase(w: torch.Tensor) -> torch.Tensor:
    """Return frac(log2 |w|), the position of a weight in its binade, from 0 up to 1; NaN for zero.

    Args:
        w: Weights.

    Returns:
        The positions.

    >>> phase(torch.tensor([1.0, -1.5, 4.0]))
    tensor([0.0000, 0.5850, 0.0000])
    """
    mantissa, _ = torch.frexp(checked(w, "w").abs())
    return torch.where(mantissa == 0, torch.nan, torch.log2(2 * mantissa))


def neighbours(
    x: torch.Tensor, grid: GridLike, *, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the nearest grid values strictly below and strictly above; infinite where there is none."""
    g, values, own = _numpy(x, grid, scale)
    below, above = _neighbours(values, g, own)

    def like_x(v: Array) -> torch.Tensor:
        return torch.from_numpy(np.asarray(v)).to(x.dtype).to(x.device)

    return like_x(below), like_x(above)


def gap(
    q: torch.Tensor, direction: torch.Tensor, grid: GridLike, *, scale: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the distance to the adjacent grid value in the direction of a proposal (upwards for zero)."""
    g, values, own = _numpy(q, grid, scale)
    checked(direction, "direction")
    below, above = _neighbours(values, g, own)
    down = (
        direction.detach().cpu().numpy() < 0
        if direction.dtype != torch.bfloat16
        else (direction < 0).cpu().numpy()
    )
    distance = np.where(down, values - below, above - values)
    return torch.from_numpy(distance).to(q.dtype).to(q.device)


def margin(q: torch.Tensor, d: torch.Tensor, grid: GridLike) -> torch.Tensor:
    """Return the distance of q + d from the nearest boundary of the rounding cell that it falls into.

    The distance is zero where no finite interior cell defines it: at the ends of the range, on a boundary,
    and for values that are not finite.

    Args:
        q: Stored values.
        d: The proposal.
        grid: The grid, by name or as a ``Grid``.

    Returns:
        The distances in float64, correctly rounded.

    Raises:
        UsageError: If the scales of the grid move with the data.

    >>> margin(torch.tensor([1.0, 448.0]), torch.tensor([0.05, 1.0]), "e4m3")
    tensor([0.0125, 0.0000], dtype=torch.float64)
    """
    g = named(grid)
    if g.scaling is not None and g.scaling.moves:
        raise UsageError(f"the cells of grid {g.name} move with the data: a margin has no meaning there.")
    z = _sum(q, d)
    landed = kernels.round(z, g)
    resolved, at, scale = _numpy(landed, g)
    below, above = _neighbours(at, resolved, scale)
    x = z.double().cpu().numpy()
    with np.errstate(invalid="ignore"):
        room = np.minimum(x - (below + (at - below) / 2), at + (above - at) / 2 - x)
    inside = np.isfinite(below) & np.isfinite(above) & np.isfinite(x) & (room > 0)
    return torch.from_numpy(np.where(inside, room, 0.0)).to(q.device)


def _numpy(
    x: torch.Tensor, grid: GridLike, scale: torch.Tensor | None = None
) -> tuple[Grid, Array, Array | None]:
    """Return the grid resolved for x, x as float64, and the scales that apply."""
    x = checked(x, "x")
    plan = plan_for(grid, x.dtype)
    scales = given_scales(scale, plan, tuple(x.shape))
    if scales is None and plan.grid.scaling is not None:
        scales = kernels.scales(x, plan.grid).cpu().numpy()
    return plan.grid, np.asarray(x.detach().double().cpu().numpy()), scales


def _neighbours(x: Array, g: Grid, scale: Array | None) -> tuple[Array, Array]:
    each: Any = 1.0
    if scale is not None and g.scaling is not None:
        each = scale[reference.segment_ids(x.shape, g.scaling)].reshape(x.shape)
    v = x / each
    low = _next(v, g, up=False)
    return low * each, _next(v, g, up=True) * each


def _next(v: Array, g: Grid, *, up: bool) -> Array:
    """Return the next element above or below, in float64."""
    top = g._fixed()[1] if up else -g.lo
    s = v if up else -v  # look upwards
    a = np.minimum(np.abs(np.where(np.isfinite(s), s, 0.0)), max(g._fixed()[1], -g.lo))
    n = index_of(a, g)
    on = value_of(n, g) == a
    outward = value_of(n + 1, g)  # s >= 0: away from zero
    inward = -value_of(np.where(on, n - 1, n), g)  # s < 0: towards zero
    r = np.where(s >= 0, outward, inward)
    r = np.where((s >= top) | (r > top), np.inf, r)
    r = np.where(s < -(-g.lo if up else g._fixed()[1]), -(-g.lo if up else g._fixed()[1]), r)
    r = np.where(np.isnan(s), np.nan, r)
    return np.asarray(r if up else -r)
