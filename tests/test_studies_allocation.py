"""``allocation``: scores, masks and masters of its arms, and the paper's rows through its gates."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_cells import Here, Stopped, run_all, write_corpora

import halfulp as hu
from halfulp.errors import UsageError
from halfulp.kernels import SCORES, TILE, tiles_of
from halfulp.models.decoder import MODERN, Config, Decoder
from halfulp.models.training import Recipe, Schedule, Training, adamw
from halfulp.studies import allocation, arms
from halfulp.study.verdict import decide, evaluate

MODEL = replace(MODERN, layers=1, heads=2, width=48, context=16, vocabulary=96, hidden=64)
RECIPE = Recipe(
    schedule=Schedule(peak=6e-3, floor=6e-4, warmup=2, horizon=12), seed=3, updates=8, batch=3, context=16,
    eval_every=5, eval_batches=2,
)  # fmt: skip
STUDY = allocation.STUDY
UNITS = [f"target-{seed}" for seed in allocation.TARGETS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpora(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def records(folder: Path) -> dict[str, dict[str, Any]]:
    """All stages at the smallest scale."""
    return run_all(STUDY, folder)


def arm(**how: Any) -> dict[str, Any]:
    given = {"seed": 7, "model": MODEL, "recipe": RECIPE, "corpus": arms.PLAYS, "save_every": 1}
    return arms.declare(**{**given, **how})


# ---- arms -----------------------------------------------------------------------------------------------


def test_scores_are_those_of_an_audit(folder: Path, tmp_path: Path) -> None:
    """Sums over the first updates, as an audit with scores= records them in a trace."""
    record = arms.run(Here(arm(scores=("e5m2", 5)), folder))
    model = Decoder(MODEL, seed=7)
    train, _ = arms.open_corpus(Here({}, folder), arms.PLAYS, MODEL.vocabulary)
    run = Training(model, adamw(model, RECIPE), train, RECIPE)
    with hu.Audit(run.optimizer, "e5m2", model=model, out=tmp_path / "trace", scores=("e5m2", 1, 5)):
        while not run.done:
            run.step()
    told = hu.Trace.open(tmp_path / "trace").scores()
    assert set(told) == set(record["sizes"]) == set(record["scores"]["P"])
    for name, sums in told.items():
        for score in arms.SCORED:
            assert record["scores"][score][name] == sums[:, SCORES.index(score)].tolist(), (name, score)


def masked(folder: Path, stop_after: int | None = None) -> Here:
    at = {"stage": "masks", "cell": "source", "name": "P"}
    cell = Here(arm(grid="e5m2", policy="tile-master", mask=at), folder, stop_after=stop_after)
    names = [n for n, p in Decoder(MODEL, seed=7).named_parameters() if p.dim() >= 2]
    cell.records = {"masks": {"source": {"masks": {"P": {n: [] if "up" in n else [0] for n in names}}}}}
    return cell


def test_interrupted_arms_leave_the_same_record(folder: Path) -> None:
    """With scores, and with masters for some tiles: stopped after each save in turn."""
    for make in (lambda **how: Here(arm(scores=("e5m2", 5)), folder, **how), lambda **h: masked(folder, **h)):
        whole = arms.run(make())
        json.dumps(whole, allow_nan=False)
        for k in range(1, RECIPE.updates + 1):
            cell = make(stop_after=k)
            with pytest.raises(Stopped):
                arms.run(cell)
            assert arms.run(cell) == whole, k


def test_masters_are_where_the_mask_says(folder: Path) -> None:
    """The bytes held are those of the chosen tiles; the run is that of a TileMaster made by hand."""
    cell = masked(folder)
    record = arms.run(cell)
    chosen = cell.records["masks"]["source"]["masks"]["P"]
    assert record["master_bytes"] == 4 * TILE * sum(map(len, chosen.values()))
    model = Decoder(MODEL, seed=7)
    matrices = {n: p for n, p in model.named_parameters() if p.dim() >= 2}
    tiles = {n: torch.arange(tiles_of(p.numel())) < len(chosen[n]) for n, p in matrices.items()}
    optimizer = hu.WriteBack(adamw(model, RECIPE), "e5m2", hu.TileMaster(tiles), model=model)
    train, held_out = arms.open_corpus(cell, arms.PLAYS, MODEL.vocabulary)
    run = Training(model, optimizer, train, RECIPE, held_out=held_out)
    while not run.done:
        run.step()
    assert run.evaluate() == arms.final_loss(record)


def test_masks_and_scores_need_their_arm() -> None:
    at = {"stage": "masks", "cell": "source", "name": "P"}
    for how in (
        {"grid": "e5m2", "policy": "tile-master"},
        {"grid": "e5m2", "policy": "rne", "mask": at},
        {"mask": at},
        {"grid": "e5m2", "policy": "rne", "scores": ("e5m2", 3)},
    ):
        with pytest.raises(UsageError, match="a mask is for the policy tile-master"):
            arm(**how)


# ---- the declaration ------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", ["smoke", "small", "paper"])
def test_arms_of_a_target_differ_in_policy_and_mask_only(scale: str) -> None:
    counts = [len(STUDY.cells(scale, stage.name)) for stage in STUDY.stages]
    assert counts == [1, 1, 3, 3, 33]
    cells = {cell.name: cell.config for cell in STUDY.cells(scale, "outcome")}
    references = {cell.name: cell.config for cell in STUDY.cells(scale, "reference")}
    for unit in UNITS:
        rne = cells[f"{unit}-rne"]
        for name in allocation.ARMS:
            other = cells[f"{unit}-{name}"]
            assert {k for k in {**rne, **other} if rne.get(k) != other.get(k)} <= {"policy", "mask"}
        same = ("seed", "model", "recipe", "corpus", "device")
        assert all(references[unit][key] == rne[key] for key in same)
        assert references[unit]["projected"] is None  # the raw anchor


@pytest.mark.parametrize("scale", ["smoke", "small"])
def test_tensors_are_whole_tiles(scale: str) -> None:
    """So that a tenth of the masters can be had exactly, whatever is chosen."""
    model = Decoder(Config(**STUDY.config(scale)["model"]), seed=0)
    sizes = [p.numel() for p in model.parameters() if p.dim() >= 2]
    assert all(n % TILE == 0 for n in sizes)
    assert sum(sizes) % (10 * TILE) == 0


def test_paper_scale_is_the_papers() -> None:
    """Appendix E: 162.2 million parameters, 211,200 tiles, scores of 600 of 1000 updates."""
    config = STUDY.cells("paper", "outcome")[0].config
    recipe, model = Recipe.from_json(config["recipe"]), Config(**config["model"])
    with torch.device("meta"):
        sizes = [p.numel() for p in Decoder(model, seed=0, device=torch.device("meta")).parameters()]
    assert sum(sizes) == 162_220_800
    assert sum(n // TILE for n in sizes if n >= 768 * 768) == 211_200
    assert (recipe.batch, recipe.context, recipe.updates) == (12, 1024, 1000)
    assert recipe.schedule == Schedule(peak=6e-4, floor=6e-5, warmup=100, horizon=3000)
    (source,) = STUDY.cells("paper", "source")
    assert (source.config["seed"], source.config["recipe"]["updates"]) == (58709217, 600)
    assert source.config["scores"] == ["e5m2", 600]
    assert [c.config["seed"] for c in STUDY.cells("paper", "reference")] == [
        1249306074,
        1629484925,
        695340460,
    ]


# ---- a smoke run ----------------------------------------------------------------------------------------


def test_masks_spend_the_budget(records: dict[str, dict[str, Any]]) -> None:
    """Every mask the same number of tiles; controls as many of each tensor as the source's P."""
    told = records["source-masks"]["source"]
    sizes = records["source"]["source"]["sizes"]
    tiles = sum(sizes.values()) // TILE // 10
    assert told["budget"] == 4 * TILE * tiles
    for name, mask in told["masks"].items():
        assert sum(map(len, mask.values())) == tiles, name
        if name in allocation.CONTROLS:
            assert {n: len(t) for n, t in mask.items()} == {n: len(t) for n, t in told["masks"]["P"].items()}
    for score in ("P", "F"):
        sums = records["source"]["source"]["scores"][score]
        worst = min(sums[n][i] for n, chosen in told["masks"][score].items() for i in chosen)
        left = {n: set(range(len(t))) - set(told["masks"][score][n]) for n, t in sums.items()}
        assert worst >= max(sums[n][i] for n, rest in left.items() for i in rest)


