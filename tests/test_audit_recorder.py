"""The recorder against brute force, and everything that a training loop may do to it."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import audit_ranks
import numpy as np
import polars as pl
import pytest
import torch
from audit_reference import (
    GRIDS,
    MODELS,
    OPTIMIZERS,
    STATIC,
    Brute,
    assert_same_tables,
    batches,
    made,
    rates,
    tables,
    train,
    weights,
)
from safetensors.torch import load_file

import halfulp as hu
from halfulp import kernels
from halfulp.audit import recorder, verdict
from halfulp.trace import TraceWriter

# ---- every number ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("kind", MODELS)
def test_every_number_is_that_of_brute_force(kind: str, name: str, tmp_path: Path) -> None:
    """Counts, phase and expectation of every tensor, grid and step; sums, rates and losses."""
    model = made(kind)
    optimizer = OPTIMIZERS[name](model.parameters())
    brute = Brute(GRIDS)
    with hu.Audit(
        optimizer, GRIDS, expected_never_moved=True, model=model, out=tmp_path / "trace", part_steps=2
    ) as audit:
        train(model, optimizer, 4, brute=brute, audit=audit)
    brute.assert_equal(hu.Trace.open(tmp_path / "trace"))
    assert len(brute.informative()) >= 10  # numbers that could have been wrong


def test_float64_weights(tmp_path: Path) -> None:
    model = made("mlp").double()
    generator = batches()
    model.loss = lambda _: model(torch.randn(8, 16, generator=generator, dtype=torch.float64)).square().mean()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    brute = Brute(STATIC)
    with hu.Audit(optimizer, STATIC, expected_never_moved=True, model=model, out=tmp_path / "trace") as audit:
        train(model, optimizer, 4, brute=brute, audit=audit)
    brute.assert_equal(hu.Trace.open(tmp_path / "trace"))


def test_proposals_that_are_not_finite_are_counted_and_nothing_else(tmp_path: Path) -> None:
    model = made("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    brute = Brute(GRIDS)
    with hu.Audit(optimizer, GRIDS, expected_never_moved=True, model=model, out=tmp_path / "trace"):
        for step, bad in enumerate((torch.inf, torch.nan, 1.0), start=1):
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=batches(step))
            model.fc2.weight.grad[3, 4] = bad
            before, lr = weights(model), rates(model, optimizer)
            optimizer.step()
            brute.step(step, before, weights(model), lr)
    trace = hu.Trace.open(tmp_path / "trace")
    brute.assert_equal(trace)
    bad_counts = trace.scan("tensors").group_by("tensor", maintain_order=True).agg("nonfinite").collect()
    assert dict(bad_counts.iter_rows()) == {i: [1, 1, 1] if i == 4 else [0, 0, 0] for i in range(9)}


# ---- the run is not touched ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("kind", MODELS)
def test_the_run_is_bitwise_the_same_without_the_audit(kind: str, name: str, tmp_path: Path) -> None:
    """Weights, gradients, losses, optimizer state and every random generator."""
    runs = []
    for audited in (False, True):
        torch.manual_seed(3)
        random.seed(3)
        model = made(kind)
        optimizer = OPTIMIZERS[name](model.parameters())
        audit = hu.Audit(
            optimizer,
            GRIDS,
            model=model,
            out=tmp_path / "trace",
            decay=True,
            keep=True,
            scores=("e4m3", 2, 3),
        )
        if audited:
            audit.start()
        losses = train(model, optimizer, 3, audit=audit if audited else None)
        if audited:
            audit.stop()
        state = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        generators = (torch.get_rng_state(), torch.tensor(np.random.get_state()[1].astype(np.int64)))  # noqa: NPY002
        runs.append(([*weights(model).values(), *state, *grads, *generators], losses, random.getstate()))
    assert all(torch.equal(a, b) for a, b in zip(runs[0][0], runs[1][0], strict=True))
    assert runs[0][1:] == runs[1][1:]


# ---- optimizers and loops --------------------------------------------------------------------------------


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
    assert "unused" not in set(trace.table()["tensor"])
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


# ---- which tensors, which numbers ------------------------------------------------------------------------


def test_tied_frozen_and_unused_tensors(tmp_path: Path) -> None:
    """A tied tensor is there once, under its first name; one without a gradient is in the inventory only."""
    model = made("gpt")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with hu.Audit(optimizer, ["bf16"], model=model, out=tmp_path / "trace") as audit:
        train(model, optimizer, 2, audit=audit)
    trace = hu.Trace.open(tmp_path / "trace")
    names = [t["name"] for t in trace.tensors]
    trainable = [n for n, p in model.named_parameters() if p.requires_grad]
    assert names == trainable
    assert "wte.weight" in names
    assert "lm_head.weight" not in names
    assert "still" not in names
    assert set(trace.table()["tensor"]) == set(trainable) - {"unused"}


def test_groups_and_scopes(tmp_path: Path) -> None:
    model = made("gpt")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with hu.Audit(optimizer, ["bf16", "e5m2"], model=model, out=tmp_path / "trace") as audit:
        train(model, optimizer, 2, audit=audit)
    trace = hu.Trace.open(tmp_path / "trace")
    groups = {t["name"]: t["group"] for t in trace.tensors}
    assert groups["wte.weight"] == groups["wpe.weight"] == "embedding"
    assert groups["h.0.attn.c_attn.weight"] == groups["h.0.attn.c_proj.bias"] == "attention"
    assert groups["h.0.mlp.0.weight"] == groups["h.0.mlp.2.weight"] == "mlp"
    assert groups["h.0.ln_1.weight"] == groups["ln_f.bias"] == "norm"
    assert groups["unused"] == "other"
    table = trace.table().filter((pl.col("grid") == "e5m2") & (pl.col("step") == 2))
    core = table.filter(pl.col("group").is_in(["attention", "mlp"]))
    assert trace.frozen("e5m2", "core")[1] == core["frozen"].sum() / core["numel"].sum()
    one = table.filter(pl.col("tensor") == "wpe.weight")
    assert trace.frozen("e5m2", "wpe.weight")[1] == one["frozen"].item() / (12 * 24)


def test_your_own_groups(tmp_path: Path) -> None:
    model = made("mlp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rule = lambda name, p: "vectors" if p.dim() < 2 else name.split(".")[0]  # noqa: E731
    with hu.Audit(optimizer, ["bf16"], model=model, out=tmp_path / "trace", groups=rule) as audit:
        train(model, optimizer, 1, audit=audit)
    trace = hu.Trace.open(tmp_path / "trace")
    assert {t["group"] for t in trace.tensors} == {"vectors", "fc1", "fc2", "head"}
    assert trace.numel("vectors") == sum(p.numel() for p in model.parameters() if p.dim() < 2)
    assert len(trace.frozen("bf16", "vectors")) == 1


def test_a_choice_of_tensors(tmp_path: Path) -> None:
    model = made("mlp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    only = lambda name, p: p.dim() >= 2  # noqa: E731
    with hu.Audit(optimizer, ["bf16"], model=model, out=tmp_path / "trace", params=only) as audit:
        train(model, optimizer, 1, audit=audit)
    names = [t["name"] for t in hu.Trace.open(tmp_path / "trace").tensors]
    assert names == ["fc1.weight", "fc2.weight", "head.weight"]


def test_a_sample_counts_exactly_the_sampled_tiles(tmp_path: Path) -> None:
    """A quarter of the tiles of every tensor, the same at every step and in every run with the seed."""
    chosen = []
    for seed in (0, 0, 1):
        model = made("gpt")
        model.big = torch.nn.Parameter(torch.randn(50, 770, generator=batches()) * 0.02)
        plain = model.loss
        model.loss = lambda g, plain=plain, model=model: plain(g) + model.big.square().sum()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        path = tmp_path / f"trace{len(chosen)}"
        copies, loss = [], []
        with hu.Audit(
            optimizer, STATIC, expected_never_moved=True, model=model, out=path, sample=0.25, seed=seed
        ) as audit:
            for step in (1, 2):
                optimizer.zero_grad()
                loss.append(model.loss(batches(step)))
                loss[-1].backward()
                audit.log(loss[-1])
                before, lr = weights(model), rates(model, optimizer)
                optimizer.step()
                copies.append((before, weights(model), lr))
        tiles = {w.name: w.tiles.numpy() for w in audit.watched.values()}
        chosen.append(tiles)
        for name, p in model.named_parameters():
            if p.requires_grad:
                everything = kernels.tiles_of(p.numel())
                assert len(set(tiles[name])) == max(1, round(0.25 * everything))
                assert tiles[name].max() < everything
                assert (np.diff(tiles[name]) > 0).all()
        brute = Brute(STATIC, tiles)
        for step, (before, after, lr) in enumerate(copies, start=1):
            brute.step(step, before, after, lr, loss[step - 1].item())
        trace = hu.Trace.open(path)
        brute.assert_equal(trace)
        assert trace.numel("big") == sum(min(768, 38500 - 768 * t) for t in tiles["big"])
    assert all((chosen[0][n] == chosen[1][n]).all() for n in chosen[0])
    assert not np.array_equal(chosen[0]["big"], chosen[2]["big"])
    assert "A fixed sample of 25% of the tiles" in "\n".join(verdict.lines(trace))


def test_decay_and_gradient_apart(tmp_path: Path) -> None:
    """Where weight decay is decoupled; null where it is not, or where there is none."""
    model = made("mlp")
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.3},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=3e-3)
    decays = {n: 0.3 if p.dim() >= 2 else 0.0 for n, p in model.named_parameters()}
    brute = Brute(STATIC)
    with hu.Audit(
        optimizer, STATIC, expected_never_moved=True, model=model, out=tmp_path / "trace", decay=True
    ) as audit:
        for step in (1, 2, 3):
            optimizer.zero_grad()
            loss = model.loss(batches(step))
            loss.backward()
            audit.log(loss)
            before, lr = weights(model), rates(model, optimizer)
            optimizer.step()
            brute.step(step, before, weights(model), lr, loss.item(), decays)
    trace = hu.Trace.open(tmp_path / "trace")
    brute.assert_equal(trace)
    shares = trace.series("frozen_decay", "bf16"), trace.series("frozen_gradient", "bf16")
    assert shares[0].min() > 0.9  # decay alone is lost
    assert shares[1].max() < 0.9


def test_coupled_decay_is_no_part_of_its_own(tmp_path: Path) -> None:
    model = made("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    with hu.Audit(optimizer, ["bf16"], model=model, out=tmp_path / "trace", decay=True) as audit:
        train(model, optimizer, 1, audit=audit)
    table = hu.Trace.open(tmp_path / "trace").table()
    assert table["frozen_decay"].null_count() == table["frozen_gradient"].null_count() == len(table)


@pytest.mark.parametrize("sample", [None, 0.5])
def test_scores_are_summed_over_their_steps(sample: float | None, tmp_path: Path) -> None:
    """Steps 2 to 4, matrices only; a resumed audit goes on with the sums."""
    model = made("mlp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    expected: dict[str, torch.Tensor] = {}
    copies = []

    def options() -> dict[str, Any]:
        return {"model": model, "out": tmp_path / "trace", "scores": ("e4m3@128", 2, 4), "sample": sample}

    audit = hu.Audit(optimizer, ["bf16"], **options())
    audit.start()
    for step in range(1, 6):
        if step == 4:  # as a second process would
            audit.stop()
            audit = hu.Audit(optimizer, ["bf16"], **options(), resume=True, first_step=4)
            audit.start()
        optimizer.zero_grad()
        model.loss(batches(step)).backward()
        before = weights(model)
        gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
        optimizer.step()
        copies.append((step, before, weights(model), gradients))
    audit.stop()
    tiles = {w.name: w.tiles for w in audit.watched.values()}
    for step, before, after, gradients in copies:
        for name in before:
            if before[name].dim() >= 2 and 2 <= step <= 4:
                parts = [before[name], gradients[name], after[name]]
                if sample:
                    parts = [
                        torch.cat([x.reshape(-1)[t * 768 : (t + 1) * 768] for t in tiles[name]])
                        for x in parts
                    ]
                score = kernels.score(*parts, "e4m3@128", after=True)
                expected[name] = expected.get(name, 0) + score
    found = hu.Trace.open(tmp_path / "trace").scores()
    assert found.keys() == expected.keys() == {"fc1.weight", "fc2.weight", "head.weight"}
    for name, score in expected.items():
        np.testing.assert_array_equal(found[name], score.numpy())


def test_kept_weights_replay_any_grid(tmp_path: Path) -> None:
    """A replay equals the audit that it stands for, followed coordinates, rates and losses included."""
    model = made("gpt")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    options: dict[str, Any] = {"model": model, "expected_never_moved": True}
    kept = hu.Audit(optimizer, ["bf16"], out=tmp_path / "kept", keep=True, part_steps=2, **options)
    direct = hu.Audit(optimizer, GRIDS, out=tmp_path / "direct", **options)
    with kept, direct:
        for step in range(1, 6):
            optimizer.zero_grad()
            loss = model.loss(batches(step))
            loss.backward()
            if step == 3:
                model.wpe.weight.grad = None  # not part of this step
            kept.log(loss)
            direct.log(loss)
            optimizer.step()
    replayed = hu.replay(hu.Trace.open(tmp_path / "kept"), GRIDS, tmp_path / "replayed")
    assert replayed.grids == GRIDS
    assert_same_tables(replayed, hu.Trace.open(tmp_path / "direct"))
    assert replayed.crossing("mxfp4") == hu.Trace.open(tmp_path / "direct").crossing("mxfp4")
    with pytest.raises(hu.UsageError, match="kept no weights"):
        hu.replay(replayed, ["bf16"], tmp_path / "again")


def test_following_can_be_left_out(tmp_path: Path) -> None:
    model = made("mlp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    options = {"never_moved": False, "expected_never_moved": False}
    with hu.Audit(optimizer, ["bf16"], model=model, out=tmp_path / "trace", **options) as audit:
        train(model, optimizer, 2, audit=audit)
    trace = hu.Trace.open(tmp_path / "trace")
    with pytest.raises(hu.UsageError, match="without never_moved"):
        trace.never_moved("bf16")
    with pytest.raises(hu.UsageError, match="without expected_never_moved"):
        trace.expected_never_moved("bf16")
    assert "never moved" not in "\n".join(verdict.lines(trace))


def test_parts_by_time_cost_a_hundredth_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step with part_seconds=0, unless writing takes long: then the next part waits a hundred times."""
    commit = TraceWriter.commit
    parts = []
    for pause in (0.0, 1.0):
        clock = [100.0]  # ten seconds a step

        def slow(*args: Any, pause: float = pause, clock: list[float] = clock, **options: Any) -> None:
            commit(*args, **options)
            clock[0] += pause

        monkeypatch.setattr(TraceWriter, "commit", slow)
        monkeypatch.setattr(recorder.time, "monotonic", lambda clock=clock: clock[0])
        model = made("mlp")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        path = tmp_path / f"{pause}"
        with hu.Audit(optimizer, ["bf16"], model=model, out=path, part_seconds=0) as audit:
            for step in range(40):
                clock[0] += 10
                train(model, optimizer, 1, audit=audit, seed=step)
        monkeypatch.undo()
        trace = hu.Trace.open(path)
        assert trace.last_step == 40
        parts.append(len(trace.parts))
    assert parts == [40, 5]  # to steps 1, 11, 21, 31 and the end


