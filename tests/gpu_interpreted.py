"""Checks of the Triton kernels against the reference, in Triton's interpreter.

Triton decides when it is imported whether it compiles or interprets, so these checks have a process
of their own: test_gpu.py runs this file once with TRITON_INTERPRET=1 and reads one line of JSON a
check. Nothing here imports Triton before that.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from gpu_values import BF16, SCALED, SIZES, STATIC, STREAM, WIDE, near, same, tensor, values, within
from onepass_cases import patterns

from halfulp.kernels import onepass, onepass_reference, params, reference
from halfulp.kernels.plan import plan_for
from halfulp.kernels.reference import DEADZONE, NEAREST, STOCHASTIC, TILE, WRITE_SUMS
from halfulp.kernels.writing import Carry
from halfulp.numbers.grids import Grid, float_grid, grid
from halfulp.numbers.streams import Stream


def rounded(x: Any, g: Grid, mode: int, stream: Stream | None, scale: Any = None) -> None:
    from halfulp.kernels import gpu

    t = tensor(x)
    expected = reference.round(x, g, mode, stream, scale)
    same(gpu.round_(t, torch.empty_like(t), g, mode, stream, scale), expected, g.name, mode, x.dtype)


def check_round_float32() -> None:
    x = values(1000, np.float32, 1)
    for g in within(STATIC, np.float32):
        rounded(x, g, NEAREST, None)
        rounded(x, g, STOCHASTIC, STREAM)


def check_round_other_containers() -> None:
    for names, dtype in (
        (("bf16", "e5m2", "e4m3@128", "m3", "int4@16/asym"), BF16),
        (("fp16", "e5m2", "m3"), np.float16),
        (("e4m3", "m7", "fp32"), np.float64),
    ):
        x = values(769, dtype, 2, spread=10 if dtype == np.float16 else 24)
        for g in within(names, dtype):
            rounded(x, g, NEAREST, None)
            rounded(x, g, STOCHASTIC, STREAM)


def check_round_sizes_and_offsets() -> None:
    (g,) = within(("e4m3",), np.float32)
    for n in SIZES:
        rounded(values(n, np.float32, n), g, STOCHASTIC, STREAM)
    x = values(100, np.float32, 3)
    for offset in (5, 16, 2**33 + 32, 2**57 + 11):
        rounded(x, g, STOCHASTIC, STREAM.at(offset))


def check_round_strides() -> None:
    from halfulp.kernels import gpu

    (g,) = within(("e4m3",), np.float32)
    x = values((30, 40), np.float32, 4)
    out = torch.empty((40, 30)).t()
    assert gpu.round_(tensor(x.T).t(), out, g) is out
    same(out, reference.round(x, g))
    t = tensor(x)
    same(gpu.round_(t, t, g), reference.round(x, g))


def check_round_scaled() -> None:
    for dtype, names in ((np.float32, SCALED), (BF16, ("nvfp4", "mxfp4")), (np.float64, ("int8/row",))):
        x = values((3, 300), dtype, 5, spread=6, odd=False)
        x[1, 3:5] = np.nan, -np.inf
        x[2, :200] = 0
        for g in within(names, dtype):
            rounded(x, g, NEAREST, None)
            rounded(x, g, STOCHASTIC, STREAM.at(32))
    assert params.params(WIDE, "float32").kind == params.SCALED
    rounded(values(900, np.float32, 6), WIDE, NEAREST, None)
    rounded(values(900, np.float32, 6), WIDE, STOCHASTIC, STREAM)


def check_round_at_the_top() -> None:
    """Where a scale that was rounded up would make the largest code infinite."""
    for dtype in (np.float32, BF16, np.float64):
        top = float(np.finfo(dtype).max) if dtype != BF16 else 255 * 2.0**120
        for share in (1.0, 0.995, 0.97, 0.92, 0.6):
            x = np.zeros((2, 48), dtype=dtype)
            x[0, ::5], x[1, ::7] = top * share, -top * share
            for g in within((*SCALED[:-1], "int2", "int4/asym"), dtype):
                rounded(x, g, NEAREST, None)
                rounded(x, g, STOCHASTIC, STREAM)


def check_round_given_scales() -> None:
    """Scales with all their bits: the quotient can land on a midpoint that the value is not on."""
    rng = np.random.default_rng(7)
    scale = rng.uniform(0.001, 1.0, 3)
    middle = (rng.integers(-64, 64, (3, 4000)) + 0.5) * scale[:, None]
    for dtype in (np.float32, np.float64):
        x = middle.astype(dtype)
        x = np.concatenate([x, np.nextafter(x, dtype(9e9)), np.nextafter(x, dtype(-9e9))], axis=1)
        side = np.abs(x) - np.abs(x / scale[:, None]) * scale[:, None]
        hidden = (np.abs(x / scale[:, None]) % 1 == 0.5) & (side != 0)
        x = np.concatenate([x[:, :50], np.where(hidden, x, 0)[:, hidden.any(axis=0)][:, :200]], axis=1)
        assert dtype == np.float32 or ((side[hidden] > 0).any() and (side[hidden] < 0).any())
        (g,) = within(("int8/row",), dtype)
        rounded(x, g, NEAREST, None, scale)


def check_scales() -> None:
    from halfulp.kernels import gpu

    for dtype in (np.float32, BF16, np.float64):
        for shape in ((5, 37), (2, 3, 64), (200,), (), (0, 4)):
            x = values(shape, dtype, 8, spread=8)
            for g in within((*SCALED, "int8/row", "int8/absmean"), dtype):
                with np.errstate(over="ignore"):
                    expected = reference.scales(np.asarray(x), g)
                same(gpu.scales(tensor(x), g), expected, g.name, dtype, shape)


def check_scales_from_a_sum() -> None:
    """A mean that rounds one way if added from left to right, and the other way if added exactly."""
    from halfulp.kernels import gpu

    (g,) = within(("int4/absmean",), np.float32)
    x = np.full(4096, 2.0**-31, np.float32)
    x[0] = 7 * (2**21 + 1)  # in the middle between two scales of 21 bits; the others vanish one by one
    (expected,), exact = reference.scales(x, g), float(np.sum(x.astype(np.float64)[::-1])) / 4096 / 7
    assert expected < exact
    same(gpu.scales(tensor(x), g), np.array([expected]))


def check_ties() -> None:
    """Fractions that begin with the very digits of U: the first word cannot decide."""
    from halfulp.kernels import gpu

    g = float_grid(mantissa=3, emin=3, largest=240.0)  # the quantum is 1: below it, the value is the fraction
    first, second = (STREAM.words(TILE, level).astype(np.float64) for level in (0, 1))
    tail = np.floor(second / 2**12) + np.arange(TILE) % 2  # twenty more digits: of U, and just above
    x = first / 2**32 + tail / 2**52
    expected = reference.round(x, g, STOCHASTIC, STREAM)
    assert expected[1::2].min() == 1.0, "just above U: up"
    assert expected[0::2].max() == 0.0, "not above U: down"
    same(gpu.round_(tensor(x), torch.empty(TILE, dtype=torch.float64), g, STOCHASTIC, STREAM), expected)

    # float32 has 24 digits, so only a small U leaves some for the second word.
    words = STREAM.words(40000)
    at = int(np.flatnonzero((words >> np.uint32(1) < 2**15) & (words > 2**10))[0])
    stream = STREAM.at(at // 32 * 32)
    u = words[at] / 2**32 + STREAM.words(40000, 1)[at] / 2**64
    below = np.float32(u)
    below = np.nextafter(below, np.float32(0)) if below > u else below
    for value, up in ((below, 0.0), (np.nextafter(below, np.float32(1)), 1.0)):
        assert int(float(value) * 2**31) == int(words[at]) >> 1
        y = np.zeros(32, np.float32)
        y[at % 32] = value
        expected = reference.round(y, g, STOCHASTIC, stream)
        assert expected[at % 32] == up
        same(gpu.round_(tensor(y), torch.empty(32), g, STOCHASTIC, stream), expected)
        moving, scale = replace(g, scaling=grid("int4@10").scaling), np.ones(1)
        expected = reference.round(y, moving, STOCHASTIC, stream, scale)
        assert expected[at % 32] == up
        same(gpu.round_(tensor(y), torch.empty(32), moving, STOCHASTIC, stream, scale), expected)


def audited(w: Any, d: Any, grids: list[Grid], after: bool = False, phase: bool = True) -> None:
    from halfulp.kernels import gpu

    proposal = d
    if after:
        with np.errstate(over="ignore", invalid="ignore"):
            work = np.float64 if w.dtype == np.float64 else np.float32
            proposal = d.astype(work) - w.astype(work)
    expected = reference.audit(w, proposal, grids, phase)
    found = gpu.audit(tensor(w), tensor(d), after, grids, phase)
    parts = ("counts", "shared", "sums", "phase", "expected", "arrived")
    for key, ours in zip(parts, found, strict=True):
        same(ours, expected[key], key, w.dtype, w.shape, [g.name for g in grids])


def check_audit_sizes() -> None:
    grids = within(("bf16", "e4m3@128", "int4@16/asym"), np.float32)
    for n in SIZES:
        audited(values(n, np.float32, 10), values(n, np.float32, 11, spread=40), grids)
    audited(values(50, np.float32, 10), values(50, np.float32, 11), [])


def check_audit_grids() -> None:
    w, d = values((3, 300), np.float32, 12), values((3, 300), np.float32, 13, spread=30)
    w[:, ::7] = d[:, ::11] = 0
    mixed = within((*STATIC[:5], *SCALED, *STATIC[5:]), np.float32)
    audited(w, d, [*mixed, WIDE])
    audited(w, d, mixed[4:7], phase=False)
    tame, small = (values((3, 300), np.float32, s, spread=4, odd=False) for s in (16, 17))
    audited(tame, small * np.float32(0.1), within(SCALED, np.float32))
    tiny = (np.arange(1, 401) * 1e-39).astype(np.float32)  # phases of subnormals
    audited(tiny, tiny * np.float32(2.0**-4.5), within(("m3",), np.float32))
    with np.errstate(over="ignore"):
        audited(w, w + d, mixed[3:8], after=True)


def check_audit_containers() -> None:
    for dtype, names in (
        (BF16, ("bf16", "e4m3", "m3", "mxfp4", "int3/dqt")),
        (np.float16, ("fp16", "e5m2", "int4/g128")),
        (np.float64, ("bf16", "m40", "int8")),
    ):
        w, d = (values((2, 400), dtype, s, spread=12) for s in (14, 15))
        audited(w, d, within(names, dtype))
        with np.errstate(over="ignore"):
            audited(w, (w + d).astype(dtype), within(names, dtype), after=True)


def check_never_moved() -> None:
    """Over several steps, on every kind of grid: the bits and counts of the reference."""
    from halfulp import kernels
    from halfulp.audit.meter import device_moved as following

    kernels.on_gpu = following.on_gpu = lambda _: True  # type: ignore[assignment]  # as if on a device
    for dtype, names, shape in (
        (np.float32, ("bf16", "e4m3@128", "int8", "int3/dqt", "mxfp4"), (3, 301)),
        (BF16, ("bf16", "e4m3"), (2, 5)),
        (np.float64, ("bf16",), (769,)),
    ):
        grids = within(names, dtype)
        size = int(np.prod(shape))
        bits = np.zeros((len(grids), (size + 7) // 8), dtype=np.uint8)
        ours = tensor(bits)
        for step in range(2):
            w, d = values(shape, dtype, 70 + step, spread=8), values(shape, dtype, 80 + step, spread=16)
            work = np.float64 if dtype == np.float64 else np.float32
            with np.errstate(over="ignore", invalid="ignore"):
                after = (w + d).astype(dtype)
                d = after.astype(work) - w.astype(work)
            expected = reference.audit(w, d, grids, moved=bits)
            found = following.audit(tensor(w), tensor(after), grids, moved=ours, stay=None)
            same(found.counts, expected["counts"], "counts", dtype, step)
            same(ours, bits, "moved", dtype, step)
    kernels.on_gpu = following.on_gpu = lambda x: x.device.type == "cuda"


def written(
    q: Any, z: Any, g: Grid, mode: int, *, mark: bool = True, carry: Any = None, into: str = ""
) -> None:
    from halfulp.kernels import gpu

    moved = np.random.default_rng(0).integers(0, 256, (q.size + 7) // 8, dtype=np.uint8) if mark else None
    ours = None if moved is None else tensor(moved)
    rest = None if carry is None else tensor(carry)
    tq, tz = tensor(q), tensor(z)
    out = {"": torch.empty_like(tz), "z": tz, "q": tq}[into]
    stream = STREAM.at(64)
    counts, sums = gpu.write_back(
        tq, tz, out, g, mode, stream, ours, carry=None if rest is None else Carry(rest)
    )
    extra = {} if carry is None else {"carry": carry}
    expected, events = reference.write_back(q, z, g, mode, stream, moved, **extra)
    where = g.name, mode, q.dtype, q.shape
    same(out, expected, *where)
    same(counts, events["counts"], "counts", *where)
    same(sums, events["sums"], "sums", *where)
    if ours is not None:
        same(ours, moved, "moved", *where)
    if rest is not None:
        same(rest, carry, "carry", *where)


def check_write_back() -> None:
    for dtype, names in (
        (np.float32, ("bf16", "e4m3", "int4@16/asym")),
        (BF16, ("bf16", "e4m3@128")),
        (np.float64, ("e4m3",)),
        (np.float16, ("e5m2",)),
    ):
        for g in within(names, dtype):
            q = reference.round(values(900, dtype, 20, spread=8, odd=False), g)
            for mode in (NEAREST, STOCHASTIC, DEADZONE):
                written(q, near(q, 21), g, mode, into={DEADZONE: "z", STOCHASTIC: "q"}.get(mode, ""))


def check_write_back_sizes() -> None:
    (g,) = within(("e4m3",), np.float32)
    for n in SIZES:
        q = reference.round(values(n, np.float32, 22, spread=8, odd=False), g)
        written(q, near(q, 23), g, DEADZONE)
    written(q, near(q, 24), g, NEAREST, mark=False)


def check_write_back_scaled() -> None:
    for dtype, names in (
        (np.float32, ("int8", "int3/dqt", "mxfp4", "nvfp4", "int4@10")),
        (BF16, ("int4/g128",)),
    ):
        for g in within(names, dtype):
            q = reference.round(values((2, 400), dtype, 25, spread=6, odd=False), g)
            written(q, near(q, 26), g, NEAREST)
            written(q, near(q, 27), g, DEADZONE, into="z")


def check_write_back_carry() -> None:
    for name in ("e4m3@128", "int4/g128"):
        (g,) = within((name,), np.float32)
        q = reference.round(values((2, 400), np.float32, 28, spread=6, odd=False), g)
        z = near(q, 30)
        carry = values((2, 400), np.float32, 29, spread=20, odd=False) * np.float32(1e-3)
        carry[0, 9], carry[1, 7:9], z[1, 7] = np.nan, 3e38, 3e38  # the sum is no number, or too large
        written(q, z, g, NEAREST, carry=carry)


def check_sums_not_wanted() -> None:
    from halfulp.kernels import gpu

    (g,) = within(("e4m3",), np.float32)
    q = tensor(values(100, np.float32, 31, odd=False))
    _, sums = gpu.write_back(q, q + 1, torch.empty_like(q), g, want_sums=False)
    same(sums, np.zeros((1, len(WRITE_SUMS))))


def check_score() -> None:
    from halfulp.kernels import gpu

    for dtype, names in (
        (np.float32, ("e4m3", "bf16", "int4/g128", "int3/dqt")),
        (BF16, ("e4m3@128", "mxfp4")),
    ):
        w, g_, u = (values((2, 500), dtype, s, spread=12) for s in (40, 41, 42))
        for after in (False, True):
            with np.errstate(over="ignore", invalid="ignore"):
                proposal = u.astype(np.float32) - w.astype(np.float32) if after else u
            for g in within(names, dtype):
                expected = reference.score(w, g_, proposal, g) + 0.0  # a sum of zeros may come as -0
                same(gpu.score(tensor(w), tensor(g_), tensor(u), after, g) + 0.0, expected, g.name, dtype)
    for dtype, name in (
        (np.float32, "e4m3"),
        (np.float32, "int4/g128"),
        (BF16, "e4m3"),
        (np.float64, "bf16"),
    ):
        (g,) = within((name,), dtype)
        w, g_, u = (values((3, 601), dtype, s, spread=12) for s in (46, 47, 48))
        for tile in (1, 5, 96, 100, 768, 1000, 1536):
            for after in (False, True):
                with np.errstate(over="ignore", invalid="ignore"):
                    work = np.float64 if dtype == np.float64 else np.float32
                    proposal = u.astype(work) - w.astype(work) if after else u
                    expected = reference.score(w, g_, proposal, g, tile) + 0.0
                    found = gpu.score(tensor(w), tensor(g_), tensor(u), after, g, tile) + 0.0
                same(found, expected, g.name, dtype, tile, after)
    (g,) = within(("e4m3",), np.float32)
    for n in (0, 1, 768):
        w, g_, u = (values(n, np.float32, s) for s in (43, 44, 45))
        same(
            gpu.score(tensor(w), tensor(g_), tensor(u), False, g) + 0.0, reference.score(w, g_, u, g) + 0.0, n
        )


STEPS: dict[str, tuple[str, str, int, int, dict[str, Any]]] = {
    "bf16, all drawn": ("bf16", "bfloat16", STOCHASTIC, onepass.NOTHING, {"moments": np.uint16}),
    "a shard": ("bf16", "bfloat16", STOCHASTIC, onepass.NOTHING, {"moments": np.uint16, "offset": 37}),
    "e4m3": ("e4m3@128", "float32", STOCHASTIC, onepass.NOTHING, {"offset": 64}),
    "dead zone": ("e4m3@128", "float32", DEADZONE, onepass.NOTHING, {}),
    "Adam, master": ("bf16", "float32", NEAREST, onepass.MASTER, {"rule": onepass.ADAM, "beta": 0.3}),
    "kahan": ("bf16", "bfloat16", NEAREST, onepass.CARRY, {"kept": np.uint16}),
    "eco": ("e4m3@128", "float32", NEAREST, onepass.ERROR, {}),
    "remainder16": ("bf16", "bfloat16", NEAREST, onepass.REMAINDER, {"kept": np.int16}),
    "remainder8": ("bf16", "bfloat16", STOCHASTIC, onepass.REMAINDER, {"kept": np.int8}),
    "SGD, eco": ("bf16", "float32", STOCHASTIC, onepass.ERROR, {"rule": onepass.SGD}),
    "eco, a tiny rate": ("bf16", "float32", NEAREST, onepass.ERROR, {"rate": 1e-40}),
    "SGD, eco, a tiny rate": (
        "e4m3@128", "float32", NEAREST, onepass.ERROR,
        {"rule": onepass.SGD, "rate": 1e-40, "moments": np.uint16},
    ),
    "Nesterov": ("int4@64", "float32", NEAREST, onepass.CARRY, {"rule": onepass.NESTEROV}),
    "Lion": ("bf16", "bfloat16", STOCHASTIC, onepass.NOTHING, {"rule": onepass.LION, "moments": np.uint16}),
}  # fmt: skip


def fused_as_on_a_gpu() -> None:
    """The interpreter's FMA rounds twice, a GPU's once: give it the reference's."""
    from triton.runtime import interpreter

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        made = onepass_reference.fma(x.data, y.data, z.data)
        return interpreter.TensorHandle(made, z.dtype.scalar)

    interpreter.InterpreterBuilder.create_fma = create_fma


