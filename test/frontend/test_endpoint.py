"""What programs of `sglang.lang` send through our backend."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest
import sglang as sgl
from recorder import Recorder, meta_of
from sglang.lang.backend.base_backend import BaseBackend
from sglang.lang.backend.runtime_endpoint import RuntimeEndpoint as StockEndpoint

import sglang_taper
from sglang_taper.errors import FieldError
from sglang_taper.protocol import parse_branch_meta

LONG = "A prefix that is long enough to be worth a request of its own. " * 2


@sgl.function
def forks(s, width=3, prefix=LONG):
    s += prefix
    s += sgl.gen("head")
    branches = s.fork(width)
    branches += lambda i: f"\n{i}:" + sgl.gen("tip")
    branches.join()
    s += "".join(s["tip"]) if width else ""
    s += sgl.gen("tail")


@sgl.function
def nested(s):
    s += LONG
    outer = s.fork(2)
    for i in range(2):
        outer[i] += f"\n{i}:"
        inner = outer[i].fork(2)
        inner += sgl.gen("leaf")
        inner.join()
        outer[i] += sgl.gen("twig")
    outer.join()
    s += sgl.gen("tail")


@pytest.fixture
def endpoint(recorder: Recorder) -> sglang_taper.RuntimeEndpoint:
    return sglang_taper.RuntimeEndpoint(recorder.url)


def place(body: dict) -> tuple[int, int, int, int]:
    meta = parse_branch_meta(meta_of(body))
    return meta.depth, meta.stage, meta.branch, meta.width


def test_importing_the_package_imports_neither_torch_nor_sglang():
    check = (
        "import sys, sglang_taper;"
        "sys.exit(any(m in sys.modules for m in ('torch', 'sglang', 'httpx')))"
    )
    assert subprocess.run([sys.executable, "-c", check]).returncode == 0


def test_a_fork_sends_width_branches_of_one_group_between_two_serial_stages(
    recorder, endpoint
):
    forks.run(backend=endpoint).sync()
    places = [place(body) for body in recorder.bodies()]
    assert places[0] == (0, 0, 0, 1)
    assert sorted(places[1:-1]) == [(1, 1, i, 3) for i in range(3)]
    assert places[-1] == (0, 1, 0, 1)
    assert len({meta["group"] for meta in recorder.metas()}) == 1


def test_metadata_holds_scalars_only(recorder, endpoint):
    forks.run(backend=endpoint).sync()
    values = [v for meta in recorder.metas() for v in meta.values()]
    assert all(isinstance(v, (str, int, float)) for v in values)


def test_children_name_the_last_request_of_their_parent(recorder, endpoint):
    forks.run(backend=endpoint).sync()
    head, *children, tail = recorder.bodies()
    assert {meta_of(child)["parent"] for child in children} == {head["rid"]}
    assert "parent" not in meta_of(tail)


def test_every_request_has_its_own_id(recorder, endpoint):
    nested.run(backend=endpoint).sync()
    rids = [body["rid"] for body in recorder.bodies()]
    assert len(set(rids)) == len(rids)


def test_nested_forks_stay_in_the_group_and_count_forks_over_the_program(
    recorder, endpoint
):
    nested.run(backend=endpoint).sync()
    assert len({meta["group"] for meta in recorder.metas()}) == 1
    places = Counter(place(body) for body in recorder.bodies())
    commit_and_tail = {(0, 0, 0, 1): 1, (0, 1, 0, 1): 1}
    twigs = {(1, 1, i, 2): 1 for i in range(2)}
    leaves = {(2, stage, i, 2): 1 for stage in (2, 3) for i in range(2)}
    assert places == commit_and_tail | twigs | leaves


@pytest.mark.parametrize("num_threads", [1, 4])
def test_each_program_of_a_batch_is_a_request_of_its_own(
    recorder, endpoint, num_threads
):
    forks.run_batch([{}] * 4, backend=endpoint, num_threads=num_threads)
    # The common prefix that run_batch caches first belongs to no program.
    of_programs = [b for b in recorder.bodies() if "rid" in b]
    in_group = Counter(meta_of(body)["group"] for body in of_programs)
    assert sorted(in_group.values()) == [5, 5, 5, 5]


def test_streaming_programs_carry_the_same_metadata(recorder, endpoint):
    state = forks.run(backend=endpoint, stream=True)
    text = "".join(state.text_iter())
    assert text == LONG + " out" + " out" * 3 + " out"
    places = [place(body) for body in recorder.bodies()]
    assert places[0] == (0, 0, 0, 1)
    assert sorted(places[1:-1]) == [(1, 1, i, 3) for i in range(3)]
    assert places[-1] == (0, 1, 0, 1)


def test_programs_without_a_worker_thread_carry_the_same_metadata(recorder, endpoint):
    forks.run(backend=endpoint, use_thread=False)
    head, *children, _ = recorder.bodies()
    assert place(head) == (0, 0, 0, 1)
    assert sorted(place(child) for child in children) == [
        (1, 1, i, 3) for i in range(3)
    ]


@pytest.mark.parametrize("mode", ["gather_variable", "concate_and_append"])
def test_a_join_hands_the_childrens_work_to_the_parent(recorder, endpoint, mode):
    @sgl.function
    def program(s):
        s += "Start."
        branches = s.fork(2)
        branches += lambda i: f" {i}" + sgl.gen("x")
        branches.join(mode)
        s += sgl.gen("end")

    state = program.run(backend=endpoint)
    added = " 0 out 1 out" if mode == "concate_and_append" else ""
    assert state.text() == "Start." + added + " out"
    assert mode == "concate_and_append" or state["x"] == [" out", " out"]
    assert {path for path, _ in recorder.requests[1:]} == {"/generate"}


def test_a_fork_of_an_empty_state_sends_only_its_branches(recorder, endpoint):
    @sgl.function
    def program(s):
        branches = s.fork(2)
        branches += lambda i: f"{i}" + sgl.gen("x")
        branches.join()

    assert program.run(backend=endpoint)["x"] == [" out", " out"]
    assert [place(b)[:2] for b in recorder.bodies()] == [(1, 1), (1, 1)]


def test_a_fork_into_no_branch_at_all_is_an_empty_group(recorder, endpoint):
    forks.run(width=0, backend=endpoint).sync()
    assert [place(body) for body in recorder.bodies()] == [(0, 0, 0, 1)] * 2


def test_a_fork_too_wide_for_the_server_is_refused_by_name(recorder, endpoint):
    with pytest.raises(FieldError, match=r"fork\.width=5000"):
        forks.run(width=5000, backend=endpoint)


def test_select_scores_all_choices_as_requests_of_the_asking_branch(recorder, endpoint):
    @sgl.function
    def program(s):
        s += "Pick:" + sgl.select("a", ["x", "longest", "mid"])
        s += sgl.gen("b", choices=["y", "longer"])

    state = program.run(backend=endpoint)
    assert (state["a"], state["b"]) == ("longest", "longer")
    assert len({meta["group"] for meta in recorder.metas()}) == 1
    scored = recorder.bodies()[1]
    assert len(scored["text"]) == len(set(scored["rid"])) == 3


def test_regex_and_images_reach_the_server_as_with_the_stock_backend(
    recorder, endpoint, tmp_path
):
    picture = tmp_path / "picture.png"
    picture.write_bytes(b"pixels")

    @sgl.function
    def program(s):
        s += sgl.image(str(picture))
        s += sgl.gen("x", regex="[0-9]+", stop=".", temperature=0.5)

    def body_of(backend) -> dict:
        program.run(backend=backend).sync()
        return recorder.bodies()[-1]

    stock, ours = body_of(StockEndpoint(recorder.url)), body_of(endpoint)
    del ours["rid"], ours["sampling_params"]["custom_params"]
    assert ours == stock
    assert ours["image_data"]


def test_targets_apply_to_every_request_and_can_differ_by_program(recorder):
    endpoint = sglang_taper.RuntimeEndpoint(recorder.url, tpot_slo_ms=50, priority=2)
    forks.run(backend=endpoint.with_slo(ttft_slo_ms=900, tpot_slo_ms=20)).sync()
    forks.run(backend=endpoint).sync()
    targets = [
        (m.get("ttft_slo_ms"), m["tpot_slo_ms"], m["priority"])
        for m in recorder.metas()
    ]
    assert targets == [(900, 20, 2)] * 5 + [(None, 50, 2)] * 5


@pytest.mark.parametrize("name", ["ttft_slo_ms", "tpot_slo_ms", "priority"])
def test_an_unacceptable_target_is_refused_before_anything_is_sent(recorder, name):
    with pytest.raises(FieldError, match=rf"{name}=-1"):
        sglang_taper.RuntimeEndpoint(recorder.url, **{name: -1})
    assert recorder.requests == []


def test_a_new_prefix_is_committed_once_before_any_sibling(recorder, endpoint):
    @sgl.function
    def program(s):
        s += "Short." + sgl.gen("head") + LONG
        branches = s.fork(3)
        branches += sgl.gen("tip")
        branches.join()

    recorder.delay_s = 0.02
    for _ in range(5):
        recorder.requests.clear()
        program.run(backend=endpoint).sync()
        _, commit, *children = recorder.bodies()
        assert commit["sampling_params"]["max_new_tokens"] == 0
        assert commit["text"] == "Short. out" + LONG
        assert place(commit) == (0, 0, 0, 1)
        assert {meta_of(child)["parent"] for child in children} == {commit["rid"]}
        assert [place(child)[0] for child in children] == [1, 1, 1]


def test_what_a_generation_left_in_the_cache_is_not_committed_again(recorder, endpoint):
    forks.run(backend=endpoint).sync()
    assert not [
        body
        for body in recorder.bodies()
        if not body["sampling_params"]["max_new_tokens"]
    ]


def test_an_image_is_committed_however_short_its_text(recorder, endpoint, tmp_path):
    picture = tmp_path / "picture.png"
    picture.write_bytes(b"pixels")

    @sgl.function
    def program(s):
        s += sgl.image(str(picture))
        branches = s.fork(2)
        branches += sgl.gen("x")
        branches.join()

    program.run(backend=endpoint).sync()
    commit = recorder.bodies()[0]
    assert commit["sampling_params"]["max_new_tokens"] == 0
    assert commit["image_data"]


def test_a_fork_whose_prefix_the_server_refuses_raises_the_servers_message(
    recorder, endpoint
):
    @sgl.function
    def program(s):
        s += LONG
        s.fork(2)

    recorder.refuse_with = (400, {"error": {"message": "no such thing"}})
    with pytest.raises(RuntimeError, match="no such thing"):
        program.run(backend=endpoint)


class _OtherBackend(BaseBackend):
    def generate(self, s, sampling_params):
        return " out", {}


def test_programs_of_other_backends_fork_exactly_as_before(recorder, endpoint):
    forked = []

    @sgl.function
    def program(s):
        branches = s.fork(2)
        forked.extend([s, *branches.states])
        branches += sgl.gen("x")
        branches.join()

    stock = StockEndpoint(recorder.url)
    for backend in (_OtherBackend(), stock):
        assert program.run(backend=backend)["x"] == [" out", " out"]
    assert not any("taper_branch" in vars(s.stream_executor) for s in forked)
    assert not any("custom_params" in str(body) for body in recorder.bodies())
