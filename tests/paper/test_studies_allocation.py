"""The studies of exact-budget allocation: the paper's rows through their gates, and what their runs leave."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from decoder_cells import Here, outcomes, run_with_files, write_corpora

from halfulp.paper.arms import Arm, Bundle, measures
from halfulp.paper.arms.mask_recipes import PACKED, Ranked, pack, unpacked
from halfulp.paper.dominance import Point, Tolerance, survivors
from halfulp.paper.models.decoder import GPT2, MODERN, MODERN_17, NEOX, Decoder, DecoderConfig
from halfulp.paper.studies import (
    depth_17,
    eco_comparator,
    eco_systems,
    gpt2_pareto,
    leverage_primary,
    mask_reuse,
    packed_systems,
    prospective_modern,
    saliency_challenge,
    tile_screen,
    whole_tensor,
)
from halfulp.study.gates import Decision, decide, evaluate
from halfulp.study.protocol import Outcomes, Study

# ---- the declarations -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "tiles", "tenth", "payload"),
    [
        (GPT2, 161_920, 16_192, 49_741_824),
        (MODERN, 211_200, 21_120, 64_880_640),
        (MODERN_17, 257_280, 25_728, 79_036_416),
        (NEOX, 211_200, 21_120, 64_880_640),
    ],
)
def test_inventories(config: DecoderConfig, tiles: int, tenth: int, payload: int) -> None:
    """Tiles of the paper's models, and a tenth of them in bytes, on the meta device."""
    model = Decoder(config, device="meta")
    sizes = {n: p.numel() for n, p in model.named_parameters() if p.dim() >= 2}
    assert all(n % 768 == 0 for n in sizes.values())
    assert sum(sizes.values()) == 768 * tiles
    mask = Ranked(sizes, 768).masks({"r": {"random": 1, "share": 0.1}})["r"]
    assert sum(int(t.sum()) for t in mask.tiles.values()) == tenth
    assert mask.payload_bytes == mask.budget == payload
    if config is GPT2:
        made = Ranked(sizes, 768).masks(
            {"tied": {"only": "transformer.wte.weight"}, "twice": {"random": 1, "share": 0.2}}
        )
        assert made["tied"].payload_bytes == 154_533_888
        assert made["twice"].payload_bytes == 99_483_648
        assert round(made["tied"].payload_bytes / made["tied"].blanket_bytes, 3) == 0.311


@pytest.mark.parametrize(
    ("module", "runs"),
    [
        (tile_screen, [1, 1, 1, 20]), (leverage_primary, [3, 3, 3, 24, 21]), (saliency_challenge, [27, 27]),
        (mask_reuse, [1, 3, 3, 21]), (eco_comparator, [3]), (depth_17, [1, 3, 3, 15]),
        (gpt2_pareto, [1, 3, 3, 3, 36, 3]), (whole_tensor, [2, 2, 2, 34]), (packed_systems, [1, 3]),
        (eco_systems, [1, 4]),
    ],
)  # fmt: skip
def test_runs_of_the_paper(module: Any, runs: list[int]) -> None:
    """27 and 21 attempts (three are the float32 runs), 19 runs at 17 layers, 40 of the comparison."""
    study: Study = module.STUDY
    assert [len(study.cells("paper", stage.name)) for stage in study.stages] == runs
    for scale in ("smoke", "small"):
        assert [len(study.cells(scale, s.name)) for s in study.stages][:-1] == runs[:-1]


def test_budgets_are_whole_tiles_at_every_scale() -> None:
    for module in (tile_screen, leverage_primary, mask_reuse, depth_17, gpt2_pareto):
        for scale in ("smoke", "small"):
            arm = module.RUNS.scales[scale]
            sizes = [p.numel() for p in Decoder(arm.model, device="meta").parameters() if p.dim() >= 2]
            assert all(n % arm.tile == 0 for n in sizes)
            assert sum(sizes) // arm.tile % (20 if module is gpt2_pareto else 10) == 0


def test_depth_17_changes_one_field_at_the_papers_scale() -> None:
    """19 runs and 18,600 updates."""
    ours, theirs = depth_17.RUNS.scales["paper"], prospective_modern.RUNS.scales["paper"]
    assert ours == replace(theirs, model=replace(theirs.model, layers=17))
    arms = [
        Arm.from_json(cell.config)
        for stage in ("source", "reference", "outcome")
        for cell in depth_17.STUDY.cells("paper", stage)
    ]
    assert (len(arms), sum(arm.recipe.updates for arm in arms)) == (19, 18_600)


