"""A run that began under a plain optimizer goes on under a write-back, from the plain optimizer's state."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import assert_same
from writeback_models import TWO_DIMENSIONAL, Tied, adamw, masks, train, values

import halfulp as hu
from halfulp.writeback import Kahan, Master

STOP, REST = 3, 3
GRID = "e4m3@16"
POLICIES: dict[str, Callable[[torch.nn.Module], Any]] = {
    "rne": lambda _: "rne", "sr": lambda _: "sr", "deadzone-sr": lambda _: "deadzone-sr",
    "eco": lambda _: "eco", "kahan": lambda _: "kahan",
    "kahan in bfloat16": lambda _: Kahan(torch.bfloat16),
    "master": lambda _: "master", "master from raw": lambda _: Master("raw"),
    "tile masters": lambda m: hu.TileMaster(masks(m)),
}  # fmt: skip
NARROW = {k: POLICIES[k] for k in POLICIES if k != "tile masters"} | {
    "remainder16": lambda _: "remainder16",
    "remainder8": lambda _: "remainder8",
}
KINDS: dict[str, Any] = {
    "AdamW": lambda p, **o: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1, **o),
    "Adam": lambda p, **o: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1, **o),
    "SGD": lambda p, **o: torch.optim.SGD(p, lr=1e-1, momentum=0.9, **o),
    "amsgrad": lambda p, **o: torch.optim.AdamW(p, lr=1e-2, amsgrad=True, **o),
    "plain SGD": lambda p, **o: torch.optim.SGD(p, lr=1e-1, **o),
    "Adagrad": lambda p, **o: torch.optim.Adagrad(p, lr=1e-1),
}


def begun(
    dtype: torch.dtype = torch.float32, kind: str = "AdamW", **options: Any
) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """Weights and state of a plain run, as a checkpoint has them; and the run."""
    model = Tied().to(dtype)
    optimizer = KINDS[kind](model.parameters(), **options)
    train(model, optimizer, STOP)
    return *copy.deepcopy((model.state_dict(), optimizer.state_dict())), (model, optimizer)


def with_weights(weights: dict[str, Any], dtype: torch.dtype = torch.float32) -> Tied:
    model = Tied(seed=1).to(dtype)
    model.load_state_dict(weights)
    return model


def assert_same_run(a: tuple[Tied, hu.WriteBack], b: tuple[Tied, hu.WriteBack]) -> None:
    """Weights, moments, what policies keep, and events, after every step to come."""
    for number in range(STOP, STOP + REST):
        losses = [train(model, opt, 1, start=number) for model, opt in (a, b)]
        assert losses[0] == losses[1]
        assert a[1].events.rows == b[1].events.rows
    left, right = (opt.state_dict() for _, opt in (a, b))
    assert left["param_groups"][0]["halfulp"] == right["param_groups"][0]["halfulp"]  # with its digest
    for name, value in values(a[0]).items():
        assert_same(value, values(b[0])[name], name)


# ---- every policy ------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [False, True], ids=["weights first", "write-back first"])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_goes_on(policy: str, after: bool, caplog: pytest.LogCaptureFixture) -> None:
    """As a write-back made around the plain optimizer itself, in the middle of its run: bit for bit.

    It does not matter whether the weights were there when the write-back was made, or came with the state.
    """
    weights, state, (model, optimizer) = begun()
    around = hu.WriteBack(optimizer, GRID, POLICIES[policy](model), model=model)
    fresh = Tied(seed=1) if after else with_weights(weights)
    opt = hu.WriteBack(adamw(fresh, lr=1.0), GRID, POLICIES[policy](fresh), model=fresh)
    if after:
        train(fresh, opt, 1)  # what was before does not matter
        fresh.load_state_dict(weights)
    with caplog.at_level(logging.INFO, "halfulp"):
        opt.load_state_dict(state)
    said = [r for r in caplog.records if "saved without a write-back" in r.getMessage()]
    assert [r.levelno for r in said] == [logging.WARNING]
    assert opt.param_groups[0]["lr"] == 1e-2  # as torch has it: the state's
    assert opt.steps == 0
    assert_same_run((model, around), (fresh, opt))


@pytest.mark.parametrize("policy", NARROW)
def test_every_policy_of_bfloat16_weights_goes_on(policy: str) -> None:
    """Moments of bfloat16 become float32: what a plain bfloat16 run has, and no write-back keeps."""
    weights, state, (model, optimizer) = begun(torch.bfloat16)
    assert state["state"][0]["exp_avg"].dtype == torch.bfloat16
    around = hu.WriteBack(optimizer, "bf16", NARROW[policy](model), model=model)
    fresh = with_weights(weights, torch.bfloat16)
    opt = hu.WriteBack(adamw(fresh), "bf16", NARROW[policy](fresh), model=fresh)
    opt.load_state_dict(state)
    assert {s["exp_avg"].dtype for s in opt.state.values()} == {torch.float32}
    assert_same_run((model, around), (fresh, opt))


@pytest.mark.parametrize("grid", ["int8/row", "mxfp4", "int4/g16"])
@pytest.mark.parametrize("policy", ["sr", "kahan", "master"])
def test_scales_that_move(grid: str, policy: str) -> None:
    weights, state, (model, optimizer) = begun()
    around = hu.WriteBack(optimizer, grid, policy, model=model)
    fresh = Tied(seed=1)
    opt = hu.WriteBack(adamw(fresh), grid, policy, model=fresh)
    fresh.load_state_dict(weights)
    opt.load_state_dict(state)
    assert_same_run((model, around), (fresh, opt))


@pytest.mark.parametrize("grid", [GRID, "int8/row"])
@pytest.mark.parametrize("policy", ["sr", "kahan", "master"])
def test_packed_codes(grid: str, policy: str) -> None:
    weights, state, (model, optimizer) = begun()
    around = hu.WriteBack(optimizer, grid, policy, model=model, storage="packed")
    fresh = with_weights(weights)
    opt = hu.WriteBack(adamw(fresh), grid, policy, model=fresh, storage="packed")
    opt.load_state_dict(state)
    for number in range(STOP, STOP + REST):
        assert train(model, around, 1, start=number) == train(fresh, opt, 1, start=number)
    for name, value in model.state_dict().items():
        assert_same(fresh.state_dict()[name], value, name)


@pytest.mark.parametrize("kind", KINDS)
def test_every_optimizer_goes_on(kind: str) -> None:
    """On a grid that rounds nothing, as if nothing had happened: the plain run to the last bit."""
    weights, state, (model, optimizer) = begun(kind=kind)
    fresh = with_weights(weights)
    opt = hu.WriteBack(KINDS[kind](fresh.parameters()), "float32", "rne", model=fresh)
    opt.load_state_dict(state)
    assert train(fresh, opt, REST, start=STOP) == train(model, optimizer, REST, start=STOP)
    for name, value in values(model).items():
        assert_same(values(fresh)[name], value, name)


# ---- hu.AdamW and its like ---------------------------------------------------------------------------


def made(kind: str, of: torch.nn.Module, **options: Any) -> hu.WriteBack:
    one: Any = getattr(hu, kind)
    opt: hu.WriteBack = one(of.parameters(), **options)
    return opt


@pytest.mark.parametrize("policy", NARROW)
@pytest.mark.parametrize("moments", ["fp32", "bf16"])
def test_one_pass_goes_on(policy: str, moments: str) -> None:
    """The state of a plain optimizer that was not fused, into one that makes its steps in one pass only."""
    weights, state, _ = begun(torch.bfloat16)
    fresh = with_weights(weights, torch.bfloat16)
    opt = made("AdamW", fresh, policy=NARROW[policy](fresh), moments=moments, lr=1.0)
    opt.load_state_dict(state)
    for slot, saved in zip(opt.slots, state["state"].values(), strict=True):
        kept = opt.optimizer.state[slot.stepped]
        assert_same(kept["exp_avg_sq"], saved["exp_avg_sq"].to(opt.moments))
        assert kept["step"] == STOP
        if "master" in slot.state:
            assert_same(slot.state["master"], slot.p.detach().float())
        if "carry" in slot.state:
            assert not bool(slot.state["carry"].any())
    before = values(fresh)
    train(fresh, opt, REST, start=STOP)
    assert all(bool((p != before[n]).any()) for n, p in fresh.named_parameters())
    assert opt.param_groups[0]["lr"] == 1e-2


@pytest.mark.parametrize("kind", ["Adam", "SGD"])
def test_one_pass_of_other_kinds_goes_on(kind: str) -> None:
    """As the write-back around torch's fused one does, but for the draws: of nearest rounding, the same."""
    weights, state, _ = begun(kind=kind)
    ends = []
    for theirs in (False, True):
        fresh = with_weights(weights)
        chosen: Any = {"params" if theirs else "select": list(TWO_DIMENSIONAL), "model": fresh}
        if theirs:
            opt = hu.WriteBack(KINDS[kind](fresh.parameters(), fused=True), "bf16", "kahan", **chosen)
        else:
            opt = made(kind, fresh, policy="kahan", **chosen)
        opt.load_state_dict(state)
        train(fresh, opt, REST, start=STOP)
        ends.append(fresh.embedding.weight.detach()[:, :16].clone())
    assert torch.allclose(*ends, rtol=2.0**-7, atol=0)


