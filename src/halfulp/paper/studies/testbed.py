"""Search for the start and the teacher, which the paper does not print, as declared and on references alone.

The paper's controlled studies share one testbed (input 8, teacher 8, student 64, 512 + 512 examples, noise
0.1) whose start, teacher and loss it does not print. It prints much about their *references*, though: which
of them diverge, when their projected updates freeze, what they promise (:mod:`halfulp.paper.studies._facts`).
A candidate is a :class:`~halfulp.paper.models.teacher.Testbed`, and takes the error at an onset before or
after the update (`models.learning_forecasts`). No cell of this study runs anything on a grid, so
what it chooses cannot have been chosen for its outcomes.

With x = rate * 2**m, a reference's updates shrink beside the spacing as x does. Stage ``screen`` runs 18 fp64
references of every candidate: those that say whether it diverges where the paper's do, and one rate on each
side of every edge in x. Stage ``whole`` takes the best few of that stage, by rank, and runs what the studies
will run: 36 references of the phase diagram and 18 of the midpoint study, 12 of the timing grid and six of
the finite-size study; beside them, the former choice. The candidate with most facts wins; among equals, the
one with more cells as printed; then the first declared. What it chose is a constant in
`models.teacher`, and a test compares that with the committed record.

The seeds are those that the studies use (the paper names 2027 to 2029), because the facts are about single
seeds. So the facts that the winner meets here hold again, by construction, in the references of the studies;
what is free to come out either way is every run on a grid.

Not a blind search: small starts were noticed while trial runs on grids were in view (docs/controlled.md).
Ranking and choice see references only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from halfulp.measures.forecasts import pooled_rho
from halfulp.numbers.grids import grid as named
from halfulp.paper.models.learning_forecasts import follow, forecasts
from halfulp.paper.models.teacher import Testbed, teacher_student
from halfulp.paper.studies._facts import FACTS, Count, Reference, best_side, met, ranked, score
from halfulp.paper.studies.claims import Beside
from halfulp.paper.studies.declared import declared, gate, rule
from halfulp.paper.studies.finite_size import look
from halfulp.study.protocol import Cell, Config, Estimand, Json, Records, Running, Stage, Table, Values

# ---- cells ----------------------------------------------------------------------------------------------


def screen_cells(config: Config) -> Iterator[Cell]:
    """Yield a cell for each candidate."""
    shared = {key: config[key] for key in ("width", "examples", "steps", "mantissas")}
    for name, testbed in config["candidates"].items():
        yield Cell(name=name, config={**shared, "testbed": testbed, "references": config["screen"]})


def whole_cells(config: Config) -> Iterator[Cell]:
    """Yield a cell for each rank and for the former testbed."""
    keys = ("width", "examples", "steps", "mantissas", "candidates", "timing", "sizes")
    shared = {key: config[key] for key in keys}
    for name in (*(f"rank{rank}" for rank in range(1, config["ranks"] + 1)), FORMER):
        yield Cell(name=name, config={**shared, "references": config["whole"]})


def screen(cell: Running) -> Mapping[str, Json]:
    """Run the few references that distinguish most candidates from the paper."""
    return {"candidate": cell.name, "references": _references(cell, Testbed.of(cell.config["testbed"]))}


def whole(cell: Running) -> Mapping[str, Json]:
    """Run all references of the studies that share the testbed, for a candidate by rank or the former one."""
    c = cell.config
    screened = {name: cell.read("screen", name) for name in c["candidates"]}
    name = FORMER if cell.name == FORMER else ranked(screened)[int(cell.name.removeprefix("rank")) - 1]
    testbed = Testbed.of(c["candidates"][name])
    return {
        "candidate": name, "references": _references(cell, testbed), "timing": _timing(c, testbed),
        "sizes": _sizes(c, testbed),
    }  # fmt: skip


def _references(cell: Running, testbed: Testbed) -> list[Json]:
    c, rows = cell.config, []
    grids = [f"m{m}" for m in c["mantissas"]]
    for done, (role, rate, seed) in enumerate(c["references"], 1):
        p = teacher_student(
            seed, width=c["width"], examples=c["examples"], tests=c["examples"], testbed=testbed
        )
        ran = follow(p, rate, c["steps"], audit=grids)
        rows.append(
            {
                "role": role, "rate": rate, "seed": seed, "diverged": ran.diverged, "slow": ran.slow,
                "said": {
                    grid: {name: list(each.values()) for name, each in said.items()}
                    for grid, said in forecasts(ran, c["mantissas"]).items()
                },
            }
        )  # fmt: skip
        cell.progress(done, len(c["references"]))
    return rows


def _timing(c: Config, testbed: Testbed) -> list[Json]:
    """First symmetric crossings on a wide range of grids, and the pooled rho there."""
    t, rows = c["timing"], []
    for rate in t["rates"]:
        for seed in t["seeds"]:
            p = teacher_student(seed, width=c["width"], examples=c["examples"], tests=1, testbed=testbed)
            ran = follow(p, rate, t["steps"], audit=[f"m{m}" for m in t["mantissas"]])
            weights, proposals = ran.series.squares.T
            for m in t["mantissas"]:
                said = forecasts(ran, [m])[f"m{m}"]["symmetric"]["first"]
                rho = None
                if said is not None:
                    at = slice(said - 1, said)
                    rho = float(pooled_rho(proposals[at], weights[at], named(f"m{m}").epsilon)[0])
                rows.append({"rate": rate, "seed": seed, "mantissa": m, "first": said, "rho": rho})
    return rows


def _sizes(c: Config, testbed: Testbed) -> list[Json]:
    """Return the width of the input layer's crossover where a reference crosses, at the projected codes."""
    s, rows = c["sizes"], []
    for width in s["widths"]:
        for seed in s["seeds"]:
            p = teacher_student(seed, width=width, examples=c["examples"], tests=1, testbed=testbed)
            layer, grids = p.net.part("W1"), [f"m{m}" for m in s["mantissas"]]
            ran = follow(p, s["rate"], s["steps"], audit=grids, span=layer)
            firsts = {m: forecasts(ran, [m])[f"m{m}"]["directional"]["first"] for m in s["mantissas"]}
            again = follow(p, s["rate"], 0).trainer
            for m, first in sorted(firsts.items(), key=lambda pair: pair[1] or 0):
                row: dict[str, Json] = {"width": width, "seed": seed, "mantissa": m, "step": first}
                if first is not None:
                    again.advance(first - 1 - again.step)
                    w = again.weights[layer].copy()
                    d = again.gradient()[layer] * -(s["rate"] * p.factor)
                    code = named(f"m{m}").round(torch.from_numpy(w)).numpy()
                    row |= look(code, d, f"m{m}")
                rows.append(row)
    return rows


