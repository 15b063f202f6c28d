"""Everything that optimizers and loops may do: several, closures, scalers, gradients that are dropped."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from audit_reference import (
    STATIC,
    Brute,
    batches,
    made,
    rates,
    train,
    weights,
)

import halfulp as hu
from halfulp import kernels


def two_optimizers(model: Any) -> list[torch.optim.Optimizer]:
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    return [torch.optim.SGD(matrices, lr=0.2, momentum=0.9), torch.optim.AdamW(rest, lr=1e-3)]


@pytest.mark.parametrize("given", ["given", "found"])
def test_several_optimizers_share_a_step(given: str, tmp_path: Path) -> None:
    """Both parts of a step are one step: one row in ``run``, one call of a listener, ``every`` hits both."""
    model = made("mlp")
    optimizers = two_optimizers(model)
    brute = Brute(STATIC)
    heard: list[dict[str, Any]] = []
    audit = hu.Audit(
        optimizers if given == "given" else None,
        STATIC,
        model=model,
        out=tmp_path / "trace",
        every=2,
        part_steps=1,
        listeners=[heard.append],
    )
    with audit:
        for step in range(1, 6):
            for o in optimizers:
                o.zero_grad()
            loss = model.loss(batches(step))
            loss.backward()
            audit.log(loss)
            before = weights(model)
            lr = {**rates(model, optimizers[0]), **rates(model, optimizers[1])}
            for o in optimizers:
                o.step()
            if step % 2:
                brute.step(step, before, weights(model), lr, loss.item())
    trace = hu.Trace.open(tmp_path / "trace")
    brute.assert_equal(trace)
    assert [h["step"] for h in heard] == [1, 3, 5]
    assert all(set(h["tensors"]) == set(weights(model)) for h in heard)
    assert [o["class"] for o in trace.manifest["optimizers"]] == ["SGD", "AdamW"]


@pytest.mark.parametrize("each", [1, 3])
def test_an_optimizer_that_is_made_anew_begins_a_step(each: int, tmp_path: Path) -> None:
    """One for every batch, or for every epoch of three: each call is a step, and is committed like any other;
    what was dropped is not kept."""
    model = made("mlp")
    brute, made_so_far, heard = Brute(STATIC), [], []
    with hu.Audit(
        None, STATIC, model=model, out=tmp_path / "trace", part_steps=2, listeners=[heard.append]
    ) as audit:
        for step in range(1, 7):
            if step % each == 0 or step == 1:
                optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
                made_so_far.append(weakref.ref(optimizer))
            train(model, optimizer, 1, brute=brute, audit=audit, first=step, scheduled=False)
            if step == 5:
                assert hu.Trace.open(tmp_path / "trace").last_step >= 2
        gc.collect()
        assert sum(o() is not None for o in made_so_far) <= 2  # the last, and the first, which is described
    brute.assert_equal(hu.Trace.open(tmp_path / "trace"))
    assert [h["step"] for h in heard] == [1, 2, 3, 4, 5, 6]


def test_optimizers_that_step_at_different_rates(tmp_path: Path) -> None:
    """Two steps of the first to one of the second, as for adversarial networks: steps are the first's."""
    model = made("mlp")
    first, second = two_optimizers(model)
    with hu.Audit([first, second], ["bf16"], model=model, out=tmp_path / "trace"):
        for i in range(3):
            for o in (first, first, second):
                model.zero_grad()
                model.loss(batches(i)).backward()
                o.step()
    trace = hu.Trace.open(tmp_path / "trace")
    assert trace.steps.tolist() == [1, 2, 3, 4, 5, 6]
    assert trace.steps_of("fc1.weight").tolist() == [1, 2, 3, 4, 5, 6]
    assert trace.steps_of("norm").tolist() == [2, 4, 6]
    assert len(trace.frozen("bf16", "norm")) == 3
    trace.crossing("bf16", "norm")  # has its own steps


def test_parameters_added_later(tmp_path: Path) -> None:
    model = made("mlp")
    optimizer = torch.optim.AdamW(model.fc1.parameters(), lr=1e-3)
    brute = Brute(STATIC)
    with hu.Audit(
        optimizer, STATIC, expected_never_moved=True, model=model, out=tmp_path / "trace", part_steps=2
    ) as audit:
        train(model, optimizer, 3, brute=brute, audit=audit, scheduled=False)
        optimizer.add_param_group({"params": [*model.head.parameters()], "lr": 0.01})
        train(model, optimizer, 3, brute=brute, audit=audit, first=4, seed=1, scheduled=False)
    trace = hu.Trace.open(tmp_path / "trace")
    brute.assert_equal(trace)
    assert trace.steps_of("head.weight").tolist() == [4, 5, 6]
    assert trace.crossing("bf16", "head").first in (None, 4, 5, 6)
    assert len(trace.frozen("bf16")) == 6


