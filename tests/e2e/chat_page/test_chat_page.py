"""The chat page in a real browser, against the real daemon with its demo model."""

import base64
import json
import os
import re
import shutil
from contextlib import contextmanager
from urllib.parse import urlsplit

import pytest

from epdd.families import DEMO
from tests.e2e.daemon import running

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
from playwright.sync_api import expect  # noqa: E402

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium"), pytest.mark.takes(50)]

SAMPLES = DEMO / "samples"
HANG_MS = 90_000        # seconds, then the test fails
PHONE = {"viewport": {"width": 360, "height": 740}, "is_mobile": True, "has_touch": True}
# An answer that takes over two minutes on the emulated decoder of `unhurried`: it can be stopped on any machine.
LONG = {"ignore_eos": True, "max_tokens": 1_000_000}

# Events that carry files to the page, as the browser makes them.
HAND_OVER = """([kind, files]) => {
  const data = new DataTransfer();
  for (const [name, type, text] of files) {
    data.items.add(new File([Uint8Array.from(atob(text), (c) => c.charCodeAt(0))], name, { type }));
  }
  const made = kind === "paste" ? new ClipboardEvent(kind, { clipboardData: data, bubbles: true, cancelable: true })
    : new DragEvent(kind, { dataTransfer: data, bubbles: true, cancelable: true });
  document.activeElement.dispatchEvent(made);
}"""


@pytest.fixture(scope="module")
def daemon():
    with running(encoder__workers=2) as daemon:
        yield daemon.ready()


@pytest.fixture(scope="module")
def unhurried():
    with running(emulation__profile="laptop") as daemon:
        yield daemon.ready()


@pytest.fixture(scope="module")
def browser():
    # Root may not use Chromium's sandbox; in CI everybody is root.
    expect.set_options(timeout=HANG_MS)
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"] * (os.getuid() == 0))
        yield browser
        browser.close()


@pytest.fixture
def visit(daemon, browser):
    """`with visit(**context) as page`: the page, loaded; nothing but refused requests may be logged at its end."""

    @contextmanager
    def open_page(refused=0, routes=(), at=daemon, **options):
        context = browser.new_context(**options)
        page = context.new_page()
        page.set_default_timeout(HANG_MS)
        faults, refusals, hosts = [], [], set()
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda message: message.type in ("error", "warning") and (
            refusals if message.text.startswith("Failed to load resource") else faults).append(message.text))
        page.on("request", lambda request: hosts.add(urlsplit(request.url).netloc))
        for pattern, answer in routes:
            page.route(pattern, answer)
        page.goto(at.url("/"))
        yield page
        assert faults == [] and len(refusals) == refused, (faults, refusals)
        assert hosts - {""} == {f"127.0.0.1:{at.port}"}     # data: has none
        context.close()

    return open_page


def hand_over(page, kind, *names, type="image/png"):
    files = [[name, type, base64.b64encode((SAMPLES / name).read_bytes() if type == "image/png" else b"x").decode()]
             for name in names]
    page.evaluate(HAND_OVER, [kind, files])


def pick(page, *names):
    page.set_input_files("#files", [SAMPLES / name for name in names])
    expect(page.locator("#tray li")).to_have_count(len(names))


def answer(page):
    """The last answer, once it is complete."""
    expect(page.locator("#exchanges li").last.locator(".actions")).to_be_visible()
    return page.locator("#exchanges li").last.locator(".answer .text").inner_text()


def asked(page, act):
    """The body of the request that `act` sends."""
    with page.expect_request("**/v1/chat/completions") as found:
        act()
    return found.value.post_data_json


def lengthen(route):
    route.continue_(post_data={**route.request.post_data_json, **LONG})


def shape(content):
    """A message's content with every image as one word."""
    return content if isinstance(content, str) else [part.get("text", "IMAGE") for part in content]


