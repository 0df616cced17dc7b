"""The page at `/` in a real browser: with real keys and a real mouse, at three widths, in light and dark."""

import re
import shutil
from dataclasses import replace

import httpx
import pytest
from support.live_server import running
from support.served_page import CONTRASTS, LINES, NAMELESS, OUTSIDE, Page, readable, wait

from tarnn.serving.engine import Engine
from tarnn.serving.http.app import create_app
from tarnn.serving.http.settings import ServerSettings
from tarnn.serving.model import open_served
from tarnn.serving.store import StateStore

WIDTHS = [(360, 740), (768, 1024), (1400, 900)]
PROMPT = "the cat sat on "
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
KEY = "open-sesame-1234"


@pytest.fixture(scope="module")
def engine(served):
    model = replace(served("endless"), name="linear")  # as the server calls it
    with Engine(model, store=StateStore(model)) as engine:
        yield engine


@pytest.fixture
def page(browser, address):
    browser.look(1400, 900)
    opened = Page(browser, address)
    opened.put(seed=7, max_tokens=24)
    yield opened
    assert all(url.startswith((address, "data:")) for url in browser.requests())
    assert not browser.complaints()


def test_a_text_goes_on_as_the_api_writes_it(page, http):
    page.send(PROMPT)
    page.send()
    first, second = page.answers
    how = {"max_output_tokens": 24, "seed": 7}
    one = http.post("/v1/responses", json={"input": PROMPT, **how}).json()
    two = http.post("/v1/responses", json={"previous_response_id": one["id"], **how}).json()
    assert [first, second] == [readable(x["output"][0]["content"][0]["text"]) for x in (one, two)]


def test_the_state_stands_beside_what_a_cache_would_hold(page, http):
    model = http.get("/v1/models").json()["data"][0]
    page.send(PROMPT)
    tokens = int(page.text("length"))
    assert tokens == len(PROMPT) + 24
    state, cache = model["state_bytes"], tokens * model["cache_bytes_per_token"]
    for name, size in (("state-bytes", state), ("cache-bytes", cache)):
        number, unit = page.text(name).split()
        assert float(number) * {"bytes": 1, "KB": 1e3, "MB": 1e6}[unit] == pytest.approx(size, rel=6e-3)
    assert re.fullmatch(r"[\d,]+", page.text("speed"))
    assert page.facts[0].startswith("24 tokens, ")
    widths = page.browser.run("return ['state-bar', 'cache-bar'].map(x => document.getElementById(x).style.width)")
    parts = [float(x.removesuffix("%")) / 100 for x in widths]
    assert parts == pytest.approx([state / max(state, cache), cache / max(state, cache)], abs=1e-5)


def test_undo_goes_back_and_the_same_seed_writes_the_same(page):
    page.send(PROMPT)
    page.send("and then ")
    before = page.answers
    page.click("Undo from here: answer 2")
    assert page.answers == before[:1]
    assert page.ask("text.value") == "and then "
    page.browser.press("enter")
    page.rest()
    assert page.answers == before
    page.click("Undo from here: message 1 of yours")
    assert page.answers == []
    assert page.ask("text.value") == PROMPT


def test_forks_share_a_beginning_and_part(page):
    page.send(PROMPT)
    page.send("one ")
    page.click("Fork after this: answer 1")
    assert len(page.answers) == 1
    page.send("two ")
    other = page.answers
    assert "already in the state" in page.facts[1]
    page.click("Fork 1,")
    mine = page.answers
    assert mine[0] == other[0]
    assert mine[1] != other[1]
    page.click("Fork before this: message 2 of yours")
    assert page.ask("text.value") == "one "
    page.browser.press("enter")
    page.rest()
    assert page.answers == mine
    assert page.browser.run("return [...document.querySelectorAll('#branches button')].map(x => x.textContent)") == [
        "Fork 1",
        "Fork 2",
        "Fork 3",
    ]


def test_an_empty_page_says_what_the_model_is(page, http):
    """Its name and sizes, and a beginning to click on: the text then goes on from it."""
    model = http.get("/v1/models").json()["data"][0]
    said = page.browser.run("return document.querySelector('.welcome').textContent")
    assert model["id"] in said
    assert f"{model['parameters']:,} parameters" in said
    assert page.text("state-bytes") in said
    page.click("Try: Once upon a time")
    page.rest()
    assert page.asked == ["Once upon a time"]
    assert len(page.answers) == 1
    assert not page.browser.run("return !!document.querySelector('.welcome')")


