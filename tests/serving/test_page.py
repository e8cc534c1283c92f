"""The page in a real browser, against a small server that answers as jmoe's does."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import playwright
import pytest
from axe_playwright_python.sync_playwright import Axe
from openai_server import OpenAIServer
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.http_servers import HttpProcess

BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome")
MARKUP = '<img src=x onerror="window.hacked = 1"><script>window.hacked = 1</script><b>bold</b>'
MOVING = {
    "policy": "experts",
    "uptime_s": 7500.0,
    "requests_running": 3,
    "requests_waiting": 12,
    "kv_tokens_used": 1024,
    "prompt_tokens_total": 1234,
    "generation_tokens_total": 2_500_000,
    "tokens_per_s": 31.5,
    "slots": [[0, 5], None, [1, 2]],
    "streamed_bytes_total": 4_000_000_000,
    "nvme_bytes_total": 1_000_000_000,
    "hit_rate": 0.625,
    "computed_tokens_total": 1000,
    "expert_hits_total": 500,
    "experts_chosen_total": 800,
    "waited_s": 90.0,
    "roofline_fraction": 0.5,
    "expert_counts": [[4, 0, 2, 2, 0, 8], [], [1, 1, 1, 1, 1, 1]],
    "devices": {
        "loads": [3_000_000.0, 1_000_000.0],
        "copies": [5, 0],
        "balancedness": [0.5, 0.75],
        "replans": 7,
        "swaps": 3,
    },
}
LIMIT_MS = 120_000  # a guard against what hangs


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    node = Path(playwright.__file__).parent / "driver" / "node"
    started = subprocess.run([node, "--version"], capture_output=True, text=True)
    if started.returncode:
        pytest.skip(f"playwright does not start on this machine: {started.stderr.strip()}")
    expect.set_options(timeout=LIMIT_MS)
    with sync_playwright() as driver:
        found = [path for name in BROWSERS if (path := shutil.which(name))] + [
            driver.chromium.executable_path
        ]
        path = next((path for path in found if Path(path).exists()), None)
        if path is None:
            pytest.skip(
                f"no browser: none of {', '.join(BROWSERS)} on PATH, nor what `playwright install`"
                " brings"
            )
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def server() -> Iterator[OpenAIServer]:
    with OpenAIServer() as server:
        yield server


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A tab; whatever its script did not catch fails the test."""
    errors: list[str] = []
    with browser.new_context(viewport={"width": 1280, "height": 860}) as context:
        context.set_default_timeout(LIMIT_MS)
        page = context.new_page()
        page.on("pageerror", lambda error: errors.append(str(error)))
        yield page
    assert errors == []


def open_page(page: Page, server: OpenAIServer) -> None:
    page.goto(server.url)
    expect(page.locator("#state")).to_have_text("connected")


