"""Write OpenWebText and Wikipedia as tokens: ``train.bin`` and ``val.bin`` in nanoGPT's layout.

The texts are public data sets of the Hugging Face hub, cut into Parquet files (shards). One shard after
another is downloaded, checked, turned into 16-bit tokens with an end-of-text token after every document,
appended, and removed, so the disk holds the tokens and one shard. A shard counts from the moment that
``prepared.json`` names it, and that file is replaced only when its tokens are on the disk: whatever an
interruption or a kill leaves beyond that is cut off when the work goes on. The token files get their names
when all shards are in them and their digests are known.

The first of every 2,000 documents of a shard is held out. nanoGPT holds out as many, drawn by a shuffle for
which all documents must be on the disk first; so its files and these hold the same documents, cut elsewhere.
"""

from __future__ import annotations

import importlib
import json
import re
import shutil
import time
import urllib.request
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

import numpy as np

from halfulp import canonical, data, files
from halfulp.data import bpe
from halfulp.errors import CorruptionError, TamperingError, UsageError
from halfulp.text import time_left

HUB = "https://huggingface.co"
REPOSITORIES = {
    "openwebtext": ("Skylion007/openwebtext", ""), "wikipedia": ("wikimedia/wikipedia", "20231101.en"),
}  # fmt: skip
"""The repository of a corpus on the hub, and the folder of its shards, or of folders with them."""
STATE, SHARD, SPLITS = "prepared.json", "shard.parquet", ("train", "val")
HELD_OUT = 2000
TOKENS_PER_BYTE = 0.4
"""Tokens for a byte of a shard, about: nanoGPT makes 9.04 billion of the 24 GB of OpenWebText."""
TOKENS_PER_SECOND = 1_000_000
"""Of one core, about: measured on English prose, 1.1 to 1.5 million."""
ASKED_BYTES, ASKED_SECONDS = 10**9, 600
"""Beyond this the work is begun only with ``--yes``."""
ENDS = ("<|endoftext|>", "</s>")

Say = Callable[[str], None]
State = dict[str, Any]


@dataclass(frozen=True)
class Encoder:
    """An encoding of text in 16-bit tokens."""

    name: str
    """``gpt2``, or the digest of a tokenizer's file."""
    size: int
    end: int
    """The token that ends a document."""
    encode: Callable[[str], list[int]]


def encoder(corpus: str, tokenizer: str) -> Encoder:
    """Return the encoding that a corpus is written in.

    Args:
        corpus: The name of the corpus; OpenWebText is written in GPT-2's encoding by default.
        tokenizer: ``gpt2``, or a ``tokenizer.json``, which the library ``tokenizers`` reads.

    Raises:
        UsageError: If none is chosen for Wikipedia, or the file cannot be used.
    """
    if not tokenizer and corpus == "wikipedia":
        raise UsageError(
            "Wikipedia needs --tokenizer. The study that trains on it, dqt-int3, has the 32,000 pieces of "
            "LLaMA: give that tokenizer.json. For tokens of GPT-2, which that study cannot read: "
            "--tokenizer gpt2."
        )
    if tokenizer in ("", "gpt2"):
        published = bpe.Gpt2Bpe.published()
        return Encoder("gpt2", len(published.encoder), published.encoder[ENDS[0]], published.encode)
    try:
        library = _library("tokenizers").Tokenizer.from_file(tokenizer)
        digest = canonical.sha256_file(Path(tokenizer))
    except UsageError:
        raise
    except Exception as error:  # the library raises Exception itself
        raise UsageError(f"{tokenizer} is not a tokenizer.json that can be read: {error}.") from None
    end = next((number for text in ENDS if (number := library.token_to_id(text)) is not None), None)
    size = library.get_vocab_size()
    if end is None or size > 1 << 16:
        raise UsageError(
            f"{tokenizer} has {size:,} tokens, expected at most 65,536, with one of {' or '.join(ENDS)} "
            "to end a document."
        )
    return Encoder(digest, size, end, lambda text: library.encode(text, add_special_tokens=False).ids)


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise UsageError(f"This needs {name}: pip install 'halfulp[data]'.") from None


