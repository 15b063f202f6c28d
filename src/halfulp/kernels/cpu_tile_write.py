"""One tile written back: the proposal with its carry, and what is counted of it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.extending import overload

from halfulp.kernels.cpu_tile import changes, count_ends, load, merge, nonfinite, padded, sum_abs, tree
from halfulp.kernels.cpu_tile_arrival import sum_arrival
from halfulp.kernels.reference import TILE
from halfulp.kernels.simd import JIT, bits_of, float_like, kernel, narrow, round_bits, span, widen


@kernel
def sum_changes(q: Any, z: Any, buffer: Any) -> Any:
    """Sum of |z - q| over a padded tile."""
    for i in range(TILE // 2):
        a = abs(np.float64(z[i]) - np.float64(q[i]))
        b = abs(np.float64(z[i + TILE // 2]) - np.float64(q[i + TILE // 2]))
        buffer[i] = a + b
    return tree(buffer)


@kernel
def finish_write(
    q: Any, z: Any, r: Any, n: Any, bad: Any, proposed: Any, lo: Any, hi: Any, exponent: Any, moved: Any,
    want_sums: Any, bits: Any, buffer: Any, counts: Any, sums: Any, t: Any,
) -> None:  # fmt: skip
    """Counts and sums of one written tile; z and r equal q wherever the proposal was not finite."""
    proposals = changes(q, z, n, bits)
    changed = changes(q, r, n, bits)
    ends = count_ends(r[:n], lo, hi)
    if bad > 0:
        for i in range(n):
            if (bits_of(widen(proposed[i])) & exponent) == exponent and (r[i] >= hi or r[i] <= lo):
                ends -= 1
    put_counts(changed, proposals, ends, bad, n, bits, moved, counts, t)
    if want_sums and t % want_sums == 0:
        sums[t, 1] = sum_changes(q, z, buffer)
        sums[t, 0] = sum_abs(q, buffer) if bad == 0 else sum_proposed(q, proposed, exponent, buffer)
        r[n:] = 0
        sums[t, 2], sums[t, 3], sums[t, 4] = sum_arrival(q, z, r, buffer)


@kernel
def put_counts(
    changed: Any, proposals: Any, ends: Any, bad: Any, n: Any, bits: Any, moved: Any, counts: Any, t: Any
) -> None:
    """The row of one tile, and the bits of what changed added to those of what ever has."""
    counts[t, 0] = n - changed - bad
    counts[t, 1] = n - proposals - bad
    counts[t, 2] = ends
    counts[t, 3] = bad
    counts[t, 4] = 0
    if moved.size:
        start = t * (TILE // 8)
        counts[t, 4] = n - merge(bits, span(moved, start, start + (n + 7) // 8))


@kernel
def sum_proposed(q: Any, proposed: Any, exponent: Any, buffer: Any) -> Any:
    """Sum of |q| where the proposal is finite."""
    kept = np.zeros(TILE, q.dtype)
    for i in range(proposed.size):
        if (bits_of(widen(proposed[i])) & exponent) != exponent:
            kept[i] = q[i]
    return sum_abs(kept, buffer)


@kernel
def whole_proposal(proposed: Any, q: Any, carry: Any, carry_in: Any, z_: Any, exponent: Any) -> Any:
    """What is to be written, with its carry, as a whole tile; and how many proposals were not finite, which
    become the stored value."""
    z = padded(proposed, z_)
    bad = nonfinite(z, exponent)
    if carry_in:
        add_carry(z[: proposed.size], carry, z_, exponent)
        z_[proposed.size :] = 0
        z = z_
    elif bad > 0:
        load(z, z_)
        z = z_
    if bad > 0:
        keep_stored(proposed, q, z, exponent)
    return z, bad


@kernel
def add_carry(z: Any, carry: Any, out: Any, exponent: Any) -> None:
    """z + carry, wherever that is finite."""
    for i in range(z.size):
        whole = z[i] + widen(carry[i])
        fine = (bits_of(whole) & exponent) != exponent
        out[i] = whole if fine else z[i]


@kernel
def take_carry(z: Any, r: Any, lo: Any, hi: Any, proposed: Any, bad: Any, exponent: Any, carry: Any) -> None:
    """What was not written, z - r: exact, for r is a neighbour of z. Nothing is carried beyond the ends
    of the range (it could never be written), and nothing changes where the proposal was not finite."""
    for i in range(carry.size):
        past = ((r[i] >= hi) & (z[i] > r[i])) | ((r[i] <= lo) & (z[i] < r[i]))
        rest = z[i] - r[i]
        rest = z[i] - z[i] if past else rest
        if bad == 0 or (bits_of(widen(proposed[i])) & exponent) != exponent:
            carry[i] = rest


def put_carry(kept: Any, carry: Any) -> None:
    """Give a carry that was widened into a buffer back to where it is kept, to the nearest."""
    raise TypeError("for compiled code only")


@overload(put_carry, jit_options=JIT)
def _put_carry(kept: Any, carry: Any) -> Any:
    if kept.dtype == carry.dtype:  # it was worked on in its own place

        def nothing(kept: Any, carry: Any) -> None:
            pass

        return nothing

    def rounded(kept: Any, carry: Any) -> None:
        for i in range(carry.size):
            u = round_bits(bits_of(kept[i]), np.int32(0x7FFF), np.int32(16), np.int32(1), np.int32(-0x10000))
            carry[i] = narrow(carry[i], float_like(kept[i], u))

    return rounded


@kernel
def keep_stored(proposed: Any, q: Any, r: Any, exponent: Any) -> None:
    """Put q back, whatever it was, where the proposal was not finite."""
    for i in range(proposed.size):
        if (bits_of(widen(proposed[i])) & exponent) == exponent:
            r[i] = q[i]


@kernel
def prefer_nearest(q: Any, z: Any, near: Any, r: Any) -> None:
    """Dead-zone write-back: the stochastic r only where nearest throws a proposal away."""
    for i in range(r.size):
        dead = (near[i] == q[i]) & (z[i] != q[i])
        r[i] = r[i] if dead else near[i]
