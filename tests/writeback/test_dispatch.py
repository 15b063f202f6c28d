"""Evidence of native products: the calls of a step, by operand and kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from native_models import loss_of, native_net

from halfulp.writeback import Dispatch
from halfulp.writeback.storage import dispatch


def test_evidence_of_a_step() -> None:
    """Four products here: two matrices and the tied output forward; each again twice backward."""
    model = native_net()
    with Dispatch() as seen:
        loss_of(model).backward()
    assert dispatch.products(model) == 9
    assert seen.calls == dispatch.expected(9) == {"e4m3 x e4m3": 3, "e5m2 x e4m3": 6}
    assert seen.kernels == {} or torch.cuda.is_available()
    assert len(seen.sha256) == 64
    assert seen.to_json()["calls"] == seen.calls


def test_a_fallback_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers, decoded first: nothing native ran, and the evidence says so."""

    def decoded(
        a: torch.Tensor, b: torch.Tensor, *, scale_a: Any, scale_b: Any, out_dtype: Any
    ) -> torch.Tensor:
        return (a.float() * scale_a) @ (b.float() * scale_b)

    monkeypatch.setattr(torch, "_scaled_mm", decoded)
    model = native_net()
    with Dispatch() as seen:
        loss_of(model).backward()
    assert seen.calls == {}


def test_on_a_gpu_a_call_counts_with_its_kernel() -> None:
    def call(number: int) -> dict[str, Any]:
        kinds = ["c10::Float8_e5m2", "c10::Float8_e4m3fn"]
        return {
            "name": dispatch.OPERATOR,
            "cat": "cpu_op",
            "args": {"External id": number, "Input type": kinds},
        }

    kernel = {"name": "gemm_e5m2_e4m3", "cat": "kernel", "args": {"External id": 1}}
    trace = {"traceEvents": [call(1), call(2), kernel, {"name": "other", "ph": "X"}]}
    calls, _, launched = dispatch.scan(trace, gpu=True)
    assert (calls, launched) == ({"e5m2 x e4m3": 1}, {"gemm_e5m2_e4m3": 1})
    assert dispatch.scan(trace, gpu=False)[0] == {"e5m2 x e4m3": 2}
