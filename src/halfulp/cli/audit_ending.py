"""End ``halfulp audit``: judge terms and gates, choose the exit code, and print JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Self

import typer

from halfulp.cli.option_groups import FailOptions
from halfulp.outputs import envelope
from halfulp.text import plain, tell

if TYPE_CHECKING:
    from halfulp.audit.session import Audit
    from halfulp.contract import Contract, Terms
    from halfulp.trace import Trace
    from halfulp.verdicts.answer import Answer


@dataclass
class Ending:
    """The gates of an audit. As a context manager, it holds every optimizer to the terms of ``--require``."""

    fail: FailOptions
    terms: Terms | None
    as_json: bool
    every_grid: bool
    """True if grids were named, which are then judged even if nothing is stored on them."""
    contract: Contract | None = field(default=None, init=False)

    @classmethod
    def of(cls, fail: FailOptions, require: Path | None, as_json: bool, every_grid: bool) -> Self:
        """Read the gates, and refuse invalid ones before anything runs."""
        from halfulp.contract import Terms

        _ = fail.most
        return cls(fail, None if require is None else Terms.load(require), as_json, every_grid)

    def __enter__(self) -> None:
        from halfulp.contract import Contract

        self.contract = None if self.terms is None else Contract(None, self.terms)

    def __exit__(self, *_: object) -> None:
        if self.contract is not None:
            self.contract.release()

    @property
    def broken(self) -> list[str]:
        """A description of each time that the terms did not hold, and of patterns that fitted nothing."""
        if self.contract is None:
            return []
        unmatched = self.contract.unmatched_breaches() if self.contract.checked else []
        return [*self.contract.failures, *(f"moving: {b.where}: {b.found}; {b.fix}." for b in unmatched)]

    def say(self, recorder: Audit, code: int) -> int:
        """Print which gate failed, or the whole answer as JSON.

        Args:
            recorder: The audit, at its end.
            code: The exit code of the script.

        Returns:
            The exit code: the script's, or 1 if that is 0 and a gate failed.
        """
        from halfulp.trace import Trace
        from halfulp.verdicts.answer import verdict

        place = recorder.out
        trace = None
        if place is not None and recorder.writes and not recorder.lost and (place / "manifest.json").exists():
            trace = Trace.open(place)
        answer = None if trace is None else verdict(trace, recorder.trouble)
        if trace is not None and (missed := trace.missed_scores()):
            tell(plain(f"halfulp: {missed}."))
        failed = self.broken[0] if self.broken else self._judged(recorder, trace, answer)
        ended = f"the script ended with exit code {code}" if code else recorder.trouble or "done"
        code = code or (1 if failed else 0)
        if self.as_json:
            result = None if answer is None else {"trace": str(place), **answer.to_json()}
            typer.echo(envelope("audit", result, code, failed or ended))
        elif failed:
            typer.echo(f"FAILED: {failed}")
        if self.contract is not None and not self.broken:
            tell(f"The precision contract {self.contract.summary()}.")
        return code

    def _judged(self, recorder: Audit, trace: Trace | None, answer: Answer | None) -> str | None:
        """Return the reason why --fail-above or --fail-stuck fails; None if neither does.

        Either fails where the trace does not hold the whole run.
        The grids that the weights are really stored on are judged, others only if they were named. Under a
        policy that keeps what it does not write, a code that does not change is not a loss.
        """
        from halfulp.verdicts.findings import NO_SHARE, keeping

        if self.fail.most is None and not self.fail.fail_stuck:
            return None
        if recorder.trouble is not None:
            return f"the run cannot be judged to its end (--fail-above, --fail-stuck): {recorder.trouble}"
        if trace is None or answer is None or not len(trace.steps):
            return "there is no recorded step to judge (--fail-above, --fail-stuck)."
        for f in answer.findings:
            if keeping(trace, f.grid) if f.measured else not self.every_grid:
                continue
            if self.fail.most is not None and f.severity in NO_SHARE:
                return f"{f.severity} (--fail-above)."
            what = f"of the updates {'were' if f.measured else 'would be'} lost in {f.grid}"
            stuck = [name for name, _, _, still in f.hardly if still == 1]
            if why := self.fail.reason(f.lost, what, stuck, f"never moved in {f.grid}"):
                return f"{why}."
        return None
