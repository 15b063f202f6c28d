"""Sixteen weights of a one-pass step, one by one: what lanes only notice, done with care.

Values that are not finite, ends of the range, draws that need more digits, a second moment that is infinite.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from halfulp.kernels.cpu_tile import nearest, settle
from halfulp.kernels.onepass_reference import CARRY, ERROR, LARGEST, MASTER, NOTHING, REMAINDER
from halfulp.kernels.params import HI, LO
from halfulp.kernels.reference import DEADZONE, NEAREST
from halfulp.kernels.simd import bits_of, exact_up, float_like, kernel

EXPONENT = 0x7F800000
MAGNITUDE = 0x7FFFFFFF
NEAR_END = 0x7F7EFFFF
"""Patterns above this are rounded to bfloat16's largest number, or might be, or are not finite."""
TO_END = 0x7F7FFFFF
"""Patterns above this are not finite."""


@kernel
def finite(x: Any) -> Any:
    return (bits_of(x) & EXPONENT) != EXPONENT


@kernel
def _master(z: Any, short: Any, eight: Any, k0: Any, k1: Any, i: Any) -> Any:
    """What a remainder can keep of a master."""
    u = np.int64(bits_of(z)) & MAGNITUDE
    if eight:
        part = np.float64(u & 255) / 256.0
        u = (u & ~255) + 256 * np.int64(exact_up(part, k0, k1, i, short))
    most = LARGEST & ~255 if eight else LARGEST
    return float_like(z, (most if u > most else u) | (np.int64(bits_of(z)) & -(2**31)))


@kernel
def slowly(
    rows: Any, rates: Any, f: Any, k: Any, masks: Any, keys: Any, index: Any, mode: Any, keeps: Any,
    short: Any, eight: Any, two: Any,
) -> Any:  # fmt: skip
    """``rows`` come with w (decayed), m, v, q and what is kept, sixteen of each (of a rule without a second
    moment the proposals instead of w), and go with z, r, what is to
    be kept (a carry, an error, a master) and the denominators. Returns, in bits: which proposals were not
    finite (16), and how many weights are at an end of the range."""
    z, r, near = np.empty(16, f.dtype), np.empty(16, f.dtype), np.empty(16, f.dtype)
    kept = np.empty(16, f.dtype)
    bad, ends = 0, 0
    for i in range(16):
        q = rows[48 + i]
        value = rows[i]
        if two:
            below = np.sqrt(rows[32 + i]) / rates[4] + rates[6]
            value = rows[i] + rows[16 + i] * rates[7] / below
            rows[32 + i] = below
        fine = finite(value)
        if not fine:
            bad |= 1 << i
        if keeps == CARRY and fine:
            whole = value + rows[64 + i]
            value = whole if finite(whole) else value
        if keeps == REMAINDER and fine:
            value = _master(value, short, eight, keys[0], keys[1], index + i)
        z[i] = value if fine else q
    if keeps == REMAINDER:
        for i in range(16):
            r[i] = float_like(z[i], (np.int64(bits_of(z[i])) + 0x8000) & -65536)
    elif mode == NEAREST:
        nearest(z, r, f, k, masks[0], masks[1])
    else:
        settle(z, r, f, k, masks[0], masks[1], keys[0], keys[1], index, short)
        if mode == DEADZONE:
            nearest(z, near, f, k, masks[0], masks[1])
            for i in range(16):
                q = rows[48 + i]
                r[i] = r[i] if near[i] == q and z[i] != q else near[i]
    for i in range(16):
        fine, q = (bad >> i) & 1 == 0, rows[48 + i]
        kept[i] = rows[64 + i] if keeps in (CARRY, MASTER, REMAINDER) else 0
        if not fine:
            r[i] = q
            continue
        end = r[i] >= f[HI] or r[i] <= f[LO]
        ends += end
        if keeps in (CARRY, ERROR):
            past = (r[i] >= f[HI] and z[i] > r[i]) or (r[i] <= f[LO] and z[i] < r[i])
            kept[i] = 0 if past else z[i] - r[i]
        elif keeps != NOTHING:
            kept[i] = z[i]
    for i in range(16):
        below = rows[32 + i]
        rows[i], rows[16 + i], rows[32 + i], rows[48 + i] = z[i], r[i], kept[i], below
    return bad | (ends << 16)
