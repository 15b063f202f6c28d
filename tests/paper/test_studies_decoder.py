"""``char-gpt`` and ``matched-10k``: declarations, estimands, gates; the paper's rows through the same."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from decoder_cells import run_outcomes, write_corpora

from halfulp.paper.arms import Arm, measures
from halfulp.paper.arms.bundle import Unit
from halfulp.paper.models.training import Schedule
from halfulp.paper.studies import char_gpt, matched_10k
from halfulp.study import Outcomes
from halfulp.study.gates import decide, evaluate

UNITS = tuple(matched_10k.RUNS.units)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text with an alphabet of 65, and the same as bytes and as token files."""
    return write_corpora(tmp_path_factory.mktemp("data"))


# ---- declarations ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", ["smoke", "small", "medium", "paper"])
def test_matched_cells_differ_only_in_policy(scale: str) -> None:
    study = matched_10k.STUDY
    assert [len(study.cells(scale, stage)) for stage in ("reference", "forecast", "outcome")] == [2, 4, 8]
    outcome = {cell.name: cell.config for cell in study.cells(scale, "outcome")}
    for unit in UNITS:
        rne, sr = outcome[f"{unit}-rne"], outcome[f"{unit}-sr"]
        assert {key for key in {**rne, **sr} if rne.get(key) != sr.get(key)} == {"policy"}
        seed = int(unit.partition("-")[2])
        assert sr["stream_seed"] == seed + 1
        (fp32,) = [c.config for c in study.cells(scale, "reference") if c.name == f"fp32-{seed}"]
        same = ("seed", "model", "recipe", "corpus", "device")
        assert all(fp32.get(key) == rne.get(key) for key in same)
        assert "projected" not in fp32  # the raw anchor
        assert fp32["audit"] == ["e5m2", "e4m3@128"]


def test_matched_paper_scale_is_the_papers() -> None:
    """Appendix C: GPT-2 124M, batch 12, context 1024, 10k cosine, evaluations every 250 on 8 batches."""
    arm = Arm.from_json(matched_10k.STUDY.cells("paper", "outcome")[0].config)
    recipe, model = arm.recipe, arm.model
    assert (model.layers, model.heads, model.width, model.vocabulary) == (12, 12, 768, 50304)
    assert (recipe.batch, recipe.context, recipe.updates, recipe.eval_every) == (12, 1024, 10_000, 250)
    assert (recipe.eval_batches, recipe.eval_seed, recipe.betas) == (8, 4242, (0.9, 0.95))
    assert (recipe.weight_decay, recipe.clip) == (0.1, 1.0)
    schedule = Schedule(peak=6e-4, floor=6e-5, warmup=100, horizon=10_000)
    assert recipe.schedule == schedule
    assert matched_10k.STUDY.scale_data["paper"] == ("openwebtext/train.bin", "openwebtext/val.bin")


def test_char_gpt_paper_scale_is_the_papers() -> None:
    """Appendix B: four layers, four heads, 128, context 128, batch 32, 3000 updates."""
    reference, outcome = (char_gpt.STUDY.cells("paper", s)[0].config for s in ("reference", "outcome"))
    both = {*reference, *outcome}
    differ = {key for key in both if reference.get(key) != outcome.get(key)}
    assert differ == {"audit", "grid", "policy", "stream_seed"}
    recipe, model = Arm.from_json(outcome).recipe, Arm.from_json(outcome).model
    assert (model.layers, model.heads, model.width, model.context) == (4, 4, 128, 128)
    assert (recipe.batch, recipe.context, recipe.updates, recipe.clip) == (32, 128, 3000, 1.0)
    assert recipe.schedule == Schedule(peak=6e-4, floor=6e-5, warmup=100, horizon=3000)
    assert (outcome["grid"], outcome["policy"]) == ("m7", "rne")


# ---- the whole of a smoke run, in this process ------------------------------------------------------------


@pytest.fixture(scope="module")
def char_records(folder: Path) -> Outcomes:
    return run_outcomes(char_gpt.STUDY, folder)


@pytest.fixture(scope="module")
def matched_records(folder: Path) -> Outcomes:
    return run_outcomes(matched_10k.STUDY, folder)


def test_char_gpt_smoke(char_records: Outcomes) -> None:
    values = evaluate(char_gpt.STUDY.estimands, char_records)
    assert values["matched"] == {"seed-1337": 1.0, "seed-1338": 1.0}
    assert all(v is not None for v in values["loss-fp32"].values())
    assert decide(char_gpt.STUDY, values).label != "not matched"
    for name, make in char_gpt.STUDY.tables.items():
        table = make(char_records)
        assert table.rows, name
        assert all(len(row) == len(table.columns) for row in table.rows), name
    assert {type(claim.ours(char_records)) for claim in char_gpt.CLAIMS} <= {float, int, type(None)}


