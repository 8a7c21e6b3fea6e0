"""The page in a real browser: what it shows, what it asks for, and that nothing but its own script runs."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from kda_jax.server import Keys, Tenant
from server_engine import EchoEngine
from server_site import running

BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
ALICE = "sk-alice-0123456789"

pytestmark = pytest.mark.skipif(
    BROWSER is None, reason=f"needs a browser, one of {', '.join(BROWSERS)}: Debian's chromium-headless-shell"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A new page; what goes wrong in it is an error at the end."""
    page, wrong = browser.new_page(), []
    page.set_default_timeout(10_000)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("response", lambda answer: wrong.append(answer.url) if answer.status in (404, 500) else None)
    yield page
    page.close()
    assert wrong == []


def see(page: Any, selector: str, text: str) -> None:
    """Waits until an element holds a text."""
    page.wait_for_function(
        "([selector, text]) => document.querySelector(selector)?.innerText.includes(text)",
        arg=[selector, text],
    )


def test_requests_rates_and_the_tree_are_shown_as_they_change(page: Any) -> None:
    engine = EchoEngine()
    with running(engine) as site:
        page.goto(site.url)
        see(page, "#state", "0 of 8 slots run · 1 wait · 2 load · 60 of 100 pages free, 30 cached")
        see(page, "#state", "open to all who reach it")
        see(page, "#requests", "none")
        see(page, "#tree", "empty")
        for _ in range(4):
            site.client().completions.create(model="tiny", prompt="x" * 100, max_tokens=2)
        see(page, "#rate", "74.3 % of 400 prompt tokens were restored")
        see(page, "#legend", "computed 103")
        see(page, "#legend", "device 297")
        assert page.locator("#rates rect.device").count() >= 1
        see(page, "#tree summary", "0 to 100device end, latents in device, used 1 s ago")
        engine.hold.clear()
        stream = site.client().completions.create(model="tiny", prompt="abc", max_tokens=9, stream=True)
        next(stream)
        see(page, "#requests", "cmpl-")
        assert page.locator("#requests td.number").all_inner_texts()[:2] == ["3", "1"]
        engine.hold.set()
        list(stream)
        see(page, "#requests", "none")
        assert not page.locator("#who").is_visible()


def test_it_explains_a_prompt(page: Any) -> None:
    with running(EchoEngine()) as site:
        site.client().completions.create(model="tiny", prompt="abc", max_tokens=1)
        page.goto(site.url)
        page.fill("#prompt", "abc")
        page.click("text=Explain")
        see(page, "#why", "2 of 3 tokens would be restored (2 from device; state from device)")
        page.fill("#prompt", "abd")
        page.click("text=Explain")
        see(page, "#why", "none of 3 tokens would be restored")
        page.fill("#prompt", "")
        page.click("text=Explain")
        see(page, "#why", "prompt is empty; give at least one token to go on from")


def test_with_keys_it_asks_for_one(page: Any) -> None:
    with running(EchoEngine(), keys=Keys({ALICE: Tenant("alice", "salt", False)})) as site:
        site.client(ALICE).completions.create(model="tiny", prompt="abc", max_tokens=1)
        page.goto(site.url)
        see(page, "#note", "no key that this server takes")
        assert page.inner_text("#tree") == "" and page.inner_text("#requests") == ""
        page.fill("#key", ALICE)
        page.click("text=Show")
        see(page, "#tree", "0 to 3")
        see(page, "#state", "tenant alice")
        assert page.inner_text("#note") == "" and "slots" not in page.inner_text("#state")


def test_what_it_is_told_is_text_and_no_script_but_its_own_runs(page: Any) -> None:
    with running(EchoEngine(), keys=Keys({ALICE: Tenant("<b>x</b>", "salt", False)})) as site:
        page.goto(site.url)
        page.fill("#key", ALICE)
        page.click("text=Show")
        see(page, "#state", "tenant <b>x</b>")
        assert page.locator("#state b").count() == 0
        blocked = page.evaluate(
            "() => { const s = document.createElement('script'); s.textContent = 'window.ran = 1';"
            " document.body.append(s); return window.ran === undefined }"
        )
        assert blocked