def test_the_comparison_has_39_600_updates() -> None:
    cells = [
        Arm.from_json(cell.config).recipe.updates
        for stage in ("source", "reference", "outcome")
        for cell in gpt2_pareto.STUDY.cells("paper", stage)
    ]
    assert (len(cells), sum(cells)) == (40, 39_600)


# ---- the paper's rows through our gates -------------------------------------------------------------------

Rows = Mapping[str, Sequence[float]]


def lost(loss: float) -> dict[str, Any]:
    return {"updates": 1000, "evaluations": [{"update": 1000, "loss": loss}]}


def records_of(runs: Bundle, rows: Rows, gaps: Sequence[float]) -> dict[str, dict[str, Any]]:
    """Records whose recoveries are the paper's: float32 at zero, nearest at the gap."""
    made: dict[str, dict[str, Any]] = {"reference": {}}
    for i, (unit, gap) in enumerate(zip(runs.units, gaps, strict=True)):
        made["reference"][runs.reference_of(unit)] = lost(0.0)
        for arm in runs.arms:
            if arm == "rne" or arm in rows:
                won = 0.0 if arm == "rne" else rows[arm][i]
                made.setdefault(runs.stage_of(arm), {})[runs.cell(unit, arm)] = lost(gap * (1 - won))
    return made


def decided(
    study: Study, found: Outcomes, skip: Sequence[str] = ("foretold", "bytes-off", "matched")
) -> Decision:
    """What a study decides on records that have losses alone."""
    computed = [e for e in study.estimands if not e.name.startswith(tuple(skip))]
    values = evaluate(computed, found)
    units = list(values["gap"])
    sound = {"bytes-off": 0.0, "matched": 1.0}
    values |= {
        e.name: dict.fromkeys(units, sound.get(e.name)) for e in study.estimands if e.name not in values
    }
    return decide(study, values)


def test_the_screen_is_negative() -> None:
    rows = {"master": (0.993,), "C-10": (0.708,), "L-10": (0.706,), "F-10": (0.024,), "C-20": (0.825,),
            "L-20": (0.827,), "F-20": (0.024,), "R-10": (0.0,), "R-20": (0.0,)}  # fmt: skip
    for percent, values in (
        (10, (0.152, 0.155, 0.159, 0.16, 0.167)),
        (20, (0.251, 0.26, 0.265, 0.268, 0.27)),
    ):
        rows |= {f"random-{i}-{percent}": (v,) for i, v in enumerate(values, 1)}
    found = Outcomes(records_of(tile_screen.RUNS, rows, [1.049]))
    assert decided(tile_screen.STUDY, found).label == "informative negative"
    assert decided(tile_screen.STUDY, Outcomes(records_of(
        tile_screen.RUNS, {**rows, "C-20": (0.86,)}, [1.049]))).label == "promoted"  # fmt: skip


LEVERAGE: dict[str, Sequence[float]] = {
    "master": (0.99, 0.99, 0.99), "L-10": (0.7123, 0.7385, 0.6914), "L-20": (0.840, 0.812, 0.785),
    "tied": (0.772, 0.772, 0.772),
    **{f"random-{i}-10": v for i, v in enumerate(
        [(0.141, 0.146, 0.153), (0.15, 0.15, 0.16), (0.159, 0.164, 0.163), (0.16, 0.17, 0.163),
         (0.168, 0.171, 0.163)], 1)},
    **{f"random-{i}-20": v for i, v in enumerate(
        [(0.236, 0.237, 0.246), (0.25, 0.24, 0.25), (0.259, 0.249, 0.254), (0.26, 0.25, 0.26),
         (0.261, 0.259, 0.260)], 1)},
}  # fmt: skip
GAPS = (1.05, 1.06, 1.07)


def test_leverage_passes_both_stages() -> None:
    found = Outcomes(records_of(leverage_primary.RUNS, LEVERAGE, GAPS))
    decision = decided(leverage_primary.STUDY, found)
    assert decision.label == "both stages pass"
    values = evaluate(
        [e for e in leverage_primary.STUDY.estimands if e.name.startswith("above-median")], found
    )
    for percent, printed in ((10, (0.553, 0.575, 0.529)), (20, (0.581, 0.563, 0.530))):
        for found_one, expected in zip(values[f"above-median-{percent}"].values(), printed, strict=True):
            assert found_one is not None
            assert abs(found_one - expected) < 0.0015  # medians are printed to 0.001


