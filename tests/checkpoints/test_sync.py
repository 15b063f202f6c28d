"""What changed between two syncs, against a bit diff; files, application, and what is refused."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import halfulp as hu
from halfulp.checkpoints import BlockFp8, Change, join
from halfulp.checkpoints.sync import places, receiving
from halfulp.checkpoints.sync.tracker import COMPARED, SCALES
from halfulp.errors import TamperingError

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
        Change.load(tmp_path / "change.safetensors"),
        Change.from_bytes(change.to_bytes()),
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
    for changed in (1, 200):
        x = {"w": torch.zeros(1000, dtype=torch.bfloat16)}
        sync = hu.Sync(x)
        x["w"][:changed] = 1.0
        change = sync.take()
        forms[change.parts["w"].form] = change.payload_bytes
    forms[sync.full().parts["w"].form] = sync.full().payload_bytes
    assert forms == {"gaps": 3, "mask": 525, "all": 2000}


def test_changes_are_found_across_the_chunks_of_a_comparison() -> None:
    x = {"w": torch.zeros(2 * COMPARED + 5, dtype=torch.uint8)}
    sync = hu.Sync(x)
    at = [0, COMPARED - 1, COMPARED, 2 * COMPARED, 2 * COMPARED + 4]
    x["w"][at] = 1
    assert sync.take().parts["w"].indices.tolist() == at


def test_a_bound_is_ignored_with_a_warning() -> None:
    x = {"w": torch.zeros(4).bfloat16()}
    with pytest.warns(DeprecationWarning, match="keeps every bit"):
        sync = hu.Sync(x, bound=1e-9)
    x["w"][1] = 2**-11  # far beyond the bound
    assert sync.take().changed == 1


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
        Change.from_bytes(change.to_bytes()).apply(replica, verify=True)
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


# ---- one after another ------------------------------------------------------------------------------


def chain(count: int) -> tuple[dict[str, torch.Tensor], hu.Sync, list[Change], str]:
    """A trainer's tensors and ``count`` changes, each of one of five tensors; where they began."""
    x = {f"w{i}": torch.zeros(20) for i in range(5)}
    sync = hu.Sync(x)
    began, changes = sync.position, []
    for step in range(count):
        x[f"w{step % 5}"][step % 20] += 1
        changes.append(Change.from_bytes(sync.take().to_bytes()))
    return x, sync, changes, began


def zeros() -> dict[str, torch.Tensor]:
    return {f"w{i}": torch.zeros(20) for i in range(5)}


def test_a_receiver_follows_a_chain() -> None:
    """Fifty changes in order; saved half way, another receiver goes on from the position."""
    x, sync, changes, began = chain(50)
    copied = zeros()
    receiver = hu.Receiver(copied, position=began)
    for change in changes[:25]:
        receiver.apply(change, verify=True)
    later = hu.Receiver(copied, position=str(receiver.position))
    for change in changes[25:]:
        later.apply(change)
    assert later.position == sync.position
    for name, value in x.items():
        assert torch.equal(copied[name], value)


@pytest.mark.parametrize("out", range(0, 49, 7))
def test_a_change_that_was_left_out_is_noticed_at_once(out: int) -> None:
    """By a receiver at the next change, though that is of another tensor; and by ``verify`` without one."""
    _, _, changes, began = chain(50)
    copied = zeros()
    receiver = hu.Receiver(copied, position=began)
    for change in changes[:out]:
        receiver.apply(change)
    before, place = {n: v.clone() for n, v in copied.items()}, receiver.position
    for later in changes[out + 1 :]:
        with pytest.raises(hu.UsageError, match=rf"from sync {out + 1} to {later.since} is missing"):
            receiver.apply(later)
        with pytest.raises(hu.CorruptionError, match=f"not at sync {later.since}"):
            later.apply(copied, verify=True)
    assert receiver.position == place
    assert all(torch.equal(copied[n], v) for n, v in before.items())
    for change in changes[out:]:
        receiver.apply(change)


