"""One optimizer step of whole tiles in one sweep over memory, sixteen lanes at a time.

Gradient, moments and stored weights are read once and written once: the moments move, the optimizer's
proposal is rounded by the policy, what was lost is counted. :mod:`halfulp.kernels.onepass_reference` defines
every bit of it. There is a loop for each case (:func:`tiles`), so that nothing is asked inside, and one call
does all tensors of a step that are of a case. Draws are made 128 at a time, in two chains.

What is rare in sixteen lanes (a value that is not finite, an end of bfloat16's range, a draw that its digits
do not decide) is only noticed; :mod:`halfulp.kernels.onepass_rare` then does those sixteen one by one.

The denominator's division by a constant, sqrt(v) / c, is a multiplication with c's reciprocal and one
correction of the remainder, which rounds as the division does (Markstein) and leaves the divider free.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from halfulp.kernels import lanes
from halfulp.kernels.cpu_tile import sum_abs
from halfulp.kernels.cpu_tile_arrival import sum_arrival
from halfulp.kernels.cpu_tile_write import sum_changes
from halfulp.kernels.onepass_packed import packed_tensor
from halfulp.kernels.onepass_rare import EXPONENT, MAGNITUDE, NEAR_END, TO_END, slowly
from halfulp.kernels.onepass_reference import (
    ADAM,
    ADAMW,
    BFLOAT,
    CARRY,
    ERROR,
    LION,
    NESTEROV,
    NOTHING,
    REMAINDER,
)  # fmt: skip
from halfulp.kernels.onepass_stored import HALF, drawn_code, kept_of, moment_of, stored_of, to_keep, values_of
from halfulp.kernels.reference import DEADZONE, NEAREST, STOCHASTIC, TILE, WRITE_SUMS
from halfulp.kernels.simd import (
    array_at,
    inline,
    kernel,
    ones,
    special_case,
    specialised,
    two_short,
    two_threefry,
)  # fmt: skip

SUMS = len(WRITE_SUMS)


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
    beta1: Any


class Coding(NamedTuple):
    """What rounding and coding of lanes need to know of a grid: see params and
    :func:`halfulp.kernels.onepass._coding`. ``up``: how many values its first digits of a draw have."""

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
    fine: Any
    half_unit: Any
    half_inverse: Any
    most: Any
    spare: Any
    digits: Any
    half_sign: Any
    half_index: Any


RULE, MODE, KEEPS, GRID, SHORT, SMALL, DRAWN = 0, STOCHASTIC, NOTHING, BFLOAT, True, True, False
RESTS, BESIDE = False, False  # whether something is not written; whether something is kept beside weights
CODED = False  # whether draws make codes, and no values
TWO = True  # whether the rule has a second moment
FILL: Any = None
ONCE = 0  # how many draws it makes
RUN: Any = None
TENSOR: Any = None
PACKED: Any = None
CODES = False  # whether codes are stored
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


AT_ONCE = 128  # draws


@kernel
def fill_long(words: Any, at: Any, k0: Any, k1: Any, first: Any, n: Any) -> None:
    """n draws and some more from first on, a multiple of 64, of the stream with 32 digits."""
    for i in range(0, n, 64):
        a, b, c, d = two_threefry(k0, k1, first + i)
        lanes.store(words, at + i, a)
        lanes.store(words, at + i + 16, b)
        lanes.store(words, at + i + 32, c)
        lanes.store(words, at + i + 48, d)


@kernel
def fill_short(words: Any, at: Any, k0: Any, k1: Any, first: Any, _n: Any) -> None:
    """AT_ONCE of the stream with 16."""
    a, b, c, d = two_short(k0, k1, (first >> 6) << 4)
    lanes.store(words, at, a & 0xFFFF)
    lanes.store(words, at + 16, a >> 16)
    lanes.store(words, at + 32, b & 0xFFFF)
    lanes.store(words, at + 48, b >> 16)
    lanes.store(words, at + 64, c & 0xFFFF)
    lanes.store(words, at + 80, c >> 16)
    lanes.store(words, at + 96, d & 0xFFFF)
    lanes.store(words, at + 112, d >> 16)


@kernel
def fill_pairs(words: Any, at: Any, k0: Any, k1: Any, first: Any) -> None:
    """The same for both moments: a draw of 16 digits, and above it the same with its bytes exchanged."""
    a, b, c, d = two_short(k0, k1, (first >> 6) << 4)
    lanes.store(words, at, lanes.lower_pair(a))
    lanes.store(words, at + 16, lanes.upper_pair(a))
    lanes.store(words, at + 32, lanes.lower_pair(b))
    lanes.store(words, at + 48, lanes.upper_pair(b))
    lanes.store(words, at + 64, lanes.lower_pair(c))
    lanes.store(words, at + 80, lanes.upper_pair(c))
    lanes.store(words, at + 96, lanes.lower_pair(d))
    lanes.store(words, at + 112, lanes.upper_pair(d))


def _run(given: Any, t0: Any, t1: Any) -> None:
    """The tiles [t0, t1) of a tensor, all of them whole. ``given``: its arrays, then what :func:`_tiles` says
    of it, then buffers."""
    stored, grad, first_, second, kept, moved, counts, sums = given[:8]
    rates, f, k, ft, kt, masks, keys, offset, plain, want_sums = given[8:18]
    changes, proposals, words, pairs, all_z, all_q, all_r, buffer, sixteen = given[18:]
    now, packed, asked_for = changes.view(np.uint8), changes.view(np.uint64), proposals.view(np.uint64)
    a = Rates(
        rates[0], rates[1], rates[2], rates[3], rates[4], rates[5], rates[6], rates[7], rates[8], rates[9]
    )
    g = Coding(
        f[0], f[1], f[2], f[3], f[4], k[0], k[1], k[2], k[3], k[4], k[5], k[6], k[7], f[5], f[6], f[7], k[8],
        k[9], k[10], k[11], k[12],
    )  # fmt: skip
    for t in range(t0, t1):
        first = t * TILE
        ends, bad, wrong = 0, 0, 0
        sampled = want_sums and t % want_sums == 0
        shift = (offset + first) & 63  # draws are made from multiples of 64; a shard may begin within
        start, ready = offset + first - shift, 0
        # A pipeline of three, for a square root and a division take the time of a turn each: moments and root
        # of sixteen weights, the proposal of the sixteen before, and the write-back of those before them.
        m = v = root = w = q = before = lanes.splat(lanes.load(all_z, 0), 0.0)
        next_m = next_v = next_q = next_before = z = x = m
        for turn in range(0, TILE + 2 * lanes.COUNT, lanes.COUNT):
            if turn >= 2 * lanes.COUNT:
                i = turn - 2 * lanes.COUNT
                j = first + i
                if (MODE != NEAREST or DRAWN) and ready < shift + i + lanes.COUNT:
                    # Few at a time where that is quick, so that memory is not idle meanwhile.
                    if MODE != NEAREST:
                        FILL(words, ready, keys[0], keys[1], start + ready, shift + TILE)
                    if DRAWN:
                        for some in range(ready, ready + ONCE, AT_ONCE):
                            fill_pairs(pairs, some, keys[2], keys[3], start + some)
                    ready += ONCE
                asked = z
                if KEEPS == CARRY:
                    z = z + next_before
                if KEEPS == REMAINDER:
                    u = lanes.bits_of(z)
                    rare = (u & MAGNITUDE) > NEAR_END
                    if kept.itemsize == 1:
                        word = lanes.load(words, shift + i)
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
                elif CODED:
                    r = z
                    old = lanes.load(stored, j)
                    code, rare, last = drawn_code(z, lanes.load(words, shift + i), g)
                else:
                    r, rare = _drawn(z, lanes.load(words, shift + i), g, GRID, SHORT)
                    u = lanes.bits_of(z)
                    rare = rare | ((u & MAGNITUDE) > (NEAR_END if GRID == BFLOAT else TO_END))
                    if MODE == DEADZONE:
                        near = _nearest(z, g, GRID)
                        r = lanes.select((near == next_q) & (z != next_q), r, near)
                rest = z - r if RESTS else z
                if GRID != BFLOAT and not CODED:
                    at_end = lanes.mask((r >= g.hi) | (r <= g.lo))
                    ends += ones(at_end)
                    if RESTS and at_end:
                        past = ((r >= g.hi) & (z > r)) | ((r <= g.lo) & (z < r))
                        rest = lanes.select(past, lanes.splat(z, 0.0), rest)
                if CODED:
                    at_end, odd = lanes.mask(last), False
                    if lanes.mask(rare | last):
                        ends += ones(at_end)
                        odd = lanes.mask(rare | ((lanes.bits_of(z) & MAGNITUDE) > TO_END)) != 0
                else:
                    odd = lanes.mask(rare) != 0
                if odd:
                    if GRID != BFLOAT:
                        ends -= ones(at_end)
                    old_w = next_before if BESIDE and KEEPS != CARRY else next_q
                    if TWO:
                        lanes.store(sixteen, 0, old_w if RULE == ADAM else old_w * a.decay)
                    else:
                        lanes.store(sixteen, 0, asked)
                    lanes.store(sixteen, 16, next_m)
                    lanes.store(sixteen, 32, next_v)
                    lanes.store(sixteen, 48, next_q)
                    if BESIDE:
                        lanes.store(sixteen, 64, next_before)
                    # As values, not as constants: one function for all cases.
                    found = slowly(
                        sixteen, rates, ft, kt, masks, keys, offset + j, np.int64(MODE), np.int64(KEEPS),
                        bool(SHORT), bool(kept.itemsize == 1), bool(TWO),
                    )  # fmt: skip
                    wrong = found & 0xFFFF
                    bad += ones(wrong)
                    ends += found >> 16
                    z, r, rest = lanes.load(sixteen, 0), lanes.load(sixteen, 16), lanes.load(sixteen, 32)
                    x = lanes.load(sixteen, 48)
                    if CODED:
                        code = stored_of(old, r, g, GRID)
                if KEEPS == ERROR and a.feed != 0:
                    next_m = next_m + (x * rest) * a.feed if TWO else lanes.fma(rest, a.feed, next_m)
                pair = lanes.load(pairs, shift + i)
                lanes.store(first_, j, moment_of(lanes.load(first_, j), next_m, pair & 0xFFFF, odd))
                if TWO:
                    lanes.store(second, j, moment_of(lanes.load(second, j), next_v, pair >> 16, odd))
                if BESIDE:
                    lanes.store(kept, j, to_keep(lanes.load(kept, j), rest, r))
                if CODED:
                    lanes.store(stored, j, code)
                else:
                    lanes.store(stored, j, stored_of(lanes.load(stored, j), r, g, GRID))
                if sampled:
                    if KEEPS == REMAINDER:  # as the two-pass policy has it
                        u = lanes.bits_of(z)
                        tie = lanes.select((u & 0xFFFF) == 0x8000, lanes.splat(u, 1), 0)
                        lanes.store(all_z, i, lanes.floats_of(u | tie))
                    else:
                        lanes.store(all_z, i, z)
                    lanes.store(all_q, i, next_q)
                    if CODED:
                        r = values_of(code, g, GRID)
                    lanes.store(all_r, i, r)
                    if odd and wrong:
                        for b in range(lanes.COUNT):
                            if (wrong >> b) & 1:
                                all_z[i + b] = 0
                                all_q[i + b] = 0
                                all_r[i + b] = 0
                if CODED:  # by value: zeros of either sign are one
                    changes[i >> 4] = lanes.mask((code != old) & (((code | old) & (g.top - 1)) != 0))
                else:
                    changes[i >> 4] = lanes.mask(r != next_q)
                proposals[i >> 4] = lanes.mask(z != next_q)
            if turn < TILE + lanes.COUNT:
                next_m, next_v, next_q, next_before = m, v, q, before
                if TWO:
                    x = root * a.inverse
                    x = lanes.fma(lanes.fma(x, -a.root, root), a.inverse, x) + a.eps
                    z = w + m * a.step / x
                elif RULE == LION:
                    z = w + root * a.step
                else:
                    z = lanes.fma(root, a.step, w)
            if turn < TILE:
                j = first + turn
                w = q = values_of(lanes.load(stored, j), g, GRID)
                if BESIDE:
                    before = kept_of(lanes.load(kept, j), q)
                    if KEEPS != CARRY:
                        w = before
                d = lanes.widened(lanes.load(grad, j))
                m = lanes.widened(lanes.load(first_, j))
                behind = j + lanes.COUNT > plain  # the end of a tensor, as torch's vector width leaves it
                late = lanes.signed(lanes.counting(0)) >= plain - j
                if RULE in (ADAMW, LION):
                    w = w * a.decay
                elif a.decay != 0:
                    d = lanes.fma(w, a.decay, d)
                if TWO:
                    v = lanes.widened(lanes.load(second, j))
                    m = lanes.fma(d - m, a.share, m if SMALL else d)
                    weighted = d * a.rest2
                    next_to = lanes.fma(weighted, d, v * a.beta2)
                    if behind:
                        next_to = lanes.select(late, lanes.fma(v, a.beta2, weighted * d), next_to)
                    v = next_to
                    root = lanes.sqrt(v)  # in the other rules, the direction of the step
                elif RULE == LION:
                    c = m * a.beta1 + d * a.share
                    root = lanes.select(c < 0, lanes.splat(c, -1.0), c)
                    root = lanes.select(c > 0, lanes.splat(c, 1.0), root)
                    m = m * a.beta2 + d * a.rest2
                else:
                    turned = lanes.fma(d, a.share, m * a.beta1)
                    if behind:
                        turned = lanes.select(late, lanes.fma(m, a.beta1, d * a.share), turned)
                    m = turned
                    root = lanes.fma(m, a.beta2, d) if RULE == NESTEROV else m
        changed, wanted = 0, 0
        for i in range(TILE // 64):
            changed += ones(packed[i])
            wanted += ones(asked_for[i])
        counts[t, 0] = TILE - changed - bad
        counts[t, 1] = TILE - wanted - bad
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
            sums[t, 2], sums[t, 3], sums[t, 4] = sum_arrival(all_q, all_z, all_r, buffer)


def _tensor(given: Any, buffers: Any, t0: Any, t1: Any) -> None:
    """The tiles [t0, t1) of a tensor."""
    stored, grad, first_, second, kept, moved, counts, sums = given[:8]
    rates, f, k, ft, kt, masks, keys, offset, plain, want_sums = given[8:]
    whole = min(t1, stored.size // TILE)
    RUN(given + buffers, t0, whole)
    if whole == t1:
        return
    # The last tile, short: filled up with weights of zero that have no gradient and stay.
    first, n = whole * TILE, stored.size - whole * TILE
    stored_, grad_ = np.zeros(TILE, stored.dtype), np.zeros(TILE, grad.dtype)
    m_, v_, kept_ = np.zeros(TILE, first_.dtype), np.zeros(TILE, second.dtype), np.zeros(TILE, kept.dtype)
    moved_, counts_, sums_ = np.zeros(TILE // 8, np.uint8), np.zeros((1, 5), np.int32), np.zeros((1, SUMS))
    ever = moved_ if moved.size else moved_[:0]
    for i in range(n):
        stored_[i], grad_[i] = stored[first + i], grad[first + i]
        m_[i] = first_[first + i]
        if second.size:
            v_[i] = second[first + i]
        if kept.size:
            kept_[i] = kept[first + i]
    for i in range(n, TILE):
        v_[i] = 0x3F80 if second.itemsize == 2 else 1
    for i in range((n + 7) // 8):
        if moved.size:
            moved_[i] = moved[first // 8 + i]
    given_ = (
        stored_, grad_, m_, v_, kept_, ever, counts_, sums_, rates, f, k, ft, kt, masks, keys, offset + first,
        plain - first, want_sums if want_sums and whole % want_sums == 0 else 0,
    )  # fmt: skip
    # 0 and 1, as sums: constants are types of their own, and the loop would be compiled once more for them.
    RUN(given_ + buffers, t1 - t1, t1 - whole)
    for i in range(n):
        stored[first + i], first_[first + i] = stored_[i], m_[i]
        if second.size:
            second[first + i] = v_[i]
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
    for c in range(SUMS):
        sums[whole, c] = sums_[0, c]


def _tiles(
    stored: Any, grad: Any, first_: Any, second: Any, kept: Any, moved: Any, table: Any, rates: Any,
    keys: Any, f: Any, k: Any, ft: Any, kt: Any, masks: Any, counts: Any, sums: Any, t0: Any, t1: Any,
) -> None:  # fmt: skip
    """The tiles [t0, t1) of those of all tensors, one after the other.

    The first six are empty arrays, for their types. ``table`` has a row a tensor: TABLE; ``rates`` and
    ``keys`` (of weights and of moments) too. ``f`` and ``k``: a grid's :class:`Coding`, ``ft`` and ``kt`` its
    tables."""
    buffers = (
        np.empty(TILE // lanes.COUNT, np.uint16), np.empty(TILE // lanes.COUNT, np.uint16),
        np.empty(TILE + 128, np.uint32), np.empty(TILE + 128, np.uint32), np.zeros(TILE, np.float32),
        np.empty(TILE, np.float32), np.empty(TILE, np.float32), np.empty(TILE // 2, np.float64),
        np.empty(80, np.float32),
    )  # fmt: skip
    for i in range(len(table)):
        row = table[i]
        size, start, bits = row[6], row[10], row[11]
        n = (size + TILE - 1) // TILE
        if start + n <= t0 or start >= t1:
            continue
        given = (
            array_at(stored, row[0], (size * bits + 7) // 8 if CODES else size),
            array_at(grad, row[1], size), array_at(first_, row[2], size),
            array_at(second, row[3], size if row[3] else 0), array_at(kept, row[4], size if row[4] else 0),
            array_at(moved, row[5], (size + 7) // 8 if row[5] else 0), counts[start : start + n],
            sums[start : start + n], rates[i], f, k, ft, kt, masks, keys[i], row[7], row[8], row[9],
        )  # fmt: skip
        if CODES and bits < 8:
            PACKED(given, buffers, size, bits, max(t0 - start, 0), min(t1 - start, n))
        else:
            TENSOR(given, buffers, max(t0 - start, 0), min(t1 - start, n))


TABLE = (
    "stored", "grad", "first", "second", "kept", "moved", "size", "offset", "plain", "sums", "start", "bits",
)  # fmt: skip
"""A tensor's addresses (zero: it has none); how many weights; where in the whole they begin; the first
element whose second moment is summed in the other order; of every how many tiles sums are wanted; its first
tile; how many bits a code has in memory."""


@cache
def tiles(
    rule: int, mode: int, keeps: int, grid: int, short: bool, small: bool, drawn: bool, codes: bool
) -> Any:
    """The compiled step of a case; types of arrays make others of it. ``small``: 1 - beta1 is below a half;
    ``drawn``: moments are bfloat16; ``codes``: stored are those."""
    coded = codes and (grid, mode, keeps, short) == (HALF, STOCHASTIC, NOTHING, True)
    names = ("RULE", "MODE", "KEEPS", "GRID", "SHORT", "SMALL", "DRAWN", "CODED")
    values = (rule, mode, keeps, grid, short, small, drawn, coded)
    case, name = dict(zip(names, values, strict=True)), "_".join(str(int(v)) for v in values)
    case |= {"RESTS": keeps in (CARRY, ERROR), "BESIDE": keeps not in (NOTHING, ERROR)}
    case |= {"TWO": rule in (ADAMW, ADAM)}
    draws = {"FILL": fill_short, "ONCE": AT_ONCE} if short else {"FILL": fill_long, "ONCE": TILE + AT_ONCE}
    run = specialised(_run, name, **draws, **case)
    tensor = inline(
        special_case(_tensor, name, {"RUN": run})
    )  # a function more would be compiled as often again
    packed = specialised(packed_tensor, name, TENSOR=tensor) if codes else None
    return specialised(_tiles, f"{name}_{int(codes)}", TENSOR=tensor, PACKED=packed, CODES=codes)
