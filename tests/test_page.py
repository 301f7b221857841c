"""figures/page.py: the numbers of its page, the template, and what it does in a browser."""
import base64
import html
import json
import re
import shutil
import subprocess
import zlib

import numpy as np
import pytest

from common.checkpoint import load_run
from common.names import models
from figures import maps, page
from tests.helpers import ROOT, command

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


def page_data(path):
    """What page.py wrote into a page: its JSON, and the template around it."""
    text = path.read_text(encoding="utf-8")
    before, rest = text.split('<script type="application/json" id="data">')
    content, _, after = rest.partition("</script>")
    return json.loads(content), before + after


def unpacked(string):
    """A string's numbers in a page -> [lane][head]{part: a row for every query}"""
    return json.loads(zlib.decompress(base64.b64decode(string["numbers"])))


def test_a_page_to_play_with_holds_what_literal_says(trained, home):
    """Every number of every head to two digits; the last of a list stands for all that follow."""
    command(home, "figures.page", trained / "tra", trained / "rope", "--length", 12, 40,
            "--split", "dense", "sparse", "iid", "--out", "p.html")
    content, _ = page_data(home / "p.html")
    which = ("dense", 12), ("sparse", 40), ("iid", 40)
    for string, (split, length) in zip(content["strings"], which, strict=True):
        assert string["name"].split()[0] == split
        lanes = unpacked(string)
        for n, name in enumerate(("tra", "rope")):
            run, lane = load_run(trained / name), content["lanes"][n]
            text = maps.sequence(run, "", split, length, 0)
            layers = maps.look(run.model, text.ids)
            assert string["tokens"] == text.labels and lane["trained"] == 16
            assert lane["heads"] == [[0, 0], [0, 1]]
            equation = models()[name][0].EQUATION
            assert lane["equation"] == (equation[name] if name == "rope" else equation)
            for (layer, head), parts in zip(lane["heads"], lanes[n], strict=True):
                assert {"qk", "bias", "attention", "rate"} <= parts.keys()
                for part in page.DIGITS.keys() & parts.keys():
                    shows_these(parts[part], layers[layer][part][head], page.DIGITS[part])
            said = run.model(text.ids)[0][0].softmax(-1)
            shown = string["predictions"][n]
            assert shown["said"] == text.show(said.argmax(-1).numpy())
            assert np.abs(100 * said.max(-1).values.detach().numpy() - shown["sure"]).max() <= .51
        asked = [n for n, token in enumerate(string["tokens"]) if token == "r"]
        assert [n for n, answer in enumerate(string["answers"]) if answer] == asked
        for n in asked:  # the bit of the last write, which the page outlines
            holder = string["holder"][n]
            assert string["tokens"][holder] == string["answers"][n]
            assert string["tokens"][holder - 1] == "w" and "w" not in string["tokens"][holder:n]


def shows_these(rows, exact, digits):
    """A triangle of numbers in a page is the exact one (T, T), rounded."""
    for i, row in enumerate(rows):
        assert len(row) == i + 1
        finite = np.isfinite(exact[i, :i + 1])
        assert [x is not None for x in row] == finite.tolist()
        shown = np.array(row, float)[finite]
        assert (np.abs(shown - exact[i, :i + 1][finite]) <= .5 * 10. ** -digits + 1e-9).all()


def test_the_pages_that_are_committed_have_the_template_as_it_is():
    """Nothing comes from the network; a scene's address names what there is."""
    _, template = page_data(ROOT / "figures" / "page.html")
    for word in ("http:", "https:", " src=", "import ", "fetch(", "@font-face", "url("):
        assert word not in template, word
    for name, lanes in (("play.html", ["alibi", "fox", "cable", "cope", "tra"]),
                        ("play_text.html", ["cable", "fox", "cope"])):
        path = ROOT / "results" / name
        content, ours = page_data(path)
        assert ours == template and path.stat().st_size < 2e6
        assert [lane["name"] for lane in content["lanes"]] == lanes
        guide = page.guide_of(path.with_suffix(".md"))
        assert guide.items() <= content.items()
        for scene in guide["scenes"]:
            words = dict(pair.split("=") for pair in scene["state"].split("&"))
            string = content["strings"][int(words["string"]) - 1]
            assert string["answers"][int(words["query"]) - 1]
            assert all(0 < int(n) <= len(lanes) for n in words.get("show", "1").split(","))


