"""Which tensors are written back, by which rules; and what must not matter: order, threads, ties."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import assert_same
from writeback_models import TWO_DIMENSIONAL, Tied, adamw, train, values, written_back

import halfulp as hu
from halfulp.writeback import Master

STEPS = 8
pytestmark = pytest.mark.usefixtures("one_thread")


def assert_same_values(a: torch.nn.Module, b: torch.nn.Module) -> None:
    for name, p in a.named_parameters():
        assert_same(p.detach(), b.get_parameter(name).detach(), name)


def names(opt: hu.WriteBack) -> list[str]:
    return [slot.name for slot in opt.slots]


# ---- which tensors --------------------------------------------------------------------------------


def test_by_default_every_trainable_matrix_once() -> None:
    """Two or more dimensions and trainable; a tied tensor is one tensor under its first name."""
    model = Tied()
    model.down.weight.requires_grad_(False)
    opt = written_back(model)
    assert names(opt) == ["embedding.weight", "up.weight"]
    before = values(model)
    train(model, opt, 2)
    assert opt.events["embedding.weight"].numel == model.embedding.weight.numel()
    assert len(opt.events.rows) == 2
    assert torch.equal(model.down.weight, before["down.weight"])
    assert model.head.weight is model.embedding.weight
    on_grid = hu.grid("e4m3@16").round(model.head.weight.detach())
    assert torch.equal(on_grid, model.head.weight.detach())


def test_a_convolution_counts_as_a_matrix() -> None:
    """Any number of dimensions above one, in any memory layout."""
    torch.manual_seed(0)
    runs = []
    weights = torch.nn.Conv2d(3, 5, 3).state_dict()
    for layout in (torch.contiguous_format, torch.channels_last):
        for policy in ("sr", "kahan", hu.TileMaster({"weight": torch.tensor([True])})):
            model = torch.nn.Conv2d(3, 5, 3)
            model.load_state_dict(weights)
            model = model.to(memory_format=layout)
            opt = written_back(model, policy=policy)
            assert names(opt) == ["weight"]
            for step in range(4):
                model.weight.grad = torch.randn(5, 3, 3, 3, generator=torch.Generator().manual_seed(step))
                opt.step()
            assert opt.events["weight"].frozen > 0
            runs.append(model.weight.detach().contiguous())
    for a, b in zip(runs[:3], runs[3:], strict=True):
        assert_same(a, b)


def test_a_predicate_chooses() -> None:
    """By name and tensor, norms and biases too."""
    model = Tied()
    opt = written_back(model, params=lambda name, p: "norm" in name or p.shape == (40, 24))
    assert names(opt) == ["up.weight", "norm.weight", "norm.bias"]
    before = values(model)
    train(model, opt, 1)
    rounded = hu.grid("e4m3@16").round(model.norm.weight.detach())
    assert torch.equal(model.norm.weight.detach(), rounded)
    assert not torch.equal(model.down.weight, before["down.weight"])


def test_names_choose() -> None:
    """A list of names, or anything that can be gone through once."""
    for chosen in (
        ["up.weight", "norm.weight"],
        iter(["up.weight", "norm.weight"]),
        {"up.weight": 1, "norm.weight": 2},
    ):
        assert names(written_back(Tied(), params=chosen)) == ["up.weight", "norm.weight"]


@pytest.mark.parametrize(
    ("chosen", "match"),
    [
        (["up.weight", "sideways.weight"], r"\['sideways.weight'\]"),
        (["head.weight"], r"\['head.weight'\]"),  # tied: known by its first name
        ([], "no parameter to write back"),
        (lambda _name, _p: False, "no parameter to write back"),
    ],
)
def test_names_that_are_not_there(chosen: Any, match: str) -> None:
    model = Tied()
    before = values(model)
    with pytest.raises(hu.UsageError, match=match):
        written_back(model, params=chosen)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_nothing_to_write_back() -> None:
    with pytest.raises(hu.UsageError, match="two or more dimensions"):
        written_back(torch.nn.LayerNorm(5))


# ---- groups ---------------------------------------------------------------------------------------


def test_a_group_has_its_own_grid_and_policy() -> None:
    """Each group as if it were alone under its own rules."""
    model = Tied()
    base = torch.optim.AdamW(
        [
            {"params": [model.embedding.weight], "grid": "bf16", "policy": "kahan"},
            {"params": [model.up.weight], "policy": Master()},
            {"params": [model.down.weight], "grid": hu.grid("e5m2"), "lr": 1e-3},
            {"params": [*model.norm.parameters(), model.up.bias, model.down.bias]},
        ],
        lr=1e-2,
    )
    opt = hu.WriteBack(base, "e4m3@16", "sr", model=model)
    found = {s.name: (s.grid.name, s.policy.name) for s in opt.slots}
    assert found == {
        "embedding.weight": ("bf16", "kahan"),
        "up.weight": ("e4m3@16", "master"),
        "down.weight": ("e5m2", "sr"),
    }
    train(model, opt, 4)
    for slot in opt.slots:
        assert torch.equal(slot.grid.round(slot.p.detach()), slot.p.detach()), slot.name
    assert set(opt.slots[0].state) == {"carry"}
    assert set(opt.slots[1].state) == {"master"}
    assert opt.param_groups[2]["lr"] == 1e-3


@pytest.mark.parametrize("storage", ["container", "native", "packed"])
def test_a_group_added_later(storage: str) -> None:
    """From then on as if it had been there from the start, under its own or the common rules."""
    dtype = torch.bfloat16 if storage == "native" else torch.float32
    model = Tied().to(dtype)
    first = torch.optim.AdamW([model.embedding.weight, *model.norm.parameters()], lr=1e-2)
    opt = hu.WriteBack(first, "e4m3@16", "sr", model=model, storage=storage)
    train(model, opt, 2)
    opt.add_param_group({"params": model.up.parameters(), "lr": 3e-3})
    opt.add_param_group({"params": list(model.down.parameters()), "policy": "kahan"})
    assert names(opt) == ["embedding.weight", "up.weight", "down.weight"]
    assert (
        [g["lr"] for g in opt.param_groups]
        == [g["lr"] for g in opt.optimizer.param_groups]
        == [1e-2, 3e-3, 1e-2]
    )
    before = {n: v.clone() for n, v in model.state_dict().items()}
    train(model, opt, 3, start=2)
    after = model.state_dict()
    for name in TWO_DIMENSIONAL:
        assert not torch.equal(before[name], after[name])
        assert torch.equal(hu.grid("e4m3@16").round(after[name]), after[name])
    assert [r.name for r in opt.events.rows] == names(opt)
    assert set(opt.slots[2].state) == {"carry"}


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "packed"])
def test_a_group_added_while_everything_else_is_frozen(kind: str) -> None:
    """It is managed at once, as beside tensors that are; what was frozen is taken up later as ever."""
    model = Tied().to(torch.bfloat16 if kind == "bfloat16" else torch.float32)
    model.requires_grad_(False)
    late = model.down.weight.requires_grad_()
    named = [(n, p) for n, p in model.named_parameters() if p is not late]
    stored: dict[str, Any] = {"storage": "packed"} if kind == "packed" else {}
    opt = hu.WriteBack(torch.optim.AdamW(named, lr=1e-2), "e4m3@16", "sr", model=model, **stored)
    assert names(opt) == []
    opt.add_param_group({"params": [("down.weight", late)]})
    assert names(opt) == ["down.weight"]
    train(model, opt, 2)
    assert [row.name for row in opt.events.rows] == ["down.weight"]
    now = model.state_dict()["down.weight"].float()
    assert torch.equal(hu.grid("e4m3@16").round(now), now)
    model.up.weight.requires_grad_()
    train(model, opt, 2)
    assert names(opt) == ["down.weight", "up.weight"]


@pytest.mark.parametrize("storage", ["container", "packed"])
def test_a_refused_group_is_not_added(storage: str) -> None:
    """Neither to the wrapped optimizer nor to the write-back."""
    model = Tied()
    base = torch.optim.AdamW([model.embedding.weight], lr=1e-2)
    opt = hu.WriteBack(base, "e4m3@16", "sr", model=model, storage=storage)
    bad = torch.nn.Parameter(torch.full((2, 2), torch.nan))
    for group, match in (
        ({"params": [model.up.weight], "policy": "best"}, "unknown policy 'best'"),
        ({"params": [model.up.weight], "grid": "e9m9"}, "unknown grid 'e9m9'"),
        ({"params": [bad]}, "parameter '1.0' has 4 value"),
        ({"params": [model.up.weight], "differentiable": True}, "differentiable"),
    ):
        with pytest.raises(hu.UsageError, match=match):
            opt.add_param_group(group)
        assert len(opt.param_groups) == len(base.param_groups) == 1
    with pytest.raises(ValueError, match="more than one parameter group"):
        opt.add_param_group({"params": [model.embedding.weight]})
    assert len(opt.param_groups) == len(base.param_groups) == 1
    assert names(opt) == ["embedding.weight"]
    train(model, opt, 1)


# ---- what must not matter ---------------------------------------------------------------------------


@pytest.mark.parametrize("storage", ["container", "packed"])
@pytest.mark.parametrize("policy", ["sr", "deadzone-sr", "kahan"])
@pytest.mark.parametrize("named", [False, True])
def test_the_order_of_parameters(policy: str, storage: str, named: bool) -> None:
    """Streams are keyed by name, so the optimizer's order is of no account."""
    runs = []
    for turn in (1, -1):
        model = Tied()
        parameters: list[Any] = list(model.named_parameters() if named else model.parameters())[::turn]
        base = torch.optim.AdamW(parameters, lr=1e-2)
        model_for_names = model if storage == "packed" or not named else None
        opt = hu.WriteBack(
            base, "e4m3@16", policy, model=model_for_names, storage=storage, project="stochastic"
        )
        train(model, opt, STEPS)
        runs.append((model.state_dict(), {r.name: r for r in opt.events.rows}))
    assert runs[0][1] == runs[1][1]
    for name, value in runs[0][0].items():
        assert_same(value, runs[1][0][name], name)


