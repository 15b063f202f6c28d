"""Make the prose corpus from its sources: 65 public-domain novels, 4096 word pieces, token files.

The sources are the repositories of Standard Ebooks at fixed commits (`prose_books.json`: repository, commit,
and size and digest of each resulting text). The corpus is made in four steps, each of them checked:

1. its archive is downloaded, ``REPOSITORY/archive/COMMIT.tar.gz`` of github.com or of a mirror;
2. its prose is taken from the XHTML, without title pages, prefaces, notes, tables or figures; an empty line
   separates paragraphs, a line end separates lines of verse, and typographic marks are written in ASCII;
3. the books of a split are joined into one text, with a mark between them;
4. the encoding is learned from the training text (`halfulp.data.bpe`), line by line, and both texts are
   written as 16-bit tokens in nanoGPT's layout.

A file that exists and is right is not made again, so an interrupted build can be resumed. Every file that is
kept has the digest that `datasets.tsv` states. The two compressed texts also depend on the machine's zlib:
with another zlib they cannot have that digest, which is reported, and all other files are still made.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import shutil
import tarfile
import urllib.request
import xml.etree.ElementTree as ET  # the result must have a known digest
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from http.client import HTTPException
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from halfulp import canonical, data, files
from halfulp.data import bpe
from halfulp.errors import UsageError

ORIGIN = "https://github.com"
BOOKS, PIECES = "se_prose_books.json", "prose_bpe4096.json"
SPLITS = ("train", "val")
MARK = "\n<|endoftext|>\n"
COUNT = 4096
DOWNLOAD_BYTES = 5_000_000
"""The mean size of an archive: 65 of them are about 330 MB, covers included. Only texts are kept."""
DISK_BYTES = 280_000_000
"""The size of all files that a build keeps: books, compressed texts, tokens."""
MINUTES = 2
"""The time of a build on one core, without the download."""
TIMEOUT_SECONDS = 60

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Book:
    """A source of the corpus: a repository at a commit, and the text made from it."""

    split: str
    repo: str
    title: str
    commit: str
    bytes: int
    sha256: str

    @property
    def file(self) -> str:
        """The name of the book's text while the corpus is being made."""
        return f"{self.repo.rpartition('/')[2]}.txt"


def is_of(book: Book, content: bytes) -> bool:
    """Return True if these bytes are the text of a book."""
    return len(content) == book.bytes and canonical.sha256(content) == book.sha256


@cache
def listed() -> bytes:
    """Return the list of sources, as the bytes that are stored beside the texts."""
    return resources.files("halfulp.data").joinpath("prose_books.json").read_bytes()


def books() -> list[Book]:
    """Return the sources, in the order of the corpus."""
    return [Book(**book) for book in json.loads(listed())]


# ---- the plan -----------------------------------------------------------------------------------------


def text_of(split: str) -> str:
    """Return the name of a split's compressed text."""
    return f"se_prose_{split}.txt.gz"


def tokens_of(split: str) -> str:
    """Return the name of a split's token file."""
    return f"prose_bpe4096_{split}.bin"


def names() -> list[str]:
    """Return the names of the data sets that a build makes."""
    return [BOOKS, *map(text_of, SPLITS), PIECES, *map(tokens_of, SPLITS)]


def missing(folder: Path) -> list[str]:
    """Return the names of the data sets that are missing from a folder, or there with another digest."""
    return [name for name in names() if not _there(folder, name)]


def plan(folder: Path) -> str:
    """Describe what a build in a folder will download and store, and how long it will take."""
    left = _unread(folder)
    return (
        f"{len(left)} of {len(books())} books to download, about {len(left) * DOWNLOAD_BYTES / 1e6:.0f} MB; "
        f"{DISK_BYTES / 1e6:.0f} MB of disk in {folder}; then about {MINUTES} minutes on one core."
    )


def _there(folder: Path, name: str) -> bool:
    path = folder / name
    return path.is_file() and data.state(data.dataset(name), path) == "ok"


def _unread(folder: Path) -> list[Book]:
    """Return the books that have to be downloaded; none if the texts exist."""
    if all(_there(folder, text_of(split)) for split in SPLITS):
        return []
    return [b for b in books() if not ((path := _place(folder, b)).is_file() and is_of(b, path.read_bytes()))]


def _place(folder: Path, book: Book) -> Path:
    return folder / "prose_books" / book.file


# ---- building -----------------------------------------------------------------------------------------