def patterned(x: Any) -> torch.Tensor:
    """An array as the kernel has it: patterns of bfloat16 as bfloat16."""
    return patterns(x) if x.dtype == np.uint16 else tensor(x)


def stepped(case: str, evil: bool) -> None:
    from halfulp.kernels import gpu_onepass

    name, storage, mode, keeps, options = STEPS[case]
    g = plan_for(grid(name), torch.float32).grid
    rng, n, kind = np.random.default_rng(5), TILE + 101, options.get("moments", np.float32)
    rule = options.get("rule", onepass.ADAMW)
    q = reference.round((rng.standard_normal(n) * 0.02).astype(np.float32), g)
    m, v = np.zeros(n, kind), np.zeros(n, kind) if rule < onepass.SGD else None
    kept, moved = np.zeros(n, options.get("kept", np.float32)), np.zeros((n + 7) // 8, np.uint8)
    kept = q.copy() if keeps == onepass.MASTER else kept
    mine = [tensor(q).to(getattr(torch, storage)), patterned(m), None if v is None else patterned(v)]
    beside, marks = patterned(kept), tensor(moved)
    for t in (1, 2, 3):
        grad = (rng.standard_normal(n) * 1e-3).astype(np.float32)
        if evil:
            for value, count in ((np.nan, 3), (np.inf, 3), (3e25, 3), (0, 30)):
                grad[rng.integers(0, n, count)] = value
        s = onepass.Settings(
            lr=options.get("rate", 6e-4), betas=(options.get("beta", 0.9), 0.999), weight_decay=0.1,
            rule=rule, t=t, dampening=0.0,
        )  # fmt: skip
        offset = options.get("offset", 0)
        streams = [Stream(seed=3, name=x, step=t, bits=16, offset=offset) for x in "wm"]
        drawing = streams[1] if kind == np.uint16 else None
        policy = onepass.Policy(mode, keeps, kept, streams[0], drawing)
        q, m, v, found = onepass_reference.step(q, grad, m, v, g, s, policy, moved=moved)
        policy = policy._replace(kept=beside if keeps not in (onepass.NOTHING, onepass.ERROR) else None)
        one, job = onepass.prepared(
            mine[0], torch.from_numpy(grad), *mine[1:], g, s, policy, moved=marks, sums=1
        )
        ((counts, sums),) = gpu_onepass.steps(one, [job])
        same(mine[0].float(), q, case, t, "weights")
        same(counts, found["counts"], case, t)
        same(sums, found["sums"], case, t)
        same(marks, moved, case, t)
        if keeps not in (onepass.NOTHING, onepass.ERROR):
            same(beside, kept, case, t, "kept")
        for ours, theirs in ((mine[1], m), (mine[2], v)):
            if theirs is not None:  # of a NaN the sign is nobody's
                a, b = (torch.nan_to_num(x.float(), nan=7.0) for x in (ours, patterned(theirs)))
                same(a, b.numpy(), case, t, "moments")


def check_one_pass() -> None:
    fused_as_on_a_gpu()
    for case in STEPS:
        for evil in (False, True):
            stepped(case, evil)


CHECKS = {name: check for name, check in globals().items() if name.startswith("check_")}


def main() -> None:
    """Run the checks named on the command line, or all, and print what happened."""
    for name in sys.argv[1:] or CHECKS:
        begin, error = time.perf_counter(), ""
        try:
            CHECKS[name]()
        except Exception:  # the report says which check failed and how; the others still run
            error = traceback.format_exc()
        print(json.dumps({"check": name, "seconds": time.perf_counter() - begin, "error": error}), flush=True)


if __name__ == "__main__":
    main()
