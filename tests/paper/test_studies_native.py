"""Studies 1 to 3 of the paper: native weights under other schedules and policies, and three-bit integers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import decoder_kill
import numpy as np
import pytest
import torch
from decoder_cells import Here, Stopped, run_with_files, write_corpora
from oracle import assert_same
from study.samples import quick_identity

import halfulp as hu
from halfulp.errors import CorruptionError, UsageError
from halfulp.paper.arms import Arm, direct, measures
from halfulp.paper.arms import run as arms_run
from halfulp.paper.models.decoder import LLAMA, NEOX, Decoder, inventory
from halfulp.paper.models.training import Training, adamw
from halfulp.paper.studies import dqt_int3, native_coupled_sr, native_schedule_shift
from halfulp.paper.tokens import open_corpus
from halfulp.study import engine, evidence, loading, provenance
from halfulp.study import validate as validation
from halfulp.study.executor import Inline
from halfulp.study.gates import decide, evaluate, judge
from halfulp.study.store import Store
from halfulp.study.validate import validate
from halfulp.study.worker import CellRun
from halfulp.writeback.storage import dispatch

SHIFT, COUPLED, DQT = native_schedule_shift.STUDY, native_coupled_sr.STUDY, dqt_int3.STUDY


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpora(tmp_path_factory.mktemp("corpora"))


@pytest.fixture(scope="module")
def coupled(folder: Path) -> Any:
    return run_with_files(COUPLED, folder)[0]


# ---- the paper's numbers ----------------------------------------------------------------------------


def shift_values(**changed: Any) -> dict[str, Any]:
    """The printed ratios; what the paper says passed, passes; a centred cell of constant-mid fails."""
    units = list(native_schedule_shift.RUNS.units)
    fine = {"dispatched": 1, "replayed": 1, "paired": 1, "progress": 5, "loss": 5, "endpoint": 0, "raw": 0.8}
    values: dict[str, Any] = {name: dict.fromkeys(units, float(x)) for name, x in fine.items()}
    values["centred"] = {u: 1.0525 if u.startswith("constant") else 0.855 for u in units}
    values["correlation"] = dict.fromkeys(units, 0.5)
    values["macro"] = {"constant-mid": 1.0525, "cosine-restart": 0.855}
    return values | changed


def test_schedule_shift_rows() -> None:
    """Recovered by hand: inconclusive, to the letter. After the outcomes: negative, under its own label."""
    values = shift_values()
    made = decide(SHIFT, values, recovered=True)
    assert made.label == "inconclusive_invalid_native_source_audit"
    assert made.recovered
    assert [made.gates["macro"].passed, made.gates["macro"].value] == [False, 1.0525]
    after = native_schedule_shift.RETROSPECTIVE
    told = judge(after.gates, after.rules, values)
    expected = "post_outcome_retrospective_native_source_increment_not_supported_across_schedule_shift"
    assert told.label == expected
    better = shift_values(
        macro={"constant-mid": 0.85, "cosine-restart": 0.85},
        centred=dict.fromkeys(native_schedule_shift.RUNS.units, 0.85),
    )
    assert decide(SHIFT, better).label == "native_source_increment_supported_across_schedule_shift"
    assert decide(SHIFT, better, recovered=True).label == "inconclusive_invalid_native_source_audit"
    # The recovered cell, were it any other number, could not have made the joint rule positive.
    cell = "cosine-restart-161803"
    for value in (0.0, 5.0):
        other = shift_values(centred=values["centred"] | {cell: value})
        assert judge(after.gates, after.rules, other).label == expected


def archive_records() -> dict[str, Any]:
    """An archived run whose frozen share is its rate over the peak, and a target under a constant rate."""
    config = SHIFT.config("small")
    (archived,) = (Arm.from_json(c.config) for c in native_schedule_shift.archive_cells(config))
    made: dict[str, Any] = {"archive": {}, "outcome": {}}
    cells = {c.name: Arm.from_json(c.config) for c in native_schedule_shift.RUNS.outcomes(config)}
    for stage, name, arm in (
        ("archive", "archived", archived),
        *(("outcome", n, a) for n, a in cells.items()),
    ):
        schedule, updates = arm.recipe.schedule, arm.recipe.updates
        share = [round(1000 * schedule.rate(u) / 1.8e-3) for u in range(1, updates + 1)]
        made[stage][name] = {
            "grid": "e4m3@128", "updates": updates, "warmup": schedule.warmup, "schedule": asdict(schedule),
            "coordinates": {"mlp": 1000}, "frozen": {"e4m3@128": {"mlp": share}},
        }  # fmt: skip
    return made


def test_the_archive_is_read_at_the_rates_of_the_schedule() -> None:
    """Rates that the archived cosine passed are looked up."""
    found = archive_records()
    for unit in native_schedule_shift.RUNS.over(found):
        said, seen = (f(unit, "core") for f in (measures.archived, measures.measured))
        assert np.abs(said - seen)[unit.run("rne")["warmup"] :].max() <= 0.002, unit.name


def test_the_archive_is_of_another_seed_and_sealed_before_any_target() -> None:
    names = [stage.name for stage in SHIFT.stages]
    assert names.index("archive") < names.index("outcome")
    (cell,) = SHIFT.cells("paper", "archive")
    arm, targets = Arm.from_json(cell.config), native_schedule_shift.RUNS.targets
    assert arm.seed not in {*targets, native_schedule_shift.RUNS.forecast_from}
    assert (arm.storage, arm.policy, arm.grid) == ("native", "rne", "e4m3@128")


@pytest.mark.parametrize("name", ["dispatched", "replayed", "paired"])
def test_an_invalid_cell_is_inconclusive(name: str) -> None:
    units = list(native_schedule_shift.RUNS.units)
    values = shift_values(**{name: dict.fromkeys(units, 1.0) | {units[3]: 0.0}})
    assert decide(SHIFT, values).label == "inconclusive_invalid_native_source_audit"


def coupled_values(**changed: Any) -> dict[str, Any]:
    units = list(native_coupled_sr.RUNS.units)
    full, dead = (0.9862, 0.9743, 0.9694), (0.9764, 0.9949, 0.9619)
    passed = ("dispatched", "replayed", "coupled", "matched", "gap-rne")
    fine = dict.fromkeys(passed, 1.0) | {"progress": 5.0}
    values: dict[str, Any] = {name: dict.fromkeys(units, x) for name, x in fine.items()}
    values["recovery-sr"] = dict(zip(units, full, strict=True))
    values["recovery-deadzone-sr"] = dict(zip(units, dead, strict=True))
    values["ratio"] = {u: d / f for u, d, f in zip(units, dead, full, strict=True)}
    return values | changed


def test_coupled_rows() -> None:
    values = coupled_values()
    assert [f"{x:.4f}" for x in values["ratio"].values()] == ["0.9901", "1.0211", "0.9923"]  # printed 1.0212
    assert decide(COUPLED, values).label == "native_deadzone_mediates_full_sr_recovery"
    less = coupled_values(ratio=dict.fromkeys(values["ratio"], 0.5))
    assert decide(COUPLED, less).label == "native_full_sr_recovers_without_deadzone_mediation"
    broken = coupled_values(dispatched=dict.fromkeys(values["ratio"], 0.0))
    assert decide(COUPLED, broken).label == "inconclusive_invalid_native_intervention"


def test_dqt_rows() -> None:
    losses = (10.4825, 3.3788, 3.3156, 3.2521, 3.2018, 3.1754)
    records = {
        "train": {"seed-42": {"losses": {str(i): x for i, x in enumerate(losses)}, "backoffs": [0] * 3}},
        "replay": {
            f"evaluation-{i}": {"update": i, "loss": x, "values": 8} for i, x in enumerate(losses)
        },
    }  # fmt: skip
    values = evaluate(DQT.estimands, records)
    assert round(values["decrease"]["seed-42"] or 0, 4) == 7.3071
    assert round((values["decrease"]["seed-42"] or 0) / losses[0], 4) == 0.6971
    assert decide(DQT, values).label == "dqt_direct_state_int3_convergence_supported"
    records["replay"]["evaluation-5"]["loss"] = 3.1755
    assert decide(DQT, evaluate(DQT.estimands, records)).label == "inconclusive_invalid_dqt_replay"


# ---- declarations -----------------------------------------------------------------------------------


def test_paper_scales() -> None:
    """Fifty matrices; both schedules as printed; the run of study 3 as printed."""
    model = Decoder(NEOX, device="meta")
    names = hu.native(model)
    assert len(names) == 50
    assert sum(model.get_parameter(name).numel() for name in names) == 162_201_600
    assert dispatch.products(model, ("transformer.wte.weight",)) == 3 * 49
    arms = {c.name: Arm.from_json(c.config) for c in SHIFT.cells("paper", "outcome")}
    assert len(arms) == 6
    assert all((a.model, a.storage, a.recipe.updates) == (NEOX, "native", 3000) for a in arms.values())
    mid = arms["constant-mid-161803"].recipe.schedule
    assert (mid.peak, mid.floor, mid.warmup, mid.cycles) == (3e-4, 3e-4, 100, 1)
    again = arms["cosine-restart-161803"].recipe.schedule
    assert (again.peak, again.warmup, again.cycles) == (6e-4, 100, 2)
    assert again.floor == pytest.approx(6e-5, rel=1e-15)
    (source,) = SHIFT.cells("paper", "source")
    assert Arm.from_json(source.config).recipe.schedule.cycles == 1
    assert [len(list(COUPLED.cells("paper", s))) for s in ("reference", "outcome")] == [3, 9]
    (cell,) = DQT.cells("paper", "train")
    arm = Arm.from_json(cell.config)
    assert inventory(Decoder(LLAMA, device="meta")).parameters == 134_105_856
    recipe = arm.recipe
    assert (arm.model, arm.seed, recipe.updates, recipe.batch) == (LLAMA, 42, 55_670, 256)
    assert (recipe.schedule.peak, recipe.schedule.warmup, recipe.weight_decay) == (5e-4, 2000, 0.01)
    assert (recipe.betas, recipe.epsilon, recipe.loss_scale) == ((0.9, 0.999), 1e-6, 65536.0)
    assert [c.config["update"] for c in DQT.cells("paper", "replay")] == [i * 11_134 for i in range(6)]


DATA = {"native-schedule-shift": "openwebtext", "native-coupled-sr": "openwebtext", "dqt-int3": "wikipedia"}


@pytest.mark.parametrize("name", DATA)
def test_paper_scale_seals(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quick_identity(monkeypatch)
    monkeypatch.setenv("HALFULP_DATA", str(tmp_path / "data"))
    corpus = tmp_path / "data" / DATA[name]
    corpus.mkdir(parents=True)
    for part in ("train", "val"):
        (np.arange(2000, dtype=np.uint16) % 97).tofile(corpus / f"{part}.bin")
    digest = engine.seal(loading.load(name), "paper", tmp_path / "out")
    sealed = Store(tmp_path / "out").read_seal(digest)
    assert (sealed["study"], sealed["scale"]) == (name, "paper")
    assert set(sealed["data"]) == {f"{DATA[name]}/{part}.bin" for part in ("train", "val")}


# ---- runs -------------------------------------------------------------------------------------------


def test_coupled_smoke(coupled: Any) -> None:
    """All integrity gates pass on real records; evidence counts every product of every profiled update."""
    values = evaluate(COUPLED.estimands, coupled)
    for name in ("dispatched", "replayed", "coupled", "matched"):
        assert set(values[name].values()) == {1.0}, name
    run = coupled["outcome"]["target-137035-sr"]
    expected = {"e4m3 x e4m3": 9, "e5m2 x e4m3": 18}  # eight matrices of blocks and the output
    assert [(e["update"], e["calls"]) for e in run["dispatch"]] == [(1, expected), (8, expected)]
    assert [e["update"] for e in run["replayed"]] == [0, 8]
    assert "dispatch" not in coupled["reference"]["target-137035"]


def test_a_broken_dispatch_makes_the_cell_invalid(
    coupled: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products that decode first give the same numbers, and the study is inconclusive."""

    def decoded(a: Any, b: Any, *, scale_a: Any, scale_b: Any, out_dtype: Any) -> torch.Tensor:
        product: torch.Tensor = (a.float() @ b.float()) * (scale_a * scale_b)
        return product

    name = "target-137035-rne"
    cell = next(c for c in COUPLED.cells("smoke", "outcome") if c.name == name)
    monkeypatch.setattr(torch, "_scaled_mm", decoded)
    broken = arms_run.run(Here(cell.config, folder, name))
    assert broken["dispatch"][0]["calls"] == {}
    found = {**coupled, "outcome": coupled["outcome"] | {name: broken}}
    values = evaluate(COUPLED.estimands, found)
    assert values["dispatched"]["target-137035"] == 0.0
    assert decide(COUPLED, values).label == "inconclusive_invalid_native_intervention"


