"""The page of the server: one small file that needs nothing else, safe and labelled."""

import re
from html.parser import HTMLParser

import pytest
from scripted_api import PAGE

NAMESPACES = {"http://www.w3.org/2000/svg"}  # names that are never fetched


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


def test_keys_that_end_the_input_of_a_character_send_and_stop_nothing(source):
    """Enter takes a suggestion, Escape drops it; Safari says so by the key's code alone."""
    assert "event.isComposing || event.keyCode === 229" in source
    lines = re.findall(r"if \(event\.key [!=]== \"(?:Enter|Escape)\".*", source)
    assert len(lines) == 2 and all("composes(event)" in line for line in lines)
