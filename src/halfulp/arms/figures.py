"""The figures that decoder studies share, drawn from records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from halfulp.arms import measures, records
from halfulp.arms.bundle import Bundle, Unit
from halfulp.drawing import COLOURS, DASHES, GREY, new_figure, percent
from halfulp.study.protocol import Records

Curves = Sequence[tuple[int, Sequence[float]]]


def policy_effect(bundle: Bundle, found: Records, after: float = 0.3, target: float | None = None) -> Any:
    """Loss gaps, recovery and never-moved shares of every condition (the paper's fig:causal).

    A band spans the targets. Recovery is drawn from the first evaluation after a share of the run; ``target``
    is a line across it.
    """
    figure, (gaps, shares, moved) = new_figure(1, 3)
    others = [arm for arm in bundle.arms if arm != "rne"]
    for condition, colour in zip(bundle.conditions, (COLOURS[1], COLOURS[0], *COLOURS[2:]), strict=False):
        units = bundle.over(found, condition)
        updates = list(records.losses(units[0].run("rne")))
        late = [u for u in updates if u >= measures.early_update(units[0], "rne", after)]
        for arm, dash in zip(bundle.arms, DASHES, strict=False):
            name = f"{condition} {arm}"
            _band(
                gaps,
                [(u, _known(measures.gap(x, arm, u) for x in units)) for u in updates],
                colour,
                dash,
                name,
            )
        for arm, dash in zip(others, DASHES, strict=False):
            name = condition if len(others) == 1 else f"{condition} {arm}"
            _band(
                shares,
                [(u, _known(measures.recovery(x, arm, u) for x in units)) for u in late],
                colour,
                dash,
                name,
            )
        ends = [_mean(_known(measures.never_moved(x, arm) for x in units)) for arm in ("rne", others[0])]
        moved.plot([condition, condition], ends, color=colour, linewidth=1)
        moved.plot([condition], ends[:1], "o", color=colour)
        moved.plot([condition], ends[1:], "o", color=colour, markerfacecolor="white")
    if target is not None:
        shares.axhline(target, color=GREY, linewidth=0.8, linestyle=":")
    for panel, title, text in (
        (gaps, "loss gap", f"nats above {bundle.anchor} fp32"),
        (shares, "recovery", "share of the rne gap"),
        (moved, "never moved", f"attention and mlp; open: {others[0]}"),
    ):
        panel.set_title(title)
        panel.set_ylabel(text)
    for panel in (gaps, shares):
        panel.set_xlabel("update")
        panel.legend()
    percent(shares, full=False)
    percent(moved)
    return figure


def recovered(
    bundle: Bundle, found: Records, arms: Sequence[str], highlight: str, faint: Sequence[str] = ()
) -> Any:
    """Recovery by arm; a line spans the targets (the paper's fig:allocation)."""
    figure, (panel,) = new_figure(1, 1)
    units = bundle.over(found)
    for place, arm in enumerate(arms):
        known = _known(measures.recovery(unit, arm) for unit in units)
        if known:
            colour = COLOURS[1] if arm == highlight else GREY if arm in faint else COLOURS[0]
            panel.plot([place, place], [min(known), max(known)], color=colour, linewidth=1)
            panel.plot([place] * len(known), known, "o", color=colour)
    panel.axhline(0, color=GREY, linewidth=0.8)
    panel.set_xticks(range(len(arms)), arms, rotation=45, ha="right")
    panel.set_ylabel("share of the gap won back")
    percent(panel, full=False)
    return figure


def trajectories(bundle: Bundle, found: Records, scope: str) -> Any:
    """Frozen fraction over updates, forecast and measured, with persistent crossings; a panel a unit."""
    figure, panels = new_figure(1, len(bundle.units), sharey=True)
    for panel, name in zip(panels, bundle.units, strict=True):
        unit = Unit(bundle, found, name)
        run = unit.run("rne")
        for f, at, label, colour in (
            (unit.forecast(scope), measures.onset(unit, scope), "forecast", COLOURS[0]),
            (
                records.frozen(run, run["grid"], scope),
                measures.onset(unit, scope, "rne"),
                "measured",
                COLOURS[1],
            ),
        ):
            assert f is not None
            panel.plot(range(1, len(f) + 1), f, color=colour, label=label)
            if at is not None:
                panel.axvline(at, color=colour, linewidth=0.8, linestyle=":")
        panel.axhline(0.5, color=GREY, linewidth=0.8)
        panel.set_title(name)
        panel.set_xlabel("update")
        percent(panel)
    panels[0].set_ylabel(f"updates lost, {scope}")
    panels[0].legend()
    return figure


def _known(values: Any) -> list[float]:
    return [v for v in values if v is not None]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _band(panel: Any, curves: Curves, colour: str, dash: Any, name: str) -> None:
    known = [(u, values) for u, values in curves if values]
    at = [u for u, _ in known]
    panel.plot(at, [_mean(v) for _, v in known], color=colour, linestyle=dash, label=name)
    panel.fill_between(at, [min(v) for _, v in known], [max(v) for _, v in known], color=colour, alpha=0.2)
