"""The answer: what was lost, why, where, the line that fixes it, and what that means for rate and loss.

One structure, from which the terminal, the page, JSON and Python show the same. The format that the weights
are in comes first: what it lost is measured and exact. Any other is a projection of this run and takes one
line. Where nothing is worth a change, one line says so. Everything else that is known, grid by grid, is in
``details`` (:mod:`halfulp.verdicts.details`).

>>> print(Answer(headline="This run LOST 94% of its updates.", sections=(Section("Why", ("It is bf16.",)),)))
This run LOST 94% of its updates.
Why    It is bf16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from halfulp.errors import UsageError
from halfulp.measures.groups import CORE
from halfulp.outputs import finite
from halfulp.text import count, percent, plain, shown
from halfulp.trace import Memory, Recorded, Trace
from halfulp.trace.stored_on import NEAREST, moved_on_grid, policies
from halfulp.verdicts import details, held
from halfulp.verdicts import loss_costs as costs
from halfulp.verdicts.findings import (
    DISTORTED,
    FINE,
    HARDLY,
    NO_SHARE,
    NOT_FINITE,
    STRONGLY,
    UNASKED,
    Finding,
    average,
    concerned,
    copies,
    cures,
    findings,
    is_cast,
    keeping,
    unkept,
)
from halfulp.verdicts.fix import Fix, fix_of, number, rate_of

FORMATS = "And if you stored them as"
KINDS = {"attention": "attention", "mlp": "MLP", "embedding": "embeddings", "other": "matrices"}
STUCK = 0.005
"""From this share on, weights that have not moved are mentioned."""
STUCK_GAIN = 0.5
"""Below this share of arriving updates, a run in which next to nothing moves is not said to lose nothing."""
LATE = 0.1
"""The share at the end is named where it is so much above that of the run."""
APART = 0.25
"""A norm gain or bias is named where it loses so much more than the others."""
GAINS = (0.25, 0.9)
"""Gains for which a rate is named: the study ``gain-rate`` has none below, and above it is the same rate."""
MASTERS = 2.1
"""There, masters wanted the rate of the nearest run times its gain, or up to so many times that."""


@dataclass(frozen=True)
class Section:
    """A few lines under one word."""

    name: str
    lines: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The verdict on a run: what it lost or would lose, and how to fix it.

    ``str()`` is what the command line prints; :meth:`text` has the details, :meth:`to_json` the numbers.
    """

    headline: str
    grid: str | None = None
    """The format that the headline is about."""
    notices: tuple[str, ...] = ()
    """Warnings shown before everything else: an incomplete trace, or weights that are not finite."""
    sections: tuple[Section, ...] = ()
    """Why, Where, Fix, Rate, Beside, Loss, Page: those that apply, in this order."""
    formats: tuple[tuple[str, str], ...] = ()
    """Other formats, each with a one-line summary."""
    fix: Fix | None = None
    details: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()

    @property
    def code(self) -> tuple[str, ...]:
        """The lines to paste, if there is a fix."""
        return () if self.fix is None else self.fix.code

    @property
    def lines(self) -> tuple[str, ...]:
        """The lines of the short answer; the price of every format comes last."""
        out = [*self.notices, self.headline]
        prices = [s for s in self.sections if s.name == "Loss" and len(s.lines) > 1]
        for section in (s for s in self.sections if s not in prices):
            names = [section.name, *[""] * len(section.lines)]
            out += [f"{name:6} {line}" for name, line in zip(names, section.lines, strict=False)]
        if self.formats:
            width = max(len(grid) for grid, _ in self.formats)
            out += ["", FORMATS, *(f"  {grid:{width}}  {said}" for grid, said in self.formats)]
        for heading, *lines in (s.lines for s in prices):
            out += ["", heading, *(f"  {line}" for line in lines)]
        return tuple(plain(line) for line in out)

    def section(self, name: str) -> tuple[str, ...]:
        """Return the lines of a section.

        Args:
            name: Such as ``"Why"``, ``"Fix"`` or ``"Loss"``.

        Returns:
            The lines; empty if the section does not apply.
        """
        return next((s.lines for s in self.sections if s.name == name), ())

    def text(self, *, verbose: bool = False) -> str:
        """Return the answer as text.

        Args:
            verbose: Append the details of every grid.
        """
        return "\n".join([*self.lines, *(["", *self.details] if verbose and self.details else [])])

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__

    def to_json(self) -> dict[str, Any]:
        """Return the answer as data for ``json.dumps``.

        Returns:
            The sections by name, the fix, and the numbers of each grid under the names of ``Finding``.
        """
        fix = None if self.fix is None else {**asdict(self.fix), "cost": self.fix.cost}
        return {
            "kind": "halfulp.verdict",
            "version": 1,
            "headline": self.headline,
            "grid": self.grid,
            "notices": list(self.notices),
            "sections": {s.name.lower(): list(s.lines) for s in self.sections},
            "fix": finite(fix),
            "formats": dict(self.formats),
            "grids": [finite({**asdict(f), "severity": f.severity}) for f in self.findings],
            "lines": list(self.lines),
            "details": list(self.details),
        }


