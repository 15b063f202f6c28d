"""``allocation``: do the tiles that one run's trace ranks first matter in other runs?

The paper's prospective source-to-target test (section 5, tab:prospective-modern-allocation). A float32 run of
one *source* seed sums, over its first updates and for every tile of 768 coordinates, how much gradient
times update there is (P) and how often the update would be lost (F). The tiles with the largest P get fp32
masters, up to a tenth of what masters for all would take, exactly in bytes. That mask is sealed before
anything is known of the three *target* seeds. Each target is then trained on the grid with nearest
write-back (``rne``), with masters everywhere (``master``), and with the same bytes of masters in tiles
chosen by the source's P, by its F, by the target's own P (which nobody would know in time), and by
five controls: as many tiles of every tensor as the source's P, at random places. With L the held-out loss
after the last update,

    R(arm) = (L_rne - L_arm) / (L_rne - L_fp32)

is the share of the gap that an arm wins back, against the float32 run of the same target from its raw start.
The rule, as in the paper: the source's mask wins back at least half, is well above the best of the source's
F and the controls, and hardly below the target's own.

``eco`` is one more arm, which decides nothing: no masters, the rounding error kept in the first moment.
Masters start from the projected code, so that all arms on the grid start alike.

The smaller scales have a smaller decoder of the same kind, other text, and fewer updates, with window, end
and horizon in the paper's proportions; every tensor is a whole number of tiles at every scale.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from halfulp.masks import Mask, choose, tile_sizes
from halfulp.models.decoder import MODERN, Config
from halfulp.studies import arms
from halfulp.studies.arms import PLAYS, PROSE, WEB
from halfulp.studies.claims import Claim, label_of, value_of
from halfulp.study.protocol import Cell, Estimand, Gate, Records, Rule, Running, Stage, Study, Table
from halfulp.study.protocol import Config as Scale

GRID = "e5m2"
SHARE = 0.1
SOURCE = 58709217
TARGETS = (1249306074, 1629484925, 695340460)
CONTROLS = tuple(f"control-{i}" for i in range(1, 6))
RIVALS = ("source-F", *CONTROLS)
MASKED = ("source-P", "target-P", *RIVALS)
ARMS = ("rne", "master", "eco", *MASKED)


def _scale(model: Config, corpus: dict[str, str], window: int, updates: int, **how: Any) -> dict[str, Any]:
    shared = arms.scale(model, corpus, updates=updates, horizon=3 * updates, **how)
    return {**shared, "source": SOURCE, "targets": list(TARGETS), "window": window, "share": SHARE}


TINY = replace(MODERN, layers=2, heads=2, width=48, context=32, vocabulary=96, hidden=64)
SMALL = replace(MODERN, layers=4, heads=4, width=96, context=128, vocabulary=256, hidden=256)
SCALES = {
    "smoke": _scale(TINY, PLAYS, window=6, updates=10, warmup=2, eval_every=5, batch=4, eval_batches=2),
    "small": _scale(SMALL, PROSE, window=300, updates=500, warmup=50, eval_every=100),
    "paper": _scale(
        MODERN, WEB, window=600, updates=1000, warmup=100, eval_every=200, micro=4, device="auto",
        save_every=250,
    ),
}  # fmt: skip


# ---- stages -----------------------------------------------------------------------------------------


def source_cells(scale: Scale) -> Iterator[Cell]:
    """The source's float32 run, as long as its scores are summed."""
    window = scale["window"]
    yield Cell(
        name="source", config=arms.at_scale(scale, scale["source"], updates=window, scores=(GRID, window))
    )


def source_mask_cells(scale: Scale) -> Iterator[Cell]:
    """The masks that the source gives: by P, by F, and controls."""
    yield Cell(name="source", config={"share": scale["share"]})


def reference_cells(scale: Scale) -> Iterator[Cell]:
    """A float32 run a target: the anchor, and scores for the target's own mask."""
    for seed in scale["targets"]:
        yield Cell(name=f"target-{seed}", config=arms.at_scale(scale, seed, scores=(GRID, scale["window"])))


def target_mask_cells(scale: Scale) -> Iterator[Cell]:
    """The mask that each target would have given itself."""
    for seed in scale["targets"]:
        yield Cell(name=f"target-{seed}", config={"share": scale["share"]})


