"""Forks by token ids, what they prefilled, and whose KV an idle server still holds."""

from __future__ import annotations

import json
import random
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from server import Server

# Words of the model that are neither special nor reserved.
TOKEN_IDS = range(1000, 40_000)
Answer = dict[str, Any]
# The environment of a server that counts its tokens after every step.
STRICT = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}


@dataclass(frozen=True)
class Variant:
    """A server and its page size, in tokens."""

    server: Server
    page: int

    @property
    def remainder(self) -> int:
        """Tokens of a partly filled page that one child may have to compute again."""
        return self.page if self.page > 1 else 0


def some_ids(seed: object, count: int) -> list[int]:
    """`count` token ids that only this seed has."""
    return random.Random(str(seed)).choices(TOKEN_IDS, k=count)


def new_group() -> str:
    return uuid.uuid4().hex


def branch_of(
    group: str, ids: Sequence[int], branch: int = 0, width: int = 1, **more: Any
) -> dict[str, Any]:
    """A greedy /generate body of one branch; `more` are sampling parameters.

    `depth` and `parent` among them go into the metadata.
    """
    meta = {"group": group, "branch": branch, "width": width}
    meta |= {key: more.pop(key) for key in ("depth", "parent") if key in more}
    sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True, **more}
    sampling["custom_params"] = {"taper": meta}
    return {"input_ids": list(ids), "sampling_params": sampling}


def in_one_call(bodies: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Requests that reach the scheduler together and in this order."""
    names = bodies[0].keys()
    return {name: [body[name] for body in bodies] for name in names}


def meta_of(answer: Answer) -> dict[str, Any]:
    return dict(answer["meta_info"]["taper"])


def prefilled(answer: Answer) -> int:
    """Prompt tokens that a branch ran through prefill."""
    return int(meta_of(answer)["tokens_prefilled"])


def uncached(answer: Answer) -> int:
    """Prompt tokens that stock SGLang did not find in its cache."""
    info = answer["meta_info"]
    return int(info["prompt_tokens"] - info["cached_tokens"])


def ids_of(answers: Sequence[Answer]) -> list[list[int]]:
    return [answer["output_ids"] for answer in answers]


def reason_of(answer: Answer) -> str:
    return str(answer["meta_info"]["finish_reason"]["type"])


def counters(server: Server) -> dict[str, Any]:
    return dict(server.state()["counters"])


def stream(server: Server, body: dict[str, Any]) -> Iterator[Answer]:
    """The events of a streaming /generate; closing it drops the connection."""
    with server.post("/generate", {**body, "stream": True}, stream=True) as answer:
        assert answer.status_code == 200, answer.text
        # One byte at a time: an event counts when it comes, not when a block is full.
        for line in answer.iter_lines(chunk_size=1):
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])


def plain(body: dict[str, Any]) -> dict[str, Any]:
    """The same request as nobody's branch."""
    params = {k: v for k, v in body["sampling_params"].items() if k != "custom_params"}
    return {**body, "sampling_params": params}


def alone(server: Server, bodies: Sequence[dict[str, Any]]) -> list[Answer]:
    """Each request by itself on an empty cache, as nobody's branch."""
    answers = []
    for body in bodies:
        server.flush()
        answers.append(server.generate(plain(body)))
    return answers


def together(server: Server, bodies: Sequence[dict[str, Any]]) -> list[Answer]:
    """Each request over a connection of its own, all at once; answers in order."""
    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(server.generate, bodies))


def wait_for(condition: Callable[[], Any], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.02)


def faults_of(state: dict[str, Any]) -> list[str]:
    """What an idle server holds that nobody owns, or does not hold though it should."""
    pool = state["pool"]
    sizes = {name: pool[name] for name in ("free", "evictable", "protected")}
    found = [f"{name}={size}" for name, size in sizes.items() if size < 0]
    if sum(sizes.values()) != pool["total"]:
        found.append(f"{sizes} are not {pool['total']} tokens")
    # What several pins have in common counts for each of them.
    protected, pinned = pool["protected"], state["pinned_tokens"]
    shared = state["num_pins"] > 1
    if protected > pinned or (protected < pinned and not shared):
        found.append(f"{protected} protected, {pinned} in {state['num_pins']} pins")
    for name in ("num_running", "num_waiting", "num_live_groups"):
        if state[name]:
            found.append(f"{name}={state[name]}")
    return found


def assert_idle_pool(server: Server, seconds: float = 60) -> dict[str, Any]:
    """Wait until the server is idle and every token of its pool is accounted for."""
    deadline = time.monotonic() + seconds
    while faults := faults_of(state := server.state()):
        assert server.process.poll() is None, server.text_of_log()[-3000:]
        assert time.monotonic() < deadline, "; ".join(faults)
        time.sleep(0.1)
    return state
