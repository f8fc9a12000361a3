"""The page of the server: one file that needs nothing, and what a browser makes of it."""

import re
import shutil
import subprocess
import time
from html.parser import HTMLParser

import pytest
from scripted_api import PAGE, ScriptedAPI, step

NAMESPACES = {"http://www.w3.org/2000/svg"}  # names that are never fetched
STEPS = [
    step([" stood", " on", " the"], " cliff", (" hill", " rock"), "The lighthouse"),
    step([" and", " its"], " light", (), " cliff"),
    step([], " turned", (" shone",), " light"),
]
TEXT = " stood on the cliff and its light turned"


class Elements(HTMLParser):
    """Start tags of a page, as (name, attributes)."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


@pytest.fixture(scope="module")
def source() -> str:
    return PAGE.read_text()


def test_the_page_is_one_small_file_that_fetches_nothing_from_elsewhere(source):
    assert len(source.encode()) < 60_000
    assert set(re.findall(r"\w+://[^\s'\"`)<]*", source)) <= NAMESPACES
    elements = Elements(source).found
    linked = [a.get("src") or a.get("href") for _, a in elements if "src" in a or "href" in a]
    assert all(link.startswith(("data:", "#")) for link in linked), linked
    assert not re.search(r"@import|url\(", source)
    policy = next(a["content"] for _, a in elements if "http-equiv" in a)
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy


def test_what_a_model_writes_is_never_read_as_html(source):
    ways = "innerHTML|outerHTML|insertAdjacentHTML|document.write|setHTML|DOMParser|eval\\("
    assert not re.findall(ways, source)


def test_the_page_has_its_landmarks_and_every_field_its_label(source):
    elements = Elements(source).found
    tags = [tag for tag, _ in elements]
    for landmark in ("header", "nav", "main", "aside", "h1"):
        assert tags.count(landmark) == 1, landmark
    labelled = {a.get("for") for tag, a in elements if tag == "label"}
    fields = [a["id"] for tag, a in elements if tag in ("input", "textarea", "select")]
    assert set(fields) >= {"message", "temperature", "cap", "system", "key", "step"}
    assert set(fields) <= labelled
    by_id = {a["id"]: a for _, a in elements if "id" in a}
    assert len(by_id) == sum("id" in a for _, a in elements), "an id is there twice"
    assert by_id["log"]["aria-live"] == "off" and by_id["said"]["aria-live"] == "polite"
    for switch in ("speculate", "marks"):
        assert by_id[switch]["role"] == "switch" and by_id[switch]["aria-checked"] == "true"
    for query in ("prefers-reduced-motion", "prefers-contrast", "forced-colors"):
        assert f"@media ({query}" in source
    assert "lang" in dict(elements)["html"]


# ---------------------------------------------------------------- in a browser


@pytest.fixture(scope="module")
def chromium():
    """A headless browser, where there is one."""
    drivers = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    driver = shutil.which("chromedriver")
    if program is None or driver is None:
        pytest.skip("there is no chromium with its chromedriver here")
    options = drivers.ChromeOptions()
    options.binary_location = program
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = drivers.ChromeService(driver, log_output=subprocess.DEVNULL)
    browser = drivers.Chrome(options=options, service=service)
    yield browser
    browser.quit()


class Visitor:
    """Somebody before the page, with keyboard and eyes."""

    def __init__(self, browser, url: str) -> None:
        self.browser = browser
        browser.get(url)
        self.until("return document.getElementById('which').textContent === 'scripted'")

    def js(self, script: str, *given):
        return self.browser.execute_script(script, *given)

    def until(self, script: str, *given, seconds: float = 10.0) -> None:
        ends = time.monotonic() + seconds
        while not self.js(script, *given):
            assert time.monotonic() < ends, f"never came: {script}"
            time.sleep(0.02)

    def keys(self, *pressed: str) -> None:
        from selenium.webdriver import ActionChains

        ActionChains(self.browser).send_keys(*pressed).perform()

    def tab_to(self, name: str) -> None:
        """Go by the Tab key alone to the element of an id, and see where one is."""
        from selenium.webdriver import Keys

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
        from selenium.webdriver import Keys

        self.js("document.getElementById('message').focus()")
        self.keys(text, Keys.ENTER)

    def ended(self) -> None:
        self.until("return document.getElementById('send').offsetParent !== null")
        # figures are drawn with the next frame
        self.browser.execute_async_script("requestAnimationFrame(() => setTimeout(arguments[0]))")

    def ask(self, text: str) -> None:
        self.send(text)
        self.until("return document.querySelector('.answer') !== null")
        self.ended()

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

    def size(self, width: int, height: int) -> None:
        self.browser.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False},
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


@pytest.fixture
def api():
    with ScriptedAPI() as server:
        server.steps = list(STEPS)
        yield server


@pytest.fixture
def visitor(chromium, api):
    guest = Visitor(chromium, api.url)
    guest.size(1200, 800)
    yield guest
    guest.emulate()
    loud = [e["message"] for e in chromium.get_log("browser") if e["level"] == "SEVERE"]
    expected = ("the server responded with a status of", "net::ERR_CONNECTION_REFUSED")
    assert not [line for line in loud if not any(e in line for e in expected)]


@pytest.mark.slow
def test_an_answer_is_written_and_each_token_shows_where_it_came_from(visitor, api):
    visitor.ask("What stood there?")
    assert visitor.text(".answer .text") == TEXT
    assert visitor.texts(".answer .guessed") == ["stood", "on", "the", "and", "its"]
    assert visitor.texts(".answer .corrected") == ["cliff", "turned"]
    assert visitor.texts(".answer .own") == ["light"]
    kinds = [".answer .guessed", ".answer .corrected", ".answer .own"]
    assert len({visitor.style(kind, "color") for kind in kinds}) == 3
    lines = [visitor.style(kind, "textDecorationStyle") for kind in kinds[:2]]
    assert lines == ["dotted", "double"]
    assert visitor.style(kinds[2], "textDecorationLine") == "none"
    path, body, headers = api.asked[0]
    assert path == "/v1/chat/completions" and "authorization" not in headers
    assert body["messages"] == [{"role": "user", "content": "What stood there?"}]
    assert body["model"] == "scripted" and body["include_speculation"] is True
    assert "speculation" not in body

    visitor.click("marks")
    assert len({visitor.style(kind, "color") for kind in kinds}) == 1
    assert {visitor.style(kind, "textDecorationLine") for kind in kinds} == {"none"}


@pytest.mark.slow
def test_the_figures_are_those_of_the_steps(visitor, api):
    api.pause = 0.05
    visitor.ask("go on")
    assert visitor.text("#length").startswith("2.67"), "8 tokens in 3 steps"
    assert visitor.text("#acceptance") == "63 %", "5 of 8 guesses"
    told = float(visitor.text("#speed").split()[0])
    assert 8 < told < 45, "4 tokens in two pauses after the first step"
    assert visitor.text("#first").endswith("ms")
    assert "Estimated by the server: 1.75" in visitor.text("#saves")
    assert "1 to 4 tokens, 2.67 on average" in visitor.js(
        "return document.getElementById('spark').getAttribute('aria-label')"
    )


@pytest.mark.slow
def test_a_chat_of_several_turns_goes_along_and_a_new_one_forgets(visitor, api):
    visitor.ask("one")
    visitor.ask("two")
    assert [m["content"] for m in api.asked[1][1]["messages"]] == ["one", TEXT, "two"]
    visitor.click("fresh")
    assert visitor.texts(".answer") == []
    visitor.ask("three")
    assert len(api.asked[2][1]["messages"]) == 1


@pytest.mark.slow
def test_shift_and_enter_start_a_line_and_nothing_is_sent_empty(visitor, api):
    from selenium.webdriver import ActionChains, Keys

    visitor.send("   ")
    assert api.asked == []
    visitor.js("document.getElementById('message').value = ''")
    visitor.keys("a")
    chain = ActionChains(visitor.browser)
    chain.key_down(Keys.SHIFT).send_keys(Keys.ENTER).key_up(Keys.SHIFT).perform()
    visitor.ask("b")
    assert api.asked[0][1]["messages"][0]["content"] == "a\nb"


@pytest.mark.slow
@pytest.mark.parametrize("way", ["button", "escape"])
def test_an_answer_that_is_stopped_keeps_what_is_there(visitor, api, way):
    from selenium.webdriver import Keys

    api.steps, api.pause = STEPS[:1] * 200, 0.05
    visitor.send("go on")
    visitor.until("return document.querySelectorAll('.answer .t').length > 8")
    visitor.click("stop") if way == "button" else visitor.keys(Keys.ESCAPE)
    visitor.ended()
    assert api.left.wait(5), "the server never saw that the client went away"
    assert "stopped by you" in visitor.text(".foot")
    kept = visitor.text(".answer .text")
    assert kept.startswith(" stood on the cliff")
    assert visitor.js("return document.activeElement.id") == "message"
    api.steps, api.pause = STEPS, 0.0
    visitor.ask("and then?")
    assert api.asked[-1][1]["messages"][1] == {"role": "assistant", "content": kept}


@pytest.mark.slow
def test_speculation_is_switched_off_and_what_it_saves_is_measured(visitor, api):
    api.pause = 0.05
    visitor.ask("with")
    assert "switch it off" in visitor.text("#saves")
    visitor.click("speculate")
    assert visitor.js("return document.getElementById('speculate').ariaChecked") == "false"
    visitor.ask("without")
    assert api.asked[1][1]["speculation"] is False
    assert visitor.texts(".answer:last-child .guessed") == []
    assert visitor.text(".answer:last-child .text") == TEXT
    found = re.search(r"Measured in this chat: ([\d.]+)×", visitor.text("#saves"))
    assert found and 1.2 < float(found[1]) < 3.5, "2 tokens a step against 1"


@pytest.mark.slow
def test_the_draft_of_each_step_is_drawn_with_what_was_accepted(visitor):
    visitor.ask("go on")
    nodes = "return [...document.querySelectorAll('#tree g')].map((g) => g.className.baseVal"
    nodes += " + ':' + g.querySelector('text').textContent)"
    assert visitor.js(nodes) == ["root:·light", "fixed:·turned", ":·shone"], "the last step"
    assert visitor.text("#tree-told") == "1 guess, 0 accepted. The target corrected what came next to “·turned”."
    visitor.js("document.getElementById('step').focus()")
    from selenium.webdriver import Keys

    visitor.keys(Keys.HOME)
    visitor.until("return document.querySelectorAll('#tree .kept').length > 3")
    first = visitor.js(nodes)
    assert first[1:4] == ["kept:·stood", "kept:·on", "kept:·the"]
    assert sorted(first[4:]) == [":·hill", ":·rock", "fixed:·cliff"]
    assert "·hill  not used" in visitor.text("#outline-text")
    assert visitor.texts(".answer .looked") == ["stood", "on", "the", "cliff"]


@pytest.mark.slow
@pytest.mark.parametrize("width", [400, 1200])
def test_a_tree_of_sixty_four_nodes_stays_readable(visitor, api, width):
    """Nothing outside the drawing, no node on another, no letters smaller than they were."""
    tokens = ["root"] + [f" word{n}" for n in range(63)]
    parents = [-1] + [n if n < 24 else (n * 7) % 24 for n in range(63)]
    tree = {"tokens": tokens, "parents": parents, "accepted": [1, 2, 3]}
    one = step([" word0", " word1", " word2"], " other", ("x",))
    api.steps = [{**one, "drafted": 63, "tree": tree}]
    visitor.size(width, 800)
    visitor.ask("go on")
    if width == 400:
        visitor.click("open-more")
        visitor.until("return document.querySelectorAll('#tree g').length > 0")
    boxes = visitor.js(
        "const svg = document.getElementById('tree').getBoundingClientRect();"
        "return [...document.querySelectorAll('#tree g > rect:first-of-type')].map((one) => {"
        " const box = one.getBoundingClientRect();"
        " return [box.left - svg.left, box.right - svg.left, box.top - svg.top,"
        "  box.bottom - svg.top, svg.width, svg.height]; })"
    )
    assert len(boxes) == 65
    for left, right, top, bottom, wide, high in boxes:
        assert left >= -0.5 and right <= wide + 0.5 and top >= -0.5 and bottom <= high + 0.5
        assert bottom - top > 17
    for number, one in enumerate(boxes):
        for other in boxes[:number]:
            apart = one[1] <= other[0] or other[1] <= one[0]
            assert apart or one[3] <= other[2] or other[3] <= one[2], (one, other)
    assert visitor.overflow() <= 0


@pytest.mark.slow
def test_everything_is_reached_by_keyboard_alone(visitor, api):
    from selenium.webdriver import Keys

    visitor.tab_to("open-settings")
    visitor.keys(Keys.ENTER)
    assert visitor.js("return document.getElementById('settings').open")
    visitor.tab_to("system")
    visitor.keys("Be brief.")
    visitor.tab_to("key")
    visitor.keys("secret", Keys.ENTER)
    assert not visitor.js("return document.getElementById('settings').open")
    visitor.tab_to("speculate")
    visitor.keys(Keys.SPACE)
    visitor.tab_to("message")
    visitor.keys("hello", Keys.ENTER)
    visitor.until("return document.querySelector('.answer') !== null")
    visitor.ended()
    _, body, headers = api.asked[0]
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert body["speculation"] is False and headers["authorization"] == "Bearer secret"
    for name in ("marks", "theme", "fresh", "step"):
        visitor.tab_to(name)
    stored = visitor.js("return JSON.stringify([localStorage, sessionStorage, document.cookie])")
    assert "secret" not in stored


@pytest.mark.slow
def test_an_answer_is_read_out_by_sentences_and_not_by_tokens(visitor, api):
    api.steps = [step([f" word{n}"], "." if n % 5 == 4 else ",") for n in range(40)]
    visitor.ask("go on")
    said = visitor.texts("#said p")
    assert 1 <= len(said) <= 3 and said[-1].endswith("Answer complete.")
    whole = "".join(token["text"] for one in api.steps for token in one["tokens"])
    assert whole.replace(" ", "") in "".join(said).replace(" ", "")


@pytest.mark.slow
@pytest.mark.parametrize("system", ["light", "dark"])
def test_dark_and_light_follow_the_system_and_the_button(visitor, system):
    visitor.emulate(prefers_color_scheme=system)
    visitor.ask("go on")

    def contrast(selector: str) -> float:
        colours = [visitor.style(selector, "color"), visitor.style("html", "backgroundColor")]
        one, other = sorted(map(brightness, colours))
        return (other + 0.05) / (one + 0.05)

    dark = brightness(visitor.style("html", "backgroundColor")) < 0.2
    assert dark == (system == "dark")
    for _ in range(2):
        for kind in (".answer .guessed", ".answer .corrected", ".answer .own", "#hint", "dt"):
            assert contrast(kind) >= 4.5, kind
        visitor.click("theme")
        now = brightness(visitor.style("html", "backgroundColor")) < 0.2
        assert now != dark
        dark = now


def brightness(colour: str) -> float:
    """The relative luminance of a computed colour."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.slow
