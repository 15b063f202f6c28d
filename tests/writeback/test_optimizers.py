"""Any optimizer, scheduler and scaler: torch's own, and ones that a user might write."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from oracle import assert_same
from torch.optim import lr_scheduler
from writeback_models import VOCABULARY, WIDTH, Tied, adamw, loss_of, train, values, written_back

import halfulp as hu
from halfulp.writeback import WriteBackOptions

GRID = "e4m3@16"
Parameters = Iterable[torch.nn.Parameter]
pytestmark = pytest.mark.usefixtures("one_thread")


class Sparse(torch.nn.Module):
    """Embeddings with sparse gradients."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = torch.nn.Embedding(VOCABULARY, WIDTH, sparse=True)
        self.head = torch.nn.Embedding(VOCABULARY, VOCABULARY, sparse=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.embedding(tokens).sum(-1, keepdim=True) * self.head(tokens)


def torch_optimizers() -> dict[str, Callable[[Parameters], torch.optim.Optimizer]]:
    """Every optimizer of torch.optim that there is, in every implementation that it has on a CPU."""
    o = torch.optim
    plain: dict[str, tuple[Any, dict[str, Any]]] = {
        "Adadelta": (o.Adadelta, {"lr": 1.0}),
        "Adagrad": (o.Adagrad, {"lr": 1e-2}),
        "Adam": (o.Adam, {"lr": 3e-3, "weight_decay": 0.1}),
        "Adam amsgrad maximize": (o.Adam, {"lr": 3e-3, "amsgrad": True, "maximize": True}),
        "AdamW": (o.AdamW, {"lr": 3e-3, "weight_decay": 0.1}),
        "Adamax": (o.Adamax, {"lr": 3e-3}),
        "ASGD": (o.ASGD, {"lr": 1e-1}),
        "NAdam": (o.NAdam, {"lr": 3e-3, "weight_decay": 0.1, "decoupled_weight_decay": True}),
        "RAdam": (o.RAdam, {"lr": 3e-2}),
        "RMSprop": (o.RMSprop, {"lr": 3e-3, "momentum": 0.9, "centered": True}),
        "Rprop": (o.Rprop, {"lr": 1e-3}),
        "SGD": (o.SGD, {"lr": 1e-1, "momentum": 0.9}),
        "SGD nesterov maximize": (o.SGD, {"lr": 1e-1, "momentum": 0.9, "nesterov": True, "maximize": True}),
    }
    made: dict[str, Callable[[Parameters], torch.optim.Optimizer]] = {}
    for name, (kind, options) in plain.items():
        for way in ("foreach", "plain", "fused"):
            if way == "fused" and name.split()[0] not in ("Adagrad", "Adam", "AdamW", "SGD"):
                continue
            chosen = options | ({"fused": True} if way == "fused" else {"foreach": way == "foreach"})
            made[f"{name}, {way}"] = lambda p, kind=kind, chosen=chosen: kind(p, **chosen)
    made["Adafactor, foreach"] = lambda p: o.Adafactor(p, lr=1e-2, weight_decay=0.1, foreach=True)
    made["Adafactor, plain"] = lambda p: o.Adafactor(p, lr=1e-2, foreach=False)
    if hasattr(o, "Muon"):  # since torch 2.9; for matrices only
        made["Muon"] = lambda p: o.Muon([x for x in p if x.dim() == 2], lr=1e-2)
    made["SparseAdam"] = lambda p: o.SparseAdam(list(p), lr=1e-2)
    made["LBFGS"] = lambda p: o.LBFGS(list(p), lr=0.1, max_iter=3)
    return made


OPTIMIZERS = torch_optimizers()


def test_no_optimizer_is_missing() -> None:
    """Whatever torch adds should be added here."""
    there = {n for n in dir(torch.optim) if n[0].isupper() and n != "Optimizer"}
    assert there == {n.split(",")[0].split()[0] for n in OPTIMIZERS}


@pytest.mark.parametrize("policy", ["rne", "sr"])
@pytest.mark.parametrize(
    ("name", "scaled"),
    [
        (n, scaled) for n in OPTIMIZERS for scaled in (False, True) if not (scaled and n == "LBFGS")
    ],  # no closures
)
def test_each_step_stores_what_it_should(name: str, scaled: bool, policy: str) -> None:
    """After each step every managed weight is Q of what the optimizer made, and the counts are those of
    copies compared by hand."""
    model = Sparse() if name == "SparseAdam" else Tied()
    base = OPTIMIZERS[name](model.parameters())
    opt = hu.WriteBack(base, GRID, policy, model=model, seed=5)
    schedule = lr_scheduler.LambdaLR(opt, lambda step: 1.0 / (1 + step))
    scaler = torch.amp.GradScaler("cpu", enabled=scaled, init_scale=2.0**10)
    managed = {n: p for n, p in model.named_parameters() if p.dim() >= 2}
    grid, proposed, moved = hu.grid(GRID), {}, {n: torch.zeros_like(p).bool() for n, p in managed.items()}
    base.register_step_post_hook(
        lambda *_: proposed.update({n: p.detach().clone() for n, p in managed.items()})
    )
    any_moved = False
    for step in range(1, 6):
        before = values(model)

        def closure(step: int = step) -> torch.Tensor:
            opt.zero_grad()
            loss = loss_of(model, step)
            scaler.scale(loss).backward()
            return loss

        if name == "LBFGS":
            opt.step(closure)
        else:
            closure()
            scaler.step(opt)
            scaler.update()
        for n, p in managed.items():
            q, z, stored = before[n], proposed[n], p.detach()
            stream = hu.Stream(seed=5, name=n, step=step)
            assert_same(stored, grid.round(z, stochastic=stream if policy == "sr" else None), n)
            moved[n] |= stored != q
            row = opt.events[n]
            assert row.frozen == int((stored == q).sum())
            assert row.zero_proposal == int((z == q).sum())
            assert row.endpoint == int((stored.abs() == grid.largest).sum())  # type: ignore[attr-defined]
            assert row.never_moved == int((~moved[n]).sum())
            assert row.nonfinite == 0
            assert row.numel == p.numel()
        assert opt.param_groups[0]["lr"] == base.param_groups[0]["lr"]
        schedule.step()
        any_moved |= any(bool(m.any()) for m in moved.values())
    assert any_moved


@pytest.mark.parametrize("name", [n for n in OPTIMIZERS if n != "SparseAdam"])
def test_on_the_containers_own_grid_it_is_the_plain_optimizer(name: str) -> None:
    """Rounding to float32 changes no float32: with scheduler, clipping and scaler, bit for bit."""
    plain, wrapped = common_loop(name, wrap=False), common_loop(name, wrap=True)
    for key, value in plain.items():
        assert_same(wrapped[key], value, key)


def common_loop(name: str, *, wrap: bool) -> dict[str, torch.Tensor]:
    """Five steps of what training loops do; the weights."""
    model = Tied()
    base = OPTIMIZERS[name](model.parameters())
    opt: Any = hu.WriteBack(base, "float32", "rne", model=model) if wrap else base
    schedule = lr_scheduler.CosineAnnealingLR(opt, 5)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    for step in range(5):

        def closure(step: int = step) -> torch.Tensor:
            opt.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            return loss

        if name == "LBFGS":
            opt.step(closure)
        else:
            opt.zero_grad()
            scaler.scale(loss_of(model, step)).backward()
            scaler.unscale_(opt)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(opt)
            scaler.update()
        schedule.step()
    return values(model)


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda t: 0.9**t),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda t: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 3),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=4),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 6),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 6),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 1e-3, 1e-2, step_size_up=2, cycle_momentum=True),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 1e-2, total_steps=8),  # moves betas, too
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.5, threshold=0.5),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers(name: str) -> None:
    """The same rates as for the plain optimizer, and the same weights where the grid rounds nothing; packed,
    the same as in a container."""
    rates, weights = [], []
    for grid, storage in ((None, ""), ("float32", "container"), ("bf16", "container"), ("bf16", "packed")):
        model = Tied()
        base = adamw(model)
        opt: Any = base if grid is None else hu.WriteBack(base, grid, "sr", model=model, storage=storage)
        schedule = SCHEDULERS[name](opt)
        seen = []
        base.register_step_pre_hook(lambda o, *_, seen=seen: seen.append(o.param_groups[0]["lr"]))
        for step in range(7):
            loss = train(model, opt, 1, start=step)[0]
            schedule.step(*([loss] if name == "ReduceLROnPlateau" else []))
        rates.append(sorted(set(seen)))
        weights.append(model.state_dict())
    assert len(rates[0]) > 1
    assert all(r == rates[0] for r in rates)
    for key, value in weights[0].items():
        assert_same(weights[1][key], value, key)
        assert_same(weights[3][key], weights[2][key], key)


