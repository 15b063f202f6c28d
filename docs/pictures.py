"""The pictures of the documentation, each computed with halfulp itself.

    python docs/pictures.py [FOLDER]

writes SVG files; a test holds those in ``docs/assets`` to what it writes.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import halfulp as hu
from halfulp.drawing import COLOURS, new_figure, percent, save

ASSETS = Path(__file__).parent / "assets"
GRID = hu.grid("e4m3")
NEAREST, STOCHASTIC, EXACT = COLOURS[1], COLOURS[0], "0.45"


def codes(low: float, high: float) -> torch.Tensor:
    """The codes of e4m3 from low to high."""
    return torch.unique(GRID.round(torch.linspace(low, high, 2001)))


def cell(folder: Path) -> None:
    """A rounding cell: what is stored for everything between two midpoints."""
    figure, (panel,) = new_figure(width=6.4, height=1.9)
    around = codes(0.875, 1.25)
    below, above = float(around[around < 1.0].max()), float(around[around > 1.0].min())
    panel.axvspan((1 + below) / 2, (1 + above) / 2, color=NEAREST, alpha=0.2, lw=0)
    panel.hlines(0, 0.86, 1.28, color="0.3", lw=1)
    panel.plot(around, torch.zeros_like(around), "|", ms=16, mew=1.6, color="0.15")
    for code in around.tolist():
        panel.text(code, -0.42, f"{code:g}", ha="center", va="top", fontsize=8)
    for d, height, colour in ((0.06, 0.55, NEAREST), (0.07, 1.15, STOCHASTIC)):
        lost = bool(hu.frozen(torch.tensor([1.0]), torch.tensor([d]), GRID))
        panel.annotate(
            "", (1 + d, height), (1.0, height), arrowprops={"arrowstyle": "->", "color": colour, "lw": 1.6}
        )
        panel.text(
            1 + d + 0.006,
            height,
            f"d = {d:g}: {'lost' if lost else 'moves the weight'}",
            va="center",
            fontsize=9,
        )
    panel.text(1.0, 1.75, "everything here is stored as 1", ha="center", fontsize=9, color=NEAREST)
    panel.set_ylim(-1.1, 2.1)
    panel.set_xlim(0.86, 1.28)
    panel.set_axis_off()
    save(figure, folder / "cell", ("svg",))


def dead_zone(folder: Path) -> None:
    """The next stored value as a function of the proposal, and what stochastic rounding does on average."""
    figure, (panel,) = new_figure(width=6.4, height=3.2)
    d = torch.linspace(-0.2, 0.3, 501)
    z = 1.0 + d
    draws = [GRID.round(z, hu.Stream(seed=0, name="picture", step=s)) for s in range(400)]
    dead = d[hu.frozen(torch.ones_like(d), d, GRID)]
    panel.axvspan(float(dead.min()), float(dead.max()), color=NEAREST, alpha=0.15, lw=0)
    panel.plot(d, z, color=EXACT, lw=1, ls="--", label="what the optimizer asked for")
    panel.plot(d, GRID.round(z), color=NEAREST, label="nearest")
    panel.plot(
        d, torch.stack(draws).mean(dim=0), color=STOCHASTIC, lw=1.2, label="stochastic, mean of 400 draws"
    )
    panel.text(float(dead.mean()), 1.24, "dead zone", ha="center", fontsize=9, color=NEAREST)
    panel.set_xlabel("proposal d at the stored value 1")
    panel.set_ylabel("next stored value")
    panel.legend(loc="lower right", fontsize=8)
    save(figure, folder / "dead-zone", ("svg",))


def many_steps(folder: Path) -> None:
    """The same small proposal, two hundred times, at sixty-four weights."""
    figure, (panel,) = new_figure(width=6.4, height=3.0)
    steps, d, weights = 200, 0.004, 64
    nearest, drawn = [torch.ones(weights)], [torch.ones(weights)]
    for s in range(steps):
        nearest.append(GRID.round(nearest[-1] + d))
        drawn.append(GRID.round(drawn[-1] + d, hu.Stream(seed=0, name="picture", step=s)))
    asked = [1.0 + d * s for s in range(steps + 1)]
    panel.plot(asked, color=EXACT, lw=1.2, ls="--", label="sum of the proposals")
    panel.plot([w[0] for w in nearest], color=NEAREST, lw=2.0, label="nearest, every weight")
    for i in range(3):
        path = [w[i] for w in drawn]
        panel.plot(path, color=STOCHASTIC, lw=0.8, alpha=0.45, drawstyle="steps-post")
    panel.plot(
        [w.mean() for w in drawn], color=STOCHASTIC, label="stochastic, three weights and the mean of 64"
    )
    panel.set_xlabel("update")
    panel.set_ylabel("stored value")
    panel.legend(loc="upper left", fontsize=8)
    save(figure, folder / "many-steps", ("svg",))


def run(scale: torch.Tensor, grid: str | None) -> tuple[list[float], float]:
    """Least squares with features of these scales; losses, and the share of updates lost."""
    made = torch.Generator().manual_seed(0)
    x = torch.randn(1024, len(scale), generator=made) * scale
    y = x @ torch.randn(len(scale), 1, generator=made)
    model = torch.nn.Linear(len(scale), 1, bias=False)
    torch.nn.init.normal_(model.weight, std=0.5, generator=made)
    inner = torch.optim.SGD(model.parameters(), lr=0.2)
    optimizer = inner if grid is None else hu.WriteBack(inner, grid, "rne", model=model)
    losses, lost = [], 0.0
    for _ in range(400):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        lost += 0.0 if grid is None else optimizer.events.frozen / 400
    return [value / losses[0] for value in losses], lost


def visibility(folder: Path) -> None:
    """Two runs that lose most of their updates: one hardly notices, the other stops."""
    figure, panels = new_figure(1, 2, width=6.8, height=2.9, sharey=True)
    few = torch.cat([torch.ones(8), torch.full((504,), 0.01)])
    problems = (("8 of 512 weights matter", few), ("all 512 weights matter", torch.full((512,), 0.125)))
    for panel, (title, scale) in zip(panels, problems, strict=True):
        exact, _ = run(scale, None)
        nearest, lost = run(scale, "e4m3")
        panel.plot(exact, color=EXACT, ls="--", label="fp32")
        panel.plot(nearest, color=NEAREST, label=f"e4m3, nearest: {lost:.1%} of updates lost")
        panel.set_xlabel("update")
        panel.set_title(title, fontsize=9)
        panel.legend(fontsize=8)
    panels[0].set_ylabel("loss, of the first")
    save(figure, folder / "visibility", ("svg",))


def learn(policy: str | None) -> tuple[list[float], list[float]]:
    """The run of docs/start.md: losses, and the share of weights that never moved."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 256), torch.nn.LayerNorm(256), torch.nn.GELU(), torch.nn.Linear(256, 10)
    )
    inner = torch.optim.AdamW(model.parameters(), lr=3e-4)
    optimizer = inner if policy is None else hu.WriteBack(inner, "e4m3@128", policy, model=model)
    losses, never = [], []
    for _ in range(200):
        x = torch.randn(64, 64)
        loss = torch.nn.functional.cross_entropy(model(x), x[:, :10].argmax(dim=1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if policy is not None:
            never.append(optimizer.events.never_moved)
    return losses, never


def claim(folder: Path) -> None:
    """One model, one optimizer, weights in fp8: as a cast stores them, and stochastically."""
    figure, (left, right) = new_figure(1, 2, width=7.2, height=2.7)
    for policy, colour, name in (
        (None, EXACT, "fp32"),
        ("rne", NEAREST, "fp8, nearest (a cast)"),
        ("sr", STOCHASTIC, "fp8, stochastic"),
    ):
        losses, never = learn(policy)
        smooth = torch.tensor(losses).unfold(0, 10, 1).mean(dim=1)  # ten batches
        left.plot(
            range(10, 201),
            smooth,
            color=colour,
            ls="-" if policy else "--",
            zorder=2 if policy else 3,
            label=name,
        )
        if never:
            right.plot(range(1, 201), never, color=colour, label=name)
    left.set_title("training loss", fontsize=9)
    right.set_title("weights that have never moved", fontsize=9)
    percent(right)
    for panel in (left, right):
        panel.set_xlabel("update")
        panel.legend(fontsize=8)
    save(figure, folder / "claim", ("svg",))


def main(folder: Path = ASSETS) -> None:
    """Draw all."""
    folder.mkdir(parents=True, exist_ok=True)
    for picture in (claim, cell, dead_zone, many_steps, visibility):
        picture(folder)


if __name__ == "__main__":
    main(*(Path(a) for a in sys.argv[1:2]))
