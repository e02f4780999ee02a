from __future__ import annotations

import numpy as np
import pytest

from mlflow_tula.errors import InvalidInputError
from mlflow_tula.predictors import link
from mlflow_tula.table import LinkMeasurement

SIZES = [2**20 * 4**k for k in range(5)]


def rows(latency: float, bandwidth: float, nodes=(2, 4), noise: float = 0.0, sizes=SIZES):
    draw = np.random.default_rng(1)
    return [
        LinkMeasurement(
            scope="inter_node",
            nodes=count,
            devices_per_node=1,
            message_bytes=size,
            time_s=(latency * np.log2(count) + 2 * (count - 1) / count * size / bandwidth)
            * float(np.exp(noise * draw.normal())),
        )
        for count in nodes
        for size in sizes
    ]


@pytest.mark.parametrize("latency", [1e-4, 1e-3])
@pytest.mark.parametrize("bandwidth", [25e6, 125e6, 1.2e9])
def test_latency_and_bandwidth_are_recovered(latency: float, bandwidth: float) -> None:
    found = link.fit(rows(latency, bandwidth), "inter_node")
    assert found is not None
    assert found.latency_s == pytest.approx(latency, rel=1e-3)
    assert found.bandwidth_bytes_per_s == pytest.approx(bandwidth, rel=1e-3)
    assert found.relative_error < 1e-6


def test_noise_of_3_percent_moves_bandwidth_by_less_than_5() -> None:
    found = link.fit(rows(1e-3, 125e6, noise=0.03), "inter_node")
    assert found is not None
    assert found.bandwidth_bytes_per_s == pytest.approx(125e6, rel=0.05)
    assert 0 < found.relative_error < 0.05


def test_messages_below_one_mebibyte_do_not_flatter_a_shaped_link() -> None:
    small = rows(1e-5, 1e12, sizes=[1024, 65536])
    found = link.fit(small + rows(1e-3, 25e6), "inter_node")
    assert found is not None
    assert found.bandwidth_bytes_per_s == pytest.approx(25e6, rel=1e-3)


def test_small_messages_serve_where_there_are_no_others() -> None:
    found = link.fit(rows(1e-4, 1e9, sizes=[1024, 65536, 262144]), "inter_node")
    assert found is not None
    assert found.latency_s == pytest.approx(1e-4, rel=1e-2)


def test_one_message_size_or_one_rank_identifies_nothing() -> None:
    assert link.fit([], "inter_node") is None
    assert link.fit(rows(1e-3, 1e9, sizes=[2**20]), "inter_node") is None
    assert link.fit(rows(1e-3, 1e9), "intra_node") is None


def test_a_link_is_checked_and_round_trips() -> None:
    one = link.Link(latency_s=1e-3, bandwidth_bytes_per_s=1e9)
    assert link.Link.from_dict(one.to_dict()) == one
    with pytest.raises(InvalidInputError, match="bandwidth_bytes_per_s must be a finite number"):
        link.Link(latency_s=0.0, bandwidth_bytes_per_s=0.0)
