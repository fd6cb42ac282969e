"""What the server says about its routes is true: schemathesis makes up the requests."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings

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


@pytest.fixture(scope="session")
def described(taper_server: Server) -> Any:
    taper_server.set_policy(policy="taper")
    return schemathesis.openapi.from_url(f"{taper_server.url}/openapi.json")


schema = schemathesis.pytest.from_fixture("described")


@schema.include(path_regex=OURS).parametrize()
@settings(max_examples=40)
def test_our_routes_answer_as_they_are_described(
    case: Any, taper_server: Server
) -> None:
    before = taper_server.state()["params"]
    try:
        case.call_and_validate(timeout=60)
    finally:
        if "policy" in case.path:
            taper_server.set_policy(**{**before, "rho": None})


@schema.include(path_regex=r"^/fork$").parametrize()
@settings(max_examples=25)
def test_a_fork_of_anything_is_answered_as_described(case: Any) -> None:
    case.call_and_validate(timeout=60, checks=OF_FORKS)


@schema.include(path_regex=r"^/abort_request$").parametrize()
@settings(max_examples=40)
def test_an_abort_of_anything_is_no_error_of_the_server(case: Any) -> None:
    case.call_and_validate(timeout=60, checks=[schemathesis.checks.not_a_server_error])
