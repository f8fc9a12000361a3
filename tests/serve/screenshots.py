"""Take the pictures of the page under docs/ from a server that was just started: what it wrote
before would be guessed.

foretoken serve --target smollm2-135m --draft smollm2-135m-draft --dtype bfloat16
python tests/serve/screenshots.py http://127.0.0.1:8000/
"""

import base64
import sys
from pathlib import Path

from visitor import Visitor, headless

DOCS = Path(__file__).parents[2] / "docs"
MOST = 250_000  # bytes of a picture
# of the steps that kept some guesses the one with the largest tree: the last step often has none
TELLING = """
const turn = chat.turns.at(-1), size = (step) => (step.accepted ? step.drafted : 0);
lookAt(turn, turn.steps.reduce((best, step, at) => size(step) > size(turn.steps[best]) ? at : best, 0));
"""  # noqa: E501


def talk(guest: Visitor, *said: str | bool) -> None:
    """Send messages in a new chat; truths switch speculation on and off."""
    guest.click("fresh")
    for one in said:
        if isinstance(one, bool):
            guest.click("speculate")
        else:
            guest.ask(one, seconds=300)
    guest.js(TELLING)


def take(guest: Visitor, name: str) -> None:
    """Write what is on the screen to docs/."""
    guest.settle()
    shot = guest.browser.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})
    picture = base64.b64decode(shot["data"])
    assert len(picture) < MOST, f"{name} has {len(picture)} bytes"
    (DOCS / f"serve-{name}.png").write_bytes(picture)


def main(url: str) -> None:
    story, egg = "Write a short story about a lighthouse.", "How do I boil an egg?"
    city = "What is the capital of France, and what is it known for?"
    planets, leaves = "What are the planets of the solar system?", "Why are leaves green?"
    code = "Write a Python function that adds two numbers."
    with headless() as browser:
        guest = Visitor(browser, url)
        guest.js("document.getElementById('cap').value = 120")
        guest.emulate(prefers_color_scheme="light")
        guest.size(400, 800, scale=2)
        talk(guest, story)
        take(guest, "phone")
        guest.size(1280, 800)
        talk(guest, planets, False, egg, True, city)
        take(guest, "light")
        guest.emulate(prefers_color_scheme="dark")
        talk(guest, leaves, False, planets, True, code)
        take(guest, "dark")


if __name__ == "__main__":
    main(sys.argv[1])
