"""What the server says about its routes is true: schemathesis makes up the requests."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings

from server import Server

# In the extra `test`; an environment made without it runs everything else.
schemathesis = pytest.importorskip("schemathesis")

OURS = r"^/taper"
# Not that every body which agrees with the schema is accepted: what is wrong with the
# values of a fork, as an unknown sampling parameter, is more than a schema says.
OF_FORKS = [
    schemathesis.checks.not_a_server_error,
    schemathesis.checks.status_code_conformance,
    schemathesis.checks.content_type_conformance,
    schemathesis.checks.response_schema_conformance,
]


@pytest.fixture(scope="module")
def described(taper_server: Server) -> Any:
    taper_server.set_policy(policy="taper")
    return schemathesis.openapi.from_url(f"{taper_server.url}/openapi.json")


def each_case(schema: Any, path: str, num_examples: int, check: Any) -> None:
    """`check` of made-up calls of every operation below `path`, at least one."""
    operations = [*schema.include(path_regex=path).get_all_operations()]
    assert operations
    for operation in operations:

        @settings(max_examples=num_examples)
        @given(case=operation.ok().as_strategy())
        def all_pass(case: Any) -> None:
            check(case)

        all_pass()


def test_our_routes_answer_as_they_are_described(
    described: Any, taper_server: Server
) -> None:
    before = taper_server.state()["params"]

    def check(case: Any) -> None:
        try:
            case.call_and_validate(timeout=60)
        finally:
            if "policy" in case.path:
                taper_server.set_policy(**{**before, "rho": None})

    each_case(described, r"^/taper", 40, check)


def test_a_fork_of_anything_is_answered_as_described(described: Any) -> None:
    def check(case: Any) -> None:
        case.call_and_validate(timeout=60, checks=OF_FORKS)

    each_case(described, r"^/fork$", 25, check)


def test_an_abort_of_anything_is_no_error_of_the_server(described: Any) -> None:
    def check(case: Any) -> None:
        no_error = [schemathesis.checks.not_a_server_error]
        case.call_and_validate(timeout=60, checks=no_error)

    each_case(described, r"^/abort_request$", 40, check)
