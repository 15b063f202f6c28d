"""How fast the CPU kernels are: beside their peers and beside the memory they must touch.

Every contestant of a size runs once in each repetition, in an order that is shuffled each time, so that
drift of the machine hits all alike and none always finds its arrays in the cache; the result is the
median. Speeds are million coordinates a second. Two ratios go with them: the share of the *limit*, which
is how fast torch merely reads (and writes) the same arrays, and how many times faster halfulp does the
same task. Run it on a machine with nothing else to do.

Weights are normal with standard deviation 0.02 and proposals a thousand times smaller, inside the range of
every grid, where all contestants that round to nearest give the same values. Results go to arrays that
exist already wherever a contestant can do that. Peers: ``pip install -c constraints.txt -e .[peers]``;
one that is missing is reported as such. qtorch compiles itself on first import.

    python benchmarks/kernels.py --sizes 1e5,1e6,1e7,1e8
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

import halfulp as hu
from halfulp import kernels

GRID = hu.grid("e4m3")
EIGHT = [hu.grid(name) for name in ("bf16", "fp16", "e5m2", "e4m3", "e4m3@128", "e3m4", "e2m1", "m5")]
STREAM = hu.Stream(seed=0, name="benchmark", step=1)
PACKAGES = ("torch", "numpy", "numba", "llvmlite", "ml_dtypes", "gfloat", "qtorch", "pychop")
OUT = Path(__file__).parent / "out"
LIMIT = "memory"

Call = Callable[[], object]


class Arrays:
    """What the contestants of one size share."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(size)
        self.w = torch.randn(size, generator=generator).mul_(0.02)
        self.d = torch.randn(size, generator=generator).mul_(0.02e-3)
        self.g = torch.randn(size, generator=generator)
        self.q = kernels.round(self.w, GRID)
        self.z = self.q + self.d
        self.out = torch.empty(size)
        self.codes = torch.empty(size, dtype=torch.uint8)
        self.half = torch.empty(size, dtype=torch.bfloat16)

    def propose(self) -> None:
        """Undo what a write-back did to z."""
        torch.add(self.q, self.d, out=self.z)


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """One way to do a task. ``setup`` does what is not timed and gives the call that is."""

    task: str
    name: str
    setup: Callable[[Arrays], Call]
    limit: str = ""
    """The contestant of the memory task that touches the same arrays."""
    most: float = float("inf")
    """The largest size that takes a bearable time."""
    before: Callable[[Arrays], None] = field(default=lambda a: None)
    """What restores the inputs, before every timed call."""


# ---- the peers ----------------------------------------------------------------------------------


def torch_round_trip(a: Arrays) -> Call:
    eight = a.codes.view(torch.float8_e4m3fn)
    return lambda: a.out.copy_(eight.copy_(a.w))


def torch_event(a: Arrays) -> Call:
    """The event in eager torch, as one would write it: no counts per tile, no edge cases."""

    def call() -> object:
        q = a.w.to(torch.float8_e4m3fn).float()
        return ((q + a.d).to(torch.float8_e4m3fn).float() == q).sum()

    return call


def ml_dtypes_codes(a: Arrays) -> Call:
    import ml_dtypes

    w, codes = a.w.numpy(), a.codes.numpy().view(ml_dtypes.float8_e4m3fn)
    return lambda: np.copyto(codes, w, casting="unsafe")


def ml_dtypes_round_trip(a: Arrays) -> Call:
    import ml_dtypes

    w, out, codes = a.w.numpy(), a.out.numpy(), a.codes.numpy().view(ml_dtypes.float8_e4m3fn)

    def call() -> None:
        np.copyto(codes, w, casting="unsafe")
        np.copyto(out, codes, casting="unsafe")

    return call


def gfloat_nearest(a: Arrays) -> Call:
    import gfloat
    from gfloat.formats import format_info_ocp_e4m3

    w = a.w.numpy()
    return lambda: gfloat.round_ndarray(format_info_ocp_e4m3, w)


def qtorch(rounding: str) -> Callable[[Arrays], Call]:
    def setup(a: Arrays) -> Call:
        from qtorch.quant import float_quantize

        return lambda: float_quantize(a.w, exp=4, man=3, rounding=rounding)

    return setup


def pychop(mode: int) -> Callable[[Arrays], Call]:
    def setup(a: Arrays) -> Call:
        import pychop

        chop = pychop.Chop(exp_bits=4, sig_bits=3, rmode=mode)
        return lambda: chop(a.w)

    return setup


# ---- the contests ---------------------------------------------------------------------------------

