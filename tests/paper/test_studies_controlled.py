"""The controlled studies: their declarations, their arithmetic on made-up records, and whole smoke runs."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from locked_cells import Alone, InterruptedCellError

import halfulp as hu
from halfulp import canonical
from halfulp.drawing import vector
from halfulp.errors import UsageError
from halfulp.measures import events
from halfulp.paper.models.descent import direct
from halfulp.paper.models.mlp import Trainer
from halfulp.paper.models.teacher import frozen_features
from halfulp.paper.report import beside_paper
from halfulp.paper.studies import (
    _timing,
    cnn,
    finite_size,
    phase_diagram,
    two_layer,
)
from halfulp.study import engine, loading
from halfulp.study.gates import decide
from halfulp.study.loading import REGISTRY
from halfulp.study.protocol import Study
from halfulp.study.store import Store
from halfulp.study.validate import validate

IMAGES, LABELS = cnn.DATA
NAMES = ("testbed", "emulator", "two-layer", "cnn", "finite-size", "phase-diagram", "ce-transfer")


def study_of(name: str) -> Study:
    study = importlib.import_module(REGISTRY[name]).STUDY
    assert isinstance(study, Study)
    return study


# ---- declarations ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("testbed", {"screen": 27, "whole": 4}),
        ("ce-transfer", {"reference": 48, "nearest": 240}),
        ("emulator", {"reference": 3, "measured": 18, "bf16": 7}),
        ("two-layer", {"reference": 42, "recomputed": 24, "measured": 252}),
        ("cnn", {"reference": 3, "measured": 15, "bf16": 1}),
        ("finite-size", {"crossing": 108}),
        ("phase-diagram", {"reference": 36, "arms": 180}),
    ],
)
def test_paper_cells(name: str, counts: dict[str, int]) -> None:
    study = study_of(name)
    assert {stage.name: len(study.cells("paper", stage.name)) for stage in study.stages} == counts
    assert set(study.scales) == {"smoke", "small", "paper"} | ({"medium"} if name == "cnn" else set())


def test_the_principal_grid_has_72_cells() -> None:
    cells = two_layer.STUDY.cells("paper", "measured")
    assert sum(cell.config["system"] == two_layer.PRINCIPAL for cell in cells) == 72


def test_boundary_rates_have_six_seeds() -> None:
    cells = phase_diagram.STUDY.cells("paper", "reference")
    seeds = {rate: sum(c.config["rate"] == rate for c in cells) for rate in (0.0125, 0.1, 0.8, 1.6)}
    assert seeds == {0.0125: 3, 0.1: 6, 0.8: 6, 1.6: 3}


@pytest.mark.parametrize("name", NAMES)
def test_measured_cells_name_a_reference(name: str) -> None:
    study = study_of(name)
    if "measured" not in [stage.name for stage in study.stages]:
        return
    for scale in study.scales:
        references = {cell.name for cell in study.cells(scale, "reference")}
        assert {cell.config["reference"] for cell in study.cells(scale, "measured")} == references


# ---- timing ---------------------------------------------------------------------------------------------


def crossing(first: int | None) -> dict[str, Any]:
    category = "absent" if first is None else "at-initialisation" if first == 1 else "later"
    return {"first": first, "persistent": first, "category": category}


def timing_records(pairs: list[tuple[str, int | None, int | None]]) -> dict[str, dict[str, Any]]:
    """Records of a reference and a run for each (system, forecast, measured)."""
    reference, measured = {}, {}
    for i, (system, forecast, found) in enumerate(pairs):
        both = {"exact": crossing(forecast), "symmetric": crossing(forecast)}
        reference[f"r{i}"] = {"system": system, "predicted": {"m7": both}}
        measured[f"c{i}"] = {
            "system": system, "reference": f"r{i}", "grid": "m7", "crossing": crossing(found),
            "rho": 0.7 + i / 100, "rate": 0.1, "seed": i,
        }  # fmt: skip
    return {"reference": reference, "measured": measured}


def test_timing_estimands() -> None:
    records = timing_records(
        [("a", 10, 10), ("a", 23, 20), ("a", 1, 1), ("a", None, 50), ("b", 100, 80), ("b", 1, 2)]
    )
    found = {e.name: e.compute(records, **e.args) for e in _timing.ESTIMANDS}
    assert found["eligible.exact"] == {"a": 2, "b": 1}
    assert found["median-ratio.symmetric"]["a"] == pytest.approx((1 + 1.15) / 2)
    assert found["share-within.exact"] == {"a": 1.0, "b": 0.0}
    assert found["disagreement.exact"] == {"a": 0.25, "b": 0.5}
    assert found["span.exact"] == {"a": 2.0, "b": 1.0}
    assert found["rho-at-crossing"]["a"] == pytest.approx(np.median([0.70, 0.71, 0.73]))


PUBLISHED = {  # tab:transfer-app: median ratio, share within 15%; section 3: 4 of 72 categories
    "gd-squared": (1.000, 52 / 55), "emulator": (1.03, 15 / 18), "adam-squared": (1.000, 0.900),
    "gd-cross-entropy": (1.016, 0.922), "three-layer": (0.999, 0.960), "cnn": (1.000, 1.0),
}  # fmt: skip


def test_the_published_rows_pass_the_timing_gates() -> None:
    """The paper's own numbers, where it prints them, through the gates of this study."""
    values: dict[str, dict[str, float | None]] = {
        "measured-span": {"study": 384.0}, "same-prediction": {"study": 1.0},
    }  # fmt: skip
    for p in _timing.PREDICTORS:
        values[f"median-error.{p}"] = {name: abs(median - 1) for name, (median, _) in PUBLISHED.items()}
        values[f"share-within.{p}"] = {name: within for name, (_, within) in PUBLISHED.items()}
        values[f"disagreement.{p}"] = {"gd-squared": 4 / 72}
    decision = decide(two_layer.STUDY, values)
    assert all(result.passed for result in decision.gates.values())
    assert decision.label.startswith("onset is predicted, over a wide range of times")
    values["median-error.symmetric"]["cnn"] = 0.06
    assert decide(two_layer.STUDY, values).label == "onset is not predicted"


