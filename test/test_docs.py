"""The docs say what the code does: tables are compared, links and code are checked."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
from collections.abc import Iterator
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sglang_taper.config import TaperConfig, env_of, flag_of
from sglang_taper.engine import explain, live, metrics, report
from sglang_taper.engine.attention.counting import AttentionCounters
from sglang_taper.engine.controller import BranchController
from sglang_taper.engine.counters import StepRecord
from sglang_taper.engine.hooks import HOOKS, Hook
from sglang_taper.engine.hooks_doc import markdown
from sglang_taper.engine.pins import PinTable
from sglang_taper.engine.prefix import PrefixTree
from sglang_taper.engine.refusals import REFUSALS, RUST_SERVER
from sglang_taper.policy import admission
from sglang_taper.policy.baselines import choose_baseline
from sglang_taper.policy.latency import StepLatencyModel
from sglang_taper.policy.types import PolicyParams
from sglang_taper.protocol import BranchMeta

REPOSITORY = Path(__file__).parents[1]
DOCS = REPOSITORY / "docs"
PAGES = [REPOSITORY / "README.md", *sorted(DOCS.rglob("*.md"))]
SOURCES = [
    path
    for folder in ("python/sglang_taper", "benchmark", "test")
    for path in sorted((REPOSITORY / folder).rglob("*.py"))
]


def name_of(path: Path) -> str:
    return path.relative_to(REPOSITORY).as_posix()


def read(name: str) -> str:
    return (DOCS / name).read_text()


def blocks(text: str, language: str) -> list[str]:
    """Fenced code blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)


# -- tables against code


def test_the_table_of_hooks_is_the_one_in_the_code() -> None:
    begin = "<!-- table: python -m sglang_taper.engine.hooks_doc -->\n\n"
    _, _, rest = read("hooks.md").partition(begin)
    table, end, _ = rest.partition("\n<!-- end of table -->")
    assert end
    assert table == markdown()


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.id)
def test_every_hook_is_explained(hook: Hook) -> None:
    (line,) = [
        row for row in read("hooks.md").splitlines() if f"| `{hook.id}` |" in row
    ]
    wanted = (hook.target, hook.kind.value, hook.role.value)
    for text in (*wanted, hook.why, hook.removable_when):
        assert text in line
        assert len(text) > 3


@pytest.mark.parametrize("setting", fields(TaperConfig), ids=lambda f: f.name)
def test_every_setting_has_a_row_with_flag_variable_default_and_range(
    setting: Field,
) -> None:
    rows = read("operations.md").splitlines()
    (row,) = [row for row in rows if row.startswith(f"| `{flag_of(setting.name)}` |")]
    _, _, variable, default, accepted, _, _ = (cell.strip() for cell in row.split("|"))
    assert variable == f"`{env_of(setting.name)}`"
    assert all(text in default for text in default_of(setting))
    assert all(text in accepted for text in accepted_by(setting))


def default_of(setting: Field) -> Iterator[str]:
    if setting.name == "slack_fraction":
        for deadline in ("schedule", "progress"):
            yield f"{PolicyParams(deadline=deadline).slack_fraction} with `{deadline}`"
    else:
        yield "none" if setting.default is None else str(setting.default)


def accepted_by(setting: Field) -> Iterator[str]:
    accepted = setting.metadata["accepted"]
    if setting.name == "branch_policy":
        yield from (f"`{name}`" for name in ("none", *admission.policy_names()))
    elif isinstance(accepted, tuple):
        yield from (f"`{name}`" for name in accepted)
    else:
        yield "JSON file" if accepted is None else str(accepted)


