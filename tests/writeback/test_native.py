"""Weights that live as float8 codes: one parameter to torch, native products, evidence of them."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import assert_same
from safetensors.torch import load_file, save_file

import halfulp as hu
from halfulp import kernels
from halfulp.writeback import Dispatch, WriteBackOptions
from halfulp.writeback.storage import dispatch
from halfulp.writeback.storage import native_products as gemm
from halfulp.writeback.storage.native_weight import (
    NativeWeight,
    flat_state,
    is_native,
    native_state,
    plain,
    scale_of,
)

GRID, SCALE = "e4m3@128", 2.0**-7
EXACT = torch.finfo(torch.float32).eps


class Net(torch.nn.Module):
    """An embedding that is tied to the output, two matrices with a bias, a norm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows = torch.nn.Embedding(24, 32)
        self.up, self.down = torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)
        self.norm = torch.nn.LayerNorm(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.rows(x)
        h = h + self.down(torch.nn.functional.gelu(self.up(self.norm(h))))
        return torch.nn.functional.linear(h, self.rows.weight)


def batch(step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    found = torch.randint(24, (4, 9), generator=torch.Generator().manual_seed(step))
    return found[:, :-1], found[:, 1:]


def native_net() -> Net:
    model = Net()
    assert hu.native(model) == ["rows.weight", "up.weight", "down.weight"]
    return model


def loss_of(model: torch.nn.Module, step: int = 0) -> torch.Tensor:
    x, y = batch(step)
    return torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())


def wrapped(model: torch.nn.Module, policy: str = "sr", **options: Any) -> hu.WriteBack:
    fused = options.pop("fused", True)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, fused=fused)
    return hu.WriteBack(adamw, GRID, policy, model=model, seed=3, **options)


