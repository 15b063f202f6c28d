"""Pages that are made when the site is built: commands from the command line itself, results from records."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results"


def on_files(files: Files, config: Any) -> Files:
    """Add them to the site."""
    pages = {"reference/commands.md": commands(), **dict(results())}
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    for picture in sorted(RESULTS.glob("*.svg")):
        files.append(File.generated(config, f"results/{picture.name}", abs_src_path=str(picture)))
    return files


def commands() -> str:
    """Every command with its arguments and options."""
    import typer
    from typer.cli import get_docs_for_click

    from halfulp.cli import app
    from halfulp.cli.option_groups import reveal

    command = typer.main.get_command(app)
    for each in command.commands.values():
        reveal(each)
    context = typer.Context(command, info_name="halfulp")
    text = get_docs_for_click(obj=command, ctx=context, name="halfulp")
    return text.replace("# `halfulp`", "# Commands", 1)


def results() -> Iterator[tuple[str, str]]:
    """The pages of committed studies and benchmarks."""
    from halfulp.report.page import page
    from halfulp.text import plain

    listed = ["# Results", "", "Every page here is made from records or measurements in the repository."]
    listed.append("")
    for stem, title in (
        ("labels", "The paper's 31 protocols: its labels and ours"),
        ("controlled", "The controlled studies beside the paper"),
        ("transformers", "The transformer studies beside the paper"),
        ("allocation", "The allocation studies beside the paper"),
        ("terms", "The paper's definitions, regimes and layers of evidence"),
    ):
        file = RESULTS / f"{stem}.md"
        if file.is_file():
            yield f"results/{file.name}", file.read_text()
            listed.append(f"- [{title}]({file.name})")
    listed += ["", "## Studies", ""]
    for folder in sorted(p.parent for p in RESULTS.glob("studies/*/result.json")):
        yield f"results/{folder.name}.html", page([folder], code=True)
        label = json.loads((folder / "result.json").read_text())["label"]
        listed.append(f"- [{folder.name}]({folder.name}.html): {plain(label)}")
    listed += ["", "## Benchmarks", ""]
    for table in sorted(RESULTS.glob("bench/*.md")):
        title = table.stem.capitalize()
        yield f"results/bench-{table.name}", f"# {title}\n\n{table.read_text()}"
        listed.append(f"- [{title}](bench-{table.name})")
    yield "results/index.md", "\n".join(listed) + "\n"
