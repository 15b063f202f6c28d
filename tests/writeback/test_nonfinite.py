"""Gradients and proposals that are not finite: refused or counted, and nothing is written of them."""

from __future__ import annotations

import pytest
import torch
from writeback_models import Tied, train, written_back
from writeback_unchanged import assert_unchanged, everything

import halfulp as hu
from halfulp.writeback import WriteBackOptions

GRID = "e4m3@16"
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("storage", ["container", "packed"])
def test_raise(bad: float, storage: str) -> None:
    """Before anything changes: weights, moments, carries, telemetry and the step number."""
    model = Tied()
    opt = written_back(model, GRID, "kahan", options=WriteBackOptions(nonfinite="raise"), storage=storage)
    train(model, opt, 2)
    model.up.weight.grad[3, 5] = bad
    before = everything(model, opt)
    with pytest.raises(
        hu.UsageError, match=r"gradient of 'up.weight' is not finite at step 3.*nothing was changed"
    ):
        opt.step()
    assert_unchanged(before, model, opt)
    train(model, opt, 1)
    assert opt.steps == 3


@pytest.mark.parametrize("one_pass", [True, False])
def test_spoilt_moments_are_told_of_once(one_pass: bool, caplog: pytest.LogCaptureFixture) -> None:
    """The weights stay finite and so does the loss: only the log can say that nothing moves any more."""
    model = Tied()
    opt = written_back(model, "bf16", "sr", options=WriteBackOptions(one_pass=one_pass))
    train(model, opt, 2)
    model.up.weight.grad[3, 5] = torch.nan
    opt.step()
    with caplog.at_level("WARNING", "halfulp"):
        train(model, opt, 70)
    told = [r.getMessage() for r in caplog.records if "not finite" in r.getMessage()]
    assert told == [told[0]]
    assert "at step 33 the update of 'up.weight' is not finite" in told[0]
    assert "go back to a checkpoint" in told[0]


@pytest.mark.parametrize("storage", ["container", "packed"])
@pytest.mark.parametrize("policy", ["rne", "sr", "deadzone-sr", "eco", "kahan", "master"])
def test_count(policy: str, storage: str) -> None:
    """Counted, and those weights stay as they are; carries and masters stay finite; the others move on."""
    model = Tied()
    opt = written_back(model, GRID, policy, storage=storage)
    train(model, opt, 2)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    bad = torch.zeros(40, 24, dtype=torch.bool)
    bad[3, 5:7] = bad[0, 0] = True
    model.up.weight.grad[bad] = torch.nan
    opt.step()
    after = model.state_dict()
    assert torch.equal(after["up.weight"][bad], before["up.weight"][bad])
    assert opt.events["up.weight"].nonfinite == opt.events.nonfinite == 3
    assert bool((after["up.weight"] != before["up.weight"]).any())
    assert all(torch.isfinite(v).all() for v in after.values())
    for key, value in opt.slots[1].state.items():
        assert torch.isfinite(value).all(), key


def test_raise_with_sparse_gradients() -> None:
    model = torch.nn.Embedding(5, 4, sparse=True)
    opt = hu.WriteBack(
        torch.optim.SparseAdam(model.parameters()),
        GRID,
        "sr",
        model=model,
        options=WriteBackOptions(nonfinite="raise"),
    )
    model(torch.tensor([1, 2])).sum().backward()
    opt.step()
    (model(torch.tensor([1, 2])).sum() * torch.inf).backward()
    with pytest.raises(hu.UsageError, match="gradient of 'weight' is not finite"):
        opt.step()