def verdict(
    trace: Recorded | Memory | str | Path,
    trouble: str | None = None,
    *,
    page: str | None = None,
) -> Answer:
    """Return the verdict on a run, as the command line prints it: ``print(hu.verdict(trace))``.

    Args:
        trace: A recorded run, a :class:`~halfulp.Memory`, or the folder of a trace.
        trouble: Why recording stopped (``audit.trouble``), if a full disk kept it out of the trace.
        page: The location of the report page, or the command that makes it.

    Returns:
        The answer; ``.text(verbose=True)`` includes the details of every grid.

    Raises:
        UsageError: If ``trace`` is none of these.

    >>> import halfulp as hu, torch
    >>> model, memory = torch.nn.Linear(8, 8).bfloat16(), hu.Memory()
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-7)
    >>> with hu.Audit(optimizer, "bf16", model=model, out=memory):
    ...     model(torch.ones(1, 8).bfloat16()).sum().backward()
    ...     optimizer.step()
    >>> hu.verdict(memory).headline.startswith("This run LOST")
    True
    """
    if isinstance(trace, str | Path):
        trace = Trace.open(trace)
    elif isinstance(trace, Memory):
        trace = trace.trace
    if not isinstance(trace, Recorded):
        raise UsageError(
            f"verdict() takes a trace, a Memory or the folder of a trace, not {type(trace).__name__}."
        )
    trouble = trouble or trace.trouble
    missing = (plain(f"INCOMPLETE: {trouble}"),) if trouble else ()
    if not trace.recorded:
        return Answer(headline="No step was recorded.", notices=missing)
    if not trace.tensors:
        said = "Nothing was recorded: none of the tensors has a weight."
        return Answer(headline=said, notices=missing)
    return answer_of(trace, tuple(findings(trace)), missing, page=page)


def whence(trace: Recorded, folder: object) -> str:
    """Return a line with the number of audited steps and the location of the trace."""
    steps = count(len(trace.steps) if trace.recorded else 0, "step")
    return plain(f"{steps} audited. The trace is in {folder}.")


def answer_of(
    trace: Recorded,
    by_grid: tuple[Finding, ...],
    notices: tuple[str, ...] = (),
    *,
    page: str | None = None,
) -> Answer:
    """Build the answer from existing findings; see :func:`verdict`.

    It is about the format that most weights are stored in; where no finding is about a stored format, about
    the first format that would lose something.
    """
    bad = details.nonfinite_words(trace)
    at_home = [f for f in by_grid if moved_on_grid(trace, f.grid)]
    losing = [f for f in by_grid if f.severity not in (FINE, *NO_SHARE)]
    unguarded = [f for f in at_home if f in losing and unkept(trace, f.grid)]
    first = max(at_home, key=lambda f: f.of) if at_home else (*losing, *by_grid)[0]
    if unguarded and keeping(trace, first.grid):  # which is true of the most weights, and not of all
        first = max(unguarded, key=lambda f: f.of)
    kept = is_cast(trace) or (bool(at_home) and keeping(trace, first.grid) is not None)
    masters = len(copies(trace)) == len(trace.tensors)
    broke = _broke(trace, first)
    loses = first.severity not in (FINE, *NO_SHARE) and not (kept or masters or broke)
    fix = fix_of(trace, first.grid, stored=first.of if at_home else 0.0) if loses else None
    cost = tuple(line.strip() for line in costs.lines(trace) if line)
    if not cost and loses:
        there = ", on a run with float32 weights" if at_home else ""
        cost = (f"not measured: --rehearse {first.grid} --evaluate FN{there}",)
    beside = _beside(trace)
    nothing = all(f.severity in (FINE, UNASKED) for f in by_grid) and not (beside or masters or broke)
    parts = {
        "Why": _why(trace, first, stored=bool(at_home)) if loses or masters else _why_stuck(trace, first),
        "Where": _where(trace, first) if loses else (),
        "Fix": () if fix is None else (*fix.code, *_cost(trace, first, fix)),
        "Rate": _rate(trace) if loses and at_home else (),
        "Beside": beside,
        "Loss": cost,
        "Page": (page,) if page and not nothing else (),
    }
    others = [f for f in by_grid if masters or f is not first]
    return Answer(
        headline=plain(_headline(trace, by_grid, first, kept=kept, masters=masters)),
        grid=first.grid,
        notices=(*notices, *(plain(said) for said in (bad, trace.older_counts) if said)),
        sections=tuple(Section(name, tuple(map(plain, lines))) for name, lines in parts.items() if lines),
        formats=() if nothing else tuple((f.grid, plain(_format(trace, f))) for f in others),
        fix=fix,
        details=tuple(details.lines(trace, by_grid)),
        findings=by_grid,
    )