def test_measured_reads_rho_at_the_crossing() -> None:
    frozen, squares = (
        np.array([10, 40, 60, 70]),
        np.array([[4.0, 1.0], [4.0, 0.5], [4.0, 2.0**-14], [4.0, 0.0]]),
    )
    found = _timing.measured("m7", frozen, squares, 100)
    assert found["crossing"] == {"first": 3, "persistent": 3, "category": "later"}
    assert found["rho"] == pytest.approx(2.0**-7 / (2.0**-8 * 2.0))  # ||d|| / (eps ||w||)
    assert _timing.measured("m7", frozen[:2], squares, 100)["rho"] is None


def test_reference_precision_compares_clean_cells_only() -> None:
    def reference(first: int | None, system: str = two_layer.PRINCIPAL) -> dict[str, Any]:
        both = {"symmetric": crossing(first), "exact": crossing(first)}
        return {"system": system, "predicted": {"m12": both, "m14": {"symmetric": crossing(999)}}}

    records = {
        "reference": {"a": reference(50), "b": reference(60), "c": reference(1), "d": reference(9, "adam")},
        "recomputed": {
            f"{name}.{p}": reference(first)
            for name, first in (("a", 50), ("b", 61), ("c", 2))
            for p in ("fp32", "m16")
        },
    }
    assert two_layer.clean_comparisons(records) == {"a.m12": True, "b.m12": False}
    again = {"first": 50, "persistent": 70, "category": "later"}  # crosses one half more than once
    records["reference"]["a"]["predicted"]["m12"]["symmetric"] = again
    assert two_layer.clean_comparisons(records) == {"b.m12": False}
    records["reference"]["a"] = reference(50)
    assert two_layer.same_prediction(records) == {"study": 0.5}


