from __future__ import annotations

import dataclasses
import json
import math
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any, get_args

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mlflow_tula as tula
from mlflow_tula.errors import InvalidInputError, TulaWarning, UnknownNameError
from mlflow_tula.recommend.recommendation import Objective

GIB = 2**30
SIZES = np.array([8, 16, 32, 64, 128, 256])
ONE = tula.ClusterSpec()
TWO = tula.ClusterSpec(devices_per_node=2)
HARDWARE = tula.HardwareSpec(
    device_type="cuda", device_name="bench", device_memory_bytes=8 * GIB, devices_per_node=2
)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TulaWarning)
        yield


def step_time(sizes: np.ndarray) -> np.ndarray:
    """A floor of 20 ms and 0.5 ms a sample: throughput is within 10 % of its best from 64 on."""
    return np.asarray(((0.02) ** 4 + (0.003 + 0.0005 * sizes) ** 4) ** 0.25)


def frame(*, worlds: tuple[int, ...] = (1, 2), memory: bool = True, **more: Any) -> pd.DataFrame:
    parts = []
    for world in worlds:
        part = pd.DataFrame({"local_batch_size": SIZES, "devices_per_node": world})
        part["step_time_s"] = step_time(SIZES) + (0.004 if world > 1 else 0.0)
        if memory:
            part["peak_memory_bytes"] = GIB + SIZES * 16 * 2**20
        parts.append(part)
    return pd.concat(parts).assign(**more)


def make_bundle(
    rows: pd.DataFrame | None = None,
    *,
    dataset_size: int = 50_000,
    convergence: pd.DataFrame | None = None,
) -> tula.PredictorBundle:
    table = tula.ProfileTable.from_frame(
        frame() if rows is None else rows,
        workload=tula.Workload(model="net", dataset="digits", dataset_size=dataset_size),
        hardware=HARDWARE,
    )
    return tula.fit(table, convergence)


EPOCHS = pd.DataFrame({"global_batch_size": SIZES, "epochs_to_target": 10.0 * (1 + SIZES / 48)})
BUNDLE = make_bundle(convergence=EPOCHS)
PRICE = tula.Pricing(usd_per_device_hour=2.0, usd_per_gb_hour=0.15)


def ask(bundle: tula.PredictorBundle = BUNDLE, **options: Any) -> tula.Recommendation:
    return tula.recommend(bundle, **{"cluster": ONE, **options})


def test_the_knee_is_where_throughput_saturates() -> None:
    choice = ask()
    assert choice.global_batch_size == 64
    assert "larger than 64 saves" in choice.reasons[0]
    assert choice.choice.fits
    assert choice.knee_rule == "diminishing_returns"


def test_each_objective_minimises_what_it_names() -> None:
    curve = {point.global_batch_size: point for point in ask(pricing=PRICE).curve}
    fastest = ask(objective="min_time")
    assert fastest.choice.time_s == pytest.approx(
        min(p.epoch_time_s for p in curve.values() if p.fits), rel=0.03
    )
    cheapest = ask(objective="min_cost", pricing=PRICE)
    assert cheapest.choice.cost_usd == pytest.approx(
        min(p.cost_usd for p in curve.values() if p.fits), rel=0.03
    )
    target = ask(objective="min_time_to_target")
    true = 50_000 / SIZES * step_time(SIZES) * (1 + SIZES / 48)
    assert target.global_batch_size == SIZES[np.argmin(true)]
    dollars = ask(objective="min_cost_to_target", pricing=PRICE)
    assert dollars.choice.cost_to_target_usd is not None
    assert dollars.global_batch_size <= target.global_batch_size