def test_stage_two_needs_stage_one() -> None:
    """Without a best-mask win in two seeds stage 2 has no records, and the label says so."""
    study, runs = leverage_primary.STUDY, leverage_primary.RUNS
    rows = {**LEVERAGE, "L-10": (0.3, 0.31, 0.7), "random-1-10": (0.4, 0.4, 0.1)}
    made = records_of(runs, rows, GAPS)
    made.pop("stage-2")
    decision = decided(study, Outcomes(made, not_run={"stage-2"}))
    assert decision.label != "both stages pass"
    assert not decision.gates["wins"].passed
    assert study.stage("stage-2").only_if == leverage_primary.FIRST
    assert decide(study, {e.name: {} for e in study.estimands}, {"stage-2"}).label == "not matched"


SALIENCY: dict[str, Sequence[float]] = {
    "F-10": (0.0310, 0.0208, 0.0123), "G-10": (0.6073, 0.6193, 0.5904), "U-10": (0.1703, 0.1742, 0.1864),
    "W-10": (-0.0140, -0.0218, -0.0242), "T-10": (0.6512, 0.6451, 0.6440), "P-10": (0.7165, 0.6864, 0.6779),
    "within-10": (0.1614, 0.1444, 0.1526), "matched-10": (0.1552, 0.1406, 0.1477), "R-10": (0.0, 0.0, 0.0),
}  # fmt: skip


def test_saliency_is_negative() -> None:
    """-0.00418, 0.05203 and 0.01347 in the paper, to the digits that recoveries are printed in."""
    evidence = Outcomes(records_of(leverage_primary.RUNS, LEVERAGE, GAPS))
    made = records_of(saliency_challenge.RUNS, SALIENCY, GAPS)
    del made["reference"]
    found = Outcomes(made, evidence={"leverage": evidence}, not_run={"stage-2"})
    study = saliency_challenge.STUDY
    values = evaluate([e for e in study.estimands if e.name.startswith("above")], found)
    for name, printed in (("above-scores", (-0.00418, 0.05203, 0.01347)),
                          ("above-structure", (0.55091, 0.59411, 0.53879))):  # fmt: skip
        for ours, expected in zip(values[name].values(), printed, strict=True):
            assert ours is not None
            assert abs(ours - expected) <= 0.0001
    decision = decided(study, found)
    assert decision.label == "negative"
    assert [decision.gates[g].passed for g in saliency_challenge.DECIDES] == [False, False, True, True]


def test_reuse_is_positive() -> None:
    """From the losses that the paper prints, tab:fixed-mask-reuse-losses."""
    losses = {
        2035: (5.691, 6.776, 5.699, 6.028, 6.010, 6.733, 6.602),
        2036: (5.710, 6.780, 5.704, 6.046, 6.049, 6.741, 6.614),
        2037: (5.679, 6.777, 5.712, 6.032, 6.041, 6.732, 6.618),
    }
    arms = ("rne", "master", "source-P", "target-P", "source-F", "control-1")
    made: dict[str, dict[str, Any]] = {"reference": {}, "outcome": {}}
    for seed, (fp32, *rest) in losses.items():
        made["reference"][f"target-{seed}"] = lost(fp32)
        made["outcome"] |= {f"target-{seed}-{a}": lost(v) for a, v in zip(arms, rest, strict=True)}
        made["outcome"][f"target-{seed}-source-R"] = lost(fp32)
    decision = decided(mask_reuse.STUDY, Outcomes(made))
    assert decision.label == "positive"
    assert all(gate.passed for gate in decision.gates.values())


def test_depth_17_is_go() -> None:
    rows = {"master": (0.998, 0.988, 1.004), "source-P": (0.659, 0.661, 0.672),
            "target-P": (0.650, 0.652, 0.664), "control-1": (0.163, 0.170, 0.161)}  # fmt: skip
    found = records_of(depth_17.RUNS, rows, (1.136, 1.145, 1.128))
    assert decided(depth_17.STUDY, Outcomes(found)).label == "GO"
    worse = records_of(depth_17.RUNS, {**rows, "source-P": (0.659, 0.661, 0.499)}, (1.136, 1.145, 1.128))
    assert decided(depth_17.STUDY, Outcomes(worse)).label == "NO-GO"