# appended to a page: what it says at first, and after each of a list of actions
VISIT = """<script>(async () => {
  const until = async test => { while (!test()) await new Promise(f => setTimeout(f, 5)); };
  const key = (key, shiftKey = false) => document.body.dispatchEvent(
    new KeyboardEvent("keydown", { key, shiftKey, bubbles: true }));
  const mouse = (type, svg, token, more = {}) => {
    const box = document.querySelectorAll("svg")[svg], { left } = box.getBoundingClientRect();
    box.dispatchEvent(new PointerEvent(type, { clientX: left + (token + .5) * cell, ...more }));
  };
  const steps = [() => 0, ACTIONS], log = [];
  await until(() => document.querySelector("dd")?.textContent);
  for (const step of steps) {
    await step();
    const numbers = { says: document.querySelector(".lane:last-child .says").textContent };
    for (const x of document.querySelectorAll(".lane:last-child [data-kind]"))
      numbers[x.dataset.kind] = x.textContent.replaceAll("−", "-");
    const box = document.querySelector(".holder");
    log.push([where.textContent.match(/(?<=token )\\d+(?= “)/g).map(n => n - 1), numbers,
      page.classList.contains("held"), box.getAttribute("x") / cell]);
  }
  make(document.body, "pre", JSON.stringify(log)).id = "log";
})();</script>"""
ACTIONS = {  # what is done -> which query and key of 15 are shown then, and whether it is held
    "mouse('pointermove', 2, 4)": (14, 4, False), "key('Home', true)": (14, 0, True),
    "key('ArrowRight', true)": (14, 1, True), "key('ArrowLeft')": (13, 1, True),
    "mouse('click', 2, 6)": (13, 6, True), "mouse('pointermove', 1, 2)": (13, 6, True),
    "mouse('pointermove', 0, 12, { buttons: 1 })": (12, 6, True),
    "key('Escape')": (12, 12, False)}


def visited(address, home):
    """The page at this address as Chromium has it, which gives no message."""
    done = subprocess.run([CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu",
                           f"--user-data-dir={home / 'profile'}", "--dump-dom",
                           "--enable-logging=stderr", "--window-size=1280,900",
                           "--virtual-time-budget=60000", address],
                          capture_output=True, text=True, timeout=120)
    assert "CONSOLE" not in done.stderr, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM, reason="needs Chromium")
def test_the_page_in_a_browser(trained, home):
    """
    Keys and pointer choose a query and a key; a held one stays; the numbers are literal's.
    """
    command(home, "figures.page", trained / "rope", trained / "tra", "--length", 16,
            "--out", "p.html")
    scripted = home / "scripted.html"
    actions = ", ".join(f"() => {action}" for action in ACTIONS)
    scripted.write_text((home / "p.html").read_text(encoding="utf-8")
                        + VISIT.replace("ACTIONS", actions), encoding="utf-8")
    dom = visited(f"{scripted.as_uri()}#whole=0", home)
    log = json.loads(html.unescape(re.search(r'<pre id="log">(.*)</pre>', dom)[1]))
    assert [(*where, held) for where, _, held, _ in log[1:]] == list(ACTIONS.values())
    run = load_run(trained / "tra")
    text = maps.sequence(run, "", "", 16, 0)
    layers = maps.look(run.model, text.ids)
    found = page.heads_of(layers, text.holder[0].numpy())
    layer, head = found["heads"][found["first"]]
    predicted = page.predicted(run.model, text)
    for (i, j), numbers, _, outlined in log:
        exact = {name: part[head, i, j] for name, part in layers[layer].items()}
        said, sure = (predicted[key][i] for key in ("said", "sure"))
        answer = text.labels[text.holder[0, i]] if text.holder[0, i] >= 0 else ""
        sign = "" if not answer else "✓" if said == answer else "✗"
        assert numbers["says"].split() == ["says", said, *sign, str(sure), "%"]
        assert not answer or outlined == pytest.approx(text.holder[0, i].item())
        assert numbers["attention"] == f"{exact['attention']:.3f}"
        assert (numbers["bias"] == "dropped") == np.isinf(exact["bias"])
        assert abs(float(numbers["qk"]) - exact["qk"]) <= .005 + 1e-6
        assert abs(float(numbers["step"]) - exact["step"]) <= .005 + 1e-6


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM, reason="needs Chromium")
def test_an_address_is_a_scene_with_its_models_and_says_which_head_is_not_there(home):
    page = (ROOT / "results" / "play.html").as_uri()
    dom = visited(f"{page}#scene=2", home)
    assert re.findall(r'<section class="lane"(.*?)>', dom) == ["", *[' hidden=""'] * 3, ""]
    assert "Query: token 63 " in dom and "that is not there" not in dom.partition("<script")[0]
    dom = visited(f"{page}#scene=3&heads=1.0,9.9", home)
    assert "Query: token 255 " in dom and "that is not there (9.9)" in dom.partition("<script")[0]