def test_drop_an_image_ask_and_see_the_answer(visit):
    with visit() as page:
        hand_over(page, "dragover", "red-circle.png")
        expect(page.locator("#drop")).to_be_visible()
        hand_over(page, "drop", "red-circle.png")
        expect(page.locator("#drop")).to_be_hidden()
        expect(page.locator("#tray img")).to_have_count(1)
        page.get_by_label("Question", exact=True).fill("What colour is the circle?")
        page.get_by_role("button", name="Ask", exact=True).click()
        assert answer(page) == "red"
        expect(page.locator("#said")).to_have_text("Answer: red")       # for screen readers
        expect(page.locator(".facts")).to_contain_text("first token")
        expect(page.locator("#tray li")).to_have_count(0)
        expect(page.locator("#totals")).to_contain_text(re.compile(r"\b[1-9]\d* completed"))


def test_paste_several_place_one_in_the_text_and_take_one_away(visit):
    with visit() as page:
        hand_over(page, "paste", "red-circle.png", "blue-square.png", "yellow-star.png")
        expect(page.locator("#tray li")).to_have_count(3)
        hand_over(page, "paste", "notes.txt", type="text/plain")
        expect(page.locator("#notice")).to_have_text("Not an image: notes.txt")
        question = page.get_by_label("Question", exact=True)
        question.fill("First , then [image 7].")
        question.evaluate("(field) => field.setSelectionRange(6, 6)")
        page.get_by_role("button", name="Place image 3, yellow-star.png, in the text").click()
        expect(question).to_have_value("First [image 3], then [image 7].")
        page.get_by_role("button", name="Remove image 1, red-circle.png").click()
        expect(question).to_have_value("First [image 2], then [image 6].")
        body = asked(page, lambda: question.press("Enter"))
        assert shape(body["messages"][0]["content"]) == ["IMAGE", "First ", "IMAGE", ", then [image 6]."]
        urls = [part["image_url"]["url"] for part in body["messages"][0]["content"] if "image_url" in part]
        blue, yellow = (base64.b64encode((SAMPLES / name).read_bytes()).decode()
                        for name in ("blue-square.png", "yellow-star.png"))
        assert urls == [f"data:image/png;base64,{blue}", f"data:image/png;base64,{yellow}"]
        answer(page)
        page.get_by_role("button", name="Edit").click()
        expect(question).to_have_value("First [image 2], then [image 6].")
        expect(page.locator("#tray li")).to_have_count(2)
        expect(page.locator("#exchanges li")).to_have_count(0)


def test_the_conversation_goes_along_with_its_images(visit):
    with visit() as page:
        page.get_by_role("button", name="What colour is the circle?").click()
        assert answer(page) == "red"
        question = page.get_by_label("Question", exact=True)
        question.fill("What shape is this?")
        body = asked(page, lambda: question.press("Enter"))
        assert [(message["role"], shape(message["content"])) for message in body["messages"]] == [
            ("user", ["IMAGE", "What colour is the circle?"]), ("assistant", "red"), ("user", "What shape is this?")]
        before = answer(page)
        again = asked(page, lambda: page.get_by_role("button", name="Regenerate").click())
        assert again == body and answer(page) == before
        page.get_by_role("button", name="Clear").click()
        expect(page.get_by_role("heading", name="Ask about images")).to_be_visible()
        question.fill("Hello")
        assert len(asked(page, lambda: question.press("Enter"))["messages"]) == 1
        assert answer(page).startswith("Hello")


def test_stop_in_the_middle(visit, unhurried):
    before = unhurried.status()["requests"]
    with visit(at=unhurried, routes=[("**/v1/chat/completions", lengthen)]) as page:
        for stop in (lambda: page.get_by_role("button", name="Stop").click(), lambda: page.keyboard.press("Escape")):
            page.get_by_label("Question", exact=True).fill("Hello")
            page.keyboard.press("Enter")
            # The second answer depends on how much of the first had come.
            expect(page.locator("#exchanges li").last.locator(".text")).to_contain_text(re.compile(r"\w"))
            expect(page.get_by_role("button", name="Ask", exact=True)).to_be_hidden()
            stop()
            expect(page.locator(".facts").last).to_contain_text("stopped")
            assert answer(page)     # what had come stays
            expect(page.get_by_label("Question", exact=True)).to_be_focused()
    after = unhurried.wait(lambda status: status["requests"]["running"] == 0)["requests"]
    assert after["aborted"] == before["aborted"] + 2 and after["failed"] == before["failed"]


