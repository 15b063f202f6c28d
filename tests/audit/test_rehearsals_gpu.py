"""Rehearsals on a GPU: equal to the reference, with the write-backs in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

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


def test_importing_halfulp_does_not_import_triton() -> None:
    code = "import sys, halfulp, halfulp.kernels.rehearse; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
