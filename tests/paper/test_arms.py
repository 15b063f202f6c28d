"""Arms: what a run leaves, that it can be interrupted anywhere, and that it is what it says."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from decoder_cells import Here, Stopped, write_corpora
from safetensors.torch import load as load_tensors

import halfulp as hu
from halfulp.errors import UsageError
from halfulp.measures.groups import CORE, group_of
from halfulp.paper.arms import Arm, Bundle, measures, records
from halfulp.paper.arms.mask_recipes import PACKED, Ranked, pack, recipes
from halfulp.paper.arms.run import run as run_arm
from halfulp.paper.arms.standard import loss_forecasts
from halfulp.paper.models.decoder import Decoder, DecoderConfig
from halfulp.paper.models.training import Recipe, Schedule, Training, adamw
from halfulp.paper.tokens import open_corpus
from halfulp.trace import Columns

MODEL = DecoderConfig(layers=2, heads=2, width=32, context=16, vocabulary=65, hidden=64)
RECIPE = Recipe(
    schedule=Schedule(peak=6e-3, floor=6e-4, warmup=2, horizon=12), seed=7, updates=12, batch=3, context=16,
    eval_every=5, eval_batches=2,
)  # fmt: skip
CORPUS = {"kind": "characters", "train": "tinyshakespeare.txt"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text with an alphabet of 65, and the same as bytes and as token files."""
    return write_corpora(tmp_path_factory.mktemp("data"))


def arm(**how: Any) -> dict[str, Any]:
    given = {"seed": 7, "model": MODEL, "recipe": RECIPE, "corpus": CORPUS, "save_every": 1}
    return Arm(**{**given, **how}).to_json()


KINDS = {
    "fp32": {"audit": ("e5m2", "e4m3@128")},
    "projected": {"audit": ("e5m2",), "projected": "e5m2"},
    "rehearsed": {
        "audit": ("e5m2",), "rehearse": ("e5m2", "e5m2:sr", "e5m2:master"), "tile": 32, "tables": False,
        "attribute": {"of": ["e5m2"], "moments": 3, "points": 2, "batches": 1},
    },
    "rne": {"grid": "e5m2", "policy": "rne"},
    "sr": {"grid": "e4m3@128", "policy": "sr", "stream_seed": 8},
}  # fmt: skip


# ---- arms -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_interrupted_arm_leaves_the_same_record(kind: str, folder: Path) -> None:
    """Stopped after one of its saves, and taken up again: neither the record nor a file knows."""
    first = Here(arm(**KINDS[kind]), folder)
    whole = run_arm(first)
    json.dumps(whole, allow_nan=False)
    for k in (1, 2, 7, RECIPE.updates):
        cell = Here(arm(**KINDS[kind]), folder, stop_after=k)
        with pytest.raises(Stopped):
            run_arm(cell)
        assert run_arm(cell) == whole, k
        assert cell.attached == first.attached, k


def test_reference_record_is_the_trace(folder: Path, tmp_path: Path) -> None:
    """The counts of a float32 arm are those of an audit that writes a trace."""
    record = run_arm(Here(arm(audit=("e5m2", "e4m3@128")), folder))
    model = Decoder(MODEL, seed=7)
    run = Training(model, adamw(model, RECIPE), open_corpus(Here({}, folder).data, CORPUS, 65)[0], RECIPE)
    with hu.Audit(run.optimizer, ["e5m2", "e4m3@128"], model=model, out=tmp_path / "trace"):
        while not run.done:
            run.step()
    trace = hu.Trace.open(tmp_path / "trace")
    assert set(record["frozen"]) == {"e5m2", "e4m3@128"}
    for grid in record["frozen"]:
        for scope in ("attention", "mlp", "core", "embedding", "all-2d"):
            assert np.array_equal(
                records.frozen(record, grid, scope), trace.frozen(grid, scope, of="weights")
            ), (
                grid,
                scope,
            )


