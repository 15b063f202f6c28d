"""Findings of a trace by grid, in numbers: how much is lost, where, from when, what would cure it.

A proposal of zero has nothing to lose, so shares of *lost updates* are of those that were not zero; the
event itself, and every table, counts it as frozen. One that is not finite has no meaning at all, and no share
counts it. Under a policy that keeps what it does not write, an unchanged code is not a loss. In words:
:mod:`halfulp.verdicts.answer`.

A share counts updates; it does not weigh them. Where scales move, few may be lost and little arrive all the
same. So how bad a grid is depends on both, and :func:`severity` alone decides what it is called:

    ==================== ========== ============== ==========
    severity             lost, late arrives (gain) cosine
    ==================== ========== ============== ==========
    most, or strongly    >= 50%     < 50%          < 0.5
    some, or distorted   >= 5%      < 90%          < 0.9
    fine                 less       more           more
    ==================== ========== ============== ==========

with "some" also where a tensor hardly moves. *Lost, late* is the share over the last tenth of the steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from halfulp.measures.crossings import Majority, majority
from halfulp.numbers.grids import grid as named
from halfulp.trace import Array, Recorded, Scope
from halfulp.trace.stored_on import NEAREST, default_scope, moved_on_grid, on_grid, policies
from halfulp.verdicts import held
from halfulp.writeback.policies import POLICIES

HARDLY = 0.99
"""A tensor hardly moves if this share of its updates is lost."""
NOT_FINITE, UNASKED = "no proposal was finite", "no update was proposed"
NO_SHARE = (NOT_FINITE, UNASKED)
"""Severities of a run without a share of lost updates."""
MOST, SOME, FINE = "most updates are lost", "some updates are lost", "fine"
STRONGLY, DISTORTED = "updates are strongly distorted", "updates are distorted"
ALWAYS = ("sr", "kahan", "master")
"""Policies that every optimizer admits: known without asking it."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One grid."""

    grid: str
    measured: bool
    """True if measured, because every weight concerned is stored on the grid; False for a forecast."""
    of: float
    """Share of the weights concerned: those stored on the grid, or all."""
    idle: float
    """Share of the proposals that were zero: nothing to lose, and not counted as updates."""
    lost: float
    """Share of updates lost, the mean over the recorded steps that had updates; NaN if none had."""
    lost_late: float
    """Mean share over the last tenth of these steps."""
    majority: Majority | None
    """When more than half of the updates of each step are lost, if that lasts."""
    never_moved: float | None
    hardly: tuple[tuple[str, str, float, float], ...]
    """(name, group, share of updates lost, share that never moved) of tensors that hardly move."""
    gain: float | None
    """Share of the update that arrives at an average step; None if proposals are not known."""
    cosine: float | None
    """Cosine between the proposed update and the update that arrives."""

    @property
    def severity(self) -> str:
        """Return the severity of the finding as one of a few fixed phrases."""
        phrase = severity(self.lost, self.lost_late, self.gain, self.cosine, bool(self.hardly))
        return UNASKED if phrase == NOT_FINITE and self.idle == 1 else phrase


def severity(lost: float, late: float, gain: float | None, cosine: float | None, hardly: bool) -> str:
    """Say how bad a grid is, by what is lost and by what arrives: the table at the top of this module.

    >>> severity(0.012, 0.012, 0.254, 0.35, False), severity(0.3, 0.382, 0.943, 0.91, False)
    ('updates are strongly distorted', 'some updates are lost')
    """
    if lost != lost:
        return NOT_FINITE
    arrives = min(1.0 if x is None else x for x in (gain, cosine))
    if late >= 0.5:
        return MOST
    if arrives < 0.5:
        return STRONGLY
    if late >= 0.05 or hardly:
        return SOME
    return DISTORTED if arrives < 0.9 else FINE


def majority_words(majority: Majority | None) -> str:
    """Say when a majority is lost; one that does not last is none."""
    return "no lasting majority" if majority is None else f"a majority {majority.when}"


def findings(trace: Recorded, scope: Scope | None = None) -> list[Finding]:
    """Return a finding for each grid; by default of the tensors that are stored on it, or else of all."""
    return [finding(trace, g, scope) for g in trace.grids]