def build(folder: Path, mirror: str = ORIGIN, say: Say = print) -> list[Path]:
    """Make the files of the corpus that are missing from a folder.

    Args:
        folder: The folder of the data sets; files that exist and are right are left as they are.
        mirror: The address or the folder that holds the repositories' archives.
        say: A function that is called with each line of progress.

    Returns:
        The files of the corpus that have the digests of `datasets.tsv`.

    Raises:
        UsageError: If an archive cannot be downloaded.
        TamperingError: If a text or a file that was made does not have its published digest.
    """
    say(plan(folder))
    waiting = _unread(folder)
    for done, book in enumerate(waiting, 1):
        files.put(_place(folder, book), _fetched(book, mirror))
        say(f"{done} of {len(waiting)}: {book.title}")
    if not _there(folder, BOOKS):
        _keep(folder, BOOKS, listed())
    texts = {split: _text(folder, split) for split in SPLITS}
    for split, text in texts.items():
        name = text_of(split)
        if not _there(folder, name) and not _keep(folder, name, compressed(text), zlib=True):
            say(
                f"{name}: the text is right, and this machine's zlib compresses it to other bytes "
                "than those that are listed. It is not kept; tokens do not depend on it."
            )
    if any(not _there(folder, name) for name in (PIECES, *map(tokens_of, SPLITS))):
        _encode(folder, {split: text.decode() for split, text in texts.items()}, say)
    if not missing(folder):  # the books are in the texts
        shutil.rmtree(folder / "prose_books", ignore_errors=True)
    return [folder / name for name in names() if _there(folder, name)]


def _fetched(book: Book, mirror: str) -> bytes:
    """Download a book's archive and return its text."""
    if "://" not in mirror and not Path(mirror).is_dir():
        raise UsageError(f"there is no folder {mirror}: --mirror takes an address, or a folder of archives.")
    base = mirror if "://" in mirror else Path(mirror).resolve().as_uri()
    address = f"{base.rstrip('/')}/{book.repo}/archive/{book.commit}.tar.gz"
    try:
        with urllib.request.urlopen(address, timeout=TIMEOUT_SECONDS) as source:
            content = prose(io.BytesIO(source.read()))
    except (OSError, EOFError, HTTPException, tarfile.TarError, KeyError, ET.ParseError) as error:
        raise UsageError(
            f"the archive of {book.title} could not be taken from {address}: {data.reason(error)}. "
            "Books that were read are kept; run it again to go on, or give another --mirror."
        ) from None
    said = f"the prose of {book.title}, from {address}, is not what it should be"
    data.check_made(said, book.sha256, canonical.sha256(content), len(content))
    return content


def _text(folder: Path, split: str) -> bytes:
    """Return the text of a split, from its compressed file or by joining the books."""
    if _there(folder, text_of(split)):
        return gzip.decompress((folder / text_of(split)).read_bytes())
    return MARK.encode().join(_place(folder, b).read_bytes() for b in books() if b.split == split)


def compressed(content: bytes) -> bytes:
    """Compress bytes with gzip, without a time or a name in the header."""
    buffer = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", fileobj=buffer, compresslevel=9, mtime=0) as file:
        file.write(content)
    return buffer.getvalue()


def _keep(folder: Path, name: str, content: bytes, *, zlib: bool = False) -> bool:
    """Write a data set if it has the listed digest; otherwise raise, or return False if zlib may differ."""
    expected, digest = data.dataset(name).sha256, canonical.sha256(content)
    if zlib and digest != expected:
        return False
    data.check_made(f"{name} as it was made here is not the data set", expected, digest, len(content))
    files.put(folder / name, content, folder / "prose_books")  # what a kill leaves goes with that folder
    return True


def _encode(folder: Path, texts: dict[str, str], say: Say) -> None:
    say(f"learning {COUNT} pieces")
    words, places = cut(texts["train"])
    counts = dict(zip(words, np.bincount(places, minlength=len(words)).tolist(), strict=True))
    encoder, merges = bpe.learn(counts, COUNT)
    _keep(folder, PIECES, described(encoder, merges))
    encoding = bpe.Gpt2Bpe(encoder, merges)
    for split, (its_words, its_places) in {"train": (words, places), "val": cut(texts["val"])}.items():
        say(f"writing the tokens of {split}")
        each = [encoding.encode(word) for word in its_words]
        tokens = array("H")
        for place in its_places.tolist():
            tokens.extend(each[place])
        _keep(folder, tokens_of(split), np.array(tokens, dtype="<u2").tobytes())