def test_rehearsals_of_an_arm(folder: Path) -> None:
    """Losses and counts are those of a run that is rehearsed by hand; the run itself is what it was."""
    record = run_arm(Here(arm(**KINDS["rehearsed"]), folder))
    plain = run_arm(Here(arm(audit=("e5m2",)), folder))
    assert [e["loss"] for e in record["evaluations"]] == [e["loss"] for e in plain["evaluations"]]
    model = Decoder(MODEL, seed=7)
    train, held_out = open_corpus(Here({}, folder).data, CORPUS, 65)
    run = Training(model, adamw(model, RECIPE), train, RECIPE, held_out=held_out)
    grid, names = hu.grid("e5m2"), [n for n, p in model.named_parameters() if p.dim() >= 2]
    start = {n: p.detach().clone() for n, p in model.named_parameters() if n in names}
    held = {bound: {n: grid.round(w) for n, w in start.items()} for bound in ("point", "upper")}
    peak, frozen = 0.0, []
    while not run.done:
        before = {n: p.detach().clone() for n, p in model.named_parameters() if n in names}
        run.step()
        params = {n: p for n, p in model.named_parameters() if n in names}
        peak = max(peak, RECIPE.schedule.rate(run.update))
        still = 0
        for bound, k in (("point", min(1.0, 30 * peak)), ("upper", 0.0)):
            for n, p in params.items():
                s = held[bound][n]
                d = p.detach() - before[n]
                held[bound][n] = grid.round(s + (d + torch.tensor(k, dtype=torch.float32) * (before[n] - s)))
                still += int((held[bound][n] == s).sum()) if bound == "point" else 0
        frozen.append(still)
    own = {n: p.detach().clone() for n, p in params.items()}
    last = record["evaluations"][-1]["rehearsed"]["e5m2"]
    for bound, values in {**held, "lower": {n: grid.round(w) for n, w in own.items()}}.items():
        with torch.no_grad():
            for n, p in params.items():
                p.copy_(values[n])
        assert last["loss"][bound] == run.evaluate(), bound
    counted = np.sum([record["rehearsed"]["e5m2"][g] for g in record["coordinates"]], axis=0)
    assert counted.tolist() == frozen
    assert [m["update"] for m in record["attributed"]] == [4, 8, 12]


@pytest.mark.parametrize("kind", ["rne", "sr"])
def test_outcome_record_is_what_happened(kind: str, folder: Path) -> None:
    """Frozen, never moved and occupancy, recounted from the weights after every update."""
    how: dict[str, Any] = KINDS[kind]
    record = run_arm(Here(arm(**how), folder))
    train, held_out = open_corpus(Here({}, folder).data, CORPUS, 65)
    model = Decoder(MODEL, seed=7)
    optimizer = hu.WriteBack(
        adamw(model, RECIPE), how["grid"], how["policy"], model=model, seed=how.get("stream_seed", 0)
    )
    run = Training(model, optimizer, train, RECIPE, held_out=held_out)
    names = [n for n, p in model.named_parameters() if p.dim() >= 2]

    def now() -> dict[str, torch.Tensor]:
        return {n: p.detach().clone() for n, p in model.named_parameters() if n in names}

    q, ever = now(), {n: torch.zeros_like(p, dtype=torch.bool) for n, p in now().items()}
    frozen: dict[str, list[int]] = {g: [] for g in record["coordinates"]}
    grid = hu.grid(how["grid"])
    most, evaluations = 0, []
    while not run.done:
        run.step()
        after = now()
        still = {n: q[n] == after[n] for n in names}
        for group, series in frozen.items():
            series.append(sum(int(still[n].sum()) for n in names if group_of(n, q[n]) == group))
        ever = {n: ever[n] | ~still[n] for n in names}
        q = after
        ends = sum(int((q[n].abs() == grid.largest).sum()) for n in names)  # type: ignore[attr-defined]
        most = max(most, ends)
        if RECIPE.evaluates(run.update):
            unmoved = {g: sum(int((~ever[n]).sum()) for n in names if group_of(n, q[n]) == g) for g in frozen}
            small = sum(int(((q[n].abs() < grid.smallest_normal) & (q[n] != 0)).sum()) for n in names)
            zero = sum(int((q[n] == 0).sum()) for n in names)
            evaluations.append(
                {
                    "update": run.update, "loss": run.evaluate(), "never_moved": unmoved,
                    "occupancy": {"endpoint": ends, "subnormal": small, "zero_code": zero},
                }
            )  # fmt: skip
    assert record["frozen"] == {how["grid"]: frozen}
    assert record["evaluations"] == evaluations
    assert record["most_endpoint"] == most
    core = [n for n in names if group_of(n, q[n]) in CORE]
    share = sum(int((~ever[n]).sum()) for n in core) / sum(q[n].numel() for n in core)
    assert records.never_moved(record, "core") == share


