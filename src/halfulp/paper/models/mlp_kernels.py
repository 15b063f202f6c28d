"""The inner loops of small tanh networks, compiled by numba, with every sum in a fixed order.

Arrays are ``[unit, example]``: the examples of one unit lie side by side, so loops run over examples and
fill vector registers. The compiler may not reorder additions (no fastmath, no fused multiply-add), so a
result depends neither on the width of the registers nor on the processor:

    forward    z[o] = ((b[o] + W[o,0] x[0]) + W[o,1] x[1]) + ...        in the order of the inputs
    backward   the same over the outputs, from zero
    gradient   sum over examples of delta[o] x[k]: example i is added to lane i % 8, in the order of
               examples, then the upper lanes to the lower ones (4, 2, 1)

The number of examples is a multiple of 16; what is padded has delta zero. At 64 x 8 weights a BLAS call costs
more than the product, and its order of sums differs between processors, as ``tanh`` does between libraries.
So ``tanh`` is here, as arithmetic: with y = 2 |x| = k ln 2 + r, |r| <= ln(2) / 2,

    expm1(y) = 2**k expm1(r) + (2**k - 1)        tanh |x| = expm1(y) / (expm1(y) + 2)

and expm1(r) by its series to r**13 (the rest is below 2e-17 of it). Relative error below 4e-16.

Weights are one flat vector: for each layer ``W`` (outputs, inputs) by rows, then ``b``. A network is
``(sizes, biased, loss)``, a batch ``(x, y, n)``, scratch ``(activations, deltas, a row of ones)``.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np

from halfulp.paper.models.rounding_kernels import (
    CUT,
    EMIN,
    EXPONENT,
    bits_of,
    cgutils,
    float_like,
    intrinsic,
    ir,
    kernel,
    nearest,
    round_pattern,
    stochastic,
    types,
)

PADDING = 16
"""Examples come in whole blocks of this many."""
SQUARED, CROSS_ENTROPY = 0, 1
DESCENT, ADAM = 0, 1
KEPT, NEAREST, STOCHASTIC = 0, 1, 2
LIMIT = 2.0**300
"""A weight beyond this magnitude, or not a number, has diverged; squares of what is below are finite."""


# ---- elementary functions -------------------------------------------------------------------------------

LOG2E, LN2_HI, LN2_LO = 1.4426950408889634, 6.93147180369123816490e-01, 1.90821492927058770002e-10
ROUND = 6755399441055744.0  # 1.5 * 2**52: adding it leaves the nearest integer in the low bits
C2, C3, C4, C5, C6, C7 = 1 / 2, 1 / 6, 1 / 24, 1 / 120, 1 / 720, 1 / 5040
C8, C9, C10, C11 = 1 / 40320, 1 / 362880, 1 / 3628800, 1 / 39916800
C12, C13 = 1 / 479001600, 1 / 6227020800


@kernel
def power_and_rest(y: Any) -> Any:
    """Return 2**k and expm1(r) of y = k ln 2 + r."""
    t = y * LOG2E + ROUND
    n = t - ROUND
    r = (y - n * LN2_HI) - n * LN2_LO
    p = C7 + r * (C8 + r * (C9 + r * (C10 + r * (C11 + r * (C12 + r * C13)))))
    p = C2 + r * (C3 + r * (C4 + r * (C5 + r * (C6 + r * p))))
    return float_like(y, (bits_of(t) + 1023) << 52), r + (r * r) * p


@kernel
def tanh_row(x: Any) -> None:
    """Replace values by their tanh."""
    for i in range(x.size):
        v = np.float64(x[i])
        s, p = power_and_rest(44.0 if abs(v) > 22.0 else abs(v) + abs(v))  # tanh(22) rounds to one
        e = s * p + (s - 1.0)
        q = e / (e + 2.0)
        x[i] = -q if v < 0.0 else q


@kernel
def exp_row(x: Any) -> None:
    """Replace values from -inf up to 0 by their exp."""
    for i in range(x.size):
        v = np.float64(x[i])
        s, p = power_and_rest(-700.0 if v < -700.0 else v)
        x[i] = s + s * p


@kernel
def fill(x: Any, value: Any) -> None:
    """Set every element; slice assignment does the same but compiles for seconds."""
    for i in range(x.size):
        x[i] = value


# ---- sums in a fixed order ------------------------------------------------------------------------------
#
# The lanes are written as vector instructions, because an accumulator that is an array would live in memory.


class _Rows:
    """The rows of a C-ordered matrix as vectors of eight numbers, for building instructions."""

    def __init__(self, context: Any, builder: Any, kind: Any, value: Any) -> None:
        matrix = cgutils.create_struct_proxy(kind)(context, builder, value)
        self.builder, self.data = builder, matrix.data
        self.count, self.columns = (builder.extract_value(matrix.shape, i) for i in (0, 1))
        self.vector = ir.VectorType(context.get_value_type(kind.dtype), 8)
        self.align = int(kind.dtype.bitwidth // 8)  # rows need not start at a multiple of a vector

    def from_row(self, first: Any, number: int) -> list[Any]:
        """Return consecutive row numbers; beyond the last row, the last is repeated."""
        last = self.builder.sub(self.count, first.type(1))
        rows = [self.builder.add(first, first.type(i)) for i in range(number)]
        return [self.builder.select(self.builder.icmp_signed("<", r, last), r, last) for r in rows]

    def load(self, row: Any, column: Any) -> Any:
        place = self.builder.gep(self.data, [self.builder.add(self.builder.mul(row, self.columns), column)])
        return self.builder.load(self.builder.bitcast(place, self.vector.as_pointer()), align=self.align)


def _lane_dots(high: int, low: int) -> Any:
    @intrinsic
    def block(_context: Any, out: Any, across: Any, x: Any, o: Any, y: Any, k: Any) -> Any:
        """out[i * across + j] = the sum of products of rows x[i] and y[j], for rows from o and from k on."""

        def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            left, right = (_Rows(context, builder, sig.args[i], args[i]) for i in (2, 4))
            target = cgutils.create_struct_proxy(sig.args[0])(context, builder, args[0]).data
            pairs = list(product(left.from_row(args[3], high), right.from_row(args[5], low)))
            sums = [cgutils.alloca_once(builder, left.vector) for _ in pairs]
            for kept in sums:
                builder.store(ir.Constant(left.vector, None), kept)
            word = left.columns.type
            with cgutils.for_range_slice(builder, word(0), left.columns, word(8)) as (at, _):
                for (row, column), kept in zip(pairs, sums, strict=True):  # equal loads are made one
                    both = builder.fmul(left.load(row, at), right.load(column, at))
                    builder.store(builder.fadd(builder.load(kept), both), kept)
            for (row, column), kept in zip(pairs, sums, strict=True):
                at = builder.add(builder.mul(row, args[1]), column)
                builder.store(_halved(builder, builder.load(kept)), builder.gep(target, [at]))
            return context.get_dummy_value()

        return types.void(out, types.intp, x, types.intp, y, types.intp), build

    return block


def _halved(builder: Any, v: Any) -> Any:
    """Return the sum of eight lanes, by adding the upper half to the lower three times."""
    for half in (4, 2, 1):
        kind = ir.VectorType(ir.IntType(32), half)
        low, high = (ir.Constant(kind, [start + j for j in range(half)]) for start in (0, half))
        v = builder.fadd(builder.shuffle_vector(v, v, low), builder.shuffle_vector(v, v, high))
    return builder.extract_element(v, ir.IntType(32)(0))


four_by_four, four_by_one = _lane_dots(4, 4), _lane_dots(4, 1)


@kernel
def dots(x: Any, y: Any, out: Any) -> None:
    """out[i, j], flat by rows, = the sum of products of x[i] and y[j]: in eight lanes, then by halving."""
    n = y.shape[0]
    for o in range(0, x.shape[0], 4):
        if n == 1:
            four_by_one(out, n, x, o, y, 0)
        else:
            for k in range(0, n, 4):
                four_by_four(out, n, x, o, y, k)


@kernel
def mix(out: Any, coefficients: Any, across: Any, along: Any, rows: Any) -> None:
    """out[o] += the sum over j of coefficients[o * across + j * along] * rows[j], in the order of j."""
    fours = rows.shape[0] // 4 * 4
    for o in range(out.shape[0]):
        here, c = out[o], coefficients[o * across :]
        for j in range(0, fours, 4):  # four at a time: out[o] is read and written a quarter as often
            c0, c1, c2, c3 = c[j * along], c[(j + 1) * along], c[(j + 2) * along], c[(j + 3) * along]
            r0, r1, r2, r3 = rows[j], rows[j + 1], rows[j + 2], rows[j + 3]
            for i in range(here.size):
                here[i] = (((here[i] + c0 * r0[i]) + c1 * r1[i]) + c2 * r2[i]) + c3 * r3[i]
        for j in range(fours, rows.shape[0]):
            c0, r0 = c[j * along], rows[j]
            for i in range(here.size):
                here[i] = here[i] + c0 * r0[i]


# ---- the network ----------------------------------------------------------------------------------------


@kernel
def forward(w: Any, sizes: Any, biased: Any, x: Any, acts: Any) -> None:
    """Write activations of every layer into ``acts``, one row per unit; the last rows are the outputs."""
    at, row, before = 0, 0, x
    for layer in range(sizes.size - 1):
        n_in, n_out = sizes[layer], sizes[layer + 1]
        here = acts[row : row + n_out]
        for o in range(n_out):
            fill(here[o], w[at + n_out * n_in + o] if biased else w.dtype.type(0))
        mix(here, w[at:], n_in, 1, before)
        if layer < sizes.size - 2:
            tanh_row(here.reshape(here.size))
        at += n_out * (n_in + biased)
        row += n_out
        before = here


@kernel
def softmax(out: Any, y: Any, n: Any, scratch: Any) -> Any:
    """Turn outputs into (probability - target); return the summed cross-entropy of the first n examples."""
    classes, top, norm = out.shape[0], scratch[0], scratch[1]
    for i in range(top.size):
        top[i] = out[0, i]
        norm[i] = 0
    for c in range(1, classes):
        row = out[c]
        for i in range(top.size):
            top[i] = max(top[i], row[i])
    loss = 0.0
    for c in range(classes):
        row = out[c]
        for i in range(row.size):
            row[i] = row[i] - top[i]
        for i in range(n):
            loss -= y[c, i] * row[i]
        exp_row(row)
        for i in range(row.size):
            norm[i] = norm[i] + row[i]
    for i in range(n):
        loss += np.log(np.float64(norm[i]))
    for c in range(classes):
        row, target = out[c], y[c]
        for i in range(row.size):
            row[i] = row[i] / norm[i] - target[i]
    return loss


@kernel
def output_error(out: Any, y: Any, n: Any, loss: Any, scratch: Any) -> Any:
    """Turn outputs into the derivative of the loss by them, zero for padding; return the loss.

    squared: mean over examples of |out - y|**2; cross-entropy: mean of -log p(target).
    """
    if loss == CROSS_ENTROPY:
        value = softmax(out, y, n, scratch) / n
    else:
        value = 0.0
        for c in range(out.shape[0]):
            row, target = out[c], y[c]
            for i in range(row.size):
                row[i] = row[i] - target[i]
            fill(row[n:], 0)
            for i in range(n):
                value += np.float64(row[i]) * np.float64(row[i])
        value /= n
    count = out.dtype.type(n if loss == CROSS_ENTROPY else 0.5 * n)
    for c in range(out.shape[0]):
        row = out[c]
        fill(row[n:], 0)
        for i in range(row.size):
            row[i] = row[i] / count
    return value


@kernel
def gradient(w: Any, net: Any, batch: Any, scratch: Any, g: Any) -> Any:
    """Write the gradient at w over the first n examples into g, and return the loss."""
    sizes, biased, loss = net
    x, y, n = batch
    acts, deltas, ones = scratch
    forward(w, sizes, biased, x, acts)
    layers = sizes.size - 1
    row = acts.shape[0] - sizes[layers]
    value = output_error(acts[row:], y, n, loss, deltas)
    at, here = w.size, acts[row:]
    for layer in range(layers - 1, -1, -1):
        n_in, n_out = sizes[layer], sizes[layer + 1]
        at -= n_out * (n_in + biased)
        before = acts[row - n_in : row] if layer > 0 else x
        dots(here, before, g[at:])
        if biased:
            dots(here, ones, g[at + n_out * n_in :])
        if layer > 0:
            row -= n_in
            below = deltas[row : row + n_in]
            d, a = below.reshape(below.size), before.reshape(below.size)
            fill(d, 0)
            mix(below, w[at:], 1, n_in, here)
            for i in range(d.size):
                d[i] = d[i] - d[i] * (a[i] * a[i])
            here = below
    return value


@kernel
def error(w: Any, net: Any, batch: Any, acts: Any) -> Any:
    """Return the loss of w on a batch."""
    sizes, biased, loss = net
    x, y, n = batch
    forward(w, sizes, biased, x, acts)
    last = sizes[sizes.size - 1]
    return output_error(acts[acts.shape[0] - last :], y, n, loss, np.empty((2, x.shape[1]), x.dtype))


# ---- optimizers, events and write-back ------------------------------------------------------------------


@kernel
def propose(g: Any, d: Any, optimizer: Any, rate: Any, m: Any, v: Any, betas: Any, powers: Any) -> None:
    """The proposal d: -rate g, or Adam's (without weight decay); ``powers`` holds beta_1**t and beta_2**t."""
    if optimizer == ADAM:
        b1, b2, eps = betas[0], betas[1], betas[2]
        step, root = rate / (1.0 - powers[0]), np.sqrt(1.0 - powers[1])
        for i in range(g.size):
            m[i] = b1 * m[i] + (1.0 - b1) * g[i]
            v[i] = b2 * v[i] + (1.0 - b2) * (g[i] * g[i])
            d[i] = -step * m[i] / (np.sqrt(v[i]) / root + eps)
    else:
        for i in range(g.size):
            d[i] = -rate * g[i]