def test_smoke(records: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    values = evaluate(STUDY.estimands, records)
    assert values["matched"] == dict.fromkeys(sorted(UNITS), 1.0)
    assert values["bytes-off"] == dict.fromkeys(sorted(UNITS), 0.0)
    for unit in UNITS:
        fp32 = arms.final_loss(records["reference"][unit])
        rne, ours = (arms.final_loss(records["outcome"][f"{unit}-{name}"]) for name in ("rne", "source-P"))
        assert fp32 is not None
        assert rne is not None
        assert ours is not None
        assert values["recovery-source"][unit] == (rne - ours) / (rne - fp32)
    assert decide(STUDY, values).label not in ("not matched", "budget not met exactly")
    for make in STUDY.tables.values():
        table = make(records)
        assert [len(row) for row in table.rows] == [len(table.columns)] * 3
    assert all(claim.ours(records) is not None for claim in allocation.PAPER)
    pytest.importorskip("matplotlib")
    figure = STUDY.figures["recovered"](records)
    figure.savefig(tmp_path / "recovered.svg")
    assert figure.axes[0].lines


def test_another_start_or_budget_is_noticed(records: dict[str, dict[str, Any]]) -> None:
    for key, value, label in (
        ("start", "other", "not matched"),
        ("master_bytes", 1, "budget not met exactly"),
    ):
        changed = json.loads(json.dumps(records))
        changed["outcome"][f"{UNITS[1]}-control-3"][key] = value
        assert decide(STUDY, evaluate(STUDY.estimands, changed)).label == label


# ---- the paper's rows through our gates -------------------------------------------------------------------

# tab:prospective-modern-allocation and -losses: fp32, rne, masters everywhere, source-P, target-P; best rival
ROWS = {
    UNITS[0]: (5.343, 6.502, 5.341, 5.802, 5.789, 0.182),
    UNITS[1]: (5.351, 6.488, 5.343, 5.794, 5.800, 0.175),
    UNITS[2]: (5.338, 6.524, 5.358, 5.805, 5.806, 0.179),
}
PRINTED = {UNITS[0]: (0.604, 0.615), UNITS[1]: (0.610, 0.605), UNITS[2]: (0.607, 0.606)}


def paper_values(**changes: float) -> dict[str, Mapping[str, float | None]]:
    """The estimands of records with the paper's losses; a rival's loss follows from its recovery."""

    def record(loss: float) -> dict[str, Any]:
        return {"updates": 1000, "evaluations": [{"update": 1000, "loss": loss}]}

    made: dict[str, dict[str, Any]] = {"reference": {}, "outcome": {}}
    for unit, (fp32, rne, everywhere, source, target, rival) in ROWS.items():
        losses = {"rne": rne, "master": everywhere, "source-P": source, "target-P": target, "eco": fp32}
        losses |= dict.fromkeys(allocation.RIVALS, rne - rival * (rne - fp32))
        made["reference"][unit] = record(fp32)
        made["outcome"].update({f"{unit}-{n}": record(changes.get(n, loss)) for n, loss in losses.items()})
    rest = ("shared-tiles", "bytes-off", "matched")
    values = {e.name: e.compute(made) for e in STUDY.estimands if e.name not in rest}
    return {**values, "bytes-off": dict.fromkeys(ROWS, 0.0), "matched": dict.fromkeys(ROWS, 1.0)}


def test_paper_rows_give_the_papers_decision() -> None:
    values = paper_values()
    for unit, printed in PRINTED.items():
        for name, expected in zip(("recovery-source", "recovery-target"), printed, strict=True):
            found = values[name][unit]
            assert found is not None
            assert abs(found - expected) <= 0.002  # losses are printed to 0.001, gaps are above 1.1
    decision = decide(STUDY, values)
    assert all(result.passed for result in decision.gates.values())
    assert decision.label == "the source's mask transfers"


@pytest.mark.parametrize(
    ("changes", "label"),
    [
        ({"source-P": 6.0}, "the source's mask is above its rivals, not every floor met"),
        ({"control-2": 5.9}, "the source's mask does not transfer"),
        ({"master": 5.6}, "masters everywhere do not win the gap back"),
        ({"rne": 5.4}, "no material gap"),
    ],
)
def test_labels(changes: dict[str, float], label: str) -> None:
    assert decide(STUDY, paper_values(**changes)).label == label
