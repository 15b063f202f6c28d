"""EMA copies, moments, gradients that accumulate: counted as bits are compared, and nothing is touched."""

from __future__ import annotations

import copy
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from audit_reference import assert_same_tables
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import halfulp as hu
from halfulp import documents
from halfulp.errors import TamperingError
from halfulp.report.page import page
from halfulp.trace.schema import read_manifest


def model_of(dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(0)
    layers = (torch.nn.Linear(24, 24), torch.nn.GELU(), torch.nn.Linear(24, 24, bias=False))
    return torch.nn.Sequential(*layers).to(dtype)


def train(
    dtype: torch.dtype,
    *,
    every: int = 1,
    decay: float = 0.99,
    kinds: tuple[Any, ...] = (torch.optim.AdamW,),
    **audit: Any,
) -> tuple[list[dict[str, torch.Tensor]], hu.Memory]:
    """All values of weights, EMA and moments before every step and at the end; updated every n-th step."""
    model = model_of(dtype)
    ema = copy.deepcopy(model).requires_grad_(False)
    params = list(model.parameters())
    parts = [params] if len(kinds) == 1 else [params[:1], params[1:]]
    opts = [kind(part, lr=1e-3) for kind, part in zip(kinds, parts, strict=True)]
    stages: list[dict[str, torch.Tensor]] = []

    def look() -> None:
        found = {f"ema {n}": p.clone() for n, p in ema.named_parameters()}
        for name, p in model.named_parameters():
            found[f"weight {name}"] = p.detach().clone()
            for opt in opts:
                moments = {k: v for k, v in opt.state.get(p, {}).items() if v.shape == p.shape}
                found |= {f"{k} {name}": v.clone() for k, v in moments.items()}
        stages.append(found)

    memory = hu.Memory()
    recorder = (
        hu.Audit(opts, ["bf16"], model=model, out=memory, also={"ema": ema}, **audit) if audit else None
    )
    if recorder is not None:
        recorder.start()
    for i in range(6):
        look()
        torch.manual_seed(i)
        x = torch.randn(8, 24, dtype=dtype)
        model.zero_grad()
        (model(x) - x).square().mean().backward()
        for opt in opts:
            opt.step()
        if i % every == every - 1:
            for a, b in zip(ema.parameters(), model.parameters(), strict=True):
                a.lerp_(b.detach(), 1 - decay)
    look()
    if recorder is not None:
        recorder.stop()
    return stages, memory


def shares(stages: list[dict[str, torch.Tensor]], role: str, grid: str = "bf16") -> list[float]:
    """The share of a role's values that stay on a grid, step by step, where it was there and changed."""
    found, g = [], hu.grid(grid)
    for before, after in pairwise(stages):
        names = [n for n in before if n.startswith(f"{role} ")]
        if not names or all(torch.equal(before[n], after[n]) for n in names):
            continue
        frozen = [hu.frozen(g.round(before[n]), after[n] - before[n], g) for n in names]
        found.append(float(torch.cat([f.reshape(-1) for f in frozen]).double().mean()))
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_counts_are_those_of_a_comparison(dtype: torch.dtype) -> None:
    stages, memory = train(dtype, states=True)
    plain, _ = train(dtype)
    for a, b in zip(stages, plain, strict=True):
        assert all(torch.equal(a[n], b[n]) for n in a)
    roles = memory.trace.roles
    assert sorted(roles) == ["ema", "exp_avg", "exp_avg_sq"]
    for role, trace in roles.items():
        assert trace.frozen("bf16", of="weights").tolist() == pytest.approx(shares(stages, role), abs=1e-15)
        assert trace.manifest["run"] == {"role": role}
        with pytest.raises(hu.HalfulpError, match="has no 'phase'"):
            trace.frozen("bf16", by="phase")
        moved = {n for n in stages[0] if n.startswith(f"{role} ")}
        if dtype == torch.bfloat16 and moved:  # never moved, by the bits of all stages
            still = torch.cat(
                [
                    torch.stack([s[n] == stages[0][n] for s in stages]).all(0).reshape(-1)
                    for n in sorted(moved)
                ]
            )
            assert trace.never_moved("bf16")[-1] == pytest.approx(float(still.double().mean()))
    assert memory.trace.frozen("bf16", of="weights").tolist() == pytest.approx(
        shares(stages, "weight"), abs=1e-15
    )
    kind = "lost" if dtype == torch.bfloat16 else "would be lost"
    assert kind in next(line for line in hu.verdict(memory.trace).details if line.startswith("ema"))


def test_a_copy_that_is_updated_now_and_then_is_recorded_then() -> None:
    stages, memory = train(torch.float32, every=2, states=True)
    assert memory.trace.roles["ema"].steps.tolist() == [2, 4, 6]
    assert memory.trace.roles["ema"].frozen("bf16").tolist() == pytest.approx(shares(stages, "ema"))


def test_a_copy_that_never_changes_is_said() -> None:
    _, memory = train(torch.bfloat16, decay=0.999999, states=False, never_moved=True)
    assert memory.trace.roles == {}
    assert any(
        line.startswith("ema: not one of its values changed in 6 steps")
        for line in hu.verdict(memory.trace).details
    )


def test_moments_of_several_optimizers() -> None:
    stages, memory = train(torch.bfloat16, kinds=(torch.optim.AdamW, torch.optim.Adam), states=True)
    trace = memory.trace.roles["exp_avg_sq"]
    assert {t["name"] for t in trace.tensors} == {"0.weight", "0.bias", "2.weight"}
    assert trace.frozen("bf16", of="weights").tolist() == pytest.approx(shares(stages, "exp_avg_sq"))


class Keeper:
    """An average as a list of tensors in an object, as diffusers' EMAModel is."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.shadow_params = [p.detach().clone() for p in model.parameters()]

    def update(self, model: torch.nn.Module) -> None:
        for average, p in zip(self.shadow_params, model.parameters(), strict=True):
            average.lerp_(p.detach(), 0.1)


class Task(torch.nn.Module):
    """A model and its average in one module, as in timm's and many of Lightning's."""

    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
        self.average = copy.deepcopy(self.model)


def test_copies_are_found_where_scripts_keep_them() -> None:
    """In a module around the model, in a list; not gradients, not a network that is trained."""
    torch.manual_seed(0)
    task = Task()
    trained = copy.deepcopy(task.model)
    keeper = Keeper(task.model)
    other = torch.optim.SGD(trained.parameters(), lr=0.1)
    optimizer, memory = torch.optim.SGD(task.model.parameters(), lr=0.1), hu.Memory()
    with hu.Audit(None, ["bf16"], out=memory, states="find"):
        for _ in range(4):
            x = torch.randn(4, 8)
            task.zero_grad()
            trained.zero_grad()
            (task.model(x) + trained(x)).square().mean().backward()
            grads = [p.grad for p in task.model.parameters()]
            optimizer.step()
            other.step()
            keeper.update(task.model)
            with torch.no_grad():
                for a, p in zip(task.average.parameters(), task.model.parameters(), strict=True):
                    a.lerp_(p, 0.5)
    assert len(grads) == 4
    assert sorted(memory.trace.roles) == ["average", "shadow_params"]
    assert all(len(memory.trace.roles[n].steps) == 4 for n in memory.trace.roles)
    names = [t["name"] for t in memory.trace.roles["shadow_params"].tensors]
    assert names == ["model.0.weight", "model.0.bias", "model.1.weight"]  # of what has more than one element


def test_what_is_trained_later_and_what_masters_are_cast_to_are_no_copies() -> None:
    torch.manual_seed(0)
    first = torch.nn.Linear(8, 8)
    second = copy.deepcopy(first)
    memory, low = hu.Memory(), torch.nn.Linear(8, 8).bfloat16()
    one, two = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (first, second))
    masters = [p.detach().float() for p in low.parameters()]
    three = torch.optim.SGD(masters, lr=0.1)
    with hu.Audit(None, ["bf16"], out=memory, states="find"):
        for _ in range(3):
            for model, optimizer in ((first, one), (second, two)):
                optimizer.zero_grad()
                model(torch.randn(4, 8)).square().mean().backward()
                optimizer.step()
            for m in masters:
                m.grad = torch.randn_like(m)
            three.step()
            for m, p in zip(masters, low.parameters(), strict=True):
                p.detach().copy_(m)
    assert not memory.trace.roles


class Stacking(torch.optim.Optimizer):
    """Momentum of all weights in one tensor and a factored second moment, as Muon's are kept in nanochat; or
    new tensors at each step, a level deeper, as heavyball's."""

    def __init__(self, params: Any, new: bool) -> None:
        super().__init__(params, {"lr": 1e-3})
        self.new = new

    def held(self) -> dict[str, torch.Tensor]:
        state = self.state[self.param_groups[0]["params"][0]]
        return state.setdefault(0, {}) if self.new else state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = self.param_groups[0]["params"]
        grads = torch.stack([p.grad for p in params])
        state = self.held()
        if not state:
            state["momentum_buffer"] = torch.zeros_like(grads)
            state["second"] = torch.zeros_like(grads[:, :, :1])
            state["scales"] = torch.zeros(7)  # of no weight's shape
        for kind, x, rate in (
            ("momentum_buffer", grads, 0.05),
            ("second", grads.square().mean(-1, keepdim=True), 0.001),
        ):
            if self.new:
                state[kind] = state[kind].lerp(x, rate)
            else:
                state[kind].lerp_(x, rate)
        for p, m in zip(params, state["momentum_buffer"], strict=True):
            p.sub_(m, alpha=1e-2)


@pytest.mark.parametrize("new", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_moments_that_are_stacked_or_factored(dtype: torch.dtype, new: bool) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16, bias=False, dtype=dtype) for _ in range(3)))
    optimizer, memory, seen = Stacking(model.parameters(), new), hu.Memory(), []
    ema = {"average": model[0].weight.detach().clone()}
    with hu.Audit(optimizer, ["bf16"], model=model, out=memory, states=True, also={"ema": ema}):
        for _ in range(5):
            model.zero_grad()
            x = torch.randn(8, 16, dtype=dtype)
            (model(x) - x).square().mean().backward()
            optimizer.step()
            ema["average"] = ema["average"].lerp(model[0].weight.detach(), 0.5)
            seen.append({k: v.clone() for k, v in optimizer.held().items()})
    assert sorted(memory.trace.roles) == ["ema", "momentum_buffer", "second"]
    assert len(memory.trace.roles["ema"].steps) == 5
    assert "momentum_buffer, second" in hu.verdict(memory.trace).details[1]
    for role in ("momentum_buffer", "second"):
        trace = memory.trace.roles[role]
        (tensor,) = trace.tensors
        assert tensor["name"] == "0.weight and 2 more"
        assert tensor["shape"] == list(seen[0][role].shape)
        for found, (before, after) in zip(trace.frozen("bf16"), pairwise(s[role] for s in seen), strict=True):
            q = before.bfloat16().to(dtype)
            assert found == ((q + (after - before)).bfloat16() == q).double().mean().item()


