"""What a step lost: every count against copies compared by hand, the share of decay, and how it reads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from writeback_models import TWO_DIMENSIONAL, Tied, adamw, train, values, written_back

import halfulp as hu
from halfulp.writeback import WriteBackOptions

pytestmark = pytest.mark.usefixtures("one_thread")
GRIDS = ["bf16", "e4m3@16", "e2m1@4", "int3@4/asym", "int8", "int4/g128", "mxfp4", "nvfp4"]


def element(grid: hu.Grid, q: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """Stored values over their scales."""
    if grid.scaling is None:
        return q.double()
    assert scales is not None
    row, length = grid.scaling.segment_length(tuple(q.shape))
    i = torch.arange(q.numel())
    return q.double() / scales[i // row * -(-row // length) + i % row // length].reshape(q.shape)


def frozen(
    grid: hu.Grid, q: torch.Tensor, z: torch.Tensor, stored: torch.Tensor, scales: torch.Tensor | None
) -> torch.Tensor:
    """Where nothing of a proposal z was written: the value stayed, or the code where scales move."""
    if grid.scaling is None:
        return stored == q
    old = grid.scales(q)
    stays = element(grid, grid.round(q, scale=old), old) == element(grid, stored, scales)
    return (stored == q) | (z == q) | stays


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("policy", ["rne", "sr", "deadzone-sr", "eco", "kahan", "master"])
def test_counts(policy: str, grid: str) -> None:
    """Frozen, zero proposals, ends, non-finite and never moved, over steps with all of them."""
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 50, bias=False)
    torch.nn.init.uniform_(model.weight, -2, 2)
    base = torch.optim.SGD(model.parameters(), lr=5e-2, momentum=0.5)
    opt = hu.WriteBack(base, grid, policy, model=model)
    g, proposed = hu.grid(grid), {}
    base.register_step_post_hook(lambda *_: proposed.update(z=model.weight.detach().clone()))
    moved, seen = (
        torch.zeros(50, 64).bool(),
        dict.fromkeys(("frozen", "zero_proposal", "endpoint", "nonfinite"), 0),
    )
    generator = torch.Generator().manual_seed(0)
    for step in range(6):
        gradient = torch.randn(50, 64, generator=generator)
        gradient[:5] = 0.0
        if step >= 3:
            gradient[9, 3:6] = torch.tensor([torch.nan, torch.inf, -torch.inf])
        model.weight.grad = gradient
        q = model.weight.detach().clone()
        carry = opt.slots[0].state["carry"].clone() if policy == "kahan" else torch.zeros_like(q)
        opt.step()
        stored, z = model.weight.detach(), proposed["z"]
        fine = torch.isfinite(z)
        whole = torch.where(torch.isfinite(z + carry), z + carry, z)
        assert torch.equal(stored[~fine], q[~fine])
        scales = None if g.scaling is None else g.scales(whole)
        still, at = frozen(g, q, whole, stored, scales), element(g, stored, scales)
        moved |= fine & ~still
        expected = {
            "frozen": int((fine & still).sum()),
            "zero_proposal": int((fine & (whole == q)).sum()),
            "endpoint": int((fine & ((at == g.largest) | (at == g.lo))).sum()),
            "nonfinite": int((~fine).sum()),
        }
        row = opt.events["weight"]
        assert {k: getattr(row, k) for k in expected} == expected
        assert row.never_moved == int((~moved).sum())
        seen = {k: v + expected[k] for k, v in seen.items()}
    assert seen["frozen"] > 0
    assert seen["nonfinite"] == 9
    assert seen["endpoint"] > 0 or grid in ("bf16", "e4m3@16")


@pytest.mark.parametrize("policy", ["rne", "sr", "deadzone-sr", "kahan", "master"])
def test_how_much_of_a_step_arrives(policy: str) -> None:
    """<u, d> / |d|**2 and the cosine: d from the stored value to what the policy rounds, u to the new one.
    Masters and carries make them of what has not been written yet as well."""
    model = Tied()
    base = adamw(model, lr=3e-3, weight_decay=0.0)
    opt = hu.WriteBack(base, "e4m3@16", policy, model=model)
    proposed: dict[str, torch.Tensor] = {}
    base.register_step_post_hook(lambda *_: proposed.update(values(model)))
    for step in range(3):
        before = values(model)
        carries = {s.name: s.state["carry"].clone() for s in opt.slots} if policy == "kahan" else {}
        train(model, opt, 1, start=step)
        total = [0.0, 0.0, 0.0]
        for name in TWO_DIMENSIONAL:
            q, d = before[name].double(), proposed[name]
            d = (d + carries[name] if carries else d).double() - q
            u = values(model)[name].double() - q
            dot, proposal, written = float((u * d).sum()), float((d * d).sum()), float((u * u).sum())
            total = [a + b for a, b in zip(total, (dot, proposal, written), strict=True)]
            row = opt.events[name]
            # float64 sums of a thousand terms in another order: relative 1000 * 2**-53
            assert row.gain == pytest.approx(dot / proposal, rel=1e-12)
            along = dot / (proposal * written) ** 0.5 if written else None
            assert row.cosine == (None if along is None else pytest.approx(along, rel=1e-12))
        assert opt.events.gain == pytest.approx(total[0] / total[1], rel=1e-12)
        assert opt.events.cosine == pytest.approx(total[0] / (total[1] * total[2]) ** 0.5, rel=1e-12)
        assert "arrived" in str(opt.events)


@pytest.mark.parametrize("policy", ["rne", "sr", "kahan", "master"])
def test_the_share_of_decay(policy: str) -> None:
    """lr * decay * sum |q| over sum |d|, with d from the stored value to what the policy rounds."""
    model = Tied()
    base = adamw(model, lr=3e-3, weight_decay=0.7)
    opt = hu.WriteBack(base, "e4m3@16", policy, model=model)
    proposed: dict[str, torch.Tensor] = {}
    base.register_step_post_hook(lambda *_: proposed.update(values(model)))
    for step in range(3):
        before = values(model)
        carries = {s.name: s.state["carry"].clone() for s in opt.slots} if policy == "kahan" else {}
        base.param_groups[0]["lr"] = rate = 3e-3 / (step + 1)
        train(model, opt, 1, start=step)
        for name in TWO_DIMENSIONAL:
            q, d = before[name].double(), proposed[name]
            d = (d + carries[name] if carries else d).double() - q
            expected = rate * 0.7 * float(q.abs().sum()) / float(d.abs().sum())
            # float64 sums of a thousand terms in another order: relative 1000 * 2**-53
            assert opt.events[name].decay_share == pytest.approx(expected, rel=1e-12)


def test_the_share_of_decay_of_a_large_tensor_is_sampled() -> None:
    """Every sixteenth tile of a tensor of 256 tiles or more: 17 tiles here, all of one distribution, so that
    the ratio of sums over 13056 weights is right to a few percent."""
    torch.manual_seed(0)
    model = torch.nn.Linear(768, 272, bias=False)
    opt = hu.WriteBack(adamw(model, lr=1e-3), "bf16", "sr", model=model)
    before = model.weight.detach().double()
    model.weight.grad = torch.randn(272, 768)
    opt.step()
    exact = (
        1e-3 * 0.1 * before.abs().sum() / (1e-3 * before.numel())
    )  # Adam's first step is lr; decay adds 0.2 %
    assert opt.events["weight"].decay_share == pytest.approx(float(exact), rel=0.05)


@pytest.mark.parametrize(
    ("make", "decays"),
    [
        (lambda p: torch.optim.AdamW(p, weight_decay=0.1), True),
        (lambda p: torch.optim.Adam(p, weight_decay=0.1, decoupled_weight_decay=True), True),
        (lambda p: torch.optim.RAdam(p, weight_decay=0.1, decoupled_weight_decay=True), True),
        (lambda p: torch.optim.Adafactor(p, weight_decay=0.1), True),
        (lambda p: torch.optim.AdamW(p, weight_decay=0.0), False),
        (lambda p: torch.optim.Adam(p, weight_decay=0.1), False),
        (lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1), False),
    ],
)
def test_only_decoupled_decay_has_a_share(make: Any, decays: bool) -> None:
    """Elsewhere decay is a part of the gradient that cannot be told from the rest."""
    model = Tied()
    opt = hu.WriteBack(make(model.parameters()), "bf16", "sr", model=model)
    train(model, opt, 1)
    shares = [r.decay_share for r in opt.events.rows]
    assert all((s is not None) == decays for s in shares)
    assert not decays or all(0 < s < 1 for s in shares)


def test_totals() -> None:
    """Shares weigh coordinates, not tensors."""
    model = Tied()
    opt = written_back(model, policy="rne")
    train(model, opt, 3)
    rows = {r.name: r for r in opt.events.rows}
    assert list(rows) == list(TWO_DIMENSIONAL)
    total = sum(r.numel for r in rows.values())
    assert opt.events.frozen == sum(r.frozen for r in rows.values()) / total
    assert opt.events.never_moved == sum(r.never_moved for r in rows.values()) / total
    assert opt.events.nonfinite == 0
    up = rows["up.weight"]
    assert up.frozen_fraction == up.frozen / up.numel
    with pytest.raises(hu.UsageError, match="by_group has ended: sum frozen and numel"):
        opt.events.by_group({})
    with pytest.raises(KeyError, match="no tensor 'sideways'"):
        _ = opt.events["sideways"]
    text = str(opt.events)
    assert text.startswith(f"step 3: {opt.events.frozen:.1%} of weights unchanged")
    assert all(name in text for name in TWO_DIMENSIONAL)
    assert "never moved" in text
    assert "of the proposal" in text


def test_before_the_first_step_there_are_none() -> None:
    opt = written_back(Tied())
    assert opt.events.rows == ()
    assert opt.events.frozen == opt.events.never_moved == 0.0
    assert opt.events.step == 0


def test_without_telemetry() -> None:
    """No bit a weight, no decay share; the counts of a step are there all the same, and the weights equal."""
    with_bits, without = Tied(), Tied()
    a, b = written_back(with_bits), written_back(without, options=WriteBackOptions(telemetry=False))
    train(with_bits, a, 3)
    train(without, b, 3)
    assert all(torch.equal(p, without.get_parameter(n)) for n, p in with_bits.named_parameters())
    for x, y in zip(a.events.rows, b.events.rows, strict=True):
        assert (x.frozen, x.zero_proposal, x.endpoint) == (y.frozen, y.zero_proposal, y.endpoint)
        assert y.never_moved is None
        assert y.decay_share is None
    assert all("halfulp.moved" not in entry for entry in b.state_dict()["state"].values())


def test_never_moved_is_since_the_start() -> None:
    """A weight that moves and comes back has moved; one that is asked to and cannot has not."""
    model = torch.nn.Linear(8, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    opt = hu.WriteBack(torch.optim.SGD(model.parameters(), lr=1.0), "e4m3", "rne", model=model)
    there_and_back = np.array([0.125, 0, 0, 0, 0, 0, 0, 0], np.float32)
    small = np.array([0, 0.01, 0, 0, 0, 0, 0, 0], np.float32)
    for g in (there_and_back + small, -there_and_back + small):
        model.weight.grad = torch.from_numpy(g)[None].clone()
        opt.step()
    assert torch.equal(model.weight.detach(), torch.ones(1, 8))
    row = opt.events["weight"]
    assert (row.never_moved, row.frozen, row.zero_proposal) == (7, 7, 6)
