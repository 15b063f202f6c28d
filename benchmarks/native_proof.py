"""Whether the C++ kernels are the reference, bit for bit: random inputs, compilers and targets, sanitizers.

What the tests sample on every run, this does at length, before a release or after a change of
``src/halfulp/kernels/native``. Only ``speed`` is timed.

    python benchmarks/native_proof.py random --inputs 1e8      bit patterns drawn at random, kernel by kernel
    python benchmarks/native_proof.py compilers "g++" "/venv/bin/python -m ziglang c++"
    python benchmarks/native_proof.py sanitizers               ASan and UBSan (gcc), over the tests of kernels
    python benchmarks/native_proof.py speed "g++"              steps by compiler and target, and the first

Runs may be parts (``--kernel``, ``--target``). With ``--json results/bench/native-proof.json`` their rows
take the place of those of earlier runs in that file and in the table beside it, each with the digest of the
sources.

``random`` compares every value, count, sum and state that a kernel leaves with those of the NumPy reference
(which takes some twenty minutes for 1e8 inputs on one core), for float32, bfloat16 and float64 containers and
every kind of grid, mode and optimizer rule in turn; a bit pattern is as likely as any other, so about one
float32 in 128 is not finite. ``compilers`` and ``sanitizers`` build a copy of the package with each compiler
and run the tests of kernels on it, with every target that this processor has (``HALFULP_NATIVE``).
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from kernels import environment

import halfulp as hu
from halfulp import kernels
from halfulp.errors import UsageError
from halfulp.kernels import coded_moments, native, onepass, reference
from halfulp.kernels.native import build

ROOT = Path(__file__).resolve().parent.parent
TESTS = ("tests/kernels", "tests/writeback/test_onepass.py", "tests/writeback/test_chunked.py")
SANITIZED = "g++ -g1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined"
CHUNK = 2**20 - 37  # neither tiles nor vectors are filled
MODES: tuple[kernels.Mode, ...] = ("nearest", "stochastic", "deadzone")
FIXED = ("bf16", "e4m3@128", "e5m2", "m3", "m7", "int4@16/asym")
MOVING = ("mxfp8_e4m3", "int4/g32", "int8/row", "nvfp4", "int3/dqt", "int4/absmean")
RULES = (onepass.ADAMW, onepass.ADAM, onepass.SGD, onepass.NESTEROV, onepass.LION)
Parts = list[torch.Tensor]
Rows = dict[str, dict[str, Any]]
MACHINE = ("cpu", "vectors", "cores", "system", "python", "torch", "numpy")

# ---- random inputs -------------------------------------------------------------------------------------


def patterns(rng: np.random.Generator, n: int, dtype: torch.dtype) -> torch.Tensor:
    """Values whose bits are drawn at random."""
    raw = torch.from_numpy(np.frombuffer(rng.bytes(n * dtype.itemsize), dtype=np.uint8).copy())
    return raw.view(dtype)


def proposals(rng: np.random.Generator, w: torch.Tensor) -> torch.Tensor:
    """Patterns for one half; for the other, changes of the order of what would be lost."""
    d = patterns(rng, w.numel(), w.dtype)
    near = (w * torch.from_numpy(np.exp2(-rng.uniform(0, 16, w.numel()))).to(w.dtype)).to(w.dtype)
    return torch.where(torch.from_numpy(rng.random(w.numel()) < 0.5), d, near)


def rounded(rng: np.random.Generator, n: int, case: tuple[Any, ...]) -> Callable[[], Parts]:
    dtype, grid, mode = case
    x = patterns(rng, n, dtype)
    stream = None if mode == "nearest" else hu.Stream(seed=int(rng.integers(2**60)), name="x")
    return lambda: [kernels.round(x, grid, stream)]


def audited(rng: np.random.Generator, n: int, case: tuple[Any, ...]) -> Callable[[], Parts]:
    dtype, grid, after = case
    w = patterns(rng, n, dtype)
    d = proposals(rng, w)

    def made() -> Parts:
        moved = torch.zeros((1, (n + 7) // 8), dtype=torch.uint8)
        stay = torch.ones((1, n), dtype=torch.float64 if dtype == torch.float64 else torch.float32)
        found = kernels.audit(w, d, [grid], after=after, moved=moved, stay=stay)
        return [
            found.counts, found.shared, found.sums, found.phase, found.expected, found.arrived, moved, stay
        ]  # fmt: skip

    return made


def written(rng: np.random.Generator, n: int, case: tuple[Any, ...]) -> Callable[[], Parts]:
    dtype, grid, mode = case
    q = kernels.round(torch.nan_to_num(patterns(rng, n, dtype), 0, 1, -1), grid)
    z, carried = q + proposals(rng, q), dtype != torch.bfloat16
    rest = proposals(rng, q)
    stream = hu.Stream(seed=int(rng.integers(2**60)), name="x")

    def made() -> Parts:
        moved, carry = torch.zeros((n + 7) // 8, dtype=torch.uint8), rest.clone() if carried else None
        out = torch.empty_like(z)
        found = kernels.write_back(q, z, grid, mode, stream, moved=moved, sums=3, carry=carry, out=out)
        return [found.out, found.counts, found.sums, moved, *([] if carry is None else [carry])]

    return made


def stepped(rng: np.random.Generator, n: int, case: tuple[Any, ...]) -> Callable[[], Parts]:
    dtype, grid, (rule, keeps, mode) = case
    narrow, remainder = dtype != torch.float32, keeps == onepass.REMAINDER
    q = kernels.round(torch.nan_to_num(patterns(rng, n, torch.float32), 0, 1, -1), grid)
    g = patterns(rng, n, torch.bfloat16 if narrow else torch.float32)
    m, v = (
        patterns(rng, n, kind)
        for kind in ((torch.int8, torch.uint8) if dtype == torch.int8 else (dtype,) * 2)
    )
    scales = [patterns(rng, -(-n // coded_moments.BLOCK), torch.float32).abs() for _ in range(2)]
    kept = {
        onepass.CARRY: lambda: proposals(rng, q), onepass.MASTER: lambda: q + proposals(rng, q),
        onepass.REMAINDER: lambda: patterns(rng, n, torch.int8 if narrow else torch.int16),
    }.get(keeps, lambda: None)()  # fmt: skip
    settings = onepass.Settings(lr=1e-3, eps=1e-8, weight_decay=0.1, rule=rule, t=int(rng.integers(1, 9)))
    seed = int(rng.integers(2**60))

    def made() -> Parts:
        positive = v.clone() if dtype == torch.int8 else v.abs()
        tensors = [q.bfloat16() if remainder else q.clone(), g.clone(), m.clone(), positive]
        second = tensors[3] if rule in (onepass.ADAMW, onepass.ADAM) else None
        beside, moved = None if kept is None else kept.clone(), torch.zeros((n + 7) // 8, dtype=torch.uint8)
        streams = [hu.Stream(seed=seed, name=name, bits=16) for name in ("w", "m")]
        policy = onepass.Policy(
            reference.MODES[mode], keeps, beside, streams[0], streams[1] if narrow else None
        )
        found = hu.grid(grid).within(torch.float32)
        weights, grad, first, _ = tensors
        how, job = onepass.prepared(
            weights, grad, first, second, found, settings, policy, moved=moved, sums=3
        )
        by = tuple(x.clone() for x in scales[: 1 if second is None else 2]) if dtype == torch.int8 else ()
        counted = onepass.steps(how, [replace(job, scales=by)])[0]
        return [*tensors, moved, *counted, *by, *([] if beside is None else [beside])]

    return made


def ways() -> Iterator[tuple[int, int, str]]:
    """Optimizer rules, what policies keep, and how they round."""
    for rule in RULES:
        yield from ((rule, onepass.NOTHING, mode) for mode in MODES)
        yield from ((rule, keeps, "nearest") for keeps in (onepass.CARRY, onepass.MASTER, onepass.ERROR))
        yield rule, onepass.REMAINDER, "nearest"


def fits(dtype: torch.dtype, grid: str) -> bool:
    """Whether a container has a grid: narrow ones leave too few bits for some scales."""
    try:
        return bool(kernels.round(torch.ones(1, dtype=dtype), grid).numel())
    except UsageError:
        return False


DTYPES = (torch.float32, torch.bfloat16, torch.float64)
KINDS = [(dtype, grid) for dtype in DTYPES for grid in (*FIXED, *MOVING) if fits(dtype, grid)]
CASES: dict[str, tuple[Callable[..., Callable[[], Parts]], list[tuple[Any, ...]]]] = {
    "round": (rounded, [(*kind, mode) for kind in KINDS for mode in MODES[:2]]),
    "audit": (audited, [(*kind, after) for kind in KINDS for after in (False, True)]),
    "write_back": (written, [(*kind, mode) for kind in KINDS for mode in MODES]),
    "one_pass": (
        stepped,
        [
            (dtype, grid, way)
            for way in ways()
            for dtype in (*DTYPES[:2], torch.int8)
            for grid in (("bf16",) if way[1] == onepass.REMAINDER else FIXED)
            if onepass.kind_of(hu.grid(grid).within(torch.float32)) is not None
        ],
    ),
}
"""What a kernel is called with, in turn; of one pass, a dtype is that of gradients and moments.

