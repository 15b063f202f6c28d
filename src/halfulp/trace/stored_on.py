"""On which grid a recorded run stores its weights, and by which policy they get there."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch

from halfulp.numbers.containers import CONTAINERS
from halfulp.numbers.grids import grid as named

if TYPE_CHECKING:
    from halfulp.trace.recorded import Recorded

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in CONTAINERS}
NEAREST = "rne"


def on_grid(trace: Recorded, grid: str) -> list[int]:
    """Return the tensors that are stored on a grid."""
    return [t["id"] for t in trace.tensors if same_values(t["stored"], grid, t["dtype"])]


def moved_on_grid(trace: Recorded, grid: str) -> list[int]:
    """Return those of :func:`on_grid` that some step was about: of the others there is nothing to say."""
    ids = on_grid(trace, grid)
    rows = np.unique(trace.scan("tensors", "tensor")["tensor"]).tolist() if ids else ()
    return sorted(set(ids).intersection(rows))


def default_scope(trace: Recorded, grid: str) -> str | Sequence[int]:
    """Return the default scope of a grid.

    It is the tensors stored on the grid (measured), or all if there are none (a forecast).
    """
    return moved_on_grid(trace, grid) or "all"


def in_full(stored: str) -> bool:
    """Return True if values are stored in full precision, so that a change of zero is a proposal of zero.

    On a coarse grid, where only the change is seen, a lost update looks the same.
    """
    return stored in ("float32", "fp32", "float64")


@lru_cache(maxsize=1024)
def same_values(stored: str, grid: str, dtype: str) -> bool:
    """Return True if two names (bf16, bfloat16) mean the same values in a container."""
    names = ("m52" if stored == "float64" else stored, grid)  # no grid is called like the widest container
    first, second = (named(name).within(DTYPES[dtype]) for name in names)
    return first.same_values(second)


def policies(trace: Recorded) -> list[str]:
    """Return the write-back policies of a run, by name; none where the optimizer writes weights itself."""
    specs = [spec for o in trace.manifest.get("optimizers", ()) for spec in o.get("policies", ())]
    return list(dict.fromkeys(str(spec).partition("(")[0] for spec in specs))


def is_of(spec: str, trace: Recorded) -> bool:
    """Return True if a run stores most of its weights as this rehearsal would have: grid and policy."""
    grid, _, how = spec.partition(":")
    wanted = {"": NEAREST, "tiles": "tile-master"}.get(how.partition("(")[0], how.partition("(")[0])
    if (policies(trace) or [NEAREST]) != [wanted]:
        return False
    fit = [t for t in trace.tensors if _fits(grid, t["dtype"]) and same_values(t["stored"], grid, t["dtype"])]
    total = sum(int(t["numel"]) for t in trace.tensors)
    return sum(int(t["numel"]) for t in fit) > total / 2


def _fits(grid: str, dtype: str) -> bool:
    try:
        named(grid).within(DTYPES[dtype])
    except ValueError:  # of which UsageError is a kind
        return False
    return True