def test_a_native_run_goes_on_where_it_stopped(coupled: Any, folder: Path) -> None:
    name = "target-137035-sr"
    cell = next(c for c in COUPLED.cells("smoke", "outcome") if c.name == name)
    here = Here(cell.config, folder, name, stop_after=1)
    with pytest.raises(Stopped):
        arms_run.run(here)
    assert arms_run.run(here) == coupled["outcome"][name]


@pytest.mark.slow
@pytest.mark.skipif("HALFULP_DATA" not in os.environ, reason="HALFULP_DATA is not set")
def test_a_cell_recovered_by_hand_in_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The paper's own course of study 1: five canonical cells, one by hand, then an analysis."""
    quick_identity(monkeypatch)
    out, lost = tmp_path / "out", "cosine-restart-161803"
    real = CellRun.load

    def gone(self: CellRun) -> bytes | None:
        if self.name == lost:
            raise RuntimeError("the node died")
        return real(self)

    monkeypatch.setattr(CellRun, "load", gone)
    source = loading.load("native-schedule-shift")
    with pytest.raises(engine.FailedError, match="the node died"):
        engine.run(source, "smoke", out, executor="inline")
    cell = next(c for c in SHIFT.cells("smoke", "outcome") if c.name == lost)
    by_hand = arms_run.run(Here(cell.config, Path(os.environ["HALFULP_DATA"])))
    engine.recover(out, f"outcome/{lost}", by_hand, "the node died")
    result = engine.run(source, "smoke", out, executor="inline")
    assert result["label"] == "inconclusive_invalid_native_source_audit"
    assert not result["scientific_result"]
    assert validate(out).label == result["label"]
    analysis = b"from halfulp.paper.studies.native_schedule_shift import RETROSPECTIVE\n"
    told = evidence.retrospect(out, analysis, "after.py", tmp_path / "after")
    assert told["label"].startswith("retrospective: post_outcome_retrospective_")
    assert told["registered"]["label"] == "inconclusive_invalid_native_source_audit"
    assert evidence.check_retrospective(tmp_path / "after", out) == told


