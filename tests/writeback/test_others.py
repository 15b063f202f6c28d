"""Optimizers with more than a step: one inside another, and ones whose methods move the weights."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from oracle import assert_same
from writeback_models import TWO_DIMENSIONAL, Tied, adamw, loss_of, masks, train, unsealed, values

import halfulp as hu
from halfulp.errors import TamperingError

GRID = "e4m3@16"
STORED = ("float32", "bfloat16", "packed")
pytestmark = pytest.mark.usefixtures("one_thread")


def model_for(stored: str) -> tuple[torch.nn.Module, dict[str, Any]]:
    model = Tied().to(torch.bfloat16 if stored == "bfloat16" else torch.float32)
    return model, {"storage": "packed"} if stored == "packed" else {}


def stored_values(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {n: v.clone() for n, v in model.state_dict().items()}


def assert_on_grid(opt: hu.WriteBack, model: torch.nn.Module) -> None:
    state = model.state_dict()
    for slot in opt.slots:
        assert torch.equal(slot.grid.round(state[slot.name].float()), state[slot.name].float()), slot.name


# ---- an optimizer around another ------------------------------------------------------------------------


class Lookahead(torch.optim.Optimizer):
    """Every k-th step the weights go half way back to slow ones, which follow them (Zhang et al. 2019)."""

    def __init__(self, inner: torch.optim.Optimizer, k: int = 2, *, slow: str = "state") -> None:
        self.inner, self.k, self.calls, self.kind = inner, k, 0, slow
        super().__init__(inner.param_groups, inner.defaults)
        everything = [p for g in self.param_groups for p in g["params"]]
        if slow == "state":
            for p in everything:
                self.state[p]["slow"] = p.detach().clone()
        self.slow = [p.detach().clone() for p in everything] if slow == "list" else []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.inner.step()
        self.calls += 1
        if self.calls % self.k:
            return
        everything = [p for g in self.param_groups for p in g["params"]]
        for i, p in enumerate(everything):
            if self.kind == "lazy" and "slow" not in self.state[p]:
                self.state[p]["slow"] = p.detach().clone()
            slow = self.slow[i] if self.kind == "list" else self.state[p]["slow"]
            slow.add_(p - slow, alpha=0.5)
            p.copy_(slow)


def by_hand(model: torch.nn.Module, kind: str, steps: int) -> dict[str, torch.Tensor]:
    """The same in float32 on copies, rounding by the grid: the inner step, then the slow weights."""
    named = dict(model.named_parameters())
    managed = {n: p.dim() >= 2 for n, p in named.items()}
    grid = hu.grid(GRID)
    wide = {n: torch.nn.Parameter(p.detach().float().clone()) for n, p in named.items()}
    for n, p in wide.items():  # as WriteBack puts them on the grid; the slow copies were made before
        p.data.copy_(grid.round(p.detach()) if managed[n] else p.detach())
    slow = {n: p.detach().float().clone() for n, p in named.items()}
    inner = torch.optim.SGD(wide.values(), lr=0.5)
    if kind == "lazy":
        slow = {}
    for step in range(1, steps + 1):
        with torch.no_grad():
            for n, p in named.items():
                p.copy_(wide[n])
        model.zero_grad()
        loss_of(model, step).backward()
        for n, p in named.items():
            wide[n].grad = p.grad.float()
        inner.step()
        if step % 2 == 0:
            for n, p in wide.items():
                slow.setdefault(n, p.detach().clone()).add_(p.detach() - slow[n], alpha=0.5)
                p.data.copy_(slow[n])
        for n, p in wide.items():
            if managed[n]:
                p.data.copy_(grid.round(p.detach()))
    return {n: p.detach() for n, p in wide.items()}


@pytest.mark.parametrize("kind", ["state", "list", "lazy"])
@pytest.mark.parametrize("stored", STORED)
def test_lookahead(stored: str, kind: str) -> None:
    """Wherever it keeps its slow weights, and they are float32 where the weights are stepped in it."""
    model, options = model_for(stored)
    reference = copy.deepcopy(model)
    inner = torch.optim.SGD(model.parameters(), lr=0.5)
    opt = hu.WriteBack(Lookahead(inner, slow=kind), GRID, "rne", model=model, **options)
    for step in range(1, 7):
        opt.zero_grad()
        loss_of(model, step).backward()
        opt.step()
        assert_on_grid(opt, model)
    states = [opt.optimizer.state[slot.stepped] for slot in opt.slots]
    slows = opt.optimizer.slow if kind == "list" else [state["slow"] for state in states]  # type: ignore[attr-defined]
    assert {t.dtype for t in slows if t.dim() >= 2} == {torch.float32}
    if stored == "bfloat16":
        return  # its norms are stepped in bfloat16, which by_hand does not do
    found, expected = model.state_dict(), by_hand(reference, kind, 6)
    for name in TWO_DIMENSIONAL:
        assert torch.equal(found[name], expected[name]), name


@pytest.mark.parametrize("stored", STORED)
def test_lookahead_goes_on_from_its_state(stored: str) -> None:
    """Its own groups and state by parameter; what is inside it has a state of its own, which it must save."""
    runs = []
    for stop in (False, True):
        model, options = model_for(stored)
        inner = torch.optim.SGD(model.parameters(), lr=0.5)
        opt = hu.WriteBack(Lookahead(inner), GRID, "sr", model=model, **options)
        train(model, opt, 2)
        if stop:
            weights, state = copy.deepcopy((model.state_dict(), opt.state_dict()))
            model, options = model_for(stored)
            inner = torch.optim.SGD(model.parameters(), lr=0.5)
            opt = hu.WriteBack(Lookahead(inner), GRID, "sr", model=model, **options)
            model.load_state_dict(weights)
            opt.load_state_dict(state)
        train(model, opt, 4, start=2)
        runs.append(stored_values(model))
    for name, value in runs[0].items():
        assert_same(runs[1][name], value, name)


class Shrinking(torch.optim.Optimizer):
    """Moves every weight that it has, gradient or not."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data.mul_(0.97)
                if p.grad is not None:
                    p.data.sub_(p.grad, alpha=0.1)


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("policy", ["rne", "sr", "kahan", "master", "some tiles"])
def test_weights_that_move_without_a_gradient(policy: str, stored: str) -> None:
    """They are written back like the others, and only then counted."""
    model, options = model_for(stored)
    rule = hu.TileMaster(masks(model)) if policy == "some tiles" else policy
    opt = hu.WriteBack(Shrinking(model.parameters()), GRID, rule, model=model, **options)
    before = stored_values(model)
    loss_of(model, 0).backward()
    model.up.weight.grad = None
    for _ in range(20):
        opt.step()
        assert_on_grid(opt, model)
    assert {r.name for r in opt.events.rows} == set(TWO_DIMENSIONAL)
    after = model.state_dict()["up.weight"].float()
    if policy in ("sr", "kahan", "master"):
        expected = before["up.weight"].float() * 0.97**20
        assert after.abs().sum() == pytest.approx(float(expected.abs().sum()), rel=0.02)