def test_the_lone_seed_is_found() -> None:
    records = timing_records([("gd-squared", 61, 61), ("gd-squared", 1800, 1790), ("gd-squared", 1805, 1803)])
    assert two_layer.lone_seed(records) == (
        "seed 0 at 61 (forecast 61), the others at 1790, 1803 (m7, rate 0.1)"
    )


# ---- bfloat16 -------------------------------------------------------------------------------------------


def test_direct_is_a_bfloat16_tensor_under_sgd() -> None:
    """Frozen counts of a few steps, from the bits of bfloat16; resumed runs are the same run."""
    p = frozen_features(1, features=8, readouts=3, examples=40, tests=4)
    series = direct(p, 0.1, 30)
    network = Trainer(p.net, p.train, p.start, rate=0.1)
    w = torch.from_numpy(p.start).to(torch.bfloat16)
    for t in range(30):
        g = torch.from_numpy(network.gradient(w.double().numpy())).to(torch.bfloat16)
        new = (w.float() - 0.1 * g.float()).to(torch.bfloat16)
        assert series.frozen[t] == int((new.view(torch.int16) == w.view(torch.int16)).sum())
        w = new
    fake = Alone("cell", {}, {}, dies_after=2)
    long = direct(p, 0.1, 1100).frozen
    with pytest.raises(InterruptedCellError):
        direct(p, 0.1, 1100, fake)  # type: ignore[arg-type]
    again = direct(p, 0.1, 1100, fake).frozen  # type: ignore[arg-type]
    np.testing.assert_array_equal(long, again)
    assert series.squares.shape == (30, 2)


def test_bf16_rmse_is_over_all_steps() -> None:
    each = [(4, 100, 10), (0, 100, 30)]
    records = {
        "bf16": {
            str(i): {"network": "n", "squared_difference": s, "size": size, "steps": steps}
            for i, (s, size, steps) in enumerate(each)
        }
    }
    assert _timing.bf16_rmse(records)["n"] == pytest.approx((4 / 100**2 / 40) ** 0.5)


# ---- finite size ----------------------------------------------------------------------------------------


def test_z_says_who_is_frozen() -> None:
    """Away from ties, z > 0 is the event; and uniform phases give a known mean."""
    rng = np.random.Generator(np.random.PCG64(8))
    q = hu.grid("m7").round(torch.from_numpy(rng.standard_normal(5000))).numpy()
    d = q * np.exp2(-8 + rng.standard_normal(5000)) * rng.choice([-1, 1], 5000)
    frozen = events.frozen(torch.from_numpy(q), torch.from_numpy(d), "m7").numpy()
    gap = events.gap(torch.from_numpy(q), torch.from_numpy(d), "m7").numpy()
    z = np.log2(gap / (2 * np.abs(d)))
    np.testing.assert_array_equal(frozen, z > 0)
    found = finite_size.look(q, d, "m7")
    assert [found["z"][k] for k in ("0.16", "0.50", "0.84")] == pytest.approx(
        np.quantile(z, [0.16, 0.5, 0.84])
    )
    rho = np.abs(d) / (2.0**-8 * np.abs(q))
    assert found["uniform_phase"] == pytest.approx(np.clip(-np.log2(rho), 0, 1).mean())


def finite_records(widths: Mapping[int, float], mantissa: int = 7) -> dict[str, Any]:
    cells = {}
    for n, width in widths.items():
        for seed, shift in ((1, -0.1), (2, 0.1)):
            cells[f"{n}.{seed}"] = {
                "width": n // 8, "mantissa": mantissa, "seed": seed, "size": n, "step": 9, "frozen": n // 2,
                "z": {"0.16": -1.0, "0.50": 0.0, "0.84": width - 1.0 + shift}, "uniform_phase": 0.51,
            }  # fmt: skip
    return {"crossing": cells}


def test_power_fit_recovers_a_power() -> None:
    records = finite_records({n: 3.0 * n**0.1 for n in (128, 256, 512, 1024, 2048, 4096)})
    a, r2 = finite_size.fits(records)[7] or (0, 0)
    assert (a, r2) == (pytest.approx(-0.1), pytest.approx(1.0))
    assert finite_size.growth(records)["m7"] == pytest.approx(32**0.1)
    assert finite_size.phase_error(records)["study"] == pytest.approx(0.01)


