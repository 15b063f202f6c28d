"""An answer in words: what a run would lose on each grid, where, from when, and what would cure it.

Nothing is said that the evidence does not carry. A realized event (the grid that the weights are stored on)
is exact. Any other grid is a projection of this run: it assumes that a low-precision run would follow the
same path, which it does not exactly, and it says nothing about the loss; a rehearsal does
(:mod:`halfulp.audit.costs`). What was not finite comes first. The numbers are those of
:mod:`halfulp.audit.findings`.

The change d is the one that the optimizer made, after minus before in the parameter's own dtype. Where that
dtype is coarse itself, the optimizer's own rounding is in d: on a grid coarser still, the event is exact for
the change that was left, not for the one that a float32 optimizer would have made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from halfulp import pictures
from halfulp.audit import costs, holdings
from halfulp.audit.calibration import Calibration
from halfulp.audit.findings import (
    NOT_FINITE,
    Finding,
    average,
    copies,
    cures,
    finding,
    findings,
    is_cast,
    keeping,
    lost_series,
    role_findings,
)  # fmt: skip
from halfulp.audit.stored_on import moved_on_grid, on_grid
from halfulp.measures.groups import CORE
from halfulp.text import count, plain, shown
from halfulp.trace import Recorded, Scope

IDLE = 0.005
"""From this share on, proposals of zero are mentioned."""
CAST = (
    "How sure this is: a stored value counts as unchanged if the cast of its main value has the same value: "
    "exact. On a grid that the copies are not stored on, the casts of both are compared. What would be lost "
    "without the main parameters is another question: audit their optimizer (hu.Audit)."
)
GRADIENTS = "grad"
"""The role of buffers in which gradients accumulate."""
NAMED = 3
"""Tensors that are named in a sentence."""


@dataclass(frozen=True, repr=False)
class Verdict:
    """A verdict in words: ``str()`` is what the command line prints."""

    lines: tuple[str, ...]
    findings: tuple[Finding, ...]

    def __str__(self) -> str:
        return "\n".join(self.lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = [
            (
                f.grid,
                f.lost,
                f"{f.severity}; {pictures.percent(f.lost_late)} at the end"
                + ("" if f.never_moved is None else f"; {f.never_moved:.1%} never moved"),
            )
            for f in self.findings
        ]
        lost = "<div>updates lost, or that would be, by grid</div>" if rows else ""
        return pictures.framed("", lost, pictures.bars(rows), pictures.pre(str(self)))


def verdict(
    trace: Recorded, trouble: str | None = None, *, calibration: Calibration | None = None
) -> Verdict:
    """The answer in words, as the command line prints it: ``print(hu.verdict(trace))``.

    ``trouble``: what a disk that was full could not note in the trace (``audit.trouble``). ``calibration``:
    an earlier pair of runs, for the losses of rehearsals.
    """
    found = tuple(findings(trace)) if trace.recorded and trace.tensors else ()
    return Verdict(tuple(_lines(trace, found, trouble or trace.trouble, calibration)), found)


def arrival_words(found: Finding) -> str | None:
    """How much of the update arrives; None where that is not known."""
    if found.gain is None:
        return None
    along = "" if found.cosine is None else f", cosine {found.cosine:.2f} with what was proposed"
    return f"{found.gain:.1%} of the update {'arrives' if found.realized else 'would arrive'}{along}"


def copies_words(trace: Recorded) -> str | None:
    """What it means that the optimizer steps masters; None where it does not."""
    held = set(copies(trace))
    if not held:
        return None
    there = [t for t in trace.tensors if t["id"] in held]
    narrow = " and ".join(sorted({shown(str(t["copy"]), 20) for t in there}))
    some = "" if len(there) == len(trace.tensors) else f" of {len(there)} of {len(trace.tensors)} tensors"
    return (
        f"The optimizer steps a {' and '.join(sorted({shown(t['dtype'], 20) for t in there}))} copy{some}; "
        f"the model holds {narrow}. Masters are there already: nothing stored in {narrow} accumulates. What "
        "follows says what would be lost without that copy."
    )


def nonfinite_words(trace: Recorded) -> str | None:
    """How many proposals or weights were not finite, where and since when; None if all were."""
    mine = pl.col("tensor").is_in([t["id"] for t in trace.tensors])
    bad = trace.scan("tensors").filter(mine, pl.col("nonfinite") > 0)
    frame = bad.select("step", "tensor", "nonfinite").sort("step").collect()
    if not len(frame):
        return None
    hit = set(frame["tensor"])
    names = [shown(str(t["name"]), 40) for t in trace.tensors if t["id"] in hit]
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    steps, all_steps = frame["step"].unique().sort(), trace.steps
    first, last = int(steps[0]), int(steps[-1])
    if len(steps) == int((all_steps >= first).sum()):
        when = f"from step {first} on"
    else:
        when = f"at {count(len(steps), 'step')}, first at {first}, last at {last}"
    return (
        f"NOT FINITE: {int(frame['nonfinite'].sum()):,} weights or proposals were NaN or infinite {when}, in "
        f"{len(names)} of {count(len(trace.tensors), 'tensor')} ({', '.join(names[:NAMED])}{more}). Shares "
        "of lost updates are of the finite ones."
    )


def rounded_words(trace: Recorded) -> str | None:
    """What a grid says of weights that are stored on another one that is coarse; None if there are none."""
    full = set(trace.in_full())
    coarse = {t["id"]: shown(str(t["stored"]), 20) for t in trace.tensors if t["id"] not in full}
    if not any(set(coarse) - set(on_grid(trace, grid)) for grid in trace.grids):
        return None
    stored = " and ".join(sorted(set(coarse.values())))
    return (
        f"Weights are stored in {stored}: the change is the one that was left after that rounding, so on "
        "another grid the event is that of this change, not of what a float32 optimizer would have made."
    )


def why_kept(policy: str) -> str:
    """Why an unchanged code is not a lost update under a policy."""
    if policy in ("sr", "deadzone-sr", "dqt"):
        return "a small update moves a weight seldom, but by a whole gap, and is right on average"
    return "what is not written is carried to the next step"


def _lines(
    trace: Recorded, found: Sequence[Finding], trouble: str | None, calibration: Calibration | None
) -> list[str]:
    missing = [f"INCOMPLETE: {trouble}"] if trouble else []
    if not trace.recorded:
        return [*missing, "No step was recorded."]
    if not trace.tensors:
        return ["Nothing was recorded: none of the tensors has a weight."]
    steps, n = trace.steps, trace.numel("all")
    dtypes = sorted({t["dtype"] for t in trace.tensors})
    out = [
        f"{count(len(steps), 'step')} audited (to step {int(steps[-1])}), "
        f"{count(len(trace.tensors), 'tensor')}, {n:,} weights; the optimizer sees "
        f"{', '.join(shown(d) for d in dtypes)}."
    ]
    if holds := holdings.words(trace):
        out.append(holds)
    if bad := nonfinite_words(trace):
        out.insert(0, bad)
    out[:0] = missing
    if there := copies_words(trace):
        out.append(there)
    if trace.manifest["options"]["sample"]:
        share = trace.manifest["options"]["sample"]
        out.append(f"A fixed sample of {share:.0%} of the tiles: {_error(trace)}.")
    out += costs.lines(trace, calibration)
    for whole in found:
        out += ["", *_grid_lines(trace, whole)]
    out += role_lines(trace)
    if is_cast(trace):
        out += ["", CAST]
        return [plain(line) for line in out]
    rounded = rounded_words(trace)
    out += [
        "",
        "How sure this is: the event at a weight is exact, for the change that the optimizer made. "
        + (f"{rounded} " if rounded else "")
        + "Grids other than the one the weights are stored on are a projection of this run; a run on the "
        "grid takes another path. Lost updates are not lost accuracy: what they cost must be measured"
        + (", or rehearsed: " + costs.REHEARSED if trace.rehearsals else ", or rehearsed (--rehearse)."),
    ]
    return [plain(line) for line in out]


def role_lines(trace: Recorded) -> list[str]:
    """What accumulates beside the weights: what of it was lost, or would be, and what keeps it."""
    out: list[str] = []
    for role, beside, home, found in role_findings(trace):
        grid = beside.grids[0]
        dtypes = " and ".join(sorted({shown(t["dtype"], 20) for t in beside.tensors}))
        head = f"{shown(role)} ({count(len(beside.tensors), 'tensor')}, {dtypes})"
        if beside.manifest["run"].get("role") == GRADIENTS:
            head = f"{head}, {count(len(beside.steps), 'accumulation')}"
        if found.severity == NOT_FINITE:
            out += ["", f"{head}: nothing can be said, because {NOT_FINITE}."]
            continue
        if home:
            out += ["", f"{head}: {found.lost:.1%} of its updates in {grid} lost."]
        else:
            out += ["", f"{head}: {found.lost:.1%} of its updates would be lost in {grid}."]
        if arrives := arrival_words(found):
            out.append(f"  {arrives}")
        if found.never_moved is not None:
            moved = f"  never moved: {found.never_moved:.1%} of its values"
            out.append(moved if home else f"{moved}, if it were stored so")
        out += [
            f"    {shown(name)}: {lost:.1%} lost" + ("" if np.isnan(still) else f", {still:.0%} never moved")
            for name, _, lost, still in found.stuck[:3]
        ]
        if home and found.severity != "fine":
            out.append(f"  would keep them: {shown(role)} in float32, which takes 2 more bytes a value")
    if coded := holdings.coded_words(trace):
        out += ["", coded]
    for said in unchanged_words(trace):
        out += ["", said]
    return out


def unchanged_words(trace: Recorded) -> list[str]:
    """Of each copy that never changed, what that may mean."""
    return [
        f"{shown(str(role))}: not one of its values changed in {count(len(trace.steps), 'step')}. As it "
        "should be for a reference that is frozen; an average was either never updated, or all of it is "
        "stuck, as with decay 0.9999 in bfloat16: keep it in float32."
        for role in trace.manifest["run"].get("unchanged", ())
    ]


def _grid_lines(trace: Recorded, whole: Finding) -> list[str]:
    """One grid: what happened to the weights that are stored on it, or else what would to all of them."""
    grid = whole.grid
    home = moved_on_grid(trace, grid)
    scope: Scope = home or "all"
    cast = is_cast(trace)
    found = finding(trace, grid, home) if home and not whole.realized else whole
    policy = keeping(trace) if home or cast else None
    if found.severity == NOT_FINITE:
        return [f"{grid}: nothing can be said, because {NOT_FINITE}."]
    out = []
    if policy is None:
        kind = "lost" if found.realized else "would be lost"
        late = f"{found.lost_late:.1%} at the end"
        out.append(f"{grid}: {found.lost:.1%} of updates {kind} ({late}): {found.onset}.")
        if arrives := arrival_words(found):
            out.append(f"  {arrives}")
        if found.idle >= IDLE:
            out.append(f"  {found.idle:.1%} of the proposals were zero, with nothing to lose: not counted")
        out += _core_lines(trace, grid, trace.ids(scope))
    elif cast:
        left = "left" if home else "would leave"
        out.append(
            f"{grid}: a cast {left} {found.lost:.1%} of the stored values as they were, at an average step."
        )
        out.append("  not a loss: the main parameters keep what is not written")
    else:
        out.append(f"{grid}, {policy} write-back: {found.lost:.1%} of codes stayed at an average step.")
        out.append(f"  not a loss: {why_kept(policy)}")
    if found.never_moved is not None:
        out.append(f"  never moved: {found.never_moved:.1%} of the weights")
    if trace.manifest["options"]["decay"] and policy is None:
        out += _decay_lines(trace, grid, scope)
    if found.stuck and policy is None:
        out += _stuck_lines(trace, found, bool(home))
    if home and (rest := sorted({t["id"] for t in trace.tensors} - set(home))):
        share, part = average(lost_series(trace, grid, rest)), trace.numel(rest) / trace.numel("all")
        there = NOT_FINITE if share != share else f"{share:.1%} would be lost"
        out.append(
            f"  {len(rest)} tensor(s) with {part:.1%} of the weights are not stored on it; there {there}"
        )
    if policy is None and found.severity != "fine":
        offers = "; ".join(f"{name} {size:g}" for name, size in cures(trace, grid))
        out.append(f"  would keep them, in bytes a weight when stored packed: {offers}")
        if any(t["stored"] in ("bfloat16", "float16") for t in trace.tensors if t["id"] in home):
            out.append(f'  in one line: optimizer = hu.WriteBack(optimizer, "{grid}", "sr", model=model)')
    return out


def _core_lines(trace: Recorded, grid: str, ids: Sequence[int]) -> list[str]:
    """Attention and mlp alone, as far as there are any beside other tensors."""
    core = [t for t in trace.tensors if t["group"] in CORE and t["id"] in ids]
    if not core or len(core) == len(ids):
        return []
    groups = " and ".join(group for group in CORE if any(t["group"] == group for t in core))
    share = average(lost_series(trace, grid, [t["id"] for t in core]))
    return [f"  {groups} alone: {NOT_FINITE if share != share else f'{share:.1%}'}"]


def _stuck_lines(trace: Recorded, found: Finding, home: bool) -> list[str]:
    out = [f"  {len(found.stuck)} tensor(s) hardly move:"]
    for name, group, lost, still in found.stuck[:6]:
        never = "" if np.isnan(still) else f", {still:.0%} never moved"
        out.append(f"    {shown(name)} ({shown(group)}): {lost:.1%} of its updates lost{never}")
    if len(found.stuck) > 6:
        out.append(f"    and {len(found.stuck) - 6} more")
    flat = {t["name"] for t in trace.tensors if len(t["shape"]) < 2}
    if not home and any(name in flat for name, *_ in found.stuck):
        out.append("    (WriteBack leaves tensors of one dimension in full precision, unless told otherwise)")
    return out


def _decay_lines(trace: Recorded, grid: str, scope: Scope) -> list[str]:
    """Weight decay alone and the rest of the update alone, where they were audited apart."""
    decay, rest = (trace.series(c, grid, scope) for c in ("frozen_decay", "frozen_gradient"))
    if not len(decay):
        return ["  weight decay: none that is decoupled"]
    return [f"  alone, {decay.mean():.1%} of weight decay would be lost, and {rest.mean():.1%} of the rest"]


def _error(trace: Recorded) -> str:
    """The sampling error of the frozen share, from the largest binomial spread at the sampled size."""
    n, total = trace.numel("all"), sum(int(t["numel"]) for t in trace.tensors)
    tiles = max(1, n // 768)
    worst = 0.5 / np.sqrt(tiles) * np.sqrt(max(0.0, 1 - n / total))
    return f"a share over all tensors has a standard error of at most {worst:.2%} (tiles taken as the unit)"