def test_matched_arms_start_alike(folder: Path) -> None:
    """The same raw weights everywhere, the same codes in both write-backs and the projected anchor."""
    found = {
        kind: run_arm(Here(arm(**how), folder))
        for kind, how in (
            ("fp32", {}),
            ("projected", {"projected": "e5m2"}),
            ("rne", {"grid": "e5m2", "policy": "rne"}),
            ("sr", {"grid": "e5m2", "policy": "sr"}),
        )
    }
    assert len({r["initial"] for r in found.values()}) == 1
    assert found["fp32"]["start"] == found["fp32"]["initial"]
    codes = {found[kind]["start"] for kind in ("projected", "rne", "sr")}
    assert len(codes) == 1
    assert codes != {found["fp32"]["start"]}


def test_corpora(folder: Path) -> None:
    """Letters with a tenth held out, bytes of two files, token files; a small vocabulary is refused."""
    cell = Here({}, folder)
    train, held_out = open_corpus(cell.data, CORPUS, 65)
    assert (len(train), len(held_out)) == (5458, 607)
    both = {"train": "tinyshakespeare.txt", "held_out": "held-out.txt"}
    raw, other = open_corpus(cell.data, {"kind": "bytes", **both}, 256)
    assert raw[:5458].tolist() == (train + 33).tolist()
    assert len(other) == 500
    mapped, _ = open_corpus(cell.data, {"kind": "bin", "train": "train.bin", "held_out": "val.bin"}, 65)
    assert isinstance(mapped, np.memmap)
    assert np.array_equal(mapped[:5458], train)
    with pytest.raises(UsageError, match="65 characters, the model knows 64"):
        open_corpus(cell.data, CORPUS, 64)


def test_diverged_loss_is_null(folder: Path) -> None:
    """A record holds no NaN: a loss that is not finite is missing, and no gate passes on it."""
    recipe = replace(RECIPE, schedule=replace(RECIPE.schedule, peak=1e30, floor=0.0), clip=1e30)
    record = run_arm(Here(arm(recipe=recipe), folder))
    json.dumps(record, allow_nan=False)
    assert records.loss(record) is None


def test_half_a_write_back_is_refused() -> None:
    with pytest.raises(UsageError, match="both a grid and a policy"):
        arm(grid="e5m2")