def test_cluster_and_batch_are_ranked_together() -> None:
    choice = ask(cluster=[ONE, TWO], objective="min_time")
    assert (choice.nodes, choice.devices_per_node) == (1, 2)
    assert {(p.nodes, p.devices_per_node) for p in choice.curve} == {(1, 1), (1, 2)}
    cheap = ask(
        cluster=[TWO, ONE],
        objective="min_cost",
        pricing=tula.Pricing(usd_per_device_hour=1.0),
    )
    assert cheap.devices_per_node == 1, "two ranks pay for synchronisation"
    knee = ask(cluster=[ONE, TWO])
    assert knee.devices_per_node == 2
    assert "fewest within 10%" in " ".join(knee.reasons)


def test_accumulation_is_used_when_the_batch_does_not_fit_at_once() -> None:
    choice = ask(candidates=[512], memory_limit_bytes=4 * GIB)
    assert choice.global_batch_size == 512
    assert choice.accumulation_steps > 1
    assert choice.local_batch_size * choice.accumulation_steps == 512
    assert choice.choice.peak_memory_bytes <= 4 * GIB
    assert "accumulation steps" in " ".join(choice.reasons)


def test_accumulation_as_an_option() -> None:
    choice = ask(accumulation_steps=4, candidates=[64, 256])
    assert choice.accumulation_steps == 4
    assert {point.global_batch_size for point in choice.curve} == {64, 256}
    with pytest.raises(InvalidInputError, match=r"1 x 4, not 258; .* are 256 and 260"):
        ask(accumulation_steps=4, candidates=[64, 258])
    with pytest.raises(InvalidInputError, match="cannot feed 1 ranks with 64 accumulation steps"):
        ask(accumulation_steps=64, dataset_size=40)
    with pytest.raises(InvalidInputError, match="accumulation_steps must be a whole number"):
        ask(accumulation_steps=0)


def test_a_memory_limit_moves_the_choice() -> None:
    limit = GIB + 40 * 16 * 2**20
    choice = ask(memory_limit_bytes=limit)
    assert choice.global_batch_size == 32
    assert not next(p for p in choice.curve if p.global_batch_size == 64).fits
    large = make_bundle(frame().query("local_batch_size >= 64"))
    assert min(p.global_batch_size for p in ask(large).curve) == 64
    tight = ask(large, memory_limit_bytes=1500 * 2**20)
    assert tight.global_batch_size < 64, "smaller than usual, for want of anything else"
    with pytest.raises(InvalidInputError, match=r"no candidate fits: the nearest is 1 "):
        ask(memory_limit_bytes=2**20)


@given(size=st.integers(1, 400), world=st.sampled_from([1, 2]))
@settings(deadline=None, max_examples=25)
def test_the_choice_never_exceeds_a_ranks_share_of_the_data(size: int, world: int) -> None:
    cluster = tula.ClusterSpec(devices_per_node=world)
    if size < world:
        with pytest.raises(InvalidInputError, match="cannot feed 2 ranks"):
            ask(cluster=cluster, dataset_size=size)
        return
    choice = ask(cluster=cluster, dataset_size=size, objective="min_time")
    assert all(p.global_batch_size <= size for p in choice.curve)
    assert choice.local_batch_size <= math.ceil(size / world)


def test_deadline_and_budget_bound_the_choice() -> None:
    free = ask(objective="min_cost_to_target", pricing=PRICE)
    assert free.choice.meets_limits
    knee = ask(epochs=10, deadline_s=400)
    assert all(p.meets_limits == (p.time_s <= 400) for p in knee.curve)
    assert knee.choice.time_s <= 400
    with pytest.raises(
        InvalidInputError, match=r"no candidate meets the deadline_s of 1 \(\d+.*predicted\)"
    ):
        ask(epochs=10, deadline_s=1)
    with pytest.raises(InvalidInputError, match=r"no candidate meets the budget_usd of 1e-06"):
        ask(epochs=10, budget_usd=1e-6, pricing=PRICE)


