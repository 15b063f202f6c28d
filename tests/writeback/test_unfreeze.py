"""Parameters that are frozen when a write-back is made, and trained later."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from oracle import assert_same
from writeback_models import Tied, loss_of, train, written_back

import halfulp as hu

GRID = "e4m3@16"
KINDS = ("float32", "bfloat16", "packed")
pytestmark = pytest.mark.usefixtures("one_thread")


def make(kind: str, policy: Any = "sr", **options: Any) -> tuple[torch.nn.Module, hu.WriteBack]:
    """The lower matrix and the norm are frozen at first."""
    model = Tied().to(torch.bfloat16 if kind == "bfloat16" else torch.float32)
    freeze(model, True)
    stored = {"storage": "packed"} if kind == "packed" else {}
    return model, written_back(model, GRID, policy, **stored, **options)


def freeze(model: torch.nn.Module, frozen: bool) -> None:
    for p in (*model.up.parameters(), *model.norm.parameters()):
        p.requires_grad_(not frozen)


def assert_same_model(a: torch.nn.Module, b: torch.nn.Module) -> None:
    for name, value in a.state_dict().items():
        assert_same(b.state_dict()[name], value, name)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", ["sr", "kahan", "master"])
def test_taken_up_at_the_first_step_with_a_gradient(kind: str, policy: str) -> None:
    """Projected first, then stepped; as one that was added to the optimizer then."""
    model, opt = make(kind, policy)
    raw = model.up.weight.detach().clone()
    assert [s.name for s in opt.slots] == ["embedding.weight", "down.weight"]
    train(model, opt, 2)
    assert_same(model.up.weight.detach(), raw)
    freeze(model, False)
    opt.zero_grad()
    opt.step()  # no gradients yet
    assert [s.name for s in opt.slots] == ["embedding.weight", "down.weight"]
    opt.steps -= 1
    train(model, opt, 3, start=2)
    assert [s.name for s in opt.slots] == ["embedding.weight", "down.weight", "up.weight"]
    assert opt.events["up.weight"].numel == 960
    found = model.state_dict()["up.weight"].float()
    assert torch.equal(hu.grid(GRID).round(found), found)
    assert model.norm.weight.requires_grad  # one dimension: trained, not managed

    if kind == "packed":
        return  # a packed weight has no values of its own to take a gradient at
    other = Tied().to(model.norm.weight.dtype)
    freeze(other, True)
    first = [p for n, p in other.named_parameters() if n != "up.weight"]
    inner = torch.optim.AdamW(first, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    added = hu.WriteBack(inner, GRID, policy, model=other)
    train(other, added, 2)
    freeze(other, False)
    added.add_param_group({"params": [other.up.weight]})
    other.zero_grad()
    projected = other.up.weight.detach().clone()
    other.up.weight.data.copy_(raw)  # the gradient of the first step was taken before the projection
    loss_of(other, 2).backward()
    other.up.weight.data.copy_(projected)
    added.step()
    train(other, added, 2, start=3)
    assert_same_model(model, other)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", ["sr", "kahan", "master"])
@pytest.mark.parametrize("stop", [1, 4])
def test_going_on_from_before_and_after(kind: str, policy: str, stop: int) -> None:
    """A script freezes, makes its optimizer, loads, and unfreezes again at step 2: the same run."""

    def go(model: torch.nn.Module, opt: hu.WriteBack, first: int, last: int) -> None:
        for step in range(first, last):
            freeze(model, step < 2)
            train(model, opt, 1, start=step)

    model, opt = make(kind, policy)
    go(model, opt, 0, stop)
    weights, state = copy.deepcopy((model.state_dict(), opt.state_dict()))
    go(model, opt, stop, 6)
    again, resumed = make(kind, policy)
    if kind != "packed":
        again.load_state_dict(weights)
    resumed.load_state_dict(state)
    again.load_state_dict(weights)
    assert {s.name for s in resumed.slots} >= ({"up.weight"} if stop == 4 else {"down.weight"})
    go(again, resumed, stop, 6)
    assert_same_model(model, again)
    a, b = opt.state_dict(), resumed.state_dict()
    for k, entry in a["state"].items():
        for key, value in entry.items():
            assert_same(b["state"][k][key], value, f"{key} of {k}")


def test_a_state_from_before_does_not_fit_what_is_managed_now() -> None:
    """Refused with what to do; nothing has changed."""
    model, opt = make("float32")
    train(model, opt, 1)
    state = copy.deepcopy(opt.state_dict())
    freeze(model, False)
    train(model, opt, 1, start=1)
    with pytest.raises(hu.UsageError, match=r"managed only in this WriteBack.*while it is frozen"):
        opt.load_state_dict(state)


def test_a_refused_state_adopts_nothing() -> None:
    model, opt = make("bfloat16", "kahan")
    freeze(model, False)
    train(model, opt, 1)
    state = copy.deepcopy(opt.state_dict())
    state["param_groups"].append({"params": []})
    again, resumed = make("bfloat16", "kahan")
    again.load_state_dict(model.state_dict())
    with pytest.raises(hu.UsageError, match="does not take this state"):
        resumed.load_state_dict(state)
    assert [s.name for s in resumed.slots] == ["embedding.weight", "down.weight"]
    assert any(p is again.up.weight for p in resumed.optimizer.param_groups[0]["params"])


def test_a_predicate_is_asked_again() -> None:
    """One that chooses what is trained; and one that does not want it is asked once."""
    for name, expected in (("up", 3), ("sideways", 2)):
        model, opt = make(
            "float32",
            params=lambda n, p, name=name: (
                p.dim() > 1 and p.requires_grad and (name in n or "u" not in n[:2])
            ),
        )
        freeze(model, False)
        train(model, opt, 2)
        assert len(opt.slots) == expected
        assert opt._frozen == []


@pytest.mark.parametrize(
    "params", [lambda n, p: p.dim() >= 2, ["0.weight", "1.weight"]], ids=["rule", "names"]
)
def test_what_is_frozen_is_left_alone_however_it_is_chosen(params: Any) -> None:
    """Until it is stepped; a name of none of the parameters is refused as before."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    model[0].weight.requires_grad_(False)
    before = model[0].weight.clone()
    opt = hu.WriteBack(
        torch.optim.SGD(model.parameters(), lr=0.1), "e4m3@16", "rne", model=model, params=params
    )
    assert torch.equal(model[0].weight, before)
    assert [slot.name for slot in opt.slots] == ["1.weight"]
    model[0].weight.requires_grad_(True)
    model(torch.ones(1, 8)).sum().backward()
    opt.step()
    assert sorted(slot.name for slot in opt.slots) == ["0.weight", "1.weight"]
    with pytest.raises(hu.UsageError, match="params= names"):
        hu.WriteBack(torch.optim.SGD(model.parameters(), lr=0.1), "e4m3@16", "rne", model=model, params=["x"])


