import math

from jaxrl.logs.steps import merge
from jaxrl.objectives.metrics import Metric


def update(loss, gap, norm):
    return {
        "actor/pg_loss": Metric(loss, "loss"),
        "x/gap": Metric(gap, "maximum"),
        "grad_norm": Metric(norm),
    }


def test_metrics_of_a_step_by_their_reductions():
    measured = [update(1.0, 3.0, 2.0), update(3.0, 1.0, 4.0)]
    assert merge(measured) == {"actor/pg_loss": 2.0, "x/gap": 3.0, "actor/grad_norm": 3.0}
    assert merge([]) == {}


def test_an_update_in_which_nothing_was_measured_is_left_out():
    merged = merge([update(1.0, math.nan, 2.0), update(3.0, 1.0, math.nan)])
    assert merged == {"actor/pg_loss": 2.0, "x/gap": 1.0, "actor/grad_norm": 2.0}
    assert math.isnan(merge([update(1.0, math.nan, 2.0)])["x/gap"])
