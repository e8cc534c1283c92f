"""Draws docs/server_page.png: the page in a browser, on a real server under load.

`python -m tests.serving.page_picture [FILE]` needs Chromium. The model is `tests.agent_model`,
whose answers are given; its experts are chosen at random, and half of them fit on the device. A
window of a desktop stands beside one of a phone. Fails if axe finds a barrier in one of them.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import threading
from io import BytesIO
from pathlib import Path

from axe_playwright_python.sync_playwright import Axe
from PIL import Image
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.agent_model import POSITIONS, Scene, call_text, save_agent_model
from tests.http_servers import HttpProcess, start_server
from tests.processes import one_device

PICTURE = Path(__file__).resolve().parent.parent.parent / "docs" / "server_page.png"
WIDTHS, HEIGHT, GAP = (1280, 360), 800, 24
LIMIT_MS = 240_000
WATCHED_MS = 10_000  # before a picture, so that the figures of the last seconds have moved
CALLS = "\n".join(call_text("weather", f'{{"city": "{city}"}}') for city in ("Zürich", "Oslo"))
SCENES = (
    Scene(
        "results == 0 and names",
        "<think>\nI need both temperatures before I can compare them.\n</think>\n\n"
        f"Let me look.\n{CALLS}",
    ),
    Scene("results > 0", "Zürich is warmer: 21 °C, and 12 °C in Oslo."),
    Scene("true", "A mixture of experts sends each token to a few of its experts. " * 3),
)
ASKED = {"role": "user", "content": "What is a mixture of experts?"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]


def load(server: HttpProcess, stop: threading.Event) -> None:
    """Ask one chat after another."""
    while not stop.is_set():
        server.post("/v1/chat/completions", messages=[ASKED], max_tokens=180)


def converse(page: Page, server: HttpProcess) -> None:
    """Ask, answer the calls, and open the reasoning and one of the calls."""
    page.goto(server.url)
    page.get_by_text("Settings", exact=True).click()
    page.get_by_label("Tools, as a JSON list of functions").fill(json.dumps(TOOLS))
    page.get_by_text("Settings", exact=True).click()
    message = page.get_by_label("Message", exact=True)
    message.fill("Is it warmer in Zürich or in Oslo?")
    message.press("Enter")
    for city, degrees in (("Zürich", "21"), ("Oslo", "12")):
        page.get_by_label(f'Result of weather {{"city": "{city}"}}').fill(degrees)
    page.get_by_role("button", name="Send results").click()
    expect(page.locator("article > p").last).to_contain_text("12 °C in Oslo.")
    expect(page.locator("article .note").last).to_contain_text("tokens/s")
    for title in ("Reasoning", "Call of weather"):
        page.get_by_text(title, exact=True).first.click()


def photograph(browser: Browser, server: HttpProcess, width: int) -> Image.Image:
    """Return the window after a conversation; prints what the page says and what axe finds."""
    with browser.new_context(viewport={"width": width, "height": HEIGHT}) as context:
        context.set_default_timeout(LIMIT_MS)
        page = context.new_page()
        converse(page, server)
        page.wait_for_timeout(WATCHED_MS)
        names = ("running", "hit-rate", "streamed", "token-bytes", "waited")
        shown = {name: page.locator(f"#{name}").inner_text() for name in names}
        shown["tokens/s"] = page.locator("#tokens-chart .said").inner_text()
        violations = [found["id"] for found in Axe().run(page).response["violations"]]
        print(json.dumps({"width": width, "shown": shown, "violations": violations}), flush=True)
        assert violations == []
        return Image.open(BytesIO(page.screenshot())).convert("RGB")


def draw(server: HttpProcess, path: Path) -> None:
    """Write the windows of all widths, one beside the other, to a PNG file."""
    expect.set_options(timeout=LIMIT_MS)
    with sync_playwright() as driver:
        program = shutil.which("chromium") or driver.chromium.executable_path
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        windows = [photograph(browser, server, width) for width in WIDTHS]
        browser.close()
    picture = Image.new("RGB", (sum(WIDTHS) + GAP * (len(WIDTHS) - 1), HEIGHT), "#c8ccd0")
    left = 0
    for window in windows:
        picture.paste(window, (left, 0))
        left += window.width + GAP
    picture.quantize(128).save(path, optimize=True)


def main(path: Path = PICTURE) -> None:
    """Start the server and its load, and draw the picture."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "agent")
        save_agent_model(model, SCENES, layers=4, experts=8)
        options = ("--max-batch", 4, "--max-seq-len", POSITIONS, "--policy", "experts")
        env = one_device(Path(folder, "cache"))
        server, stop = start_server(Path(folder, "log"), env, model, *options), threading.Event()
        clients = [threading.Thread(target=load, args=(server, stop)) for _ in range(2)]
        try:
            for client in clients:
                client.start()
            server.post("/v1/chat/completions", messages=[ASKED], max_tokens=1)  # compiles
            draw(server, path)
        finally:
            stop.set()
            for client in clients:
                client.join()
            server.kill()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