def test_a_conversation_survives_a_reload(page):
    """With its forks in the same tab; by its address alone in another one, where the server tells the conversation."""
    page.send(PROMPT)
    page.send("one ")
    page.click("Fork after this: answer 1")
    page.send("two ")
    seen, facts = (page.asked, page.answers), page.facts
    length = page.text("length")
    page.open(page.browser.run("return location.href"))
    assert ((page.asked, page.answers), page.facts, page.text("length")) == (seen, facts, length)
    page.click("Fork 1,")
    assert page.asked == [PROMPT, "one "]
    page.click("Fork 2,")
    address = page.browser.run("return location.href")
    page.browser.open("about:blank")
    page.open(address)
    assert ((page.asked, page.answers), page.text("length")) == (seen, length)
    assert page.browser.run("return document.getElementById('branches').hidden")
    page.put(seed=7, max_tokens=24)
    page.send("three ")
    assert "already in the state" in page.facts[2]


def test_a_stopped_answer_is_a_part_of_what_is_opened_again(page, http):
    """The page sends what the server does not hold as metadata, in pieces."""
    pieces = {"page0": '[{"asked":"the cat ","answer":"sat"},', "page1": '{"asked":" on "}]'}
    body = {"input": "the cat sat on ", "max_output_tokens": 24, "metadata": pieces}
    response = http.post("/v1/responses", json=body).json()
    page.browser.open("about:blank")
    page.open(f"{page.address}/#{response['id']}")
    assert page.asked == ["the cat ", " on "]
    assert page.answers == ["sat", readable(response["output"][0]["content"][0]["text"])]
    assert page.facts[0] == "Stopped."


def test_an_address_of_no_response_is_the_servers_own_sentence(page, http):
    sentence = http.get("/v1/responses/resp_none").json()["error"]["message"]
    page.browser.open(f"{page.address}/#resp_none")
    assert wait(lambda: page.text("alert")) == sentence
    assert page.answers == []
    assert "404" in "".join(page.browser.complaints())


def test_what_was_not_sent_from_the_page_is_said_to_be_unknown(page, http):
    one = http.post("/v1/responses", json={"input": PROMPT, "seed": 7, "max_output_tokens": 24}).json()
    page.browser.open(f"{page.address}/#{one['id']}")
    assert wait(lambda: page.answers) == [readable(one["output"][0]["content"][0]["text"])]
    assert "was not sent from this page" in page.asked[0]


def test_a_new_text_begins_empty_and_the_way_back_leads_to_the_old_one(page):
    page.send(PROMPT)
    before = page.answers
    page.click("New text")
    assert page.answers == []
    assert page.text("length") == "0"
    page.browser.run("history.back()")
    wait(lambda: page.answers == before)


def test_copies_are_what_is_read(page):
    page.browser.run("navigator.clipboard.writeText = async text => { window.copied = text; }")
    page.send(PROMPT)
    page.click("Copy: answer 1")
    assert page.browser.run("return window.copied") == page.answers[0]
    page.click("Copy all")
    assert page.browser.run("return window.copied") == PROMPT + page.answers[0]


def test_one_menu_at_a_time_and_escape_closes_it(page):
    page.send(PROMPT)
    menus = "return [...document.querySelectorAll('.menu')].map(x => x.open)"
    page.browser.point(".mine .menu summary")
    assert page.browser.run(menus) == [True, False]
    page.browser.press("escape")
    assert page.browser.run(menus) == [False, False]
    assert page.browser.run("return document.activeElement.ariaLabel") == "Actions for message 1 of yours"
    page.browser.point(".theirs .menu summary")
    page.browser.point("h1")
    assert page.browser.run(menus) == [False, False]


def test_nothing_is_a_box_and_how_much_is_left_out_is_said(page, http):
    answer = http.post("/v1/responses", json={"input": PROMPT, "seed": 7, "max_output_tokens": 24}).json()
    text = answer["output"][0]["content"][0]["text"]
    left_out = len(text) - len(readable(text))
    assert left_out > 1
    page.send(PROMPT)
    assert "\ufffd" not in page.answers[0]
    assert f"{left_out} characters that can't be shown are left out." in page.facts[0]


@pytest.mark.parametrize("size", WIDTHS, ids=lambda x: str(x[0]))
def test_memory_stays_in_sight_and_lines_are_short(browser, address, size):
    browser.look(*size)
    page = Page(browser, address)
    page.put(max_tokens=24)
    page.send(PROMPT)
    browser.run(
        "document.querySelector('.theirs .text').firstChild.data = "
        "'The old house stood at the end of a lane, and nobody had lived there for years. '.repeat(60)"
    )
    browser.run("scrollTo(0, document.documentElement.scrollHeight)")
    top, bottom = browser.run(
        "const r = document.getElementById('memory').getBoundingClientRect(); return [r.top, r.bottom]"
    )
    assert 0 <= top < bottom <= size[1]
    assert bottom < size[1] / 2
    assert browser.run("return scrollY") > 100
    assert 30 < browser.run(LINES) <= 70


