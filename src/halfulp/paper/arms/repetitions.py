"""Measure what arms cost: seconds, persistent bytes and peak bytes, each arm in a process of its own.

A cell of a systems study is one *repetition*: all arms, one after the other, each in a fresh process, in an
order that is rotated from repetition to repetition, so that no arm always follows the same one or is always
first on a cold machine. A process builds the arm, takes some updates that are not timed, and then times a
window of updates. Nothing is evaluated, and nothing is audited unless the arm sums scores.

The record's ``measured`` has one row per process, in the order in which they ran: ``wall_seconds`` from
before the model is built to the end of the window; ``window_seconds`` and ``processor_seconds`` of the timed
``updates``, by the clock and by the process itself; ``persistent_bytes`` of every tensor that outlives an
update, and ``policy_bytes`` of those that the policy keeps, both exact; ``peak_bytes``, on a GPU what was
allocated, on a CPU how far the resident set rose, which is coarse; and on a CPU ``counted_bytes``, the most
that tensors held at once during one more update, which does not depend on the machine.

Seconds are an outcome like any other, but no run gives the same again, so such a stage says that it holds
clocks and is never replayed.
"""

from __future__ import annotations

import base64
import contextlib
import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from halfulp.errors import HalfulpError
from halfulp.paper.arms.arm import Arm
from halfulp.paper.arms.mask_recipes import PACKED, unpacked
from halfulp.paper.arms.run import audited, device, optimizer_of
from halfulp.paper.models.decoder import Decoder
from halfulp.paper.models.tensor_bytes import counted, kept
from halfulp.paper.models.training import Training
from halfulp.paper.tokens import files_of, open_corpus
from halfulp.study.protocol import Cell, Running
from halfulp.trace import Memory

Json = Any
MODULE = "halfulp.paper.arms.repetitions"


def repetitions(arms: Mapping[str, Arm], count: int, *, updates: int, warm: int) -> Iterator[Cell]:
    """Return the cells of a systems stage: every repetition begins with another arm."""
    names = list(arms)
    for i in range(count):
        order = names[i % len(names) :] + names[: i % len(names)]
        yield Cell(
            name=f"repetition-{i + 1}",
            config={
                "order": order, "updates": updates, "warm": warm,
                "arms": {name: arm.to_json() for name, arm in arms.items()},
            },
        )  # fmt: skip


def repetition(running: Running) -> dict[str, Json]:
    """Run every arm in a process of its own, and return what each measured, in order."""
    config, rows = running.config, []
    for done, name in enumerate(config["order"]):
        arm = Arm.from_json(config["arms"][name])
        request: dict[str, Json] = {
            "arm": config["arms"][name], "updates": config["updates"], "warm": config["warm"],
            "data": {file: str(running.data(file)) for file in files_of(arm.corpus)},
        }  # fmt: skip
        if arm.mask is not None:
            packed = running.read_bytes(arm.mask["stage"], arm.mask["cell"], PACKED)
            request["masks"] = base64.b64encode(packed).decode()
        rows.append({"arm": name, **_process(request)})
        running.progress(done + 1, len(config["order"]))
    return {"measured": rows}


def _process(request: Mapping[str, Json]) -> dict[str, Json]:
    """Measure an arm in a fresh process."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", MODULE], input=json.dumps(request), capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    if done.returncode:
        raise HalfulpError(f"a process that was to be timed failed: {done.stderr[-2000:]}")
    measured: dict[str, Json] = json.loads(done.stdout.splitlines()[-1])
    return measured


# ---- in the process ---------------------------------------------------------------------------------------


def measure(request: Mapping[str, Json]) -> dict[str, Json]:
    """Build an arm, warm it up, and time a window of its updates."""
    arm = Arm.from_json(request["arm"])
    tokens, _ = open_corpus(lambda name: Path(request["data"][name]), arm.corpus, arm.model.vocabulary)
    before, began = _settled(), time.perf_counter()
    where = device(arm.device)
    model = Decoder(arm.model, seed=arm.seed, device=where)
    masks = unpacked(base64.b64decode(request["masks"]), "masks") if arm.mask else {}
    optimizer = optimizer_of(arm, model, masks[arm.mask["name"]] if arm.mask else None)
    training = Training(model, optimizer, tokens, arm.recipe)
    with audited(arm, training, Memory(), []) if arm.scores is not None else contextlib.nullcontext():
        for _ in range(request["warm"]):
            training.step()
        _settle(where)
        started, used = time.perf_counter(), time.process_time()
        for _ in range(request["updates"]):
            training.step()
        _settle(where)
        ended, spent = time.perf_counter(), time.process_time()
        peak = {"peak_bytes": _peak(where, before)}
        if where.type != "cuda":
            peak["counted_bytes"] = counted(training)
    return {
        "wall_seconds": ended - began,
        "window_seconds": ended - started,
        "processor_seconds": spent - used,
        "updates": request["updates"],
        "gpu": where.type == "cuda",
        **peak,
        **kept(model, optimizer),
    }


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _settled() -> int:
    """Return the resident set, and on Linux count its maximum from now on."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _resident("VmRSS")


def _resident(which: str) -> int:
    """Return the resident set, or its maximum (VmHWM), in bytes; without /proc, always the maximum."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith(which)).split()[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _peak(device: torch.device, before: int) -> int:
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else _resident("VmHWM") - before


if __name__ == "__main__":
    print(json.dumps(measure(json.load(sys.stdin))))
