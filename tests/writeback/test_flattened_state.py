"""torch's flattened optimizer state: taken up bit for bit, and not half loaded by torch's own function."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import halfulp as hu
from halfulp.writeback import unflattened

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Named(torch.nn.Module):
    """A name that begins like another's: ``a`` and ``a_.a``, with a parameter beside a module of its name."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = torch.nn.ModuleDict({"b": torch.nn.Linear(8, 8)})
        self.a.register_parameter("weight", torch.nn.Parameter(torch.randn(8)))

    def forward(self, x: torch.Tensor) -> Any:
        return self.a["b"](x) * self.a.weight


def groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    """In another order than the model's, with other options for vectors."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    return [
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
        {"params": matrices},
    ]


def made(kind: str, model: torch.nn.Module) -> Any:
    if kind == "plain":
        return torch.optim.AdamW(groups(model), lr=1e-3, fused=True)
    if kind == "masters":
        inner = torch.optim.SGD(groups(model), lr=1e-2, momentum=0.9)
        return hu.WriteBack(inner, "bf16", "master", model=model)
    return hu.AdamW(groups(model), lr=1e-3, moments=kind)


def train(model: torch.nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).bfloat16()
        model(x).float().square().sum().backward()
        optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("kind", ["fp32", "bf16", "int8", "masters"])
def test_a_run_goes_on_from_a_flattened_state(kind: str) -> None:
    """Through a file, with another model's parameters beside it, as torchtitan saves all parts together."""
    model = Named().bfloat16()
    optimizer = made(kind, model)
    train(model, optimizer, range(3))
    other = torch.nn.Sequential(torch.nn.Linear(8, 8).bfloat16())
    beside = made(kind, other)
    train(other, beside, range(2))
    state = {
        **get_optimizer_state_dict(other, beside, options=FLAT),
        **get_optimizer_state_dict(model, optimizer, options=FLAT),
    }
    file = io.BytesIO()
    torch.save((state, model.state_dict()), file)
    train(model, optimizer, range(3, 6))

    file.seek(0)
    state, weights = torch.load(file, weights_only=True)
    again = Named().bfloat16()
    again.load_state_dict(weights)
    resumed = made(kind, again)
    resumed.load_state_dict(unflattened(state, resumed, again))
    train(again, resumed, range(3, 6))
    assert resumed.steps == 6
    for (name, a), b in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("compiled", [False, True])
def test_wrappers_leave_names_alone_but_for_their_own_part(compiled: bool) -> None:
    """A name may end in ``module`` itself, and a checkpointed module's wrapper has a name that does."""
    model = torch.nn.Sequential()
    model.add_module("submodule", checkpoint_wrapper(torch.nn.Linear(8, 8)))
    model = model.bfloat16()
    whole: Any = torch.compile(model) if compiled else model
    optimizer = made("fp32", model)
    train(model, optimizer, range(3))
    state = get_optimizer_state_dict(whole, optimizer, options=FLAT)
    assert "state.submodule.weight.exp_avg" in state
    again = made("fp32", model)
    again.load_state_dict(unflattened(state, again, whole))
    assert again.steps == 3
    for p, q in zip(optimizer.slots, again.slots, strict=True):
        a, b = optimizer.optimizer.state[p.stepped], again.optimizer.state[q.stepped]
        assert torch.equal(a["exp_avg_sq"], b["exp_avg_sq"])


def test_a_plain_run_goes_on_under_a_write_back(caplog: pytest.LogCaptureFixture) -> None:
    model = Named().bfloat16()
    plain = made("plain", model)
    train(model, plain, range(3))
    state = get_optimizer_state_dict(model, plain, options=FLAT)
    moments = copy.deepcopy([plain.state[p]["exp_avg"] for g in plain.param_groups for p in g["params"]])
    optimizer = made("fp32", model)
    optimizer.load_state_dict(unflattened(state, optimizer, model))
    assert "saved without a write-back" in caplog.text
    for slot, moment in zip(optimizer.slots, moments, strict=True):
        assert torch.equal(optimizer.optimizer.state[slot.stepped]["exp_avg"].bfloat16(), moment)
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.0, 0.01]


def test_torchs_own_function_loads_it_or_nothing() -> None:
    """It would leave out what the new optimizer does not show: refused, with what to call instead."""
    model = Named().bfloat16()
    optimizer = made("fp32", model)
    train(model, optimizer, range(3))
    state = get_optimizer_state_dict(model, optimizer, options=FLAT)
    again = Named().bfloat16()
    with pytest.raises(hu.UsageError, match=r"the moments are lost.*halfulp.writeback.unflattened"):
        set_optimizer_state_dict(again, made("fp32", again), state, options=FLAT)


def test_one_that_is_not_flattened_is_resumed() -> None:
    model = Named().bfloat16()
    optimizer = made("fp32", model)
    train(model, optimizer, range(3))
    state = get_optimizer_state_dict(model, optimizer)
    again = Named().bfloat16()
    resumed = made("fp32", again)
    set_optimizer_state_dict(again, resumed, state)
    assert resumed.steps == 3


def test_what_does_not_fit() -> None:
    model = Named().bfloat16()
    optimizer = made("fp32", model)
    state = get_optimizer_state_dict(model, optimizer, options=FLAT)
    with pytest.raises(hu.UsageError, match="parameter 0 of the optimizer is not in the model"):
        unflattened(state, optimizer, Named())
    del state["param_groups.a.b.weight.lr"]
    without = {k: v for k, v in state.items() if ".a.b.weight." not in k}
    with pytest.raises(hu.UsageError, match=r"\('a.b.weight'\) is not in the flattened state"):
        unflattened(without, optimizer, model)
    with pytest.raises(hu.CorruptionError, match="it has 'lr', expected state"):
        unflattened({"lr": 1.0}, optimizer, model)