def test_listeners_hear_every_audited_step(tmp_path: Path) -> None:
    model = made("mlp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    heard: list[dict[str, Any]] = []
    with hu.Audit(
        optimizer, STATIC, model=model, out=tmp_path / "trace", every=2, listeners=[heard.append]
    ) as audit:
        losses = train(model, optimizer, 5, audit=audit)
    trace = hu.Trace.open(tmp_path / "trace")
    assert [h["step"] for h in heard] == [1, 3, 5]
    assert audit.latest == heard[-1]
    for i, h in enumerate(heard):
        assert h["frozen"] == {g: trace.frozen(g)[i] for g in STATIC}
        assert h["never_moved"] == {g: trace.never_moved(g)[i] for g in STATIC}
        assert h["tensors"]["fc1.weight"]["e5m2"] == trace.frozen("e5m2", "fc1.weight")[i]
        assert h["update_ratio"] == pytest.approx(trace.update_ratio()[i], rel=1e-12)  # sums in another order
        assert h["loss"] == losses[2 * i]
        assert h["nonfinite"] == 0


# ---- weights that are stored in low precision ------------------------------------------------------------


def test_a_bfloat16_model_realizes_its_events(tmp_path: Path) -> None:
    """On bf16 the event is what happened: after == before."""
    model = made("mlp").bfloat16()
    generator = batches()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    expected = []
    with hu.Audit(optimizer, ["bf16", "e5m2"], model=model, out=tmp_path / "trace"):
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.randn(8, 16, generator=generator).bfloat16()).square().mean().backward()
            before = weights(model)
            optimizer.step()
            after = weights(model)
            expected.append({n: int((after[n] == before[n]).sum()) for n in before})
    trace = hu.Trace.open(tmp_path / "trace")
    rows = trace.table().filter(pl.col("grid") == "bf16").select("step", "tensor", "frozen").iter_rows()
    assert {(s, t): f for s, t, f in rows} == {
        (s, t): f for s, of in enumerate(expected, start=1) for t, f in of.items()
    }
    assert 0 < sum(expected[-1].values()) < sum(p.numel() for p in model.parameters())
    assert {t["dtype"] for t in trace.tensors} == {"bfloat16"}
    findings = {f.grid: f for f in verdict.findings(trace)}
    assert findings["bf16"].realized
    assert not findings["e5m2"].realized
    said = "\n".join(verdict.lines(trace))
    assert "the optimizer sees bfloat16" in said
    assert "of updates lost (" in said
    assert "of updates would be lost (" in said


