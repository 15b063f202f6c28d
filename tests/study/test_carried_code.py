"""Code that a study's folder carries: what it may not change, and who says that it is run."""

from __future__ import annotations

from pathlib import Path

import pytest
from study.forging import forge, load
from study.samples import invoke, run, study_file

from halfulp import canonical
from halfulp.errors import CorruptionError, UsageError
from halfulp.study import engine, evidence, ledger, loading, provenance
from halfulp.study.store import Store
from halfulp.study.validate import validate

ENVIRONMENT = provenance.environment()  # asked once: it reads what every library says of itself

pytestmark = pytest.mark.usefixtures("quick")


# ---- code that a folder carries ----


def test_a_protocol_that_the_sealed_code_does_not_declare(
    out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A threshold was moved and every digest made anew; the code beside it still says what it was."""
    protocol = load(out / "protocol.json")
    protocol["gates"][0]["threshold"] = 0.16
    forge(out, "protocol.json", protocol)
    with pytest.raises(CorruptionError, match="not the record of this cell under this seal"):
        validate(out)
    whole_forgery(out)
    for options in ((), ("--strict-code",)):
        code, text, _ = invoke(capsys, "study", "validate", str(out), *options)
        assert code == 1
        assert "the sealed protocol is not what the code declares: gates.close.threshold" in text


def whole_forgery(out: Path) -> None:
    """Records, stage seals and result made anew for the protocol that lies there."""
    store = Store(out)
    protocol = canonical.sha256((out / "protocol.json").read_bytes())
    for path in sorted((out / "records").rglob("*.json")):
        forge(out, path.relative_to(out).as_posix(), load(path) | {"protocol": protocol})
    before, seal = "", canonical.sha256((out / "seal.json").read_bytes())
    for stage in ("forecast", "outcome"):
        sealed = load(out / "seals" / f"{stage}.json") | {"seal": seal, "before": before}
        forge(out, f"seals/{stage}.json", sealed)
        before = canonical.digest(sealed)
    stages = {
        stage: canonical.sha256((out / "seals" / f"{stage}.json").read_bytes())
        for stage in ("forecast", "outcome")
    }
    result = load(store.result_file) | {"seal": seal, "stages": stages}
    result["gates"][0]["threshold"] = load(out / "protocol.json")["gates"][0]["threshold"]
    forge(out, "result.json", result)


def test_strict_code_also_compares_what_other_code_declares(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    protocol = load(out / "protocol.json")
    protocol["gates"][0]["threshold"] = 0.16
    forge(out, "protocol.json", protocol)
    whole_forgery(out)
    monkeypatch.setattr(provenance, "environment", lambda: ENVIRONMENT | {"cpu": "another"})
    code, text, _ = invoke(capsys, "study", "validate", str(out))
    assert code == 0
    assert "the study as the code declares it today, which differs: gates.close.threshold" in text
    code, text, _ = invoke(capsys, "study", "validate", str(out), "--strict-code")
    assert code == 1
    assert "the sealed protocol is not what the code declares: gates.close.threshold" in text


SAID = "code that {} carries. If it came from somebody else, read it first"


def test_every_command_says_that_it_runs_carried_code(
    out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = SAID.format(out)
    digest = ledger.read(out / "ledger.jsonl").head
    archive, page = str(tmp_path / "a.zip"), str(tmp_path / "p.html")
    for arguments, said in (
        (("validate", str(out)), True), (("report", str(out), "-o", page), True),
        (("export", str(out), archive), True), (("report", str(out)), False),
        (("validate", str(out), "--no-code"), False), (("report", str(out), "-o", page, "--no-code"), False),
        (("validate", str(out), "--expect", digest), False),
        (("export", str(out), archive, "--expect", digest), False), (("status", str(out)), False),
    ):  # fmt: skip
        code, _, error = invoke(capsys, "study", *arguments)
        assert code == (arguments[-1] == "--no-code" and arguments[0] == "validate"), error
        assert (where in error) is said, arguments
    code, _, error = invoke(capsys, "study", "report", archive, "-o", page)
    assert (code, "read it first" in error) == (0, True)
    code, _, error = invoke(capsys, "report", str(out), "--code", "-o", str(tmp_path / "p.html"))
    assert (code, where in error) == (0, True)
    assert where not in invoke(capsys, "report", str(out), "-o", str(tmp_path / "p.html"))[2]


def test_a_report_without_code_runs_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import sys

    from study.samples import SMALL

    text = "import os, pathlib\npathlib.Path(os.environ['RAN']).touch()  # and say so\n" + SMALL
    mark, out = tmp_path / "ran", tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAN", str(mark))
        run(study_file(tmp_path, text), out)
        for name in [n for n in sys.modules if n.startswith("halfulp_file_")]:
            del sys.modules[name]
        mark.unlink()
        page = tmp_path / "p.html"
        command = ("study", "report", str(out), "-o", str(page))
        assert invoke(capsys, *command, "--no-code")[0] == 0
        assert "<h2>Gates</h2>" in page.read_text()
        assert "Errors</bdi></h2>" not in page.read_text()
        assert not mark.exists()
        assert invoke(capsys, *command)[0] == 0
        assert "Errors</bdi></h2>" in page.read_text()
        assert mark.exists()


@pytest.mark.parametrize("where", ["import sys\nsys.exit(0)\n", "TABLE"])
def test_a_study_file_that_ends_the_process_is_not_valid(
    tmp_path: Path, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """An exit code of 0 that the file itself chose would say that it was validated."""
    import sys

    from study.samples import SMALL

    text = "import os\nif 'LEAVE' in os.environ:\n    raise SystemExit(0)\n" + SMALL
    if where == "TABLE":
        text = SMALL.replace(
            "def error(records):",
            "def error(records):\n    import os\n    if 'LEAVE' in os.environ:\n        raise SystemExit(0)",
        )
    out = tmp_path / "out"
    run(study_file(tmp_path, text), out)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LEAVE", "1")
        for name in [n for n in sys.modules if n.startswith("halfulp_file_")]:
            del sys.modules[name]
        for command in (("validate", str(out)), ("report", str(out), "-o", str(tmp_path / "p.html"))):
            code, _, error = invoke(capsys, "study", *command)
            assert (code, "SystemExit" in error) == (1, True)


def test_the_committed_studies_still_read() -> None:
    """Ledgers of the release before have the shape and the times that are asked for now."""
    folders = sorted((Path(__file__).parents[2] / "results" / "studies").iterdir())
    assert len(folders) >= 11
    for folder in folders:
        assert evidence.open_closed(folder).result is not None


def test_a_study_that_is_not_closed_is_said_to_be(tmp_path: Path) -> None:
    engine.seal(loading.load(str(study_file(tmp_path))), "small", tmp_path / "out")
    assert evidence.open_study(tmp_path / "out").result is None
    with pytest.raises(UsageError, match="is not closed"):
        evidence.open_closed(tmp_path / "out")
