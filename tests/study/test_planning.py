"""What a study would take: cells and updates from its declaration, seconds from a few steps of its cells."""

from __future__ import annotations

from pathlib import Path

import pytest
from study.samples import SMALL, invoke, study_file

from halfulp.errors import HalfulpError, UsageError
from halfulp.study import loading, planning
from halfulp.study.loading import REGISTRY

STEPS = SMALL.replace(
    "def forecast(cell):",
    "def forecast(cell):\n    import time\n    for i in range(1000):\n        time.sleep(0.002)\n"
    "        cell.progress(i + 1, 1000)\n    raise RuntimeError('it was to be stopped')",
)


def test_a_cell_is_measured_and_stopped(tmp_path: Path) -> None:
    """Two steps of a thousand; what reads an earlier stage is said to; nothing is left behind."""
    source = loading.load(str(study_file(tmp_path, STEPS)))
    forecast, outcome = planning.planned(source, "small", steps=2, seconds=60)
    assert forecast.measured is not None
    assert forecast.measured.steps == 1000
    assert 0.002 <= forecast.measured.step < 0.2
    assert forecast.measured.seconds > 2
    assert forecast.measured.memory > 1 << 20
    assert (outcome.measured, outcome.why) == (None, "it reads stage forecast")
    text = "\n".join(planning.in_words(source, "small", [forecast, outcome], ""))
    assert "small (small): 4 cells" in text
    assert "s to the first of 1,000 steps" in text
    assert "outcome: 3 cells (it reads stage forecast)" in text
    assert [path.name for path in tmp_path.iterdir()] == [Path(source.name).name]


def test_a_cell_that_fails_is_named_and_one_that_is_slow_is_left(tmp_path: Path) -> None:
    broken = loading.load(str(study_file(tmp_path / "a", SMALL.replace("cell.attach(", "raise ValueError("))))
    with pytest.raises(HalfulpError, match=r"(?s)A cell of stage forecast failed: .*ValueError"):
        planning.planned(broken, "small", steps=1, seconds=60)
    slow = loading.load(str(study_file(tmp_path / "b", STEPS.replace("0.002", "60"))))
    assert (
        "no step of cell all was done within 5" in planning.planned(slow, "small", steps=1, seconds=5)[0].why
    )


@pytest.mark.parametrize("seconds", [float("inf"), float("nan"), 1e300])
def test_a_measurement_has_an_end(tmp_path: Path, seconds: float) -> None:
    source = loading.load(str(study_file(tmp_path)))
    with pytest.raises(UsageError, match="up to 1,000,000 seconds"):
        planning.planned(source, "small", steps=1, seconds=seconds)


def test_data_that_is_not_here_has_a_stand_in(tmp_path: Path) -> None:
    source = loading.load(str(study_file(tmp_path, SMALL)))
    trial = planning.Trial("cell", {}, source, 1, tmp_path / "scratch")
    path = trial.data("openwebtext/nothing.bin")
    content = path.read_bytes()
    assert len(content) == planning.STAND_IN_BYTES
    assert set(content[1::2]) == {0}  # small numbers, two bytes each
    assert trial.load() is None


def test_every_study_has_a_plan_at_paper_scale() -> None:
    """Updates of the decoder studies are those that the paper counts."""
    updates = {}
    for name in REGISTRY:
        source = loading.load(name)
        plans = planning.planned(source, "paper", steps=0, seconds=1)
        assert sum(len(plan.stage.cells) for plan in plans) > 0
        updates[name] = sum(plan.updates for plan in plans)
        assert (updates[name] > 0) == any(plan.operations > 0 for plan in plans)
    assert updates["source-amortized"] == 21_000
    assert updates["neox-transfer"] == 30 * 3000
    assert updates["matched-10k"] == 10 * 10_000
    assert updates["dqt-int3"] == 55_670
    assert updates["phase-diagram"] == 0


def test_a_gpu_has_a_number_with_a_source(capsys: pytest.CaptureFixture[str]) -> None:
    code, page, _ = invoke(
        capsys, "study", "plan", "matched-10k", "--scale", "paper", "--steps", "0", "--device", "rtx5090"
    )
    assert code == 0
    assert "outcome: 8 cells, 80,000 updates" in page
    assert "rtx5090: 8.46 hours" in page  # 100,000 updates at the paper's 0.3046 s
    assert "the paper's RTX 5090: 1000 updates of GPT-2 124M in 304.6 s" in page
    assert "openwebtext/train.bin" in page
    refused = invoke(capsys, "study", "plan", "matched-10k", "--steps", "0", "--device", "abacus")
    assert refused[0] == 2
    assert "known: rtx5090" in refused[2]


def test_days_on_a_cpu_are_asked_about(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "gpu_count", lambda: 0)
    with pytest.raises(UsageError, match=r"matched-10k at scale paper takes about .* days .*--yes"):
        planning.refuse_unasked(loading.load("matched-10k"), "paper")
    planning.refuse_unasked(loading.load("matched-10k"), "small")
    planning.refuse_unasked(loading.load("phase-diagram"), "paper")  # made for a CPU
    planning.refuse_unasked(loading.load("char-gpt"), "paper")
    monkeypatch.setattr(planning, "gpu_count", lambda: 1)
    planning.refuse_unasked(loading.load("matched-10k"), "paper")


def test_a_run_of_days_begins_only_when_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(planning, "gpu_count", lambda: 0)
    code, _, said = invoke(
        capsys, "study", "run", "matched-10k", "--scale", "paper", "--out", str(tmp_path / "o")
    )
    assert code == 2
    assert "--yes runs it all the same" in said
    assert not (tmp_path / "o").exists()


def test_a_device_is_answered_where_cells_say_nothing_of_their_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A study of one's own: its hours elsewhere are not known, and its one cell has no steps."""
    path = str(study_file(tmp_path))
    _, text, _ = invoke(capsys, "study", "plan", path, "--device", "h100", "--steps", "0")
    assert "h100: not known" in text
