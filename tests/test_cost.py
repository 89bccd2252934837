"""The cost model: published figures within the error it states, its own step on an H200 in 15 %."""

import pytest
import torch

import train
from data import bench, cost


@pytest.mark.parametrize("claim", cost.CLAIMS, ids=lambda c: c.model.__name__)
def test_published_figures_come_out_within_the_stated_error(claim):
    assert abs(claim.model() / claim.published - 1) <= claim.error <= 0.1


@pytest.mark.parametrize("claim", [c for c in cost.CLAIMS if c.assumed],
                         ids=lambda c: c.model.__name__)
def test_what_is_assumed_is_plausible_and_its_range_is_told(claim):
    low, high = cost.needed(claim)
    value = cost.defaults(claim.model)[claim.assumed]
    assert claim.bounds[0] <= low <= value <= high <= claim.bounds[1]
    for end in (low, high):
        assert abs(claim.model(**{claim.assumed: end}) / claim.published - 1) <= claim.error


def test_sensitivities_are_derivatives():
    assert dict(cost.sensitivity(cost.operations_per_byte)) == pytest.approx(
        dict(fp4=1, link=-1), abs=1e-5)
    name, slope = cost.sensitivity(cost.scout)[0]       # 1 / (1 - f (1 - 1/g)) - 1 by hand
    rounded, plain = cost.scout_times(0.81e15, 1e15)
    f, g = rounded / (rounded + plain) * (1 - 0.32), 1.709
    d = f / g / (1 - f * (1 - 1 / g)) ** 2              # g * d(gain)/dg
    assert name == "gain" and slope == pytest.approx(d / cost.scout(), rel=1e-4)


@pytest.mark.parametrize("row", cost.measured(), ids=lambda r: f"{r['model']}-{r['precision']}")
def test_the_step_on_an_h200_is_predicted(row):
    model = sum(cost.h200_step(bench.MODELS[row["model"]], row["precision"]).values())
    assert 1e3 * model == pytest.approx(row["ms"], rel=0.15)


@pytest.mark.parametrize("shape", bench.MODELS.values(), ids=bench.MODELS)
def test_parameters_and_operations_are_those_of_the_model(shape):
    class Unmade(train.GPT):
        def init_weights(self, seed):
            pass

    with torch.device("meta"):
        model = Unmade(train.Config(**shape).model())
    assert cost.parameters(shape) == pytest.approx(model.parameters_active()[0], rel=1e-3)
    experts, other, attention = cost.active_flops(shape)
    tokens = shape["batch"] * shape["seq_len"]
    # flops_per_token counts 3 passes of attention over half the positions; the model 3.5.
    assert (experts + other + attention * 3 / 3.5) / tokens == pytest.approx(
        model.flops_per_token(), rel=0.01)