def test_errors_are_shown_in_the_servers_words_and_spoil_nothing(visit):
    with visit(refused=1) as page:
        pick(page, "red-circle.png")
        page.get_by_role("button", name="Sampling").click()
        page.get_by_label("Temperature").fill("9")
        question = page.get_by_label("Question", exact=True)
        question.fill("What colour is the circle?")
        question.press("Enter")
        expect(page.get_by_role("alert").filter(has_text="temperature is 9; it must be from 0 to 2")).to_be_visible()
        expect(page.locator(".error small")).to_have_text("400 invalid_request")
        page.get_by_label("Temperature").fill("")
        page.get_by_role("button", name="Try again").click()
        assert answer(page) == "red"
        expect(page.locator(".error")).to_have_count(0)


def test_an_answer_that_breaks_keeps_what_had_come(visit):
    chunk = 'data: {"choices": [{"index": 0, "delta": {"content": "a red"}, "finish_reason": null}]}\n\n'
    error = 'data: {"error": {"message": "encoder/0 is lost", "code": "worker_lost"}}\n\ndata: [DONE]\n\n'
    with visit(refused=1) as page:
        question = page.get_by_label("Question", exact=True)
        for body, message in ((chunk + error, "encoder/0 is lost"),
                              (chunk + chunk[:20], "The connection ended before the answer did")):
            page.route("**/v1/chat/completions",
                       lambda route: route.fulfill(content_type="text/event-stream", body=body))
            question.fill("What is this?")
            question.press("Enter")
            assert answer(page) == "a red"
            expect(page.locator(".error").last).to_contain_text(message)
        page.route("**/v1/chat/completions", lambda route: route.abort())
        question.fill("And now?")
        question.press("Enter")
        expect(page.locator(".error").last).to_contain_text("The server cannot be reached")
        expect(page.get_by_role("button", name="Ask", exact=True)).to_be_visible()


def test_a_question_that_failed_is_not_sent_again(visit):
    with visit(refused=1) as page:
        page.set_input_files("#files", [{"name": "broken.png", "mimeType": "image/png", "buffer": b"not a picture"}])
        question = page.get_by_label("Question", exact=True)
        question.fill("What is this?")
        question.press("Enter")
        expect(page.locator(".error")).to_contain_text("image")
        question.fill("Hello")
        body = asked(page, lambda: question.press("Enter"))
        assert [shape(message["content"]) for message in body["messages"]] == ["Hello"]
        assert answer(page).startswith("Hello")


def test_settings_go_along_only_where_they_are_set(visit):
    with visit() as page:
        question = page.get_by_label("Question", exact=True)
        question.fill("Hello")
        body = asked(page, lambda: question.press("Enter"))
        assert body.keys() == {"messages", "stream", "stream_options"}
        answer(page)
        page.get_by_role("button", name="Sampling").click()
        for label, value in (("Temperature", "0.5"), ("Top p", "0.9"), ("Tokens at most", "3"), ("Seed", "7"),
                             ("System message", "Be brief.")):
            page.get_by_label(label).fill(value)
        body = asked(page, lambda: page.get_by_role("button", name="Regenerate").click())
        assert (body["temperature"], body["top_p"], body["max_tokens"], body["seed"]) == (0.5, 0.9, 3, 7)
        assert body["messages"][0] == {"role": "system", "content": "Be brief."}
        answer(page)
        expect(page.locator(".facts")).to_contain_text("cut off")


