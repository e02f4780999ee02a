"""Questions -> decisions: what the served model, the pages and the deployment client ask.

A request names the predictor (`name`, or `model`, `dataset` and `hardware`) and asks a question
(questions.FIELDS). Answers are kept: the same question to the same version costs microseconds.
"""

from __future__ import annotations

import functools
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlflow_tula.errors import InvalidInputError
from mlflow_tula.recommend import Recommendation
from mlflow_tula.serving.catalogue import Catalogue
from mlflow_tula.serving.champions import Champion
from mlflow_tula.serving.questions import FIELDS, MAX_QUESTIONS, Question, answer_row
from mlflow_tula.specs import check_name, slugify

WHO: dict[str, str] = {
    "model": "what is trained, as it was profiled: vgg11",
    "dataset": "what on, with its variant: cifar100, digits-bf16-64px",
    "hardware": "hardware slug or fingerprint of `tula registry list`; the serving machine's own",
    "name": "the registered name, in place of the three: tula.vgg11.digits.<hardware>",
}
"""Fields that name the predictor, in words."""

KEPT_ANSWERS = 1024
_NAME = re.compile(r"tula(\.[a-z0-9_-]+){3}")
_FINGERPRINT = re.compile(r"[0-9a-f]{12}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """An answer, and who gave it."""

    champion: Champion
    question: Question
    recommendation: Recommendation

    @property
    def warnings(self) -> tuple[str, ...]:
        """The recommendation's warnings, and what was wrong with the registry."""
        own = (self.champion.warning,) if self.champion.warning else ()
        return (*own, *self.recommendation.warnings)

    def row(self) -> dict[str, Any]:
        """One flat row of JSON types."""
        who = {"name": self.champion.asked, "version": self.champion.version}
        return {**who, **answer_row(self.recommendation), "warnings": list(self.warnings)}


class Recommender:
    """Answers from the champions of a catalogue; safe to use from many threads."""

    def __init__(self, catalogue: Catalogue | None = None) -> None:
        """Nothing is read yet."""
        self.catalogue = catalogue or Catalogue()
        self._lock = threading.Lock()
        self._answers: OrderedDict[tuple[str, str, Question], dict[str, Any]] = OrderedDict()

    def answer(self, requests: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """One row a request.

        Raises:
            InvalidInputError: a request that cannot be answered; says which of several.
            NotRegisteredError: nothing is registered for it.
            StoreError: the registry does not answer.
        """
        if not 0 < len(requests) <= MAX_QUESTIONS:
            raise InvalidInputError(f"ask 1 to {MAX_QUESTIONS} questions, not {len(requests):,}")
        rows = []
        for position, request in enumerate(requests):
            try:
                rows.append(self._answer(request))
            except InvalidInputError as error:
                if len(requests) == 1:
                    raise
                raise InvalidInputError(f"question {position + 1}: {error}") from error
        return rows

    def decide(self, request: Mapping[str, Any]) -> Decision:
        """The whole recommendation for a request; raises as `answer` does."""
        champion, question = self.understood(request)
        return Decision(
            champion=champion,
            question=question,
            recommendation=question.decide(champion.bundle),
        )

    def understood(self, request: Mapping[str, Any]) -> tuple[Champion, Question]:
        """Who is asked, and what; the question is checked before the registry is."""
        asked = {key: value for key, value in request.items() if key not in WHO}
        question = Question.from_record(asked, also=WHO)
        return self.catalogue.champion(self.named(request)), question

    def named(self, request: Mapping[str, Any]) -> str:
        """The registered name that a request means."""
        given = {key: request[key] for key in WHO if request.get(key) is not None}
        if "name" in given:
            return checked_name(given["name"])
        for key, value in given.items():
            check_name(key, value)
        missing = [key for key in ("model", "dataset") if key not in given]
        if missing:
            raise InvalidInputError(
                f"a question must name {' and '.join(missing)}: "
                '{"model": "vgg11", "dataset": "cifar100", "hardware": "..."}'
            )
        workload = f"{slugify(given['model'])}.{slugify(given['dataset'])}"
        hardware = str(given.get("hardware") or _own_hardware())
        if _FINGERPRINT.fullmatch(hardware):
            for one in self.catalogue.listed(within_s=60.0):
                if (one.fingerprint, one.workload) == (hardware, workload):
                    return one.name
        return f"tula.{workload}.{slugify(hardware)}"

    def _answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """One row, from memory where the same was asked before."""
        champion, question = self.understood(request)
        key = (champion.name, champion.source, question)
        with self._lock:
            row = self._answers.get(key)
            if row is not None:
                self._answers.move_to_end(key)
        if row is None:
            choice = question.decide(champion.bundle)
            row = Decision(champion=champion, question=question, recommendation=choice).row()
            if champion.warning:
                return row
            with self._lock:
                self._answers[key] = row
                while len(self._answers) > KEPT_ANSWERS:
                    self._answers.popitem(last=False)
        elif champion.warning:
            return {**row, "warnings": [champion.warning, *row["warnings"]]}
        return dict(row)


def checked_name(name: object) -> str:
    """A registered name, as it may stand in an address."""
    if not isinstance(name, str) or len(name) > 250 or not _NAME.fullmatch(name):
        raise InvalidInputError(
            "a registered predictor is named tula.<model>.<dataset>.<hardware>, not "
            f"{str(name)[:80]!r}"
        )
    return name


@functools.cache
def _own_hardware() -> str:
    """This machine's slug."""
    from mlflow_tula.hardware import detect

    return detect().slug


COLUMNS = {**WHO, **FIELDS}
"""Every column of a served request."""