@pytest.mark.parametrize("stored", STORED)
def test_weights_that_do_not_move_are_not_counted(stored: str) -> None:
    """Neither events nor carries: as with torch's own optimizers."""

    class Plain(Shrinking):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for p in self.param_groups[0]["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=0.1)

    model, options = model_for(stored)
    opt = hu.WriteBack(Plain(model.parameters()), GRID, "kahan", model=model, **options)
    train(model, opt, 2)
    opt.zero_grad()
    loss_of(model, 3).backward()
    model.up.weight.grad = None
    before, kept = stored_values(model), {k: v.clone() for k, v in opt.slots[1].kept_tensors().items()}
    opt.step()
    assert [r.name for r in opt.events.rows] == ["embedding.weight", "down.weight"]
    assert_same(model.state_dict()["up.weight"], before["up.weight"])
    for key, value in kept.items():
        assert_same(opt.slots[1].kept_tensors()[key], value, key)


# ---- methods that move the weights ------------------------------------------------------------------------


class Averaged(torch.optim.Optimizer):
    """Schedule-free SGD (Defazio et al. 2024): training at y, evaluation at x, and a z that makes the steps.

    y = (1 - b) z + b x; only z is kept, so that x is found from y and z, and y from x and z.
    """

    def __init__(self, params: Any, lr: float = 0.2, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "training": True, "count": 0})
        self.label = "averaged"

    @torch.no_grad()
    def eval(self) -> None:
        for group in self.param_groups:
            if group["training"]:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], 1 - 1 / group["beta"])
                group["training"] = False

    @torch.no_grad()
    def train(self) -> None:
        for group in self.param_groups:
            if not group["training"]:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], 1 - group["beta"])
                group["training"] = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["count"] += 1
            share = 1 / group["count"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                z = self.state[p].setdefault("z", p.detach().clone())
                p.lerp_(z, share)
                p.add_(p.grad, alpha=group["lr"] * (group["beta"] * (1 - share) - 1))
                z.sub_(p.grad, alpha=group["lr"])

    @torch.no_grad()
    def drift(self, by: float = 0.01) -> str:
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(by)
        return "moved"

    def looks(self, factor: int, *, more: int = 0) -> int:
        return factor * len(self.param_groups[0]["params"]) + more


def averaged(stored: str, policy: str = "sr") -> tuple[torch.nn.Module, hu.WriteBack]:
    """All tensors are managed: others go to the average and back by arithmetic, which rounds."""
    model, options = model_for(stored)
    every = {"params": lambda name, p: True, **options}
    return model, hu.WriteBack(Averaged(model.parameters()), GRID, policy, model=model, **every)


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("policy", ["rne", "sr", "kahan", "master"])
def test_evaluation_weights_are_on_the_grid_and_training_weights_return(policy: str, stored: str) -> None:
    """Looking at the model between steps changes nothing of the run."""
    runs = []
    for looks in (False, True):
        model, opt = averaged(stored, policy)
        for step in range(6):
            train(model, opt, 1, start=step)
            if not looks:
                continue
            training = stored_values(model)
            kept = {s.name: {k: v.clone() for k, v in s.kept_tensors().items()} for s in opt.slots}
            opt.eval()
            opt.eval()  # twice is once
            evaluated = stored_values(model)
            assert_on_grid(opt, model)
            assert opt.param_groups[0]["training"] is False
            if step > 2:
                assert not torch.equal(evaluated["embedding.weight"], training["embedding.weight"])
                with pytest.raises(hu.UsageError, match=r"weights for evaluation: call train\(\)"):
                    opt.step()
            opt.train()
            for slot in opt.slots:
                assert_same(model.state_dict()[slot.name], training[slot.name], slot.name)
                for key, value in kept[slot.name].items():
                    assert_same(slot.kept_tensors()[key], value, key)
        runs.append(stored_values(model))
    for name, value in runs[0].items():
        assert_same(runs[1][name], value, name)


def test_what_is_evaluated_is_the_nearest_to_the_average() -> None:
    model, opt = averaged("bfloat16", "sr")
    train(model, opt, 5)
    slot = opt.slots[1]
    y, z = slot.p.detach().float(), opt.optimizer.state[slot.shadow]["z"]
    assert z.dtype == torch.float32
    opt.eval()
    assert_same(slot.p.detach().float(), hu.grid(GRID).round(y.lerp(z, 1 - 1 / 0.9)))


@pytest.mark.parametrize("stored", STORED)
def test_a_state_that_was_saved_for_evaluation(stored: str) -> None:
    """As schedule-free optimizers ask for: the training weights are in it."""
    model, opt = averaged(stored, "master")
    train(model, opt, 6)
    opt.eval()
    weights, state = copy.deepcopy((model.state_dict(), opt.state_dict()))
    opt.train()
    again, resumed = averaged(stored, "master")
    if stored != "packed":
        again.load_state_dict(weights)
    resumed.load_state_dict(state)
    for name, value in again.state_dict().items():
        assert_same(value, weights[name], name)
    damaged = unsealed(state)
    damaged["state"][0].pop("halfulp.resting")
    with pytest.raises(hu.CorruptionError, match=r"'embedding.weight'.*does not round to the stored weight"):
        resumed.load_state_dict(damaged)
    resumed.train()
    assert train(again, resumed, 3, start=6) == train(model, opt, 3, start=6)
    for name, value in model.state_dict().items():
        assert_same(again.state_dict()[name], value, name)


def test_attributes_and_methods_go_through() -> None:
    """Whatever else an optimizer has, except names that begin with an underscore, which are torch's."""
    for stored in STORED:
        model, opt = averaged(stored)
        train(model, opt, 1)
        before = stored_values(model)
        assert opt.label == "averaged"
        assert opt.looks(2, more=1) == 2 * len(list(model.parameters())) + 1
        assert not hasattr(opt, "nothing_of_the_kind")
        assert all(torch.equal(v, before[k]) for k, v in stored_values(model).items())
    model = Tied()
    fused = hu.WriteBack(adamw(model, fused=True), GRID, "sr", model=model)
    assert not hasattr(fused, "eval")
    assert not getattr(fused, "_step_supports_amp_scaling", False)  # or GradScaler would leave it unscaled


@pytest.mark.parametrize("stored", STORED)
def test_a_method_that_moves_weights_is_refused(stored: str) -> None:
    model, opt = averaged(stored)
    train(model, opt, 2)
    before = stored_values(model)
    with pytest.raises(
        hu.UsageError, match=r"Averaged.drift\(\) moved 7 managed.*'embedding.weight'.*as they"
    ):
        opt.drift(by=0.02)
    after = model.state_dict()
    assert all(torch.equal(after[slot.name], before[slot.name]) for slot in opt.slots)
    train(model, opt, 1, start=2)


def test_a_state_without_groups() -> None:
    """Refused with what to do instead."""

    class Odd(Averaged):
        def state_dict(self) -> dict[str, Any]:
            return {"everything": super().state_dict()}

    model = Tied()
    opt = hu.WriteBack(Odd(model.parameters()), GRID, "sr", model=model)
    with pytest.raises(
        hu.UsageError, match=r"Odd.state_dict\(\) has no 'param_groups', only \['everything'\]"
    ):
        opt.state_dict()


def test_a_state_with_more() -> None:
    """What an optimizer adds to its state comes back to it; one file does not hold it."""

    class More(Averaged):
        seen: Any = None

        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "more": [1, 2]}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.seen = state_dict["more"]
            super().load_state_dict(state_dict)

    model = Tied()
    opt = hu.WriteBack(More(model.parameters()), GRID, "sr", model=model)
    train(model, opt, 1)
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert opt.seen == [1, 2]
    with pytest.raises(hu.UsageError, match=r"cannot hold \['more'\]"):
        hu.writeback.save(opt, "nowhere.safetensors")
    assert values(model)


