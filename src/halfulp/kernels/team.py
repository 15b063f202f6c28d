"""Compiled code on the threads of an OpenMP team, without the interpreter.

A kernel does the tiles [first, last). :func:`launcher` makes of it a function that gives ranges of them to a
team: the block that every thread of the team runs is compiled too, so no thread waits for the interpreter's
lock, which costs a worker that sleeps on it as much as a kernel on 10**5 coordinates takes.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from llvmlite import ir
from numba import typeof, types
from numba._dispatcher import compute_fingerprint
from numba.extending import intrinsic

from halfulp.kernels.simd import kernel as compiled

WORD = ir.IntType(64)
DATA = ir.IntType(8).as_pointer()
BLOCK = ir.FunctionType(ir.VoidType(), [DATA])
FORK = ir.FunctionType(ir.VoidType(), [BLOCK.as_pointer(), DATA, ir.IntType(32), ir.IntType(32)])
ASK = ir.FunctionType(ir.IntType(32), [])
KERNEL, FIRST, COUNT, RANGES, TOTAL, FAILED, MY_NUMBER, THREADS, ARGUMENTS = range(9)
"""What the threads share: the code, the tiles, how many ranges they are cut into, the sum of what the kernel
returned, whether a call failed, whom to ask for the thread's number and for how many there are, and the
arguments."""


def _field(builder: Any, shared: Any, which: int) -> Any:
    return builder.gep(shared, [ir.Constant(ir.IntType(32), i) for i in (0, which)], inbounds=True)


def _block(context: Any, module: Any, shared_type: Any, returns: Any, takes: Any, name: str) -> Any:
    """What every thread runs: the range of its number, and others if there are fewer threads than ranges.

    Ranges are not given to whoever asks first: what thread i worked on in the last operation, torch's or
    ours, is in the caches of its core."""
    block = ir.Function(module, BLOCK, name=name)
    block.linkage = "internal"
    entry, check, work, leave = (block.append_basic_block(n) for n in ("entry", "check", "work", "leave"))
    builder = ir.IRBuilder(entry)
    shared = builder.bitcast(block.args[0], shared_type.as_pointer())
    kernel, first, count, ranges, *ask = (
        builder.load(_field(builder, shared, i)) for i in (KERNEL, FIRST, COUNT, RANGES, MY_NUMBER, THREADS)
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
    given = [builder.extract_value(arguments, j) for j in range(len(takes) - 2)]
    function = context.call_conv.get_function_type(returns, takes).as_pointer()
    status, result = context.call_conv.call_function(
        builder, builder.inttoptr(kernel, function), returns, takes, [*given, *ends]
    )
    if returns != types.none:
        builder.atomic_rmw("add", _field(builder, shared, TOTAL), result, "monotonic")
    failed = builder.zext(status.is_error, WORD)
    builder.atomic_rmw("or", _field(builder, shared, FAILED), failed, "monotonic")
    i.add_incoming(builder.add(i, threads), builder.block)
    builder.branch(check)

    builder.position_at_end(leave)
    builder.ret_void()
    return block


@intrinsic
def fork(
    _typing: Any, returns: Any, kernel: Any, team: Any, ranges: Any, first: Any, last: Any, arguments: Any
) -> Any:
    """kernel(*arguments, start, stop) over [first, last) in ranges; the sum of what the calls return, and
    whether one failed. ``returns``: a number if the kernel returns one, or None; ``kernel``: the address of
    its code for these types of arguments. ``team``: the addresses of ``GOMP_parallel``,
    ``omp_get_thread_num`` and ``omp_get_num_threads``, or zeros for this thread alone."""
    takes = (*arguments.types, types.intp, types.intp)
    gives = types.none if returns == types.none else types.int64

    def build(context: Any, builder: Any, whole: Any, args: Any) -> Any:
        _, kernel, team, ranges, first, last, given = args
        shared_type = ir.LiteralStructType([WORD] * ARGUMENTS + [given.type])
        name = f"{builder.function.name}.block"
        block = _block(context, builder.module, shared_type, gives, takes, name)
        with builder.goto_entry_block():
            shared = builder.alloca(shared_type)
        zero = ir.Constant(WORD, 0)
        parallel, number, threads = (builder.extract_value(team, i) for i in range(3))
        for which, value in (
            (KERNEL, kernel), (FIRST, first), (COUNT, builder.sub(last, first)), (RANGES, ranges),
            (TOTAL, zero), (FAILED, zero), (MY_NUMBER, number), (THREADS, threads), (ARGUMENTS, given),
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
    return whole(returns, types.intp, team, types.intp, types.intp, types.intp, arguments), build


@compiled
def _launch(returns: Any, kernel: Any, team: Any, ranges: Any, first: Any, last: Any, *arguments: Any) -> Any:
    return fork(returns, kernel, team, ranges, first, last, arguments)


@cache
def launcher(kernel: Any) -> Any:
    """``launch(team, ranges, first, last, *arguments)`` of a kernel, see :func:`fork`.

    What is launched is called by its address, so that the code around it is compiled once for types of
    arguments, not for every kernel, and no kernel is compiled a second time into it."""
    known: dict[Any, tuple[int | None, int]] = {}

    def launch(team: Any, ranges: int, first: int, last: int, *arguments: Any) -> Any:
        kinds = compute_fingerprint(arguments)  # of their types, as numba itself tells calls apart
        if kinds not in known:
            takes = (*map(typeof, arguments), types.intp, types.intp)
            kernel.compile(takes)
            done = kernel.overloads[takes]
            address = done.library.get_pointer_to_function(done.fndesc.llvm_func_name)
            assert done.signature.return_type in (types.none, types.int64), done.signature
            known[kinds] = None if done.signature.return_type == types.none else 0, address
        return _launch(*known[kinds], team, ranges, first, last, *arguments)

    return launch
