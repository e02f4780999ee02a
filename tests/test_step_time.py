from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlflow_tula.errors import SchemaError, TableError, TulaWarning
from mlflow_tula.fit import fit
from mlflow_tula.predictors import compute_curve, step_time, step_time_formulas
from mlflow_tula.specs import HardwareSpec, Workload
from mlflow_tula.table import LinkMeasurement, Measurement, ProfileTable

HARDWARE = HardwareSpec(device_type="cuda", device_name="bench", device_memory_bytes=2**34)
SIZES = (8, 32, 128, 512)
QUICK = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def table(rows: Sequence[dict[str, Any]], links: Sequence[LinkMeasurement] = (), **workload: Any):
    made = tuple(Measurement(**row) for row in rows)
    job = Workload(model="m", dataset="d", dataset_size=100_000, **workload)
    return ProfileTable(workload=job, hardware=HARDWARE, measurements=made, links=tuple(links))


def curve(sizes: Sequence[int], times: Sequence[float]):
    rows = [
        {"local_batch_size": size, "step_time_s": time}
        for size, time in zip(sizes, times, strict=True)
    ]
    return step_time.fit(table(rows))


def ask(predictor, sizes, nodes=1, devices=1, accumulation=1, level=0.9, **link: Any):
    batch = np.atleast_1d(np.asarray(sizes, float))
    setup = (np.full(batch.shape, float(count)) for count in (nodes, devices, accumulation))
    return step_time_formulas.step_time(predictor.params, batch, *setup, level=level, **link)


def truth(batch, floor: float, slope: float, power: float = 2.0):
    return (floor**power + (slope * np.asarray(batch, float)) ** power) ** (1 / power)


# --- known parameters come back ---------------------------------------------------------------


@pytest.mark.parametrize("floor", [0.002, 0.02, 0.2])
@pytest.mark.parametrize("slope", [1e-5, 1e-4, 1e-3])
@pytest.mark.parametrize("power", [1.0, 2.0, 3.0])
def test_a_floor_and_a_line_are_recovered(floor: float, slope: float, power: float) -> None:
    predictor = curve(SIZES, truth(SIZES, floor, slope, power))
    inside, beyond = [16, 64, 256], [1024, 2048]
    value, lower, upper = ask(predictor, inside)
    assert value == pytest.approx(truth(inside, floor, slope, power), rel=0.02)
    assert np.all((lower < value) & (value < upper))
    far, low, high = ask(predictor, beyond)
    expected = truth(beyond, floor, slope, power)
    assert far == pytest.approx(expected, rel=0.2)
    assert np.all((low <= expected) & (expected <= high))


@pytest.mark.parametrize("noise", [0.01, 0.03, 0.06])
def test_noise_is_averaged_out_over_many_sizes(noise: float) -> None:
    draw = np.random.default_rng(7)
    sizes = np.unique(np.geomspace(8, 512, 14).astype(int))
    times = truth(sizes, 0.02, 1e-4) * np.exp(noise * draw.normal(size=len(sizes)))
    predictor = curve(sizes.tolist(), times)
    asked = np.unique(np.geomspace(9, 500, 30).astype(int))
    expected = truth(asked, 0.02, 1e-4)
    value, lower, upper = ask(predictor, asked)
    assert np.mean(np.abs(value / expected - 1)) < 0.6 * noise + 0.005
    assert np.mean((lower <= expected) & (expected <= upper)) >= 0.85


@pytest.mark.parametrize("wild", [0.3, 3.0, 10.0])
def test_one_outlier_among_seven_sizes_moves_the_others_by_less_than_5_percent(
    wild: float,
) -> None:
    sizes = [8, 16, 32, 64, 128, 256, 512]
    times = truth(sizes, 0.02, 1e-4)
    times[3] *= wild
    predictor = curve(sizes, times)
    assert any("local batch size 64 took" in text for text in predictor.warnings)
    value, _, _ = ask(predictor, [8, 16, 24, 200, 400, 512, 1024])
    assert value == pytest.approx(truth([8, 16, 24, 200, 400, 512, 1024], 0.02, 1e-4), rel=0.05)


