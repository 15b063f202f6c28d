"""Run the kernels on tensors: rounding, audit, write-back, scores.

Each takes any shape, stride, size and device in one call. The work is done by C++
(:mod:`~halfulp.kernels.native`) or Triton (:mod:`~halfulp.kernels.gpu`), which agree with
:mod:`~halfulp.kernels.reference` to the last bit.
Containers are float64, float32, bfloat16 and float16 (the last through a float32 copy).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from halfulp.errors import UsageError
from halfulp.kernels import fallback, native, reference, scaled
from halfulp.kernels.codes import decode, encode
from halfulp.kernels.plan import (
    checked,
    checked_tile,
    deliver,
    destination,
    flat_of,
    given_scales,
    key_of,
    on_gpu,
    plan_for,
    proposals,
    same_shape,
    scales_of,
    writable,
)
from halfulp.kernels.reference import (
    ARRIVED,
    AUDIT_COUNTS,
    SCORES,
    SHARED_COUNTS,
    TILE,
    WRITE_COUNTS,
    WRITE_SUMS,
    tiles_of,
)
from halfulp.kernels.writing import Carry, Mode, Prepared, Queue, Scales, Written, prepare
from halfulp.numbers.grids import Grid
from halfulp.numbers.streams import Stream

__all__ = [
    "ARRIVED", "AUDIT_COUNTS", "SCORES", "SHARED_COUNTS", "TILE", "WRITE_COUNTS", "WRITE_SUMS",
    "Audited", "Carry", "Mode", "Prepared", "Queue", "Scales", "Written", "audit", "check_followed",
    "checked_tile", "decode", "encode", "prepare", "round", "scales", "score", "set_aside", "tiles_of",
    "write_back",
]  # fmt: skip

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Audited:
    """The result of :func:`audit`, per tile.

    ``counts`` (tiles, grids, AUDIT_COUNTS) and ``shared`` (tiles, SHARED_COUNTS) are int32,
    ``sums`` (tiles; squares of weights and proposals) float64, ``phase`` (tiles, grids) int64
    in units of 2**-16, ``expected`` (tiles, grids) float64: the sums of the followed probabilities.
    ``arrived`` (tiles, grids, ARRIVED) float64: with u the change that is written, <u, d> and <u, u>.
    """

    counts: torch.Tensor
    shared: torch.Tensor
    sums: torch.Tensor
    phase: torch.Tensor
    expected: torch.Tensor
    arrived: torch.Tensor
    numel: int

    def frozen(self) -> torch.Tensor:
        """Return the share of coordinates that each grid leaves frozen (:mod:`halfulp.kernels.reference`)."""
        return self.counts[:, :, 0].sum(dim=0, dtype=torch.float64) / max(self.numel, 1)

    def gain(self) -> torch.Tensor:
        """Return the share of proposals that each grid writes: ``<written, proposed> / |proposed|**2``."""
        return self.arrived[:, :, 0].sum(dim=0) / self.sums[:, 1].sum()


# ---- the four kernels -------------------------------------------------------------------------------


def scales(x: torch.Tensor, grid: Grid | str | torch.dtype) -> torch.Tensor:
    """Compute the scales that a grid's rule takes from a tensor.

    Args:
        x: The tensor.
        grid: The grid.

    Returns:
        One float64 scale per segment.

    Raises:
        UsageError: If the tensor or the grid is not supported.
    """
    x = checked(x, "x")
    plan = plan_for(grid, x.dtype)
    if on_gpu(x) and plan.grid.scaling is not None:
        from halfulp.kernels import gpu

        return gpu.scales(x, plan.grid)
    return torch.from_numpy(scales_of(flat_of(x), plan, tuple(x.shape), x.dtype))


def round(
    x: torch.Tensor,
    grid: Grid | str | torch.dtype,
    stochastic: Stream | None = None,
    *,
    scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Round to the nearest grid value, or stochastically with a stream.

    Args:
        x: The values. Non-finite values stay as they are.
        grid: The grid to round to.
        stochastic: The stream of random draws; None rounds to nearest even.
        scale: Fixed scales, for a grid with scales; by default they are computed from ``x``.
        out: The tensor for the result; by default a new one.

    Returns:
        The rounded values.

    Raises:
        UsageError: If the tensors, the grid or the scales do not fit together.

    >>> round(torch.tensor([1.06, 1.07]), "e4m3")
    tensor([1.0000, 1.1250])
    """
    x = checked(x, "x")
    plan = plan_for(grid, x.dtype)
    mode = reference.NEAREST if stochastic is None else reference.STOCHASTIC
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    same_shape(x=x, out=out)
    writable(out, x)
    shape = tuple(x.shape)
    key = key_of(stochastic, mode, x.numel())
    given = given_scales(scale, plan, shape)
    if on_gpu(x):
        from halfulp.kernels import gpu

        return gpu.round_(x, out, plan.grid, mode, stochastic, given)
    flat, result = flat_of(x), destination(out)
    if native.library() is None:
        fallback.round_(flat.reshape(shape), result, plan, x.dtype, mode, stochastic, given)
    else:
        each = {}
        if plan.scaled:
            now = scales_of(flat, plan, shape, x.dtype) if given is None else given
            each = {**plan.segments(shape), "now": now}
        kernel = "round_scaled" if plan.scaled else "round"
        call = native.call_of(
            kernel, **plan.numbers, **each, mode=mode, stored=native.OF_ARRAY[flat.dtype], key=key[:2],
            x=flat, out=result, size=flat.size, offset=key[2],
        )  # fmt: skip
        native.run(kernel, tiles_of(flat.size), call)
    return deliver(result, out)