def test_scales_beside_codes_are_no_moments() -> None:
    model = torch.nn.Linear(16, 256, bias=False)
    optimizer, memory = torch.optim.SGD(model.parameters(), lr=0.1), hu.Memory()
    state = optimizer.state[model.weight]
    state["state1"], state["absmax1"] = torch.zeros(256, 16, dtype=torch.uint8), torch.zeros(16)
    with hu.Audit(optimizer, ["bf16"], model=model, out=memory, states=True):
        for i in range(3):
            model.zero_grad()
            model(torch.randn(2, 16)).sum().backward()
            optimizer.step()
            state["absmax1"] += i + 1
    assert not memory.trace.roles
    assert "Not followed: state1 in uint8." in hu.verdict(memory.trace).text(verbose=True)


def test_in_a_folder_and_every_other_step(tmp_path: Path) -> None:
    model = model_of(torch.bfloat16)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    frozen = copy.deepcopy(model)
    with hu.Audit(opt, ["bf16"], model=model, out=tmp_path / "run", every=2, states="find"):
        for _ in range(5):
            opt.zero_grad()
            model(torch.randn(4, 24).bfloat16()).square().mean().backward()
            opt.step()
            ema.update_parameters(model)
    trace = hu.Trace.open(tmp_path / "run")
    assert sorted(trace.roles) == ["ema", "exp_avg", "exp_avg_sq"]  # the copy by the name of its variable
    assert trace.roles["exp_avg"].steps.tolist() == [3, 5]
    assert trace.roles["ema"].tensors[0]["name"] == "module.0.weight"
    shown = page([tmp_path / "run"])
    assert all(text in shown for text in (">Beside</dt>", "exp_avg_sq", "average"))
    assert "frozen: not one of its values changed" in shown
    assert not torch.equal(frozen[0].weight, model[0].weight)


