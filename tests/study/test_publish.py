"""Archives that others can check, signatures, and analyses after the fact."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import stat
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from study.samples import LATE, SMALL, invoke, run, study_file, tree

from halfulp import canonical
from halfulp.errors import CorruptionError, TamperingError, UsageError
from halfulp.study import engine, evidence, ledger, loading, publish
from halfulp.study.validate import validate

pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture
def closed(tmp_path: Path) -> Path:
    run(study_file(tmp_path), tmp_path / "out")
    return tmp_path / "out"


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    """A private and a public key, in the files that openssl would write."""
    pytest.importorskip("cryptography", reason="cryptography is not installed (extra sign)")
    from cryptography.hazmat.primitives import serialization as s
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    # RFC 8032, section 7.1, test 1
    key = Ed25519PrivateKey.from_private_bytes(
        bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
    )
    private, public = tmp_path / "key.pem", tmp_path / "public.pem"
    private.write_bytes(key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(s.Encoding.PEM, s.PublicFormat.SubjectPublicKeyInfo))
    return private, public


def test_an_archive_is_deterministic_and_validates(
    closed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "a.zip", tmp_path / "sub" / "b.zip"
    code, text, _ = invoke(capsys, "study", "export", str(closed), str(first))
    assert code == 0
    moved = tmp_path / "elsewhere"
    shutil.copytree(closed, moved)
    publish.export(moved, second)
    assert first.read_bytes() == second.read_bytes()
    assert canonical.sha256(first.read_bytes()) in text
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith(".")) == []
    code, text, _ = invoke(capsys, "study", "validate", str(first))
    assert code == 0
    assert "label: close" in text
    assert invoke(capsys, "study", "report", str(first))[0] == 0
    with zipfile.ZipFile(first) as archive:  # unpacked by hand, it is a folder like any other
        archive.extractall(tmp_path / "by-hand")
    assert validate(tmp_path / "by-hand").exit_code == 0


def test_the_statement_says_what_it_must(closed: Path, tmp_path: Path) -> None:
    """in-toto Statement v1."""
    publish.export(closed, tmp_path / "a.zip")
    with zipfile.ZipFile(tmp_path / "a.zip") as archive:
        statement = json.loads(archive.read("statement.json"))
        members = {name: archive.read(name) for name in archive.namelist()}
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    subjects = {s["name"]: s["digest"]["sha256"] for s in statement["subject"]}
    assert subjects == {n: canonical.sha256(c) for n, c in members.items() if n != "statement.json"}
    events = ledger.read(closed / "ledger.jsonl")
    assert statement["predicate"]["seal"] == events.seal
    assert statement["predicate"]["closed"] == events.head
    assert statement["predicate"]["label"] == "close"


def test_every_byte_of_what_an_archive_adds(closed: Path, tmp_path: Path) -> None:
    publish.export(closed, tmp_path / "a.zip")
    folder = tmp_path / "unpacked"
    with zipfile.ZipFile(tmp_path / "a.zip") as archive:
        archive.extractall(folder)
    path = folder / "statement.json"
    content = path.read_bytes()
    for i in range(0, len(content), 17):
        path.write_bytes(content[:i] + bytes([content[i] ^ 1]) + content[i + 1 :])
        with pytest.raises(CorruptionError, match=r"statement\.json"):
            validate(folder)
    path.unlink()
    shutil.copyfile(
        folder / "result.json", folder / "ro-crate-metadata.json"
    )  # of older archives, where it is stated
    with pytest.raises(CorruptionError, match=r"statement\.json"):
        validate(folder)
    path.write_bytes(content)
    with pytest.raises(CorruptionError, match=r"ro-crate-metadata\.json"):
        validate(folder)
    (folder / "ro-crate-metadata.json").unlink()
    assert validate(folder).exit_code == 0


def test_only_closed_and_valid_studies_are_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    engine.seal(loading.load(str(study_file(tmp_path))), "small", out)
    with pytest.raises(UsageError, match="not closed"):
        publish.export(out, tmp_path / "a.zip")
    assert invoke(capsys, "study", "export", str(out), str(tmp_path / "a.zip"))[0] == 2
    assert not (tmp_path / "a.zip").exists()


# ---- hostile archives ----


def archive_with(path: Path, name: str, content: bytes = b"x", mode: int = stat.S_IFREG | 0o644) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        entry = zipfile.ZipInfo("placeholder")
        entry.filename = name
        entry.external_attr = mode << 16
        archive.writestr(entry, content)
    return path


@pytest.mark.parametrize(
    "name",
    ["../up", "/etc/cron.d/x", "a/../../up", "C:/x", "a\\..\\up", "./a", "a//b", "records/", "..", "a/./b"],
)
def test_paths_cannot_leave_the_archive(tmp_path: Path, name: str) -> None:
    path = archive_with(tmp_path / "a.zip", name)
    with pytest.raises(CorruptionError, match="not a plain file inside it"), publish.unpacked(path):
        pass
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.zip"]


def test_links_are_not_unpacked(tmp_path: Path) -> None:
    path = archive_with(tmp_path / "a.zip", "link", b"/etc/passwd", stat.S_IFLNK | 0o777)
    with pytest.raises(CorruptionError, match="not a plain file"), publish.unpacked(path):
        pass


def test_the_same_name_twice_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("seal.json", b"1")
        archive.writestr("SEAL.json", b"2")  # the same file where case is folded
    with pytest.raises(CorruptionError, match="twice"), publish.unpacked(tmp_path / "a.zip"):
        pass


def test_bombs_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what the archive says, and by what comes out of it."""
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("zeros", b"\0" * 1_000_000)
    monkeypatch.setattr(publish, "ARCHIVED_BYTES", 10_000)
    with pytest.raises(CorruptionError, match="more than"), publish.unpacked(tmp_path / "a.zip"):
        pass
    with zipfile.ZipFile(tmp_path / "a.zip") as archive, archive.open("zeros") as source:
        limited = publish._Limited(source, 10_000)
        assert len(limited.read(9_000)) == 9_000
        with pytest.raises(CorruptionError, match="more than"):
            limited.read(9_000)


