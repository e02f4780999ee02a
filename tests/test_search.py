from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mlflow_tula as tula
from mlflow_tula.errors import InvalidInputError
from mlflow_tula.search import (
    MAX_FAILURES,
    FullSearch,
    PartialSearch,
    Probe,
    Search,
    expected_probe_time_s,
    full_search_cost,
)
from mlflow_tula.table import Status

SIZES = tuple(2**k for k in range(3, 11))
EMPTY = tula.ProfileTable(
    workload=tula.Workload(model="net", dataset="digits", dataset_size=50_000),
    hardware=tula.HardwareSpec(
        device_type="cpu", device_name="bench", device_memory_bytes=8 * 2**30
    ),
)


def probes(worlds: Iterable[int] = (1,), sizes: Iterable[int] = SIZES) -> list[Probe]:
    sizes = list(sizes)
    return [Probe(local_batch_size=b, devices_per_node=w) for w in worlds for b in sizes]


def step_time(probe: Probe) -> float:
    return float(max(0.02, 0.003 + 5e-4 * probe.local_batch_size) + 0.004 * (probe.world_size > 1))


def measured(probe: Probe, status: Status = "ok") -> tula.Measurement:
    seconds = step_time(probe)
    ran = {"step_time_s": seconds, "num_steps": 20, "probe_time_s": 1.0 + 20 * seconds}
    return tula.Measurement(
        **probe.to_dict(),
        status=status,
        reason="" if status == "ok" else "it did",
        **(ran if status == "ok" else {}),
    )


def run(
    search: Search, answer: Callable[[Probe], Status] = lambda probe: "ok", limit: int = 100
) -> tula.ProfileTable:
    """Replay: every probe is answered at once; nothing may be asked twice."""
    table, elapsed = EMPTY, 0.0
    for _ in range(limit):
        probe = search.next_probe(table, elapsed)
        assert search.reason
        if probe is None:
            return table
        assert probe not in {Probe.of(row) for row in table.measurements}
        row = measured(probe, answer(probe))
        elapsed += row.probe_time_s or 0.5
        table = table.with_rows([row])
    raise AssertionError(f"no end after {limit} probes")


def tried(table: tula.ProfileTable, world: int = 1) -> list[int]:
    return [r.local_batch_size for r in table.measurements if r.world_size == world]


def test_full_search_measures_every_candidate_once() -> None:
    search = FullSearch(probes((1, 2)))
    table = run(search, lambda probe: "oom" if probe.local_batch_size == 64 else "ok")
    assert len(table.measurements) == 2 * len(SIZES)
    assert search.reason == "all 16 candidates were measured"


def test_full_search_stops_at_its_budget() -> None:
    search = FullSearch(probes(), time_budget_s=5.0)
    assert 1 < len(run(search).measurements) < len(SIZES)
    assert "time budget of 5 s ended with" in search.reason


def test_partial_search_is_cheaper_and_decides_the_same() -> None:
    partial = run(PartialSearch(probes()))
    cost = full_search_cost(probes(), partial)
    assert len(partial.ok) <= 5
    assert cost.share < 0.5
    choice = tula.recommend(tula.fit(partial), cluster=tula.ClusterSpec(), candidates=SIZES[:6])
    true = {b: step_time(Probe(local_batch_size=b)) / b for b in SIZES[:6]}
    assert true[choice.global_batch_size] <= 1.15 * min(true.values())
    assert choice.global_batch_size <= 128


def test_partial_search_starts_small_and_goes_up() -> None:
    order = tried(run(PartialSearch(probes())))
    assert order[0] == SIZES[0]
    assert order[:3] == sorted(order[:3])
    assert order[2] >= 16 * order[0]


def test_a_choice_beyond_all_that_was_measured_is_measured() -> None:
    # All latency: a larger batch always pays, so that the largest must have been seen to run.
    table, search = EMPTY, PartialSearch(probes())
    while (probe := search.next_probe(table, 0.0)) is not None:
        row = tula.Measurement(**probe.to_dict(), step_time_s=0.1, num_steps=20)
        table = table.with_rows([row])
    assert max(tried(table)) == SIZES[-1]


def test_a_second_world_size_gets_at_least_two_probes() -> None:
    table = run(PartialSearch(probes((1, 2))))
    assert len(tried(table, 1)) >= 3
    assert len(tried(table, 2)) >= 2
    assert len(table.measurements) < 2 * len(SIZES)


