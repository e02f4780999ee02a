import dataclasses
import json
import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlflow_tula import HardwareSpec, Measurement, ProfileTable, Workload
from mlflow_tula.errors import InvalidInputError, SchemaError, TooFewProbesWarning
from mlflow_tula.predictors import memory, memory_formulas
from mlflow_tula.predictors.memory import MemoryPredictor

MB, MIB, GIB = 10**6, 2**20, 2**30

# allocated peaks of VGG11 at 32x32 with SGD momentum, MB (docs/method.md, section Memory)
VGG11_ALLOCATED = {
    8: 1485, 16: 1491, 32: 1504, 64: 1533, 128: 1592, 256: 1739, 512: 2034, 1024: 2625,
}  # fmt: skip
# device memory of VGG11 on an A100, MiB, as seen by nvidia-smi (same source): workspace jumps
VGG11_A100 = {8: 4161, 16: 4593, 32: 5567, 64: 10467, 128: 17999}
# adarsh-kr/CVModelsBenchmark, out.txt (MIT): max_memory_allocated on CIFAR-10
RESNET50 = {1: 2567.4, 32: 3858.9, 64: 5199.4, 128: 7877.7, 256: 13238.5}
GOOGLENET = {1: 901.3, 32: 2180.8, 64: 3589.2, 128: 6399.4, 256: 12032.1}


def table(
    peaks,
    *,
    unit=1,
    device_type="cuda",
    memory_bytes=40 * GIB,
    parameters=None,
    extra=(),
    **columns,
):
    rows = [
        Measurement(
            local_batch_size=size, step_time_s=0.1, peak_memory_bytes=int(peak * unit), **columns
        )
        for size, peak in peaks.items()
    ]
    return ProfileTable(
        workload=Workload(model="m", dataset="d", dataset_size=10**6, num_parameters=parameters),
        hardware=HardwareSpec(
            device_type=device_type, device_name="x", device_memory_bytes=memory_bytes
        ),
        measurements=(*rows, *extra),
    )


def oom(size, **columns):
    return Measurement(local_batch_size=size, status="oom", reason="out of memory", **columns)


def line(sizes, static=10**9, each=10**6):
    return {size: static + each * size for size in sizes}


def ask(predictor, sizes, world=1, level=0.9):
    sizes = np.asarray(sizes, float)
    worlds = np.full(sizes.shape, world)
    return memory_formulas.peak_memory(predictor.to_dict(), sizes, worlds, level)


def fits(predictor, sizes, world=1, limit=None, devices=1):
    sizes = np.asarray(sizes, float)
    found, why = memory_formulas.feasible(
        predictor.to_dict(), sizes, np.full(sizes.shape, world), limit, devices
    )
    return found.tolist(), why.tolist()


@pytest.mark.parametrize("static", [10**8, 5 * 10**9])
@pytest.mark.parametrize("each", [10**5, 10**8])
def test_a_known_line_is_recovered(static, each):
    predictor = MemoryPredictor.fit(table(line([64, 256, 1024], static, each)))
    sizes = np.array([32, 100, 512, 4096])
    value, lower, upper = ask(predictor, sizes)
    assert value == pytest.approx(static + each * sizes, rel=1e-9)
    assert (lower < value).all()
    assert (value < upper).all()
    assert predictor.leave_one_out_mape == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("peaks", [VGG11_ALLOCATED, RESNET50, GOOGLENET])
def test_published_peaks_from_two_probes_of_32_and_64(peaks):
    predictor = MemoryPredictor.fit(table({b: peaks[b] for b in (32, 64)}, unit=MB))
    beyond = [size for size in peaks if 64 < size <= 256]
    value, lower, upper = ask(predictor, beyond)
    truth = np.array([peaks[size] for size in beyond]) * MB
    assert value == pytest.approx(truth, rel=0.03)
    assert (lower <= truth).all()
    assert (truth <= upper).all()


def test_points_on_both_sides_of_the_bend_give_every_published_vgg11_peak():
    predictor = MemoryPredictor.fit(table({b: VGG11_ALLOCATED[b] for b in (8, 64, 256)}, unit=MB))
    sizes = [16, 32, 128, 512, 1024]
    truth = np.array([VGG11_ALLOCATED[size] for size in sizes]) * MB
    assert ask(predictor, sizes)[0] == pytest.approx(truth, rel=0.04)


