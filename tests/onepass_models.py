"""Models that are stepped in one pass and in two, side by side."""

from __future__ import annotations

from typing import Any

import torch

import halfulp as hu
from halfulp.writeback import WriteBackOptions


def model_of(dtype: torch.dtype) -> torch.nn.Sequential:
    torch.manual_seed(0)
    parts = [torch.nn.Linear(40, 50), torch.nn.LayerNorm(50), torch.nn.Linear(50, 33)]
    return torch.nn.Sequential(*parts).to(dtype)


def give_gradients(model: torch.nn.Module, step: int) -> None:
    made = torch.Generator().manual_seed(step)
    for p in model.parameters():
        p.grad = (torch.randn(p.shape, generator=made) * 1e-2).to(p.dtype)


def kept_of(opt: hu.WriteBack) -> list[dict[str, torch.Tensor]]:
    found = [dict(s.kept_tensors()) for s in opt.slots]
    return found + [dict(opt.optimizer.state[s.stepped]) for s in opt.slots]


def assert_same_dicts(a: Any, b: Any) -> None:
    for x, y in zip(a, b, strict=True):
        assert x.keys() == y.keys()
        for key in x:
            assert x[key].dtype == y[key].dtype, key
            assert torch.equal(x[key], y[key]), key


def sgd(model: torch.nn.Module, **options: Any) -> torch.optim.Optimizer:
    given = {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1, "fused": True, **options}
    return torch.optim.SGD(model.parameters(), **given)


def plain(model: torch.nn.Module, kind: Any = torch.optim.AdamW, **options: Any) -> torch.optim.Optimizer:
    return kind(model.parameters(), lr=1e-3, weight_decay=0.1, **options)


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return plain(model, fused=True)


def both(
    inner: Any,
    policy: str,
    grid: str,
    storage: Any,
    dtype: torch.dtype,
    model_of: Any = model_of,
    route: str = "one pass",
) -> None:
    """Twenty-four steps in one pass and in two, the first resumed in the middle."""

    def write_back(model: torch.nn.Module, once: bool) -> hu.WriteBack:
        return hu.WriteBack(
            inner(model), grid, policy, model=model, storage=storage, options=WriteBackOptions(one_pass=once)
        )

    models = [model_of(dtype), model_of(dtype)]
    one, two = write_back(models[0], True), write_back(models[1], False)
    for step in range(24):
        if step == 10:
            weights, state = models[0].state_dict(), one.state_dict()
            models[0] = model_of(dtype)
            models[0].load_state_dict(weights)
            one = write_back(models[0], True)
            one.load_state_dict(state)
        for model, opt in ((models[0], one), (models[1], two)):
            give_gradients(model, step)
            opt.step()
        assert {chosen.name for chosen in one.routes.values()} == {route}
        assert one.events.rows == two.events.rows
    assert_same_dicts([models[0].state_dict()], [models[1].state_dict()])
    assert_same_dicts(kept_of(one), kept_of(two))


def adamw(model: torch.nn.Module, **options: Any) -> hu.AdamW:
    return hu.AdamW(model.named_parameters(), lr=1e-3, weight_decay=0.1, moments="bf16", **options)
