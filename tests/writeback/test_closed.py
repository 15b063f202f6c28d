"""Packed weights outside their module's forward: a write reaches the codes or raises, a read is right."""

from __future__ import annotations

import copy
import json
import os
import pickle
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import assert_same

import halfulp as hu

HERE = Path(__file__).parents[1]
FINE = {"same", "same, unchanged", "refused", "not callable", "ends the process, as with a plain tensor"}


def packed(model: torch.nn.Module, grid: str = "e4m3@16", policy: Any = "rne") -> hu.WriteBack:
    inner = torch.optim.SGD(model.parameters(), lr=0.0)
    return hu.WriteBack(inner, grid, policy, model=model, storage="packed", params=lambda _, p: p.dim() >= 2)


@pytest.mark.parametrize(
    ("kind", "least"), [("operators", (1200, 400, 300)), ("functions", (1300, 500, 450))]
)
def test_every_in_place_operation_that_torch_has(kind: str, least: tuple[int, int, int]) -> None:
    """By torch's own schemas and names: the codes are those of what plain torch gives, or there is an error
    and nothing has changed."""
    command = [sys.executable, str(HERE / "inplace_operations.py"), kind]
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    ran = subprocess.run(
        command, capture_output=True, text=True, timeout=600, env={**os.environ, "PYTHONPATH": path}
    )
    assert ran.returncode == 0, ran.stderr
    found = dict(json.loads(line) for line in ran.stdout.splitlines())
    assert {name: verdict for name, verdict in found.items() if verdict not in FINE} == {}
    counts = Counter(found.values())
    assert (len(found), counts["same"], counts["refused"]) >= least
    assert counts["same"] >= least[1]


WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "zero_": lambda w: w.zero_(),
    "fill_": lambda w: w.fill_(0.5),
    "init.zeros_": torch.nn.init.zeros_,
    "init.constant_": lambda w: torch.nn.init.constant_(w, 0.25),
    "data.zero_": lambda w: w.data.zero_(),
    "data.clamp_": lambda w: w.data.clamp_(-0.125, 0.125),
    "a row": lambda w: w.__setitem__(1, 1.0),
    "a column of a view": lambda w: w.detach().T[2].fill_(-1.0),
    "mul_": lambda w: w.mul_(2.0),
    "one of several": lambda w: torch._foreach_neg_([torch.ones(2), w]),
    "out=": lambda w: torch.neg(torch.ones(8, 8), out=w),
    "copy_": lambda w: w.copy_(torch.eye(8)),
}


@pytest.mark.parametrize("grid", ["e4m3@16", "int8/row", "mxfp4"])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("policy", ["rne", "master"])
def test_what_is_written_is_where_the_next_step_starts(write: str, grid: str, policy: str) -> None:
    """In the codes at once, in the next forward, and after a step at rate zero, under masters too. What is
    off the grid (a constant is off ``int8/row``) changes nothing."""
    model = torch.nn.Linear(8, 8, bias=False)
    opt = packed(model, grid, policy)
    before, expected = model.state_dict()["weight"], model.state_dict()["weight"]
    with torch.no_grad():
        WRITES[write](expected)
        if not torch.equal(hu.grid(grid).round(expected), expected):
            with pytest.raises(hu.UsageError, match="values to load or set are off it"):
                WRITES[write](model.weight)
            expected = before
        else:
            WRITES[write](model.weight)
    assert torch.equal(model.state_dict()["weight"], expected)
    x = torch.eye(8)
    assert torch.equal(model(x), torch.nn.functional.linear(x, expected))
    model(x).sum().backward()
    opt.step()
    assert torch.equal(model.state_dict()["weight"], expected)


