"""Where weights live: native storage steps as containers do, and the bytes are those reported."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import assert_same
from storage_cases import GRIDS, POLICIES, chosen
from writeback_models import TWO_DIMENSIONAL, Tied, adamw, train, written_back
from writeback_reference import gradients, weights

import halfulp as hu
from halfulp.writeback import WriteBackOptions
from halfulp.writeback.slot import Slot

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("grid", ["e4m3@16", "m3"])
def test_native_steps_as_a_float32_container_does(grid: str, dtype: torch.dtype, policy: str) -> None:
    """Given the same gradients. The parameter has the narrow type, the optimizer works in float32."""
    shape = (30, 40)
    runs = []
    for storage, kind in (("container", torch.float32), ("native", dtype)):
        model = torch.nn.Linear(40, 30, bias=False).to(kind)
        model.load_state_dict({"weight": torch.from_numpy(weights(shape)).to(dtype)})
        rule = chosen(policy, model)
        # m3 takes its range from the parameter's type
        named = hu.grid(grid).within(dtype)
        opt = hu.WriteBack(adamw(model), named, rule, model=model, storage=storage)
        assert model.weight.dtype == kind
        for g in gradients(shape, 8):
            model.weight.grad = torch.from_numpy(g).to(dtype).to(kind)
            opt.step()
        runs.append((model.weight.detach().float(), opt.events, opt.slots[0].kept_tensors()))
    assert_same(runs[0][0], runs[1][0])
    assert runs[0][1] == runs[1][1]
    for key, value in runs[0][2].items():
        assert_same(runs[1][2][key], value, key)


def test_native_bf16_model_trains() -> None:
    """A bf16 model with its own type as grid: weights move under sr and their dtype stays."""
    model = Tied().to(torch.bfloat16)
    opt = written_back(model, "bf16", "sr", storage="native")
    losses = train(model, opt, 20)
    assert losses[-1] < losses[0]
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
    assert opt.events.never_moved < 0.1


def live_bytes(opt: hu.WriteBack) -> int:
    """Storage behind every tensor that can be reached from a write-back, except what the caller made: the
    optimizer, the model with its gradients, and a mask."""
    outside = ("optimizer", "_model", "_groups", "defaults", "_handles", "mask")
    found: dict[int, int] = {}
    seen: set[int] = set()
    queue: list[Any] = [v for k, v in vars(opt).items() if k not in outside]
    while queue:
        x = queue.pop()
        if id(x) in seen:
            continue
        seen.add(id(x))
        if isinstance(x, torch.Tensor):
            found[x.untyped_storage()._cdata] = x.untyped_storage().nbytes()
        elif isinstance(x, dict):
            queue += [*x.keys(), *x.values()]
        elif isinstance(x, list | tuple):
            queue += x
        elif type(x).__module__.startswith("halfulp") and hasattr(x, "__dict__"):
            queue += [v for k, v in vars(x).items() if k not in outside]
    for state in opt.optimizer.state.values():
        for moment in state.values():
            found.pop(moment.untyped_storage()._cdata, None)
    return sum(found.values())


@pytest.mark.parametrize("storage", ["container", "native", "packed"])
@pytest.mark.parametrize("policy", POLICIES)
def test_persistent_bytes_are_those_alive(policy: str, storage: str) -> None:
    """Parameters, codes, what the policy keeps, telemetry and scratch: to the byte."""
    model = Tied().to(torch.bfloat16 if storage == "native" else torch.float32)
    opt = written_back(model, "e4m3@16", chosen(policy, model), storage=storage)
    before = opt.bytes()
    train(model, opt, 2)
    assert opt.bytes() == before  # known before the first step
    assert before.persistent == live_bytes(opt)
    assert before.parameters == sum(model.get_parameter(n).numel() for n in TWO_DIMENSIONAL)


@pytest.mark.parametrize("grid", GRIDS)
def test_packed_bytes_of_every_grid(grid: str) -> None:
    """Codes take their bits, rounded up to bytes for each tensor, and the scales what they take."""
    model = Tied()
    opt = written_back(model, grid, "sr", storage="packed", options=WriteBackOptions(telemetry=False))
    train(model, opt, 1)
    assert opt.bytes().persistent == live_bytes(opt)
    bits = hu.grid(grid).within(torch.float32).bits
    scales = sum(8 * g.segments(tuple(s.p.shape)) for s in opt.slots if (g := s.grid.scaling) is not None)
    codes = sum(-(-s.p.numel() * bits // 8) for s in opt.slots)
    assert opt.bytes().weights == codes + scales + 4 * len(opt.slots)


def test_what_policies_cost() -> None:
    """Bytes a parameter, as the documentation has them."""
    cost = {}
    for policy in POLICIES:
        model = torch.nn.Linear(768, 64, bias=False)
        mask = hu.TileMaster({"weight": torch.arange(64) < 16})
        opt = hu.WriteBack(
            adamw(model), "e4m3", mask if policy == "some tiles" else POLICIES[policy], model=model
        )
        cost[policy] = opt.bytes().per_parameter()["policy"]
    tiles = 16 * 4 / (768 * 64)  # their numbers
    assert cost == {
        "rne": 0, "sr": 0, "deadzone-sr": 0, "eco": 0, "kahan": 4, "kahan in bfloat16": 2, "master": 4,
        "master from raw": 4, "some tiles": 1 + tiles,
    }  # fmt: skip


def test_a_container_keeps_the_place_of_stored_values() -> None:
    """Between steps in two passes, in two bytes; other storage frees it."""
    for dtype in (torch.float32, torch.bfloat16):
        model = Tied().to(dtype)
        opt = written_back(model, options=WriteBackOptions(one_pass=False))
        train(model, opt, 3)
        assert opt.bytes().persistent == live_bytes(opt)
        assert opt.bytes().scratch == (2 * opt.bytes().parameters if dtype == torch.float32 else 0)


def test_values_off_the_grid_are_set_aside_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stored values take two bytes during a step; what somebody put between them takes four."""
    runs = []
    for halved in (True, False):
        model = Tied()
        opt = written_back(model, "e4m3@16", "kahan", options=WriteBackOptions(one_pass=False))
        if not halved:
            monkeypatch.setattr(Slot, "aside", torch.float32)
        train(model, opt, 2)
        assert [s.scratch.dtype == torch.bfloat16 for s in opt.slots if s.scratch is not None] == [halved] * 3
        model.up.weight.data.add_(2.0**-12)
        model.up.weight.grad[0, 0] = torch.nan  # so that one of them is put back
        opt.step()
        assert model.up.weight[0, 0].item() % 2.0**-11 == 2.0**-12
        train(model, opt, 1)
        runs.append((model.state_dict(), opt.events))
    assert runs[0][1] == runs[1][1]
    assert all(torch.equal(v, runs[1][0][k]) for k, v in runs[0][0].items())


