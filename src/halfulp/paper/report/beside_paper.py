"""All that the paper says of its studies, beside what our records say: four pages, five figures.

    halfulp paper [--studies results/studies] [--scale paper] [--out results]

reads the folders ``NAME-SCALE`` of closed studies and writes ``controlled.md``, ``controlled.svg`` and
``e4.svg``; of the transformer studies, where they are, ``transformers.md``, ``causal.svg`` and
``allocation.svg``; of those of allocation ``allocation.md``, ``budget.svg`` and ``recoveries.tsv``;
``terms.md``, the paper's tables of definitions, regimes and evidence; and ``labels.md``, the label of every
study beside the paper's. Where a study was run at ``medium``, that is shown. No number of ours is typed in:
a row is a :class:`~halfulp.paper.studies.claims.Claim` of a study's module, computed from records whose
digests were checked against the ledger on the way in. Gates are shown as they fell. The same records give the
same bytes.

Why a page apart from ``halfulp study report``? A report knows its own study and nothing of the paper.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfulp import canonical, files
from halfulp.drawing import house_style, new_figure, vector
from halfulp.errors import UsageError
from halfulp.measures.crossings import TOLERANCE
from halfulp.paper import panels
from halfulp.paper.report import labels, won_back
from halfulp.paper.report.definitions import tables
from halfulp.paper.studies import _timing as timing
from halfulp.paper.studies import phase_diagram
from halfulp.paper.studies.declared import OURS
from halfulp.study.evidence import open_closed
from halfulp.study.loading import REGISTRY
from halfulp.study.protocol import Json, Records
from halfulp.text import beside, cell, number, short

STUDIES = (
    "testbed", "phase-diagram", "phase-edge", "midpoint", "margin", "two-layer", "finite-size",
    "emulator", "cnn", "ce-transfer", "theory",
)  # fmt: skip
MARK = " †"
"""Marks a gate whose threshold is ours because the paper prints none."""

INTRODUCTION = """\
Each row sets a number that the paper prints beside the number that our records give for the same definition.
The paper does not print most of its seeds, its starts, its teacher or most of its rates, so the cells are of
the same design but are not the same cells: counts of cells and edges of windows need not agree, shapes and
signs should. Start and teacher were chosen by a declared search, `testbed`, that saw references and no run on
a grid; its table says which printed fact about references the former choice met and which the present one
meets. Every other number of ours is an outcome. Two predictors are shown where the paper's archived sweeps
use the symmetric spacing proxy. What was chosen where the paper is silent is said in the docstring of each
study's module and is part of its sealed protocol.

This page is made by `halfulp paper` from the folders in `studies/`."""

TRANSFORMERS = {
    "char-gpt": "paper", "policy-3k": "small", "nearest-10k": "small", "matched-10k": "small",
    "modern-transfer": "small", "neox-transfer": "small", "source-amortized": "small",
    "template-challenge": "small", "prospective-modern": "small",
    **dict.fromkeys(("native-schedule-shift", "native-coupled-sr", "dqt-int3"), "small"),
}  # fmt: skip
"""The scale at which each was run."""

ALLOCATION = dict.fromkeys(
    ("whole-tensor", "tile-screen", "leverage-primary", "saliency-challenge", "mask-reuse", "eco-comparator",
     "depth-17", "gpt2-pareto", "packed-systems", "eco-systems"), "small",
)  # fmt: skip
"""The studies of exact-budget allocation beside `prospective-modern`, and their scale."""

FIGURES = {
    "matched-10k": ("policy-effect", "causal.svg", "Loss gaps, recovery and never-moved shares"),
    "prospective-modern": ("recovered", "allocation.svg", "Recovery by arm"),
    "gpt2-pareto": ("budget-curve", "budget.svg", "Recovery against bytes of masters, and the Pareto front"),
}
"""The figures of the paper that are a study's own: which of its figures, the file, and what it shows."""

