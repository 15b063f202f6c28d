"""Native weights on two processes: DDP, FSDP2 and a distributed checkpoint are one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from native_distributed import POLICIES, single
from oracle import assert_same

import halfulp as hu

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available() or sys.platform == "win32", reason="needs gloo"
)
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
KEYS = [*(f"fsdp {policy}" for policy in POLICIES), "ddp sr", "resumed master"]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two processes found together."""
    folder = tmp_path_factory.mktemp("ranks")
    here = Path(__file__).parents[1]
    path = os.pathsep.join([str(here), str(Path(hu.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    started = [
        subprocess.Popen(
            [sys.executable, str(here / "native_distributed.py"), str(rank), "2", str(folder)],
            env=os.environ | {"PYTHONPATH": path} | LOOPBACK,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=300)[0] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert [p.returncode for p in started] == [0, 0], "\n".join(said)
    made: dict[str, Any] = torch.load(folder / "found.pt", weights_only=True)
    return made


@pytest.mark.parametrize("key", KEYS)
def test_two_processes_are_one(found: dict[str, Any], key: str) -> None:
    """Weights and events, bit for bit; the matrices are codes on every rank."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    expected = single(key.split()[1])
    torch.set_num_threads(threads)
    run = found[key]
    assert run["native"] == ["first.weight", "last.weight", "rows.weight"]
    assert run["events"] == expected["events"]
    for name, value in expected["weights"].items():
        assert_same(run["weights"][name], value, name)