@pytest.mark.parametrize(
    ("dtype", "storage", "grid", "policy", "match"),
    [
        (torch.float32, "native", "bf16", "sr", "'embedding.weight'.*bfloat16 or float16"),
        (torch.bfloat16, "native", "m10", "sr", "'embedding.weight'.*m10 does not fit bfloat16"),
        (torch.bfloat16, "native", "fp16", "sr", "'embedding.weight'.*fp16 does not fit bfloat16"),
        (torch.bfloat16, "native", "int8", "sr", "'embedding.weight': grid int8 does not fit bfloat16"),
        (torch.float16, "native", "int2", "sr", "'embedding.weight'.*cannot hold the values of grid int2"),
        (torch.float16, "native", "mxfp4", "sr", "'embedding.weight'.*cannot hold the values of grid mxfp4"),
        (torch.float16, "packed", "int2", "sr", "'embedding.weight'.*cannot hold the values of grid int2"),
        (torch.float32, "packed", "m10", "sr", "'embedding.weight'.*19 bits, so nothing can be packed"),
        (
            torch.bfloat16,
            "container",
            "e4m3",
            "kahan",
            "'embedding.weight'.*'kahan'.*float32.*storage='native'",
        ),
        (torch.bfloat16, "container", "e4m3", "master", "'embedding.weight'.*'master'.*storage='native'"),
        (torch.float16, "container", "e4m3", "eco", "'embedding.weight'.*'eco'.*storage='native'"),
    ],
)
def test_what_does_not_fit(dtype: torch.dtype, storage: Any, grid: str, policy: str, match: str) -> None:
    """Said when the write-back is made, with the parameter's name, not found out in a wrong weight."""
    model = Tied().to(dtype)
    with pytest.raises(hu.UsageError, match=match):
        written_back(model, grid, policy, storage=storage)


@pytest.mark.parametrize("grid", ["mxfp8_e4m3", "mxfp4", "nvfp4"])
def test_native_bf16_with_block_scales(grid: str) -> None:
    """A block format's element times its scale is exact in bfloat16."""
    model = Tied().to(torch.bfloat16)
    opt = written_back(model, grid, "rne", storage="native")
    train(model, opt, 3)
    for name in TWO_DIMENSIONAL:
        w = model.get_parameter(name).detach().float()
        assert torch.equal(hu.grid(grid).round(w), w)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("policy", ["rne", "sr", "deadzone-sr"])
def test_other_containers(dtype: torch.dtype, policy: str) -> None:
    """Parameters of other types hold grid values, too; the optimizer then works in that type."""
    model = Tied().to(dtype)
    opt = written_back(model, "e4m3@16", policy)
    train(model, opt, 3)
    for name in TWO_DIMENSIONAL:
        w = model.get_parameter(name).detach()
        assert w.dtype == dtype
        assert torch.equal(hu.grid("e4m3@16").round(w), w)