def say(page: Page, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.get_by_label("Message", exact=True).press("Enter")


def test_conversation(page: Page, server: OpenAIServer) -> None:
    open_page(page, server)
    page.get_by_text("Settings", exact=True).click()
    page.get_by_label("System message").fill("Be kind.")
    page.get_by_label("Temperature").fill("")
    say(page, "line 1\nline 2")
    expect(page.locator("article p")).to_have_text(
        ["line 1\nline 2", "Hello, world"], use_inner_text=True
    )
    expect(page.locator("article .note").last).to_contain_text("7 + 3 tokens · first after")
    say(page, "more")
    expect(page.locator("article p")).to_have_count(4)
    expect(page.locator("article .note").last).to_contain_text("tokens/s")
    (path, first, _), (_, second, _) = server.requests
    system = {"role": "system", "content": "Be kind."}
    question = {"role": "user", "content": "line 1\nline 2"}
    assert path == "/v1/chat/completions"
    assert first == {
        "model": "fake-moe",
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "max_tokens": 512,
        "messages": [system, question],
    }
    answer = {"role": "assistant", "content": "Hello, world"}
    assert second["messages"] == [system, question, answer, {"role": "user", "content": "more"}]
    page.get_by_role("button", name="New").click()
    expect(page.locator("article")).to_have_count(0)
    say(page, "afresh")
    expect(page.locator("article .note").last).to_contain_text("tokens")
    assert server.requests[2][1]["messages"] == [system, {"role": "user", "content": "afresh"}]


def test_completion_without_chat_template(page: Page, server: OpenAIServer) -> None:
    server.live["chat"] = False
    open_page(page, server)
    say(page, "def f(")
    expect(page.locator("article h2")).to_have_text(["Text", "Continuation"])
    expect(page.locator("article p").last).to_have_text("Hello, world")
    path, body, _ = server.requests[0]
    assert path == "/v1/completions"
    assert body["prompt"] == "def f("
    assert "messages" not in body


def test_no_more_new_tokens_than_fit(page: Page, server: OpenAIServer) -> None:
    """512 by default do not fit a model of 256 positions."""
    server.max_model_len = 256
    open_page(page, server)
    say(page, "Hello")
    expect(page.locator("article .note").last).to_contain_text("tokens")
    page.get_by_text("Settings", exact=True).click()
    page.get_by_label("Most new tokens").fill("20")
    say(page, "more")
    expect(page.locator("article p")).to_have_count(4)
    expect(page.locator("article .note").last).to_contain_text("tokens")
    assert [body["max_tokens"] for _, body, _ in server.requests] == [249, 20]


def test_the_first_message_is_answered(page: Page, shared_server: HttpProcess) -> None:
    """With the settings that the page and a server of a model of 256 positions begin with."""
    page.goto(shared_server.url)
    expect(page.locator("#state")).to_have_text("connected")
    say(page, "Hello")
    # the first may be the end of the text
    expect(page.locator("article .note").last).to_contain_text("tokens")
    expect(page.get_by_role("alert")).to_have_count(0)


ANSWERS = [
    (
        [{"reasoning": "I need ", "reasoning_content": "I need "}, {"reasoning": "the tool."}],
        "stop",
    ),
    (
        [
            {"content": "Let me look."},
            {
                "tool_calls": [
                    {"index": 0, "id": "a", "function": {"name": "weather", "arguments": ""}}
                ]
            },
            {"tool_calls": [{"index": 0, "function": {"arguments": '{"city": '}}]},
            {"tool_calls": [{"index": 0, "function": {"arguments": '"Oslo"}'}}]},
        ],
        "tool_calls",
    ),
]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]


