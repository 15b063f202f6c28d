"""`phase-edge`: draws of six seeds, counted by hand; the scale `medium`; labels beside the paper's."""

from __future__ import annotations

import itertools
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest

from halfulp import canonical
from halfulp.paper.arms import Arm
from halfulp.paper.arms.predictions import forecast
from halfulp.paper.models.decoder import normal_at_start
from halfulp.paper.plugin import STUDIES
from halfulp.paper.report import labels
from halfulp.paper.report.beside_paper import shown
from halfulp.paper.studies import phase_diagram, phase_edge, whole_tensor
from halfulp.study import loading
from halfulp.study.gates import decide, evaluate
from halfulp.study.protocol import Records, Study

EDGE = phase_edge.STUDY


def records(learned: dict[tuple[int, float], list[float]]) -> Records:
    """Records of runs that learned these shares: errors fall from 2 to 1 in every reference."""
    found: dict[str, dict[str, Any]] = {"reference": {}, "arms": {}}
    for (m, x), each in learned.items():
        for seed, share in enumerate(each):
            rate, said = x / 2**m, {f"m{n}": {"before": 1.0, "after": 1.0} for n in range(1, 6)}
            name = f"rate={rate}.seed={seed}"
            found["reference"][name] = {
                "diverged": False,
                "error": {"start": 2.0, "end": 1.0},
                "forecast": said,
            }
            arm = {"error": 2.0 - share, "diverged": False}
            found["arms"][f"{name}.m{m}"] = {"rate": rate, "seed": seed, "mantissa": m, "nearest": arm}
    return found


def test_draws_of_six_are_all_counted() -> None:
    rng = np.random.default_rng(5)
    learned = {(m, x): list(rng.uniform(0.1, 0.9, 9)) for m in (1, 2) for x in phase_edge.SIDES}
    found = phase_edge.share_of_draws(records(learned))
    both = 0
    expected = {"m1": 0, "m2": 0}
    for drawn in itertools.combinations(range(9), 6):
        each = {key: median(values[i] for i in drawn) >= 0.5 for key, values in learned.items()}
        m1, m2 = each[1, 0.4] and each[1, 0.8], not each[2, 0.4] and each[2, 0.8]
        expected["m1"] += m1
        expected["m2"] += m2
        both += m1 and m2
    assert found == {name: count / 84 for name, count in expected.items()}
    assert phase_edge.share_of_all(records(learned)) == {"study": both / 84}


@pytest.mark.parametrize(("at", "label"), [
    (0.45, "six seeds give each of the paper's windows more often than not"),
    (0.55, "six seeds give some of the paper's windows less often than not"),
])  # fmt: skip
def test_the_label_follows_the_edge(at: float, label: str) -> None:
    learned = {(m, x): [0.52 if m == 1 else at] * 7 for m in range(1, 6) for x in phase_edge.SIDES}
    learned |= {(m, 0.8): [0.9] * 7 for m in range(1, 6)}
    assert decide(EDGE, evaluate(EDGE.estimands, records(learned))).label == label


def test_thirty_seeds_a_side_that_no_other_study_has() -> None:
    cells = EDGE.cells("paper", "arms")
    assert len(cells) == 30 * 2 * 5
    assert {round(c.config["rate"] * 2 ** c.config["mantissa"], 9) for c in cells} == {0.4, 0.8}
    config = phase_diagram.STUDY.config("paper")
    assert not {c.config["seed"] for c in cells} & {*config["seeds"], *config["more_seeds"]}
    named = {cell.name for cell in EDGE.cells("paper", "reference")}
    assert {cell.name.rpartition(".")[0] for cell in cells} == named


# ---- the scale medium -----------------------------------------------------------------------------------


def medium(name: str) -> Arm:
    study: Study = loading.load(name).study
    return Arm.from_json(study.cells("medium", study.stages[-1].name)[0].config)


LONGER = {
    "policy-3k": 600, "modern-transfer": 600, "neox-transfer": 600, "source-amortized": 600,
    "whole-tensor": 600, "native-schedule-shift": 600, "tile-screen": 200, "leverage-primary": 200,
    "saliency-challenge": 200, "mask-reuse": 200, "depth-17": 200, "matched-10k": 10_000,
}  # fmt: skip


@pytest.mark.parametrize(("name", "updates"), LONGER.items())
def test_medium_is_small_for_longer(name: str, updates: int) -> None:
    study: Study = loading.load(name).study
    small = Arm.from_json(study.cells("small", study.stages[-1].name)[0].config)
    arm = medium(name)
    assert arm.recipe.updates == updates
    assert (arm.model.width, arm.corpus) == (small.model.width, small.corpus)
    if updates == 200:
        assert arm.recipe.schedule.horizon == 600


def test_what_else_medium_changes() -> None:
    assert medium("whole-tensor").model.layers == 6
    assert whole_tensor.RUNS.scales["small"].model.layers == 4
    matched = medium("matched-10k").recipe
    assert (matched.batch, matched.held_contexts) == (6, 96)
    recipe = Arm.from_json(loading.load("modern-transfer").study.cells("paper", "outcome")[0].config).recipe
    assert recipe.held_contexts == 128  # as printed; the studies of GPT-2 have eight batches of twelve


# ---- beside the paper -----------------------------------------------------------------------------------


def test_weights_that_are_normal_at_the_start() -> None:
    """Appendix C prints 99.5% and 99.0%."""
    found = [normal_at_start(smallest) for smallest in (2.0**-14, 2.0**-13)]
    assert [f"{100 * share:.2f}" for share in found] == ["99.49", "98.97"]


def test_every_study_of_the_paper_has_a_label() -> None:
    assert len(labels.PAPER) == 31
    assert set(labels.PAPER) <= set(loading.REGISTRY)
    for name, label in labels.PAPER.items():
        known = {rule.label for rule in loading.load(name).study.rules}
        assert label in known, name


def test_labels_by_scale(tmp_path: Path) -> None:
    """The longer scale is shown; a seal without a commit is marked; one scale that agrees is enough."""
    commit = {"small": None, "medium": {"commit": "a" * 40, "dirty": False}}
    for scale, label in (("small", "NO-GO"), ("medium", "GO")):
        folder = tmp_path / f"depth-17-{scale}"
        folder.mkdir()
        (folder / "result.json").write_bytes(canonical.dumps({"label": label}))
        (folder / "seal.json").write_bytes(canonical.dumps({"git": {"package": commit[scale]}}))
    rows = {row[0]: row[1:] for row in labels.table(tmp_path).rows}
    assert rows["depth-17"] == ("GO", "small*: NO-GO; medium: the same", "yes")
    assert rows["midpoint"] == ("not promoted", "not run", "-")
    assert shown(tmp_path, "depth-17", "small").name == "depth-17-medium"


@pytest.mark.parametrize("name", STUDIES)
def test_a_forecast_by_scope_has_the_tables_that_it_is_made_of(name: str) -> None:
    study: Study = loading.load(name).study
    for scale, stage in itertools.product(study.scales, study.stages):
        for cell in study.cells(scale, stage.name) if stage.run is forecast else ():
            read = study.cells(scale, cell.config.get("stage", "reference"))
            (reference,) = (c for c in read if c.name == cell.config["reference"])
            assert Arm.from_json(reference.config).tables, (scale, cell.name)
