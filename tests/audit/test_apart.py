"""As-if calls of a script's evaluation leave its variables and its files alone."""

from __future__ import annotations

import functools
import io
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.utils.data import DataLoader, TensorDataset

import halfulp as hu
from halfulp.audit.script import own_evaluation
from halfulp.audit.script.apart import ApartError, can_fork, in_fork, in_place
from halfulp.audit.script.own_evaluation import OwnEvaluation

forks = pytest.mark.skipif(not can_fork(), reason="no process is forked here")

SCRIPT = """
import torch

torch.manual_seed(0)
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
best, bad, history = 1e9, 0, []


def evaluate():
    global best, bad
    loss = model(torch.ones(1, 8)).square().sum().item()
    history.append(loss)
    print(loss, file=log, flush=True)
    if loss < best:
        best, bad = loss, 0
        torch.save(model.state_dict(), "best.pt")
    else:
        bad += 1
    return loss


log = open("log.txt", "w")
for step in range(40):
    optimizer.zero_grad()
    model(torch.randn(3, 8)).square().sum().backward()
    optimizer.step()
    if step % 2 == 0:
        evaluate()
        if bad >= 2:
            break
print(step, history, *(p.double().sum().item() for p in model.parameters()))
"""


def test_early_stopping_and_the_best_weights_are_those_of_the_run_alone(tmp_path: Path) -> None:
    """The evaluation stops early by its own counters, saves the best weights, and writes a log."""
    options = ["-m", "halfulp", "audit", "--rehearse", "e5m2", "--evaluate", "evaluate", "--no-weights"]
    options += ["--out", "trace"]
    said = []
    for name, command in (("plain", []), ("audited", options)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.py").write_text(SCRIPT)
        done = subprocess.run(
            [sys.executable, *command, "train.py"], cwd=tmp_path / name, capture_output=True, text=True,
            timeout=240, check=True,
        )  # fmt: skip
        said.append(done.stdout)
    assert said[0] == said[1]
    for file in ("best.pt", "log.txt"):
        assert (tmp_path / "plain" / file).read_bytes() == (tmp_path / "audited" / file).read_bytes()
    trace = hu.Trace.open(tmp_path / "audited" / "trace")
    assert set(trace.forecast("e5m2").losses["step"].tolist()) == set(range(1, 41, 2))


@forks
@pytest.mark.parametrize("threads", [1, 2])
def test_a_fork_gives_the_same_number_to_the_bit(threads: int) -> None:
    """OpenMP's threads are gone in a fork: no sum may wait for them, nor be made in another order."""
    x, weight = torch.randn(1 << 20), torch.randn(512, 512)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:

        def loss() -> float:
            return float((weight @ weight).square().mean() + x.exp().sum())

        here = loss()
        assert in_fork(loss, 60)[0] == here
        assert loss() == here
    finally:
        torch.set_num_threads(before)


@forks
def test_a_fork_shares_no_file_with_its_parent(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"0123456789")
    reading, writing = os.pipe()
    os.write(writing, b"a batch")
    with (tmp_path / "data").open("rb", buffering=0) as data, (tmp_path / "log").open("w") as log:
        data.read(3)

        def loss() -> float:
            log.write("as if")
            log.flush()
            (tmp_path / "best").write_text("as if")
            save_file({"w": torch.ones(2)}, tmp_path / "best.safetensors")
            np.save(tmp_path / "best.npy", np.ones(2))
            assert os.read(reading, 7) == b""
            return float(data.read(4))

        assert in_fork(loss, 60)[0] == 3456.0
        assert data.read(4) == b"3456"
    assert os.read(reading, 7) == b"a batch"
    os.close(reading)
    os.close(writing)
    assert {f.name for f in tmp_path.iterdir()} == {"data", "log"}
    assert (tmp_path / "log").read_text() == ""
    for change in (lambda: os.replace(tmp_path / "log", tmp_path / "x"), lambda: os.open("x", os.O_CREAT)):
        with pytest.raises(ApartError, match="PermissionError: it changes files"):
            in_fork(lambda change=change: float(change() or 0), 60)  # type: ignore[misc]  # bound now


@forks
def test_a_fork_that_gives_no_number_says_why() -> None:
    with pytest.raises(ApartError, match="ValueError: no data"):
        in_fork(lambda: _fail(ValueError("no data")), 60)
    with pytest.raises(ApartError, match="did not end within 0 s"):
        in_fork(lambda: float(time.sleep(60) or 0), 0.2)
    with pytest.raises(ApartError, match="the process forked for it died"):
        in_fork(lambda: os._exit(3), 60)


@forks
def test_workers_of_a_loader_serve_a_fork_of_its_own() -> None:
    data = TensorDataset(torch.arange(8.0))

    def loss() -> float:
        return float(sum(x.sum() for (x,) in DataLoader(data, batch_size=2, num_workers=1)))

    training = iter(DataLoader(data, batch_size=2, num_workers=1))
    first = next(training)[0].sum()
    assert in_fork(loss, 120)[0] == 28.0
    assert first + sum(x.sum() for (x,) in training) == 28.0


@forks
def test_workers_that_persist_stay_their_loaders_own() -> None:
    data = TensorDataset(torch.arange(8.0))
    loader = DataLoader(data, batch_size=2, num_workers=1, persistent_workers=True)
    held = [iter(DataLoader(data, batch_size=2, num_workers=1))]

    def loss() -> float:
        held.clear()  # which ends its workers, but not those of the parent
        return float(sum(x.sum() for (x,) in loader))

    assert sum(x.sum() for (x,) in loader) == 28.0
    assert in_fork(loss, 120)[0] == 28.0
    assert sum(x.sum() for (x,) in loader) == 28.0
    with pytest.raises(ApartError, match="Error"):
        in_fork(lambda: float(next(held[0])[0].sum()), 120)
    assert sum(x.sum() for (x,) in held[0]) == 28.0


def test_without_a_fork_variables_are_put_back_and_files_are_not_written(tmp_path: Path) -> None:
    class State:
        bad, seen = 0, [1.0]

    state, best = State(), 5.0
    state.bad = 0
    losses: list[float] = []

    def pure() -> float:
        torch.save({"w": torch.ones(2)}, tmp_path / "best.pt")
        (tmp_path / "best").write_text("as if")
        return 2.0

    def evaluate(self: State) -> float:
        nonlocal best
        best, self.bad = 2.0, self.bad + 1
        losses.append(best)
        return best

    assert in_place(functools.partial(pure), float)[0] == 2.0
    with pytest.raises(ApartError, match=r"it changes self\.bad, best, losses, which were put back"):
        in_place(functools.partial(evaluate, state), float)
    assert (best, state.bad, losses) == (5.0, 0, [])
    assert not list(tmp_path.iterdir())
    torch.save({"w": torch.ones(2)}, tmp_path / "own.pt")
    assert (tmp_path / "own.pt").stat().st_size > 0
    torch.save({"w": torch.ones(2)}, buffer := io.BytesIO())
    assert buffer.tell() > 0


def test_without_a_fork_an_evaluation_that_keeps_something_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(own_evaluation, "can_fork", lambda: False)
    model, seen = torch.nn.Linear(4, 4), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own = OwnEvaluation("evaluate")

    def loss() -> float:
        seen.append(1)
        return 1.0

    evaluate = own(loss)
    with hu.Audit(optimizer, ["bf16"], model=model, rehearse=["e5m2"], out=tmp_path / "t") as own.audit:
        for _ in range(3):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            assert evaluate() == 1.0
    assert len(seen) == 3
    said = capsys.readouterr().err
    assert (
        said.count("evaluate() could not be called again as if (it changes seen, which were put back)") == 1
    )
    assert list(hu.Trace.open(tmp_path / "t").real_losses()) == [1, 2, 3]


def _fail(error: Exception) -> Any:
    raise error
