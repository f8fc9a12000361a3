"""The page in a headless browser, before a server whose answers are written beforehand.

Where there is no browser these checks are left out, and say so.
"""

import re

import pytest

pytest.importorskip("selenium", reason="the extra `browser` is not installed")

from scripted_api import ScriptedAPI, step
from selenium.webdriver import ActionChains, Keys
from visitor import Visitor, brightness, headless

pytestmark = pytest.mark.slow
STEPS = [
    step([" stood", " on", " the"], " cliff", (" hill", " rock"), "The lighthouse"),
    step([" and", " its"], " light", (), " cliff"),
    step([], " turned", (" shone",), " light"),
]
TEXT = " stood on the cliff and its light turned"


@pytest.fixture(scope="module")
def chromium():
    """A headless browser, where there is one."""
    with headless() as browser:
        yield browser


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
    assert guest.complaints() == []


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


def test_a_chat_of_several_turns_goes_along_and_a_new_one_forgets(visitor, api):
    visitor.ask("one")
    visitor.ask("two")
    assert [m["content"] for m in api.asked[1][1]["messages"]] == ["one", TEXT, "two"]
    visitor.click("fresh")
    assert visitor.texts(".answer") == []
    visitor.ask("three")
    assert len(api.asked[2][1]["messages"]) == 1


def test_shift_and_enter_start_a_line_and_nothing_is_sent_empty(visitor, api):
    visitor.send("   ")
    assert api.asked == []
    visitor.js("document.getElementById('message').value = ''")
    visitor.keys("a")
    chain = ActionChains(visitor.browser)
    chain.key_down(Keys.SHIFT).send_keys(Keys.ENTER).key_up(Keys.SHIFT).perform()
    visitor.ask("b")
    assert api.asked[0][1]["messages"][0]["content"] == "a\nb"


@pytest.mark.parametrize("way", ["button", "escape"])
def test_an_answer_that_is_stopped_keeps_what_is_there(visitor, api, way):
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
    found = re.search(r"Measured in this chat: ([\d.]+)\u00d7", visitor.text("#saves"))
    assert found and 1.2 < float(found[1]) < 3.5, "2 tokens a step against 1"


def test_the_draft_of_each_step_is_drawn_with_what_was_accepted(visitor):
    visitor.ask("go on")
    nodes = "return [...document.querySelectorAll('#tree g')].map((g) => g.className.baseVal"
    nodes += " + ':' + g.querySelector('text').textContent)"
    assert visitor.js(nodes) == ["root:·light", "fixed:·turned", ":·shone"], "the last step"
    assert (
        visitor.text("#tree-told")
        == "1 guess, 0 accepted. The target corrected what came next to “·turned”."
    )
    visitor.js("document.getElementById('step').focus()")
    visitor.keys(Keys.HOME)
    visitor.until("return document.querySelectorAll('#tree .kept').length > 3")
    first = visitor.js(nodes)
    assert first[1:4] == ["kept:·stood", "kept:·on", "kept:·the"]
    assert sorted(first[4:]) == [":·hill", ":·rock", "fixed:·cliff"]
    assert "·hill  not used" in visitor.text("#outline-text")
    assert visitor.texts(".answer .looked") == ["stood", "on", "the", "cliff"]


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


def test_everything_is_reached_by_keyboard_alone(visitor, api):
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


def test_an_answer_is_read_out_by_sentences_and_not_by_tokens(visitor, api):
    api.steps = [step([f" word{n}"], "." if n % 5 == 4 else ",") for n in range(40)]
    visitor.ask("go on")
    said = visitor.texts("#said p")
    assert 1 <= len(said) <= 3 and said[-1].endswith("Answer complete.")
    whole = "".join(token["text"] for one in api.steps for token in one["tokens"])
    assert whole.replace(" ", "") in "".join(said).replace(" ", "")


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