@pytest.mark.parametrize("storage", ["container", "packed"])
def test_a_scheduler_of_the_wrapped_optimizer(storage: str) -> None:
    """Made before the write-back, it works on; and a rate set by hand in either place counts."""
    model = Tied()
    base = adamw(model)
    schedule = lr_scheduler.ExponentialLR(base, 0.5)
    opt = hu.WriteBack(base, GRID, "sr", model=model, storage=storage)
    used = []
    base.register_step_pre_hook(lambda o, *_: used.append(o.param_groups[0]["lr"]))
    for step in range(3):
        train(model, opt, 1, start=step)
        schedule.step()
    opt.param_groups[0]["lr"] = 7.0
    assert opt.state_dict()["param_groups"][0]["lr"] == base.param_groups[0]["lr"] == 7.0
    base.param_groups[0]["lr"] = 8.0
    train(model, opt, 1, start=3)
    assert sorted(set(used)) == [1e-2 / 4, 1e-2 / 2, 1e-2, 8.0]
    assert opt.param_groups[0]["lr"] == 8.0


def test_a_rate_that_is_a_tensor() -> None:
    """As for compiled loops: torch takes it, the decay share is a number, the state is whole."""
    model, plain = Tied(), Tied()
    opt = hu.WriteBack(adamw(model, lr=torch.tensor(1e-2)), "float32", "rne", model=model)
    train(model, opt, 3)
    train(plain, adamw(plain, lr=torch.tensor(1e-2)), 3)
    assert all(torch.equal(p, plain.get_parameter(n)) for n, p in model.named_parameters())
    assert isinstance(opt.events.rows[0].decay_share, float)