# ---- the plan -----------------------------------------------------------------------------------------


def plan(state: State, folder: Path) -> str:
    """Describe what is left to download and to store, and how long it will take."""
    left, seconds = _left(state), _seconds(state)
    size = sum(shard["bytes"] for shard in left)
    return (
        f"{len(left)} of {len(state['shards'])} shards of {state['repository']} to read, "
        f"{size / 1e9:.3g} GB; about {size * TOKENS_PER_BYTE / 1e9:.2g} billion tokens, "
        f"{_disk(state) / 1e9:.3g} GB of disk in {folder}, {max(1, round(seconds / 60))} minutes on one core "
        "beside the download."
    )


def _left(state: State) -> list[dict[str, Any]]:
    return [shard for shard in state["shards"] if "tokens" not in shard]


def _seconds(state: State) -> float:
    return float(sum(shard["bytes"] for shard in _left(state)) * TOKENS_PER_BYTE / TOKENS_PER_SECOND)


def _disk(state: State) -> float:
    """Return the bytes of all tokens that are missing, and of a shard."""
    sizes = [shard["bytes"] for shard in _left(state)]
    return float(sum(sizes) * TOKENS_PER_BYTE * 2 + max(sizes, default=0))


def _refuse_unasked(state: State, folder: Path) -> None:
    size, free = sum(shard["bytes"] for shard in _left(state)), shutil.disk_usage(folder).free
    if size > ASKED_BYTES or _seconds(state) > ASKED_SECONDS:
        raise UsageError(f"{plan(state, folder)} Nothing was begun; --yes begins.")
    if _disk(state) > free:
        raise UsageError(f"{plan(state, folder)} Only {free / 1e9:.3g} GB are free there; --yes begins.")


# ---- the shards ---------------------------------------------------------------------------------------


def opened(corpus: str, folder: Path, source: str, writes: Encoder) -> State:
    """Return the state of the work in a folder: what an earlier run left, or all shards to be read.

    Raises:
        UsageError: If the shards cannot be listed, or the folder holds other work or other files.
    """
    if (folder / STATE).is_file():
        try:
            state: State = json.loads((folder / STATE).read_text("utf-8"))
            begun = state["corpus"], state["tokenizer"]
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptionError(f"{folder / STATE} is damaged: {error!r}. Remove {folder}.") from None
        if begun != (corpus, writes.name):
            raise UsageError(
                f"{folder} holds {state['corpus']} in tokens of {state['tokenizer']}, expected {corpus} in "
                f"{writes.name}. Choose another folder (--to), or remove that one."
            )
        return state
    for split in SPLITS:
        if (folder / f"{split}.bin").exists():
            raise UsageError(f"{folder / split}.bin was not made here, and is not replaced. Move it away.")
    repository, under = REPOSITORIES[corpus]
    if "://" in source:
        revision, shards = _on_the_hub(source.rstrip("/"), repository, under)
    elif not Path(source).is_dir():
        raise UsageError(
            f"there is no folder {source}: --source takes an address, or a folder with a copy of "
            f"{repository}."
        )
    else:
        revision, shards = "a folder", _in_a_folder(Path(source) / under)
    counts = {re.sub(r".*-of-0*(\d+)\.parquet", r"\1", shard["path"]) for shard in shards}
    if counts != {str(len(shards))}:
        raise UsageError(
            f"{source} has {len(shards)} files train-NUMBER-of-COUNT.parquet of {repository}"
            f"{' in ' + under if under else ''}, expected as many as their names say."
        )
    return {
        "corpus": corpus, "repository": repository, "revision": revision, "tokenizer": writes.name,
        "vocabulary": writes.size, "shards": shards,
    }  # fmt: skip


def _in_a_folder(folder: Path) -> list[dict[str, Any]]:
    paths = sorted(folder.rglob("train-*.parquet"))
    return [{"path": path.relative_to(folder).as_posix(), "bytes": path.stat().st_size} for path in paths]