def choice(records: Records) -> tuple[str, str]:
    """Return the candidate and the side of the error that this study chose."""
    whole = records["whole"]
    best = whole[ranked(whole)[0]]
    return best["candidate"], best_side(best)


# ---- estimands ------------------------------------------------------------------------------------------


def _each(records: Records) -> Iterator[tuple[str, Reference]]:
    for stage in ("screen", "whole"):
        for record in records[stage].values():
            yield f"{record['candidate']} {stage}", record


def facts_met(records: Records) -> Values:
    """Printed facts met, by candidate and stage."""
    return {name: float(score(record, best_side(record))[0]) for name, record in _each(records)}


def cells_met(records: Records) -> Values:
    """Mean over facts of the share of cells as printed."""
    return {name: score(record, best_side(record))[1] for name, record in _each(records)}


def chosen_share(records: Records) -> Values:
    """The share of the facts that the chosen candidate meets."""
    name, side = choice(records)
    record = next(r for r in records["whole"].values() if r["candidate"] == name)
    return {name: score(record, side)[0] / len(met(record, side))}


def chosen_by_fact(records: Records) -> Values:
    """Of the chosen candidate, the share of cells that are as printed, by fact."""
    name, side = choice(records)
    record = next(r for r in records["whole"].values() if r["candidate"] == name)
    return {fact: a / b for fact, (a, b) in met(record, side).items()}


def former_by_fact(records: Records) -> Values:
    """The same of the former choice."""
    record = records["whole"][FORMER]
    return {fact: a / b for fact, (a, b) in met(record, best_side(record)).items()}


def lead(records: Records) -> Values:
    """Facts that the chosen candidate meets more than the former choice does."""
    whole = records["whole"]
    best, old = (score(whole[cell], best_side(whole[cell]))[0] for cell in (ranked(whole)[0], FORMER))
    return {"study": float(best - old)}


# ---- reports --------------------------------------------------------------------------------------------


def _holds(count: Count) -> bool:
    return count[0] == count[1]


def _shown(count: Count) -> str:
    return "yes" if _holds(count) else "{}/{}".format(*count)


