"""``halfulp pilot``: an unmodified script, its twins, and what cannot be done is said."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
import warm
from typer.testing import CliRunner

from halfulp.cli import app
from halfulp.errors import UsageError
from halfulp.pilots import scripts
from halfulp.pilots.scripts import ScriptError, ScriptPilot

SCRIPT = """
import argparse
from pathlib import Path
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=16)
parser.add_argument("--fail", action="store_true")
parser.add_argument("--store")
given = parser.parse_args()
with open("calls", "a") as calls:
    print(given.batch, file=calls)
if given.fail:
    raise SystemExit(3)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
held_out = torch.randn(256, 16)
if given.store:
    import halfulp as hu
    optimizer = hu.WriteBack(optimizer, *given.store.split(":"), model=model)


@torch.no_grad()
def evaluate():
    return {"val": torch.nn.functional.cross_entropy(model(held_out), held_out[:, :4].argmax(dim=1)).item()}


for step in range(1, 41):
    x = torch.randn(16, 16)[: given.batch]
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(x), x[:, :4].argmax(dim=1)).backward()
    optimizer.step()
    schedule.step()
    if step % 20 == 0:
        print(step, repr(evaluate()["val"]), flush=True)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script's runs are forks of a process that has torch; one test has interpreters of its own."""
    monkeypatch.setattr(scripts.subprocess, "run", warm.as_subprocess)


def pilot(**more: object) -> ScriptPilot:
    given: dict[str, object] = {
        "script": Path("train.py"), "arguments": [], "formats": ["e5m2", "e5m2:sr"],
        "evaluate": "evaluate:val",
        "budget": 10.0, "out": Path("out"), "small": ["--batch", "2"], **more,
    }  # fmt: skip
    return ScriptPilot(**given)  # type: ignore[arg-type]  # by name


def by_hand(capsys: pytest.CaptureFixture[str], *arguments: str) -> float:
    """The last number that the script prints, run as it is."""
    before, sys.argv = sys.argv, ["train.py", *arguments]
    try:
        runpy.run_path("train.py", run_name="__main__")
    finally:
        sys.argv = before
    return float(capsys.readouterr().out.split()[-1])