def test_what_cannot_be_followed_is_refused() -> None:
    model = model_of(torch.float32)
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    for also, said in (
        ({"../x": model}, "short words"),
        ({"ema": {"ids": torch.arange(3)}}, "no tensor"),
        ({"ema": []}, "no tensor"),
        ({"grad": model_of(torch.float32)}, "cannot name a copy 'grad'"),
    ):
        with pytest.raises(hu.UsageError, match=said):
            hu.Audit(opt, ["bf16"], also=also)


ODD = ("../../../esc", "{here}/abs", "a/b", "x" * 300, "x" * 100_000, "nul\0", "..", "", "grad", "\ud800", 3)


class Odd(torch.optim.SGD):
    """An optimizer that keeps states under names that are no folder's."""

    kinds: tuple[Any, ...] = ODD

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for p in self.param_groups[0]["params"]:
            for kind in self.kinds:
                self.state[p].setdefault(kind, torch.ones_like(p)).mul_(1.5)


def test_states_by_any_name_stay_inside_the_trace(tmp_path: Path) -> None:
    """Each has a folder of its own, and gradients keep theirs."""
    model = model_of(torch.float32)
    opt = Odd(model.parameters(), lr=1e-3)
    opt.kinds = tuple(k.format(here=tmp_path) if isinstance(k, str) else k for k in ODD)
    with hu.Audit(opt, ["bf16"], model=model, out=tmp_path / "a" / "b" / "c" / "run", states=True) as audit:
        for _ in range(3):
            opt.zero_grad()
            for _ in range(2):
                model(torch.ones(1, 24)).square().sum().backward()
            opt.step()
    assert audit.trouble is None
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    assert [p.name for p in (tmp_path / "a" / "b" / "c").iterdir()] == ["run"]
    trace = hu.Trace.open(tmp_path / "a" / "b" / "c" / "run")
    assert len(trace.roles) == len(ODD) + 1
    for name, role in trace.roles.items():
        assert role.steps.tolist() == ([1, 2] if name == "grad" else [2, 3])
    assert len(trace.manifest["optimizers"][0]["holds"]["states"]) == len(ODD)
    assert hu.verdict(trace).lines


