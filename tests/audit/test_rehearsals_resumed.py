"""Rehearsals that are resumed equal those that were not interrupted."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from rehearsal_runs import begun, held, loss_of, steps_of, train

import halfulp as hu
from halfulp import documents
from halfulp.errors import UsageError


@pytest.mark.parametrize("where", ["folder", "memory"])
def test_a_resumed_rehearsal_equals_an_uninterrupted_one(where: str, tmp_path: Path) -> None:
    """Whether the checkpoint is where the trace ends, or before it."""
    specs = ["e5m2", "e4m3@128:sr", "bf16:kahan", "bf16:eco", "e5m2:master"]

    def rates(step: int) -> float:
        return 1e-3 * (step + 1) if step < 5 else 1e-3

    def go(net: Any, opt: Any, steps: range, audit: hu.Audit) -> None:
        for step in steps:
            opt.param_groups[0]["lr"] = rates(step)
            train(net, opt, range(step, step + 1))
            if step % 3 == 2:
                audit.evaluate(lambda: loss_of(net, 99))

    def answers(trace: Any) -> list[Any]:
        counts = [trace.scan(name).to_polars().fill_nan(None).rows() for name in ("grids", "rehearsals")]
        return counts + [trace.forecast(spec).losses.to_polars().rows() for spec in specs]

    def opened(out: Any) -> Any:
        return out.trace if isinstance(out, hu.Memory) else hu.Trace.open(out)

    def place(name: str) -> Any:
        return hu.Memory() if where == "memory" else tmp_path / name

    settings: dict[str, Any] = {"rehearse": specs, "grids": "bf16", "part_steps": 2}
    net, opt = begun()
    whole = place("whole")
    with hu.Audit(opt, model=net, out=whole, **settings) as audit:
        go(net, opt, range(9), audit)
        expected = held(audit)
    for checkpoint in (4, 6):
        net, opt = begun()
        out = place(f"cut-{checkpoint}")
        with hu.Audit(opt, model=net, out=out, **settings) as audit:
            go(net, opt, range(checkpoint), audit)
            saved = copy.deepcopy((net.state_dict(), opt.state_dict()))
            go(net, opt, range(checkpoint, 6), audit)
        if isinstance(out, hu.Memory):
            out = hu.Memory.loaded(out.save())
        net, opt = begun()
        net.load_state_dict(saved[0])
        opt.load_state_dict(saved[1])
        settings_now = {**settings, "resume": True, "first_step": checkpoint + 1}
        with hu.Audit(opt, model=net, out=out, **settings_now) as audit:
            if checkpoint < 6:  # the codes are those of step 6
                assert audit.evaluate(lambda: 0.5).losses == {}
                with pytest.raises(UsageError, match="are those of step 6"), audit.as_if("e5m2"):
                    pass
            go(net, opt, range(checkpoint, 9), audit)
            found = held(audit)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        assert answers(opened(out)) == answers(opened(whole))


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_rehearsal_that_is_killed_equals_one_that_is_not(tmp_path: Path) -> None:
    """Trace, codes, the model's own weights and those as if: after kills anywhere, and at the end."""
    places = [str(Path(hu.__file__).parent.parent), str(Path(__file__).parents[1])]
    told = subprocess.run(
        [sys.executable, str(Path(__file__).parents[1] / "rehearsals_kill.py"), str(tmp_path), "12"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(places)}, stdout=subprocess.PIPE, check=True,
    )  # fmt: skip
    kills = json.loads(told.stdout)
    assert kills == {"disk": 4, "step": 4, "rehearsal": 4}
    whole, *killed = sorted(tmp_path.iterdir(), key=lambda p: p.name != "whole")
    expected = hu.Trace.open(whole / "trace")
    saved = sorted(p.name for p in whole.glob("*.safetensors"))
    assert len(saved) == 18
    for folder in killed:
        trace = hu.Trace.open(folder / "trace")
        for table in ("grids", "tensors", "run", "rehearsals", "losses"):
            mine, theirs = (t.scan(table).to_polars().sort(pl.all()) for t in (trace, expected))
            # A checkpoint may be older than the trace: then a step is evaluated again, with the same losses.
            mine = mine.unique(maintain_order=True) if table == "losses" else mine
            assert mine.equals(theirs, null_equal=True), (folder.name, table)
        a, b = trace.state(), expected.state()
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in b)
        assert all((folder / name).read_bytes() == (whole / name).read_bytes() for name in saved)


