"""Policies and rehearsals beside an oracle in integers: every stored value, master and carry of some steps.

The oracle knows a grid's values from its declared limits, finds neighbours by bisection and compares exact
rationals (``tests/oracle.py``); of halfulp it takes the words of a stream. SGD at rate one makes the
proposals, so that one subtraction in float32 is all that is left to arithmetic. Weights lie over 60 binades,
and some proposals are of 2**127 and beyond, where sums overflow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from oracle import Exact, oracle_of

import halfulp as hu
from torture import Clock, Effort, Trial

TILE = 768
GRIDS = ("bf16", "e4m3@128", "e5m2", "e2m3@16", "m5")
Values = list[float]


def inputs(n: int, seed: int, huge: bool) -> tuple[np.ndarray, np.ndarray]:
    """Weights, and gradients of a step; huge ones reach over the end of float32."""
    rng = np.random.default_rng(seed)
    w = rng.standard_normal(n) * np.exp2(rng.integers(-30, 4, n))
    g = rng.standard_normal(n) * np.exp2(rng.integers(-40, 3, n))
    if huge:
        at = rng.integers(0, n, n // 10)
        g[at] = rng.choice([-1, 1], len(at)) * np.exp2(rng.uniform(126, 127.9, len(at)))
    return w.astype(np.float32), g.astype(np.float32)


def nearest(grid: Exact, x: np.ndarray) -> np.ndarray:
    """The nearest values; what is not finite stays what it is."""
    return np.array([grid.nearest(float(v)) if np.isfinite(v) else v for v in x], dtype=np.float32)


def drawn(grid: Exact, z: float, word: int, known: float) -> float:
    """Stochastic rounding by a word of 32 digits; ``known`` where later digits decide."""
    if not np.isfinite(z):
        return z
    size = abs(z)
    low = size if grid.below(np.nextafter(size, np.inf)) == size else grid.below(size)
    high = grid.above(low)
    if high == np.inf or low == size:
        return float(np.copysign(min(low, size), z)) if high != np.inf else grid.nearest(z)
    share = (Fraction(size) - Fraction(low)) / (Fraction(high) - Fraction(low)) * 2**32
    if word == int(share) and share != int(share):
        return known
    return float(np.copysign(high if word < share else low, z))


def policy(kind: str, grid: str, n: int, seed: int, huge: bool) -> tuple[int, int]:
    """Five steps of a policy: how many stored values, and how many the oracle has otherwise."""
    exact, wrong, tried = oracle_of(hu.grid(grid).within(torch.float32)), 0, 0
    w, _ = inputs(n, seed, False)
    model = torch.nn.Linear(n, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.from_numpy(w)[None])
    chosen: Any = kind
    masters = np.full(n, kind == "master")
    if kind == "tiles":
        tiles = torch.arange(-(-n // TILE)) % 2 == 1
        chosen = hu.TileMaster({"weight": tiles})
        masters = np.repeat(tiles.numpy(), TILE)[:n]
    opt = hu.WriteBack(torch.optim.SGD(model.parameters(), lr=1.0), grid, chosen, model=model, seed=3)
    q = nearest(exact, w)
    wrong += int((model.weight.detach().numpy()[0] != q).sum())
    held, carry = q.copy(), np.zeros(n, np.float32)
    for step in range(1, 6):
        _, g = inputs(n, seed + step, huge)
        model.weight.grad = torch.from_numpy(g)[None].clone()
        opt.step()
        with np.errstate(over="ignore", invalid="ignore"):
            z = np.where(masters, held, q) - g
            z = z + carry if kind == "kahan" else z
        over = ~np.isfinite(z)  # such a proposal leaves everything as it is
        held, old, before = np.where(over, held, z), q, carry
        words = hu.Stream(seed=3, name="weight", step=step).words(n)
        found = model.weight.detach().numpy()[0]
        if kind == "sr":
            q = np.array(
                [drawn(exact, float(a), int(b), float(c)) for a, b, c in zip(z, words, found, strict=True)],
                dtype=np.float32,
            )
        else:
            q = nearest(exact, z)
        if kind == "kahan":
            beyond = (np.abs(z) >= exact.nearest(3.4028235e38)) & (np.abs(z) >= np.abs(q))
            with np.errstate(invalid="ignore"):
                carry = np.where(beyond, np.float32(0), z - q)
            carry = np.where(over, before, carry)
        tried, wrong = tried + n, wrong + int((found != np.where(over, old, q)).sum())
        q = found.copy()  # one wrong value is one wrong value
    return tried, wrong


def rehearsed(grid: str, n: int, seed: int) -> tuple[int, int]:
    """The upper bound of a rehearsal: codes that only the reference's proposals move, s <- Q(s + d)."""
    exact = oracle_of(hu.grid(grid).within(torch.float32))
    w, _ = inputs(n, seed, False)
    model = torch.nn.Linear(n, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.from_numpy(w)[None])
    opt = torch.optim.SGD(model.parameters(), lr=1.0)
    s = nearest(exact, w)
    with hu.Audit(opt, [grid], model=model, rehearse=[grid]) as audit:
        for step in range(1, 6):
            _, g = inputs(n, seed + step, False)
            before = model.weight.detach().numpy()[0].copy()
            model.weight.grad = torch.from_numpy(g)[None].clone()
            opt.step()
            d = model.weight.detach().numpy()[0] - before
            s = nearest(exact, s + d)
        with audit.as_if(grid, "upper"):
            found = model.weight.detach().numpy()[0].copy()
    return n, int((found != s).sum())


def trials(effort: Effort) -> Iterator[Trial]:
    torch.set_num_threads(1)
    n = effort.of(2_000, 100_000)

    def over(run: Callable[[str, int], tuple[int, int]]) -> tuple[int, int]:
        found = [run(grid, 100 * i) for i, grid in enumerate(GRIDS)]
        return sum(t for t, _ in found), sum(w for _, w in found)

    for huge in (False, True):
        for kind in ("rne", "sr", "kahan", "master", "tiles"):
            what = f"values stored by `{kind}`" + " with proposals up to 2^128" * huge
            if effort.wants(what):
                clock = Clock()
                tried, lost = over(lambda grid, seed, k=kind, h=huge: policy(k, grid, n, seed, h))
                yield Trial("Oracle", what, tried, lost, clock(), f"on {', '.join(GRIDS)}")
    if effort.wants("rehearsed"):
        clock = Clock()
        tried, lost = over(lambda grid, seed: rehearsed(grid, n, seed))
        yield Trial("Oracle", "values rehearsed, upper bound", tried, lost, clock(), f"on {', '.join(GRIDS)}")
