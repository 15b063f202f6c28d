"""``--json``: one envelope for every command, documented keys, and the numbers of the text."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from audit_command import TRAIN, Halfulp, script
from safetensors.torch import save_file
from study.samples import quick_identity

import halfulp as hu
from halfulp.outputs import SCHEMA
from halfulp.version import __version__

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reference" / "json.md").read_text()
WORDS = set(re.findall(r"`([a-z_0-9]+)`", PAGE))
BY_NAME = {
    "skipped", "could_move_from", "groups", "kinds", "forecast", "never_moved", "crossings", "comparisons",
    "arrives", "ratio", "majority",
}  # fmt: skip
"""Whose keys are names of tensors, groups, bounds or shares."""


def keys(value: Any, open_: bool = False) -> set[str]:
    """Every key in it that is a word of the schema."""
    if isinstance(value, list):
        return set().union(*(keys(v) for v in value)) if value else set()
    if not isinstance(value, dict):
        return set()
    mine = set() if open_ else set(value)
    return mine.union(*(keys(v, key in BY_NAME) for key, v in value.items() if key not in BY_NAME))


def told(halfulp: Halfulp, command: str, *args: str, code: int = 0, undocumented: bool = False) -> Any:
    """The result of a command; its envelope and its keys are as documented."""
    found, out, _ = halfulp(*command.split(), "--json", *args)
    line = out.strip().splitlines()[-1]
    whole = json.loads(line, parse_constant=pytest.fail)
    assert list(whole) == ["schema", "halfulp", "command", "exit", "result"]
    assert (whole["schema"], whole["halfulp"], whole["command"]) == (SCHEMA, __version__, command)
    assert (whole["exit"]["code"], found) == (code, code)
    assert (whole["exit"]["reason"] == "done") == (code == 0)
    if not undocumented:
        assert keys(whole["result"]) <= WORDS
    return whole["result"]


def says(text: str, share: float) -> bool:
    """Whether a share is in some text, with however many digits."""
    found = re.findall(r"[0-9]+(?:\.([0-9]+))?%", text)
    return any(f"{share:.{len(digits)}%}" in text for digits in set(found))


def trained(folder: Path, policy: str | None = None) -> Path:
    """A reference with a rehearsal and scores, or a run on the grid."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 10))
    opt: Any = torch.optim.AdamW(model.parameters(), lr=3e-3)
    options: dict[str, Any] = {"rehearse": ["e5m2"], "scores": ("e5m2", 1, 20)} if policy is None else {}
    if policy is not None:
        opt = hu.WriteBack(opt, "e5m2", policy, model=model)
    x = torch.randn(64, 16)

    def loss() -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(x), x[:, :10].argmax(dim=1))

    with hu.Audit(opt, ["e5m2"], model=model, out=folder, **options) as audit:
        for _ in range(20):
            opt.zero_grad()
            loss().backward()
            opt.step()
        with torch.no_grad():
            audit.evaluate(loss)
    return folder


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    top = tmp_path_factory.mktemp("traces")
    return str(trained(top / "reference")), str(trained(top / "nearest", "rne"))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_compare(halfulp: Halfulp, here: Path, traces: tuple[str, str]) -> None:
    result = told(halfulp, "compare", *traces)
    text = halfulp("compare", *traces)[1]
    (grid,) = result["grids"]
    assert f"RMSE {grid['rmse']:.5f} of the share" in text
    last = result["rehearsals"][0]["losses"][-1]
    assert f"reference {last['real']:.4f}, measured {last['measured']:.4f}" in text


def test_calibrate_says_what_took_its_place(halfulp: Halfulp, here: Path, traces: tuple[str, str]) -> None:
    for args in (("calibrate", *traces, "--add"), ("calibrate",)):
        code, _, said = halfulp(*args)
        assert code == 2
        assert "has ended: a pilot makes its own pair" in said
    code, _, said = halfulp("report", "--calibration", "c.json", traces[0])
    assert code == 0
    assert "--calibration is not used. Calibration by pairs of runs has ended" in said


def test_allocate(halfulp: Halfulp, here: Path, traces: tuple[str, str]) -> None:
    options = (traces[0], "--budget", "50%", "-o", "m.safetensors")
    result = told(halfulp, "allocate", *options)
    text = halfulp("allocate", *options)[1]
    assert f"{result['payload_bytes']:,} of {result['budget_bytes']:,} bytes" in text
    assert sum(t["payload_bytes"] for t in result["tensors"]) == result["payload_bytes"]
    assert all(line in text for line in result["evidence"])


