"""A mix of forking and serial requests whose greedy outputs are compared."""

from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from server import Server

STORY = (
    "Once upon a time a small robot lived in a big library. Every night it read a "
    "book, and every morning it told the other robots what it had learned."
)
TOPICS = (" It liked", " The books were", " Its friends said that", " One day", " In")
MAX_NEW_TOKENS = 20


def branch_request(
    text: str, group: str, branch: int, width: int, **sampling: Any
) -> dict[str, Any]:
    """A /generate body of one branch of a fork."""
    meta = {"group": group, "branch": branch, "width": width, "depth": 1}
    return {
        "text": text,
        "sampling_params": {
            "temperature": 0,
            "max_new_tokens": MAX_NEW_TOKENS,
            "custom_params": {"taper": meta},
            **sampling,
        },
    }


def mixed_requests(with_penalty: bool = True) -> list[dict[str, Any]]:
    """Two forks (five and three branches) beside two serial requests.

    One branch each has a grammar, logprobs, a stop string that spans tokens, a
    different length and (where wanted) a frequency penalty.
    """
    first, second = uuid.uuid4().hex, uuid.uuid4().hex
    requests = [
        branch_request(STORY + topic, first, i, len(TOPICS))
        for i, topic in enumerate(TOPICS)
    ]
    requests += [
        branch_request("List three colours." + end, second, i, 3)
        for i, end in enumerate((" Red", " Blue and", " My favourite is"))
    ]
    requests += [
        {
            "text": text,
            "sampling_params": {"temperature": 0, "max_new_tokens": MAX_NEW_TOKENS},
        }
        for text in ("The capital of France is", "Two plus two is")
    ]
    requests[1]["sampling_params"]["regex"] = "(yes|no)( yes| no){5}"
    requests[2]["return_logprob"] = True
    requests[2]["top_logprobs_num"] = 2
    requests[3]["sampling_params"]["stop"] = [" the other robots"]
    requests[4]["sampling_params"]["max_new_tokens"] = 7
    if with_penalty:
        requests[5]["sampling_params"]["frequency_penalty"] = 0.8
        requests[8]["sampling_params"]["presence_penalty"] = 0.5
    return requests


def run_all(server: Server, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Send all at once; answers in order."""
    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(server.generate, requests))


def outputs(answers: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """What must not depend on the policy."""
    return [
        (a["text"], a["output_ids"], a["meta_info"]["finish_reason"]) for a in answers
    ]


def logprobs(answer: dict[str, Any]) -> list[float]:
    return [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
