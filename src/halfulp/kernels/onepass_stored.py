"""How lanes are loaded and stored: codes, bfloat16, float32, and what is kept beside weights.

Functions of lanes alone: arrays as arguments would cost atomic counts of references. ``like`` are lanes as
they were loaded, whose type says how values are stored.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import overload

from halfulp.kernels import lanes
from halfulp.kernels.onepass_rare import EXPONENT, MAGNITUDE
from halfulp.kernels.onepass_reference import WHOLE
from halfulp.kernels.simd import JIT


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