def test_more_contrast_and_less_motion_are_given_to_those_who_want_them(visitor, api):
    api.pause = 0.3
    visitor.emulate(prefers_contrast="more", prefers_reduced_motion="reduce")
    visitor.send("go on")
    visitor.until("return document.querySelector('.answer .corrected') !== null")
    blink = "return getComputedStyle(document.querySelector('.running .text'), '::after')"
    assert visitor.js(f"{blink}.animationName") == "none"
    assert visitor.style(".answer .guessed", "textDecorationThickness") == "3px"
    assert visitor.style("html", "backgroundColor") in ("rgb(255, 255, 255)", "rgb(0, 0, 0)")
    visitor.ended()


@pytest.mark.slow
@pytest.mark.parametrize("width", [320, 400, 768, 1600])
def test_nothing_scrolls_sideways(visitor, api, width):
    visitor.size(width, 800)
    assert visitor.overflow() <= 0
    long = "x" * 300
    api.steps = [*STEPS, step([long], " https://" + "y" * 200)]
    visitor.ask(f"{long} long words")
    if width < 900:
        visitor.click("open-more")
    visitor.ended()
    assert visitor.overflow() <= 0
    visitor.click("open-settings")
    assert visitor.overflow() <= 0
    inside = visitor.js(
        "const box = document.getElementById('settings').getBoundingClientRect();"
        "return box.left >= 0 && box.right <= innerWidth && box.bottom <= innerHeight"
    )
    assert inside


