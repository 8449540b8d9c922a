"""The page in a real browser: what it shows, how it is operated, and that nothing of a request is more than text."""

import dataclasses
import re
from typing import Any

import pytest
from playwright.async_api import expect

from gateway.access.keys import digest_of_key, new_key
from gateway.requests.turns import GroupState, ModelTurns, TurnsState
from protos import cluster_pb2
from services.cluster.decision_board import DecisionBoard, ShownDecision
from tests.browser import DESKTOP, PALE, PHONE, TIMEOUT_MS, UNNAMED, Watched, browser_page

ODD_NAME = "<img src=x onerror=alert(1)>"
ANSWER = "hello world, naïve café end"

FOCUSED = """() => {
  const {id, className, localName} = document.activeElement;
  return id || className.baseVal || className || localName;
}"""
"""The best name of the element that has the focus."""

expect.set_options(timeout=TIMEOUT_MS)


@pytest.fixture
def pair(pair_type: Any, tokenizer: Any) -> Any:
    return pair_type([*tokenizer.encode(ANSWER, add_special_tokens=False).ids, 1])


@pytest.fixture
async def system(make_system: Any, pair: Any) -> Any:
    """A gateway that has served some requests and refused one."""
    system = await make_system()
    await system.add_pair(pair, prefill=2, decode=2)
    for tenant in ("acme", "globex", "acme"):
        await system.complete(max_tokens=100, tenant=tenant)
    await system.complete(model=ODD_NAME, tenant="acme")
    await system.until(lambda: system.gateway.requests.log.history.last_number == 4)
    return system


TURNS = TurnsState(
    {"chat": "on_disk", "code": "switching"}, [GroupState("group-0", "code", "switching", 2.0)], {"disk": 1.5}
)


async def open_page(watched: Watched, system: Any) -> Any:
    await watched.page.goto(f"{system.base_url}/dashboard")
    await expect(watched.page.locator("#link")).to_have_text("live")
    await expect(watched.page.locator("#list tbody tr")).to_have_count(4)
    return watched.page


