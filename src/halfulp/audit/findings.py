"""What a trace says of each of its grids, in numbers: how much is lost, where, from when, what would cure it.

A proposal of zero has nothing to lose, so shares of *lost updates* are of those that were not zero; the
event itself, and every table, counts it as frozen. One that is not finite has no meaning at all, and no share
counts it. Under a policy that keeps what it does not write, an unchanged code is not a loss. In words:
:mod:`halfulp.audit.verdict`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from halfulp.audit.stored_on import moved_on_grid, on_grid, policies
from halfulp.grids import grid as named
from halfulp.measures.crossings import Crossing, crossing
from halfulp.trace import Array, Recorded, Scope

STUCK = 0.99
"""A tensor counts as stuck if this share of its updates is lost."""
NOT_FINITE = "no proposal was finite"
ALWAYS = ("sr", "kahan", "master")
"""Policies that every optimizer admits: known without asking it."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One grid."""

    grid: str
    stored: float
    """Share of the weights that are stored on the grid."""
    idle: float
    """Share of the proposals that were zero: nothing to lose, and not counted as updates."""
    lost: float
    """Share of updates lost over the run; NaN if none was finite."""
    lost_late: float
    """Over its last tenth."""
    onset: str
    never_moved: float | None
    stuck: tuple[tuple[str, str, float, float], ...]
    """(name, group, share of updates lost, share that never moved) of tensors that hardly move."""
    gain: float | None
    """How much of the update arrives, at an average step; None where proposals are not known."""
    cosine: float | None
    """Between what is proposed and what arrives."""

    @property
    def realized(self) -> bool:
        """Whether this happened: every weight is stored on the grid."""
        return self.stored == 1.0

    @property
    def severity(self) -> str:
        if self.lost != self.lost:
            return NOT_FINITE
        if self.lost_late >= 0.5:
            return "most updates are lost"
        if self.lost_late >= 0.05 or self.stuck:
            return "some updates are lost"
        return "fine"


def findings(trace: Recorded, scope: Scope = "all") -> list[Finding]:
    """What a trace says of each of its grids."""
    return [finding(trace, g, scope) for g in trace.grids]


