"""The obvious one-pass step: NumPy, one idea a line. It defines the fast ones.

Adam and AdamW as torch's *fused* step on the CPU has them (``fused=True``, float32), bit for bit::

    g  = g + wd w           (Adam)        or   w = (1 - lr wd) w      (AdamW)
    m  = m + (1 - b1) (g - m)             v  = b2 v + ((1 - b2) g) g
    z  = w - (lr / c1) m / (sqrt(v) / sqrt(c2) + eps)

where c = 1 - b**t, every operation is rounded to float32 and a product that is added is not rounded before
(an FMA). Numbers such as lr / c1 are computed in double precision first. torch's vectors take the last
``numel % 8`` elements otherwise: there b2 v is the product that is not rounded. ``plain`` says where that
begins; :class:`halfulp.AdamW` has no such end, so that its results do not depend on how a tensor is sharded.

torch's other steps, ``foreach`` and the plain loop, have no such end either. They differ in one thing: their
square root is that of ``torch.sqrt``, which MKL makes and does not round correctly (``torchs_root``).

SGD with momentum b and dampening as torch's fused step has it, with the same rule for the last elements; at
the first step m is g. Without momentum there is no m, and g takes its place. The other steps are the same
without that rule::

    g  = g + wd w      m  = b m + (1 - dampening) g      z  = w - lr m   or   w - lr (g + b m)  (Nesterov)

Lion (Chen et al. 2023), of which torch has none, so that every operation is rounded, products as well::

    w  = (1 - lr wd) w    z  = w - lr sign(b1 m + (1 - b1) g)      m  = b2 m + (1 - b2) g

Then the policy makes stored values of z as :func:`halfulp.kernels.reference.write_back` does. Moments in
bfloat16 are rounded stochastically, with one draw of 16 digits a weight from a short stream of their own: the
first moment takes the draw, the second the same with its two bytes exchanged. Each is right on average; that
one goes up says next to nothing of the other, whose leading eight digits are others (the probability of both
is off the product by less than 2**-7). The step itself uses moments before they are rounded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from halfulp.kernels import reference
from halfulp.numbers.grids import Grid
from halfulp.numbers.streams import Stream

Array = npt.NDArray[Any]
real = np.float32

ADAMW, ADAM, SGD, NESTEROV, LION, PLAIN = 0, 1, 2, 3, 4, 5
"""Rules. Those from SGD on have no second moment; PLAIN, SGD without momentum, has none."""
NOTHING, CARRY, ERROR, MASTER, REMAINDER = 0, 1, 2, 3, 4
"""The ways in which a policy keeps what it does not write: nothing; a carry beside the weight; the error in
the first moment; a master; the bits of a master beyond its bfloat16 weight, 16 or 8 of them."""
BFLOAT, FLOAT, WHOLE = 0, 1, 2
"""The kinds of stored values: bfloat16's patterns; sign and index; two's complement times a quantum."""

LARGEST = 0x7F7F7FFF
"""The largest master whose nearest bfloat16, ties away from zero, is finite."""

RATES = ("decay", "share", "beta2", "rest2", "root", "inverse", "eps", "step", "feed", "beta1")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A parameter group's numbers at one step.

    ``t`` is the number of this step, from 1; for SGD, whose momentum is ``betas[0]``, only whether it is
    the first. ``torchs_root``: Adam's square root is ``torch.sqrt``, else the rounded one.
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    rule: int = ADAMW
    t: int = 1
    decay_exact: bool = False
    dampening: float = 0.0
    torchs_root: bool = False


class Policy(NamedTuple):
    """The rule that turns proposals into stored values.

    It says how to round, what to keep (``kept`` is updated in place), and the random draws of stored values
    and of moments in bfloat16.
    """

    mode: int = reference.NEAREST
    keeps: int = NOTHING
    kept: Any = None
    stream: Stream | None = None
    drawing: Stream | None = None


@dataclass(frozen=True)
class RateRow:
    """The form of :class:`Settings` that a kernel call takes."""

    rule: int
    rates: tuple[float, ...]
    small: bool
    torchs_root: bool = False


@lru_cache(maxsize=64)
def rates(s: Settings | RateRow) -> Array:
    """The numbers of a step, float32: RATES. All tensors of a group have the same, so they are kept."""
    if isinstance(s, RateRow):
        return np.array(s.rates, dtype=real)
    with np.errstate(over="ignore"):  # a rate of 1e-40 has no finite factor to feed errors back by
        of_rule = _of_adam(s) if s.rule in (ADAMW, ADAM) else _of_one_moment(s)
    values = dict.fromkeys(RATES, real(0)) | of_rule
    return np.array([values[name] for name in RATES], dtype=real)


def _of_one_moment(s: Settings) -> dict[str, Any]:
    b1, b2 = s.betas
    factors = {"step": real(-s.lr)}
    if s.rule == LION:
        decay, rest = real(1 - s.lr * s.weight_decay), real(1 - b2)
        factors |= {"decay": decay, "share": real(1 - b1), "beta1": real(b1)}
        return factors | {"beta2": real(b2), "rest2": rest}
    factors |= {"decay": real(s.weight_decay), "beta2": real(b1)}
    factors["feed"] = real(0.0 if s.lr == 0 or b1 == 0 else 1 / s.lr * (1 - 1 / b1))
    if s.t == 1:  # the moment is the gradient: 1 g + (-0) 0, and the sign of a zero is that of g
        return factors | {"share": real(1), "beta1": real(-0.0)}
    return factors | {"share": real(1 - s.dampening), "beta1": real(b1)}


def _of_adam(s: Settings) -> dict[str, Any]:
    b1, b2 = s.betas
    c1, c2 = 1 - b1**s.t, 1 - b2**s.t
    share = real(1 - b1)
    root = real(c2**0.5 if s.torchs_root else math.sqrt(c2))  # as torch writes it in either step
    feed = 0.0 if s.lr == 0 or b1 == 0 else c1 / s.lr * (1 - 1 / b1)
    feed *= 1 - s.lr * s.weight_decay if s.decay_exact else 1
    return {
        "decay": real(1 - s.lr * s.weight_decay) if s.rule == ADAMW else real(s.weight_decay),
        "share": share if small(s) else share - real(1),
        "beta2": real(b2),
        "rest2": real(1 - b2),
        "root": root,
        "inverse": real(1) / root if root else real(np.inf),
        "eps": real(s.eps),
        "step": real(-(s.lr / c1)) if c1 else real(-np.inf),
        "feed": real(feed),
        "beta1": real(b1),
    }


def small(s: Settings | RateRow) -> bool:
    """Return True if Adam's moment moves from m towards g, False if back from g; the smaller step counts."""
    if isinstance(s, RateRow):
        return s.small
    return s.rule in (ADAMW, ADAM) and bool(abs(real(1 - s.betas[0])) < real(0.5))


