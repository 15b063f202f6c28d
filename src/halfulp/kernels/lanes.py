"""Sixteen values at once, for loops that the compiler would not vectorise by itself.

A :class:`Lanes` is a vector of floats, integers or truths that lives in registers of whatever width the
processor has. Compiled code loads and stores them, and writes the arithmetic as for one value::

    v = load(x, i)
    r = select(v < floor, splat(v, 0.0), v)
    store(out, i, r)

Scalars beside lanes are spread over them, and cut to their width. Comparisons give truths; ``mask``
makes sixteen bits of those, lowest first.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core.cgutils import get_or_insert_function
from numba.core.extending import models, register_model
from numba.extending import intrinsic, overload

COUNT = 16


class Lanes(types.Type):  # type: ignore[misc]  # numba has no types
    """The compiled type of sixteen values."""

    def __init__(self, dtype: Any) -> None:
        self.dtype = dtype
        super().__init__(name=f"Lanes({dtype})")


@register_model(Lanes)
class _Model(models.PrimitiveModel):  # type: ignore[misc]  # numba has no types
    def __init__(self, manager: Any, kind: Any) -> None:
        element = ir.IntType(1) if kind.dtype == types.boolean else manager[kind.dtype].get_value_type()
        super().__init__(manager, kind, ir.VectorType(element, COUNT))


def _spread(builder: Any, kind: Any, wanted: Any, value: Any) -> Any:
    """A value as lanes of the wanted LLVM vector type: itself, or a scalar in every lane."""
    if isinstance(kind, Lanes):
        return value
    element = wanted.element
    if isinstance(element, ir.IntType):
        width = value.type.width
        if width > element.width:
            value = builder.trunc(value, element)
        elif width < element.width:
            value = builder.sext(value, element)
    elif isinstance(value.type, ir.IntType):
        value = builder.sitofp(value, element)
    elif value.type != element:
        value = (
            builder.fptrunc(value, element)
            if isinstance(element, ir.FloatType)
            else builder.fpext(value, element)
        )
    one = builder.insert_element(ir.Constant(wanted, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), COUNT), [0] * COUNT)
    return builder.shuffle_vector(one, ir.Constant(wanted, ir.Undefined), zeros)


def _operator(op: Any, make: Callable[[Any, bool, Any, Any], Any], truth: bool = False) -> None:
    """Teach the compiler a two-sided operator on lanes: make(builder, floating, a, b)."""

    @intrinsic
    def apply(_ctx: Any, a: Any, b: Any) -> Any:
        kind = a if isinstance(a, Lanes) else b

        def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            wide = context.get_value_type(kind)
            both = (_spread(builder, k, wide, v) for k, v in zip(sig.args, args, strict=True))
            return make(builder, isinstance(kind.dtype, types.Float), *both)

        return (Lanes(types.boolean) if truth else kind)(a, b), build

    @overload(op)
    def _apply(a: Any, b: Any) -> Any:
        if not isinstance(a, Lanes) and not isinstance(b, Lanes):
            return None

        def both(a: Any, b: Any) -> Any:
            return apply(a, b)

        return both


def _arithmetic(op: Any, whole: str, real: str = "") -> None:
    def make(builder: Any, floating: bool, a: Any, b: Any) -> Any:
        return getattr(builder, real if floating else whole)(a, b)

    _operator(op, make)


def _comparison(op: Any, sign: str) -> None:
    def make(builder: Any, floating: bool, a: Any, b: Any) -> Any:
        if not floating:
            return builder.icmp_signed(sign, a, b)
        return (builder.fcmp_unordered if sign == "!=" else builder.fcmp_ordered)(sign, a, b)

    _operator(op, make, truth=True)


_arithmetic(operator.add, "add", "fadd")
_arithmetic(operator.sub, "sub", "fsub")
_arithmetic(operator.mul, "mul", "fmul")
_arithmetic(operator.truediv, "sdiv", "fdiv")
_arithmetic(operator.and_, "and_")
_arithmetic(operator.or_, "or_")
_arithmetic(operator.xor, "xor")
_arithmetic(operator.lshift, "shl")
_arithmetic(operator.rshift, "lshr")
_comparison(operator.lt, "<")
_comparison(operator.le, "<=")
_comparison(operator.gt, ">")
_comparison(operator.ge, ">=")
_comparison(operator.eq, "==")
_comparison(operator.ne, "!=")


def _place(context: Any, builder: Any, kind: Any, array: Any, index: Any) -> Any:
    start = builder.gep(context.make_array(kind)(context, builder, array).data, [index])
    return builder.bitcast(start, context.get_value_type(Lanes(kind.dtype)).as_pointer())


@intrinsic
def load(_ctx: Any, array: Any, i: Any) -> Any:
    """array[i:i + 16] of a contiguous array."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.load(_place(context, builder, sig.args[0], *args), align=array.dtype.bitwidth // 8)

    return Lanes(array.dtype)(array, types.intp), build


