"""One optimizer step of whole tiles in one sweep over memory, sixteen lanes at a time.

Gradient, moments and stored weights are read once and written once: the moments move, the optimizer's
proposal is rounded by the policy, what was lost is counted. :mod:`halfulp.kernels.onepass_reference` defines
every bit of it. There is a loop for each case (:func:`tiles`), so that nothing is asked inside.

What is rare in sixteen lanes (a value that is not finite, an end of bfloat16's range, a draw that its digits
do not decide) is only noticed; :mod:`halfulp.kernels.onepass_rare` then does those sixteen one by one.

The denominator's division by a constant, sqrt(v) / c, is a multiplication with c's reciprocal and one
correction of the remainder, which rounds as the division does (Markstein) and leaves the divider free.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import types
from numba.extending import overload

from halfulp.kernels import lanes
from halfulp.kernels.cpu_tile import sum_abs
from halfulp.kernels.cpu_tile_write import sum_changes
from halfulp.kernels.onepass_rare import EXPONENT, MAGNITUDE, NEAR_END, TO_END, slowly
from halfulp.kernels.onepass_reference import ADAM, BFLOAT, CARRY, ERROR, NOTHING, REMAINDER, WHOLE
from halfulp.kernels.reference import DEADZONE, NEAREST, STOCHASTIC, TILE
from halfulp.kernels.simd import JIT, kernel, ones, specialised, threefry, two_threefry


class Rates(NamedTuple):
    """The numbers of one step, float32: see :func:`halfulp.kernels.onepass_reference.rates`."""

    decay: Any
    share: Any
    beta2: Any
    rest2: Any
    root: Any
    inverse: Any
    eps: Any
    step: Any
    feed: Any


class Coding(NamedTuple):
    """What rounding and coding of lanes need to know of a grid: see params. ``up``: how many values its first
    digits of a draw have."""

    lo: Any
    hi: Any
    quantum: Any
    unit: Any
    up: Any
    emin: Any
    shift: Any
    inverse: Any
    mant: Any
    cut: Any
    first: Any
    top: Any
    left: Any


RULE, MODE, KEEPS, GRID, SHORT, SMALL, DRAWN = 0, STOCHASTIC, NOTHING, BFLOAT, True, True, False
RESTS, BESIDE = False, False  # whether something is not written; whether something is kept beside weights
WORDS: Any = None
RUN: Any = None
"""And otherwise, in copies of the functions below."""


@kernel
def _nearest(v: Any, g: Any, grid: Any) -> Any:
    """Nearest even, of finite lanes; of bfloat16 those that are not near its end."""
    u = lanes.bits_of(v)
    if grid == BFLOAT:
        return lanes.floats_of((u + (((u >> 16) & 1) + 0x7FFF)) & -65536)
    a = lanes.select(v < g.lo, lanes.splat(v, g.lo), v)
    a = lanes.select(a > g.hi, lanes.splat(v, g.hi), a)
    e = lanes.bits_of(a) & EXPONENT
    c = lanes.floats_of(lanes.select(e > g.emin, e, g.emin) + g.shift)
    return lanes.floats_of((lanes.bits_of((a + c) - c) & MAGNITUDE) | (u & ~MAGNITUDE))


@kernel
def _drawn(v: Any, word: Any, g: Any, grid: Any, short: Any) -> Any:
    """A neighbour by the first digits of U, of finite lanes; and where those do not decide."""
    u = lanes.bits_of(v)
    if grid == BFLOAT:
        if short:  # the digits are the complements of these bits: to go up is to carry
            return lanes.floats_of((u + lanes.signed(word)) & -65536), u != u
        digits = (u & 0xFFFF) << 15
        drawn = lanes.signed(word >> 1)
        up = lanes.select(drawn < digits, lanes.splat(u, 65536), 0)
        return lanes.floats_of((u & -65536) + up), drawn == digits
    limit = lanes.select(u < 0, lanes.splat(v, -g.lo), g.hi)
    x = lanes.floats_of(u & MAGNITUDE)
    x = lanes.select(x > limit, limit, x)
    e = lanes.bits_of(x) & EXPONENT
    e = lanes.select(e > g.emin, e, g.emin)
    s = x * lanes.floats_of(g.inverse - e)
    n = lanes.floor(s)
    digits = lanes.to_int((s - n) * g.up)
    drawn = lanes.signed(word) ^ 0xFFFF if short else lanes.signed(word >> 1)
    n = lanes.select(drawn < digits, n + 1.0, n)
    r = lanes.bits_of(n * lanes.floats_of(e - g.mant))
    return lanes.floats_of(r | (u & ~MAGNITUDE)), drawn == digits


@kernel
def short_words(k0: Any, k1: Any, first: Any) -> Any:
    """Draws of elements first .. first + 63, a multiple of 64, of the stream with 16 digits."""
    a, b = threefry(k0, k1, (first >> 6) << 4, 0)
    return a & 0xFFFF, a >> 16, b & 0xFFFF, b >> 16


@kernel
def long_words(k0: Any, k1: Any, first: Any) -> Any:
    """Draws of elements first .. first + 63, a multiple of 32, of the stream with 32."""
    return two_threefry(k0, k1, first)


# Functions of lanes alone: arrays as arguments would cost atomic counts of references. ``like`` are lanes as
# they were loaded, whose type says how values are stored.


def values_of(like: Any, g: Any, whole: Any) -> Any:
    """Stored lanes as floats: codes, bfloat16 or float32."""
    raise TypeError("for compiled code only")


@overload(values_of, jit_options=JIT)
def _values_of(like: Any, g: Any, whole: Any) -> Any:
    if like.dtype == types.uint8:

        def decoded(like: Any, g: Any, whole: Any) -> Any:
            c = lanes.from_unsigned(like)
            if whole == WHOLE:
                return lanes.to_float((c ^ g.top) - g.top) * g.quantum
            a = c & (g.top - 1)
            small = lanes.bits_of(lanes.to_float(a) * g.quantum)
            value = lanes.select(a < g.first, small, (a << g.cut) + (g.emin - 0x800000))
            return lanes.floats_of(value | ((c & g.top) << g.left))

        return decoded

    def plain(like: Any, g: Any, whole: Any) -> Any:
        return lanes.widened(like)

    return plain


def stored_of(like: Any, r: Any, g: Any, whole: Any) -> Any:
    """Values that fit them as lanes to be stored."""
    raise TypeError("for compiled code only")


@overload(stored_of, jit_options=JIT)
def _stored_of(like: Any, r: Any, g: Any, whole: Any) -> Any:
    if like.dtype == types.uint8:

        def encoded(like: Any, r: Any, g: Any, whole: Any) -> Any:
            if whole == WHOLE:
                return lanes.bytes_of(lanes.to_int(r * g.unit) & (g.top + g.top - 1))
            u = lanes.bits_of(r)
            a = u & MAGNITUDE
            small = lanes.to_int(lanes.floats_of(a) * g.unit)
            code = lanes.select(a < g.emin, small, (a - (g.emin - 0x800000)) >> g.cut)
            return lanes.bytes_of(code | ((u >> g.left) & g.top))

        return encoded

    if like.dtype == types.uint16:

        def halves(like: Any, r: Any, g: Any, whole: Any) -> Any:
            return lanes.upper(lanes.bits_of(r))

        return halves

    def plain(like: Any, r: Any, g: Any, whole: Any) -> Any:
        return r

    return plain


def moment_of(like: Any, x: Any, word: Any, rare: Any) -> Any:
    """Moments as they are stored: float32, or bfloat16 by draws."""
    raise TypeError("for compiled code only")


@overload(moment_of, jit_options=JIT)
def _moment_of(like: Any, x: Any, word: Any, rare: Any) -> Any:
    if like.dtype == types.uint16:

        def drawn(like: Any, x: Any, word: Any, rare: Any) -> Any:
            u = lanes.bits_of(x)
            r = u + lanes.signed(word)
            if rare:
                quiet = u | lanes.select(x != x, lanes.splat(u, 0x400000), 0)
                r = lanes.select((u & EXPONENT) == EXPONENT, quiet, r)
            return lanes.upper(r)

        return drawn

    def plain(like: Any, x: Any, word: Any, rare: Any) -> Any:
        return x

    return plain


def kept_of(like: Any, q: Any) -> Any:
    """What is kept beside weights: a carry or master as it is, a master from its remainder."""
    raise TypeError("for compiled code only")


@overload(kept_of, jit_options=JIT)
def _kept_of(like: Any, q: Any) -> Any:
    if like.dtype == types.int16:

        def from_16(like: Any, q: Any) -> Any:
            return lanes.floats_of(lanes.bits_of(q) + lanes.from_signed(like))

        return from_16
    if like.dtype == types.int8:

        def from_8(like: Any, q: Any) -> Any:
            return lanes.floats_of(lanes.bits_of(q) + (lanes.from_signed(like) << 8))

        return from_8

    def plain(like: Any, q: Any) -> Any:
        return lanes.widened(like)

    return plain


def to_keep(like: Any, x: Any, r: Any) -> Any:
    """A carry (nearest, in bfloat16) or master x, or what a master x lacks to the weight r."""
    raise TypeError("for compiled code only")


@overload(to_keep, jit_options=JIT)
def _to_keep(like: Any, x: Any, r: Any) -> Any:
    if like.dtype == types.int16:

        def as_16(like: Any, x: Any, r: Any) -> Any:
            return lanes.shorts_of(lanes.bits_of(x) - lanes.bits_of(r))

        return as_16
    if like.dtype == types.int8:

        def as_8(like: Any, x: Any, r: Any) -> Any:
            return lanes.chars_of((lanes.bits_of(x) - lanes.bits_of(r)) >> 8)

        return as_8
    if like.dtype == types.uint16:

        def rounded(like: Any, x: Any, r: Any) -> Any:
            u = lanes.bits_of(x)
            return lanes.upper(u + 0x7FFF + ((u >> 16) & 1))

        return rounded

    def plain(like: Any, x: Any, r: Any) -> Any:
        return x

    return plain


def _run(given: Any, t0: Any, t1: Any) -> None:
    """The tiles [t0, t1), all of them whole. ``given``: the arguments of :func:`_tiles`, and buffers."""
    stored, grad, first_, second, kept, rates, f, k, ft, kt, masks, keys = given[:12]
    offset, plain, moved, want_sums, counts, sums = given[12:18]
    bits, words, words_m, words_v, all_z, all_q, buffer, sixteen = given[18:]
    now, packed = bits.view(np.uint8), bits.view(np.uint64)
    a = Rates(rates[0], rates[1], rates[2], rates[3], rates[4], rates[5], rates[6], rates[7], rates[8])
    g = Coding(f[0], f[1], f[2], f[3], f[4], k[0], k[1], k[2], k[3], k[4], k[5], k[6], k[7])
    k0, k1, k2, k3, k4, k5 = keys[0], keys[1], keys[2], keys[3], keys[4], keys[5]
    for t in range(t0, t1):
        first = t * TILE
        changed, proposals, ends, bad, wrong = 0, 0, 0, 0, 0
        sampled = want_sums and t % want_sums == 0
        # Draws come 64 at a time. Where a shard begins within 64, those of the next 64 are needed, too.
        shift = (offset + first) & 63
        fill = (offset + first) - shift
        ahead = 64 if shift else 0
        for start in range(-ahead, TILE, 64):
            if ahead:
                for i in range(0, 64, lanes.COUNT):
                    lanes.store(words, i, lanes.load(words, 64 + i))
                    lanes.store(words_m, i, lanes.load(words_m, 64 + i))
                    lanes.store(words_v, i, lanes.load(words_v, 64 + i))
            if MODE != NEAREST:
                four = WORDS(k0, k1, fill + start + ahead)
                lanes.store(words, ahead, four[0])
                lanes.store(words, ahead + 16, four[1])
                lanes.store(words, ahead + 32, four[2])
                lanes.store(words, ahead + 48, four[3])
            if DRAWN:
                four = short_words(k2, k3, fill + start + ahead)
                lanes.store(words_m, ahead, four[0])
                lanes.store(words_m, ahead + 16, four[1])
                lanes.store(words_m, ahead + 32, four[2])
                lanes.store(words_m, ahead + 48, four[3])
                four = short_words(k4, k5, fill + start + ahead)
                lanes.store(words_v, ahead, four[0])
                lanes.store(words_v, ahead + 16, four[1])
                lanes.store(words_v, ahead + 32, four[2])
                lanes.store(words_v, ahead + 48, four[3])
            if start < 0:
                continue
            for at in range(0, 64, lanes.COUNT):
                i, j = start + at, first + start + at
                coded = lanes.load(stored, j)
                q = values_of(coded, g, GRID)
                d = lanes.widened(lanes.load(grad, j))
                old_m, old_v = lanes.load(first_, j), lanes.load(second, j)
                m, v = lanes.widened(old_m), lanes.widened(old_v)
                w = q
                if BESIDE:
                    old = lanes.load(kept, j)
                    before = kept_of(old, q)
                    if KEEPS != CARRY:
                        w = before
                if RULE == ADAM:
                    d = lanes.fma(w, a.decay, d)
                else:
                    w = w * a.decay
                m = lanes.fma(d - m, a.share, m if SMALL else d)
                weighted = d * a.rest2
                if j + lanes.COUNT > plain:  # the end of a tensor, as torch's vector width leaves it
                    behind = lanes.signed(lanes.counting(0)) >= plain - j
                    v = lanes.select(
                        behind, lanes.fma(v, a.beta2, weighted * d), lanes.fma(weighted, d, v * a.beta2)
                    )
                else:
                    v = lanes.fma(weighted, d, v * a.beta2)
                root = lanes.sqrt(v)
                x = root * a.inverse
                x = lanes.fma(lanes.fma(x, -a.root, root), a.inverse, x) + a.eps
                z = w + m * a.step / x
                if KEEPS == CARRY:
                    z = z + before
                if KEEPS == REMAINDER:
                    u = lanes.bits_of(z)
                    rare = (u & MAGNITUDE) > NEAR_END
                    if kept.itemsize == 1:
                        word = lanes.load(words, shift + at)
                        if SHORT:
                            u = (u + lanes.signed(word >> 8)) & -256
                        else:
                            digits, drawn = (u & 255) << 23, lanes.signed(word >> 1)
                            rare = rare | (digits == drawn)
                            u = (u & -256) + lanes.select(drawn < digits, lanes.splat(u, 256), 0)
                    z = lanes.floats_of(u)
                    r = lanes.floats_of((u + 0x8000) & -65536)
                elif MODE == NEAREST:
                    r = _nearest(z, g, GRID)
                    u = lanes.bits_of(z)
                    rare = (u & MAGNITUDE) > (NEAR_END if GRID == BFLOAT else TO_END)
                else:
                    r, rare = _drawn(z, lanes.load(words, shift + at), g, GRID, SHORT)
                    u = lanes.bits_of(z)
                    rare = rare | ((u & MAGNITUDE) > (NEAR_END if GRID == BFLOAT else TO_END))
                    if MODE == DEADZONE:
                        near = _nearest(z, g, GRID)
                        r = lanes.select((near == q) & (z != q), r, near)
                rest = z - r if RESTS else z
                if GRID != BFLOAT:
                    at_end = lanes.mask((r >= g.hi) | (r <= g.lo))
                    ends += ones(at_end)
                    if RESTS and at_end:
                        past = ((r >= g.hi) & (z > r)) | ((r <= g.lo) & (z < r))
                        rest = lanes.select(past, lanes.splat(z, 0.0), rest)
                odd = lanes.mask(rare) != 0
                if odd:
                    if GRID != BFLOAT:
                        ends -= ones(at_end)
                    lanes.store(sixteen, 0, w)
                    lanes.store(sixteen, 16, m)
                    lanes.store(sixteen, 32, v)
                    lanes.store(sixteen, 48, q)
                    if BESIDE:
                        lanes.store(sixteen, 64, before)
                    found = slowly(
                        sixteen,
                        rates,
                        ft,
                        kt,
                        masks,
                        keys,
                        offset + j,
                        MODE,
                        KEEPS,
                        SHORT,
                        kept.itemsize == 1,
                    )
                    wrong = found & 0xFFFF
                    bad += ones(wrong)
                    ends += found >> 16
                    z, r, rest = lanes.load(sixteen, 0), lanes.load(sixteen, 16), lanes.load(sixteen, 32)
                    x = lanes.load(sixteen, 48)
                if KEEPS == ERROR and a.feed != 0:
                    m = m + (x * rest) * a.feed
                lanes.store(first_, j, moment_of(old_m, m, lanes.load(words_m, shift + at), odd))
                lanes.store(second, j, moment_of(old_v, v, lanes.load(words_v, shift + at), odd))
                if BESIDE:
                    lanes.store(kept, j, to_keep(old, rest, r))
                lanes.store(stored, j, stored_of(coded, r, g, GRID))
                if sampled:
                    if KEEPS == REMAINDER:  # as the two-pass policy has it
                        u = lanes.bits_of(z)
                        tie = lanes.select((u & 0xFFFF) == 0x8000, lanes.splat(u, 1), 0)
                        lanes.store(all_z, i, lanes.floats_of(u | tie))
                    else:
                        lanes.store(all_z, i, z)
                    lanes.store(all_q, i, q)
                    if odd and wrong:
                        for b in range(lanes.COUNT):
                            if (wrong >> b) & 1:
                                all_z[i + b] = 0
                                all_q[i + b] = 0
                differs = lanes.mask(r != q)
                bits[i >> 4] = differs
                changed += ones(differs)
                proposals += ones(lanes.mask(z != q))
        counts[t, 0] = TILE - changed - bad
        counts[t, 1] = TILE - proposals - bad
        counts[t, 2] = ends
        counts[t, 3] = bad
        counts[t, 4] = 0
        if moved.size:
            never = TILE
            for i in range(0, TILE // 8, lanes.COUNT):
                ever = lanes.load(now, i) | lanes.load(moved, first // 8 + i)
                lanes.store(now, i, ever)
                lanes.store(moved, first // 8 + i, ever)
            for word in packed:
                never -= ones(word)
            counts[t, 4] = never
        if sampled:
            sums[t, 1] = sum_changes(all_z, all_q, buffer)
            sums[t, 0] = sum_abs(all_q, buffer)


def _tiles(
    stored: Any, grad: Any, first_: Any, second: Any, kept: Any, rates: Any, f: Any, k: Any, ft: Any, kt: Any,
    masks: Any, keys: Any, offset: Any, plain: Any, moved: Any, want_sums: Any, counts: Any, sums: Any,
    t0: Any, t1: Any,
) -> None:  # fmt: skip
    """The tiles [t0, t1). ``kept``: a carry (float32, bfloat16), masters or remainders; ``f`` and ``k``: a
    grid's :class:`Coding`, ``ft`` and ``kt`` its tables; ``keys``: of weights and both moments; ``plain``:
    the first
    element whose second moment is summed in the other order; ``want_sums``: of every so many tiles."""
    buffers = (
        np.empty(TILE // lanes.COUNT, np.uint16), np.empty(128, np.uint32), np.empty(128, np.uint32),
        np.empty(128, np.uint32), np.empty(TILE, np.float32), np.empty(TILE, np.float32),
        np.empty(TILE // 2, np.float64), np.empty(80, np.float32),
    )  # fmt: skip
    given = (
        stored, grad, first_, second, kept, rates, f, k, ft, kt, masks, keys, offset, plain, moved, want_sums,
        counts, sums,
    )  # fmt: skip
    whole = min(t1, stored.size // TILE)
    RUN(given + buffers, t0, whole)
    if whole == t1:
        return
    # The last tile, short: filled up with weights of zero that have no gradient and stay.
    first, n = whole * TILE, stored.size - whole * TILE
    stored_, grad_ = np.zeros(TILE, stored.dtype), np.zeros(TILE, grad.dtype)
    m_, v_, kept_ = np.zeros(TILE, first_.dtype), np.zeros(TILE, second.dtype), np.zeros(TILE, kept.dtype)
    moved_, counts_, sums_ = np.zeros(TILE // 8, np.uint8), np.zeros((1, 5), np.int32), np.zeros((1, 2))
    ever = moved_ if moved.size else moved_[:0]
    for i in range(n):
        stored_[i], grad_[i], m_[i], v_[i] = (
            stored[first + i],
            grad[first + i],
            first_[first + i],
            second[first + i],
        )
        if kept.size:
            kept_[i] = kept[first + i]
    for i in range(n, TILE):
        v_[i] = 0x3F80 if second.itemsize == 2 else 1
    for i in range((n + 7) // 8):
        if moved.size:
            moved_[i] = moved[first // 8 + i]
    given_ = (
        stored_, grad_, m_, v_, kept_, rates, f, k, ft, kt, masks, keys, offset + first, plain - first, ever,
        want_sums if want_sums and whole % want_sums == 0 else 0, counts_, sums_,
    )  # fmt: skip
    RUN(given_ + buffers, 0, 1)
    for i in range(n):
        stored[first + i], first_[first + i], second[first + i] = stored_[i], m_[i], v_[i]
        if kept.size:
            kept[first + i] = kept_[i]
    for i in range((n + 7) // 8):
        if moved.size:
            moved[first // 8 + i] = moved_[i]
    for c in range(5):
        counts[whole, c] = counts_[0, c]
    counts[whole, 0] -= TILE - n
    counts[whole, 1] -= TILE - n
    if moved.size:
        counts[whole, 4] -= TILE - n
    sums[whole, 0], sums[whole, 1] = sums_[0, 0], sums_[0, 1]


@cache
def tiles(rule: int, mode: int, keeps: int, grid: int, short: bool, small: bool, drawn: bool) -> Any:
    """The compiled step of a case; types of arrays make others of it. ``small``: 1 - beta1 is below a half;
    ``drawn``: moments are bfloat16."""
    names = ("RULE", "MODE", "KEEPS", "GRID", "SHORT", "SMALL", "DRAWN")
    values = (rule, mode, keeps, grid, short, small, drawn)
    case, name = dict(zip(names, values, strict=True)), "_".join(str(int(v)) for v in values)
    case |= {"RESTS": keeps in (CARRY, ERROR), "BESIDE": keeps not in (NOTHING, ERROR)}
    run = specialised(_run, name, WORDS=short_words if short else long_words, **case)
    return specialised(_tiles, name, RUN=run)
