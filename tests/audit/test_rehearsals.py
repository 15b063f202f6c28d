"""Rehearsals: bit for bit a plain replay of the kept proposals, and the run knows nothing of them."""

from __future__ import annotations

import copy
import json
import math
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from kept_weights import KeptWeights, Steps
from safetensors.torch import load_file

import halfulp as hu
from halfulp import documents
from halfulp.audit.rehearsal.specs import Rehearsal
from halfulp.errors import UsageError
from halfulp.kernels import rehearse as kernel
from halfulp.kernels import rehearse_reference as reference
from halfulp.kernels.rehearse import Rule
from halfulp.kernels.rehearse_reference import MASTER
from halfulp.writeback import Kahan

SPECS = [
    "e4m3@128", "e4m3@128:sr", "e5m2:deadzone-sr", "bf16", "bf16:sr", "bf16:kahan", "bf16:eco",
    "e5m2:eco(rounding=stochastic)", "e5m2:master", "e4m3@128:master(start_from=raw)", "m5", "int8/row",
    "int8/row:sr", "mxfp8_e4m3", "e5m2:kahan",
]  # fmt: skip


def pull(rate: float) -> float:
    """The default: .8 times the root of the largest rate, which is the only one here."""
    return min(1.0, 0.8 * math.sqrt(rate))


class Net(torch.nn.Module):
    """Two layers, a weight that is used twice, and a buffer that a forward pass changes."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(24, 40)
        self.norm = torch.nn.BatchNorm1d(40)
        self.outer = torch.nn.Linear(40, 33)
        self.again = torch.nn.Linear(24, 40)
        self.again.weight = self.inner.weight
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.norm(self.inner(x)).relu() + self.again(x).tanh())


def begun(
    dtype: torch.dtype = torch.float32, kind: Any = torch.optim.AdamW, **options: Any
) -> tuple[Net, Any]:
    torch.manual_seed(3)
    net = Net(dtype)
    return net, kind(net.parameters(), **{"lr": 2e-3, **options})


def loss_of(net: torch.nn.Module, step: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(step)
    dtype = next(net.parameters()).dtype
    x, y = (torch.randn(16, n, generator=made).to(dtype) for n in (24, 33))
    return torch.nn.functional.mse_loss(net(x), y)


def train(net: torch.nn.Module, opt: Any, steps: range) -> None:
    for step in steps:
        opt.zero_grad()
        loss_of(net, step).backward()
        opt.step()


def held(audit: hu.Audit) -> dict[str, torch.Tensor]:
    assert audit.rehearsing is not None
    found = audit.rehearsing.state()
    for w in audit.rehearsing.tensors:
        found |= audit.rehearsing.state_of(w)
    return {name: value.clone() for name, value in found.items()}


def steps_of(audit: hu.Audit) -> int:
    assert audit.rehearsing is not None
    return audit.rehearsing.step


def replayed(
    steps: Steps, spec: str, bound: str, name: str, group: dict[str, Any], squares: dict[str, list[Any]]
) -> Any:
    """What a plain loop over the kept weights gives: values, counts by step, carry.

    ``squares``: the second moments after every step, by which ECO's feedback is divided.
    """
    r = Rehearsal.of(spec)
    dtype = steps[0][name][0].dtype
    rule = r.rule(dtype)
    work: Any = np.float64 if dtype == torch.float64 else np.float32
    state: Any = {}
    for weights in steps:
        before, after = (x.to(torch.float64).numpy().astype(work) for x in weights[name])
        if not state:
            s = reference.reference.round(before, rule.grid)
            raw = r.policy.spec == "master(start_from=raw)"
            state = {
                "held": reference.reference.encode(s, rule.grid) if rule.coded else (before if raw else s),
                "kept": np.zeros_like(s),
                "moved": np.zeros((s.size + 7) // 8, dtype=np.uint8),
                "counts": [],
            }
        step = len(state["counts"]) + 1
        unit, decayed = work(1.0), None
        if ":eco" in spec:
            d = np.sqrt(squares[name][step - 1]) / work(math.sqrt(1 - 0.999**step)) + work(1e-8)
            unit, decayed = work(group["lr"] / (1 - 0.9**step)) / d, state["kept"] * work(0.9)
            state["kept"] = state["kept"] * unit
        state["held"], counts = reference.step(
            rule, state["held"], before, after, pull(group["lr"]) if bound == "point" else 0.0,
            stream=hu.Stream(seed=5, name=name, step=step), kept=state["kept"], back=r.back(group),
            moved=state["moved"],
        )  # fmt: skip
        if decayed is not None:
            state["kept"] = state["kept"] / unit
            state["kept"] = np.where(np.isfinite(state["kept"]), state["kept"], decayed)
        state["counts"].append(counts.sum(axis=0).tolist())
    return state, rule


NARROW = ["e4m3@128", "bf16:sr", "bf16:kahan", "e5m2:master", "mxfp8_e4m3"]
"""What is rehearsed beside other containers: every case more is another kernel to compile."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_rehearsal_is_a_replay_of_the_kept_proposals(dtype: torch.dtype, tmp_path: Path) -> None:
    net, opt = begun(dtype)
    specs = SPECS if dtype == torch.float32 else NARROW
    kept = KeptWeights(net, opt)
    settings: dict[str, Any] = {"seed": 5, "part_steps": 3, "rehearse": specs}
    with hu.Audit(opt, ["bf16"], model=net, out=tmp_path / "trace", **settings) as audit:
        squares: dict[str, list[Any]] = {}
        for k in range(8):
            train(net, opt, range(k, k + 1))
            for name, p in net.named_parameters():
                squares.setdefault(name, []).append(opt.state[p]["exp_avg_sq"].to(torch.float64).numpy())
        squares = {n: [v.astype(np.float32) for v in each] for n, each in squares.items()}
        state = held(audit)
        shown = {}
        for spec in specs:
            for bound in ("point", "upper"):
                with audit.as_if(spec, bound):
                    shown[spec, bound] = net.outer.weight.detach().double().numpy().copy()
    trace = hu.Trace.open(tmp_path / "trace")
    assert [t["name"] for t in trace.tensors if t.get("rehearsed")] == ["inner.weight", "outer.weight"]
    table = trace.scan("rehearsals").to_polars()
    for j, spec in enumerate(specs):
        for b, bound in enumerate(("point", "upper")):
            for name in ("inner.weight", "outer.weight"):
                found, rule = replayed(kept.steps, spec, bound, name, opt.param_groups[0], squares)
                at = next(t["id"] for t in trace.tensors if t["name"] == name)
                saved = {what: state.get(f"{at}.{j}.{what}") for what in ("held", "moved", "kept")}
                mine = {what: rows[b] for what, rows in saved.items() if rows is not None}
                codes = mine["held"].numpy()
                codes = codes.view(np.uint16) if codes.dtype == np.int16 else codes
                assert np.array_equal(codes, found["held"].reshape(-1)), (spec, bound, name)
                assert np.array_equal(mine["moved"].numpy(), found["moved"])
                if "kept" in mine:
                    assert np.array_equal(mine["kept"].numpy(), found["kept"].reshape(-1)), (spec, bound)
                    assert found["kept"].any() or dtype == torch.bfloat16
                rows = table.filter(
                    pl.col("rehearsal") == j, pl.col("bound") == b + 1, pl.col("tensor") == at
                )
                columns = rows.sort("step").select("frozen", "never_moved", "nonfinite")
                assert [list(r) for r in columns.iter_rows()] == found["counts"], (spec, bound)
            values = reference.reference.decode(found["held"], rule.grid) if rule.coded else found["held"]
            if rule.keeps == MASTER:
                values = reference.reference.round(values, rule.grid)
            assert np.array_equal(shown[spec, bound], values.astype(np.float64)), (spec, bound)