def test_by_keyboard_alone(visit, unhurried):
    with visit(at=unhurried, reduced_motion="reduce", routes=[("**/v1/chat/completions", lengthen)]) as page:
        expect(page.get_by_label("Question", exact=True)).to_be_focused()
        expect(page.locator("#examples button")).to_have_count(5)
        order = []
        for _ in range(4):
            page.keyboard.press("Tab")
            order.append(page.evaluate("document.activeElement.textContent"))
            assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
        assert order[:3] == ["Add images", "Sampling", "Ask"]
        for _ in range(4):
            page.keyboard.press("Shift+Tab")
        page.keyboard.press("Shift+Tab")
        assert page.evaluate("document.activeElement.textContent") == "List the images in order."
        page.get_by_label("Question", exact=True).focus()
        page.keyboard.type("Hello")
        page.keyboard.press("Shift+Enter")
        page.keyboard.type("there")
        expect(page.get_by_label("Question", exact=True)).to_have_value("Hello\nthere")
        page.keyboard.press("Enter")
        expect(page.locator(".running")).to_have_count(1)
        # Users may ask for reduced motion.
        assert page.evaluate("getComputedStyle(document.querySelector('.running .text'), '::after').animationName"
                             ) == "none"
        expect(page.locator(".text")).not_to_have_text("")
        page.keyboard.press("Escape")
        expect(page.locator(".facts")).to_contain_text("stopped")


def test_the_fleet_beside_it(visit, daemon):
    with visit() as page:
        rows = page.locator("#encoders tbody tr")
        expect(rows).to_have_count(2)
        expect(rows.first).to_contain_text("encoder/0")
        expect(page.locator("#decoders tbody tr")).to_have_count(1)
        expect(page.locator("#state")).to_have_text("ready")
        expect(page.locator("#in-flight-gpu")).to_have_text("no GPU encodes")
        daemon.ask("drain", worker="encoder/1")
        try:
            expect(page.locator("#state")).to_have_text("degraded")
            # On a busy machine "slow" stands beside it.
            expect(rows.last.locator(".state")).to_have_text(re.compile("^draining"))
            expect(page.locator("#said")).to_have_text("Server: degraded")
        finally:
            daemon.ask("resume", worker="encoder/1")
        expect(page.locator("#state")).to_have_text("ready")
        page.get_by_role("button", name="What colour is the circle?").click()
        answer(page)
        for name in ("^Tokens per second, the last two minutes: now [0-9.]+,",
                     "^First token after, the last two minutes: last [0-9.]+ m?s,"):
            expect(page.get_by_role("img", name=re.compile(name))).to_have_count(1)


def test_a_fleet_with_all_that_a_status_may_have_and_one_with_hardly_anything(visit, daemon):
    full = daemon.get("/status")[1]
    full["emulated"] = {"profile": "laptop", "scale": 4, "answers": "none", "about": "invented"}
    full["workers"][0] |= {"device": "cuda:0", "share": 0.75, "slow": True, "slowness": 2.3, "restarts": 1}
    full["router"] |= {"i_cpu": 6136, "i_gpu": 12288, "n_cpu": 1, "n_gpu": 1, "budget_cpu": 7911.2, "ratio": 6.21,
                       "ratio_source": "measured", "queue_jobs": 3, "queue_cost": 6120, "oldest_s": 1.25}
    with visit(routes=[("**/status", lambda route: route.fulfill(json=full))]) as page:
        expect(page.locator("#emulated")).to_have_text(
            "Emulated devices: profile laptop, 4 times as fast; answers mean nothing.")
        first = page.locator("#encoders tbody tr").first
        expect(first.locator(".state")).to_have_text("readyslow ×2.3, 1 restart")
        expect(first.locator(".part")).to_have_text("75%")
        expect(page.locator("#ratio")).to_have_text("R 6.2 measured")
        expect(page.locator("#in-flight-cpu")).to_have_text("6,136 of 7,911 patches")
        expect(page.locator("#queue")).to_have_text("3 images queued, 6,120 patches; the oldest for 1.25 s")
    bare = {"state": "starting", "workers": [{"name": "encoder/0", "role": "encoder", "state": "STARTING"}]}
    with visit(routes=[("**/status", lambda route: route.fulfill(json=bare))]) as page:
        expect(page.locator("#state")).to_have_text("starting")
        expect(page.locator("#encoders tbody tr")).to_contain_text("starting")
        expect(page.locator("#emulated")).to_be_hidden()


