"""What a failed call must leave alone."""

from __future__ import annotations

import copy
from typing import Any

import torch
from oracle import assert_same

import halfulp as hu


def everything(model: torch.nn.Module, opt: hu.WriteBack) -> dict[str, Any]:
    """All that a failed call must leave alone."""
    state = opt.state_dict()
    flat = {f"{k}.{n}": v for k, entry in state["state"].items() for n, v in entry.items()}
    groups = [{k: v for k, v in g.items() if k != "params"} for g in state["param_groups"]]
    return copy.deepcopy({"steps": opt.steps, "groups": groups, **flat, **model.state_dict()})


def assert_unchanged(before: dict[str, Any], model: torch.nn.Module, opt: hu.WriteBack) -> None:
    after = everything(model, opt)
    assert set(after) == set(before)
    for key, value in before.items():
        if isinstance(value, torch.Tensor):
            assert_same(after[key], value, key)
        else:
            assert after[key] == value, key