def hard(seed: int, numel: int = 1700) -> tuple[Any, Any]:
    """Weights and what becomes of them: all sizes, ends of the range, zeros, and what is not finite."""
    made = np.random.default_rng(seed)
    w = (made.normal(size=numel) * np.exp2(made.integers(-20, 4, numel))).astype(np.float32)
    d = (made.normal(size=numel) * np.exp2(made.integers(-24, 3, numel))).astype(np.float32)
    w[:40], d[40:80] = 0.0, -0.0
    w[80:90], w[90:100], d[100:110] = 3.5, -448.0, np.float32(3e38)
    after = w + d
    after[110:120], w[120:125], after[700:703] = np.nan, np.inf, -np.inf
    return w, after


RULES = [
    Rule(hu.grid(grid).within(torch.float32), mode, keeps)
    for grid in ("e4m3@128", "e5m2", "m5", "bf16", "fp16", "int8/row")
    for mode, keeps in (
        (reference.reference.NEAREST, reference.NOTHING),
        (reference.reference.STOCHASTIC, reference.NOTHING),
        (reference.reference.DEADZONE, reference.NOTHING),
        (reference.reference.NEAREST, reference.CARRY),
        (reference.reference.NEAREST, reference.PENDING),
        (reference.reference.NEAREST, reference.MASTER),
    )
]


