"""Somebody before the page: keyboard, eyes, and the size of the screen."""

import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from selenium.webdriver import ActionChains, Chrome, ChromeOptions, ChromeService, Keys

EXPECTED = ("the server responded with a status of", "net::ERR_CONNECTION_REFUSED")


@contextmanager
def headless() -> Iterator[Chrome]:
    """A browser without a window, where there is one."""
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    driver = shutil.which("chromedriver")
    if program is None or driver is None:
        pytest.skip("there is no chromium with its chromedriver here")
    options = ChromeOptions()
    options.binary_location = program
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = ChromeService(driver, log_output=subprocess.DEVNULL)
    browser = Chrome(options=options, service=service)
    try:
        yield browser
    finally:
        browser.quit()


class Visitor:
    """Somebody before the page, with keyboard and eyes."""

    def __init__(self, browser, url: str) -> None:
        self.browser = browser
        browser.get(url)
        self.until("return chat.model !== ''")

    def js(self, script: str, *given):
        return self.browser.execute_script(script, *given)

    def until(self, script: str, *given, seconds: float = 10.0) -> None:
        ends = time.monotonic() + seconds
        while not self.js(script, *given):
            assert time.monotonic() < ends, f"never came: {script}"
            time.sleep(0.02)

    def keys(self, *pressed: str) -> None:
        ActionChains(self.browser).send_keys(*pressed).perform()

    def tab_to(self, name: str) -> None:
        """Go by the Tab key alone to the element of an id, and see where one is."""
        for _ in range(40):
            at, ring = self.js(
                "const at = document.activeElement, box = at.closest('#box') ?? at;"
                "return [at.id, getComputedStyle(box).outlineStyle]"
            )
            if at:
                assert ring != "none", f"{at} does not show that it has the focus"
            if at == name:
                return
            self.keys(Keys.TAB)
        raise AssertionError(f"Tab never reached {name}")

    def send(self, text: str) -> None:
        """Type a message into its box and send it."""
        self.js("document.getElementById('message').focus()")
        self.keys(text, Keys.ENTER)

    def settle(self) -> None:
        """Figures and trees are drawn with the next frame."""
        self.browser.execute_async_script("requestAnimationFrame(() => setTimeout(arguments[0]))")

    def ended(self, seconds: float = 10.0) -> None:
        self.until("return document.getElementById('send').offsetParent !== null", seconds=seconds)
        self.settle()

    def ask(self, text: str, seconds: float = 10.0) -> None:
        """Send a message and read the whole answer."""
        before = self.js("return chat.turns.length")
        self.send(text)
        self.until("return chat.turns.length > arguments[0]", before)
        self.ended(seconds)

    def text(self, selector: str) -> str:
        return self.js("return document.querySelector(arguments[0])?.textContent ?? ''", selector)

    def texts(self, selector: str) -> list[str]:
        return self.js(
            "return [...document.querySelectorAll(arguments[0])].map((one) => one.textContent)",
            selector,
        )

    def click(self, name: str) -> None:
        self.js("document.getElementById(arguments[0]).click()", name)

    def style(self, selector: str, name: str) -> str:
        return self.js(
            "return getComputedStyle(document.querySelector(arguments[0]))[arguments[1]]",
            selector,
            name,
        )

    def emulate(self, **media: str) -> None:
        features = [{"name": k.replace("_", "-"), "value": v} for k, v in media.items()]
        self.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def size(self, width: int, height: int, scale: int = 1) -> None:
        self.browser.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": False},
        )

    def complaints(self) -> list[str]:
        """Errors of the page itself since the last call; refusals of the server are none."""
        log = self.browser.get_log("browser")
        errors = [entry["message"] for entry in log if entry["level"] == "SEVERE"]
        return [line for line in errors if not any(known in line for known in EXPECTED)]

    def leftover(self) -> int:
        """Pixels by which the page as a whole is taller than the window."""
        return self.js(
            "const page = document.documentElement; return page.scrollHeight - innerHeight"
        )

    def overflow(self) -> int:
        """Pixels by which the widest scrolling box, the page first, is too wide."""
        return self.js(
            "return Math.max(...[document.documentElement, ...document.querySelectorAll('*')]"
            ".filter((one) => !one.closest('.unseen') && one.clientWidth > 1"
            "  && !['visible', 'hidden'].includes(getComputedStyle(one).overflowX)"
            "  || one === document.documentElement)"
            ".map((one) => one.scrollWidth - one.clientWidth))"
        )


def brightness(colour: str) -> float:
    """The relative luminance of a computed colour."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
