"""The GitHub Action: its one script, run as a runner would, passes and fails as the audit does."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from audit_command import TRAIN, environment, script

ROOT = Path(__file__).parent.parent
NARROW = TRAIN.replace("optimizer = ", "model.bfloat16()\n    optimizer = ").replace(
    "16, 8)", "16, 8).bfloat16()"
)

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


def steps() -> list[dict[str, Any]]:
    yaml: Any = pytest.importorskip("yaml")
    found: list[dict[str, Any]] = yaml.safe_load((ROOT / "action.yml").read_text())["runs"]["steps"]
    return found


@pytest.mark.parametrize(
    ("text", "inputs", "code", "said"),
    [
        (TRAIN, {"REQUIRE": "contract.toml", "FAIL_ABOVE": "50%"}, 0, "### halfulp: passed"),
        (NARROW, {"REQUIRE": "contract.toml"}, 1, "updated in bfloat16"),
        (NARROW, {"FAIL_ABOVE": "50%", "OPTIONS": "--every 2"}, 1, "more than 0.5 (--fail-above)"),
        ("raise SystemExit(5)", {}, 5, "the script ended with exit code 5"),
        (TRAIN, {"REQUIRE": "$(touch owned).toml"}, 2, "is missing"),
    ],
)
def test_it_is_the_audit(
    text: str, inputs: dict[str, str], code: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script(text)
    Path("contract.toml").write_text('weights = "float32"\n')
    step = next(s for s in steps() if s.get("id") == "audit")
    assert set(step["env"]) == {"SCRIPT", "REQUIRE", "FAIL_ABOVE", "OPTIONS"}
    assert "${{" not in step["run"]
    given = dict.fromkeys(step["env"], "") | {"SCRIPT": "train.py 1"} | inputs
    files = {"GITHUB_OUTPUT": "out", "GITHUB_STEP_SUMMARY": "summary", "RUNNER_TEMP": str(tmp_path)}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
        env=environment(PATH=path, **given, **files), capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    summary = Path("summary").read_text()
    assert done.returncode == code, done.stderr
    assert said in summary
    answer = json.loads(Path(Path("out").read_text().strip().removeprefix("json=")).read_text())
    assert answer["exit"]["code"] == done.returncode
    assert not Path("owned").exists()