def cores(probe: Probe) -> tula.Measurement:
    """VGG11 on two cores: two ranks have one each."""
    compute = 0.35 + 0.0105 * probe.local_batch_size * probe.world_size
    wait = 0.4 if probe.world_size > 1 else 0.0
    seconds = compute + wait
    steps = int(min(40, max(3, 4.0 / seconds)))
    return tula.Measurement(
        **probe.to_dict(),
        step_time_s=seconds,
        sync_time_s=wait,
        num_steps=steps,
        probe_time_s=1.0 + (steps + 3.5) * seconds,
    )


def sweep(budget: float | None, row: Callable[[Probe], tula.Measurement] = cores):
    """The table of a partial search on one and two ranks."""
    table, elapsed = EMPTY, 6.0
    search = PartialSearch(probes((1, 2)), time_budget_s=budget)
    while (probe := search.next_probe(table, elapsed)) is not None:
        table = table.with_rows([row(probe)])
        elapsed += table.measurements[-1].probe_time_s or 0.0
        assert budget is None or elapsed <= 1.1 * budget
    return table


@pytest.mark.parametrize("budget", [90.0, 120.0, 200.0, None])
def test_two_sizes_far_apart_are_measured_on_ranks_that_share_cores(budget: float | None) -> None:
    on_two = [row.local_batch_size for row in sweep(budget).ok if row.world_size == 2]
    assert on_two[0] >= 64
    assert max(on_two) >= 4 * min(on_two)


def test_a_single_probe_of_another_world_size_is_a_large_one() -> None:
    on_two = [row.local_batch_size for row in sweep(45.0).ok if row.world_size == 2]
    assert len(on_two) == 1
    assert on_two[0] >= 64


@pytest.mark.parametrize("budget", [120.0, 200.0, None])
def test_what_is_chosen_was_measured_or_a_neighbour_was(budget: float | None) -> None:
    table = sweep(budget)
    clusters = [tula.ClusterSpec(), tula.ClusterSpec(devices_per_node=2)]
    memory = [
        replace(row, peak_memory_bytes=2**30 + 2**20 * row.local_batch_size)
        for row in table.measurements
    ]
    bundle = tula.fit(replace(table, measurements=tuple(memory)))
    choice = tula.recommend(bundle, cluster=clusters).choice
    near = [
        row.local_batch_size
        for row in table.ok
        if row.world_size == choice.world_size
        and 0.5 <= row.local_batch_size / choice.local_batch_size <= 2
    ]
    assert near
    truth = cores(
        Probe(local_batch_size=choice.local_batch_size, devices_per_node=choice.world_size)
    )
    assert choice.step_time_s == pytest.approx(truth.step_time_s, rel=0.1)


def test_a_probe_on_more_ranks_of_a_cpu_is_expected_to_take_longer() -> None:
    table = EMPTY.with_rows(cores(probe) for probe in probes(sizes=(8, 64, 256)))
    asked = Probe(local_batch_size=128, devices_per_node=2)
    expected = expected_probe_time_s(table, asked)
    assert expected == pytest.approx(cores(asked).probe_time_s, rel=0.15)


def test_many_world_sizes_are_covered_by_the_ends_and_the_middle() -> None:
    table = run(PartialSearch(probes((1, 2, 4, 8, 16))))
    assert {1, 4, 16} <= {row.world_size for row in table.ok}
    assert len(table.measurements) < 25


def test_nothing_larger_than_the_memory_estimate_is_probed() -> None:
    table = run(PartialSearch(probes((1, 2)), max_local_batch_size=100))
    assert max(row.local_batch_size for row in table.measurements) <= 64
    with pytest.raises(InvalidInputError, match="at most max_local_batch_size = 4"):
        PartialSearch(probes(), max_local_batch_size=4)


def test_what_ran_out_of_memory_is_walked_down_from() -> None:
    table = run(PartialSearch(probes((1, 2))), lambda p: "oom" if p.local_batch_size > 24 else "ok")
    assert {8, 16} <= set(tried(table))
    assert len(table.ok) >= 3
    oom = {row.local_batch_size for row in table.measurements if row.status == "oom"}
    assert len(oom) <= 4
    assert not oom & set(tried(table, 2)), "what did not fit on one rank was tried on two"


