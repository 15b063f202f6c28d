"""Twins and forks are the runs that one would make by hand, to the bit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pilots.pilot_run import BATCH, UPDATES, Single, Small, by_hand, counted

import halfulp as hu
from halfulp.errors import UsageError
from halfulp.pilots import run_states, rung_costs, rungs
from halfulp.pilots.pilot import Pilot

FORMATS = ("e4m3@128", "e5m2:sr")


class Watched(Small):
    """Notes the weights of every evaluation."""

    seen: list[list[torch.Tensor]]

    def evaluate(self) -> float:
        type(self).seen.append([p.detach().clone() for p in self.model.parameters()])
        return super().evaluate()


@pytest.fixture
def watched() -> type[Watched]:
    torch.manual_seed(5)
    return type("Here", (Watched,), {"seen": []})


def training(make: Any = Small, **more: Any) -> rungs.Factory:
    torch.manual_seed(5)
    return rungs.Factory(make=make, updates=UPDATES, formats=FORMATS, **more)


def same(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def hand(**how: Any) -> list[torch.Tensor]:
    torch.manual_seed(5)
    return [p.detach() for p in by_hand(**how).model.parameters()]


def test_the_reference_is_the_plain_run(watched: type[Watched]) -> None:
    """All evaluations but those before the run and as if."""
    found = rungs.reference(training(watched), fork_at={7}, bounds=("lower", "point", "upper"))
    assert same(watched.seen[1], hand())
    assert same(watched.seen[-1], hand())
    assert found.again == found.real
    assert set(found.as_if) == set(FORMATS)


@pytest.mark.parametrize("part", [None, 2])
def test_twins_are_runs_by_hand(watched: type[Watched], part: int | None) -> None:
    for spec in FORMATS:
        grid, _, policy = spec.partition(":")
        rungs.twin(training(watched), spec, part)
        assert same(watched.seen[-1], hand(spec=(grid, policy or "rne"), part=part or BATCH))


@pytest.mark.parametrize("spec", FORMATS)
@pytest.mark.parametrize("kept", [False, True])
def test_a_fork_is_a_run_by_hand(watched: type[Watched], tmp_path: Path, spec: str, kept: bool) -> None:
    """The reference to update 7, its codes, then the format; from memory and from a file."""
    what = training(watched)
    forked = rungs.reference(what, fork_at={7}, bounds=("point", "lower")).forked[7]
    if kept:
        run_states.save(forked, tmp_path / "forked.safetensors")
        forked = run_states.load(tmp_path / "forked.safetensors")
    grid, _, policy = spec.partition(":")
    for bound in ("point", "lower"):
        rungs.fork(what, spec, bound, forked)
        torch.manual_seed(5)
        run = Small()
        with hu.Audit(run.optimizer, grid, model=run.model, rehearse=[spec]) as audit:
            for update in range(1, 8):
                run.step(run.batch(update), update)
            with audit.as_if(spec, bound):
                codes = {n: p.detach().clone() for n, p in run.model.named_parameters()}
        with torch.no_grad():
            for n, p in run.model.named_parameters():
                p.copy_(codes[n])
        run.optimizer = hu.WriteBack(run.optimizer, grid, policy or "rne", model=run.model)
        for update in range(8, UPDATES + 1):
            run.step(run.batch(update), update)
        assert same(watched.seen[-1], [p.detach() for p in run.model.parameters()])


def test_a_nudged_run_ends_beside(watched: type[Watched]) -> None:
    rungs.nudged(training(watched), 2)
    one, other = watched.seen[-1], hand(part=2)
    assert not same(one, other)
    assert all(torch.allclose(a, b, atol=0.05) for a, b in zip(one, other, strict=True))  # 16 bits, 12 steps


def test_the_generators_are_left_as_they_were_found() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    Pilot(Small, FORMATS, updates=UPDATES, budget=1.0).run()
    assert torch.equal(before, torch.get_rng_state())


def test_a_step_that_goes_round_the_optimizer_is_refused() -> None:
    class Round(Small):
        def __init__(self) -> None:
            super().__init__()
            self.mine = self.optimizer

        def step(self, batch: Any, update: int) -> None:
            self.mine.step()

    with pytest.raises(UsageError, match=r"never called self\.optimizer\.step"):
        rungs.twin(training(Round), "e5m2", None)


def test_what_cannot_be_sliced_is_said() -> None:
    for batch in ("text", {"x": torch.zeros(3, 1), "y": torch.zeros(4)}, torch.tensor(1.0)):
        with pytest.raises(UsageError, match="first dimension"):
            rungs.size(batch)


KILLED = """
import os, signal, sys, torch
sys.path.insert(0, {tests!r})
from pilots.pilot_run import {kind} as Kind, counted
from halfulp.pilots.pilot import Pilot
count = 0
class Mortal(Kind):
    def step(self, batch, update):
        global count
        count += 1
        if count == {at}:
            os.kill(os.getpid(), signal.SIGKILL)
        super().step(batch, update)
