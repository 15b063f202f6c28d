"""Many tensors in one call, planned once: the bits of one by one; and no plan outlives what it is about."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from oracle import assert_same

import halfulp as hu
from halfulp.kernels import many, native, onepass
from halfulp.numbers.streams import key_of, keys_of
from halfulp.writeback import WriteBackOptions
from halfulp.writeback.fused.step import planned

SHAPES = (4, 4), (3, 5), (1, 1), (100, 9), (800, 3), (40, 40)
POLICIES = ("rne", "sr", "deadzone-sr", "kahan", "kahan(dtype=bfloat16)")
pytestmark = pytest.mark.usefixtures("one_thread")


def parameters(dtype: torch.dtype = torch.float32) -> torch.nn.ParameterList:
    made = torch.Generator().manual_seed(0)
    return torch.nn.ParameterList(torch.randn(s, generator=made).to(dtype) for s in SHAPES)


def give_gradients(params: torch.nn.ParameterList, step: int) -> None:
    made = torch.Generator().manual_seed(step)
    for p in params:
        p.grad = (torch.randn(p.shape, generator=made) * 1e-2).to(p.dtype)
    if step == 2:
        params[3].grad[0, 0] = torch.nan


def assert_same_runs(a: Any, b: Any, what: str) -> None:
    (ours, first), (theirs, second) = a, b
    assert first.events == second.events, what
    for i, (p, q) in enumerate(zip(ours, theirs, strict=True)):
        assert_same(p.detach(), q.detach(), f"{what}: {i}")
    for mine, yours in zip(first.slots, second.slots, strict=True):
        for key, value in yours.kept_tensors().items():
            assert_same(mine.kept_tensors()[key], value, f"{what}: {key}")


def calls(monkeypatch: pytest.MonkeyPatch, module: Any) -> list[Any]:
    """What is launched by one of the modules that launch kernels for many tensors."""
    found: list[Any] = []
    real = native.run

    def run(kernel: str, *args: Any) -> None:
        found.append(kernel)
        real(kernel, *args)

    launching = SimpleNamespace(**{**vars(native), "run": run})
    monkeypatch.setattr(module, "native", launching)
    return found


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_passes_together_are_those_of_each_tensor(
    policy: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, what policies keep and every count, tensors longer and shorter than a tile, and a NaN; in one
    call, or in two where stored values are set aside."""
    runs = []
    for together in (True, False):
        params = parameters(dtype)
        inner = torch.optim.AdamW(params.parameters(), lr=1e-3, weight_decay=0.1)
        opt = hu.WriteBack(inner, "bf16", policy, model=params, options=WriteBackOptions(one_pass=False))
        for slot in opt.slots:
            assert slot.batched
            slot.batched = together
        launched = calls(monkeypatch, many)
        for step in range(4):
            give_gradients(params, step)
            opt.step()
        assert len(launched) == 4 * (1 if dtype == torch.bfloat16 else 2) * together
        monkeypatch.undo()
        runs.append((params, opt))
    assert_same_runs(runs[0], runs[1], f"{policy} {dtype}")


def test_a_step_in_one_pass_is_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many tensors there are; and from the second step on nothing is planned again."""
    params = torch.nn.ParameterList(torch.randn(2, 3) for _ in range(100))
    opt = hu.AdamW(params.named_parameters(), lr=1e-3)
    launched = calls(monkeypatch, onepass)
    plans = set()
    for step in range(1, 4):
        for p in params:
            p.grad = torch.randn(2, 3)
        opt.step()
        assert len(launched) == step
        plans.add(id(opt.plans[opt.slots[0]]))
    assert len(plans) == 1
    assert len(opt.events.rows) == 100


def _new_data(opt: Any, params: Any) -> None:
    params[3].data = params[3].data.clone()


def _new_moment(opt: Any, params: Any) -> None:
    state = opt.optimizer.state[params[0]]
    state["exp_avg"] = state["exp_avg"].clone()


def _same_moment_elsewhere(opt: Any, params: Any) -> None:
    moment = opt.optimizer.state[params[4]]["exp_avg_sq"]
    moment.data = moment.data.clone()


def _new_bits(opt: Any, params: Any) -> None:
    opt.slots[1].moved = opt.slots[1].moved.clone()


def _loaded(opt: Any, params: Any) -> None:
    opt.load_state_dict(opt.state_dict())


def _transposed(opt: Any, params: Any) -> None:
    params[5].data = params[5].data.t().contiguous().t()


def _other_options(opt: Any, params: Any) -> None:
    opt.param_groups[0].update(betas=(0.3, 0.9), decoupled_weight_decay=False)


def _hooked(opt: Any, params: Any) -> None:
    opt.optimizer.register_step_post_hook(lambda *_: None)


CHANGES: tuple[Callable[[Any, Any], None], ...] = (
    _new_data, _new_moment, _same_moment_elsewhere, _new_bits, _loaded, _transposed, _other_options, _hooked,
)  # fmt: skip


@pytest.mark.parametrize("policy", ["sr", "kahan", "master"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_plan_does_not_outlive_what_it_is_about(change: Any, policy: str) -> None:
    """Memory, state or options that change between two steps: the next is as in two passes."""
    runs = []
    for one_pass in (True, False):
        params = parameters()
        inner = torch.optim.AdamW(params.parameters(), lr=1e-3, weight_decay=0.1, fused=True)
        opt = hu.WriteBack(inner, "bf16", policy, model=params, options=WriteBackOptions(one_pass=one_pass))
        for step in range(6):
            give_gradients(params, step)
            if step == 3:
                assert (planned(opt, opt.slots) is not None) == one_pass
                change(opt, params)
                assert planned(opt, opt.slots) is None
            opt.step()
        runs.append((params, opt))
    assert_same_runs(runs[0], runs[1], f"{change.__name__} {policy}")


def test_a_plan_keeps_no_gradient() -> None:
    """They take as much memory as the weights."""
    params = parameters()
    opt = hu.AdamW(params.named_parameters(), lr=1e-3)
    give_gradients(params, 0)
    opt.step()
    held = {id(job.grad) for call in opt.plans[opt.slots[0]]._calls for job in call.jobs.jobs}
    assert not held & {id(p.grad) for p in params}
    assert all(job.grad.numel() == 0 for call in opt.plans[opt.slots[0]]._calls for job in call.jobs.jobs)


def test_keys_of_many_names_are_those_of_each() -> None:
    """Names of any characters, both kinds of stream."""
    names = ["a", "layers.0.weight", "ä", "\udcff"]
    for bits in (16, 32):
        found = keys_of(3, [name.encode("utf-8", "surrogatepass") for name in names], 7, bits)
        assert [tuple(row) for row in found.tolist()] == [key_of(3, name, 7, bits) for name in names]