@pytest.mark.parametrize("rule", RULES, ids=lambda r: f"{r.grid.name}-{r.mode}-{r.keeps}")
def test_the_kernel_equals_the_reference(rule: Rule, threads: None) -> None:
    """On hard values, over steps, alone and beside another tensor, with any number of threads."""
    torch.set_num_threads(2)
    pulls, back = [0.03, 0.0, 1.0], (0.9, 0.1)
    chosen = torch.arange(1700) % 5 < 2 if rule.keeps == MASTER else None
    w, _ = hard(0)
    alone = kernel.begin(rule, torch.from_numpy(w), len(pulls))
    small = kernel.begin(rule, torch.from_numpy(w[:500].copy()), len(pulls))
    beside = alone.empty(4)
    table = kernel.table_of([500, 1700, 0])
    for held, first in ((small, 0), (alone, 1)):
        part = beside.part(first, held.held.shape[1])
        for name, into in part.tensors().items():
            into.copy_(held.tensors()[name])
    plain = [{name: t[i].numpy().copy() for name, t in alone.tensors().items()} for i in range(len(pulls))]
    for step in range(4):
        w, after = hard(step)
        stream = hu.Stream(seed=1, name="w", step=step, offset=(0, 5, 32, 31)[step])  # lanes want 32
        asked = kernel.Tensor(pulls=pulls, stream=stream)
        given = (torch.from_numpy(w), torch.from_numpy(after))
        counts = kernel.move(rule, alone, *given, asked, back, chosen)
        for i, k in enumerate(pulls):
            mine = plain[i]
            codes = mine["held"].view(np.uint16) if mine["held"].dtype == np.int16 else mine["held"]
            new, expected = reference.step(
                rule, codes, w, after, k, stream=stream, kept=mine.get("kept"), back=back,
                moved=mine["moved"], chosen=None if chosen is None else chosen.numpy(),
            )  # fmt: skip
            mine["held"] = new.astype(codes.dtype).view(mine["held"].dtype)
            assert np.array_equal(counts[:, i].numpy(), expected), (step, k)
            for name, value in alone.tensors().items():
                assert np.array_equal(value[i].numpy(), mine[name]), (step, k, name)
        assert counts[:, :, 2].sum() >= 3 * 18
        if kernel.fused(rule, given[0]):
            both = (torch.zeros(4 * 768), torch.zeros(4 * 768))
            for flat, x in zip(both, given, strict=True):
                flat[768:][:1700] = x
            which = None if chosen is None else torch.zeros(4 * 768, dtype=torch.bool)
            if which is not None and chosen is not None:
                which[768:][:1700] = chosen
            together = kernel.Asked([None, asked, asked], table, torch.float32)
            found = kernel.move_many(rule, beside, *both, together, [back] * 3, which)
            assert np.array_equal(found[1:], counts.numpy())
            assert not found[0].any()
            for name, value in beside.part(1, 1700).tensors().items():
                assert torch.equal(value, alone.tensors()[name]), name
            for name, value in beside.part(0, 500).tensors().items():
                assert torch.equal(value, small.tensors()[name]), name


def test_a_carry_in_bfloat16() -> None:
    """It is rounded to the nearest when it is kept, and is half as large."""
    rule = Rule(hu.grid("e5m2").within(torch.float32), keeps=reference.CARRY)
    w, after = (torch.from_numpy(x) for x in hard(1))
    short, long = (kernel.begin(rule, w, 1, kept=t) for t in (torch.bfloat16, torch.float32))
    for held in (short, long):
        kernel.move(rule, held, w, after, kernel.Tensor(pulls=[0.0], stream=hu.Stream(seed=0, name="w")))
    assert short.kept is not None
    assert long.kept is not None
    assert torch.equal(short.kept, long.kept.to(torch.bfloat16))
    assert torch.equal(short.held, long.held)


def test_tiles_with_masters(tmp_path: Path) -> None:
    """Masters in all tiles are masters, in none they are nearest; by a file, as an object, by a name."""
    net, opt = begun()
    made = {}
    for name, on in (("all", True), ("none", False)):
        tiles = {"inner.weight": torch.full((2,), on), "outer.weight": torch.full((2,), on)}
        sizes = {"inner.weight": 960, "outer.weight": 1320}
        made[name] = hu.Mask(tiles=tiles, sizes=sizes, score="P", budget=4 * 2280)
        made[name].save(tmp_path / f"{name}.safetensors")
    half = hu.TileMaster({"inner.weight": torch.ones(2) > 0, "outer.weight": torch.zeros(2) > 0})
    by_file = [f"e5m2:tiles({tmp_path / name}.safetensors)" for name in made]
    specs = ["e5m2", "e5m2:master", *by_file, ("half", "e5m2", half), ("e5m2", half)]
    with hu.Audit(opt, "e5m2", model=net, out=tmp_path / "t", rehearse=specs) as audit:
        train(net, opt, range(6))
        shown = []
        for spec in audit.rehearsals:
            with audit.as_if(spec):
                shown.append([p.detach().clone() for p in (net.inner.weight, net.outer.weight)])
    plain, master, every, none, mine, pair = shown
    for a, b in ((every, master), (none, plain), (mine, [master[0], plain[1]]), (pair, mine)):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    trace = hu.Trace.open(tmp_path / "t")
    assert trace.rehearsals == ["e5m2", "e5m2:master", *by_file, "half", "e5m2:tile-master(start_from=code)"]
    assert trace.forecast("half").grid == "e5m2"