@pytest.mark.parametrize("storage", ["container", "native", "packed"])
@pytest.mark.parametrize("policy", ["rne", "sr"])
def test_a_write_back_realizes_its_events(policy: str, storage: str, tmp_path: Path) -> None:
    """The audit of its own grid says what the write-back says, wherever the weights are kept."""
    model = made("mlp")
    dtype = torch.bfloat16 if storage == "native" else torch.float32
    model = model.to(dtype)
    generator = batches()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    opt = hu.WriteBack(inner, "e4m3@128", policy, model=model, seed=1, storage=storage)
    expected = {}
    with hu.Audit(opt, ["e4m3@128"], model=model, out=tmp_path / "trace"):
        for step in range(1, 6):
            opt.zero_grad()
            model(torch.randn(8, 16, generator=generator).to(dtype)).square().mean().backward()
            opt.step()
            for row in opt.events.rows:
                expected[step, row.name] = (row.frozen, row.never_moved)
    trace = hu.Trace.open(tmp_path / "trace")
    on_grid = trace.table().filter(pl.col("tensor").is_in(["fc1.weight", "fc2.weight", "head.weight"]))
    found = {(r["step"], r["tensor"]): (r["frozen"], r["never_moved"]) for r in on_grid.iter_rows(named=True)}
    assert found == expected
    assert 0 < sum(f for f, _ in found.values()) < sum(on_grid["numel"])
    stored = {t["name"]: t["stored"] for t in trace.tensors}
    assert stored["fc1.weight"] == "e4m3@128"
    assert stored["norm.weight"] == str(dtype).removeprefix("torch.")
    assert trace.manifest["optimizers"][0]["class"] == "WriteBack"
    assert trace.manifest["optimizers"][0]["wraps"] == "AdamW"
    (finding,) = verdict.findings(trace)
    matrices = trace.numel("all-2d")
    assert finding.stored == matrices / trace.numel()
    assert not finding.realized
    said = "\n".join(verdict.lines(trace))
    assert "6 tensor(s) with 7.8% of the weights are not stored on it" in said
    assert ("e4m3@128, sr write-back: " if policy == "sr" else "% of updates lost (") in said