def test_shift_smoke(folder: Path) -> None:
    """One source serves both schedules; every measure is defined."""
    records, files = run_with_files(SHIFT, folder)
    values = evaluate(SHIFT.estimands, records)
    for name in ("dispatched", "replayed", "paired"):
        assert set(values[name].values()) == {1.0}, name
    assert all(x is not None for by_unit in values.values() for x in by_unit.values())
    assert list(values["macro"]) == ["constant-mid", "cosine-restart"]
    assert len(SHIFT.tables["centred errors"](records).rows) == 6
    assert all("dispatch.json" in files["outcome"][cell] for cell in records["outcome"])


# ---- three-bit integers -----------------------------------------------------------------------------


def dqt_arm(**recipe: Any) -> Arm:
    arm = dqt_int3.ARMS["smoke"]
    return replace(arm, recipe=replace(arm.recipe, **recipe), save_every=3)


def test_dqt_smoke_and_continuation(folder: Path) -> None:
    """Six files replay what was noted; a run that was stopped repeats every update's evidence."""
    records, _ = run_with_files(DQT, folder)
    values = evaluate(DQT.estimands, records)
    assert set(values["agrees"].values()) == {1.0}
    assert max(x or 9 for x in values["distinct"].values()) <= 8
    assert len(values["replayed"]) == 6
    arm = dqt_arm().to_json()
    whole, stopped = Here(arm, folder), Here(arm, folder, stop_after=2)
    record = direct.train(whole)
    with pytest.raises(Stopped):
        direct.train(stopped)
    assert direct.train(stopped) == record
    assert stopped.attached == whole.attached
    assert len(record["evidence"]) == 10


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_dqt_is_killed_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By SIGKILL, again and again, anywhere on the disk: every update's evidence, checkpoints, record, label.

    Then all cells are run again, the six checkpoints from their files, and give the same records.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, decoder_kill.__file__, str(tmp_path), "60", "dqt-int3"],
        capture_output=True, text=True, env=environment, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["dqt-int3"]
    assert found["same"]
    assert found["runs"] > 3
    quick_identity(monkeypatch)
    monkeypatch.setattr(provenance, "locate", lambda name, beside: tmp_path / name)
    monkeypatch.setattr(provenance.data, "verify", lambda *given: None)
    monkeypatch.setattr(validation, "Local", lambda opening, workers: Inline(opening))  # which sees that text
    folders = [tmp_path / how / "dqt-int3" for how in ("broken", "whole")]
    mine, expected = (
        json.loads(Store(f).record_file("train", dqt_int3.CELL).read_text())["outcome"] for f in folders
    )
    assert len(expected["evidence"]) == 10
    assert mine["evidence"] == expected["evidence"]
    page = validate(folders[0], replay=[])
    assert page.problems == []
    assert "7 of 7 cells run again left the same record, bit for bit" in page.recomputed


