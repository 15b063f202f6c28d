"""Grids of every kind, and the weights, proposals and gradients that kernels are tested on."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from oracle import NUMPY, fits

import halfulp as hu
from halfulp.numbers import float_grid

STATIC = ["bf16", "fp16", "e5m2", "e4m3@128", "e2m1", "m0", "m3", "m10", "float32"]
STATIC += ["int4@16/asym", "int8@100", "int3@3/asym", "bf16@4"]
MOVING = ["int8", "int8/g48", "int3/dqt", "int8/row", "int4/absmean/row", "int5/asym"]
MOVING += ["mxfp8_e4m3", "mxfp6_e3m2", "mxfp4", "nvfp4"]
ODD = [
    float_grid(mantissa=3, emin=-60, largest=1.5 * 2.0**120, name="wide"),  # too wide for float32's shortcut
    float_grid(mantissa=22, emin=-60, largest=1.0, name="fine"),
]
SHAPES = [(), (0, 5), (1,), (769,), (7, 100), (3, 768), (2, 3, 520)]


def grids_for(dtype: torch.dtype) -> list[hu.Grid]:
    """Every kind of grid that fits a container."""
    fitting = []
    for g in (*(hu.grid(n) for n in STATIC + MOVING), *ODD):
        if (g.mantissa, dtype) == (0, torch.float16):
            continue  # refused: see test_errors
        if fits(g, dtype):
            fitting.append(g)
    return fitting


def draw(shape: tuple[int, ...], dtype: torch.dtype, seed: int, bad: bool = True) -> tuple[np.ndarray, ...]:
    """Weights, proposals and gradients: zeros, huge and tiny ones, ties, and (if ``bad``) non-finite ones."""
    rng = np.random.default_rng([seed, *shape])
    n = math.prod(shape)
    w, d, g = rng.standard_normal(n) * 0.05, rng.standard_normal(n) * 0.002, rng.standard_normal(n)
    w[rng.random(n) < 0.03] = 0
    w[rng.random(n) < 0.01] *= 1e5
    w[rng.random(n) < 0.01] *= 1e-30
    w[rng.random(n) < 0.05] = 0.5
    d[rng.random(n) < 0.1] = 0
    d[rng.random(n) < 0.02] *= 1e7
    d[rng.random(n) < 0.02] *= 1e-35
    d[rng.random(n) < 0.05] = 2.0 ** -rng.integers(3, 12)  # half gaps
    if bad and n > 10:
        for v in (np.nan, np.inf, -np.inf):
            for x in (w, d, g):
                x[rng.integers(0, n, 2)] = v
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return tuple(x.reshape(shape).astype(NUMPY[dtype]) for x in (w, d, g))


def quiet(call: Any, *args: Any, **kwargs: Any) -> Any:
    """The reference, without NumPy's remarks on overflow, which it means to meet."""
    with np.errstate(all="ignore"):
        return call(*args, **kwargs)
