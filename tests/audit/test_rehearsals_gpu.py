"""The rehearsals' Triton kernel: equal to the reference in Triton's interpreter, and clean when compiled."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

import pytest
import rehearsals_interpreted

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None,
        reason="Triton is not installed (it has no wheels for this platform, or: pip install 'halfulp[gpu]')",
    ),
]


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    """What each check said: nothing, or how it failed."""
    done = subprocess.run(
        [sys.executable, rehearsals_interpreted.__file__],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=880,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return {row["check"]: row["error"] for row in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("check", rehearsals_interpreted.CASES)
def test_equals_the_reference(outcomes: dict[str, str], check: str) -> None:
    """Every code, carry, bit and count is the reference's."""
    assert not outcomes[check], outcomes[check]


COMPILE = """
import json
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import gpu_compiled as base
from halfulp.kernels import gpu_rehearse as gpu

TYPES = {"moved": "*u8", "chosen": "*u8", "counts": "*i32", "k": "*i32", "n": "i64", "offset": "i64",
         "k0": "i32", "k1": "i32"}
for keeps, mode, held in ((0, 2, "*u8"), (2, 1, "*i16"), (3, 0, "*fp32")):
    constants = {"MODE": mode, "KEEPS": keeps, "SIGN": 128, "CHOSEN": keeps == 3, "ALIGNED": True}
    types = TYPES | {"held": held} | dict.fromkeys(constants, "constexpr")
    signature = {a: types.get(a, "*fp32") for a in gpu.move_tile.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, t in enumerate(signature.values()) if t[0] == "*"}
    for arch in (80, 90, 100, 120):
        source = ASTSource(gpu.move_tile, signature, constants, aligned)
        ptx = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=gpu.OPTIONS).asm["ptx"]
        print(json.dumps({"spilled": base._assemble(ptx, arch)[1], **base.count_hazards(ptx)}))
"""


def test_compiles_for_every_architecture() -> None:
    """Without spills, and without an instruction that could break equality."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join(
        [os.path.dirname(rehearsals_interpreted.__file__), env.get("PYTHONPATH", "")]
    )
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], env=env, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    assert rows == [{"spilled": 0, "fused": 0, "approximate": 0, "flushed": 0}] * 12


def test_importing_halfulp_does_not_import_triton() -> None:
    code = "import sys, halfulp, halfulp.kernels.rehearse; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