# ---- the parts --------------------------------------------------------------------------------------------


def _headline(
    trace: Recorded, by_grid: Sequence[Finding], first: Finding, *, kept: bool, masters: bool
) -> str:
    """Say in one sentence what was lost, or why that cannot be said, or why nothing is."""
    steps = count(len(trace.steps), "step")
    still = "" if (first.never_moved or 0) < STUCK else percent(first.never_moved)
    undecided = _undecided(trace, first, steps)
    if undecided is not None:
        return undecided
    if is_cast(trace):
        return (
            f"Nothing lost: the main parameters keep what a cast does not write ({percent(first.lost)} of "
            "the stored values stayed at an average step)."
        )
    if (arrived := _hardly_arrived(trace, first)) is not None:
        wrote = f"sr write-back to {first.grid} wrote {percent(max(arrived, 0.0))} of what was proposed"
        return f"Updates do not arrive: {wrote}; {still} of its weights have not moved in {steps}."
    if kept:
        by = f"{keeping(trace, first.grid)} write-back carries the updates to {first.grid}"
        said = f"Nothing lost: {by if policies(trace) else details.state_words(trace, first)}"
        return f"{said}; {still} of its weights have not moved in {steps}." if still else f"{said}."
    if masters:
        return "Nothing lost: the optimizer steps copies in full precision."
    if first.severity == FINE:
        return _fine(by_grid, first, steps)
    return _lost(trace, first, steps, still)


def _undecided(trace: Recorded, first: Finding, steps: str) -> str | None:
    """Say why a run cannot be judged; None if it can."""
    if first.severity == NOT_FINITE:
        return f"Nothing can be said: {NOT_FINITE}."
    if _broke(trace, first):
        finite = f"of the updates that were finite, {percent(first.lost)} were lost"
        return f"Most weights or updates were not finite ({steps}): the run failed; {finite}."
    if first.severity == UNASKED:
        at = " at a learning rate of 0" if not trace.scan("tensors", "lr")["lr"].any() else ""
        return f"Nothing can be said: {UNASKED} in {steps}{at}."
    return None


def _fine(by_grid: Sequence[Finding], first: Finding, steps: str) -> str:
    """Say how little was lost, of this format and of the others."""
    was = "this run lost" if first.measured else "this run would lose"
    said = f"{was} {percent(first.lost)} of {_of(first)} updates in {first.grid} ({steps})"
    if any(f.severity != FINE for f in by_grid):
        return f"{said[0].upper()}{said[1:]}: nothing to mend."
    names = ", ".join(f.grid for f in by_grid if f is not first)
    return f"Nothing found: {said}{f', and hardly more in {names}' if names else ''}."


def _lost(trace: Recorded, first: Finding, steps: str, still: str) -> str:
    """Say what was lost, or would be, and which share (``still``) of the weights never moved."""
    start = "This run" if moved_on_grid(trace, first.grid) else f"Stored in {first.grid}, this run would"
    if not first.measured and trace.ids() == trace.in_full() and not policies(trace):
        start = f"Nothing is lost in {' and '.join(_stored(trace, trace.ids()))}. {start}"
    if first.severity in (STRONGLY, DISTORTED):
        how = "strongly distort" if first.severity == STRONGLY else "distort"
        verb = how.replace("distort", "DISTORTED") if first.measured else how
        return f"{start} {verb} its updates: {details.arrival_words(first)}; {percent(first.lost)} are lost."
    verb = "LOST" if first.measured else "lose"
    late = f", {percent(first.lost_late)} at the end" if first.lost_late - first.lost > LATE else ""
    said = f"{start} {verb} {percent(first.lost)} of {_of(first)} updates{late}"
    stuck = "have not moved" if first.measured else "would not have moved"
    return f"{said}; {still} of {_of(first)} weights {stuck} in {steps}." if still else f"{said}."


