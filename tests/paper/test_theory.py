"""The theory study: its problems, and that a wrong promise would be found."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from locked_cells import Alone, run_cell

import halfulp as hu
from halfulp.errors import TamperingError
from halfulp.paper.models.certifiable import FAMILIES, CertifiableProblem, nearest
from halfulp.paper.studies import theory

CONFIG = {"grids": ["m5"], "grid": "m5", "problems": 6, "steps": 20, "seed": 2031}


@pytest.mark.parametrize("grid", ["e4m3", "e5m2", "m3", "m7"])
def test_nearest_of_a_rational_is_round_of_a_float(grid: str) -> None:
    """On floats both are exact: random ones, midpoints, codes, zero and beyond the ends."""
    g = hu.grid(grid).within(np.float64)
    rng = np.random.default_rng(0)
    q = g.round(torch.from_numpy(rng.standard_normal(200) * 2.0 ** rng.integers(-12, 10, 200)))
    middle = q + g.gap(q, torch.ones_like(q)).nan_to_num(posinf=0.0) / 2
    x = torch.cat(
        [q, middle, torch.randn(200, generator=torch.Generator().manual_seed(0)).double(), torch.zeros(1)]
    )
    x = torch.cat([x, torch.tensor([1e5, -1e5], dtype=torch.float64)])
    assert [nearest(Fraction(v), g) for v in x.tolist()] == g.round(x).tolist()


def test_nearest_sees_what_float64_does_not() -> None:
    g, tiny = hu.grid("e4m3"), Fraction(1, 2**200)
    assert [nearest(Fraction(17, 16) + s * tiny, g) for s in (-1, 0, 1)] == [1.0, 1.0, 1.125]
    assert [nearest(Fraction(19, 16) + s * tiny, g) for s in (-1, 0, 1)] == [1.125, 1.25, 1.25]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_problem_is_a_function_of_its_key(family: str) -> None:
    a, b, c = (CertifiableProblem(family, "m5", 1, k) for k in (3, 3, 7))
    assert (a.w0 == b.w0).all()
    assert a.rate == b.rate
    assert a.w0.shape == c.w0.shape == (4,)
    assert (a.w0 != c.w0).all()


def test_the_logistic_gradient_is_that_of_its_loss() -> None:
    """Central differences: error below h**2 |F'''| / 6 + eps F / h, here 1e-10."""
    p, h = CertifiableProblem("logistic", "m5", 1, 3), 1e-6
    x, y = p.x, p.y

    def loss(w: np.ndarray) -> float:
        return float(np.mean(np.log1p(np.exp(-y * (x @ w)))))

    w = np.array([0.3, -0.7, 0.1, 0.5])
    numeric = [(loss(w + h * e) - loss(w - h * e)) / (2 * h) for e in np.eye(4)]
    assert np.abs(p.gradient(w) - numeric).max() < 1e-8
    assert np.abs(p.gradient(w) - p.gradient(w, backwards=True)).max() < 1e-12


@pytest.fixture(scope="module", params=FAMILIES)
def promise(request: pytest.FixtureRequest) -> tuple[dict[str, Any], dict[str, Any]]:
    config = {**CONFIG, "family": request.param}
    return config, run_cell(theory.certify, Alone("cell", config, {}))


def test_promises_are_kept(promise: tuple[dict[str, Any], dict[str, Any]]) -> None:
    config, sealed = promise
    found = run_cell(theory.execute, Alone("cell", config, {"certify": {"cell": sealed}}))
    assert set(found["contradicted"].values()) == {0}
    assert ("rational" in found["contradicted"]) == (config["family"] != "logistic")
    assert all(s >= h for s, h in zip(found["stayed"], sealed["horizon"], strict=True))


def test_a_promise_too_far_is_found_out(promise: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """Promise all projected codes of all steps, as if no premise had failed: the runs contradict it."""
    config, sealed = promise
    far = dict(sealed, horizon=[config["steps"]] * config["problems"])
    far["promised"] = [
        theory._digest(p.certify(config["steps"]).codes)[:16] for p in theory._problems(config)
    ]
    found = run_cell(theory.execute, Alone("cell", config, {"certify": {"cell": far}}))
    assert min(found["contradicted"].values()) > 0


def test_a_promise_of_other_codes_is_refused(promise: tuple[dict[str, Any], dict[str, Any]]) -> None:
    config, sealed = promise
    other = dict(sealed, promised=["0" * 16, *sealed["promised"][1:]])
    with pytest.raises(TamperingError, match="sealed"):
        theory.execute(Alone("cell", config, {"certify": {"cell": other}}))


def test_prefix_pairs_part_at_the_next_update() -> None:
    found = run_cell(theory.prefix, Alone("prefix-m5", {**CONFIG, "problems": 12}, {}))
    assert len(found["pairs"]) + found["unmoved"] == 12
    assert len(found["pairs"]) >= 8
    for pair in found["pairs"]:
        assert pair["stay"] == pair["from"] < pair["cross"]
        assert pair["same_value"]
        assert pair["states"] >= 3 * 21 + 1  # three sources of 20 updates, and a target that moved


def test_the_bound_holds_and_is_not_idle() -> None:
    """Never broken, on runs whose codes do differ and whose forecasts are sometimes wrong."""
    found = run_cell(theory.bound, Alone("bound-m5", CONFIG, {}))
    assert found["broken"] == 0
    assert found["n"] == 6 * 20 * 32
    assert found["wrong_diverged"] + found["wrong_same"] > 0
    assert found["diverged"] < found["n"]
