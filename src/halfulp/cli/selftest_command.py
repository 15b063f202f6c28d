"""``halfulp selftest``."""

from __future__ import annotations

from typing import Annotated

import typer

from halfulp.cli.option_groups import option


def selftest(
    device: Annotated[str, option("cpu or cuda.")] = "cpu",
    matrices: Annotated[int, option("Millions of weights to time a step of; 0: no benchmark.", min=0)] = 10,
) -> None:
    """Compare every kernel with the reference on this machine, time a step, and print one page to post."""
    from halfulp import selftest as test

    raise typer.Exit(0 if test.run(device, matrices, typer.echo) else 1)