def test_one_wild_trial_of_three_does_not_move_the_median() -> None:
    rows = []
    for size in SIZES:
        time = float(truth(size, 0.02, 1e-4))
        rows += [{"local_batch_size": size, "step_time_s": time * k} for k in (1.0, 1.01, 20.0)]
    value, _, _ = ask(step_time.fit(table(rows)), SIZES)
    assert value == pytest.approx(truth(SIZES, 0.02, 1e-4), rel=0.02)


def test_a_row_with_a_wide_spread_over_few_steps_counts_for_less() -> None:
    def fitted(std: float):
        rows = [
            {
                "local_batch_size": s,
                "step_time_s": float(t),
                "num_steps": 20,
                "step_time_std_s": 1e-4,
            }
            for s, t in zip(SIZES, truth(SIZES, 0.02, 1e-4), strict=True)
        ]
        rows[1] |= {"step_time_s": 1.3 * rows[1]["step_time_s"], "step_time_std_s": std}
        return ask(step_time.fit(table(rows)), 32)[0][0]

    clean = float(truth(32, 0.02, 1e-4))
    assert abs(fitted(0.05) / clean - 1) < abs(fitted(1e-4) / clean - 1)


def published(batch):
    """VGG16 on a V100, forward, milliseconds (CDECatapult, ml-performance-prediction)."""
    known = {1: 20.67, 2: 22.77, 4: 27.07, 8: 33.8, 16: 39.72, 32: 60.31, 64: 102.4}
    return [known[size] / 1e3 for size in batch]


def test_published_step_times_of_vgg16_on_a_v100() -> None:
    value, lower, upper = ask(curve([1, 4, 16, 64], published([1, 4, 16, 64])), [2, 8, 32])
    expected = published([2, 8, 32])
    assert value == pytest.approx(expected, rel=0.09)
    assert np.all((lower <= expected) & (expected <= upper))


def test_published_step_times_of_resnet18_on_a_t4_up_to_5x_beyond() -> None:
    """AdaptDL's traces, one T4, milliseconds (petuum/adaptdl, osdi21-artifact)."""
    known = {32: 42.79, 64: 59.83, 91: 75.91, 182: 137.2, 257: 187.1, 513: 355.4, 1024: 702.1}
    probes, beyond = [32, 64, 91, 182], [257, 513, 1024]
    predictor = curve(probes, [known[size] / 1e3 for size in probes])
    value, lower, upper = ask(predictor, beyond)
    expected = np.array([known[size] / 1e3 for size in beyond])
    assert value == pytest.approx(expected, rel=0.05)
    assert np.all((lower <= expected) & (expected <= upper))


# --- several ranks ----------------------------------------------------------------------------


def ranks(sync, power: float = 1.0, setups=((1, 1), (1, 2), (1, 4)), sizes=SIZES, noise=0.0):
    draw = np.random.default_rng(3)
    rows = []
    for nodes, devices in setups:
        for size in sizes:
            alone = float(truth(size, 0.02, 1e-3, 1.0))
            wait = sync(nodes, devices) if nodes * devices > 1 else 0.0
            time = (alone**power + wait**power) ** (1 / power)
            rows.append(
                {
                    "local_batch_size": size,
                    "nodes": nodes,
                    "devices_per_node": devices,
                    "step_time_s": time * float(np.exp(noise * draw.normal())),
                }
            )
    return rows


def ring(nodes: int, devices: int) -> float:
    count = nodes * devices
    return 0.2 * 2 * (count - 1) / count


@pytest.mark.parametrize("power", [1.0, 2.0, 4.0])
def test_overlap_and_a_ring_across_nodes_are_recovered(power: float) -> None:
    predictor = step_time.fit(table(ranks(ring, power, setups=((1, 1), (4, 1), (16, 1)))))
    value, lower, upper = ask(predictor, SIZES, nodes=8)
    expected = (truth(SIZES, 0.02, 1e-3, 1.0) ** power + ring(8, 1) ** power) ** (1 / power)
    assert value == pytest.approx(expected, rel=0.07)
    assert np.all((lower <= expected) & (expected <= upper))
    weights = dict(
        zip(
            predictor.params["inter_node"]["powers"],
            predictor.params["inter_node"]["weights"],
            strict=True,
        )
    )
    assert weights[power] == max(weights.values())