def _on_the_hub(hub: str, repository: str, under: str) -> tuple[str, list[dict[str, Any]]]:
    """Return the newest commit of a data set, and its shards there with the digests that the hub states."""
    address = f"{hub}/api/datasets/{repository}"
    try:
        with urllib.request.urlopen(f"{address}/revision/main", timeout=data.TIMEOUT_SECONDS) as source:
            revision = json.load(source)["sha"]
        tree = f"{address}/tree/{revision}/{under}".rstrip("/") + "?recursive=true"
        with urllib.request.urlopen(tree, timeout=data.TIMEOUT_SECONDS) as source:
            shards = [
                {"path": one["path"], "bytes": one["size"], "sha256": one["lfs"]["oid"]}
                for one in json.load(source)
                if re.search(r"(^|/)train-[^/]*\.parquet$", one["path"])
            ]
    except (OSError, HTTPException, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"the files of {repository} could not be listed at {address}: {data.reason(error)}. Try "
            "again, or give a mirror of the hub or a folder with a copy of the repository (--source)."
        ) from None
    return revision, sorted(shards, key=lambda shard: shard["path"])


@contextmanager
def _fetched(state: State, shard: dict[str, Any], source: str, folder: Path) -> Iterator[Path]:
    """Give the verified file of a shard; one that was downloaded is removed at the end."""
    aside = folder / SHARD
    if "://" not in source:
        path = Path(source) / REPOSITORIES[state["corpus"]][1] / shard["path"]
        try:
            size, digest = path.stat().st_size, canonical.sha256_file(path)
        except OSError as error:
            raise UsageError(f"the shard {path} cannot be read: {error.strerror}. Run it again.") from None
    else:
        path = aside
        address = f"{source.rstrip('/')}/datasets/{state['repository']}/resolve/{state['revision']}"
        address += f"/{shard['path']}"
        try:
            with (
                urllib.request.urlopen(address, timeout=data.TIMEOUT_SECONDS) as got,
                open(path, "wb") as file,
            ):
                digest, size = data.copy(got, file, shard["bytes"])
        except (OSError, HTTPException) as error:
            aside.unlink(missing_ok=True)
            raise UsageError(
                f"a shard could not be downloaded from {address}: {error}. Tokens of the shards before it "
                "are kept; run it again to go on."
            ) from None
    try:
        said = f"{shard['path']} is not the listed shard of {shard['bytes']:,} bytes"
        expected = shard.setdefault("sha256", digest) if size == shard["bytes"] else shard.get("sha256")
        data.check_made(said, expected, digest, size)
        yield path
    finally:
        aside.unlink(missing_ok=True)


# ---- writing ------------------------------------------------------------------------------------------


def prepare(
    corpus: str,
    folder: Path,
    source: str = HUB,
    *,
    tokenizer: str = "",
    yes: bool = False,
    planned: bool = False,
    say: Say = print,
) -> Mapping[str, str]:
    """Write the token files of a corpus, or go on with them.

    Args:
        corpus: ``openwebtext`` or ``wikipedia``.
        folder: The folder of the data sets; the files are written in a folder of the corpus's name in it.
        source: The address of the hub or of a mirror, or a folder with a copy of the repository.
        tokenizer: ``gpt2``, the default of OpenWebText, or a ``tokenizer.json``.
        yes: True to begin whatever it takes.
        planned: True to say what it takes, and do nothing.
        say: A function that is called with each line of progress.

    Returns:
        The digest of each token file; none if only the plan was asked for.

    Raises:
        UsageError: If shards cannot be had, the work is long and ``yes`` is False, or a library is missing.
        TamperingError: If a shard is not the one that was listed, or a finished file was changed.
    """
    if corpus not in REPOSITORIES:
        raise UsageError(f"There is no corpus {corpus!r} to prepare; there are {', '.join(REPOSITORIES)}.")
    writes, folder = encoder(corpus, tokenizer), folder / corpus
    _library("polars")
    if planned:
        say(plan(opened(corpus, folder, source, writes), folder))
        return {}
    files.make_folder(folder)
    lock = folder / "prepare.lock"
    held = files.hold(lock, folder) if files.CAN_LOCK else None
    try:
        for left in (*folder.glob(f"{files.PART}*"), folder / SHARD):  # by a kill
            files.remove(left)
        state = opened(corpus, folder, source, writes)
        if _left(state):
            if not yes:
                _refuse_unasked(state, folder)
            say(plan(state, folder))
            _write(state, folder, source, writes, say)
        return _finished(state, folder, say)
    finally:
        lock.unlink(missing_ok=True)
        if held is not None:
            held.release()


