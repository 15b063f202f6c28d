"""``halfulp grids``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from halfulp.cli.console import NAMES, print_plain

if TYPE_CHECKING:
    from rich.table import Table

    from halfulp.numbers.grids import Grid


def grids(
    name: Annotated[str, typer.Argument(help=f"A grid; none lists the known ones. {NAMES}")] = "",
) -> None:
    """List the grids, or state the rules of one."""
    from rich.console import Console

    from halfulp.numbers.grids import grid

    console = Console()
    if name:
        print_plain(console, *_rules(grid(name)))
        return
    console.print(_table())
    print_plain(console, NAMES, "Other names of these work too, such as torch.bfloat16, BF16, fp8_e4m3.")


def _table() -> Table:
    from rich.table import Column, Table

    from halfulp.numbers.grid_names import SHOWN
    from halfulp.numbers.grids import grid

    name_column = Column("name", no_wrap=True)  # to be copied
    table = Table(name_column, "bits", "mantissa", "smallest normal", "largest", "bytes per weight", "scale")
    for known in SHOWN:
        g = grid(known)
        table.add_row(
            known,
            str(g.bits),
            str(g.mantissa),
            "-" if g.emin is None or g.integer else f"{g.smallest_normal:.3g}",
            "-" if g.largest is None else f"{g.largest:g}" if g.largest < 1e5 else f"{g.largest:.3g}",
            f"{g.bytes_per_weight:g}",
            "fixed" if g.scaling is None else f"{g.scaling.rule} / {g.scaling.size or g.scaling.per}",
        )
    return table


def _rules(g: Grid) -> list[str]:
    lines = [str(g), *(f"  {rule + ':':12}{text}" for rule, text in g.rules.items())]
    if g.emin is not None and g.bits <= 8:
        values = g.values()
        up = values[values >= 0]
        first = ", ".join(f"{v:g}" for v in up[:12]) + (" ..." if len(up) > 12 else "")
        lines.append(f"  {'codes:':12}{len(values)} values; from zero up {first}")
    return lines