def test_a_key_is_asked_for_only_where_the_server_wants_one(visit):
    with running(server__api_keys="sk-one") as keyed, visit(refused=2, at=keyed.ready()) as page:
        field = page.get_by_label("API key")
        for key in ("sk-two", "sk-one"):
            expect(field).to_be_focused()
            expect(page.locator("#state")).to_have_text("needs an API key")
            field.fill(key)
            field.press("Enter")
        expect(page.locator("#state")).to_have_text("ready")
        expect(field).to_be_hidden()
        page.get_by_label("Question", exact=True).fill("Hello")
        page.keyboard.press("Enter")
        assert answer(page).startswith("Hello")
        assert page.evaluate("JSON.stringify([localStorage.length, document.cookie, sessionStorage.length])"
                             ) == '[0,"",1]'
    with visit() as page:
        expect(page.locator("#state")).to_have_text("ready")
        expect(page.get_by_label("API key")).to_be_hidden()


def test_on_a_phone(visit):
    with visit(**PHONE) as page:
        expect(page.locator("#encoders tbody tr")).to_have_count(2)
        page.get_by_role("button", name="List the images in order.").tap()
        assert "blue square" in answer(page)
        expect(page.locator("#fleet")).to_be_hidden()
        wide = "document.documentElement.scrollWidth > innerWidth"
        assert not page.evaluate(wide)
        page.get_by_role("button", name="Fleet").tap()
        expect(page.locator("#fleet")).to_be_visible()
        expect(page.locator("#talk")).to_be_hidden()
        assert not page.evaluate(wide)
        assert page.evaluate("""() => [...document.querySelectorAll("#fleet *")].every((element) =>
            element.closest(".unseen") || element.getBoundingClientRect().right <= innerWidth)""")
        page.get_by_role("button", name="Chat").tap()
        expect(page.get_by_label("Question", exact=True)).to_be_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_schemes_are_readable_by_all(visit, scheme):
    axe = pytest.importorskip("axe_core_python.sync_playwright", reason="axe-core-python is not installed")
    with visit(color_scheme=scheme) as page:
        background = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", background))) < 3 * 64) == (scheme == "dark")
        check = axe.Axe()
        page.get_by_role("button", name="Sampling").click()
        pick(page, "red-circle.png")
        assert [(fault["id"], fault["nodes"][0]["html"]) for fault in check.run(page)["violations"]] == []
        page.get_by_label("Question", exact=True).fill("What colour is the circle?")
        page.keyboard.press("Enter")
        answer(page)
        assert [(fault["id"], fault["nodes"][0]["html"]) for fault in check.run(page)["violations"]] == []


def test_reasoning_is_folded_beside_the_answer(visit):
    """Shown as text, not as markup, and never sent back as part of the answer."""
    deltas = [{"role": "assistant", "content": ""}, {"reasoning_content": "a <b>plan</b>\n"},
              {"reasoning_content": "of two lines"}, {"content": "red"}]
    chunks = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    said = ("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body))
    with visit(routes=[said]) as page:
        page.get_by_label("Question", exact=True).fill("What colour?")
        page.keyboard.press("Enter")
        assert answer(page) == "red"
        thoughts = page.locator(".reasoning p")
        expect(thoughts).to_be_hidden()
        page.locator(".reasoning summary").click()
        expect(thoughts).to_be_visible()
        assert thoughts.inner_text() == "a <b>plan</b>\nof two lines"
        page.get_by_label("Question", exact=True).fill("Sure?")
        sent = asked(page, lambda: page.keyboard.press("Enter"))
        assert sent["messages"][1] == {"role": "assistant", "content": "red"}