def test_a_found_write_back_is_one_step(tmp_path: Path) -> None:
    """Without being told of it, the audit sees the outer optimizer, not the one inside."""
    model = made("mlp")
    opt = hu.WriteBack(torch.optim.AdamW(model.parameters(), lr=1e-2), "e4m3@128", "rne", model=model)
    frozen = []
    with hu.Audit(None, ["e4m3@128"], model=model, out=tmp_path / "trace", params=lambda n, p: p.dim() >= 2):
        for step in range(4):
            opt.zero_grad()
            model.loss(batches(step)).backward()
            opt.step()
            frozen.append(opt.events.frozen)
    np.testing.assert_array_equal(hu.Trace.open(tmp_path / "trace").frozen("e4m3@128"), frozen)


# ---- going on with a trace -------------------------------------------------------------------------------


def test_a_resumed_audit_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    """From a checkpoint (first_step), and by running the same steps again, which are skipped."""
    for name, stops in (("whole", []), ("checkpoint", [4]), ("again", [3, 6])):
        model = made("gpt")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        options = {"model": model, "out": tmp_path / name, "resume": True, "part_steps": 2}
        audit = hu.Audit(optimizer, GRIDS, expected_never_moved=True, **options)
        audit.start()
        for step in range(1, 9):
            if step - 1 in stops:
                audit.stop()
                again = name == "again"
                if again:  # from the start, as a script without checkpoints
                    model = options["model"] = made("gpt")
                    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
                audit = hu.Audit(
                    optimizer, GRIDS, expected_never_moved=True, **options, first_step=1 if again else step
                )
                audit.start()
                for past in range(1, step) if again else ():
                    optimizer.zero_grad()
                    model.loss(batches(past)).backward()
                    optimizer.step()
            optimizer.zero_grad()
            loss = model.loss(batches(step))
            loss.backward()
            audit.log(loss)
            optimizer.step()
        audit.stop()
    whole = hu.Trace.open(tmp_path / "whole")
    for name in ("checkpoint", "again"):
        assert_same_tables(hu.Trace.open(tmp_path / name), whole)
        assert hu.Trace.open(tmp_path / name).tensors == whole.tensors