def test_the_first_step_is_that_of_the_audit(tmp_path: Path) -> None:
    """Both begin at Q(w), and the open loop is asked what the projection is asked."""
    net, opt = begun()
    memory = hu.Memory()
    grids = ["bf16", "e5m2", "e4m3@128", "int8/row"]
    with hu.Audit(opt, grids, model=net, out=memory, rehearse=grids) as audit:
        train(net, opt, range(1))
        assert audit.rehearsals == grids
    for grid in grids:
        f = memory.trace.forecast(grid)
        assert f.frozen(bound="upper").tolist() == f.frozen(bound="lower").tolist()
        assert f.never_moved(bound="upper").tolist() == f.frozen(bound="upper").tolist()


def test_an_open_loop_is_the_write_back_of_the_same_proposals(tmp_path: Path) -> None:
    """Plain SGD on a linear loss makes proposals that do not depend on the weights."""
    for policy in ("rne", "sr", "deadzone-sr", "kahan", "master"):
        weights = [torch.nn.Parameter(torch.linspace(-1, 1, 600).reshape(20, 30)) for _ in range(2)]
        slopes = torch.linspace(-3, 3, 600).reshape(20, 30)
        reference_run = torch.optim.SGD([("w", weights[0])], lr=2**-9)
        measured = hu.WriteBack(torch.optim.SGD([("w", weights[1])], lr=2**-9), "e4m3", policy, seed=7)
        with hu.Audit(reference_run, "e4m3", rehearse=f"e4m3:{policy}", seed=7) as audit:
            for _ in range(20):
                for w, opt in zip(weights, (reference_run, measured), strict=True):
                    w.grad = slopes.clone()
                    opt.step()
            with audit.as_if("e4m3" if policy == "rne" else f"e4m3:{policy}", "upper"):
                close = (weights[0] == weights[1]).double().mean()
        assert close > (0.99 if policy in ("kahan", "master") else 0.97), (policy, float(close))


def test_the_run_is_bitwise_the_same(tmp_path: Path) -> None:
    """With rehearsals and evaluations that draw random numbers and pass through batch norm."""

    def run(rehearse: Any) -> tuple[list[torch.Tensor], Any]:
        net, opt = begun()
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        drawn: list[Any] = []
        seen: list[float] = []

        def evaluate() -> torch.Tensor:
            drawn.append((float(torch.rand(())), random.random(), float(np.random.rand())))  # noqa: NPY002
            return loss_of(net, 1000)

        audit = hu.Audit(opt, "bf16", model=net, rehearse=rehearse)
        with audit:
            for step in range(6):
                train(net, opt, range(step, step + 1))
                if step % 2:
                    if rehearse is None:
                        seen.append(float(evaluate().detach()))
                    else:
                        made = audit.evaluate(evaluate)
                        seen.append(made.real)
                        assert len(set(drawn[-1 - 3 * len(audit.rehearsals) + 1 :])) == 1
        tensors = [*net.state_dict().values(), *(t for s in opt.state.values() for t in s.values())]
        return tensors, (seen, float(torch.rand(())), random.random(), float(np.random.rand()))  # noqa: NPY002

    plain, tail = run(None)
    rehearsed, same = run(["e5m2", "bf16:kahan", "e4m3@128:sr"])
    assert tail == same
    assert all(torch.equal(a, b) for a, b in zip(plain, rehearsed, strict=True))


def test_as_if_puts_everything_back() -> None:
    net, opt = begun()
    with hu.Audit(opt, "e5m2", model=net, rehearse=["e5m2", "bf16"]) as audit:
        train(net, opt, range(3))
        before = copy.deepcopy(net.state_dict())
        places = [p.data_ptr() for p in net.parameters()]
        graph = loss_of(net.eval(), 7)

        def meddle() -> None:
            assert not torch.equal(net.inner.weight, before["inner.weight"])
            assert net.again.weight is net.inner.weight
            net.train()
            loss_of(net, 1)
            net.outer.weight.data = torch.zeros(1)
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError), audit.as_if("e5m2"):
            meddle()
        assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
        assert places == [p.data_ptr() for p in net.parameters()]
        graph.backward()  # it is still what it was
        with audit.as_if("bf16"):
            with pytest.raises(UsageError, match="leave that one first"), audit.as_if("e5m2"):
                pass
            with pytest.raises(UsageError, match=r"AdamW\.step\(\) was called inside as_if\('bf16'"):
                opt.step()
            torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1.0).step()  # another model's
        with audit.as_if("bf16", "lower"):
            assert torch.equal(net.inner.weight, hu.grid("bf16").round(before["inner.weight"]))
            assert torch.equal(net.inner.bias, before["inner.bias"])
        train(net, opt, range(3, 4))
        assert steps_of(audit) == 4
    with audit.as_if("e5m2"):  # the codes are there when the audit is over
        pass


