"""An answer in words: what a run would lose on each grid, where, from when, and what would cure it.

Nothing is said that the evidence does not carry. A realized event (the grid that the weights are stored on)
is exact. Any other grid is a projection of this run: it assumes that a low-precision run would follow the
same path, which it does not exactly, and it says nothing about the loss. A proposal of zero has nothing to
lose, so shares of *lost updates* are of those that were not zero; the event itself, and every table, counts
it as frozen. Under a policy that keeps what it does not write, an unchanged code is not a loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import polars as pl
import torch

from halfulp.audit.crossings import Crossing, crossing
from halfulp.audit.groups import CORE
from halfulp.grids import CONTAINERS
from halfulp.grids import grid as named
from halfulp.text import shown
from halfulp.trace import Array, Scope, Trace

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in CONTAINERS}

IDLE = 0.005
"""From this share on, proposals of zero are mentioned."""
STUCK = 0.99
"""A tensor counts as stuck if this share of its updates is lost."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One grid."""

    grid: str
    stored: float
    """Share of the weights that are stored on the grid."""
    idle: float
    """Share of the proposals that were zero: nothing to lose, and not counted as updates."""
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


def findings(trace: Trace, scope: Scope = "all") -> list[Finding]:
    """What a trace says of each of its grids."""
    return [_finding(trace, g, scope) for g in trace.grids]


def lost_updates(frozen: Array, zero: Array) -> Array:
    """The share of non-zero proposals that is lost, from the shares of frozen weights and zero proposals.

    >>> lost_updates(np.array([0.9, 1.0]), np.array([0.8, 1.0])).round(6).tolist()
    [0.5, 0.0]
    """
    asked = 1 - zero
    return np.where(asked > 0, np.maximum(frozen - zero, 0) / np.where(asked > 0, asked, 1), 0.0)


def onset_words(found: Crossing) -> str:
    """When a majority of updates is lost."""
    words = {
        "at-initialisation": "from the first step on",
        "later": f"majority from step {found.first}",
        "absent": "never a majority",
        "undecided": f"a majority at the first step that was audited ({found.first})",
    }[found.category]
    if found.category == "later" and found.persistent == found.first:
        return f"{words} to the end of the record"
    if found.category == "later" and found.persistent is not None:
        return f"{words}, from step {found.persistent} to the end of the record"
    return words