def test_escape_stops_and_what_came_stays(page, engine):
    page.put(max_tokens=250_000)
    page.write(PROMPT)
    page.browser.press("enter")
    wait(lambda: page.answers and len(page.answers[0]) > 50)
    assert page.browser.run("return document.querySelector('#messages').getAttribute('aria-busy')") == "true"
    page.browser.press("escape")
    page.rest()
    wait(lambda: engine.stats.running == 0)
    assert page.facts[0].startswith("Stopped.")
    assert page.text("status") == "Stopped."
    stopped = page.answers[0]
    page.put(max_tokens=24)
    page.send()
    assert page.answers[0] == stopped
    assert len(page.answers) == 2


@pytest.fixture
def chat(browser, served_folder, tmp_path):
    """The page before a model with a chat template, on a server that wants a key."""
    folder = shutil.copytree(served_folder("endless"), tmp_path / "chatty")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    model = open_served(folder, name="c")
    settings = ServerSettings(keys=(KEY,))
    with Engine(model, store=StateStore(model)) as engine, running(create_app({"c": engine}, settings)) as address:
        yield address


def test_a_chat_behind_a_key(browser, chat):
    browser.look(1400, 900)
    page = Page(browser, chat, ready="key-form.hidden === false")
    assert browser.run("return document.activeElement.id") == "key"
    assert page.text("alert") == ""
    browser.press(*"wrong", "enter")
    assert "does not know this key" in wait(lambda: page.text("alert"))
    page.put(key=KEY)
    browser.press("enter")
    page.rest()
    page.put(seed=7, max_tokens=12)
    assert (page.text("text-label"), page.text("send")) == ("Message", "Send")
    page.send("Where is the cat?")
    page.send("   ")  # nothing is asked
    page.put(text="", max_tokens=250_000)
    page.write("And the hat?")
    browser.press("enter")
    wait(lambda: len(page.answers) == 2 and len(page.answers[1]) > 50)
    page.browser.point("#stop")
    page.rest()
    page.put(max_tokens=12)
    page.send("And then?")
    first, second, third = page.answers
    with httpx.Client(base_url=chat, headers={"Authorization": f"Bearer {KEY}"}) as http:
        asked = {"input": "Where is the cat?", "seed": 7, "max_output_tokens": 12}
        answer = http.post("/v1/responses", json=asked).json()
        assert readable(answer["output"][0]["content"][0]["text"]) == first
    said = ["Where is the cat?", "And the hat?", "And then?"]
    assert second
    assert third
    assert page.asked == said
    browser.complaints()


def test_an_error_is_the_servers_own_sentence(page, http):
    page.put(max_tokens=1e30)
    sentence = http.post("/v1/responses", json={"input": "a", "max_output_tokens": 1e30}).json()["error"]["message"]
    page.send(PROMPT)
    assert page.text("alert") == sentence
    assert page.ask("text.value") == PROMPT
    assert page.answers == []
    page.put(max_tokens=24)
    page.browser.press("enter")
    page.rest()
    assert page.text("alert") == ""
    assert len(page.answers) == 1
    assert "400" in "".join(page.browser.complaints())


def test_what_a_setting_may_be_is_checked_before_it_is_sent(page):
    page.put(temperature=-1)
    page.write(PROMPT)
    page.browser.press("enter")
    assert page.answers == []
    assert page.browser.run("return document.activeElement.id") == "temperature"


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", WIDTHS, ids=lambda x: str(x[0]))
def test_it_fits_and_can_be_read(browser, address, size, dark, tmp_path):
    """Nothing is cut off; letters stand out from what is behind them; whatever can be used has a name and can be reached."""
    browser.look(*size, dark=dark)
    page = Page(browser, address)
    page.put(max_tokens=60)
    page.send(PROMPT)
    page.click("Fork after this: answer 1")
    assert browser.run("return document.documentElement.scrollWidth <= innerWidth")
    assert browser.run(OUTSIDE) == []
    faint = [(text, ratio) for text, ratio in browser.run(CONTRASTS) if ratio < 4.5]
    assert faint == []
    background = browser.run("return getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", background))) < 200) == dark
    assert browser.run(NAMELESS) == []


def test_all_can_be_done_by_keys(page):
    page.send(PROMPT)
    reached = []
    for _ in range(60):
        page.browser.press("tab")
        name = page.browser.run("const x = document.activeElement; return x.id || x.ariaLabel || x.tagName")
        if name == "Actions for answer 1" and name not in reached:
            page.browser.press("enter")  # opens the menu, whose actions come next
        reached.append(name)
        if name != "SUMMARY" and reached.count(name) > 1:
            break
    expected = {"new", "copy", "api", "text", "send", "temperature", "top_p", "seed", "max_tokens"}
    expected |= {f"{action}: answer 1" for action in ("Fork after this", "Undo from here", "Copy")}
    assert expected <= set(reached)
    assert page.browser.run("return document.getElementById('status').getAttribute('aria-live')") == "polite"
    assert page.text("status") == "The answer has ended: 24 tokens."
