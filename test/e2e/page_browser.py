"""Debian's Chromium, without a window, for the tests of the page."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
# Set where a missing browser is a failure and not a reason to skip.
REQUIRED = "TAPER_REQUIRE_BROWSER"
# Where screenshots go; outside git by default.
ARTIFACTS = "TAPER_TEST_ARTIFACTS"
WAIT_S = 60.0
DESKTOP, PHONE = (1360, 900), (390, 844)
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic"),
    *("--no-first-run", "--disable-background-networking", "--disable-sync"),
    *("--disable-component-update", "--disable-dev-shm-usage"),
    *("--force-device-scale-factor=1", "--hide-scrollbars"),
)


def missing() -> str | None:
    """What is not here of what the tests need."""
    programs = [name for name in ("chromium", "chromedriver") if not shutil.which(name)]
    if programs:
        return f"{' and '.join(programs)}, of Debian's chromium and chromium-driver"
    try:
        import selenium  # noqa: F401 - only whether it is here
    except ImportError:
        return "selenium, of the extra `test`"
    return None


def require_browser() -> None:
    if (what := missing()) is None:
        return
    if os.environ.get(REQUIRED):
        pytest.fail(f"needs {what}")
    pytest.skip(f"needs {what}")


@contextmanager
def chromium() -> Iterator[Any]:
    """A driver with a profile of its own, which is gone afterwards."""
    from selenium.webdriver import Chrome, ChromeOptions, ChromeService

    options = ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with tempfile.TemporaryDirectory(prefix="taper-chromium-") as profile:
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        service = ChromeService(
            str(shutil.which("chromedriver")), log_output=subprocess.DEVNULL
        )
        driver = Chrome(options=options, service=service)
        try:
            yield driver
        finally:
            driver.quit()


def set_form(driver: Any, size: tuple[int, int], scheme: str) -> None:
    """A window of `size`, a phone's with touch; `scheme` is light or dark."""
    is_phone = size == PHONE
    metrics = {
        "width": size[0],
        "height": size[1],
        "deviceScaleFactor": 2 if is_phone else 1,
        "mobile": is_phone,
    }
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    feature = {"name": "prefers-color-scheme", "value": scheme}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})


def screenshot(driver: Any, name: str) -> Path:
    folder = Path(os.environ.get(ARTIFACTS) or REPOSITORY / "test-artifacts")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"page-{name}.png"
    assert driver.save_screenshot(str(path))
    return path


def wait_for(what: Callable[[], Any], describe: str = "") -> Any:
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        if found := what():
            return found
        time.sleep(0.1)
    raise AssertionError(f"not within {WAIT_S:.0f} s: {describe or what}")


def text(driver: Any, id: str) -> str:
    return str(
        driver.execute_script(f"return document.getElementById('{id}').innerText")
    )


def open_page(driver: Any, url: str) -> None:
    driver.get(url + "/taper/")
    wait_for(lambda: text(driver, "connection") == "live", "the page is live")