def _write(state: State, folder: Path, source: str, writes: Encoder, say: Say) -> None:
    """Append the tokens of every shard that is left."""
    for split in SPLITS:
        kept = 2 * sum(shard["tokens"][split] for shard in state["shards"] if "tokens" in shard)
        part = _part(folder, split)
        size = part.stat().st_size if part.exists() else 0
        if size < kept:
            raise CorruptionError(
                f"{part} is damaged: expected at least {kept:,} bytes, found {size:,}. Remove {folder} and "
                "begin again."
            )
        if size > kept:  # of a shard that was interrupted
            files.cut(part, kept)
    began, whole, done = time.monotonic(), sum(shard["bytes"] for shard in _left(state)), 0
    for shard in _left(state):
        with _fetched(state, shard, source, folder) as path:
            tokens = encoded(path, writes)
        for split in SPLITS:
            content = np.array(tokens[split], dtype="<u2").tobytes()
            files.append(_part(folder, split), content, durable=True)
        shard["tokens"] = {split: len(tokens[split]) for split in SPLITS}
        _keep(state, folder)
        done += shard["bytes"]
        count, number = len(state["shards"]), len(state["shards"]) - len(_left(state))
        left = time_left(time.monotonic() - began, done, whole)
        say(f"{number} of {count}: {sum(shard['tokens'].values()):,} tokens of {shard['path']}{left}")


def encoded(path: Path, writes: Encoder) -> dict[str, array[int]]:
    """Return the tokens of a shard's documents, an end-of-text token after each.

    Args:
        path: A Parquet file with a column ``text``.
        writes: The encoding.

    Raises:
        CorruptionError: If it is no such file.
    """
    polars = _library("polars")
    try:
        texts = polars.read_parquet(path, columns=["text"], glob=False)["text"]
    except (polars.exceptions.PolarsError, OSError) as error:
        raise CorruptionError(f"{path} is not a Parquet file with a column text: {error}.") from None
    if texts.dtype != polars.String or texts.null_count():
        raise CorruptionError(f"{path} has documents in column text that are no text.")
    tokens = {split: array("H") for split in SPLITS}
    for row, text in enumerate(texts):
        into = tokens["val" if row % HELD_OUT == 0 else "train"]
        into.extend(writes.encode(text))
        into.append(writes.end)
    return tokens


def _finished(state: State, folder: Path, say: Say) -> Mapping[str, str]:
    """Give the files their names once their digests are on the disk; check them if they have them."""
    digests: dict[str, str] = {}
    for split in SPLITS:
        part, named = _part(folder, split), folder / f"{split}.bin"
        digests[named.name] = canonical.sha256_file(part if part.exists() else named)
    if state.setdefault("sha256", digests) != digests:
        raise TamperingError(
            f"the token files in {folder} are not those that were made: expected SHA-256 {state['sha256']}, "
            f"found {digests}. Remove the folder and begin again."
        )
    _keep(state, folder)
    for split in SPLITS:
        if _part(folder, split).exists():
            files.rename(_part(folder, split), folder / f"{split}.bin")
        say(f"{folder / split}.bin: sha256 {digests[f'{split}.bin']}")
    return digests


def _part(folder: Path, split: str) -> Path:
    return folder / f"{split}.bin.part"


def _keep(state: State, folder: Path) -> None:
    files.put(folder / STATE, json.dumps(state, indent=1).encode())
