"""The step-latency model a scheduler starts with."""

from __future__ import annotations

from collections.abc import Iterable

from sglang_taper.config import TaperConfig, read_latency_profile
from sglang_taper.policy.latency import StepLatencyModel


def make_latency_model(
    config: TaperConfig, graph_buckets: Iterable[int], shared_read_once: bool
) -> StepLatencyModel:
    """From the profile of `config`, else one that will be calibrated.

    `shared_read_once` is whether the attention in use reads a shared prefix once: a
    fact of this server, whatever a profile was measured with.
    """
    buckets = sorted(graph_buckets)
    if config.latency_profile is None:
        model = StepLatencyModel(graph_buckets=buckets)
    else:
        profile = read_latency_profile(config.latency_profile)
        model = StepLatencyModel.from_profile({"graph_buckets": buckets} | profile)
    model.shared_read_once = shared_read_once
    return model