def test_a_plain_lion_goes_on() -> None:
    from halfulp.writeback.rules.lion import Lion

    model = Tied()
    plain = Lion(model.parameters(), lr=1e-3)
    train(model, plain, STOP)
    fresh = with_weights(model.state_dict())
    opt = made("Lion", fresh, grid=GRID, policy="kahan")
    opt.load_state_dict(plain.state_dict())
    assert_same(opt.state[fresh.up.weight]["exp_avg"], plain.state[model.up.weight]["exp_avg"])
    train(fresh, opt, REST, start=STOP)


def test_what_is_saved_afterwards_is_a_write_backs() -> None:
    """And is resumed like any other, bit for bit."""
    weights, state, _ = begun()
    runs = []
    for stopped in (False, True):
        fresh = with_weights(weights)
        opt = hu.WriteBack(adamw(fresh), GRID, "kahan", model=fresh)
        opt.load_state_dict(state)
        train(fresh, opt, 1, start=STOP)
        if stopped:
            later = copy.deepcopy((fresh.state_dict(), opt.state_dict()))
            fresh = with_weights(later[0])
            opt = hu.WriteBack(adamw(fresh), GRID, "kahan", model=fresh)
            opt.load_state_dict(later[1])
            assert opt.steps == 1
        runs.append((fresh, opt))
    assert_same_run(*runs)