def test_what_is_no_archive_is_said_to_be_damaged(
    closed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    publish.export(closed, tmp_path / "a.zip")
    content = (tmp_path / "a.zip").read_bytes()
    for damaged in (
        b"",
        b"PK",
        content[: len(content) // 2],
        content.replace(b'"value":0.1', b'"value":0.3'),
    ):
        (tmp_path / "b.zip").write_bytes(damaged)
        code, _, error = invoke(capsys, "study", "validate", str(tmp_path / "b.zip"))
        assert code == 3
        assert error


@pytest.fixture
def at_most_a_minute() -> Iterator[None]:
    """An error in the place of waiting for ever."""

    def ring(number: int, frame: object) -> None:
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes with names")
@pytest.mark.usefixtures("at_most_a_minute")
def test_a_pipe_is_no_archive_and_no_lock(
    closed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody writes to it, so that whoever opens it as a file waits for ever."""
    pipe, target = str(tmp_path / "a.zip"), str(tmp_path / "b.zip")
    os.mkfifo(pipe)
    for arguments in (("validate", pipe), ("report", pipe), ("export", pipe, target)):
        code, _, error = invoke(capsys, "study", *arguments)
        assert (code, "a.zip is not a plain file" in error) == (3, True)
    code, _, error = invoke(capsys, "study", "validate", target)
    assert (code, "b.zip is missing" in error) == (3, True)
    (closed / "work").mkdir()
    os.mkfifo(closed / "work/lock")
    assert invoke(capsys, "study", "validate", str(closed))[0] == 0
    assert invoke(capsys, "study", "status", str(closed))[0] == 0


# ---- signatures ----


def test_a_signed_archive(
    closed: Path, tmp_path: Path, keys: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    private, public = keys
    target = tmp_path / "a.zip"
    assert invoke(capsys, "study", "export", str(closed), str(target), "--key", str(private))[0] == 0
    code, text, _ = invoke(capsys, "study", "validate", str(target), "--public-key", str(public))
    assert code == 0
    assert "signed by the given key" in text
    unasked = invoke(capsys, "study", "validate", str(target))[1]
    assert "its signature was NOT checked" in unasked
    wanted = "that this is the study that was published"
    assert wanted in unasked
    assert wanted not in text  # a signature says so
    asked = ("study", "validate", str(target), "--public-key", str(public), "--expect")
    digest = ledger.read(closed / "ledger.jsonl").head
    assert "the closing digest is the expected one" in invoke(capsys, *asked, digest)[1]
    assert invoke(capsys, *asked, "0" * 64)[0] == 3


def test_signatures_that_do_not_hold(closed: Path, tmp_path: Path, keys: tuple[Path, Path]) -> None:
    private, public = keys
    publish.export(closed, tmp_path / "a.zip", key=private)
    folder = tmp_path / "unpacked"
    with zipfile.ZipFile(tmp_path / "a.zip") as archive:
        archive.extractall(folder)
    path = folder / "statement.dsse.json"
    envelope = json.loads(path.read_bytes())
    signature = bytearray(base64.b64decode(envelope["signatures"][0]["sig"]))
    signature[5] ^= 1
    forged = base64.b64encode(bytes(signature)).decode()
    other = base64.b64encode(b'{"other":"statement"}').decode()
    for bad, words in (
        (envelope | {"signatures": [{"keyid": "", "sig": forged}]}, "no valid signature"),
        (envelope | {"signatures": []}, "no valid signature"),
        (envelope | {"payload": other}, "signs something else"),
        (envelope | {"payloadType": "text/plain"}, "signs something else"),
        ({"payload": 3}, "not a DSSE envelope"),
    ):
        path.write_bytes(canonical.dumps(bad))
        with pytest.raises(TamperingError, match=words):
            validate(folder, public_key=public)
    path.unlink()
    with pytest.raises(TamperingError, match="not signed"):
        validate(folder, public_key=public)
    with pytest.raises(UsageError, match="PEM"):
        validate_with_bad_key(closed, tmp_path)


def test_endless_files_are_not_read(
    closed: Path, tmp_path: Path, keys: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    zero, large = "/dev/zero", tmp_path / "large"
    with open(large, "wb") as file:
        file.truncate(publish.MOST_KEY + 1)
    export = ("study", "export", str(closed), str(tmp_path / "z.zip"), "--key")
    for command, said in (
        ((*export, zero), "not a plain file"),
        ((*export, str(large)), "at most"),
        (("study", "retrospect", str(closed), zero, "--to", str(tmp_path / "to")), "not a plain file"),
    ):
        code, _, error = invoke(capsys, *command)
        assert (code, said in error) == (2, True), error


def validate_with_bad_key(closed: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.pem"
    bad.write_text("no key")
    publish.export(closed, tmp_path / "b.zip", key=bad)


def test_signatures_are_those_of_the_standard(tmp_path: Path, keys: tuple[Path, Path]) -> None:
    """The pre-authentication encoding of the DSSE specification's own example, and openssl agrees."""
    assert publish._encoded(b"hello world") == b"DSSEv1 28 application/vnd.in-toto+json 11 hello world"
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    private, public = keys
    envelope = publish.envelope(b"hello world", private)
    (tmp_path / "m").write_bytes(publish._encoded(b"hello world"))
    (tmp_path / "s").write_bytes(base64.b64decode(envelope["signatures"][0]["sig"]))
    command = ["openssl", "pkeyutl", "-verify", "-pubin", "-inkey", str(public), "-rawin"]
    done = subprocess.run(
        [*command, "-in", str(tmp_path / "m"), "-sigfile", str(tmp_path / "s")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr + done.stdout


# ---- analyses after the fact ----


def test_a_retrospective_has_its_own_folder_and_label(
    closed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    analysis = study_file(tmp_path, LATE, "late.py")
    before, to = tree(closed, ledger=True), tmp_path / "late"
    code, text, _ = invoke(capsys, "study", "retrospect", str(closed), str(analysis), "--to", str(to))
    assert code == 0
    assert "label   retrospective: positive" in text
    assert tree(closed, ledger=True) == before
    result = canonical.loads((to / "result.json").read_bytes(), "r")
    events = ledger.read(closed / "ledger.jsonl")
    assert result["label"] == "retrospective: positive"
    assert not result["scientific_result"]
    assert result["registered"] == {
        "study": "small", "scale": "small", "seal": events.seal, "closed": events.head, "label": "close",
    }  # fmt: skip
    assert invoke(capsys, "study", "validate", str(to), "--of", str(closed))[0] == 0
    assert invoke(capsys, "study", "validate", str(to))[0] == 2
    for path in sorted(to.iterdir()):
        content = path.read_bytes()
        for i in range(0, len(content), 3):
            path.write_bytes(content[:i] + bytes([content[i] ^ 1]) + content[i + 1 :])
            with pytest.raises(CorruptionError, match=path.name):
                evidence.check_retrospective(to, closed)
        path.write_bytes(content)
    (to / "more").write_text("x")
    with pytest.raises(CorruptionError, match="more"):
        evidence.check_retrospective(to, closed)


def test_what_a_retrospective_may_not_do(closed: Path, tmp_path: Path) -> None:
    content = LATE.encode()
    with pytest.raises(UsageError, match="must not touch"):
        evidence.retrospect(closed, content, "late.py", closed / "late")
    with pytest.raises(UsageError, match="exists already"):
        evidence.retrospect(closed, content, "late.py", tmp_path)
    other = LATE.replace('study="small"', 'study="other"').encode()
    with pytest.raises(UsageError, match="analyses study other"):
        evidence.retrospect(closed, other, "late.py", tmp_path / "late")
    silent = LATE.replace("somebody asked", " ").encode()
    with pytest.raises(UsageError, match="must say why"):
        evidence.retrospect(closed, silent, "late.py", tmp_path / "late")
    opened = tmp_path / "open"
    engine.seal(loading.load(str(study_file(tmp_path, SMALL))), "small", opened)
    with pytest.raises(UsageError, match="is not closed"):
        evidence.retrospect(opened, content, "late.py", tmp_path / "late")
    record = closed / "records" / "outcome" / "arm-1.json"
    record.write_bytes(record.read_bytes().replace(b"0.1", b"0.2"))
    with pytest.raises(TamperingError, match="arm-1"):
        evidence.retrospect(closed, content, "late.py", tmp_path / "late")