TRANSFORMERS_INTRODUCTION = """\
Each row sets a number that the paper prints beside the number that our records give for the same definition.
`char-gpt` is the paper's configuration, with our own initial weights and order of data. The others are not:
where the paper trains GPT-2 124M and decoders of 162 million weights on OpenWebText, for 10,000 updates
(`nearest-10k`, `matched-10k`), 1,000 (`prospective-modern`) or 3,000 (the rest), ours are the scales
`small`, decoders of 1.3 and 1.8 million weights on novels in 4096 pieces, for 240, 1,000, 200 and 120
updates. The native studies and `dqt-int3` are smaller still, two layers of width 64 on characters for 300 and
400 updates. The structure is the same, the numbers need not be.

This page is made by `halfulp paper` from the folders in `studies/`."""

ALLOCATION_INTRODUCTION = """\
Each row sets a number that the paper prints beside the number that our records give for the same definition.
The paper trains GPT-2 124M and decoders of 162 and 198 million weights on OpenWebText, on a GPU. These are
the scales `small`: decoders of the same kinds with 1.3 to 2.8 million weights on novels in 4096 pieces, 40
updates of a schedule of 120 where the paper has 1000 of 3000 (`whole-tensor`: 40 for 3000), on one core of a
CPU that others shared. So seconds are those that a process itself used of a processor, and peaks those of its
resident set, which is coarse: survivors are of this machine. What of the paper does not appear at this size
is said in docs/allocation.md.

This page is made by `halfulp paper` from the folders in `studies/`."""

TERMS_INTRODUCTION = """\
The paper's tables of definitions, of regimes and of the layers of its evidence, in the words of this library,
with numbers from the records in `studies/`. This page is made by `halfulp paper`."""


LABELS_INTRODUCTION = """\
The label that our rules give the paper's printed rows, and the labels of our runs, by scale; `recovered` is
the paper's own course, with a record made by hand. Why labels differ is told in docs/controlled.md,
docs/decoder.md and docs/allocation.md. This page is made by `halfulp paper` from the folders in
`studies/`."""


PAGES = (
    ("transformers.md", "The transformer studies, beside the paper", TRANSFORMERS_INTRODUCTION, TRANSFORMERS),
    ("allocation.md", "Exact-budget allocation, beside the paper", ALLOCATION_INTRODUCTION, ALLOCATION),
)
"""By file: title, introduction, and the scale of each study."""


@dataclass(frozen=True)
class Closed:
    """A closed study: its records, its result, and the digests to know it by."""

    records: Records
    result: dict[str, Json]
    seal: str
    head: str


def read(folder: Path) -> Closed:
    """Return a closed study's records, with every digest checked."""
    opened = open_closed(folder)
    assert opened.result is not None
    return Closed(opened.records, opened.result, opened.events.seal, opened.digest)


# ---- the page -------------------------------------------------------------------------------------------


def page(
    studies: Mapping[str, Closed | None],
    title: str = "The controlled studies, beside the paper",
    introduction: str = INTRODUCTION,
) -> str:
    """Return the comparison as Markdown; studies without results are listed as missing."""
    parts = [f"# {title}", introduction, _summary(studies)]
    if studies.get("emulator") and studies.get("two-layer"):
        parts.append("![Forecast and measured crossings](controlled.svg)")
    if studies.get("phase-diagram"):
        parts.append("![Learned fractions by rate and mantissa](e4.svg)")
    for name, closed in studies.items():
        parts.append(f"## {name}")
        if closed and name in FIGURES:
            parts.append(f"![{FIGURES[name][2]}]({FIGURES[name][1]})")
        parts += _section(name, closed) if closed else ["This study has not been run."]
    return "\n\n".join(parts) + "\n"


def _summary(studies: Mapping[str, Closed | None]) -> str:
    rows = []
    for name, closed in studies.items():
        if closed is None:
            rows.append((name, "not run", "", ""))
            continue
        gates = closed.result["gates"]
        failed = ", ".join(g["name"] for g in gates if not g["passed"]) or "none"
        rows.append(
            (name, closed.result["label"], f"{sum(g['passed'] for g in gates)} of {len(gates)}", failed)
        )
    return _table(("study", "label", "gates passed", "gates failed"), rows)


