"""Audits of processes with several threads: whose steps are seen, and when an audit steps aside."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import halfulp as hu

Linear = tuple[torch.nn.Linear, torch.optim.SGD]
REASON = "steps in several threads at once cannot be told apart"


class Meeting(torch.optim.SGD):
    """Does something in the middle of every step."""

    inside: Callable[[], Any] = staticmethod(lambda: None)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # as simple as it can be
        self.inside()
        super().step()


def linear(kind: type[torch.optim.SGD] = torch.optim.SGD) -> Linear:
    model = torch.nn.Linear(4, 4)
    return model, kind(model.parameters(), lr=1e-3)


def train(made: Linear, steps: int = 1) -> None:
    model, optimizer = made
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()


def elsewhere(work: Callable[[], Any]) -> None:
    """In a thread of its own, to its end; never for ever."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "deadlock"
    if raised:
        raise raised[0]


def met(other: Callable[[], Any]) -> tuple[torch.nn.Linear, Meeting]:
    """A model whose optimizer has something done in another thread while it steps, once."""
    model, optimizer = linear(Meeting)
    assert isinstance(optimizer, Meeting)

    def once() -> None:
        optimizer.inside = lambda: None  # type: ignore[method-assign]  # of this one
        elsewhere(other)

    optimizer.inside = once  # type: ignore[method-assign]  # of this one
    return model, optimizer


@pytest.mark.parametrize("listened", [False, True])
def test_steps_of_threads_at_once_are_not_counted(
    tmp_path: Path, listened: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """What was recorded before is kept, the rest is left out, and it is said; both trainings go on."""
    first, second = linear(), linear()
    heard: list[int] = []
    listeners = [lambda told: heard.append(told["step"])] if listened else []
    overlapping = met(lambda: train(second, 2))
    with hu.Audit(None, ["bf16"], out=tmp_path / "run", listeners=listeners, rehearse="bf16") as audit:
        train(first, 3)
        train(overlapping, 2)
        train(first, 2)
    trace = hu.Trace.open(tmp_path / "run")
    assert audit.given_up
    assert audit.trouble is not None
    assert REASON in audit.trouble
    assert "It ends at step 3; the run went on without it. Audit the optimizer of one thread" in audit.trouble
    assert trace.last_step == 3
    assert trace.trouble == audit.trouble
    assert heard == ([1, 2, 3] if listened else [])
    assert hu.verdict(trace).lines[0] == f"INCOMPLETE: {audit.trouble}"
    assert capfd.readouterr().err.count(REASON) == 1


def test_an_audit_in_memory_and_one_of_nothing() -> None:
    memory = hu.Memory()
    with hu.Audit(None, ["bf16"], out=memory) as audit, hu.Audit(None, ["bf16"]) as alone:
        train(met(lambda: train(linear())), 2)
    for one in (audit, alone):
        assert one.trouble is not None
        assert REASON in one.trouble
    assert not memory.parts


def test_three_threads_that_train_at_once() -> None:
    """However they interleave: there are too many steps for none to begin within another."""
    barrier = threading.Barrier(3)

    def work() -> None:
        made = linear()
        barrier.wait()
        train(made, 40)

    with hu.Audit(None, ["bf16"]) as audit, ThreadPoolExecutor(3) as pool:
        for done in [pool.submit(work) for _ in range(3)]:
            done.result(timeout=120)
    assert audit.given_up
    assert audit.trouble is not None


def test_a_step_that_begins_while_a_hook_is_at_work() -> None:
    """Also where the hooks of the first were over when the second came to its own."""
    first, second = linear(), linear()
    begun = threading.Event()
    thread = threading.Thread(target=lambda: (begun.wait(60), train(second)), daemon=True)

    def listener(_: object) -> None:
        if not begun.is_set():
            begun.set()
            thread.join(0.5)  # its step waits for this hook

    with hu.Audit([first[1], second[1]], ["bf16"], listeners=[listener]) as audit:
        thread.start()
        train(first, 1)
        train(second, 1)
        thread.join(60)
    assert not thread.is_alive()
    assert audit.given_up


def test_steps_of_threads_one_after_the_other(tmp_path: Path) -> None:
    made = linear()
    with hu.Audit(None, ["bf16"], out=tmp_path / "run") as audit:
        for _ in range(4):
            elsewhere(lambda: train(made))
            train(made)
    assert audit.trouble is None
    assert hu.Trace.open(tmp_path / "run").last_step == 8


def test_an_audit_of_one_optimizer_does_not_see_other_threads(tmp_path: Path) -> None:
    """The same trace as alone, whatever else steps in the middle of it."""
    shares = []
    for name, others in (("alone", 0), ("not", 3)):
        torch.manual_seed(0)
        made = met(lambda n=others: train(linear(), n))  # type: ignore[misc]  # bound now
        with hu.Audit(made[1], ["bf16"], out=tmp_path / name) as audit:
            train(made, 4)
        assert audit.trouble is None
        shares.append(hu.Trace.open(tmp_path / name).frozen("bf16"))
    np.testing.assert_array_equal(*shares)


def test_a_step_that_raises_is_not_open_for_other_threads() -> None:
    """Neither one that raised in a thread that is over, nor in one that goes on."""
    broken = met(lambda: torch.ones(2) @ torch.ones(3))
    second = linear()
    with hu.Audit(None, ["bf16"]) as audit:
        with pytest.raises(RuntimeError):
            train(broken)
        elsewhere(lambda: train(second))
        again = met(lambda: torch.ones(2) @ torch.ones(3))
        with pytest.raises(RuntimeError):
            elsewhere(lambda: train(again))
        train(second)
    assert audit.trouble is None
    assert audit.step == 2


def test_steps_inside_steps_and_backwards() -> None:
    """An optimizer that steps another, a write-back, steps in hooks of backward; in two threads in turn."""
    inner, outer = linear(), linear(Meeting)
    outer[1].inside = lambda: train(inner)  # type: ignore[attr-defined]  # of this one
    stored = linear()
    wrapped = (stored[0], hu.WriteBack(stored[1], "bf16", model=stored[0]))
    model, optimizer = linear()
    weight: Any = model.weight
    weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())

    def all_of_them() -> None:
        train(outer, 2)
        train(wrapped, 2)  # type: ignore[arg-type]  # which is stepped as the other is
        for _ in range(2):
            model(torch.ones(1, 4)).sum().backward()

    with hu.Audit(None, ["bf16"]) as audit:
        all_of_them()
        elsewhere(all_of_them)
    assert audit.trouble is None
    assert audit.step > 0
