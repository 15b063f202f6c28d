"""Verify that products ran natively, by scanning a profiler's trace for the operator and its operands.

If something decodes a native weight, training works just as well, but in float32 and without a notice. So a
step is run under torch's profiler, the raw trace (Kineto's) is read back, and every call of
``aten::_scaled_mm`` is counted by the types of its operands. On CUDA a call counts only if it launched a
kernel; the names of the kernels are kept.

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
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from halfulp.writeback.storage.native_weight import is_native

OPERATOR = "aten::_scaled_mm"
_SHORT = {"c10::Float8_e4m3fn": "e4m3", "c10::Float8_e5m2": "e5m2"}


class Dispatch:
    """A context manager that counts native products; its counts are set when the block ends."""

    def __init__(self) -> None:
        self.calls: dict[str, int] = {}
        """Native products by the types of their operands."""
        self.kernels: dict[str, int] = {}
        """The kernels that they launched on a GPU, by name; a CPU has none."""
        self.shapes: dict[str, int] = {}
        """The same by types and sizes."""
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
        self.calls, self.shapes, self.kernels = scan(json.loads(raw), gpu=torch.cuda.is_available())

    def to_json(self) -> dict[str, Any]:
        """Return the counts as JSON."""
        return {
            "calls": self.calls, "shapes": self.shapes, "kernels": self.kernels, "trace_sha256": self.sha256
        }  # fmt: skip


def scan(trace: Mapping[str, Any], *, gpu: bool) -> tuple[dict[str, int], ...]:
    """Count the native products of a raw trace by types, by types and sizes, and by kernels.

    With ``gpu``, only products that launched a kernel count.
    """
    events = trace["traceEvents"]
    launched: dict[Any, list[str]] = {}
    for e in events:
        if e.get("cat") == "kernel":
            launched.setdefault(e["args"].get("External id"), []).append(e["name"])
    calls, shapes, kernels = Counter[str](), Counter[str](), Counter[str]()
    for e in events:
        if e.get("name") != OPERATOR or e.get("cat") != "cpu_op":
            continue
        names = launched.get(e["args"].get("External id"), [])
        if gpu and not names:
            continue
        kinds = [_SHORT.get(kind, kind) for kind in e["args"].get("Input type", ["?", "?"])[:2]]
        sizes = e["args"].get("Input Dims", [[], []])[:2]
        calls[" x ".join(kinds)] += 1
        shapes[" x ".join(f"{kind} {size}" for kind, size in zip(kinds, sizes, strict=False))] += 1
        kernels.update(names)
    return tuple(dict(sorted(counter.items())) for counter in (calls, shapes, kernels))


def products(model: torch.nn.Module, only_read: tuple[str, ...] = ()) -> int:
    """Count the native products of one forward and backward: three per native matrix that is used once.

    ``only_read`` names matrices that are only indexed by row and never multiplied.
    """
    used = [n for n, p in model.named_parameters() if is_native(p) and n not in only_read]
    return 3 * len(used)


def expected(count: int) -> dict[str, int]:
    """Split a number of products by the types of a hybrid step: one third of them are forward."""
    return {"e4m3 x e4m3": count // 3, "e5m2 x e4m3": count - count // 3}
