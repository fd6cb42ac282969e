"""What the server says about its routes is true: schemathesis makes up the requests."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings

from server import Server

# In the extra `test`; an environment made without it runs everything else.
schemathesis = pytest.importorskip("schemathesis")

OURS = r"^/(taper|fork)"


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


@schema.include(path_regex=r"^/abort_request$").parametrize()
@settings(max_examples=40)
def test_an_abort_of_anything_is_no_error_of_the_server(case: Any) -> None:
    case.call_and_validate(timeout=60, checks=[schemathesis.checks.not_a_server_error])
