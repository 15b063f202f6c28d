"""The recipes of the documentation run: audit, fix and resume in each framework that is installed.

Those of other packages run where these are installed: ``python examples/recipes/run_all.py``.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how" / "recipes.md"


def runner() -> Any:
    spec = importlib.util.spec_from_file_location("run_all", ROOT / "examples" / "recipes" / "run_all.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


RUN_ALL = runner()
HERE = {"transformers", "accelerate", "lightning"}
"""What the development environment has of the recipes' packages."""


@pytest.mark.parametrize("name", [name for name, needs in RUN_ALL.RECIPES.items() if HERE.issuperset(needs)])
def test_recipe(name: str) -> None:
    if lacking := RUN_ALL.missing(name):
        pytest.skip(f"needs {', '.join(lacking)}")
    shown = RUN_ALL.run(name)
    assert set(shown) >= {"audit", "fix", "resume"}


@pytest.mark.parametrize("name", RUN_ALL.DISTRIBUTED)
def test_recipe_on_two_ranks(name: str) -> None:
    if lacking := RUN_ALL.missing(name):
        pytest.skip(f"needs {', '.join(lacking)}")
    assert RUN_ALL.run(name, ranks=2)["distributed"] == "DDP, two ranks agree"


class EpochSampler(torch.utils.data.Sampler[int]):
    """What seeds a ``DistributedSampler``: the epoch that the trainer announces before each pass."""

    def __init__(self) -> None:
        self.epoch, self.seen = -1, list[int]()

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.seen.append(self.epoch)
        return iter(range(4))

    def __len__(self) -> int:
        return 4


def plain_lightning(folder: Path, saving: dict[str, int], start: Path | None = None) -> EpochSampler:
    """Six epochs of a plain Lightning run of two steps each, saved after the second and the fourth."""
    lightning = pytest.importorskip("lightning.pytorch")
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Plain(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(4, 4)

        def training_step(self, batch: torch.Tensor, _index: int) -> torch.Tensor:
            return self.net(batch).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    save = ModelCheckpoint(folder, filename="{step}", save_top_k=-1, **saving)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(
        max_epochs=6, accelerator="cpu", callbacks=[save], default_root_dir=folder, **quiet
    )
    sampler = EpochSampler()
    trainer.fit(
        Plain(), torch.utils.data.DataLoader(torch.ones(4, 4), batch_size=2, sampler=sampler), ckpt_path=start
    )
    return sampler


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("saving", "again"), [({"every_n_epochs": 2}, [4, 5]), ({"every_n_train_steps": 4}, [3, 4, 5])]
)
def test_a_second_resume_of_plain_lightning(tmp_path: Path, saving: dict[str, int], again: list[int]) -> None:
    """Resumed once it goes on with epoch 2; once more, from step 8, with 4 or, by steps, 3 again.

    Nothing of halfulp takes part. It is why the recipe counts epochs. If the second case fails with a newer
    Lightning, Lightning was mended: have the recipe's page say so.
    """
    straight = plain_lightning(tmp_path / "straight", saving)
    assert straight.seen == [0, 1, 2, 3, 4, 5]
    once = plain_lightning(tmp_path / "once", saving, tmp_path / "straight" / "step=4.ckpt")
    assert once.seen == [2, 3, 4, 5]
    twice = plain_lightning(tmp_path / "twice", saving, tmp_path / "once" / "step=8.ckpt")
    assert twice.seen == again


def matrix() -> list[list[str]]:
    """Cells of the rows of the page's first table."""
    lines = PAGE.read_text(encoding="utf-8").partition("| file in")[2].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split(" |")] for line in lines]
    return rows[: next(i for i, line in enumerate(lines) if not line.startswith("|"))]


def test_every_cell_of_the_matrix_was_shown() -> None:
    """By a test that is there, or by hand as its note says; what was not run has a note, too."""
    tests = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    notes = set(re.findall(r"^(\d)\. ", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    rows = matrix()
    assert len(rows) == 17
    for name, *cells, shown in rows:
        assert len(cells) == 4, name
        assert all(cells), name
        ran = [cell for cell in cells if "not run" not in cell]
        assert notes.issuperset(re.findall(r"\((\d)\)", " ".join([*cells, shown])))
        assert all(re.search(r"\(\d\)$", cell) for cell in cells if "not run" in cell), name
        assert bool(ran) == bool(shown), name
        assert shown == "by hand (6)" or all(f"def {test}(" in tests for test in re.findall(r"`(\w+)", shown))
        if shown.startswith("`test_recipe["):
            recipe = re.findall(r"\[(\w+)\]", shown)[0]
            assert HERE.issuperset(RUN_ALL.RECIPES[recipe])
            assert name.startswith(f"`{recipe}.py`")
            assert ("two ranks" in cells[3]) == (recipe in RUN_ALL.DISTRIBUTED)


def test_the_workflow_runs_what_the_page_says() -> None:
    """Every package of a recipe is asked for, those that vary are pinned to what the page names."""
    there = {f: (ROOT / f).read_text(encoding="utf-8") for f in ("Makefile", ".github/workflows/recipes.yml")}
    assert "make recipes VERSIONS=${{ matrix.versions }}" in there[".github/workflows/recipes.yml"]
    assert "\nrecipes:\n" in there["Makefile"]
    asked, pinned = (
        (ROOT / "examples" / "recipes" / f"{name}.txt").read_text(encoding="utf-8").splitlines()[1:]
        for name in ("requirements", "constraints")
    )
    assert {p for needs in RUN_ALL.RECIPES.values() for p in needs} <= {*asked, *HERE}
    page = PAGE.read_text(encoding="utf-8")
    assert all(pin.replace("==", " ") in page for pin in pinned)


def test_the_page_names_every_recipe() -> None:
    """And only files that are there."""
    named = set(re.findall(r"(\w+)\.py", PAGE.read_text(encoding="utf-8")))
    files = {path.stem for path in (ROOT / "examples" / "recipes").glob("*.py")}
    assert named == files - {"shared"}
    assert set(RUN_ALL.RECIPES) == files - {"shared", "run_all"}
