"""The paper's three mathematical statements (appendix B), made into artefacts that can fail.

**A certificate is a forecast**, so it is treated as one. Stage ``certify`` states, before anything is
run, for how many updates the codes of a quantized gradient descent are certain, and seals a digest of
those codes. Stage ``execute`` then runs the descent, without looking at a reference: quadratics in
*rational* arithmetic, where nothing is rounded but the stored weight, and in float64 with the sums
taken forwards and backwards; logistic regressions in float64, both ways. One code that differs within
a horizon refutes :mod:`halfulp.paper.certificates`. Beyond the horizon nothing was promised; how long
the run stays there anyway says how cautious the certificate is.

**A finite trace promises nothing.** Stage ``prefix`` builds, for random smooth objectives, two others
with the same recorded past and opposite next events (Eqs. 11 to 13), and executes both.

**The posterior bound** |f_a - f_hat| <= c + v (Eq. 8) is checked on every step of quantized runs beside
their projected references, in whole numbers, in stage ``bound``. The ``margin`` study checks the same on
762,880,000 events, coordinate by coordinate.

Families, all drawn from ``default_rng([seed, family, grid, problem])``; the paper prints none, so they
are ours:

    slow      a random quadratic of 1 to 4 coordinates, rate 2**-4 to 2**-11: most updates are lost
    jump      a Hessian near the identity, rate 1/2 or 1: large moves, which a certificate may also promise
    logistic  32 examples, 1 to 4 coordinates, rate 2**-4 to 2**-11; slope at most 1/4 gives the envelope

*Why not more tests instead?* The unit tests search for counterexamples too. A study adds what a test
cannot: the promise is sealed before the run exists, and someone else can recompute the verdict.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import torch

from halfulp.numbers.grids import grid as named
from halfulp.paper.certificates import Descent, reachable_prefix
from halfulp.paper.models.certifiable import FAMILIES, Array, CertifiableProblem, arrival, rippled_bowl
from halfulp.paper.models.digests import refuse_other
from halfulp.paper.studies.claims import Beside, over
from halfulp.paper.studies.declared import declared, gate, rule, scaled
from halfulp.paper.trust import Posterior, posterior
from halfulp.paper.values import quotient
from halfulp.study.protocol import Cell, Config, Estimand, Json, Records, Running, Stage, Table, Values

PREMISES = ("start", "transition", "cell", "bound", "none")


def _digest(codes: Array) -> str:
    return hashlib.sha256(np.ascontiguousarray(codes + 0.0).tobytes()).hexdigest()  # + 0.0: -0 equals +0


# ---- certificates: the promise, then the run ----------------------------------------------------------


def certificate_cells(config: Config) -> list[Cell]:
    """List a cell for each family and grid."""
    return [
        Cell(name=f"{family}-{grid}", config={**config, "family": family, "grid": grid})
        for family in FAMILIES
        for grid in config["grids"]
    ]


def _problems(config: Config) -> Iterator[CertifiableProblem]:
    for number in range(config["problems"]):
        yield CertifiableProblem(config["family"], config["grid"], config["seed"], number)


def certify(cell: Running) -> Mapping[str, Json]:
    """Horizons, what ended them, and a digest of every promised code."""
    certificates = [problem.certify(cell.config["steps"]) for problem in _problems(cell.config)]
    return {
        "horizon": [c.horizon for c in certificates],
        "moves": [int((~c.frozen).any(axis=1).sum()) for c in certificates],
        "stopped_by": [c.stopped_by or "none" for c in certificates],
        "promised": [_digest(c.codes[: c.horizon + 1])[:16] for c in certificates],
    }


def execute(cell: Running) -> Mapping[str, Json]:
    """Run every problem, and hold the runs against the promise."""
    promise = cell.read("certify", cell.name)
    contradicted: dict[str, int] = {}
    stays = []
    for problem, horizon, promised in zip(
        _problems(cell.config), promise["horizon"], promise["promised"], strict=True
    ):
        certificate = problem.certify(cell.config["steps"])
        again = _digest(certificate.codes[: horizon + 1])[:16]
        refuse_other(cell.name, {"promise": promised}, {"promise": again})
        first = len(certificate.codes)
        for name, codes in problem.runs(cell.config["steps"]).items():
            differs = np.flatnonzero((codes != certificate.codes).any(axis=1))
            at = int(differs[0]) if differs.size else len(codes)
            contradicted[name] = contradicted.get(name, 0) + (at <= horizon)
            first = min(first, at)
        stays.append(first - 1)
    return {"contradicted": contradicted, "stayed": stays}


# ---- the construction ---------------------------------------------------------------------------------


def each_grid(config: Config, stage: str) -> list[Cell]:
    """List a cell for each grid."""
    return [Cell(name=f"{stage}-{grid}", config={**config, "grid": grid}) for grid in config["grids"]]


def prefix(cell: Running) -> Mapping[str, Json]:
    """Construct and execute; `reachable_prefix` compares every recorded state bit for bit.

    The target stops where it first reaches a state that nobody has seen: the construction's premise.
    A problem in which it never leaves its start has no such state, and is counted.
    """
    config, rows, unmoved = cell.config, [], 0
    for number in range(config["problems"]):
        rng = np.random.default_rng([config["seed"], 3, *config["grid"].encode(), number])
        objective = rippled_bowl(rng)
        grid = named(config["grid"]).within(np.float64)
        starts = [grid.round(torch.from_numpy(rng.standard_normal(2) * 2)).numpy() for _ in range(3)]
        length, coordinate = int(rng.integers(2, 7)), int(rng.integers(0, 2))
        sources = [Descent(start + rng.standard_normal(2) / 8, [0.2] * 20) for start in starts]
        first = grid.round(torch.from_numpy(starts[0] - 0.2 * objective.gradient(starts[0]))).numpy()
        if np.array_equal(first, starts[0]):
            unmoved += 1
            continue
        target = Descent(starts[0], [0.2] * arrival(objective, starts[0], grid, length), config["grid"])
        p = reachable_prefix(objective, sources, target, coordinate=coordinate)
        rows.append(
            {
                "states": sum(len(s) for s in p.sources) + len(p.target) - 1,
                "from": float(p.q[coordinate]),
                "stay": float(p.next_stay[coordinate]),
                "cross": float(p.next_cross[coordinate]),
                "same_value": p.stay.value(p.q) == p.cross.value(p.q) == objective.value(p.q),
            }
        )
    return {"unmoved": unmoved, "pairs": rows}


# ---- the posterior bound ------------------------------------------------------------------------------


def bound(cell: Running) -> Mapping[str, Json]:
    """Quantized runs of 32-coordinate quadratics beside their references: every step, in whole numbers."""
    config, n = cell.config, 32
    grid = named(config["grid"]).within(np.float64)
    broken = attained = 0
    total: Posterior | None = None
    for number in range(config["problems"]):
        rng = np.random.default_rng([config["seed"], 4, *config["grid"].encode(), number])
        a = rng.standard_normal((n, n))
        h, b, rate = a.T @ a / n, rng.standard_normal(n), 2.0 ** -int(rng.integers(3, 9))
        q = w = grid.round(torch.from_numpy(rng.standard_normal(n))).numpy()
        for _ in range(config["steps"]):
            hat, d_r, d_a = grid.round(torch.from_numpy(w)).numpy(), -rate * (h @ w + b), -rate * (h @ q + b)
            p = posterior(q, d_a, hat, d_r, grid)
            excess = abs(p.frozen_actual - p.frozen_hat) - p.diverged - p.violated
            broken += excess > 0
            attained += excess == 0 and p.bound > 0
            total = p if total is None else total + p
            w, q = w + d_r, grid.round(torch.from_numpy(q + d_a)).numpy()
    assert total is not None
    counts = {
        k: int(getattr(total, k)) for k in ("n", "diverged", "violated", "wrong_diverged", "wrong_same")
    }
    return {"broken": broken, "attained": attained, **counts}


# ---- estimands ----------------------------------------------------------------------------------------


def contradictions(records: Records) -> Values:
    """Executions that leave a promised code."""
    return {name: float(sum(r["contradicted"].values())) for name, r in records["execute"].items()}


def certified(records: Records) -> Values:
    """Updates promised."""
    return {name: float(sum(r["horizon"])) for name, r in records["certify"].items()}


def certified_moves(records: Records) -> Values:
    """Promised updates that move a code."""
    return {"study": float(sum(sum(r["moves"]) for r in records["certify"].values()))}


def caution(records: Records) -> Values:
    """Share of the updates on which the run was at the projected codes that had been promised."""
    promised = {name: sum(r["horizon"]) for name, r in records["certify"].items()}
    return {name: quotient(promised[name], sum(r["stayed"])) for name, r in records["execute"].items()}


def opposite(records: Records) -> Values:
    """Share of pairs that agree on the past and on arrival, and part at the next update."""
    parted = {
        name: [p["stay"] == p["from"] < p["cross"] and p["same_value"] for p in r["pairs"]]
        for name, r in records["prefix"].items()
    }
    return {name: quotient(sum(each), len(each)) for name, each in parted.items()}


def bound_broken(records: Records) -> Values:
    """Steps with |f_a - f_hat| > c + v."""
    return {name: float(r["broken"]) for name, r in records["bound"].items()}


def bound_attained(records: Records) -> Values:
    """Steps with |f_a - f_hat| = c + v > 0."""
    return {"study": float(sum(r["attained"] for r in records["bound"].values()))}


# ---- reports ------------------------------------------------------------------------------------------


def table(records: Records) -> Table:
    """Tabulate certificates and what ran, by problem."""
    rows: list[Sequence[str | float | None]] = []
    for name, r in records["certify"].items():
        ran, ends = records["execute"][name], [r["stopped_by"].count(p) for p in PREMISES]
        rows.append(
            (name, len(r["horizon"]), sum(r["horizon"]), sum(r["moves"]), sum(ran["stayed"]),
             sum(ran["contradicted"].values()), *ends)
        )  # fmt: skip
    return Table(
        columns=("problems", "number", "updates promised", "with a move", "updates that agreed",
                 "contradicted", *(f"ended by {p}" for p in PREMISES)),
        rows=rows,
        caption="Certificates against the runs they were made for.",
    )  # fmt: skip


ESTIMANDS = (
    *map(Estimand.of, (
        contradictions, certified, certified_moves, caution, opposite, bound_broken, bound_attained,
    )),
)  # fmt: skip

STUDY = declared(
    __name__, own=ESTIMANDS,
    stages=(
        Stage(name="certify", kind="prediction", cells=certificate_cells, run=certify),
        Stage(name="execute", kind="outcome", cells=certificate_cells, run=execute, reads=("certify",)),
        Stage(name="prefix", kind="outcome", cells=partial(each_grid, stage="prefix"), run=prefix),
        Stage(name="bound", kind="outcome", cells=partial(each_grid, stage="bound"), run=bound),
    ),
    tables={"certificates": table},
    question="Do the certificate, the prefix construction and the posterior bound hold when executed?",
    units="one family of problems on one grid",
    not_claimed=(
        "that a certificate exists for Adam, for minibatches, or for a network without bounded derivatives",
        "that agreement beyond a horizon can be relied on",
        "that these problems resemble those of practice",
    ),
    gates=(
        gate("no-contradiction", "contradictions == 0",
            "a certificate is a proof: one contradiction refutes it"),
        gate("not-empty", "certified > 0", "a certificate that promises nothing is never contradicted",
            scope="mean"),
        gate("moves-too", "certified-moves > 0",
            "promising only lost updates would test half of the statement"),
        gate("opposite-events", "opposite == 1",
            "every pair must share the whole past and part at the next update"),
        gate("bound-holds", "bound-broken == 0", "Eq. 8 is a theorem"),
    ),
    rules=(
        rule("statements hold as executed", "no-contradiction", "not-empty", "moves-too", "opposite-events",
            "bound-holds"),
        rule("refuted", failed=("no-contradiction",)),
        rule("refuted", failed=("opposite-events",)),
        rule("refuted", failed=("bound-holds",)),
        rule("vacuous"),
    ),
    scales=scaled(
        {"grids": ["e4m3", "e5m2", "m3", "m5", "m7"], "problems": 64, "steps": 64, "seed": 2031},
        smoke={"grids": ["e4m3", "m5"], "problems": 4, "steps": 12},
        small={"problems": 24, "steps": 40},
    ),
)  # fmt: skip

_NOTE_RUN = "The paper proves it and prints no runs. Ours are executed, in rational and in float64 numbers."
_NOTE_BUILT = "The paper proves it; ours are built and executed, every recorded number compared bit for bit."
_NOTE_THEOREM = "A theorem; checked in whole numbers."
row = Beside(STUDY, "app:predictor, eq:hessian-certificate")
CLAIMS = (
    row("runs that leave a certified code", 0, over(sum, "contradictions"), note=_NOTE_RUN),
    row("share of constructed pairs with one reached prefix and opposite next events", 1,
        over(min, "opposite"), source="app:predictor, eq:reachable-bump", note=_NOTE_BUILT),
    row("steps that break |f_a - f_hat| <= c + v", 0, over(sum, "bound-broken"), source="eq:predictor-bound",
        note=_NOTE_THEOREM),
)  # fmt: skip