torch.manual_seed(5)
pilot = Pilot(Mortal, {formats!r}, updates=12, budget=2.0, cost=counted, out={out!r})
print(pilot.run().to_json())
"""


@pytest.mark.parametrize(("kind", "at"), [(Small, 14), (Small, 55), (Single, 5), (Single, 15), (Single, 30)])
def test_a_killed_pilot_goes_on(tmp_path: Path, kind: type[Small], at: int) -> None:
    """In twins, in the reference and in forks; what it says in the end is what it would have said."""
    torch.manual_seed(5)
    whole = Pilot(kind, FORMATS, updates=UPDATES, budget=2.0, cost=counted).run().to_json()
    assert ("forks" in whole["paid"]) == (kind is Single)
    text = KILLED.format(
        tests=str(Path(__file__).parents[1]), at=at, formats=FORMATS, out=str(tmp_path), kind=kind.__name__
    )
    first = subprocess.run([sys.executable, "-c", text], capture_output=True, env=os.environ)
    assert first.returncode == -signal.SIGKILL, first.stderr.decode()
    torch.manual_seed(5)
    again = Pilot(kind, FORMATS, updates=UPDATES, budget=2.0, cost=counted, out=tmp_path).run().to_json()
    assert again == whole


def test_an_interval_between_saves_is_ignored_with_a_warning() -> None:
    with pytest.warns(DeprecationWarning, match="saves whole runs"):
        Pilot(Small, FORMATS, updates=2, save_every=1)


def test_another_question_is_refused(tmp_path: Path) -> None:
    Pilot(Small, FORMATS, updates=2, budget=0.0, out=tmp_path).run()
    with pytest.raises(UsageError, match="updates differ"):
        Pilot(Small, FORMATS, updates=3, budget=0.0, out=tmp_path).run()


def test_a_budget_in_time_buys_no_twin_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of a small model are Python: a sequence of eight takes most of the time of all of them."""
    torch.manual_seed(5)
    pilot = Pilot(Small, FORMATS, updates=UPDATES, budget=0.2)
    taken = rung_costs.measured(pilot.training, BATCH)
    assert min(taken.run, taken.measuring, taken.twin(1)) > 0
    long = replace(taken, run=1e6, rehearsals=0.1, parts={"1": 0.6, "4": 0.8}, stored=1.0, measuring=0.0)
    monkeypatch.setattr("halfulp.pilots.pilot.measured", lambda *_: long)
    found = pilot.run()
    assert not any("twins" in what for what in found.paid)
    assert found.paid.keys() <= {"rehearsals", "timing", "forks"}
    assert pilot._costs is not None
    assert 3 * pilot._costs.twin(1) > 0.2
    (note,) = (n for n in found.notes if "no twin" in n)
    assert "3 are needed" in note
    assert "A budget of" in note


def test_what_is_dearer_than_planned_is_not_gone_on_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every run takes two whole runs, whatever the plan thought."""

    def pay(pilot: Pilot, purpose: str, *_: float) -> None:
        pilot._spent[purpose] = pilot._spent.get(purpose, 0.0) + 2.0

    monkeypatch.setattr(Pilot, "_pay", pay)
    torch.manual_seed(5)
    found = Pilot(Small, FORMATS, updates=UPDATES, budget=3.0, cost=counted).run()
    assert sum(found.paid.values()) == 4.0  # the second began when a whole run was left
    assert "e5m2:sr: no twin was run, for it takes 200.0% of the run and 0.0% of the" in found.notes[0]
    assert found["e4m3@128"].seen.twin is not None
    assert found["e5m2:sr"].seen.twin is None
