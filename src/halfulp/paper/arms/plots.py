"""The figures that decoder studies share, drawn from records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from halfulp.drawing import COLOURS, DASHES, GREY, new_figure, percent
from halfulp.paper.arms import measures, records
from halfulp.paper.arms.bundle import Bundle, Unit
from halfulp.paper.values import known
from halfulp.study.protocol import Records

Curves = Iterable[tuple[int, Sequence[float]]]
CONDITIONS = (COLOURS[1], COLOURS[0], *COLOURS[2:])


def policy_effect(bundle: Bundle, outcomes: Records, after: float = 0.3, target: float | None = None) -> Any:
    """Draw loss gaps, recovery and never-moved shares of every condition (the paper's fig:causal).

    A band spans the targets. Recovery is drawn from the first evaluation after a share of the run; ``target``
    is a line across it.
    """
    figure, (lost, shares, moved) = new_figure(1, 3)
    others = [arm for arm in bundle.arms if arm != "rne"]
    for condition, colour in zip(bundle.conditions, CONDITIONS, strict=False):
        units = bundle.over(outcomes, condition)
        first = measures.early_update(units[0], "rne", after)
        late = [u for u in records.losses(units[0].run("rne")) if u >= first]
        _draw_gaps(lost, bundle, units, condition, colour)
        for arm, dash in zip(bundle.arms, DASHES, strict=False):
            if arm == "rne":
                continue
            curve = ((u, known(measures.recovery(x, arm, u) for x in units)) for u in late)
            _band(shares, curve, colour, dash, f"{condition} {arm}")
        ends = [_mean(known(measures.never_moved(x, arm) for x in units)) for arm in ("rne", others[0])]
        moved.plot([condition, condition], ends, color=colour, linewidth=1)
        moved.plot([condition], ends[:1], "o", color=colour)
        moved.plot([condition], ends[1:], "o", color=colour, markerfacecolor="white")
    if target is not None:
        shares.axhline(target, color=GREY, linewidth=0.8, linestyle=":")
    lost.set(title="loss gap", xlabel="update", ylabel=f"nats above {bundle.anchor} fp32")
    shares.set(title="recovery", xlabel="update", ylabel="share of the rne gap")
    moved.set(title="never moved", ylabel=f"attention and mlp; open: {others[0]}")
    figure.legend(*lost.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    percent(shares, full=False)
    percent(moved)
    moved.margins(x=0.2)
    return figure


def tracked(bundle: Bundle, records: Records, scope: str) -> Any:
    """Draw the frozen fraction over updates, measured and by each sealed predictor; a panel per condition.

    The band spans the targets; forecasts are means over them.
    """
    figure, panels = new_figure(1, len(bundle.conditions), sharey=True)
    for panel, condition in zip(panels, bundle.conditions, strict=True):
        units = bundle.over(records, condition)
        seen = np.array([measures.measured(unit, scope) for unit in units])
        _band(panel, enumerate(seen.T.tolist(), 1), COLOURS[1], "-", "measured")
        colours = (COLOURS[0], *COLOURS[2:])
        for predictor, colour, dash in zip(("frozen", "symmetric", "rho"), colours, DASHES[1:], strict=False):
            curves = [f for unit in units if (f := unit.forecast(scope, predictor)) is not None]
            _draw(panel, np.mean(curves, axis=0), colour, measures.PREDICTORS[predictor], linestyle=dash)
        panel.set(title=condition, xlabel="update")
        percent(panel, full=False)
    panels[0].set_ylabel(f"updates lost, {scope}")
    panels[0].legend()
    return figure


def gaps(bundle: Bundle, records: Records) -> Any:
    """Draw the loss above the anchor over updates, a line per arm and condition; a band spans the targets."""
    figure, (panel,) = new_figure()
    for condition, colour in zip(bundle.conditions, CONDITIONS, strict=False):
        _draw_gaps(panel, bundle, bundle.over(records, condition), condition, colour)
    panel.set(xlabel="update", ylabel=f"nats above {bundle.anchor} fp32")
    panel.legend()
    return figure


def recovered(
    bundle: Bundle, records: Records, arms: Sequence[str], highlight: str, faint: Sequence[str] = ()
) -> Any:
    """Draw the recovery by arm; a line spans the targets (the paper's fig:allocation)."""
    figure, (panel,) = new_figure(1, 1)
    units = bundle.over(records)
    for place, arm in enumerate(arms):
        won = known(measures.recovery(unit, arm) for unit in units)
        if won:
            colour = COLOURS[1] if arm == highlight else GREY if arm in faint else COLOURS[0]
            panel.plot([place, place], [min(won), max(won)], color=colour, linewidth=1)
            panel.plot([place] * len(won), won, "o", color=colour)
    panel.axhline(0, color=GREY, linewidth=0.8)
    panel.set_xticks(range(len(arms)), arms, rotation=45, ha="right")
    panel.set_ylabel("share of the gap won back")
    percent(panel, full=False)
    return figure


def trajectories(bundle: Bundle, records: Records, scope: str) -> Any:
    """Draw the frozen fraction, forecast and measured, with persistent crossings; a panel per unit."""
    figure, panels = new_figure(1, len(bundle.units), sharey=True)
    for panel, unit in zip(panels, bundle.over(records), strict=True):
        for f, at, label, colour in (
            (unit.forecast(scope), measures.onset(unit, scope), "forecast", COLOURS[0]),
            (measures.measured(unit, scope), measures.onset(unit, scope, "rne"), "measured", COLOURS[1]),
        ):
            assert f is not None
            _draw(panel, f, colour, label)
            if at is not None:
                panel.axvline(at, color=colour, linewidth=0.8, linestyle=":")
        panel.axhline(0.5, color=GREY, linewidth=0.8)
        panel.set(title=unit.name, xlabel="update")
        percent(panel)
    panels[0].set_ylabel(f"updates lost, {scope}")
    panels[0].legend()
    return figure


def _draw_gaps(panel: Any, bundle: Bundle, units: Sequence[Unit], condition: str, colour: str) -> None:
    updates = list(records.losses(units[0].run("rne")))
    for arm, dash in zip(bundle.arms, DASHES, strict=False):
        curve = ((u, known(measures.gap(unit, arm, u) for unit in units)) for u in updates)
        _band(panel, curve, colour, dash, f"{condition} {arm}")


def _draw(panel: Any, series: records.Array, colour: str, label: str, **how: Any) -> None:
    panel.plot(range(1, len(series) + 1), series, color=colour, label=label, **how)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _band(panel: Any, curve: Curves, colour: str, dash: Any, name: str) -> None:
    points = {u: values for u, values in curve if values}
    panel.plot(list(points), [*map(_mean, points.values())], color=colour, linestyle=dash, label=name)
    low, high = ([*map(end, points.values())] for end in (min, max))
    panel.fill_between(list(points), low, high, color=colour, alpha=0.2)


def budget_curve(
    kept: Mapping[str, float],
    won: Mapping[str, Sequence[float]],
    front: Sequence[str],
    privileged: Sequence[str] = (),
) -> Any:
    """Draw recovery against the bytes that a policy keeps, a mark per policy; a line spans the targets.

    The step line is the Pareto front: nothing that keeps as few bytes wins back more. ``privileged`` policies
    (open marks) know their own target, so they are not on it.
    """
    figure, (panel,) = new_figure(1, 1, height=4.2)
    unit = max(kept.values()) or 1.0
    at = {arm: size / unit for arm, size in kept.items()}
    for arm, values in won.items():
        chosen = arm in front
        colour = COLOURS[1] if chosen else COLOURS[0] if arm in privileged else GREY
        mean = _mean(values)
        panel.plot([at[arm], at[arm]], [min(values), max(values)], color=colour, linewidth=1)
        face = "white" if arm in privileged else colour
        panel.plot([at[arm]], [mean], "o", color=colour, markerfacecolor=face)
        if arm not in privileged:
            panel.annotate(arm, (at[arm], mean), xytext=(3, -4), textcoords="offset points",
                           fontsize="small", rotation=-35, rotation_mode="anchor", va="top")  # fmt: skip
    steps = [*front, front[-1]]
    heights = [_mean(won[arm]) for arm in steps]
    panel.step([*(at[arm] for arm in front), 1.12], heights, where="post", color=COLOURS[1], linewidth=1)
    panel.axhline(0, color=GREY, linewidth=0.8)
    panel.set(xlim=(-0.04, 1.12), ylabel="share of the gap won back",
              xlabel="bytes that the policy keeps, as a share of masters everywhere")  # fmt: skip
    percent(panel, full=False)
    return figure