def test_a_run_without_a_crossing_is_missing_not_dropped() -> None:
    records = finite_records({128: 3.0, 4096: 4.0})
    lost = records["crossing"]["128.1"]
    records["crossing"]["128.1"] = {k: lost[k] for k in ("width", "mantissa", "seed", "size")} | {
        "step": None
    }
    assert finite_size.growth(records) == {"m7": None}
    assert finite_size.fits(records) == {7: None}
    assert finite_size.crossed(records) == {"study": 0.75}


def test_the_published_widths_pass() -> None:
    """app:arithmetic: widths at both ends, exponents, the mean phase error."""
    values: dict[str, dict[str, float | None]] = {
        "growth": {"m6": 4.490 / 2.811, "m7": 4.734 / 3.267, "m8": 4.566 / 3.426},
        "exponent": {"m6": -0.100, "m7": -0.075, "m8": -0.069},
        "phase-error": {"study": 0.008},
        "crossed": {"study": 1.0},
    }
    assert decide(finite_size.STUDY, values).label == "a crossover that does not sharpen"
    values["growth"]["m6"] = 0.9
    assert decide(finite_size.STUDY, values).label == "widths narrow at some precision"


# ---- phase diagram --------------------------------------------------------------------------------------


def diagram_records(cells: list[dict[str, Any]]) -> dict[str, Any]:
    reference: dict[str, Any] = {}
    arms: dict[str, Any] = {}
    for c in cells:
        key = f"rate={c['rate']}.seed={c['seed']}"
        bad = c.get("diverged", False)
        share = None if bad else 1.0 if c["told"] is None else 1.0 - c["told_error"]
        told = {"first": 1, "onset": c["told"], "before": share, "after": share}
        reference[key] = {
            "rate": c["rate"], "seed": c["seed"], "diverged": bad, "slow": False,
            "error": {"start": 1.0, "end": 0.0}, "forecast": {"m2": told},
        }  # fmt: skip
        both = {"diverged": c.get("arm_diverged", False), "error": c["error"], "crossing": 1}
        arms[key + ".m2"] = {"rate": c["rate"], "seed": c["seed"], "mantissa": 2, "nearest": both,
                             "stochastic": {**both, "error": 0.0}}  # fmt: skip
    return {"reference": reference, "arms": arms}


def test_windows_robust_and_survivors() -> None:
    """Three survivors that learn 0.68 and three diverged references: 0.34 robustly, 0.68 among survivors."""
    cells = [
        {"rate": 0.8, "seed": s, "error": 0.32, "told": 5, "told_error": 0.9, "diverged": s >= 3}
        for s in range(6)
    ]
    cells += [{"rate": 0.4, "seed": s, "error": 0.4, "told": None, "told_error": 0.0} for s in range(3)]
    records = diagram_records(cells)
    assert phase_diagram.medians(records, "nearest") == {
        (2, 0.8): pytest.approx(0.34),
        (2, 0.4): pytest.approx(0.6),
    }
    assert phase_diagram.windows(records, "nearest") == {2: [0.4]}
    assert phase_diagram.windows(records, "nearest", robust=False) == {2: [0.4, 0.8]}
    assert phase_diagram.windows(records, "forecast") == {2: [0.4]}
    assert phase_diagram.matches(records) == {"study": 1.0}
    assert phase_diagram.diverged(records) == {0.4: (0, 3), 0.8: (3, 6)}
    assert set(phase_diagram.stochastic_at_stable_rates(records)) == {"m2.rate=0.4"}


def test_a_diverged_arm_counts_as_zero() -> None:
    cells = [
        {
            "rate": 0.4,
            "seed": s,
            "error": None if s else 0.0,
            "told": 1,
            "told_error": 1.0,
            "arm_diverged": s > 0,
        }
        for s in range(3)
    ]
    assert phase_diagram.medians(diagram_records(cells), "nearest") == {(2, 0.4): 0.0}


