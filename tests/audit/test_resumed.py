"""Going on with a trace: equal to one that was never interrupted, and refused where it would not be."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from audit_reference import (
    GRIDS,
    assert_same_tables,
    batches,
    made,
    train,
)

import halfulp as hu


def test_a_resumed_audit_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    """From a checkpoint (first_step, or by what the optimizer has counted), and by running the same steps
    again, which are skipped."""
    for name, stops in (("whole", []), ("checkpoint", [4]), ("counted", [4]), ("again", [3, 6])):
        model = made("gpt")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        options = {"model": model, "out": tmp_path / name, "resume": True, "part_steps": 2}
        audit = hu.Audit(optimizer, GRIDS, expected_never_moved=True, **options)
        audit.start()
        for step in range(1, 9):
            if step - 1 in stops:
                audit.stop()
                again = name == "again"
                if again:  # from the start, as a script without checkpoints
                    model = options["model"] = made("gpt")
                    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
                first = {"again": 1, "counted": None}.get(name, step)
                audit = hu.Audit(optimizer, GRIDS, expected_never_moved=True, **options, first_step=first)
                audit.start()
                for past in range(1, step) if again else ():
                    optimizer.zero_grad()
                    model.loss(batches(past)).backward()
                    optimizer.step()
            optimizer.zero_grad()
            loss = model.loss(batches(step))
            loss.backward()
            audit.log(loss)
            optimizer.step()
        audit.stop()
    whole = hu.Trace.open(tmp_path / "whole")
    for name in ("checkpoint", "counted", "again"):
        assert_same_tables(hu.Trace.open(tmp_path / name), whole)
        assert hu.Trace.open(tmp_path / name).tensors == whole.tensors


def test_a_tensor_keeps_its_number_in_a_resumed_trace(tmp_path: Path) -> None:
    """Whatever the order in which the second process meets the tensors, and those that it does not meet."""
    model = made("mlp")
    optimizer = torch.optim.AdamW([*model.fc1.parameters(), *model.head.parameters()], lr=1e-3)
    with hu.Audit(optimizer, ["bf16"], model=model, out=tmp_path / "trace") as audit:
        train(model, optimizer, 2, audit=audit)
    optimizer = torch.optim.AdamW([*model.fc2.parameters(), *model.head.parameters()], lr=1e-3)
    options = {"model": model, "out": tmp_path / "trace", "resume": True, "first_step": 3}
    with hu.Audit(optimizer, ["bf16"], **options) as audit:
        train(model, optimizer, 2, audit=audit)
    trace = hu.Trace.open(tmp_path / "trace")
    assert [t["name"] for t in trace.tensors] == [
        "fc1.weight", "fc1.bias", "head.weight", "head.bias", "fc2.weight", "fc2.bias",
    ]  # fmt: skip
    assert [t["id"] for t in trace.tensors] == list(range(6))
    assert trace.steps_of("fc1.weight").tolist() == [1, 2]
    assert trace.steps_of("fc2.weight").tolist() == [3, 4]
    assert trace.steps_of("head.weight").tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"grids": ["bf16"]}, "recorded with grids="),
        ({"every": 2}, "recorded with every=1, not 2"),
        ({"sample": 0.5}, "recorded with sample=None, not 0.5"),
        ({"decay": True}, "recorded with decay=False, not True"),
        ({"seed": 1}, "recorded with seed=0, not 1"),
        ({"first_step": 5}, "ends at step 3, but this run goes on after step 4: step 4 would be missing"),
        ({"resume": False, "exists": "raise"}, "holds a trace already"),
    ],
)
def test_a_trace_is_not_gone_on_with_otherwise(changed: dict[str, Any], said: str, tmp_path: Path) -> None:
    model = made("mlp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with hu.Audit(optimizer, ["bf16", "e5m2"], model=model, out=tmp_path / "trace") as audit:
        train(model, optimizer, 3, audit=audit)
    options: dict[str, Any] = {"grids": ["bf16", "e5m2"], "resume": True, "first_step": 4, **changed}
    audit = hu.Audit(optimizer, options.pop("grids"), model=model, out=tmp_path / "trace", **options)
    with pytest.raises(hu.UsageError, match=said):
        audit.start()


def test_a_trace_of_another_model_is_not_gone_on_with(tmp_path: Path) -> None:
    for width, said in ((5, None), (6, r"'weight' has shape \[5, 5\] there, but \[6, 6\] here")):
        model = torch.nn.Linear(width, width)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        first = 1 if said is None else 2
        options = {"model": model, "out": tmp_path / "trace", "resume": True, "first_step": first}
        with hu.Audit(optimizer, ["bf16"], **options):
            model(torch.ones(1, width)).sum().backward()
            if said is None:
                optimizer.step()
            else:
                with pytest.raises(hu.UsageError, match=said):
                    optimizer.step()


def test_steps_between_audited_ones_are_not_missing(tmp_path: Path) -> None:
    """Every third: the trace ends at step 4; a run that goes on with 6 misses nothing, with 8 it does."""
    model = made("mlp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with hu.Audit(optimizer, ["bf16"], model=model, out=tmp_path / "trace", every=3) as audit:
        train(model, optimizer, 5, audit=audit)
    options = {"model": model, "out": tmp_path / "trace", "every": 3, "resume": True}
    with pytest.raises(hu.UsageError, match="step 7 would be missing"):
        hu.Audit(optimizer, ["bf16"], **options, first_step=8).start()
    with hu.Audit(optimizer, ["bf16"], **options, first_step=6) as audit:
        train(model, optimizer, 3, audit=audit)
    assert hu.Trace.open(tmp_path / "trace").steps.tolist() == [1, 4, 7]


def stepped(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int, **options: Any) -> hu.Audit:
    audit = hu.Audit(optimizer, ["bf16"], model=model, part_steps=1, **options)
    with audit:
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
    return audit


def test_which_step_a_resumed_run_begins_with_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An optimizer that counts is believed; of one that was loaded and does not, the guess is named."""
    for kind, options, said, steps in (
        (torch.optim.AdamW, {}, "is taken for step 4, as the optimizer has counted.\n", 5),
        (torch.optim.SGD, {"momentum": 0.9}, "does not say how many steps it has made: if it goes on", 3),
    ):
        out = tmp_path / kind.__name__
        model = torch.nn.Linear(4, 4)
        optimizer = kind(model.parameters(), lr=1e-3, **options)
        stepped(model, optimizer, 3, out=out)
        assert capsys.readouterr().err == ""
        stepped(model, optimizer, 2, out=out, resume=True)
        told = capsys.readouterr().err
        assert f"{out} holds steps up to 3; the first one of this process" in told
        assert said in told
        assert hu.Trace.open(out).steps.tolist() == list(range(1, steps + 1))
    stepped(model, optimizer, 2, out=out, resume=True, first_step=4)
    assert hu.Trace.open(out).steps.tolist() == [1, 2, 3, 4, 5]
    assert capsys.readouterr().err == ""


