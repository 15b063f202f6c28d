"""The ninth score: shares of a rehearsal's loss that add up, by coordinate and by tile."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import halfulp as hu
from halfulp.allocation.masks import choose
from halfulp.audit.rehearsal.attribution import by_tile
from halfulp.errors import UsageError

WIDTH = 40  # of a hidden layer: the last tile of 768 is short


class Small(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one = torch.nn.Linear(24, WIDTH)
        self.two = torch.nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(torch.tanh(self.one(x)))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(1)
    return torch.randn(64, 24, generator=drawn), torch.randint(0, 5, (64,), generator=drawn)


def rehearsed(out: Path | hu.Memory, steps: int = 20) -> tuple[Small, hu.Audit, Callable[[], torch.Tensor]]:
    """A model after some steps, beside a rehearsal on a coarse grid; the audit is still running."""
    model, (x, y) = Small(), batch()
    opt = torch.optim.AdamW(model.parameters(), lr=5e-3)

    def loss() -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(x), y)

    audit = hu.Audit(opt, ["e5m2"], model=model, out=out, rehearse=["e5m2", "e5m2:master"])
    audit.start()
    for _ in range(steps):
        opt.zero_grad()
        loss().backward()
        opt.step()
    return model, audit, loss


def gap(audit: hu.Audit, loss: Callable[[], torch.Tensor], spec: str = "e5m2") -> float:
    with torch.no_grad():
        here = float(loss())
        with audit.as_if(spec):
            return float(loss()) - here


def test_shares_add_up_to_the_gap_as_points_grow(tmp_path: Path) -> None:
    """The midpoint rule: four times nearer with twice the points, until float32 ends it."""
    _, audit, loss = rehearsed(tmp_path / "trace")
    whole = gap(audit, loss)
    assert whole > 0.05
    off = []
    for points in (1, 2, 4, 8, 64):
        found = audit.attribute("e5m2", loss, points=points)
        off.append(abs(math.fsum(float(s.sum()) for s in found.values()) - whole))
    audit.stop()
    assert off[0] > off[1] > off[2] > off[3]
    assert off[-1] < 1e-5 * max(1.0, whole)


def test_shares_equal_numpy(tmp_path: Path) -> None:
    """Two layers and a softmax by hand, at the same points, in float64."""
    model, audit, loss = rehearsed(tmp_path / "trace")
    w = {n: p.detach().double().numpy().copy() for n, p in model.named_parameters()}
    with audit.as_if("e5m2"):
        s = {n: p.detach().double().numpy().copy() for n, p in model.named_parameters()}
    found = audit.attribute("e5m2", loss, points=4)
    audit.stop()
    x, y = (t.numpy().astype(np.float64 if t.is_floating_point() else np.int64) for t in batch())
    expected = {n: np.zeros_like(w[n]) for n in ("one.weight", "two.weight")}
    for i in range(4):
        p = {n: w[n] + (i + 0.5) / 4 * (s[n] - w[n]) for n in w}
        hidden = np.tanh(x @ p["one.weight"].T + p["one.bias"])
        logits = hidden @ p["two.weight"].T + p["two.bias"]
        chance = np.exp(logits - logits.max(axis=1, keepdims=True))
        chance /= chance.sum(axis=1, keepdims=True)
        chance[np.arange(len(y)), y] -= 1
        back = chance / len(y)
        gradient = {
            "two.weight": back.T @ hidden,
            "one.weight": ((back @ p["two.weight"]) * (1 - hidden**2)).T @ x,
        }
        for n in expected:
            expected[n] += gradient[n] * (s[n] - w[n]) / 4
    assert set(found) == set(expected)  # biases are not rehearsed
    for n, share in found.items():
        tiles = [part.sum() for part in np.split(expected[n].reshape(-1), range(768, expected[n].size, 768))]
        np.testing.assert_allclose(share.numpy(), tiles, rtol=0, atol=1e-6 * np.abs(expected[n]).sum())


def test_attributing_changes_nothing(tmp_path: Path) -> None:
    """Weights, gradients, buffers and random states are what they were, also when the closure fails."""
    model, audit, loss = rehearsed(tmp_path / "trace")
    model.one.weight.grad = kept = torch.ones_like(model.one.weight)
    before = {n: p.detach().clone() for n, p in model.state_dict().items()}
    state = torch.get_rng_state()

    def noisy() -> torch.Tensor:
        return loss() + 0 * torch.rand(())

    audit.attribute("e5m2", noisy)
    with pytest.raises(ZeroDivisionError):
        audit.attribute("e5m2", lambda: 1 / 0)  # type: ignore[arg-type,return-value]
    audit.stop()
    assert all(torch.equal(before[n], p) for n, p in model.state_dict().items())
    assert model.one.weight.grad is kept
    assert bool((kept == 1).all())
    assert torch.equal(state, torch.get_rng_state())


def test_a_mask_by_what_tiles_cost(tmp_path: Path) -> None:
    """The trace keeps sums of several moments; R takes the dearest tiles, and those of keep= come first."""
    _, audit, loss = rehearsed(tmp_path / "trace")
    first = audit.attribute("e5m2", loss, tile=WIDTH)
    second = audit.attribute("e5m2", loss, points=2)  # the same tiles
    audit.stop()
    trace = hu.Trace.open(tmp_path / "trace")
    kept = trace.attribution("e5m2")
    for n, sums in kept.items():
        assert np.array_equal(sums, (first[n] + second[n]).numpy())
    ranked = sorted(((-cost, n, i) for n, sums in kept.items() for i, cost in enumerate(sums)))
    assert len(ranked) == 24 + 5

    def chosen(mask: hu.Mask) -> set[tuple[str, int]]:
        return {(n, int(i)) for n, tiles in mask.tiles.items() for i in tiles.nonzero()}

    three = hu.allocate(trace, 3 * 4 * WIDTH, score="R")
    assert three.tile == WIDTH
    assert chosen(three) == {(n, i) for _, n, i in ranked[:3]}
    least = choose({n: -s for n, s in kept.items()}, three.sizes, 2 * 4 * WIDTH, "least", WIDTH)
    four = hu.allocate(trace, 4 * 4 * WIDTH, score="R:e5m2", keep=least)
    assert chosen(four) == {(n, i) for _, n, i in (*ranked[:2], *ranked[-2:])}


def test_resumed_attribution(tmp_path: Path) -> None:
    """What was attributed is saved with the trace and goes on from there."""
    memory = hu.Memory()
    model, audit, loss = rehearsed(memory)
    first = audit.attribute("e5m2", loss)
    audit.stop()
    memory = hu.Memory.loaded(memory.save())
    opt = torch.optim.AdamW(model.parameters(), lr=5e-3)
    specs = ["e5m2", "e5m2:master"]
    with hu.Audit(
        opt, ["e5m2"], model=model, out=memory, rehearse=specs, resume=True, first_step=21
    ) as taken_up:
        loss().backward()
        opt.step()
        second = taken_up.attribute("e5m2", loss)
    for n, sums in memory.trace.attribution("e5m2").items():
        assert np.array_equal(sums, (first[n] + second[n]).numpy())


def test_short_tiles() -> None:
    assert by_tile(torch.ones(3, 3), 4).tolist() == [4.0, 4.0, 1.0]


def test_what_cannot_be_attributed(tmp_path: Path) -> None:
    _, audit, loss = rehearsed(tmp_path / "trace")
    with pytest.raises(UsageError, match="not rehearsed"):
        audit.attribute("e4m3", loss)
    with pytest.raises(UsageError, match="points="):
        audit.attribute("e5m2", loss, points=0)
    with pytest.raises(UsageError, match=r"without backward\(\)"):
        audit.attribute("e5m2", lambda: loss().item())  # type: ignore[arg-type,return-value]
    audit.attribute("e5m2", loss)
    with pytest.raises(UsageError, match="tiles of 768"):
        audit.attribute("e5m2", loss, tile=96)
    audit.stop()
    trace = hu.Trace.open(tmp_path / "trace")
    with pytest.raises(UsageError, match="was not attributed"):
        trace.attribution("e5m2:master")
    everything = hu.allocate(trace, 1.0, score="R")
    with pytest.raises(UsageError, match="more than the budget"):
        hu.allocate(trace, 200 * 4, score="R", keep=everything)
    with pytest.raises(UsageError, match="tiles of 96 where these have 768"):
        hu.allocate(trace, 1.0, score="R", keep=dataclasses.replace(everything, tile=96))