READ, READ_2, READ_3 = "read 1 array", "read 2 arrays", "read 3 arrays"
COPY, UPDATE = "read 1, write 1", "read 2, write 1 of them"

CONTESTANTS = [
    Contestant(task=LIMIT, name=READ, setup=lambda a: lambda: a.w.sum()),
    Contestant(task=LIMIT, name=READ_2, setup=lambda a: lambda: (a.w.sum(), a.d.sum())),
    Contestant(task=LIMIT, name=READ_3, setup=lambda a: lambda: (a.w.sum(), a.g.sum(), a.d.sum())),
    Contestant(task=LIMIT, name=COPY, setup=lambda a: lambda: a.out.copy_(a.w)),
    Contestant(
        task=LIMIT, name=UPDATE, setup=lambda a: lambda: torch.add(a.q, a.z, out=a.z), before=Arrays.propose
    ),
    *(
        Contestant(task="nearest, e4m3, float32 to float32", name=name, setup=setup, limit=COPY, most=most)
        for name, setup, most in [
            ("halfulp", lambda a: lambda: kernels.round(a.w, GRID, out=a.out), 1e9),
            ("torch, there and back", torch_round_trip, 1e9),
            ("ml_dtypes, there and back", ml_dtypes_round_trip, 1e9),
            ("qtorch", qtorch("nearest"), 1e8),
            ("gfloat", gfloat_nearest, 1e6),
            ("pychop", pychop(1), 1e6),
        ]
    ),
    *(
        Contestant(task="nearest, e4m3, float32 to codes", name=name, setup=setup, limit=READ)
        for name, setup in [
            ("halfulp", lambda a: lambda: kernels.encode(a.w, GRID, out=a.codes)),
            ("torch", lambda a: lambda: a.codes.view(torch.float8_e4m3fn).copy_(a.w)),
            ("ml_dtypes", ml_dtypes_codes),
        ]
    ),
    *(
        Contestant(task="nearest, bf16, float32 to float32", name=name, setup=setup, limit=limit)
        for name, setup, limit in [
            ("halfulp", lambda a: lambda: kernels.round(a.w, "bf16", out=a.out), COPY),
            ("torch, there and back", lambda a: lambda: a.out.copy_(a.half.copy_(a.w)), COPY),
            ("torch, there only", lambda a: lambda: a.half.copy_(a.w), READ),
        ]
    ),
    *(
        Contestant(task="stochastic, e4m3, float32 to float32", name=name, setup=setup, limit=COPY, most=most)
        for name, setup, most in [
            ("halfulp", lambda a: lambda: kernels.round(a.w, GRID, stochastic=STREAM, out=a.out), 1e9),
            ("qtorch", qtorch("stochastic"), 1e8),
            ("pychop", pychop(5), 1e6),
        ]
    ),
    *(
        Contestant(task="audit, 1 grid", name=name, setup=setup, limit=READ_2)
        for name, setup in [
            ("halfulp", lambda a: lambda: kernels.audit(a.w, a.d, [GRID])),
            ("halfulp, no phase", lambda a: lambda: kernels.audit(a.w, a.d, [GRID], phase=False)),
            ("torch, frozen count only", torch_event),
        ]
    ),
    *(
        Contestant(task="audit, 8 grids", name=name, setup=setup, limit=READ_2)
        for name, setup in [
            ("halfulp", lambda a: lambda: kernels.audit(a.w, a.d, EIGHT)),
            ("halfulp, no phase", lambda a: lambda: kernels.audit(a.w, a.d, EIGHT, phase=False)),
        ]
    ),
    *(
        Contestant(
            task=f"write-back, {mode}",
            name="halfulp",
            setup=lambda a, mode=mode, stream=stream: (
                lambda: kernels.write_back(a.q, a.z, GRID, mode, stream)
            ),
            limit=UPDATE,
            before=Arrays.propose,
        )
        for mode, stream in [("nearest", None), ("stochastic", STREAM), ("deadzone", STREAM)]
    ),
    Contestant(
        task="scores",
        name="halfulp",
        setup=lambda a: lambda: kernels.score(a.w, a.g, a.d, GRID),
        limit=READ_3,
    ),
]


# ---- measuring ------------------------------------------------------------------------------------


