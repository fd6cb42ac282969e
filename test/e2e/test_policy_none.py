"""Design invariant 7: with policy `none` only the flags are there."""

from __future__ import annotations

from workload import mixed_requests, run_all

from server import Server


def test_our_routes_are_absent_and_answers_carry_nothing(stock_server: Server) -> None:
    assert stock_server.get("/taper/state").status_code == 404
    answers = run_all(stock_server, mixed_requests()[:2])
    assert all("taper" not in answer["meta_info"] for answer in answers)