def test_small_probes_expect_the_slope_to_rise():
    predictor = MemoryPredictor.fit(table(line([1, 2, 4], 10**9, 10**8)))
    assert predictor.bend_factor == 1.3
    assert ask(predictor, [8])[0][0] == pytest.approx(1.8e9)
    assert ask(predictor, [16])[0][0] == pytest.approx(1.8e9 + 8 * 1.3e8)
    # probes past the bend, or that have shown it, leave nothing to expect
    assert MemoryPredictor.fit(table(line([1, 32], 10**9, 10**8))).bend_factor == 1.0
    bent = {1: 100, 2: 110, 4: 130, 8: 180}
    assert MemoryPredictor.fit(table(bent, unit=MB)).bend_factor == pytest.approx(1.3 / 1.25)


def test_a_jump_of_workspace_is_not_said_to_fit():
    # at 64 the A100 took 10,467 MiB, 1.4 times the line through 8, 16 and 32
    known = {size: VGG11_A100[size] for size in (8, 16, 32)}
    predictor = MemoryPredictor.fit(table(known, unit=MIB))
    guess = ask(predictor, [64])[0][0]
    assert guess < 8000 * MIB
    assert fits(predictor, [64], limit=9000 * MIB) == (
        [False],
        ["within the limit unless memory jumps: run it once"],
    )
    assert fits(predictor, [64], limit=24 * GIB)[0] == [True]
    assert fits(MemoryPredictor.fit(table(VGG11_A100, unit=MIB)), [64], limit=9000 * MIB)[0] == [
        False
    ]


def test_what_was_run_decides_for_itself():
    predictor = MemoryPredictor.fit(table(line([8, 64]), extra=[oom(16)]))
    found, why = fits(predictor, [8, 16, 64])
    assert found == [True, False, True]
    assert why == ["was run", "ran out of memory when measured", "was run"]
    assert fits(predictor, [8, 64], limit=1.03e9)[0] == [True, False]


def test_smaller_fits_is_never_assumed():
    # workspace choice: 16 ran out of memory while 32 ran (deeplearning4j 5461, pytorch 49207)
    predictor = MemoryPredictor.fit(table(line([8, 32]), extra=[oom(16)]))
    found, why = fits(predictor, [4, 8, 12, 16, 20, 31, 32, 40])
    assert found == [True, True, False, False, False, False, True, True]
    assert why[4] == "a neighbouring batch size ran out of memory: run it once"
    lowest = MemoryPredictor.fit(table(line([32, 64]), extra=[oom(16)]))
    assert fits(lowest, [8, 16, 24, 48])[0] == [False, False, False, True]


def test_a_size_that_ran_out_shows_the_real_limit():
    # the device says 40 GiB, but 128 ran out at a predicted 1.128 GB: others hold the rest
    predictor = MemoryPredictor.fit(table(line([32, 64]), extra=[oom(128)]))
    assert fits(predictor, [48, 65, 127, 200, 256])[0] == [True, False, False, False, False]
    assert fits(MemoryPredictor.fit(table(line([32, 64]))), [127, 200, 256])[0] == [True] * 3


def test_past_four_times_the_largest_that_ran_nothing_fits():
    predictor = MemoryPredictor.fit(table(line([4, 8, 16])))
    found, why = fits(predictor, [64, 65, 281, 10**9])
    assert found == [True, False, False, False]
    assert "beyond 4x" in why[1]


def test_a_failed_probe_does_not_fit_and_says_nothing_of_its_neighbours():
    crash = Measurement(local_batch_size=16, status="failed", reason="segmentation fault")
    predictor = MemoryPredictor.fit(table(line([8, 32]), extra=[crash]))
    assert fits(predictor, [16, 20]) == (
        [False, True],
        ["failed when measured", "the interval's upper end is within the limit"],
    )


