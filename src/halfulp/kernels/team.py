"""Compiled code on the threads of an OpenMP team, without the interpreter.

A kernel does the tiles [first, last). :func:`launcher` makes of it a function that gives ranges of them to a
team: the block that every thread of the team runs is compiled too, so no thread waits for the interpreter's
lock, which costs a worker that sleeps on it as much as a kernel on 10**5 coordinates takes.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from halfulp.kernels.simd import specialised

WORD = ir.IntType(64)
DATA = ir.IntType(8).as_pointer()
BLOCK = ir.FunctionType(ir.VoidType(), [DATA])
FORK = ir.FunctionType(ir.VoidType(), [BLOCK.as_pointer(), DATA, ir.IntType(32), ir.IntType(32)])
ASK = ir.FunctionType(ir.IntType(32), [])
FIRST, COUNT, RANGES, TOTAL, FAILED, MY_NUMBER, THREADS, ARGUMENTS = range(8)
"""What the threads share: the tiles, how many ranges they are cut into, the sum of what the kernel returned,
whether a call failed, whom to ask for the thread's number and for how many there are, and the arguments."""


def _field(builder: Any, shared: Any, which: int) -> Any:
    return builder.gep(shared, [ir.Constant(ir.IntType(32), i) for i in (0, which)], inbounds=True)


def _block(context: Any, module: Any, shared_type: Any, done: Any, sig: Any, name: str) -> Any:
    """What every thread runs: the range of its number, and others if there are fewer threads than ranges.

    Ranges are not given to whoever asks first: what thread i worked on in the last operation, torch's or
    ours, is in the caches of its core."""
    block = ir.Function(module, BLOCK, name=name)
    block.linkage = "internal"
    entry, check, work, leave = (block.append_basic_block(n) for n in ("entry", "check", "work", "leave"))
    builder = ir.IRBuilder(entry)
    shared = builder.bitcast(block.args[0], shared_type.as_pointer())
    first, count, ranges, *ask = (
        builder.load(_field(builder, shared, i)) for i in (FIRST, COUNT, RANGES, MY_NUMBER, THREADS)
    )
    arguments = builder.load(_field(builder, shared, ARGUMENTS))
    alone = builder.icmp_signed("==", ask[0], ir.Constant(WORD, 0))
    with builder.if_else(alone) as (one, many):
        with one:
            before = builder.block
        with many:
            told = [builder.zext(builder.call(builder.inttoptr(f, ASK.as_pointer()), []), WORD) for f in ask]
            after = builder.block
    number, threads = builder.phi(WORD), builder.phi(WORD)
    for phi, default, value in ((number, 0, told[0]), (threads, 1, told[1])):
        phi.add_incoming(ir.Constant(WORD, default), before)
        phi.add_incoming(value, after)
    start = builder.block
    builder.branch(check)

    builder.position_at_end(check)
    i = builder.phi(WORD)
    i.add_incoming(number, start)
    builder.cbranch(builder.icmp_signed("<", i, ranges), work, leave)

    builder.position_at_end(work)
    ends = [
        builder.add(first, builder.sdiv(builder.mul(count, k), ranges))
        for k in (i, builder.add(i, ir.Constant(WORD, 1)))
    ]
    given = [builder.extract_value(arguments, j) for j in range(len(sig.args) - 2)]
    status, result = context.call_internal_no_propagate(builder, done.fndesc, sig, [*given, *ends])
    if isinstance(sig.return_type, types.Integer):
        whole = context.cast(builder, result, sig.return_type, types.int64)
        builder.atomic_rmw("add", _field(builder, shared, TOTAL), whole, "monotonic")
    failed = builder.zext(status.is_error, WORD)
    builder.atomic_rmw("or", _field(builder, shared, FAILED), failed, "monotonic")
    i.add_incoming(builder.add(i, threads), builder.block)
    builder.branch(check)

    builder.position_at_end(leave)
    builder.ret_void()
    return block


@intrinsic
def fork(typing: Any, kernel: Any, team: Any, ranges: Any, first: Any, last: Any, arguments: Any) -> Any:
    """kernel(*arguments, start, stop) over [first, last) in ranges; the sum of what the calls return, and
    whether one failed. ``team``: the addresses of ``GOMP_parallel``, ``omp_get_thread_num`` and
    ``omp_get_num_threads``, or zeros for this thread alone."""
    sig = kernel.get_call_type(typing, (*arguments.types, types.intp, types.intp), {})
    done = kernel.dispatcher.get_compile_result(sig)

    def build(context: Any, builder: Any, whole: Any, args: Any) -> Any:
        _, team, ranges, first, last, given = args
        context.active_code_library.add_linking_library(done.library)
        shared_type = ir.LiteralStructType([WORD] * ARGUMENTS + [given.type])
        name = f"{builder.function.name}.block"
        block = _block(context, builder.module, shared_type, done, sig, name)
        with builder.goto_entry_block():
            shared = builder.alloca(shared_type)
        zero = ir.Constant(WORD, 0)
        parallel, number, threads = (builder.extract_value(team, i) for i in range(3))
        for which, value in (
            (FIRST, first), (COUNT, builder.sub(last, first)), (RANGES, ranges), (TOTAL, zero),
            (FAILED, zero), (MY_NUMBER, number), (THREADS, threads), (ARGUMENTS, given),
        ):  # fmt: skip
            builder.store(value, _field(builder, shared, which))
        data = builder.bitcast(shared, DATA)
        with builder.if_else(builder.icmp_signed("!=", parallel, zero)) as (together, alone):
            with together:
                call = builder.inttoptr(parallel, FORK.as_pointer())
                wanted = builder.trunc(ranges, ir.IntType(32))
                builder.call(call, [block, data, wanted, ir.Constant(ir.IntType(32), 0)])
            with alone:
                builder.call(block, [data])
        found = [builder.load(_field(builder, shared, i)) for i in (TOTAL, FAILED)]
        return context.make_tuple(builder, whole.return_type, found)

    whole = types.UniTuple(types.int64, 2)
    return whole(kernel, team, types.intp, types.intp, types.intp, arguments), build


KERNEL: Any = None  # in copies of the function below


def _launch(team: Any, ranges: Any, first: Any, last: Any, *arguments: Any) -> Any:
    return fork(KERNEL, team, ranges, first, last, arguments)


@cache
def launcher(kernel: Any) -> Any:
    """``launch(team, ranges, first, last, *arguments)`` of a kernel, see :func:`fork`."""
    function, stamp = kernel.py_func, kernel._cache._cache_file._source_stamp
    # By the kernel's own stamp: a kernel elsewhere may change when nothing here does.
    return specialised(_launch, f"{function.__module__}.{function.__qualname__}.{stamp[:16]}", KERNEL=kernel)