def test_splitting_groups() -> None:
    """One group or one for each parameter."""
    whole, split = Tied(), Tied()
    a = written_back(whole)
    groups = [{"params": [p]} for p in split.parameters()]
    base = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    b = hu.WriteBack(base, "e4m3@16", "sr", model=split)
    train(whole, a, STEPS)
    train(split, b, STEPS)
    assert_same_values(whole, split)
    assert a.events == b.events


@pytest.mark.parametrize("policy", ["rne", "sr", "eco", "kahan", "master"])
def test_threads(policy: str) -> None:
    """A tensor of 600 tiles, so that there is work for two."""
    runs = []
    for count in (1, 2):
        torch.set_num_threads(count)
        w = torch.randn(640, 720, generator=torch.Generator().manual_seed(0))
        model = torch.nn.Linear(720, 640, bias=False)
        model.load_state_dict({"weight": w})
        opt = hu.WriteBack(adamw(model), "e4m3", policy, model=model)
        for step in range(3):
            model.weight.grad = torch.randn(w.shape, generator=torch.Generator().manual_seed(step))
            opt.step()
        runs.append((model.weight.detach(), opt.events, opt.state_dict()["state"][0]))
    assert_same(runs[0][0], runs[1][0])
    assert runs[0][1] == runs[1][1]
    for key, value in runs[0][2].items():
        assert_same(value, runs[1][2][key], key)


