"""Kernels on threads and in forks, and on more elements than 32 bits count."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from kernel_inputs import draw, quiet
from oracle import array, assert_same, tensor

import halfulp as hu
from halfulp import kernels
from halfulp.kernels import native, reference


def inputs(seed: int, n: int = 450_000) -> dict[str, Any]:
    """Tensors large enough to be split between two threads."""
    w, d, g = (tensor(x) for x in draw((n // 50, 50), torch.float32, seed=seed))
    codes = {name: kernels.round(torch.nan_to_num(w, 0, 1, -1), name) for name in MANY}
    return {"w": w, "d": d, "g": g, "codes": codes, "next": {name: q + d for name, q in codes.items()}}


MANY = ("e4m3", "bf16", "int8", "int8/row", "mxfp4")


def everything(x: dict[str, Any]) -> list[np.ndarray]:
    """What every kernel makes of such tensors. No operation of torch's own is needed."""
    stream, found, w = hu.Stream(seed=1, name="w"), [], x["w"]
    for name in MANY:
        q, z = x["codes"][name], x["next"][name]
        moved, out = np.zeros((w.numel() + 7) // 8, dtype=np.uint8), torch.empty(w.shape)
        written = kernels.write_back(
            q, z, name, "deadzone", stream, moved=torch.from_numpy(moved), sums=True, out=out
        )
        found += [written.out, written.counts, written.sums, torch.from_numpy(moved)]
        found += [kernels.round(w, name), kernels.round(w, name, stream), kernels.scales(w, name)]
        found += [kernels.score(w, x["g"], x["d"], name), kernels.encode(q, name)]
    audit = kernels.audit(w, x["d"], list(MANY))
    return [array(v) for v in (*found, audit.counts, audit.shared, audit.sums, audit.phase)]


def test_one_thread_or_two(threads: None) -> None:
    """The number of threads does not change a bit."""
    found = []
    for count in (1, 2):
        torch.set_num_threads(count)
        found.append(everything(inputs(seed=11)))
    for one, two in zip(*found, strict=True):
        assert_same(two, one)


def test_ranges_are_shared_out(threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every range is done once, whatever the number of threads: the sums say so."""
    codes = torch.zeros(100_000, dtype=torch.uint8).numpy()
    table, out = np.full(1, np.nan), np.empty(100_000)
    tiles = kernels.tiles_of(codes.size)
    bad = np.zeros(1, dtype=np.int64)
    call = native.call_of("decode", bytes=1, codes=codes, values=table, out=out, size=codes.size, bad=bad)
    for team in (native.ALONE, native.torchs_team()):
        monkeypatch.setattr(native, "torchs_team", lambda team=team: team)
        for count in (1, 2, 3, 7):
            torch.set_num_threads(count)
            bad[0] = 0
            native.run("decode", tiles, call, grain=1)
            assert bad[0] == codes.size


def test_two_python_threads(threads: None) -> None:
    """Two Python threads in the kernels at once, each of which uses two more, get what one alone gets."""
    torch.set_num_threads(2)
    work = [inputs(seed=12), inputs(seed=13)]
    alone = [everything(x) for x in work]
    with ThreadPoolExecutor(2) as pool:
        for _ in range(2):
            for results, expected in zip(pool.map(everything, work), alone, strict=True):
                for got, want in zip(results, expected, strict=True):
                    assert_same(got, want)


def test_plain_threads(threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch has no team, threads of our own do the work."""
    torch.set_num_threads(3)
    x = inputs(seed=14)
    expected = everything(x)
    monkeypatch.setattr(native, "_forked", True)
    for got, want in zip(everything(x), expected, strict=True):
        assert_same(got, want)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_forked_child(threads: None) -> None:
    """A child forked after the parent used its threads can use its own, and gets the same. (torch's own
    parallel operations may hang in such a child, so the kernels must not need any.)"""
    torch.set_num_threads(2)
    x = inputs(seed=14)
    expected = everything(x)
    child = os.fork()
    if child == 0:  # no pytest from here on: the exit code tells
        status = 1
        try:
            signal.alarm(60)
            for got, want in zip(everything(x), expected, strict=True):
                assert_same(got, want)
            status = 0
        finally:
            os._exit(status)
    for _ in range(600):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        time.sleep(0.1)
    else:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        pytest.fail("the forked child hung")
    assert os.waitstatus_to_exitcode(status) == 0


def test_indices_beyond_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels on the last three tiles of tensors of more than 2**31 elements. Elsewhere the tensors
    are zeros that nobody reads or writes, so the system never gives them memory."""
    calls = []

    def last_native(kernel: Any, count: int, call: Any, grain: int = 0) -> None:
        calls.append(kernel)
        whole(kernel, count, call, first=max(count - 3, 0))

    whole = native.run
    monkeypatch.setattr(native, "run", last_native)
    n = 2**31 + 1000
    first = (reference.tiles_of(n) - 3) * reference.TILE
    assert first < 2**31 < n
    w, d, g = draw((n - first,), torch.bfloat16, seed=15)
    q = np.where(np.isfinite(w), w, 0).astype(w.dtype)
    z = quiet(lambda: (q + d).astype(q.dtype))

    def tail_of(values: np.ndarray) -> torch.Tensor:
        flat = np.zeros(n, dtype=np.int16)
        flat[first:] = values.view(np.int16)
        return torch.from_numpy(flat).view(torch.bfloat16)

    big = {name: tail_of(x) for name, x in {"w": w, "d": d, "g": g, "q": q, "z": z}.items()}
    stream, grid = hu.Stream(seed=15, name="w"), hu.grid("e4m3")
    rounded = kernels.round(big["w"], grid, stream)
    expected = quiet(reference.round, w, grid, reference.STOCHASTIC, stream.at(first))
    assert_same(rounded[first:], expected, "round")

    moved = torch.from_numpy(np.zeros((n + 7) // 8, dtype=np.uint8))
    written = kernels.write_back(big["q"], big["z"], grid, "deadzone", stream, moved=moved, sums=True)
    bits = np.zeros((n - first + 7) // 8, dtype=np.uint8)
    r, facts = quiet(reference.write_back, q, z, grid, reference.DEADZONE, stream.at(first), moved=bits)
    assert_same(written.out[first:], r, "write_back")
    assert_same(written.counts[-3:], facts["counts"], "counts")
    assert_same(written.sums[-3:], facts["sums"], "sums")
    assert_same(moved[first // 8 :], bits, "moved")

    audited, audit = kernels.audit(big["w"], big["d"], [grid]), quiet(reference.audit, w, d, [grid])
    for name, want in audit.items():
        assert_same(getattr(audited, name)[-3:], want, name)
    score = kernels.score(big["w"], big["g"], big["d"], grid)
    assert_same(score[-3:], quiet(reference.score, w, g, d, grid), "score")
    assert len(calls) == 4  # none of them went over the whole tensors


@pytest.mark.large
def test_more_than_two_to_the_31_elements() -> None:
    """The public calls on more than 2**31 bfloat16 values (nine gigabytes in all): beginning, middle, end."""
    n = 2**31 + 10_000
    x = torch.zeros(n, dtype=torch.bfloat16)
    values, _, _ = draw((5000,), torch.bfloat16, seed=16, bad=False)
    starts = (0, 2**31 - 2500, n - 5000)
    for start in starts:
        x[start : start + 5000] = tensor(values)
    stream = hu.Stream(seed=16, name="x")
    expected = [kernels.round(x[s : s + 5000].clone(), "e4m3", stream.at(s)) for s in starts]
    q = x.clone()
    kernels.round(x, "e4m3", stream, out=x)
    for start, want in zip(starts, expected, strict=True):
        assert_same(x[start : start + 5000], want)
    moved = torch.zeros((n + 7) // 8, dtype=torch.uint8)
    written = kernels.write_back(q, x, "e4m3", moved=moved)
    frozen, never = (int(written.counts[:, c].sum(dtype=torch.int64)) for c in (0, 4))
    pieces = zip(q.split(2**26), x.split(2**26), strict=True)  # the sum of booleans makes a copy of int64s
    assert frozen == never == sum(int((a == b).sum()) for a, b in pieces)
    assert int(written.counts[:, 3].sum()) == 0
    audit = kernels.audit(q, x, ["e4m3"], after=True)
    assert int(audit.counts[:, 0, 4].sum(dtype=torch.int64)) > 2**31 - 20_000