def test_contention_within_a_node_is_told_from_synchronisation() -> None:
    rows = [
        {
            "local_batch_size": size,
            "devices_per_node": devices,
            "step_time_s": float(truth(size, 0.02, 1e-3, 1.0)) * (1 + 0.1 * math.log2(devices)),
        }
        for devices in (1, 4)
        for size in SIZES
    ]
    predictor = step_time.fit(table(rows))
    for part in ("slope", "floor"):
        assert predictor.params["contention"][part] == pytest.approx(0.13, abs=0.05)
    expected = truth(SIZES, 0.02, 1e-3, 1.0) * 1.1
    assert ask(predictor, SIZES, devices=2)[0] == pytest.approx(expected, rel=0.06)


FLOOR, SLOPE, SYNC = 0.35, 0.01, 0.4


def cores(batch, devices: int = 1, shared: float = 1.0):
    """Seconds on a CPU: ranks share its cores (1) or each has its own (0)."""
    compute = FLOOR + SLOPE * np.asarray(batch, float) * float(devices) ** shared
    return compute + SYNC * (devices > 1)


def on_cpu(second: Sequence[int], shared: float, *, recorded: bool):
    """A fit of three sizes on one rank and `second` on two."""
    rows = []
    for devices, sizes in ((1, (8, 64, 256)), (2, second)):
        for size in sizes:
            row = {"local_batch_size": size, "devices_per_node": devices}
            row["step_time_s"] = float(cores(size, devices, shared))
            if recorded:
                row["sync_time_s"] = SYNC * (devices > 1)
            rows.append(row)
    return step_time.fit(replace(table(rows), hardware=replace(HARDWARE, device_type="cpu")))


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("shared", [0.0, 1.0])
@pytest.mark.parametrize("second", [(), (8,)])
def test_one_size_on_two_ranks_of_a_cpu_leaves_open_whether_they_share(
    second: tuple[int, ...], shared: float, recorded: bool
) -> None:
    predictor = on_cpu(second, shared, recorded=recorded)
    _, lower, upper = ask(predictor, [64, 128, 256], devices=2)
    for truth_there in (0.0, 1.0):
        expected = cores([64, 128, 256], 2, truth_there)
        assert np.all((lower <= expected) & (expected <= upper))


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("shared", [0.0, 1.0])
@pytest.mark.parametrize("second", [(8, 64), (16, 256), (8, 32, 128)])
def test_two_sizes_on_two_ranks_of_a_cpu_tell_whether_they_share(
    second: tuple[int, ...], shared: float, recorded: bool
) -> None:
    predictor = on_cpu(second, shared, recorded=recorded)
    asked = [8, 16, 32, 64, 128, 256]
    expected = cores(asked, 2, shared)
    value, lower, upper = ask(predictor, asked, devices=2)
    assert value == pytest.approx(expected, rel=0.16)
    assert np.all((lower <= expected) & (expected <= upper))
    assert np.all(upper / lower < 1.7)


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("shared", [0.0, 1.0])
def test_one_large_size_on_two_ranks_of_a_cpu_says_most(shared: float, recorded: bool) -> None:
    predictor = on_cpu((256,), shared, recorded=recorded)
    value, lower, upper = ask(predictor, [8, 64, 128, 256], devices=2)
    expected = cores([8, 64, 128, 256], 2, shared)
    assert value[2:] == pytest.approx(expected[2:], rel=0.2)
    assert np.all((lower <= expected) & (expected <= upper))


def test_a_gpu_is_not_taken_to_share_anything() -> None:
    rows = [
        {"local_batch_size": size, "devices_per_node": devices, "step_time_s": time}
        for devices, size in ((1, 8), (1, 64), (1, 256), (2, 8))
        for time in [float(cores(size, devices, 0.0))]
    ]
    value, lower, upper = ask(step_time.fit(table(rows)), [64, 256], devices=2)
    assert value == pytest.approx(cores([64, 256], 2, 0.0), rel=0.1)
    assert np.all(upper / lower < 1.6)


def test_what_was_measured_on_fewer_ranks_only_is_extrapolated() -> None:
    predictor = on_cpu((8, 64), 1.0, recorded=True)
    batch = np.array([8.0, 64.0, 128.0, 256.0, 257.0])
    for devices, expected in ((1, [False] * 4 + [True]), (2, [False, False, True, True, True])):
        counts = np.full(5, float(devices))
        found = step_time_formulas.is_extrapolated(predictor.params, batch, np.ones(5), counts)
        assert found.tolist() == expected
    assert "its floor by" in predictor.form