int8: moments are codes, gradients bfloat16.
"""


@contextmanager
def by_reference() -> Iterator[None]:
    """Have the reference do what the library does."""
    with mock.patch.object(native, "library", return_value=None):
        yield


def same(a: torch.Tensor, b: torch.Tensor) -> int:
    """How many elements differ: in any bit, but for which NaN it is."""
    a, b = (x.float() if x.dtype == torch.bfloat16 else x for x in (a, b))
    equal = a.numpy().view(np.uint8).reshape(a.numel(), -1) == b.numpy().view(np.uint8).reshape(b.numel(), -1)
    nans = np.isnan(a.numpy()) & np.isnan(b.numpy())
    return int((~equal.all(axis=1) & ~nans.reshape(-1)).sum())


@dataclass
class Row:
    """What was found of a kernel."""

    cases: int = 0
    inputs: int = 0
    compared: int = 0
    differing: int = 0


def random_inputs(wanted: int, chosen: list[str], seed: int) -> Rows:
    """Compare the kernels on so many inputs each."""
    rows: Rows = {}
    for kernel in chosen:
        function, cases = CASES[kernel]
        row, rng = Row(), np.random.default_rng([seed, list(CASES).index(kernel)])
        chunk = min(CHUNK, -(-wanted // len(cases)))
        for case in itertools.cycle(cases):
            if row.inputs >= wanted:
                break
            call = function(rng, chunk, case)
            fast = call()
            with by_reference():
                slow = call()
            for a, b in zip(fast, slow, strict=True):
                row.compared += a.numel()
                row.differing += (wrong := same(a, b))
                if wrong:
                    print(f"{kernel} {case}: {wrong} of {a.numel()} differ", flush=True)
            row.inputs, row.cases = row.inputs + chunk, min(row.cases + 1, len(cases))
            if row.inputs // chunk % 10 == 0:
                print(kernel, json.dumps(vars(row)), flush=True)
        rows[kernel] = vars(row)
    return rows


# ---- compilers and sanitizers ------------------------------------------------------------------------------


def built(folder: Path, compiler: str) -> dict[str, str]:
    """Copy the package, build its library with a compiler, and return the environment that uses it."""
    source = folder / "src"
    shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("built", "__pycache__"))
    env = {**os.environ, "CXX": compiler, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    made = source / build.HERE.relative_to(ROOT / "src") / "build.py"
    subprocess.run([sys.executable, str(made)], env=env, check=True, capture_output=True)
    return env


def passed(env: dict[str, str], tests: list[str]) -> str:
    """Run tests; return pytest's last line."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    if done.returncode:
        print(done.stdout[-6000:], done.stderr[-2000:])
    return done.stdout.strip().splitlines()[-1]


