"""Alerts: when they speak, when they stop, and that idle weights are no loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import halfulp as hu
from halfulp.cli import app

SCRIPT = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(32, 32).bfloat16()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-7)
for _ in range(6):
    optimizer.zero_grad()
    model(torch.randn(4, 32).bfloat16()).square().mean().backward()
    optimizer.step()
open("finished", "w").close()
"""


def summary(step: int, **lost: float) -> dict[str, Any]:
    return {"step": step, "frozen": {"bf16": 0.0}, "tensors": {n: {"bf16": x} for n, x in lost.items()}}


def test_a_tensor_is_named_after_n_steps_in_a_row_and_again_after_it_recovered(
    capsys: pytest.CaptureFixture[str],
) -> None:
    alert = hu.audit.Alert(above=0.9, steps=2)
    for step, share in enumerate((0.95, 0.5, 0.95, 0.95, 0.95, 0.1, 0.91, 0.99), 1):
        alert(summary(step, w=share, other=0.0))
    assert [line.split("at step ")[1] for line in alert.messages] == ["4.", "8."]
    with pytest.deprecated_call(match=r"Alert\.told is now Alert\.messages"):
        assert alert.told == alert.messages
    assert capsys.readouterr().err.count("ALERT: w lost more than 90%") == 2
    with pytest.raises(SystemExit) as stopped:
        hu.audit.Alert(above=0.9, steps=1, stop=True, grid="bf16")(summary(1, w=0.99))
    assert stopped.value.code == 1
    hu.audit.Alert(above=0.9, steps=1, stop=True, grid="e5m2")(summary(1, w=0.99))


def test_weights_without_a_proposal_are_no_loss() -> None:
    """Rows of an embedding that no token asked for do not change, and nothing of theirs is lost."""
    torch.manual_seed(0)
    model = torch.nn.Embedding(50, 16)
    opt = torch.optim.SGD(model.parameters(), lr=10.0)
    with hu.Audit(opt, ["bf16"], model=model) as audit:
        model(torch.tensor([3])).square().sum().backward()
        opt.step()
    assert audit.latest["tensors"]["weight"]["bf16"] == 0.0


def test_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    run = CliRunner()
    common = ["audit", "--grids", "bf16", "--alert"]
    done = run.invoke(app, [*common, "90%:3", "--stop", "--out", "stopped", "train.py"])
    assert done.exit_code == 1
    assert not (tmp_path / "finished").exists()
    assert hu.Trace.open(tmp_path / "stopped").steps.tolist() == [1, 2, 3]
    assert run.invoke(app, [*common, "90%:3", "--out", "warned", "train.py"]).exit_code == 0
    assert (tmp_path / "finished").exists()
    for wrong in (["90:3", "train.py"], ["100%:3", "train.py"], ["", "--stop", "train.py"]):
        assert isinstance(run.invoke(app, [*common, *wrong]).exception, hu.UsageError)
    assert hu.verdict(hu.Trace.open(tmp_path / "warned")).headline


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--stop"], "--stop goes with --alert, such as"),
        (["--alert", "95"], "--alert takes a share and a number of steps"),
        (["--rehearse", "bf16:eco("], "'bf16:eco(' has a bracket that is not closed"),
        (["--grids", "bf16)"], "'bf16)' has a bracket that is not closed, or not opened"),
        (["--alert", ""], "--alert is empty: give it a value, or leave it out"),
        (["--rehearse", ""], "--rehearse is empty"),
        (["--evaluate", ""], "--evaluate is empty"),
        (["--scores", ""], "--scores is empty"),
        (["--tile", "96"], "--tile goes with --scores"),
        (["--first-step", "0"], "first_step= takes a whole number, at least 1"),
    ],
)
def test_options_that_mean_nothing(options: list[str], said: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    found = CliRunner().invoke(app, ["audit", "--out", str(tmp_path / "run"), *options, str(script)])
    assert isinstance(found.exception, hu.UsageError)
    assert said in str(found.exception)