def test_a_compiled_model_sees_the_rehearsed_weights() -> None:
    net, opt = begun()
    compiled = torch.compile(net.eval(), backend="aot_eager")
    with hu.Audit(opt, "e5m2", model=compiled, rehearse="e5m2") as audit:
        train(net, opt, range(2))
        with audit.as_if("e5m2"):
            assert torch.equal(loss_of(compiled, 9), loss_of(net, 9))
            inside = loss_of(compiled, 9)
        assert torch.equal(loss_of(compiled, 9), loss_of(net, 9))
        assert not torch.equal(loss_of(compiled, 9), inside)


def test_saved_weights_load_into_the_model(tmp_path: Path) -> None:
    net, opt = begun()
    with hu.Audit(opt, "e5m2", model=torch.compile(net, backend="eager"), rehearse="e5m2") as audit:
        train(net, opt, range(3))
        audit.save_as_if("e5m2", tmp_path / "w.safetensors", "upper")
        with audit.as_if("e5m2", "upper"):
            expected = copy.deepcopy(net.state_dict())
    other = Net()
    other.load_state_dict(load_file(tmp_path / "w.safetensors"))
    assert all(torch.equal(v, expected[k]) for k, v in other.state_dict().items())
    assert not torch.equal(other.inner.weight, net.inner.weight)


@pytest.mark.parametrize("where", ["folder", "memory"])
def test_a_resumed_rehearsal_equals_an_uninterrupted_one(where: str, tmp_path: Path) -> None:
    """Whether the checkpoint is where the trace ends, or before it."""
    specs = ["e5m2", "e4m3@128:sr", "bf16:kahan", "bf16:eco", "e5m2:master"]

    def rates(step: int) -> float:
        return 1e-3 * (step + 1) if step < 5 else 1e-3

    def go(net: Any, opt: Any, steps: range, audit: hu.Audit) -> None:
        for step in steps:
            opt.param_groups[0]["lr"] = rates(step)
            train(net, opt, range(step, step + 1))
            if step % 3 == 2:
                audit.evaluate(lambda: loss_of(net, 99))

    def answers(trace: Any) -> list[Any]:
        counts = [trace.scan(name).to_polars().fill_nan(None).rows() for name in ("grids", "rehearsals")]
        return counts + [trace.forecast(spec).losses.to_polars().rows() for spec in specs]

    def opened(out: Any) -> Any:
        return out.trace if isinstance(out, hu.Memory) else hu.Trace.open(out)

    def place(name: str) -> Any:
        return hu.Memory() if where == "memory" else tmp_path / name

    settings: dict[str, Any] = {"rehearse": specs, "grids": "bf16", "part_steps": 2}
    net, opt = begun()
    whole = place("whole")
    with hu.Audit(opt, model=net, out=whole, **settings) as audit:
        go(net, opt, range(9), audit)
        expected = held(audit)
    for checkpoint in (4, 6):
        net, opt = begun()
        out = place(f"cut-{checkpoint}")
        with hu.Audit(opt, model=net, out=out, **settings) as audit:
            go(net, opt, range(checkpoint), audit)
            saved = copy.deepcopy((net.state_dict(), opt.state_dict()))
            go(net, opt, range(checkpoint, 6), audit)
        if isinstance(out, hu.Memory):
            out = hu.Memory.loaded(out.save())
        net, opt = begun()
        net.load_state_dict(saved[0])
        opt.load_state_dict(saved[1])
        settings_now = {**settings, "resume": True, "first_step": checkpoint + 1}
        with hu.Audit(opt, model=net, out=out, **settings_now) as audit:
            if checkpoint < 6:  # the codes are those of step 6
                assert audit.evaluate(lambda: 0.5).losses == {}
                with pytest.raises(UsageError, match="are those of step 6"), audit.as_if("e5m2"):
                    pass
            go(net, opt, range(checkpoint, 9), audit)
            found = held(audit)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        assert answers(opened(out)) == answers(opened(whole))


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_rehearsal_that_is_killed_equals_one_that_is_not(tmp_path: Path) -> None:
    """Trace, codes, the model's own weights and those as if: after kills anywhere, and at the end."""
    places = [str(Path(hu.__file__).parent.parent), str(Path(__file__).parents[1])]
    told = subprocess.run(
        [sys.executable, str(Path(__file__).parents[1] / "rehearsals_kill.py"), str(tmp_path), "12"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(places)}, stdout=subprocess.PIPE, check=True,
    )  # fmt: skip
    kills = json.loads(told.stdout)
    assert kills == {"disk": 4, "step": 4, "rehearsal": 4}
    whole, *killed = sorted(tmp_path.iterdir(), key=lambda p: p.name != "whole")
    expected = hu.Trace.open(whole / "trace")
    saved = sorted(p.name for p in whole.glob("*.safetensors"))
    assert len(saved) == 18
    for folder in killed:
        trace = hu.Trace.open(folder / "trace")
        for table in ("grids", "tensors", "run", "rehearsals", "losses"):
            mine, theirs = (t.scan(table).to_polars().sort(pl.all()) for t in (trace, expected))
            # A checkpoint may be older than the trace: then a step is evaluated again, with the same losses.
            mine = mine.unique(maintain_order=True) if table == "losses" else mine
            assert mine.equals(theirs, null_equal=True), (folder.name, table)
        a, b = trace.state(), expected.state()
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in b)
        assert all((folder / name).read_bytes() == (whole / name).read_bytes() for name in saved)