def test_an_overflow_is_tried_again_on_the_same_batch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run equals one whose scale was low enough from the start: same data, rates, bits."""
    real, seen = Training._gradients, []

    def limit(self: Training, begin: Any) -> Any:
        total, norm = real(self, begin)
        assert isinstance(self.optimizer, hu.WriteBack)
        rate = self.optimizer.param_groups[0]["lr"]
        seen.append((self.update + 1, begin.tolist(), rate, self.optimizer.steps))
        largest = {4: 32768.0, 7: 8192.0}.get(self.update + 1, torch.inf)
        return total, norm * torch.inf if self.scale is not None and self.scale > largest else norm

    monkeypatch.setattr(Training, "_gradients", limit)
    record = direct.train(Here(dqt_arm().to_json(), folder))
    assert record["backoffs"] == [[4, 65536.0, 32768.0], [7, 32768.0, 16384.0], [7, 16384.0, 8192.0]]
    tries = {update: [s for s in seen if s[0] == update] for update in (4, 7)}
    assert [len(t) for t in tries.values()] == [2, 3]
    assert all(len({str(s) for s in t}) == 1 for t in tries.values())  # cursor, rate and stream unmoved
    monkeypatch.setattr(Training, "_gradients", real)
    low = direct.train(Here(dqt_arm(loss_scale=8192.0).to_json(), folder))
    assert low["backoffs"] == []
    assert low["losses"] == record["losses"]
    assert low["end"] == record["end"]
    assert [e[:2] for e in low["evidence"]] == [e[:2] for e in record["evidence"]]


def test_a_run_that_diverged_stops(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Training._gradients
    bad = torch.tensor(torch.nan)
    monkeypatch.setattr(Training, "_gradients", lambda self, begin: (real(self, begin)[0], bad))
    with pytest.raises(UsageError, match="update 1 overflows"):
        direct.train(Here(dqt_arm().to_json(), folder))


def test_recomputed_activations_give_the_same_gradient() -> None:
    arm = dqt_int3.ARMS["smoke"]
    text = torch.randint(80, (2, 9), generator=torch.Generator().manual_seed(0))
    grads = []
    for recomputed in (False, True):
        model = Decoder(arm.model, seed=1)
        model.transformer.checkpointing = recomputed
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model.loss(text[:, :-1], text[:, 1:]).backward()  # type: ignore[no-untyped-call]  # torch's
        grads.append([p.grad for p in model.parameters()])
    for a, b in zip(*grads, strict=True):
        assert a is not None
        assert b is not None
        assert_same(a, b, "gradient")


def test_a_state_of_more_than_three_bits_is_refused() -> None:
    model = torch.nn.Linear(4, 4)
    with pytest.raises(CorruptionError, match="more than 3 bits name"):
        direct.state_of(model)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.sign())
    state, other = direct.state_of(model), torch.nn.Linear(4, 4)
    direct.put_state(other, state)
    assert_same(other.weight.detach(), model.weight.detach(), "weights")
    assert state["weight/codes"].numel() == 6  # sixteen codes of three bits


def test_half_is_bfloat16_on_a_cpu(folder: Path) -> None:
    arm = dqt_arm()
    model = Decoder(arm.model, seed=1)
    train, held_out = open_corpus(Here(arm.to_json(), folder).data, arm.corpus, arm.model.vocabulary)
    training = Training(model, adamw(model, arm.recipe), train, arm.recipe, held_out=held_out)
    with training._precision():
        x = torch.ones(2, 2) @ torch.ones(2, 2)
    assert x.dtype == torch.bfloat16
