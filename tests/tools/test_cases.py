"""Cases, inputs and routings: what a measurement is made of."""

import pytest
import torch

from sonicmoe import routing
from sonicmoe.enums import ActivationType
from sonicmoe.tools.cases import CASES, GRID, MODELS, ROUTERS, Case, find_case
from sonicmoe.tools.inputs import ROUTINGS, _capped, make_inputs, shares


def test_names_are_unique_and_found():
    assert len(CASES) == len(GRID) + len(MODELS)
    assert str(find_case("7b-fine").problem) == "24576,1536,256,128,8"
    with pytest.raises(ValueError, match=r"case: expected one of 7b-fine.*got 'nine'.*--shape"):
        find_case("nine")


def test_the_layers_routers_are_the_cases_routers():
    assert set(ROUTERS) <= set(routing.ROUTERS)
    assert {case.router for case in CASES.values()} == set(ROUTERS)


def test_a_shape_is_a_case():
    case = Case.of_shape("256,64,32,8,2", ActivationType.RELU_SQ, bias=True)
    assert (case.name, case.problem.N, case.bias) == ("256,64,32,8,2", 32, True)
    assert case.with_tokens(7).problem.T == 7
    with pytest.raises(ValueError, match=r"shape: expected five integers"):
        Case.of_shape("256,64")


@pytest.mark.parametrize("case", MODELS, ids=lambda case: case.name)
def test_models_fit_the_kernels(case):
    assert case.problem.H % 8 == case.problem.I % 8 == 0
    assert case.problem.K <= case.problem.E


# --- routing --------------------------------------------------------------------------------------
@pytest.mark.parametrize("routing", ROUTINGS)
def test_shares_sum_to_one(routing):
    assert sum(shares(routing, 128)) == pytest.approx(1)
    assert shares(routing, 1) == [1.0]


def test_shares_by_hand():
    assert shares("zipf", 3) == pytest.approx([6 / 11, 3 / 11, 2 / 11])
    assert shares("hot", 4) == pytest.approx([0.25, 0.25, 0.25, 0.25])
    assert shares("hot", 16)[0] == pytest.approx(0.25)
    with pytest.raises(ValueError, match=r"routing: expected one of uniform, zipf, hot"):
        shares("lukewarm", 4)


def test_no_expert_gets_more_than_a_choice_of_every_token():
    assert _capped([0.6, 0.3, 0.1], 0.5) == pytest.approx([0.5, 0.375, 0.125])
    assert _capped([0.7, 0.29, 0.01], 0.5) == pytest.approx([0.5, 0.4833, 0.0167], abs=1e-4)
    assert _capped([0.25] * 4, 0.25) == pytest.approx([0.25] * 4)


@pytest.mark.parametrize("router", [True, False], ids=["router", "given"])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_routing_has_the_shares_that_were_asked_for(routing, router):
    case = Case.of_shape("4096,64,8,16,2")
    counts = make_inputs(case, routing, "cpu", torch.float32).counts(router)
    assert sum(counts) == case.problem.R
    wanted = shares(routing, 16)
    for count, share in zip(counts, wanted, strict=True):
        assert count / case.problem.R == pytest.approx(
            share, rel=0.6 if routing == "uniform" else 0.15
        )


def test_a_quarter_of_the_rows_even_where_no_router_could():
    case = Case.of_shape("512,64,8,16,8")
    inputs = make_inputs(case, "hot", "cpu", torch.float32)
    assert inputs.counts(router=False)[0] / case.problem.R == pytest.approx(1 / 4, rel=0.1)
    assert inputs.counts(router=True)[0] / case.problem.R == pytest.approx(1 / 8, rel=0.05)
