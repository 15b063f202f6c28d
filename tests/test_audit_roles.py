"""EMA copies and moments: counted as a comparison of bits counts them, and nothing is touched."""

from __future__ import annotations

import copy
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import halfulp as hu


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
        assert trace.frozen("bf16").tolist() == pytest.approx(shares(stages, role), abs=1e-15)
        assert trace.manifest["run"] == {"role": role}
        moved = {n for n in stages[0] if n.startswith(f"{role} ")}
        if dtype == torch.bfloat16 and moved:  # never moved, by the bits of all stages
            still = torch.cat(
                [
                    torch.stack([s[n] == stages[0][n] for s in stages]).all(0).reshape(-1)
                    for n in sorted(moved)
                ]
            )
            assert trace.never_moved("bf16")[-1] == pytest.approx(float(still.double().mean()))
    assert memory.trace.frozen("bf16").tolist() == pytest.approx(shares(stages, "weight"), abs=1e-15)
    kind = "lost" if dtype == torch.bfloat16 else "would be lost"
    assert kind in next(line for line in hu.verdict(memory.trace).lines if line.startswith("ema"))


def test_a_copy_that_is_updated_now_and_then_is_recorded_then() -> None:
    stages, memory = train(torch.float32, every=2, states=True)
    assert memory.trace.roles["ema"].steps.tolist() == [2, 4, 6]
    assert memory.trace.roles["ema"].frozen("bf16").tolist() == pytest.approx(shares(stages, "ema"))


def test_a_copy_that_never_changes_is_said() -> None:
    _, memory = train(torch.bfloat16, decay=0.999999, states=False, never_moved=True)
    assert memory.trace.roles == {}
    assert any(
        line.startswith("ema: not one of its values changed in 6 steps")
        for line in hu.verdict(memory.trace).lines
    )


def test_moments_of_several_optimizers() -> None:
    stages, memory = train(torch.bfloat16, kinds=(torch.optim.AdamW, torch.optim.Adam), states=True)
    trace = memory.trace.roles["exp_avg_sq"]
    assert {t["name"] for t in trace.tensors} == {"0.weight", "0.bias", "2.weight"}
    assert trace.frozen("bf16").tolist() == pytest.approx(shares(stages, "exp_avg_sq"))


def test_in_a_folder_and_every_other_step(tmp_path: Path) -> None:
    model = model_of(torch.bfloat16)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
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


def test_what_cannot_be_followed_is_refused() -> None:
    model = model_of(torch.float32)
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    for also, said in (
        ({"../x": model}, "short words"),
        ({"ema": {"ids": torch.arange(3)}}, "no tensor"),
        ({"ema": []}, "no tensor"),
    ):
        with pytest.raises(hu.UsageError, match=said):
            hu.Audit(opt, ["bf16"], also=also)
