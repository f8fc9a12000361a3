"""Prompts that begin alike and are there at once are read once, and their texts stay the same."""

import pytest

import foretoken
from foretoken.audit.fixtures import random_head
from foretoken.coins import SeededCoins
from foretoken.engine.alike import Alike
from foretoken.errors import ConfigError
from foretoken.lm.views.view import innermost
from foretoken.row import make_row
from foretoken.types import SamplingParams

LONG = [(7 * i * i + 3 * i) % 200 for i in range(120)]
OTHER = [(5 * i * i + i) % 200 for i in range(90)]


@pytest.fixture
def opened(tiny_pair, byte_tokenizer):
    """Sessions that keep what they have read."""
    made = []

    def load(method, **options):
        target, draft = tiny_pair
        session = foretoken.load(
            target, method, draft if method == "chain" else None, tokenizer=byte_tokenizer,
            kernels="dense", **options,
        )  # fmt: skip
        made.append(session)
        return session

    yield load
    for session in made:
        session.close()


def fed_by(session):
    """Prompt tokens that each of the session's steps fed its target with."""
    base, fed = innermost(session.target), []
    fill = base._fill

    def counting(rows, *rest):
        before = sum(base.missing(row) for row in rows)
        found = fill(rows, *rest)
        if count := before - sum(base.missing(row) for row in rows):
            fed.append(count)
        return found

    base._fill = counting
    return fed


@pytest.mark.parametrize("method", ["plain", "chain", "eagle3"])
def test_several_texts_of_a_prompt_read_it_once(opened, byte_tokenizer, method):
    head = {}
    if method == "eagle3":
        head = {"draft_head": random_head("eagle3", len(byte_tokenizer), 64), "depth": 3}
    session = opened(method, **head)
    options = {"max_new_tokens": 12, "temperature": 1.0, "seed": 5}
    alone = [one.tokens for one in session.generate([LONG] * 4, **options)]
    session.keep_prefixes(1 << 24)
    fed = fed_by(session)
    rows = session.rows([LONG] * 4, **options)
    together = session.write(rows)
    assert [one.tokens for one in together] == alone
    assert sum(fed) == len(LONG) - 1
    assert sorted(row.reused.get("target", 0) for row in rows) == [0] + 3 * [len(LONG) - 1]


def test_other_prompts_do_not_wait(opened):
    """Those that share less than half are read beside the first."""
    session = opened("plain")
    session.keep_prefixes(1 << 24)
    fed = fed_by(session)
    prompts = [LONG, OTHER, LONG[:20] + OTHER, LONG + [3] * 30]
    session.generate(prompts, max_new_tokens=4, temperature=0.0)
    assert fed[0] == sum(len(prompt) - 1 for prompt in prompts[:3])
    assert sum(fed) == fed[0] + 30, "what the last one has of its own"


def test_who_waits_for_a_prompt_that_is_given_up_is_read_itself(opened):
    session = opened("plain")
    [alone] = session.generate([LONG], max_new_tokens=6, temperature=0.0)
    session.keep_prefixes(1 << 24)
    first, second = session.rows([LONG, LONG], max_new_tokens=6, temperature=0.0)
    for row in (first, second):
        session.engine.submit(row)
    prefill = session.target.prefill

    def given_up(rows, *rest, **options):
        first.finish = first.finish or session.engine.cancel(first) or first.finish
        return prefill(rows, *rest, **options)

    session.target.prefill = given_up
    while not session.engine.idle:
        session.engine.step()
        session.target.prefill = prefill
    assert first.finish.reason == "cancelled" and second.new_tokens == alone.tokens
    assert not session.engine.alike.behind


def test_who_waits_is_told_by_what_is_shared():
    alike, texts = Alike(), (LONG, LONG, LONG[:60] + OTHER[:59], LONG[:40] + OTHER)
    first, copy, half, less = (
        make_row(list(tokens), SamplingParams(), SeededCoins(0), 200) for tokens in texts
    )
    for one in (copy, half, less):
        alike.add(one, [first])
    assert alike.parted([first, copy, half, less]) == ([first, less], [copy, half])
    assert alike.parted([copy, half]) == ([copy, half], []), "the first has left"
    assert alike.awaited(first) and not alike.awaited(first)
    assert alike.parted([first, copy]) == ([first, copy], [])


def test_a_short_prompt_does_not_wait_for_much_that_is_not_its_own():
    alike = Alike()
    long, short = (
        make_row(tokens, SamplingParams(), SeededCoins(0), 200)
        for tokens in (LONG + OTHER + OTHER, LONG[:60])
    )
    alike.add(short, [long])
    assert alike.parted([long, short]) == ([long, short], [])


def test_what_is_kept_already_is_not_waited_for(opened):
    session = opened("plain")
    session.keep_prefixes(1 << 24)
    session.generate(LONG, max_new_tokens=4, temperature=0.0)
    fed = fed_by(session)
    session.generate([LONG + OTHER[:20], LONG + OTHER[:10]], max_new_tokens=4, temperature=0.0)
    assert len(fed) == 1, "both go on behind it at once"


def test_several_texts_of_a_prompt_are_kept_once(opened):
    """Or sixteen of them would push out what is kept of everybody else."""
    session = opened("plain")
    session.keep_prefixes(1 << 24)
    session.generate([LONG] * 6, max_new_tokens=8, temperature=1.0, seed=1)
    assert len(innermost(session.target).prefixes) == 1
    session.generate(OTHER, max_new_tokens=8)
    assert len(innermost(session.target).prefixes) == 2


def test_realigned_rows_are_read_each_by_itself(opened):
    session = opened("chain")
    [alone] = session.generate([LONG], max_new_tokens=8, temperature=0.0)
    session.keep_prefixes(1 << 24)
    padded = session.using("eqspec")
    found = padded.generate([LONG, LONG], max_new_tokens=8, temperature=0.0)
    assert [one.tokens for one in found] == [alone.tokens] * 2


def test_texts_of_two_owners_do_not_wait_for_each_other():
    rows = [make_row(list(LONG), SamplingParams(), SeededCoins(0), 200) for _ in range(3)]
    rows[1].owner = "b"
    alike = Alike()
    for row in rows[1:]:
        alike.add(row, rows[:1])
    assert alike.parted(rows) == ([rows[0], rows[1]], [rows[2]])


@pytest.mark.parametrize("limit", [-1, 1.5, True, "many", None])
def test_what_to_keep_is_a_number_of_bytes(opened, limit):
    session = opened("plain")
    session.keep_prefixes("1MiB")
    assert innermost(session.target).prefixes.asked == 1048576
    with pytest.raises(ConfigError, match="keep_prefixes"):
        session.keep_prefixes(limit)
    assert innermost(session.target).prefixes.asked == 1048576