def test_a_deadline_inside_the_interval_is_a_warning() -> None:
    time = ask(objective="min_time", epochs=10).choice.time_s
    choice = ask(objective="min_time", epochs=10, deadline_s=time * 1.001)
    assert any("its interval reaches" in warning for warning in choice.warnings)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"objective": "fastest"}, UnknownNameError, "unknown objective 'fastest'"),
        ({"knee_rule": "elbow"}, UnknownNameError, "unknown knee rule 'elbow'"),
        ({"objective": "min_cost"}, InvalidInputError, "needs pricing: usd_per_device_hour"),
        ({"budget_usd": 3.0, "epochs": 2}, InvalidInputError, "budget_usd needs pricing"),
        ({"deadline_s": 60}, InvalidInputError, "deadline_s needs the length of the run"),
        ({"epochs": -1}, InvalidInputError, "epochs must be a finite number above 0, not -1"),
        ({"deadline_s": math.nan, "epochs": 1}, InvalidInputError, "deadline_s must be a finite"),
        ({"candidates": [60_000]}, InvalidInputError, "at most the dataset's 50000 samples"),
        ({"candidates": [0]}, InvalidInputError, "at least 1, not 0"),
        ({"candidates": ["big"]}, InvalidInputError, "whole number of at least 1, not 'big'"),
        ({"candidates": []}, InvalidInputError, "candidates must be a non-empty list"),
        ({"candidates": "128"}, InvalidInputError, "candidates must be a non-empty list"),
        ({"candidates": 128}, InvalidInputError, "candidates must be a non-empty list"),
        ({"cluster": [ONE, ONE]}, InvalidInputError, "clusters must differ in nodes"),
        ({"cluster": 4}, InvalidInputError, "cluster must be a"),
        ({"candidates": [33], "cluster": TWO}, InvalidInputError, "nearest .* are 32 and 34"),
        ({"cluster": []}, InvalidInputError, "cluster must be a ClusterSpec"),
        ({"memory_limit_bytes": 0}, InvalidInputError, "memory_limit_bytes must be a finite"),
        ({"level": 1.5}, InvalidInputError, "level"),
        ({"current_global_batch_size": 0}, InvalidInputError, "current"),
    ],
)
def test_bad_requests_are_named(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        ask(**options)


@pytest.mark.parametrize("objective", ["min_time_to_target", "min_cost_to_target"])
def test_a_target_needs_convergence_and_says_how_to_give_it(objective: Objective) -> None:
    with pytest.raises(InvalidInputError, match=r"needs convergence data: .*epochs_to_target"):
        ask(make_bundle(), objective=objective, pricing=PRICE)


@given(
    objective=st.sampled_from(get_args(Objective)),
    current=st.sampled_from([None, 8, 128, 100_000]),
    worlds=st.sampled_from([ONE, [ONE, TWO]]),
)
@settings(deadline=None, max_examples=20)
def test_json_round_trip(objective: Objective, current: int | None, worlds: Any) -> None:
    choice = ask(
        objective=objective, pricing=PRICE, current_global_batch_size=current, cluster=worlds
    )
    text = json.dumps(choice.to_dict(), allow_nan=False)
    assert tula.Recommendation.from_dict(json.loads(text)) == choice


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 99}, "newer than 1"),
        ({"kind": "tula.other"}, "expected a tula.recommendation"),
        ({"colour": "red"}, "has no field 'colour'"),
        ({"curve": {}}, "curve must be a list"),
        ({"curve": [{"colour": "red"}]}, "CurvePoint has no field"),
        ({"curve": [{"nodes": 1}]}, "CurvePoint is incomplete"),
        ({"curve": []}, "must hold its choice, 64"),
        ({"global_batch_size": 63}, "must hold its choice, 63"),
        ({"objective": "fastest"}, "unknown objective"),
    ],
)
def test_documents_of_another_kind_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        tula.Recommendation.from_dict(ask().to_dict() | change)


@given(price=st.floats(0.01, 100.0), factor=st.floats(1.0, 10.0))
@settings(deadline=None, max_examples=20)
def test_cost_is_monotone_in_price(price: float, factor: float) -> None:
    costs = []
    for usd in (price, price * factor):
        choice = ask(pricing=tula.Pricing(usd_per_device_hour=usd), epochs=3)
        costs.append(np.array([point.cost_usd for point in choice.curve]))
    assert np.all(costs[1] >= costs[0])
    assert costs[1] == pytest.approx(costs[0] * factor)