@intrinsic
def store(_ctx: Any, array: Any, i: Any, lanes: Any) -> Any:
    """array[i:i + 16] = lanes."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        builder.store(
            args[2], _place(context, builder, sig.args[0], *args[:2]), align=array.dtype.bitwidth // 8
        )
        return context.get_dummy_value()

    return types.none(array, types.intp, lanes), build


@intrinsic
def splat(_ctx: Any, like: Any, x: Any) -> Any:
    """x in every lane."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _spread(builder, sig.args[1], context.get_value_type(like), args[1])

    return like(like, x), build


@intrinsic
def counting(_ctx: Any, first: Any) -> Any:
    """first, first + 1, ... as unsigned 32-bit lanes."""
    kind = Lanes(types.uint32)

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        wide = context.get_value_type(kind)
        return builder.add(
            _spread(builder, sig.args[0], wide, args[0]), ir.Constant(wide, list(range(COUNT)))
        )

    return kind(first), build


@intrinsic
def bits_of(_ctx: Any, x: Any) -> Any:
    """The bit patterns of floats."""
    kind = Lanes(types.int32 if x.dtype == types.float32 else types.int64)

    def build(context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        return builder.bitcast(args[0], context.get_value_type(kind))

    return kind(x), build


@intrinsic
def floats_of(_ctx: Any, x: Any) -> Any:
    """The floats with these bit patterns."""
    kind = Lanes(types.float32 if x.dtype.bitwidth == 32 else types.float64)

    def build(context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        return builder.bitcast(args[0], context.get_value_type(kind))

    return kind(x), build


@intrinsic
def widened(_ctx: Any, x: Any) -> Any:
    """Container elements as floats: bfloat16 patterns (uint16) become float32."""
    kind = Lanes(types.float32) if x.dtype == types.uint16 else x

    def build(context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        if kind == x:
            return args[0]
        wide = context.get_value_type(Lanes(types.int32))
        patterns = builder.shl(builder.zext(args[0], wide), ir.Constant(wide, [16] * COUNT))
        return builder.bitcast(patterns, context.get_value_type(kind))

    return kind(x), build


@intrinsic
def upper(_ctx: Any, x: Any) -> Any:
    """The upper halves of 32-bit lanes, as uint16."""
    kind = Lanes(types.uint16)

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        wide = context.get_value_type(sig.args[0])
        halves = builder.lshr(args[0], ir.Constant(wide, [16] * COUNT))
        return builder.trunc(halves, context.get_value_type(kind))

    return kind(x), build


@intrinsic
def select(_ctx: Any, truth: Any, a: Any, b: Any) -> Any:
    """a where true, else b."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        wide = context.get_value_type(a if isinstance(a, Lanes) else b)
        both = [_spread(builder, k, wide, v) for k, v in zip(sig.args[1:], args[1:], strict=True)]
        return builder.select(args[0], *both)

    return (a if isinstance(a, Lanes) else b)(truth, a, b), build


@intrinsic
def mask(_ctx: Any, truth: Any) -> Any:
    """Sixteen truths as bits, lowest first."""

    def build(_context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(COUNT))

    return types.uint16(truth), build


def _unary(name: str, kind: Any, make: Callable[[Any, Any, Any], Any]) -> Any:
    """An operation on float32 or uint32 lanes whose result has another element type."""

    @intrinsic
    def apply(_ctx: Any, x: Any) -> Any:
        result = Lanes(kind)

        def build(context: Any, builder: Any, _sig: Any, args: Any) -> Any:
            return make(builder, args[0], context.get_value_type(result))

        return result(x), build

    apply.__doc__ = name
    return apply


def _floor(builder: Any, x: Any, wide: Any) -> Any:
    found = get_or_insert_function(builder.module, ir.FunctionType(wide, [wide]), f"llvm.floor.v{COUNT}f32")
    return builder.call(found, [x])


def _sqrt(builder: Any, x: Any, wide: Any) -> Any:
    found = get_or_insert_function(builder.module, ir.FunctionType(wide, [wide]), f"llvm.sqrt.v{COUNT}f32")
    return builder.call(found, [x])


floor = _unary("The floats rounded down.", types.float32, _floor)
sqrt = _unary("Square roots, correctly rounded.", types.float32, _sqrt)
to_int = _unary(
    "Floats as 32-bit integers, rounded towards zero.", types.int32, lambda b, x, wide: b.fptosi(x, wide)
)
to_float = _unary("Signed integers as floats.", types.float32, lambda b, x, wide: b.sitofp(x, wide))
bytes_of = _unary("The low bytes of 32-bit lanes.", types.uint8, lambda b, x, wide: b.trunc(x, wide))
chars_of = _unary("The low bytes of lanes, signed.", types.int8, lambda b, x, wide: b.trunc(x, wide))
shorts_of = _unary("The low halves of lanes, signed.", types.int16, lambda b, x, wide: b.trunc(x, wide))
from_unsigned = _unary("Unsigned bytes as integers.", types.int32, lambda b, x, wide: b.zext(x, wide))
from_signed = _unary("Signed bytes and halves as integers.", types.int32, lambda b, x, wide: b.sext(x, wide))
signed = _unary("Unsigned lanes, taken as signed.", types.int32, lambda b, x, wide: b.bitcast(x, wide))


def _paired(first: int) -> Any:
    """Bytes first and first + 1 of every lane, and the same exchanged: (a, b) to (a, b, b, a)."""
    order = [4 * i + first + b for i in range(COUNT) for b in (0, 1, 1, 0)]

    def make(builder: Any, x: Any, wide: Any) -> Any:
        small = ir.VectorType(ir.IntType(8), 4 * COUNT)
        picked = ir.Constant(ir.VectorType(ir.IntType(32), 4 * COUNT), order)
        bytes_ = builder.bitcast(x, small)
        return builder.bitcast(builder.shuffle_vector(bytes_, bytes_, picked), wide)

    return make


lower_pair = _unary(
    "The lower halves of lanes; above each the same, bytes exchanged.", types.uint32, _paired(0)
)
upper_pair = _unary(
    "The upper halves of lanes; above each the same, bytes exchanged.", types.uint32, _paired(2)
)


@intrinsic
def fma(_ctx: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once. One of them is lanes at least; scalars are spread."""
    kind = next(k for k in (a, b, c) if isinstance(k, Lanes))

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        wide = context.get_value_type(kind)
        each = [_spread(builder, k, wide, v) for k, v in zip(sig.args, args, strict=True)]
        shape = ir.FunctionType(wide, [wide] * 3)
        return builder.call(get_or_insert_function(builder.module, shape, f"llvm.fma.v{COUNT}f32"), each)

    return kind(a, b, c), build
