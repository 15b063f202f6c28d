"""Panels of the controlled studies' figures: how their numbers look, from plain numbers.

A study says which numbers; nothing here knows of records, and no number depends on anything here, so a
change of looks is no change of a sealed study's code (:mod:`halfulp.study.loading`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from halfulp.drawing import COLOURS, GREY, new_figure

Points = Sequence[tuple[float, float]]
Grid2d = Mapping[tuple[int, float], float | None]
"""By mantissa and rate."""
RHO_STAR = 2**-0.5
"""The half-freeze boundary of uniform phases (appendix A)."""


# ---- timing -------------------------------------------------------------------------------------------


def timing_pairs(ax: Any, points: Mapping[str, Points], predictor: str, tolerance: float) -> None:
    """Forecast against measured crossings, with the band of the tolerance; (forecast, measured) by name."""
    for label, each in points.items():
        if each:
            forecast, measured = zip(*each, strict=True)
            ax.scatter(measured, forecast, s=14, alpha=0.7, linewidths=0, label=f"{label}, n = {len(each)}")
    ends = np.array([2.0, 10_000.0])
    ax.fill_between(ends, ends * (1 - tolerance), ends * (1 + tolerance), color="0.85", zorder=0)
    ax.plot(ends, ends, color="0.5", linewidth=0.8, zorder=0)
    ax.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="measured crossing (step)",
           ylabel=f"forecast crossing, {predictor} (step)")  # fmt: skip
    ax.legend(frameon=False, fontsize="small")


def locations(ax: Any, values: Mapping[str, Sequence[float]]) -> None:
    """Draw median, quartiles and range of the pooled rho at the crossing, by system."""
    ax.axvspan(0.5, 1.0, color="0.9", zorder=0)
    ax.axvline(RHO_STAR, color="0.5", linewidth=0.8, zorder=0)
    for row, v in enumerate(values.values()):
        low, q1, middle, q3, high = np.percentile(v, [0, 25, 50, 75, 100])
        ax.plot([low, high], [row, row], color="C0", linewidth=0.8)
        ax.plot([q1, q3], [row, row], color="C0", linewidth=3)
        ax.plot([middle], [row], "o", color="C0", markersize=5)
    ax.set(xscale="log", xlabel="pooled rho at the first crossing", ylim=(len(values) - 0.5, -0.5))
    ax.set_yticks(range(len(values)), [f"{name} (n = {len(v)})" for name, v in values.items()])
    ax.set_xticks([0.25, 0.5, 1, 2, 4], ["0.25", "0.5", "1", "2", "4"])
    ax.set_xticks([], minor=True)


def widths(each: Mapping[int, Points], means: Mapping[int, Points]) -> Any:
    """Draw the crossover width against size, by mantissa: every seed, and the means."""
    fig, (ax,) = new_figure(width=5.4, height=3.6)
    for color, (m, points) in enumerate(each.items()):
        ax.scatter([n for n, _ in points], [w for _, w in points], s=8, alpha=0.4, color=f"C{color}")
        ax.plot([n for n, _ in means[m]], [w for _, w in means[m]], color=f"C{color}", label=f"m = {m}")
    ax.set(xscale="log", xlabel="coordinates of the input layer", ylabel="Q0.84 - Q0.16 of z (bits)")
    ax.set_ylim(bottom=0)
    ax.legend(frameon=False)
    return fig


# ---- learning -----------------------------------------------------------------------------------------


def phase_diagram(
    real: Grid2d, forecast: Grid2d, stochastic: Grid2d, bad: Mapping[float, tuple[int, int]], learned: float
) -> Any:
    """Draw where the forecast agrees, and what both arms learn; diverged references are hatched."""
    fig, (left, middle, right) = new_figure(1, 3, width=11.0, height=3.6, sharey=True)
    mantissas, rates = sorted({m for m, _ in real}), sorted({rate for _, rate in real})
    for (m, rate), value in real.items():
        inside, forecast_inside = (v is not None and v >= learned for v in (value, forecast[m, rate]))
        agrees = inside == forecast_inside
        color = ("#cfe8cf" if inside else "#eeeeee") if agrees else "#f4a742"
        _cell(left, rates.index(rate), mantissas.index(m), color, "✓" if agrees else "")
    for ax, values, title in ((middle, real, "(b) nearest"), (right, stochastic, "(c) stochastic")):
        for (m, rate), value in values.items():
            shade = 1 - 0.75 * min(max(value or 0.0, 0.0), 1.0)
            text, hatched = "" if value is None else f"{value:.2f}", bad[rate][0] > 0
            x, y = rates.index(rate), mantissas.index(m)
            _cell(ax, x, y, (shade, shade, 1.0), text, hatched=hatched, dark=shade < 0.5)
        ax.set_title(title)
    left.set_title(f"(a) forecast agrees at {learned:g}")
    left.set_ylabel("mantissa bits")
    for ax in (left, middle, right):
        ax.set_xlim(-0.5, len(rates) - 0.5)
        ax.set_ylim(-0.5, len(mantissas) - 0.5)
        labels = [f"{rate:g}\n{bad[rate][0]}/{bad[rate][1]}" for rate in rates]
        ax.set_xticks(range(len(rates)), labels, fontsize="x-small")
        ax.set_xlabel("rate, and diverged/total references")
        ax.set_yticks(range(len(mantissas)), [str(m) for m in mantissas])
    return fig


def _cell(
    ax: Any, x: int, y: int, color: Any, text: str, *, hatched: bool = False, dark: bool = False
) -> None:
    from matplotlib.patches import Rectangle

    ax.add_patch(
        Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=color, edgecolor="0.5", linewidth=0.4,
                  hatch="////" if hatched else None)
    )  # fmt: skip
    ink = "white" if dark and not hatched else "black"
    ax.text(x, y, text, ha="center", va="center", fontsize="x-small", color=ink)


def learned_shares(cells: Mapping[int, Sequence[tuple[float, float, float]]], positive: float) -> Any:
    """Draw the learned share against the rate, by mantissa: (rate, measured, forecast)."""
    fig, axes = new_figure(1, len(cells), width=2 * len(cells), sharey=True)
    for ax, (m, each) in zip(axes, cells.items(), strict=True):
        rates, measured, forecast = zip(*each, strict=True)
        ax.axhline(positive, color=GREY, linewidth=0.8)
        ax.plot(rates, forecast, "x", color=COLOURS[1], label="forecast")
        ax.plot(rates, measured, "o", color=COLOURS[0], fillstyle="none", label="measured")
        ax.set(xscale="log", ylim=(-0.1, 1.2), title=f"m = {m}", xlabel="rate")
        ax.set_xticks([0.02, 0.1, 0.5], ["0.02", "0.1", "0.5"])
        ax.set_xticks([], minor=True)
    axes[0].set_ylabel("learned share")
    axes[-1].legend(loc="center")
    return fig


# ---- trust --------------------------------------------------------------------------------------------


def margins(curves: Mapping[str, Points], aim: float, units: Mapping[str, Mapping[str, Any]]) -> Any:
    """Draw risk against coverage by forecast; and one unit per grid, its interval and what happened."""
    fig, (left, *others) = new_figure(1, 1 + len(units), width=2 * (1 + len(units)))
    for (name, curve), color in zip(curves.items(), COLOURS, strict=False):
        left.plot(*zip(*curve, strict=True), "o-", color=color, markersize=3, label=name)
    left.axhline(aim, color=GREY, linewidth=0.8)
    left.set(xlabel="coverage", ylabel="risk")
    left.set_ylim(bottom=0)
    if len(curves) > 1:
        left.legend()
    for ax, (grid, unit) in zip(others, units.items(), strict=True):
        shares = {k: [v / unit["weights"] for v in unit["curve"][k]] for k in ("lower", "upper", "measured")}
        at = unit["curve"]["step"]
        ax.fill_between(at, shares["lower"], shares["upper"], color=COLOURS[1], alpha=0.3, linewidth=0)
        ax.plot(at, shares["measured"], color=COLOURS[0])
        ax.set(xscale="log", ylim=(0, 1), title=grid, xlabel="update")
    others[0].set_ylabel("frozen")
    return fig
