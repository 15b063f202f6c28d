"""How far a run is: a bar with the time left on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Protocol as Shape

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from halfulp.study.declaration import Protocol, SealedStage
from halfulp.text import tell

LINE_SECONDS = 10.0


class Progress(Shape):
    """What the engine tells while it runs."""

    def __enter__(self) -> Progress: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def sealed(self, digest: str, protocol: Protocol) -> None:
        """The study is sealed, now or from before."""

    def stage(self, stage: SealedStage, done: int) -> None:
        """A stage begins, or goes on."""

    def began(self, cell: str) -> None:
        """A cell begins."""

    def share(self, cell: str, share: float) -> None:
        """A cell is so far."""

    def ended(self, cell: str, how: str) -> None:
        """A cell finished, failed or stopped."""

    def say(self, text: str) -> None:
        """Something to read."""


class Quiet:
    """Says nothing; counts, for those that say something."""

    def __init__(self) -> None:
        self.name, self.total, self.done, self.before = "", 0, 0, 0
        self.shares: dict[str, float] = {}
        self.since = time.monotonic()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return

    def sealed(self, digest: str, protocol: Protocol) -> None:
        return

    def stage(self, stage: SealedStage, done: int) -> None:
        self.name, self.total, self.done, self.before = stage.name, len(stage.cells), done, done
        self.shares = {}
        self.since = time.monotonic()

    def began(self, cell: str) -> None:
        self.shares[cell] = 0.0

    def share(self, cell: str, share: float) -> None:
        self.shares[cell] = share

    def ended(self, cell: str, how: str) -> None:
        self.shares.pop(cell, None)
        self.done += how == "finished"

    def say(self, text: str) -> None:
        return


class Shown(Quiet):
    """Says what was sealed and what went wrong, and shows how far it is whenever that changes."""

    def sealed(self, digest: str, protocol: Protocol) -> None:
        self.say(f"{protocol.study} ({protocol.scale}), seal {digest}")

    def share(self, cell: str, share: float) -> None:
        super().share(cell, share)
        self.show()

    def ended(self, cell: str, how: str) -> None:
        super().ended(cell, how)
        if how != "finished":
            self.say(f"cell {self.name}/{cell}: {how}")
        self.show()

    def show(self) -> None:
        """How far the stage is."""


class Lines(Shown):
    """A line when a stage begins and ends, and now and then in between."""

    def __init__(self) -> None:
        super().__init__()
        self.last = time.monotonic()

    def stage(self, stage: SealedStage, done: int) -> None:
        super().stage(stage, done)
        self.say(f"stage {stage.name} ({stage.kind}): {done} of {len(stage.cells)} cells finished")

    def say(self, text: str) -> None:
        tell(text)

    def show(self) -> None:
        now = time.monotonic()
        if self.done == self.total or now - self.last >= LINE_SECONDS:
            self.last = now
            self.say(f"stage {self.name}: {self.done} of {self.total} cells finished{self._left(now)}")

    def _left(self, now: float) -> str:
        worked = self.done - self.before + sum(self.shares.values())
        left = self.total - self.before - worked
        if worked <= 0 or left <= 0:
            return ""
        seconds = round((now - self.since) / worked * left)
        return f", about {seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d} left"


class Bar(Shown):
    """A bar a stage."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self.bars = Bars(
            TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(),
            TimeElapsedColumn(), TimeRemainingColumn(), console=console,
        )  # fmt: skip
        self.task = self.bars.add_task("", visible=False)

    def __enter__(self) -> Progress:
        self.bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bars.stop()

    def stage(self, stage: SealedStage, done: int) -> None:
        super().stage(stage, done)
        self.task = self.bars.add_task(f"{stage.name} ({stage.kind})", total=self.total, completed=done)

    def say(self, text: str) -> None:
        self.bars.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def show(self) -> None:
        self.bars.update(self.task, completed=self.done + sum(self.shares.values()))


def for_terminal() -> Progress:
    """A bar on a terminal, lines elsewhere."""
    console = Console(stderr=True)
    return Bar(console) if console.is_terminal else Lines()
