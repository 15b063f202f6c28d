"""Describe everything that is known of a run, grid by grid: what is lost, where, when, and what would fix it.

The text claims only what the evidence supports. A realized event (the grid that the weights are stored on)
is exact. Any other grid is a projection of this run: it assumes that a low-precision run would follow the
same path, which it does not exactly, and it says nothing about the loss; a rehearsal does
(:mod:`halfulp.verdicts.loss_costs`). What was not finite comes first. The numbers are those of
:mod:`halfulp.verdicts.findings`.

The change d is the one that the optimizer made, after minus before in the parameter's own dtype. Where that
dtype is coarse itself, the optimizer's own rounding is in d: on a grid coarser still, the event is exact for
the change that was left, not for the one that a float32 optimizer would have made.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from halfulp.measures.groups import CORE
from halfulp.text import count, percent, plain, shown
from halfulp.trace import Recorded, Scope
from halfulp.trace.stored_on import moved_on_grid, on_grid, policies
from halfulp.verdicts import held
from halfulp.verdicts import loss_costs as costs
from halfulp.verdicts.counters import counters
from halfulp.verdicts.findings import (  # fmt: skip
    FINE,
    NO_SHARE,
    Finding,
    average,
    concerned,
    copies,
    cures,
    is_cast,
    keeping,
    majority_words,
    role_findings,
)
from halfulp.writeback.policies import POLICIES, Policy

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


def arrival_words(finding: Finding) -> str | None:
    """Say how much of the update arrives; None where that is not known."""
    if finding.gain is None:
        return None
    along = "" if finding.cosine is None else f", cosine {finding.cosine:.2f} with what was proposed"
    return f"{finding.gain:.1%} of the update {'arrives' if finding.measured else 'would arrive'}{along}"


def arriving(finding: Finding) -> str:
    """Format how much of an update arrives: a share that may pass 1."""
    if finding.gain is None:
        return "-"
    return percent(finding.gain) if 0 <= finding.gain <= 1 else f"{finding.gain:.0%}"


def copies_words(trace: Recorded) -> str | None:
    """Explain what it means that the optimizer steps masters; None if it does not."""
    copied = set(copies(trace))
    if not copied:
        return None
    there = [t for t in trace.tensors if t["id"] in copied]
    narrow = " and ".join(sorted({shown(str(t["copy"]), 20) for t in there}))
    some = "" if len(there) == len(trace.tensors) else f" of {len(there)} of {len(trace.tensors)} tensors"
    return (
        f"The optimizer steps a {' and '.join(sorted({shown(t['dtype'], 20) for t in there}))} copy{some}; "
        f"the model holds {narrow}. Masters are there already: nothing stored in {narrow} accumulates. What "
        "follows says what would be lost without that copy."
    )


def nonfinite_words(trace: Recorded) -> str | None:
    """Say how many proposals or weights were not finite, where and since when; None if all were."""
    rows = trace.scan("tensors", "step", "tensor", "nonfinite")
    bad = rows.take((rows["nonfinite"] > 0) & np.isin(rows["tensor"], [t["id"] for t in trace.tensors]))
    if not len(bad):
        return None
    hit = set(bad["tensor"].tolist())
    names = [shown(str(t["name"]), 40) for t in trace.tensors if t["id"] in hit]
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    steps, all_steps = np.unique(bad["step"]), trace.steps
    first, last = int(steps[0]), int(steps[-1])
    if len(steps) == int((all_steps >= first).sum()):
        when = f"from step {first} on"
    else:
        when = f"at {count(len(steps), 'step')}, first at {first}, last at {last}"
    return (
        f"NOT FINITE: {int(bad['nonfinite'].sum()):,} weights or proposals were NaN or infinite {when}, in "
        f"{len(names)} of {count(len(trace.tensors), 'tensor')} ({', '.join(names[:NAMED])}{more}). Shares "
        "of lost updates are of the finite ones."
    )


def rounded_words(trace: Recorded) -> str | None:
    """Explain a grid's numbers for weights that are stored on another, coarse one; None if there are none."""
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
    """Say why an unchanged code is not a lost update under a policy."""
    return POLICIES.get(policy, Policy).why_kept


