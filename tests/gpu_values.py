"""Values that Triton kernels are checked on, and how results are compared. Nothing here imports Triton."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import torch

from halfulp.numbers.grids import Grid, float_grid, grid
from halfulp.numbers.streams import Stream

STATIC = ("bf16", "fp16", "e5m2", "e4m3", "e4m3@128", "e2m1", "m3", "int4@16/asym", "fp32")
SCALED = ("int8", "int4/g128", "int3/dqt", "mxfp4", "mxfp8_e4m3", "nvfp4", "int4/absmean/row", "int4@10")
BF16 = np.dtype(ml_dtypes.bfloat16)
SIZES = (0, 1, 767, 768, 769, 2000)
STREAM = Stream(seed=7, name="w", step=3)
# A static grid that fits float32 but that float32 arithmetic cannot round: it goes through float64.
WIDE = float_grid(mantissa=22, emin=-20, largest=2.0**20, name="wide")


def values(shape: int | tuple[int, ...], dtype: Any, seed: int, spread: int = 24, odd: bool = True) -> Any:
    """Short mantissas (many ties) and long ones over many binades; ``odd`` adds the special values."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-spread, 8, shape))
    short = np.round(rng.uniform(-32, 32, shape)) / 32 * np.exp2(rng.integers(-spread, 8, shape))
    x = np.where(rng.random(shape) < 0.5, short, x).astype(dtype)
    if odd and x.size > 20:
        box = {"float64": 1e-310, "float16": 6e-8}.get(x.dtype.name, 1e-40)
        top = {"float64": 1.7e308, "float16": 65504.0}.get(x.dtype.name, 3.3e38)
        special = [np.nan, np.inf, -np.inf, 0.0, -0.0, box, -box, 3 * box, top, -top]
        at = rng.permutation(x.size)[: 2 * len(special)]
        x.reshape(-1)[at] = np.array(special * 2).astype(dtype)
    return x


def tensor(x: Any) -> torch.Tensor:
    x = np.ascontiguousarray(x)
    if x.dtype == BF16:
        return torch.from_numpy(x.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(x.copy())


def same(ours: torch.Tensor, theirs: Any, *where: Any) -> None:
    """Equal to the last bit."""
    made = ours.view(torch.int16) if ours.dtype == torch.bfloat16 else ours
    a, b = made.contiguous().numpy(), np.ascontiguousarray(theirs)
    assert a.shape == b.shape, (*where, a.shape, b.shape)
    bits = f"u{b.dtype.itemsize}"
    wrong = np.flatnonzero(a.view(bits).reshape(-1) != b.view(bits).reshape(-1))
    if wrong.size:
        i = int(wrong[0])
        shown = ours.double().reshape(-1)[i].item(), np.float64(theirs.reshape(-1)[i])
        raise AssertionError(
            f"{where}: {wrong.size} differ, the first at {i}: {shown[0]!r}, not {shown[1]!r}"
        )


def within(names: tuple[str, ...], dtype: Any) -> list[Grid]:
    """The grids that fit the container; integers with scales do not fit bfloat16."""
    box = tensor(np.zeros(1, dtype=dtype)).dtype
    chosen = [grid(n) for n in names]
    return [g.within(box) for g in chosen if dtype != BF16 or not g.integer or g.scaling is None]


def near(q: Any, seed: int) -> Any:
    """Proposals: some zero, some far below the spacing, some not finite."""
    d = values(q.shape, np.float64, seed, spread=20, odd=False)
    with np.errstate(over="ignore"):
        z = (q.astype(np.float64) + np.where(d < -1, 0, d * 0.01)).astype(q.dtype)
    z.reshape(-1)[3::211] = np.nan
    z.reshape(-1)[4::211] = -np.inf
    return z
