"""Data sets: found by name, verified by digest, downloaded whole or not at all."""

from __future__ import annotations

import functools
import hashlib
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path
from types import MappingProxyType

import pytest
from typer.testing import CliRunner

from halfulp import data
from halfulp.cli import app
from halfulp.data import DataSet
from halfulp.errors import TamperingError, UsageError

CONTENT = b"to be or not to be\n" * 100


def made(url: str | None, content: bytes = CONTENT) -> DataSet:
    return DataSet(
        name="plays/small.txt", bytes=len(content), sha256=hashlib.sha256(content).hexdigest(), url=url,
        origin="a test", licence="none",
    )  # fmt: skip


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A data folder and a cache, both empty, and one known data set without an address."""
    folder, cache = tmp_path / "folder", tmp_path / "cache"
    monkeypatch.setenv(data.FOLDER, str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    know(monkeypatch, made(None))
    return folder, cache / "halfulp" / "data"


def know(monkeypatch: pytest.MonkeyPatch, known: DataSet) -> None:
    monkeypatch.setattr(data, "DATASETS", MappingProxyType({known.name: known}))


def put(folder: Path, content: bytes = CONTENT) -> Path:
    path = folder / "plays" / "small.txt"
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    return path


def left_in(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.rglob("*") if p.is_file())


# ---- the table ----------------------------------------------------------------------------------------


def test_table_is_sound() -> None:
    """Digests are digests, names are relative and safe, addresses are https."""
    assert len(data.DATASETS) == 17
    for known in data.DATASETS.values():
        assert not Path(known.name).is_absolute()
        assert ".." not in known.name
        assert known.origin
        assert known.licence
        assert known.url is None or known.url.startswith("https://")
        own = known.name.startswith(("openwebtext/", "wikipedia/"))  # the user writes these
        assert (known.sha256 is None) == (known.bytes is None) == own
        assert known.sha256 is None or len(bytes.fromhex(known.sha256)) == 32
    assert data.DIGESTS.keys() == {n for n, d in data.DATASETS.items() if d.sha256}


@pytest.mark.skipif("HALFULP_DATA" not in os.environ, reason="HALFULP_DATA is not set")
@pytest.mark.parametrize("name", sorted(data.DIGESTS))
def test_known_file_has_its_digest(name: str) -> None:
    """A real copy is accepted: the table's digests are those of the files."""
    if data.located(data.DATASETS[name]) is None:
        pytest.skip("not in HALFULP_DATA")
    assert data.state(data.DATASETS[name], data.find(name)) == "ok"


# ---- finding ------------------------------------------------------------------------------------------


def test_folder_comes_before_cache(places: tuple[Path, Path]) -> None:
    folder, cache = places
    in_cache = put(cache)
    assert data.find("plays/small.txt") == in_cache
    in_folder = put(folder)
    assert data.find("plays/small.txt") == in_folder


@pytest.mark.parametrize("content", [CONTENT[:-1], CONTENT + b"x", b"T" + CONTENT[1:]])
def test_wrong_file_is_refused(places: tuple[Path, Path], content: bytes) -> None:
    """Also when a right one is in the next place: a wrong file is a mistake, not a miss."""
    folder, cache = places
    wrong = put(folder, content)
    put(cache)
    with pytest.raises(TamperingError, match=str(wrong)):
        data.find("plays/small.txt")


def test_missing_without_address_says_where_to_put_it(places: tuple[Path, Path]) -> None:
    with pytest.raises(UsageError, match=r"a test.*HALFULP_DATA/plays/small.txt"):
        data.find("plays/small.txt")


def test_unknown_name_lists_the_known(places: tuple[Path, Path]) -> None:
    with pytest.raises(UsageError, match=r"no data set 'hamlet'; known: plays/small.txt"):
        data.find("hamlet")


