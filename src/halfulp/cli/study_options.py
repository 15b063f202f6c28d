"""What commands of ``halfulp study`` take: a study and its scale, or the folder of one, and what to check.

A folder, or an archive, may carry the study's own code: whoever opens one says so before any of it is run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from halfulp import outputs
from halfulp.cli.option_groups import option
from halfulp.errors import CorruptionError, UsageError
from halfulp.study import evidence, loading, publish
from halfulp.study import validate as validation
from halfulp.text import plain

SCALE = Annotated[
    str, option("smoke, small, medium or paper; default small, or the only one that the study has.")
]
OUT = Annotated[Path | None, option("The study's folder; default runs/NAME-SCALE.")]
EXPECT = Annotated[
    str | None, option("A digest printed when the study was sealed or closed.", show_default=False)
]
EVIDENCE = Annotated[
    list[str] | None,
    option("The closed study that a study declares as evidence; once for each.", metavar="NAME=FOLDER"),
]
HELD = ("ledger.jsonl", *outputs.STUDY, evidence.DECLARATION)
"""Files of which the folder of a run holds one, whatever happened to it."""
VALIDATION = "What else is checked"
"""The panel of options that ``validate --help`` leaves to ``--help-all``."""


@dataclass(frozen=True)
class Declared:
    """A study by name or file, at one of its scales."""

    study: Annotated[
        str, typer.Argument(help="A study by name (see `halfulp study list`), or a file.py of your own.")
    ]
    scale: SCALE = ""

    def load(self) -> tuple[loading.Source, str]:
        """Load the study; return it with the scale: the given one, or the usual one."""
        source = loading.load(self.study)
        scales, scale = source.study.scales, self.scale
        if not scale:
            scale = "small" if "small" in scales or len(scales) > 1 else next(iter(scales))
        source.study.config(scale)
        return source, scale

    def folder(self, out: Path | None) -> tuple[loading.Source, str, Path]:
        """Load the study; return it with its scale and its folder."""
        source, scale = self.load()
        return source, scale, out or Path("runs") / f"{source.study.name}-{scale}"


@dataclass(frozen=True)
class StudyPlace:
    """The folder of a study that was sealed, however it is named."""

    study: Annotated[
        str,
        typer.Argument(
            help="A study's folder, an exported archive, or a study by name or file (then --scale says which "
            "run)."
        ),
    ]
    scale: SCALE = ""
    out: OUT = None

    @contextmanager
    def opened(self, *, code: bool, instead: str = "--no-code runs none of it") -> Iterator[Path]:
        """Open the folder of a run, or of an archive's content for as long as it is needed.

        Args:
            code: True if a file that the folder carries is going to be run, which is said.
            instead: How to do without that.
        """
        named = self.study in loading.REGISTRY or self.study.partition(":")[0].endswith(".py")
        named = named and not Path(self.study).is_dir()
        if self.scale and (self.out is not None or not named):
            raise UsageError(
                f"--scale says which run of a study by name or file; {self.out or self.study} is one run: "
                "leave it out."
            )
        if self.out is not None and not named:
            raise UsageError(
                f"--out names the run of a study by name or file, which {self.study[:200]!a} is not."
            )
        with ExitStack() as stack:
            packed = not named and Path(self.study).suffix == ".zip"
            if packed:
                folder = stack.enter_context(publish.unpacked(Path(self.study)))
            elif named:
                folder = self.out or Declared(self.study, self.scale).folder(None)[2]
            else:
                folder = Path(self.study)
            if not any(os.path.lexists(folder / name) for name in HELD):
                if packed:
                    raise CorruptionError(
                        f"{plain(self.study)} holds no study. `halfulp study export` writes archives."
                    )
                raise UsageError(
                    f"There is no run of a study at {plain(str(folder))}. Expected its folder, such as "
                    "runs/NAME-SCALE, an archive (.zip), or a study by name or file that was run: "
                    "`halfulp study run` makes a run."
                )
            if code:
                say_code(folder, instead)
            yield folder


@dataclass(frozen=True)
class Checks:
    """What a validation asks beside digests, gates and label, and what code it runs."""

    expect: EXPECT = None
    replay: Annotated[bool, option("Run cells again and compare bit for bit.", "--replay")] = False
    no_code: Annotated[
        bool, option("Run no code of the study: digests, gates and label only.", "--no-code")
    ] = False
    registered: Annotated[
        Path | None,
        option("For a retrospective analysis: the folder of the study that it is of.", "--of"),
    ] = None
    strict_code: Annotated[
        bool, option("Other code than the sealed is a failure.", "--strict-code", panel=VALIDATION)
    ] = False
    strict_provenance: Annotated[
        bool,
        option(
            "A seal that names no commit of halfulp is a failure.", "--strict-provenance", panel=VALIDATION
        ),
    ] = False
    public_key: Annotated[
        Path | None,
        option("An ed25519 key (PEM) that must have signed the exported statement.", panel=VALIDATION),
    ] = None
    data_folder: Annotated[
        Path | None,
        option("With --replay: where data files lie that the study file names.", panel=VALIDATION),
    ] = None
    workers: Annotated[int | None, option("With --replay: cells run at a time.", min=1, panel=VALIDATION)] = (
        None
    )

    def check(self, cells: Sequence[str]) -> None:
        """Refuse an empty digest, and options of a replay without one."""
        validation.check_expected(self.expect)
        given = {
            "Cells are named": bool(cells), "--workers is": self.workers is not None,
            "--data-folder is": self.data_folder is not None,
        }  # fmt: skip
        for what, there in given.items():
            if there and not self.replay:
                raise UsageError(f"{what} for --replay only: add that, or leave it out.")

    @property
    def before_code(self) -> bool:
        """True if no code is run, or something from outside vouches for the study before any is."""
        return self.no_code or self.expect is not None or self.public_key is not None

    def validate(self, folder: Path, cells: list[str]) -> validation.Validation:
        """Validate the folder of a study."""
        return validation.validate(
            folder, expect=self.expect, strict_code=self.strict_code, code=not self.no_code,
            replay=cells if self.replay else None, data_folder=self.data_folder, public_key=self.public_key,
            workers=self.workers, strict_provenance=self.strict_provenance,
        )  # fmt: skip


def evidence_folders(given: list[str] | None) -> dict[str, Path]:
    """Read ``NAME=FOLDER``, as often as it was given."""
    folders: dict[str, Path] = {}
    for one in given or []:
        name, equals, folder = one.partition("=")
        if not (name and equals and folder) or name in folders:
            raise UsageError(f"--evidence takes NAME=FOLDER, each name once, not {one[:200]!a}.")
        folders[name] = Path(folder)
        say_code(folders[name], "evidence is validated, so that it can be sealed")
    return folders


def say_code(folder: Path, instead: str) -> None:
    """Say that code is run which a folder carries. Every command that does so says it here."""
    for name in ("study.py", "analysis.py"):
        if (folder / name).is_file():
            typer.echo(
                f"halfulp: running {name}, code that {plain(str(folder))} carries. If it came from somebody "
                f"else, read it first; {instead}.",
                err=True,
            )