def test_the_pareto_front_is_what_nothing_beats() -> None:
    choice = ask(cluster=[ONE, TWO], pricing=PRICE, epochs=1)
    fits = [p for p in choice.curve if p.fits]
    beaten = [
        any(q.time_s <= p.time_s and q.cost_usd < p.cost_usd for q in fits)
        or any(q.time_s < p.time_s and q.cost_usd <= p.cost_usd for q in fits)
        for p in fits
    ]
    assert [p.on_pareto for p in fits] == [not lost for lost in beaten]
    times = [p.time_s for p in choice.pareto]
    assert times == sorted(times)


def test_the_same_choice_in_nineteen_of_twenty_reseedings() -> None:
    chosen = []
    for objective in ("knee", "min_time_to_target"):
        current = None
        for seed in range(20):
            random = np.random.default_rng(seed)
            rows = frame(worlds=(1,))
            rows["step_time_s"] *= np.exp(0.03 * random.standard_normal(len(rows)))
            bundle = make_bundle(rows, convergence=EPOCHS)
            choice = ask(bundle, objective=objective, current_global_batch_size=current)
            current = current or choice.global_batch_size
            chosen.append((objective, choice.global_batch_size))
    counts = Counter(chosen)
    for objective in ("knee", "min_time_to_target"):
        assert max(n for (name, _), n in counts.items() if name == objective) >= 19


def test_the_current_choice_gives_way_to_a_clear_gain() -> None:
    choice = ask(current_global_batch_size=8)
    assert choice.global_batch_size == 64
    kept = ask(current_global_batch_size=64, objective="min_time_to_target")
    assert kept.global_batch_size == 64


def test_a_tie_goes_to_the_measured_size_then_to_the_smaller() -> None:
    flat = pd.DataFrame({"local_batch_size": SIZES, "step_time_s": 1e-3 * SIZES})
    choice = ask(make_bundle(flat), objective="min_time", candidates=[8, 16, 32, 64, 128])
    assert choice.global_batch_size == 8
    assert choice.choice.measured
    few = ask(make_bundle(flat[flat.local_batch_size >= 32]), candidates=[16, 32, 64])
    assert {p.global_batch_size: p.measured for p in few.curve} == {16: False, 32: True, 64: True}
    assert ask(make_bundle(flat)).global_batch_size == 8, "a flat curve has no knee"


def shared_cores(second: dict[int, float], device_type: str = "cpu") -> tula.PredictorBundle:
    """A step of 0.3 s and 10 ms a sample on one rank; as given on two."""
    one = {int(b): 0.3 + 0.01 * b for b in SIZES}
    rows = pd.DataFrame(
        [
            {"local_batch_size": b, "devices_per_node": d, "step_time_s": t}
            for d, times in ((1, one), (2, second))
            for b, t in times.items()
        ]
    ).assign(peak_memory_bytes=GIB)
    table = tula.ProfileTable.from_frame(
        rows,
        workload=tula.Workload(model="net", dataset="digits", dataset_size=50_000),
        hardware=dataclasses.replace(HARDWARE, device_type=device_type),
    )
    return tula.fit(table)


@pytest.mark.parametrize("objective", ["knee", "min_time", "min_cost"])
def test_what_was_measured_beats_other_ranks_that_were_only_predicted(objective: Objective) -> None:
    choice = ask(shared_cores({8: 0.5}), cluster=[ONE, TWO], objective=objective, pricing=PRICE)
    assert choice.choice.world_size == 1
    assert choice.local_batch_size <= 2 * max(SIZES)
    fastest = min(choice.curve, key=lambda p: p.time_s or math.inf)
    if objective != "min_cost":
        assert fastest.world_size == 2
        assert "what was measured wins" in " ".join(choice.reasons)


