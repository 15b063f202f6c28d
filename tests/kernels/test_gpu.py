"""The Triton kernels: equal to the reference in Triton's interpreter, and clean when compiled.

No GPU is needed for either. The interpreter runs the kernels' own code on NumPy arrays, in a process
of its own (see gpu_interpreted.py); the compiler makes the same code into machine code for four
architectures.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import gpu_interpreted
import pytest

from halfulp.kernels import onepass_reference
from halfulp.writeback.route import gpu_is_exact

pytestmark = pytest.mark.timeout(900)  # both fixtures take minutes
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="Triton is not installed (it has no wheels for this platform, or: pip install 'halfulp[gpu]')",
)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    """What each check said: nothing, or how it failed."""
    script = Path(gpu_interpreted.__file__)
    done = subprocess.run(
        [sys.executable, str(script)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=880,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return {row["check"]: row["error"] for row in map(json.loads, done.stdout.splitlines())}


@needs_triton
@pytest.mark.parametrize("check", gpu_interpreted.CHECKS)
def test_equals_the_reference(outcomes: dict[str, str], check: str) -> None:
    """Every result of every kernel is the reference's, to the last bit."""
    assert not outcomes[check], outcomes[check]


@pytest.fixture(scope="module")
def compiled() -> list[dict[str, Any]]:
    import gpu_compiled

    return gpu_compiled.compile_report()


@needs_triton
def test_compiles_for_every_architecture_without_spills(compiled: list[dict[str, Any]]) -> None:
    """All values stay in registers, on every architecture."""
    from halfulp.kernels import gpu

    assert {row["arch"] for row in compiled} == {80, 90, 100, 120}
    assert {row["kernel"] for row in compiled} == set(gpu.OPTIONS)
    assert [row for row in compiled if row["spill_bytes"]] == []


@needs_triton
def test_compiled_arithmetic_is_that_of_the_reference(compiled: list[dict[str, Any]]) -> None:
    """No multiplication is fused with an addition but those of the one-pass step that the reference fuses, no
    division is approximate, no subnormal flushed."""
    wrong = [row for row in compiled if row["approximate"] or row["flushed"]]
    if gpu_is_exact():
        assert wrong == []
    else:  # then nobody steps in one pass on a GPU
        assert {row["kernel"] for row in wrong} == {"step_tile"}
    each = (256 + 4 * 256) // 128  # elements a thread: a run, and a tile laid out for sums
    asked = {onepass_reference.ADAMW: 2, onepass_reference.NESTEROV: 4}
    for row in compiled:
        expected = asked[row["constants"]["RULE"]] * each if row["kernel"] == "step_tile" else 0
        assert row["fused"] == expected, row


@needs_triton
def test_a_step_moves_every_byte_once() -> None:
    """bfloat16 weights, gradients, moments: eight bytes per weight read and six written, and the bit of what
    ever moved."""
    import gpu_compiled

    constants = next(c for name, _, c in gpu_compiled.VARIANTS if name == "step_tile") | {"SUMS": False}
    ptx = gpu_compiled.compile_ptx("step_tile", "bfloat16", constants, 90)
    a_thread = 256 // 128  # weights
    for kind, halves in (("ld", 4), ("st", 3)):
        assert len(re.findall(rf"\b{kind}\.global\.b16\b", ptx)) == halves * a_thread
        assert len(re.findall(rf"\b{kind}\.global\.b8\b", ptx)) == 1
        assert not re.findall(rf"\b{kind}\.global\.v", ptx)


@needs_triton
def test_a_fused_kernel_would_be_noticed() -> None:
    """The count of fused operations is not zero by blindness."""
    import gpu_compiled

    fused = gpu_compiled.compile_ptx(
        "audit_tile", "float32", {"AFTER": True, "PHASE": True}, 90, enable_fp_fusion=True
    )
    assert gpu_compiled.count_hazards(fused)["fused"] > 0


def test_importing_halfulp_does_not_import_triton() -> None:
    """It is an optional dependency, and slow to import."""
    code = "import sys, halfulp, halfulp.kernels; sys.exit('triton' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
