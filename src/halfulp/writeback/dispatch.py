"""Evidence that products ran natively: a profiler's trace, scanned for the operator and its operands.

A native weight that something decodes trains just as well, only in float32, and nothing says so. So a step is
run under torch's profiler, the raw trace (Kineto's) is read back, and every call of ``aten::_scaled_mm`` is
counted by the types of its operands. On CUDA a call counts only with a kernel that it launched; their names
are kept.

>>> a = torch.ones(16, 16).to(torch.float8_e4m3fn)
>>> with Dispatch() as seen:
...     _ = torch._scaled_mm(
...         a, a.t(), scale_a=torch.ones(()), scale_b=torch.ones(()), out_dtype=torch.float32
...     )
>>> seen.calls
{'e4m3 x e4m3': 1}
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from halfulp.writeback.native import is_native

OPERATOR = "aten::_scaled_mm"
_SHORT = {"c10::Float8_e4m3fn": "e4m3", "c10::Float8_e5m2": "e5m2"}


class Dispatch:
    """What ran natively in a ``with`` block."""

    def __init__(self) -> None:
        self.calls: dict[str, int] = {}
        """Native products by the types of their operands."""
        self.kernels: dict[str, int] = {}
        """The kernels that they launched on a GPU, by name; a CPU has none."""
        self.sha256 = ""
        """Of the raw trace."""

    def __enter__(self) -> Dispatch:
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=kinds, record_shapes=True)
        self._profiler.__enter__()  # type: ignore[no-untyped-call]  # torch's
        return self

    def __exit__(self, *error: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._profiler.__exit__(*error)  # type: ignore[no-untyped-call]  # torch's
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self._profiler.export_chrome_trace(str(path))
            raw = path.read_bytes()
        self.sha256 = hashlib.sha256(raw).hexdigest()
        self.calls, self.kernels = scan(json.loads(raw), gpu=torch.cuda.is_available())

    def to_json(self) -> dict[str, Any]:
        return {"calls": self.calls, "kernels": self.kernels, "trace_sha256": self.sha256}


def scan(trace: Mapping[str, Any], *, gpu: bool) -> tuple[dict[str, int], dict[str, int]]:
    """Native products of a raw trace, and their kernels; with ``gpu`` only those that launched one."""
    events = trace["traceEvents"]
    launched: dict[Any, list[str]] = {}
    for e in events:
        if e.get("cat") == "kernel":
            launched.setdefault(e["args"].get("External id"), []).append(e["name"])
    calls: dict[str, int] = {}
    kernels: dict[str, int] = {}
    for e in events:
        if e.get("name") != OPERATOR or e.get("cat") != "cpu_op":
            continue
        names = launched.get(e["args"].get("External id"), [])
        if gpu and not names:
            continue
        kinds = [_SHORT.get(kind, kind) for kind in e["args"].get("Input type", ["?", "?"])[:2]]
        kind = " x ".join(kinds)
        calls[kind] = calls.get(kind, 0) + 1
        for name in names:
            kernels[name] = kernels.get(name, 0) + 1
    return dict(sorted(calls.items())), dict(sorted(kernels.items()))


def products(model: torch.nn.Module, only_read: tuple[str, ...] = ()) -> int:
    """How many native products one forward and backward makes where every native matrix is used in one:
    three each. ``only_read`` names those that rows are picked from and that are multiplied with nothing."""
    used = [n for n, p in model.named_parameters() if is_native(p) and n not in only_read]
    return 3 * len(used)


def expected(count: int) -> dict[str, int]:
    """So many products, by the types of a hybrid step: a third of them forward."""
    return {"e4m3 x e4m3": count // 3, "e5m2 x e4m3": count - count // 3}
