"""The parts of a trace's page: the verdict, when updates die, where, how sure that is, and what was run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from halfulp.report import words
from halfulp.report.gather import Array, bins
from halfulp.report.markup import Content, Html, name, number, numeric, picture, table, tag
from halfulp.report.runs import Run
from halfulp.text import percent, shown
from halfulp.trace import Trace
from halfulp.verdicts import details
from halfulp.verdicts.answer import Answer
from halfulp.verdicts.findings import HARDLY, Finding

WORST = 12
"""Tensors that are listed, for each grid."""
NOSCRIPT = tag(
    "noscript", tag("p", "The charts are drawn by a script; the tables hold the numbers.", class_="note")
)

WHEN = (
    "The share of a step's updates that is lost: the stored code stays, because the update is smaller than "
    "half a gap. ● marks where a majority begins that lasts (a tenth of the steps without a gap). "
    "Drag to zoom, double-click to go back; the arrow keys move the cursor."
)
ARRIVES = (
    "Arrives: how much of the proposed change is written, along it, ⟨written, proposed⟩ / |proposed|²; it "
    "can pass 100%, because rounding up overshoots."
)
TREE = (
    "A module is as wide as its weights, with the modules and tensors in it below. The "
    "colour is how much of its updates arrives (where that is not known, how many of them). Click one to "
    "look into it, or use the arrow keys and Enter."
)
EXACT = (
    "whether an update changed a stored weight is arithmetic, Q(q + d) = q, for the change d that the "
    "optimizer made. No model and no assumption, in the run that was watched and on the grid that it stores."
)
FORECAST = (
    "any other grid is a projection of this run. A run on the grid leaves this path, often within a few "
    "steps. Its shares can still be close; whether they are must be checked on one such run."
)
KEPT = (
    "stochastic rounding, ECO, Kahan and masters leave most codes unchanged at a step and lose nothing by "
    "that. For them, look at what never moved, and at the loss."
)
NO_LOSS = (
    "most weights can be frozen at every step while a changing minority learns. What it costs must be "
    "measured."
)
NO_COORDINATE = (
    "which single weight freezes. Fractions are forecast, coordinates are not: margins and intervals for "
    "single weights failed in the paper's locked test."
)


# ---- the verdict ----------------------------------------------------------------------------------------


def verdict_section(run: Run, answer: Answer, *, alone: bool) -> Html:
    """Return the answer, as the command line gives it; then its line to copy; details are folded below."""
    parts = [
        (tag("dt", part.name), tag("dd", _lines(part.lines, fix=part.name == "Fix", code=answer.code)))
        for part in answer.sections
    ]
    shown_details = tag("pre", "\n".join(answer.details))
    return tag(
        "section",
        *(tag("p", said, class_="banner", role="alert") for said in answer.notices),
        None if alone else tag("p", name(run.name), class_="kicker"),
        tag("h1", answer.headline),
        tag("dl", *parts, class_="answer") if parts else None,
        tag("details", tag("summary", "Everything that is known, grid by grid"), shown_details),
        class_="verdict",
        aria_label="Verdict",
    )


def _lines(said: Sequence[str], *, fix: bool, code: Sequence[str]) -> list[Html]:
    """Return the lines of a section; those of a fix can be copied."""
    if not fix:
        return [tag("p", line) for line in said]
    paste = "\n".join(code)
    button = tag("button", "Copy", type="button", class_="copy", data_copy=paste)
    rest = [tag("p", line) for line in said if line not in code]
    return [tag("div", tag("pre", tag("code", paste)), button, class_="paste"), *rest]


def formats_section(run: Run, *, alone: bool) -> Html:
    """Return every format that was audited, a row each."""
    findings = run.gathered.findings()
    weights = sum(int(t["numel"]) for t in run.trace.tensors)
    facts = f"{len(run.gathered.steps):,} steps, {len(run.trace.tensors):,} tensors, {weights:,} weights"
    dtypes = ", ".join(sorted({shown(str(t["stored"]), 20) for t in run.trace.tensors}))
    stored = f"stored on {run.grid}, {run.policy_words} write-back"
    kind = f"a forecast from this run in {dtypes}" if run.grid is None else stored
    head: list[Content] = [
        "grid",
        numeric("updates lost" if run.loses else "code kept"),
        "over the run",
        numeric("at the end"),
        *([numeric("arrives")] if _arrival_known(findings) else []),
        "majority lost",
        numeric("never moved"),
        numeric("hardly move"),
        "kept by",
    ]
    idle = findings[0].idle
    nothing = f" {idle:.1%} of the proposals were zero: not counted." if idle >= details.IDLE else ""
    caption = (
        f"Shares of the weights that are stored on the grid; where none is, of all.{nothing} Hardly move: "
        f"tensors that lose at least {HARDLY:.0%} of their updates."
        + (f" {ARRIVES}" if _arrival_known(findings) else "")
        + " Kept by: policies that keep the updates, with their bytes per weight when stored packed."
    )
    rows = [_grid_row(run, finding, arrives=_arrival_known(findings)) for finding in findings]
    return tag(
        "section",
        tag("h2", "Formats"),
        None if alone else tag("p", name(run.name), class_="kicker"),
        tag("p", f"{facts}; {kind}.", _sampled(run.trace), class_="facts"),
        table(head, rows, caption=caption),
        aria_label="Formats",
    )


def _arrival_known(findings: Sequence[Finding]) -> bool:
    """Return True if it is known how much of the update arrives."""
    return any(f.gain is not None for f in findings)


def _sampled(trace: Trace) -> str | None:
    share = trace.manifest["options"]["sample"]
    return f" A fixed sample of {share:.0%} of the tiles: {details._error(trace)}." if share else None


def _grid_row(run: Run, finding: Finding, *, arrives: bool) -> list[Content]:
    severity = words.SEVERITIES[finding.severity] if run.loses or finding.grid != run.grid else "kept"
    sign = {"most": "●", "some": "◐", "fine": "○", "kept": "○", "unknown": ""}[severity]
    late = tag("span", sign, class_=f"mark {severity}", aria_hidden="true")
    lossy = severity in ("most", "some")
    return [
        tag("th", finding.grid, scope="row"),
        number(percent(finding.lost)),
        tag("td", sparkline(run.gathered.lost_share(finding.grid)), class_="spark"),
        number(late, percent(finding.lost_late)),
        *([number(details.arriving(finding), title=words.angle(finding))] if arrives else []),
        tag("td", words.lasting(finding.majority), class_="onset"),
        number(percent(finding.never_moved)),
        number(len(finding.hardly) or "none"),
        tag("td", words.kept_by(run, finding) if lossy else "-", class_="onset"),
    ]  # fmt: skip


def sparkline(shares: Array, width: int = 120, height: int = 26) -> Html:
    """Return a curve of shares so small that it fits a line of text."""
    there = shares[~np.isnan(shares)]
    if not len(there):
        return tag("span", "-")
    starts = bins(len(there), width)
    mean = np.add.reduceat(there, starts) / np.diff(np.append(starts, len(there)))
    if len(mean) == 1:
        mean = np.repeat(mean, 2)
    x, y = np.linspace(1, width - 1, len(mean)), 1 + (height - 2) * (1 - mean)
    path = "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in zip(x, y, strict=True))
    parts = [
        tag("path", d=f"{path}L{width - 1} {height}L1 {height}Z", class_="area"),
        tag("line", x1=0, x2=width, y1=height / 2, y2=height / 2, class_="half"),
        tag("path", d=path, class_="line"),
    ]
    return picture(f"from {percent(float(there[0]))} to {percent(float(there[-1]))}", width, height, parts)


def tree_section(runs: Sequence[Run]) -> Html:
    """Show the model as one picture: a module is as wide as its weights, and darker where less arrives."""
    worst = [tag("div", *(_worst(run, grid) for grid in run.gathered.grids)) for run in runs]
    lists = tag("div", *worst, class_="panels", data_runs=len(runs))
    ramp = tag("span", class_="ramp", role="img", aria_label="colour scale from all arrives to nothing")
    scale = tag("span", "all arrives", ramp, "nothing", class_="scale")
    return tag(
        "section",
        tag("h2", "The model"),
        tag("p", TREE),
        tag("div", _select("grid", "Grid", []), scale, class_="controls"),
        *(tag("div", class_="tree", data_tree=i) for i in range(len(runs))),
        NOSCRIPT,
        tag("details", tag("summary", "Tensors that lose most"), lists),
        aria_label="The model",
    )


# ---- when -------------------------------------------------------------------------------------


def when_section(runs: Sequence[Run]) -> Html:
    """Show the curves over steps."""
    measures = [
        ("frozen", "updates lost at this step"),
        ("never_moved", "weights never moved so far"),
        ("expected", "never moved so far, expected with stochastic rounding"),
    ]
    known = [(key, what) for key, what in measures if all(key in r.gathered.counts for r in runs)]
    kinds = [("grids", "grids, a chart for each run"), ("runs", "runs, on one grid")]
    controls = [
        _select("measure", "Show", known),
        _select("scope", "of", []),
        _select("lines", "Lines are", kinds) if len(runs) > 1 else None,
        tag("label", tag("input", type="checkbox", id="log"), "logarithmic steps"),
    ]
    return tag(
        "section",
        tag("h2", "When updates die"),
        tag("p", WHEN),
        tag("div", *controls, class_="controls"),
        tag("div", class_="panels", id="when", data_runs=len(runs)),
        NOSCRIPT,
        aria_label="When updates die",
    )


def _worst(run: Run, grid: str) -> Html:
    """Return the tensors of a run that lose most on a grid."""
    g = run.gathered
    followed = run.trace.manifest["options"]["never_moved"]
    never = g.last_never[:, g.grids.index(grid)]
    moved = [
        row for row in zip(run.trace.tensors, g.tensor_share(grid), never, strict=True) if row[1] == row[1]
    ]
    moved.sort(key=lambda row: (-row[1], -row[0]["recorded"], row[0]["name"]))
    rows = [
        [
            tag("th", name(t["name"], 40), scope="row"),
            name(t["group"], 20),
            number(f"{t['numel']:,}"),
            number(percent(float(share))),
            number(percent(still / t["recorded"]) if followed else "-"),
        ]
        for t, share, still in moved[:WORST]
    ]  # fmt: skip
    more = f", the first {WORST} of {len(moved):,}" if len(moved) > WORST else ""
    head = ["tensor", "group", numeric("weights"), numeric("updates lost"), numeric("never moved")]
    return tag("div", table(head, rows, caption=[name(run.name, 32), f" on {grid}{more}"]), data_grid=grid)


def _select(identifier: str, label: str, options: Sequence[tuple[str, str]]) -> Html:
    tags = [tag("option", text, value=value) for value, text in options]
    return tag("label", label, tag("select", *tags, id=identifier))


# ---- what is behind it ------------------------------------------------------------------------------------


def sure_section(runs: Sequence[Run]) -> Html:
    """Show what the page claims, and what it does not."""
    projected = any(r.grid is None or len(r.trace.grids) > 1 for r in runs)
    rounded = dict.fromkeys(text for r in runs if (text := details.rounded_words(r.trace)))
    said = [
        ("Exact: ", EXACT, True),
        *(("Rounded before: ", text, True) for text in rounded),
        ("Forecast: ", FORECAST, projected),
        ("Kept is not lost: ", KEPT, any(not r.loses for r in runs)),
        ("A lost share is not yet a loss: ", NO_LOSS, True),
        ("Not claimed: ", NO_COORDINATE, True),
    ]
    items = [tag("li", tag("b", what), text) for what, text, wanted in said if wanted]
    return tag("section", tag("h2", "How sure this is"), tag("ul", *items))


def run_section(runs: Sequence[Run]) -> Html:
    """Show what was run."""
    facts = [_facts(run) for run in runs]
    return tag("section", tag("h2", "What was run"), tag("div", *facts, class_="panels", data_runs=len(runs)))


def _facts(run: Run) -> Html:
    manifest, steps = run.trace.manifest, run.gathered.steps
    about = manifest.get("run", {})
    command = " ".join(str(part) for part in (about.get("script", ""), *about.get("arguments", ()))).strip()
    others = {k: v for k, v in about.items() if k not in ("script", "arguments", "name", "caller", "gain")}
    stores = {
        t["dtype"] if t["dtype"] == t["stored"] else f"{t['dtype']} on {t['stored']}"
        for t in run.trace.tensors
    }
    environment = ", ".join(f"{k} {v}" for k, v in manifest.get("environment", {}).items())
    every = "every step" if manifest["every"] == 1 else f"every {manifest['every']} steps"
    facts: list[tuple[str, Content]] = [
        ("trace", name(run.trace.path.name)),
        ("script", name(command, 120) if command else None),
        *((shown(str(k), 30), name(str(v), 120)) for k, v in others.items()),
        ("steps", f"{len(steps):,} recorded, to step {int(steps[-1]):,}"),
        ("audited", f"{every}, on {', '.join(run.trace.grids)}"),
        ("weights", name(", ".join(sorted(stores)), 120)),
        ("optimizer", [tag("span", name(_optimizer(o), 200)) for o in manifest.get("optimizers", [])]),
        ("environment", name(environment, 160)),
        ("recorded by", name(f"halfulp {manifest.get('halfulp')}")),
    ]  # fmt: skip
    listed = [(tag("dt", k), tag("dd", v)) for k, v in facts if v]
    return tag("div", tag("h3", name(run.name)), tag("dl", *listed))


def _optimizer(optimizer: dict[str, Any]) -> str:
    wraps = f" around {optimizer['wraps']}" if "wraps" in optimizer else ""
    policies = "".join(f", {policy}" for policy in optimizer.get("policies", ()))
    wanted = ("lr", "betas", "momentum", "eps", "weight_decay")
    groups = optimizer.get("groups") or [optimizer.get("defaults", {})]
    groups = [{**g, "lr": g.get("initial_lr", g.get("lr"))} if "lr" in g else g for g in groups]
    each = {k: list(dict.fromkeys(g[k] for g in groups if k in g)) for k in wanted}
    given = [f"{k}={' or '.join(values)}" for k, values in each.items() if values]
    return f"{optimizer.get('class')}{wraps}{policies} ({', '.join(given)})"