def test_without_digest_any_file_is_taken(places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's own tokens: there is nothing to compare them with."""
    known = DataSet(name="plays/small.txt", bytes=None, sha256=None, url=None, origin="you", licence="yours")
    know(monkeypatch, known)
    path = put(places[0], b"anything")
    assert data.find("plays/small.txt") == path
    assert data.state(known, path) == "no digest known"


# ---- downloading --------------------------------------------------------------------------------------


def test_download_is_verified_and_kept(
    places: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source.txt"
    source.write_bytes(CONTENT)
    know(monkeypatch, made(source.as_uri()))
    path = data.find("plays/small.txt")
    assert path == places[1] / "plays/small.txt"
    assert path.read_bytes() == CONTENT
    source.unlink()  # from now on the cache has it
    assert data.find("plays/small.txt") == path
    assert left_in(places[1]) == ["small.txt"]


@pytest.mark.parametrize("content", [CONTENT[:-1], CONTENT + b"more", b"T" + CONTENT[1:], b""])
def test_wrong_download_leaves_nothing(
    places: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    source = tmp_path / "source.txt"
    source.write_bytes(content)
    know(monkeypatch, made(source.as_uri()))
    with pytest.raises(TamperingError, match="Nothing was kept"):
        data.find("plays/small.txt")
    assert left_in(places[1]) == []


def test_endless_download_is_cut(places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """An address that never stops is not followed further than the size that is expected."""
    monkeypatch.setattr(data, "CHUNK", 1 << 10)
    know(monkeypatch, made(Path("/dev/zero").as_uri()))
    with pytest.raises(TamperingError, match=r"over 2,048 bytes"):
        data.find("plays/small.txt")
    assert left_in(places[1]) == []


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


class Broken(BaseHTTPRequestHandler):
    """Promises more than it sends."""

    def do_GET(self) -> None:  # the name that http.server calls
        self.send_response(200)
        self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        self.wfile.write(CONTENT[:50])

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def serve() -> Iterator[object]:
    """Start a server of this machine; gives its address."""
    servers: list[tuple[HTTPServer, threading.Thread]] = []

    def start(handler: object) -> str:
        server = HTTPServer(("127.0.0.1", 0), handler)  # type: ignore[arg-type]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        servers.append((server, thread))
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server, thread in servers:
        server.shutdown()
        thread.join()
        server.server_close()


def test_http(
    places: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, serve: object
) -> None:
    """Over HTTP: the file; a missing page and a broken connection leave nothing."""
    (tmp_path / "small.txt").write_bytes(CONTENT)
    address = serve(functools.partial(Quiet, directory=str(tmp_path)))  # type: ignore[operator]
    know(monkeypatch, made(f"{address}/gone.txt"))
    with pytest.raises(UsageError, match=r"could not be downloaded .*404"):
        data.find("plays/small.txt")
    know(monkeypatch, made(serve(Broken)))  # type: ignore[operator]
    with pytest.raises((TamperingError, UsageError), match="Nothing was kept"):
        data.find("plays/small.txt")
    assert left_in(places[1]) == []
    know(monkeypatch, made(f"{address}/small.txt"))
    assert data.find("plays/small.txt").read_bytes() == CONTENT


def test_interrupt_leaves_nothing(
    places: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source.txt"
    source.write_bytes(CONTENT)
    know(monkeypatch, made(source.as_uri()))

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", stop)
    with pytest.raises(KeyboardInterrupt):
        data.find("plays/small.txt")
    assert left_in(places[1]) == []


# ---- the command --------------------------------------------------------------------------------------


def test_command_lists_and_gets(places: tuple[Path, Path]) -> None:
    runner = CliRunner()
    assert "nowhere" in runner.invoke(app, ["data"]).output
    path = put(places[0])
    listed = runner.invoke(app, ["data"]).output
    assert "plays/small.txt" in listed
    assert "ok" in listed
    shown = runner.invoke(app, ["data", "plays/small.txt"])
    assert str(path) in shown.output
    assert hashlib.sha256(CONTENT).hexdigest() in shown.output
    path.write_bytes(b"?" + CONTENT[1:])
    assert "wrong digest" in runner.invoke(app, ["data"]).output
    refused = runner.invoke(app, ["data", "plays/small.txt"]).exception
    assert isinstance(refused, TamperingError)
    assert refused.exit_code == 3
