"""One pass: the fast step equals the reference, torch's fused step and the two-pass write-back, bit for
bit."""

from __future__ import annotations

import logging
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import halfulp as hu
from halfulp import kernels
from halfulp.kernels import native, onepass, onepass_reference, reference
from halfulp.kernels.plan import plan_for
from halfulp.kernels.reference import DEADZONE, NEAREST, STOCHASTIC
from halfulp.numbers.streams import Stream
from halfulp.writeback import WriteBackOptions, two_passes
from halfulp.writeback.fused import chunked
from halfulp.writeback.fused import step as moving
from halfulp.writeback.rules.lion import Lion as PlainLion
from halfulp.writeback.storage.packed import pack_bits, unpack_bits

real = np.float32
SIZE = 768 * 2 + 101


def patterns(x: Any) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(x).view(np.int16).copy()).view(torch.bfloat16)


def flat(x: torch.Tensor) -> Any:
    return x.view(torch.int16).numpy().view(np.uint16) if x.dtype == torch.bfloat16 else x.numpy()


class Case:
    """One tensor, stepped by the reference and by the kernel side by side."""

    def __init__(
        self, grid: str, storage: str, mode: int, keeps: int = onepass.NOTHING, **options: Any
    ) -> None:
        self.rng = np.random.default_rng(0)
        self.grid = plan_for(hu.grid(grid), torch.float32).grid
        self.mode, self.keeps, self.options = mode, keeps, options
        self.n, self.offset = options.get("n", SIZE), options.get("offset", 0)
        self.q = reference.round((self.rng.standard_normal(self.n) * 0.02).astype(real), self.grid)
        kind = options.get("moments", np.float32)
        self.m, self.v = np.zeros(self.n, kind), np.zeros(self.n, kind)
        if options.get("rule", onepass.ADAMW) >= onepass.SGD:
            self.v = None
        if options.get("rule") == onepass.PLAIN:
            self.m = None
        self.kept = None
        if keeps == onepass.MASTER:
            self.kept = self.q.copy()
        elif keeps in (onepass.CARRY, onepass.REMAINDER):
            self.kept = np.zeros(self.n, options.get("kept", real))
        self.moved = np.zeros((self.n + 7) // 8, np.uint8)
        self.fast = self._copies(storage)

    def _copies(self, storage: str) -> dict[str, Any]:
        stored = torch.from_numpy(self.q.copy())
        if storage == "bfloat16":
            stored = stored.bfloat16()
        elif storage in ("codes", "packed"):
            stored = kernels.encode(stored, self.grid)
            stored = pack_bits(stored, self.grid.bits) if storage == "packed" else stored
        made = {"m": self.m, "v": self.v, "kept": self.kept, "moved": self.moved}
        copies = {
            k: None if x is None else patterns(x) if x.dtype == np.uint16 else torch.from_numpy(x.copy())
            for k, x in made.items()
        }
        return {"stored": stored, **copies}

    def gradient(self, evil: bool) -> Any:
        g = (self.rng.standard_normal(self.n) * 1e-3).astype(real)
        if evil:
            for value, count in ((np.nan, 5), (np.inf, 3), (3e25, 3), (0, 30)):
                g[self.rng.integers(0, self.n, count)] = value
        return g

    def step(self, t: int, evil: bool = False) -> None:
        g = torch.from_numpy(self.gradient(evil))
        if self.options.get("narrow"):
            g = g.bfloat16()
        betas = (self.options.get("beta", 0.9), 0.999)
        s = onepass.Settings(
            lr=6e-4, betas=betas, weight_decay=0.1, rule=self.options.get("rule", onepass.ADAMW), t=t,
            dampening=self.options.get("dampening", 0.0), torchs_root=self.options.get("torchs_root", False),
        )  # fmt: skip
        bits = self.options.get("bits", 16)
        stream = Stream(seed=3, name="w", step=t, offset=self.offset, bits=bits)
        drawing = None
        if self.m is not None and self.m.dtype == np.uint16:
            drawing = Stream(seed=3, name="moments", step=t, offset=self.offset, bits=16)
        plain = (
            self.n if s.torchs_root else self.n - self.n % 8
        )  # of torch's own, only fused steps have an end
        policy = onepass.Policy(self.mode, self.keeps, self.kept, stream, drawing)
        self.q, self.m, self.v, found = onepass_reference.step(
            self.q, g.float().numpy(), self.m, self.v, self.grid, s, policy, plain=plain, moved=self.moved
        )
        f = self.fast
        policy = policy._replace(kept=f["kept"], stream=stream if self.mode != NEAREST else None)
        counts, sums = onepass.step(
            f["stored"], g, f["m"], f["v"], self.grid, s, policy, plain=plain, moved=f["moved"], sums=1
        )
        values = f["stored"]
        if values.numel() < self.n:
            assert int(values[-1]) < 2 ** (self.n * self.grid.bits % 8 or 8)  # behind the last code, zeros
            values = unpack_bits(values, self.grid.bits, self.n)
        values = kernels.decode(values, self.grid) if values.dtype == torch.uint8 else values.float()
        for name, a, b in (
            ("weights", self.q, values.numpy()), ("first", self.m, None if f["m"] is None else flat(f["m"])),
            ("second", self.v, None if f["v"] is None else flat(f["v"])),
            ("kept", self.kept, None if f["kept"] is None else flat(f["kept"])),
            ("moved", self.moved, f["moved"].numpy()), ("counts", found["counts"], counts.numpy()),
            ("sums", found["sums"], sums.numpy()),
        ):  # fmt: skip
            if a is not None:
                np.testing.assert_array_equal(a, b, err_msg=f"{name} at step {t}")


CASES: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "bf16 sr, bf16 moments": (("bf16", "bfloat16", STOCHASTIC), {"moments": np.uint16, "narrow": True}),
    "bf16 sr, bf16 moments, a shard": (
        ("bf16", "bfloat16", STOCHASTIC), {"moments": np.uint16, "narrow": True, "offset": 37},
    ),
    "bf16 sr, draws of 32": (("bf16", "float32", STOCHASTIC), {"bits": 32}),
    "bf16 sr, draws of 32, a shard": (("bf16", "float32", STOCHASTIC), {"bits": 32, "offset": 37}),
    "bf16 rne": (("bf16", "bfloat16", NEAREST), {}),
    "bf16 rne, beta1 below a half": (("bf16", "bfloat16", NEAREST), {"beta": 0.3}),
    "e4m3 sr codes, bf16 moments": (("e4m3@128", "codes", STOCHASTIC), {"moments": np.uint16}),
    "e5m2 sr codes, bf16 moments": (("e5m2", "codes", STOCHASTIC), {"moments": np.uint16}),
    "e2m1 sr, packed, many tiles": (
        ("e2m1@32", "packed", STOCHASTIC), {"moments": np.uint16, "n": 768 * 65 + 101, "offset": 37},
    ),
    "e3m2 sr, packed": (("e3m2@64", "packed", STOCHASTIC), {"moments": np.uint16}),
    "e4m3 deadzone": (("e4m3@128", "float32", DEADZONE), {"bits": 32}),
    "int4 codes": (("int4@64", "codes", NEAREST), {}),
    "int3, packed": (("int3@32", "packed", NEAREST), {}),
    "kahan": (("bf16", "float32", NEAREST, onepass.CARRY), {}),
    "kahan, bf16 carry": (("bf16", "bfloat16", NEAREST, onepass.CARRY), {"kept": np.uint16}),
    "eco on e4m3": (("e4m3@128", "float32", NEAREST, onepass.ERROR), {}),
    "master, Adam": (("bf16", "float32", NEAREST, onepass.MASTER), {"rule": onepass.ADAM}),
    "remainder16": (("bf16", "bfloat16", NEAREST, onepass.REMAINDER), {"kept": np.int16}),
    "remainder8": (("bf16", "bfloat16", STOCHASTIC, onepass.REMAINDER), {"kept": np.int8}),
    "SGD, sr, bf16 moment, a shard": (
        ("bf16", "bfloat16", STOCHASTIC),
        {"rule": onepass.SGD, "moments": np.uint16, "offset": 37, "dampening": 0.3},
    ),
    "SGD, eco on e4m3": (("e4m3@128", "float32", NEAREST, onepass.ERROR), {"rule": onepass.SGD}),
    "Nesterov, kahan": (("bf16", "float32", NEAREST, onepass.CARRY), {"rule": onepass.NESTEROV}),
    "SGD without momentum, a shard": (
        ("bf16", "bfloat16", STOCHASTIC), {"rule": onepass.PLAIN, "narrow": True, "offset": 37, "beta": 0.0},
    ),
    "SGD without momentum, packed": (
        ("int3@32", "packed", NEAREST), {"rule": onepass.PLAIN, "beta": 0.0},
    ),
    "torch's root": (("bf16", "float32", STOCHASTIC), {"torchs_root": True, "bits": 32}),
    "torch's root, Adam, kahan": (
        ("bf16", "bfloat16", NEAREST, onepass.CARRY),
        {"torchs_root": True, "rule": onepass.ADAM, "kept": np.uint16, "narrow": True, "beta": 0.3},
    ),
    "torch's root, remainder8": (
        ("bf16", "bfloat16", STOCHASTIC, onepass.REMAINDER), {"torchs_root": True, "kept": np.int8},
    ),
    "Lion, sr, bf16 moment": (
        ("bf16", "bfloat16", STOCHASTIC), {"rule": onepass.LION, "moments": np.uint16, "narrow": True},
    ),
    "Lion, remainder16": (
        ("bf16", "bfloat16", NEAREST, onepass.REMAINDER), {"rule": onepass.LION, "kept": np.int16},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_equals_the_reference(name: str) -> None:
    """Weights, moments, what is kept, counts and sums; with gradients that are not finite, too."""
    given, options = CASES[name]
    for evil in (False, True):
        case = Case(*given, **options)
        for t in range(1, 4):
            case.step(t, evil)


STEPS: dict[str, dict[str, bool]] = {"fused": {"fused": True}, "plain": {}, "foreach": {"foreach": True}}
"""Torch's own steps of one optimizer."""


@pytest.mark.parametrize("how", STEPS)
@pytest.mark.parametrize("adam", [False, True])
@pytest.mark.parametrize("size", [5, 31, 1000, 999])
def test_the_reference_equals_torchs_adam(size: int, adam: bool, how: str) -> None:
    """Ends of tensors included, over steps; on a torch whose arithmetic is known."""
    fused = how == "fused"
    width = onepass.torchs_end(onepass.ADAM if adam else onepass.ADAMW, fused=fused)
    if width is None:
        pytest.skip("this torch has another arithmetic; write-backs are made in two passes")
    made = torch.Generator().manual_seed(size)
    p = torch.nn.Parameter(torch.randn(size, generator=made) * 0.02)
    kind = torch.optim.Adam if adam else torch.optim.AdamW
    optimizer = kind([p], lr=6e-4, weight_decay=0.1, **STEPS[how])
    w, m, v = p.detach().numpy().copy(), np.zeros(size, real), np.zeros(size, real)
    for t in range(1, 12):
        p.grad = torch.randn(size, generator=made) * 1e-3
        optimizer.step()
        s = onepass.Settings(
            lr=6e-4,
            weight_decay=0.1,
            rule=onepass.ADAM if adam else onepass.ADAMW,
            t=t,
            torchs_root=not fused,
        )
        w, m, v = onepass_reference.moments(w, p.grad.numpy(), m, v, s, size - size % width)
        w = onepass_reference.proposed(w, m, v, s)
        state = optimizer.state[p]
        for mine, theirs in ((w, p.detach()), (m, state["exp_avg"]), (v, state["exp_avg_sq"])):
            np.testing.assert_array_equal(mine.view(np.int32), theirs.numpy().view(np.int32))


@pytest.mark.parametrize("how", STEPS)
@pytest.mark.parametrize("rule", [onepass.SGD, onepass.NESTEROV, onepass.PLAIN])
@pytest.mark.parametrize(("size", "decay", "dampening"), [(5, 0.1, 0.0), (1000, 0.0, 0.3), (999, 0.1, 0.3)])
def test_the_reference_equals_torchs_sgd(
    size: int, decay: float, dampening: float, rule: int, how: str
) -> None:
    """From the first step on, ends of tensors and zeros of either sign included."""
    nesterov, momentum = rule == onepass.NESTEROV, 0.0 if rule == onepass.PLAIN else 0.9
    width = onepass.torchs_end(rule, fused=how == "fused")
    if width is None:
        pytest.skip("this torch has another arithmetic; write-backs are made in two passes")
    dampening = 0.0 if nesterov else dampening  # torch has not both
    made = torch.Generator().manual_seed(size)
    p = torch.nn.Parameter(torch.randn(size, generator=made) * 0.02)
    optimizer = torch.optim.SGD(
        [p],
        lr=1e-2,
        momentum=momentum,
        dampening=dampening,
        weight_decay=decay,
        nesterov=nesterov,
        **STEPS[how],
    )
    w, m = p.detach().numpy().copy(), np.zeros(size, real)
    for t in range(1, 12):
        p.grad = torch.randn(size, generator=made) * 1e-2
        p.grad[:3] = torch.tensor([-0.0, 0.0, -0.0])
        grad = p.grad.numpy().copy()  # foreach Nesterov writes over it
        optimizer.step()
        s = onepass.Settings(
            lr=1e-2, betas=(momentum, 0.0), weight_decay=decay, rule=rule, t=t, dampening=dampening
        )
        w, m = onepass_reference.one_moment(w, grad, m, s, size - size % width)
        for mine, theirs in (
            (w, p.detach()),
            (m, optimizer.state[p].get("momentum_buffer", torch.zeros(size))),
        ):
            np.testing.assert_array_equal(mine.view(np.int32), theirs.numpy().view(np.int32))


def test_an_fma_is_rounded_once() -> None:
    """Against rational arithmetic, near ties as well."""
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 2000)).astype(real)
    near = -(a.astype(np.float64) * b).astype(real)
    c = np.where(np.arange(2000) % 2 == 0, near, rng.standard_normal(2000).astype(real)).astype(real)
    made = onepass_reference.fma(a, b, c)
    for x, y, z, r in zip(a, b, c, made, strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        below, above = np.nextafter(r, real(-np.inf)), np.nextafter(r, real(np.inf))
        error = abs(Fraction(float(r)) - exact)
        assert error <= min(abs(Fraction(float(n)) - exact) for n in (below, above))


# ---- write-backs ------------------------------------------------------------------------------------


def model_of(dtype: torch.dtype) -> torch.nn.Sequential:
    torch.manual_seed(0)
    parts = [torch.nn.Linear(40, 50), torch.nn.LayerNorm(50), torch.nn.Linear(50, 33)]
    return torch.nn.Sequential(*parts).to(dtype)


def give_gradients(model: torch.nn.Module, step: int) -> None:
    made = torch.Generator().manual_seed(step)
    for p in model.parameters():
        p.grad = (torch.randn(p.shape, generator=made) * 1e-2).to(p.dtype)


def kept_of(opt: hu.WriteBack) -> list[dict[str, torch.Tensor]]:
    found = [dict(s.kept_tensors()) for s in opt.slots]
    return found + [dict(opt.optimizer.state[s.stepped]) for s in opt.slots]


def assert_same(a: Any, b: Any) -> None:
    for x, y in zip(a, b, strict=True):
        assert x.keys() == y.keys()
        for key in x:
            assert x[key].dtype == y[key].dtype, key
            assert torch.equal(x[key], y[key]), key


SOME = hu.TileMaster(
    {n: torch.arange(-(-p.numel() // 96)) % 3 != 1 for n, p in model_of(torch.float32).named_parameters()},
    tile=96,
)
WRITE_BACKS: dict[str, tuple[Any, str, str | None, torch.dtype]] = {
    "sr": ("sr", "bf16", None, torch.float32),
    "rne": ("rne", "bf16", None, torch.float32),
    "eco": ("eco", "e4m3@128", None, torch.float32),
    "kahan": ("kahan", "bf16", None, torch.float32),
    "master": ("master", "bf16", None, torch.float32),
    "some tiles": (SOME, "e4m3@128", None, torch.float32),
    "some tiles native": (SOME, "bf16", None, torch.bfloat16),
    "some tiles packed": (SOME, "e4m3@128", "packed", torch.float32),
    "deadzone-sr": ("deadzone-sr", "e4m3@128", None, torch.float32),
    "sr native": ("sr", "bf16", None, torch.bfloat16),
    "sr packed": ("sr", "e4m3@128", "packed", torch.float32),
    "sr packed, four bits": ("sr", "e2m1@32", "packed", torch.float32),
    "remainder16": ("remainder16", "bf16", None, torch.bfloat16),
    "remainder8": ("remainder8", "bf16", None, torch.bfloat16),
}


@pytest.mark.parametrize("name", WRITE_BACKS)
def test_one_pass_equals_two(name: str) -> None:
    """Weights, the optimizer's state, what policies keep, events."""

    def inner(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=True)

    both(inner, *WRITE_BACKS[name])


def sgd(model: torch.nn.Module, **options: Any) -> torch.optim.Optimizer:
    given = {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1, "fused": True, **options}
    return torch.optim.SGD(model.parameters(), **given)


def plain(model: torch.nn.Module, kind: Any = torch.optim.AdamW, **options: Any) -> torch.optim.Optimizer:
    return kind(model.parameters(), lr=1e-3, weight_decay=0.1, **options)


OTHER_RULES: dict[str, tuple[Any, ...]] = {
    "SGD, sr": (sgd, "sr", "bf16", None, torch.bfloat16),
    "SGD, eco": (sgd, "eco", "e4m3@128", None, torch.float32),
    "Nesterov, kahan": (lambda m: sgd(m, nesterov=True), "kahan", "bf16", None, torch.float32),
    "SGD, not fused": (lambda m: sgd(m, fused=False), "sr", "bf16", None, torch.bfloat16),
    "SGD, not fused, eco": (lambda m: sgd(m, fused=False), "eco", "e4m3@128", None, torch.float32),
    "SGD, foreach": (lambda m: sgd(m, fused=False, foreach=True), "kahan", "bf16", None, torch.float32),
    "SGD without momentum": (lambda m: sgd(m, momentum=0), "sr", "bf16", None, torch.bfloat16),
    "SGD without momentum, not fused": (
        lambda m: sgd(m, momentum=0, fused=False),
        "remainder8",
        "bf16",
        None,
        torch.bfloat16,
    ),
    "SGD without momentum, packed": (
        lambda m: sgd(m, momentum=0, fused=False),
        "sr",
        "e2m1@32",
        "packed",
        torch.float32,
    ),
    "AdamW, not fused": (plain, "sr", "bf16", None, torch.float32),
    "AdamW, not fused, native": (plain, "remainder16", "bf16", None, torch.bfloat16),
    "AdamW, not fused, packed": (plain, "sr", "e4m3@128", "packed", torch.float32),
    "AdamW, foreach": (lambda m: plain(m, foreach=True), "kahan", "bf16", None, torch.bfloat16),
    "Adam, not fused": (lambda m: plain(m, torch.optim.Adam), "master", "bf16", None, torch.float32),
    "Lion, sr": (lambda m: PlainLion(m.parameters(), weight_decay=0.1), "sr", "bf16", None, torch.bfloat16),
    "Lion, master": (lambda m: PlainLion(m.parameters()), "master", "bf16", None, torch.float32),
}


@pytest.mark.parametrize("name", OTHER_RULES)
def test_one_pass_equals_two_for_other_rules(name: str) -> None:
    both(*OTHER_RULES[name])


def blocks_of(dtype: torch.dtype) -> torch.nn.Sequential:
    """Matrices of several pieces each, of eight rows or of 24; their last ones are short."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(96, 33), torch.nn.Linear(32, 101)).to(dtype)


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=True)


BLOCKS: dict[str, tuple[Any, str, str, str | None]] = {
    "rne, packed": (adam, "rne", "mxfp4", "packed"),
    "sr": (adam, "sr", "mxfp8_e4m3", None),
    "sr, packed": (adam, "sr", "mxfp6_e2m3", "packed"),
    "deadzone-sr": (adam, "deadzone-sr", "mxfp6_e3m2", None),
    "eco, packed": (adam, "eco", "int4/g16", "packed"),
    "kahan": (adam, "kahan", "mxfp4", None),
    "master, packed": (adam, "master", "mxfp8_e5m2", "packed"),
    "AdamW, not fused, eco": (plain, "eco", "int8/row", None),
    "SGD, not fused": (lambda m: sgd(m, fused=False), "sr", "mxfp4", "packed"),
    "SGD without momentum": (lambda m: sgd(m, momentum=0), "sr", "int8/row", None),
    "a scale a row": (adam, "rne", "int8/row", None),
    "a fixed scale, not a power of two": (adam, "sr", "int4@50", "packed"),
    "SGD, eco": (sgd, "eco", "mxfp4", None),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_one_pass_equals_two_for_block_scales(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces of 768 weights, so that there are some; sums of every second tile."""
    monkeypatch.setattr(chunked, "CHUNK", 768)
    monkeypatch.setattr(chunked, "OFTEN", 1)
    for module in (two_passes, moving, chunked):
        monkeypatch.setattr(module, "sampling", lambda _: 2)
    inner, policy, grid, storage = BLOCKS[name]
    both(inner, policy, grid, storage, torch.float32, blocks_of, route="one pass in chunks")


@pytest.mark.parametrize("kind", [adam, plain, sgd])
@pytest.mark.parametrize("grid", ["mxfp4", "int8/row"])
@pytest.mark.parametrize("shape", [(), (0, 64), (0,), (4, 0)])
def test_scalars_and_empty_tensors_in_chunks(shape: tuple[int, ...], grid: str, kind: Any) -> None:
    """A trainable scalar, or a tensor without elements, among the others: as in two passes."""
    models = [torch.nn.ParameterDict({"w": torch.ones(4, 64), "odd": torch.ones(shape)}) for _ in range(2)]
    opts = [
        hu.WriteBack(kind(m), grid, "sr", params=["w", "odd"], model=m, options=WriteBackOptions(one_pass=o))
        for m, o in zip(models, (True, False), strict=True)
    ]
    for step in range(3):
        for model, opt in zip(models, opts, strict=True):
            give_gradients(model, step)
            opt.step()
        assert opts[0].events.rows == opts[1].events.rows
    assert {chosen.name for chosen in opts[0].routes.values()} == {"one pass in chunks"}
    assert_same([models[0].state_dict()], [models[1].state_dict()])
    assert_same(kept_of(opts[0]), kept_of(opts[1]))


@pytest.mark.parametrize("grid", ["mxfp4", "int8/row", "int4@50"])
@pytest.mark.parametrize(
    "shape", [(1000, 1000), (7, 768), (3, 5, 640), (101,), (4097, 641), (0, 32), (32, 0)]
)
def test_pieces_are_whole_rows_and_tiles(grid: str, shape: tuple[int, ...]) -> None:
    found = list(chunked.chunks(hu.grid(grid), shape))
    assert [p.start for p in found] == [0, *(p.stop for p in found)][: len(found)]
    assert (found[-1].stop if found else 0) == math.prod(shape)
    assert all(p.start % 768 == 0 for p in found)
    scaling = hu.grid(grid).scaling
    if scaling is not None and scaling.per != "tensor":
        assert all(p.start % max(shape[-1], 1) == 0 for p in found)
        assert (found[-1].scales.stop if found else 0) == scaling.segments(shape)


def both(
    inner: Any,
    policy: str,
    grid: str,
    storage: Any,
    dtype: torch.dtype,
    model_of: Any = model_of,
    route: str = "one pass",
) -> None:
    """Twenty-four steps in one pass and in two, the first resumed in the middle."""

    def write_back(model: torch.nn.Module, once: bool) -> hu.WriteBack:
        return hu.WriteBack(
            inner(model), grid, policy, model=model, storage=storage, options=WriteBackOptions(one_pass=once)
        )

    models = [model_of(dtype), model_of(dtype)]
    one, two = write_back(models[0], True), write_back(models[1], False)
    for step in range(24):
        if step == 10:
            weights, state = models[0].state_dict(), one.state_dict()
            models[0] = model_of(dtype)
            models[0].load_state_dict(weights)
            one = write_back(models[0], True)
            one.load_state_dict(state)
        for model, opt in ((models[0], one), (models[1], two)):
            give_gradients(model, step)
            opt.step()
        assert {chosen.name for chosen in one.routes.values()} == {route}
        assert one.events.rows == two.events.rows
    assert_same([models[0].state_dict()], [models[1].state_dict()])
    assert_same(kept_of(one), kept_of(two))


def test_what_cannot_be_one_pass_says_why(caplog: pytest.LogCaptureFixture) -> None:
    """The step is made all the same, in two passes, and the log says so once."""

    class Mine(torch.optim.AdamW):
        pass

    def reason(
        made: Any, grid: str = "bf16", policy: str = "rne", group: Any = None, **options: Any
    ) -> str | None:
        model = model_of(torch.float32)
        params = [{"params": list(model.parameters()), **(group or {})}]
        opt = hu.WriteBack(made(params, lr=1e-3, **options), grid, policy, model=model)
        give_gradients(model, 0)
        return next((r.reason for r in opt.routes.values() if not r.one_pass), None)

    assert "not torch's" in str(reason(Mine, fused=True))
    assert "not torch's" in str(reason(torch.optim.Adagrad))
    assert "arithmetic of fused=True" in str(reason(torch.optim.AdamW, policy="eco"))
    assert "foreach=True" in str(reason(torch.optim.SGD, group={"fused": True, "foreach": True}))
    assert "amsgrad" in str(reason(torch.optim.AdamW, fused=True, amsgrad=True))
    assert "maximize" in str(reason(torch.optim.AdamW, fused=True, maximize=True))
    for grid in ("int4", "nvfp4"):
        assert "whole tensor's maximum" in str(reason(torch.optim.AdamW, grid, fused=True))
    assert "plain finite" in str(reason(torch.optim.AdamW, fused=True, eps=math.inf))
    model = model_of(torch.float32)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    inner.register_step_pre_hook(lambda *_: None)
    opt = hu.WriteBack(inner, "bf16", "rne", model=model)
    with caplog.at_level(logging.WARNING, logger="halfulp"):
        for step in range(2):
            give_gradients(model, step)
            opt.step()
    told = [r.getMessage() for r in caplog.records if "two passes" in r.getMessage()]
    assert len(told) == 1
    assert "step hooks" in told[0]


@pytest.mark.parametrize("kind", ["WriteBack", "AdamW"])
def test_hooks_of_all_optimizers_see_the_step(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """``halfulp audit`` has such; the step is one pass all the same."""

    def weights(audited: bool) -> list[torch.Tensor]:
        model = model_of(torch.bfloat16)
        if kind == "AdamW":
            opt: hu.WriteBack = adamw(model, grid="bf16", policy="sr")
        else:
            opt = hu.WriteBack(torch.optim.AdamW(model.parameters(), fused=True), "bf16", "sr", model=model)
        audit = hu.Audit(None, ["bf16"], model=model)
        if audited:
            audit.start()
        for step in range(3):
            give_gradients(model, step)
            opt.step()
        if audited:
            audit.stop()
            assert audit.latest["step"] == 3
            lost = sum(row.frozen for row in opt.events.rows) / sum(p.numel() for p in model.parameters())
            assert audit.latest["frozen"]["bf16"] == lost
        return [p.detach() for p in model.parameters()]

    with caplog.at_level(logging.WARNING, logger="halfulp"):
        for plain, found in zip(weights(False), weights(True), strict=True):
            assert torch.equal(plain, found)
    assert not any("two passes" in r.getMessage() for r in caplog.records)


def test_an_audit_does_not_see_steps_in_the_backward(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says so, and the training goes on."""
    model = torch.nn.Linear(16, 16).bfloat16()
    opt = hu.AdamW(model.named_parameters(), lr=1e-3)
    opt.in_backward()
    with hu.Audit(opt, ["bf16"], model=model, out=tmp_path / "run") as audit:
        for _ in range(3):
            model(torch.ones(2, 16).bfloat16()).sum().backward()
            opt.step()
    assert opt.steps == 3
    assert audit.trouble is not None
    assert "given up after step 0: weights move inside the backward" in audit.trouble
    assert capsys.readouterr().err.count("inside the backward") == 1


@pytest.mark.parametrize("what", ["the loop", "the step"])
@pytest.mark.parametrize("kind", ["WriteBack", "AdamW"])
def test_compiled_callers(kind: str, what: str) -> None:
    """torch.compile looks into what is called; steps in one pass are left as they are."""

    def weights(compiled: bool) -> list[torch.Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Linear(32, 16))
        if kind == "AdamW":
            opt: hu.WriteBack = hu.AdamW(model.named_parameters(), lr=1e-3, grid="bf16", policy="rne")
        else:
            inner = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
            opt = hu.WriteBack(inner, "bf16", "rne", model=model)
        step: Any = opt.step

        def loop(x: torch.Tensor) -> None:
            opt.zero_grad()
            (model(x) - x).square().mean().backward()
            step()

        train: Any = loop
        if compiled and what == "the loop":
            train = torch.compile(loop, backend="eager")
        elif compiled:
            step = torch.compile(opt.step, backend="eager")
        made = torch.Generator().manual_seed(1)
        for _ in range(4):
            train(torch.randn(8, 16, generator=made))
        return [p.detach() for p in model.parameters()]

    for plain, found in zip(weights(False), weights(True), strict=True):
        assert torch.equal(plain, found)


# ---- AdamW ------------------------------------------------------------------------------------------


def adamw(model: torch.nn.Module, **options: Any) -> hu.AdamW:
    return hu.AdamW(model.named_parameters(), lr=1e-3, weight_decay=0.1, moments="bf16", **options)


def test_a_resumed_adamw_goes_on_bit_for_bit() -> None:
    models = [model_of(torch.bfloat16), model_of(torch.bfloat16)]
    opts = [adamw(m) for m in models]
    for step in range(6):
        if step == 3:
            weights, state = models[1].state_dict(), opts[1].state_dict()
            models[1] = model_of(torch.bfloat16)
            models[1].load_state_dict(weights)
            opts[1] = adamw(models[1])
            opts[1].load_state_dict(state)
        for model, opt in zip(models, opts, strict=True):
            give_gradients(model, step)
            opt.step()
    assert_same([models[0].state_dict()], [models[1].state_dict()])
    assert_same(kept_of(opts[0]), kept_of(opts[1]))
    assert {x.dtype for s in kept_of(opts[0])[len(opts[0].slots) :] for k, x in s.items() if k != "step"} == {
        torch.bfloat16
    }


def test_steps_inside_the_backward_are_those_of_step() -> None:
    """And no gradient is left."""
    x = torch.randn(8, 40, generator=torch.Generator().manual_seed(5)).bfloat16()
    models = [model_of(torch.bfloat16), model_of(torch.bfloat16)]
    opts = [adamw(m) for m in models]
    opts[1].in_backward()
    for _ in range(3):
        for model, opt in zip(models, opts, strict=True):
            opt.zero_grad()
            model(x).square().mean().backward()
            if opt is opts[1]:
                assert all(p.grad is None for p in model.parameters())
            opt.step()
        assert opts[0].events.rows
        assert len(opts[0].events.rows) == len(opts[1].events.rows)
    assert_same([models[0].state_dict()], [models[1].state_dict()])
    model, opt = models[1], opts[1]
    model(x).square().mean().backward()
    with pytest.raises(hu.UsageError, match="second gradient"):
        model(x).square().mean().backward()


def test_shards_of_a_tensor_give_the_whole() -> None:
    """Cut anywhere, streams of weights and moments included."""
    n, cut = 768 * 2 + 101, 701
    made = torch.Generator().manual_seed(0)
    whole = [
        (torch.randn(n, generator=made) * 0.02).bfloat16(),
        *(torch.zeros(n).bfloat16() for _ in range(2)),
    ]
    parts = [[x[:cut].clone(), x[cut:].clone()] for x in whole]
    grid = plan_for(hu.grid("bf16"), torch.float32).grid
    for t in range(1, 4):
        g = (torch.randn(n, generator=made) * 1e-3).bfloat16()
        s = onepass.Settings(lr=1e-3, weight_decay=0.1, t=t)

        def step(x: list[torch.Tensor], g: torch.Tensor, offset: int, s: Any = s, t: int = t) -> None:
            streams = [Stream(seed=0, name=k, step=t, offset=offset, bits=16) for k in "wm"]
            onepass.step(
                x[0],
                g,
                x[1],
                x[2],
                grid,
                s,
                onepass.Policy(STOCHASTIC, stream=streams[0], drawing=streams[1]),
            )

        step(whole, g, 0)
        for i, (a, b) in enumerate(((0, cut), (cut, n))):
            step([p[i] for p in parts], g[a:b].clone(), a)
    for x, pair in zip(whole, parts, strict=True):
        assert torch.equal(x, torch.cat(list(pair)))


def test_defaults_are_torchs() -> None:
    """Who puts one in the place of torch's own gets the same run, weight decay included."""
    for ours, theirs in ((hu.AdamW, torch.optim.AdamW), (hu.Adam, torch.optim.Adam)):
        mine, plain = (
            make(torch.nn.Linear(4, 4).named_parameters()).param_groups[0] for make in (ours, theirs)
        )
        assert {key: mine[key] for key in ("lr", "betas", "eps", "weight_decay")} == {
            key: plain[key] for key in ("lr", "betas", "eps", "weight_decay")
        }


def test_a_bfloat16_model_has_its_norms_on_the_grid() -> None:
    """Gains of exactly 1 do not move under nearest at a small rate; under sr they do."""
    still, moving = {}, {}
    for policy, found in (("rne", still), ("sr", moving)):
        model = torch.nn.Sequential(torch.nn.LayerNorm(768)).bfloat16()
        opt = hu.AdamW(model.named_parameters(), lr=6e-4, grid="bf16", policy=policy, select=["0.weight"])
        for step in range(100):
            give_gradients(model, step)
            opt.step()
        found["moved"] = int((model[0].weight != 1).sum())
    assert still["moved"] == 0
    assert moving["moved"] > 500


def test_second_moments_in_bfloat16_need_draws() -> None:
    """Ten thousand steps at beta2 = .999: nearest stays far below the float32 moment, draws match it."""
    n, steps = 768, 10_000
    rng = np.random.default_rng(0)
    grid = plan_for(hu.grid("bf16"), torch.float32).grid
    w = (torch.randn(n, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    drawn = [w.clone(), torch.zeros(n).bfloat16(), torch.zeros(n).bfloat16()]
    wide, narrow = np.zeros(n, real), np.zeros(n, real)
    for t in range(1, steps + 1):
        g = rng.standard_normal(n).astype(real)
        wide = wide * real(0.999) + real(0.001) * g * g
        u = (narrow * real(0.999) + real(0.001) * g * g).view(np.uint32)
        narrow = ((u + 0x7FFF + ((u >> 16) & 1)) & np.uint32(0xFFFF0000)).view(real)
        streams = [Stream(seed=0, name=k, step=t, bits=16) for k in "wm"]
        onepass.step(
            drawn[0], torch.from_numpy(g), drawn[1], drawn[2], grid, onepass.Settings(lr=1e-5, t=t),
            onepass.Policy(STOCHASTIC, stream=streams[0], drawing=streams[1]),
        )  # fmt: skip
    exact = float(wide.mean())
    assert abs(float(drawn[2].float().mean()) - exact) < 0.02 * exact
    assert abs(float(narrow.mean()) - exact) > 0.15 * exact


# ---- remainders -------------------------------------------------------------------------------------


def test_remainders_keep_masters() -> None:
    """Every upper half with lower halves around its ends and middle: the master comes back exactly, the
    weight is
    the nearest, ties away from zero; nearest even differs where a tie lies above an even weight."""
    upper = np.arange(0x7F7F, dtype=np.uint32)
    for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        master = ((upper << 16) | np.uint32(low)).view(real)
        weight = onepass_reference.away(master)
        rest = (master.view(np.int32) - weight.view(np.int32)).astype(np.int16)
        assert np.array_equal(
            onepass_reference.composed(weight, rest).view(np.uint32), master.view(np.uint32)
        )
        even = reference.round(master, hu.grid("bf16"))
        differs = (weight != even) & np.isfinite(weight)
        expected = (upper % 2 == 0) if low == 0x8000 else np.zeros(upper.size, bool)
        assert np.array_equal(differs, expected & np.isfinite(weight))


def test_remainder16_has_the_masters_of_master() -> None:
    """The same gradients give the same masters, bit for bit; weights differ in ties only."""
    models = [model_of(torch.bfloat16), model_of(torch.bfloat16)]
    opts = [
        hu.WriteBack(torch.optim.AdamW(m.parameters(), lr=1e-3, fused=True), "bf16", p, model=m)
        for m, p in zip(models, ("remainder16", "master"), strict=True)
    ]
    for step in range(20):
        for model, opt in zip(models, opts, strict=True):
            give_gradients(model, step)
            opt.step()
    for a, b in zip(opts[0].slots, opts[1].slots, strict=True):
        q = a.p.detach().float().numpy()
        masters = onepass_reference.composed(q, a.state["remainder"].numpy())
        assert np.array_equal(masters, b.state["master"].numpy())
        tie = (masters.view(np.uint32) & 0xFFFF) == 0x8000
        assert np.array_equal((q != b.p.detach().float().numpy()) & ~tie, np.zeros_like(tie))


def test_remainder8_stays_within_its_bound() -> None:
    """One step is off by less than 2**-15 of the master, and right on average."""
    rng = np.random.default_rng(0)
    z = (rng.standard_normal(200_000) * 0.02).astype(real)
    kept = onepass_reference.kept_master(z, np.dtype(np.int8), Stream(seed=0, name="x", bits=16))
    error = (kept.astype(np.float64) - z) / np.abs(z)
    assert np.max(np.abs(error)) < 2.0**-15
    assert abs(error.mean()) < 4 * error.std() / math.sqrt(z.size)


# ---- torch's options --------------------------------------------------------------------------------

OPTIMIZERS = (hu.AdamW, hu.Adam, hu.SGD, hu.Lion)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_options_of_torchs_that_change_nothing(kind: Any) -> None:
    results = []
    for options in (
        {},
        {"fused": True, "capturable": False, "amsgrad": False},
        {"foreach": True, "maximize": False},
    ):
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 8).bfloat16()
        opt = kind(model.named_parameters(), lr=1e-2, **options)
        model(torch.ones(2, 8).bfloat16()).sum().backward()
        opt.step()
        results.append(model.weight.detach().clone())
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, True) for name in ("amsgrad", "maximize", "capturable", "differentiable", "fuse")),
        ("decoupled_weight_decay", True),
        ("one_pass", False),
    ],
)
def test_options_that_one_pass_has_not(kind: Any, name: str, value: bool) -> None:
    model = torch.nn.Linear(8, 8).bfloat16()
    with pytest.raises(
        hu.UsageError, match=rf"halfulp\.{kind.__name__} does not support {name}={value}; .*WriteBack\("
    ):
        kind(model.named_parameters(), **{name: value})


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("rate", [real(1e-2), np.float64(1e-2), torch.tensor(1e-2), 1])
def test_a_rate_is_any_number(kind: Any, rate: Any) -> None:
    """Given, and set in mid-run as schedulers do; the biases here are not on the grid."""
    results = []
    for given in (rate, float(rate)):
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 8)
        opt = kind(model.named_parameters(), lr=given)
        for step in range(2):
            give_gradients(model, step)
            opt.param_groups[0]["lr"] = given
            opt.step()
        results.append(model.state_dict())
    assert_same(results[:1], results[1:])


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("rate", ["1e-2", torch.ones(2), math.inf, None])
def test_a_rate_that_is_no_number(kind: Any, rate: Any) -> None:
    model = torch.nn.Linear(8, 8)
    with pytest.raises(hu.UsageError, match="lr must be a number, such as 1e-5"):
        kind(model.named_parameters(), lr=rate)
    opt = kind(model.named_parameters(), lr=1e-2)
    give_gradients(model, 0)
    opt.param_groups[0]["lr"] = rate
    with pytest.raises(hu.UsageError, match="not plain finite numbers"):
        opt.step()


def test_options_of_a_write_back() -> None:
    model = torch.nn.Linear(8, 8).bfloat16()
    options = WriteBackOptions(telemetry=False)
    assert hu.AdamW(model.named_parameters(), project="none", options=options).project == "none"


@pytest.mark.parametrize("moments", ["bfloat16", torch.bfloat16, "BF16"])
def test_moments_take_any_spelling_of_their_type(moments: Any) -> None:
    opt = hu.AdamW([torch.nn.Parameter(torch.ones(4, 4).bfloat16())], moments=moments)
    assert opt.moments == hu.AdamW([torch.nn.Parameter(torch.ones(4, 4).bfloat16())], moments="bf16").moments


GIVEN: dict[str, Any] = {
    "transposed": lambda g: g.t().contiguous().t(),
    "every second": lambda g: g.repeat_interleave(2, dim=1)[:, ::2],
    "one for all": lambda g: g[:1, :1].expand(g.shape),
    "subnormal and huge": lambda g: g * 2.0 ** torch.linspace(-149, 124, g.numel()).view(g.shape),
    "bfloat16": lambda g: g.bfloat16().float(),
}  # fmt: skip


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("kind", ["AdamW", "Adam", "SGD", "SGD without momentum"])
def test_steps_that_are_not_fused_are_torchs_own(kind: str, given: str) -> None:
    """Masters and moments, however gradients lie in memory, and large enough for several threads."""
    name, *rest = kind.split(maxsplit=1)
    options = {"momentum": 0.0 if rest else 0.9} if name == "SGD" else {}
    runs = []
    for one_pass in (True, False):
        made = torch.Generator().manual_seed(0)
        p = torch.nn.Parameter(torch.randn(301, 257, generator=made))
        inner = getattr(torch.optim, name)([("p", p)], lr=1e-2, weight_decay=0.1, **options)
        opt = hu.WriteBack(inner, "bf16", "master", options=WriteBackOptions(one_pass=one_pass))
        for _ in range(3):
            p.grad = GIVEN[given](torch.randn(p.shape, generator=made))
            opt.step()
        assert (opt.routes["p"].name == "one pass") is one_pass
        runs.append([{"p": p.detach(), **opt.slots[0].kept_tensors(), **inner.state[p]}])
    assert_same(*runs)


def test_where_torchs_root_is_not_known_steps_are_in_two_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another library's: only the fused step's arithmetic is the reference's then."""
    monkeypatch.setattr(native, "torchs_root", lambda: None)
    onepass.torchs_end.cache_clear()
    model = model_of(torch.float32)
    opt = hu.WriteBack(plain(model), "bf16", "rne", model=model)
    assert {route.reason for route in opt.routes.values()} == {
        "torch's step has another arithmetic on this machine"
    }
    assert onepass.torchs_end(onepass.ADAMW, fused=True) is not None
    onepass.torchs_end.cache_clear()


def test_torchs_root_is_told_from_the_rounded_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch without MKL rounds its roots, and needs no function of another library."""
    assert native.torchs_root() is not None
    monkeypatch.setattr(torch.Tensor, "sqrt", lambda x: torch.from_numpy(np.sqrt(x.numpy())))
    assert native.torchs_root.__wrapped__() == native.ROUNDED
    monkeypatch.setattr(torch.Tensor, "sqrt", lambda x: x**0.5 + 1)
    assert native.torchs_root.__wrapped__() is None
