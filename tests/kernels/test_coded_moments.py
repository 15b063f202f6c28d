"""Moments in eight bits: the kernel is the definition bit for bit, and draws are right on average."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from halfulp.kernels import coded_moments as moments
from halfulp.kernels import native, onepass
from halfulp.numbers.grids import grid
from halfulp.numbers.streams import Stream

SIZES = (1, 63, 64, 65, 768, 768 * 3 + 130)
KINDS = {"first": torch.int8, "second": torch.uint8}


def coded(n: int, kind: str) -> moments.Coded:
    scales = torch.zeros(-(-n // moments.BLOCK), dtype=torch.float32)
    return moments.Coded(torch.zeros(n, dtype=KINDS[kind]), scales)


def values(n: int, kind: str, seed: int = 0) -> torch.Tensor:
    """Over many decades, with zeros of both signs, subnormals and some that are not finite."""
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal(n) * 10.0 ** rng.uniform(-12, 2, n)).astype(np.float32)
    odd = [0.0, -0.0, 1e-40, -1e-45, 3e38] + ([np.nan, np.inf, -np.inf] if seed % 3 == 2 else [])
    x[rng.integers(0, n, n // 8)] = rng.choice(np.array(odd, np.float32), n // 8)
    if seed % 4 == 1:
        x[: n // 2] = 0
    return torch.from_numpy(np.abs(x) if kind == "second" else x)


def encoded(x: torch.Tensor, kind: str, step: int = 0, offset: int = 0) -> moments.Coded:
    out = coded(x.numel(), kind)
    moments.encode(x, out, Stream(seed=0, name="w", step=step, bits=16).key, offset)
    return out


def decoded(x: moments.Coded) -> torch.Tensor:
    out = torch.empty(x.codes.numel())
    moments.decode(x, out)
    return out


@pytest.mark.parametrize(("n", "kind"), [*product(SIZES, KINDS)])
def test_the_kernel_is_the_definition(n: int, kind: str) -> None:
    assert native.library() is not None
    for seed in range(12):
        offset = 64 * seed + (seed % 3) * 37
        x = values(n, kind, seed)
        fast = encoded(x, kind, seed, offset)
        digits = Stream(seed=0, name="w", step=seed, bits=16, offset=offset).words(n)
        codes, scales = moments.encoded(x.numpy(), digits, second=kind == "second")
        np.testing.assert_array_equal(fast.codes.numpy(), codes)
        np.testing.assert_array_equal(fast.scales.numpy().view(np.int32), scales.view(np.int32))
        there = moments.decoded(codes, scales)
        np.testing.assert_array_equal(decoded(fast).numpy().view(np.int32), there.view(np.int32))


@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_is_the_definition_at_every_code(kind: str) -> None:
    """Values of codes and their neighbours, where a root is rounded to the next code."""
    second = kind == "second"
    every = moments.power(np.arange(256 if second else 128), second)
    near = (every.view(np.int32)[:, None] + np.arange(-8, 9)).clip(0).view(np.float32).reshape(-1)
    blocks = np.resize(np.minimum(near, every[-1]), (-(-near.size // 63), 63))
    x = np.column_stack([blocks, np.full(len(blocks), every[-1])]).reshape(-1)
    for step in range(200):
        fast = encoded(torch.from_numpy(x), kind, step)
        digits = Stream(seed=0, name="w", step=step, bits=16).words(x.size)
        codes, _ = moments.encoded(x, digits, second=second)
        np.testing.assert_array_equal(fast.codes.numpy(), codes)


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_library(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = values(130, kind, 3)
    fast = encoded(x, kind)
    there = decoded(fast)
    monkeypatch.setattr(native, "library", lambda: None)
    slow = encoded(x, kind)
    assert torch.equal(fast.codes, slow.codes)
    assert torch.equal(fast.scales, slow.scales)
    assert torch.equal(there, decoded(slow))


@pytest.mark.parametrize("kind", KINDS)
def test_codes_are_kept(kind: str) -> None:
    """Every code that stands beside its block's largest is itself again: what nothing moves stays."""
    least, most = (0, 255) if kind == "second" else (-127, 127)
    every = np.arange(least, most + 1)
    codes = np.stack([np.append(np.roll(every, k)[:63], most) for k in range(0, every.size, 7)])
    for scale in (1e-30, 0.37, 1e30):
        was = moments.Coded(
            torch.from_numpy(codes.astype(np.uint8 if kind == "second" else np.int8).reshape(-1)),
            torch.full((len(codes),), scale, dtype=torch.float32),
        )
        back = encoded(decoded(was), kind, step=5)
        assert torch.equal(back.scales, was.scales)
        off = (back.codes.int() - was.codes.int()).abs()
        assert int(off.max()) <= 1
        assert float((off != 0).float().mean()) < 2e-3  # quotients that are rounded, where a draw is 0