def test_every_row_out_of_memory():
    predictor = MemoryPredictor.fit(table({}, extra=[oom(8), oom(16)]))
    assert fits(predictor, [1, 8, 12])[0] == [False] * 3
    assert np.isnan(ask(predictor, [8])[0]).all()


@pytest.mark.filterwarnings("ignore::mlflow_tula.errors.TooFewProbesWarning")
def test_memory_that_was_not_measured():
    rows = [Measurement(local_batch_size=size, step_time_s=0.1) for size in (8, 64)]
    predictor = MemoryPredictor.fit(table({}, extra=rows))
    assert all(np.isnan(part).all() for part in ask(predictor, [8, 16]))
    assert fits(predictor, [8, 16, 64, 65])[0] == [True, True, True, False]
    assert fits(predictor, [8, 16], limit=GIB)[0] == [False, False]
    zeros = table({8: 0, 64: 0})
    with pytest.warns(TooFewProbesWarning, match="2 rows have a peak memory of 0 bytes"):
        assert MemoryPredictor.fit(zeros).form == "not measured"


@pytest.mark.parametrize("second", [500, 499, 501])
def test_flat_readings_ask_for_larger_probes(second):
    # yolov5 9287: flat readings gave "batch size 253731"
    flat = table({8: 500, 16: second}, unit=MB, memory_bytes=1500 * MB)
    with pytest.warns(TooFewProbesWarning, match="does not grow from batch size 8 to 16"):
        predictor = MemoryPredictor.fit(flat)
    assert not predictor.identified
    value, _, upper = ask(predictor, [64])
    assert value[0] == pytest.approx(500 * MB, rel=0.02)
    assert upper[0] >= 4 * 499 * MB
    assert fits(predictor, [16, 32, 64, 253731])[0] == [True, True, False, False]


def test_one_size_gives_an_honest_interval():
    with pytest.warns(TooFewProbesWarning, match="at batch size 64 only"):
        predictor = MemoryPredictor.fit(table(line([64])))
    value, lower, upper = ask(predictor, [16, 64, 256])
    assert value[1] == pytest.approx(1.064e9)
    assert (lower[0], upper[0]) == pytest.approx((1.064e9 / 4, 1.064e9), rel=0.25)
    assert (lower[2], upper[2]) == pytest.approx((1.064e9, 4 * 1.064e9), rel=0.25)


@pytest.mark.filterwarnings("ignore::mlflow_tula.errors.TooFewProbesWarning")
def test_counts_on_fake_tensors_are_used_where_readings_cannot_tell():
    one = table(line([64]))
    static = MemoryPredictor.fit(one, static_bytes_hint=10**9)
    assert ask(static, [256])[0][0] == pytest.approx(1.256e9)
    counted = memory.fit(one, activation_bytes_hint=2 * 10**6)
    assert ask(counted, [256])[0][0] == pytest.approx(1.064e9 + 192 * 2e6)
    two = MemoryPredictor.fit(table(line([64, 128])), activation_bytes_hint=5 * 10**6)
    assert ask(two, [256])[0][0] == pytest.approx(1.256e9)
    with pytest.raises(InvalidInputError, match="static_bytes_hint"):
        MemoryPredictor.fit(one, static_bytes_hint=-1)


