"""What changed between two syncs, against a bit diff; files, application, and what is refused."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch

import halfulp as hu
from halfulp.stored import sync as module
from halfulp.stored.sync import SCALES

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8]


def bits(x: torch.Tensor) -> np.ndarray:
    """The bytes of every value, one row each."""
    flat = x.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().reshape(flat.numel(), flat.element_size())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("share", [0.0, 1e-3, 0.02, 0.3, 1.0])
def test_changes_are_those_of_a_bit_diff(dtype: torch.dtype, share: float, tmp_path: Path) -> None:
    """Precision and recall 1.0 against NumPy, in every form, through a file, onto a copy."""
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, (5000, dtype.itemsize), dtype=np.uint8)
    held = {"w": torch.from_numpy(raw.copy()).view(dtype).reshape(50, 100)}
    replica = {"w": held["w"].clone()}
    sync = hu.Sync(held)
    at = rng.random(5000) < share
    raw[at] ^= 1
    held["w"].view(torch.uint8).reshape(-1).copy_(torch.from_numpy(raw.reshape(-1)))
    expected = np.flatnonzero((bits(replica["w"]) != bits(held["w"])).any(axis=1))
    assert sync.density() == len(expected) / 5000
    change = sync.take()
    assert change.density == len(expected) / 5000
    change.save(tmp_path / "change.safetensors")
    for found in (
        change,
        hu.Change.load(tmp_path / "change.safetensors"),
        hu.Change.from_bytes(change.to_bytes()),
    ):
        if share == 0.0:
            assert found.parts == {}
            continue
        part = found.parts["w"]
        assert part.indices.tolist() == expected.tolist()
        assert torch.equal(part.mask.reshape(-1), torch.from_numpy(at))
        assert (bits(part.values) == bits(held["w"])[part.indices.numpy()]).all()
        there = {"w": replica["w"].clone()}
        found.apply(there, verify=True)
        assert (bits(there["w"]) == bits(held["w"])).all()
    assert sync.density() == 0.0


def test_every_form_is_taken_where_it_is_smallest() -> None:
    forms = {}
    for changed in (1, 40):
        x = {"w": torch.zeros(1000, dtype=torch.bfloat16)}
        sync = hu.Sync(x)
        x["w"][:changed] = 1.0
        change = sync.take()
        forms[change.parts["w"].form] = change.payload_bytes
    forms[sync.full().parts["w"].form] = sync.full().payload_bytes
    assert forms == {"indices": 6, "mask": 205, "all": 2000}


def test_a_device_gives_the_same_as_the_compiled_loop() -> None:
    g = torch.Generator().manual_seed(0)
    old, new = (torch.randint(0, 3, (1001,), dtype=torch.int16, generator=g) for _ in range(2))
    mask, changed = module._differing(old, new)
    other, count = module._differing_elsewhere(old, new)
    assert 0 < changed == count
    assert (mask == other).all()


@pytest.mark.parametrize("grid", ["e4m3@128", "nvfp4", "mxfp8_e4m3", "bf16"])
def test_codes_of_a_grid(grid: str) -> None:
    """The trainer holds float32; codes and scales are synced, from which a copy gives the same values."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(48, 32), torch.nn.Linear(32, 16))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sync = hu.Sync(model, grid)
    replica = {name: x.clone() for name, x in sync.stored().items()}
    sync.full().apply(replica, verify=True)
    for _ in range(3):
        for _ in range(2):
            opt.zero_grad()
            model(torch.randn(8, 48)).square().mean().backward()
            opt.step()
        now = sync.stored()
        changed = sum(int((bits(now[n]) != bits(replica[n])).any(axis=1).sum()) for n in now)
        change = sync.take()
        assert change.changed == changed > 0
        assert change.density == changed / change.numel
        hu.Change.from_bytes(change.to_bytes()).apply(replica, verify=True)
        for name, x in now.items():
            assert (bits(x) == bits(replica[name])).all()
    g = hu.grid(grid)
    w, name = model[0].weight.detach(), "0.weight"
    scales = replica.get(name + SCALES)
    codes = replica[name] if replica[name].dtype == torch.uint8 else replica[name].int() & 0xFFFF
    values = g.decode(codes, scale=None if scales is None else scales.double())
    assert torch.equal(values, g.round(w))