@pytest.mark.parametrize("policy", ["master", "kahan"])
def test_weights_that_came_unseen(policy: str) -> None:
    """Through ``.data``, which no counter of torch's notices: masters do not bring the first weights back."""
    weights, state, _ = begun()
    fresh = Tied(seed=1)
    opt = hu.WriteBack(adamw(fresh), GRID, policy, model=fresh)
    for name, p in fresh.named_parameters():
        p.data.copy_(weights[name])
    opt.load_state_dict(state)
    for slot in opt.slots:
        assert_same(slot.p.detach(), hu.grid(GRID).round(weights[slot.name]))
        assert_same(slot.state.get("master", slot.p.detach()), slot.p.detach())


def test_a_frozen_parameter_is_taken_up_with_its_moments() -> None:
    weights, state, _ = begun(torch.bfloat16)
    fresh = with_weights(weights, torch.bfloat16)
    fresh.up.weight.requires_grad_(False)
    opt = hu.WriteBack(adamw(fresh), "bf16", "sr", model=fresh)
    opt.load_state_dict(state)
    fresh.up.weight.requires_grad_(True)
    train(fresh, opt, 1, start=STOP)
    slot = next(s for s in opt.slots if s.p is fresh.up.weight)
    assert opt.optimizer.state[slot.stepped]["step"] == STOP + 1


def test_names_stay_those_of_this_optimizer() -> None:
    """A state with names, into an optimizer without: streams go by place, before and after."""
    model = Tied()
    plain = torch.optim.AdamW(model.named_parameters(), lr=1e-2)
    train(model, plain, STOP)
    fresh = with_weights(model.state_dict())
    opt = hu.WriteBack(adamw(fresh), GRID, "sr")
    opt.load_state_dict(plain.state_dict())
    assert "param_names" not in opt.param_groups[0]
    assert opt._chooser.names(opt.param_groups)[fresh.up.weight] == opt.slots[1].name == "0.1"


# ---- the dictionary itself ---------------------------------------------------------------------------


def test_the_state_is_not_written_to() -> None:
    """Neither a plain one nor a write-back's: loaded, trained from and loaded again, it is what it was."""
    _, state, (model, _) = begun()
    before = copy.deepcopy(state)
    opt = hu.WriteBack(adamw(model), GRID, "kahan", model=model)
    for _ in range(2):
        opt.load_state_dict(state)
        train(model, opt, 2)
    for k, entry in before["state"].items():
        for name, value in entry.items():
            assert_same(state["state"][k][name], value, name)
    assert state["param_groups"] == before["param_groups"]