def fma(a: Any, b: Any, c: Any) -> Array:
    """Return a * b + c of float32 values, rounded once.

    The product is exact in float64; the sum is rounded to odd there, so that rounding it again to float32 is
    as rounding once.
    """
    with np.errstate(all="ignore"):
        p = np.asarray(a, dtype=np.float64) * np.asarray(b, dtype=np.float64)
        c = np.asarray(c, dtype=np.float64)
        s = np.asarray(p + c)
        t = s - p
        rest = (p - (s - t)) + (c - t)
        bits = s.view(np.int64)
        towards = np.where((rest > 0) == (s > 0), 1, -1)
        odd = np.where((rest != 0) & np.isfinite(rest) & (bits & 1 == 0) & (s != 0), bits + towards, bits)
        return odd.view(np.float64).astype(real)


def moments(
    w: Array, g: Array, m: Array, v: Array, s: Settings | RateRow, plain: int
) -> tuple[Array, Array, Array]:
    """The weight as it is decayed, and the next moments."""
    a = dict(zip(RATES, rates(s), strict=True))
    with np.errstate(all="ignore"):
        if s.rule == ADAMW:
            w = w * a["decay"]
        elif a["decay"] != 0:
            g = fma(w, a["decay"], g)
        m = fma(a["share"], g - m, m if small(s) else g)
        weighted = a["rest2"] * g
        v = np.where(
            np.arange(g.size).reshape(g.shape) < plain,
            fma(weighted, g, v * a["beta2"]),
            fma(v, a["beta2"], weighted * g),
        )
    return w, m, v


def denominator(v: Array, s: Settings | RateRow) -> Array:
    """Return Adam's denominator of second moments ``v``."""
    a = dict(zip(RATES, rates(s), strict=True))
    with np.errstate(all="ignore"):
        root = torch.from_numpy(v).sqrt().numpy() if s.torchs_root else np.sqrt(v)
        return np.asarray(root / a["root"] + a["eps"])


def proposed(w: Array, m: Array, v: Array, s: Settings | RateRow) -> Array:
    """z, from what :func:`moments` gave."""
    a = dict(zip(RATES, rates(s), strict=True))
    with np.errstate(all="ignore"):
        return np.asarray(w + a["step"] * m / denominator(v, s))


def one_moment(w: Array, g: Array, m: Any, s: Settings | RateRow, plain: int) -> tuple[Array, Any]:
    """Return z and the next moment of a rule that has one or none."""
    a = dict(zip(RATES, rates(s), strict=True))
    with np.errstate(all="ignore"):
        if s.rule == LION:
            c = a["beta1"] * m + a["share"] * g
            sign = np.where(c > 0, real(1), np.where(c < 0, real(-1), c))  # of NaN, and of zeros, themselves
            return w * a["decay"] + a["step"] * sign, a["beta2"] * m + a["rest2"] * g
        if a["decay"] != 0:
            g = fma(w, a["decay"], g)
        if s.rule == PLAIN:
            return fma(g, a["step"], w), m
        m = np.where(
            np.arange(g.size).reshape(g.shape) < plain,
            fma(a["share"], g, m * a["beta1"]),
            fma(m, a["beta1"], g * a["share"]),
        )
        return fma(fma(m, a["beta2"], g) if s.rule == NESTEROV else m, a["step"], w), m