def test_a_size_measured_on_more_ranks_is_not_extrapolated_on_fewer() -> None:
    rows = ranks(ring, setups=((1, 1),), sizes=(8, 32)) + ranks(ring, setups=((1, 4),))
    params = step_time.fit(table(rows)).params
    one, batch = np.ones(2), np.array([512.0, 1024.0])
    for devices in (1, 2, 4):
        found = step_time_formulas.is_extrapolated(params, batch, one, devices * one)
        assert found.tolist() == [False, True]


def test_only_several_ranks_of_a_cpu_measured_answers_for_one_and_for_more() -> None:
    rows = [
        {
            "local_batch_size": size,
            "devices_per_node": 2,
            "step_time_s": float(cores(size, 2)),
            "sync_time_s": SYNC,
        }
        for size in SIZES
    ]
    made = replace(table(rows), hardware=replace(HARDWARE, device_type="cpu"))
    predictor = step_time.fit(made)
    assert ask(predictor, SIZES, devices=2)[0] == pytest.approx(cores(SIZES, 2), rel=0.05)
    for devices in (1, 4):
        _, lower, upper = ask(predictor, SIZES, devices=devices)
        expected = cores(SIZES, devices)
        assert np.all((lower <= expected) & (expected <= upper))


def test_one_node_count_answers_wider_than_two_and_says_so() -> None:
    one = step_time.fit(table(ranks(ring, setups=((1, 1), (2, 1)))))
    two = step_time.fit(table(ranks(ring, setups=((1, 1), (2, 1), (4, 1)))))
    widths = []
    for predictor in (one, two):
        _, lower, upper = ask(predictor, 8, nodes=16)
        assert lower[0] <= 0.028 + ring(16, 1) <= upper[0]
        widths.append(float((upper / lower)[0]))
    assert widths[0] > widths[1]
    assert any("node counts" in text for text in one.warnings)
    assert not any("node counts" in text for text in two.warnings)
    assert "one level" in one.form


def test_what_was_never_measured_is_a_wide_guess() -> None:
    predictor = curve(SIZES, truth(SIZES, 0.02, 1e-3))
    known = ask(predictor, 32)
    for setup in ({"devices": 4}, {"nodes": 2}, {"nodes": 16, "devices": 8}):
        value, lower, upper = ask(predictor, 32, **setup)
        assert value[0] >= known[0][0]
        assert upper[0] / lower[0] > 1.5 * known[2][0] / known[1][0]


def test_only_several_ranks_measured_answers_for_one_with_a_wide_interval() -> None:
    predictor = step_time.fit(table(ranks(ring, setups=((2, 4),))))
    _, lower, upper = ask(predictor, 32)
    assert upper[0] / lower[0] > 5
    assert lower[0] <= 0.052 <= upper[0]
    assert any("one device" in text for text in predictor.warnings)


def test_recorded_synchronisation_stands_in_for_a_step_on_one_device() -> None:
    rows = [row | {"sync_time_s": ring(1, 2)} for row in ranks(ring, setups=((1, 2),))]
    predictor = step_time.fit(table(rows))
    assert ask(predictor, SIZES)[0] == pytest.approx(truth(SIZES, 0.02, 1e-3, 1.0), rel=0.03)
    assert "less their synchronisation" in predictor.form


LINKS = [
    LinkMeasurement(
        scope="inter_node",
        nodes=count,
        devices_per_node=1,
        message_bytes=size,
        time_s=1e-3 * math.log2(count) + 2 * (count - 1) / count * size / 1e9,
    )
    for count in (2, 4)
    for size in (2**20, 2**22, 2**24, 2**26, 2**28)
]


def all_reduce(nodes: int, devices: int = 1, bandwidth: float = 1e9) -> float:
    return 1e-3 * math.log2(nodes) + 2 * (nodes - 1) / nodes * 4e8 / bandwidth


def test_a_microbenchmark_foretells_nodes_that_no_step_was_measured_on() -> None:
    rows = ranks(all_reduce, setups=((1, 1),))
    predictor = step_time.fit(table(rows, LINKS, num_parameters=10**8))
    value, lower, upper = ask(predictor, SIZES, nodes=4)
    alone = truth(SIZES, 0.02, 1e-3, 1.0)
    assert np.all(value >= np.maximum(alone, all_reduce(4)) * 0.99)
    assert np.all(lower <= alone + all_reduce(4))
    assert np.all(upper >= alone + all_reduce(4))
    assert "the measured link" in predictor.form