def test_values_off_the_grid_are_refused_and_change_nothing() -> None:
    model = torch.nn.Linear(8, 8, bias=False)
    packed(model)
    before = model.state_dict()["weight"]
    for write in (torch.nn.init.normal_, lambda w: w.add_(1e-3), lambda w: w.data[2].fill_(0.3)):
        with (
            torch.no_grad(),
            pytest.raises(hu.UsageError, match=r"'weight' is packed on grid e4m3@16.*grid\.round"),
        ):
            write(model.weight)
        assert_same(model.state_dict()["weight"], before)
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):  # torch's own rule
        model.weight.zero_()
    with torch.no_grad(), pytest.raises(hu.UsageError, match="another shape, layout or memory"):
        model.weight.t_()
    with torch.no_grad(), pytest.raises(hu.UsageError, match="no memory to exchange"):
        model.weight.set_(torch.ones(8, 8))
    assert_same(model.state_dict()["weight"], before)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_an_embedding_that_renormalises_its_rows_is_refused(mode: Any) -> None:
    """It writes to the weight inside its forward; rows whose norms fit are left alone, and it runs."""
    model = torch.nn.Embedding(8, 8, max_norm=1.0)
    with torch.no_grad():
        model.weight.fill_(1.0)[:4] = 0.125
    packed(model)
    before = model.state_dict()["weight"]
    with mode():
        assert torch.equal(model(torch.tensor([1, 3])), before[[1, 3]])
        with pytest.raises(hu.UsageError, match=r"'weight' is packed on grid e4m3@16, but 8 of 64 values"):
            model(torch.tensor([1, 6]))
        assert torch.equal(model(torch.tensor([1, 3])), before[[1, 3]])
    assert_same(model.state_dict()["weight"], before)


class Clipped(torch.nn.Linear):
    """Clips its weight in its forward, in one of several ways."""

    how = "data"
    at = 0.125

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            if self.how == "data":
                self.weight.data.clamp_(-self.at, self.at)
            elif self.how == "itself":
                self.weight.clamp_(-self.at, self.at)
            else:
                self.weight.data = self.weight.data.clamp(-self.at, self.at)
        return super().forward(x)


@pytest.mark.parametrize("how", ["data", "itself", "set"])
def test_what_a_forward_writes_to_its_own_weight(how: str) -> None:
    model = Clipped(8, 8, bias=False)
    model.how = how
    packed(model)
    before = model.state_dict()["weight"]
    model(torch.ones(1, 8)).sum().backward()
    assert_same(model.state_dict()["weight"], before.clamp(-0.125, 0.125))
    model.at = 0.1
    with pytest.raises(hu.UsageError, match="values to load or set are off it"):
        model(torch.ones(1, 8))
    assert_same(model.state_dict()["weight"], before.clamp(-0.125, 0.125))