def test_the_bucket_copy_of_ddp_is_measured_counted_or_guessed():
    copy = 517 * MB
    alone = line([32, 64])
    both = [
        Measurement(
            local_batch_size=size,
            devices_per_node=2,
            step_time_s=0.1,
            peak_memory_bytes=peak + copy,
        )
        for size, peak in alone.items()
    ]
    measured = MemoryPredictor.fit(table(alone, extra=both))
    assert measured.copy_bytes == copy
    counted = MemoryPredictor.fit(table(alone, parameters=copy // 4))
    guessed = MemoryPredictor.fit(table(alone))
    for predictor in (measured, counted, guessed):
        one, two, eight = (ask(predictor, [48], world) for world in (1, 2, 8))
        assert two[0][0] > one[0][0]
        assert two[2][0] > one[2][0]
        assert two[0][0] == eight[0][0]
        limit = one[2][0] * 1.001
        assert fits(predictor, [48], 1, limit)[0] == [True]
        assert fits(predictor, [48], 2, limit)[0] == [False]
    assert ask(counted, [48], 2)[0][0] - ask(counted, [48], 1)[0][0] == pytest.approx(
        copy, rel=1e-6
    )


def test_only_several_ranks_were_measured():
    predictor = MemoryPredictor.fit(table(line([32, 64]), devices_per_node=4, parameters=10**7))
    assert ask(predictor, [32, 64], 4)[0] == pytest.approx([1.032e9, 1.064e9])
    assert ask(predictor, [32], 1)[0][0] == pytest.approx(1.032e9 - 4e7)
    assert fits(predictor, [32], 4)[1] == ["was run"]


def test_out_of_memory_on_other_devices_counts_too():
    predictor = MemoryPredictor.fit(table(line([8, 16]), extra=[oom(32)]))
    # one rank ran out between 1.016 and 1.032 GB: no room for the copy of a second one
    assert fits(predictor, [16, 32], world=2) == (
        [False, False],
        ["predicted above the limit", "ran out of memory on another number of devices"],
    )
    shared = table(line([8, 32]), extra=[oom(16, devices_per_node=2)])
    predictor = MemoryPredictor.fit(shared)
    assert fits(predictor, [16, 32], world=1) == (
        [False, True],
        ["ran out of memory on another number of devices", "was run"],
    )


def test_ranks_of_a_cpu_share_its_memory():
    peaks = line([8, 16, 32], static=3 * 10**9)
    cpu = MemoryPredictor.fit(table(peaks, device_type="cpu", memory_bytes=8 * 10**9))
    assert fits(cpu, [24], world=1)[0] == [True]
    assert fits(cpu, [24], world=4, devices=4)[0] == [False]
    gpu = MemoryPredictor.fit(table(peaks, memory_bytes=8 * 10**9))
    assert fits(gpu, [24], world=4, devices=4)[0] == [True]


def test_readings_that_fall_widen_the_interval_between_them():
    predictor = MemoryPredictor.fit(table({8: 900, 16: 700, 32: 1000}, unit=MB))
    value, _, upper = ask(predictor, [12])
    assert value[0] == pytest.approx(800 * MB)
    assert upper[0] >= 900 * MB


def test_repeated_readings_count_by_their_largest_and_their_spread():
    rows = [
        Measurement(local_batch_size=size, step_time_s=0.1, peak_memory_bytes=int(peak * factor))
        for size, peak in line([32, 64]).items()
        for factor in (0.95, 1.0, 1.05)
    ]
    predictor = MemoryPredictor.fit(table({}, extra=rows))
    assert predictor.peak_bytes == pytest.approx((1.032e9 * 1.05, 1.064e9 * 1.05))
    assert predictor.relative_sd > 0.03


def test_json_round_trip():
    predictor = MemoryPredictor.fit(table(VGG11_ALLOCATED, unit=MB, extra=[oom(2048)]))
    assert MemoryPredictor.from_dict(json.loads(json.dumps(predictor.to_dict()))) == predictor


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"batch_sizes": [1.0]}, "do not go together"),
        ({"batch_sizes": ["x"]}, "damaged"),
        ({"slope_bytes": -1.0}, "damaged"),
        ({"peak_bytes": [math.nan] * 8}, "damaged"),
        ({"probes": [{"size": 3}]}, "no field 'size'"),
        ({"first_slope_bytes": "x"}, "damaged"),
        ({"up_sd": None}, "damaged"),
        ({"batch_sizes": [8.0] * 8}, "do not go together"),
        ({"surprise": 1}, "damaged"),
    ],
)
def test_damaged_documents_are_refused(change, match):
    document = MemoryPredictor.fit(table(VGG11_ALLOCATED, unit=MB)).to_dict()
    with pytest.raises(SchemaError, match=match):
        MemoryPredictor.from_dict({**document, **change})
    with pytest.raises(SchemaError, match="must be a JSON object, not list"):
        MemoryPredictor.from_dict([])


peaks_by_size = st.dictionaries(
    st.integers(1, 4096), st.integers(10**6, 10**11), min_size=1, max_size=8
)


