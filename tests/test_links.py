"""The communication probe: sizes, buckets, what is fitted and registered, and what it foretells."""

from __future__ import annotations

import dataclasses
import itertools
import warnings

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mlflow_tula as tula
from mlflow_tula.errors import InvalidInputError, NotRegisteredError
from mlflow_tula.predictors import link, sync_formulas
from mlflow_tula.table import LinkMeasurement, Measurement, ProfileTable

GRADIENT = 44_700_000
MIB = 2**20


def probe_rows(
    bandwidth: float, *, latency: float = 4e-4, nodes: int = 2, cast: float = 1.5e-10
) -> tuple[LinkMeasurement, ...]:
    """What the communication probe measures on a link that is exactly its law."""

    def row(size: int, buckets: int | None = None, half: bool = False) -> LinkMeasurement:
        ring = 2 * (nodes - 1) / nodes * size / bandwidth
        rounds = latency * (buckets or 1) * np.log2(nodes)
        return LinkMeasurement(
            scope="inter_node",
            nodes=nodes,
            devices_per_node=1,
            message_bytes=size,
            time_s=rounds + (0.5 * ring + cast * size if half else ring),
            num_buckets=buckets,
            compression="bf16" if half else None,
        )

    plain = [row(MIB * 2**power) for power in range(0, 10, 2)]
    return (*plain, row(GRADIENT, 3), row(GRADIENT, 3, half=True))


def single_node_table(**more: object) -> ProfileTable:
    """A compute curve with its backward pass: a floor and a line."""
    rows = tuple(
        Measurement(
            local_batch_size=size,
            step_time_s=0.03 + 0.0015 * size,
            backward_time_s=0.015 + 0.001 * size,
            optimizer_time_s=0.008,
            peak_memory_bytes=500_000_000 + 600_000 * size,
        )
        for size in (8, 64, 512)
    )
    workload = tula.Workload(
        model="resnet18", dataset="d", dataset_size=60_000, num_parameters=GRADIENT // 4
    )
    hardware = tula.HardwareSpec(
        device_type="cuda", device_name="T4", device_memory_bytes=16 * 2**30
    )
    return ProfileTable(workload=workload, hardware=hardware, measurements=rows, **more)


def step(bundle: tula.PredictorBundle, nodes: int, local: int = 64, **options: object) -> float:
    frame = pd.DataFrame({"local_batch_size": [local], "nodes": nodes})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tula.errors.TulaWarning)
        return float(bundle.predict(frame, **options).step_time_s[0])


