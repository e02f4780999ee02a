from __future__ import annotations

from dataclasses import replace

import pytest

from mlflow_tula.fit import fit
from mlflow_tula.registry.evaluation import Evaluation
from mlflow_tula.registry.promotion import (
    Verdict,
    _compared,
    agree,
    judge,
    validation_thresholds,
)

pytestmark = pytest.mark.filterwarnings("ignore::mlflow_tula.errors.TulaWarning")


def smaller(table, sizes, world=1):
    rows = tuple(
        row for row in table.ok if row.local_batch_size in sizes and row.world_size == world
    )
    return replace(table, measurements=rows)


def test_the_first_version_is_promoted(table, bundle):
    verdict = judge(bundle, table, None)
    assert verdict.promoted
    assert "first version" in verdict.reason


@pytest.mark.parametrize("seed", range(3))
def test_an_equally_good_profile_is_promoted(seed, table, bundle, remeasured):
    other_table, other = remeasured(seed=seed, noise=0.01)
    verdict = judge(other, other_table, bundle, table)
    assert verdict.promoted, verdict.reason
    assert verdict.step_time_error == pytest.approx(verdict.champion_step_time_error, abs=0.03)


def test_the_same_table_again_is_promoted(table, bundle):
    assert judge(bundle, table, bundle, table).promoted


def test_a_noisy_profile_is_not(table, bundle, remeasured):
    other_table, other = remeasured(seed=3, noise=0.5)
    verdict = judge(other, other_table, bundle, table, champion_name="version 4")
    assert not verdict.promoted
    assert "not promoted" in verdict.reason
    assert "version 4" in verdict.reason


def test_a_profile_of_two_sizes_is_not(table, bundle):
    few = smaller(table, {8, 256})
    verdict = judge(fit(few), few, bundle, table)
    assert not verdict.promoted


def test_one_size_cannot_be_checked(table, bundle):
    one = smaller(table, {32})
    verdict = judge(fit(one), one, bundle, table)
    assert not verdict.promoted
    assert "too few" in verdict.reason


def test_a_slower_machine_is_news_and_not_an_error(table, bundle, remeasured):
    # The champion is 40 % off on the new rows: the world has changed, the new fit is right.
    other_table, other = remeasured(seed=1, noise=0.01, scale=1.4)
    verdict = judge(other, other_table, bundle, table)
    assert verdict.promoted, verdict.reason
    assert verdict.champion_step_time_error > verdict.step_time_error


def test_a_bundle_that_contradicts_its_own_table_is_not(table, bundle, remeasured):
    _, wrong = remeasured(scale=3.0)
    broken = replace(wrong, table_digest=table.digest)
    verdict = judge(broken, table, bundle, table)
    assert not verdict.promoted
    assert "on its own table" in verdict.reason


def test_memory_once_known_is_not_given_up(table, bundle):
    verdict = judge(replace(bundle, memory=None), table, bundle, table)
    assert not verdict.promoted
    assert "no memory measurements" in verdict.reason


def test_without_the_champions_table_the_champion_itself_is_asked(table, bundle, remeasured):
    other_table, other = remeasured(seed=5, noise=0.01)
    verdict = judge(other, other_table, bundle, None)
    assert verdict.champion_step_time_error is not None


def test_tables_agree_on_what_they_share(table, remeasured):
    assert agree(table, remeasured(seed=1, noise=0.02)[0])
    assert not agree(table, remeasured(scale=1.4)[0])
    assert not agree(smaller(table, {8}), smaller(table, {32}))


def test_the_champions_rows_count_where_both_tables_agree(table, bundle):
    # On its own rows the new profile does as well; the champion's show what it does not know.
    few = smaller(table, {8, 16, 32})
    verdict = judge(fit(few), few, bundle, table)
    alone = judge(fit(few), few, bundle, None)
    assert verdict.step_time_error != alone.step_time_error
    assert "on sizes left out" in verdict.reason


def test_coverage_and_regret_count(table, bundle):
    fine = Evaluation(rows=20, mape=0.05, coverage=0.95, regret=0.0)
    assert not _compared(fine, fine, "x").reason.startswith("not")
    narrow = replace(fine, coverage=0.6)
    assert "worse in coverage" in _compared(narrow, fine, "x").reason
    # Intervals that keep what they promise are good enough.
    assert _compared(replace(fine, coverage=0.86), replace(fine, coverage=1.0), "x").promoted
    # One row of a few says nothing.
    assert _compared(
        replace(fine, rows=5, coverage=0.8), replace(fine, rows=5, coverage=1.0), "x"
    ).promoted
    poor = replace(fine, regret=0.2)
    verdict = _compared(poor, fine, "version 4")
    assert not verdict.promoted
    assert "worse in regret: step time error 5.0% against 5.0%" in verdict.reason
    assert "regret 20.0% against 0.0% of version 4" in verdict.reason
    assert _compared(fine, poor, "x").promoted


NUMBERS = {"mape": 0.05, "memory_mape": 0.02, "coverage": 0.95, "regret": 0.0}


@pytest.mark.parametrize(
    ("change", "promoted"),
    [
        ({}, True),
        ({"mape": 0.069}, True),
        ({"mape": 0.071}, False),
        ({"memory_mape": 0.08}, False),
        ({"coverage": 0.86}, True),
        ({"coverage": 0.7}, False),
        ({"regret": 0.06}, False),
        ({"memory_mape": None, "regret": None}, True),
    ],
)
def test_the_gate_is_that_of_mlflow(change, promoted):
    import mlflow
    from mlflow.models import EvaluationResult
    from mlflow.models.evaluation.validation import ModelValidationFailedException

    champion = Evaluation(rows=20, memory_rows=20, **NUMBERS)
    own = replace(champion, **change)
    assert _compared(own, champion, "version 4").promoted is promoted
    thresholds = validation_thresholds(champion)
    # MLflow refuses a threshold on a metric that is not there; unknown numbers are no worse.
    known = {name: one for name, one in thresholds.items() if name in own.metrics()}
    result = EvaluationResult(metrics=own.metrics(), artifacts={})
    if promoted:
        mlflow.validate_evaluation_results(known, result)
    else:
        with pytest.raises(ModelValidationFailedException, match=next(iter(change))):
            mlflow.validate_evaluation_results(known, result)


def test_a_verdict_carries_both_evaluations_and_round_trips(table, bundle, remeasured):
    other_table, other = remeasured(seed=1, noise=0.01)
    verdict = judge(other, other_table, bundle, table)
    assert verdict.held_out.rows == verdict.champion_held_out.rows > len(other_table.ok)
    assert verdict.rows_digest not in (table.digest, other_table.digest, "")
    assert Verdict.from_dict(verdict.to_dict()) == verdict
    first = judge(bundle, table, None)
    assert first.held_out.rows == len(table.ok)
    assert (first.champion_held_out, first.rows_digest) == (None, table.digest)
