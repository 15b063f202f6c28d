"""The commands, as a user types them: the worked example of the documentation, and text that bites."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from study.samples import SMALL, invoke, quick_identity, run, study_file, tree

from halfulp import canonical
from halfulp.study import gates, ledger, loading, open_closed, provenance
from halfulp.study.declaration import Protocol
from halfulp.study.gates import RecomputationError
from halfulp.study.validate import validate

EXAMPLE = Path(__file__).parents[2] / "examples" / "study_coin.py"


@pytest.mark.parametrize("name", ["study_coin.py", "study_again.py"])
def test_the_documentation_shows_the_examples(name: str) -> None:
    page = (EXAMPLE.parent.parent / "docs" / "studies.md").read_text()
    assert (EXAMPLE.parent / name).read_text().split('"""', 2)[2].strip() in page


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quick_identity(monkeypatch)


def test_the_worked_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Shown, sealed, run, validated, reported, exported; the default folder; digests that are printed."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(EXAMPLE, "study_coin.py")
    assert "gate close" in invoke(capsys, "study", "show", "study_coin.py")[1]
    code, sealed, _ = invoke(capsys, "study", "seal", "study_coin.py")
    assert code == 0
    out = Path("runs/coin-small")
    seal = ledger.read(out / "ledger.jsonl").seal
    assert f"seal sha256 {seal}" in sealed
    assert "forecast (prediction): 0 of 1 cells" in invoke(capsys, "study", "status", "study_coin.py")[1]
    assert invoke(capsys, "study", "validate", "study_coin.py")[0] == 1  # incomplete
    code, text, progress = invoke(capsys, "study", "run", "study_coin.py", "--executor", "inline")
    assert code == 0
    assert "label   the forecast holds" in text
    assert "stage toss: 40 of 40 cells finished" in progress
    closed = ledger.read(out / "ledger.jsonl").head
    assert f"closed  sha256 {closed}" in text
    for digest in (seal, closed):
        assert invoke(capsys, "study", "validate", str(out), "--expect", digest)[0] == 0
    assert (
        f"label   the forecast holds\nclosed  sha256 {closed}"
        in invoke(capsys, "study", "report", "study_coin.py")[1]
    )
    assert invoke(capsys, "study", "report", str(out), "-o", "page.html")[0] == 0
    assert "in coin-33" in Path("page.html").read_text()
    code, text, _ = invoke(capsys, "study", "report", str(out), "-o", "page.html")  # again, and it says so
    assert (code, text.startswith("The page is page.html (")) == (0, True)
    code, _, error = invoke(capsys, "study", "report", str(out), "-o", "page.md")
    assert (code, "is HTML: write it to page.html" in error) == (2, True)
    assert invoke(capsys, "study", "export", "study_coin.py", "coin.zip")[0] == 0
    assert invoke(capsys, "study", "validate", "coin.zip", "--expect", closed)[0] == 0
    for command in (
        ("study", "report", str(out), "-o", str(out / "page.html")),
        ("study", "export", str(out), str(out / "records" / "coin.zip")),
        ("report", str(out), "-o", str(out / "page.html")),
        ("audit", "--out", str(out / "run"), "study_coin.py"),
    ):  # a file more, and the study would not be valid
        code, _, error = invoke(capsys, *command)
        assert code == 2
        assert "is in the folder of the study" in error
    assert invoke(capsys, "study", "validate", str(out), "--expect", closed)[0] == 0


def test_usage_errors_exit_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = study_file(tmp_path)
    for arguments in (
        ("show", "nothing"), ("run", str(path), "--scale", "huge"), ("validate", str(tmp_path / "nowhere")),
        ("validate", "nothing"), ("run", str(path), "--out", str(tmp_path / "o"), "--executor", "slurm"),
        ("status", str(tmp_path / "nowhere.py")), ("report", "nothing"), ("status", str(tmp_path)),
        ("status", str(path)), ("validate", str(tmp_path)), ("export", str(path), "coin.zip"),
    ):  # fmt: skip
        code, _, error = invoke(capsys, "study", *arguments)
        assert code == 2, arguments
        assert error
        assert "Traceback" not in error