@kernel
def audit(w: Any, d: Any, k: Any, up: Any, counts: Any) -> None:
    """For each grid (a row of k): coordinates frozen by code at Q(w), and by symmetric spacing at w."""
    for j in range(k.shape[0]):
        cut, exponent, emin = k[j, CUT], k[j, EXPONENT], k[j, EMIN]
        frozen, symmetric = 0, 0
        for i in range(w.size):
            u = np.int64(bits_of(w[i]))
            q = float_like(d[i], round_pattern(u, cut))
            frozen += float_like(d[i], round_pattern(np.int64(bits_of(q + d[i])), cut)) == q
            symmetric += abs(d[i]) * up[j] < float_like(d[i], max(u & exponent, emin))
        counts[j, 0], counts[j, 1] = frozen, symmetric


@kernel
def write(w: Any, d: Any, z: Any, r: Any, how: Any, k: Any, key: Any) -> None:
    """Compute z = w + d, and r = z as it is stored."""
    for i in range(w.size):
        z[i] = w[i] + d[i]
    if how == NEAREST:
        nearest(z, r, k)
    elif how == STOCHASTIC:
        stochastic(z, r, k, key)
    else:
        for i in range(z.size):
            r[i] = z[i]


@kernel
def train(
    state: Any, net: Any, batch: Any, test: Any, rule: Any, grids: Any, store: Any, span: Any, scratch: Any,
    out: Any,
) -> Any:  # fmt: skip
    """Take steps until the arrays of ``out`` are full or a weight diverges; return their number.

    The arguments are tuples of the arrays that :class:`halfulp.paper.models.mlp.Trainer` owns.
    """
    w, g, d, z, m, v, moved = state
    optimizer, rate, betas, powers = rule
    audited, up = grids
    how, k, keys = store
    lo, hi = span
    inner, acts_test = scratch
    losses, tests, frozen, counts, squares, never = out
    for t in range(losses.size):
        losses[t] = gradient(w, net, batch, inner, g)
        propose(g, d, optimizer, rate, m, v, betas, powers[t])
        audit(w[lo:hi], d[lo:hi], audited, up, counts[t])
        write(w, d, z, g, how, k, keys[t])  # g has been used: it takes the new weights
        ww, dd, same, still, fine = 0.0, 0.0, 0, 0, True
        for i in range(w.size):
            fine = fine and abs(g[i]) < LIMIT
            if lo <= i < hi:
                ww += np.float64(w[i]) * np.float64(w[i])
                dd += np.float64(d[i]) * np.float64(d[i])
                same += g[i] == w[i]
                moved[i] = moved[i] | (g[i] != w[i])
                still += not moved[i]
            w[i] = g[i]
        squares[t, 0], squares[t, 1], frozen[t], never[t] = ww, dd, same, still
        if test[2] > 0:
            tests[t] = error(w, net, test, acts_test)
        if not fine:
            return t + 1
    return losses.size