def finding(trace: Recorded, grid: str, scope: Scope) -> Finding:
    """One of them, over a scope of tensors."""
    f, steps = lost_series(trace, grid, scope), trace.steps_of(scope)
    there = ~np.isnan(f)
    f, steps = f[there], steps[there]
    followed = trace.manifest["options"]["never_moved"]
    return Finding(
        grid=grid,
        stored=_stored(trace, grid, scope),
        idle=float(trace.zero_proposals(scope).mean()),
        lost=average(f),
        lost_late=average(f[-max(1, len(f) // 10) :]),
        onset=onset_words(crossing(f, steps=steps)) if len(f) else NOT_FINITE,
        never_moved=float(trace.never_moved(grid, scope)[-1]) if followed else None,
        stuck=_stuck(trace, grid, followed, trace.ids("all" if isinstance(scope, str) else scope)),
        gain=known(trace.gain(grid, scope)),
        cosine=known(trace.cosine(grid, scope)),
    )


def role_findings(trace: Recorded) -> list[tuple[str, Recorded, bool, Finding]]:
    """What accumulates beside the weights: the role, its trace, whether it is stored on the grid, and what of
    that, or else of all of it, is lost."""
    out = []
    for role, beside in trace.roles.items():
        if beside.recorded:
            home = moved_on_grid(beside, beside.grids[0])
            out.append((role, beside, bool(home), finding(beside, beside.grids[0], home or "all")))
    return out


def lost_updates(frozen: Array, zero: Array, bad: Array | float = 0.0) -> Array:
    """The share of updates that is lost, from the shares of weights that are frozen, not asked, not finite.

    An update is a finite proposal other than zero. NaN where nothing was asked and something was not finite.

    >>> lost_updates(np.array([0.9, 1.0]), np.array([0.8, 1.0])).round(6).tolist()
    [0.5, 0.0]
    >>> lost_updates(np.array([0.2, 0.0]), np.zeros(2), np.array([0.6, 1.0])).round(6).tolist()
    [0.5, nan]
    """
    asked = 1 - zero - bad
    some = asked > 2.0**-51  # three roundings of 2**-53 are nothing; one of fewer than 2**51 weights is
    none = np.where(np.asarray(bad) > 0, np.nan, 0.0)
    return np.where(some, np.maximum(frozen - zero, 0) / np.where(some, asked, 1), none)


def lost_series(trace: Recorded, grid: str, scope: Scope = "all") -> Array:
    """The share of a scope's updates that is lost, one value a recorded step."""
    return lost_updates(trace.frozen(grid, scope), trace.zero_proposals(scope), trace.nonfinite(scope))


def average(shares: Array) -> float:
    """The mean over the steps that have a value; NaN if none has."""
    known = shares[~np.isnan(shares)]
    return float(known.mean()) if len(known) else float("nan")


def known(shares: Array) -> float | None:
    """The mean over the steps that have a value, if one has."""
    mean = average(shares)
    return None if mean != mean else mean


def onset_words(found: Crossing) -> str:
    """When a majority of updates is lost."""
    words = {
        "at-initialisation": "a majority at the first step",
        "later": f"majority from step {found.first}",
        "absent": "never a majority",
        "undecided": f"a majority at the first step that was audited ({found.first})",
    }[found.category]
    if found.persistent == found.first:
        whole = {"at-initialisation": "from the first step on", "later": f"{words} to the end of the record"}
        return whole.get(found.category, words)
    if found.persistent is not None:
        return f"{words}, from step {found.persistent} to the end of the record"
    return words if found.first is None else f"{words}, less at the end"


def _stored(trace: Recorded, grid: str, scope: Scope) -> float:
    """The share of a scope's weights that are stored on a grid."""
    ids = trace.ids(scope)
    return trace.numel(sorted(set(ids) & set(on_grid(trace, grid)))) / trace.numel(ids)


def _stuck(
    trace: Recorded, grid: str, followed: bool, ids: Sequence[int]
) -> tuple[tuple[str, str, float, float], ...]:
    size = {t["id"]: t for t in trace.tensors if t["id"] in ids}
    steps = len(trace.steps)
    known = pl.col("zero_proposal") * pl.col("tensor").is_in(trace.tells_zero())
    zero = trace.scan("tensors").group_by("tensor").agg(known.sum(), pl.col("nonfinite").sum())
    frame = (
        trace.scan()
        .filter(pl.col("grid") == trace.grids.index(grid), pl.col("tensor").is_in(list(size)))
        .group_by("tensor")
        .agg(pl.col("frozen").sum(), pl.len().alias("n"), pl.col("never_moved").sort_by("step").last())
        .join(zero, on="tensor")
        .collect()
    )
    rows = []
    for tensor, frozen, n, never, idle, bad in frame.iter_rows():
        t = size[tensor]
        asked = n * t["recorded"] - idle - bad
        share = (frozen - idle) / asked if asked else 0.0
        still = never / t["recorded"] if followed else float("nan")
        if share >= STUCK and n >= steps / 2:
            rows.append((str(t["name"]), str(t["group"]), float(share), float(still)))
    rows.sort(key=lambda r: (-r[2], r[0]))
    return tuple(rows)


def cures(trace: Recorded, grid: str) -> list[tuple[str, float]]:
    """Policies that keep updates on this grid, with bytes a weight in all: codes and what a policy keeps.

    Only those that the optimizers of the run admit, and no masters where the optimizer steps them already.
    """
    weight = named(grid).bytes_per_weight
    offers = [
        ("sr", weight),
        ("eco", weight),
        ("kahan in bfloat16", weight + 2),
        ("kahan", weight + 4),
        ("master", weight + 4),
    ]
    there = len(copies(trace)) == len(trace.tensors)
    return [o for o in offers if admitted(trace, o[0].split()[0]) and not (there and o[0] == "master")]


def admitted(trace: Recorded, policy: str) -> bool:
    """Whether every optimizer of a run can be wrapped with a policy, as they said when it was recorded."""
    optimizers = trace.manifest.get("optimizers") or [{}]
    return all(policy in o.get("admits", ALWAYS) for o in optimizers)


def copies(trace: Recorded) -> list[int]:
    """The tensors of which the model holds a copy in a narrower dtype: the optimizer steps masters."""
    return [t["id"] for t in trace.tensors if t.get("copy")]


def keeping(trace: Recorded) -> str | None:
    """The write-back policies of a run, if they keep what they do not write; None if updates are lost."""
    names = policies(trace)
    return " and ".join(names) if names and "rne" not in names else None


def is_cast(trace: Recorded) -> bool:
    """Whether a trace is of copies that are written from main parameters: that of a ``CastAudit``."""
    return bool(trace.manifest["run"].get("cast"))