def test_the_published_windows_pass() -> None:
    """tab:e4-window through the gates: windows shrink upward, four of five are forecast."""
    printed = {c.claim: str(c.paper) for c in phase_diagram.CLAIMS}
    real, told = (
        {
            m: [float(r) for r in printed[f"{kind} window, m = {m}"].strip("{}").split(",")]
            for m in range(1, 6)
        }
        for kind in ("measured", "forecast")
    )
    values: dict[str, dict[str, float | None]] = {
        "lowest-rate-ratio": {f"m{m}": real[m][0] / real[m + 1][0] for m in (1, 2, 3, 4)},
        "compression": {"study": real[1][0] / real[5][0]},
        "windows-matched": {"study": sum(real[m] == told[m] for m in real) / 5},
        "stochastic-stable": {"least": 0.5},
    }
    decision = decide(phase_diagram.STUDY, values)
    assert values["windows-matched"] == {"study": 0.8}
    assert all(result.passed for result in decision.gates.values())


# ---- whole smoke runs -----------------------------------------------------------------------------------


def _runnable(name: str) -> bool:
    folder = os.environ.get("HALFULP_DATA")
    return name != "cnn" or (folder is not None and (Path(folder) / IMAGES).is_file())


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Every study that can run here, at scale smoke, in this process."""
    top = tmp_path_factory.mktemp("studies")
    threads = torch.get_num_threads()
    for name in NAMES:
        if _runnable(name):
            engine.run(loading.load(name), "smoke", top / f"{name}-smoke", executor="inline")
    yield top
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", NAMES)
def test_smoke_runs_validate_and_repeat(name: str, smoke: Path, tmp_path: Path) -> None:
    """A second run leaves the same records, byte for byte; tables and figures can be made of them."""
    if not _runnable(name):
        pytest.skip("needs MNIST in the folder named by HALFULP_DATA")
    first = smoke / f"{name}-smoke"
    page = validate(first)
    assert not page.problems
    assert page.label
    engine.run(loading.load(name), "smoke", tmp_path / "again", executor="inline")
    for path in sorted((first / "records").rglob("*.json")):
        assert path.read_bytes() == (tmp_path / "again" / path.relative_to(first)).read_bytes(), path.name
    study, records = study_of(name), beside_paper.read(first).records
    for make in study.tables.values():
        table = make(records)
        assert all(len(row) == len(table.columns) for row in table.rows)
        assert table.rows
    for draw in study.figures.values():
        assert vector(draw(records), "svg").startswith(b"<?xml")


def test_the_page_is_made_of_records_alone(smoke: Path, tmp_path: Path) -> None:
    for out in ("a", "b"):
        beside_paper.write(smoke, "smoke", tmp_path / out)
    names = ("controlled.md", "controlled.svg", "e4.svg")
    assert [(tmp_path / "a" / n).read_bytes() for n in names] == [
        (tmp_path / "b" / n).read_bytes() for n in names
    ]
    text = (tmp_path / "a" / "controlled.md").read_text()
    assert "| theory | not run |" in text
    assert "Not a scientific result" in text
    for name in NAMES:
        assert f"## {name}\n" in text
        claims = importlib.import_module(REGISTRY[name]).CLAIMS if _runnable(name) else ()
        assert len({c.claim for c in claims}) == len(claims)
        assert all(c.source for c in claims)
    result = canonical.loads((smoke / "finite-size-smoke" / "result.json").read_bytes(), "result.json")
    value = result["estimands"]["phase-error"]["study"]
    assert f"| uniform phases: mean error over cells | 0.008 | {value:.6g} |" in text


def test_the_page_refuses_what_is_not_there(smoke: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds none of testbed-paper"):
        beside_paper.write(smoke, "paper", tmp_path)
    source = loading.load("finite-size")
    engine.seal(source, "smoke", tmp_path / "finite-size-smoke")
    with pytest.raises(UsageError, match="is not closed"):
        beside_paper.read(tmp_path / "finite-size-smoke")
    assert Store(tmp_path / "finite-size-smoke").ledger_file.exists()
