"""Implement ``halfulp selftest``: check this machine's kernels against the reference, and time a step.

Every check compares the kernels of a device bit for bit with the reference in NumPy, and steps in one pass
with the same steps in two. A short benchmark against torch's own step follows. The output names the machine,
so that it can be posted: on a GPU it is evidence that this project cannot produce itself.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from halfulp import kernels
from halfulp.errors import UsageError
from halfulp.kernels import native, onepass, onepass_reference, reference
from halfulp.kernels.plan import plan_for
from halfulp.kernels.reference import DEADZONE, NEAREST, STOCHASTIC, TILE
from halfulp.numbers.grids import grid as named
from halfulp.numbers.streams import Stream
from halfulp.version import __version__
from halfulp.writeback import AdamW, WriteBack, WriteBackOptions

GRIDS = ("bf16", "fp16", "e5m2", "e4m3@128", "e2m1", "m3", "int4@16/asym", "int8/row", "mxfp4", "int3/dqt")
POLICIES = {
    "rne": "bf16", "sr": "bf16", "kahan": "bf16", "master": "bf16", "deadzone-sr": "e4m3@128",
    "eco": "e4m3@128",
}  # fmt: skip
MODES: dict[int, kernels.Mode] = {NEAREST: "nearest", STOCHASTIC: "stochastic", DEADZONE: "deadzone"}
SHAPE = (67, 2 * TILE // 3 + 5)
STREAM = Stream(seed=1, name="selftest", step=2, offset=37)
Line = tuple[str, str]


def run(device: str, matrices: int, out: Callable[[str], None]) -> bool:
    """Print the results, and return True if everything is equal."""
    if device not in ("cpu", "cuda"):
        raise UsageError(f"--device takes cpu or cuda, not {device!r}.")
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch finds no CUDA device here. Use --device cpu.")
    out(f"halfulp {__version__} selftest on {device}")
    out(_machine(device))
    out("")
    failed = 0
    for name, check in CHECKS.items():
        start, wrong, count = time.perf_counter(), "", 0
        for what, problem in check(torch.device(device)):
            count += 1
            wrong = wrong or (f"{what}: {problem}" if problem else "")
        failed += bool(wrong)
        said = f"FAILED, {wrong}" if wrong else f"equal, {count} cases" if count else "not on this device"
        out(f"  {name:46s} {said} ({time.perf_counter() - start:.1f} s)")
    out("")
    for line in _speed(device, matrices):
        out(line)
    out("")
    out("Everything is equal to the reference." if not failed else f"{failed} check(s) failed.")
    return not failed


def _machine(device: str) -> str:
    parts = [f"python {platform.python_version()}", f"torch {torch.__version__}", platform.platform()]
    if device == "cuda":
        from importlib.metadata import version

        gpu = torch.cuda.get_device_properties(0)
        device_words = f"{gpu.name}, sm_{gpu.major}{gpu.minor}"
        parts = [device_words, f"CUDA {torch.version.cuda}", f"triton {version('triton')}", *parts]
    else:
        threads = f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} thread(s)"
        parts = [native.described(), threads, *parts]
    return "; ".join(parts)


# ---- equality ---------------------------------------------------------------------------------------


def _values(seed: int, spread: int = 20) -> Any:
    """Return short and long mantissas over many binades, non-finite values among them."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(SHAPE) * np.exp2(rng.integers(-spread, 4, SHAPE))
    short = np.round(rng.uniform(-32, 32, SHAPE)) / 32 * np.exp2(rng.integers(-spread, 4, SHAPE))
    x = np.where(rng.random(SHAPE) < 0.5, short, x).astype(np.float32)
    x.reshape(-1)[5 : 5 + 7 * 301 : 301] = (np.nan, np.inf, -np.inf, -0.0, 1e-40, 3.4e38, -3.4e38)
    return x


def _difference(ours: torch.Tensor, theirs: Any) -> str:
    """Describe the first difference between two arrays; empty if they are equal."""
    a, b = ours.detach().cpu().contiguous().numpy(), np.ascontiguousarray(theirs)
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{a.shape} of {a.dtype}, not {b.shape} of {b.dtype}"
    bits = f"u{b.dtype.itemsize}"
    wrong = np.flatnonzero(a.view(bits).reshape(-1) != b.view(bits).reshape(-1))
    if not wrong.size:
        return ""
    i = int(wrong[0])
    return f"{wrong.size} of {a.size} differ, the first is {a.reshape(-1)[i]}, not {b.reshape(-1)[i]}"


