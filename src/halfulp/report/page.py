"""The page of traces and studies, whatever a command was given."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from halfulp.errors import UsageError
from halfulp.report import costs, outcomes, sections
from halfulp.report.charts import page_data
from halfulp.report.document import document
from halfulp.report.markup import Html
from halfulp.report.runs import Run, arms, forecasts, open_runs, shown_first
from halfulp.report.study_page import is_study, open_study, study_sections
from halfulp.report.tree import tree_data
from halfulp.text import shown
from halfulp.trace import Trace
from halfulp.verdicts.answer import Answer, answer_of


def page(paths: Sequence[Path], *, code: bool = False) -> str:
    """Return one HTML page of trace and study folders, studies first.

    Args:
        paths: The folders.
        code: Allow a study's own file to be run.
    """
    studies = [open_study(p, code=code) for p in paths if is_study(p)]
    traces = [Trace.open(p) for p in paths if not is_study(p)]
    names = [view.protocol.study for view in studies]
    parts = [part for view in studies for part in study_sections(view)]
    data: object = {"runs": [], "outcomes": [], "arms": [], "trees": []}
    if traces or not studies:
        runs = open_traces(traces)
        names += [run.name for run in runs]
        below, data = _of_traces(runs)
        parts += below
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return document(f"{names[0]}{more}", parts, data)


def open_traces(traces: Sequence[Trace]) -> list[Run]:
    """Return the runs of traces that hold something."""
    if not traces:
        raise UsageError("a page needs at least one trace or study.")
    for trace in traces:
        if not trace.parts:
            raise UsageError(f"{trace.path} holds no complete part yet: there is nothing to show.")
        if not trace.tensors:
            raise UsageError(f"{trace.path} holds no tensor with a weight in it: there is nothing to show.")
    return open_runs(traces)


def _of_traces(runs: Sequence[Run]) -> tuple[list[Html | None], object]:
    """Show references side by side, and the arms that they forecast; add what the charts are drawn from."""
    first, measured, policies = shown_first(runs), forecasts(runs), arms(runs)
    rehearsed = costs.gathered(runs)
    answers = [_answer(run) for run in first]
    met: list[Html | None] = [outcomes.forecast_section(first, measured), outcomes.policy_section(policies)]
    seen: list[Html | None] = [sections.when_section(first)]
    parts: list[Html | None] = [
        *(
            sections.verdict_section(run, answer, alone=len(first) == 1)
            for run, answer in zip(first, answers, strict=True)
        ),
        sections.tree_section(first),
        *(sections.formats_section(run, alone=len(first) == 1) for run in first),
        *(costs.cost_section(c, alone=len(first) == 1) for c in rehearsed),
        *(met + seen if measured or policies else seen + met),
        sections.sure_section(runs),
        sections.run_section(runs),
    ]
    data = page_data(first, measured, policies)
    data["grid"] = answers[0].grid
    data["trees"] = [tree_data(run.gathered) for run in first]
    return parts, data


def _answer(run: Run) -> Answer:
    """Return the answer of a run, from what was gathered."""
    trouble = (f"Incomplete: {shown(run.trace.trouble, 400)}",) if run.trace.trouble else ()
    return answer_of(run.trace, tuple(run.gathered.findings()), trouble)
