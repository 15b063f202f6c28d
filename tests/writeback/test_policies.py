"""Policies by themselves: how they are named, compared and checked, and what one step of theirs leaves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from oracle import assert_same

import halfulp as hu
from halfulp.writeback import ECO, Kahan, Master, policies
from halfulp.writeback.policies import Step
from halfulp.writeback.policies.kahan import too_large


@pytest.mark.parametrize(
    "made",
    [
        *(ECO(rounding=r, decay_exact=d) for r in ("nearest", "stochastic") for d in (False, True)),
        *(Kahan(dtype) for dtype in (torch.float32, torch.bfloat16)),
        *(Master(start_from=start) for start in ("code", "raw")),
        *(kind() for kind in policies.POLICIES.values()),
    ],
    ids=lambda made: made.spec,
)
def test_a_policy_is_read_as_it_prints_itself(made: policies.Policy) -> None:
    """Every value of every option."""
    assert policies.policy(made.spec) == made


def test_options_of_policies_that_are_none() -> None:
    for spec, options in (
        ("sr(x=1)", "Options: none."),
        ("eco(x=1)", "Options: rounding=nearest or stochastic; decay_exact=False or True."),
    ):
        with pytest.raises(hu.UsageError) as caught:
            policies.policy(spec)
        assert str(caught.value).endswith(options)


def test_scales_that_are_kept_are_those_of_the_kernel() -> None:
    """Packed codes need them: from what a carry and a proposal make together, unless that is too large."""
    grid, made = hu.grid("int8/row"), torch.Generator().manual_seed(0)
    q = grid.round(torch.randn(4, 50, generator=made))
    z = q + torch.randn(4, 50, generator=made) * 0.3
    carry = torch.randn(4, 50, generator=made) * 0.3
    z[0, 3], carry[0, 3] = 3e38, -1e38  # together less than alone
    z[1, 3], carry[1, 3] = 3e38, 1e38  # together too large
    step = Step(
        name="w", grid=grid, stream=hu.Stream(seed=0, name="w"), q=q, z=z.clone(), state={}, moved=None,
        sums=0, decay=0.0, group={}, moments={}, keep_scales=True,
    )  # fmt: skip
    step.write(carry=carry.clone())
    step.finish()
    plain = hu.kernels.write_back(q, z.clone(), grid, carry=carry.clone()).out
    assert_same(step.z, plain)
    assert step.scales is not None
    assert step.scales[0] < step.scales[1]


@pytest.mark.parametrize(("kind", "largest"), [("remainder16", 0x7F7F7FFF), ("remainder8", 0x7F7F7F00)])
def test_masters_beyond_bfloat16_are_cut_to_it(kind: str, largest: int) -> None:
    """To the largest whose nearest weight is finite; what is not finite leaves the remainder alone."""
    policy: Any = policies.POLICIES[kind]()
    beyond = torch.tensor([3.4e38, -3.4e38, 3.389531e38, float("nan")])
    assert beyond[:2].bfloat16().isinf().all()
    q = torch.ones(4)
    state = policy.start(q, q, "w")
    state["remainder"] += 5
    step = Step(
        name="w", grid=hu.grid("bf16").within(torch.float32), stream=hu.Stream(seed=0, name="w"), q=q,
        z=beyond.clone(), state=state, moved=None, sums=0, decay=0.0, group={}, moments={}, keep_scales=False,
    )  # fmt: skip
    policy.after(step)
    masters = step.z.view(torch.int32) + (state["remainder"].int() << (16 - policy.bits))
    assert (masters[:2] & 0x7FFFFFFF).tolist() == [largest] * 2
    assert step.z[:2].tolist() == [hu.grid("bf16").largest, -hu.grid("bf16").largest]
    assert int(state["remainder"][3]) == 5


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_carry_of_half_a_gap_belongs_to_its_weight(sign: float) -> None:
    """Nearest rounding may leave as much over, on either side, and no more; below a power of two less."""
    grid, q = hu.grid("bf16"), torch.tensor([1.5, 1.5, 1.0, 1.0]) * sign
    half = torch.tensor([2**-8, -(2**-8), 2**-8, -(2**-9)]) * sign
    assert too_large(half, q, grid).tolist() == [False] * 4
    assert too_large(half * (1 + 2**-20), q, grid).tolist() == [True] * 4


@pytest.mark.parametrize("kind", ["remainder16", "remainder8"])
def test_remainders_of_weights_that_were_set(kind: str) -> None:
    """Any remainder makes a master of a weight that is not zero; of a zero, none that lies below it, and none
    of what is no bfloat16."""
    policy: Any = policies.POLICIES[kind]()
    most = 2 ** (policy.bits - 1)
    rests = [0, 1, 100, most - 1, -1, -100, -most]
    weights = torch.tensor([1.0, -1.0, 1.5, -3.0, 2.0**-126, 0.0, -0.0, 1.0 + 2.0**-20])
    q = weights[:, None].expand(-1, len(rests)).contiguous()
    state = policy.start(q, q, "w")
    state["remainder"].copy_(torch.tensor(rests, dtype=torch.int16))
    policy.resync(q, state, hu.grid("bf16"))
    assert state["remainder"][:5].tolist() == [rests] * 5
    assert state["remainder"][5:7].tolist() == [[max(rest, 0) for rest in rests]] * 2
    assert not state["remainder"][7].any()


def test_policies_are_values_and_one_with_a_mask_is_itself() -> None:
    """Comparing masks would be comparing tensors."""
    assert len({ECO(), ECO(), Kahan(), Kahan(torch.bfloat16)}) == 3
    chosen = {"w": torch.ones(3, dtype=torch.bool)}
    one, other = hu.TileMaster(chosen), hu.TileMaster(chosen)
    assert len({one, other, one}) == 2


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Master(start_from="Code"), r"Master\(start_from=\.\.\.\) takes code or raw, not 'Code'"),
        (lambda: hu.TileMaster({}, start_from="x"), r"TileMaster\(start_from=\.\.\.\) takes code or raw"),
        (lambda: Kahan("bfloat16"), r"Kahan\(dtype=\.\.\.\) takes float32 or bfloat16, not 'bfloat16'"),
        (lambda: ECO(rounding="up"), "takes nearest or stochastic, not 'up'"),
        (lambda: ECO(decay_exact=1), "takes False or True, not 1"),
        (lambda: hu.TileMaster(5), "TileMaster takes a mask .* not int"),
        (lambda: hu.TileMaster(SimpleNamespace(tiles={})), "takes a mask .* not SimpleNamespace"),
        (lambda: hu.TileMaster(SimpleNamespace(tile=768)), "takes a mask .* not SimpleNamespace"),
    ],
)
def test_options_of_policies_are_checked(make: Any, said: str) -> None:
    with pytest.raises(hu.UsageError, match=said):
        make()


def test_a_tile_master_takes_a_mask() -> None:
    """As allocate makes it, with its own size of tiles."""
    tiles = {"w": torch.tensor([True, False])}
    mask = hu.Mask(tiles=tiles, sizes={"w": 1000}, score="P", budget=2000, tile=500)
    assert (hu.TileMaster(mask).mask, hu.TileMaster(mask).tile) == (tiles, 500)
    with pytest.raises(hu.UsageError, match=r"tiles of 500 weights, not of 96"):
        hu.TileMaster(mask, tile=96)