def _rounding(device: torch.device) -> Iterator[Line]:
    x = _values(0)
    for name in GRIDS:
        g = named(name).within(torch.float32)
        for mode, stream in ((NEAREST, None), (STOCHASTIC, STREAM)):
            rounded = kernels.round(torch.from_numpy(x).to(device), g, stream)
            yield f"{name}, {MODES[mode]}", _difference(rounded, reference.round(x, g, mode, stream))


def _write_backs(device: torch.device) -> Iterator[Line]:
    for name in GRIDS:
        g = named(name).within(torch.float32)
        q = reference.round(np.where(np.isfinite(x := _values(1, 8)), x, 0).astype(np.float32), g)
        with np.errstate(over="ignore", invalid="ignore"):
            z = (q + _values(2) * np.float32(0.01)).astype(np.float32)
        for mode, said in MODES.items():
            moved = np.zeros((q.size + 7) // 8, dtype=np.uint8)
            marks = torch.from_numpy(moved.copy()).to(device)
            stored, proposed = (torch.from_numpy(v.copy()).to(device) for v in (q, z))
            fast = kernels.write_back(stored, proposed, g, said, STREAM, moved=marks, sums=True)
            expected, counted = reference.write_back(q, z, g, mode, STREAM, moved)
            pairs = (
                (fast.out, expected),
                (fast.counts, counted["counts"]),
                (fast.sums, counted["sums"]),
                (marks, moved),
            )
            yield f"{name}, {said}", next(filter(None, (_difference(a, b) for a, b in pairs)), "")


def _audits(device: torch.device) -> Iterator[Line]:
    w, d = _values(3), _values(4, 30)
    weights, proposals = (torch.from_numpy(x).to(device) for x in (w, d))
    for name in GRIDS:
        g = named(name).within(torch.float32)
        fast = kernels.audit(weights, proposals, [g])
        with np.errstate(over="ignore", invalid="ignore"):
            expected = reference.audit(w, d, [g])
        pairs = (
            (fast.counts, expected["counts"]),
            (fast.sums, expected["sums"]),
            (torch.nan_to_num(fast.arrived), np.nan_to_num(expected["arrived"])),  # a NaN has no fixed bits
            (fast.phase, expected["phase"]),
        )
        yield name, next(filter(None, (_difference(a, b) for a, b in pairs)), "")


def _one_pass(device: torch.device) -> Iterator[Line]:
    """Step bfloat16 weights three times by kernel and reference, to nearest and with random rounding."""
    g, n, rng = plan_for(named("bf16"), torch.float32).grid, 2 * TILE + 101, np.random.default_rng(5)
    for mode, kind in ((NEAREST, torch.float32), (STOCHASTIC, torch.bfloat16)):
        w, m, v = (torch.zeros(n, dtype=t) for t in (torch.bfloat16, kind, kind))
        w.copy_(torch.from_numpy((rng.standard_normal(n) * 0.02).astype(np.float32)))
        theirs = [w.float().numpy(), *(_patterns(x) for x in (m, v))]
        w, m, v = (x.to(device) for x in (w, m, v))
        wrong = ""
        for t in (1, 2, 3):
            grad = torch.from_numpy((rng.standard_normal(n) * 1e-3).astype(np.float32)).to(kind)
            s = onepass.Settings(lr=6e-4, weight_decay=0.1, t=t)
            streams = (Stream(seed=3, name=name, step=t, bits=16) for name in ("w", "m"))
            drawn, drawing = (None, None) if mode == NEAREST else streams
            policy = onepass.Policy(mode, stream=drawn, drawing=drawing)
            theirs[0], theirs[1], theirs[2], _ = onepass_reference.step(
                theirs[0], grad.float().numpy(), theirs[1], theirs[2], g, s, policy
            )
            onepass.step(w, grad.to(device), m, v, g, s, policy)
            mine = (w.float(), *(torch.from_numpy(_patterns(x)) for x in (m, v)))
            pairs = zip(mine, theirs, strict=True)
            wrong = wrong or next(filter(None, (_difference(a, b) for a, b in pairs)), "")
        yield MODES[mode], wrong


def _patterns(x: torch.Tensor) -> Any:
    """Return moments as the reference has them: bfloat16 as bit patterns."""
    x = x.cpu()
    return (
        x.view(torch.int16).numpy().view(np.uint16).copy() if x.dtype == torch.bfloat16 else x.numpy().copy()
    )


def _two_passes(device: torch.device) -> Iterator[Line]:
    """Make five steps around torch's fused AdamW, in one pass and in two."""
    if device.type != "cpu" or onepass.torchs_end(onepass.ADAMW, fused=True) is None:
        return
    for policy, grid in POLICIES.items():
        by_route = []
        for once in (True, False):
            torch.manual_seed(0)
            model = torch.nn.Linear(70, 33)
            inner = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
            opt = WriteBack(inner, grid, policy, model=model, options=WriteBackOptions(one_pass=once))
            for step in range(5):
                noise = torch.Generator().manual_seed(step)
                for p in model.parameters():
                    p.grad = torch.randn(p.shape, generator=noise) * 1e-2
                opt.step()
            state = opt.optimizer.state[opt.slots[0].stepped]
            kept = [*opt.slots[0].kept_tensors().values(), state["exp_avg"], state["exp_avg_sq"]]
            by_route.append([model.weight.detach(), *kept])
        pairs = zip(*by_route, strict=True)
        yield policy, next(filter(None, (_difference(a, b.numpy()) for a, b in pairs)), "")


CHECKS: dict[str, Callable[[torch.device], Iterator[Line]]] = {
    "rounding is the reference's": _rounding,
    "write-backs are the reference's": _write_backs,
    "audits are the reference's": _audits,
    "steps in one pass are the reference's": _one_pass,
    "steps in one pass are those in two": _two_passes,
}


# ---- speed ------------------------------------------------------------------------------------------


def _contestants(device: str) -> dict[str, Callable[[torch.nn.ParameterList], Any]]:
    def torchs(params: torch.nn.ParameterList) -> Any:
        return torch.optim.AdamW(params.parameters(), lr=6e-4, weight_decay=0.1, fused=True)

    def around(policy: str) -> Callable[[torch.nn.ParameterList], Any]:
        return lambda params: WriteBack(torchs(params), "bf16", policy, model=params)

    def ours(policy: str, moments: Any) -> Callable[[torch.nn.ParameterList], Any]:
        return lambda params: AdamW(
            params.named_parameters(), lr=6e-4, weight_decay=0.1, policy=policy, moments=moments
        )

    two = {f"bfloat16, {policy}, two passes": around(policy) for policy in ("rne", "sr")}
    return {
        "float32, torch's fused AdamW": torchs,
        **(two if device == "cuda" else {}),
        "bfloat16, rne, float32 moments": ours("rne", "fp32"),
        "bfloat16, sr, float32 moments": ours("sr", "fp32"),
        "bfloat16, sr, bfloat16 moments": ours("sr", "bf16"),
    }


def _speed(device: str, matrices: int) -> Iterator[str]:
    """Yield a table of the median times of interleaved steps."""
    if not matrices:
        return
    ready: list[tuple[str, Any, list[float]]] = []
    for name, make in _contestants(device).items():
        dtype = torch.float32 if name.startswith("float32") else torch.bfloat16
        noise = torch.Generator().manual_seed(0)
        params = torch.nn.ParameterList(
            torch.nn.Parameter((torch.randn(1000, 1000, generator=noise) * 0.02).to(device, dtype))
            for _ in range(matrices)
        )
        for p in params:
            p.grad = torch.full_like(p, 1e-3)
        ready.append((name, make(params), []))
    for turn in range(18):
        for _, optimizer, taken in ready:
            _wait(device)
            start = time.perf_counter()
            optimizer.step()
            _wait(device)
            if turn >= 3:
                taken.append(time.perf_counter() - start)
    base = statistics.median(ready[0][2])
    yield f"  AdamW on {matrices} million weights, telemetry on     ms a step, times torch's"
    for name, _, taken in ready:
        middle = statistics.median(taken)
        yield f"  {name:46s} {middle * 1e3:10.2f} {middle / base:10.2f}"


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
