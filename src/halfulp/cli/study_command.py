"""``halfulp study``: the commands. Text of studies is never printed as markup."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from halfulp import canonical, documents, files
from halfulp.cli.entry import Command
from halfulp.cli.option_groups import JSON, grouped, option
from halfulp.errors import CorruptionError, UsageError
from halfulp.outputs import check_output, envelope
from halfulp.study import engine, ledger, loading, planning, publish
from halfulp.study import evidence as opening
from halfulp.study import seal as seals
from halfulp.study import validate as validation
from halfulp.study.declaration import Protocol
from halfulp.study.protocol import Json, Study
from halfulp.study.store import Status, Store
from halfulp.text import number, plain

app = typer.Typer(
    name="study",
    help="Studies whose protocol is sealed before their outcomes, and whose verdict can be recomputed.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

STUDY = typer.Argument(..., help="A study by name (see `halfulp study list`), or a file.py of your own.")
PLACE = typer.Argument(
    ...,
    help="A study's folder, an exported archive, or a study by name or file (then --scale says which run).",
)
SCALE = typer.Option(
    "", help="smoke, small, medium or paper; default small, or the only one that the study has."
)
OUT = typer.Option(None, help="The study's folder; default runs/NAME-SCALE.")
EVIDENCE = typer.Option(
    [], metavar="NAME=FOLDER", help="The closed study that a study declares as evidence; once for each."
)


@app.command("list")
def list_() -> None:
    """List the studies that come with halfulp."""
    if not loading.REGISTRY:
        typer.echo("This halfulp comes without studies. Run one of your own: halfulp study run file.py")
    for name in sorted(loading.REGISTRY):
        try:
            study = loading.load(name).study
        except UsageError as error:
            typer.echo(f"{name}  [-]  {plain(str(error))}")
        else:
            typer.echo(f"{name}  [{' '.join(study.scales)}]  {plain(study.question)}")


@app.command()
def show(
    study: str = STUDY,
    scale: str = SCALE,
    as_json: bool = typer.Option(False, "--json", help="The canonical JSON that would be sealed."),
) -> None:
    """Print everything that would be sealed, before anything runs."""
    declared = loading.load(study).study
    protocol = Protocol.of(declared, chosen_scale(declared, scale))
    if as_json:
        typer.echo(protocol.bytes.decode())
    else:
        for line in seals.in_words(protocol):
            typer.echo(line)


@app.command()
def plan(
    study: str = STUDY,
    scale: str = SCALE,
    device: str = typer.Option("", help="A GPU of the table, for its hours; here they are measured."),
    steps: int = typer.Option(2, min=0, help="Steps of a cell that are timed; 0 measures nothing."),
    seconds: float = typer.Option(900.0, min=1.0, help="The most that a cell is given for its steps."),
) -> None:
    """Say what a study would take: cells, updates, bytes, and hours measured from a few updates."""
    source, scale, _ = loaded(study, scale, None)
    plans = planning.planned(source, scale, steps=steps, seconds=seconds)
    for line in planning.in_words(source, scale, plans, device):
        typer.echo(plain(line))


@app.command()
def seal(
    study: str = STUDY, scale: str = SCALE, out: Path | None = OUT, evidence: list[str] = EVIDENCE
) -> None:
    """Fix protocol, code, data, evidence and environment; nothing runs."""
    source, scale, folder = loaded(study, scale, out)
    digest = engine.seal(source, scale, folder, evidence=named_folders(evidence))
    for line in seals.facts(Store(folder).read_seal(digest)):
        typer.echo(line)
    typer.echo(f"sealed in {folder}\nseal sha256 {digest}")


@app.command()
def run(
    study: str = STUDY,
    scale: str = SCALE,
    out: Path | None = OUT,
    executor: str = typer.Option(
        "local", help="local: worker processes; ray: a Ray cluster; inline: this process."
    ),
    workers: int | None = typer.Option(None, min=1, help="Cells at a time; default cores over threads."),
    deviation: str = typer.Option(
        "",
        help="Why to go on although code or environment changed since the seal; the label is not promoted.",
    ),
    evidence: list[str] = EVIDENCE,
    yes: bool = typer.Option(False, "--yes", help="Begin although it takes days: paper scale without a GPU."),
) -> None:
    """Seal the study if it is not, and run it to its end from wherever it is."""
    source, scale, folder = loaded(study, scale, out)
    if not yes:
        planning.refuse_unasked(source, scale)
    result = engine.run(
        source, scale, folder, executor=executor, workers=workers, deviation=deviation,
        progress=engine.Progress(shown=True), evidence=named_folders(evidence),
    )  # fmt: skip
    for line in in_short(result, ledger.read(Store(folder).ledger_file).head):
        typer.echo(line)
    typer.echo(f"The study is in {folder}.")


def status(study: str = PLACE, scale: str = SCALE, out: Path | None = OUT, as_json: JSON = False) -> None:
    """Show how far a study is."""
    progress = Status.of(Store(found_folder(study, scale, out)))
    if as_json:
        typer.echo(envelope("study status", asdict(progress)))
        return
    for line in progress.lines():
        typer.echo(line)


@dataclass(frozen=True)
class Checks:
    """What a validation asks beside digests, gates and label, and what code it runs."""

    expect: Annotated[
        str | None, option("A digest printed when the study was sealed or closed.", show_default=False)
    ] = None
    strict_code: Annotated[bool, option("Other code than the sealed is a failure.", "--strict-code")] = False
    strict_provenance: Annotated[
        bool, option("A seal that names no commit of halfulp is a failure.", "--strict-provenance")
    ] = False
    replay: Annotated[bool, option("Run cells again and compare bit for bit.", "--replay")] = False
    data_folder: Annotated[
        Path | None,
        option("Where data files lie that the study file names relative to itself.", "--data-folder"),
    ] = None
    public_key: Annotated[
        Path | None,
        option("An ed25519 key (PEM) that must have signed the exported statement.", "--public-key"),
    ] = None
    registered: Annotated[
        Path | None,
        option("For a retrospective analysis: the folder of the study that it is of.", "--of"),
    ] = None
    no_code: Annotated[
        bool, option("Run no code of the study: digests, gates and label only.", "--no-code")
    ] = False
    workers: Annotated[int | None, option("Cells replayed at a time.", min=1)] = None

    def check(self, cells: list[str]) -> None:
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


def validate(
    study: str = PLACE,
    cells: list[str] = typer.Argument(None, help="With --replay: the cells to run again; default all."),
    *,
    scale: str = SCALE,
    out: Path | None = OUT,
    checks: Checks,
    as_json: JSON = False,
) -> None:
    """Check every digest, recompute estimands, gates and label, and say what was and was not checked."""
    checks.check(cells or [])
    with opened(study, scale, out, code=not checks.before_code) as folder:
        if (folder / opening.DECLARATION).exists():
            _validate_retrospective(folder, checks.registered, checks.before_code, as_json)
            return
        if checks.registered is not None:
            raise UsageError(
                f"{folder} holds a study of its own, not a retrospective analysis: leave out --of, which "
                "names the study that an analysis is of."
            )
        report = checks.validate(folder, list(cells or []))
    if as_json:
        reason = report.problems[0] if report.problems else "done"
        typer.echo(envelope("study validate", asdict(report), report.exit_code, reason))
    else:
        for line in report.lines():
            typer.echo(line)
    raise typer.Exit(report.exit_code)


app.command(cls=Command)(grouped(status))
app.command(cls=Command)(grouped(validate))


def _validate_retrospective(folder: Path, registered: Path | None, for_studies: bool, as_json: bool) -> None:
    """Validate an analysis after the fact, by running its file."""
    if registered is None:
        raise UsageError(f"{folder} is a retrospective analysis: name the study it is of with --of.")
    if for_studies:
        raise UsageError(
            f"{folder} is a retrospective analysis, which is validated by running its file: "
            "--no-code, --expect and --public-key are for studies."
        )
    result = opening.check_retrospective(folder, registered)
    if as_json:
        recomputed = [f"from {registered}, byte for byte"]
        typer.echo(envelope("study validate", {"label": result["label"], "recomputed": recomputed}))
    else:
        typer.echo(f"recomputed from {registered}, byte for byte\nlabel: {plain(result['label'])}\nvalid")


@app.command()
def recover(
    out: Path = typer.Argument(..., help="The study's folder."),
    cell: str = typer.Argument(..., help="The cell, as stage/cell."),
    record: Path = typer.Option(..., help="A JSON file with what the cell would have given back."),
    reason: str = typer.Option(..., help="Why there is no record of the cell's own."),
) -> None:
    """Put a record made by hand in the place of a missing one. It is marked for ever, and never promoted."""
    try:
        outcome = canonical.parse(files.read(record, documents.MOST_BYTES, follow=True))
    except ValueError as error:
        raise CorruptionError(f"{record} cannot be read as JSON: {error}.") from None
    if not isinstance(outcome, dict):
        raise UsageError(f"{record} must hold a JSON object: what the cell would have given back.")
    engine.recover(out, cell, outcome, reason)
    typer.echo(f"recovered {cell}; the label of this study will not be promoted")


@app.command()
def export(
    study: str = PLACE,
    target: Path = typer.Argument(..., help="The archive to write (.zip)."),
    scale: str = SCALE,
    out: Path | None = OUT,
    key: Path | None = typer.Option(None, help="An ed25519 private key (PEM) to sign the statement with."),
    expect: str | None = typer.Option(None, help="A digest printed when the study was sealed or closed."),
) -> None:
    """Write one archive that others can validate without this machine; the study is validated first."""
    check_output(target)
    validation.check_expected(expect)
    with opened(study, scale, out, code=expect is None, instead="--expect vouches for it first") as folder:
        report = validation.validate(folder, expect=expect)
        if report.exit_code:
            raise UsageError(f"{folder} is not exported, because it is not valid: {report.problems[0]}")
        digest = publish.export(folder, target, key=key)
    typer.echo(f"wrote {target}\nsha256 {digest}")


@app.command()
def retrospect(
    out: Path = typer.Argument(..., help="The folder of a closed study."),
    analysis: str = typer.Argument(..., help="A file.py with a Retrospective, or file.py:attribute."),
    to: Path = typer.Option(..., help="The folder of the analysis; not inside the study's."),
) -> None:
    """Analyse a closed study after the fact, under a label of its own; the study is not touched."""
    name, _, attribute = analysis.partition(":")
    try:
        content = files.read(Path(name), documents.MOST_BYTES, follow=True)
    except CorruptionError as error:
        raise UsageError(f"The analysis file cannot be read: {error}") from None
    result = opening.retrospect(out, content, Path(name).name, to, attribute)
    for gate in result["gates"]:
        typer.echo(gate_line(gate))
    typer.echo(f"label   {plain(result['label'])}\nregistered label  {plain(result['registered']['label'])}")


# ---- what the commands share ------------------------------------------------------------------------


def chosen_scale(study: Study, scale: str) -> str:
    """Return the scale that was asked for, or the usual one."""
    if not scale:
        scale = "small" if "small" in study.scales or len(study.scales) > 1 else next(iter(study.scales))
    study.config(scale)
    return scale


def named_folders(given: list[str]) -> dict[str, Path]:
    """Read ``NAME=FOLDER``, as often as it was given."""
    folders: dict[str, Path] = {}
    for one in given:
        name, equals, folder = one.partition("=")
        if not (name and equals and folder) or name in folders:
            raise UsageError(f"--evidence takes NAME=FOLDER, each name once, not {one[:200]!a}.")
        folders[name] = Path(folder)
        say_code(folders[name], "evidence is validated, so that it can be sealed")
    return folders


def loaded(reference: str, scale: str, out: Path | None) -> tuple[loading.Source, str, Path]:
    """Load a study; return it with its scale and its folder, ``runs/NAME-SCALE`` if nobody says where."""
    source = loading.load(reference)
    scale = chosen_scale(source.study, scale)
    return source, scale, out or Path("runs") / f"{source.study.name}-{scale}"


def found_folder(reference: str, scale: str, out: Path | None) -> Path:
    """Return the folder that a folder, name or file stands for."""
    if out is not None:
        return out
    if Path(reference).is_dir():
        _check_no_scale(reference, scale)
        return Path(reference)
    if reference not in loading.REGISTRY and not reference.partition(":")[0].endswith(".py"):
        raise UsageError(f"{reference[:200]!a} is neither a study's folder nor a study.")
    return loaded(reference, scale, out)[2]


def _check_no_scale(reference: str, scale: str) -> None:
    """Refuse a scale beside a folder or an archive, which holds a run of one scale."""
    if scale:
        raise UsageError(
            f"--scale says which run of a study by name or file; {reference} is one run: leave it out."
        )


@contextmanager
def opened(
    reference: str, scale: str, out: Path | None, *, code: bool, instead: str = "--no-code runs none of it"
) -> Iterator[Path]:
    """Open the folder of a study, or of an archive's content for as long as it is needed.

    With `code`, a file that it carries is going to be run, which is said.
    """
    with ExitStack() as stack:
        if out is None and Path(reference).suffix == ".zip":
            _check_no_scale(reference, scale)
            folder = stack.enter_context(publish.unpacked(Path(reference)))
        else:
            folder = found_folder(reference, scale, out)
        if code:
            say_code(folder, instead)
        yield folder


def say_code(folder: Path, instead: str) -> None:
    """Say that code is run which a folder carries. Every command that does so says it here."""
    for name in ("study.py", "analysis.py"):
        if (folder / name).is_file():
            typer.echo(
                f"halfulp: running {name}, code that {plain(str(folder))} carries. If it came from somebody "
                f"else, read it first; {instead}.",
                err=True,
            )


def in_short(result: dict[str, Json], closed: str) -> Iterator[str]:
    """Yield the result of a closed study in a few lines: gates, stages that were not run, label, digest."""
    yield from map(gate_line, result["gates"])
    for stage, decision in result.get("decisions", {}).items():
        if not decision["authorised"]:
            yield f"stage {stage} was not authorised: none of its cells was run"
    yield f"label   {plain(result['label'])}"
    if "says" in result:
        yield f"        {plain(result['says'])}"
    if not result["scientific_result"]:
        yield "        (not a scientific result)"
    yield f"closed  sha256 {closed}"


def gate_line(gate: dict[str, Json]) -> str:
    """Put a gate of a result on one line."""
    value = number(gate["value"])
    unit = f" ({gate['unit']})" if gate["unit"] and gate["scope"] == "all" else ""
    verdict = "pass" if gate["passed"] else "FAIL"
    return f"{verdict}    {gate['name']}: {value}{unit} {gate['comparison']} {gate['threshold']}"
