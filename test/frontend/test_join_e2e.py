"""Joins by text on a real server: order, nesting, and what is not computed again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import sglang as sgl

import sglang_taper
from server import Server
from sglang_taper.policy.types import PolicyParams

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PROMPT = (
    "The harbour town lies between two hills, and its people have always lived from "
    "the sea. A visitor who walks from the station to the old market passes:"
)
JOIN = "concate_and_append"


@pytest.fixture
def endpoint(taper_server: Server) -> Iterator[sglang_taper.RuntimeEndpoint]:
    params = PolicyParams()
    taper_server.set_policy(policy=params.policy, tpot_slo_ms=params.tpot_slo_ms)
    taper_server.flush()
    endpoint = sglang_taper.RuntimeEndpoint(taper_server.url)
    before = sgl.global_config.default_backend
    sgl.set_default_backend(endpoint)
    yield endpoint
    sgl.set_default_backend(before)


class Run:
    """What the states of one run of a program were, for looking at afterwards."""

    def __init__(self) -> None:
        self.children: list[Any] = []

    def fork(self, s: Any, width: int) -> Any:
        fork = s.fork(width)
        self.children += fork.states
        return fork


def own_text(state: Any) -> str:
    """What a child wrote and said after it was forked."""
    executor = state.stream_executor
    return str(executor.text_[executor.fork_start_text_pos :])


def listing(run: Run, width: int, stop: str | None = None) -> Any:
    @sgl.function
    def program(s: Any) -> None:
        s += PROMPT + sgl.gen("opening", max_tokens=8, ignore_eos=True)
        children = run.fork(s, width)
        for i, child in enumerate(children.states):
            child += f"\n{i + 1}."
            child += sgl.gen("item", max_tokens=12, stop=stop, ignore_eos=True)
        children.join(JOIN)
        s += "\nIn short," + sgl.gen("summary", max_tokens=12, ignore_eos=True)

    return program.run(temperature=0)


def num_known_tokens(state: Any, name: str) -> int:
    """Tokens of `state` when it had said `name`, less the one sampled last."""
    info = state.get_meta_info(name)
    return int(info["prompt_tokens"] + info["completion_tokens"] - 1)


@pytest.mark.usefixtures("endpoint")
@pytest.mark.parametrize("stop", [None, " the"])
def test_the_parent_goes_on_after_its_childrens_texts_in_order(stop: str) -> None:
    run = Run()
    state = listing(run, 3, stop)
    texts = [own_text(child) for child in run.children]
    assert [text[:3] for text in texts] == ["\n1.", "\n2.", "\n3."]
    assert state.text() == (
        PROMPT + state["opening"] + "".join(texts) + "\nIn short," + state["summary"]
    )


def test_a_generation_after_a_join_says_what_it_says_to_the_joined_text(
    taper_server: Server, endpoint: sglang_taper.RuntimeEndpoint
) -> None:
    state = listing(Run(), 3)
    joined = state.text().removesuffix(state["summary"])
    sampling = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
    alone = taper_server.generate({"text": joined, "sampling_params": sampling})
    assert alone["text"] == state["summary"]


@pytest.mark.usefixtures("endpoint")
@pytest.mark.parametrize("stop", [None, " the"])
def test_after_a_join_the_parent_and_its_first_child_are_not_computed_again(
    stop: str,
) -> None:
    run = Run()
    state = listing(run, 3, stop)
    taper = state.get_meta_info("summary")["taper"]
    first = run.children[0]
    # The text of a stop string that was trimmed is at most one token.
    known = num_known_tokens(first, "item") - (stop is not None)
    assert known > num_known_tokens(state, "opening") + 3
    assert taper["prefix_tokens_shared"] >= known


@pytest.mark.usefixtures("endpoint")
def test_children_share_what_their_parent_generated() -> None:
    run = Run()
    state = listing(run, 3)
    opening = num_known_tokens(state, "opening")
    for child in run.children:
        taper = child.get_meta_info("item")["taper"]
        assert taper["prefix_tokens_shared"] >= opening


class Node(NamedTuple):
    """A state that wrote, forked in two above depth 3, joined, and went on."""

    state: Any
    depth: int
    children: list[Node]

    def parts(self) -> Iterator[str]:
        """What the text of the state must consist of."""
        yield f"\nLevel {self.depth}:" + self.state[f"down{self.depth}"]
        for child in self.children:
            yield from child.parts()
        yield "\nBack:" + self.state[f"up{self.depth}"]

    def walk(self) -> Iterator[Node]:
        yield self
        for child in self.children:
            yield from child.walk()


def branch_out(s: Any, depth: int) -> Node:
    s += f"\nLevel {depth}:"
    s += sgl.gen(f"down{depth}", max_tokens=4, ignore_eos=True)
    children = []
    if depth < 3:
        fork = s.fork(2)
        children = [branch_out(child, depth + 1) for child in fork.states]
        fork.join(JOIN)
    s += "\nBack:" + sgl.gen(f"up{depth}", max_tokens=4, ignore_eos=True)
    return Node(s, depth, children)


@pytest.fixture
def tree(endpoint: sglang_taper.RuntimeEndpoint) -> Node:
    roots = []

    @sgl.function
    def program(s: Any) -> None:
        s += PROMPT
        roots.append(branch_out(s, 0))

    state = program.run(temperature=0)
    assert state.error() is None
    (root,) = roots
    assert len([*root.walk()]) == 1 + 2 + 4 + 8
    return root


def test_nested_joins_keep_the_order_of_every_level(tree: Node) -> None:
    assert tree.state.text() == PROMPT + "".join(tree.parts())
    for node in tree.walk():
        if node.depth:
            assert own_text(node.state) == "".join(node.parts())


def test_nested_joins_compute_nothing_again_up_to_their_first_child(tree: Node) -> None:
    for node in tree.walk():
        taper = node.state.get_meta_info(f"up{node.depth}")["taper"]
        first = node.children[0] if node.children else node
        name = f"up{first.depth}" if node.children else f"down{node.depth}"
        assert taper["prefix_tokens_shared"] >= num_known_tokens(first.state, name)


def test_generations_after_nested_joins_say_what_they_say_to_the_joined_text(
    tree: Node, taper_server: Server
) -> None:
    sampling = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
    for node in tree.walk():
        said = node.state[f"up{node.depth}"]
        joined = node.state.text().removesuffix(said)
        alone = taper_server.generate({"text": joined, "sampling_params": sampling})
        assert alone["text"] == said
