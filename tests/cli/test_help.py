"""``--help`` of every command: it fits on a screen, and ``--help-all`` shows what it leaves out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from halfulp.cli import app

LINES = 40
"""What a terminal of 80 columns shows at once."""


def commands(group: Any, *names: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, *names, name)
        elif not command.hidden:
            yield (*names, name), command


COMMANDS = dict(commands(typer.main.get_command(app)))


@pytest.mark.parametrize("names", COMMANDS, ids=" ".join)
def test_help_fits_on_a_screen(names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = CliRunner().invoke(app, [*names, "--help"])
    assert shown.exit_code == 0
    assert len(shown.output.splitlines()) <= LINES
    in_panels = [p.opts[0] for p in COMMANDS[names].params if getattr(p, "rich_help_panel", None)]
    assert ("--help-all" in shown.output) == bool(in_panels)
    assert not [option for option in in_panels if option in shown.output]


@pytest.mark.parametrize("names", [("audit",), ("check",), ("study", "validate")], ids=" ".join)
def test_all_options_are_shown_on_request(names: tuple[str, ...]) -> None:
    every = CliRunner().invoke(app, [*names, "--help-all"])
    assert every.exit_code == 0
    for p in COMMANDS[names].params:
        assert p.param_type_name == "argument" or p.opts[0] in every.output
