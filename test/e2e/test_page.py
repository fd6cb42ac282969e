"""The page in a real browser: under load on a real server, and with states by hand."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from page_browser import (
    DESKTOP,
    PHONE,
    chromium,
    open_page,
    require_browser,
    screenshot,
    set_form,
    text,
    wait_for,
)
from page_states import REASONS, STATUSES, synthetic_state
from workload import STORY, TOPICS

from server import Server

NUM_GROUPS, NUM_BRANCHES = 25, 40
FORMS = [(size, scheme) for size in (DESKTOP, PHONE) for scheme in ("light", "dark")]
NAMES = {DESKTOP: "desktop", PHONE: "phone"}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    require_browser()
    with chromium() as driver:
        yield driver


def counts(driver: Any) -> dict[str, int]:
    return {s: int(text(driver, f"num-{s}").replace(",", "")) for s in STATUSES}


def set_paused(driver: Any, paused: bool) -> None:
    button = driver.find_element("id", "pause")
    if (button.get_attribute("aria-pressed") == "true") is not paused:
        button.click()


def fork_bodies(prefix: str) -> dict[str, Any]:
    """One call of 1000 branches: 25 requests, each a fork of 40, a few of them below
    a branch of the first."""
    texts, sampling, rids = [], [], []
    for number in range(NUM_GROUPS):
        group = f"{prefix}-{number}"
        for i in range(NUM_BRANCHES):
            nested = number == 0 and i >= 30
            meta: dict[str, Any] = {
                "group": group,
                "branch": i,
                "width": 30,
                "depth": 1,
            }
            if nested:
                meta |= {"branch": i - 30, "width": 10, "depth": 2}
                meta["parent"] = f"{group}/0"
            elif number:
                meta["width"] = NUM_BRANCHES
            texts.append(STORY + TOPICS[i % len(TOPICS)])
            rids.append(f"{group}/{i}")
            sampling.append(
                {
                    **{"temperature": 0, "max_new_tokens": 60, "ignore_eos": True},
                    "custom_params": {"taper": meta},
                }
            )
    return {"text": texts, "rid": rids, "sampling_params": sampling}


@pytest.fixture(scope="module")
def loaded(browser: Any, taper_server: Server) -> Iterator[Server]:
    """1000 branches, of which the server runs 32 rows at a time; the rest wait."""
    taper_server.set_policy(policy="cap", cap=6)
    taper_server.flush()
    prefix = uuid.uuid4().hex[:8]
    body = fork_bodies(prefix)
    load = threading.Thread(
        target=lambda: taper_server.post("/generate", body, timeout=600)
    )
    load.start()
    open_page(browser, taper_server.url)
    wait_for(lambda: counts(browser)["deferred"] > 0, "a branch is deferred")
    yield taper_server
    for number in range(NUM_GROUPS):
        taper_server.post("/abort_request", {"group": f"{prefix}-{number}"})
    load.join(120)
    assert not load.is_alive()
    taper_server.flush()


def test_a_thousand_branches_are_shown_as_the_server_has_them(
    loaded: Server, browser: Any
) -> None:
    shown = wait_for(lambda: sum(counts(browser).values()) >= 1000 and counts(browser))
    assert shown["running"] <= 32
    assert shown["deferred"] > 0
    assert shown["queued"] > 500
    cells = browser.execute_script(
        "return document.querySelectorAll('#requests .cell').length"
    )
    assert cells == NUM_GROUPS * NUM_BRANCHES
    state = loaded.get("/taper/live").json()
    assert {r["id"] for r in state["requests"]} == set(
        browser.execute_script(
            "return [...document.querySelectorAll('.title')].map(t => t.dataset.id)"
        )
    )


@pytest.mark.parametrize(("size", "scheme"), FORMS)
def test_the_page_under_load_fits_every_form(
    loaded: Server, browser: Any, size: tuple[int, int], scheme: str
) -> None:
    set_form(browser, size, scheme)
    time.sleep(1.5)
    screenshot(browser, f"load-{NAMES[size]}-{scheme}")
    assert overflow(browser) <= 0
    assert contrast(browser) >= 4.5
    background = browser.execute_script(
        "return getComputedStyle(document.body).backgroundColor"
    )
    assert (luminance(background) < 0.5) is (scheme == "dark")


def overflow(driver: Any) -> int:
    """By how many pixels the page is wider than the window."""
    script = "return document.documentElement.scrollWidth - arguments[0]"
    width = driver.execute_script("return document.documentElement.clientWidth")
    return int(driver.execute_script(script, width))


def luminance(color: str) -> float:
    parts = color[color.index("(") + 1 : -1].replace(",", " ").split()[:3]
    linear = [
        c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4
        for c in (float(p) / 255 for p in parts)
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(driver: Any) -> float:
    """The smallest of the texts of the page on their cards (WCAG 2)."""
    pairs = driver.execute_script(
        "const card = getComputedStyle(document.querySelector('.request'));"
        "return ['.note', 'dt', '.fact', '.fork .name', '#connection', '.unit']"
        ".map(s => getComputedStyle(document.querySelector(s)).color)"
        ".map(c => [c, card.backgroundColor])"
    )
    ratios = []
    for front, back in pairs:
        light, dark = sorted((luminance(front), luminance(back)), reverse=True)
        ratios.append((light + 0.05) / (dark + 0.05))
    return min(ratios)


def test_nothing_jumps_while_branches_come_and_go(loaded: Server, browser: Any) -> None:
    set_form(browser, DESKTOP, "light")
    browser.execute_script(
        "window.shifts = 0; new PerformanceObserver(list => {"
        " for (const e of list.getEntries()) window.shifts += e.value;"
        "}).observe({type: 'layout-shift'})"
    )
    time.sleep(5)
    assert browser.execute_script("return window.shifts") < 0.05


def test_the_reason_of_a_deferral_is_told_on_hover(
    loaded: Server, browser: Any
) -> None:
    from selenium.webdriver import ActionChains

    set_form(browser, DESKTOP, "light")
    set_paused(browser, True)
    cell = browser.find_element("css selector", '.cell[data-status="deferred"]:not(i)')
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", cell)
    ActionChains(browser).move_to_element(cell).perform()
    tip = text(browser, "tip")
    assert "deferred" in tip
    assert "Its request runs as many branches as the cap allows." in tip
    assert cell.get_attribute("aria-describedby") == "tip"
    screenshot(browser, "deferral-on-hover")
    ActionChains(browser).move_to_element(
        browser.find_element("css selector", "h1")
    ).perform()
    assert not browser.find_element("id", "tip").is_displayed()


def test_the_keyboard_reaches_every_branch_its_reason_and_its_timeline(
    loaded: Server, browser: Any
) -> None:
    from selenium.webdriver.common.keys import Keys

    def press(*keys: str) -> Any:
        for key in keys:
            browser.switch_to.active_element.send_keys(key)
        return browser.switch_to.active_element

    set_paused(browser, True)
    browser.find_element("id", "pause").send_keys("")
    item = press(Keys.TAB)
    assert item.get_attribute("role") == "treeitem"
    stops = browser.execute_script(
        "return document.querySelectorAll('#requests [tabindex=\"0\"]').length"
    )
    assert stops == 1
    assert press(Keys.ARROW_RIGHT).get_attribute("class") == "name"
    first = press(Keys.ARROW_RIGHT)
    assert first.get_attribute("class") == "cell"
    tip = text(browser, "tip")
    assert "Branch 1 of 30" in tip
    below = press(Keys.ARROW_DOWN)
    assert below.rect["y"] > first.rect["y"]
    assert press(Keys.ARROW_UP).rect["y"] == first.rect["y"]
    press(Keys.ENTER)
    wait_for(lambda: browser.find_element("id", "story").is_displayed())
    assert "queued" in text(browser, "story-rows")
    screenshot(browser, "timeline")
    press(Keys.ESCAPE)
    assert not browser.find_element("id", "story").is_displayed()
    assert press(Keys.END).get_attribute("aria-label").startswith("branch")
    assert press(Keys.HOME).get_attribute("class") == "title"
    assert press(Keys.PAGE_DOWN).get_attribute("class") == "title"
    set_paused(browser, False)


def test_the_page_asks_its_own_server_for_everything(
    loaded: Server, browser: Any
) -> None:
    urls = browser.execute_script(
        "return performance.getEntriesByType('resource').map(e => e.name)"
    )
    assert urls
    assert all(url.startswith(loaded.url + "/taper/") for url in urls), urls
    severe = [e for e in browser.get_log("browser") if e["level"] == "SEVERE"]
    assert severe == []


# -- states by hand


@pytest.fixture
def still(browser: Any, taper_server: Server) -> Any:
    """The page, paused and empty."""
    set_form(browser, DESKTOP, "light")
    open_page(browser, taper_server.url)
    set_paused(browser, True)
    browser.execute_script(
        "document.getElementById('requests').replaceChildren();"
        "cards.clear(); branches.clear(); pastSteps.clear(); lastStep = 0;"
        "for (const chart of Object.values(charts)) chart.top = chart.bottom = 0"
    )
    return browser


def show(driver: Any, state: dict[str, Any]) -> float:
    """How long the page takes to show it, in ms, layout included."""
    return float(
        driver.execute_script(
            "const began = performance.now(); render(arguments[0]);"
            "document.body.getBoundingClientRect(); return performance.now() - began",
            state,
        )
    )


def test_every_status_and_depth_of_a_tree_is_shown(still: Any) -> None:
    state = synthetic_state(num_requests=12, width=24)
    show(still, state)
    expected = dict.fromkeys(STATUSES, 0)
    for request in state["requests"]:
        for status in request["branches"]["status"]:
            expected[status] += 1
    assert counts(still) == expected
    levels = still.execute_script(
        "return [...document.querySelectorAll('#requests .request')].map(r =>"
        " [...r.querySelectorAll('.name')].map(n => n.ariaLevel))"
    )
    assert levels == [["2", "3", "4"]] * 12
    for number in range(12):
        (late,) = still.execute_script(
            "return [...document.querySelectorAll(`[data-id='request-"
            f"{number}'] .bad`)].map(e => e.textContent)"
        ) or [""]
        assert ("late" in late) is (number % 3 == 0)
    screenshot(still, "states-desktop-light")
    set_form(still, PHONE, "dark")
    assert overflow(still) <= 0
    screenshot(still, "states-phone-dark")


def test_every_reason_has_words(still: Any) -> None:
    show(still, synthetic_state(1, 1))
    told = {
        reason: still.execute_script(
            "return reasonText({reason: arguments[0], budget_ms: 21, urgent: 'u',"
            " urgent_slack_ms: -3})",
            reason,
        )
        for reason in REASONS
    }
    assert len(set(told.values())) == len(REASONS)
    assert all(
        "Most urgent was u: it is 3.0 ms late" in words for words in told.values()
    )
    assert "21.0 ms" in told["budget"]


def test_thousands_of_branches_are_drawn_well_within_a_second(still: Any) -> None:
    state = synthetic_state(num_requests=40, width=100)
    first_ms = show(still, state)
    again_ms = show(still, synthetic_state(num_requests=40, width=100, seed=1))
    assert first_ms < 2000
    assert again_ms < 1000
    set_form(still, DESKTOP, "dark")
    screenshot(still, "4000-branches-desktop-dark")


def test_every_item_of_the_tree_has_a_role_a_level_and_a_name(still: Any) -> None:
    show(still, synthetic_state(3, 5))
    items = still.execute_script(
        "return [...document.querySelectorAll('#requests [tabindex]')].map(e =>"
        " [e.getAttribute('role'), e.ariaLevel, e.ariaLabel || e.textContent])"
    )
    assert len(items) == 3 * (1 + 3 + 8)
    assert all(role == "treeitem" and level and name for role, level, name in items)


def test_a_request_that_has_ended_stays_a_moment_and_then_goes(still: Any) -> None:
    state = synthetic_state(2, 4)
    show(still, state)
    show(still, {**state, "requests": state["requests"][:1]})
    ended = "return document.querySelectorAll('.request.ended').length"
    assert still.execute_script(ended) == 1
    time.sleep(4.5)
    show(still, {**state, "requests": state["requests"][:1]})
    assert still.execute_script(ended) == 0


def test_what_is_looked_at_does_not_go(still: Any) -> None:
    state = synthetic_state(2, 4)
    show(still, state)
    still.execute_script("document.querySelector('#requests .cell').focus()")
    show(still, {**state, "requests": []})
    time.sleep(4.5)
    show(still, {**state, "requests": []})
    left = "return document.querySelectorAll('.request').length"
    assert still.execute_script(left) == 2


def test_an_idle_server_is_told_as_idle(still: Any) -> None:
    state = synthetic_state(0, 0)
    empty: dict[str, list[Any]] = {key: [] for key in state["steps"]}
    service = {**state["service"], "slo_attainment": None}
    still.execute_script("pastSteps.clear()")
    show(still, {**state, "steps": empty, "service": service})
    assert "No request is running" in text(still, "empty")
    assert text(still, "f-step") == "\u2013"
    assert text(still, "f-attainment") == "\u2013"
