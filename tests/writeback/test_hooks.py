"""Who is called at a step: hooks of all optimizers and of this one once, however the weights move."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from oracle import assert_same
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from writeback_models import Tied, loss_of

import halfulp as hu
from halfulp.writeback import WriteBackOptions
from halfulp.writeback import slot as slots

STORED: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "container": (torch.float32, {}),
    "native": (torch.bfloat16, {}),
    "all at once": (torch.bfloat16, {"options": WriteBackOptions(materialise="all")}),
    "packed": (torch.float32, {"storage": "packed"}),
}
pytestmark = pytest.mark.usefixtures("one_thread")


class Heard:
    """Counts of hooks, by what they were registered for, while they are attached."""

    def __init__(self, opt: hu.WriteBack, inner: bool) -> None:
        self.calls: list[tuple[str, str]] = []
        own = [("inner", opt.optimizer)] if inner else []
        self._handles = [
            register_optimizer_step_pre_hook(self._note("all, before")),
            register_optimizer_step_post_hook(self._note("all, after")),
        ]
        for name, optimizer in [("outer", opt), *own]:
            self._handles += [
                optimizer.register_step_pre_hook(self._note(f"{name}, before")),
                optimizer.register_step_post_hook(self._note(f"{name}, after")),
            ]

    def _note(self, what: str) -> Any:
        return lambda optimizer, *_: self.calls.append((what, type(optimizer).__name__))

    def taken(self) -> list[tuple[str, str]]:
        found, self.calls = self.calls, []
        return found

    def __enter__(self) -> Heard:
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()


def made(storage: str, one_pass: bool = False) -> tuple[torch.nn.Module, hu.WriteBack]:
    dtype, how = STORED[storage]
    model = Tied().to(dtype)
    inner = torch.optim.AdamW(model.named_parameters(), lr=1e-2)
    options = replace(how.get("options", WriteBackOptions()), one_pass=one_pass)
    return model, hu.WriteBack(inner, "e4m3@16", "sr", model=model, **{**how, "options": options})


@pytest.mark.parametrize("room", [slots.ROOM, 1])
@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("one_pass", [False, True])
@pytest.mark.parametrize("storage", STORED)
def test_every_hook_fires_once_a_step(
    storage: str, one_pass: bool, inner: bool, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one pass, in two, and where two take several calls; the wrapped optimizer's own inside."""
    monkeypatch.setattr(slots, "ROOM", room)
    model, opt = made(storage, one_pass)
    expected = [("all, before", "WriteBack"), ("outer, before", "WriteBack")]
    expected += [("inner, before", "AdamW"), ("inner, after", "AdamW")] if inner else []
    expected += [("outer, after", "WriteBack"), ("all, after", "WriteBack")]
    with Heard(opt, inner) as heard:
        for step in range(3):
            loss_of(model, step).backward()
            opt.step()
            opt.zero_grad()
            assert heard.taken() == expected


def counted(opt: hu.WriteBack, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many parameters each call of the wrapped optimizer's own arithmetic is given."""
    found: list[int] = []
    module = sys.modules[torch.optim.AdamW.__base__.__module__]
    real = module.adam  # type: ignore[attr-defined]  # torch.optim takes the module's name away

    def adam(params: Any, *args: Any, **options: Any) -> Any:
        found.append(len(params))
        return real(params, *args, **options)

    monkeypatch.setattr(module, "adam", adam)
    return found


@pytest.mark.parametrize("storage", STORED)
def test_the_wrapped_optimizer_is_called_once_a_step(storage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all of its parameters: matrices on the grid, and norms and biases that are not."""
    model, opt = made(storage)
    found = counted(opt, monkeypatch)
    loss_of(model, 0).backward()
    opt.step()
    assert found == [len(list(model.parameters()))]


def test_stand_ins_are_no_more_at_a_time_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond what the largest tensor takes anyway; the weights are the same, and the bytes are counted."""
    runs, calls, peaks = [], [], []
    for room in (1, slots.ROOM):
        monkeypatch.setattr(slots, "ROOM", room)
        model, opt = made("native")
        with monkeypatch.context() as m:
            found = counted(opt, m)
            for step in range(3):
                loss_of(model, step).backward()
                opt.step()
                opt.zero_grad()
        runs.append(model.state_dict())
        calls.append(len(found) // 3)
        peaks.append(opt.bytes().step)
    sizes = [s.p.numel() for s in opt.slots]
    assert calls[1] == 1 < calls[0] <= len(sizes)
    assert peaks[1] == sum(sizes) * (4 + 4 + 2)
    for name, value in runs[0].items():
        assert_same(value, runs[1][name], name)


def test_hooks_of_the_wrapped_optimizer_may_change_arguments_and_weights() -> None:
    """As torch calls them: what a hook after the step does to the weights is written back, too."""
    p = torch.nn.Parameter(torch.ones(4, 4))
    inner = torch.optim.SGD([("p", p)], lr=1.0)
    opt = hu.WriteBack(inner, "bf16", "rne")
    given: list[Any] = []
    inner.register_step_pre_hook(lambda o, args, options: ((o,), {"closure": None}))
    inner.register_step_post_hook(lambda o, args, options: given.append((len(args), options)))
    inner.register_step_post_hook(lambda *_: p.data.fill_(1 / 3))
    p.grad = torch.ones(4, 4)
    opt.step()
    assert given == [(1, {"closure": None})]
    assert_same(p.detach(), torch.full((4, 4), 1 / 3).bfloat16().float())
    inner.register_step_pre_hook(lambda *_: "nothing")  # type: ignore[arg-type, return-value]  # not allowed
    before = p.detach().clone()
    with pytest.raises(RuntimeError, match="must return None or a tuple"):
        opt.step()
    assert_same(p.detach(), before)


@pytest.mark.parametrize("around", ["outer", "inner"])
def test_a_scheduler_sees_its_optimizer_step(around: str) -> None:
    """It warns where it does not, and warnings are errors here."""
    model, opt = made("native")
    scheduled = opt if around == "outer" else opt.optimizer
    scheduler = torch.optim.lr_scheduler.LambdaLR(scheduled, lambda n: 1.0 / (n + 1))
    for step in range(3):
        loss_of(model, step).backward()
        opt.step()
        scheduler.step()
        opt.zero_grad()
    assert scheduled.param_groups[0]["lr"] == 1e-2 / 4