@pytest.mark.slow
@pytest.mark.parametrize(
    "status, told, words, advice",
    [
        (401, "wrong key", "asks for an API key", "Enter it in the settings"),
        (429, "queue full", "too much to do", "then send again"),
        (400, "context is 2048 tokens", "could not take this message", "start a new chat"),
        (413, "4 MiB at most", "too much text", "Shorten"),
        (503, "stopping", "takes no messages", "send again"),
        (500, "error ab12", "failed (status 500)", "log"),
    ],
)
def test_a_refusal_is_told_in_plain_words_and_loses_nothing(
    visitor, api, status, told, words, advice
):
    api.refusal = (status, told)
    visitor.send("precious <b>words</b>")
    visitor.until("return document.querySelector('.notice.wrong') !== null")
    notice = visitor.text(".notice.wrong")
    assert words in notice and advice in notice and f"The server says: {told}" in notice
    assert visitor.js("return document.getElementById('message').value") == "precious <b>words</b>"
    assert visitor.texts(".answer") == [] and visitor.texts(".you") == []
    api.refusal = None
    visitor.js("document.getElementById('message').value = ''")
    visitor.ask("again")
    assert visitor.texts(".notice.wrong") == [] and visitor.text(".answer .text") == TEXT


@pytest.mark.slow
def test_a_server_that_is_gone_and_a_stream_that_breaks_off_are_told(visitor, api):
    api.breaks_off = True
    visitor.ask("go on")
    assert "broke off" in visitor.text(".notice.wrong")
    assert visitor.text(".answer .text") == TEXT, "what has come stays"
    api.shutdown()
    api.server_close()
    visitor.send("still there?")
    visitor.until("return document.body.textContent.includes('cannot be reached')")
    visitor.ended()
    api.breaks_off = False