def audit(
    w: torch.Tensor,
    d: torch.Tensor,
    grids: Sequence[Grid | str],
    *,
    after: bool = False,
    phase: bool = True,
    moved: torch.Tensor | None = None,
    stay: torch.Tensor | None = None,
) -> Audited:
    """Count what each grid would do to one step, all grids in one pass.

    To audit many tensors in one call, use :mod:`halfulp.kernels.auditing`.

    Args:
        w: The weights before the step.
        d: The proposals or, with ``after=True``, the weights after the step.
        grids: The grids to audit.
        after: Take ``d`` as the weights after the step.
        phase: Compute the uniform-phase sums.
        moved: uint8, grids x bytes, one bit per coordinate: the coordinates that nearest rounding ever moved.
            Updated in place.
        stay: Grids x coordinates, of the working type, ones at the start: the probability that stochastic
            rounding never moved a coordinate. Updated in place.

    Returns:
        The counts and sums per tile.

    Raises:
        UsageError: If the tensors do not fit together, or ``moved`` or ``stay`` is given on a GPU.

    >>> audit(torch.tensor([1.0, 1.0]), torch.tensor([0.06, 0.07]), ["bf16", "e4m3"]).frozen()
    tensor([0.0000, 0.5000], dtype=torch.float64)
    """
    w, d = checked(w, "w"), checked(d, "d")
    same_shape(w=w, d=d)
    proposals(d, w, "d")
    plans = [plan_for(g, w.dtype) for g in grids]
    check_followed(w, len(plans), moved, stay)
    if on_gpu(w):
        from halfulp.kernels import gpu

        counts, shared, sums, phases, expected, arrived = gpu.audit(
            w, d, after, [p.grid for p in plans], phase
        )
        return Audited(counts, shared, sums, phases, expected, arrived, w.numel())
    from halfulp.kernels.auditing import audit_alone

    return audit_alone(w, d, plans, after=after, phase=phase, followed=(moved, stay))


