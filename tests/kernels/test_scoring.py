"""Scores of many tensors in one call, against the NumPy reference, to the last bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from kernels.test_kernels import draw, grids_for, quiet
from oracle import assert_same, tensor

import halfulp as hu
from halfulp.kernels import SCORES, reference, tiles_of
from halfulp.kernels.scoring import Scored, add_scores

SHAPES = [(5, 700), (2,), (64, 128), (9, 256), (1, 4096), (3, 768)]


def drawn(
    shape: tuple[int, ...], dtype: torch.dtype, seed: int, bad: bool, by: float = 1.0
) -> tuple[tuple[torch.Tensor, ...], Any]:
    """Weights, gradient and weights after a step; and the change, as the reference has it."""
    w, u, g = draw(shape, dtype, seed, bad)
    w, u = (w * by).astype(w.dtype), (u * by).astype(w.dtype)
    after = quiet(lambda: (w + u).astype(w.dtype))
    work = np.float64 if dtype == torch.float64 else np.float32
    change = quiet(lambda: after.astype(work) - w.astype(work))
    return (tensor(w), tensor(g), tensor(after)), (w, g, change)


def check(grid: hu.Grid, tile: int, dtype: torch.dtype = torch.float32, **how: Any) -> None:
    """Two steps of tensors of many shapes, added up."""
    found = [torch.zeros(tiles_of(int(np.prod(s)), tile), len(SCORES), dtype=torch.float64) for s in SHAPES]
    expected = [np.zeros(tuple(f.shape)) for f in found]
    for seed in (1, 2):
        jobs = []
        for shape, scores, sums in zip(SHAPES, found, expected, strict=True):
            (w, g, after), known = drawn(shape, dtype, seed, **how)
            jobs.append(Scored(w, g, after, scores))
            sums += quiet(reference.score, *known, grid, tile)
        add_scores(jobs, grid, tile)
    for shape, scores, sums in zip(SHAPES, found, expected, strict=True):
        assert_same(scores, sums, f"{grid.name}, {shape}, tiles of {tile}")


@pytest.mark.parametrize("tile", [1, 64, 100, 112, 128, 192, 256, 384, 512, 768, 1024, 1536, 100000])
def test_tiles_of_any_size(tile: int) -> None:
    """Those that lanes do, and those that they do not; weights that round plainly, and those that do not."""
    for name in ("e5m2", "bf16"):
        check(hu.grid(name), tile, bad=False, by=0.01)
        check(hu.grid(name), tile, bad=True)


def test_every_grid() -> None:
    """Fixed scales in lanes, others one by one; within and at the ends of a grid's range."""
    for grid in grids_for(torch.float32):
        check(grid, 128, bad=False, by=2.0**-9)
        check(grid, 128, bad=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_other_containers(dtype: torch.dtype) -> None:
    check(hu.grid("e5m2"), 128, dtype, bad=True)


def test_every_place_of_a_rare_value() -> None:
    """One value that is not finite, or large, anywhere in a tile: its coordinate counts for nothing, and the
    tiles beside it are not touched."""
    rng = np.random.default_rng(3)
    for what in range(3):
        for value in (np.nan, np.inf, np.float32(3e38)):
            w, g, after = (rng.standard_normal(128 * 128).astype(np.float32) for _ in range(3))
            (w, g, after)[what][np.arange(128) * 129] = value
            scores = torch.zeros(128, len(SCORES), dtype=torch.float64)
            add_scores([Scored(tensor(w), tensor(g), tensor(after), scores)], "e5m2", 128)
            change = quiet(lambda w=w, after=after: after - w)
            assert_same(scores, quiet(reference.score, w, g, change, hu.grid("e5m2"), 128), str(value))


def test_views_and_threads() -> None:
    """What is not contiguous is read all the same; threads change nothing."""
    given, known = drawn((40, 1280), torch.float32, seed=4, bad=True)
    expected = quiet(reference.score, *known, hu.grid("e5m2"), 128)
    apart = torch.zeros(40, 2560)[:, ::2].copy_(given[1])
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            for gradient in (given[1], apart):
                scores = torch.zeros(400, len(SCORES), dtype=torch.float64)
                add_scores([Scored(given[0], gradient, given[2], scores)], "e5m2", 128)
                assert_same(scores, expected, f"{threads} threads")
    finally:
        torch.set_num_threads(before)


def test_scores_must_fit() -> None:
    x = torch.ones(10, 128)
    for wrong in (torch.zeros(9, 8, dtype=torch.float64), torch.zeros(10, 8)):
        with pytest.raises(hu.UsageError, match=r"in tiles of 128 are float64 of \(10, 8\) on the CPU"):
            add_scores([Scored(x, x, x, wrong)], "e5m2", 128)
    add_scores([], "e5m2", 128)
