"""torch's flattened optimizer state loses a write-back's when it is loaded: refused, not half loaded."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import halfulp as hu


def stepped(steps: int) -> tuple[torch.nn.Module, hu.WriteBack]:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8).bfloat16()
    optimizer = hu.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 8).bfloat16()).sum().backward()
        optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def test_a_flattened_state_is_refused() -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    state = get_optimizer_state_dict(*stepped(3), options=options)
    model, optimizer = stepped(0)
    with pytest.raises(hu.UsageError, match="nothing in it: the moments are lost"):
        set_optimizer_state_dict(model, optimizer, state, options=options)


def test_one_that_is_not_flattened_is_resumed() -> None:
    saved_model, saved = stepped(3)
    state = get_optimizer_state_dict(saved_model, saved)
    model, optimizer = stepped(0)
    set_optimizer_state_dict(model, optimizer, state)
    assert optimizer.steps == 3