@pytest.mark.usefixtures("forked")
def test_a_script_and_its_twins_are_the_runs_by_hand(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = pilot().run()
    plain, small = by_hand(capsys), by_hand(capsys, "--batch", "2")
    assert found.reference == plain
    assert found.updates == 40
    assert found.weights == 16 * 64 + 64 * 4
    for spec in ("e5m2", "e5m2:sr"):
        grid, _, policy = spec.partition(":")
        twin = found[spec].seen.twin
        assert twin is not None
        assert twin.reference == small
        assert twin.real == by_hand(capsys, "--batch", "2", "--store", f"{grid}:{policy or 'rne'}")
    assert found["e5m2"].seen.upper > found["e5m2"].seen.reference
    assert found["e5m2"].seen.floor >= 0.01
    assert not found.notes
    assert found.paid["twins"] > 0
    calls = (here / "calls").read_text()
    again = pilot().run()
    assert (here / "calls").read_text() == calls
    assert again.to_json() == found.to_json()
    with pytest.raises(UsageError, match=r"asked something else \(small differ"):
        pilot(small=["--batch", "3"]).run()


def test_the_command_prints_the_table_or_json(here: Path) -> None:
    asked = ["pilot", "--formats", "e5m2", "--evaluate", "evaluate:val", "--out", "out", "train.py"]
    found = CliRunner().invoke(app, asked)
    assert found.exit_code == 0, found.output
    assert "What each format costs this run in loss" in found.output
    assert "rehearsed point, nothing paid" in found.output
    assert "--small '--batch_size 1'" in found.output
    told = json.loads(CliRunner().invoke(app, [*asked[:1], "--json", *asked[1:]]).stdout)
    assert told["formats"][0]["format"] == "e5m2"
    assert told["formats"][0]["kind"] == "free"


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("more", "error", "said"),
    [
        ({"small": ["--batch", "16"]}, UsageError, "runs as without"),
        ({"arguments": ["--fail"]}, ScriptError, "the script ended with exit code 3"),
        ({"small": ["--batch=2", "--fail"]}, ScriptError, "its twin ended with exit code 3.*is in out"),
        ({"script": Path("other.py")}, UsageError, "no script at"),
    ],
)
def test_what_cannot_be_done_is_said(
    here: Path, more: dict[str, object], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        pilot(**more).run()


SLOW = """
    end = time.process_time() + 0.2 * (given.batch == 2)
    while time.process_time() < end:
        pass
    if given.batch == 2:
        print(step, file=open("steps", "w"))
"""


@pytest.mark.usefixtures("forked")
def test_a_twin_that_would_take_too_long_ends_itself_at_once(here: Path) -> None:
    slow = SCRIPT.replace("    x = torch.randn(16, 16)", SLOW + "    x = torch.randn(16, 16)")
    (here / "train.py").write_text("import time\n" + slow)
    found = pilot(budget=4.0).run()
    assert int((here / "steps").read_text()) <= 12
    assert "for want of budget: it would take" in found.notes[0]
    assert "3 are needed. A --budget of" in found.notes[0]
    assert all(p.estimate.kind == "free" for p in found.prices)


@pytest.mark.usefixtures("forked")
def test_a_twin_of_another_length_is_refused(here: Path) -> None:
    (here / "train.py").write_text(
        SCRIPT.replace("range(1, 41)", "range(1, 41 if given.batch == 16 else 61)")
    )
    with pytest.raises(UsageError, match=r"60 updates, and 40 without"):
        pilot().run()


@pytest.mark.usefixtures("forked")
def test_a_training_without_a_module_is_refused(here: Path) -> None:
    (here / "train.py").write_text(SCRIPT.replace("model(", "torch.nn.functional.linear(model[0].weight, "))
    with pytest.raises(ScriptError):
        pilot().run()


LOADED = """
import argparse
import torch
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--first", type=int, default=16)
parser.add_argument("--store")
given = parser.parse_args()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
x = torch.randn(320, 16)
data = TensorDataset(x, x[:, :4].argmax(dim=1))
if given.store:
    import halfulp as hu
    optimizer = hu.WriteBack(optimizer, *given.store.split(":"), model=model)


def test(loader):
    "Only prints its loss."
    model.eval()
    loss = 0.0
    for x, y in loader:
        loss += torch.nn.functional.cross_entropy(model(x), y).item() / len(loader)
    print(repr(loss))


for epoch in range(2):
    model.train()
    for x, y in DataLoader(data, batch_size=16, shuffle=True):
        x, y = x[: given.first], y[: given.first]
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    test(DataLoader(data, batch_size=100))
"""


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(("small", "first"), [([], "2"), (["5"], "5")])
def test_batches_of_a_loader_are_cut_without_arguments(
    here: Path, capsys: pytest.CaptureFixture[str], small: list[str], first: str
) -> None:
    """And the loss is a variable of a function that only prints it."""
    (here / "train.py").write_text(LOADED)
    found = pilot(small=small, formats=["e5m2"], evaluate="test:loss").run()
    twin = found["e5m2"].seen.twin
    assert twin is not None
    assert (found.reference, found.updates) == (by_hand(capsys), 40)
    assert twin.reference == by_hand(capsys, "--first", first)
    assert twin.real == by_hand(capsys, "--first", first, "--store", "e5m2:rne")


@pytest.mark.usefixtures("forked")
def test_more_sequences_than_a_loader_gives_are_refused(here: Path) -> None:
    with pytest.raises(UsageError, match=r"--small 4: .*gave this script has none\. A script that draws"):
        pilot(small=["4"]).run()
    (here / "train.py").write_text(LOADED)
    with pytest.raises(UsageError, match=r"gave this script has 16\."):
        pilot(small=["16"], evaluate="test:loss", out=Path("other")).run()


@pytest.mark.usefixtures("forked")
def test_what_a_killed_pilot_left_is_not_taken_for_its_reference(here: Path) -> None:
    found = pilot(formats=["bf16"], budget=0.0).run()
    Path("out/pilot.json").unlink()
    again = pilot(budget=0.0).run()
    assert [p.spec for p in again.prices] == ["e5m2:sr", "e5m2"]
    assert again.reference == found.reference


@pytest.mark.usefixtures("forked")
def test_a_reference_that_loses_updates_itself_is_said(here: Path) -> None:
    low = SCRIPT.replace("256, 16)", "256, 16).bfloat16()").replace("16, 16)[", "16, 16).bfloat16()[")
    low = low.replace("optimizer = torch", "model.bfloat16()\noptimizer = torch", 1)
    (here / "train.py").write_text(low)
    found = pilot(formats=["bf16:sr"], budget=0.0).run()
    assert "this run itself stores weights in bfloat16" in found.notes[0]
    assert "gaps are over this run" in found.notes[0]