def test_buckets_are_ddps() -> None:
    links = pytest.importorskip("mlflow_tula.probing.links")
    sizes = [MIB // 2] * 4 + [30 * MIB, 10 * MIB, MIB // 4, MIB]
    # from the last parameter on: the first bucket is closed at 1 MiB, the others at 25
    assert links.bucket_sizes(sizes) == [MIB, 40 * MIB + MIB // 4, 2 * MIB]
    assert links.bucket_sizes([100]) == [100]
    assert sum(links.bucket_sizes(sizes, 5 * MIB)) == sum(sizes)
    assert len(links.bucket_sizes(sizes, 5 * MIB)) > len(links.bucket_sizes(sizes))


def test_buckets_equal_those_of_a_real_ddp() -> None:
    torch = pytest.importorskip("torch")
    from mlflow_tula.probing.links import bucket_sizes

    layers = [torch.nn.Linear(700, 700) for _ in range(24)]
    parameters = [p for layer in layers for p in layer.parameters()]
    limits = [MIB, 5 * MIB]
    groups = torch.distributed._compute_bucket_assignment_by_size(
        list(reversed(parameters)), limits
    )[0]
    sizes = [p.numel() * 4 for p in parameters]
    mirrored = list(reversed(sizes))
    assert bucket_sizes(sizes, 5 * MIB) == [sum(mirrored[i] for i in group) for group in groups]


@pytest.mark.parametrize("rate", [1e6, 25e6, 125e6, 5e9, 1e12])
def test_five_sizes_follow_the_links_speed(rate: float) -> None:
    from mlflow_tula.probing.links import LARGEST_BYTES, message_sizes

    sizes = message_sizes(rate)
    assert len(set(sizes)) == 5
    assert sizes == sorted(sizes)
    assert sizes[0] == MIB
    assert 4 * MIB <= sizes[-1] <= LARGEST_BYTES
    assert all(size % 4 == 0 for size in sizes)


@pytest.mark.parametrize(
    ("busy_s", "others", "own_s"), [(0.12, 0.0, 0.12), (0.55, 0.5, 0.05), (0.9, 1.0, 0.0)]
)
def test_other_work_on_the_cores_is_not_the_all_reduces(
    busy_s: float, others: float, own_s: float
) -> None:
    links = pytest.importorskip("mlflow_tula.probing.links")
    assert links.without_others(busy_s, 1.0, others) == pytest.approx(own_s)


def test_latency_bandwidth_and_casts_are_recovered() -> None:
    found = link.fit(probe_rows(118e6), "inter_node")
    assert found is not None
    assert found.latency_s == pytest.approx(4e-4, rel=0.01)
    assert found.bandwidth_bytes_per_s == pytest.approx(118e6, rel=1e-3)
    assert found.cast_s_per_byte == pytest.approx(1.5e-10, rel=0.01)
    assert found.seconds(GRADIENT, 2, messages=3) == pytest.approx(0.3812, rel=0.01)
    assert found.seconds(GRADIENT, 2, messages=3, compressed=True) < 0.2


@given(
    alone=st.floats(1e-3, 10),
    sync=st.floats(1e-3, 10),
    power=st.sampled_from([1.0, 2.0, 4.0]),
    share=st.floats(0.05, 1),
    messages=st.floats(1, 50),
)
def test_overlap_lies_between_hiding_all_and_hiding_nothing(
    alone: float, sync: float, power: float, share: float, messages: float
) -> None:
    one = np.array([alone]), np.array([[sync]]), power, np.array([share]), messages
    value = sync_formulas.overlapped(*one)[0, 0]
    back = share * alone
    assert value >= alone - back + max(back, sync) - 1e-9
    assert value <= alone + sync + 1e-9


def test_links_alone_foretell_nodes_that_are_not_there() -> None:
    bundle = tula.fit(single_node_table(links=probe_rows(118e6)))
    base = step(bundle, 1)
    two, four, sixteen = (step(bundle, nodes) for nodes in (2, 4, 16))
    assert base == pytest.approx(0.126, rel=0.02)
    # forward + optimizer + the gradient's way: 0.047 + 0.381, and a little for the last bucket
    assert two == pytest.approx(0.045 + 0.381, rel=0.06)
    assert two < four < sixteen < 0.05 + 2 * 0.381 * 1.1
    frame = pd.DataFrame({"local_batch_size": [64] * 3, "nodes": [1, 2, 16]})
    with pytest.warns(tula.errors.ExtrapolationWarning):
        assert bundle.predict(frame).extrapolated.tolist() == [False, True, True]


def test_compression_halves_the_volume_and_accumulation_divides_the_synchronisations() -> None:
    bundle = tula.fit(single_node_table(links=probe_rows(118e6)))
    plain, half = step(bundle, 2), step(bundle, 2, gradient_compression="bf16")
    assert half == pytest.approx(plain - 0.19 + GRADIENT * 1.5e-10, rel=0.05)
    frame = pd.DataFrame({"local_batch_size": [64] * 2, "nodes": 2, "accumulation_steps": [1, 4]})
    with pytest.warns(tula.errors.ExtrapolationWarning):
        once, four = bundle.predict(frame).step_time_s
    assert four - once == pytest.approx(3 * 0.118, rel=0.05)
    more_buckets = step(bundle, 2, bucket_bytes=float(MIB))
    assert more_buckets > plain
    with pytest.raises(InvalidInputError, match="gradient_compression must be none or bf16"):
        bundle.predict(frame, gradient_compression="int8")


def test_rows_with_compression_teach_the_level_without() -> None:
    rows = single_node_table().measurements
    across = tuple(
        dataclasses.replace(
            row,
            nodes=2,
            step_time_s=(row.step_time_s or 0) + 0.3,
            sync_time_s=0.3,
            backward_time_s=None,
            gradient_compression="bf16",
        )
        for row in rows
    )
    table = dataclasses.replace(single_node_table(), measurements=(*rows, *across))
    bundle = tula.fit(table)
    measured = step(bundle, 2, gradient_compression="bf16")
    assert measured == pytest.approx(0.126 + 0.3, rel=0.12)
    assert step(bundle, 2) > measured * 1.2


def test_stated_bandwidth_takes_the_place_of_the_measured_one() -> None:
    bundle = tula.fit(single_node_table(links=probe_rows(118e6)))
    slow = step(bundle, 2, inter_node_bandwidth_bytes_per_s=23.6e6)
    assert slow == pytest.approx(step(tula.fit(single_node_table(links=probe_rows(23.6e6))), 2))


def test_recommendations_flip_with_the_link() -> None:
    clusters = [tula.ClusterSpec(nodes=nodes) for nodes in (1, 2)]
    slow, fast = (
        tula.recommend(
            tula.fit(single_node_table(links=probe_rows(rate))),
            cluster=clusters,
            objective="min_time",
            candidates=[64, 128, 256, 512],
        )
        for rate in (5e6, 5e9)
    )
    assert (slow.nodes, fast.nodes) == (1, 2)
    assert any("compression does not pay" in text or "would save" in text for text in fast.advice)
    assert fast.choice.extrapolated


def test_scaling_ranks_nodes_and_batches_together() -> None:
    bundle = tula.fit(single_node_table(links=probe_rows(1.2e9)))
    clusters = [tula.ClusterSpec(nodes=nodes) for nodes in (1, 2, 4, 8, 16)]
    choice = tula.recommend(bundle, cluster=clusters, objective="min_time")
    assert {point.nodes for point in choice.ranking} == {1, 2, 4, 8, 16}
    times = [point.time_s for point in choice.ranking]
    assert times == sorted(times)
    strong = [point for point in choice.scaling if point.scaling == "strong"]
    weak = [point for point in choice.scaling if point.scaling == "weak"]
    assert len({point.global_batch_size for point in strong}) == 1
    assert len({point.local_batch_size for point in weak}) == 1
    assert weak[0].efficiency == 1.0
    assert all(a.efficiency >= b.efficiency for a, b in itertools.pairwise(weak))
    assert all(point.extrapolated for point in weak if point.nodes > 1)
    assert tula.Recommendation.from_dict(choice.to_dict()) == choice
    assert "extrapolated" in str(choice)
    for scaling, held in (("strong", "global_batch_size"), ("weak", "local_batch_size")):
        one = tula.recommend(bundle, cluster=clusters, objective="min_time", scaling=scaling)
        assert len({getattr(point, held) for point in one.curve}) == 1


def test_measured_on_two_devices_is_not_measured_on_two_nodes() -> None:
    rows = single_node_table().measurements
    twice = tuple(
        dataclasses.replace(row, devices_per_node=2, step_time_s=1.1 * (row.step_time_s or 0))
        for row in rows
    )
    table = dataclasses.replace(
        single_node_table(links=probe_rows(118e6)), measurements=(*rows, *twice)
    )
    bundle = tula.fit(table)
    clusters = [tula.ClusterSpec(nodes=2), tula.ClusterSpec(devices_per_node=2)]
    choice = tula.recommend(bundle, cluster=clusters, objective="min_time")
    assert not any(point.measured for point in choice.curve if point.nodes == 2)
    assert any(point.measured for point in choice.curve if point.devices_per_node == 2)


def test_a_link_is_registered_once_for_its_hardware(store) -> None:
    import mlflow

    from mlflow_tula import registry

    hardware = single_node_table().hardware
    with pytest.raises(NotRegisteredError, match=r"tula\.link\.1x-t4"):
        registry.load_links(hardware)
    rows = probe_rows(118e6)
    with mlflow.start_run() as run:
        first = registry.register_links(hardware, rows, run_id=run.info.run_id)
        again = registry.register_links(hardware, rows, run_id=run.info.run_id)
        other = registry.register_links(hardware, probe_rows(25e6), run_id=run.info.run_id)
        nothing = registry.register_links(hardware, rows[:1], run_id=run.info.run_id)
    assert (first or "").endswith("version 1")
    assert again is None
    assert (other or "").endswith("version 2")
    assert nothing is None
    assert set(registry.load_links(hardware)) == set(probe_rows(25e6))
    model = mlflow.pyfunc.load_model(f"models:/tula.link.{hardware.slug}@champion")
    frame = pd.DataFrame({"message_bytes": [GRADIENT, GRADIENT], "nodes": [2, 1]})
    seconds = model.predict(frame).time_s.tolist()
    assert seconds[0] == pytest.approx(4e-4 + GRADIENT / 25e6, rel=0.01)
    assert seconds[1] == 0.0
    assert registry.find() == []