def test_a_stated_link_takes_the_place_of_the_measured_one() -> None:
    rows = ranks(all_reduce, setups=((1, 1), (4, 1)))
    predictor = step_time.fit(table(rows, LINKS, num_parameters=10**8))
    slow, _, _ = ask(predictor, SIZES, nodes=4, bandwidth_bytes_per_s=1e8, latency_s=1e-3)
    expected = truth(SIZES, 0.02, 1e-3, 1.0) + all_reduce(4, bandwidth=1e8)
    assert slow == pytest.approx(expected, rel=0.08)
    same, _, _ = ask(predictor, SIZES, nodes=4, bandwidth_bytes_per_s=1e9)
    assert same == pytest.approx(ask(predictor, SIZES, nodes=4)[0], rel=1e-3)


def test_a_stated_link_needs_the_gradients_bytes_and_a_bandwidth() -> None:
    blind = curve(SIZES, truth(SIZES, 0.02, 1e-3))
    with pytest.raises(ValueError, match="num_parameters"):
        ask(blind, 8, nodes=2, bandwidth_bytes_per_s=1e9)
    told = step_time.fit(table(ranks(ring), num_parameters=10**6))
    with pytest.raises(ValueError, match="inter_node_bandwidth_bytes_per_s"):
        ask(told, 8, nodes=2, latency_s=1e-3)


# --- accumulation and data --------------------------------------------------------------------


def test_accumulated_passes_repeat_neither_the_optimizer_nor_synchronisation() -> None:
    rows = [row | {"optimizer_time_s": 0.01} for row in ranks(ring, setups=((1, 1), (4, 1)))]
    predictor = step_time.fit(table(rows))
    alone = truth(SIZES, 0.02, 1e-3, 1.0)
    value, _, _ = ask(predictor, SIZES, nodes=4, accumulation=8)
    assert value == pytest.approx(7 * (alone - 0.01) + alone + ring(4, 1), rel=0.04)


def test_the_optimizer_s_time_is_told_by_several_accumulation_steps() -> None:
    rows = [
        {
            "local_batch_size": size,
            "accumulation_steps": k,
            "step_time_s": k * (0.01 + 1e-3 * size) + 0.02,
        }
        for size in SIZES
        for k in (1, 4)
    ]
    predictor = step_time.fit(table(rows))
    assert predictor.params["optimizer_s"] == pytest.approx(0.02, rel=1e-6)
    value, _, _ = ask(predictor, SIZES, accumulation=16)
    assert value == pytest.approx([16 * (0.01 + 1e-3 * s) + 0.02 for s in SIZES], rel=0.02)


def test_a_slow_loader_bounds_the_step_from_below() -> None:
    rows = [
        {
            "local_batch_size": size,
            "step_time_s": max(0.02 + 1e-4 * size, 1e-3 * size),
            "data_time_s": 1e-3 * size,
        }
        for size in SIZES
    ]
    predictor = step_time.fit(table(rows))
    assert "input-bound" in predictor.form
    assert ask(predictor, 4096)[0][0] >= 4.09
    assert ask(predictor, 512, accumulation=4)[0][0] >= 4 * 0.511


# --- edges ------------------------------------------------------------------------------------


def test_no_usable_row_is_an_error_that_names_the_way_out() -> None:
    with pytest.raises(TableError, match="measure a smaller batch size"):
        step_time.fit(table([{"local_batch_size": 8, "status": "oom"}]))


def test_one_row_answers_between_all_floor_and_all_line() -> None:
    predictor = curve([32], [0.1])
    value, lower, upper = ask(predictor, [1, 32, 128, 10**9])
    assert value[1] == pytest.approx(0.1)
    assert lower[0] <= 0.1 / 32
    assert upper[0] >= 0.1
    assert lower[2] <= 0.1
    assert upper[2] >= 0.4
    assert np.all(np.isfinite(value) & (value > 0))
    assert predictor.leave_one_out_mape is None
    assert any("1 batch size:" in text for text in predictor.warnings)