def test_candidates_that_are_all_behind_a_wall_end_the_search() -> None:
    rows = [measured(Probe(local_batch_size=8)), measured(Probe(local_batch_size=16), "oom")]
    search = PartialSearch(probes(sizes=(32, 64)))
    assert search.next_probe(EMPTY.with_rows(rows), 0.0) is None
    assert search.reason


def test_the_smallest_may_fail_where_a_larger_one_runs() -> None:
    # pytorch issue 49207: 16 ran out of memory while 32 ran, by the choice of workspace.
    table = run(PartialSearch(probes()), lambda p: "oom" if p.local_batch_size == 8 else "ok")
    assert len(table.ok) >= 3


@pytest.mark.parametrize("search", [PartialSearch(probes()), FullSearch(probes())])
def test_a_job_that_always_fails_is_not_probed_for_ever(search: Search) -> None:
    table = run(search, lambda probe: "failed")
    assert len(table.measurements) <= MAX_FAILURES
    assert "failed and none ran, the last with: it did" in search.reason


def test_nothing_fits_is_said() -> None:
    search = PartialSearch(probes())
    table = run(search, lambda probe: "oom")
    assert len(table.measurements) <= MAX_FAILURES
    assert "fits" in search.reason


@given(
    bad=st.sets(st.sampled_from(range(12)), max_size=12),
    kind=st.sampled_from(["oom", "failed"]),
    budget=st.sampled_from([None, 3.0, 30.0]),
)
@settings(deadline=None, max_examples=12)
def test_any_pattern_of_failures_comes_to_an_end(
    bad: set[int], kind: Status, budget: float | None
) -> None:
    candidates = probes((1, 2), SIZES[:6])
    broken = {candidates[i] for i in bad}
    search = PartialSearch(candidates, time_budget_s=budget)
    run(search, lambda probe: kind if probe in broken else "ok")


@pytest.mark.parametrize("budget", [2.5, 8.0, 20.0])
def test_the_time_budget_is_kept(budget: float) -> None:
    table = run(PartialSearch(probes((1, 2)), time_budget_s=budget))
    assert sum(row.probe_time_s or 0.0 for row in table.ok) <= budget
    assert table.ok


def test_with_convergence_the_decision_is_the_time_to_target() -> None:
    import pandas as pd

    epochs = pd.DataFrame(
        {"global_batch_size": SIZES, "epochs_to_target": [10 * (1 + b / 32) for b in SIZES]}
    )
    convergence = tula.ConvergencePredictor.fit(epochs)
    table = run(PartialSearch(probes(), convergence=convergence))
    choice = tula.recommend(
        tula.fit(table, convergence),
        cluster=tula.ClusterSpec(),
        candidates=SIZES[:5],
        objective="min_time_to_target",
    )
    true = {b: step_time(Probe(local_batch_size=b)) / b * (1 + b / 32) for b in SIZES}
    assert true[choice.global_batch_size] <= 1.05 * min(true.values())


def test_the_cost_of_full_search_counts_what_was_measured_as_it_was() -> None:
    candidates = probes()
    full = run(FullSearch(candidates))
    truth = full_search_cost(candidates, full)
    assert truth.share == 1.0
    partial = full_search_cost(candidates, run(PartialSearch(candidates)))
    assert partial.full_s == pytest.approx(truth.full_s, rel=0.25)
    assert partial.spent_s < truth.spent_s


def test_the_expected_time_of_a_probe_follows_the_last_line() -> None:
    table = EMPTY.with_rows(measured(p) for p in probes(sizes=(8, 64, 128)))
    for probe in probes(sizes=(64, 96, 256, 1024)):
        row = measured(probe)
        assert expected_probe_time_s(table, probe) == pytest.approx(row.probe_time_s, rel=0.05)
    one = EMPTY.with_rows([measured(Probe(local_batch_size=8))])
    large = Probe(local_batch_size=1024)
    assert expected_probe_time_s(one, large) > measured(large).probe_time_s / 2
    assert expected_probe_time_s(EMPTY, large) == 0.0


@pytest.mark.parametrize("bad", [[], [8, 16], "8"])
def test_candidates_are_probes(bad: list[int]) -> None:
    for kind in (PartialSearch, FullSearch):
        with pytest.raises(InvalidInputError, match="non-empty list of Probe"):
            kind(bad)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="time_budget_s must be a finite number above 0"):
        PartialSearch(probes(), time_budget_s=0)
