"""An answer in words: what a run would lose on each grid, where, from when, and what would cure it.

Nothing is said that the evidence does not carry. A realized event (the grid that the weights are stored on)
is exact. Any other grid is a projection of this run: it assumes that a low-precision run would follow the
same path, which it does not exactly, and it says nothing about the loss.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from halfulp.grids import CONTAINERS
from halfulp.grids import grid as named
from halfulp.trace import Trace

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in CONTAINERS}

STUCK = 0.99
"""A tensor counts as stuck if this share of its updates is lost."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One grid."""

    grid: str
    stored: float
    """Share of the weights that are stored on the grid."""
    lost: float
    """Share of updates lost over the run."""
    lost_late: float
    """Over its last tenth."""
    onset: str
    never_moved: float | None
    stuck: tuple[tuple[str, str, float, float], ...]
    """(name, group, share of updates lost, share that never moved) of tensors that hardly move."""

    @property
    def realized(self) -> bool:
        """Whether this happened: every weight is stored on the grid."""
        return self.stored == 1.0

    @property
    def severity(self) -> str:
        if self.lost_late >= 0.5:
            return "most updates are lost"
        if self.lost_late >= 0.05 or self.stuck:
            return "some updates are lost"
        return "fine"


def shown(name: str, width: int = 60) -> str:
    """A name made safe and short for a terminal.

    >>> shown("a\\x1b[31mb")
    'a\\\\x1b[31mb'
    """
    safe = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)
    return safe if len(safe) <= width else safe[: width - 1] + "…"


def findings(trace: Trace, scope: str = "all") -> list[Finding]:
    """What a trace says of each of its grids."""
    return [_finding(trace, g, scope) for g in trace.grids]


def _finding(trace: Trace, grid: str, scope: str) -> Finding:
    f = trace.frozen(grid, scope)
    crossing = trace.crossing(grid, scope)
    onset = {
        "at-initialisation": "from the first step on",
        "later": f"majority from step {crossing.first}",
        "absent": "never a majority",
        "undecided": f"a majority at the first step that was audited ({crossing.first})",
    }[crossing.category]
    if crossing.category == "later" and crossing.persistent is not None:
        onset += f", for good from step {crossing.persistent}"
    followed = trace.manifest["options"]["never_moved"]
    late = f[-max(1, len(f) // 10) :]
    return Finding(
        grid=grid,
        stored=_stored(trace, grid, scope),
        lost=float(f.mean()),
        lost_late=float(late.mean()),
        onset=onset,
        never_moved=float(trace.never_moved(grid, scope)[-1]) if followed else None,
        stuck=_stuck(trace, grid, followed),
    )


def _stored(trace: Trace, grid: str, scope: str) -> float:
    """The share of a scope's weights that are stored on a grid."""
    ids = set(trace.ids(scope))
    sizes = [(t, float(t["recorded"])) for t in trace.tensors if t["id"] in ids]
    return sum(n for t, n in sizes if _same_values(t["stored"], grid, t["dtype"])) / sum(n for _, n in sizes)


def _same_values(stored: str, grid: str, dtype: str) -> bool:
    """Whether two names (bf16, bfloat16) mean the same values in a container."""
    first, second = (replace(named(name).within(DTYPES[dtype]), name="", note="") for name in (stored, grid))
    return first == second


def _stuck(trace: Trace, grid: str, followed: bool) -> tuple[tuple[str, str, float, float], ...]:
    import polars as pl

    size = {t["id"]: t for t in trace.tensors}
    steps = len(trace.steps)
    frame = (
        trace.scan()
        .filter(pl.col("grid") == trace.grids.index(grid))
        .group_by("tensor")
        .agg(pl.col("frozen").sum(), pl.len().alias("n"), pl.col("never_moved").sort_by("step").last())
        .collect()
    )
    rows = []
    for tensor, frozen, n, never in frame.iter_rows():
        t = size[tensor]
        share = frozen / (n * t["recorded"]) if n else 0.0
        still = never / t["recorded"] if followed else float("nan")
        if share >= STUCK and n >= steps / 2:
            rows.append((str(t["name"]), str(t["group"]), float(share), float(still)))
    rows.sort(key=lambda r: (-r[2], r[0]))
    return tuple(rows)


def cures(grid: str) -> list[tuple[str, float]]:
    """Policies that keep updates on this grid, with bytes a weight in all: codes and what a policy keeps."""
    weight = named(grid).bytes_per_weight
    return [
        ("sr", weight),
        ("eco", weight),
        ("kahan in bfloat16", weight + 2),
        ("kahan", weight + 4),
        ("master", weight + 4),
    ]


def lines(trace: Trace) -> list[str]:
    """The verdict, for a terminal."""
    if not trace.parts:
        return ["No step was recorded."]
    scope = "core" if any(t["group"] in ("attention", "mlp") for t in trace.tensors) else "all"
    steps, n = trace.steps, trace.numel("all")
    dtypes = sorted({t["dtype"] for t in trace.tensors})
    out = [
        f"{len(steps)} steps audited (to step {int(steps[-1])}), {len(trace.tensors)} tensors, {n:,} "
        f"weights; the optimizer sees {', '.join(shown(d) for d in dtypes)}."
    ]
    if trace.manifest["options"]["sample"]:
        share = trace.manifest["options"]["sample"]
        out.append(f"A fixed sample of {share:.0%} of the tiles: {_error(trace)}.")
    for found in findings(trace, "all"):
        kind = "lost" if found.realized else "would be lost"
        out.append("")
        share = f"{found.lost:.1%} of updates {kind} ({found.lost_late:.1%} at the end)"
        out.append(f"{found.grid}: {share}: {found.onset}.")
        if 0 < found.stored < 1:
            out.append(f"  {found.stored:.1%} of the weights are stored on it; the rest is a projection")
        if scope == "core":
            out.append(f"  attention and mlp alone: {float(trace.frozen(found.grid, 'core').mean()):.1%}")
        if found.never_moved is not None:
            out.append(f"  never moved: {found.never_moved:.1%} of the weights")
        if found.stuck:
            out.append(f"  {len(found.stuck)} tensor(s) hardly move:")
            for name, group, share, still in found.stuck[:6]:
                never = "" if np.isnan(still) else f", {still:.0%} never moved"
                out.append(f"    {shown(name)} ({shown(group)}): {share:.1%} of its updates lost{never}")
            if len(found.stuck) > 6:
                out.append(f"    and {len(found.stuck) - 6} more")
        if found.severity != "fine":
            offers = "; ".join(f"{name} {size:g} bytes" for name, size in cures(found.grid))
            out.append(f"  would keep them, in bytes a weight: {offers}")
    out += [
        "",
        "How sure this is: the event at a weight is exact. Grids other than the one the weights are stored "
        "on are a projection of this run; a run on the grid takes another path. Lost updates are not lost "
        "accuracy: what they cost must be measured.",
    ]
    return out


def _error(trace: Trace) -> str:
    """The sampling error of the frozen share, from the largest binomial spread at the sampled size."""
    n, total = trace.numel("all"), sum(int(t["numel"]) for t in trace.tensors)
    tiles = max(1, n // 768)
    worst = 0.5 / np.sqrt(tiles) * np.sqrt(max(0.0, 1 - n / total))
    return f"a share over all tensors has a standard error of at most {worst:.2%} (tiles taken as the unit)"
