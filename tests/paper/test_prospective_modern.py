"""``prospective-modern``: masks and masters of its arms, and the paper's rows through its gates."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_cells import Files, Records, outcomes, run_with_files, write_corpora

from halfulp.paper.arms import Arm
from halfulp.paper.arms import records as reading
from halfulp.paper.arms.mask_recipes import PACKED, unpacked
from halfulp.paper.models.decoder import Decoder
from halfulp.paper.models.training import Schedule
from halfulp.paper.studies import prospective_modern
from halfulp.paper.studies.prospective_modern import CONTROLS, RIVALS, RUNS, STUDY
from halfulp.study.gates import decide, evaluate

UNITS = list(RUNS.units)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpora(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def finished(folder: Path) -> tuple[Records, Files]:
    """All stages at the smallest scale."""
    return run_with_files(STUDY, folder)


@pytest.fixture(scope="module")
def records(finished: tuple[Records, Files]) -> Records:
    return finished[0]


# ---- the declaration ------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", ["smoke", "small", "paper"])
def test_arms_of_a_target_differ_in_policy_and_mask_only(scale: str) -> None:
    counts = [len(STUDY.cells(scale, stage.name)) for stage in STUDY.stages]
    assert counts == [1, 3, 33]
    cells = {cell.name: cell.config for cell in STUDY.cells(scale, "outcome")}
    references = {cell.name: cell.config for cell in STUDY.cells(scale, "reference")}
    for unit in UNITS:
        rne = cells[f"{unit}-rne"]
        for name in RUNS.arms:
            other = cells[f"{unit}-{name}"]
            assert {k for k in {**rne, **other} if rne.get(k) != other.get(k)} <= {"policy", "mask"}
        same = ("seed", "model", "recipe", "corpus", "device")
        assert all(references[unit].get(key) == rne.get(key) for key in same)
        assert "projected" not in references[unit]  # the raw anchor


@pytest.mark.parametrize("scale", ["smoke", "small"])
def test_tensors_are_whole_tiles(scale: str) -> None:
    """So that a tenth of the masters can be had exactly, whatever is chosen; a tile is a row of the width."""
    arm = RUNS.scales[scale]
    sizes = [p.numel() for p in Decoder(arm.model, seed=0).parameters() if p.dim() >= 2]
    assert arm.tile == arm.model.width
    assert all(n % arm.tile == 0 for n in sizes)
    assert sum(sizes) % (10 * arm.tile) == 0


def test_paper_scale_is_the_papers() -> None:
    """Appendix E: 162.2 million parameters, 211,200 tiles, scores of 600 of 1000 updates."""
    arm = Arm.from_json(STUDY.cells("paper", "outcome")[0].config)
    with torch.device("meta"):
        sizes = [p.numel() for p in Decoder(arm.model, seed=0, device=torch.device("meta")).parameters()]
    assert sum(sizes) == 162_220_800
    assert arm.tile == 768
    assert sum(n // arm.tile for n in sizes if n >= 768 * 768) == 211_200
    assert (arm.recipe.batch, arm.recipe.context, arm.recipe.updates) == (12, 1024, 1000)
    assert arm.recipe.schedule == Schedule(peak=6e-4, floor=6e-5, warmup=100, horizon=3000)
    (source,) = (Arm.from_json(cell.config) for cell in STUDY.cells("paper", "source"))
    assert (source.seed, source.recipe.updates, source.scores) == (58709217, 600, ("e5m2", 600))
    assert [c.config["seed"] for c in STUDY.cells("paper", "reference")] == [
        1249306074,
        1629484925,
        695340460,
    ]


def test_another_depth_is_one_replace_away() -> None:
    """The paper's migration to 17 layers: 257,280 tiles, of which a tenth is 25,728 with 79,036,416 bytes."""
    deeper = replace(
        RUNS, scales={k: replace(a, model=replace(a.model, layers=17)) for k, a in RUNS.scales.items()}
    )
    (cell,) = deeper.source(deeper.configs["paper"])
    model = Decoder(Arm.from_json(cell.config).model, device="meta")
    tiles = sum(p.numel() // 768 for p in model.parameters() if p.dim() >= 2)
    assert (tiles, tiles // 10, tiles // 10 * 768 * 4) == (257_280, 25_728, 79_036_416)


# ---- a smoke run ----------------------------------------------------------------------------------------


def test_masks_spend_the_budget(finished: tuple[Records, Files]) -> None:
    """Every mask the same number of tiles; controls as many of each tensor as the source's P."""
    records, files = finished
    source = records["source"]["source"]
    told, sizes, tile = source["masks"], source["sizes"], RUNS.scales["smoke"].tile
    tiles = sum(sizes.values()) // tile // 10
    masks = unpacked(files["source"]["source"][PACKED], "source")
    assert list(masks) == ["P", "F", *CONTROLS]
    assert told["budget"] == dict.fromkeys(masks, 4 * tile * tiles)
    for name, mask in masks.items():
        assert sum(told["tiles"][name].values()) == tiles, name
        if name in CONTROLS:
            assert told["tiles"][name] == told["tiles"]["P"]
            each = [(int(t.sum()), int(masks["P"].tiles[n].sum())) for n, t in mask.tiles.items()]
            assert all(own == others for own, others in each)
            assert any(not torch.equal(t, masks["P"].tiles[n]) for n, t in mask.tiles.items())
    for unit in UNITS:
        own = unpacked(files["reference"][unit][PACKED], unit)["P"]
        both = sum(int((t & own.tiles[n]).sum()) for n, t in masks["P"].tiles.items())
        assert records["reference"][unit]["masks"]["shared"]["P"] == both / tiles


def test_smoke(finished: tuple[Records, Files], tmp_path: Path) -> None:
    records = outcomes(*finished)
    values = evaluate(STUDY.estimands, records)
    assert values["matched"] == dict.fromkeys(sorted(UNITS), 1.0)
    assert values["bytes-off"] == dict.fromkeys(sorted(UNITS), 0.0)
    for unit in UNITS:
        fp32 = reading.loss(records["reference"][unit])
        rne, ours = (reading.loss(records["outcome"][f"{unit}-{name}"]) for name in ("rne", "source-P"))
        assert fp32 is not None
        assert rne is not None
        assert ours is not None
        assert values["recovery-source"][unit] == (rne - ours) / (rne - fp32)
    assert decide(STUDY, values).label not in ("not matched", "budget not met exactly")
    for make in STUDY.tables.values():
        table = make(records)
        assert len(table.rows) in (3, 3 * len(RUNS.arms))
        assert {len(row) for row in table.rows} == {len(table.columns)}
    assert all(claim.ours(records) is not None for claim in prospective_modern.CLAIMS)
    pytest.importorskip("matplotlib")
    figure = STUDY.figures["recovered"](records)
    figure.savefig(tmp_path / "recovered.svg")
    assert figure.axes[0].lines


def test_another_start_or_budget_is_noticed(records: Records) -> None:
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

    made: Records = {"reference": {}, "outcome": {}}
    for unit, (fp32, rne, everywhere, source, target, rival) in ROWS.items():
        losses = {"rne": rne, "master": everywhere, "source-P": source, "target-P": target, "eco": fp32}
        losses |= dict.fromkeys(RIVALS, rne - rival * (rne - fp32))
        made["reference"][unit] = record(fp32)
        made["outcome"].update({f"{unit}-{n}": record(changes.get(n, loss)) for n, loss in losses.items()})
    rest = ("shared-tiles", "bytes-off", "matched")
    values = {e.name: e.compute(made, **e.args) for e in STUDY.estimands if e.name not in rest}
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