def test_other_code_is_stated_and_fails_only_if_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Results stay valid when the package moves on, as long as recomputation agrees."""
    out = tmp_path / "out"
    run(study_file(tmp_path), out)
    real = provenance.code
    monkeypatch.setattr(provenance, "code", lambda source: real(source) | {"package": {"one.py": "1" * 64}})
    code, text, _ = invoke(capsys, "study", "validate", str(out))
    assert code == 0
    assert "the sealed code itself: this halfulp differs in 1 place, code.package.one.py: was" in text
    code, text, _ = invoke(capsys, "study", "validate", str(out), "--strict-code")
    assert code == 1
    assert "the code is not the sealed code" in text


@pytest.mark.parametrize(
    ("attribute", "value"),
    [("compute", lambda records: 1 / 0), ("name", "renamed"), ("compute", lambda records: {})],
)
def test_code_that_moved_on_too_far_is_not_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], attribute: str, value: object
) -> None:
    """The estimand raises, is gone, or says something else: exit code 1, and the records are not blamed."""

    path, out = study_file(tmp_path), tmp_path / "out"
    run(path, out)
    estimand = loading.load(str(path)).study.estimands[0]
    with pytest.MonkeyPatch.context() as patch:
        environment = provenance.environment()
        patch.setattr(provenance, "environment", lambda: environment | {"cpu": "another"})
        original = getattr(estimand, attribute)
        object.__setattr__(estimand, attribute, value)  # frozen for everybody else
        try:
            code, _, error = invoke(capsys, "study", "validate", str(out))
        finally:
            object.__setattr__(estimand, attribute, original)
    assert code == 1
    assert "result.json" in error


def test_running_a_closed_study_touches_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = study_file(tmp_path), tmp_path / "out"
    run(path, out)
    before = tree(out, ledger=True)
    run(path, out)
    assert tree(out, ledger=True) == before
    (out / "records" / "mine.txt").write_text("mine")
    code, _, error = invoke(capsys, "study", "run", str(path), "--out", str(out), "--executor", "inline")
    assert code == 3
    assert "mine.txt does not belong" in error
    assert (out / "records" / "mine.txt").exists()


def test_values_may_differ_by_rounding_only_on_another_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from halfulp.errors import TamperingError

    out = tmp_path / "out"
    run(study_file(tmp_path), out)
    real, factor = gates.evaluate, 1.0

    def off(estimands: object, records: object) -> object:
        values = real(estimands, records)  # type: ignore[arg-type]
        return {name: {u: v and v * factor for u, v in units.items()} for name, units in values.items()}

    monkeypatch.setattr(gates, "evaluate", off)
    factor = 1 + 2**-50
    with pytest.raises(TamperingError, match="does not follow from the records"):
        validate(out)
    environment = provenance.environment()
    monkeypatch.setattr(provenance, "environment", lambda: environment | {"cpu": "another"})
    page = validate(out)
    assert page.exit_code == 0
    assert any("agree only to" in line for line in page.recomputed)
    factor = 1 + 1e-6
    with pytest.raises(RecomputationError) as raised:
        validate(out)
    assert raised.value.exit_code == 1


def test_no_code_runs_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Gates and label are still checked, from stated values; the exit code says that it is not all."""
    text = "import os, pathlib\npathlib.Path(os.environ['RAN']).touch()\n" + SMALL
    mark, out = tmp_path / "ran", tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAN", str(mark))
        run(study_file(tmp_path, text), out)
        import sys

        for name in [n for n in sys.modules if n.startswith("halfulp_file_")]:
            del sys.modules[name]
        mark.unlink()
        code, page, _ = invoke(capsys, "study", "validate", str(out), "--no-code")
        assert not mark.exists()
        assert code == 1
        assert "estimands were not recomputed" in page
        code, _, error = invoke(capsys, "study", "validate", str(out), "--expect", "0" * 64)
        assert code == 3
        assert "not the expected study" in error
        assert not mark.exists()  # an outside digest is checked before any code of the study runs
        assert invoke(capsys, "study", "validate", str(out))[0] == 0
        assert mark.exists()


def test_an_empty_digest_is_refused_before_any_code_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An unset shell variable must not turn the check of a stranger's study into no check."""
    out = tmp_path / "out"
    run(study_file(tmp_path), out)
    for command in (("validate", str(out)), ("export", str(out), str(tmp_path / "a.zip"))):
        for digest in ("", "  "):
            code, _, error = invoke(capsys, "study", *command, "--expect", digest)
            assert code == 2
            assert "--expect is empty" in error
            assert "running study.py" not in error
    assert not (tmp_path / "a.zip").exists()


@pytest.mark.parametrize(
    ("command", "options", "said"),
    [
        ("validate", ("--workers", "3"), "--workers is for --replay only"),
        ("validate", ("--data-folder", "x"), "--data-folder is for --replay only"),
        ("validate", ("--of", "x"), "leave out --of"),
        ("validate", ("--scale", "paper"), "--scale says which run"),
        ("status", ("--scale", "paper"), "--scale says which run"),
        ("status", ("--out", "elsewhere"), "--out names the run of a study by name or file"),
        ("run", ("--executor", "slurm"), "There is no executor 'slurm'"),
        ("run", ("--deviation", "because"), "nothing is left that could deviate"),
    ],
)
def test_options_that_would_do_nothing_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, options: tuple[str, ...], said: str
) -> None:
    path, out = study_file(tmp_path), tmp_path / "out"
    run(path, out)
    target = (str(path), "--out", str(out)) if command == "run" else (str(out),)
    code, _, error = invoke(capsys, "study", command, *target, *options)
    assert (code, said in error) == (2, True), error