def check_followed(
    w: torch.Tensor, grids: int, moved: torch.Tensor | None, stay: torch.Tensor | None
) -> None:
    """Refuse tensors that cannot follow the coordinates of w over steps, see :func:`audit`."""
    if on_gpu(w) and (moved is not None or stay is not None):
        raise UsageError("following coordinates over steps is a CPU feature: move the tensors there.")
    work = torch.float64 if w.dtype == torch.float64 else torch.float32
    for what, x, shape, dtype in (
        ("moved", moved, (grids, (w.numel() + 7) // 8), torch.uint8),
        ("stay", stay, (grids, w.numel()), work),
    ):
        if x is not None and (tuple(x.shape) != shape or x.dtype != dtype or not x.is_contiguous()):
            raise UsageError(
                f"{what} must be a contiguous {dtype} tensor of shape {shape}, "
                f"not {x.dtype} of {tuple(x.shape)}."
            )


def write_back(
    q: torch.Tensor,
    z: torch.Tensor,
    grid: Grid | str | torch.dtype,
    mode: Mode = "nearest",
    stream: Stream | None = None,
    *,
    moved: torch.Tensor | None = None,
    sums: bool | int = False,
    scale: torch.Tensor | Scales | None = None,
    carry: torch.Tensor | Carry | None = None,
    out: torch.Tensor | None = None,
) -> Written:
    """Round the proposed values z to the grid, replace the stored values q by them, and count.

    A proposal that is not finite leaves the stored value as it is and is counted.

    Args:
        q: The stored values, of z's dtype, or bfloat16 beside float32 (:func:`set_aside`).
        z: The proposed values.
        grid: The grid of the result.
        mode: ``nearest``, ``stochastic``, or ``deadzone`` (stochastic only where nearest rounding would lose
            a non-zero proposal).
        stream: The random draws of the last two modes.
        moved: One bit per coordinate (``torch.zeros((numel + 7) // 8, dtype=torch.uint8)``), updated in
            place.
        sums: Also compute WRITE_SUMS per tile, the sums of magnitudes and of what arrives; a number n
            computes them for every n-th tile only.
        scale: The scales of the new values and, with :class:`Scales`, of q, by which codes are compared where
            scales move with the data (see :mod:`halfulp.kernels.reference`).
        carry: A tensor that takes the rounding error and, unless :class:`Carry` says otherwise, is added to
            the proposal first: compensated summation in float32 or float64, kept in any floating dtype.
        out: The tensor for the result; by default z.

    Returns:
        The result and the counts.

    Raises:
        UsageError: If the arguments do not fit together.

    >>> q = torch.tensor([1.0, 1.0])
    >>> z = q + torch.tensor([0.06, 0.07])
    >>> write_back(q, z, "e4m3").out
    tensor([1.0000, 1.1250])
    """
    written, work = prepare(
        q, z, grid, mode, stream, moved=moved, sums=sums, scale=scale, carry=carry, out=out
    )
    for do in work:
        do()
    return written


def set_aside(x: Sequence[torch.Tensor], out: Sequence[torch.Tensor]) -> list[bool]:
    """Copy float32 tensors on the CPU into contiguous bfloat16 tensors.

    Args:
        x: The float32 tensors.
        out: The bfloat16 tensors, of the same shapes.

    Returns:
        For each tensor, True if bfloat16 holds all its values exactly.

    Raises:
        UsageError: If a pair differs in shape, or has another type, layout or device.
    """
    for wide, narrow in zip(x, out, strict=True):
        kinds = wide.dtype == torch.float32 and narrow.dtype == torch.bfloat16 and narrow.is_contiguous()
        if not (kinds and wide.is_cpu and narrow.is_cpu and wide.shape == narrow.shape):
            raise UsageError(
                "set_aside copies float32 into contiguous bfloat16 of the same shape on the CPU, not "
                f"{wide.dtype} of {tuple(wide.shape)} on {wide.device} into {narrow.dtype} of "
                f"{tuple(narrow.shape)} on {narrow.device}."
            )
    if native.library() is None:
        return [fallback.aside(wide, narrow) for wide, narrow in zip(x, out, strict=True)]
    pairs, off = [(flat_of(a), flat_of(b)) for a, b in zip(x, out, strict=True)], np.zeros(len(x), np.int64)
    tiles = [tiles_of(a.size) for a, _ in pairs]
    starts = np.cumsum(tiles) - tiles
    rows = [
        (native.at(a) or 0, native.at(b) or 0, a.size, s) for (a, b), s in zip(pairs, starts, strict=True)
    ]
    table = np.array(rows, dtype=np.int64)
    call = native.call_of("aside", tensors=len(x), rows=table, off=off)
    native.run("aside", sum(tiles), call)
    return [not lost for lost in off.tolist()]


def score(
    w: torch.Tensor,
    g: torch.Tensor,
    u: torch.Tensor,
    grid: Grid | str | torch.dtype,
    *,
    after: bool = False,
    tile: int = TILE,
) -> torch.Tensor:
    """Compute the per-tile sums behind every allocation score of one step.

    Args:
        w: The weights.
        g: The gradients.
        u: The proposals or, with ``after=True``, the weights after the step.
        grid: The grid of the stored weights.
        after: Take ``u`` as the weights after the step.
        tile: The number of consecutive coordinates per tile; the last tile may be short.

    Returns:
        A float64 tensor of shape (tiles, SCORES).

    Raises:
        UsageError: If the tensors do not fit together.

    >>> w, g, u = torch.ones(4), torch.ones(4), torch.full((4,), -0.01)
    >>> score(w, g, u, "e4m3").shape == (1, len(SCORES))
    True
    """
    w, g, u = checked(w, "w"), checked(g, "g"), checked(u, "u")
    same_shape(w=w, g=g, u=u)
    proposals(g, w, "g")
    proposals(u, w, "u")
    plan = plan_for(grid, w.dtype)
    tile = min(checked_tile(tile), max(w.numel(), 1))  # zeros behind the end would change no sum
    if on_gpu(w):
        from halfulp.kernels import gpu

        return gpu.score(w, g, u, after, plan.grid, tile)
    flat_w, flat_g, flat_u = flat_of(w), flat_of(g), flat_of(u)
    if native.library() is None:
        return fallback.score((flat_w, flat_g, flat_u), after, plan, w, tile)
    out = np.zeros((tiles_of(flat_w.size, tile), len(SCORES)))
    step = scaled.Step(flat_w, flat_g, flat_u, after, plan, w)
    step.score([(*step.addresses, native.at(out) or 0, flat_w.size, 0)], tile, len(out))
    return torch.from_numpy(out)