def test_whole_tensors_by_risk_are_above_anti_selection() -> None:
    rows = {"master": (1.005, 1.001), "select-25": (0.274, 0.273), "anti-25": (0.082, 0.078),
            "tied": (0.559, 0.552), "select-50": (1.010, 1.003), "without-50": (0.309, 0.291)}  # fmt: skip
    rows |= dict.fromkeys((*whole_tensor.DRAWS[25], *whole_tensor.DRAWS[50]), (0.27, 0.27))
    found = Outcomes(records_of(whole_tensor.RUNS, rows, (1.0, 1.0)))
    skip = ("foretold", "bytes-off", "matched", "spent", "draws")
    assert decided(whole_tensor.STUDY, found, skip).label == "selection is above anti-selection"


def test_eco_is_above_the_sources_mask() -> None:
    rows = {"master": (1.0, 1.0, 1.0), "source-P": (0.604, 0.610, 0.607), "eco": (0.964, 0.965, 0.966)}
    gaps = (1.159, 1.137, 1.186)
    evidence = Outcomes(records_of(prospective_modern.RUNS, rows, gaps))
    made = records_of(eco_comparator.RUNS, {"eco": rows["eco"]}, gaps)
    del made["reference"]
    decision = decided(eco_comparator.STUDY, Outcomes(made, evidence={"prospective": evidence}))
    assert decision.label == "post hoc: eco is above the source's mask"


# ---- dominance --------------------------------------------------------------------------------------------

BASE = 3 * 4 * 124_373_760
WALLS = {"rne": 304.60, "eco": 342.95, "master": 335.62, "source-P-5": 330.94, "source-P-10": 331.82,
         "source-P-20": 333.73}  # fmt: skip
WON = {
    "rne": 0.0,
    "eco": 0.934,
    "master": 0.984,
    "source-P-5": 0.492,
    "source-P-10": 0.698,
    "source-P-20": 0.800,
}
SOURCE_PEAK, SOURCE_WALL = 25_057_738_240, 210.30


def paper_points(peak: int) -> dict[str, Point]:
    """The paper's six choices; it prints the source's peak and not the arms', so one is given."""
    kept = {"rne": 0, "eco": 0, "master": 497_418_240}
    kept |= {f"source-P-{p}": 3076 * tiles for p, tiles in ((5, 8_096), (10, 16_192), (20, 32_384))}
    return {
        name: Point(WON[name], {
            "peak": SOURCE_PEAK if name.startswith("source") else peak + kept[name],
            "storage": BASE + kept[name], "wall": WALLS[name]})
        for name in gpt2_pareto.CHOICES
    }  # fmt: skip


@pytest.mark.parametrize("peak", [23_000_000_000, 24_000_000_000, 25_000_000_000])
def test_survivors_of_the_paper(peak: int) -> None:
    """Nearest, ECO and blanket at every reuse count; without tolerances the masks too, at 30 and 100."""
    for times in gpt2_pareto.REUSE:
        points = gpt2_pareto.reused(paper_points(peak), SOURCE_WALL, times)
        assert survivors(points, gpt2_pareto.WITHIN) == ["rne", "eco", "master"]
        strict = ["rne", "eco", "master", *(gpt2_pareto.SOURCE if times >= 30 else ())]
        assert survivors(points) == strict
        if times == 100:
            walls = [points[name].costs["wall"] for name in gpt2_pareto.SOURCE]
            assert [round(w, 2) for w in walls] == [333.04, 333.92, 335.83]  # the paper: 335.84


def test_no_allocator_headline() -> None:
    """The paper's recoveries and costs, as records: 10% and 20% have the quality, and none survives."""
    rows: dict[str, Sequence[float]] = {
        "master": (0.977, 0.984, 0.991), "eco": (0.934, 0.934, 0.934),
        "source-P-5": (0.484, 0.492, 0.500), "source-P-10": (0.680, 0.700, 0.714),
        "source-P-20": (0.788, 0.800, 0.812), "target-P-5": (0.491,) * 3, "target-P-10": (0.702,) * 3,
        "target-P-20": (0.797,) * 3, "control-5": (0.050,) * 3, "control-10": (0.169,) * 3,
        "control-20": (0.278,) * 3,
    }  # fmt: skip
    found = records_of(gpt2_pareto.RUNS, rows, (1.090, 1.1, 1.108))
    found["source"] = {"source": {"updates": 600}}
    points = paper_points(24_000_000_000)
    measured = [
        {"arm": n, "updates": 1000, "window_seconds": p.costs["wall"], "peak_bytes": p.costs["peak"],
         "persistent_bytes": p.costs["storage"], "policy_bytes": 0}
        for n, p in points.items()
    ]  # fmt: skip
    trace = {"arm": "trace", "updates": 600, "window_seconds": SOURCE_WALL, "peak_bytes": SOURCE_PEAK}
    found["costs"] = {"repetition-1": {"measured": [*measured, trace]}}
    decision = decided(gpt2_pareto.STUDY, Outcomes(found))
    assert [decision.gates[f"quality[{p}%]"].passed for p in (5, 10, 20)] == [False, True, True]
    assert decision.label == "retain_allocator_headline=false"
    cheap = [
        {**row, "window_seconds": 250.0} if str(row["arm"]).startswith("source") else row for row in measured
    ]
    found["costs"] = {"repetition-1": {"measured": [*cheap, {**trace, "window_seconds": 1.0}]}}
    assert decided(gpt2_pareto.STUDY, Outcomes(found)).label == "retain_allocator_headline=true"


