"""A workload: the requests of one run, each with its arrival and its shape."""

from __future__ import annotations

import random
from typing import Any

import msgspec

from sglang_taper.errors import FieldError
from sglang_taper.workload.arrivals import Arrivals, arrival_times_ms
from sglang_taper.workload.parametric import ShapeParams, draw_shape
from sglang_taper.workload.shape import RequestShape, describe
from sglang_taper.workload.trees import read_trees


class PlannedRequest(msgspec.Struct, frozen=True):
    """A request of a workload. In a closed loop it is sent when a place is free."""

    arrival_ms: float
    shape: RequestShape


class WorkloadSpec(msgspec.Struct, frozen=True):
    """What to ask of a server, as the flags in `workload/flags.py` say it.

    With `fork_trees` shapes are drawn from that file, counts divided by `shorten`:
    all of them alike, or with `mix_pdr` a share `params.pdr` from its forking ones and
    the rest from the serial part of `params`.
    """

    num_requests: int = 400
    seed: int = 0
    arrivals: Arrivals = Arrivals(concurrency=8)
    rate_per_s: float | None = None
    slowdown: float = 1.0
    params: ShapeParams = ShapeParams()
    fork_trees: str | None = None
    shorten: float = 1.0
    mix_pdr: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.num_requests <= 1_000_000:
            accepted = "at least 1 and at most 1000000"
            raise FieldError("--num-prompts", self.num_requests, accepted)


def make_requests(spec: WorkloadSpec) -> list[PlannedRequest]:
    """The requests of `spec`, by arrival. Shapes do not depend on the arrivals."""
    shapes = _draw_shapes(spec, random.Random(f"shapes {spec.seed}"))
    times_ms = arrival_times_ms(
        spec.arrivals,
        spec.num_requests,
        random.Random(f"arrivals {spec.seed}"),
        spec.rate_per_s,
        spec.slowdown,
    )
    return [
        PlannedRequest(arrival_ms, shape)
        for arrival_ms, shape in zip(times_ms, shapes, strict=True)
    ]


def _draw_shapes(spec: WorkloadSpec, rng: random.Random) -> list[RequestShape]:
    if spec.fork_trees is None:
        return [draw_shape(spec.params, rng) for _ in range(spec.num_requests)]
    trees = read_trees(spec.fork_trees, spec.shorten)
    if not spec.mix_pdr:
        return [rng.choice(trees) for _ in range(spec.num_requests)]
    wide = [tree for tree in trees if tree.is_decomposable]
    if not wide:
        raise FieldError("--fork-trees", spec.fork_trees, "a file with a fork in it")
    serial = msgspec.structs.replace(spec.params, pdr=0.0)
    return [
        rng.choice(wide) if rng.random() < spec.params.pdr else draw_shape(serial, rng)
        for _ in range(spec.num_requests)
    ]


def workload_header(
    spec: WorkloadSpec, requests: list[PlannedRequest]
) -> dict[str, Any]:
    """What was composed from where, for the header of a result."""
    return {
        "seed": spec.seed,
        "arrivals": msgspec.to_builtins(spec.arrivals),
        "rate_per_s": spec.rate_per_s,
        "slowdown": spec.slowdown,
        "fork_trees": spec.fork_trees,
        "shorten": spec.shorten,
        "parameters": msgspec.to_builtins(spec.params)
        if spec.fork_trees is None or spec.mix_pdr
        else None,
        **describe(request.shape for request in requests),
    }
