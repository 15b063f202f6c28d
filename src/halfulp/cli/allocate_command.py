"""``halfulp allocate``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from halfulp.cli.option_groups import JSON, option
from halfulp.errors import HalfulpError, UsageError
from halfulp.outputs import check_output, envelope
from halfulp.text import plain, shown

UNITS = {"kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
"""Units of a budget, in bytes."""


def allocate(
    trace: Annotated[Path, typer.Argument(help="A trace that was recorded with --scores.")],
    budget: Annotated[str, option("A share of all masters, such as 10%, or bytes.")],
    score: Annotated[str, option("F, L, C, G, U, W, T, P, R (or R:SPEC) of a rehearsal, or random.")] = "P",
    keep: Annotated[Path | None, option("A mask whose tiles come first: the second round of R.")] = None,
    seed: Annotated[int | None, option("Of a random mask; default 0.")] = None,
    shuffle: Annotated[
        int | None,
        option("A control: then move the tiles to random places of their tensors, by this seed."),
    ] = None,
    output: Annotated[Path, option("The mask.", "--output", "-o")] = Path("mask.safetensors"),
    as_json: JSON = False,
) -> None:
    """Choose the tiles that get an fp32 master within an exact budget, and say what to expect of that."""
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    from halfulp.allocation import masks
    from halfulp.report import recoveries

    check_output(output, ".safetensors")
    if output.is_file():
        try:
            masks.Mask.load(output)
        except HalfulpError as error:
            raise UsageError(f"{error} It is not replaced: choose another --output.") from None
    kept = None if keep is None else masks.Mask.load(keep)
    mask = masks.allocate(trace, _budget(budget), score, seed=seed, keep=kept)
    mask = mask if shuffle is None else mask.shuffled(shuffle)
    mask.save(output)
    evidence = list(recoveries.of_mask(mask, trace))
    if as_json:
        result = {
            "output": str(output), "payload_bytes": mask.payload_bytes, "budget_bytes": mask.budget,
            "blanket_bytes": mask.blanket_bytes, "score": mask.score, "tile": mask.tile,
            "tensors": [
                {"tensor": n, "tiles": int(t.sum()), "of": len(t), "payload_bytes": mask.payload(n)}
                for n, t in mask.tiles.items()
            ],
            "evidence": evidence,
        }  # fmt: skip
        typer.echo(envelope("allocate", result))
        return
    table = Table(Column("tensor", no_wrap=True), "tiles", "of", "bytes of masters")
    for name, tiles in mask.tiles.items():
        table.add_row(
            Text(shown(name)), f"{int(tiles.sum()):,}", f"{len(tiles):,}", f"{mask.payload(name):,}"
        )
    Console().print(table)
    typer.echo(
        f"{mask.payload_bytes:,} of {mask.budget:,} bytes ({mask.payload_bytes / mask.blanket_bytes:.4%} of "
        f"{mask.blanket_bytes:,}), by score {mask.score}, in tiles of {mask.tile}: {plain(str(output))}"
    )
    for line in evidence:
        typer.echo(plain(line))


def _budget(text: str) -> float | int:
    """Parse a share or a number of bytes.

    >>> _budget("2.5%"), _budget("4096"), _budget("1.5 MB"), _budget("64KiB")
    (0.025, 4096, 1500000, 65536)
    """
    parts = re.fullmatch(rf"(0|[1-9][0-9]*)(\.[0-9]+)? ?(%|{'|'.join(UNITS)})?", text.strip())
    if parts is None or (parts[2] and not parts[3]):
        raise UsageError(
            "--budget takes a share such as 10% or 2.5%, or bytes such as 4096, 64KiB or 1.5MB, "
            f"not {text!r}."
        )
    number, unit = float(parts[1] + (parts[2] or "")), parts[3]
    if unit == "%":
        return number / 100
    return int(parts[1]) if unit is None else round(number * UNITS[unit])