def short(compiler: str) -> str:
    """Name a compiler as in a table."""
    return "sanitizers" if compiler == SANITIZED else "zig" if "ziglang" in compiler else compiler


def compilers(names: list[str], targets: list[str], tests: list[str], **more: str) -> Rows:
    """Run tests with the library of every compiler, at every target."""
    rows: Rows = {}
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            env = built(Path(folder), name)
            for target in targets:
                said = passed({**env, **more, "HALFULP_NATIVE": target}, tests)
                rows[f"{short(name)}, {target}"] = {"tests": " ".join(tests), "outcome": said}
                print(short(name), target, said, flush=True)
    return rows


def sanitizers(targets: list[str], tests: list[str]) -> Rows:
    """Run tests with a library that checks addresses and undefined behaviour, at every target."""
    found = [
        subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout
        for name in ("libasan.so", "libubsan.so")
    ]
    # Python and torch leak by design; what they free at the end is theirs.
    checks = {
        "LD_PRELOAD": " ".join(x.strip() for x in found), "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
    }  # fmt: skip
    return compilers([SANITIZED], targets, tests, **checks)


# ---- speed ---------------------------------------------------------------------------------------------

SPEED = """
import json, time, torch, halfulp as hu
torch.set_num_threads(1)

def layers(count, width):
    made = torch.nn.ModuleList(torch.nn.Linear(width, width, bias=False) for _ in range(count))
    for p in made.parameters():
        p.grad = torch.randn_like(p) * 1e-3
    return made

def took(call, clock, times=1):
    best = float("inf")
    for _ in range(times):
        begun = clock()
        call()
        best = min(best, clock() - begun)
    return round(best * 1e3, 2)

made = {}
fixed = hu.AdamW(layers(20, 64).parameters(), policy="sr")
for which in ("first", "second"):
    made[f"{which} hu.AdamW step"] = took(fixed.step, time.perf_counter)
plain = torch.optim.AdamW(layers(20, 64).parameters())
with hu.Audit(plain, ["bf16"]):
    for which in ("first", "second"):
        made[f"{which} audited step"] = took(plain.step, time.perf_counter)
for moments in ("fp32", "bf16", "int8"):
    step = hu.AdamW(layers(1, 2048).bfloat16().parameters(), moments=moments).step
    made[f"sr, {moments} moments"] = took(step, time.process_time, 15)
model = layers(1, 2048)
step = hu.AdamW(model.named_parameters(), grid="e4m3@128", storage="packed", moments="bf16", model=model).step
made["packed e4m3, bf16 moments"] = took(step, time.process_time, 15)
w, eight = torch.randn(2048, 2048), ["bf16", "fp16", "e5m2", "e4m3", "e4m3@128", "e3m4", "e2m1", "m5"]
d = w * 1e-3
made["audit of eight grids"] = took(lambda: hu.kernels.audit(w, d, eight), time.process_time, 5)
print(json.dumps(made))
"""
"""Milliseconds: the first two by the clock on the wall in a fresh process, the others of a processor."""