@pytest.mark.parametrize("micro", [1, 2])
def test_a_role_that_cannot_be_begun_is_left_out(
    micro: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on a disk that is full by then; the audit of the weights goes on, and the training."""
    model = model_of(torch.float32)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ema = copy.deepcopy(model).requires_grad_(False)
    audit = hu.Audit(opt, ["bf16"], model=model, out=tmp_path / "run", states=True, also={"ema": ema})
    with audit:
        (tmp_path / "run" / "roles").write_text("no folder")
        for _ in range(4):
            opt.zero_grad()
            for _ in range(micro):
                model(torch.ones(1, 24)).square().sum().backward()
            opt.step()
            for a, b in zip(ema.parameters(), model.parameters(), strict=True):
                a.lerp_(b.detach(), 0.5)
    assert audit.trouble is None
    said = capsys.readouterr().err.splitlines()
    assert len(said) == (3 if micro == 1 else 4)
    assert all("could not be begun: " in line and "The run went on without it" in line for line in said)
    assert all(track.trouble is not None for track in audit.tracked.tracks.values())
    (tmp_path / "run" / "roles").unlink()
    assert not any(
        "not one of its values changed" in s for s in hu.verdict(hu.Trace.open(tmp_path / "run")).lines
    )
    assert hu.Trace.open(tmp_path / "run").steps.tolist() == [1, 2, 3, 4]


# ---- gradients that accumulate ---------------------------------------------------------------------------


class Words(torch.nn.Module):
    """An embedding of which a micro-batch uses some rows, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = torch.nn.Embedding(60, 24)
        self.head = torch.nn.Linear(24, 24)
        self.unused = torch.nn.Parameter(torch.ones(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.words(ids)).square().mean()


def accumulate(
    dtype: torch.dtype, micro: int = 4, to_none: bool = True, steps: int = 4, **options: Any
) -> tuple[list[dict[str, tuple[torch.Tensor, torch.Tensor]]], hu.Memory, list[torch.Tensor]]:
    """Train on micro-batches: buffers before every accumulation with what is added, and all weights."""
    model = Words().to(dtype)
    opt, memory = torch.optim.AdamW(model.parameters(), lr=1e-3), hu.Memory()
    audit = hu.Audit(opt, ["bf16"], model=model, out=memory, **options) if options else None
    if audit is not None:
        audit.start()
    seen: list[dict[str, tuple[torch.Tensor, torch.Tensor]]] = []
    for step in range(1, steps + 1):
        opt.zero_grad(set_to_none=to_none)
        for i in range(micro):
            old = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
            torch.manual_seed(10 * step + i)
            loss = model(torch.randint(0, 60, (3,))) * 10.0 ** (-i)
            apart = torch.autograd.grad(
                loss, list(model.parameters()), retain_graph=True, allow_unused=True
            )  # nothing is added here, although hooks are called
            loss.backward()
            names = [n for n, _ in model.named_parameters()]
            found = {
                n: (old[n], g)
                for n, g in zip(names, apart, strict=True)
                if g is not None and old[n] is not None and old[n].any()
            }
            if found and step > 1:  # tensors are known from the first step on
                seen.append(found)
        torch.autograd.grad(model(torch.tensor([1, 2])), model.head.weight)  # and never added
        opt.step()
    if audit is not None:
        audit.stop()
    return seen, memory, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("to_none", [True, False])
def test_contributions_that_a_buffer_loses(dtype: torch.dtype, to_none: bool) -> None:
    """Every count is that of adding by hand, zeros of unused rows apart; the run is the one without."""
    seen, memory, ended = accumulate(dtype, to_none=to_none, states=True)
    _, _, plain = accumulate(dtype, to_none=to_none)
    assert all(torch.equal(a, b) for a, b in zip(ended, plain, strict=True))
    trace = memory.trace.roles["grad"]
    assert trace.manifest["run"] == {"role": "grad", "proposals": "known"}
    assert trace.steps.tolist() == list(range(1, len(seen) + 1)) == list(range(1, 10))
    grid, table = hu.grid("bf16"), trace.table().to_polars()
    zeros = {r["step"]: {} for r in table.iter_rows(named=True)}
    names = {t["id"]: t["name"] for t in trace.tensors}
    for r in trace.scan("tensors").to_polars().iter_rows(named=True):
        zeros[r["step"]][names[r["tensor"]]] = r["zero_proposal"]
    for step, found in enumerate(seen, 1):
        rows = {r["tensor"]: r for r in table.filter(step=step).iter_rows(named=True)}
        assert rows.keys() == found.keys() == {"words.weight", "head.weight", "head.bias"}
        for name, (buffer, g) in found.items():
            q = grid.round(buffer)
            assert rows[name]["frozen"] == int((grid.round(q + g) == q).sum())
            assert zeros[step][name] == int((g == 0).sum())
    assert zeros[1]["words.weight"] >= 24 * 57  # three rows a micro-batch
    lost = hu.verdict(memory.trace)
    line = next(line for line in lost.details if line.startswith("grad"))
    assert line.startswith(f"grad (3 tensors, {str(dtype)[6:]}), 9 accumulations: ")
    assert ("would be lost" in line) == (dtype == torch.float32)
    assert 0.1 < float(line.split("accumulations: ")[1].split("%")[0]) / 100 < 0.9


def test_one_batch_a_step_accumulates_nothing() -> None:
    _, memory, _ = accumulate(torch.bfloat16, micro=1, states=True)
    assert sorted(memory.trace.roles) == ["exp_avg", "exp_avg_sq"]


def test_hooks_go_with_the_audit_and_are_not_there_without() -> None:
    model = Words().bfloat16()
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    for states in (False, True):
        with hu.Audit(opt, ["bf16"], model=model, out=hu.Memory(), states=states):
            model(torch.tensor([1])).backward()
            opt.step()
            assert all(bool(p._backward_hooks) == states for p in model.parameters())
        assert not any(p._backward_hooks for p in model.parameters())
    assert copy.deepcopy(model) is not model


Saved = tuple[dict[str, Any], dict[str, Any]]


def in_parts(
    out: Path, first: int, last: int, saved: Saved | None = None, *, stops: bool = True, **options: Any
) -> Saved:
    """Train on two micro-batches a step, from one step to another, and what a checkpoint then holds."""
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 16)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if saved is not None:
        model.load_state_dict(saved[0])
        opt.load_state_dict(saved[1])
    options = {"resume": True, "states": True, "part_seconds": 1e6, **options}
    audit = hu.Audit(opt, ["bf16"], model=model, out=out, **options).start()
    for step in range(first, last + 1):
        opt.zero_grad()
        for i in range(3):
            torch.manual_seed(10 * step + i)
            model(torch.randn(4, 16)).square().mean().backward()
        opt.step()
    if stops:
        audit.stop()
    else:  # killed
        audit._steps.hooks.detach()
        for one in (audit, *audit.tracked.tracks.values()):
            one.pipeline.sink.close()
    return copy.deepcopy((model.state_dict(), opt.state_dict()))


def test_roles_that_are_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From a checkpoint, or by running the same steps again: as without an interruption. The accumulations
    of a process's first step are not seen, for the tensors are not known yet."""
    in_parts(tmp_path / "whole", 1, 10)
    saved = in_parts(tmp_path / "checkpoint", 1, 5)
    in_parts(tmp_path / "checkpoint", 6, 10, saved)
    said = capsys.readouterr().err
    assert said.count("taken for step 6") == said.count("taken for") == 1
    in_parts(tmp_path / "again", 1, 5)
    in_parts(tmp_path / "again", 1, 10)
    whole, checkpoint, again = (
        hu.Trace.open(tmp_path / name).roles for name in ("whole", "checkpoint", "again")
    )
    assert whole["exp_avg"].steps.tolist() == list(range(2, 11))
    assert whole["grad"].steps.tolist() == list(range(1, 19))
    for role in ("exp_avg", "exp_avg_sq"):
        assert_same_tables(checkpoint[role], whole[role])
        assert_same_tables(again[role], whole[role])
    assert_same_tables(again["grad"], whole["grad"])
    assert checkpoint["grad"].steps.tolist() == list(range(1, 17))
    frozen = whole["grad"].frozen("bf16").tolist()
    assert checkpoint["grad"].frozen("bf16").tolist() == frozen[:8] + frozen[10:]


@pytest.mark.parametrize("part_steps", [3, 4])
def test_accumulations_are_written_part_by_part_and_taken_up_in_the_midst_of_a_step(
    part_steps: int, tmp_path: Path
) -> None:
    """A killed run keeps the parts that were whole, and goes on after the last accumulation in them."""
    in_parts(tmp_path / "whole", 1, 10)
    in_parts(tmp_path / "killed", 1, 6, stops=False, part_steps=part_steps)
    held = hu.Trace.open(tmp_path / "killed").roles["grad"].last_step
    assert held == 9 // part_steps * part_steps
    in_parts(tmp_path / "killed", 1, 10, part_steps=part_steps)
    whole = hu.Trace.open(tmp_path / "whole").roles["grad"]
    assert_same_tables(hu.Trace.open(tmp_path / "killed").roles["grad"], whole)


# ---- what the optimizer holds ----------------------------------------------------------------------------


def test_dtypes_that_the_optimizer_holds(tmp_path: Path) -> None:
    model = Words().bfloat16()
    model.head.float()
    opts = [
        torch.optim.AdamW(list(model.words.parameters()), lr=1e-3),
        torch.optim.SGD(model.head.parameters(), lr=1e-3, momentum=0.9),
    ]
    with hu.Audit(opts, ["e5m2"], model=model, out=tmp_path / "run"):
        for _ in range(2):
            model.head(model.words(torch.tensor([1, 2])).float()).square().mean().backward()
            for opt in opts:
                opt.step()
                opt.zero_grad()
    trace = hu.Trace.open(tmp_path / "run")
    adam, sgd = (o["holds"] for o in trace.manifest["optimizers"])
    n, m = 60 * 24, 24 * 24 + 24
    assert adam == {
        "parameters": {"bfloat16": n},
        "gradients": {"bfloat16": n},
        "states": {"exp_avg": {"bfloat16": n}, "exp_avg_sq": {"bfloat16": n}},
    }
    assert sgd == {
        "parameters": {"float32": m},
        "gradients": {"float32": m},
        "states": {"momentum_buffer": {"float32": m}},
    }
    said = (
        "The optimizer holds: parameters bfloat16 (71%), float32 (29%); gradients bfloat16 (71%), float32 "
        "(29%); exp_avg, exp_avg_sq bfloat16; momentum_buffer float32."
    )
    assert said in hu.verdict(trace).details
    assert said in page([tmp_path / "run"])


def test_states_of_eight_bits_are_what_they_are() -> None:
    torchao = pytest.importorskip("torchao.optim", reason="needs torchao")
    model = torch.nn.Linear(256, 256).bfloat16()
    opt, memory = torchao.AdamW8bit(model.parameters(), lr=1e-3), hu.Memory()
    with hu.Audit(opt, ["bf16"], model=model, out=memory):
        model(torch.ones(1, 256).bfloat16()).sum().backward()
        opt.step()
    states = memory.trace.manifest["optimizers"][0]["holds"]["states"]
    assert states["exp_avg"] == {"uint8": 256 * 256, "bfloat16": 256}


# ---- whose roles they are --------------------------------------------------------------------------------


def in_folder(out: Path, steps: int = 4, before: Any = None, **options: Any) -> tuple[hu.Audit, list[Any]]:
    """A run that records its moments; ``before`` is called before every step with its number."""
    model = model_of(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with hu.Audit(optimizer, ["bf16"], model=model, out=out, states=True, part_steps=2, **options) as audit:
        for step in range(1, steps + 1):
            if before is not None:
                before(step)
            optimizer.zero_grad()
            model(torch.full((4, 24), 0.1 * step)).square().mean().backward()
            optimizer.step()
    return audit, [p.detach().clone() for p in model.parameters()]


def edited(role: Path, **changes: Any) -> None:
    """A manifest with other values, or without (None), under a digest that is right."""
    told = {**read_manifest(role / "manifest.json"), **changes}
    sealed = documents.sealed({key: value for key, value in told.items() if value is not None})
    (role / "manifest.json").write_bytes(sealed)


def test_a_role_is_bound_to_its_trace(tmp_path: Path) -> None:
    for name in ("run", "other"):
        in_folder(tmp_path / name)
    trace, place = hu.Trace.open(tmp_path / "run"), tmp_path / "run" / "roles" / "exp_avg"
    assert {role.manifest["owner"] for role in trace.roles.values()} == {trace.manifest["id"]}
    place.rename(tmp_path / "mine")
    for source, said in (
        (tmp_path / "other" / "roles" / "exp_avg", "does not belong here: its trace is"),
        (tmp_path / "run" / "roles" / "exp_avg_sq", "does not belong here: its role is 'exp_avg_sq'"),
    ):
        shutil.copytree(source, place)
        with pytest.raises(TamperingError, match=said):
            _ = trace.roles
        with pytest.raises(TamperingError, match=said):
            hu.verdict(hu.Trace.open(tmp_path / "run"))
        shutil.rmtree(place)
    (tmp_path / "mine").rename(place)
    edited(place, owner=3)
    with pytest.raises(TamperingError, match="does not belong here: its trace is 3"):
        _ = trace.roles


def test_a_role_without_its_manifest_is_damage(tmp_path: Path) -> None:
    in_folder(tmp_path / "run")
    trace = hu.Trace.open(tmp_path / "run")
    (tmp_path / "run" / "roles" / "new" / "parts").mkdir(parents=True)  # one that is just beginning
    assert sorted(trace.roles) == ["exp_avg", "exp_avg_sq"]
    (tmp_path / "run" / "roles" / "exp_avg" / "manifest.json").unlink()
    with pytest.raises(hu.CorruptionError, match=r"exp_avg has parts, but no manifest\.json"):
        _ = trace.roles


def test_a_role_of_before_is_read_and_bound_when_it_is_gone_on_with(tmp_path: Path) -> None:
    """It does not say whose it is."""
    in_folder(tmp_path / "run")
    for role in (tmp_path / "run" / "roles").iterdir():
        edited(role, owner=None)
    trace = hu.Trace.open(tmp_path / "run")
    assert [r.manifest.get("owner") for r in trace.roles.values()] == [None, None]
    in_folder(tmp_path / "run", 6, resume=True)
    assert [r.manifest.get("owner") for r in trace.roles.values()] == [trace.manifest["id"]] * 2
    assert [r.last_step for r in trace.roles.values()] == [6, 6]


def test_another_role_is_not_gone_on_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It stays as it is, and so does the training."""
    for name in ("run", "other"):
        in_folder(tmp_path / name)
    place = tmp_path / "run" / "roles" / "exp_avg"
    shutil.rmtree(place)
    shutil.copytree(tmp_path / "other" / "roles" / "exp_avg", place)
    _, expected = in_folder(tmp_path / "whole", 6)
    capsys.readouterr()
    audit, weights = in_folder(tmp_path / "run", 6, resume=True)
    assert all(torch.equal(a, b) for a, b in zip(weights, expected, strict=True))
    assert audit.trouble is None
    assert "exp_avg does not belong here: its trace is" in capsys.readouterr().err
    assert hu.Trace.open(place).last_step == 4
    assert hu.Trace.open(tmp_path / "run").last_step == 6


@pytest.mark.parametrize("another", [False, True])
@pytest.mark.parametrize("at", [2, 4])
def test_roles_of_a_folder_that_goes(tmp_path: Path, at: int, another: bool) -> None:
    """Before they begin, or later: none is made in the old place, nor in the trace that is there by then."""
    folder = tmp_path / "run"
    _, expected = in_folder(tmp_path / "whole", 6)
    in_folder(tmp_path / "other")

    def goes(step: int) -> None:
        if step == at:
            folder.rename(tmp_path / "moved")
            if another:
                shutil.copytree(tmp_path / "other", folder)
                shutil.rmtree(folder / "roles")

    audit, weights = in_folder(folder, 6, goes)
    assert audit.lost
    assert all(torch.equal(a, b) for a, b in zip(weights, expected, strict=True))
    assert hu.Trace.open(tmp_path / "moved").last_step == (0 if at == 2 else 2)
    assert not (folder / "roles").exists()
    assert folder.exists() == another