def state_words(trace: Recorded, finding: Finding) -> str:
    """Say that a state of the optimizer keeps what the weights do not hold."""
    stayed = f"{percent(finding.lost)} of the stored values stayed at an average step"
    return f"{' and '.join(held.keepers(trace) or ())} keeps what {finding.grid} does not hold ({stayed})"


def lines(trace: Recorded, findings: Sequence[Finding]) -> list[str]:
    """Return everything that is known of a run, grid by grid, one line each.

    Args:
        trace: The run, of which something was recorded.
        findings: Its findings.
    """
    steps, n = trace.steps, trace.numel("all")
    dtypes = sorted({t["dtype"] for t in trace.tensors})
    out = [
        f"{count(len(steps), 'step')} audited (to step {int(steps[-1])}), "
        f"{count(len(trace.tensors), 'tensor')}, {n:,} weights; the optimizer sees "
        f"{', '.join(shown(d) for d in dtypes)}."
    ]
    if holds := held.words(trace):
        out.append(holds)
    if there := copies_words(trace):
        out.append(there)
    if trace.manifest["options"]["sample"]:
        share = trace.manifest["options"]["sample"]
        out.append(f"A fixed sample of {share:.0%} of the tiles: {_error(trace)}.")
    out += costs.lines(trace)
    for each in findings:
        out += ["", *_grid_lines(trace, each)]
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
    """Say how much of the tracked optimizer states was lost or would be, and what keeps it."""
    counts = {c.role: c for c in counters(trace)}
    out: list[str] = []
    for role, beside, home, finding in role_findings(trace):
        if role in counts:
            out += ["", counts[role].words]
            continue
        grid = beside.grids[0]
        dtypes = " and ".join(sorted({shown(t["dtype"], 20) for t in beside.tensors}))
        head = f"{shown(role)} ({count(len(beside.tensors), 'tensor')}, {dtypes})"
        if beside.manifest["run"].get("role") == GRADIENTS:
            head = f"{head}, {count(len(beside.steps), 'accumulation')}"
        if finding.severity in NO_SHARE:
            out += ["", f"{head}: nothing can be said, because {finding.severity}."]
            continue
        if home:
            cure = "" if finding.severity == FINE else "; keep it in float32 (2 more bytes per value)"
            out += ["", f"{head}: {finding.lost:.1%} of its updates in {grid} lost{cure}."]
        else:
            out += ["", f"{head}: {finding.lost:.1%} of its updates would be lost in {grid}."]
        if arrives := arrival_words(finding):
            out.append(f"  {arrives}")
        if finding.never_moved is not None:
            moved = f"  never moved: {finding.never_moved:.1%} of its values"
            out.append(moved if home else f"{moved}, if it were stored so")
        out += [
            f"    {shown(name)}: {lost:.1%} lost" + ("" if np.isnan(still) else f", {still:.0%} never moved")
            for name, _, lost, still in finding.hardly[:3]
        ]
    if coded := held.coded_words(trace):
        out += ["", coded]
    for said in unchanged_words(trace):
        out += ["", said]
    return out


def unchanged_words(trace: Recorded) -> list[str]:
    """Explain what it may mean that a copy never changed, one line for each such copy."""
    return [
        f"{shown(str(role))}: not one of its values changed in {count(len(trace.steps), 'step')}. As it "
        "should be for a reference that is frozen; an average was either never updated, or all of it is "
        "stuck, as with decay 0.9999 in bfloat16: keep it in float32."
        for role in trace.manifest["run"].get("unchanged", ())
    ]