def test_tracing_is_refused() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
    packed(model)
    expected = model(torch.ones(2, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch would rather export
        with pytest.raises(hu.UsageError, match=r"'0\.weight' is packed, and a traced module"):
            torch.jit.trace(model, torch.ones(2, 8))
    assert torch.equal(model(torch.ones(2, 8)), expected)


@pytest.mark.filterwarnings("ignore")  # torch.compile's own
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_modules_see_the_weights_of_each_step(backend: str) -> None:
    losses = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        opt = hu.WriteBack(inner, "e4m3@16", "sr", model=model, storage="packed")
        run = torch.compile(model, backend=backend) if compiled else model
        for _ in range(3):
            opt.zero_grad()
            loss = run(torch.ones(4, 8)).square().sum()
            loss.backward()
            opt.step()
            losses.append(loss.item())
    assert losses[:3] == losses[3:]


class Parent(torch.nn.Module):
    """Reads the weights of its children, without calling them."""

    def __init__(self) -> None:
        super().__init__()
        self.child = torch.nn.Linear(8, 8, bias=False)
        self.other = torch.nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.linear(x, self.child.weight).tanh() @ self.other.weight.T
        return y + self.child.weight[0] * self.other.weight.norm()


def test_reads_outside_the_modules_own_forward_have_gradients() -> None:
    """As in a container: values, gradients of weights and of what they were multiplied with."""
    runs = []
    for storage in ("container", "packed"):
        torch.manual_seed(0)
        model = Parent()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        opt = hu.WriteBack(inner, "e4m3@16", "sr", model=model, storage=storage)
        seen = []
        for step in range(3):
            opt.zero_grad()
            x = torch.full((2, 8), 0.5 + step, requires_grad=True)
            loss = model(x).square().sum()
            loss.backward()
            seen += [loss.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]
            opt.step()
        runs.append([*seen, *model.state_dict().values()])
    for a, b in zip(*runs, strict=True):
        assert_same(a, b)


def test_what_is_kept_of_a_weight_shows_what_it_holds_now() -> None:
    model = torch.nn.Linear(8, 8, bias=False)
    packed(model)
    view, row = model.weight.data, model.weight.detach()[3]
    with torch.no_grad():
        model.weight.fill_(0.5)
    assert bool((view == 0.5).all())
    assert bool((row == 0.5).all())
    row.zero_()
    assert model.state_dict()["weight"].sum().item() == 28.0


def test_functions_about_the_parameter_itself() -> None:
    """Hooks, gradients and flags are the parameter's; a copy of it alone is a plain one, with values."""
    model = torch.nn.Linear(8, 8, bias=False)
    packed(model)
    w = model.weight
    assert isinstance(w, torch.nn.Parameter)
    assert (w.is_leaf, w.requires_grad, w.numel(), w.is_contiguous()) == (True, True, 64, True)
    handle = w.register_hook(lambda g: g * 2)
    (w * 3).sum().backward()
    assert bool((w.grad == 6).all())
    handle.remove()
    assert bool((torch.autograd.grad((w * 3).sum(), w)[0] == 3).all())
    w.requires_grad_(False)
    assert not w.requires_grad
    pickled = pickle.loads(pickle.dumps(w))  # noqa: S301  # our own bytes
    for made in (copy.deepcopy(w), pickled, copy.deepcopy(w.data)):
        assert type(made) in (torch.nn.Parameter, torch.Tensor)
        assert_same(made.detach(), model.state_dict()["weight"])
    assert repr(w).startswith("Parameter containing:\ntensor([[")


def test_memory_is_not_given_out() -> None:
    """Neither to functions that torch shows us nor to those that it does not."""
    model = torch.nn.Linear(8, 8, bias=False)
    packed(model)
    before = model.state_dict()["weight"]
    w = model.weight
    for call in (w.numpy, w.detach().numpy, w.data.tolist, w.share_memory_, w.data.storage):
        with pytest.raises(hu.UsageError, match=r"needs a tensor's memory.*w\.detach\(\) \+ 0"):
            call()
    assert_same(torch.from_numpy((w.detach() + 0).numpy()), before)
    for x in (w, w.detach()):
        with pytest.raises(RuntimeError, match="Cannot access data pointer"):
            torch.utils.dlpack.to_dlpack(x)
    scripted = torch.jit.CompilationUnit("def zero(w: Tensor) -> Tensor:\n    return w.zero_()\n").zero
    with torch.no_grad(), pytest.raises(RuntimeError, match="Cannot access data pointer"):
        scripted(w)
    assert_same(model.state_dict()["weight"], before)


def test_casts_of_a_packed_model_keep_its_values() -> None:
    """And a step refuses them, as for any storage; back in its own type it goes on."""
    model = torch.nn.Linear(8, 8, bias=False)
    opt = packed(model)
    before = model.state_dict()["weight"]
    model.bfloat16()
    assert_same(model.state_dict()["weight"], before.bfloat16())
    model.weight.grad = torch.ones(8, 8).bfloat16()
    with pytest.raises(hu.UsageError, match="was float32 when the WriteBack was made and is bfloat16 now"):
        opt.step()
    model.weight.grad = None
    model.float()
    assert_same(model.state_dict()["weight"], before)
    with pytest.raises(hu.UsageError, match=r"\[8, 8\] on cpu, and cannot get \[2, 8\]"):
        model.weight.data = torch.ones(2, 8)
    with pytest.raises(hu.UsageError, match=r"other values cannot be set in torch\.float64"):
        model.weight.data = torch.ones(8, 8).double()
