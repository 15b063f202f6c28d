"""Scores of many tensors in one call, against the NumPy reference, to the last bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from kernel_inputs import draw, grids_for, quiet
from oracle import assert_same, tensor

import halfulp as hu
from halfulp import kernels
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


def test_a_sum_of_zeros_is_no_minus_zero() -> None:
    """In a whole tile, which no zeros are added to."""
    one, none = np.ones(768, np.float32), np.zeros(768, np.float32)
    assert not np.signbit(reference.arrival(one, one, -one)).any()
    grid = hu.grid("bf16")
    expected = reference.score(one, none, one, grid)
    assert not np.signbit(expected).any()
    assert_same(kernels.score(tensor(one), tensor(none), tensor(one), grid), expected)


def test_score(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """The eight sums of every tile."""
    w, u, g = draw(shape, dtype, seed=5)
    for grid in grids_for(dtype):
        expected = quiet(reference.score, w, g, u, grid)
        assert_same(kernels.score(tensor(w), tensor(g), tensor(u), grid), expected, grid.name)


def plain_scores(w: Any, g: Any, u: Any, grid: Any, tile: int) -> Any:
    """Scores by loops over tiles: padded to 3 * 2**k, halved, and the last three from left to right."""
    columns = reference.score(w, g, u, grid, tile=1)  # a coordinate a tile: its eight values
    size = 3
    while size < tile:
        size *= 2
    rows = []
    for first in range(0, w.size, tile):
        part = np.zeros((size, 8))
        part[: len(columns[first : first + tile])] = columns[first : first + tile]
        while len(part) > 3:
            part = part[: len(part) // 2] + part[len(part) // 2 :]
        rows.append(part[0] + part[1] + part[2])
    return np.array(rows)


@pytest.mark.parametrize("tile", [1, 5, 96, 100, 768, 1000, 1536, 5000])
def test_scores_of_tiles_of_any_size(dtype: torch.dtype, tile: int) -> None:
    """Tiles of any size, the last one short or not, on fixed and moving grids, before and after a step."""
    for shape in ((5, 700), (2,)):
        w, u, g = draw(shape, dtype, seed=15)
        after = quiet(lambda w=w, u=u: (w + u).astype(w.dtype))
        work = np.float64 if dtype == torch.float64 else np.float32
        change = quiet(lambda w=w, a=after, to=work: a.astype(to) - w.astype(to))
        for grid in grids_for(dtype):
            expected = quiet(reference.score, w, g, u, grid, tile)
            assert expected.shape == (-(-w.size // tile), 8)
            assert_same(kernels.score(tensor(w), tensor(g), tensor(u), grid, tile=tile), expected, grid.name)
            expected = quiet(reference.score, w, g, change, grid, tile)
            found = kernels.score(tensor(w), tensor(g), tensor(after), grid, after=True, tile=tile)
            assert_same(found, expected, grid.name)


@pytest.mark.parametrize("tile", [1, 5, 96, 100, 768, 1000, 1536])
def test_scores_are_plain_sums(tile: int) -> None:
    """The reference itself, against loops over tiles."""
    w, u, g = draw((5, 700), torch.float32, seed=16)
    for name in ("e5m2", "int4/g128"):
        grid = hu.grid(name)
        assert_same(
            torch.from_numpy(quiet(reference.score, w, g, u, grid, tile)),
            quiet(plain_scores, w, g, u, grid, tile),
        )


@pytest.mark.parametrize("tile", [0, -1, 1.5, True, None, "96"])
def test_what_is_not_the_size_of_a_tile(tile: Any) -> None:
    x = torch.ones(10)
    with pytest.raises(hu.UsageError, match="a tile is a whole number of coordinates, 1 or more"):
        kernels.score(x, x, x, "e5m2", tile=tile)
