"""Moments, copies and counters beside the weights: who is told of them, and which have stopped."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from audit_reference import batches
from rich.console import Console

import halfulp as hu
from halfulp.integrations.scalars import Scalars
from halfulp.report.live import line, picture
from halfulp.report.page import page
from halfulp.trace import Memory


class Counting(torch.optim.Optimizer):
    """Momentum, with a counter of steps in a dtype of its own, as optimizers make it with the weight's."""

    def __init__(self, params: Any, dtype: torch.dtype, start: int = 0, anew: bool = False) -> None:
        super().__init__(params, {"lr": 1e-3})
        self.dtype, self.start, self.anew = dtype, start, anew

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no closure here
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[p]
            if not state:
                state["step"] = torch.tensor(float(self.start), dtype=self.dtype)
                state["exp_avg"] = torch.zeros_like(p)
            if self.anew:
                state["step"] = state["step"] + 1
            else:
                state["step"] += 1
            state["exp_avg"].lerp_(p.grad, 0.1)
            p.sub_(state["exp_avg"], alpha=1e-3)


def trained(optimizer: Any, model: torch.nn.Module, steps: int, after: Any = None) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        x = torch.randn(4, 8, generator=batches(step)).to(next(model.parameters()).dtype)
        model(x).square().sum().backward()
        optimizer.step()
        if after is not None:
            after()


def linear(dtype: torch.dtype = torch.bfloat16) -> torch.nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return torch.nn.Linear(8, 8).to(dtype)


@pytest.mark.parametrize("anew", [False, True], ids=["in place", "a new tensor"])
@pytest.mark.parametrize(("dtype", "most"), [(torch.bfloat16, 256), (torch.float16, 2048)], ids=str)
def test_a_counter_that_has_stopped_is_named(
    dtype: torch.dtype, most: int, anew: bool, tmp_path: Path
) -> None:
    """256 and one more are 256 in bfloat16: from then on nothing that counts steps goes on."""
    model = linear()
    optimizer = Counting(model.parameters(), dtype, start=most - 5, anew=anew)
    with hu.Audit(optimizer, "bf16", model=model, out=tmp_path / "run", states=True):
        trained(optimizer, model, 8)
    assert all(float(s["step"]) == most for s in optimizer.state.values())
    trace = hu.Trace.open(tmp_path / "run")
    role = trace.roles["step"]
    assert role.frozen(role.grids[0]).tolist() == [0.0] * 4 + [1.0] * 3  # from when it is there
    name = str(dtype).removeprefix("torch.")
    said = f"step: STOPPED at {most:,} in 2 of 2 tensors, from step 6 on: {name} has no {most + 1:,}."
    assert said in hu.verdict(trace).text(verbose=True)
    assert said in page([trace.path])
    text = hu.verdict(trace).text(verbose=True)
    assert f"step {name}" in text or "step, exp_avg bfloat16" in text


def test_a_counter_that_will_stop_is_named() -> None:
    model, memory = linear(), Memory()
    optimizer = Counting(model.parameters(), torch.bfloat16)
    with hu.Audit(optimizer, "bf16", model=model, out=memory, states=True):
        trained(optimizer, model, 4)
    assert "step: counts steps in bfloat16, which ends at 256. Keep it in float32" in str(
        hu.verdict(memory.trace)
    )


def test_a_counter_that_has_room_is_not_spoken_of() -> None:
    """Float32, as torch's own optimizers have it."""
    model, memory = linear(), Memory()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with hu.Audit(optimizer, "bf16", model=model, out=memory, states=True):
        trained(optimizer, model, 4)
    assert sorted(memory.trace.roles) == ["exp_avg", "exp_avg_sq"]
    assert "step:" not in hu.verdict(memory.trace).text(verbose=True)


@pytest.mark.parametrize("recorded", [False, True], ids=["alone", "with a trace"])
def test_listeners_know_of_moments_and_copies(recorded: bool) -> None:
    """Under the names of the trace, with its numbers; copies one step later, when what they did is known."""
    model, memory = linear(), Memory()
    ema = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    seen: list[dict[str, Any]] = []

    def average() -> None:
        with torch.no_grad():
            for a, b in zip(ema.parameters(), model.parameters(), strict=True):
                a.lerp_(b, 0.1)

    told = Scalars()
    tags: list[dict[str, float]] = []
    with hu.Audit(
        optimizer, "bf16", model=model, states=True, also={"ema": ema}, out=memory if recorded else None,
        listeners=[seen.append, lambda s: tags.append(told.of(s))],
    ) as audit:  # fmt: skip
        trained(optimizer, model, 6, average)
    assert sorted(audit.latest["roles"]) == ["ema", "exp_avg", "exp_avg_sq"]
    assert audit.latest["roles"]["ema"]["step"] == 6
    for role in ("exp_avg", "exp_avg_sq"):
        assert [s["roles"][role]["step"] for s in seen[1:]] == [2, 3, 4, 5, 6]
        assert all(s["roles"][role]["measured"] == ["bf16"] for s in seen[1:])
    assert [s["roles"]["ema"]["step"] for s in seen[1:]] == [1, 2, 3, 4, 5]
    for s, t in zip(seen[1:], tags[1:], strict=True):
        for role, beside in s["roles"].items():
            assert t[f"halfulp/roles/{role}/frozen/bf16"] == beside["frozen"]["bf16"]
            assert f"; {role} " in line(s)
            screen = Console(record=True, quiet=True)
            screen.print(picture(s))
    if recorded:
        for role, trace in memory.trace.roles.items():
            heard = [s["roles"][role] for s in (*seen[1:], audit.latest)]
            known = {h["step"]: h["frozen"]["bf16"] for h in heard}
            assert [known[s] for s in trace.steps.tolist()] == trace.frozen("bf16").tolist()


def test_an_alert_for_a_moment() -> None:
    """Only where it is stored so: a float32 moment would lose as much in bfloat16, and does not."""
    for dtype, count in ((torch.bfloat16, 2), (torch.float32, 0)):
        model, alert = linear(dtype), hu.audit.Alert(above=0.8, steps=3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-1, betas=(0.0, 0.9999))
        with hu.Audit(optimizer, "m20" if dtype == torch.float32 else "bf16", model=model, states=True,
                      listeners=[alert]) as audit:  # fmt: skip
            trained(optimizer, model, 1)
            for state in optimizer.state.values():
                state["exp_avg_sq"].fill_(1000.0)  # so large that a step changes it little, but for one value
                state["exp_avg_sq"].view(-1)[0] = 0.0
            trained(optimizer, model, 6)
        lost = audit.latest["roles"]["exp_avg_sq"]["frozen"]["bf16"]
        assert lost > 0.8
        assert sum("exp_avg_sq of " in text for text in alert.messages) == count


def test_a_step_that_accumulates_tells_of_its_gradients() -> None:
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with hu.Audit(optimizer, "bf16", model=model, states=True) as audit:
        for step in range(2):
            optimizer.zero_grad()
            for part in range(3):
                model(
                    torch.randn(4, 8, generator=batches(3 * step + part)).bfloat16()
                ).square().sum().backward()
            optimizer.step()
    assert 0 <= audit.latest["roles"]["grad"]["frozen"]["bf16"] < 1