def test_an_audit_knows_the_newcomer() -> None:
    """It is on its grid before the audit looks at it."""
    model, opt = make("packed")
    with hu.Audit(opt, [GRID], model=model) as audit:
        train(model, opt, 1)
        freeze(model, False)
        train(model, opt, 2, start=1)
        watched = {w.name: w for w in audit.watched.values()}
    assert watched["up.weight"].stored == GRID
    assert watched["up.weight"].codes is not None


def test_a_choice_of_which_everything_is_frozen(tmp_path: Any) -> None:
    """As in gradual unfreezing: nothing to do yet, and saved and loaded as that."""
    model, optimizer = make("float32", params=["up.weight"])
    assert not optimizer.slots
    train(model, optimizer, 2)
    for path in (tmp_path / "frozen.safetensors", tmp_path / "thawed.safetensors"):
        hu.writeback.save(optimizer, path)
        again, other = make("float32", params=["up.weight"])
        again.load_state_dict(model.state_dict())
        if optimizer.slots:
            freeze(again, False)
        hu.writeback.load(other, path)
        assert [s.name for s in other.slots] == [s.name for s in optimizer.slots]
        for m, o in ((model, optimizer), (again, other)):
            freeze(m, False)
            train(m, o, 2)
        assert [s.name for s in other.slots] == ["up.weight"]
        assert_same_model(model, again)
    assert set(model.up.weight.unique().tolist()) <= set(
        hu.grid(GRID).round(model.up.weight).unique().tolist()
    )