def test_falling_times_are_flat_and_wide_and_said() -> None:
    predictor = curve([8, 16, 32, 64], [0.4, 0.3, 0.2, 0.1])
    value, lower, upper = ask(predictor, [8, 16, 32, 64])
    assert np.all(np.diff(value) >= 0)
    assert np.all((lower <= [0.4, 0.3, 0.2, 0.1]) & (upper >= [0.4, 0.3, 0.2, 0.1]))
    assert any("fall" in text for text in predictor.warnings)


def test_intervals_widen_with_the_distance_from_the_probes() -> None:
    predictor = curve(SIZES, truth(SIZES, 0.02, 1e-4))
    _, lower, upper = ask(predictor, [512, 1024, 2048, 8192, 10**9])
    assert np.all(np.diff(upper / lower) > 0)


def test_repeated_trials_far_apart_widen_the_interval() -> None:
    def width(apart: float) -> float:
        rows = [
            {"local_batch_size": size, "step_time_s": float(truth(size, 0.02, 1e-4)) * factor}
            for size in SIZES
            for factor in (1 - apart, 1.0, 1 + apart)
        ]
        _, lower, upper = ask(step_time.fit(table(rows)), 64)
        return float((upper / lower)[0])

    assert width(0.15) > 1.3 * width(0.01)


def test_leave_one_out_is_honest_about_a_clean_curve_and_a_wild_one() -> None:
    clean = curve(SIZES, truth(SIZES, 0.02, 1e-4))
    wild = curve(SIZES, truth(SIZES, 0.02, 1e-4) * np.array([1.0, 1.5, 0.7, 1.0]))
    assert clean.leave_one_out_mape is not None
    assert wild.leave_one_out_mape is not None
    assert clean.leave_one_out_mape < 0.1 < wild.leave_one_out_mape
    assert wild.params["spread"]["scale"] > clean.params["spread"]["scale"]


# --- properties -------------------------------------------------------------------------------

POSITIVE = st.floats(1e-4, 1e2)
CURVES = st.lists(
    st.tuples(st.integers(1, 100_000), POSITIVE), min_size=1, max_size=8, unique_by=lambda p: p[0]
)


@QUICK
@given(points=CURVES, setup=st.sampled_from([(1, 1, 1), (1, 4, 1), (8, 2, 1), (2, 1, 4)]))
def test_step_time_never_falls_with_the_batch(points, setup) -> None:
    predictor = curve([size for size, _ in points], [time for _, time in points])
    asked = np.unique(np.concatenate([np.geomspace(1, 1e7, 120), [size for size, _ in points]]))
    nodes, devices, accumulation = setup
    value, lower, upper = ask(predictor, asked, nodes, devices, accumulation)
    assert np.all(np.diff(value) >= -1e-9 * value[1:])
    assert np.all((lower > 0) & (lower <= value) & (value <= upper))


@QUICK
@given(points=CURVES, unit=st.sampled_from([1e-3, 60.0, 1e3]))
def test_another_unit_of_time_scales_the_answer(points, unit: float) -> None:
    sizes, times = zip(*points, strict=True)
    asked = np.geomspace(1, 1e6, 20)
    one = ask(curve(sizes, times), asked)
    other = ask(curve(sizes, [unit * time for time in times]), asked)
    for first, second in zip(one, other, strict=True):
        assert second == pytest.approx(unit * first, rel=1e-5)


@QUICK
@given(points=CURVES, levels=st.tuples(st.floats(0.01, 0.99), st.floats(0.01, 0.99)))
def test_intervals_nest_with_the_level(points, levels) -> None:
    predictor = curve([size for size, _ in points], [time for _, time in points])
    asked = np.geomspace(1, 1e6, 20)
    small, large = (ask(predictor, asked, nodes=4, level=level) for level in sorted(levels))
    assert np.all(large[1] <= small[1] * (1 + 1e-12))
    assert np.all(small[2] <= large[2] * (1 + 1e-12))


def optional(low: float, high: float):
    return st.none() | st.floats(low, high)