def explained(text: str) -> set[str]:
    """Everything in backquotes, apart from fenced blocks."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    return set(re.findall(r"`([^`\n]+)`", prose))


def a_state() -> tuple[BranchController, dict[str, object]]:
    """A controller with one branch, and its state."""
    config = TaperConfig(branch_policy="taper")
    no_tree: Any = None
    pins = PinTable(PrefixTree(no_tree), max_tokens=0)
    controller = BranchController(config, StepLatencyModel(), 1, False, pins, 1)
    controller.attach("rid", BranchMeta(group="g"), 0.0, 8)
    return controller, report.describe_state(controller)


def keys_in(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        yield from value
        for inner in value.values():
            yield from keys_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from keys_in(inner)


def test_every_key_of_the_state_is_explained() -> None:
    _, state = a_state()
    keys = {*keys_in(state), *msgspec.structs.asdict(a_step_record())}
    assert {"group", "mape", "reasons", "measured_ms"} <= keys
    assert keys <= explained(read("operations.md"))


def test_every_key_of_the_page_is_explained() -> None:
    controller, _ = a_state()
    _, _, section = read("operations.md").partition("## The page")
    page, _, timeline = section.partition("## Explain one request")
    shown = live.describe_live(controller, 0, ())
    (request,) = shown["requests"]
    branches = request.pop("branches")
    assert {"rid", "status", "deferral"} <= branches.keys()
    assert {*shown, *branches, *shown["service"]} <= explained(page)
    assert request.keys() <= explained(page) | explained(read("operations.md"))
    record = controller.recorder.book.find("g")[0]
    controller.recorder.book.close(record, 2.0, "stop", row_aliased=True)
    told = explain.describe_request([record], "g", 3.0, ())
    spans = {key for b in told["branches"] for s in b["spans"] for key in s}
    keys = {*told, *told["branches"][0], *spans, *FORK_KEYS}
    assert keys <= explained(page) | explained(timeline.partition("## Dashboards")[0])


FORK_KEYS = {
    *("depth", "stage", "parent", "width", "num_ended", "opened_ms", "ended_ms"),
    *("joined_by", "joined_ms"),
}


def test_every_key_of_the_attention_is_explained() -> None:
    counters = AttentionCounters()
    keys = {"backend", *msgspec.structs.asdict(counters)}
    assert keys <= explained(read("operations.md"))


def a_step_record() -> StepRecord:
    values = [0] * len(StepRecord.__struct_fields__)
    return StepRecord(*values)


def test_every_key_of_an_answer_is_explained() -> None:
    controller, _ = a_state()
    branch = controller.attach("rid", BranchMeta(group="g"), 0.0, 8)
    keys = report.describe_branch(branch, "taper").keys()
    _, _, section = read("operations.md").partition("## Answers")
    assert keys <= explained(section.partition("\n## ")[0])


@pytest.mark.parametrize(
    "name", [*metrics.COUNTERS, metrics.STEPS_BY_REASON, *metrics.GAUGES]
)
def test_every_metric_is_explained(name: str) -> None:
    assert metrics.PREFIX + name in explained(read("operations.md"))


def test_every_key_of_the_wire_format_is_explained() -> None:
    _, _, section = read("architecture.md").partition("## Wire format")
    assert set(BranchMeta.__struct_fields__) <= explained(section.partition("\n## ")[0])


def test_every_refused_mode_is_listed() -> None:
    _, _, section = read("operations.md").partition("## Refused modes")
    for refusal in (*REFUSALS, RUST_SERVER):
        assert f"| `{refusal.flag}`" in section


# -- links and code


def links_of(path: Path) -> list[str]:
    prose = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.M | re.S)
    return re.findall(r"\]\(([^)\s]+)\)", prose)


def anchors_of(path: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", path.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", t.lower()).replace(" ", "-") for t in titles}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_within_the_repository_lead_somewhere(page: Path) -> None:
    for link in links_of(page):
        if link.startswith("https://"):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), link
        assert not anchor or anchor in anchors_of(target), link


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_code_in_the_docs_is_valid(page: Path) -> None:
    text = page.read_text()
    for source in blocks(text, "python"):
        compile(source, str(page), "exec")
    for source in blocks(text, "json"):
        json.loads(source)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_and_modules_that_the_docs_name_exist(page: Path) -> None:
    text = page.read_text()
    # The recipe's own new file is the one exception.
    paths = set(re.findall(r"\b(?:python|test|benchmark|docs)/[\w/.-]+\.\w+", text))
    for path in paths - {"python/sglang_taper/policy/small_batch.py"}:
        assert (REPOSITORY / path).exists(), path
    for module in re.findall(r"python3? -m (sglang_taper[\w.]*)", text):
        assert importlib.util.find_spec(module.rstrip(".")), module


def test_pages_that_the_code_refers_to_exist() -> None:
    names = {
        n for path in SOURCES for n in re.findall(r"docs/[\w/.-]+", path.read_text())
    }
    missing = [n for n in names if not list(REPOSITORY.glob(n.rstrip("./") + "*"))]
    assert names
    assert missing == []


def test_every_page_can_be_reached_from_the_readme() -> None:
    seen: set[Path] = set()
    to_read = [REPOSITORY / "README.md"]
    while to_read:
        page = to_read.pop()
        if page in seen or page.suffix != ".md":
            continue
        seen.add(page)
        links = (link.partition("#")[0] for link in links_of(page))
        inside = (link for link in links if link and "://" not in link)
        to_read += [(page.parent / link).resolve() for link in inside]
    assert set(PAGES) - seen == set()


@pytest.mark.parametrize("page", sorted((DOCS / "adr").glob("*.md")), ids=name_of)
def test_a_decision_has_context_choice_and_consequence_on_one_page(page: Path) -> None:
    text = page.read_text()
    number = int(page.name[:4])
    assert text.startswith(f"# {number}. ")
    assert all(
        f"\n## {part}\n" in text for part in ("Context", "Choice", "Consequence")
    )
    assert len(text.splitlines()) <= 50


# -- the recipe for a policy


@pytest.fixture
def _registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "_factories", dict(admission._factories))


@pytest.mark.usefixtures("_registry")
def test_the_recipe_for_a_policy_works_and_is_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(REPOSITORY / "test" / "policy"))
    make_view = importlib.import_module("factories").make_view
    _, _, section = read("contributing.md").partition("## Add a policy")
    source = blocks(section, "python")[0]
    assert len(source.splitlines()) <= 20
    exec(compile(source, "contributing.md", "exec"), {"__name__": "small_batch"})
    policy = admission.make_policy("small-batch")
    small, large = make_view((3, 1)), make_view((30, 3))
    assert policy.plan(small).rows == [0, 1, 2, 3]
    assert policy.plan(large).rows == choose_baseline(large)


# -- what nobody should have to read

# In pieces, so that this file does not find itself.
UNWANTED = {
    "a registry host": r"pypi\.or"
    r"g|pythonhoste"
    r"d\.|npmjs\.or"
    r"g|deb\.debia"
    r"n",
    "a path of one machine": r"(?<![\w.])/(?:op" r"t|wor" r"k|roo" r"t|Use" r"rs)/\w",
    "an unexplained note": r"\b(?:TOD" r"O|FIXM" r"E|XX" r"X)\b(?!\(#\d+\))",
    "an unfilled place": r"FILL-M" r"E",
}


@pytest.mark.parametrize("what", UNWANTED)
def test_no_page_and_no_source_contains(what: str) -> None:
    files = [
        *PAGES,
        *SOURCES,
        REPOSITORY / "pyproject.toml",
        REPOSITORY / ".ci" / "run",
        *(path for path in (REPOSITORY / "docker").rglob("*") if path.is_file()),
    ]
    found = [
        f"{name_of(path)}:{number}"
        for path in files
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(UNWANTED[what], line)
    ]
    assert found == []
