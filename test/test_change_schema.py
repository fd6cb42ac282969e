"""The schema of a policy change says what is accepted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from sglang_taper.changes import schema_of_changes, updated_params
from sglang_taper.errors import FieldError
from sglang_taper.policy.types import PolicyParams

PROPERTIES = schema_of_changes()["properties"]


def good_values(name: str) -> Iterator[Any]:
    for kind in PROPERTIES[name]["anyOf"]:
        if kind.get("type") == "null":
            yield None
        elif "enum" in kind:
            yield from kind["enum"]
        else:
            yield kind["maximum"]
            yield kind.get("minimum", kind["maximum"] / 2)
            yield float(kind["maximum"])  # also of an integer: JSON has one kind


def bad_values(name: str) -> Iterator[Any]:
    yield from ([], {}, True, "no such word")
    kinds = PROPERTIES[name]["anyOf"]
    if not any(kind.get("type") == "null" for kind in kinds):
        yield None
    for kind in kinds:
        if "maximum" in kind:
            yield str(kind["maximum"])
            yield kind["maximum"] + 1
            yield kind["minimum"] - 1 if "minimum" in kind else kind["exclusiveMinimum"]
        if kind.get("type") == "integer":
            yield 2.5


@pytest.mark.parametrize("name", PROPERTIES)
def test_the_schema_of_a_parameter_agrees_with_its_check(name: str) -> None:
    assert PROPERTIES[name]["description"]
    for value in good_values(name):
        updated_params(PolicyParams(), {name: value})
    for value in bad_values(name):
        with pytest.raises(FieldError):
            updated_params(PolicyParams(), {name: value})


def test_the_schema_has_every_parameter_and_nothing_else_is_accepted() -> None:
    assert set(PROPERTIES) == set(PolicyParams.__struct_fields__)
    assert schema_of_changes()["additionalProperties"] is False
