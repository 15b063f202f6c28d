"""``halfulp study``: the commands. Text of studies is never printed as markup."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from halfulp import canonical, documents, files
from halfulp.cli.entry import Command
from halfulp.cli.option_groups import JSON, grouped, option
from halfulp.cli.study_options import EVIDENCE, EXPECT, OUT, Checks, Declared, StudyPlace, evidence_folders
from halfulp.errors import CorruptionError, UsageError
from halfulp.outputs import check_output, envelope
from halfulp.study import engine, ledger, loading, planning, publish
from halfulp.study import evidence as opening
from halfulp.study import seal as seals
from halfulp.study import validate as validation
from halfulp.study.declaration import Protocol
from halfulp.study.protocol import Json
from halfulp.study.store import Status, Store
from halfulp.text import number, plain

app = typer.Typer(
    name="study",
    help="Studies whose protocol is sealed before their outcomes, and whose verdict can be recomputed.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Register a command under the name of its function."""
    app.command(function.__name__.rstrip("_"), cls=Command)(grouped(function))
    return function


@command
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


@command
def show(
    declared: Declared,
    as_json: Annotated[bool, option("The canonical JSON that would be sealed.", "--json")] = False,
) -> None:
    """Print everything that would be sealed, before anything runs."""
    source, scale = declared.load()
    protocol = Protocol.of(source.study, scale)
    if as_json:
        typer.echo(protocol.bytes.decode())
    else:
        for line in seals.in_words(protocol):
            typer.echo(line)


@command
def plan(
    declared: Declared,
    device: Annotated[str, option("A GPU of the table, for its hours; here they are measured.")] = "",
    steps: Annotated[int, option("Steps of a cell that are timed; 0 measures nothing.", min=0)] = 2,
    seconds: Annotated[float, option("The most that a cell is given for its steps.", min=1.0)] = 900.0,
) -> None:
    """Say what a study would take: cells, updates, bytes, and hours measured from a few updates."""
    source, scale = declared.load()
    plans = planning.planned(source, scale, steps=steps, seconds=seconds)
    for line in planning.in_words(source, scale, plans, device):
        typer.echo(plain(line))


@command
def seal(declared: Declared, out: OUT = None, evidence: EVIDENCE = None) -> None:
    """Fix protocol, code, data, evidence and environment; nothing runs."""
    source, scale, folder = declared.folder(out)
    digest = engine.seal(source, scale, folder, evidence=evidence_folders(evidence))
    for line in seals.facts(Store(folder).read_seal(digest)):
        typer.echo(line)
    typer.echo(f"sealed in {folder}\nseal sha256 {digest}")


@command
def run(
    declared: Declared,
    out: OUT = None,
    executor: Annotated[
        str, option("local: worker processes; ray: a Ray cluster; inline: this process.")
    ] = "local",
    workers: Annotated[int | None, option("Cells at a time; default cores over threads.", min=1)] = None,
    deviation: Annotated[
        str,
        option(
            "Why to go on although code or environment changed since the seal; the label is not promoted."
        ),
    ] = "",
    evidence: EVIDENCE = None,
    yes: Annotated[bool, option("Begin although it takes days: paper scale without a GPU.", "--yes")] = False,
) -> None:
    """Seal the study if it is not, and run it to its end from wherever it is."""
    source, scale, folder = declared.folder(out)
    if not yes:
        planning.refuse_unasked(source, scale)
    result = engine.run(
        source, scale, folder, executor=executor, workers=workers, deviation=deviation,
        progress=engine.Progress(shown=True), evidence=evidence_folders(evidence),
    )  # fmt: skip
    for line in in_short(result, ledger.read(Store(folder).ledger_file).head):
        typer.echo(line)
    typer.echo(f"The study is in {folder}.")


@command
def status(place: StudyPlace, as_json: JSON = False) -> None:
    """Show how far a study is."""
    with place.opened(code=False) as folder:
        progress = Status.of(Store(folder))
    if as_json:
        typer.echo(envelope("study status", asdict(progress)))
        return
    for line in progress.lines():
        typer.echo(line)


@command
def validate(
    place: StudyPlace,
    cells: Annotated[
        list[str] | None, typer.Argument(help="With --replay: the cells to run again; default all.")
    ] = None,
    *,
    checks: Checks,
    as_json: JSON = False,
) -> None:
    """Check every digest, recompute estimands, gates and label, and say what was and was not checked."""
    cells = list(cells or [])
    checks.check(cells)
    with place.opened(code=not checks.before_code) as folder:
        if (folder / opening.DECLARATION).exists():
            _validate_retrospective(folder, checks.registered, checks.before_code, as_json)
            return
        if checks.registered is not None:
            raise UsageError(
                f"{folder} holds a study of its own, not a retrospective analysis: leave out --of, which "
                "names the study that an analysis is of."
            )
        report = checks.validate(folder, cells)
    if as_json:
        reason = report.problems[0] if report.problems else "done"
        typer.echo(envelope("study validate", asdict(report), report.exit_code, reason))
    else:
        for line in report.lines():
            typer.echo(line)
    raise typer.Exit(report.exit_code)


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


@command
def recover(
    out: Annotated[Path, typer.Argument(help="The study's folder.")],
    cell: Annotated[str, typer.Argument(help="The cell, as stage/cell.")],
    record: Annotated[Path, option("A JSON file with what the cell would have given back.")],
    reason: Annotated[str, option("Why there is no record of the cell's own.")],
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


@command
def export(
    place: StudyPlace,
    target: Annotated[Path, typer.Argument(help="The archive to write (.zip).")],
    key: Annotated[Path | None, option("An ed25519 private key (PEM) to sign the statement with.")] = None,
    expect: EXPECT = None,
) -> None:
    """Write one archive that others can validate without this machine; the study is validated first."""
    check_output(target, ".zip")
    validation.check_expected(expect)
    with place.opened(code=expect is None, instead="--expect vouches for it first") as folder:
        report = validation.validate(folder, expect=expect)
        if report.exit_code:
            raise UsageError(f"{folder} is not exported, because it is not valid: {report.problems[0]}")
        digest = publish.export(folder, target, key=key)
    typer.echo(f"wrote {target}\nsha256 {digest}")


@command
def retrospect(
    out: Annotated[Path, typer.Argument(help="The folder of a closed study.")],
    analysis: Annotated[str, typer.Argument(help="A file.py with a Retrospective, or file.py:attribute.")],
    to: Annotated[Path, option("The folder of the analysis; not inside the study's.")],
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


# ---- lines ------------------------------------------------------------------------------------------


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