HOSTILE: dict[str, tuple[str, Callable[[dict[str, Any]], Any], str]] = {
    "another bound": ("manifest.json", lambda d: d["options"]["rehearse"].update(bounds=["mid"]), "rehearse"),
    "no specs": ("manifest.json", lambda d: d["options"]["rehearse"].update(specs=[]), "rehearse"),
    "a grid more": ("manifest.json", lambda d: d["options"]["rehearse"]["grids"].append("bf16"), "rehearse"),
    "another pull": ("manifest.json", lambda d: d["options"]["rehearse"].update(pull=[]), "rehearse"),
    "specs swapped": ("manifest.json", lambda d: d["options"]["rehearse"]["specs"].reverse(), "belong"),
    "none": ("manifest.json", lambda d: d["options"].update(rehearse=None), "expected"),
    "rows": (
        "parts/000000/part.json", lambda d: d["rows"].update(rehearsals=5), "its part states 5",
    ),
    "a table less": ("parts/000000/part.json", lambda d: d["rows"].pop("rehearsals"), "expected"),
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE)
def test_what_a_trace_may_say_of_rehearsals(what: str, tmp_path: Path) -> None:
    """With digests made right, as somebody might on purpose."""
    net, opt = begun()
    with hu.Audit(opt, "bf16", model=net, out=tmp_path / "t", rehearse=["e5m2", "bf16"]) as audit:
        train(net, opt, range(2))
        audit.evaluate(lambda: 1.0)
    hu.Trace.open(tmp_path / "t")
    name, change, said = HOSTILE[what]
    document = json.loads((tmp_path / "t" / name).read_text())
    del document["sha256"]
    change(document)
    (tmp_path / "t" / name).write_bytes(documents.sealed(document))
    with pytest.raises(hu.HalfulpError, match=said):
        hu.Trace.open(tmp_path / "t").scan("rehearsals")


def test_a_resumed_trace_ends_later_than_the_run(tmp_path: Path) -> None:
    net, opt = begun()
    with hu.Audit(opt, "bf16", model=net, out=tmp_path / "t", rehearse="e5m2") as audit:
        train(net, opt, range(4))
    net, opt = begun()
    again: dict[str, Any] = {"model": net, "out": tmp_path / "t", "resume": True}
    with hu.Audit(opt, "bf16", rehearse="e5m2", **again) as audit:
        train(net, opt, range(2))
        assert steps_of(audit) == 4
    shutil.copytree(tmp_path / "t", tmp_path / "u")
    with pytest.raises(UsageError, match="step 5 would be missing"):
        hu.Audit(opt, "bf16", rehearse="e5m2", **again, first_step=9).start()
    for other in (["bf16"], None, hu.Rehearse("e5m2", pull=3.0), hu.Rehearse("e5m2", bounds=["point"])):
        with pytest.raises(UsageError, match="it was recorded with rehearse="):
            hu.Audit(opt, "bf16", rehearse=other, **again).start()


def test_every_third_step_is_recorded_and_every_step_is_rehearsed(tmp_path: Path) -> None:
    made = {}
    for every in (1, 3):
        net, opt = begun()
        with hu.Audit(
            opt, "bf16", model=net, out=tmp_path / str(every), every=every, rehearse="e5m2"
        ) as audit:
            train(net, opt, range(8))
            audit.commit()
            audit.evaluate(lambda net=net: loss_of(net, 5))
            made[every] = held(audit)
    assert all(torch.equal(made[1][k], made[3][k]) for k in made[1])
    one, three = (hu.Trace.open(tmp_path / str(every)) for every in (1, 3))
    assert three.steps.tolist() == [1, 4, 7]
    for bound in ("point", "upper"):
        a, b = (t.forecast("e5m2").frozen(bound=bound) for t in (one, three))
        assert a[::3].tolist() == b.tolist()
    assert one.forecast("e5m2").losses.to_polars().equals(three.forecast("e5m2").losses.to_polars())
    assert one.forecast("e5m2").losses.to_polars()["step"].to_list() == [8, 8, 8]