def _section(name: str, closed: Closed) -> Iterator[str]:
    if not closed.result["scientific_result"]:
        yield f"Not a scientific result (scale {closed.result['scale']})."
    yield f"Label: **{cell(closed.result['label'])}**. {cell(closed.result.get('says', ''))}".rstrip()
    module = importlib.import_module(REGISTRY[name])
    ours = {gate.name for gate in module.STUDY.gates if OURS in gate.why}
    yield _table(
        ("gate", "value", "threshold", "outcome"),
        [
            (
                g["name"] + (MARK if g["name"].partition("[")[0] in ours else ""),
                beside(g["value"], g["threshold"]) + (f" ({g['unit']})" if g["unit"] else ""),
                f"{g['comparison']} {canonical.number(g['threshold'])}", "pass" if g["passed"] else "FAIL",
            )
            for g in closed.result["gates"]
        ],
    )  # fmt: skip
    if ours:
        yield f"{MARK.strip()} The threshold is ours: {OURS}."
    for title, make in module.STUDY.tables.items():
        table = make(closed.records)
        rows = [[value if isinstance(value, str) else short(value) for value in row] for row in table.rows]
        yield _folded(title, [cell(table.caption), _table(table.columns, rows)])
    claims = module.CLAIMS
    notes = list(dict.fromkeys(c.note for c in claims if c.note))
    yield _table(
        ("claim", "paper", "ours", "where", "note"),
        [
            (c.claim, _shown(c.paper), _shown(c.ours(closed.records)), c.source,
             str(notes.index(c.note) + 1) if c.note else "")
            for c in claims
        ],
    )  # fmt: skip
    yield "\n".join(f"{i}. {cell(note)}" for i, note in enumerate(notes, 1))
    yield f"Sealed as {closed.seal[:16]}, closed as {closed.head[:16]}."


def _folded(title: str, parts: Sequence[str]) -> str:
    return "\n\n".join([f"<details><summary>{cell(title)}</summary>", *parts, "</details>"])


def terms(studies: Mapping[str, Closed]) -> str:
    """Return the tables of words, as Markdown."""
    parts = ["# Definitions, regimes and evidence", TERMS_INTRODUCTION]
    for title, table in zip(
        ("Definitions", "Regimes", "Evidence"), tables({n: c.records for n, c in studies.items()}),
        strict=True,
    ):  # fmt: skip
        rows = [[value if isinstance(value, str) else short(value) for value in row] for row in table.rows]
        parts += [f"## {title}", cell(table.caption), _table(table.columns, rows)]
    return "\n\n".join(parts) + "\n"


