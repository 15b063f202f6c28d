"""The obvious rehearsal: one step of the run that did not happen, in NumPy. It defines the others.

A rehearsed tensor holds grid values s, and moves by what the reference run did to its own weights, w to w':

    d = w' - w,   p = d + k (w - s),   z = s + p,   s <- policy(z)

in exactly this order, every operation rounded once in the *working type*: float64 for weights in float64,
float32 for all others. (Not in a bfloat16 container: stochastic rounding to bfloat16 of what was rounded to
bfloat16 before has nothing left to round. A write-back on such weights works in float32 as well.)

What a policy keeps beside the codes enters as in a write-back. A *carry* or a *pending* proposal P is added
to z where that is finite; of what is then not written, e = z - s', nothing beyond the ends of the range, the
carry becomes e and the pending proposal b P + c e. A *master* m is moved in place of s, s = Q(m); where only
chosen coordinates have a master, the others hold m = s.
A proposal that is not finite moves nothing and is counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from halfulp.kernels import reference
from halfulp.kernels.reference import NEAREST, tile_count
from halfulp.numbers.grids import Grid
from halfulp.numbers.streams import Stream

Array = npt.NDArray[Any]

NOTHING, CARRY, PENDING, MASTER = range(4)
"""The kinds of state that is kept beside the codes, or instead of them."""
COUNTS = ("frozen", "never_moved", "nonfinite")
"""Counts per tile: frozen coordinates (see :mod:`halfulp.kernels.reference`; for a master, by its rounded
value); coordinates that no step has moved so far; and non-finite proposals, which are in no other count."""


@dataclass(frozen=True)
class Rule:
    """The rule of a rehearsal: its grid, resolved for the container, its rounding and what it keeps."""

    grid: Grid
    mode: int = NEAREST
    keeps: int = NOTHING

    @property
    def coded(self) -> bool:
        """True if codes of one or two bytes are kept; otherwise values of the working type."""
        return self.keeps != MASTER and self.grid.scaling is None and self.grid.bits <= 16


def step(
    rule: Rule,
    stored: Array,
    w: Array,
    after: Array,
    k: float,
    *,
    stream: Stream | None = None,
    kept: Array | None = None,
    chosen: Array | None = None,
    back: tuple[float, float] = (0.0, 0.0),
    moved: Array | None = None,
) -> tuple[Array, Array]:
    """Compute the next state, and the counts per tile (COUNTS).

    ``stored`` are codes (of any integer type) if the rule has them, else values of the working type; for a
    master, the master. ``kept`` is the carry or the pending update, updated in place. ``chosen`` marks the
    coordinates that have a master, if not all have. ``back`` are the factors b and c. ``moved`` are bits, as
    in :func:`halfulp.kernels.reference.write_back`, updated in place.
    """
    work: Any = np.float64 if w.dtype == np.float64 else np.float32
    grid, shape = rule.grid, w.shape
    s = reference.decode(stored, grid).astype(work) if rule.coded else stored
    w = w.astype(work)
    with np.errstate(over="ignore", invalid="ignore"):
        d = after.astype(work) - w
        p = d + work(k) * (w - s)
        z = s + p
        ok = np.isfinite(z)
        if rule.keeps in (CARRY, PENDING):
            assert kept is not None
            whole = z + kept.astype(work)
            z = np.where(np.isfinite(whole), whole, z)
    safe = np.where(ok, z, s).astype(work)
    if rule.keeps == MASTER:
        now, then = ((None if grid.scaling is None else reference.scales(x, grid)) for x in (s, safe))
        old, r = reference.round(s, grid, scale=now), reference.round(safe, grid, scale=then)
        have = np.ones(shape, dtype=bool) if chosen is None else chosen
        stored = np.where(ok, np.where(have, safe, r), s)
        same = reference.unchanged(old, r, safe == s, grid, now, then) & ok
        frozen = tile_count(same)
        if moved is not None:
            moved |= np.packbits((~same & ok).reshape(-1), bitorder="little")
    else:
        rest = np.zeros(shape, dtype=work)
        proposed = np.where(ok, safe, np.nan).astype(work)
        r, counted = reference.write_back(
            s, proposed, grid, rule.mode, stream, moved, carry=rest, carry_in=False
        )
        frozen = counted["counts"][:, 0]
        if rule.keeps == CARRY and kept is not None:
            kept[ok] = rest[ok].astype(kept.dtype)
        elif kept is not None:
            kept[ok] = (work(back[0]) * kept + work(back[1]) * rest)[ok]
        stored = reference.encode(r, grid).astype(stored.dtype) if rule.coded else r
    if moved is None:
        never = np.zeros(ok.size, dtype=bool)
    else:
        never = np.unpackbits(moved, count=ok.size, bitorder="little") == 0
    return stored, np.stack([frozen, tile_count(never), tile_count(~ok.reshape(-1))], axis=1)