def outcome_cells(scale: Scale) -> Iterator[Cell]:
    """Every arm of every target."""
    for seed in scale["targets"]:
        for arm in ARMS:
            how: dict[str, Any] = {"grid": GRID, "policy": arm}
            if arm == "target-P":
                at = {"stage": "target-masks", "cell": f"target-{seed}", "name": "P"}
                how = {"grid": GRID, "policy": "tile-master", "mask": at}
            elif arm in MASKED:
                at = {"stage": "source-masks", "cell": "source", "name": arm.removeprefix("source-")}
                how = {"grid": GRID, "policy": "tile-master", "mask": at}
            yield Cell(name=f"target-{seed}-{arm}", config=arms.at_scale(scale, seed, **how))


def source_masks(running: Running) -> dict[str, Any]:
    """By P, by F, and the first shuffled within its tensors, five times."""
    found = _chosen(running.read("source", "source"), running.config["share"], "P", "F")
    for i, control in enumerate(CONTROLS):
        found[control] = found["P"].shuffled(seed=i)
    return _to_json(found)


def target_masks(running: Running) -> dict[str, Any]:
    """By the target's own P."""
    return _to_json(_chosen(running.read("reference", running.name), running.config["share"], "P"))


def _chosen(record: arms.Record, share: float, *scores: str) -> dict[str, Mask]:
    sizes = record["sizes"]
    return {
        score: choose(
            {name: sums / tile_sizes(sizes[name]) for name, sums in record["scores"][score].items()},
            sizes, share, score,
        )
        for score in scores
    }  # fmt: skip


def _to_json(masks: Mapping[str, Mask]) -> dict[str, Any]:
    """The chosen tiles, by tensor, and the bytes that were to be spent."""
    (budget,) = {mask.budget for mask in masks.values()}
    tiles = {
        name: {tensor: chosen.nonzero().reshape(-1).tolist() for tensor, chosen in mask.tiles.items()}
        for name, mask in masks.items()
    }
    return {"budget": budget, "masks": tiles}


# ---- estimands: one number a target -----------------------------------------------------------------


_by_target = functools.partial(arms.by_cell, "reference")


def _loss(records: Records, unit: str, arm: str) -> float | None:
    record = records["reference"][unit] if arm == "fp32" else records["outcome"][f"{unit}-{arm}"]
    return arms.final_loss(record)


def gap(records: Records, unit: str) -> float | None:
    """Held-out loss of nearest write-back above the float32 anchor's."""
    rne, fp32 = (_loss(records, unit, arm) for arm in ("rne", "fp32"))
    return None if rne is None or fp32 is None else rne - fp32


def recovery(records: Records, unit: str, arm: str) -> float | None:
    """The share of the gap that an arm does not have; None without a gap."""
    whole, rne, loss = gap(records, unit), _loss(records, unit, "rne"), _loss(records, unit, arm)
    return None if whole is None or whole <= 0 or rne is None or loss is None else (rne - loss) / whole


def best_rival(records: Records, unit: str) -> float | None:
    """The largest recovery among the source's F and the controls; None if one is missing."""
    found = [recovery(records, unit, arm) for arm in RIVALS]
    return None if None in found else max(r for r in found if r is not None)


def _above(records: Records, unit: str, other: Callable[[Records, str], float | None]) -> float | None:
    ours, theirs = recovery(records, unit, "source-P"), other(records, unit)
    return None if ours is None or theirs is None else ours - theirs


def above_rivals(records: Records, unit: str) -> float | None:
    """Recovery of the source's P less that of its best rival."""
    return _above(records, unit, best_rival)


def above_target(records: Records, unit: str) -> float | None:
    """Recovery of the source's P less that of the target's own."""
    return _above(records, unit, functools.partial(recovery, arm="target-P"))


def shared_tiles(records: Records, unit: str) -> float | None:
    """The share of the source's P tiles that the target's own P chose too."""
    source, target = (
        records[f"{k}-masks"][c]["masks"]["P"] for k, c in (("source", "source"), ("target", unit))
    )
    common = sum(len(set(tiles) & set(target[name])) for name, tiles in source.items())
    return common / sum(map(len, source.values()))