def _grid_lines(trace: Recorded, finding: Finding) -> list[str]:
    """Describe what happened to the weights stored on a grid, or what would happen to all weights."""
    grid = finding.grid
    home = moved_on_grid(trace, grid)
    scope = concerned(trace, grid)
    cast = is_cast(trace)
    policy = keeping(trace, grid) if home or cast else None
    if finding.severity in NO_SHARE:
        return [f"{grid}: nothing can be said, because {finding.severity}."]
    out = []
    if policy is None:
        kind = "lost" if finding.measured else "would be lost"
        late = f"{finding.lost_late:.1%} at the end"
        out.append(
            f"{grid}: {finding.lost:.1%} of updates {kind} ({late}): {majority_words(finding.majority)}."
        )
        if arrives := arrival_words(finding):
            out.append(f"  {arrives}")
        if finding.idle >= IDLE:
            out.append(f"  {finding.idle:.1%} of the proposals were zero, with nothing to lose: not counted")
        out += _core_lines(trace, grid, trace.ids(scope))
    elif cast:
        left = "left" if home else "would leave"
        out.append(
            f"{grid}: a cast {left} {finding.lost:.1%} of the stored values as they were, at an average step."
        )
        out.append("  not a loss: the main parameters keep what is not written")
    else:
        by = f"{policy} write-back" if policies(trace) else policy
        out.append(f"{grid}, {by}: {finding.lost:.1%} of codes stayed at an average step.")
        out.append(f"  not a loss: {why_kept(policy) if policies(trace) else state_words(trace, finding)}")
    if finding.never_moved is not None:
        out.append(f"  never moved: {finding.never_moved:.1%} of the weights")
    if trace.manifest["options"]["decay"] and policy is None:
        out += _decay_lines(trace, grid, scope)
    if finding.hardly and policy is None:
        out += _hardly_lines(trace, finding, bool(home))
    if home and (rest := sorted({t["id"] for t in trace.tensors} - set(home))):
        share, part = average(trace.frozen(grid, rest)), trace.numel(rest) / trace.numel("all")
        there = "nothing can be said" if share != share else f"{share:.1%} would be lost"
        out.append(
            f"  {len(rest)} tensor(s) with {part:.1%} of the weights are not stored on it; there {there}"
        )
    if policy is None and finding.severity != FINE:
        offers = "; ".join(f"{name} {size:g}" for name, size in cures(trace, grid))
        out.append(f"  would keep them, in bytes per weight when stored packed: {offers}")
    return out


def _core_lines(trace: Recorded, grid: str, ids: Sequence[int]) -> list[str]:
    """Describe attention and MLP tensors alone, if there are others too."""
    core = [t for t in trace.tensors if t["group"] in CORE and t["id"] in ids]
    if not core or len(core) == len(ids):
        return []
    groups = " and ".join(group for group in CORE if any(t["group"] == group for t in core))
    share = average(trace.frozen(grid, [t["id"] for t in core]))
    return [f"  {groups} alone: {'nothing can be said' if share != share else f'{share:.1%}'}"]


def _hardly_lines(trace: Recorded, finding: Finding, home: bool) -> list[str]:
    out = [f"  {len(finding.hardly)} tensor(s) hardly move:"]
    for name, group, lost, still in finding.hardly[:6]:
        never = "" if np.isnan(still) else f", {still:.0%} never moved"
        out.append(f"    {shown(name)} ({shown(group)}): {lost:.1%} of its updates lost{never}")
    if len(finding.hardly) > 6:
        out.append(f"    and {len(finding.hardly) - 6} more")
    flat = {t["name"] for t in trace.tensors if len(t["shape"]) < 2}
    if not home and any(name in flat for name, *_ in finding.hardly):
        out.append("    (WriteBack leaves tensors of one dimension in full precision, unless told otherwise)")
    return out


def _decay_lines(trace: Recorded, grid: str, scope: Scope) -> list[str]:
    """Describe weight decay and the rest of the update separately, where they were audited so."""
    decay, rest = (trace.series(c, grid, scope) for c in ("frozen_decay", "frozen_gradient"))
    if not len(decay):
        return ["  weight decay: none that is decoupled"]
    return [f"  alone, {decay.mean():.1%} of weight decay would be lost, and {rest.mean():.1%} of the rest"]


def _error(trace: Recorded) -> str:
    """Return the sampling error of the frozen share, from the largest binomial spread at the sampled size."""
    n, total = trace.numel("all"), sum(int(t["numel"]) for t in trace.tensors)
    tiles = max(1, n // 768)
    worst = 0.5 / np.sqrt(tiles) * np.sqrt(max(0.0, 1 - n / total))
    return f"a share over all tensors has a standard error of at most {worst:.2%} (tiles taken as the unit)"