def test_a_bundle_forecasts_what_its_references_rehearse(folder: Path) -> None:
    """Losses by arm and bound, and the frozen fraction of the nearest one beside the other predictors."""
    runs = Bundle(
        scales={"smoke": Arm.from_json(arm())},
        targets=(7,),
        conditions={"e5m2": {"grid": "e5m2"}},
        arms={"rne": {"policy": "rne"}, "sr": {"policy": "sr"}},
        scopes=("core",),
        rehearse=("rne", "sr"),
    )
    stages = {stage.name: stage for stage in runs.stages}
    found: dict[str, dict[str, Any]] = {}
    files: dict[str, dict[str, dict[str, bytes]]] = {}
    for name in ("reference", "forecast", "outcome"):
        found[name], files[name] = {}, {}
        for cell in stages[name].cells(runs.configs["smoke"]):
            here = Here(cell.config, folder, cell.name)
            here.records, here.files = found, files
            found[name][cell.name] = json.loads(json.dumps(stages[name].run(here), allow_nan=False))
            files[name][cell.name] = here.attached
    (reference,), (told,) = found["reference"].values(), found["forecast"].values()
    assert set(reference["rehearsed"]) == {"e5m2", "e5m2:sr"}
    assert told["rehearsal"] == records.frozen(reference, "e5m2", "core", "rehearsed").tolist()
    last = reference["evaluations"][-1]
    for name, spec in (("rne", "e5m2"), ("sr", "e5m2:sr")):
        assert told["losses"][name]["12"] == last["rehearsed"][spec]["loss"]
    (unit,) = runs.over(found)
    gap = last["rehearsed"]["e5m2"]["loss"]["upper"] - last["loss"]
    assert measures.forecast_gap(unit, bound="upper") == gap
    row = next(r for r in loss_forecasts(runs, found).rows if r[1] == "rne")
    assert row[2:6:3] == (measures.gap(unit), gap)
    sealed, own = (measures.forecast_rmse(unit, "core", predictor=p) for p in ("rehearsal", "rehearsed"))
    assert sealed == own is not None
    assert 0 < measures.stays(unit) == told["stays"] < 1
    # Where probabilities were not followed, as on a GPU, nothing is said of them.
    (cell,) = stages["forecast"].cells(runs.configs["smoke"])
    here = Here(cell.config, folder, cell.name)
    (of,) = files["reference"]
    table = records.unpack(files["reference"][of]["grids.safetensors"], "grids")
    content = records.pack(Columns({**dict(table), "expected": np.full(len(table), np.nan)}))
    here.records = found
    here.files = {**files, "reference": {of: {**files["reference"][of], "grids.safetensors": content}}}
    found["forecast"][cell.name] = json.loads(json.dumps(stages["forecast"].run(here), allow_nan=False))
    assert found["forecast"][cell.name]["stays"] is None
    (unit,) = runs.over(found)
    assert measures.stays(unit) is None


# ---- as data --------------------------------------------------------------------------------------------


def test_what_is_left_at_its_default_is_left_out() -> None:
    """And comes back: through text, for every field at another value than its default."""
    plain = Arm(model=MODEL, recipe=RECIPE, corpus=CORPUS)
    assert set(plain.to_json()) == {"model", "recipe", "corpus"}
    assert "seed" not in plain.to_json()["recipe"]
    fp32 = replace(
        plain, seed=3, projected="e5m2", audit=("e5m2", "bf16"), scores=("e5m2", 5), tile=32,
        attention="math", replay=True, tables=False, rehearse=("e5m2", "e5m2:tiles(half)"),
        masks={"stage": "masks", "cell": "source"},
        attribute={"of": ["e5m2"], "moments": 3, "points": 4, "batches": 2},
        make={"P": {"score": "P", "share": 0.1}},
    )  # fmt: skip
    at = {"stage": "masks", "cell": "source", "name": "P"}
    masked = replace(
        plain, grid="e5m2", policy="tile-master(start_from=raw)", projection="stochastic",
        storage="container", stream_seed=4, mask=at, device="auto", save_every=9,
    )  # fmt: skip
    for made in (plain, fp32, masked):
        assert Arm.from_json(json.loads(json.dumps(made.to_json()))) == made
    assert {f.name for f in fields(Arm)} == set(fp32.to_json()) | set(masked.to_json())


def test_a_seed_is_one_seed() -> None:
    """Of weights and of data: the recipe's follows."""
    assert replace(Arm(model=MODEL, recipe=RECIPE, corpus=CORPUS), seed=5).recipe.seed == 5