def check_clean(watched: Watched, system: Any) -> None:
    assert watched.errors == []
    assert all(url.startswith(f"{system.base_url}/") for url in watched.asked)


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
async def test_clicking_through(system: Any, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    async with browser_page(size) as watched:
        page = await open_page(watched, system)
        await expect(page.locator("#turns-box")).to_be_hidden()
        monkeypatch.setattr(ModelTurns, "state", TURNS)
        await expect(page.locator("#turns")).to_contain_text("◌ code: switching")
        await expect(page.locator("#turns")).to_contain_text("group-0 switching for 2 s")
        await expect(page.locator("#turns")).to_contain_text("○ chat: on disk")
        await expect(page.locator("#turns-note")).to_have_text("A switch takes 1.5 s from disk.")
        await watched.shot(f"page-{size[0]}", full=True)
        assert not await watched.is_too_wide()

        card = page.locator(".worker", has_text="decode-1")
        await expect(card).to_contain_text("100 free of 100 pages")
        worker = system.workers["decode-1"]
        worker.load.pages.CopyFrom(cluster_pb2.PageCounts(total=100, free=40, cached=30, reserved=10, used=20))
        worker.load.running = 3
        worker.sessions.load_changed()
        await expect(card).to_contain_text("20 used, 10 reserved, 30 cached, 40 free of 100 pages")
        await expect(card.locator(".bar")).to_have_attribute("aria-label", re.compile("20 used, 10 reserved"))
        widths = await card.locator(".bar").evaluate("(bar) => [...bar.children].map((part) => part.clientWidth)")
        assert widths[3] > widths[2] > widths[0] > widths[1] > 0

        await page.fill("#q", "ACME")
        await expect(page.locator("#list tbody tr")).to_have_count(3)
        await page.select_option("#outcome", "refused")
        await expect(page.locator("#list tbody tr")).to_have_count(1)
        await expect(page.locator("#list tbody")).to_contain_text(ODD_NAME)
        await page.fill("#q", "nobody")
        await expect(page.locator("#list-note")).to_contain_text("None of the 4 remembered requests fits")
        await page.fill("#q", "")
        await page.select_option("#outcome", "-refused")
        await expect(page.locator("#list tbody tr")).to_have_count(3)
        await page.select_option("#outcome", "finished")
        await expect(page.locator("#list tbody tr")).to_have_count(3)

        await page.locator("#list button.link").first.click()
        story = page.locator("#story")
        for phase in ("queue", "route", "prefill", "decode"):
            await expect(story.locator(".waterfall tbody")).to_contain_text(phase)
        await expect(story).to_contain_text("tokens to compute than decode workers do")
        await expect(story).to_contain_text("The first token was predicted")
        await story.locator("summary").first.click()
        await expect(story.locator(".parts .sum")).to_contain_text("the price")
        await expect(story.locator(".waterfall thead")).to_contain_text("Expected")
        await watched.shot(f"story-{size[0]}")
        assert not await watched.is_too_wide()
        assert await page.evaluate(UNNAMED) == []
        await page.locator("#story-close").click()
        await expect(story).to_be_hidden()

        await page.select_option("#span", "60")
        await expect(page.locator(".plot").first).to_contain_text("60 s ago")
        assert await page.locator("img[onerror]").count() == 0
        check_clean(watched, system)


async def test_it_is_operated_by_keys_alone(system: Any) -> None:
    async with browser_page() as watched:
        page = await open_page(watched, system)
        await page.keyboard.press("Tab")
        await expect(page.locator(".skip")).to_be_focused()
        reached = set()
        while (name := await page.evaluate(FOCUSED)) != "body":
            reached.add(name)
            assert await page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none", name
            await page.keyboard.press("Tab")
        controls = {"pause", "theme", "span", "plot", "q", "outcome", "model", "class", "follow", "link"}
        assert (
            controls | {"ask-model", "ask-kind", "ask-tokens", "ask-temperature", "ask-prompt", "ask-send"} <= reached
        )

        button = page.locator("#list button.link").nth(1)
        await button.focus()
        await page.keyboard.press("Enter")
        await expect(page.locator("#story")).to_be_visible()
        await page.keyboard.press("Escape")
        await expect(page.locator("#story")).to_be_hidden()
        await expect(button).to_be_focused()

        chart = page.locator(".chart", has_text="Running and queued")
        await page.wait_for_function("document.querySelectorAll('.chart .line').length > 6")
        await chart.locator(".plot").focus()
        await page.keyboard.press("ArrowLeft")
        await expect(chart.locator(".when")).to_contain_text("ago")
        await expect(chart.locator(".plot")).to_have_attribute("aria-label", re.compile(r"ago: running 0, queued 0"))
        await page.keyboard.press("Escape")
        await expect(chart.locator(".when")).to_have_text("")
        check_clean(watched, system)


async def test_text_stands_out_in_both_themes_and_nothing_moves_that_should_not(system: Any) -> None:
    async with browser_page() as watched:
        await watched.page.emulate_media(color_scheme="dark", reduced_motion="reduce")
        page = await open_page(watched, system)
        bar = page.locator(".bar > span").first
        assert await bar.evaluate("(one) => getComputedStyle(one).transitionProperty") == "none"
        grounds = set()
        for theme in ("", "light"):
            await page.select_option("#theme", theme)
            grounds.add(await page.evaluate("getComputedStyle(document.body).backgroundColor"))
            assert await page.evaluate(PALE) == []
            await page.locator("#list button.link").last.click()
            await expect(page.locator("#story .waterfall")).to_be_visible()
            assert await page.evaluate(PALE) == []
            await page.keyboard.press("Escape")
        assert len(grounds) == 2
        check_clean(watched, system)


async def test_the_playground_answers_and_is_stopped(system: Any, pair: Any) -> None:
    async with browser_page() as watched:
        page = await open_page(watched, system)
        await page.select_option("#ask-kind", "text")
        await page.fill("#ask-tokens", "100")
        await page.click("#ask-send")
        await expect(page.locator("#ask-status")).to_contain_text("ended by stop")
        assert ANSWER in await page.locator("#answer").inner_text()
        await expect(page.locator("#ask-figures")).to_contain_text(re.compile(r"TTFT\s*[0-9.]+ (ms|s)"))
        await page.click("#ask-status a")
        await expect(page.locator("#story .waterfall")).to_be_visible()
        await page.keyboard.press("Escape")

        pair.step_s = 60.0  # so that it would continue
        await page.click("#ask-send")
        await expect(page.locator("#ask-status")).to_have_text("answering")
        await page.click("#ask-stop")
        await expect(page.locator("#ask-status")).to_have_text("stopped")
        await expect(page.locator("#list tbody")).to_contain_text("cancelled")
        await page.fill("#ask-prompt", "x" * 5000)
        await page.keyboard.press("Control+Enter")
        await expect(page.locator("#ask-status")).to_contain_text("✕")
        assert all("400" in error for error in watched.errors)  # the browser's own word for the last answer
        watched.errors.clear()
        check_clean(watched, system)


async def test_a_key_is_asked_for_and_kept_in_the_tab_only(make_system: Any, pair: Any, tmp_path: Any) -> None:
    admin, plain = new_key(), new_key()
    keys = tmp_path / "keys.toml"
    keys.write_text(
        f'[[key]]\nsha256 = "{digest_of_key(admin)}"\ntenant = "ops"\nadmin = true\n'
        f'[[key]]\nsha256 = "{digest_of_key(plain)}"\ntenant = "acme"\n'
    )
    system = await make_system(api_keys=keys, admin_port=0)
    await system.add_pair(pair)
    async with browser_page(PHONE) as watched:
        page = watched.page
        await page.goto(f"{system.base_url}/dashboard")
        await expect(page.locator("#door")).to_be_visible()
        await expect(page.locator("#main")).to_be_hidden()
        assert not await watched.is_too_wide()
        assert await page.evaluate(PALE) == []
        for wrong, words in ((plain, "admin role"), ("nonsense", "not known")):
            await page.fill("#key", wrong)
            await page.keyboard.press("Enter")
            await expect(page.locator("#door-error")).to_contain_text(words)
            await expect(page.locator("#key")).to_have_value("")
        await page.fill("#key", admin)
        await page.keyboard.press("Enter")
        await expect(page.locator("#link")).to_have_text("live")
        await page.select_option("#ask-kind", "text")
        await page.click("#ask-send")
        await expect(page.locator("#ask-status")).to_contain_text("ended by")
        await page.reload()
        await expect(page.locator("#link")).to_have_text("live")
        stored = await page.evaluate("[JSON.stringify(localStorage), document.cookie, location.href].join()")
        assert admin not in stored
        assert not any(admin in url for url in watched.asked)
        other = await watched.context.new_page()
        await other.goto(f"{system.base_url}/dashboard")
        await expect(other.locator("#door")).to_be_visible()
        await other.close()
        await page.click("#forget")
        await expect(page.locator("#door")).to_be_visible()

        # Where there is a key file, operators' pages ask for an admin's key at their own address too.
        await page.goto(f"http://127.0.0.1:{system.gateway.admin_port}/dashboard")
        await expect(page.locator("#door")).to_be_visible()
        await page.fill("#key", admin)
        await page.keyboard.press("Enter")
        await expect(page.locator("#link")).to_have_text("live")
        await expect(page.locator("#ask")).to_be_hidden()
        await expect(page.locator("#no-api")).to_contain_text(f"port, {system.gateway.http_port}.")


async def test_requests_of_another_gateway_take_the_place_of_all_that_were_shown(system: Any) -> None:
    async with browser_page() as watched:
        page = await open_page(watched, system)
        feed, history = system.gateway._feed, system.gateway.requests.log.history
        await feed.close()
        await expect(page.locator("#link")).to_have_text("connection lost, trying again")
        # As behind one address: another gateway, whose numbers begin anew.
        feed._facts = dataclasses.replace(feed._facts, id="another")
        history._kept.clear()
        history.last_number = 0
        await system.http.post("/v1/completions", json={"prompt": "a"}, headers={"x-request-id": "of-another"})
        await system.until(lambda: history.last_number == 1)
        feed.start(DecisionBoard(system.gateway._page_store))
        await expect(page.locator("#list tbody tr")).to_have_count(1)
        await expect(page.locator("#list tbody")).to_contain_text("of-another")


async def test_what_could_not_be_set_up_at_first_is_set_up_later(system: Any) -> None:
    async with browser_page() as watched:
        fails = iter([True])

        async def answer(route: Any) -> None:
            await (route.abort() if next(fails, False) else route.continue_())

        await watched.page.route("**/v1/models", answer)
        await watched.page.goto(f"{system.base_url}/dashboard#request=@1")
        await expect(watched.page.locator("#story .waterfall")).to_be_visible()
        await expect(watched.page.locator("#ask-model option")).to_have_count(1)


async def test_a_page_that_nobody_sees_asks_for_nothing(system: Any) -> None:
    async with browser_page() as watched:
        page = watched.page
        await page.add_init_script("window.isSeen = false;")
        await page.add_init_script("Object.defineProperty(Document.prototype, 'hidden', {get: () => !window.isSeen});")
        await page.goto(f"{system.base_url}/dashboard")
        await expect(page.locator("#link")).to_have_text("asleep")
        assert not [url for url in watched.asked if "/dashboard/data" in url or "/dashboard/events" in url]
        for is_seen, link in (("true", "live"), ("false", "asleep")):
            await page.evaluate(f"window.isSeen = {is_seen}; document.dispatchEvent(new Event('visibilitychange'))")
            await expect(page.locator("#link")).to_have_text(link)
        await system.until(lambda: system.gateway._feed.num_watchers == 0)


async def test_empty_states_are_explained_and_lost_connections_come_back(make_system: Any, pair: Any) -> None:
    system = await make_system()
    async with browser_page() as watched:
        page = watched.page
        await page.goto(f"{system.base_url}/dashboard")
        await expect(page.locator("#fresh")).to_contain_text("has served no request yet")
        await expect(page.locator("#topology")).to_contain_text("requests are refused until one comes")
        await expect(page.locator("#list-note")).to_contain_text("No request has ended at this gateway since")
        await expect(page.locator("#scope-note")).to_contain_text("Others have pages of their own")
        await expect(page.locator(".chart").first).to_contain_text("nothing yet")

        await system.gateway._feed.close()
        await expect(page.locator("#link")).to_have_text("connection lost, trying again")
        system.gateway._feed.start(DecisionBoard(system.gateway._page_store))
        await expect(page.locator("#link")).to_have_text("live")
        await system.add_pair(pair)
        await expect(page.locator(".worker")).to_have_count(2)
        await system.complete(max_tokens=100)
        await expect(page.locator("#fresh")).to_be_hidden()
        await expect(page.locator("#list tbody tr")).to_have_count(1)

        await page.click("#pause")
        await expect(page.locator("#link")).to_have_text("paused")
        await system.until(lambda: system.gateway._feed.num_watchers == 0)
        await page.click("#pause")
        await expect(page.locator("#link")).to_have_text("live")
        await page.evaluate("location.hash = '#request=not-there'")
        await expect(page.locator("#story")).to_contain_text("no such request is remembered here")


async def test_what_holds_models_back_and_what_the_autoscaler_did_are_told_as_text(
    system: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = f"{ODD_NAME} is full; one more decode worker: +40% requests"
    bottleneck = {"model": "tiny", "said": said, "since_unix_s": 1000.0}
    monkeypatch.setattr(system.gateway.requests.bottlenecks, "told", lambda: [bottleneck])
    await DecisionBoard(system.gateway._page_store).put(ShownDecision(1000.0, "ordered 2:1", f"{ODD_NAME} came"))
    async with browser_page(PHONE) as watched:
        page = await open_page(watched, system)
        await expect(page.locator("#bottlenecks .trouble")).to_have_text(f"⧗ tiny is held back: {ODD_NAME} is full")
        await expect(page.locator("#bottlenecks .note")).to_contain_text("one more decode worker: +40% requests (since")
        await expect(page.locator("#decisions")).to_contain_text("ordered 2:1", timeout=20_000)
        await expect(page.locator("#decisions .note")).to_have_text(f"{ODD_NAME} came")
        assert not await watched.is_too_wide()
        monkeypatch.setattr(system.gateway.requests.bottlenecks, "told", list)
        await expect(page.locator("#bottlenecks")).to_be_hidden()
        check_clean(watched, system)