def test_check_and_diff(halfulp: Halfulp, here: Path) -> None:
    weights = {"norm.weight": torch.ones(8), "mlp.weight": torch.randn(64, 64)}
    save_file({n: x.bfloat16() for n, x in weights.items()}, "a.safetensors")
    save_file({n: (x + 1e-3).bfloat16() for n, x in weights.items()}, "b.safetensors")
    assert len(told(halfulp, "check", "a.safetensors")["rates"]) == 9
    result = told(halfulp, "check", "a.safetensors", "--lr", "1e-3")
    text = halfulp("check", "a.safetensors", "--lr", "1e-3")[1]
    assert f"{result['share']:.2%} of the weights cannot be moved" in text
    told(halfulp, "check", "a.safetensors", "--lr", "1e-3", "--fail-above", "1%", code=1)
    assert told(halfulp, "diff", "a.safetensors", "b.safetensors")["total"]["weights"] == 64 * 64 + 8


def test_audit(halfulp: Halfulp, here: Path) -> None:
    """The number in JSON, in the text and on the page is one number."""
    narrow = TRAIN.replace("optimizer = ", "model.bfloat16()\n    optimizer = ")
    script(narrow.replace("16, 8)", "16, 8).bfloat16()"))
    result = told(halfulp, "audit", "--grids", "bf16,e5m2", "train.py", undocumented=True)
    trace = hu.Trace.open(result["trace"])
    answer = hu.verdict(trace)
    assert {k: v for k, v in result.items() if k != "trace"} == json.loads(json.dumps(answer.to_json()))
    page = halfulp("report", result["trace"], "-o", "page.html")
    assert page[0] == 0
    for found in answer.findings:
        assert says(str(answer), found.lost)
        assert says(Path("page.html").read_text(), found.lost)
        assert found.lost in [g["lost"] for g in result["grids"]]


@pytest.mark.parametrize(
    ("command", "args", "code"),
    [
        ("check", ("missing.safetensors",), 2), ("diff", ("a", "b"), 2), ("audit", ("missing.py",), 2),
        ("compare", ("a", "b"), 3), ("study status", ("nothing",), 2),
        ("allocate", ("a", "--budget", "x"), 2), ("study validate", ("nothing",), 2),
        ("check", ("a", "--lr", "abc"), 2), ("check", (), 2),
        ("diff", ("a", "b", "--unknown"), 2), ("audit", ("--every", "x", "train.py"), 2),
        ("study validate", ("a", "--workers", "x"), 2),
    ],
)  # fmt: skip
def test_errors(halfulp: Halfulp, here: Path, command: str, args: tuple[str, ...], code: int) -> None:
    assert told(halfulp, command, *args, code=code) is None


@pytest.mark.parametrize("error", [OSError(36, "File name too long", "x" * 300), ZeroDivisionError()])
def test_errors_of_the_system_and_of_ours(
    halfulp: Halfulp, here: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(hu.Trace, "open", Mock(side_effect=error))
    assert told(halfulp, "compare", "a", "b", code=4) is None


def test_the_option_of_a_script_is_its_own(halfulp: Halfulp, here: Path) -> None:
    assert halfulp("audit", "--every", "x", "train.py", "--json")[:2] == (2, "")


def test_studies(halfulp: Halfulp, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quick_identity(monkeypatch)
    shutil.copy(ROOT / "examples" / "study_coin.py", "study_coin.py")
    halfulp("study", "seal", "study_coin.py")
    assert told(halfulp, "study status", "study_coin.py")["closed"] is None
    assert told(halfulp, "study validate", "study_coin.py", code=1)["problems"]
    halfulp("study", "run", "study_coin.py", "--executor", "inline")
    status = told(halfulp, "study status", "study_coin.py")
    text = halfulp("study", "status", "study_coin.py")[1]
    assert f"closed sha256 {status['closed']}\nlabel {status['label']}" in text
    for stage in status["stages"]:
        assert f"{stage['name']} ({stage['kind']}): {stage['done']} of {stage['cells']} cells" in text
    assert told(halfulp, "study validate", "study_coin.py")["label"] == status["label"]


def test_the_page_says_which_schema_it_is_of() -> None:
    assert f'"schema": "{SCHEMA}"' in PAGE