def proposal(w: Array, g: Array, m: Any, v: Any, s: Settings | RateRow, plain: int) -> tuple[Array, Any, Any]:
    """Return z and the next moments, by any rule."""
    if s.rule in (ADAMW, ADAM):
        w, m, v = moments(w, g, m, v, s, plain)
        return proposed(w, m, v, s), m, v
    return *one_moment(w, g, m, s, plain), v


def composed(q: Array, remainder: Array) -> Array:
    """The masters of bfloat16 weights and their remainders, which count in units of the last bits."""
    unit = 8 if remainder.dtype == np.int8 else 0
    return (q.view(np.int32) + (remainder.astype(np.int32) << unit)).view(real)


def kept_master(z: Array, remainder: Any, stream: Stream | None) -> Array:
    """Return masters as remainders keep them: exactly with 16 bits, to 16 significant bits with 8.

    The largest are clipped where their nearest bfloat16 would be infinite.
    """
    u = z.view(np.int32) & 0x7FFFFFFF
    most = LARGEST
    if remainder == np.int8:
        most = LARGEST & ~255
        assert stream is not None
        u = (u & ~255) + 256 * reference.stochastic_up((u & 255) / 256.0, stream)
    return np.asarray(
        (np.minimum(u, most).astype(np.int32) | (z.view(np.int32) & np.int32(-(2**31)))).view(real)
    )


def away(z: Array) -> Array:
    """The nearest bfloat16 of masters, ties away from zero."""
    return ((z.view(np.int32) + 0x8000) & -65536).view(real)


def drawn(x: Array, digits: Array) -> Array:
    """Moments as bfloat16's patterns, by draws; beyond its largest number they may become infinite."""
    u = np.ascontiguousarray(x, dtype=real).view(np.uint32)
    up = digits.reshape(x.shape) < (u & 0xFFFF)
    quiet = (u | np.where(np.isnan(x), 0x400000, 0).astype(np.uint32)) >> 16
    return np.where(np.isfinite(x), (u >> 16) + up, quiet).astype(np.uint16)


def step(
    q: Array,
    g: Array,
    m: Any,
    v: Array | None,
    grid: Grid,
    s: Settings | RateRow,
    policy: Policy,
    *,
    plain: int | None = None,
    moved: Array | None = None,
) -> tuple[Array, Array, Any, dict[str, Array]]:
    """One step of one tensor: the next stored values, both moments, and counts and sums per tile.

    All float32, moments as bfloat16 patterns where they are drawn. ``m`` and ``v`` are None where the rule
    has no such moment.
    """
    mode, keeps, kept, stream, drawing = policy
    plain = q.size if plain is None else plain
    if drawing is not None:
        m = (m.astype(np.uint32) << 16).view(real)
        v = None if v is None else (v.astype(np.uint32) << 16).view(real)
    master = kept if keeps == MASTER else composed(q, kept) if keeps == REMAINDER and kept is not None else q
    assert master is not None
    z, m, v = proposal(master, g, m, v, s, plain)
    ok = np.isfinite(z)
    if keeps == REMAINDER:
        assert kept is not None
        z = np.where(ok, kept_master(np.where(ok, z, 0), kept.dtype, stream), z)
        tie = (z.view(np.int32) & 0xFFFF) == 0x8000  # nearest even of a nudged tie is away from zero
        nudged = np.where(tie, z.view(np.int32) | 1, z.view(np.int32)).view(real)
        r, counted = reference.write_back(q, nudged, grid, moved=moved)
        kept[ok] = ((z.view(np.int32) - r.view(np.int32)) >> (8 if kept.dtype == np.int8 else 0))[ok]
    else:
        carry = np.zeros_like(q) if keeps == ERROR else kept if keeps == CARRY else None
        wide = None
        if carry is not None:
            wide = (carry.astype(np.uint32) << 16).view(real) if carry.dtype == np.uint16 else carry
        r, counted = reference.write_back(
            q, z, grid, mode, stream, moved, carry=wide, carry_in=keeps == CARRY
        )
        if keeps == CARRY and kept is not None and kept.dtype == np.uint16:
            assert wide is not None
            u = wide.view(np.uint32)
            kept[...] = (u + 0x7FFF + ((u >> 16) & 1)) >> 16
        if keeps == MASTER:
            assert kept is not None
            kept[ok] = z[ok]
        feed = rates(s)[RATES.index("feed")]
        if keeps == ERROR and feed != 0:
            assert wide is not None
            with np.errstate(all="ignore"):
                fed = fma(wide, feed, m) if v is None else m + denominator(v, s) * wide * feed
            m = np.where(np.isfinite(fed), fed, m)  # what the moment cannot hold is not fed back
    if drawing is not None:
        digits = drawing.words(q.size)
        m = drawn(m, digits)
        v = None if v is None else drawn(v, (digits >> 8) | ((digits & 255) << 8))
    return r, m, v, counted
