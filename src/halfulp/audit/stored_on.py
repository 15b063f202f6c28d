"""On which grid a recorded run stores its weights, and by which policy they get there."""

from __future__ import annotations

from dataclasses import replace

import torch

from halfulp.grids import CONTAINERS
from halfulp.grids import grid as named
from halfulp.trace import Recorded

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in CONTAINERS}
NEAREST = "rne"


def on_grid(trace: Recorded, grid: str) -> list[int]:
    """The tensors that are stored on a grid."""
    return [t["id"] for t in trace.tensors if same_values(t["stored"], grid, t["dtype"])]


def moved_on_grid(trace: Recorded, grid: str) -> list[int]:
    """Those of :func:`on_grid` that some step was about: of the others there is nothing to say."""
    found = on_grid(trace, grid)
    rows = trace.scan("tensors").select("tensor").unique().collect()["tensor"] if found else ()
    return sorted(set(found).intersection(rows))


def same_values(stored: str, grid: str, dtype: str) -> bool:
    """Whether two names (bf16, bfloat16) mean the same values in a container."""
    names = ("m52" if stored == "float64" else stored, grid)  # no grid is called like the widest container
    first, second = (replace(named(name).within(DTYPES[dtype]), name="", note="") for name in names)
    return first == second


def policies(trace: Recorded) -> list[str]:
    """The write-back policies of a run, by name; none where the optimizer writes weights itself."""
    specs = [spec for o in trace.manifest.get("optimizers", ()) for spec in o.get("policies", ())]
    return list(dict.fromkeys(str(spec).partition("(")[0] for spec in specs))


def is_of(spec: str, trace: Recorded) -> bool:
    """Whether a run stores most of its weights as a rehearsal of this name would have: grid and policy."""
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
