"""A state and the weights beside it say the same thing twice: where they differ, loading says so."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from writeback_models import Tied, adamw, masks, train, unsealed, written_back

import halfulp as hu
from halfulp.writeback import Kahan, Master

GRID = "e4m3@16"
KINDS = ("float32", "bfloat16", "packed")
pytestmark = pytest.mark.usefixtures("one_thread")


def make(kind: str, policy: Any, grid: str = GRID, **options: Any) -> tuple[torch.nn.Module, hu.WriteBack]:
    model = Tied().to(torch.bfloat16 if kind == "bfloat16" else torch.float32)
    stored = {"storage": "packed"} if kind == "packed" else {}
    if policy in ("some tiles", "some tiles from raw"):
        policy = hu.TileMaster(masks(model), start_from="raw" if "raw" in policy else "code")
    return model, written_back(model, grid, policy, **stored, **options)


DAMAGE: dict[str, tuple[Any, str, Any, str]] = {
    "a master elsewhere": (
        "master",
        "master",
        lambda t: t.view(-1)[3:5].add_(1.0),
        "'up.weight': for 2 of 960 values the saved master does not round to the stored weight",
    ),
    "a master one code away": (
        "master",
        "master",
        lambda t: t.view(-1)[7].mul_(1.14),
        "'up.weight': for 1 of 960 values the saved master",
    ),
    "a raw master two codes away": (
        Master("raw"),
        "master",
        lambda t: t.view(-1)[7].mul_(1.4),
        "'up.weight': for 1 of 960 values the saved master",
    ),
    "a tile's master": (
        "some tiles",
        "master",
        lambda t: t.view(-1)[:3].neg_(),
        r"'up.weight': for 3 of \d+ values the saved master",
    ),
    "a carry of more than half a gap": (
        "kahan",
        "carry",
        lambda t: t.view(-1)[9].fill_(0.25),
        "'up.weight': for 1 of 960 values the saved carry is more than half the gap",
    ),
    "a carry the other way": (
        Kahan(torch.bfloat16),
        "carry",
        lambda t: t.view(-1)[9:12].fill_(-0.25),
        "'up.weight': for 3 of 960 values the saved carry",
    ),
    "a master that is not finite": (
        "master",
        "master",
        lambda t: t.view(-1)[0].fill_(torch.nan),
        "'up.weight': 1 of 960 values of the saved master are not finite",
    ),
    "a carry that is not finite": (
        "kahan",
        "carry",
        lambda t: t.view(-1)[:2].fill_(torch.inf),
        "'up.weight': 2 of 960 values of the saved carry are not finite",
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", DAMAGE)
def test_what_cannot_be(what: str, kind: str) -> None:
    """Refused with the parameter and the count, before anything is taken up."""
    policy, key, damage, match = DAMAGE[what]
    model, opt = make(kind, policy)
    train(model, opt, 3)
    state = unsealed(opt.state_dict())
    opt.load_state_dict(copy.deepcopy(state))  # whole, it is taken
    damage(state["state"][1]["halfulp." + key])
    kept = opt.slots[1].state[key].clone()
    with pytest.raises(hu.CorruptionError, match=match):
        opt.load_state_dict(state)
    assert torch.equal(opt.slots[1].state[key], kept)


def test_weights_of_another_step() -> None:
    """On the grid, but not those that the masters were saved with."""
    model, opt = make("float32", "master")
    train(model, opt, 2)
    state = unsealed(opt.state_dict())
    train(model, opt, 3, start=2)
    with pytest.raises(hu.CorruptionError, match="load the model's weights that were saved with this state"):
        opt.load_state_dict(state)


POLICIES = ("master", "master from raw", "some tiles", "some tiles from raw", "kahan", "kahan in bfloat16")
NAMED = {"master from raw": Master("raw"), "kahan in bfloat16": Kahan(torch.bfloat16)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("project", ["nearest", "stochastic"])
def test_what_runs_leave_is_taken(policy: str, kind: str, project: str) -> None:
    """Before the first step, after it, with weights thrown to the ends, and with gradients that are none."""
    for grid in (GRID, "e5m2", "int4@8", "m3"):
        model, opt = make(kind, NAMED.get(policy, policy), grid, project=project)
        state = unsealed(opt.state_dict())
        opt.load_state_dict(state)
        for step in range(4):
            if step == 2:
                opt.param_groups[0]["lr"] = 20.0  # far beyond the range of some
            train(model, opt, 1, start=step)
            if step == 3:
                model.up.weight.grad[:3] = torch.nan
                opt.step()
            opt.load_state_dict(unsealed(opt.state_dict()))


@pytest.mark.parametrize("grid", ["mxfp4", "int8/row", "int4/absmean"])
@pytest.mark.parametrize("policy", ["master", "kahan", "master from raw"])
def test_scales_that_move(grid: str, policy: str) -> None:
    """Only what is not finite is refused: the step of a weight need not be found again."""
    model, opt = make("float32", NAMED.get(policy, policy), grid)
    train(model, opt, 3)
    state = unsealed(opt.state_dict())
    opt.load_state_dict(copy.deepcopy(state))
    key = "carry" if policy == "kahan" else "master"
    state["state"][1][f"halfulp.{key}"][0, 0] = torch.nan
    with pytest.raises(hu.CorruptionError, match="not finite"):
        opt.load_state_dict(state)


def test_a_tensor_that_never_had_a_gradient() -> None:
    """A raw master under a stochastic projection: one of its two neighbours is beside it, either."""
    model = Tied()
    opt = hu.WriteBack(adamw(model), GRID, Master("raw"), model=model, project="stochastic")
    slot = opt.slots[1]
    nearest = hu.grid(GRID).round(slot.state["master"])
    assert not torch.equal(nearest, slot.p.detach())
    opt.load_state_dict(unsealed(opt.state_dict()))