def test_two_optimizers_and_a_tensor_unfrozen_later(tmp_path: Path) -> None:
    """Each moves its own tensors; a rate is that of the tensor's group; what comes later starts then."""
    net = Net()
    net.outer.weight.requires_grad_(False)
    first = torch.optim.SGD(net.inner.parameters(), lr=0.01)
    second = torch.optim.SGD(net.outer.parameters(), lr=0.2)
    with hu.Audit([first, second], "e5m2", model=net, rehearse=hu.Rehearse("e5m2", pull=2.0)) as audit:
        for step in range(6):
            if step == 3:
                net.outer.weight.requires_grad_(True)
                start = net.outer.weight.detach().clone()
                assert audit.rehearsing is not None
                assert [w.name for w in audit.rehearsing.tensors] == ["inner.weight"]
            loss_of(net, step).backward()
            for opt in (first, second):
                opt.step()
                opt.zero_grad()
        assert audit.rehearsing is not None
        largest = {w.name: r.largest for w, r in audit.rehearsing.tensors.items()}
    assert largest == {"inner.weight": 0.01, "outer.weight": 0.2}
    assert not torch.equal(start, net.outer.weight)


def test_proposals_that_are_not_finite_move_nothing() -> None:
    w = torch.nn.Parameter(torch.linspace(-1, 1, 64).reshape(8, 8))
    opt = torch.optim.SGD([("w", w)], lr=1.0)
    memory = hu.Memory()
    with hu.Audit(
        opt, "e5m2", out=memory, rehearse=["e5m2", "bf16:kahan", "bf16:eco" if False else "bf16:sr"]
    ) as a:
        for bad in (0.0, float("nan"), 0.0):
            w.grad = torch.full((8, 8), 0.05)
            w.grad[0] = bad
            before = None if bad == 0.0 and not memory.parts else held(a)
            opt.step()
    table = memory.trace.scan("rehearsals").to_polars()
    assert table.filter(pl.col("step") == 1)["nonfinite"].to_list() == [0] * 6
    assert table.filter(pl.col("step") > 1)["nonfinite"].to_list() == [8] * 12
    assert before is None or before


def test_a_step_that_the_scaler_skips_is_not_rehearsed() -> None:
    net, opt = begun()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with hu.Audit(opt, "e5m2", model=net, rehearse="e5m2") as audit:
        for step in range(4):
            opt.zero_grad()
            scaler.scale(loss_of(net, step)).backward()
            if step == 2:
                net.inner.weight.grad[0, 0] = float("inf")
            scaler.step(opt)
            scaler.update()
        assert steps_of(audit) == 3


def test_a_rule_of_your_own(tmp_path: Path) -> None:
    """It is asked for every tensor and step; without a pull, the point is the upper bound."""
    asked: list[Any] = []

    def rule(name: str, step: int, rate: float, largest: float) -> float:
        asked.append((name, step, rate, largest))
        return 0.0

    net, opt = begun()
    with hu.Audit(
        opt, "e5m2", model=net, out=tmp_path / "t", rehearse=hu.Rehearse("e5m2", pull=rule)
    ) as audit:
        train(net, opt, range(1))
        opt.param_groups[0]["lr"] = 1e-4
        train(net, opt, range(1, 2))
        state = held(audit)
    assert ("inner.weight", 2, 1e-4, 2e-3) in asked
    assert len(asked) == 4
    assert all(torch.equal(v[0], v[1]) for k, v in state.items() if v.dim() > 1)
    assert "rule" in hu.Trace.open(tmp_path / "t").manifest["options"]["rehearse"]["pull"]


def test_a_buffer_that_is_expanded(tmp_path: Path) -> None:
    """It is put back in its memory, also where something wrote through what it is a view of."""
    net, opt = begun()
    base = torch.ones(3, 1)
    net.register_buffer("wide", base.expand(3, 8))
    with hu.Audit(opt, "bf16", model=net, rehearse="e5m2") as audit:
        train(net, opt, range(2))
        with audit.as_if("e5m2"):
            base.fill_(2.0)
        assert torch.equal(base, torch.ones(3, 1))
        with audit.as_if("e5m2"):
            net.wide.data = torch.zeros(3, 8)
        assert net.wide.data_ptr() == base.data_ptr()
        audit.evaluate(lambda: loss_of(net, 5))
        audit.save_as_if("e5m2", tmp_path / "m.safetensors")
    assert torch.equal(base.expand(3, 8), net.wide)


def test_a_part_of_evaluations_alone_has_no_steps(tmp_path: Path) -> None:
    net, opt = begun()
    with hu.Audit(opt, "bf16", model=net, out=tmp_path / "run", rehearse="e5m2") as audit:
        train(net, opt, range(2))
        audit.commit()
        audit.evaluate(lambda: loss_of(net, 5))
        audit.commit()
        train(net, opt, range(2, 4))
    trace = hu.Trace.open(tmp_path / "run")
    assert len(trace.parts) == 3
    assert trace.steps.tolist() == [1, 2, 3, 4]
    assert trace.forecast("e5m2").losses["step"].tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    ("rehearse", "names"),
    [
        (("own", "e4m3", "sr"), ["own"]),
        (("e4m3", "sr"), ["e4m3:sr"]),
        ((hu.grid("e4m3"), Kahan()), ["e4m3:kahan(dtype=float32)"]),
        (("e5m2", "e4m3:sr"), ["e5m2", "e4m3:sr"]),
        (("e5m2", "e4m3", "bf16"), ["e5m2", "e4m3", "bf16"]),
        ((("own", "e4m3", "sr"), "e5m2"), ["own", "e5m2"]),
        ("e5m2", ["e5m2"]),
    ],
)
def test_one_spec_or_several(rehearse: Any, names: list[str]) -> None:
    """A tuple that ends with a policy is one; others are several."""
    net, opt = begun()
    assert hu.Audit(opt, "bf16", model=net, rehearse=rehearse).rehearsals == names
    assert hu.Rehearse(rehearse).names == names