def test_a_seed_and_a_name_make_the_stream() -> None:
    """Another seed gives other weights; the same name in another model the same bits."""
    runs = {}
    for seed in (0, 0, 1):
        model = Tied()
        train(model, written_back(model, seed=seed), STEPS)
        runs.setdefault(seed, []).append(model)
    assert_same_values(*runs[0])
    assert not torch.equal(runs[0][0].up.weight, runs[1][0].up.weight)


def test_wrapped_models_keep_their_names() -> None:
    """Data-parallel wrappers and torch.compile put prefixes into names, not into streams."""
    model = Tied()
    assert names(written_back(torch.nn.DataParallel(model))) == list(TWO_DIMENSIONAL)
    inner = torch.nn.Sequential(torch.nn.Linear(4, 4))
    inner[0] = torch.compile(inner[0], backend="eager")  # wrapped only: nothing is compiled before a call
    assert names(written_back(inner)) == ["0.weight"]


def test_the_wrapped_optimizer_shares_its_groups_and_state() -> None:
    """Also after it has loaded a state of its own, so that schedulers and trainers see one optimizer."""
    model = Tied()
    opt = written_back(model)
    train(model, opt, 2)
    opt.optimizer.load_state_dict(opt.optimizer.state_dict())
    assert opt.param_groups is opt.optimizer.param_groups
    assert opt.state is opt.optimizer.state
    opt.param_groups[0]["lr"] = 0.0
    before = values(model)
    train(model, opt, 1)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    assert "sr on e4m3@16; 3 tensors; AdamW" in repr(opt)