def test_a_closure_is_part_of_the_step(tmp_path: Path) -> None:
    model = made("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    brute = Brute(STATIC)
    with hu.Audit(optimizer, STATIC, expected_never_moved=True, model=model, out=tmp_path / "trace") as audit:
        for step in range(1, 4):

            def closure(step: int = step) -> torch.Tensor:
                optimizer.zero_grad()
                loss = model.loss(batches(step))
                loss.backward()
                audit.log(loss)
                return loss

            before = weights(model)
            loss = optimizer.step(closure)
            brute.step(step, before, weights(model), rates(model, optimizer), loss.item())
    brute.assert_equal(hu.Trace.open(tmp_path / "trace"))


def test_lbfgs_is_one_step_whatever_it_evaluates(tmp_path: Path) -> None:
    model = made("mlp")
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model.loss(batches())
        loss.backward()
        return loss

    brute = Brute(STATIC)
    with hu.Audit(optimizer, STATIC, expected_never_moved=True, model=model, out=tmp_path / "trace"):
        for step in (1, 2):
            before = weights(model)
            optimizer.step(closure)
            brute.step(step, before, weights(model), rates(model, optimizer))
    brute.assert_equal(hu.Trace.open(tmp_path / "trace"))


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_the_scaler_skips_is_no_step(fused: bool, tmp_path: Path) -> None:
    """A fused optimizer is called for it all the same, and told to do nothing."""
    model = made("mlp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    brute = Brute(STATIC)
    step = 0
    with hu.Audit(optimizer, STATIC, expected_never_moved=True, model=model, out=tmp_path / "trace") as audit:
        for i in range(5):
            optimizer.zero_grad()
            scaler.scale(model.loss(batches(i))).backward()
            if i in (1, 3):
                model.fc2.weight.grad[0, 0] = torch.inf
            before = weights(model)
            scaler.step(optimizer)
            scaler.update()
            if i not in (1, 3):
                step += 1
                brute.step(step, before, weights(model), rates(model, optimizer))
    assert audit.step == 3
    brute.assert_equal(hu.Trace.open(tmp_path / "trace"))


def test_accumulated_gradients_are_one_step(tmp_path: Path) -> None:
    """Its loss is the mean of what the audit was told."""
    model = made("mlp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    brute = Brute(STATIC)
    with hu.Audit(optimizer, STATIC, expected_never_moved=True, model=model, out=tmp_path / "trace") as audit:
        for step in (1, 2):
            optimizer.zero_grad()
            losses = []
            for i in range(4):
                loss = model.loss(batches(4 * step + i))
                (loss / 4).backward()
                audit.log(loss)
                losses.append(loss.item())
            before = weights(model)
            optimizer.step()
            brute.step(step, before, weights(model), rates(model, optimizer), sum(losses) / 4)
    brute.assert_equal(hu.Trace.open(tmp_path / "trace"))


def test_every_third_step(tmp_path: Path) -> None:
    """Steps 1, 4, 7; what is followed over steps sees the audited ones only."""
    model = made("mlp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    brute = Brute(STATIC)
    with hu.Audit(
        optimizer, STATIC, expected_never_moved=True, model=model, out=tmp_path / "trace", every=3
    ) as audit:
        for step in range(1, 9):
            optimizer.zero_grad()
            loss = model.loss(batches(step))
            loss.backward()
            audit.log(loss)
            before = weights(model)
            optimizer.step()
            if step % 3 == 1:
                brute.step(step, before, weights(model), rates(model, optimizer), loss.item())
    trace = hu.Trace.open(tmp_path / "trace")
    brute.assert_equal(trace)
    assert trace.steps.tolist() == [1, 4, 7]


def test_a_step_that_raises_is_no_step(tmp_path: Path) -> None:
    """Neither is it mistaken for one that the next step is inside of, of the same or another optimizer."""
    model = made("mlp")
    first, second = two_optimizers(model)
    brute = Brute(STATIC)

    def fail() -> torch.Tensor:
        raise RuntimeError("no batch")

    with hu.Audit(None, STATIC, model=model, out=tmp_path / "trace"):
        for step, optimizer in enumerate((second, first, first), start=1):
            with pytest.raises(RuntimeError, match="no batch"):
                first.step(fail)
            model.zero_grad()
            model.loss(batches(step)).backward()
            before = weights(model)
            optimizer.step()
            # The second optimizer's step and the first's are parts of one.
            brute.step(max(1, step - 1), before, weights(model), rates(model, optimizer))
    brute.assert_equal(hu.Trace.open(tmp_path / "trace"))


class Lookahead(torch.optim.Optimizer):
    """An optimizer around another one, which goes half of the way."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self.inner = inner

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = [p for g in self.param_groups for p in g["params"]]
        before = [p.clone() for p in params]
        self.inner.step()
        self.inner.step()
        for p, b in zip(params, before, strict=True):
            p.lerp_(b, 0.5)


class Clamped(torch.optim.SGD):
    """A subclass whose step does more after its parent's, which is hooked as well."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.clamp_(-0.1, 0.1)


@pytest.mark.parametrize("kind", ["around", "subclass"])
def test_the_outer_step_is_the_step(kind: str, tmp_path: Path) -> None:
    model = made("mlp")
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = Lookahead(plain) if kind == "around" else Clamped(model.parameters(), lr=0.1)
    brute = Brute(STATIC)
    with hu.Audit(None, STATIC, model=model, out=tmp_path / "trace") as audit:
        train(model, optimizer, 3, brute=brute, audit=audit, scheduled=False)
    brute.assert_equal(hu.Trace.open(tmp_path / "trace"))


@pytest.mark.filterwarnings("ignore")  # torch.compile's own
def test_a_compiled_step(tmp_path: Path) -> None:
    """The compiler must not look into the hooks."""
    model = made("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = torch.compile(optimizer.step, backend="eager")
    brute = Brute(STATIC)
    with hu.Audit(optimizer, STATIC, expected_never_moved=True, model=model, out=tmp_path / "trace"):
        for step in (1, 2, 3):
            optimizer.zero_grad()
            model.loss(batches(step)).backward()
            before = weights(model)
            compiled()
            brute.step(step, before, weights(model), rates(model, optimizer))
    brute.assert_equal(hu.Trace.open(tmp_path / "trace"))


class Dropping(torch.optim.SGD):
    """An optimizer that gives gradients up inside its step; ``early``: before it moves anything."""

    early = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if closure is not None:
            with torch.enable_grad():
                closure()
        group = self.param_groups[0]
        held = [(p, p.grad) for p in group["params"] if p.grad is not None]
        if self.early:
            self.zero_grad()
        for p, grad in held:
            p.add_(grad, alpha=-group["lr"])
            p.grad = None


class Shrinking(torch.optim.Optimizer):
    """Decays matrices, gradient or none."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            if p.dim() >= 2:
                p.mul_(0.9)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("by", ["backward", "closure"])
def test_gradients_that_are_dropped_inside_the_step(by: str, early: bool, tmp_path: Path) -> None:
    """Whether they were there before it, or were made and dropped inside; scores are of those gradients."""
    model = made("gpt")
    model.unused.data[2] = torch.nan  # neither moved nor asked to: not part of a step, NaN or not
    optimizer = Dropping(model.parameters(), lr=0.1)
    optimizer.early = early
    brute = Brute(STATIC)
    scores = ("e4m3@128", 1, 3) if by == "backward" else None
    expected: dict[str, Any] = {n: 0.0 for n, p in model.named_parameters() if p.dim() >= 2}
    with hu.Audit(optimizer, STATIC, model=model, out=tmp_path / "trace", scores=scores):
        for step in (1, 2, 3):

            def closure(step: int = step) -> None:
                model.loss(batches(step)).backward()

            probe = made("gpt")
            probe.load_state_dict(model.state_dict())
            probe.loss(batches(step)).backward()
            lr, grads = rates(probe, torch.optim.SGD(probe.parameters(), lr=0.1)), probe.named_parameters()
            before = weights(model)
            if by == "backward":
                closure()
                optimizer.step()
            else:
                optimizer.step(closure)
            assert all(p.grad is None for p in model.parameters())
            brute.step(step, before, weights(model), lr)
            for name, p in grads if scores else ():
                if name in expected:
                    after = model.get_parameter(name).detach()
                    expected[name] += kernels.score(before[name], p.grad, after, "e4m3@128", after=True)
    trace = hu.Trace.open(tmp_path / "trace")
    brute.assert_equal(trace)
    assert "unused" not in set(trace.table().to_polars()["tensor"])
    for name, found in trace.scores().items() if scores else ():
        np.testing.assert_array_equal(found, expected[name].numpy())


def test_tensors_that_move_without_a_gradient_are_part_of_the_step(tmp_path: Path) -> None:
    model = made("mlp")
    optimizer = Shrinking(model.parameters())
    brute = Brute(STATIC)
    with hu.Audit(optimizer, STATIC, model=model, out=tmp_path / "trace"):
        for step in (1, 2):
            before = weights(model)
            optimizer.step()
            moved = {n: 0.1 for n, p in model.named_parameters() if p.dim() >= 2}
            brute.step(step, before, weights(model), moved)
    brute.assert_equal(hu.Trace.open(tmp_path / "trace"))


def test_gradients_that_are_released_in_backward(tmp_path: Path) -> None:
    """An optimizer a tensor, stepped by a hook as soon as its gradient is there: one step a backward."""
    model = made("mlp")
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def release(p: torch.Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(release)
    brute = Brute(STATIC)
    with hu.Audit(None, STATIC, model=model, out=tmp_path / "trace"):
        for step in (1, 2, 3):
            before = weights(model)
            model.loss(batches(step)).backward()
            brute.step(step, before, weights(model), dict.fromkeys(before, 0.1))
    brute.assert_equal(hu.Trace.open(tmp_path / "trace"))


def test_tensors_that_ask_for_no_gradient_but_are_given_one(tmp_path: Path) -> None:
    """Master copies are often made so: the optimizer moves what has a gradient."""
    master = torch.ones(8, 8)
    optimizer = torch.optim.SGD([master, torch.nn.Parameter(torch.ones(2))], lr=1e-4)
    with hu.Audit(optimizer, ["bf16"], out=tmp_path / "trace"):
        master.grad = torch.ones(8, 8)
        optimizer.step()
    assert hu.Trace.open(tmp_path / "trace").frozen("bf16").tolist() == [1.0]
