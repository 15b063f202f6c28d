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
from halfulp.kernels.cpu_write_run import put_lanes
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
DRAW: Any = None
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
def short_words(words: Any, at: Any, k0: Any, k1: Any, first: Any) -> None:
    """Draws of elements first .. first + 63, a multiple of 64, of the stream with 16 digits."""
    a, b = threefry(k0, k1, (first >> 6) << 4, 0)
    lanes.store(words, at, a & 0xFFFF)
    lanes.store(words, at + 16, a >> 16)
    lanes.store(words, at + 32, b & 0xFFFF)
    lanes.store(words, at + 48, b >> 16)


@kernel
def long_words(words: Any, at: Any, k0: Any, k1: Any, first: Any) -> None:
    """Draws of elements first .. first + 63, a multiple of 32, of the stream with 32."""
    a, b, c, d = two_threefry(k0, k1, first)
    lanes.store(words, at, a)
    lanes.store(words, at + 16, b)
    lanes.store(words, at + 32, c)
    lanes.store(words, at + 48, d)


def get_values(stored: Any, j: Any, g: Any, whole: Any) -> Any:
    """stored[j:j + 16] as floats: codes, bfloat16 or float32."""
    raise TypeError("for compiled code only")


@overload(get_values, jit_options=JIT)
def _get_values(stored: Any, j: Any, g: Any, whole: Any) -> Any:
    if stored.dtype == types.uint8:

        def decoded(stored: Any, j: Any, g: Any, whole: Any) -> Any:
            c = lanes.from_unsigned(lanes.load(stored, j))
            if whole == WHOLE:
                return lanes.to_float((c ^ g.top) - g.top) * g.quantum
            a = c & (g.top - 1)
            small = lanes.bits_of(lanes.to_float(a) * g.quantum)
            value = lanes.select(a < g.first, small, (a << g.cut) + (g.emin - 0x800000))
            return lanes.floats_of(value | ((c & g.top) << g.left))

        return decoded

    def plain(stored: Any, j: Any, g: Any, whole: Any) -> Any:
        return lanes.widened(lanes.load(stored, j))

    return plain


def put_values(stored: Any, j: Any, r: Any, g: Any, whole: Any) -> None:
    """stored[j:j + 16] = r, values that fit it."""
    raise TypeError("for compiled code only")


@overload(put_values, jit_options=JIT)
def _put_values(stored: Any, j: Any, r: Any, g: Any, whole: Any) -> Any:
    if stored.dtype == types.uint8:

        def encoded(stored: Any, j: Any, r: Any, g: Any, whole: Any) -> None:
            if whole == WHOLE:
                lanes.store(stored, j, lanes.bytes_of(lanes.to_int(r * g.unit) & (g.top + g.top - 1)))
            else:
                u = lanes.bits_of(r)
                a = u & MAGNITUDE
                small = lanes.to_int(lanes.floats_of(a) * g.unit)
                code = lanes.select(a < g.emin, small, (a - (g.emin - 0x800000)) >> g.cut)
                lanes.store(stored, j, lanes.bytes_of(code | ((u >> g.left) & g.top)))

        return encoded

    if stored.dtype == types.uint16:

        def halves(stored: Any, j: Any, r: Any, g: Any, whole: Any) -> None:
            lanes.store(stored, j, lanes.upper(lanes.bits_of(r)))

        return halves

    def plain(stored: Any, j: Any, r: Any, g: Any, whole: Any) -> None:
        lanes.store(stored, j, r)

    return plain


def put_moment(out: Any, j: Any, x: Any, words: Any, at: Any, rare: Any) -> None:
    """out[j:j + 16] = x: float32, or bfloat16 by the draws at words[at:]."""
    raise TypeError("for compiled code only")


@overload(put_moment, jit_options=JIT)
def _put_moment(out: Any, j: Any, x: Any, words: Any, at: Any, rare: Any) -> Any:
    if out.dtype == types.uint16:

        def drawn(out: Any, j: Any, x: Any, words: Any, at: Any, rare: Any) -> None:
            u = lanes.bits_of(x)
            r = u + lanes.signed(lanes.load(words, at))
            if rare:
                quiet = u | lanes.select(x != x, lanes.splat(u, 0x400000), 0)
                r = lanes.select((u & EXPONENT) == EXPONENT, quiet, r)
            lanes.store(out, j, lanes.upper(r))

        return drawn

    def plain(out: Any, j: Any, x: Any, words: Any, at: Any, rare: Any) -> None:
        lanes.store(out, j, x)

    return plain


def get_kept(kept: Any, j: Any, q: Any) -> Any:
    """What is kept beside weights: a carry or master as it is, a master from its remainder."""
    raise TypeError("for compiled code only")