def test_matched_smoke(matched_records: Outcomes) -> None:
    values = evaluate(matched_10k.STUDY.estimands, matched_records)
    assert values["matched"] == dict.fromkeys(sorted(UNITS), 1.0)
    for unit in UNITS:
        rne, sr, r = (values[name][unit] for name in ("gap-rne", "gap-sr", "recovery"))
        assert rne is not None
        assert sr is not None
        assert r == ((rne - sr) / rne if rne > 0 else None)
        never, stays = values["never-moved-rne"][unit], values["never-moved-sr"][unit]
        assert never is not None
        assert stays is not None
        assert stays < never
    for name, make in matched_10k.STUDY.tables.items():
        table = make(matched_records)
        assert all(len(row) == len(table.columns) for row in table.rows), name
    assert "raw" in matched_10k.STUDY.tables["losses"](matched_records).caption
    assert all(
        claim.ours(matched_records) is not None for claim in matched_10k.CLAIMS if "gap" in claim.claim
    )


def test_figures(char_records: Outcomes, matched_records: Outcomes, tmp_path: Path) -> None:
    """They draw from records alone."""
    pytest.importorskip("matplotlib")
    for study, records in ((char_gpt.STUDY, char_records), (matched_10k.STUDY, matched_records)):
        for name, draw in study.figures.items():
            figure = draw(records)
            figure.savefig(tmp_path / f"{name}.svg")
            assert all(axes.lines for axes in figure.axes)


def test_recovery_over_time(matched_records: Outcomes) -> None:
    """Early is the first evaluation after 30%: update 11 of 20 here, 3001 of 10,000 in the paper."""
    unit = Unit(matched_10k.RUNS, matched_records, "e5m2-1337")
    assert measures.early_update(unit, "rne", 0.3) == 11
    paper = {"updates": 10_000, "evaluations": [{"update": u, "loss": 1.0} for u in range(1, 10_000, 250)]}
    other = Unit(matched_10k.RUNS, {"outcome": {"e5m2-1337-rne": paper}}, "e5m2-1337")
    assert measures.early_update(other, "rne", 0.3) == 3001
    assert measures.early_recovery(unit, "sr", 0.3) == measures.recovery(unit, "sr", 11)


def test_added_value_is_of_the_reference(matched_records: Outcomes) -> None:
    """The symmetric and the scalar forecast are in every forecast, and the gate is computed from them."""
    found = evaluate(matched_10k.STUDY.estimands, matched_records)["added-value"]
    for name in UNITS:
        unit = Unit(matched_10k.RUNS, matched_records, name)
        told = matched_records["forecast"][name]
        assert set(told["symmetric"]) == set(told["rho"]) == set(matched_10k.RUNS.scopes)
        c = measures.comparison(unit, "core")
        assert c.symmetric_rmse is not None
        assert c.rho_rmse is not None
        assert found[name] == c.rmse / min(c.symmetric_rmse, c.rho_rmse)