def test_stale_changes_are_refused() -> None:
    """Applied twice, out of order, or after a full copy."""
    x, sync, changes, began = chain(6)
    copied = zeros()
    receiver = hu.Receiver(copied, position=began)
    for change in changes[:4]:
        receiver.apply(change)
    for stale in changes[:4]:
        with pytest.raises(
            hu.UsageError, match="this copy is at sync 5; it is stale, or was applied already"
        ):
            receiver.apply(stale)
        with pytest.raises(hu.CorruptionError, match="Nothing was changed"):
            (stale if stale is not changes[3] else changes[2]).apply(copied, verify=True)
    receiver.apply(sync.full())
    with pytest.raises(hu.UsageError, match="at sync 7; it is stale"):
        receiver.apply(changes[4])
    assert all(torch.equal(copied[n], v) for n, v in x.items())


def test_a_copy_that_begins() -> None:
    """From a full change; with nothing known, only that is taken."""
    x, sync, changes, _ = chain(3)
    copied = zeros()
    receiver = hu.Receiver(copied)
    with pytest.raises(hu.UsageError, match="no position yet, and the change leads from sync 3 to 4"):
        receiver.apply(changes[-1])
    receiver.apply(Change.from_bytes(sync.full().to_bytes()), verify=True)
    assert receiver.position == sync.position
    x["w2"][0] = 9
    receiver.apply(sync.take())
    assert all(torch.equal(copied[n], v) for n, v in x.items())
    with pytest.raises(hu.UsageError, match="position= is what"):
        hu.Receiver(copied, position="17")


