"""CSGO's setting comes out as it was reproduced, and the fast planner finds what Algorithm 1 finds."""

from __future__ import annotations

import statistics

import pytest

from bench.csgo.exact import compared
from bench.csgo.paper import CLAIMS, row, table
from testkit.random_fleets import FAMILIES

TABLE = {  # tokens: ideal single, even, heuristic, optimum, devices, layers, receiving, streamed
    256: (6.129, 3.612, 2.829, 2.562, "3412", (7, 5, 15, 13), 2.539, 2.315),
    512: (6.191, 3.700, 2.980, 2.658, "3412", (7, 5, 14, 14), 2.623, 2.332),
    1024: (6.325, 3.903, 3.326, 2.848, "4312", (4, 7, 15, 14), 2.788, 2.501),
    2048: (6.630, 4.388, 4.257, 3.338, "4321", (3, 6, 12, 19), 3.209, 2.808),
    4096: (7.394, 6.495, 6.204, 4.497, "4321", (2, 4, 12, 22), 4.252, 3.512),
    8192: (9.462, 12.448, 10.749, 7.029, "321", (3, 10, 27), 6.623, 5.444),
}


@pytest.mark.parametrize("tokens", TABLE)
def test_the_papers_setting_comes_out_as_it_was_reproduced(tokens: int) -> None:
    single, even, heuristic, best, devices, layers, receiving, streaming = TABLE[tokens]
    found = row(tokens)
    wanted = {"ideal_single": single, "even": even, "heuristic": heuristic, "optimum": best}
    assert found["seconds"] == pytest.approx(wanted, abs=6e-4)
    assert found["proved"]
    assert found["algorithm_1"] == pytest.approx(found["seconds"]["optimum"], rel=1e-8)
    assert found["overlaps"]["receiving"] == pytest.approx(receiving, abs=6e-4)
    assert found["overlaps"]["streamed"] == pytest.approx(streaming, abs=6e-4)
    stages = found["ways"]["optimum"]["stages"]
    assert "".join(stage["device"][-1] for stage in stages) == devices
    assert tuple(stage["last_layer"] - stage["first_layer"] + 1 for stage in stages) == layers


def test_what_is_saved_stands_beside_the_papers_claims() -> None:
    lines = [row(tokens) for tokens in (256, 8192)]
    every = [share for line in lines for share in line["saved"].values()]
    ours = {"mean_over_best_baseline": statistics.fmean(every), "least": min(every), "most": max(every)}
    text = table({"lengths": lines, "ours": ours, "claims": CLAIMS})
    assert "3,4,1,2 (7,5,15,13)" in text
    assert "(the paper: 17.43 %)" in text
    assert "9.4 to 58.2 % (the paper: 8 to 50 %)" in text


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_the_optimum_of_algorithm_1(family: str) -> None:
    found = compared(family, 6, seed=7)  # `python -m bench run csgo/exact` compares a thousand
    assert (found["wrong"], found["unproved"]) == (0, 0)