def _broke(trace: Recorded, first: Finding) -> bool:
    """Return True if most of what a finding is about was not finite: rounding is not the trouble then."""
    return float(trace.nonfinite(concerned(trace, first.grid)).mean()) > 0.5


def _hardly_arrived(trace: Recorded, first: Finding) -> float | None:
    """Return the share of the updates that arrived, if next to nothing moves under stochastic rounding."""
    gain = trace.manifest["run"].get("gain")
    stuck = first.measured and keeping(trace, first.grid) == "sr" and (first.never_moved or 0) >= HARDLY
    return gain if stuck and isinstance(gain, float) and gain < STUCK_GAIN else None


def _why_stuck(trace: Recorded, first: Finding) -> tuple[str, ...]:
    """Say why updates may not arrive under a policy that carries them in the mean."""
    if _hardly_arrived(trace, first) is None:
        return ()
    return (
        "where steps are far under a gap, sr moves a weight rarely: audit more steps. On MX grids the "
        "largest weight of a block cannot grow, because the scale is rounded down: use another grid.",
    )


def _of(finding: Finding) -> str:
    """Return the words for the weights that a finding concerns."""
    return "its" if finding.of == 1 else f"its {finding.grid}"


def _why(trace: Recorded, first: Finding, *, stored: bool) -> tuple[str, ...]:
    """Describe the dtypes of the weights and optimizer state, and the size of a step relative to a gap."""
    if (there := details.copies_words(trace)) is not None:
        return (there,)
    optimizer: dict[str, Any] = next(iter(trace.manifest.get("optimizers", ())), {})
    rate = rate_of(trace, optimizer)
    steps = f"{_small_steps(trace, first, rate)} steps are under half a gap"
    if not stored:
        arrives = details.arrival_words(first)
        dtypes = " and ".join(_stored(trace, trace.ids()))
        said = f"weights are {dtypes} now; {steps} of {first.grid}."
        return (said, f"{arrives}.") if arrives else (said,)
    if NEAREST in policies(trace):
        return (f"nearest rounding (rne) to {first.grid} drops what is too small: {steps}.",)
    ids = trace.ids(concerned(trace, first.grid))
    names = _stored(trace, ids)
    if how := " and ".join(policies(trace)):
        whose = f"{len(ids)} of {count(len(trace.tensors), 'tensor')} ({' and '.join(names)})"
        return (f"the {how} write-back does not have {whose}, which the optimizer itself rounds; {steps}.",)
    return (f"{held.stored_words(trace, names)}, no fp32 master; {steps}.",)


def _small_steps(trace: Recorded, first: Finding, rate: float | None) -> str:
    """Say which part of the steps is too small, at a rate at which it is."""
    most = first.lost_late >= 0.5
    part = "most" if most else f"{percent(first.lost)} of"
    at = "" if rate is None else f"at lr {number(rate)}{'' if most else ','}"
    if rate is None:
        return part
    ids = trace.ids(concerned(trace, first.grid))
    rows = trace.scan("tensors", "step", "tensor", "lr")
    rows = rows.take(np.isin(rows["tensor"], ids) & (rows["lr"] > 0))
    highest = dict(rows.sort("lr").select("step", "lr").rows())  # of the groups of a step
    shares = dict(zip(trace.steps_of(ids).tolist(), trace.frozen(first.grid, ids).tolist(), strict=True))
    known = [(highest[step], share) for step, share in shares.items() if step in highest and share == share]
    if not known:
        return f"{at} {part}"
    nearest = min(abs(lr - rate) for lr, _ in known)
    there = float(np.mean([share for lr, share in known if abs(lr - rate) == nearest]))
    if there >= 0.5 or (not most and abs(there - first.lost) <= LATE):
        return f"{at} {part}"
    if most:
        return f"at the end, at lr {number(float(f'{known[-1][0]:.2g}'))}, {part}"
    return f"{at} {percent(there)} of steps, over the run {part}"


def _stored(trace: Recorded, ids: Sequence[int]) -> list[str]:
    """List the formats that the given tensors are stored in."""
    return sorted({shown(str(t["stored"]), 20) for t in trace.tensors if t["id"] in set(ids)})