def test_a_tensor_keeps_its_number_in_a_resumed_trace(tmp_path: Path) -> None:
    """Whatever the order in which the second process meets the tensors, and those that it does not meet."""
    model = made("mlp")
    optimizer = torch.optim.AdamW([*model.fc1.parameters(), *model.head.parameters()], lr=1e-3)
    with hu.Audit(optimizer, ["bf16"], model=model, out=tmp_path / "trace") as audit:
        train(model, optimizer, 2, audit=audit)
    optimizer = torch.optim.AdamW([*model.fc2.parameters(), *model.head.parameters()], lr=1e-3)
    options = {"model": model, "out": tmp_path / "trace", "resume": True, "first_step": 3}
    with hu.Audit(optimizer, ["bf16"], **options) as audit:
        train(model, optimizer, 2, audit=audit)
    trace = hu.Trace.open(tmp_path / "trace")
    assert [t["name"] for t in trace.tensors] == [
        "fc1.weight", "fc1.bias", "head.weight", "head.bias", "fc2.weight", "fc2.bias",
    ]  # fmt: skip
    assert [t["id"] for t in trace.tensors] == list(range(6))
    assert trace.steps_of("fc1.weight").tolist() == [1, 2]
    assert trace.steps_of("fc2.weight").tolist() == [3, 4]
    assert trace.steps_of("head.weight").tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"grids": ["bf16"]}, "recorded with grids="),
        ({"every": 2}, "recorded with every=1, not 2"),
        ({"sample": 0.5}, "recorded with sample=None, not 0.5"),
        ({"decay": True}, "recorded with decay=False, not True"),
        ({"seed": 1}, "recorded with seed=0, not 1"),
        ({"first_step": 5}, "ends at step 3, but this run goes on after step 4: step 4 would be missing"),
        ({"resume": False, "exists": "raise"}, "holds a trace already"),
    ],
)
def test_a_trace_is_not_gone_on_with_otherwise(changed: dict[str, Any], said: str, tmp_path: Path) -> None:
    model = made("mlp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with hu.Audit(optimizer, ["bf16", "e5m2"], model=model, out=tmp_path / "trace") as audit:
        train(model, optimizer, 3, audit=audit)
    options: dict[str, Any] = {"grids": ["bf16", "e5m2"], "resume": True, "first_step": 4, **changed}
    audit = hu.Audit(optimizer, options.pop("grids"), model=model, out=tmp_path / "trace", **options)
    with pytest.raises(hu.UsageError, match=said):
        audit.start()


def test_a_trace_of_another_model_is_not_gone_on_with(tmp_path: Path) -> None:
    for width, said in ((5, None), (6, r"'weight' has shape \[5, 5\] there, but \[6, 6\] here")):
        model = torch.nn.Linear(width, width)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        first = 1 if said is None else 2
        options = {"model": model, "out": tmp_path / "trace", "resume": True, "first_step": first}
        with hu.Audit(optimizer, ["bf16"], **options):
            model(torch.ones(1, width)).sum().backward()
            if said is None:
                optimizer.step()
            else:
                with pytest.raises(hu.UsageError, match=said):
                    optimizer.step()


def test_steps_between_audited_ones_are_not_missing(tmp_path: Path) -> None:
    """Every third: the trace ends at step 4; a run that goes on with 6 misses nothing, with 8 it does."""
    model = made("mlp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with hu.Audit(optimizer, ["bf16"], model=model, out=tmp_path / "trace", every=3) as audit:
        train(model, optimizer, 5, audit=audit)
    options = {"model": model, "out": tmp_path / "trace", "every": 3, "resume": True}
    with pytest.raises(hu.UsageError, match="step 7 would be missing"):
        hu.Audit(optimizer, ["bf16"], **options, first_step=8).start()
    with hu.Audit(optimizer, ["bf16"], **options, first_step=6) as audit:
        train(model, optimizer, 3, audit=audit)
    assert hu.Trace.open(tmp_path / "trace").steps.tolist() == [1, 4, 7]


# ---- names -----------------------------------------------------------------------------------------------


def found_names(optimizer: torch.optim.Optimizer, **options: Any) -> list[str]:
    """The names that an audit gives to the tensors of an optimizer."""
    with hu.Audit(optimizer, ["bf16"], **options) as audit:
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.zeros_like(p)
        optimizer.step()
    return [w.name for w in audit.watched.values()]


class Holder:
    """A trainer that keeps its model as an attribute."""

    def __init__(self) -> None:
        self.network = made("mlp")
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=0.1)

    def run(self) -> list[str]:
        with hu.Audit(self.optimizer, ["bf16"]) as audit:
            self.network.loss(batches()).backward()
            self.optimizer.step()
        return [w.name for w in audit.watched.values()]


PLAIN = [
    "fc1.weight", "fc1.bias", "norm.weight", "norm.bias", "fc2.weight", "fc2.bias", "rms.weight",
    "head.weight", "head.bias",
]  # fmt: skip


def test_names_from_the_model_that_was_given() -> None:
    model = made("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert found_names(optimizer, model=model) == PLAIN


def test_wrappers_leave_no_mark_on_names() -> None:
    model = made("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert found_names(optimizer, model=torch.compile(model)) == PLAIN
    assert found_names(optimizer, model=torch.nn.DataParallel(torch.compile(model))) == PLAIN
    model.fc1 = torch.compile(model.fc1)
    assert found_names(optimizer, model=model) == PLAIN
    nested = torch.nn.ModuleDict({"module": model})  # a child that somebody calls module
    assert found_names(optimizer, model=nested) == [f"module.{n}" for n in PLAIN]


def test_names_from_the_frames_around_the_step() -> None:
    model = made("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert found_names(optimizer) == PLAIN
    assert Holder().run() == PLAIN


def test_frames_may_hold_anything() -> None:
    """Dead proxies and objects that raise when they are looked at."""
    import weakref

    class Unlookable:
        @property
        def __dict__(self) -> Any:  # type: ignore[override]
            raise RuntimeError("do not look")

    model = made("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gone, strange = weakref.proxy(Holder()), Unlookable()
    assert found_names(optimizer) == PLAIN
    assert (gone, strange) is not None


def test_names_of_the_optimizer_come_before_those_of_frames() -> None:
    model = made("mlp")
    optimizer = torch.optim.SGD([(f"mine/{n}", p) for n, p in model.named_parameters()], lr=0.1)
    assert found_names(optimizer) == [f"mine/{n}" for n in PLAIN]
    assert found_names(optimizer, model=model) == PLAIN


def test_names_by_place_when_there_are_no_others() -> None:
    loose = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2))]
    optimizer = torch.optim.SGD([{"params": [p]} for p in loose], lr=0.1)
    assert found_names(optimizer, model=torch.nn.Linear(1, 1)) == ["0.0", "1.0"]


def test_names_that_two_models_share_stay_apart(tmp_path: Path) -> None:
    models = [torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    with hu.Audit(optimizers, ["bf16"], model=models, out=tmp_path / "trace"):
        for m, o in zip(models, optimizers, strict=True):
            m(torch.ones(1, 3)).sum().backward()
            o.step()
    names = [t["name"] for t in hu.Trace.open(tmp_path / "trace").tensors]
    assert names == ["weight", "bias", "weight#2", "bias#2"]


def test_two_models_that_nobody_named_are_called_like_their_variables(tmp_path: Path) -> None:
    """All names of the second, also those that the first does not have."""
    critic, generator = torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (critic, generator)]
    with hu.Audit(None, ["bf16"], out=tmp_path / "trace"):
        for _ in range(2):
            for o in optimizers:
                generator(critic(torch.ones(1, 3))).sum().backward()
                o.step()
    names = [t["name"] for t in hu.Trace.open(tmp_path / "trace").tensors]
    assert names == ["weight", "generator.weight", "generator.bias"]


# ---- bad input -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grids", "options", "said"),
    [
        ([], {}, "at least one grid"),
        (["bf16", "e5m2", "bf16"], {}, r"\['bf16'\] repeat"),
        (["bf17"], {}, "unknown grid 'bf17'"),
        ([3], {}, "a grid is a name or a torch dtype"),
        (["bf16"], {"every": 0}, "at least 1"),
        (["bf16"], {"first_step": 0}, "at least 1"),
        (["bf16"], {"part_steps": 0}, "at least 1"),
        (["bf16"], {"sample": 0.0}, "above 0 and at most 1"),
        (["bf16"], {"sample": 1.5}, "above 0 and at most 1"),
        (["int8"], {"sample": 0.5}, "moves with the data"),
        (["bf16"], {"scores": ("int8", 1, 2), "sample": 0.5}, "moves with the data"),
        (["bf16"], {"scores": ("nothing", 1, 2)}, "unknown grid 'nothing'"),
        (["bf16"], {"scores": ("bf16", 3, 2)}, "a first and a last step"),
        (["bf16"], {"keep": True}, "pass out="),
        (["bf16"], {"unfit": "ignore"}, "raise or drop"),
        (["bf16"], {"exists": "ignore"}, "number or raise"),
    ],
)
def test_what_an_audit_refuses(grids: list[Any], options: dict[str, Any], said: str) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1)
    with pytest.raises(hu.UsageError, match=said):
        hu.Audit(optimizer, grids, **options)


