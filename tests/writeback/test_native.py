"""Weights that live as float8 codes: one parameter to torch, stepped and saved as any other."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from native_models import GRID, SCALE, Net, batch, loss_of, native_net, same_weights, steps, wrapped
from oracle import assert_same
from safetensors.torch import load_file, save_file

import halfulp as hu
from halfulp import kernels
from halfulp.writeback import Dispatch, WriteBackOptions
from halfulp.writeback.storage import dispatch
from halfulp.writeback.storage.native_weight import (
    NativeWeight,
    flat_state,
    is_native,
    native_state,
    plain,
    scale_of,
)


def test_codes_are_those_of_the_grid() -> None:
    """Every code that is a number, and every value that has one."""
    codes = torch.tensor([c for c in range(256) if c & 127 != 127], dtype=torch.uint8)
    values = NativeWeight(codes.view(torch.float8_e4m3fn), SCALE).decoded()
    assert_same(values, kernels.decode(codes, GRID), "values")
    assert_same(kernels.encode(values, GRID), codes, "codes")
    assert [scale_of(g) for g in ("e4m3", "e4m3@128", "e4m3@2")] == [1.0, SCALE, 0.5]


@pytest.mark.parametrize("policy", ["rne", "sr", "deadzone-sr", "master"])
def test_a_write_back_is_that_of_a_container(policy: str) -> None:
    """Given the same gradients, in one pass and in two."""
    model, boxed = native_net(), Net()
    opt, other = wrapped(model, policy), wrapped(boxed, policy, options=WriteBackOptions(one_pass=False))
    for step in range(3):
        opt.zero_grad()
        loss_of(model, step).backward()
        for p, q in zip(model.parameters(), boxed.parameters(), strict=True):
            assert p.grad is not None
            q.grad = p.grad.clone()
        opt.step()
        other.step()
        assert [r.frozen for r in opt.events.rows] == [r.frozen for r in other.events.rows]
    same_weights(model, boxed)
    two = native_net()
    steps(two, wrapped(two, policy, options=WriteBackOptions(one_pass=False)), 0, 3)
    same_weights(model, two)


def test_one_byte_a_weight() -> None:
    model = native_net()
    opt = wrapped(model, "rne", options=WriteBackOptions(telemetry=False))
    matrices = [p for p in model.parameters() if p.dim() == 2]
    count = sum(p.numel() for p in matrices)
    assert opt.bytes().weights == count == sum(local_bytes(p) for p in matrices)
    steps(model, opt, 0, 1)
    assert sum(local_bytes(p) for p in matrices) == count
    assert all(slot.shadow is None or slot.shadow.numel() == 0 for slot in opt.slots)


def local_bytes(p: torch.Tensor) -> int:
    assert isinstance(p, NativeWeight)
    return p.codes.untyped_storage().nbytes()


def test_copies_and_files(tmp_path: Path) -> None:
    """deepcopy, torch.save, safetensors: the same run goes on from each of them."""
    model = native_net()
    opt = wrapped(model, "master")
    steps(model, opt, 0, 2)
    state = copy.deepcopy(opt.state_dict())
    saved = io.BytesIO()
    torch.save(model.state_dict(), saved)
    saved.seek(0)
    save_file(flat_state(model.state_dict()), tmp_path / "model.safetensors")
    flat = load_file(tmp_path / "model.safetensors")
    assert flat["up.weight"].dtype == torch.float8_e4m3fn
    assert float(flat["up.weight_scale"]) == SCALE
    again = copy.deepcopy(model)
    assert again.up.weight.grad is None
    assert isinstance(again.up.weight, torch.nn.Parameter)
    assert codes_of(again).data_ptr() != codes_of(model).data_ptr()
    expected = steps(model, opt, 2, 4)
    for weights in (torch.load(saved, weights_only=True), native_state(flat), again.state_dict()):
        other = native_net()
        other.load_state_dict(weights)
        resumed = wrapped(other, "master")
        resumed.load_state_dict(copy.deepcopy(state))
        assert steps(other, resumed, 2, 4) == expected
        same_weights(model, other)


def codes_of(model: Net) -> torch.Tensor:
    weight = model.up.weight
    assert isinstance(weight, NativeWeight)
    return weight.codes


def test_compiled_is_eager() -> None:
    model, eager = native_net(), native_net()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    opt, other = wrapped(model), wrapped(eager)
    assert steps(compiled, opt, 0, 2) == steps(eager, other, 0, 2)
    same_weights(model, eager)


@pytest.mark.slow
def test_compiled_by_inductor() -> None:
    """Native products in the generated code, and gradients that are eager's but for the order of sums.

    A last bit of float32 can move what enters a product by a gap of its float8 type, a quarter of it at most.
    """
    cpp_builder = pytest.importorskip("torch._inductor.cpp_builder")
    try:
        cpp_builder.get_cpp_compiler()
    except RuntimeError:
        pytest.skip("inductor needs a C++ compiler")
    model, eager = native_net(), native_net()
    compiled, opt = torch.compile(model, fullgraph=True), wrapped(model)
    loss_of(eager).backward()
    loss_of(compiled).backward()
    for (name, p), q in zip(model.named_parameters(), eager.named_parameters(), strict=True):
        other = q[1].grad
        assert p.grad is not None
        assert other is not None
        assert torch.linalg.norm(p.grad - other) <= torch.linalg.norm(other) / 4, name
    before = codes_of(model).clone()
    opt.step()
    opt.zero_grad()
    with Dispatch() as seen:
        loss_of(compiled, 1).backward()
    assert seen.calls == dispatch.expected(9)
    assert codes_of(model).dtype == torch.float8_e4m3fn
    assert not torch.equal(codes_of(model).view(torch.uint8), before.view(torch.uint8))


def test_an_audit_sees_what_happened() -> None:
    model = native_net()
    opt = wrapped(model, "rne")
    memory = hu.Memory()
    with hu.Audit(opt, [GRID], model=model, out=memory, params=lambda _, p: p.dim() == 2):
        steps(model, opt, 0, 2)
    told = memory.trace.frozen(GRID, scope="all-2d")
    assert told[-1] == opt.events.frozen
    assert 0 < told[-1] < 1


def test_the_form_is_kept_or_values_are_given() -> None:
    weight = native_net().up.weight
    for kept in (weight.detach(), weight[:2], weight.clone(), weight.to("cpu"), weight.detach().split(8)[1]):
        assert is_native(kept)
    assert not is_native(weight.bfloat16())
    assert weight.bfloat16().dtype == torch.bfloat16
    assert not is_native(torch.zeros_like(weight))
    assert not is_native(weight * 2)
    assert_same((weight.detach() * 2), plain(weight.detach()) * 2, "values")
    assert "NativeWeight((64, 32)" in repr(weight)
    with torch.no_grad():
        weight.copy_(torch.full((64, 32), 0.3))
    assert_same(plain(weight.detach()), hu.grid(GRID).round(torch.full((64, 32), 0.3)), "rounded")


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (lambda m: torch.optim.SGD(m.parameters(), lr=1.0, foreach=False).step(), "let hu.WriteBack step it"),
        (lambda m: hu.WriteBack(torch.optim.SGD(m.parameters()), "e4m3", "rne", model=m), "codes times"),
        (lambda m: wrapped(m, storage="packed"), "Leave storage= out"),
        (lambda m: hu.native(m), "native already"),
        (lambda m: hu.native(m, select=lambda n, p: False), "no parameter to store natively"),
        (lambda m: hu.native(m, select=lambda n, p: n == "norm.weight"), "float32 matrices"),
        (lambda m: hu.native(Net(), "e5m2"), "which grid e5m2 is not"),
        (lambda m: hu.native(Net(), "int8"), "which grid int8 is not"),
        (lambda m: hu.native(broken()), "not finite"),
        (lambda m: torch.nn.functional.embedding(batch()[0], m.rows.weight, max_norm=1.0), "no max_norm"),
    ],
)  # fmt: skip
def test_refusals(what: Any, said: str) -> None:
    model = native_net()
    for p in model.parameters():
        p.grad = torch.ones(p.shape)
    before = copy.deepcopy(model)
    with pytest.raises(hu.UsageError, match=said):
        what(model)
    for p, q in list(zip(model.parameters(), before.parameters(), strict=True))[:3]:
        assert_same(plain(p.detach()), plain(q.detach()), "nothing changed")


def broken() -> Net:
    model = Net()
    with torch.no_grad():
        model.up.weight[0, 0] = torch.nan
    return model


def test_one_parameter_under_two_names_of_a_module() -> None:
    model = torch.nn.Linear(16, 16, bias=False)
    model.again = model.weight
    assert hu.native(model) == ["weight"]
    assert model.again is model.weight


@torch.no_grad()
def test_writing_some_of_the_values() -> None:
    """Through an index, a row, ``data``: written, or refused; never to a copy that is thrown away."""
    model = torch.nn.Linear(16, 8, bias=False)
    hu.native(model)
    w: Any = model.weight

    def zeros() -> int:
        found = int((w.decoded() == 0).sum())
        w.copy_(torch.ones(8, 16))
        return found

    w.copy_(torch.ones(8, 16))
    w[0] = 0
    assert zeros() == 16
    w[1, 2] = 0
    assert zeros() == 1
    w[:, 1:3] = torch.zeros(8, 2)
    assert zeros() == 16
    w[torch.arange(8) > 5] = w[torch.arange(8) > 5] * 0
    assert zeros() == 32
    w.data[3] = 0
    assert zeros() == 16
    w.detach()[0:2] = 0
    assert zeros() == 32
    w[0].copy_(torch.zeros(16))
    assert zeros() == 16
    w.data = torch.zeros(8, 16)
    assert zeros() == 128
    torch.nn.utils.vector_to_parameters(torch.zeros(128), model.parameters())
    assert zeros() == 128
    for write in (lambda: w[0].zero_(), lambda: w[0].add_(1), lambda: w.t().mul_(2), lambda: w.T[1].fill_(3)):
        with pytest.raises(hu.UsageError, match="would change a native weight in place"):
            write()
    with pytest.raises(hu.UsageError, match=r"shape \[8, 16\] cannot get values of shape \[4, 4\]"):
        w.data = torch.zeros(4, 4)
    assert zeros() == 0
    with torch.enable_grad(), pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        w[0] = 0
    model.bfloat16()
    assert (w.dtype, zeros()) == (torch.bfloat16, 0)