@pytest.mark.parametrize(
    ("rehearse", "options", "said"),
    [
        (["e5m2:dqt"], {}, "cannot be replayed"),
        (["e5m2:none-such"], {}, "unknown policy"),
        (["e9m9"], {}, "e9m9"),
        (["e5m2", "e5m2:rne"], {}, "specs that differ"),
        ([], {}, "at least one"),
        (["e5m2"], {"sample": 0.5}, "leave sample= out"),
    ],
)
def test_what_is_refused_at_once(rehearse: Any, options: dict[str, Any], said: str) -> None:
    net, opt = begun()
    with pytest.raises(UsageError, match=said):
        hu.Audit(opt, "bf16", model=net, rehearse=rehearse, **options)


@pytest.mark.parametrize(
    ("bounds", "pull"),
    [
        (["lower"], 30.0), ([], 30.0), (["point", "point"], 30.0), (5, 30.0), (["point"], -1.0),
        (["point"], True), (["point"], "30"),
    ],
)  # fmt: skip
def test_what_a_rehearse_refuses(bounds: Any, pull: Any) -> None:
    with pytest.raises(UsageError, match="takes"):
        hu.Rehearse("e5m2", bounds=bounds, pull=pull)


def test_what_is_refused_at_the_first_step() -> None:
    net, opt = begun(torch.bfloat16)
    with (
        hu.Audit(opt, "bf16", model=net, rehearse="fp16"),
        pytest.raises(UsageError, match="cannot be rehearsed"),
    ):
        train(net, opt, range(1))
    net, opt = begun(kind=torch.optim.SGD)
    with (
        hu.Audit(opt, "bf16", model=net, rehearse="bf16:eco"),
        pytest.raises(UsageError, match="eco needs SGD with momentum"),
    ):
        train(net, opt, range(1))
    net, opt = begun()
    wrapped = hu.WriteBack(opt, "bf16", "sr", model=net)
    with (
        hu.Audit(wrapped, "bf16", model=net, rehearse="e5m2"),
        pytest.raises(UsageError, match="written back"),
    ):
        train(net, wrapped, range(1))


def test_questions_without_an_answer(tmp_path: Path) -> None:
    net, opt = begun()
    with hu.Audit(
        opt, "bf16", model=net, out=tmp_path / "t", rehearse=hu.Rehearse("e5m2", bounds=["point"])
    ) as audit:
        train(net, opt, range(2))
        for bound, said in (("upper", "not kept"), ("middle", "a bound is one of")):
            with pytest.raises(UsageError, match=said), audit.as_if("e5m2", bound):
                pass
        with pytest.raises(UsageError, match="not rehearsed"), audit.as_if("bf16"):
            pass
        assert set(audit.evaluate(lambda: 1.0).losses["e5m2"]) == {"lower", "point"}
    trace = hu.Trace.open(tmp_path / "t")
    with pytest.raises(UsageError, match="was not rehearsed"):
        trace.forecast("bf16")
    f = trace.forecast("e5m2")
    with pytest.raises(UsageError, match="was not kept"):
        f.frozen(bound="upper")
    with pytest.raises(UsageError, match="was rehearsed"):
        f.frozen("inner.bias")
    with pytest.raises(UsageError, match="was not recorded"):
        f.frozen(bound="lower")
    with hu.Audit(opt, "bf16", model=net) as audit:
        assert audit.evaluate(lambda: 1.0).losses == {}
        with pytest.raises(UsageError, match="rehearses nothing"), audit.as_if("bf16"):
            pass


def test_a_buffer_that_is_replaced_inside(tmp_path: Path) -> None:
    """A module that counts its calls by ``self.calls = self.calls + 1``: the model is as it was."""

    class Counting(torch.nn.Linear):
        calls: torch.Tensor

        def __init__(self) -> None:
            super().__init__(4, 4)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls = self.calls + 1
            return super().forward(x)

    model = Counting()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hu.Audit(optimizer, ["bf16"], model=model, out=tmp_path / "trace", rehearse=["bf16"]) as audit:
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        before = model.calls
        with audit.as_if("bf16"):
            model(torch.ones(1, 4))
        assert model.calls is before
        assert float(model.calls) == 1
