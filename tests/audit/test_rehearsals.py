"""Rehearsals: bit for bit a plain replay of the kept proposals, and the run knows nothing of them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from kept_weights import KeptWeights, Steps
from rehearsal_runs import Net, begun, held, loss_of, pull, steps_of, train

import halfulp as hu
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
    for state, first in ((small, 0), (alone, 1)):
        part = beside.part(first, state.held.shape[1])
        for name, into in part.tensors().items():
            into.copy_(state.tensors()[name])
    plain = [{name: t[i].numpy().copy() for name, t in alone.tensors().items()} for i in range(len(pulls))]
    for step in range(4):
        w, after = hard(step)
        stream = hu.Stream(seed=1, name="w", step=step, offset=(0, 5, 32, 31)[step])  # lanes want 32
        asked = kernel.TensorStep(pulls=pulls, stream=stream)
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
            together = kernel.BatchStep([None, asked, asked], table, torch.float32)
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
    for state in (short, long):
        kernel.move(rule, state, w, after, kernel.TensorStep(pulls=[0.0], stream=hu.Stream(seed=0, name="w")))
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