# ---- scalers ----------------------------------------------------------------------------------------


def test_a_scaler_skips_a_step_that_overflowed() -> None:
    """Nothing happens: no step is counted, so the stream goes on where it was."""
    model, other = Tied(), Tied()
    opt, alone = written_back(model), written_back(other)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in (0, 1, 2):
        opt.zero_grad()
        loss = loss_of(model, step) * (float("inf") if step == 1 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
    assert opt.steps == 2
    assert scaler.get_scale() == 2.0
    train(other, alone, 1)
    train(other, alone, 1, start=2)
    assert all(torch.equal(p, other.get_parameter(n)) for n, p in model.named_parameters())


# ---- optimizers that users write ------------------------------------------------------------------------


class ByData(torch.optim.Optimizer):
    """Moves ``p.data``, as code from before ``torch.no_grad`` does."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data.add_(p.grad, alpha=-group["lr"])


class ByCopy(ByData):
    """Makes new values and copies them over."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.copy_(torch.add(p, p.grad, alpha=-group["lr"]))


class ByNewData(ByData):
    """Gives ``p.data`` another tensor."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = torch.add(p.data, p.grad, alpha=-group["lr"])


class Replacing(ByData):
    """Puts new parameters into its groups."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for i, p in enumerate(group["params"]):
                p.data.add_(1.0)
                group["params"][i] = torch.nn.Parameter(p.detach() + 1.0)


class Failing(ByData):
    """Moves some parameters and then fails."""

    def step(self, closure: Any = None) -> None:
        moved = 0
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data.add_(1.0)
                    moved += 1
                    if p.shape == (24, 40):
                        raise RuntimeError("the third tensor is too much")
        if not moved:
            raise RuntimeError("nothing to do")


@pytest.mark.parametrize("storage", ["container", "native", "packed"])
@pytest.mark.parametrize("kind", [ByData, ByCopy, ByNewData])
def test_third_party_optimizers(kind: type[ByData], storage: str) -> None:
    """However they move their parameters in place, the result is SGD's."""
    runs = []
    for make in (kind, torch.optim.SGD):
        model = Tied().to(torch.bfloat16 if storage == "native" else torch.float32)
        opt = hu.WriteBack(make(model.parameters(), lr=0.05), GRID, "sr", model=model, storage=storage)
        train(model, opt, 4)
        runs.append((model.state_dict(), opt.events))
    assert runs[0][1] == runs[1][1]
    for key, value in runs[0][0].items():
        assert_same(value, runs[1][0][key], key)


@pytest.mark.parametrize("storage", ["container", "native", "packed"])
def test_an_optimizer_that_replaces_parameters(storage: str) -> None:
    """An error with its name; weights and groups are as they were, so that training can go on without it."""
    model = Tied().to(torch.bfloat16 if storage == "native" else torch.float32)
    opt = hu.WriteBack(Replacing(model.parameters()), GRID, "kahan", model=model, storage=storage)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    kept = [p for g in opt.optimizer.param_groups for p in g["params"]]
    with pytest.raises(hu.UsageError, match=r"Replacing.step\(\) replaced its parameters"):
        train(model, opt, 1)
    after = model.state_dict()
    assert all(torch.equal(after[slot.name], before[slot.name]) for slot in opt.slots)
    assert all(
        a is b
        for a, b in zip([p for g in opt.optimizer.param_groups for p in g["params"]], kept, strict=True)
    )
    assert opt.steps == 0


@pytest.mark.parametrize("materialise", ["tensor", "all"])
@pytest.mark.parametrize("storage", ["container", "native", "packed"])
@pytest.mark.parametrize("policy", ["sr", "kahan", "master"])
def test_an_error_inside_the_step_leaves_weights_as_they_were(
    policy: str, storage: str, materialise: Any
) -> None:
    """Managed weights, what the policy keeps, the telemetry and the step number; then training goes on."""
    model = Tied().to(torch.bfloat16 if storage == "native" else torch.float32)
    base = Failing(model.parameters())
    opt = hu.WriteBack(
        base, GRID, policy, model=model, storage=storage, options=WriteBackOptions(materialise=materialise)
    )
    good = ByData.step.__get__(base)
    bad, base.step = base.step, good  # type: ignore[method-assign]
    train(model, opt, 2)
    base.step = bad  # type: ignore[method-assign]
    before = {k: v.clone() for k, v in model.state_dict().items()}
    kept = [{k: v.clone() for k, v in s.kept_tensors().items()} for s in opt.slots]
    events = opt.events
    with pytest.raises(RuntimeError, match="the third tensor"):
        train(model, opt, 1, start=2)
    after = model.state_dict()
    for slot, old in zip(opt.slots, kept, strict=True):
        assert_same(after[slot.name], before[slot.name], slot.name)
        assert set(slot.kept_tensors()) == set(old)
        for key, value in slot.kept_tensors().items():
            assert_same(value, old[key], f"{key} of {slot.name}")
    assert opt.steps == 2
    assert opt.events == events
    base.step = good  # type: ignore[method-assign]
    train(model, opt, 1, start=2)
    assert opt.steps == 3


def test_a_closure_sees_the_stored_weights() -> None:
    """Once, before anything moves; its loss is returned."""
    model = Tied()
    opt = written_back(model, policy="master")
    train(model, opt, 3)
    grid, seen = hu.grid("e4m3@16"), []

    def closure() -> torch.Tensor:
        opt.zero_grad()
        weight = model.up.weight.detach()
        seen.append(torch.equal(weight, grid.round(weight)))
        loss = loss_of(model, 9)
        assert torch.is_grad_enabled()
        loss.backward()
        return loss

    expected = loss_of(model, 9).item()
    assert opt.step(closure).item() == expected
    assert seen == [True]


def test_a_differentiable_optimizer_is_refused() -> None:
    model = Tied()
    with pytest.raises(hu.UsageError, match="differentiable=True"):
        hu.WriteBack(torch.optim.SGD(model.parameters(), lr=0.1, differentiable=True), GRID, model=model)


def test_lbfgs_needs_containers() -> None:
    """It looks at the model while it moves the weights."""
    model = Tied()
    with pytest.raises(hu.UsageError, match=r"LBFGS.*storage='packed'"):
        hu.WriteBack(torch.optim.LBFGS(model.parameters()), GRID, model=model, storage="packed")


def test_a_tensor_without_a_gradient_has_no_events() -> None:
    """It was not asked to move; the others' rows are of this step."""
    model = Tied()
    opt = written_back(model)
    train(model, opt, 1)
    opt.zero_grad()
    model.up.weight.grad = torch.ones_like(model.up.weight)
    before = values(model)
    opt.step()
    assert [r.name for r in opt.events.rows] == ["up.weight"]
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters() if n != "up.weight")


@pytest.mark.parametrize(
    ("policy", "setting"), [("rne", {"differentiable": True}), ("eco", {"betas": (0.0, 0.999)})]
)
def test_settings_that_are_refused_are_not_loaded_either(policy: str, setting: dict[str, Any]) -> None:
    """They would be found at the next step, or at the next state, when this one is gone."""
    model = torch.nn.Linear(4, 4)
    opt = hu.WriteBack(torch.optim.AdamW(model.parameters(), lr=1e-3), "bf16", policy, model=model)
    saved = opt.state_dict()
    other = {**saved, "param_groups": [{**saved["param_groups"][0], **setting}]}
    with pytest.raises(hu.UsageError, match=next(iter(setting))):
        opt.load_state_dict(other)
    opt.load_state_dict(saved)
    assert opt.param_groups[0]["betas"] == (0.9, 0.999)
