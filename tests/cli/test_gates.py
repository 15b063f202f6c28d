"""Gates of ``halfulp audit``: terms from a file, shares, tensors that never moved; exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from audit_command import TRAIN, Halfulp, script

import halfulp as hu
from halfulp import files

NARROW = TRAIN.replace("optimizer = ", "model.bfloat16()\n    optimizer = ").replace(
    "16, 8)", "16, 8).bfloat16()"
)
WRAP = """import halfulp as hu
    optimizer = hu.WriteBack(optimizer, "bf16", "sr", model=model)
    for step in"""
KEPT = NARROW.replace("for step in", WRAP)
SWALLOWED = NARROW.replace("optimizer.step()", "exec('try: optimizer.step()\\nexcept Exception: pass')")
LOST = "of the updates were lost in bf16, more than 0.5 (--fail-above)."


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("arrives.toml").write_text("arrives = 0.99\n")
    Path("weights.toml").write_text('weights = "float32"\n')
    return tmp_path


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        (NARROW, ["--fail-above", "50%"], LOST),
        (NARROW, ["--fail-stuck"], "2 whole tensors never moved in bf16, such as 1.weight (--fail-stuck)."),
        (NARROW, ["--require", "arrives.toml"], "of the proposed change was written"),
        (NARROW, ["--require", "weights.toml"], "updated in bfloat16"),
        (SWALLOWED, ["--require", "weights.toml"], "updated in bfloat16"),
        (TRAIN, ["--fail-above", "50%", "--grids", "e5m2"], "of the updates would be lost in e5m2"),
        (NARROW, ["--fail-above", "99.9%"], None),
        (KEPT, ["--fail-above", "50%", "--fail-stuck"], None),  # codes stay, and nothing is lost
        (KEPT, ["--require", "arrives.toml"], None),
        (TRAIN, ["--fail-above", "50%", "--fail-stuck"], None),  # nothing is stored on the audited grids
        (TRAIN, ["--require", "weights.toml", "--fail-above", "0"], None),
    ],
)
def test_the_exit_code_is_the_answer(
    halfulp: Halfulp, here: Path, text: str, options: list[str], said: str | None
) -> None:
    script(text)
    code, out, _ = halfulp("audit", *options, "train.py")
    assert code == (0 if said is None else 1)
    assert ("FAILED" in out) == (said is not None)
    if said is not None:
        assert said in out[out.index("FAILED") :]


def test_what_the_terms_were_held_to_is_said(halfulp: Halfulp, here: Path) -> None:
    script(KEPT)
    _, _, errors = halfulp("audit", "--require", "arrives.toml", "train.py")
    assert "The precision contract held at " in errors
    Path("pattern.toml").write_text('moving = "*nrom*"\n')
    code, out, _ = halfulp("audit", "--require", "pattern.toml", "train.py")
    assert (code, "no trained parameter has such a name" in out) == (1, True)


def test_what_broke_a_term_is_in_the_trace(halfulp: Halfulp, here: Path) -> None:
    """The step at which a share did not arrive is recorded before the script is ended."""
    script(NARROW)
    halfulp("audit", "--require", "arrives.toml", "train.py")
    trace = hu.Trace.open("runs/train")
    assert trace.steps.tolist() == [1]


def test_a_script_keeps_its_own_exit_code(halfulp: Halfulp, here: Path) -> None:
    script(NARROW + "    raise SystemExit(7)\n")
    code, out, _ = halfulp("audit", "--fail-above", "50%", "train.py")
    assert (code, LOST in out) == (7, True)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--fail-above", "150%"], "takes a share"), (["--require", "none.toml"], "is missing"),
        (["--require", "train.py"], "cannot be read as a contract"),
        (["--run", "python", "train.py", "--fail-above", "50%"], None),
    ],
)  # fmt: skip
def test_wrong_gates_are_refused_before_anything_runs(
    halfulp: Halfulp, here: Path, options: list[str], said: str | None
) -> None:
    script("raise SystemExit(9)")
    if said is None:
        for gate in (["--fail-above", "50%"], ["--fail-stuck"], ["--require", "arrives.toml"], ["--json"]):
            code, _, errors = halfulp("audit", *gate, "--run", "python", "train.py")
            assert (code, f"{gate[0]}: for one script" in errors) == (2, True)
        return
    code, _, errors = halfulp("audit", *options, "train.py")
    assert code in (2, 3)
    assert said in errors


CAST = (
    NARROW.replace("AdamW", "SGD")
    .replace(
        "        optimizer.zero_grad()",
        "        if step == 3:\n            model.float()\n        optimizer.zero_grad()",
    )
    .replace("torch.randn(16, 8).bfloat16()", "torch.randn(16, 8).to(model[0].weight)")
)


def test_a_run_that_was_not_recorded_to_its_end_passes_no_gate(halfulp: Halfulp, here: Path) -> None:
    script(CAST)
    for gates, code in (([], 0), (["--fail-above", "100%", "--json"], 1), (["--fail-stuck", "--json"], 1)):
        found, out, errors = halfulp("audit", *gates, "train.py")
        assert (found, "was given up after step 2" in errors) == (code, True)
        if gates:
            reason = json.loads(out.strip().splitlines()[-1])["exit"]["reason"]
            assert reason.startswith("the run cannot be judged to its end (--fail-above, --fail-stuck): ")
            assert "was given up after step 2" in reason


def test_a_trace_that_could_not_be_begun_passes_no_gate(
    halfulp: Halfulp, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "hook", full)
    script(TRAIN)
    for gates, code in (([], 0), (["--fail-above", "100%"], 1)):
        found, out, _ = halfulp("audit", *gates, "--json", "train.py")
        ended = json.loads(out.strip().splitlines()[-1])["exit"]
        assert (found, ended["code"]) == (code, code)
        assert "could not be begun: Cannot create" in ended["reason"]