def test_reasoning_and_calls_are_folded(page: Page, server: OpenAIServer) -> None:
    """They open by a click; what a tool says is typed in, and goes back with the calls."""
    (thought, _), (called, reason) = ANSWERS
    server.deltas = [([*thought, *called], reason)]
    open_page(page, server)
    page.get_by_text("Settings", exact=True).click()
    page.get_by_label("Tools, as a JSON list of functions").fill(json.dumps(TOOLS))
    say(page, "Weather in Oslo?")
    expect(page.locator("article > p").last).to_have_text("Let me look.")
    for title, text in (("Reasoning", "I need the tool."), ("Call of weather", '{"city": "Oslo"}')):
        expect(page.get_by_text(text)).to_be_hidden()
        page.get_by_text(title, exact=True).click()
        expect(page.get_by_text(text)).to_be_visible()
    page.get_by_label("Result of weather").fill("12")
    assert Axe().run(page).response["violations"] == []
    page.get_by_role("button", name="Send results").click()
    expect(page.locator("article > p").last).to_have_text("Hello, world")
    function = {"name": "weather", "arguments": '{"city": "Oslo"}'}
    assert [body["tools"] for _, body, _ in server.requests] == [TOOLS, TOOLS]
    assert server.requests[1][1]["messages"][1:] == [
        {
            "role": "assistant",
            "content": "Let me look.",
            "reasoning_content": "I need the tool.",
            "tool_calls": [{"id": "a", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "a", "content": "12"},
    ]


def test_a_cut_call_is_no_part_of_the_conversation(page: Page, server: OpenAIServer) -> None:
    """Its arguments are no JSON, which the server would refuse with every later message."""
    server.deltas = [(ANSWERS[1][0][:-1], "length")]
    open_page(page, server)
    say(page, "Weather in Oslo?")
    expect(page.locator("article .note").last).to_contain_text("ended at the limit of new tokens")
    expect(page.get_by_role("button", name="Send results")).to_have_count(0)
    say(page, "more")
    expect(page.locator("article > p").last).to_have_text("Hello, world")
    assert server.requests[1][1]["messages"] == [
        {"role": "user", "content": "Weather in Oslo?"},
        {"role": "assistant", "content": "Let me look."},
        {"role": "user", "content": "more"},
    ]


def test_retry(page: Page, server: OpenAIServer) -> None:
    """Takes the last answer back, or the failure, and asks the same again."""
    open_page(page, server)
    say(page, "one")
    expect(page.locator("article p").last).to_have_text("Hello, world")
    server.refuse = [(500, {}, "The engine stopped.")]
    page.get_by_role("button", name="Retry").click()
    expect(page.get_by_role("alert")).to_be_visible()
    server.text = ["Bye"]
    page.get_by_role("button", name="Retry").click()
    expect(page.locator("article p").last).to_have_text("Bye")
    expect(page.locator("article")).to_have_count(2)
    expect(page.get_by_label("Message", exact=True)).to_have_value("")
    assert [body["messages"] for _, body, _ in server.requests] == [
        [{"role": "user", "content": "one"}]
    ] * 3


def test_tools_that_are_no_json(page: Page, server: OpenAIServer) -> None:
    open_page(page, server)
    page.get_by_text("Settings", exact=True).click()
    page.get_by_label("Tools, as a JSON list of functions").fill("[")
    say(page, "one")
    expect(page.get_by_role("alert")).to_contain_text("Tools:")
    assert server.requests == []


@pytest.mark.parametrize("how", ["button", "key"])
def test_stop(page: Page, server: OpenAIServer, how: str) -> None:
    server.text, server.token_s = ["tick "] * 10_000, 0.01
    open_page(page, server)
    say(page, "go on")
    expect(page.locator("article p").last).to_contain_text("tick tick")
    expect(page.get_by_role("button", name="Send")).to_be_hidden()
    if how == "button":
        page.get_by_role("button", name="Stop").click()
    else:
        page.keyboard.press("Escape")
    expect(page.locator("article .note").last).to_have_text("stopped")
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    expect(page.locator("article p").last).to_contain_text("tick tick")
    for _ in range(LIMIT_MS // 50):
        if server.disconnects:
            break
        page.wait_for_timeout(50)
    assert server.disconnects == 1


def test_errors_are_told(page: Page, server: OpenAIServer) -> None:
    open_page(page, server)
    server.refuse = [
        (429, {"Retry-After": "3"}, "The queue is full."),
        (500, {}, "The engine stopped."),
    ]
    alert = page.get_by_role("alert").last
    say(page, "one")
    expect(alert).to_have_text("429: The queue is full. Try again in 3 s.")
    expect(page.get_by_label("Message", exact=True)).to_have_value("one")
    say(page, "two")
    expect(alert).to_have_text("500: The engine stopped.")
    server.error_after = 2
    say(page, "three")
    expect(alert).to_have_text("the engine failed")
    expect(page.locator("article p").last).to_have_text("Hello, ")
    server.error_after = None
    say(page, "four")
    expect(page.locator("article p").last).to_have_text("Hello, world")
    # Only what was answered is part of the conversation.
    said = [message["content"] for message in server.requests[-1][1]["messages"]]
    assert said == ["three", "Hello, ", "four"]


def test_api_key(page: Page, server: OpenAIServer) -> None:
    open_page(page, server)
    server.refuse = [(401, {}, "Wrong API key.")]
    say(page, "hi")
    expect(page.get_by_role("alert")).to_have_text(
        "401: Wrong API key. The API key is under Settings."
    )
    page.get_by_text("Settings", exact=True).click()
    page.get_by_label("API key").fill("sk-1")
    page.reload()
    say(page, "hi")
    expect(page.locator("article p").last).to_have_text("Hello, world")
    assert server.requests[-1][2]["Authorization"] == "Bearer sk-1"
    assert "Authorization" not in server.requests[0][2]


def test_server_goes_away(page: Page, server: OpenAIServer) -> None:
    open_page(page, server)
    server.shutdown()
    server.server_close()
    expect(page.locator("#state")).to_have_text("no answer from the server")
    say(page, "hi")
    expect(page.get_by_role("alert")).to_be_visible()
    expect(page.get_by_role("button", name="Send")).to_be_enabled()


def test_markup_stays_text(page: Page, server: OpenAIServer) -> None:
    server.text = [MARKUP[:30], MARKUP[30:]]
    server.live |= {"model": MARKUP, "policy": MARKUP}
    open_page(page, server)
    say(page, MARKUP)
    expect(page.locator("article p")).to_have_text([MARKUP, MARKUP])
    server.refuse = [(400, {}, MARKUP)]
    say(page, "again")
    expect(page.get_by_role("alert")).to_have_text("400: " + MARKUP)
    expect(page.locator("#model")).to_have_text(MARKUP)
    assert page.evaluate("window.hacked") is None
    assert page.locator("img, b").count() == 0


def test_live_view(page: Page, server: OpenAIServer) -> None:
    server.live |= MOVING
    page.clock.install()
    open_page(page, server)
    later = {
        "uptime_s": 7501.0,
        "streamed_bytes_total": 6_500_000_000,
        "nvme_bytes_total": 1_300_000_000,
        "computed_tokens_total": 1020,
        "expert_hits_total": 515,
        "experts_chosen_total": 820,
        "tokens_per_s": 20.0,
    }
    server.live |= later
    with page.expect_response("**/live"):
        page.clock.run_for(1000)
    shown = dict(
        zip(page.locator("dt").all_text_contents(), page.locator("dd").all_text_contents())
    )
    expect(page.locator("#streamed")).to_have_text("6.5 GB")
    assert shown | {"Streamed": ""} == {
        "Running": "3",
        "Waiting": "12",
        "Prompt tokens": "1,234",
        "Generated tokens": "2.50 M",
        "Roofline": "50.0 %",
        "Expert hits": "75.0 %",  # of the last seconds
        "Streamed": "",
        "Streamed a token": "125 MB",
        "Expert wait": "1 min",
    }
    expect(page.locator("#uptime")).to_have_text("up 2.1 h")
    expect(page.locator("#kv")).to_have_text("1,024 of 4,096 tokens, 25.0 %")
    expect(page.get_by_role("meter")).to_have_attribute("aria-valuenow", "25")
    labels = [
        page.locator(f"#{name}-chart svg").get_attribute("aria-label")
        for name in ("tokens", "bytes", "nvme")
    ]
    assert labels == ["20.0, peak 31.5", "2.5 GB/s, peak 2.5 GB/s", "300 MB/s, peak 300 MB/s"]


def test_a_row_a_device(page: Page, server: OpenAIServer) -> None:
    """With more than one: what each computed, beside the mean, and what was copied to it."""
    server.live |= MOVING
    open_page(page, server)
    rows = page.get_by_role("table").get_by_role("row")
    head = "DeviceToken choicesOf the meanExperts copied"
    expect(rows).to_have_text([head, "03.00 M150.0 %5", "11.00 M50.0 %0"])
    expect(page.locator("#devices-said")).to_have_text(
        "balance 62.5 %, worst layer 50.0 %, 3 swaps, 7 re-plans"
    )


def test_cells_are_said_by_keyboard_and_pointer(page: Page, server: OpenAIServer) -> None:
    server.live |= MOVING
    open_page(page, server)
    slots, use = page.locator("#slots"), page.locator("#use")
    expect(slots).to_have_attribute("aria-label", "2 of 3 filled")
    said = []
    slots.focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
        said.append(page.locator("#slots-said").text_content())
    assert said == ["slot 0: layer 0, expert 5", "slot 1: empty", "slot 2: layer 1, expert 2"]
    expect(use).to_have_attribute("aria-label", re.compile("3 layers . 6 experts"))
    use.hover(position={"x": 26, "y": 3})
    expect(page.locator("#use-said")).to_have_text(
        re.compile("layer 0, expert 0: 1.50 . its fair share")
    )
    use.focus()
    page.keyboard.press("ArrowDown")
    expect(page.locator("#use-said")).to_have_text("layer 1: no experts")


@pytest.mark.parametrize(
    ("slots", "filled"),
    [([3, 0, None, 1], "3 of 4 filled"), ([[i % 4, i] for i in range(600)], "600 of 600 filled")],
)
def test_slots_are_coloured_by_layer(
    page: Page, server: OpenAIServer, slots: list[Any], filled: str
) -> None:
    server.live |= MOVING | {"slots": slots, "expert_counts": [[1]] * 4}
    open_page(page, server)
    expect(page.locator("#slots-said")).to_have_text(filled)
    pixels = """() => slots.cells.map((_, i) => slots.pen.getImageData(
        (i % slots.columns * slots.width + 2) * devicePixelRatio,
        (Math.floor(i / slots.columns) * slots.height + 2) * devicePixelRatio, 1, 1).data.join())"""
    by_layer: dict[Any, set[str]] = {}
    for slot, color in zip(slots, page.evaluate(pixels)):
        by_layer.setdefault(slot[0] if isinstance(slot, list) else slot, set()).add(color)
    assert all(len(colors) == 1 for colors in by_layer.values())
    assert len(set.union(*by_layer.values())) == len(by_layer)


def test_without_slots_or_counts(page: Page, server: OpenAIServer) -> None:
    open_page(page, server)
    expect(page.get_by_text("No slots: every expert stays on the device.")).to_be_visible()
    expect(page.get_by_text("No expert has been used yet.")).to_be_visible()
    expect(page.locator("canvas").first).to_be_hidden()
    expect(page.locator("#devices")).to_be_hidden()
    expect(page.locator("#roofline")).to_have_text("\u2013")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 360])
def test_layout(browser: Browser, server: OpenAIServer, width: int, scheme: Any) -> None:
    """Nothing is wider than the window, everything is from the server itself, axe finds no
    barrier.
    """
    server.live |= MOVING | {
        "model": "a-very-long-model-name-without-a-space-" * 3,
        "slots": [[0, i] for i in range(99)],
    }
    server.text = ["word" * 60, " and\n    code"]
    server.deltas = [([*ANSWERS[0][0], {"content": "word" * 60}, *ANSWERS[1][0]], "tool_calls")]
    with browser.new_context(
        viewport={"width": width, "height": 800}, color_scheme=scheme
    ) as context:
        page = context.new_page()
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        open_page(page, server)
        say(page, "x" * 200)
        expect(page.locator("article .note").last).to_contain_text("tokens")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert ground == {"light": "rgb(252, 252, 251)", "dark": "rgb(21, 23, 26)"}[scheme]
        assert all(url.startswith((server.url, "data:")) for url in asked)
        for title in ("Reasoning", "Call of weather"):
            page.get_by_text(title, exact=True).click()
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        server.refuse = [(400, {}, "no")]
        say(page, "again")
        expect(page.get_by_role("alert")).to_be_visible()
        page.get_by_text("Settings", exact=True).click()
        assert Axe().run(page).response["violations"] == []
