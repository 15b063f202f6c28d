"""Memory asked for before it is needed.

A tile takes longer to work on than to read, but the processor reads ahead only while a loop runs over memory,
and not past a page. So the next tile is asked for when work on one begins.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

LINE = 64
"""Bytes of a cache line."""
READ, SECOND_LEVEL, DATA = 0, 2, 1


@intrinsic
def fetch(_ctx: Any, x: Any) -> Any:
    """Ask for the memory of a contiguous array, to be in the second-level cache soon."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        source = context.make_array(sig.args[0])(context, builder, args[0])
        word, whole, byte = ir.IntType(64), ir.IntType(32), ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [byte, whole, whole, whole])
        ask = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
        first = builder.ptrtoint(source.data, word)
        last = builder.add(first, builder.mul(source.nitems, source.itemsize))
        entry, check, body, leave = builder.block, *(builder.append_basic_block() for _ in range(3))
        builder.branch(check)
        builder.position_at_end(check)
        at = builder.phi(word)
        at.add_incoming(first, entry)
        builder.cbranch(builder.icmp_unsigned("<", at, last), body, leave)
        builder.position_at_end(body)
        how = [ir.Constant(whole, i) for i in (READ, SECOND_LEVEL, DATA)]
        builder.call(ask, [builder.inttoptr(at, byte), *how])
        at.add_incoming(builder.add(at, ir.Constant(word, LINE)), body)
        builder.branch(check)
        builder.position_at_end(leave)
        return context.get_dummy_value()

    return types.void(x), build
