"""Print the answers of ``halfulp data``: every data set, where it is, and whether its digest is right."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from halfulp import data


def table() -> Table:
    """Return a table of all data sets and the state of their files. Nothing is downloaded."""
    out = Table("name", "bytes", "found in", "digest")
    out.columns[0].no_wrap = True
    for known in data.DATASETS.values():
        path = data.located(known)
        missing = "nowhere" if known.url is None else "nowhere yet"
        where = "cache" if path == data.cache_folder() / known.name else f"${data.FOLDER}"
        out.add_row(
            known.name,
            "-" if known.bytes is None else f"{known.bytes:,}",
            missing if path is None else where,
            "-" if path is None else data.state(known, path),
        )
    return out


def one(name: str, console: Console) -> None:
    """Print one data set, downloading it if necessary.

    Args:
        name: The name of a data set; ``DATASETS`` lists them.
        console: The console to print on.

    Raises:
        UsageError: If there is no such data set, or it is not here and cannot be downloaded.
        TamperingError: If the file does not have its published digest.
    """
    known = data.dataset(name)
    path = data.find(name)
    for what, value in (
        ("file", path),
        ("bytes", f"{path.stat().st_size:,}"),
        ("sha256", known.sha256 or "none known; a study records the digest that it runs on"),
        ("origin", known.origin),
        ("licence", known.licence),
    ):
        console.print(f"{what + ':':9}{value}", highlight=False, markup=False, soft_wrap=True)
