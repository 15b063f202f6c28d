"""Rehearsals on a GPU: Triton, one program a tile and row, equal to the reference bit by bit.

Built from the pieces of :mod:`~halfulp.kernels.gpu_tiles`, under the same rules: no fused multiply-add,
nothing approximate, no atomics. Codes are decoded by a table in device memory. Grids with scales, and a carry
that is kept in bfloat16, are left to the library's own kernels.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from halfulp.kernels import gpu, reference
from halfulp.kernels import rehearse_reference as rehearse
from halfulp.kernels.gpu_maths import (
    BITS,
    CUT,
    EMIN,
    HI,
    INVERSE,
    KIND,
    LO,
    NEAREST,
    as_float,
    bits,
    finite,
    floats_at,
    ints_at,
    load,
    magnitude,
    nearest,
    stochastic,
    words,
)
from halfulp.kernels.gpu_tiles import (
    DEADZONE,
    TILE,
    carried,
    half_run,
    mark_moved,
    pack_three,
    store_three,
    this_tile,
    total,
)
from halfulp.numbers.streams import Stream

CARRY, PENDING = tl.constexpr(rehearse.CARRY), tl.constexpr(rehearse.PENDING)
MASTER = tl.constexpr(rehearse.MASTER)
OPTIONS: dict[str, Any] = {"enable_fp_fusion": False, "num_warps": 1, "maxnreg": 255}


@triton.jit
def code_of(r: tl.tensor, k: tl.tuple, SIGN: tl.constexpr) -> Any:
    """The codes of values of a float grid: see ``encode_tiles``."""
    a = magnitude(bits(r))
    if k[KIND] == BITS:
        code = (a >> k[CUT]).to(tl.int32)
    else:
        one = tl.full((), 1, a.dtype) << (52 if r.dtype == tl.float64 else 23)
        normal = (a - k[EMIN] + one) >> k[CUT]
        small = tl.minimum(tl.abs(r) * as_float(k[INVERSE] - k[EMIN]), 65536.0)
        code = tl.where(a >= k[EMIN], normal.to(tl.int32), small.to(tl.int32))
    return code | tl.where(bits(r) < 0, SIGN, 0)


@triton.jit
def move_some(
    w: tl.tensor, after: tl.tensor, held: tl.tensor, kept: tl.tensor, chosen: tl.tensor, moved: tl.tensor,
    values: tl.tensor, f: tl.tuple, k: tl.tuple, asked: tl.tuple, drawn: tl.tensor, start: tl.tensor,
    n: tl.tensor, key: tl.tuple, offset: tl.tensor,
    MODE: tl.constexpr, KEEPS: tl.constexpr, SIGN: tl.constexpr, CHOSEN: tl.constexpr,
) -> Any:  # fmt: skip
    """Move half a run; returns its counts, packed."""
    i = half_run(start)
    mask = i < n
    x = load(w, i, mask)
    d = load(after, i, mask) - x
    now = tl.load(held + i, mask=mask, other=0)
    s = now if KEEPS == MASTER else tl.load(values + (now.to(tl.int32) & 0xFFFF), mask=mask, other=0.0)
    pull, b, c = asked
    z = s + (d + pull * (x - s))
    ok = finite(z)
    before = z
    if KEEPS == CARRY or KEEPS == PENDING:
        before = tl.load(kept + i, mask=mask, other=0.0)
        z = carried(z, before)
    z = tl.where(ok, z, s)
    old = s
    if KEEPS == MASTER:
        old = nearest(s, f, k)
    if MODE == NEAREST:
        r = nearest(z, f, k)
    else:
        r = stochastic(z, drawn, f, k, key, offset + i)
        if MODE == DEADZONE:
            near = nearest(z, f, k)
            r = tl.where((near == s) & (z != s), r, near)
    ok = ok & mask
    if KEEPS == MASTER:
        if CHOSEN:
            z = tl.where(tl.load(chosen + i, mask=mask, other=0) != 0, z, r)
        tl.store(held + i, z, mask=mask)
    else:
        tl.store(held + i, code_of(r, k, SIGN).to(now.dtype), mask=mask)
    if KEEPS == CARRY or KEEPS == PENDING:  # beyond the ends of the range, what is not written never could be
        end = (r >= f[HI]) | (r <= f[LO])
        rest = tl.where(end & (tl.abs(z) >= tl.abs(r)), 0.0, z - r)
        new = b * before + c * rest if KEEPS == PENDING else rest
        tl.store(kept + i, new, mask=ok)
    never = mask & mark_moved(moved, start, n, ok & (r != old))
    return pack_three(ok & (r == old), never, mask & ~ok)


@triton.jit(do_not_specialize=["k0", "k1", "offset"])
def move_tile(
    w: tl.tensor, after: tl.tensor, held: tl.tensor, kept: tl.tensor, chosen: tl.tensor, moved: tl.tensor,
    values: tl.tensor, f: tl.tensor, k: tl.tensor, asked: tl.tensor, counts: tl.tensor,
    n: tl.tensor, k0: tl.tensor, k1: tl.tensor, offset: tl.tensor,
    MODE: tl.constexpr, KEEPS: tl.constexpr, SIGN: tl.constexpr, CHOSEN: tl.constexpr, ALIGNED: tl.constexpr,
) -> None:  # fmt: skip
    """``asked``: the pull, and the factors of what is pending."""
    tile = this_tile()
    f, k, key = floats_at(f, 0), ints_at(k, 0), (k0, k1)
    asked = (tl.load(asked), tl.load(asked + 1), tl.load(asked + 2))
    three = tl.zeros((8, 16), tl.int32)
    for run in range(3):
        start = tile * TILE + 256 * run
        i = offset + half_run(start)
        first, second = (i, i) if MODE == NEAREST else words(key, i, ALIGNED)
        three += move_some(
            w, after, held, kept, chosen, moved, values, f, k, asked, first, start, n, key, offset,
            MODE, KEEPS, SIGN, CHOSEN,
        )  # fmt: skip
        three += move_some(
            w, after, held, kept, chosen, moved, values, f, k, asked, second, start + 16, n, key, offset,
            MODE, KEEPS, SIGN, CHOSEN,
        )  # fmt: skip
    store_three(counts + 3 * tile, total(three))


def move(
    rule: rehearse.Rule,
    row: dict[str, torch.Tensor],
    w: torch.Tensor,
    after: torch.Tensor,
    asked: torch.Tensor,
    values: torch.Tensor,
    stream: Stream,
    chosen: torch.Tensor | None,
) -> torch.Tensor:
    """Move one row of what is held of a tensor; (tiles, COUNTS), int32.

    ``asked``: the pull and both factors, in the working type. ``values``: of all codes. Everything is on one
    device, and the row is updated in place.
    """
    f, k = gpu._row(rule.grid, asked)
    counts = torch.empty((reference.tiles_of(w.numel()), 3), dtype=torch.int32, device=w.device)
    k0, k1, offset = gpu._key(stream, rule.mode)
    if len(counts):
        with torch.cuda.device_of(w):
            move_tile[(len(counts),)](
                gpu._memory(w), gpu._memory(after), row["held"], row.get("kept", counts),
                counts if chosen is None else chosen.reshape(-1).view(torch.uint8), row["moved"], values, f,
                k, asked, counts, w.numel(), k0, k1, offset,
                MODE=rule.mode, KEEPS=rule.keeps, SIGN=1 << (rule.grid.bits - 1) if rule.coded else 0,
                CHOSEN=chosen is not None, ALIGNED=offset % 32 == 0, **OPTIONS,
            )  # fmt: skip
    return counts