def _where(trace: Recorded, first: Finding) -> tuple[str, ...]:
    """Return shares by kind of tensor; norm gains and biases share a row unless one stands out."""
    ids = set(trace.ids(concerned(trace, first.grid)))
    shares = trace.lost_by_tensor(first.grid)
    there = [t for t in trace.tensors if t["id"] in ids and not np.isnan(shares.get(t["id"], np.nan))]
    flat = [t for t in there if len(t["shape"]) < 2]
    rows: dict[str, list[int]] = {}
    for t in (t for t in there if len(t["shape"]) >= 2):
        rows.setdefault("core" if t["group"] in CORE else str(t["group"]), []).append(t["id"])
    core = [KINDS[g] for g in CORE if any(t["group"] == g and t not in flat for t in there)]
    said = []
    for group, tensors in rows.items():
        kind = " and ".join(core) if group == "core" else KINDS.get(group, shown(group, 20))
        kind = f"other {kind}" if group == "other" and len(rows) > 1 else kind
        said.append(f"{kind} {percent(average(trace.frozen(first.grid, tensors)))}")
    return (f"{', '.join([*said, *_flat(trace, first, flat, shares)])}.",) if there else ()


def _flat(trace: Recorded, first: Finding, flat: list[dict[str, Any]], shares: dict[int, float]) -> list[str]:
    """Return shares of norm gains and biases: of both, or of each where they differ; and what stands out."""
    gains = [t for t in flat if t["group"] == "norm" and not str(t["name"]).endswith("bias")]
    biases = [t for t in flat if t not in gains]
    means = [average(trace.frozen(first.grid, [t["id"] for t in row])) for row in (gains, biases) if row]
    apart = len(means) == 2 and abs(means[0] - means[1]) > APART
    stuck = {name for name, _, _, still in first.hardly if still == 1}
    said = []
    for row in filter(None, (gains, biases) if apart else (flat,)):
        share = average(trace.frozen(first.grid, [t["id"] for t in row]))
        n = sum(t in gains for t in row)
        kinds = [count(n, "norm gain")] if n else []
        if rest := len(row) - n:
            kinds.append(f"{rest} bias{'' if rest == 1 else 'es'}")
        whose = "its" if len(row) == 1 else "their"
        start = f" (still at {whose} start)" if all(t["name"] in stuck for t in row) else ""
        everyone = "all " if start and len(row) > 1 else ""
        said.append(f"{everyone}{' and '.join(kinds)} {percent(share)}{start}")
        out = [t for t in row if shares[t["id"]] - share > APART][: details.NAMED]
        said += [f"{shown(str(t['name']))} {percent(shares[t['id']])}" for t in out]
    return said


def _cost(trace: Recorded, first: Finding, fix: Fix) -> tuple[str, ...]:
    """Describe the bytes per weight."""
    if fix.cost is not None:
        return (fix.cost,)
    offers = ", ".join(f"{name} {size:.3g}" for name, size in cures(trace, first.grid))
    stores = f"this stores the weights in {first.grid} and keeps its updates"
    return (f'{stores}; bytes per weight with storage="packed": {offers}.',) if offers else ()


def _rate(trace: Recorded) -> tuple[str, ...]:
    """Describe the rates at which a run without loss would move as this one did, if the gain is recorded."""
    gain = trace.manifest["run"].get("gain")
    rate = rate_of(trace, next(iter(trace.manifest.get("optimizers", ())), {}))
    if rate is None or not isinstance(gain, float) or not GAINS[0] <= gain <= GAINS[1]:
        return ()
    if set(policies(trace)) - {NEAREST}:  # the gain is of weights that lose updates and of others
        return ()
    low, high = (number(float(f"{rate * x:.2g}")) for x in (gain, min(1.0, MASTERS * gain)))
    return (
        f"only {percent(gain)} of a step arrived: after the fix, a rate of {low} to {high} moves the weights "
        f"as far as {number(rate)} did. If the fixed run is unstable, lower the rate to that.",
    )


def _beside(trace: Recorded) -> tuple[str, ...]:
    """Describe the tracked states (moments, copies, gradients), one line each."""
    return tuple(line for line in details.role_lines(trace) if line and not line.startswith(" "))


def _format(trace: Recorded, finding: Finding) -> str:
    """Summarize a format in one line."""
    if finding.severity in NO_SHARE:
        return f"nothing can be said, because {finding.severity}"
    whose = "" if finding.of == 1 else f"its {finding.grid} "
    if finding.measured and (how := keeping(trace, finding.grid)):
        return f"{whose}updates are kept by {how}"
    said = f"{percent(finding.lost)} of {whose}updates {'' if finding.measured else 'would be '}lost"
    if finding.lost_late - finding.lost > LATE:
        said += f" ({percent(finding.lost_late)} at the end)"
    if finding.gain is not None:
        said += f", {details.arriving(finding)} {'arrives' if finding.measured else 'would arrive'}"
    if finding.severity == FINE:
        return said
    for policy, size in cures(trace, finding.grid)[:1]:
        said += f"; {policy} keeps them ({size:.3g} byte{'' if size == 1 else 's'} per weight)"
    return said