def test_one_grid_need_not_be_a_list() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1)
    assert [g.name for g in hu.Audit(optimizer, "bf16").grids] == ["bf16"]
    assert [g.name for g in hu.Audit(optimizer, torch.float16).grids] == ["float16"]


def test_nothing_to_train(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(3), requires_grad=False)], lr=0.1)
    with pytest.raises(hu.UsageError, match="no trainable parameters"):
        hu.Audit(optimizer, ["bf16"], out=tmp_path / "trace").start()
    assert not (tmp_path / "trace").exists()


def test_an_audit_runs_once(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1)
    audit = hu.Audit(optimizer, ["bf16"], out=tmp_path / "trace")
    with audit, pytest.raises(hu.UsageError, match="runs once"):
        audit.start()
    with pytest.raises(hu.UsageError, match="runs once"):
        audit.start()


def test_an_audit_that_nobody_stops(tmp_path: Path) -> None:
    """What is still open when the process ends is written then; an audit that was stopped is let go."""
    model = torch.nn.Linear(8, 8)
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    audit = hu.Audit(opt, "bf16", model=model, out=tmp_path / "open").start()
    model(torch.ones(1, 8)).sum().backward()
    opt.step()
    at_exit = audit._hooks._forgotten
    assert at_exit is not None
    assert not hu.Trace.open(tmp_path / "open").recorded
    at_exit()
    assert hu.Trace.open(tmp_path / "open").steps.tolist() == [1]
    assert audit._hooks._forgotten is None


