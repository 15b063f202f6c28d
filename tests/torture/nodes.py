"""A Ray cluster of several nodes on this machine, of which one is killed while a study runs.

As a program (``python -m torture.nodes STUDY OUT BEFORE``) it starts three nodes of one core, runs the study
on them, kills the last node when so many records are there and it has begun with a cell, and exits as the
study does. Nothing is resumed: the cell that the node had is lost, and the engine gives it to another.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

NODES = 3
SECONDS = 600


def main(study: str, out: Path, before: int) -> int:
    marks = out.with_suffix(".marks")
    marks.mkdir()
    os.environ["TORTURE_MARKS"] = str(marks)  # the nodes inherit it, and the cells that they run
    cluster_utils: Any = __import__("ray.cluster_utils", fromlist=["Cluster"])
    cores = {"num_cpus": 1, "include_dashboard": False}
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args=cores)
    last = [cluster.add_node(num_cpus=1) for _ in range(NODES - 1)][-1]
    place = {**os.environ, "RAY_ADDRESS": cluster.address}
    asked = ["study", "run", study, "--scale", "small", "--out", str(out), "--executor", "ray"]
    process = subprocess.Popen([sys.executable, "-m", "halfulp", *asked], env=place)
    deadline, killed = time.monotonic() + SECONDS, False
    mark = marks / last.node_id
    while process.poll() is None and time.monotonic() < deadline:
        if not killed and len(list(out.glob("records/*/*.json"))) >= before:
            mark.unlink(missing_ok=True)  # of a cell that may be over
            while process.poll() is None and not mark.exists():
                time.sleep(0.005)
            cluster.remove_node(last, allow_graceful=False)
            killed = True
        time.sleep(0.01)
    if process.poll() is None:
        process.kill()
    process.wait()
    cluster.shutdown()
    return process.returncode if killed else 100


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])))