def speeds(names: list[str], targets: list[str]) -> Rows:
    """Time steps of 4.2 million weights, and the first steps of a process, by compiler and target."""
    rows: Rows = {}
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            env = built(Path(folder), name)
            for target in targets:
                done = subprocess.run(
                    [sys.executable, "-c", SPEED], env={**env, "HALFULP_NATIVE": target}, check=True,
                    capture_output=True, text=True,
                )  # fmt: skip
                timed = json.loads(done.stdout.splitlines()[-1])
                rows[f"{short(name)}, {target}"] = {**timed, "load": round(os.getloadavg()[0], 1)}
    return rows


# ---- what is written -----------------------------------------------------------------------------------


def table(kind: str, rows: Rows) -> str:
    """Render the rows of a kind."""
    names = list(next(iter(rows.values())))
    lines = [f"| {kind} | {' | '.join(names)} |", f"|{'---|' * (len(names) + 1)}"]
    lines += [f"| {name} | {' | '.join(str(row[k]) for k in names)} |" for name, row in sorted(rows.items())]
    return "\n".join(lines) + "\n"


def record(path: Path, kind: str, rows: Rows) -> None:
    """Put rows into a file, in place of those of their names, and write the tables beside it."""
    found = json.loads(path.read_text()) if path.exists() else {}
    sources = build.library_name().split("-")[1][:8]
    day = datetime.datetime.now(datetime.UTC).date().isoformat()
    found.setdefault(kind, {}).update(
        {name: {**row, "sources": sources, "date": day} for name, row in rows.items()}
    )
    path.write_text(json.dumps(found, indent=1) + "\n")
    machine = "; ".join(f"{k}: {v}" for k, v in environment().items() if k in MACHINE)
    tables = [table(kind, found[kind]) for kind in sorted(found)]
    path.with_suffix(".md").write_text("\n".join([*tables, machine + ".\n"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    given = commands.add_parser("random")
    given.add_argument("--inputs", type=float, default=1e8, help="of each kernel")
    given.add_argument("--kernel", choices=list(CASES), action="append")
    given.add_argument("--seed", type=int, default=0)
    given, timed = commands.add_parser("compilers"), commands.add_parser("speed")
    for command in (given, timed):
        command.add_argument("compiler", nargs="+")
    timed.add_argument("--target", choices=list(build.targets()), action="append")
    for command in (given, commands.add_parser("sanitizers")):
        command.add_argument("--test", action="append", help=f"by default {' '.join(TESTS)}")
        command.add_argument("--target", choices=list(build.targets()), action="append")
    for command in commands.choices.values():
        command.add_argument("--json", type=Path, help="where the outcome goes; a .md goes beside it")
    told = parser.parse_args()
    if told.command == "random":
        kind, rows = "kernel", random_inputs(int(told.inputs), told.kernel or list(CASES), told.seed)
        wrong = any(row["differing"] for row in rows.values())
    elif told.command == "speed":
        kind, rows = "speed, ms", speeds(told.compiler, told.target or list(build.targets()))
        wrong = False
    else:
        tests, targets = told.test or list(TESTS), told.target or list(build.targets())
        kind = "compiler"
        rows = (
            sanitizers(targets, tests)
            if told.command == "sanitizers"
            else compilers(told.compiler, targets, tests)
        )
        said = [row["outcome"] for row in rows.values()]
        wrong = any("failed" in x or "error" in x or "passed" not in x for x in said)
    print("\n" + table(kind, rows))
    if told.json:
        record(told.json, kind, rows)
    sys.exit(wrong)


if __name__ == "__main__":
    main()