def test_a_resumed_run_that_begins_too_late_is_not_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps would be missing: the training goes on, and the audit says why it does not."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    stepped(model, optimizer, 3, out=tmp_path / "run")
    stepped(model, optimizer, 2, out=tmp_path / "elsewhere")
    audit = stepped(model, optimizer, 2, out=tmp_path / "run", resume=True)
    assert audit.trouble is not None
    assert "goes on after step 5: step 4 would be missing" in audit.trouble
    assert hu.Trace.open(tmp_path / "run").steps.tolist() == [1, 2, 3]
    assert audit.trouble in capsys.readouterr().err


def test_an_optimizer_that_had_counted_before_its_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fine-tuning from a checkpoint, or steps before the audit: the trace begins with 1, counts do not."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    stepped(model, optimizer, 10, out=hu.Memory())
    begun = copy.deepcopy(optimizer.state_dict())
    out = tmp_path / "run"
    stepped(model, optimizer, 5, out=out)
    later = copy.deepcopy(optimizer.state_dict())
    stepped(model, optimizer, 3, out=out, resume=True)
    assert "is taken for step 6, as the optimizer has counted." in capsys.readouterr().err
    for state, first, steps in ((later, "6, as", 5), (begun, "1.", 12)):
        optimizer.load_state_dict(copy.deepcopy(state))
        assert stepped(model, optimizer, steps, out=out, resume=True).trouble is None
        assert f"is taken for step {first}" in capsys.readouterr().err
    assert hu.Trace.open(out).steps.tolist() == list(range(1, 13))


@pytest.mark.parametrize("named", [True, False])
def test_the_counts_of_two_optimizers(
    named: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of one that steps in every second step nothing follows; if both are named, the other's is taken."""
    models = [torch.nn.Linear(4, 4) for _ in range(2)]
    slow, fast = (torch.optim.AdamW(m.parameters(), lr=1e-3) for m in models)

    def train(**options: Any) -> hu.Audit:
        with hu.Audit([slow, fast] if named else None, ["bf16"], out=tmp_path / "run", **options) as audit:
            for optimizer in (slow, fast, fast) * 3:
                optimizer.zero_grad()
                models[optimizer is fast](torch.ones(1, 4)).sum().backward()
                optimizer.step()
        return audit

    assert train().step == 6
    assert train(resume=True).trouble is None
    said, steps = capsys.readouterr().err, hu.Trace.open(tmp_path / "run").steps.tolist()
    if named:
        assert "is taken for step 7, as the optimizer has counted.\n" in said
        assert steps == list(range(1, 13))
    else:
        assert "But the steps of this trace are not those that its optimizer had counted: if it goes" in said
        assert steps == list(range(1, 7))


def test_a_state_that_is_there_from_the_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Adagrad has one before its first step, which says that there was none."""
    for resume in (False, True):
        model = torch.nn.Linear(4, 4)
        stepped(model, torch.optim.Adagrad(model.parameters()), 3 + resume, out=tmp_path, resume=resume)
    assert capsys.readouterr().err.endswith("is taken for step 1.\n")
    assert hu.Trace.open(tmp_path).last_step == 4