def test_bf16_training_is_followed_and_not_touched() -> None:
    def train(follow: bool) -> tuple[torch.nn.Module, torch.nn.Module, list[float]]:
        torch.manual_seed(0)
        model = torch.nn.Linear(64, 64).bfloat16()
        replica = copy.deepcopy(model)
        opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
        sync = hu.Sync(model)
        densities = []
        for i in range(8):
            opt.zero_grad()
            model(torch.randn(4, 64).bfloat16()).square().mean().backward()
            opt.step()
            if follow and i % 4 == 3:
                change = sync.take()
                densities.append(change.density)
                change.apply(replica, verify=True)
        return model, replica, densities

    model, replica, densities = train(True)
    alone, _, _ = train(False)
    assert all(0 < d < 1 for d in densities)
    for a, b, c in zip(model.parameters(), replica.parameters(), alone.parameters(), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


def test_a_change_that_was_left_out_is_noticed() -> None:
    x = {"w": torch.zeros(100)}
    replica = {"w": x["w"].clone()}
    sync = hu.Sync(x)
    x["w"][3] = 1
    sync.take()
    x["w"][5] = 1
    with pytest.raises(hu.CorruptionError, match="not at sync 2"):
        sync.take().apply(replica, verify=True)


def test_what_does_not_fit_is_refused_before_anything_is_written() -> None:
    x = {"a": torch.zeros(10), "b": torch.zeros(10)}
    sync = hu.Sync(x)
    x["a"][0], x["b"][0] = 1, 1
    change = sync.take()
    for wrong, said in (
        ({"a": torch.zeros(10)}, "no 'b'"),
        ({"a": torch.zeros(10), "b": torch.zeros(10).bfloat16()}, "bfloat16"),
        ({"a": torch.zeros(10), "b": torch.zeros(2, 5)}, "(2, 5)"),
        ({"a": torch.zeros(10), "b": torch.zeros(20)[::2]}, "contiguous"),
    ):
        with pytest.raises(hu.UsageError) as caught:
            change.apply(wrong)
        assert said in str(caught.value)
        assert not wrong["a"].any()
    x["a"] = torch.zeros(11)
    with pytest.raises(hu.UsageError, match="begin again"):
        sync.take()
    with pytest.raises(hu.UsageError, match="nothing to follow"):
        hu.Sync({})
    with pytest.raises(hu.UsageError, match="at most 16"):
        hu.Sync({"w": torch.zeros(2, 2)}, "float32")


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte = torch.nn.Embedding(20, 32)
        self.head = torch.nn.Linear(32, 20, bias=False)
        self.head.weight = self.wte.weight


@pytest.mark.parametrize("grid", [None, "mxfp4"])
def test_copies_that_hold_tied_weights_apart(grid: str | None, tmp_path: Path) -> None:
    """Every name of a tensor is written; in a copy that ties them too, there is one."""
    model = Tied()
    sync = hu.Sync(torch.compile(model, backend="eager"), grid)
    names = {"wte.weight": ["head.weight"]}
    apart = {
        other: x.clone() for name, x in sync.stored().items() for other in (name, name.replace("wte", "head"))
    }
    with torch.no_grad():
        model.wte.weight.mul_(1.5)
    change = sync.take()
    change.save(tmp_path / "change.safetensors")
    assert change.tied == (names if grid is None else {**names, "wte.weight.scales": ["head.weight.scales"]})
    for found in (change, hu.Change.load(tmp_path / "change.safetensors"), sync.full()):
        copied = {name: x.clone() for name, x in apart.items()}
        found.apply(copied, verify=True)
        for name, x in sync.stored().items():
            assert torch.equal(copied[name], x)
            assert torch.equal(copied[name.replace("wte", "head")], x)
    if grid is None:
        sampler = Tied()
        sync.full().apply(sampler, verify=True)
        assert torch.equal(sampler.head.weight, model.wte.weight)


def test_a_tensor_that_is_called_like_scales() -> None:
    """One would stand in the place of the other."""
    held = {"a": torch.ones(4, 32), "a.scales": torch.ones(4, 1)}
    with pytest.raises(hu.UsageError, match=r"'a\.scales' is a tensor of its own"):
        hu.Sync(held, "mxfp4")
    assert set(hu.Sync(held, "e4m3").stored()) == set(held)


def test_a_sync_that_fails_loses_nothing() -> None:
    """What it had compared already is in the next change; names that came or went are said."""
    x = {"a": torch.zeros(10), "b": torch.zeros(10)}
    sync = hu.Sync(x)
    x["a"][3], x["b"] = 1, torch.zeros(11)
    with pytest.raises(hu.UsageError, match="begin again"):
        sync.take()
    x["b"] = torch.zeros(10)
    change = sync.take()
    assert (change.since, change.number, list(change.parts)) == (1, 2, ["a"])
    x["c"] = torch.zeros(10)
    for call in (sync.take, sync.full, sync.density):
        with pytest.raises(hu.UsageError, match=r"'c' is new \(1 in all\)"):
            call()
    del x["b"], x["c"]
    for call in (sync.take, sync.full, sync.density):
        with pytest.raises(hu.UsageError, match=r"'b' is missing"):
            call()


def test_files_that_lie_are_refused(tmp_path: Path) -> None:
    x = {"a": torch.zeros(100)}
    sync = hu.Sync(x)
    x["a"][3:6] = 1
    change = sync.take()
    content = bytearray(change.to_bytes())
    content[-1] ^= 1
    with pytest.raises(hu.TamperingError):
        hu.Change.from_bytes(bytes(content))
    part = change.parts["a"]
    from dataclasses import replace

    for wrong, said in (
        (replace(part, where=part.where.flip(0).contiguous()), "not in order"),
        (replace(part, where=part.where + 98), "outside"),
        (replace(part, where=part.where[:2].clone()), "other indices"),
        (replace(part, form="all"), "3 of 100"),
        (replace(part, form="mask"), "another size"),
        (replace(part, form="mask", where=torch.zeros(13, dtype=torch.uint8)), "0 places"),
        (replace(part, bits=part.bits.long()), "for the bits"),
    ):
        with pytest.raises(hu.CorruptionError, match=said):
            hu.Change.from_bytes(replace(change, parts={"a": wrong}).to_bytes())
    from safetensors.torch import save_file

    save_file({"x": torch.ones(1)}, tmp_path / "x.safetensors")
    with pytest.raises(hu.CorruptionError, match="not a change"):
        hu.Change.load(tmp_path / "x.safetensors")
