"""What an error says about a value from outside, whatever the value is."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_taper.errors import FieldError


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value",
    [
        nested(100_000),
        "x" * 10_000_000,
        {str(i): i for i in range(1000)},
        b"x" * 1000,
        "\ud800",
        float("nan"),
        10**400,
    ],
    ids=["deep", "long", "wide", "bytes", "surrogate", "nan", "large"],
)
def test_a_message_is_short_and_names_the_field(value: Any) -> None:
    message = str(FieldError("body.cap", value, "a number"))
    assert message.startswith("body.cap=")
    assert message.endswith(" is not valid: a number")
    assert len(message) < 130


def test_a_key_that_a_client_made_up_is_cut_too() -> None:
    message = str(FieldError("meta." + "k" * 10_000, 1, "known keys are a, b"))
    assert message.startswith("meta.kkk")
    assert "...=1 is not valid: known keys are a, b" in message
    assert len(message) < 250


def test_small_values_are_shown_as_python_writes_them() -> None:
    for value in ("a b", {"deep": 1}, [1, None], True, -0.5):
        assert f"x={value!r} is" in str(FieldError("x", value, "else"))