class Counting(torch.optim.SGD):
    """Keep state of no parameter beside that of parameters, as MADGRAD (a tensor) and SPAM (an int) do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.state["total_step"] = self.state.get("total_step", 0) + 1  # type: ignore[call-overload]  # as others key it
        self.state.setdefault("k", torch.zeros(2))  # type: ignore[call-overload]  # as others key it
        self.state["k"] += 1  # type: ignore[index]
        return super().step(closure)


@pytest.mark.parametrize("plain", [False, True])
def test_state_that_is_of_no_parameter(plain: bool) -> None:
    """It is saved, comes back, and is under the digest; one file does not hold it."""
    model, again = Tied(), Tied()
    inner = Counting(model.parameters(), lr=0.1, momentum=0.9)
    opt = hu.WriteBack(inner, GRID, "sr", model=model)
    train(model, opt, 2)
    state = copy.deepcopy((inner if plain else opt).state_dict())
    again.load_state_dict(model.state_dict())
    resumed = hu.WriteBack(Counting(again.parameters(), lr=0.1, momentum=0.9), GRID, "sr", model=again)
    resumed.load_state_dict(state)
    assert resumed.state["total_step"] == 2  # type: ignore[index]
    assert resumed.state["k"].tolist() == [2, 2]  # type: ignore[index]
    train(again, resumed, 1)
    assert state["state"]["k"].tolist() == [2, 2]
    with pytest.raises(hu.UsageError, match=r"cannot hold \['total_step', 'k'\]"):
        hu.writeback.save(resumed, "nowhere.safetensors")
    state["state"]["k"] += 1
    if not plain:
        with pytest.raises(TamperingError, match="is not what was saved"):
            resumed.load_state_dict(state)