def finding(trace: Recorded, grid: str, scope: Scope | None = None) -> Finding:
    """Return the finding for one grid, over a scope of tensors."""
    ids = trace.ids(concerned(trace, grid) if scope is None else scope)
    f, steps = trace.frozen(grid, ids), trace.steps_of(ids)
    there = ~np.isnan(f)
    f, steps = f[there], steps[there]
    followed = trace.manifest["options"]["never_moved"]
    return Finding(
        grid=grid,
        measured=set(ids) <= set(on_grid(trace, grid)),
        of=trace.numel(ids) / trace.numel("all"),
        idle=float(trace.zero_proposals(ids).mean()),
        lost=average(f),
        lost_late=average(f[-max(1, len(f) // 10) :]),
        majority=majority(f, steps=steps) if len(f) else None,
        never_moved=float(trace.never_moved(grid, ids)[-1]) if followed else None,
        hardly=_hardly(trace, grid, followed, ids),
        gain=known(trace.gain(grid, ids)),
        cosine=known(trace.cosine(grid, ids)),
    )


def role_findings(trace: Recorded) -> list[tuple[str, Recorded, bool, Finding]]:
    """List the tracked optimizer states: name, trace, whether it is stored on the grid, and the finding."""
    out = []
    for role, beside in trace.roles.items():
        if beside.recorded:
            home = moved_on_grid(beside, beside.grids[0])
            out.append((role, beside, bool(home), finding(beside, beside.grids[0])))
    return out


def average(shares: Array) -> float:
    """Return the mean over the steps that have a value; NaN if none has."""
    known = shares[~np.isnan(shares)]
    return float(known.mean()) if len(known) else float("nan")


def known(shares: Array) -> float | None:
    """Return the mean over the steps that have a value, if one has."""
    mean = average(shares)
    return None if mean != mean else mean


def _hardly(
    trace: Recorded, grid: str, followed: bool, ids: Sequence[int]
) -> tuple[tuple[str, str, float, float], ...]:
    """Return the tensors of a scope that hardly move and were part of half of the steps at least."""
    steps, shares = len(trace.steps), trace.lost_by_tensor(grid)
    counts = trace.scan("grids", "step", "tensor", "never_moved")
    counts = counts.take(slice(trace.grids.index(grid), None, len(trace.grids))).sort("step")
    last, many = dict(counts.select("tensor", "never_moved").rows()), Counter(counts["tensor"].tolist())
    known = {tensor: (many[tensor], last[tensor]) for tensor in set(ids) & last.keys()}
    rows = []
    for t in (t for t in trace.tensors if t["id"] in known):
        n, never = known[t["id"]]
        if shares[t["id"]] >= HARDLY and n >= steps / 2:
            still = never / t["recorded"] if followed else float("nan")
            rows.append((str(t["name"]), str(t["group"]), shares[t["id"]], float(still)))
    return tuple(sorted(rows, key=lambda r: (-r[2], r[0])))


def cures(trace: Recorded, grid: str) -> list[tuple[str, float]]:
    """Return policies that preserve updates on this grid, with total bytes per weight (codes and state).

    Only policies that the run's optimizers admit are returned, without masters if the optimizer already steps
    them.
    """
    weight = named(grid).bytes_per_weight
    offers = [(name, weight + kept) for kind in POLICIES.values() for name, kept in kind.offers]
    there = len(copies(trace)) == len(trace.tensors)
    return [o for o in offers if admitted(trace, o[0].split()[0]) and not (there and o[0] == "master")]


def admitted(trace: Recorded, policy: str) -> bool:
    """Return True if every optimizer of a run can be wrapped with a policy, as said when it was recorded."""
    optimizers = trace.manifest.get("optimizers") or [{}]
    return all(policy in o.get("admits", ALWAYS) for o in optimizers)


def copies(trace: Recorded) -> list[int]:
    """Return the masters: tensors of which the model holds a copy in a narrower dtype."""
    return [t["id"] for t in trace.tensors if t.get("copy")]


def keeping(trace: Recorded, grid: str) -> str | None:
    """Return what keeps all updates that are not written to a grid: policies, or states; or None."""
    if unkept(trace, grid):
        return None
    return " and ".join([*policies(trace), *(held.keepers(trace) or ())]) or None


def unkept(trace: Recorded, grid: str) -> list[int]:
    """Return the tensors stored on a grid whose small updates are gone: neither policy nor state keeps them.

    A run may have both kinds: a write-back around one of two optimizers, or of some tensors (``params=``).
    """
    ids = moved_on_grid(trace, grid)
    if NEAREST in policies(trace):
        return ids
    if held.keepers(trace) is not None:
        return []
    own = held.written(trace)  # in older traces its grid may be called as the dtype is
    plain = {t["id"] for t in trace.tensors if t["stored"] == t["dtype"] and t["stored"] not in own}
    return [i for i in ids if i in plain]


def concerned(trace: Recorded, grid: str) -> Scope:
    """Return the tensors that a finding is about: those that lose updates, where others do not."""
    return unkept(trace, grid) or default_scope(trace, grid)


def is_cast(trace: Recorded) -> bool:
    """Return True if a trace is of copies that are written from main parameters: that of a ``CastAudit``."""
    return bool(trace.manifest["run"].get("cast"))