def part_of(part: float | None, whole: float) -> float | None:
    return None if part is None else min(part, whole)


ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "local_batch_size": st.integers(1, 10**6),
            "step_time_s": st.floats(1e-6, 1e5),
            "nodes": st.sampled_from([1, 1, 2, 3, 16]),
            "devices_per_node": st.sampled_from([1, 1, 2, 8]),
            "accumulation_steps": st.sampled_from([1, 1, 2, 32]),
            "step_time_std_s": optional(0, 10),
            "num_steps": st.none() | st.integers(0, 50),
            "sync_time_s": optional(0, 1e5),
            "data_time_s": optional(0, 1e5),
            "optimizer_time_s": optional(0, 1e5),
        }
    ).map(lambda row: row | {"sync_time_s": part_of(row["sync_time_s"], row["step_time_s"])}),
    min_size=1,
    max_size=12,
)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    rows=ROWS,
    links=st.booleans(),
    parameters=st.none() | st.integers(1, 10**9),
    device_type=st.sampled_from(["cuda", "cpu"]),
)
def test_any_table_that_is_allowed_fits_and_answers(
    rows, links: bool, parameters, device_type: str
) -> None:
    made = table(rows, LINKS if links else (), num_parameters=parameters)
    predictor = step_time.fit(replace(made, hardware=replace(HARDWARE, device_type=device_type)))
    assert predictor == step_time.StepTimePredictor.from_dict(
        json.loads(json.dumps(predictor.to_dict(), allow_nan=False))
    )
    asked = np.geomspace(1, 1e7, 40)
    for nodes, devices, accumulation in ((1, 1, 1), (1, 8, 2), (2, 1, 1), (64, 8, 1)):
        value, lower, upper = ask(predictor, asked, nodes, devices, accumulation)
        assert np.all(np.isfinite(value))
        assert np.all(np.diff(value) >= -1e-9 * value[1:])
        assert np.all((lower >= 0) & (lower <= value) & (value <= upper))


def test_thousands_of_sizes_make_a_small_document() -> None:
    sizes = np.arange(1, 3001)
    predictor = curve(sizes.tolist(), truth(sizes, 0.02, 1e-4))
    assert len(json.dumps(predictor.to_dict())) < 20_000
    assert ask(predictor, [1, 700, 3000])[0] == pytest.approx(
        truth([1, 700, 3000], 0.02, 1e-4), rel=0.01
    )
    assert predictor.params["range"]["largest_local_batch_size"] == 3000


@QUICK
@given(points=CURVES)
def test_parameters_are_plain_json_and_round_trip(points) -> None:
    predictor = curve([size for size, _ in points], [time for _, time in points])
    text = json.dumps(predictor.to_dict(), allow_nan=False)
    assert step_time.StepTimePredictor.from_dict(json.loads(text)) == predictor


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"compute": None}, "damaged"),
        ({"knots": "many"}, "damaged"),
        ({"range": {}}, "damaged"),
        ({"contention": 0.1}, "damaged"),
        ({"spread": {"noise_sd": 0.1}}, "damaged"),
    ],
)
def test_a_damaged_document_is_refused(change: dict[str, Any], message: str) -> None:
    data = curve(SIZES, truth(SIZES, 0.02, 1e-4)).to_dict() | change
    with pytest.raises(SchemaError, match=message):
        step_time.StepTimePredictor.from_dict(data)
    with pytest.raises(SchemaError, match="JSON object"):
        step_time.StepTimePredictor.from_dict([])  # type: ignore[arg-type]


@given(values=st.lists(st.floats(-10, 10), min_size=1, max_size=12))
def test_isotonic_values_never_fall_and_keep_their_mean(values: list[float]) -> None:
    found = compute_curve.isotonic(np.array(values), np.ones(len(values)))
    assert np.all(np.diff(found) >= 0)
    assert found.mean() == pytest.approx(np.mean(values), abs=1e-9)


def test_one_absurd_row_is_set_aside_and_the_others_stand() -> None:
    sizes = [8, 16, 32, 64, 128]
    rows = {size: 0.02 + 0.001 * size for size in sizes} | {10**9: 0.5}
    frame = pd.DataFrame({"local_batch_size": list(rows), "step_time_s": list(rows.values())})
    table = ProfileTable.from_frame(
        frame,
        workload=Workload(model="m", dataset="d", dataset_size=10**6),
        hardware=HardwareSpec(device_type="cuda", device_name="x", device_memory_bytes=2**35),
    )
    with pytest.warns(TulaWarning, match="1e\\+09 took 0.5 s"):
        bundle = fit(table)
    out = bundle.predict(pd.DataFrame({"local_batch_size": sizes}))
    assert out.step_time_s.to_numpy() == pytest.approx([rows[size] for size in sizes], rel=0.02)