HOSTILE: dict[str, tuple[str, Callable[[dict[str, Any]], Any], str]] = {
    "another bound": ("manifest.json", lambda d: d["options"]["rehearse"].update(bounds=["mid"]), "rehearse"),
    "no specs": ("manifest.json", lambda d: d["options"]["rehearse"].update(specs=[]), "rehearse"),
    "a grid more": ("manifest.json", lambda d: d["options"]["rehearse"]["grids"].append("bf16"), "rehearse"),
    "another pull": ("manifest.json", lambda d: d["options"]["rehearse"].update(pull=[]), "rehearse"),
    "specs swapped": ("manifest.json", lambda d: d["options"]["rehearse"]["specs"].reverse(), "belong"),
    "none": ("manifest.json", lambda d: d["options"].update(rehearse=None), "expected"),
    "rows": (
        "parts/000000/part.json", lambda d: d["rows"].update(rehearsals=5), "its part states 5",
    ),
    "a table less": ("parts/000000/part.json", lambda d: d["rows"].pop("rehearsals"), "expected"),
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE)
def test_what_a_trace_may_say_of_rehearsals(what: str, tmp_path: Path) -> None:
    """With digests made right, as somebody might on purpose."""
    net, opt = begun()
    with hu.Audit(opt, "bf16", model=net, out=tmp_path / "t", rehearse=["e5m2", "bf16"]) as audit:
        train(net, opt, range(2))
        audit.evaluate(lambda: 1.0)
    hu.Trace.open(tmp_path / "t")
    name, change, said = HOSTILE[what]
    document = json.loads((tmp_path / "t" / name).read_text())
    del document["sha256"]
    change(document)
    (tmp_path / "t" / name).write_bytes(documents.sealed(document))
    with pytest.raises(hu.HalfulpError, match=said):
        hu.Trace.open(tmp_path / "t").scan("rehearsals")


def test_a_resumed_trace_ends_later_than_the_run(tmp_path: Path) -> None:
    net, opt = begun()
    with hu.Audit(opt, "bf16", model=net, out=tmp_path / "t", rehearse="e5m2") as audit:
        train(net, opt, range(4))
    net, opt = begun()
    again: dict[str, Any] = {"model": net, "out": tmp_path / "t", "resume": True}
    with hu.Audit(opt, "bf16", rehearse="e5m2", **again) as audit:
        train(net, opt, range(2))
        assert steps_of(audit) == 4
    shutil.copytree(tmp_path / "t", tmp_path / "u")
    with pytest.raises(UsageError, match="step 5 would be missing"):
        hu.Audit(opt, "bf16", rehearse="e5m2", **again, first_step=9).start()
    for other in (["bf16"], None, hu.Rehearse("e5m2", pull=3.0), hu.Rehearse("e5m2", bounds=["point"])):
        with pytest.raises(UsageError, match="it was recorded with rehearse="):
            hu.Audit(opt, "bf16", rehearse=other, **again).start()


def test_a_part_of_evaluations_alone_has_no_steps(tmp_path: Path) -> None:
    net, opt = begun()
    with hu.Audit(opt, "bf16", model=net, out=tmp_path / "run", rehearse="e5m2") as audit:
        train(net, opt, range(2))
        audit.commit()
        audit.evaluate(lambda: loss_of(net, 5))
        audit.commit()
        train(net, opt, range(2, 4))
    trace = hu.Trace.open(tmp_path / "run")
    assert len(trace.parts) == 3
    assert trace.steps.tolist() == [1, 2, 3, 4]
    assert trace.forecast("e5m2").losses["step"].tolist() == [2, 2, 2]
