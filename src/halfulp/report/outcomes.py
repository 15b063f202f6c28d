"""The parts of a page that set a forecast beside its outcome, and policies beside each other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from halfulp.measures.forecasts import ACCURATE_RMSE, ADDED_VALUE_RATIO, INFORMATIVE_RANGE, INFORMATIVE_RATIO
from halfulp.report import words
from halfulp.report.markup import Content, Html, number, numeric, table, tag
from halfulp.report.runs import Arms, Outcome, Run
from halfulp.text import percent

UNTESTED = (
    "No run on one of these grids was given, so this forecast is untested. Train on one of them with nearest "
    "write-back, audit that run on its grid, and give both traces: "
)
BAND = (
    f"The shaded band is the forecast plus and minus {words.points(ACCURATE_RMSE)}: what the accuracy gate "
    "allows, not a confidence interval. The outcome is exact; the forecast was made without it."
)
ASKED = "Being close to a flat line is no evidence, so three things are asked of a forecast."
POLICIES = (
    "How the next stored value is made of what the optimizer proposes. Recovery is the share of the loss gap "
    "between nearest write-back and the fp32 reference that a policy wins back: a description of these runs "
    "against one anchor, on training loss, mean of the last tenth of the steps."
)


def forecast_section(runs: Sequence[Run], outcomes: Sequence[Outcome]) -> Html | None:
    """Forecast against measured; where nothing was measured, what that means."""
    if not any(run.grid is None for run in runs):
        return None
    if not outcomes:
        command = tag("code", "halfulp report REFERENCE MEASURED")
        return tag("section", tag("h2", "Forecast and outcome"), tag("p", UNTESTED, command, "."))
    parts = [part for i, outcome in enumerate(outcomes) for part in _outcome(i, outcome)]
    return tag(
        "section",
        tag("h2", "Forecast and outcome"),
        *parts,
        tag("p", BAND, class_="note"),
        aria_label="Forecast and outcome",
    )


def _outcome(i: int, outcome: Outcome) -> list[Html]:
    c = outcome.comparison
    gates: list[tuple[str, str, str, bool | None]] = [
        ("accurate", f"RMSE {words.points(c.rmse)}", f"at most {words.points(ACCURATE_RMSE)}", c.accurate),
        (
            "informative",
            f"range {words.points(c.measured_range)}; "
            f"RMSE {_ratio(c.rmse, c.constant_rmse)} of the best constant's",
            f"range at least {words.points(INFORMATIVE_RANGE)}; at most {INFORMATIVE_RATIO:g}",
            c.informative,
        ),
        (
            "better than simpler forecasts",
            f"RMSE {_ratio(c.rmse, min(c.symmetric_rmse or 0.0, c.rho_rmse or 0.0))} of the better one's",
            f"at most {ADDED_VALUE_RATIO:g}",
            c.directional_added_value,
        ),
    ]
    rows: list[list[Content]] = [
        [tag("th", gate, scope="row"), value, threshold, passed_mark(passed)]
        for gate, value, threshold, passed in gates
    ]
    return [
        tag("p", words.outcome_sentence(outcome), class_="lead"),
        tag("div", class_="chart outcome", data_outcome=i),
        table(["gate", "found", "asked", ""], rows, caption=ASKED),
    ]


def _ratio(a: float, b: float) -> str:
    return f"{a / b:.2f}" if b else "-"


def passed_mark(passed: bool | None) -> Html:
    """Return a gate's result as a word with a sign, never as a colour alone."""
    if passed is None:
        return tag("td", "not tested", class_="gate")
    return tag("td", "✓ passed" if passed else "✗ failed", class_=f"gate {'passed' if passed else 'failed'}")


def policy_section(groups: Sequence[Arms]) -> Html | None:
    """Show policies with their loss, recovery and bytes; of a run on its own, the loss."""
    if not groups:
        return None
    if len(groups) == 1 and len(groups[0].members) == 1:
        if not np.isfinite(groups[0].runs[0].gathered.loss).any():
            return None
        chart = tag("div", class_="chart loss", data_arms=0)
        return tag("section", tag("h2", "Training loss"), chart, aria_label="Training loss")
    parts: list[Html] = []
    for i, arms in enumerate(groups):
        parts += [_policies(arms), tag("div", class_="chart loss", data_arms=i)]
    return tag(
        "section",
        tag("h2", "Policies"),
        tag("p", POLICIES),
        *parts,
        aria_label="Policies",
    )


def _policies(group: Arms) -> Html:
    rows: list[list[Content]] = []
    for run in group.members:
        grid = run.grid or group.grid
        never = run.gathered.never_moved(grid) if run.grid else None
        recovered = group.recovery(run)
        late = run.gathered.findings()[run.gathered.grids.index(grid)].lost_late
        rows.append(
            [
                tag("th", run.policy_words if run.grid else "fp32 reference", scope="row"),
                number(f"{run.bytes_per_weight:g}"),
                number(words.loss(run, group)),
                number("-" if recovered is None else f"{recovered:.0%}"),
                number("-" if run.grid is None else percent(late)),
                number(percent(never)),
            ]
        )
    columns = ("bytes per weight", "final loss", "recovery", "code kept at the end", "never moved")
    caption = f"On {group.grid}. Bytes of stored weights and of what the policy keeps beside them."
    return table(["policy", *map(numeric, columns)], rows, caption=caption)