# ---- what does not fit -------------------------------------------------------------------------------


def other_model() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """As many parameters as the other, of other shapes."""
    model = torch.nn.ParameterList([torch.ones(2, 2) for _ in Tied().parameters()])
    optimizer = torch.optim.AdamW(model.parameters())
    sum(p.sum() for p in model).backward()
    optimizer.step()
    return model, optimizer


MISFITS: dict[str, tuple[str, Callable[[], Any], str]] = {
    "SGD's into AdamW": (
        "AdamW", lambda: begun(kind="SGD")[1], "neither of a write-back nor of AdamW.*momentum_buffer"
    ),
    "AdamW's into SGD": ("SGD", lambda: begun()[1], "neither of a write-back nor of SGD.*exp_avg"),
    "AdamW's into Lion": ("Lion", lambda: begun()[1], "neither of a write-back nor of Lion.*exp_avg_sq"),
    "one that counts no steps": (
        "AdamW", lambda: stripped("step"), "of parameter '0.0' it has exp_avg, exp_avg_sq, expected"
    ),
    "amsgrad into one pass": ("AdamW", lambda: begun(kind="amsgrad")[1], "prevent that: amsgrad=True"),
    "another number of groups": (
        "AdamW", lambda: regrouped(), "groups of 3 and 4 parameters, this optimizer of 7.*Trainer has two"
    ),
    "another model": (
        "AdamW", lambda: other_model()[1].state_dict(),
        r"exp_avg of parameter '0.0' as \(2, 2\), expected \(29, 24\)",
    ),
    "without its line": ("AdamW", lambda: without_line(), "not the line that says what they belong to"),
}  # fmt: skip


def stripped(name: str) -> dict[str, Any]:
    state = begun()[1]
    for entry in state["state"].values():
        del entry[name]
    return state


def regrouped() -> dict[str, Any]:
    state = begun()[1]
    (group,) = state["param_groups"]
    state["param_groups"] = [group | {"params": [0, 1, 2]}, group | {"params": [3, 4, 5, 6]}]
    return state


def without_line() -> dict[str, Any]:
    model = Tied().bfloat16()
    opt = made("AdamW", model, policy="kahan")
    train(model, opt, 1)
    state = opt.state_dict()
    del state["param_groups"][0]["halfulp"]
    return state


@pytest.mark.parametrize("case", MISFITS)
def test_what_fits_neither(case: str) -> None:
    """An error that says why, and nothing has changed."""
    kind, state, says = MISFITS[case]
    model = Tied().bfloat16()
    opt = made(kind, model, policy="kahan")
    train(model, opt, 2)
    before = copy.deepcopy((model.state_dict(), opt.state_dict()))
    with pytest.raises(hu.HalfulpError, match=says):
        opt.load_state_dict(state())
    after = opt.state_dict()
    assert after["param_groups"] == before[1]["param_groups"]  # the digest is over every tensor
    for name, value in before[0].items():
        assert_same(model.state_dict()[name], value, name)


def test_another_order_of_named_parameters() -> None:
    model = Tied()
    plain = torch.optim.AdamW(list(model.named_parameters())[::-1], lr=1e-2)
    opt = hu.WriteBack(torch.optim.AdamW(model.named_parameters()), GRID, "sr")
    with pytest.raises(
        hu.UsageError, match=r"has parameter 'down\.bias' where this optimizer has 'embedding\.weight'"
    ):
        opt.load_state_dict(plain.state_dict())


def test_weights_off_the_grid_that_must_not_be_projected() -> None:
    weights, state, _ = begun()
    fresh = Tied(seed=1)
    with torch.no_grad():
        for p in fresh.parameters():
            p.copy_(hu.grid(GRID).round(p))
    opt = hu.WriteBack(adamw(fresh), GRID, "sr", model=fresh, project="none")
    fresh.load_state_dict(weights)
    with pytest.raises(hu.UsageError, match="is not on grid"):
        opt.load_state_dict(state)
    assert not opt.state


def test_sgd_without_momentum_goes_on_in_one_pass() -> None:
    """It has no moment, neither in the plain run nor afterwards."""
    weights, state, _ = begun(torch.bfloat16, kind="plain SGD")
    model = with_weights(weights, torch.bfloat16)
    opt = made("SGD", model)
    opt.load_state_dict(state)
    train(model, opt, 1)
    assert {route.name for route in opt.routes.values()} == {"one pass"}
    assert not any(opt.optimizer.state.values())