def bytes_off(records: Records, unit: str) -> float | None:
    """The largest difference between masters held by a masked arm and the budget, in bytes."""
    budget = records["source-masks"]["source"]["budget"]
    held = [records["outcome"][f"{unit}-{arm}"]["master_bytes"] for arm in MASKED]
    return float(max(abs(n - budget) for n in held))


def matched(records: Records, unit: str) -> float | None:
    """1 where all runs drew the same weights and all on the grid began from the same codes."""
    runs = [records["outcome"][f"{unit}-{arm}"] for arm in ARMS]
    drawn = {r["initial"] for r in (*runs, records["reference"][unit])}
    return float(len(drawn) == 1 == len({r["start"] for r in runs}))


# ---- tables and figures -----------------------------------------------------------------------------


def losses(records: Records) -> Table:
    """The paper's tab:prospective-modern-allocation-losses, with every arm."""
    columns = ("fp32", *ARMS)
    rows = [(unit, *(_loss(records, unit, arm) for arm in columns)) for unit in records["reference"]]
    return Table(
        columns=("target", *columns), rows=rows, caption="Held-out loss after the last update, nats."
    )


def recoveries(records: Records) -> Table:
    """The paper's tab:prospective-modern-allocation, with every arm."""
    columns = ("master", "eco", *MASKED)
    rows = [
        (
            unit,
            gap(records, unit),
            *(recovery(records, unit, arm) for arm in columns),
            above_rivals(records, unit),
            above_target(records, unit),
        )
        for unit in records["reference"]
    ]
    return Table(
        columns=("target", "gap, nats", *columns, "source-P above best rival", "above target-P"), rows=rows,
        caption=f"Share of the gap won back; masked arms hold masters for {SHARE:.0%} of the coordinates.",
    )  # fmt: skip


def recovered(records: Records) -> Any:
    """The paper's fig:allocation: recovery by arm; a line spans the targets."""
    from halfulp.report.style import COLOURS, GREY, new_figure, percent

    figure, (panel,) = new_figure(1, 1)
    shown = ("master", "eco", "target-P", "source-P", "source-F", *CONTROLS)
    for place, arm in enumerate(shown):
        found = [recovery(records, unit, arm) for unit in records["reference"]]
        known = [r for r in found if r is not None]
        if known:
            colour = COLOURS[1] if arm == "source-P" else GREY if arm in CONTROLS else COLOURS[0]
            panel.plot([place, place], [min(known), max(known)], color=colour, linewidth=1)
            panel.plot([place] * len(known), known, "o", color=colour)
    panel.axhline(0, color=GREY, linewidth=0.8)
    panel.set_xticks(range(len(shown)), shown, rotation=45, ha="right")
    panel.set_ylabel("share of the gap won back")
    percent(panel, full=False)
    return figure


# ---- the declaration --------------------------------------------------------------------------------

_RECOVERIES = {
    "all": "master",
    "source": "source-P",
    "target": "target-P",
    "freeze": "source-F",
    "eco": "eco",
}