def test_a_knee_beyond_the_probes_gives_way_to_a_measured_neighbour_on_other_ranks() -> None:
    # recorded on two busy cores: 256 on two ranks was predicted at 12 to 25 s an epoch
    rows = pd.DataFrame(
        {
            "local_batch_size": [8, 64, 128, 16, 64],
            "devices_per_node": [1, 1, 1, 2, 2],
            "step_time_s": [0.687, 1.48, 2.67, 1.8, 2.86],
            "sync_time_s": [0.0, 0.0, 0.0, 0.647, 0.452],
            "peak_memory_bytes": [2.58e9, 2.67e9, 2.77e9, 2.72e9, 2.8e9],
        }
    )
    table = tula.ProfileTable.from_frame(
        rows,
        workload=tula.Workload(model="net", dataset="digits", dataset_size=1437),
        hardware=dataclasses.replace(HARDWARE, device_type="cpu"),
    )
    choice = ask(tula.fit(table), cluster=[ONE, TWO])
    assert (choice.local_batch_size, choice.choice.world_size) == (128, 1)
    assert choice.choice.measured
    assert "what was measured wins" in choice.reasons[0]


def test_ranks_that_were_measured_near_the_choice_may_win() -> None:
    choice = ask(shared_cores({64: 1.0, 128: 1.7}), cluster=[ONE, TWO], objective="min_time")
    assert choice.choice.world_size == 2
    # nothing near its knee was measured, and yet two ranks are known to be faster than one
    quick = shared_cores({b: 0.31 + 0.01 * b for b in (8, 16, 32)}, "cuda")
    choice = ask(quick, cluster=[ONE, TWO])
    assert choice.choice.world_size == 2
    assert not choice.choice.measured


def test_the_current_choice_stays_though_it_was_only_predicted() -> None:
    kept = ask(shared_cores({8: 0.5}), cluster=[ONE, TWO], current_global_batch_size=512)
    assert kept.global_batch_size == 512


def test_a_current_choice_that_cannot_be_kept_is_said() -> None:
    odd = ask(current_global_batch_size=33, cluster=TWO)
    assert "33 is not among the candidates" in " ".join(odd.warnings)
    large = ask(current_global_batch_size=256, memory_limit_bytes=2 * GIB)
    assert "current global batch size 256: " in " ".join(large.warnings)


def test_the_printed_table_starts_with_the_choice() -> None:
    text = str(ask(pricing=PRICE, epochs=2, cluster=[ONE, TWO]))
    lines = text.splitlines()
    assert lines[0].startswith("choice: global batch size ")
    assert lines[2].split()[:2] == ["batch", "local"]
    for word in ("step ms", "epoch s", "90% interval", "memory", "cost", "fits"):
        assert word in lines[2]
    assert sum("<- choice" in line for line in lines) == 1
    assert any(line.startswith("because  ") for line in lines)
    assert all(line == line.rstrip() for line in lines)
    assert max(map(len, lines[:12])) < 120


def test_the_table_leaves_out_what_is_not_known() -> None:
    text = str(ask(make_bundle(frame(memory=False))))
    assert "memory" not in text.splitlines()[2]
    assert "cost" not in text.splitlines()[2]
    assert ask().to_frame()["cost_usd"].isna().all()


def test_a_choice_that_was_only_predicted_says_so() -> None:
    choice = ask(candidates=[48])
    assert not choice.choice.measured
    assert "not measured but predicted" in " ".join(choice.reasons)
    assert "not measured" not in " ".join(ask().reasons)


def test_a_local_batch_of_one_is_said() -> None:
    choice = ask(candidates=[1])
    assert "batch normalisation" in " ".join(choice.warnings)
    assert "beyond what was measured" in " ".join(choice.warnings)


def test_default_candidates_stay_near_what_was_measured() -> None:
    sizes = [point.global_batch_size for point in ask().curve]
    assert min(sizes) == SIZES.min()
    assert max(sizes) <= 4 * SIZES.max()
    assert set(SIZES) <= set(sizes)