def facts_table(records: Records) -> Table:
    """Tabulate which candidate fits which fact, on the references of the screen."""
    names = [f.name for f in FACTS]
    rows: list[Sequence[str | float | None]] = []
    for name in ranked(records["screen"]):
        record = records["screen"][name]
        side = best_side(record)
        counts = met(record, side)
        shown = [_shown(counts[f]) if f in counts else "" for f in names]
        rows.append((name, side, score(record, side)[0], *shown))
    screened = [f for i, f in enumerate(names) if any(row[3 + i] for row in rows)]
    keep = [0, 1, 2, *(3 + names.index(f) for f in screened)]
    return Table(
        columns=("candidate", "error", "facts", *screened),
        rows=[tuple(row[i] for i in keep) for row in rows],
        caption="References of the screen alone. yes: as printed in every cell; else cells as printed.",
    )  # fmt: skip


def whole_table(records: Records) -> Table:
    """Tabulate the best few and the former choice on every reference of the studies."""
    whole = records["whole"]
    sides = {name: best_side(whole[name]) for name in ranked(whole)}
    counts = [met(whole[name], side) for name, side in sides.items()]
    rows: list[Sequence[str | float | None]] = [
        (f.name, f.printed, f.source, *(_shown(each[f.name]) if f.name in each else "-" for each in counts))
        for f in FACTS
    ]
    totals = [f"{sum(map(_holds, each.values()))} of {len(each)}" for each in counts]
    return Table(
        columns=("fact", "printed", "where", *(f"{whole[n]['candidate']} ({s})" for n, s in sides.items())),
        rows=[*rows, ("facts met", "", "", *totals)],
        caption="Every reference of the studies; cells as printed of all cells where not all are. The first "
        "candidate is the chosen one.",
    )  # fmt: skip


# ---- the study ------------------------------------------------------------------------------------------

FAN = 8**-0.5
"""1 / sqrt(8): what N(0, 1 / inputs) is for eight inputs."""
FORMER = "former"


def _bed(s1: float, s2: float, t1: float, t2: float, **more: Any) -> dict[str, Json]:
    return Testbed(hidden=s1, output=s2, teacher_hidden=t1, teacher_output=t2, **more).json()


SMALL = "he.15-20"
_TEACHERS = {"fan": (FAN, FAN), "he": (0.5, FAN), "unit": (1.0, FAN), "he-he": (0.5, 0.5)}
"""Hidden and output weights: N(0, 1 / inputs); N(0, 2 / inputs) in the first, or in both; N(0, 1) first."""
_STARTS = {
    "fan": ((10, 10), (20, 20), (10, 20)),
    "he": ((10, 10), (15, 15), (20, 20), (50, 50), (10, 20), (12, 20), (15, 20), (15, 30), (18, 36),
           (20, 40)),
    "unit": ((20, 20), (20, 40), (10, 20)),
    "he-he": ((10, 10),),
}  # fmt: skip
"""Of the student's two layers, in thousandths, by teacher."""

CANDIDATES: dict[str, dict[str, Json]] = {
    FORMER: _bed(0.1, 0.1, FAN, 1.0),
    "linear": _bed(3**-0.5, 3**-0.5, FAN, FAN, by_inputs=True),  # as wide as torch.nn.Linear's
    "inputs": _bed(1.0, 1.0, FAN, FAN, by_inputs=True),
    **{
        f"{teacher}.{a}-{b}": _bed(a / 1000, b / 1000, *_TEACHERS[teacher])
        for teacher, starts in _STARTS.items() for a, b in starts
    },
    "he.inputs-10": _bed(0.1, 0.1, *_TEACHERS["he"], by_inputs=True),
    "he.15-20.half": _bed(0.015, 0.02, *_TEACHERS["he"], factor=0.5),
    "he.15-20.half-twice": _bed(0.015, 0.02, 0.5, 2 * FAN, factor=0.5),
    "he.15-20.outputs-4": _bed(0.015, 0.02, *_TEACHERS["he"], outputs=4, factor=0.25),
    "he.15-20.uniform": _bed(0.015, 0.02, *_TEACHERS["he"], inputs="uniform"),
    "he.15-20.standardised": _bed(0.015, 0.02, *_TEACHERS["he"], standardised=True),
    "he.15-20.quiet-tests": _bed(0.015, 0.02, *_TEACHERS["he"], quiet_tests=True),
}  # fmt: skip

_BOUNDARY = [0.1, 0.2, 0.4, 0.8]
_PHASE = [0.0125 * 2**k for k in range(8)]
_MIDPOINT = [0.0125 * 2 ** (k + 0.5) for k in range(6)]
_BASE, _MORE, _LOCKED = [2021, 2022, 2023], [2024, 2025, 2026], [2027, 2028, 2029]