@pytest.mark.parametrize("command", ["status", "validate", "report"])
def test_a_scale_beside_a_folder_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    path, out = study_file(tmp_path), tmp_path / "out"
    run(path, out)
    code, _, error = invoke(capsys, "study", command, str(path), "--out", str(out), "--scale", "paper")
    assert (code, f"{out} is one run: leave it out" in error) == (2, True), error
    assert invoke(capsys, "study", command, str(path), "--out", str(out))[0] == 0


def test_an_archive_has_a_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    run(study_file(tmp_path), out)
    assert invoke(capsys, "study", "export", str(out), str(tmp_path / "a.zip"))[0] == 0
    assert (
        invoke(capsys, "study", "status", str(tmp_path / "a.zip"))[1]
        == invoke(capsys, "study", "status", str(out))[1]
    )


# ---- text that bites ----

BITES = (
    "[bold]x[/bold] <script>alert(1)</script> \\x1b[2J \\u202egnp.exe\\u202c | `a` \\x00 \\n# Forged: PASS"
)
HOSTILE = SMALL
for old, new in (
    ('"Is it close?"', f'"{BITES}"'),
    ('units="one arm"', f'units="{BITES}"'),
    ('("anything",)', f'("{BITES}",)'),
    ('label="close"', f'label="{BITES}"'),
    ('what="distance"', f'what="{BITES}"'),
    ('tables={"Errors"', f'tables={{"{BITES}"'),
    ('("arm", "error")', f'("{BITES}", "error")'),
    ('"seeds": [1, 2]', f'"{BITES}": "{BITES}", "seeds": [1, 2]'),
):
    HOSTILE = HOSTILE.replace(old, new)


def harmless(text: str) -> None:
    assert "\x1b" not in text
    assert "\x00" not in text
    assert "\u202e" not in text
    assert "\n# Forged" not in text


def test_text_of_a_study_is_inert_everywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = study_file(tmp_path, HOSTILE), tmp_path / "out"
    for arguments in (
        ("show", str(path), "--scale", "smoke"),
        ("run", str(path), "--scale", "smoke", "--out", str(out), "--executor", "inline"),
        ("status", str(out)),
        ("validate", str(out)),
        ("report", str(out)),
        ("report", str(out), "-o", str(tmp_path / "page.html")),
    ):
        code, text, error = invoke(capsys, "study", *arguments)
        assert code == 0, error
        harmless(text + error)
        if "-o" in arguments:
            text = (tmp_path / "page.html").read_text()
            assert "<script>alert" not in text
            assert "&lt;script&gt;" in text
        if arguments[0] == "show":
            assert "[bold]x[/bold]" in text  # shown, not obeyed
    assert (out / "ledger.jsonl").read_bytes().count(b"\n") == len(ledger.read(out / "ledger.jsonl").events)


def test_errors_of_a_cell_are_inert_in_the_ledger_and_on_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = SMALL.replace("done = int", f'raise ValueError("{BITES}" + "x" * 5000)\n    done = int')
    out = tmp_path / "out"
    code, shown, error = invoke(
        capsys, "study", "run", str(study_file(tmp_path, text)), "--out", str(out), "--executor", "inline"
    )
    assert code == 1
    harmless(shown + error)
    assert "  | Traceback" in error
    event = ledger.read(out / "ledger.jsonl").events[-1]
    harmless(event["error"])
    assert len(event["error"]) <= 500
    harmless(invoke(capsys, "study", "status", str(out))[1])


def test_a_forged_protocol_cannot_write_elsewhere(tmp_path: Path) -> None:
    """Names in files are checked like names in code, before any path is made of them."""
    from halfulp.errors import CorruptionError

    out = tmp_path / "out"
    run(study_file(tmp_path), out, "smoke")
    content = canonical.loads((out / "protocol.json").read_bytes(), "p")
    content["stages"][1]["cells"][0]["name"] = "../../../escaped"
    with pytest.raises(CorruptionError, match="not plain"):
        Protocol(content, "protocol.json")


@pytest.mark.parametrize("least", ["0.001", "0.01"])
def test_the_documented_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], least: str
) -> None:
    examples = Path(__file__).parents[2] / "examples"
    monkeypatch.chdir(tmp_path)
    shutil.copy(examples / "study_coin.py", ".")
    text = (examples / "study_again.py").read_text().replace("0.001", least)
    Path("study_again.py").write_text(text)
    assert invoke(capsys, "study", "run", "study_coin.py", "--executor", "inline")[0] == 0
    arguments = (
        "study",
        "run",
        "study_again.py",
        "--executor",
        "inline",
        "--evidence",
        "first=runs/coin-small",
    )
    code, text, _ = invoke(capsys, *arguments)
    assert code == 0
    assert f"label   {'regression_to_the_mean' if least == '0.001' else 'not_far'}\n" in text
    assert invoke(capsys, "study", "validate", "study_again.py")[0] == 0
    assert open_closed(Path("runs/again-small")).records.evidence["first"].label == "the forecast holds"
