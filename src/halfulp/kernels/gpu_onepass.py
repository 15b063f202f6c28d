"""The one-pass step on a GPU: Triton, one program a tile, equal to the reference bit by bit.

:mod:`halfulp.kernels.onepass_reference` defines it, :mod:`~halfulp.kernels.onepass` calls it. A tile is three
runs of 256 coordinates; a run's draws are made 64 to sixteen Threefry blocks and laid out in order.
Everything is read once and written once; only tiles of which sums are wanted are read twice, the first time
in the layout of the halving tree (:mod:`~halfulp.kernels.gpu_tiles`).

Where the reference has an FMA there is one here, and nowhere else; divisions and roots are IEEE's
(``div_rn``, ``sqrt_rn``). Draws are those of the short stream, and all elements have the same arithmetic:
what :class:`halfulp.AdamW` has. torch's fused step on a GPU has another, which nothing here equals.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from halfulp.kernels import gpu, reference
from halfulp.kernels import onepass_reference as defined
from halfulp.kernels.gpu_maths import (
    HI,
    LO,
    NEAREST,
    TO_BF16,
    as_float,
    bits,
    digit,
    finite,
    fit,
    floats_at,
    ints_at,
    load,
    magnitude,
    nearest,
    short_blocks,
    signed,
    stochastic,
    store,
)
from halfulp.kernels.gpu_tiles import (
    DEADZONE,
    TILE,
    WRITE_SUMS,
    carried,
    columns,
    pack_three,
    pack_two,
    store_three,
    store_two,
    sum_written,
    this_tile,
    tree,
)
from halfulp.kernels.plan import plan_for

if TYPE_CHECKING:
    from halfulp.kernels.onepass import Case, Job

ADAMW, SGD = tl.constexpr(defined.ADAMW), tl.constexpr(defined.SGD)
NESTEROV, LION = tl.constexpr(defined.NESTEROV), tl.constexpr(defined.LION)
CARRY, ERROR = tl.constexpr(defined.CARRY), tl.constexpr(defined.ERROR)
MASTER, REMAINDER = tl.constexpr(defined.MASTER), tl.constexpr(defined.REMAINDER)
LARGEST = tl.constexpr(defined.LARGEST)
DECAY, SHARE, BETA2, REST2, ROOT, _, EPS, STEP, FEED, BETA1 = (
    tl.constexpr(i) for i in range(len(defined.RATES))
)
RUN = tl.constexpr(256)


# ---- draws of 16 digits --------------------------------------------------------------------------


@triton.jit
def digits_of(key: tl.tuple, start: tl.tensor, ALIGNED: tl.constexpr) -> Any:
    """The first digits of a run. ``ALIGNED``: it begins with a group of 64."""
    level = tl.full((), 0, tl.int32)
    if ALIGNED:
        i = start + (64 * tl.arange(0, RUN // 64)[:, None] + tl.arange(0, 16)[None, :])
        first, second = short_blocks(key, i, level)
        words = tl.permute(tl.join(first, second), (0, 2, 1))
        halves = tl.permute(tl.join(words & 0xFFFF, words >> 16), (0, 1, 3, 2))
        return tl.reshape(halves, (RUN,)).to(tl.int32) ^ 0xFFFF
    else:
        return digit(key, start + tl.arange(0, RUN), level, True)


# ---- the optimizer's arithmetic --------------------------------------------------------------------


@triton.jit
def rates_at(p: tl.tensor) -> Any:
    """Load the rates of a step."""
    return (
        tl.load(p), tl.load(p + 1), tl.load(p + 2), tl.load(p + 3), tl.load(p + 4),
        tl.load(p + 5), tl.load(p + 6), tl.load(p + 7), tl.load(p + 8), tl.load(p + 9),
    )  # fmt: skip


@triton.jit
def proposals(
    memory: tl.tuple, i: tl.tensor, mask: tl.tensor, a: tl.tuple,
    RULE: tl.constexpr, KEEPS: tl.constexpr, SMALL: tl.constexpr, EIGHT: tl.constexpr,
) -> Any:  # fmt: skip
    """Compute the stored and the proposed values, the next moments, and the denominator of the step."""
    stored, grad, first, second, kept = memory
    q = load(stored, i, mask)
    w = q
    if KEEPS == MASTER:
        w = load(kept, i, mask)
    if KEEPS == REMAINDER:
        rest = tl.load(kept + i, mask=mask, other=0).to(tl.int32)
        w = as_float(bits(q) + (rest << (8 if EIGHT else 0)))
    g, m = load(grad, i, mask), load(first, i, mask)
    if (RULE == ADAMW) | (RULE == LION):
        w = w * a[DECAY]
    else:
        g = tl.where(a[DECAY] != 0, tl.fma(w, spread(a[DECAY], w), g), g)
    v, x = m, m
    if RULE < SGD:
        v = load(second, i, mask)
        m = tl.fma(spread(a[SHARE], g), g - m, m if SMALL else g)
        v = tl.fma(a[REST2] * g, g, v * a[BETA2])
        x = tl.div_rn(tl.sqrt_rn(v), spread(a[ROOT], v)) + a[EPS]
        z = w + tl.div_rn(a[STEP] * m, x)
    elif RULE == LION:
        c = a[BETA1] * m + a[SHARE] * g
        sign = tl.where(c > 0, 1.0, tl.where(c < 0, -1.0, c))
        m = a[BETA2] * m + a[REST2] * g
        z = w + a[STEP] * sign
    else:
        m = tl.fma(spread(a[SHARE], g), g, m * a[BETA1])
        z = tl.fma(tl.fma(m, spread(a[BETA2], m), g) if RULE == NESTEROV else m, spread(a[STEP], m), w)
    return q, z, m, v, x


@triton.jit
def spread(scalar: tl.tensor, like: tl.tensor) -> Any:
    """Broadcast a scalar to the shape of ``like``."""
    return tl.broadcast_to(scalar, like.shape)


@triton.jit
def master_of(z: tl.tensor, d: tl.tensor, EIGHT: tl.constexpr) -> Any:
    """Return a master as a remainder can keep it."""
    u = magnitude(bits(z))
    if EIGHT:
        low = u & 255
        u = tl.minimum((u - low) + tl.where(d < (low << 8), 256, 0), LARGEST - 255)
    else:
        u = tl.minimum(u, LARGEST)
    return signed(as_float(u), z)


@triton.jit
def proposed(
    memory: tl.tuple, i: tl.tensor, mask: tl.tensor, d: tl.tensor, a: tl.tuple,
    RULE: tl.constexpr, KEEPS: tl.constexpr, SMALL: tl.constexpr, EIGHT: tl.constexpr,
) -> Any:  # fmt: skip
    """:func:`proposals`, with a carry or as masters that can be kept; and which of them are finite."""
    q, z, m, v, x = proposals(memory, i, mask, a, RULE, KEEPS, SMALL, EIGHT)
    ok = finite(z)
    if KEEPS == CARRY:
        z = carried(z, load(memory[4], i, mask))
    if KEEPS == REMAINDER:
        z = tl.where(ok, master_of(z, d, EIGHT), z)
    return q, z, m, v, x, ok


# ---- storing ---------------------------------------------------------------------------------------


@triton.jit
def store_moment(p: tl.tensor, i: tl.tensor, x: tl.tensor, d: tl.tensor, mask: tl.tensor) -> None:
    """float32 as it is, bfloat16 by draws."""
    if p.dtype.element_ty == tl.int16:
        u = bits(x)
        up = (d < (u & 0xFFFF)).to(tl.int32) << 16
        quiet = tl.where(x != x, u | 0x400000, u)
        store(p, i, as_float(tl.where(finite(x), u + up, quiet)), mask)
    else:
        store(p, i, x, mask)


@triton.jit
def mark_run(moved: tl.tensor, start: tl.tensor, n: tl.tensor, now: tl.tensor) -> Any:
    """Set the bits of coordinates that move now; returns which have never moved."""
    byte = start // 8 + tl.arange(0, RUN // 8)
    shift = tl.arange(0, 8)[None, :]
    mask = byte * 8 < n
    new = tl.sum(tl.reshape(now.to(tl.int32), (RUN // 8, 8)) << shift, axis=1)
    new = new | tl.load(moved + byte, mask=mask, other=0).to(tl.int32)
    tl.store(moved + byte, new.to(tl.uint8), mask=mask)
    return tl.reshape((new[:, None] >> shift) & 1, (RUN,)) == 0


@triton.jit
def step_run(
    memory: tl.tuple, moved: tl.tensor, start: tl.tensor, n: tl.tensor, a: tl.tuple, f: tl.tuple, k: tl.tuple,
    key: tl.tuple, drawing: tl.tuple, offset: tl.tensor,
    RULE: tl.constexpr, MODE: tl.constexpr, KEEPS: tl.constexpr, SMALL: tl.constexpr, EIGHT: tl.constexpr,
    DRAWN: tl.constexpr, MARK: tl.constexpr, ALIGNED: tl.constexpr,
) -> Any:  # fmt: skip
    """Move a run; returns its counts, packed."""
    stored, _, first, second, kept = memory
    i = start + tl.arange(0, RUN)
    mask = i < n
    d = tl.zeros((RUN,), tl.int32) if MODE == NEAREST else digits_of(key, offset + start, ALIGNED)
    q, z, m, v, x, ok = proposed(memory, i, mask, d, a, RULE, KEEPS, SMALL, EIGHT)
    if KEEPS == REMAINDER:
        r = as_float((bits(z) + 0x8000) & -65536)
    elif MODE == NEAREST:
        r = nearest(z, f, k)
    else:
        r = stochastic(z, d, f, k, key, offset + i, True)
        if MODE == DEADZONE:
            near = nearest(z, f, k)
            r = tl.where((near == q) & (z != q), r, near)
    r = tl.where(ok, r, q)
    end = (r >= f[HI]) | (r <= f[LO])
    if (KEEPS == CARRY) | (KEEPS == ERROR):
        # Beyond the ends of the range, what is not written never could be.
        rest = tl.where(end & (tl.abs(z) >= tl.abs(r)), 0.0, z - r)
        if KEEPS == CARRY:
            if kept.dtype.element_ty == tl.int16:
                rest = fit(rest, TO_BF16)
            store(kept, i, rest, mask & ok)
        else:
            rest = tl.where(ok, rest, 0.0)
            if RULE < SGD:
                fed = m + x * rest * a[FEED]
            else:
                fed = tl.fma(rest, spread(a[FEED], m), m)
            fed = tl.where(finite(fed), fed, m)  # what the moment cannot hold is not fed back
            m = tl.where(a[FEED] != 0, fed, m)
    if KEEPS == MASTER:
        store(kept, i, z, mask & ok)
    if KEEPS == REMAINDER:
        left = (bits(z) - bits(r)) >> (8 if EIGHT else 0)
        tl.store(kept + i, left.to(kept.dtype.element_ty), mask=mask & ok)
    of_moments = tl.zeros((RUN,), tl.int32)
    if DRAWN:
        of_moments = digits_of(drawing, offset + start, ALIGNED)
    store_moment(first, i, m, of_moments, mask)
    if RULE < SGD:
        store_moment(second, i, v, (of_moments >> 8) | ((of_moments & 255) << 8), mask)
    store(stored, i, r, mask)
    ok = ok & mask
    never = mask & ~mask
    if MARK:
        never = mask & mark_run(moved, start, n, ok & (r != q))
    return pack_three(ok & (r == q), ok & (z == q), ok & end), pack_two(mask & ~ok, never)


@triton.jit
def sum_tile(
    memory: tl.tuple, sums: tl.tensor, tile: tl.tensor, n: tl.tensor, a: tl.tuple, key: tl.tuple,
    offset: tl.tensor, RULE: tl.constexpr, KEEPS: tl.constexpr, SMALL: tl.constexpr, EIGHT: tl.constexpr,
) -> Any:  # fmt: skip
    """The sums of sizes, before anything is written; what is stored and proposed, for those of what is."""
    i, mask = columns(tile, n)
    d = digit(key, offset + i, tl.full((), 0, tl.int32), True) if EIGHT else tl.zeros((256, 4), tl.int32)
    q, z, _, _, _, ok = proposed(memory, i, mask, d, a, RULE, KEEPS, SMALL, EIGHT)
    if KEEPS == REMAINDER:  # as the two-pass policy has it
        u = bits(z)
        z = as_float(tl.where((u & 0xFFFF) == 0x8000, u | 1, u))
    ok = ok & mask
    q = q.to(tl.float64)
    change = tl.where(ok, z.to(tl.float64) - q, 0.0)
    tl.store(sums, tree(tl.where(ok, tl.abs(q), 0.0)))
    tl.store(sums + 1, tree(tl.abs(change)))
    tl.store(sums + 2, tree(change * change))
    return q, change, ok


@triton.jit(do_not_specialize=["k0", "k1", "m0", "m1", "offset", "every"])
def step_tile(
    stored: tl.tensor, grad: tl.tensor, first: tl.tensor, second: tl.tensor, kept: tl.tensor,
    moved: tl.tensor, rates: tl.tensor, f: tl.tensor, k: tl.tensor, counts: tl.tensor, sums: tl.tensor,
    n: tl.tensor, k0: tl.tensor, k1: tl.tensor, m0: tl.tensor, m1: tl.tensor, offset: tl.tensor,
    every: tl.tensor,
    RULE: tl.constexpr, MODE: tl.constexpr, KEEPS: tl.constexpr, SMALL: tl.constexpr, EIGHT: tl.constexpr,
    DRAWN: tl.constexpr, MARK: tl.constexpr, SUMS: tl.constexpr, ALIGNED: tl.constexpr,
) -> None:  # fmt: skip
    """One tile of one tensor, in place. ``every``: of every how many tiles sums are wanted."""
    tile = this_tile()
    a, f, k = rates_at(rates), floats_at(f, 0), ints_at(k, 0)
    memory = (stored, grad, first, second, kept)
    key, drawing = (k0, k1), (m0, m1)
    if SUMS:
        sums += WRITE_SUMS * tile
        q, change, ok = (
            tl.zeros((256, 4), tl.float64),
            tl.zeros((256, 4), tl.float64),
            tl.zeros((256, 4), tl.int1),
        )
        if tile % every == 0:
            q, change, ok = sum_tile(memory, sums, tile, n, a, key, offset, RULE, KEEPS, SMALL, EIGHT)
        tl.debug_barrier()  # before anything is written over what other threads still read
    three = tl.zeros((RUN,), tl.int32)
    two = tl.zeros((RUN,), tl.int32)
    for run in range(3):
        b, c = step_run(
            memory, moved, tile * TILE + RUN * run, n, a, f, k, key, drawing, offset,
            RULE, MODE, KEEPS, SMALL, EIGHT, DRAWN, MARK, ALIGNED,
        )  # fmt: skip
        three += b
        two += c
    store_three(counts + 5 * tile, tl.sum(three, axis=0))
    store_two(counts + 5 * tile + 3, tl.sum(two, axis=0))
    if SUMS:
        tl.debug_barrier()
        if tile % every == 0:
            sum_written(stored, q, change, ok, sums, tile, n)


# ---- from the host -----------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def _on_device(rates: bytes, device: torch.device) -> torch.Tensor:
    """The numbers of a step, once for all tensors that have them."""
    return torch.frombuffer(bytearray(rates), dtype=torch.float32).to(device)


def steps(case: Case, jobs: list[Job]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """As :func:`halfulp.kernels.onepass.steps`, of tensors on a GPU: one launch a tensor."""
    return [_step(case, job) for job in jobs]


def _step(case: Case, job: Job) -> tuple[torch.Tensor, torch.Tensor]:
    assert case.short
    assert job.stored.dtype != torch.uint8
    assert job.plain >= job.stored.numel()
    grid = plan_for(case.grid, torch.float32).grid
    n, where = job.stored.numel(), job.stored.device
    tiles = reference.tiles_of(n)
    counts = torch.empty((tiles, len(reference.WRITE_COUNTS)), dtype=torch.int32, device=where)
    sums = torch.zeros((tiles, len(reference.WRITE_SUMS)), dtype=torch.float64, device=where)
    given = (job.stored, job.grad, job.first, job.second, job.kept)
    memory = [counts if x is None else gpu._memory(x) for x in given]
    gpu._run(
        step_tile, job.stored, *memory, counts if job.moved is None else job.moved,
        _on_device(job.rates.tobytes(), where), *gpu._tables((grid,), "float32", where), counts, sums, n,
        *(word - ((word >> 31) << 32) for word in job.keys), job.offset, max(job.sums, 1),
        RULE=case.rule, MODE=case.mode, KEEPS=case.keeps, SMALL=case.small,
        EIGHT=job.kept is not None and job.kept.dtype == torch.int8, DRAWN=case.drawn,
        MARK=job.moved is not None, SUMS=job.sums > 0, ALIGNED=job.offset % 64 == 0,
    )  # fmt: skip
    return counts, sums
