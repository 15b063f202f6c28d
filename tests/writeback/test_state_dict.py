"""States that are refused when they are loaded: with their own words, before anything is taken up."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from writeback_models import Tied, adamw, train, unsealed, written_back
from writeback_unchanged import assert_unchanged, everything

import halfulp as hu
from halfulp.errors import VersionError

GRID = "e4m3@16"
pytestmark = pytest.mark.usefixtures("one_thread")


def other_line(change: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], None]:
    """A state with something changed in what it says of itself."""

    def edit(state: dict[str, Any]) -> None:
        line = json.loads(state["param_groups"][0]["halfulp"])
        change(line)
        state["param_groups"][0]["halfulp"] = json.dumps(line)

    return edit


def entry(name: str, change: Callable[[torch.Tensor], Any]) -> Callable[[dict[str, Any]], None]:
    def edit(state: dict[str, Any]) -> None:
        state["state"][0]["halfulp." + name] = change(state["state"][0]["halfulp." + name])

    return edit


STATES: dict[str, tuple[Callable[[dict[str, Any]], Any], type[hu.HalfulpError], str]] = {
    "another version": (
        other_line(lambda s: s.update(version=99)),
        VersionError,
        "version 99.*reads version 1 and 2",
    ),
    "another seed": (other_line(lambda s: s.update(seed=8)), hu.UsageError, "seed 8, this WriteBack 0"),
    "another storage": (
        other_line(lambda s: s.update(storage="packed")),
        hu.UsageError,
        "storage 'packed'.*'container'",
    ),
    "another grid": (
        other_line(lambda s: s["parameters"]["0"].__setitem__(1, "bf16")),
        hu.UsageError,
        "'embedding.weight'.*grid 'bf16', this WriteBack 'e4m3@16'. Make the WriteBack with the grid",
    ),
    "another policy": (
        other_line(lambda s: s["parameters"]["0"].__setitem__(2, "rne")),
        hu.UsageError,
        r"'embedding.weight'.*policy 'rne', this WriteBack 'kahan\(dtype=float32\)'",
    ),
    "another name": (
        other_line(lambda s: s["parameters"]["0"].__setitem__(0, "wte")),
        hu.UsageError,
        "parameter 0.*name 'wte', this WriteBack 'embedding.weight'. The state is of another model, or",
    ),
    "another shape": (
        other_line(lambda s: s["parameters"]["0"].__setitem__(3, [2, 2])),
        hu.UsageError,
        r"'embedding.weight'.*shape \[2, 2\]",
    ),
    "a parameter too few": (
        other_line(lambda s: s["parameters"].pop("0")),
        hu.UsageError,
        "parameter 0 is managed only in this WriteBack",
    ),
    "a parameter too many": (
        other_line(lambda s: s["parameters"].update({"6": ["x", "bf16", "rne", [2]]})),
        hu.UsageError,
        "parameter 6 is managed only in the state",
    ),
    "no step": (
        other_line(lambda s: s.pop("step")),
        hu.CorruptionError,
        "part of this optimizer state is not whole: it has no step",
    ),
    "parameters of another form": (
        other_line(lambda s: s.update(parameters={"0": ["x"]})),
        hu.CorruptionError,
        "part of this optimizer state",
    ),
    "parameters that are a list": (
        other_line(lambda s: s.update(parameters=[1])),
        hu.CorruptionError,
        "part of this optimizer state",
    ),
    "a line that is no JSON": (
        lambda s: s["param_groups"][0].update(halfulp="{]"),
        hu.CorruptionError,
        "part of this optimizer state",
    ),
    "a line that is a list": (
        lambda s: s["param_groups"][0].update(halfulp="[]"),
        hu.CorruptionError,
        "part of this optimizer state",
    ),
    "a state without its line": (
        lambda s: s["param_groups"][0].pop("halfulp"),
        hu.CorruptionError,
        "not the line that says what they belong to",
    ),
    "a missing carry": (
        lambda s: s["state"][0].pop("halfulp.carry"),
        hu.CorruptionError,
        "'embedding.weight': the state keeps.*'moved'",
    ),
    "a missing entry": (
        lambda s: s["state"].pop(0),
        hu.CorruptionError,
        r"'embedding.weight': the state keeps \[\]",
    ),
    "something more": (
        lambda s: s["state"][0].update({"halfulp.extra": torch.ones(1)}),
        hu.CorruptionError,
        "'extra'",
    ),
    "a carry of another type": (
        entry("carry", torch.Tensor.double),
        hu.CorruptionError,
        "carry.*torch.float64",
    ),
    "a carry of another shape": (
        entry("carry", lambda t: t[:3]),
        hu.CorruptionError,
        r"saved carry is \(3, 24\)",
    ),
    "a carry that is a number": (entry("carry", lambda t: 3.0), hu.CorruptionError, "saved carry is a float"),
    "no groups": (lambda s: s.update(param_groups=[]), hu.CorruptionError, "not an optimizer state"),
    "groups that are a number": (
        lambda s: s.update(param_groups=3),
        hu.CorruptionError,
        "not an optimizer state",
    ),
    "a group without parameters": (
        lambda s: s["param_groups"][0].pop("params"),
        hu.CorruptionError,
        "not an optimizer state",
    ),
    "a checkpoint around it": (
        lambda s: s.update(model={}, optimizer=dict(s), state=0, param_groups=0),
        hu.CorruptionError,
        "inside this checkpoint: load its 'optimizer'",
    ),
    "no state": (lambda s: s.pop("state"), hu.CorruptionError, "not an optimizer state"),
    "a state that is a list": (lambda s: s.update(state=[1]), hu.CorruptionError, "not an optimizer state"),
    "another number of groups": (
        lambda s: s["param_groups"].append({"params": []}),
        hu.UsageError,
        "the wrapped AdamW does not take this state",
    ),
}


@pytest.mark.parametrize("kind", STATES)
def test_states(kind: str) -> None:
    """Each is refused with its own words before anything is taken up."""
    model = Tied()
    opt = written_back(model, GRID, "kahan")
    train(model, opt, 2)
    change, error, match = STATES[kind]
    state, weights = copy.deepcopy((opt.state_dict(), model.state_dict()))
    train(model, opt, 1, start=2)
    model.load_state_dict(weights)  # those that belong to the state
    before = everything(model, opt)
    change(state)
    with pytest.raises(error, match=match):
        opt.load_state_dict(state)
    assert_unchanged(before, model, opt)


@pytest.mark.parametrize(
    "garbage", [None, 3, "state", [], {}, {"state": {}}, {"param_groups": [{}], "state": {}}]
)
def test_garbage(garbage: Any) -> None:
    opt = written_back(Tied())
    with pytest.raises(hu.CorruptionError, match="not an optimizer state"):
        opt.load_state_dict(garbage)


def test_weights_off_the_grid_when_a_state_is_loaded() -> None:
    """The state goes with its weights: with others, even a bit away, it would be another run."""
    model = Tied()
    opt = written_back(model)
    train(model, opt, 2)
    state = copy.deepcopy(opt.state_dict())
    with torch.no_grad():
        model.up.weight[:2] += 1e-4
    with pytest.raises(
        hu.UsageError, match=r"'up.weight' is not on grid e4m3@16: \d+ of 960.*Load the model's weights"
    ):
        opt.load_state_dict(state)


def test_a_mask_with_other_tiles() -> None:
    """As many masters, of other weights."""
    a, b = ({"weight": torch.tensor(m)} for m in ([True, False, True], [True, True, False]))
    model = torch.nn.Linear(768, 3, bias=False)
    state = hu.WriteBack(adamw(model), GRID, hu.TileMaster(a), model=model).state_dict()
    opt = hu.WriteBack(adamw(model), GRID, hu.TileMaster(b), model=model)
    with pytest.raises(hu.UsageError, match=r"'weight': the state has other tiles than this policy chooses"):
        opt.load_state_dict(state)


def test_packed_codes_that_are_none() -> None:
    """float8_e4m3fn has no infinity: 0x7f is no code of it."""
    model = Tied()
    opt = written_back(model, storage="packed")
    state = unsealed(opt.state_dict())
    state["state"][1]["halfulp.codes"][7] = 0x7F
    before = everything(model, opt)
    with pytest.raises(hu.CorruptionError, match=r"'up.weight': not codes of grid"):
        opt.load_state_dict(state)
    assert_unchanged(before, model, opt)