def _whole() -> list[Json]:
    phase = [["phase", r, s] for r in _PHASE for s in [*_BASE, *(_MORE if r in _BOUNDARY else [])]]
    return phase + [["midpoint", r, s] for r in _MIDPOINT for s in _LOCKED]


def _screen() -> list[Json]:
    locked = [["midpoint", r, s] for r in (_MIDPOINT[2], _MIDPOINT[5]) for s in _LOCKED]
    edge = [["phase", r, s] for r in (0.1, 1.6) for s in _BASE]
    return locked + edge + [["phase", 0.8, s] for s in [*_BASE, *_MORE]]


_PAPER: dict[str, Json] = {
    "candidates": CANDIDATES, "width": 64, "examples": 512, "steps": 3000, "mantissas": [1, 2, 3, 4, 5],
    "ranks": 3, "screen": _screen(), "whole": _whole(),
    "timing": {"rates": [0.05, 0.1, 0.2], "seeds": [0, 1, 2, 3], "mantissas": list(range(1, 14)),
               "steps": 6000},
    "sizes": {"widths": [16, 512], "seeds": [43000, 43003, 43005], "mantissas": [6, 7, 8], "rate": 0.025,
              "steps": 600},
}  # fmt: skip
_SMOKE: dict[str, Json] = {
    **_PAPER, "candidates": {}, "width": 8, "examples": 64, "steps": 120, "ranks": 1,
    "whole": [*_screen()[:6], ["phase", 0.8, 2021], ["phase", 1.6, 2021]],
    "screen": [*_screen()[:3], ["phase", 0.8, 2021], ["phase", 1.6, 2021]],
    "timing": {"rates": [0.2], "seeds": [0, 1], "mantissas": [3, 6], "steps": 120},
    "sizes": {"widths": [4, 16], "seeds": [43000], "mantissas": [6, 8], "rate": 0.05, "steps": 150},
}  # fmt: skip

STUDY = declared(
    __name__,
    scales={
        "smoke": {**_SMOKE, "candidates": {name: CANDIDATES[name] for name in (FORMER, SMALL)}},
        "small": {**_PAPER, "candidates": {name: CANDIDATES[name] for name in (FORMER, SMALL)}, "ranks": 1},
        "paper": _PAPER,
    },
    stages=(
        Stage(name="screen", kind="reference", cells=screen_cells, run=screen),
        Stage(name="whole", kind="reference", cells=whole_cells, run=whole, reads=("screen",)),
    ),
    estimands=(
        Estimand.of(facts_met, "facts"), Estimand.of(cells_met, "cells"), Estimand.of(chosen_share, "chosen"),
        *map(Estimand.of, (chosen_by_fact, former_by_fact, lead)),
    ),
    tables={"whole": whole_table, "screen": facts_table},
    question=(
        "Which start, teacher, loss and side of the error agree with what the paper prints of its "
        "references?"
    ),
    units="one candidate; its references are what the studies that share a testbed will run",
    not_claimed=(
        "that the paper used what was chosen",
        "anything about a run on a grid: this study has none",
        "that the facts would hold at other seeds: they are facts about single seeds",
        (
            "that the list of candidates was drawn up blind: small starts were noticed while trial runs on "
            "grids were in view"
        ),
    ),
    gates=(
        gate("better-than-before", "lead > 0",
            "a search that does not beat the choice it replaces has found nothing"),
        gate("every-fact", "chosen == 1", "each printed fact is one that the paper's own testbed met"),
    ),
    rules=(
        rule("a testbed that meets every printed fact about references is chosen", "better-than-before",
            "every-fact"),
        rule("the best testbed is chosen; not every printed fact about references is met",
            "better-than-before"),
        rule("no better testbed was found"),
    ),
)  # fmt: skip


def also(records: Records) -> dict[str, float | str]:
    """Return what the paper does not print: what was chosen, and from how many candidates."""
    name, side = choice(records)
    bed = Testbed.of(CANDIDATES[name])
    chosen = (
        f"{name}: start {bed.hidden:g} and {bed.output:g}, teacher {bed.teacher_hidden:.3g} and "
        f"{bed.teacher_output:.3g} (standard deviations, hidden and output), error {side} the crossing"
    )
    return {"chosen": chosen, "candidates": float(len(records["screen"]))}


_NOTE = "Chosen among the candidates by references alone; see the tables."
row = Beside(STUDY, "app:e4")
CLAIMS = (
    row("start, teacher and loss", "not printed", also, "chosen", note=_NOTE),
    row("candidates", "not printed", also, "candidates"),
)  # fmt: skip