@pytest.mark.parametrize("kind", KINDS)
def test_draws_are_right_on_average(kind: str) -> None:
    """The mean of many codings is within four standard errors of the value, for every value of a block."""
    n, times = 64, 4000
    x = torch.from_numpy(np.geomspace(1e-3, 1, n).astype(np.float32))
    x = x * torch.tensor([1.0, -1.0] * 32) if kind == "first" else x
    made = torch.stack([decoded(encoded(x, kind, step)) for step in range(times)]).double()
    error = (made.mean(dim=0) - x.double()).abs()
    assert torch.all(error <= 4.5 * made.std(dim=0) / times**0.5 + 1e-6 * x.abs())


def test_no_second_moment_becomes_zero() -> None:
    """Rounded to zero it would be divided by: it has the smallest code at least, and zeros stay zeros."""
    x = torch.full((64,), 1e-25)
    x[0], x[1] = 1.0, 0.0
    for step in range(20):
        codes = encoded(x, "second", step).codes
        assert codes[0] == 255
        assert codes[1] == 0
        assert bool((codes[2:] == 1).all())


def test_what_is_not_finite_is_its_blocks() -> None:
    x = torch.ones(192)
    x[70] = float("nan")
    there: Any = decoded(encoded(x, "first"))
    assert bool(there[64:128].isnan().all())
    assert torch.equal(there[:64], x[:64])
    assert torch.equal(there[128:], x[128:])


@pytest.mark.parametrize("rule", [onepass.ADAMW, onepass.SGD, onepass.LION])
def test_a_step_is_the_reference(rule: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every block of a tensor whose last tile and block are short, and where a scale is not finite."""
    rng = np.random.default_rng(rule)
    n, both = 768 + 64 + 50, rule == onepass.ADAMW
    blocks = -(-n // moments.BLOCK)

    def stepped(odd: float) -> list[torch.Tensor]:
        numbers = np.random.default_rng(7)
        q, g = (torch.from_numpy(numbers.standard_normal(n).astype(np.float32)) for _ in range(2))
        raw = [torch.from_numpy(np.frombuffer(numbers.bytes(n), np.uint8).copy()) for _ in range(2)]
        scales = [torch.from_numpy(10.0 ** numbers.uniform(-9, 0, blocks)).float() for _ in range(2)]
        scales[0][[3, -1]] = torch.tensor([float("nan"), odd])
        first, second = raw[0].view(torch.int8).clamp(min=-127), raw[1] if both else None
        policy = onepass.Policy(
            mode=1, stream=Stream(seed=1, name="w", bits=16), drawing=Stream(seed=1, name="m", bits=16)
        )
        settings = onepass.Settings(lr=1e-3, weight_decay=0.1, rule=rule, t=4)
        case, job = onepass.prepared(
            q.bfloat16(), g, first, second, grid("bf16").within(torch.float32), settings, policy
        )
        used = tuple(scales if both else scales[:1])
        counted = onepass.steps(case, [replace(job, scales=used)])[0]
        codes = [t for t in (job.first, second) if t is not None]
        return [job.stored.float(), *codes, *used, *counted]

    for odd in (float("nan"), float("inf"), 0.0, 1e-30, float(rng.random())):
        fast = stepped(odd)
        with monkeypatch.context() as patch:
            patch.setattr(native, "library", lambda: None)
            slow = stepped(odd)
        for a, b in zip(fast, slow, strict=True):
            assert torch.equal(a.nan_to_num(nan=-3e38), b.nan_to_num(nan=-3e38))