def _shown(value: float | str | None) -> str:
    return "-" if value is None else value if isinstance(value, str) else number(value)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [list(columns), ["---"] * len(columns), *([cell(value) for value in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# ---- the figure of section 3 ----------------------------------------------------------------------------


def figure(emulator: Records, two_layer: Records, cnn: Records | None) -> Any:
    """Draw the timing of both grids, the event itself, and where in rho crossings lie."""
    fig, (left, middle, right) = new_figure(1, 3, width=12.0, height=3.8)
    both = {
        "emulator": timing.points(emulator, "emulator"),
        "two-layer": timing.points(two_layer, "gd-squared"),
    }
    panels.timing_pairs(left, both, "symmetric", TOLERANCE)
    left.set_title("(a) forecast and outcome")
    _draw_event(middle)
    middle.set_title("(b) the event, three mantissa bits")
    direct = timing.locations(emulator, "bf16").get("frozen-features")
    emulated = timing.locations(emulator) | ({"bfloat16": direct} if direct else {})
    panels.locations(right, emulated | timing.locations(two_layer) | (timing.locations(cnn) if cnn else {}))
    right.set_title("(c) where runs cross")
    return fig


def _draw_event(ax: Any) -> None:
    """Draw codes, midpoints, and proposals that are lost or not; gaps are unequal at a power of two."""
    values = [0.875, 0.9375, 1.0, 1.125, 1.25]  # m3
    low, high = (values[1] + values[2]) / 2, (values[2] + values[3]) / 2
    ax.axvspan(low, high, color="0.88", zorder=0)
    ax.hlines(0, values[0], values[-1], color="0.4", linewidth=0.8)
    ax.plot(values, [0] * len(values), "|", color="black", markersize=18)
    ax.plot([low, high], [0, 0], "x", color="C3", markersize=6)
    for d, moves in ((0.05, False), (0.09, True), (-0.02, False), (-0.05, True)):
        height, color = (0.65, "C1") if moves else (0.35, "C0")
        ax.annotate("", (1 + d, height), (1, height), arrowprops={"arrowstyle": "->", "color": color})
        ax.text(1 + d, height + 0.06, "moves" if moves else "lost", color=color, fontsize="small",
                ha="left" if d > 0 else "right")  # fmt: skip
    ax.set(xlabel="stored values (bars) and midpoints (crosses)", ylim=(-0.4, 1.0), yticks=[])


def shown(studies: Path, name: str, scale: str) -> Path:
    """Return the folder of a study: what was run at a scale, or at `medium` where that is longer."""
    tried = ("medium", "small") if scale == "small" else (scale, "medium", "small")
    there = [studies / f"{name}-{its}" for its in tried]
    return next((folder for folder in there if folder.is_dir()), studies / f"{name}-{scale}")


def write(studies: Path, scale: str, out: Path) -> list[Path]:
    """Write the pages and the figures, and return their paths."""
    controlled = {name: shown(studies, name, scale) for name in STUDIES}
    by_study = {name: read(folder) if folder.is_dir() else None for name, folder in controlled.items()}
    if not any(by_study.values()):
        raise UsageError(f"{studies} holds none of {', '.join(f.name for f in controlled.values())}.")
    written = {"controlled.md": page(by_study), "labels.md": _labels(studies)}
    closed: dict[str, Closed] = {}
    for file, title, introduction, scales in PAGES:
        folders = {name: shown(studies, name, its) for name, its in scales.items()}
        there = {name: read(folder) for name, folder in folders.items() if folder.is_dir()}
        if there:
            written[file] = page(there, title, introduction)
        closed |= there
    if closed:
        written["terms.md"] = terms(closed)
        written["recoveries.tsv"] = won_back.table({name: one.result for name, one in closed.items()})
    contents = {name: text.encode() for name, text in written.items()} | _figures(by_study, closed)
    files.put_all([(out / name, content) for name, content in contents.items()], out)
    return [out / name for name in contents]


def _labels(studies: Path) -> str:
    said = labels.table(studies)
    rows = [[_shown(value) for value in row] for row in said.rows]
    head = f"# The paper's 31 protocols\n\n{LABELS_INTRODUCTION}\n\n{cell(said.caption)}\n\n"
    return head + _table(said.columns, rows) + "\n"


def _figures(by_study: Mapping[str, Closed | None], closed: Mapping[str, Closed]) -> dict[str, bytes]:
    """Draw the paper's figures, by file."""
    drawn = {}
    for name in closed.keys() & FIGURES.keys():
        which, file, _ = FIGURES[name]
        study = importlib.import_module(REGISTRY[name]).STUDY
        with house_style():
            drawn[file] = vector(study.figures[which](closed[name].records), "svg")
    emulator, two_layer, cnn, diagram = (
        by_study[n] for n in ("emulator", "two-layer", "cnn", "phase-diagram")
    )
    if emulator and two_layer:
        both = figure(emulator.records, two_layer.records, cnn.records if cnn else None)
        drawn["controlled.svg"] = vector(both, "svg")
    if diagram:
        drawn["e4.svg"] = vector(phase_diagram.figure(diagram.records), "svg")
    return drawn