def test_a_cell_that_runs_twice_leaves_two_traces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The second is numbered, and said to be; resume= goes on with the first all the same."""
    model = made("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for expected in ("run", "run-2", "run-3"):
        with hu.Audit(optimizer, ["bf16"], model=model, out=tmp_path / "run") as audit:
            train(model, optimizer, 2, audit=audit)
        assert audit.out == tmp_path / expected
        said = capsys.readouterr().err
        assert (f"run holds a trace already; this one goes to {tmp_path / expected}" in said) == (
            expected != "run"
        )
    options = {"model": model, "out": tmp_path / "run", "resume": True, "first_step": 3}
    with hu.Audit(optimizer, ["bf16"], **options) as audit:
        train(model, optimizer, 1, audit=audit)
    assert hu.Trace.open(tmp_path / "run").steps.tolist() == [1, 2, 3]
    assert hu.Trace.open(tmp_path / "run-2").steps.tolist() == [1, 2]


def test_folders_that_are_not_for_a_trace(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("do not lose me")
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    for name in ("full", "file"):
        with pytest.raises(hu.UsageError, match=f"{name} is not an empty folder and holds no trace"):
            hu.Audit(optimizer, ["bf16"], out=tmp_path / name).start()
    assert (tmp_path / "full" / "thesis.tex").read_text() == "do not lose me"
    with hu.Audit(optimizer, ["bf16"], out=tmp_path / "empty"):
        pass
    assert hu.Trace.open(tmp_path / "empty").parts == ()


def test_a_grid_that_the_weights_cannot_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Asked for by name it is refused, with the parameter's name; or left out, if that was allowed."""
    model = made("mlp").bfloat16()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    audit = hu.Audit(optimizer, ["bf16", "fp16", "e5m2"], model=model)
    with (
        audit,
        pytest.raises(hu.UsageError, match=r"parameter 'fc1\.weight': grid fp16 does not fit bfloat16"),
    ):
        optimizer.step()
    options = {"model": model, "out": tmp_path / "trace", "unfit": "drop", "resume": True}
    for step in (1, 2):
        with hu.Audit(optimizer, ["bf16", "fp16", "e5m2"], **options, first_step=step):
            optimizer.step()
    assert "fp16 left out: finer than what the optimizer sees (bfloat16)" in capsys.readouterr().err
    trace = hu.Trace.open(tmp_path / "trace")
    assert trace.grids == ["bf16", "e5m2"]
    assert trace.steps.tolist() == [1, 2]


# ---- several ranks ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run on one process, on two with DDP and on two with FSDP2, all at once."""
    folder = tmp_path_factory.mktemp("ranks")
    program = Path(__file__).with_name("audit_ranks.py")
    started = []
    for mode, world in (("single", 1), ("ddp", 2), ("fsdp", 2)):
        (folder / f"of-{mode}").mkdir()
        for rank in range(world):
            command = [sys.executable, program, mode, folder / f"of-{mode}", str(rank), str(world)]
            started.append(
                subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment())
            )
    try:
        said = [p.communicate(timeout=240)[0].decode() for p in started]
    finally:
        for p in started:
            p.kill()
    assert [p.returncode for p in started] == [0] * 5, "\n".join(said)
    return folder