def steps(model: torch.nn.Module, opt: torch.optim.Optimizer, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        opt.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        opt.step()
        losses.append(float(loss.detach()))
    return losses


def same_weights(a: torch.nn.Module, b: torch.nn.Module) -> None:
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        assert_same(plain(p.detach()), plain(q.detach()), name)


def test_codes_are_those_of_the_grid() -> None:
    """Every code that is a number, and every value that has one."""
    codes = torch.tensor([c for c in range(256) if c & 127 != 127], dtype=torch.uint8)
    values = NativeWeight(codes.view(torch.float8_e4m3fn), SCALE).decoded()
    assert_same(values, kernels.decode(codes, GRID), "values")
    assert_same(kernels.encode(values, GRID), codes, "codes")
    assert [scale_of(g) for g in ("e4m3", "e4m3@128", "e4m3@2")] == [1.0, SCALE, 0.5]


def test_products_are_within_the_bound_of_the_format() -> None:
    """Exact on what was rounded, but for the order of a float32 sum; and the rounding is half a gap each."""
    torch.manual_seed(1)
    x = torch.randn(2, 16, 48, requires_grad=True)
    weight = NativeWeight((torch.randn(32, 48) * 100).to(torch.float8_e4m3fn), SCALE)
    p = torch.nn.Parameter(weight)
    y = torch.nn.functional.linear(x, p)
    g = torch.randn_like(y)
    y.backward(g)
    w, rows, out = weight.decoded(), x.detach().reshape(-1, 48), g.reshape(-1, 32)
    (x8, sx), (g8, sg) = gemm.scaled(rows, gemm.FORWARD), gemm.scaled(out, gemm.BACKWARD)
    xq, gq = x8.float() * sx, g8.float() * sg
    assert x.grad is not None
    assert p.grad is not None
    for found, a, b in (
        (y.detach().reshape(-1, 32), xq, w.t()), (x.grad.reshape(-1, 48), gq, w), (p.grad, gq.t(), xq),
    ):  # fmt: skip
        # n products and n additions of float32, and two scalings.
        bound = (2 * a.shape[1] + 2) * EXACT * (a.abs() @ b.abs())
        assert ((found - a @ b).abs() <= bound).all()
    # Half a gap: 2^-4 of a normal e4m3 number (2^-3 for e5m2), or half the smallest subnormal.
    assert ((xq - rows).abs() <= (rows.abs() * 2**-4).clamp(min=float(sx) * 2**-10) * (1 + 4 * EXACT)).all()
    assert ((gq - out).abs() <= (out.abs() * 2**-3).clamp(min=float(sg) * 2**-17) * (1 + 4 * EXACT)).all()
    assert p.grad.dtype == torch.float32
    assert not isinstance(p.grad, NativeWeight)


def test_scales_of_zeros_and_of_what_is_not_finite() -> None:
    zeros, _ = gemm.scaled(torch.zeros(3, 4), gemm.FORWARD)
    assert not zeros.float().any()
    bad, scale = gemm.scaled(torch.tensor([[1.0, torch.inf]]), gemm.BACKWARD)
    assert not torch.isfinite(bad.float() * scale).all()  # seen, not hidden


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


def test_an_embedding_is_torchs() -> None:
    """Lookups and their gradients, padding included."""
    model = Net()
    hu.native(model)
    table = model.rows.weight
    boxed = torch.nn.Parameter(plain(table.detach()))
    which = torch.tensor([[1, 3, 3], [0, 23, 1]])
    for padding in (None, 1, -1):
        found = [torch.nn.functional.embedding(which, w, padding) for w in (table, boxed)]
        assert_same(found[0].detach(), found[1].detach(), "rows")
        grads = [torch.autograd.grad(f.sin().sum(), w)[0] for f, w in zip(found, (table, boxed), strict=True)]
        assert_same(grads[0], grads[1], "gradient")


# ---- evidence ---------------------------------------------------------------------------------------


def test_evidence_of_a_step() -> None:
    """Four products here: two matrices and the tied output forward; each again twice backward."""
    model = native_net()
    with Dispatch() as seen:
        loss_of(model).backward()
    assert dispatch.products(model) == 9
    assert seen.calls == dispatch.expected(9) == {"e4m3 x e4m3": 3, "e5m2 x e4m3": 6}
    assert seen.kernels == {} or torch.cuda.is_available()
    assert len(seen.sha256) == 64
    assert seen.to_json()["calls"] == seen.calls


def test_a_fallback_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers, decoded first: nothing native ran, and the evidence says so."""

    def decoded(
        a: torch.Tensor, b: torch.Tensor, *, scale_a: Any, scale_b: Any, out_dtype: Any
    ) -> torch.Tensor:
        return (a.float() * scale_a) @ (b.float() * scale_b)

    monkeypatch.setattr(torch, "_scaled_mm", decoded)
    model = native_net()
    with Dispatch() as seen:
        loss_of(model).backward()
    assert seen.calls == {}


def test_on_a_gpu_a_call_counts_with_its_kernel() -> None:
    def call(number: int) -> dict[str, Any]:
        kinds = ["c10::Float8_e5m2", "c10::Float8_e4m3fn"]
        return {
            "name": dispatch.OPERATOR,
            "cat": "cpu_op",
            "args": {"External id": number, "Input type": kinds},
        }

    kernel = {"name": "gemm_e5m2_e4m3", "cat": "kernel", "args": {"External id": 1}}
    trace = {"traceEvents": [call(1), call(2), kernel, {"name": "other", "ph": "X"}]}
    calls, _, launched = dispatch.scan(trace, gpu=True)
    assert (calls, launched) == ({"e5m2 x e4m3": 1}, {"gemm_e5m2_e4m3": 1})
    assert dispatch.scan(trace, gpu=False)[0] == {"e5m2 x e4m3": 2}


def test_no_rows_at_all() -> None:
    """As an expert that gets no tokens: a result of no rows, and gradients of zero."""
    model = torch.nn.Linear(16, 32)
    hu.native(model)
    x = torch.zeros(0, 16, requires_grad=True)
    y = model(x)
    assert y.shape == (0, 32)
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == (0, 16)
    assert not model.weight.grad.any()


def test_rows_that_an_embedding_has_not() -> None:
    """Refused as by torch, also where counting from the end would find one."""
    model = torch.nn.Embedding(8, 16)
    hu.native(model)
    for which in (-1, 8):
        with pytest.raises(IndexError):
            model(torch.tensor([which]))


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


MEMORY = """
import os, sys, warnings
import torch
import halfulp as hu

model = torch.nn.Sequential(torch.nn.Linear(16, 16))
hu.native(model)
w = model[0].weight
ones = torch.ones(16, 16)
given = [(), (0,), (w.detach(),), (lambda x: x,), (ones, lambda x, y: x), (w, w, lambda x, y, z: x)]
calls = {
    "share": model.share_memory,
    "from_dlpack": lambda: torch.from_dlpack(w.detach()).sum(),
    "to_dlpack": lambda: torch.from_dlpack(torch.utils.dlpack.to_dlpack(w.detach())).sum(),
    "set_": lambda: torch.ones(1).set_(w.untyped_storage()).sum(),
    "storage.float": lambda: w.untyped_storage().float(),
    "storage.share": lambda: w.untyped_storage().share_memory_(),
}
calls |= {
    f"{name} {i}": (lambda name=name, x=x, args=args: getattr(x, name)(*args))
    for name in dir(torch.Tensor)
    if callable(getattr(torch.Tensor, name, None))
    and name not in ("__init_subclass__", "__new__", "__class__")
    for i, (x, args) in enumerate((x, args) for x in (w, w.detach()) for args in given)
}
todo = list(calls.items())
while todo:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        warnings.simplefilter("ignore")
        os.close(2)
        for name, call in todo:
            try:
                said = f"gave {type(call()).__name__}"
            except BaseException as error:
                said = f"{type(error).__name__}: {error}".splitlines()[0]
            os.write(writer, (name + "|" + said + "\\n").encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        for line in pipe:
            print(line, end="")
            todo.pop(0)
    os.waitpid(child, 0)
    if todo:
        print(todo.pop(0)[0] + "|ENDED")
"""


def test_no_method_of_tensors_ends_the_process() -> None:
    """Called in a child process: whatever takes the address of a weight that has no memory raises."""
    ran = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    found = dict(line.split("|", 1) for line in ran.stdout.splitlines() if "|" in line)
    assert [name for name, said in found.items() if said == "ENDED"] == []
    assert len(found) > 5000
    for name in (
        "share",
        "from_dlpack",
        "share_memory_ 0",
        "apply_ 9",
        "numpy 6",
        "storage 0",
        "tolist 0",
        "map_ 10",
    ):
        assert found[name].startswith("UsageError: "), (name, found[name])
        assert "this weight has none" in found[name]
    for name in ("to_dlpack", "set_", "storage.share"):
        assert found[name].split(":")[0] in ("RuntimeError", "NotImplementedError"), (name, found[name])
    assert found["data_ptr 0"] == "gave int"