@pytest.mark.parametrize("width", [320, 400, 768, 1600])
def test_nothing_scrolls_sideways_nor_the_page_as_a_whole(visitor, api, width):
    visitor.size(width, 800)
    assert visitor.overflow() <= 0
    long = "x" * 300
    api.steps = [*STEPS, step([long], " https://" + "y" * 200)]
    visitor.ask(f"{long} long words")
    if width < 900:
        visitor.click("open-more")
    for _ in range(3):
        visitor.ask("and on")
    assert visitor.overflow() <= 0 and visitor.leftover() <= 0
    visitor.click("open-settings")
    assert visitor.overflow() <= 0
    inside = visitor.js(
        "const box = document.getElementById('settings').getBoundingClientRect();"
        "return box.left >= 0 && box.right <= innerWidth && box.bottom <= innerHeight"
    )
    assert inside


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


def test_a_message_that_failed_comes_before_the_next_one_that_is_typed(visitor, api):
    api.refusal, api.pause = (503, "stopping"), 1.0
    visitor.send("first")
    visitor.keys("next")
    visitor.until("return document.querySelector('.notice.wrong') !== null")
    assert visitor.js("return document.getElementById('message').value") == "first\nnext"


@pytest.mark.parametrize("names", [["scripted"], []])
def test_a_page_that_was_there_before_its_server_asks_for_the_model_later(visitor, api, names):
    api.refusal = (503, "not yet")
    visitor.browser.refresh()
    visitor.until("return document.querySelector('.notice.wrong') !== null")
    assert visitor.text("#which") == "no model yet"
    api.refusal, api.names = None, names
    visitor.ask("go on")
    assert visitor.text(".answer .text") == TEXT and visitor.texts(".notice.wrong") == []
    assert api.asked[0][1].get("model", "") == visitor.text("#which") == "".join(names)


def test_a_key_that_cannot_be_sent_is_told_as_that(visitor, api):
    visitor.js("document.getElementById('key').value = '鍵'")
    visitor.send("hello")
    visitor.until("return document.querySelector('.notice.wrong') !== null")
    assert "no key can have" in visitor.text(".notice.wrong") and api.asked == []
    assert visitor.js("return document.getElementById('message').value") == "hello"


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


def test_a_model_without_a_chat_template_continues_text(visitor, api):
    api.templates = False
    visitor.ask("Once upon")
    assert "knows no chat" in visitor.text(".notice")
    visitor.ask("And")
    assert [path for path, _, _ in api.asked[1:]] == ["/v1/completions"] * 2
    assert api.asked[1][1]["prompt"] == "Once upon"
    assert api.asked[2][1]["prompt"] == f"Once upon{TEXT}\nAnd"
    assert visitor.texts(".answer:last-child .corrected") == ["cliff", "turned"]


@pytest.mark.parametrize("where", ["header", "chunk"])
def test_a_lossy_method_is_told(visitor, api, where):
    if where == "header":
        api.headers = {"x-foretoken-lossy": "typical acceptance"}
    else:
        api.steps = [{**STEPS[0], "lossy": "typical acceptance"}]
    visitor.ask("go on")
    assert "lossy" in visitor.text(".notice") and "typical acceptance" in visitor.text(".notice")


def test_html_of_a_model_stays_text(visitor, api):
    evil = [
        "<img src=x onerror=document.title='owned'>",
        "<script>document.title='owned'</scr" + "ipt>",
        "</div><style>*{display:none}</style>",
    ]
    api.steps = [step(evil[:1], evil[1], (evil[2],), evil[0]), step([evil[2]], "&amp;")]
    visitor.ask(evil[0])
    visitor.js("document.getElementById('step').focus()")
    visitor.keys(Keys.HOME)
    visitor.until("return document.querySelectorAll('#tree g').length > 3")
    assert visitor.text(".answer .text") == "".join(evil) + "&amp;"
    assert visitor.text(".you p") == evil[0]
    assert visitor.js("return document.querySelectorAll('img, body script + script').length") == 0
    assert visitor.js("return document.title") == "foretoken"


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
