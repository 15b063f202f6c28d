"""Figures for papers: of traces, and those that a study declares, as SVG and PDF in one style."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from halfulp.drawing import (
    BLUE,
    COLOURS,
    DASHES,
    GREY,
    POLICY_COLOURS,
    VERMILLION,
    house_style,
    label,
    new_figure,
    percent,
    save,
)
from halfulp.errors import UsageError
from halfulp.integrations.scalars import tag as plain_name
from halfulp.measures.forecasts import ACCURATE_RMSE
from halfulp.report.gather import Array
from halfulp.report.page import open_traces
from halfulp.report.runs import Outcome, Run, arms, forecasts, shown_first
from halfulp.report.study_page import is_study, open_study
from halfulp.trace import Trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write_figures(paths: Sequence[Path], out: Path, formats: Sequence[str] = ("svg", "pdf")) -> list[Path]:
    """Write every figure of some traces and studies into a folder; what was written."""
    figures: dict[str, Figure] = {}
    for path in (p for p in paths if is_study(p)):
        view = open_study(path, code=True)
        if view.study is None or view.records is None:
            why = "it is not finished" if view.records is None else "this halfulp does not have its code"
            raise UsageError(f"{path} has no figures to draw: {why}.")
        with house_style():
            for title, draw in view.study.figures.items():
                figures[f"{plain_name(view.protocol.study)}-{plain_name(title)}"] = draw(view.records)
    traces = [Trace.open(p) for p in paths if not is_study(p)]
    if traces:
        with house_style():
            figures |= dict(_of_traces(open_traces(traces)))
    return [file for stem, figure in figures.items() for file in save(figure, out / stem, formats)]


def _of_traces(runs: Sequence[Run]) -> Iterator[tuple[str, Figure]]:
    for run in shown_first(runs):
        stem = plain_name(run.name)
        yield f"{stem}-lost", curves(run, "frozen", "updates lost")
        if "never_moved" in run.gathered.counts:
            yield f"{stem}-never-moved", curves(run, "never_moved", "never moved so far")
    for outcome in forecasts(runs):
        yield f"{plain_name(outcome.measured.name)}-forecast-{plain_name(outcome.grid)}", forecast(outcome)
    for group in arms(runs):
        members = [run for run in group.members if run.final_loss is not None]
        if members:
            yield f"policies-{plain_name(group.grid)}", losses(members)


def curves(run: Run, column: str, what: str) -> Figure:
    """Return a share over steps, a line for each grid; a dot where a majority begins that lasts."""
    figure, (panel,) = new_figure()
    g = run.gathered
    for i, grid in enumerate(g.grids):
        colour, dash = COLOURS[i % 7], DASHES[i // 7 % len(DASHES)]
        share = g.curve(column, grid)
        panel.plot(g.steps, share, color=colour, linestyle=dash, label=label(grid))
        lasting = g.majority(grid) if column == "frozen" else None
        if lasting is not None:
            at = int(np.searchsorted(g.steps, lasting.first))
            panel.plot([lasting.first], [share[at]], "o", color=colour)
    panel.axhline(0.5, color=GREY, linewidth=0.8, linestyle=(0, (3, 3)), zorder=0)
    panel.set_xlabel("step")
    panel.set_ylabel(what)
    panel.set_title(label(run.name, 70))
    percent(panel)
    panel.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def forecast(outcome: Outcome) -> Figure:
    """Draw a forecast with the band of the accuracy gate, the rehearsal's forecast, and the measurement."""
    figure, (panel,) = new_figure()
    low, high = (np.clip(outcome.forecast + d, 0, 1) for d in (-ACCURATE_RMSE, ACCURATE_RMSE))
    panel.fill_between(outcome.steps, low, high, color=BLUE, alpha=0.15, linewidth=0)
    name = "forecast" if outcome.rehearsed is None else "projected"
    panel.plot(outcome.steps, outcome.forecast, color=BLUE, linestyle=DASHES[1], label=name)
    if outcome.rehearsed is not None:
        panel.plot(outcome.steps, outcome.rehearsed, color=COLOURS[2], linestyle=DASHES[2], label="rehearsed")
    panel.plot(outcome.steps, outcome.outcome, color=VERMILLION, label="measured")
    panel.set_xlabel("step")
    panel.set_ylabel("weights left unchanged")
    panel.set_title(label(outcome.grid, 70))
    percent(panel)
    panel.legend(loc="best")
    return figure


def losses(members: Sequence[Run]) -> Figure:
    """Draw the training loss, a line for each policy."""
    figure, (panel,) = new_figure()
    for run in members:
        colour = POLICY_COLOURS.get(run.policy or "", GREY)
        panel.plot(
            run.gathered.steps,
            _smooth(run.gathered.loss),
            color=colour,
            linestyle="-" if run.policy else DASHES[2],
            label=label(run.policy_words if run.policy else "fp32 reference"),
        )
    panel.set_xlabel("step")
    panel.set_ylabel("training loss (nats)")
    panel.legend(loc="best")
    return figure


def _smooth(loss: Array) -> Array:
    """Return a running mean over a fiftieth of the record, shorter at its start."""
    width = max(1, len(loss) // 50)
    total = np.cumsum(np.insert(loss, 0, 0.0))
    last = np.arange(1, len(loss) + 1)
    first = np.maximum(last - width, 0)
    return np.asarray((total[last] - total[first]) / (last - first))