STUDY = Study(
    name="allocation",
    question="Do the tiles that one run's gradient times update ranks first deserve masters in other runs?",
    units="one target training seed; masks, tiles and controls are not replicates",
    not_claimed=(
        "that the score is new or the best: it is one first-order signal",
        "that lost updates are unimportant in general, or that a mask holds for another model or data",
        "memory or time of a whole run: the budget counts bytes of masters",
        "anything about a population of random masks: the controls are five fixed ones",
    ),
    scales=SCALES,
    stages=(
        Stage(name="source", kind="reference", cells=source_cells, run=arms.run),
        Stage(
            name="source-masks", kind="prediction", cells=source_mask_cells, run=source_masks,
            reads=("source",),
        ),
        Stage(name="reference", kind="reference", cells=reference_cells, run=arms.run),
        Stage(
            name="target-masks", kind="prediction", cells=target_mask_cells, run=target_masks,
            reads=("reference",),
        ),
        Stage(
            name="outcome", kind="outcome", cells=outcome_cells, run=arms.run,
            reads=("source-masks", "target-masks"),
        ),
    ),
    estimands=(
        Estimand(name="gap", what="final loss of rne above raw fp32, nats", compute=_by_target(gap)),
        *(
            Estimand(
                name=f"recovery-{name}", what=f"share of the gap won back by {arm}",
                compute=_by_target(recovery, arm),
            )
            for name, arm in _RECOVERIES.items()
        ),
        *(
            Estimand(name=name, what=what, compute=_by_target(value))
            for name, what, value in (
                ("best-rival", "largest recovery of source-F and controls", best_rival),
                ("above-rivals", "recovery of source-P less best-rival", above_rivals),
                ("above-target", "recovery of source-P less that of target-P", above_target),
                ("shared-tiles", "share of source-P's tiles that target-P has too", shared_tiles),
                ("bytes-off", "largest distance of masters held from the budget", bytes_off),
            )
        ),
        Estimand(name="matched", what="1 where the arms began as declared", compute=_by_target(matched)),
    ),
    gates=(
        Gate(
            name="material", estimand="gap", scope="all", comparison=">=", threshold=0.1,
            why="without a gap a recovery has no meaning",
        ),
        Gate(
            name="blanket", estimand="recovery-all", scope="all", comparison=">=", threshold=0.9,
            why="masters everywhere must win the gap back, or masters somewhere say nothing",
        ),
        Gate(name="source", estimand="recovery-source", scope="all", comparison=">=", threshold=0.5),
        Gate(name="source-mean", estimand="recovery-source", scope="mean", comparison=">=", threshold=0.6),
        Gate(name="rivals", estimand="above-rivals", scope="all", comparison=">=", threshold=0.15),
        Gate(name="rivals-mean", estimand="above-rivals", scope="mean", comparison=">=", threshold=0.25),
        Gate(name="target", estimand="above-target", scope="all", comparison=">=", threshold=-0.1),
        Gate(name="target-mean", estimand="above-target", scope="mean", comparison=">=", threshold=-0.05),
        Gate(name="exact", estimand="bytes-off", scope="all", comparison="==", threshold=0.0),
        Gate(name="matched", estimand="matched", scope="all", comparison="==", threshold=1.0),
    ),
    rules=(
        Rule(label="not matched", failed=("matched",)),
        Rule(label="budget not met exactly", failed=("exact",)),
        Rule(label="no material gap", failed=("material",)),
        Rule(label="masters everywhere do not win the gap back", failed=("blanket",)),
        Rule(
            label="the source's mask transfers",
            passed=("source", "source-mean", "rivals", "rivals-mean", "target", "target-mean"),
        ),
        Rule(
            label="the source's mask is above its rivals, not every floor met",
            passed=("rivals", "rivals-mean"),
        ),
        Rule(label="the source's mask does not transfer"),
    ),
    scale_data={
        "smoke": (PLAYS["train"],),
        "small": (PROSE["train"], PROSE["held_out"]),
        "paper": (WEB["train"], WEB["held_out"]),
    },
    tables={"losses": losses, "recoveries": recoveries},
    figures={"recovered": recovered},
)  # fmt: skip


# ---- beside the paper -------------------------------------------------------------------------------


_TABLE = "tab:prospective-modern-allocation"
_PRINTED: dict[str, tuple[str, str, tuple[float | str, ...]]] = {
    "gap": ("nearest loss gap, nats", f"{_TABLE}-losses", (1.159, 1.137, 1.186)),
    "recovery-source": ("won back by the source's P", _TABLE, (0.604, 0.610, 0.607)),
    "recovery-target": ("won back by the target's own P", _TABLE, (0.615, 0.605, 0.606)),
    "best-rival": ("won back by the best of F and the controls", _TABLE, (0.182, 0.175, 0.179)),
    "recovery-freeze": ("won back by the source's F", _TABLE, (0.009, 0.007, 0.007)),
    "recovery-eco": ("won back by eco, without masters", "section 5", ("0.964 to 0.966",) * 3),
}

PAPER = (
    Claim(claim="the rule", source="appendix E", paper="every gate passes", ours=label_of(STUDY)),
    *(
        Claim(
            claim=f"{what}, target {seed}",
            source=source,
            paper=printed[i],
            ours=value_of(STUDY, name, f"target-{seed}"),
            note="162 million weights, 1000 updates; smaller scales have another model, text and horizon",
        )
        for name, (what, source, printed) in _PRINTED.items()
        for i, seed in enumerate(TARGETS)
    ),
)
