import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlflow_tula import ClusterSpec, Pricing, Workload
from mlflow_tula.cost import Estimate, dollars, epoch_time, time_to_target
from mlflow_tula.errors import InvalidInputError
from mlflow_tula.specs import PAPER_USD_PER_GB_HOUR

GB = 10**9


@pytest.mark.parametrize(
    ("drop_last", "batch", "steps"), [(True, 30, 3), (False, 30, 4), (True, 100, 1), (True, 101, 1)]
)
def test_an_epoch_is_its_steps(drop_last, batch, steps):
    workload = Workload(model="m", dataset="d", dataset_size=100, drop_last=drop_last)
    step = Estimate(value=0.5, lower=0.4, upper=0.7)
    epoch = epoch_time(step, workload=workload, global_batch_size=batch)
    assert (epoch.value, epoch.lower, epoch.upper) == pytest.approx(
        (0.5 * steps, 0.4 * steps, 0.7 * steps)
    )


def test_the_uncertainties_of_time_and_epochs_add_in_squares():
    epoch = Estimate(value=100.0, lower=100 / 1.3, upper=130.0)
    epochs = Estimate(value=10.0, lower=10 / 1.4, upper=14.0)
    total = time_to_target(epoch, epochs)
    assert total.value == pytest.approx(1000)
    spread = math.hypot(math.log(1.3), math.log(1.4))
    assert total.lower == pytest.approx(1000 * math.exp(-spread))
    assert total.upper == pytest.approx(1000 * math.exp(spread))
    exact = time_to_target(epoch, Estimate(value=10.0))
    assert (exact.lower, exact.upper) == pytest.approx((1000 / 1.3, 1300))


def test_device_hours_and_gb_hours():
    cluster = ClusterSpec(nodes=2, devices_per_node=4)
    hour = Estimate(value=3600.0)
    peak = Estimate(value=12.0 * GB)
    by_hour = dollars(hour, cluster=cluster, pricing=Pricing(usd_per_device_hour=2.5))
    assert by_hour.value == pytest.approx(8 * 2.5)
    # the paper's price: 8 devices x 12 GB x $0.15 per GB-hour
    paper = Pricing(usd_per_gb_hour=PAPER_USD_PER_GB_HOUR)
    by_memory = dollars(hour, cluster=cluster, pricing=paper, peak_memory_bytes=peak)
    assert by_memory.value == pytest.approx(8 * 12 * 0.15)
    both = dollars(
        hour,
        cluster=cluster,
        pricing=Pricing(usd_per_device_hour=2.5, usd_per_gb_hour=0.15),
        peak_memory_bytes=peak,
    )
    assert both.value == pytest.approx(by_hour.value + by_memory.value)


def test_the_interval_of_memory_widens_a_price_per_gb_only():
    seconds = Estimate(value=3600.0, lower=3000.0, upper=4320.0)
    peak = Estimate(value=10.0 * GB, lower=8.0 * GB, upper=15.0 * GB)
    one = ClusterSpec()

    def price(**prices):
        return dollars(seconds, cluster=one, pricing=Pricing(**prices), peak_memory_bytes=peak)

    by_hour = price(usd_per_device_hour=1.0)
    assert by_hour.upper / by_hour.value == pytest.approx(1.2)
    by_memory = price(usd_per_gb_hour=0.1)
    assert by_memory.upper / by_memory.value > 1.5
    both = price(usd_per_device_hour=1.0, usd_per_gb_hour=0.1)
    assert 1.2 < both.upper / both.value < by_memory.upper / by_memory.value


def test_a_price_of_zero_costs_nothing():
    free = dollars(
        Estimate(value=60.0, lower=1.0, upper=math.inf),
        cluster=ClusterSpec(),
        pricing=Pricing(usd_per_device_hour=0.0),
    )
    assert (free.value, free.lower, free.upper) == (0, 0, 0)


def test_a_price_per_gb_needs_memory():
    with pytest.raises(InvalidInputError, match="usd_per_gb_hour needs peak_memory_bytes"):
        dollars(Estimate(value=1.0), cluster=ClusterSpec(), pricing=Pricing(usd_per_gb_hour=0.15))


@pytest.mark.parametrize(
    ("bounds", "match"),
    [
        ({"value": -1.0}, "value must be"),
        ({"value": math.nan}, "value must be"),
        ({"value": 1.0, "lower": 2.0}, "must hold its value"),
        ({"value": 1.0, "upper": 0.5}, "must hold its value"),
        ({"value": 1.0, "upper": math.nan}, "must hold its value"),
    ],
)
def test_bad_estimates_are_refused(bounds, match):
    with pytest.raises(InvalidInputError, match=match):
        Estimate(**bounds)


def test_bad_batch_and_factor_are_refused():
    workload = Workload(model="m", dataset="d", dataset_size=100)
    with pytest.raises(InvalidInputError, match="global_batch_size must be a whole number"):
        epoch_time(Estimate(value=1.0), workload=workload, global_batch_size=0)
    with pytest.raises(InvalidInputError, match="factor must be"):
        Estimate(value=1.0).scaled(-2)


positive = st.floats(1e-3, 1e6)


@settings(max_examples=60, deadline=None)
@given(
    seconds=positive,
    ratio=st.floats(1.0, 10.0),
    peak=positive,
    price=positive,
    more=st.floats(1.0, 100.0),
    nodes=st.integers(1, 64),
)
def test_cost_is_ordered_and_monotone_in_price_time_and_devices(
    seconds, ratio, peak, price, more, nodes
):
    time = Estimate(value=seconds, lower=seconds / ratio, upper=seconds * ratio)
    held = Estimate(value=peak * GB, lower=peak * GB / ratio, upper=peak * GB * ratio)

    def cost(nodes=nodes, hour=price, gb=price, time=time):
        return dollars(
            time,
            cluster=ClusterSpec(nodes=nodes),
            pricing=Pricing(usd_per_device_hour=hour, usd_per_gb_hour=gb),
            peak_memory_bytes=held,
        )

    base = cost()
    assert base.lower <= base.value <= base.upper
    for dearer in (
        cost(hour=price * more),
        cost(gb=price * more),
        cost(nodes=nodes + 1),
        cost(time=time.scaled(more)),
    ):
        assert dearer.value >= base.value * (1 - 1e-12)
