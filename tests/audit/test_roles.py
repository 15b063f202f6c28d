"""EMA copies, moments, gradients that accumulate: counted as bits are compared, and nothing is touched."""

from __future__ import annotations

import copy
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import halfulp as hu
from halfulp.report.page import page


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