@pytest.mark.filterwarnings("ignore::mlflow_tula.errors.TooFewProbesWarning")
@settings(max_examples=60, deadline=None)
@given(peaks=peaks_by_size, out=st.sets(st.integers(1, 4096), max_size=3))
def test_any_readings_give_ordered_nested_answers(peaks, out):
    predictor = MemoryPredictor.fit(table(peaks, extra=[oom(size) for size in out]))
    sizes = np.array([1, 7, 100, 5000, 10**9])
    for world in (1, 4):
        value, low, high = ask(predictor, sizes, world, 0.9)
        _, lower, higher = ask(predictor, sizes, world, 0.99)
        assert np.isfinite(value).all()
        assert (lower <= low).all()
        assert (low <= value * (1 + 1e-12)).all()
        assert (value <= high * (1 + 1e-12)).all()
        assert (high <= higher).all()
        assert (low >= 0).all()
        # more memory never makes a size unfit; past 4x and where it ran out it never fits
        small, large = (np.array(fits(predictor, sizes, world, limit)[0]) for limit in (1e9, 1e10))
        assert (small <= large).all()
        assert not large[-1]
        asked = np.array(sorted(out), float)
        assert not any(fits(predictor, asked, 1)[0])


@pytest.mark.filterwarnings("ignore::mlflow_tula.errors.TooFewProbesWarning")
@settings(max_examples=30, deadline=None)
@given(
    static=st.integers(10**7, 10**10),
    steps=st.lists(st.integers(10**5, 10**9), min_size=2, max_size=6),
)
def test_rising_readings_give_a_rising_curve(static, steps):
    peaks = {2**k: static + total for k, total in enumerate(np.cumsum(steps), start=3)}
    value, _, _ = ask(MemoryPredictor.fit(table(peaks)), np.arange(1, 2048))
    assert (np.diff(value) >= -1e-6 * value[:-1]).all()


def test_the_document_holds_plain_types_only():
    document = MemoryPredictor.fit(table(VGG11_ALLOCATED, unit=MB)).to_dict()
    known = {field.name for field in dataclasses.fields(MemoryPredictor)}
    assert set(document) == known - {"counted_batch_size", "shared_bytes"}
    assert json.loads(json.dumps(document)) == document
    frame = pd.DataFrame(document["probes"])
    assert frame.local_batch_size.tolist() == list(VGG11_ALLOCATED)


def test_a_size_of_several_ranks_between_single_ones_tells_the_copy():
    # VGG11 on two CPU cores: peaks in bytes of 8, 32 and 128 on one rank and 64 on two.
    two = Measurement(
        local_batch_size=64, devices_per_node=2, step_time_s=2.84, peak_memory_bytes=3018178560
    )
    peaks = {8: 2773520384, 32: 2804543488, 128: 2935586816}
    fitted = MemoryPredictor.fit(
        table(peaks, device_type="cpu", parameters=128_807_306, extra=(two,))
    )
    sizes = np.array([8.0, 64.0, 128.0])
    alone, _, _ = memory_formulas.peak_memory(fitted.to_dict(), sizes, np.ones(3), 0.9)
    assert peaks[8] <= alone[1] <= peaks[128]
    both, _, _ = memory_formulas.peak_memory(fitted.to_dict(), sizes, np.full(3, 2.0), 0.9)
    assert both[1] == pytest.approx(3018178560, rel=0.01)


def test_a_counted_copy_never_makes_one_ranks_memory_fall():
    two = Measurement(
        local_batch_size=128, devices_per_node=2, step_time_s=5.4, peak_memory_bytes=3126000000
    )
    fitted = MemoryPredictor.fit(
        table(
            {8: 2750000000, 64: 2813000000},
            device_type="cpu",
            parameters=128_807_306,
            extra=(two,),
        )
    )
    sizes = np.array([8.0, 64.0, 128.0, 256.0])
    alone, _, _ = memory_formulas.peak_memory(fitted.to_dict(), sizes, np.ones(4), 0.9)
    assert (np.diff(alone) >= 0).all()
    _, lower, upper = memory_formulas.peak_memory(fitted.to_dict(), sizes, np.full(4, 2.0), 0.9)
    assert lower[2] <= 3126000000 <= upper[2]