def _finding(trace: Trace, grid: str, scope: Scope) -> Finding:
    zero = trace.zero_proposals(scope)
    f = lost_updates(trace.frozen(grid, scope), zero)
    followed = trace.manifest["options"]["never_moved"]
    late = f[-max(1, len(f) // 10) :]
    return Finding(
        grid=grid,
        stored=_stored(trace, grid, scope),
        idle=float(zero.mean()),
        lost=float(f.mean()),
        lost_late=float(late.mean()),
        onset=onset_words(crossing(f, steps=trace.steps_of(scope))),
        never_moved=float(trace.never_moved(grid, scope)[-1]) if followed else None,
        stuck=_stuck(trace, grid, followed, trace.ids("all" if isinstance(scope, str) else scope)),
    )


def _stored(trace: Trace, grid: str, scope: Scope) -> float:
    """The share of a scope's weights that are stored on a grid."""
    ids = trace.ids(scope)
    return trace.numel(sorted(set(ids) & set(on_grid(trace, grid)))) / trace.numel(ids)


def on_grid(trace: Trace, grid: str) -> list[int]:
    """The tensors that are stored on a grid."""
    return [t["id"] for t in trace.tensors if _same_values(t["stored"], grid, t["dtype"])]


def _same_values(stored: str, grid: str, dtype: str) -> bool:
    """Whether two names (bf16, bfloat16) mean the same values in a container."""
    first, second = (replace(named(name).within(DTYPES[dtype]), name="", note="") for name in (stored, grid))
    return first == second


def _stuck(
    trace: Trace, grid: str, followed: bool, ids: Sequence[int]
) -> tuple[tuple[str, str, float, float], ...]:
    size = {t["id"]: t for t in trace.tensors if t["id"] in ids}
    steps = len(trace.steps)
    known = pl.col("zero_proposal") * pl.col("tensor").is_in(trace.in_full())
    zero = trace.scan("tensors").group_by("tensor").agg(known.sum())
    frame = (
        trace.scan()
        .filter(pl.col("grid") == trace.grids.index(grid), pl.col("tensor").is_in(list(size)))
        .group_by("tensor")
        .agg(pl.col("frozen").sum(), pl.len().alias("n"), pl.col("never_moved").sort_by("step").last())
        .join(zero, on="tensor")
        .collect()
    )
    rows = []
    for tensor, frozen, n, never, idle in frame.iter_rows():
        t = size[tensor]
        asked = n * t["recorded"] - idle
        share = (frozen - idle) / asked if asked else 0.0
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


def policies(trace: Trace) -> list[str]:
    """The write-back policies of a run, by name; none where the optimizer writes weights itself."""
    specs = [spec for o in trace.manifest.get("optimizers", ()) for spec in o.get("policies", ())]
    return list(dict.fromkeys(str(spec).partition("(")[0] for spec in specs))


def keeping(trace: Trace) -> str | None:
    """The write-back policies of a run, if they keep what they do not write; None if updates are lost."""
    names = policies(trace)
    return " and ".join(names) if names and "rne" not in names else None


def why_kept(policy: str) -> str:
    """Why an unchanged code is not a lost update under a policy."""
    if policy in ("sr", "deadzone-sr", "dqt"):
        return "a small update moves a weight seldom, but by a whole gap, and is right on average"
    return "what is not written is carried to the next step"


def lines(trace: Trace) -> list[str]:
    """The verdict, for a terminal."""
    if not trace.parts:
        return ["No step was recorded."]
    steps, n = trace.steps, trace.numel("all")
    dtypes = sorted({t["dtype"] for t in trace.tensors})
    out = [
        f"{len(steps)} steps audited (to step {int(steps[-1])}), {len(trace.tensors)} tensors, {n:,} "
        f"weights; the optimizer sees {', '.join(shown(d) for d in dtypes)}."
    ]
    if trace.manifest["options"]["sample"]:
        share = trace.manifest["options"]["sample"]
        out.append(f"A fixed sample of {share:.0%} of the tiles: {_error(trace)}.")
    for grid in trace.grids:
        out += ["", *_grid_lines(trace, grid)]
    out += [
        "",
        "How sure this is: the event at a weight is exact. Grids other than the one the weights are stored "
        "on are a projection of this run; a run on the grid takes another path. Lost updates are not lost "
        "accuracy: what they cost must be measured.",
    ]
    return out


def _grid_lines(trace: Trace, grid: str) -> list[str]:
    """One grid: what happened to the weights that are stored on it, or else what would."""
    home = on_grid(trace, grid)
    scope: Scope = home or "all"
    found, policy = _finding(trace, grid, scope), keeping(trace) if home else None
    rest = sorted({t["id"] for t in trace.tensors} - set(home)) if home else []
    out = []
    if policy is None:
        kind = "lost" if found.realized else "would be lost"
        late = f"{found.lost_late:.1%} at the end"
        out.append(f"{grid}: {found.lost:.1%} of updates {kind} ({late}): {found.onset}.")
        if found.idle >= IDLE:
            out.append(f"  {found.idle:.1%} of the proposals were zero, with nothing to lose: not counted")
    else:
        out.append(f"{grid}, {policy} write-back: {found.lost:.1%} of codes stayed at an average step.")
        out.append(f"  not a loss: {why_kept(policy)}")
    core = [t["id"] for t in trace.tensors if t["group"] in CORE and (not home or t["id"] in home)]
    if core and policy is None:
        share = lost_updates(trace.frozen(grid, core), trace.zero_proposals(core)).mean()
        out.append(f"  attention and mlp alone: {share:.1%}")
    if found.never_moved is not None:
        out.append(f"  never moved: {found.never_moved:.1%} of the weights")
    if trace.manifest["options"]["decay"] and policy is None:
        out += _decay_lines(trace, grid, scope)
    if found.stuck and policy is None:
        out.append(f"  {len(found.stuck)} tensor(s) hardly move:")
        for name, group, lost, still in found.stuck[:6]:
            never = "" if np.isnan(still) else f", {still:.0%} never moved"
            out.append(f"    {shown(name)} ({shown(group)}): {lost:.1%} of its updates lost{never}")
        if len(found.stuck) > 6:
            out.append(f"    and {len(found.stuck) - 6} more")
        flat = {t["name"] for t in trace.tensors if len(t["shape"]) < 2}
        if not home and any(name in flat for name, *_ in found.stuck):
            out.append(
                "    (WriteBack leaves tensors of one dimension in full precision, unless told otherwise)"
            )
    if rest:
        share = lost_updates(trace.frozen(grid, rest), trace.zero_proposals(rest)).mean()
        part = trace.numel(rest) / trace.numel("all")
        out.append(
            f"  {len(rest)} tensor(s) with {part:.1%} of the weights are not stored on it; there {share:.1%} "
            "would be lost"
        )
    if policy is None and found.severity != "fine":
        offers = "; ".join(f"{name} {size:g}" for name, size in cures(grid))
        out.append(f"  would keep them, in bytes a weight when stored packed: {offers}")
    return out


def _decay_lines(trace: Trace, grid: str, scope: Scope) -> list[str]:
    """Weight decay alone and the rest of the update alone, where they were audited apart."""
    decay, rest = (trace.series(c, grid, scope) for c in ("frozen_decay", "frozen_gradient"))
    if not len(decay):
        return ["  weight decay: none that is decoupled"]
    return [f"  alone, {decay.mean():.1%} of weight decay would be lost, and {rest.mean():.1%} of the rest"]


def _error(trace: Trace) -> str:
    """The sampling error of the frozen share, from the largest binomial spread at the sampled size."""
    n, total = trace.numel("all"), sum(int(t["numel"]) for t in trace.tensors)
    tiles = max(1, n // 768)
    worst = 0.5 / np.sqrt(tiles) * np.sqrt(max(0.0, 1 - n / total))
    return f"a share over all tensors has a standard error of at most {worst:.2%} (tiles taken as the unit)"