@overload(get_kept, jit_options=JIT)
def _get_kept(kept: Any, j: Any, q: Any) -> Any:
    if kept.dtype == types.int16:

        def from_16(kept: Any, j: Any, q: Any) -> Any:
            return lanes.floats_of(lanes.bits_of(q) + lanes.from_signed(lanes.load(kept, j)))

        return from_16
    if kept.dtype == types.int8:

        def from_8(kept: Any, j: Any, q: Any) -> Any:
            return lanes.floats_of(lanes.bits_of(q) + (lanes.from_signed(lanes.load(kept, j)) << 8))

        return from_8

    def plain(kept: Any, j: Any, q: Any) -> Any:
        return lanes.widened(lanes.load(kept, j))

    return plain


def put_kept(kept: Any, j: Any, x: Any, r: Any) -> None:
    """Keep a carry or master x, or what a master x lacks to the weight r."""
    raise TypeError("for compiled code only")


@overload(put_kept, jit_options=JIT)
def _put_kept(kept: Any, j: Any, x: Any, r: Any) -> Any:
    if kept.dtype == types.int16:

        def as_16(kept: Any, j: Any, x: Any, r: Any) -> None:
            lanes.store(kept, j, lanes.shorts_of(lanes.bits_of(x) - lanes.bits_of(r)))

        return as_16
    if kept.dtype == types.int8:

        def as_8(kept: Any, j: Any, x: Any, r: Any) -> None:
            lanes.store(kept, j, lanes.chars_of((lanes.bits_of(x) - lanes.bits_of(r)) >> 8))

        return as_8

    def plain(kept: Any, j: Any, x: Any, r: Any) -> None:
        put_lanes(kept, j, x)

    return plain


def _draw(words: Any, at: Any, words_m: Any, words_v: Any, keys: Any, first: Any) -> None:
    """The draws that a step needs for elements first .. first + 63, a multiple of 64."""
    if MODE != NEAREST:
        if SHORT:
            short_words(words, at, keys[0], keys[1], first)
        else:
            long_words(words, at, keys[0], keys[1], first)
    if DRAWN:
        short_words(words_m, at, keys[2], keys[3], first)
        short_words(words_v, at, keys[4], keys[5], first)


def _run(given: Any, t0: Any, t1: Any) -> None:
    """The tiles [t0, t1), all of them whole. ``given``: the arguments of :func:`_tiles`, and buffers."""
    stored, grad, first_, second, kept, rates, f, k, ft, kt, masks, keys = given[:12]
    offset, plain, moved, want_sums, counts, sums = given[12:18]
    bits, words, words_m, words_v, all_z, all_q, buffer, sixteen = given[18:]
    now, packed = bits.view(np.uint8), bits.view(np.uint64)
    a = Rates(rates[0], rates[1], rates[2], rates[3], rates[4], rates[5], rates[6], rates[7], rates[8])
    g = Coding(f[0], f[1], f[2], f[3], f[4], k[0], k[1], k[2], k[3], k[4], k[5], k[6], k[7])
    for t in range(t0, t1):
        first = t * TILE
        changed, proposals, ends, bad, wrong = 0, 0, 0, 0, 0
        sampled = want_sums and t % want_sums == 0
        # Draws come 64 at a time. Where a shard begins within 64, those of the next 64 are needed, too.
        shift = (offset + first) & 63
        fill = (offset + first) - shift
        ahead = 64 if shift else 0
        if ahead:
            DRAW(words, 64, words_m, words_v, keys, fill)
        for start in range(0, TILE, 64):
            if ahead:
                for i in range(0, 64, lanes.COUNT):
                    lanes.store(words, i, lanes.load(words, 64 + i))
                    lanes.store(words_m, i, lanes.load(words_m, 64 + i))
                    lanes.store(words_v, i, lanes.load(words_v, 64 + i))
            DRAW(words, ahead, words_m, words_v, keys, fill + start + ahead)
            for at in range(0, 64, lanes.COUNT):
                i, j = start + at, first + start + at
                q = get_values(stored, j, g, GRID)
                d = lanes.widened(lanes.load(grad, j))
                m = lanes.widened(lanes.load(first_, j))
                v = lanes.widened(lanes.load(second, j))
                w = q
                if BESIDE:
                    before = get_kept(kept, j, q)
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
                put_moment(first_, j, m, words_m, shift + at, odd)
                put_moment(second, j, v, words_v, shift + at, odd)
                if BESIDE:
                    put_kept(kept, j, rest, r)
                put_values(stored, j, r, g, GRID)
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
    run = specialised(_run, name, DRAW=specialised(_draw, name, **case), **case)
    return specialised(_tiles, name, RUN=run)
