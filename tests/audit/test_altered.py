"""Tensors that become others in mid-run, or come later: the training goes on, nothing false is recorded."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import halfulp as hu
from halfulp.errors import UsageError


def pair(bias: bool = True) -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 8, bias=bias), torch.nn.Linear(8, 8, bias=bias))


def resize(model: torch.nn.Sequential) -> None:
    model[1].weight.data = torch.randn(4, 8)
    if model[1].bias is not None:
        model[1].bias.data = torch.randn(4)


def train(
    model: torch.nn.Module, opt: torch.optim.Optimizer, steps: int, change: Callable[[], Any] = lambda: None
) -> None:
    """Some steps, with a change before the third; two micro-batches each."""
    for step in range(1, steps + 1):
        if step == 3:
            change()
        opt.zero_grad()
        for _ in range(2):
            model(torch.ones(2, 8, dtype=next(model.parameters()).dtype)).square().sum().backward()
        opt.step()


def altered(model: torch.nn.Module, opt: torch.optim.Optimizer, change: Callable[[Any], Any]) -> None:
    torch.manual_seed(1)
    change(model)
    opt.state.clear()  # momentum of another shape is of no use


@pytest.mark.parametrize("single", [True, False], ids=["one tensor", "a batch"])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            torch.nn.Module.bfloat16,
            "'0.weight' was float32 [8, 8] on cpu when the audit began and is bfloat16 ",
        ),
        (torch.nn.Module.double, "and is float64 [8, 8] on cpu now"),
        (
            resize,
            "'1.weight' was float32 [8, 8] on cpu when the audit began and is float32 [4, 8] on cpu now",
        ),
    ],
    ids=["narrower", "wider", "another shape"],
)
def test_a_tensor_that_becomes_another_ends_the_recording(
    single: bool, change: Any, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also of its moments and gradients; the training is the one without an audit."""
    ended = []
    for audited in (False, True):
        model = pair(bias=not single)
        named = dict(model.named_parameters())
        if single:
            named = {"1.weight": named["1.weight"]} if change is resize else {"0.weight": named["0.weight"]}
        opt = torch.optim.SGD(named.values(), lr=1e-3, momentum=0.9)
        prepare = functools.partial(altered, model, opt, change)
        if not audited:
            train(model, opt, 6, prepare)
        else:
            options: Any = {"states": True, "rehearse": "e5m2", "listeners": [lambda _: None]}
            with hu.Audit(opt, ["bf16"], model=model, out=tmp_path / "run", **options) as audit:
                train(model, opt, 6, prepare)
                assert audit.evaluate(lambda: 1.0).losses == {}
            assert audit.trouble is not None
            assert said in audit.trouble
        ended.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*ended, strict=True))
    assert capsys.readouterr().err.count("was given up after step 2") == 1
    trace = hu.Trace.open(tmp_path / "run")
    assert trace.last_step == 2
    assert len(trace.scan("tensors").to_polars()) == 2 * (1 if single else 4)
    assert {t["dtype"] for t in trace.tensors} == {"float32"}
    assert trace.roles["momentum_buffer"].last_step == 2
    assert trace.roles["grad"].last_step <= 2  # of tensors that are what they were
    assert trace.never_moved("bf16").shape == (2,)


def test_a_moment_that_becomes_another_ends_its_role_alone(capsys: pytest.CaptureFixture[str]) -> None:
    model, memory = pair(), hu.Memory()
    opt = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def narrow() -> None:
        for state in opt.state.values():
            state["momentum_buffer"] = state["momentum_buffer"].double()

    with hu.Audit(opt, ["bf16"], model=model, out=memory, states=True) as audit:
        train(model, opt, 5, narrow)
    assert audit.trouble is None
    assert memory.last_step == 5
    assert memory.roles["momentum_buffer"].last_step == 2
    assert capsys.readouterr().err.count("was given up after step 2: '0.weight' was float32") == 1


class Shrinking(torch.optim.SGD):
    """An optimizer that prunes in its third step."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for p in self.param_groups[0]["params"] if self.param_groups[0].get("prunes") else ():
            p.data = p.data[:4].clone()


def test_a_step_that_changes_the_shape(capsys: pytest.CaptureFixture[str]) -> None:
    model, memory = torch.nn.Linear(8, 8), hu.Memory()
    opt = Shrinking(model.parameters(), lr=1e-3)
    with hu.Audit(opt, ["bf16"], model=model, out=memory) as audit:
        train(model, opt, 5, lambda: opt.param_groups[0].update(prunes=True) or None)
        assert model.weight.shape == (4, 8)
    assert audit.trouble is not None
    assert memory.last_step == 2


@pytest.mark.parametrize("unfit", ["raise", "drop"])
@pytest.mark.parametrize("part_steps", [2, 500])
@pytest.mark.parametrize("apart", [True, False], ids=["another optimizer", "another group"])
def test_tensors_that_come_later_and_do_not_fit_are_left_out(
    apart: bool, part_steps: int, unfit: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether a part was just written or not, and whatever is done with such grids before the first step."""
    model, late = pair(), torch.nn.Linear(8, 8).bfloat16()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    added = torch.optim.SGD(late.parameters(), lr=0.1) if apart else None
    options: Any = {"unfit": unfit, "part_steps": part_steps, "out": tmp_path / "run"}
    with hu.Audit(None, ["bf16", "fp16"], **options) as audit:
        train(model, opt, 2)
        if added is None:
            opt.add_param_group({"params": list(late.parameters())})
        for _ in range(3):
            before = late.weight.detach().clone()
            opt.zero_grad()
            for each, dtype in ((late, torch.bfloat16), (model, torch.float32)):
                each(torch.ones(1, 8, dtype=dtype)).square().sum().backward()
            if added is not None:  # its step is the first after a part
                added.step()
            opt.step()
    assert audit.trouble is None
    assert not torch.equal(before, late.weight)
    said = capsys.readouterr().err
    assert said.count("weight' and 1 more tensor came after the first audited step") == 1
    assert "left out: grid fp16 does not fit bfloat16" in said
    trace = hu.Trace.open(tmp_path / "run")
    assert trace.grids == ["bf16", "fp16"]
    assert trace.last_step == 5
    assert len(trace.tensors) == 4


def test_a_tensor_that_cannot_be_rehearsed_and_comes_later_ends_the_recording(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Before the first step it is refused."""
    model, late, memory = pair(), torch.nn.Linear(8, 8), hu.Memory()
    stored = hu.WriteBack(torch.optim.SGD(late.parameters(), lr=1e-3), "bf16", "rne", model=late)
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    late(torch.ones(1, 8)).sum().backward()
    with (
        hu.Audit(None, ["bf16"], rehearse="e5m2"),
        pytest.raises(UsageError, match="written back to bf16 already"),
    ):
        stored.step()
    with hu.Audit(None, ["bf16"], out=memory, rehearse="e5m2") as audit:
        train(model, opt, 2)
        stored.step()
        train(model, opt, 2)
    assert audit.trouble is not None
    assert "written back to bf16 already" in audit.trouble
    assert memory.last_step == 2
    assert capsys.readouterr().err.count("given up") == 1