def measure(size: int, repetitions: int) -> list[dict[str, Any]]:
    """One row a contestant: its times at this size, or why there are none."""
    arrays, rows, ready = Arrays(size), [], []
    for c in CONTESTANTS:
        row: dict[str, Any] = {"size": size, "task": c.task, "contestant": c.name}
        rows.append(row)
        if size > c.most:
            row["skipped"] = "too slow at this size"
            continue
        try:
            call = c.setup(arrays)
            c.before(arrays)
            call()  # compiles, touches pages
        except ImportError as error:
            row["skipped"] = f"not installed ({error.name})"
            continue
        except (OSError, RuntimeError) as error:  # qtorch without a compiler
            row["skipped"] = f"not available: {str(error).splitlines()[0]}"
            continue
        ready.append((c, call, row, []))
    order = random.Random(size)
    for _ in range(repetitions):
        for c, call, _, seconds in order.sample(ready, len(ready)):
            c.before(arrays)
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
    for _, _, row, seconds in ready:
        row["seconds"] = statistics.median(seconds)
        row["quartiles"] = [float(v) for v in np.percentile(seconds, (25, 75))]
        row["repetitions"] = repetitions
        row["million_per_second"] = size / row["seconds"] / 1e6
    add_ratios(rows)
    return rows


def add_ratios(rows: list[dict[str, Any]]) -> None:
    """Share of the limit, and how many times halfulp's time, where both were measured."""
    seconds = {(r["task"], r["contestant"]): r["seconds"] for r in rows if "seconds" in r}
    for c, row in zip(CONTESTANTS, rows, strict=True):
        if "seconds" in row and c.limit:
            row["share_of_limit"] = seconds[LIMIT, c.limit] / row["seconds"]
        if "seconds" in row and (c.task, "halfulp") in seconds:
            row["halfulp_is_faster"] = row["seconds"] / seconds[c.task, "halfulp"]


def environment() -> dict[str, Any]:
    versions = {}
    for name in ("halfulp", *PACKAGES):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "cpu": cpu_model(),
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load when it ended": round(os.getloadavg()[0], 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **versions,
    }


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


# ---- showing --------------------------------------------------------------------------------------


def markdown(env: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """The rows of all sizes as one table; ratios at the largest size that a contestant did."""
    sizes = sorted({r["size"] for r in rows})
    cells = {(r["task"], r["contestant"], r["size"]): r for r in rows}
    heads = [f"{size:.0e}".replace("e+0", "e") for size in sizes]
    lines = [
        "Million coordinates a second, median; the ratios are those at the contestant's largest size.",
        "",
        f"| task | contestant | {' | '.join(heads)} | share of limit | halfulp is faster |",
        f"|---|---|{'--:|' * len(sizes)}--:|--:|",
    ]
    for c in CONTESTANTS:
        mine = [cells[c.task, c.name, s] for s in sizes]
        done = [r for r in mine if "seconds" in r]
        if not done:
            lines.append(f"| {c.task} | {c.name} | {mine[0]['skipped']} |{' |' * (len(sizes) + 1)}")
            continue
        speeds = " | ".join(speed(r) for r in mine)
        share, faster = done[-1].get("share_of_limit"), done[-1].get("halfulp_is_faster")
        last = f"{share:.0%}" if share is not None else ""
        ratio = f"{faster:.2f} x" if faster is not None and not c.name.startswith("halfulp") else ""
        lines.append(f"| {c.task} | {c.name} | {speeds} | {last} | {ratio} |")
    lines += ["", "; ".join(f"{key}: {value}" for key, value in env.items()) + "."]
    return "\n".join(lines) + "\n"


def speed(row: dict[str, Any]) -> str:
    if "seconds" not in row:
        return "-"
    value = row["million_per_second"]
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sizes", default="1e5,1e6,1e7,1e8", help="coordinates; 1e8 takes 4 GB")
    parser.add_argument("--quick", action="store_true", help="1e5 and 1e6, few repetitions")
    parser.add_argument("--repetitions", type=int, help="default: more for small sizes")
    parser.add_argument("--threads", type=int, help="for torch and halfulp; default: torch's own choice")
    parser.add_argument(
        "--json", type=Path, default=OUT / "kernels.json", help="results; a .md goes beside it"
    )
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    sizes = [int(float(s)) for s in ("1e5,1e6" if options.quick else options.sizes).split(",")]
    env = environment()
    print("\n".join(f"{key}: {value}" for key, value in env.items()), flush=True)
    rows = []
    for size in sizes:
        usual = 5 if options.quick else max(7, min(101, int(3e8 / size)))
        print(f"measuring {size:,} coordinates", flush=True)
        rows += measure(size, options.repetitions or usual)
    table = markdown(env, rows)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"environment": env, "rows": rows}, indent=1) + "\n")
    options.json.with_suffix(".md").write_text(table)
    print("\n" + table, flush=True)
    print(f"wrote {options.json} and {options.json.with_suffix('.md')}")


if __name__ == "__main__":
    main()
