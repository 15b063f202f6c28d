"""How lanes are loaded and stored: codes, bfloat16, float32, and what is kept beside weights.

Functions of lanes alone: arrays as arguments would cost atomic counts of references. ``like`` are lanes as
they were loaded, whose type says how values are stored.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import types
from numba.core.registry import cpu_target
from numba.extending import overload

from halfulp.kernels import lanes
from halfulp.kernels.onepass_rare import EXPONENT, MAGNITUDE
from halfulp.kernels.onepass_reference import WHOLE
from halfulp.kernels.simd import JIT, kernel

HALF = 3
"""As FLOAT, of grids whose codes are cut out of a float16's pattern: the processor converts those itself,
subnormals included (:func:`halves`)."""


@cache
def halves() -> bool:
    """Whether compiled code here has the processor's conversions of float16; without them it would call
    functions that are not there."""
    features = cpu_target.target_context.codegen()._tm_features
    return any(f"+{name}," in f"{features}," for name in ("f16c", "neon"))


if halves():

    @kernel
    def from_code(c: Any, g: Any) -> Any:
        """Codes as floats: sign and index to their places in float16, and a power of two."""
        c = lanes.words_of(c)
        h = ((c << g.half_sign) & 0x8000) | ((c & (g.top - 1)) << g.half_index)
        return lanes.from_half(h) * g.half_unit

    @kernel
    def to_code(r: Any, g: Any) -> Any:
        """Values of the grid as codes."""
        h = lanes.to_half(r * g.half_inverse)
        return lanes.bytes_of(((h >> g.half_sign) & g.top) | ((h >> g.half_index) & (g.top - 1)))

else:

    @kernel
    def from_code(c: Any, _g: Any) -> Any:
        return lanes.to_float(lanes.from_unsigned(c))

    @kernel
    def to_code(r: Any, _g: Any) -> Any:
        return lanes.bytes_of(lanes.to_int(r))


@kernel
def drawn_code(v: Any, word: Any, g: Any) -> Any:
    """A neighbour's code by 16 digits of U, of finite lanes; where those do not decide; and where it is at
    an end of the range, or v is not finite.

    Indices count a float grid's magnitudes, and between two of them v's own bits are digits: those of the
    pattern, or of subnormals those of v in units of the smallest. To go up is to carry, for the digits of U
    are the complements of ``word``."""
    u = lanes.bits_of(v)
    a = u & MAGNITUDE
    small = lanes.to_int(lanes.floats_of(a) * g.fine)
    index = lanes.select(a < g.emin, small, a - (g.emin - 0x800000))
    index = lanes.select(index < g.most, index, g.most)
    index = index + (lanes.signed(word) << g.spare)
    undecided = (index & g.digits) == g.digits
    index = index >> g.cut
    code = lanes.bytes_of(index | ((u >> g.left) & g.top))
    return code, undecided, index == (g.most >> g.cut)


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
            if whole == HALF:
                return from_code(like, g)
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
            if whole == HALF:
                return to_code(r, g)
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