def test_survivors_by_brute_force() -> None:
    """Against the definition written out, for all small sets of points."""
    values = [
        Point(q, {"a": a, "b": b}) for q, a, b in itertools.product((0.0, 0.5), (1.0, 1.04), (1.0, 2.0))
    ]
    for chosen in itertools.combinations(values, 4):
        points = {str(i): p for i, p in enumerate(chosen)}
        for q, c in ((0.0, 0.0), (0.1, 0.05)):
            left = []
            for i, p in points.items():
                beaten = False
                for j, o in points.items():
                    no_worse = o.quality >= p.quality - q and all(
                        o.costs[k] <= p.costs[k] * (1 + c) for k in "ab"
                    )
                    better = o.quality > p.quality + q or any(o.costs[k] * (1 + c) < p.costs[k] for k in "ab")
                    beaten |= i != j and no_worse and better
                left += [] if beaten else [i]
            assert survivors(points, Tolerance(quality=q, cost=c)) == left


# ---- runs at the smallest scale ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpora(tmp_path_factory.mktemp("data"))


def one_seed(runs: Bundle, **changes: Any) -> Bundle:
    return replace(runs, targets=runs.targets[:1], **changes)


def run_bundle(runs: Bundle, folder: Path, evidence: Mapping[str, Outcomes] | None = None) -> Outcomes:
    """A bundle's stages at the smallest scale."""
    needed = {gate for gates in runs.only_if.values() for gate in gates} or {"material"}
    study = replace(
        mask_reuse.STUDY, scales=runs.configs, stages=runs.stages, scale_data=runs.data, tables={},
        gates=tuple(replace(mask_reuse.STUDY.gates[0], name=name) for name in sorted(needed)),
        rules=mask_reuse.STUDY.rules[-1:], figures={},
    )  # fmt: skip
    return outcomes(*run_with_files(study, folder, evidence), evidence)


@pytest.fixture(scope="module")
def leverage(folder: Path) -> Outcomes:
    """One seed of leverage-primary, with one random mask a budget."""
    runs = leverage_primary.RUNS
    few = {a: how for a, how in runs.arms.items() if not a.startswith("random") or a.startswith("random-1-")}
    return run_bundle(one_seed(runs, arms=few), folder)


def test_masks_are_made_by_the_runs_that_sum(leverage: Outcomes) -> None:
    """Packed masks come back; recorded budgets, places and overlaps are theirs; rehearsals foretell."""
    (cell,) = leverage["source"]
    made = unpacked(leverage.attached("source", cell, PACKED), "masks")
    told = leverage["source"][cell]["masks"]
    assert list(made) == list(leverage_primary.RUNS.masked.of_source)  # type: ignore[union-attr]
    tiles = sum(sum(t.shape[0] for t in m.tiles.values()) for m in [made["L-10"]])
    for name, mask in made.items():
        assert told["budget"][name] == mask.budget == mask.payload_bytes
        assert sum(told["tiles"][name].values()) == sum(int(t.sum()) for t in mask.tiles.values())
        if name.endswith(("-10", "-20")):
            assert sum(told["tiles"][name].values()) * 100 == tiles * int(name[-2:])
    assert told["tiles"]["within-10"]["wte"] == tiles // 10
    assert told["tiles"]["matched-10"] == told["tiles"]["L-10"]
    assert set(told["tiles"]["tied"]) >= {"wte", "wpe", "attention", "mlp"}
    assert pack(made) == leverage.attached("source", cell, PACKED)
    unit = one_seed(leverage_primary.RUNS).over(leverage)[0]
    won, foretold = measures.recovery(unit, "L-10"), measures.forecast_recovery(unit, "L-10")
    assert won is not None
    assert foretold is not None
    assert measures.bytes_off(unit, ["L-10", "L-20", "tied"]) == 0