def test_positions_are_of_one_run() -> None:
    """The same values by the same changes: the same positions. Others, or an empty change more: not."""
    (_, a, first, _), (x, b, second, _) = chain(4), chain(4)
    assert [c.target for c in first] == [c.target for c in second]
    receiver = hu.Receiver(zeros(), position=b.position)
    other = hu.Sync(x)
    for _ in range(4):
        other.take()
    x["w0"][0] = 5
    with pytest.raises(hu.UsageError, match="of another Sync"):
        receiver.apply(other.take())
    empty = a.take()
    assert (empty.parts, empty.base) == ({}, first[-1].target)
    assert empty.target not in (empty.base, b.position)


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_apply_that_fails_half_way_changes_nothing(
    error: type[BaseException], at: int, full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the write had happened or not when it failed."""
    x, sync, _, began = chain(0)
    for value in x.values():
        value[3] = 1
    change = sync.take()
    copied = {n: torch.full_like(v, 7) for n, v in x.items()}
    receiver = hu.Receiver(copied, position=sync.position if full else began)
    put, calls = receiving._put, []

    def failing(bits: torch.Tensor, where: object, values: torch.Tensor) -> None:
        calls.append(where)
        if len(calls) != at + 1:
            put(bits, where, values)
            return
        put(bits, where, values) if at % 2 else None
        raise error("in the middle")

    monkeypatch.setattr(receiving, "_put", failing)
    place = receiver.position
    with pytest.raises(error, match="in the middle"):
        receiver.apply(sync.full() if full else change)
    assert receiver.position == place
    assert all(bool((v == 7).all()) for v in copied.values())
    assert len(calls) == 2 * (at + 1)


def test_positions_that_lie_are_refused() -> None:
    _, sync, (change,), _ = chain(1)
    for wrong in (
        replace(change, base="2:" + "0" * 64),
        replace(change, base=None),
        replace(change, target="1:" + "0" * 64),
        replace(change, target="x"),
        replace(change, target=None),
        replace(change, checksums={"w0": -1}),
        replace(sync.full(), base=change.base),
    ):
        with pytest.raises(hu.CorruptionError, match="expected"):
            Change.from_bytes(wrong.to_bytes())


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


def test_other_types_are_refused(tmp_path: Path) -> None:
    wrong: Any
    for wrong in (None, [torch.zeros(2)], np.zeros(2), {"w": np.zeros(2)}):
        with pytest.raises(hu.UsageError, match="tensors by name"):
            hu.Sync(wrong)
    with pytest.raises(hu.UsageError, match="on the meta device"):
        hu.Sync(torch.nn.Linear(2, 2, device="meta"))
    with pytest.raises(hu.UsageError, match="a function that applies a change, not NoneType"):
        hu.Receiver(None)  # type: ignore[arg-type]
    with pytest.raises(hu.UsageError, match="takes a change, not str"):
        hu.Receiver({"w": torch.zeros(2)}).apply("17.safetensors")  # type: ignore[arg-type]
    with pytest.raises(hu.UsageError, match="changes of all ranks, not NoneType"):
        join([None])  # type: ignore[list-item]  # the mistake
    for wrong in (None, "a\0b", ""):
        with pytest.raises(hu.UsageError, match="not the path of a change"):
            Change.load(wrong)
        with pytest.raises(hu.UsageError, match="not the path of a change"):
            hu.Sync(zeros()).full().save(wrong)


def test_the_parts_of_names_that_fp8_leaves() -> None:
    x = torch.randn(4, 4)
    for left in ("embed", ["embed"]):
        assert [BlockFp8(left=left).takes(name, x) for name in ("m.embed", "m.mlp")] == [False, True]
    wrong: Any
    for wrong in ({"block": 0}, {"block": -1}, {"block": 2.0}, {"left": 3}, {"left": ("",)}):
        with pytest.raises(hu.UsageError, match=next(iter(wrong))):
            BlockFp8(**wrong)


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
    for found in (change, Change.load(tmp_path / "change.safetensors"), sync.full()):
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
    with pytest.raises(TamperingError):
        Change.from_bytes(bytes(content))
    gaps = change.parts["a"]
    for wrong, said in (
        (replace(gaps, where=gaps.where[:2].clone()), "gaps that are not 3 places"),
        (replace(gaps, where=gaps.where | 128), "gaps that are not 3 places"),
        (replace(gaps, where=gaps.where + 98), "outside"),
        (replace(gaps, form="indices", where=gaps.indices), "gaps, mask or all"),
        (replace(gaps, form="all"), "3 of 100"),
        (replace(gaps, form="mask"), "another size"),
        (replace(gaps, form="mask", where=torch.zeros(13, dtype=torch.uint8)), "0 places"),
        (replace(gaps, bits=gaps.bits.long()), "for the bits"),
    ):
        with pytest.raises(hu.CorruptionError, match=said):
            Change.from_bytes(replace(change, parts={"a": wrong}).to_bytes())
    from safetensors.torch import save_file

    save_file({"x": torch.ones(1)}, tmp_path / "x.safetensors")
    with pytest.raises(hu.CorruptionError, match="not a change"):
        Change.load(tmp_path / "x.safetensors")


# ---- places -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("numel", [1, 7, 8, 1000, 2**21])
@pytest.mark.parametrize("share", [0.0, 1e-3, 0.05, 0.3, 1.0])
def test_places_survive_every_form(numel: int, share: float) -> None:
    at = np.flatnonzero(np.random.default_rng(0).random(numel) < share)
    form, where = places.smallest(at, numel)
    assert places.why_unfit(form, where, numel, at.size) is None
    assert places.from_gaps(places.to_gaps(at)).tolist() == at.tolist()  # type: ignore[union-attr]
    assert places.decoded(form, where, numel).tolist() == at.tolist()
    assert where.nbytes <= min((numel + 7) // 8, 4 * at.size) or (at.size, numel) == (0, 1)


def test_wide_gaps() -> None:
    at = np.array([0, 127, 128, 255, 2**14, 2**21 + 2**14, 2**31, 2**40, 2**57])
    assert places.from_gaps(places.to_gaps(at)).tolist() == at.tolist()  # type: ignore[union-attr]


@pytest.mark.parametrize("coded", [[128], [0, 255], [128] * 9 + [1], [255] * 8 + [127] + [0], [255] * 10])
def test_bytes_that_are_no_gaps(coded: list[int]) -> None:
    assert places.from_gaps(np.array(coded, dtype=np.uint8)) is None