def cut(text: str) -> tuple[list[str], npt.NDArray[np.uint32]]:
    r"""Cut a text into words, line by line; return the distinct words, and the index of each word in them.

    >>> words, places = cut("a b\na b\n")
    >>> words, places.tolist()
    (['a', ' b', '\n'], [0, 1, 2, 0, 1, 2])
    """
    known: dict[str, int] = {}
    places = array("L")
    pattern = bpe.word_pattern()
    for line in text.splitlines(keepends=True):
        places.extend([known.setdefault(word, len(known)) for word in pattern.findall(line)])
    return list(known), np.array(places, dtype=np.uint32)


def described(encoder: dict[str, int], merges: list[tuple[str, str]]) -> bytes:
    """Return the file of an encoding, as the library ``tokenizers`` writes it."""
    bytewise = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
        "vocab": encoder, "merges": merges,
    }  # fmt: skip
    whole: dict[str, Any] = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": bytewise, "post_processor": None, "decoder": {**bytewise, "add_prefix_space": True},
        "model": model,
    }  # fmt: skip
    return json.dumps(whole, indent=2, ensure_ascii=False).encode()


# ---- from XHTML to prose ------------------------------------------------------------------------------

_NAMESPACES = {"opf": "http://www.idpf.org/2007/opf", "html": "http://www.w3.org/1999/xhtml"}
_TYPE = "{http://www.idpf.org/2007/ops}type"
_NO_PROSE = re.compile(
    r"(titlepage|imprint|halftitlepage|colophon|uncopyright|dedication|toc|loi|preface|introduction|foreword|"
    r"glossary|appendix|dramatis-personae|endnotes)(-.*)?"
)
"""Files of a book that are not its prose."""
_DROPPED = {"cite", "table", "figure"}
_BLOCKS = {
    "p", "h1", "h2", "h3", "h4", "h5", "h6", "li", "dt", "dd", "div", "blockquote", "section", "header",
    "footer", "hgroup", "ol", "ul", "dl", "hr", "article", "body", "pre", "figcaption",
}  # fmt: skip
_ASCII = str.maketrans(
    {
        "\u201c": '"', "\u201d": '"', "\u2018": "'", "\u2019": "'", "\u2026": "...", "\uffe1": "£",
        "\u2011": "-", "\u2012": "-", "\u2013": "-", "\u2014": "--", "\u2e3a": "----", "\u2e3b": "------",
        "\u200a": " ", "\u00a0": " ", "\u2060": "", "\ufeff": "", "\u200b": "", "\u200e": "",
    }
)  # fmt: skip


def prose(archive: io.BytesIO) -> bytes:
    """Return the prose of a book, from the archive of its repository.

    Args:
        archive: The archive, a ``tar.gz`` file.

    Returns:
        The text in UTF-8, with an empty line between paragraphs.
    """
    with tarfile.open(fileobj=archive, mode="r:gz") as tar:
        pages = {
            member.name.partition("/src/epub/")[2]: file.read()
            for member in tar
            if member.isfile() and member.name.endswith((".xhtml", "content.opf"))
            and (file := tar.extractfile(member)) is not None
        }  # fmt: skip
    package = ET.fromstring(pages["content.opf"])
    places = {
        item.get("id"): item.get("href", "") for item in package.findall("opf:manifest/opf:item", _NAMESPACES)
    }
    paragraphs: list[str] = []
    for item in package.findall("opf:spine/opf:itemref", _NAMESPACES):
        place = places[item.get("idref")]
        if not _NO_PROSE.fullmatch(Path(place).stem):
            body = ET.fromstring(pages[place]).find("html:body", _NAMESPACES)
            paragraphs += [] if body is None else _paragraphs(body)
    return ("\n\n".join(paragraphs) + "\n").translate(_ASCII).encode()


def _paragraphs(body: ET.Element) -> Iterator[str]:
    """Yield the text blocks of a page in order; runs of blanks become one, and a break becomes a line end."""
    fragments: list[str] = []
    for piece in (*_walked(body), None):
        if piece is not None:
            fragments.append(piece)
            continue
        lines = "".join(fragments).split("\x01")
        text = "\n".join(_one_blank(line) for line in lines).strip()
        fragments = []
        if text:
            yield text


def _one_blank(line: str) -> str:
    return re.sub(r"[ \t\r\n]+", " ", line).strip(" ")


def _walked(element: ET.Element) -> Iterator[str | None]:
    r"""Yield the text of an element, with \x01 for a break and None where a block begins or ends."""
    tag = element.tag.rpartition("}")[2]
    if tag in _DROPPED or "noteref" in element.get(_TYPE, ""):
        return
    if tag in _BLOCKS:
        yield None
    if tag == "br":
        yield "\x01"
    yield element.text or ""
    for child in element:
        yield from _walked(child)
        yield child.tail or ""
    if tag in _BLOCKS:
        yield None