def test_recipes_need_no_order() -> None:
    """A sealed protocol sorts names: what a recipe refers to is made before it."""
    recipes = {**whole_tensor.RUNS.masked.of_source, **gpt2_pareto._OWN, **gpt2_pareto._CONTROLS}  # type: ignore[union-attr]
    sizes = {whole_tensor.shared.TIED: 3200, "mlp": 6400}
    sums = {n: np.random.default_rng(0).random((s // 32, 8)) for n, s in sizes.items()}
    ranked = Ranked(sizes, 32, lambda: sums, silent=dict.fromkeys(sizes, 0.5))
    there, back = ranked.masks(recipes), ranked.masks(dict(sorted(recipes.items())))
    assert {n: m.payload_bytes for n, m in there.items()} == {n: m.payload_bytes for n, m in back.items()}
    assert all(torch.equal(there[n].tiles[t], back[n].tiles[t]) for n in there for t in sizes)
    assert there["P-5"].overlap(there["P-10"]) == there["P-10"].overlap(there["P-20"]) == 1


def test_evidence_stands_in_for_anchors(leverage: Outcomes, folder: Path) -> None:
    """Arms on the masks of another study; anchors and the leverage arm are its records."""
    runs = one_seed(
        saliency_challenge.RUNS, only_if={},
        arms={n: saliency_challenge.RUNS.arms[n] for n in ("P-10", "R-10", "matched-10")},
    )  # fmt: skip
    found = run_bundle(runs, folder, {"leverage": leverage})
    unit = runs.over(found)[0]
    assert measures.matched(unit) == 1
    assert measures.bytes_off(unit, ["P-10"]) == 0
    other = one_seed(leverage_primary.RUNS).over(leverage)[0]
    assert unit.run("rne") is other.run("rne")
    assert measures.gap(unit) == measures.gap(other)
    assert measures.recovery(unit, "L-10") == measures.recovery(other, "L-10")


def test_whole_tensors_overshoot(folder: Path) -> None:
    """Greedy to at least the nominal share, from both ends; draws at least as much as the selection."""
    few = ("rne", "select-25", "anti-25")
    runs = one_seed(whole_tensor.RUNS, arms={a: whole_tensor.RUNS.arms[a] for a in few})
    found = run_bundle(runs, folder)
    (cell,) = found["source"]
    made = unpacked(found.attached("source", cell, PACKED), "masks")
    silent = found["source"][cell]["masks"]["silent"]
    for name, least in (("select-25", 0.25), ("anti-25", 0.25), ("select-50", 0.5), ("without-50", 0.5)):
        mask = made[name]
        taken = [n for n, t in mask.tiles.items() if bool(t.all())]
        assert all(bool(t.all()) or not bool(t.any()) for t in mask.tiles.values())
        assert mask.payload_bytes >= least * mask.blanket_bytes
        order = sorted(taken, key=lambda n: (silent[n] if "anti" in name else -silent[n], n))
        assert mask.payload_bytes - mask.payload(order[-1]) < least * mask.blanket_bytes
        rest = [silent[n] for n in silent if n not in taken and n != whole_tensor.shared.TIED]
        edge = silent[order[-1]]
        assert all(r >= edge if "anti" in name else r <= edge for r in rest)
    assert not bool(made["without-50"].tiles[whole_tensor.shared.TIED].any())
    for percent, names in whole_tensor.DRAWS.items():
        assert all(made[n].payload_bytes >= made[f"select-{percent}"].payload_bytes for n in names)


def test_a_run_that_follows_silence_resumes(folder: Path) -> None:
    """Flags of coordinates are part of what a stopped run keeps."""
    from decoder_cells import Stopped

    from halfulp.paper.arms.run import run

    runs = one_seed(whole_tensor.RUNS)
    (cell,) = runs.source(runs.configs["smoke"])
    arm = Arm.from_json(cell.config)
    longer = replace(arm, recipe=replace(arm.recipe, updates=4), scores=("e5m2", 4), save_every=2).to_json()
    whole = Here(longer, folder)
    expected = run(whole)
    stopped = Here(longer, folder, stop_after=1)
    with pytest.raises(Stopped):
        run(stopped)
    assert run(stopped) == expected
    assert stopped.attached == whole.attached