@pytest.mark.slow
def test_a_model_without_a_chat_template_continues_text(visitor, api):
    api.templates = False
    visitor.ask("Once upon")
    assert "knows no chat" in visitor.text(".notice")
    visitor.ask("And")
    assert [path for path, _, _ in api.asked[1:]] == ["/v1/completions"] * 2
    assert api.asked[1][1]["prompt"] == "Once upon"
    assert api.asked[2][1]["prompt"] == f"Once upon{TEXT}\nAnd"
    assert visitor.texts(".answer:last-child .corrected") == ["cliff", "turned"]


@pytest.mark.slow
@pytest.mark.parametrize("where", ["header", "chunk"])
def test_a_lossy_method_is_told(visitor, api, where):
    if where == "header":
        api.headers = {"x-foretoken-lossy": "typical acceptance"}
    else:
        api.steps = [{**STEPS[0], "lossy": "typical acceptance"}]
    visitor.ask("go on")
    assert "lossy" in visitor.text(".notice") and "typical acceptance" in visitor.text(".notice")


@pytest.mark.slow
def test_html_of_a_model_stays_text(visitor, api):
    evil = [
        "<img src=x onerror=document.title='owned'>",
        "<script>document.title='owned'</scr" + "ipt>",
        "</div><style>*{display:none}</style>",
    ]
    api.steps = [step(evil[:1], evil[1], (evil[2],), evil[0]), step([evil[2]], "&amp;")]
    visitor.ask(evil[0])
    visitor.js("document.getElementById('step').focus()")
    from selenium.webdriver import Keys

    visitor.keys(Keys.HOME)
    visitor.until("return document.querySelectorAll('#tree g').length > 3")
    assert visitor.text(".answer .text") == "".join(evil) + "&amp;"
    assert visitor.text(".you p") == evil[0]
    assert visitor.js("return document.querySelectorAll('img, body script + script').length") == 0
    assert visitor.js("return document.title") == "foretoken"


@pytest.mark.slow
def test_text_that_lags_behind_its_tokens_keeps_every_letter(visitor):
    """Half characters and held-back stop texts: pieces of text and of tokens need not match."""
    ran = visitor.js(
        "const waiting = [['a', 'guessed'], ['\\ufffd', 'guessed'], ['\\ufffd', 'own'],"
        " [' end', 'corrected'], ['ing', 'own']]"
        " .map(([left, kind]) => ({ left, kind }));"
        "return ['a', 'é en', 'd', 'ing', '!'].flatMap((text) => attribute(waiting, text))"
        " .map(([text, token]) => [text, token?.kind ?? null])"
    )
    assert "".join(text for text, _ in ran) == "aé ending!"
    assert ran[0] == ["a", "guessed"] and ran[-1] == ["!", None]
    assert ran[1][1] == "guessed" and ["ing", "own"] in ran