@pytest.mark.parametrize(
    "how",
    [
        {"grid": "e5m2", "policy": "tile-master"},
        {"grid": "e5m2", "policy": "rne", "mask": {"stage": "a", "cell": "b", "name": "c"}},
        {"grid": "e5m2", "policy": "sometimes"},
    ],
)
def test_what_has_no_meaning_is_refused(how: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        arm(**how)


# ---- attachments ----------------------------------------------------------------------------------------


def test_attachments_are_the_trace(folder: Path, tmp_path: Path) -> None:
    """Every count and sum by group: those of an audit that writes a trace."""
    make = recipes(0.2, "P", "F", controls=1)
    cell = Here(arm(audit=("e5m2", "e4m3@128"), scores=("e5m2", 5), make=make, tile=32), folder)
    record = run_arm(cell)
    model = Decoder(MODEL, seed=7)
    run = Training(model, adamw(model, RECIPE), open_corpus(Here({}, folder).data, CORPUS, 65)[0], RECIPE)
    matrices = [n for n, p in model.named_parameters() if p.dim() >= 2]
    with hu.Audit(
        run.optimizer, ["e5m2", "e4m3@128"], model=model, out=tmp_path / "trace",
        scores=("e5m2", 1, 5, 32),
        expected_never_moved=True, params=lambda name, p: name in matrices,
    ):  # fmt: skip
        while not run.done:
            run.step()
    trace = hu.Trace.open(tmp_path / "trace")
    grids, groups = (
        records.unpack(cell.attached[f"{name}.safetensors"], name).to_polars() for name in ("grids", "groups")
    )
    for grid in ("e5m2", "e4m3@128"):
        for group, n in record["coordinates"].items():
            rows = grids.filter(pl.col("grid") == grid, pl.col("group") == group).sort("step")
            assert rows["step"].to_list() == list(range(1, 13))
            for column in ("frozen", "symmetric", "endpoint", "subnormal", "zero_code", "never_moved"):
                found = rows[column].to_numpy() / n
                assert np.array_equal(found, trace.series(column, grid, group)), (grid, group, column)
            expected = rows["expected"].to_numpy() / n
            # Sums of at most ten tensors' float64 sums in another order: a few units in the last place.
            assert np.allclose(expected, trace.expected_never_moved(grid, group), rtol=1e-14, atol=0)
    for group in record["coordinates"]:
        rows = groups.filter(pl.col("group") == group).sort("step")
        ratio = np.sqrt(rows["proposal_sq"].to_numpy() / rows["weight_sq"].to_numpy())
        assert np.allclose(ratio, trace.update_ratio(group), rtol=1e-14, atol=0)
    sizes = {name: p.numel() for name, p in model.named_parameters() if name in matrices}
    assert record["sizes"] == sizes
    assert cell.attached[PACKED] == pack(Ranked(sizes, 32, trace.scores).masks(make))


def test_contexts_that_are_no_whole_batches(folder: Path) -> None:
    """The first of the same contexts, each counted once."""
    some = replace(RECIPE, eval_contexts=RECIPE.batch + 1, eval_batches=2)
    whole, part = (
        Here(arm(grid="e5m2", policy="rne", recipe=r), folder)
        for r in (replace(some, eval_contexts=None), some)
    )
    records = [run_arm(cell) for cell in (whole, part)]
    each, first = (load_tensors(cell.attached["contexts.safetensors"])["loss"] for cell in (whole, part))
    assert torch.equal(each[:, : RECIPE.batch], first[:, :-1])
    assert abs(records[1]["evaluations"][-1]["loss"] - first[-1].double().mean()) <= 2**-20


def test_losses_of_contexts(folder: Path) -> None:
    """One for every context at every evaluation; their mean is the loss, but for the order of a float sum."""
    cell = Here(arm(grid="e5m2", policy="rne"), folder)
    record = run_arm(cell)
    apart = load_tensors(cell.attached["contexts.safetensors"])["loss"].double()
    assert apart.shape == (len(record["evaluations"]), RECIPE.eval_batches * RECIPE.batch)
    for found, losses in zip(record["evaluations"], apart, strict=True):
        assert abs(found["loss"] - losses.mean()) <= 2**-22 * found["loss"]
