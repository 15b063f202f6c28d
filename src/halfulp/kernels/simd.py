"""Small numba building blocks that keep loops in vector registers.

numba widens integer arithmetic to 64 bits and wraps negative indices, either of which halves
or prevents vectorisation; the intrinsics here say the narrow thing. Loops over slices that
start at zero vectorise, so every tile function takes slices.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import event
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array

from halfulp.kernels import lanes
from halfulp.kernels.kept import Kept
from halfulp.streams import PARITY

JIT: dict[str, Any] = {
    "nogil": True, "error_model": "numpy", "boundscheck": False, "no_cfunc_wrapper": True
}  # fmt: skip


def _sources() -> str:
    """A digest of every file that the compiled code is made from."""
    here = Path(__file__).parent
    files = sorted([*here.glob("*.py"), here.parent / "streams.py", here.parent / "grids.py"])
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()


SOURCES = _sources()


def _compiled(function: Any, stamp: str = SOURCES, **options: Any) -> Any:
    """njit, with a cache that forgets when any of the sources changes. numba itself looks only at the file
    of the function, not at those whose functions and constants are compiled into it."""
    made = njit(cache=True, **JIT, **options)(function)
    made._cache._cache_file = Kept(made._cache._cache_file, stamp)
    return made


class _FirstCompilation(event.Listener):  # type: ignore[misc]  # numba has no types
    """Says why the first call of a kernel takes so long. It hears of everybody's compilations.

    Once a machine and version: whoever can make a mark beside the compiled code says it, so that ten workers
    that start at once, and runs that need one kernel more, do not say it again. The mark goes with the code.
    """

    said = False

    def on_start(self, event: Any) -> None:
        dispatcher = event.data.get("dispatcher")
        function = getattr(dispatcher, "py_func", None)
        if self.said or not str(getattr(function, "__module__", "")).startswith("halfulp."):
            return
        kept = getattr(getattr(dispatcher, "_cache", None), "cache_path", None)
        if kept is None:  # a part of a kernel, which is kept as a whole
            return
        self.said = True
        try:
            place = Path(kept)
            place.mkdir(parents=True, exist_ok=True)
            (place / f"halfulp-{SOURCES[:16]}.told").touch(exist_ok=False)
        except FileExistsError:
            return
        except OSError:
            pass  # nothing is kept here: then every process compiles, and says so
        logging.getLogger("halfulp").warning(
            "halfulp: compiling kernels for this processor; they are kept, so this happens once."
        )

    def on_end(self, event: Any) -> None:
        """What is compiled is used."""


event.register("numba:compile", _FirstCompilation())


def kernel(function: Any) -> Any:
    """A compiled function."""
    return _compiled(function)


def kernel_of(*files: str) -> Callable[[Any], Any]:
    """As :func:`kernel`, for code elsewhere: its cache forgets when one of these files changes as well."""
    parts = [SOURCES.encode(), *(Path(file).read_bytes() for file in files)]
    return partial(_compiled, stamp=hashlib.sha256(b"\0".join(parts)).hexdigest())


def specialised(function: Any, name: str, **values: Any) -> Any:
    """A compiled copy of a plain function in which globals have these values. A function of its own for each
    case is faster than one that asks at run time, and only what is used is compiled. (Values from an
    enclosing function would do the same, but numba's cache does not know compiled ones among them again.)"""
    return kernel(special_case(function, name, values))


def special_case(function: Any, name: str, values: dict[str, Any]) -> Any:
    """The plain copy of :func:`specialised`, for code elsewhere: see :func:`kernel_of`."""
    made = FunctionType(function.__code__, {**function.__globals__, **values}, function.__name__)
    made.__module__, made.__qualname__ = function.__module__, f"{function.__qualname__}.{name}"
    return made


def inline(function: Any) -> Any:
    """A compiled function that is always inlined."""
    return _compiled(function, inline="always")


@intrinsic
def bits_of(_ctx: Any, x: Any) -> Any:
    """The bit pattern of a float, as an integer of its width."""
    width = x.bitwidth

    def build(_context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(width))

    return (types.int32 if width == 32 else types.int64)(x), build


@intrinsic
def float_like(_ctx: Any, x: Any, i: Any) -> Any:
    """The float of x's type with the low bits of i as its pattern."""
    width = x.bitwidth

    def build(context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        value = args[1]
        if value.type.width > width:
            value = builder.trunc(value, ir.IntType(width))
        return builder.bitcast(value, context.get_value_type(x))

    return x(x, i), build


@intrinsic
def float_from(_ctx: Any, x: Any, i: Any) -> Any:
    """The integer i as a number of x's type."""

    def build(context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        return builder.sitofp(args[1], context.get_value_type(x))

    return x(x, i), build


@intrinsic
def widen(_ctx: Any, x: Any) -> Any:
    """A container element as a float: bfloat16 patterns (uint16) become float32."""
    if x == types.uint16:

        def build(_context: Any, builder: Any, _sig: Any, args: Any) -> Any:
            wide = builder.shl(builder.zext(args[0], ir.IntType(32)), ir.Constant(ir.IntType(32), 16))
            return builder.bitcast(wide, ir.FloatType())

        return types.float32(x), build

    def same(_context: Any, _builder: Any, _sig: Any, args: Any) -> Any:
        return args[0]

    return x(x), same


@intrinsic
def narrow(_ctx: Any, like: Any, x: Any) -> Any:
    """A float as an element of like's type; exact for values that fit it."""
    if like == types.uint16:

        def build(_context: Any, builder: Any, _sig: Any, args: Any) -> Any:
            wide = builder.bitcast(args[1], ir.IntType(32))
            return builder.trunc(builder.lshr(wide, ir.Constant(ir.IntType(32), 16)), ir.IntType(16))

        return types.uint16(like, x), build

    def same(_context: Any, _builder: Any, _sig: Any, args: Any) -> Any:
        return args[1]

    return x(like, x), same


@intrinsic
def tally(_ctx: Any, count: Any, condition: Any, one: Any) -> Any:
    """count + (one if condition else 0), in 32 bits. A ``one`` that the compiler does not know to
    be 1 becomes a masked addition, which is an instruction less."""

    def build(_context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        count, bit, one = args
        if bit.type.width != 1:
            bit = builder.trunc(bit, ir.IntType(1))
        return builder.add(count, builder.select(bit, one, ir.Constant(ir.IntType(32), 0)))

    return types.int32(types.int32, types.boolean, types.int32), build


def _shift(op: str) -> Any:
    @intrinsic
    def shift(_ctx: Any, a: Any, b: Any) -> Any:
        def build(_context: Any, builder: Any, _sig: Any, args: Any) -> Any:
            return getattr(builder, op)(args[0], args[1])

        return a(a, a), build

    return shift


shl, shr = _shift("shl"), _shift("lshr")
"""Shifts in the width of their operands."""


@intrinsic
def span(_ctx: Any, x: Any, first: Any, last: Any) -> Any:
    """x[first:last] of a contiguous array that the caller keeps alive: a slice without reference counts,
    whose atomic updates would cost as much as a pass over a tile. Not for arrays that a kernel makes."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        source = context.make_array(sig.args[0])(context, builder, args[0])
        made = context.make_array(sig.return_type)(context, builder)
        size = builder.sub(args[2], args[1])
        place = builder.gep(source.data, [args[1]])
        populate_array(made, place, [size], source.strides, source.itemsize, None)
        return made._getvalue()

    return x(x, types.intp, types.intp), build


@intrinsic
def array_at(_ctx: Any, like: Any, address: Any, size: Any) -> Any:
    """The contiguous array of like's type that begins at an address, of memory that the caller keeps
    alive."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        made = context.make_array(sig.return_type)(context, builder)
        itemsize = context.get_constant(types.intp, like.dtype.bitwidth // 8)
        place = builder.inttoptr(args[1], made.data.type)
        populate_array(made, place, [args[2]], [itemsize], itemsize, None)
        return made._getvalue()

    return like(like, types.intp, types.intp), build


LANES = lanes.COUNT


@intrinsic
def ones(_ctx: Any, bits: Any) -> Any:
    """How many bits are set."""

    def build(_context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return bits(bits), build


@inline
def round_bits(u: Any, half: Any, cut: Any, odd: Any, keep: Any) -> Any:
    """Round a bit pattern to nearest even at bit ``cut``."""
    return (u + half + (shr(u, cut) & odd)) & keep


def _pick(op: str) -> Any:
    @intrinsic
    def pick(_ctx: Any, a: Any, b: Any) -> Any:
        def build(_context: Any, builder: Any, _sig: Any, args: Any) -> Any:
            return builder.select(builder.icmp_signed(op, args[0], args[1]), args[0], args[1])

        return a(a, a), build

    return pick


lesser, greater = _pick("<"), _pick(">")
"""Integer minimum and maximum without widening."""


# ---- Threefry-2x32, of 20 rounds and, for short streams, of 13 ------------------------------------


@inline
def _turn(x: Any, r: Any) -> Any:
    return (x << r) | (x >> (32 - r))


@inline
def _four(x0: Any, x1: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    x0 = x0 + x1
    x1 = _turn(x1, a) ^ x0
    x0 = x0 + x1
    x1 = _turn(x1, b) ^ x0
    x0 = x0 + x1
    x1 = _turn(x1, c) ^ x0
    x0 = x0 + x1
    x1 = _turn(x1, d) ^ x0
    return x0, x1


@inline
def twelve(k0: Any, k1: Any, block: Any, level: Any) -> Any:
    """Twelve rounds of blocks block .. block + 15, a multiple of 16, at a level of digits: in lanes."""
    k2 = k0 ^ k1 ^ PARITY
    x0 = lanes.counting(block) + k0
    x1 = lanes.splat(x0, (block >> 32) | (level << 26)) + k1
    x0, x1 = _four(x0, x1, 13, 15, 26, 6)
    x0, x1 = x0 + k1, x1 + (k2 + 1)
    x0, x1 = _four(x0, x1, 17, 29, 16, 24)
    x0, x1 = x0 + k2, x1 + (k0 + 2)
    x0, x1 = _four(x0, x1, 13, 15, 26, 6)
    return x0 + k0, x1 + (k1 + 3)


@inline
def threefry(k0: Any, k1: Any, block: Any, level: Any) -> Any:
    """The two words of those blocks after twenty rounds."""
    k2 = k0 ^ k1 ^ PARITY
    x0, x1 = twelve(k0, k1, block, level)
    x0, x1 = _four(x0, x1, 17, 29, 16, 24)
    x0, x1 = x0 + k1, x1 + (k2 + 4)
    x0, x1 = _four(x0, x1, 13, 15, 26, 6)
    return x0 + k2, x1 + (k0 + 5)


@inline
def _four_twice(x0: Any, x1: Any, y0: Any, y1: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """:func:`_four` of two chains, turn by turn: neither waits for itself."""
    x0, y0 = x0 + x1, y0 + y1
    x1, y1 = _turn(x1, a) ^ x0, _turn(y1, a) ^ y0
    x0, y0 = x0 + x1, y0 + y1
    x1, y1 = _turn(x1, b) ^ x0, _turn(y1, b) ^ y0
    x0, y0 = x0 + x1, y0 + y1
    x1, y1 = _turn(x1, c) ^ x0, _turn(y1, c) ^ y0
    x0, y0 = x0 + x1, y0 + y1
    x1, y1 = _turn(x1, d) ^ x0, _turn(y1, d) ^ y0
    return x0, x1, y0, y1


@inline
def _two_twelve(k0: Any, k1: Any, block: Any) -> Any:
    """:func:`twelve` of blocks block .. block + 15, and of the next sixteen, at the first level."""
    k2 = k0 ^ k1 ^ PARITY
    x0, y0 = lanes.counting(block) + k0, lanes.counting(block + 16) + k0
    x1, y1 = lanes.splat(x0, block >> 32) + k1, lanes.splat(x0, (block + 16) >> 32) + k1
    x0, x1, y0, y1 = _four_twice(x0, x1, y0, y1, 13, 15, 26, 6)
    x0, x1, y0, y1 = x0 + k1, x1 + (k2 + 1), y0 + k1, y1 + (k2 + 1)
    x0, x1, y0, y1 = _four_twice(x0, x1, y0, y1, 17, 29, 16, 24)
    x0, x1, y0, y1 = x0 + k2, x1 + (k0 + 2), y0 + k2, y1 + (k0 + 2)
    x0, x1, y0, y1 = _four_twice(x0, x1, y0, y1, 13, 15, 26, 6)
    return x0 + k0, x1 + (k1 + 3), y0 + k0, y1 + (k1 + 3)


@inline
def two_short(k0: Any, k1: Any, block: Any) -> Any:
    """The two words of blocks block .. block + 15 after thirteen rounds, and those of the next sixteen."""
    x0, x1, y0, y1 = _two_twelve(k0, k1, block)
    x0, y0 = x0 + x1, y0 + y1
    return x0, _turn(x1, 17) ^ x0, y0, _turn(y1, 17) ^ y0


@inline
def two_threefry(k0: Any, k1: Any, first: Any) -> Any:
    """The words of elements first .. first + 63, a multiple of 32, see halfulp.streams: in four lanes."""
    k2 = k0 ^ k1 ^ PARITY
    x0, x1, y0, y1 = _two_twelve(k0, k1, (first >> 5) << 4)
    x0, x1, y0, y1 = _four_twice(x0, x1, y0, y1, 17, 29, 16, 24)
    x0, x1, y0, y1 = x0 + k1, x1 + (k2 + 4), y0 + k1, y1 + (k2 + 4)
    x0, x1, y0, y1 = _four_twice(x0, x1, y0, y1, 13, 15, 26, 6)
    return x0 + k2, x1 + (k0 + 5), y0 + k2, y1 + (k0 + 5)


@kernel
def fill_words(words: Any, k0: Any, k1: Any, first: Any, n: Any) -> Any:
    """Words of elements first .. first + n - 1, at words[first % 32:], in groups of 32."""
    start = first - (first & 31)
    groups = (first - start + n + 31) >> 5
    for g in range(0, groups - 1, 2):
        a, b, c, d = two_threefry(k0, k1, start + g * 32)
        lanes.store(words, g * 32, a)
        lanes.store(words, g * 32 + 16, b)
        lanes.store(words, g * 32 + 32, c)
        lanes.store(words, g * 32 + 48, d)
    if groups & 1:
        last = groups - 1
        a, b = threefry(k0, k1, (start >> 5 << 4) + last * 16, 0)
        lanes.store(words, last * 32, a)
        lanes.store(words, last * 32 + 16, b)


@kernel
def word_at(k0: Any, k1: Any, i: Any, level: Any) -> Any:
    """One word of one element."""
    words = np.empty(32, np.uint32)
    a, b = threefry(k0, k1, (i >> 5) << 4, level)
    lanes.store(words, 0, a)
    lanes.store(words, 16, b)
    return words[i & 31]


@kernel
def digit_at(k0: Any, k1: Any, i: Any, level: Any) -> Any:
    """One digit of one element of the stream with 16."""
    words = np.empty(32, np.uint32)
    a, b = twelve(k0, k1, (i >> 6) << 4, level)
    a = a + b
    lanes.store(words, 0, a)
    lanes.store(words, 16, _turn(b, 17) ^ a)
    word = words[((i >> 5) & 1) * 16 + (i & 15)]
    return 0xFFFF - np.int64((word >> np.uint32(16 * ((i >> 4) & 1))) & np.uint32(0xFFFF))


@kernel
def exact_up(fraction: Any, k0: Any, k1: Any, i: Any, short: Any = False) -> Any:
    """U < fraction for element i, to the last digit; ``short``: in digits of 16 bits."""
    level = 0
    while fraction > 0.0:
        scaled = fraction * (65536.0 if short else 4294967296.0)
        digit = np.floor(scaled)
        drawn = np.float64(digit_at(k0, k1, i, level)) if short else np.float64(word_at(k0, k1, i, level))
        if drawn != digit:
            return bool(drawn < digit)
        fraction = scaled - digit
        level += 1
    return False