def broken(records: Outcomes, change: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    copy: dict[str, Any] = json.loads(json.dumps(dict(records)))
    change(copy)
    return copy


def test_unmatched_arms_are_noticed(matched_records: Outcomes) -> None:
    """Another start, other weights, or a projected anchor: the label says so."""

    def other_codes(r: dict[str, Any]) -> None:
        r["outcome"]["e5m2-1337-sr"]["start"] = "other"

    def other_weights(r: dict[str, Any]) -> None:
        r["reference"]["fp32-1338"]["initial"] = "other"

    def projected_anchor(r: dict[str, Any]) -> None:
        r["reference"]["fp32-1337"]["start"] = r["outcome"]["e4m3-1337-rne"]["start"]

    for change in (other_codes, other_weights, projected_anchor):
        values = evaluate(matched_10k.STUDY.estimands, broken(matched_records, change))
        assert decide(matched_10k.STUDY, values).label == "not matched"


# ---- the paper's rows through our gates -------------------------------------------------------------------

# tab:e3-seeds: held-out loss of fp32, rne and sr at update 10,000, and the printed recovery.
E3_SEEDS = {
    "e5m2-1337": (4.283, 6.412, 4.512, 0.8924),
    "e5m2-1338": (4.275, 6.419, 4.501, 0.8943),
    "e4m3-1337": (4.283, 5.710, 4.395, 0.9216),
    "e4m3-1338": (4.275, 5.714, 4.389, 0.9207),
}
MEASURED = {  # the text around it: core never-moved under rne, at most 1.18e-8 under sr; RMSE 0.004-0.006
    "never-moved-rne": {"e5m2-1337": 0.599, "e5m2-1338": 0.599, "e4m3-1337": 0.413, "e4m3-1338": 0.413},
    "never-moved-sr": dict.fromkeys(E3_SEEDS, 1.18e-8),
    "rmse-core": dict.fromkeys(E3_SEEDS, 0.006),
    "matched": dict.fromkeys(E3_SEEDS, 1.0),
}


def paper_records() -> dict[str, dict[str, Any]]:
    """Records with the paper's losses, as far as recovery needs them."""

    def record(loss: float) -> dict[str, Any]:
        return {"updates": 10_000, "evaluations": [{"update": 10_000, "loss": loss}]}

    out: dict[str, dict[str, Any]] = {"reference": {}, "forecast": {}, "outcome": {}}
    for unit, (fp32, rne, sr, _) in E3_SEEDS.items():
        out["reference"][f"fp32-{unit.partition('-')[2]}"] = record(fp32)
        out["forecast"][unit] = {}
        out["outcome"][f"{unit}-rne"], out["outcome"][f"{unit}-sr"] = record(rne), record(sr)
    return out


def test_paper_rows_give_the_papers_decision() -> None:
    """Section 4: the rule places E4M3 above and E5M2 below 90% in both seeds."""
    records = paper_records()
    values: dict[str, Mapping[str, float | None]] = dict(MEASURED)
    for estimand in matched_10k.STUDY.estimands:
        if estimand.name in ("gap-rne", "gap-sr", "recovery"):
            values[estimand.name] = estimand.compute(records, **estimand.args)
    for unit, (*_, printed) in E3_SEEDS.items():
        found = values["recovery"][unit]
        assert found is not None
        # Losses are printed to 0.001: each of the two differences is off by at most 0.001.
        gap = E3_SEEDS[unit][1] - E3_SEEDS[unit][0]
        assert abs(found - printed) <= 0.001 * (1 + printed) / gap
    decision = decide(matched_10k.STUDY, values)
    passed = {name: result.passed for name, result in decision.gates.items()}
    assert passed == {
        "recovered[e5m2-1337]": False, "recovered[e5m2-1338]": False,
        "recovered[e4m3-1337]": True, "recovered[e4m3-1338]": True,
        "recovered-all": False, "material": True, "accurate": True, "matched": True,
        "added-value": False,  # the paper's records do not tell
    }  # fmt: skip
    assert decision.label == "90% recovered on e4m3@128 only"


@pytest.mark.parametrize(
    ("recoveries", "label"),
    [
        ((0.9, 0.9, 0.9, 0.9), "90% recovered in all four cells"),
        ((0.9, 0.91, 0.89, 0.5), "90% recovered on e5m2 only"),
        ((0.89, 0.5, 0.1, -1.0), "90% recovered in no cell"),
        ((0.95, 0.89, 0.95, 0.95), "90% recovered in some cells"),
        ((0.95, None, 0.95, 0.95), "90% recovered in some cells"),
    ],
)
def test_matched_labels(recoveries: tuple[float | None, ...], label: str) -> None:
    values = {
        "recovery": dict(zip(UNITS, recoveries, strict=True)),
        "gap-rne": dict.fromkeys(UNITS, 1.0),
        "matched": dict.fromkeys(UNITS, 1.0),
    }
    assert decide(matched_10k.STUDY, values).label == label
    values["gap-rne"]["e5m2-1338"] = 0.1
    assert decide(matched_10k.STUDY, values).label == "no material gap"


def test_char_gpt_paper_rows() -> None:
    """Crossings measured at 1644/1666 and foretold at 1640/1669 pass the timing gate, RMSE unknown."""

    def trajectory(at: int) -> list[int]:
        return [10] + [0] * (at - 2) + [10] * (3001 - at)  # a warmup's freeze, then the one that stays

    told = {"seed-1337": 1640, "seed-1338": 1669}
    seen = {"seed-1337": 1644, "seed-1338": 1666}
    records = {
        "forecast": {cell: {"frozen": [x / 10 for x in trajectory(at)]} for cell, at in told.items()},
        "outcome": {
            cell: {"coordinates": {"mlp": 10}, "grid": "m7", "frozen": {"m7": {"mlp": trajectory(at)}}}
            for cell, at in seen.items()
        },
    }
    estimands = {e.name: e for e in char_gpt.STUDY.estimands}
    found = {
        name: estimands[name].compute(records, **estimands[name].args)
        for name in ("measured", "timing-error")
    }
    assert found["measured"] == seen
    errors = found["timing-error"]
    assert errors == {"seed-1337": 4 / 1644, "seed-1338": 3 / 1666}
    values = {"timing-error": errors, "matched": dict.fromkeys(seen, 1.0)}
    assert decide(char_gpt.STUDY, values).label == "crossing foretold"
    values["rmse"] = dict.fromkeys(seen, 0.01)
    assert decide(char_gpt.STUDY, values).label == "crossing and trajectory foretold"
    values["timing-error"] = {"seed-1337": 0.01, "seed-1338": None}
    assert decide(char_gpt.STUDY, values).label == "trajectory foretold, crossing not"
