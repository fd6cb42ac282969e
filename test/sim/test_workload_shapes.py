"""Request shapes: counting, drawing, reading trees."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from sim_factories import path_strategy

from sglang_taper.errors import FieldError
from sglang_taper.workload.parametric import ShapeParams, draw_shape
from sglang_taper.workload.shape import describe, make_shape, step_widths
from sglang_taper.workload.trees import read_trees

NESTED = [2, [[1, [[2], [1]], 1], [4]], 2]


def test_tokens_are_counted_over_all_branches_and_along_the_longest_way() -> None:
    shape = make_shape(5, NESTED)
    assert (shape.num_tokens, shape.num_critical_tokens) == (13, 8)
    assert step_widths(shape.phases) == [1, 1, 2, 3, 2, 2, 1, 1]


@given(path_strategy())
@settings(max_examples=60, deadline=None)
def test_widths_sum_to_all_tokens_and_last_for_the_critical_ones(path: Any) -> None:
    shape = make_shape(1, [1, *path])
    widths = step_widths(shape.phases)
    assert sum(widths) == shape.num_tokens
    assert len(widths) == shape.num_critical_tokens


@pytest.mark.parametrize(
    "phases", [[], [0], [[[2]], 1], [1, [[]]], [1, "2"], [1, [3]], [1.5], [True]]
)
def test_a_shape_that_cannot_be_decoded_is_refused(phases: Any) -> None:
    with pytest.raises(FieldError):
        make_shape(5, phases)


def test_a_workload_is_described_by_what_it_is_made_of() -> None:
    facts = describe([make_shape(10, [7]), make_shape(20, NESTED)])
    assert facts == {
        "num_requests": 2,
        "prompt_tokens": 30,
        "output_tokens": 20,
        "critical_tokens": 15,
        "pdr": 0.5,
        "pts": 9 / 13,
        "abf": 2.0,
        "parallel_duty": 0.5,
        "max_depth": 2,
        "serial_token_share": 7 / 20,
        "tokens_per_critical_token": 20 / 15,
    }


def test_drawn_shapes_have_the_shares_and_means_that_were_asked_for() -> None:
    rng = random.Random(7)
    facts = describe(draw_shape(ShapeParams(), rng) for _ in range(4000))
    assert facts["pdr"] == pytest.approx(0.5, abs=0.03)
    assert facts["pts"] == pytest.approx(0.8, abs=0.01)
    assert facts["abf"] == pytest.approx(7, abs=0.2)
    assert facts["prompt_tokens"] / 4000 == pytest.approx(150, rel=0.05)
    assert facts["output_tokens"] / 4000 == pytest.approx(400, rel=0.05)
    assert facts["serial_token_share"] == pytest.approx(0.25, abs=0.02)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_branches_fork_again_as_deep_as_asked(depth: int) -> None:
    params = ShapeParams(pdr=1.0, depth=depth, serial_tokens=400.0)
    rng = random.Random(1)
    facts = describe(draw_shape(params, rng) for _ in range(50))
    assert facts["max_depth"] == depth


@pytest.mark.parametrize(
    ("name", "value"),
    [("pdr", 1.5), ("fan_out", (5, 2)), ("stages", (0, 1)), ("branch_cv", -1.0)],
)
def test_parameters_out_of_range_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(FieldError, match=name):
        ShapeParams(**{name: value})


TREE = {
    "prompt_tokens": 40,
    "phases": [
        {"serial": 10},
        {
            "fork": {
                "header": 6,
                "branches": [[{"serial": 8}], [{"serial": 4}]],
                "join": 2,
            }
        },
        {"serial": 3},
    ],
}


@pytest.mark.parametrize("name", ["trees.jsonl", "trees.jsonl.gz"])
def test_trees_become_shapes_with_plan_and_conclusion_as_text(
    tmp_path: Path, name: str
) -> None:
    data = (json.dumps(TREE) + "\n").encode()
    file = tmp_path / name
    file.write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    (shape,) = read_trees(str(file))
    assert (shape.prompt_tokens, shape.phases) == (40, (16, ((8,), (4,)), 5))
    (shape,) = read_trees(str(file), shorten=4)
    assert (shape.prompt_tokens, shape.phases) == (10, (4, ((2,), (1,)), 2))


@pytest.mark.parametrize("content", ["", "{}", "[1]", "no json", '{"phases": 3}'])
def test_a_file_without_trees_is_refused_by_name(tmp_path: Path, content: str) -> None:
    file = tmp_path / "other.jsonl"
    file.write_text(content)
    with pytest.raises(FieldError, match=r"--fork-trees.*other\.jsonl"):
        read_trees(str(file))
