"""How a run is judged while a signal may come: its score, and the translation of its test sentences."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from normfree.data.text.prepared_folder import Prepared
from normfree.files import explained, replacing
from normfree.train.engine.evaluation import Score
from normfree.train.engine.inputs import Judged
from normfree.train.engine.setup import Rig
from normfree.train.run.run_folder import RunFolder
from normfree.train.run.signals import Stop
from normfree.train.text.token_runs import translate_test, translates_test
from normfree.train.text.translation import Bleu

TRANSLATIONS = "translations.txt"  # of the test sentences, one a line


class _StoppedError(Exception):
    """A signal came while the test sentences were translated."""


class Judge:
    """Judges the model of a rig; a signal cuts that short, in all processes at once, and `signal` tells which."""

    def __init__(self, rig: Rig, stop: Stop, folder: RunFolder | None) -> None:
        self._rig, self._stop, self._folder = rig, stop, folder
        self.signal: int | None = None

    def score(self, judged: Judged | None) -> Score | None:
        """The score over all processes; None where there is nothing to judge by, or a `signal` cut it short."""
        if judged is None:
            return None
        cut = 0

        def batches() -> Iterator[Any]:
            nonlocal cut
            for batch in judged():
                if self._stop.requested is not None:
                    cut = self._stop.requested
                    return  # without an error, since all processes meet at the end of the score
                yield batch

        found = self._rig.inputs.score(self._rig.model, batches(), reduce=self._rig.processes.average_)
        self.signal = self._rig.processes.agree(cut) or None
        return found if self.signal is None else None

    def translate(self) -> Bleu | None:
        """Translate the test sentences, and keep what came out beside the result; None with a `signal` on the way."""
        rig, data = self._rig, self._rig.data
        if not isinstance(data, Prepared) or not translates_test(data):
            return None
        found, cut = None, 0
        if rig.processes.first:
            try:
                lines, found = translate_test(rig.model, rig.config, data, self._go_on)
                self._write_lines(lines)
            except _StoppedError:
                cut = self._stop.requested or 0
        self.signal = rig.processes.agree(cut) or None
        return found

    def _go_on(self, done: int, total: int) -> None:
        if self._stop.requested is not None and done < total:
            raise _StoppedError

    def _write_lines(self, lines: Iterable[str]) -> None:
        if self._folder is not None:
            path = self._folder.path / TRANSLATIONS
            with explained("the translations", path), replacing(path) as temporary:
                temporary.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
