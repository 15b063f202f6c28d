"""The gain of a run in low precision: what was written of what was proposed."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from audit_reference import batches

import halfulp as hu
from halfulp.audit.meter.tensor import Watched
from halfulp.audit.sources import gain

STEPS = 3


def run(optimizer_of: Any, policy: str | None = None) -> tuple[hu.Memory, list[float]]:
    """A bfloat16 model under an audit; the gains of its steps, from the optimizer's states by NumPy or from
    the write-back's own telemetry."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.LayerNorm(64), torch.nn.Linear(64, 8))
    model = model.bfloat16()
    optimizer = optimizer_of(model.parameters())
    if policy is not None:
        optimizer = hu.WriteBack(optimizer, "bf16", policy, model=model)
    memory, gains = hu.Memory(), []
    with hu.Audit(optimizer, ["bf16"], model=model, out=memory):
        for step in range(1, STEPS + 1):
            before = [p.detach().float().numpy().copy() for p in model.parameters()]
            optimizer.zero_grad()
            model(torch.randn(8, 16, generator=batches(step)).bfloat16()).float().square().mean().backward()
            optimizer.step()
            if policy is not None:
                gains.append(optimizer.events.gain)
                continue
            dot = square = 0.0
            for q, p in zip(before, model.parameters(), strict=True):
                state, (group,) = optimizer.state[p], optimizer.param_groups
                m, v = (state[k].double().numpy() for k in ("exp_avg", "exp_avg_sq"))
                b1, b2 = group["betas"]
                d = -group["lr"] * (m / (1 - b1**step)) / (np.sqrt(v / (1 - b2**step)) + group["eps"])
                if isinstance(optimizer, torch.optim.AdamW):
                    d -= group["lr"] * group["weight_decay"] * q
                u = p.detach().double().numpy() - q
                dot, square = dot + float((u * d).sum()), square + float((d * d).sum())
            gains.append(dot / square)
    return memory, gains


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
def test_what_an_optimizer_proposed_is_known_from_its_moments(kind: Any) -> None:
    memory, gains = run(lambda p: kind(p, lr=1e-4, weight_decay=0.1))
    assert memory.trace.manifest["run"]["gain"] == pytest.approx(np.mean(gains), rel=1e-4)  # in float32


def test_a_write_back_knows_its_own() -> None:
    memory, gains = run(lambda p: torch.optim.SGD(p, lr=1e-3), "rne")
    assert memory.trace.manifest["run"]["gain"] == pytest.approx(np.mean(gains), rel=1e-12)


def test_nothing_is_said_of_an_optimizer_that_nobody_knows() -> None:
    def adagrad(parameters: Any) -> Any:
        return torch.optim.Adagrad(parameters, lr=1e-4)

    torch.manual_seed(0)
    model, memory = torch.nn.Linear(8, 8).bfloat16(), hu.Memory()
    optimizer = adagrad(model.parameters())
    with hu.Audit(optimizer, ["bf16"], model=model, out=memory):
        model(torch.ones(1, 8).bfloat16()).sum().backward()
        optimizer.step()
    assert "gain" not in memory.trace.manifest["run"]


@pytest.mark.parametrize(
    ("gain", "said"),
    [
        (0.35, "only 35% of a step arrived: after the fix, a rate of 3.5e-5 to 7.3e-5 moves the weights"),
        (0.6, "only 60% of a step arrived: after the fix, a rate of 6e-5 to 1e-4 moves the weights"),
        (0.1, None),
        (0.95, None),
        (float("nan"), None),
        ("0.5", None),
        (None, None),
    ],
)
def test_a_rate_is_named_where_the_study_reaches(gain: Any, said: str | None) -> None:
    """From the gains of the study, and as a range."""
    memory, _ = run(lambda p: torch.optim.AdamW(p, lr=1e-4))
    memory.trace.manifest["run"]["gain"] = gain
    answer = hu.verdict(memory.trace)
    assert re.match("This run LOST ", answer.headline)
    rest = "as far as 1e-4 did. If the fixed run is unstable, lower the rate to that."
    assert answer.section("Rate") == (() if said is None else (f"{said} {rest}",))


def test_float32_moments_beside_bfloat16_weights_stay() -> None:
    """They are looked at where they are, and the optimizer goes on with them."""
    p = torch.nn.Parameter(torch.linspace(0.1, 1, 64).bfloat16())
    optimizer = torch.optim.AdamW([p], lr=1e-2)
    moments = {"exp_avg": torch.full((64,), 0.1), "exp_avg_sq": torch.full((64,), 0.01)}
    optimizer.state[p] = {"step": torch.tensor(1.0), **{k: m.clone() for k, m in moments.items()}}
    watched = Watched(0, "p", "other", p, [], "bfloat16", before=(p.detach() * 0.9))
    assert gain._gain(optimizer, [watched]) is not None
    assert all(torch.equal(optimizer.state[p][k], m) for k, m in moments.items())