def environment() -> dict[str, str]:
    """The environment of a process that must find halfulp and the helpers of these tests."""
    places = [str(Path(hu.__file__).parent.parent), str(Path(__file__).parent)]
    given = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*places, *([given] if given else [])])}


@pytest.mark.parametrize("kind", ["", "-moving", "-sampled"])
def test_ddp_leaves_one_trace_equal_to_that_of_one_process(ranks: Path, kind: str) -> None:
    single = hu.Trace.open(ranks / "of-single" / f"single{kind}")
    found = hu.Trace.open(ranks / "of-ddp" / f"ddp{kind}")
    assert_same_tables(found, single)
    assert found.tensors == single.tensors
    assert sorted(p.name for p in (ranks / "of-ddp").iterdir() if p.is_dir()) == [
        "ddp", "ddp-moving", "ddp-sampled",
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["", "-moving"])
def test_fsdp_leaves_one_trace_equal_to_that_of_one_process(ranks: Path, kind: str) -> None:
    """Every count; sums of squares and probabilities are added in another order.

    Adding n non-negative numbers in any order errs by a factor of at most 1 + (n - 1) 2**-53. What arrives is
    added four times in float32 before.
    """
    single = hu.Trace.open(ranks / "of-single" / f"single{kind}")
    found = hu.Trace.open(ranks / "of-fsdp" / f"fsdp{kind}")
    assert found.tensors == single.tensors
    largest = max(t["numel"] for t in single.tensors)
    for (name, a), (_, b) in zip(tables(found), tables(single), strict=True):
        assert a.columns == b.columns
        for column in a.columns:
            if column in ("weight_sq", "proposal_sq", "expected"):
                np.testing.assert_allclose(a[column], b[column], rtol=2 * largest * 2.0**-53, atol=0)
            elif column in ("arrived", "written_sq"):
                np.testing.assert_allclose(a[column], b[column], rtol=2 * 5 * 2.0**-24, atol=0)
            else:
                assert a[column].equals(b[column], null_equal=True), (name, column)
    if not kind:
        assert found.table()["frozen_decay"].null_count() == 0


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_roles_on_ranks_are_those_of_one_process(ranks: Path, mode: str) -> None:
    """Moments and an EMA, shards of them included: every count, except at the last step of sharded copies."""
    single, found = (hu.Trace.open(ranks / f"of-{m}" / f"{m}-moving").roles for m in ("single", mode))
    assert found.keys() == single.keys() == {"ema", "exp_avg", "exp_avg_sq"}
    for role, trace in found.items():
        last = audit_ranks.STEPS - (role == "ema" and mode == "fsdp")
        assert trace.tensors == single[role].tensors
        assert trace.steps.tolist() == list(range(1 if role == "ema" else 2, last + 1))
        counts = ["step", "tensor", "frozen", "endpoint", "zero_code", "never_moved"]
        a, b = (t.table().select(counts).filter(pl.col("step") <= last) for t in (trace, single[role]))
        assert a.equals(b), role
        assert 0 < trace.frozen("bf16")[-1] < 1


def test_a_sample_of_shards_counts_what_it_says(ranks: Path) -> None:
    """Half of the tiles of every shard: of fc2, 900 coordinates a rank, the whole tile or the short one."""
    found = hu.Trace.open(ranks / "of-fsdp" / "fsdp-sampled")
    recorded = {t["name"]: t["recorded"] for t in found.tensors}
    sizes = {t["name"]: t["numel"] for t in found.tensors}
    assert recorded["gain"] == sizes["gain"] == 1  # on one rank only
    assert recorded["fc2.weight"] in (2 * 768, 2 * (900 - 768))
    assert (found.table()["frozen"] <= found.table()["numel"]).all()


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_rehearsals_on_ranks_are_those_of_one_process(ranks: Path, mode: str) -> None:
    """Counts and weights to the bit, of shards too; the loss, as far as a sum of shards is the same."""
    single, found = (hu.Trace.open(ranks / f"of-{m}" / m) for m in ("single", mode))
    assert found.scan("rehearsals").collect().equals(single.scan("rehearsals").collect())
    assert found.scan("rehearsals").collect()["frozen"].sum() > 0
    for spec in audit_ranks.REHEARSED:
        name = f"{spec.replace('/', '-')}.safetensors"
        one, other = (load_file(ranks / f"of-{m}" / name) for m in ("single", mode))
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)
        a, b = (t.forecast(spec).losses for t in (single, found))
        assert a.drop("loss", "real").equals(b.drop("loss", "real"))
        np.testing.assert_allclose(a["loss"], b["loss"], rtol=1e-6, atol=0)
        assert a["loss"].n_unique() > 1


def test_shards_refuse_what_they_cannot_do(ranks: Path) -> None:
    for rank in (0, 1):
        said = (ranks / "of-fsdp" / f"refused.{rank}").read_text().splitlines()
        assert len(said) == 4
        assert "grid int8 takes its scale from the whole tensor" in said[0]
        assert "grid nvfp4 takes its scale from the whole tensor" in said[1]
        assert "keep= and scores= are for whole tensors" in said[2]
        assert "keep= and scores= are for whole tensors" in said[3]
