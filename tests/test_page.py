"""The page of maps.py play: its numbers, its template, and what it does in a browser."""
import base64
import html
import json
import re
import shutil
import subprocess
import zlib

import numpy as np
import pytest
import torch

from common.checkpoint import load_run
from common.names import models
from figures import maps
from tests.helpers import INF, ROOT, TINY_RUN, command, make

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


def page_data(path):
    """What maps.py play wrote into a page: its JSON, and the template around it."""
    before, rest = path.read_text().split('<script type="application/json" id="data">')
    text, _, after = rest.partition("</script>")
    return json.loads(text), before + after


def unpacked(content, string):
    """A string's numbers in a page, as the page reads them -> [lane][head][part] (T, T), or (T,)"""
    planes = np.frombuffer(zlib.decompress(base64.b64decode(string["numbers"])), np.uint8)
    flat = np.ascontiguousarray(planes.reshape(4, -1).T).view("<i4")[:, 0].astype(float)
    T, at, lanes = len(string["tokens"]), 0, []
    for lane in content["lanes"]:
        lanes.append([])
        for _ in lane["heads"]:
            parts = {}
            for name in lane["kinds"]:
                size = T if name == "rate" else T * (T + 1) // 2
                parts[name] = flat[at:at + size]
                if name != "rate":
                    parts[name] = np.zeros((T, T))
                    parts[name][np.tril_indices(T)] = flat[at:at + size]
                at += size
            lanes[-1].append(parts)
    assert at == len(flat)
    return lanes


def test_a_page_to_play_with_holds_what_literal_says(trained, home):
    """Every number of every head to two digits; the last of a list stands for all that follow."""
    command(home, "figures.maps", "play", trained / "tra", trained / "rope", "--length", 12, 40,
            "--split", "dense", "sparse", "iid", "--out", "p.html")
    content, _ = page_data(home / "p.html")
    which = ("dense", 12), ("sparse", 40), ("iid", 40)
    for string, (split, length) in zip(content["strings"], which, strict=True):
        assert string["name"].split()[0] == split
        lanes = unpacked(content, string)
        for n, name in enumerate(("tra", "rope")):
            run, lane = load_run(trained / name), content["lanes"][n]
            text = maps.sequence(run, "", split, length, 0)
            layers = maps.look(run.model, text.ids)
            assert string["tokens"] == text.labels and lane["trained"] == 16
            assert lane["heads"] == [[0, 0], [0, 1]]
            for (layer, head), parts in zip(lane["heads"], lanes[n], strict=True):
                shows_these(parts, {k: v[head] for k, v in layers[layer].items()})
            assert lane["equation"] == models()[name][0].EQUATION
            said = run.model(text.ids)[0][0].softmax(-1)
            shown = string["predictions"][n]
            assert shown["said"] == text.show(said.argmax(-1).numpy())
            assert np.abs(100 * said.max(-1).values.detach().numpy() - shown["sure"]).max() <= .51
        asked = [n for n, token in enumerate(string["tokens"]) if token == "r"]
        assert [n for n, answer in enumerate(string["answers"]) if answer] == asked
        for n in asked:  # the bit of the last write, which the page outlines
            assert string["tokens"][string["holder"][n]] == string["answers"][n]
            assert "w" not in string["tokens"][string["holder"][n]:n]
            assert string["tokens"][string["holder"][n] - 1] == "w"


def shows_these(parts, exact):
    """One head's whole numbers in a page are the exact ones, as far as a page shows them."""
    seen = np.tri(len(parts["attention"]), dtype=bool)
    for name, numbers in parts.items():
        if name == "rate":
            continue
        unit = 1000 if name == "attention" else 100
        finite = seen & np.isfinite(exact[name])
        assert (np.abs(numbers / unit - exact[name])[finite] <= .5 / unit + 1e-9).all(), name
        assert (numbers[seen & ~finite] == -2**31).all()


def test_a_page_of_numbers_that_are_large_or_not_finite():
    """Distances of hundreds of thousands; what is infinite, or larger than all, is told apart."""
    exact = dict(qk=np.array([[1.005, 0], [-3.456, 2]]), bias=np.array([[-INF, 0], [-1e30, 7e5]]),
                 step=np.array([[1.0, 0], [np.nan, 1]]), attention=np.full((2, 2), .0004999),
                 distance=np.array([[123456.784, 0], [9e6, 0]]))
    parts = maps.in_units({name: x[None] for name, x in exact.items()}, 0)
    assert parts["distance"].tolist() == [12345678, 9e8, 0] and parts["qk"].tolist()[1] == -346
    assert parts["bias"].tolist() == [-2**31, -2**31, 7e7] and not parts["attention"].any()
    assert parts["step"].tolist() == [100, -2**31, 100]
    packed = zlib.decompress(base64.b64decode(maps.packed(parts["bias"])))
    assert packed == b"\0\0\x80\0\0\x1d\0\0\x2c\x80\x80\x04"


@pytest.mark.parametrize("name, has_rate", dict(alibi=True, cable=True, fox=True, tra=True,
                                                cope=False, k_cable=False, nope=False).items())
def test_a_bias_is_a_rate_times_the_distance(name, has_rate):
    """Slopes, g and log delta, so that a reader can check the product; a table has none."""
    found = 0
    for parts in maps.look(make(name), torch.arange(20)[None] % 7):
        for head in range(4):
            rate = maps.in_units(parts, head).get("rate", np.array([])) / maps.RATE
            for i in np.flatnonzero(rate > -1e4):
                bias, distance = parts["bias"][head, i], parts["distance"][head, i]
                there = np.isfinite(bias)
                assert np.abs(rate[i] * distance - bias)[there].max() < 1e-4 * max(distance)
                found += 1
    assert (found > 19) == has_rate


def test_the_head_that_reads_the_answer_is_shown_first():
    a = np.full((2, 2, 4, 4), 0.1)  # layers, heads, queries, keys
    a[0, 0, -1, 0], a[1, 0, -1, 2], a[0, 1, 3, 1] = 0.5, 0.9, 0.6
    layers = [dict(attention=x, qk=x) for x in a]
    found = maps.heads_of(layers, np.array([-1, -1, 0, 1]))
    assert found["heads"] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert found["reads"] == [10, 35, 10, 10] and found["first"] == 1
    found = maps.heads_of(layers, np.full(4, -1))  # nobody says which: the last layer's sharpest
    assert found["reads"] == [] and found["first"] == 2


def test_the_pages_that_are_committed_have_the_template_as_it_is():
    """Nothing comes from the network; a scene's address names what there is."""
    _, template = page_data(ROOT / "figures" / "play.html")
    assert template.count("\n") <= 350 and max(map(len, template.splitlines())) <= 100
    for word in ("http:", "https:", " src=", "import ", "fetch(", "@font-face", "url("):
        assert word not in template, word
    for name, models_ in (("play.html", ["alibi", "fox", "cable", "cope", "tra"]),
                          ("play_text.html", ["cable", "fox", "cope"])):
        path = ROOT / "results" / name
        content, ours = page_data(path)
        assert ours == template and path.stat().st_size < 2e6
        assert [lane["name"] for lane in content["lanes"]] == models_
        for string in content["strings"]:
            unpacked(content, string)
        guide = maps.guide_of(path.with_suffix(".md"))
        assert guide.items() <= content.items()
        for scene in guide["scenes"]:
            words = dict(pair.split("=") for pair in scene["state"].split("&"))
            string = content["strings"][int(words["string"]) - 1]
            assert string["answers"][int(words["query"]) - 1]
            assert all(0 < int(n) <= len(models_) for n in words.get("show", "1").split(","))


def test_a_page_of_a_fork(fork, copy):
    """An edited step; a hostile text in it ends no script."""
    fork("fox", ("bias = -distance", "bias = -3 * distance"),
         ('STEP = "-log f_k', 'STEP = "</script><b>three</b> -log f_k'))
    command(copy, "train.py", "--model", "mine", *TINY_RUN)
    command(copy, "figures.maps", "play", "out/mine-flipflop-nano", "--length", 12,
            "--out", "p.html")
    content, _ = page_data(copy / "p.html")
    parts = unpacked(content, content["strings"][0])[0][0]
    assert np.abs(parts["bias"] + 3 * parts["distance"]).max() < 3
    assert content["lanes"][0]["step"].startswith("</script><b>three</b>")


# appended to a page: what it says at first, and after each of a list of actions
VISIT = """<script>(async () => {
  const until = async test => { while (!test()) await new Promise(f => setTimeout(f, 5)); };
  const key = (key, shiftKey = false) => document.body.dispatchEvent(
    new KeyboardEvent("keydown", { key, shiftKey, bubbles: true }));
  const mouse = (type, svg, token, more = {}) => {
    const box = document.querySelectorAll("svg")[svg], { left } = box.getBoundingClientRect();
    box.dispatchEvent(new PointerEvent(type, { clientX: left + (token + .5) * cell, ...more }));
  };
  const press = words => [...document.querySelectorAll("button")].find(
    button => button.textContent.startsWith(words) && button.checkVisibility()).click();
  const steps = [() => 0, ACTIONS], log = [];
  await until(() => document.querySelector("dd")?.textContent);
  for (const step of steps) {
    await step();
    const numbers = { says: document.querySelector(".lane:last-child .says").textContent };
    for (const x of document.querySelectorAll(".lane:last-child [data-kind]"))
      numbers[x.dataset.kind] = x.textContent.replaceAll("−", "-");
    const shown = [...document.querySelectorAll(".lane")].filter(lane => !lane.hidden).length;
    const box = document.querySelector(".holder"), wide = document.documentElement.scrollWidth;
    log.push([where.textContent.match(/(?<=token )\\d+(?= “)/g).map(n => n - 1), numbers,
      { shown, held: page.classList.contains("held"), outlined: box.getAttribute("x") / cell,
        help: document.querySelector(".help").checkVisibility(), over: wide - innerWidth,
        scene: scene.checkVisibility() && scene.textContent }]);
  }
  save();
  make(document.body, "pre", JSON.stringify([log, location.hash])).id = "log";
})();</script>"""
ACTIONS = {  # what is done -> which query and key of 15 are shown then, and whether it is held
    "mouse('pointermove', 2, 4)": (14, 4, False), "mouse('pointermove', 3, 5)": (14, 5, False),
    "key('Home', true)": (14, 0, True), "key('ArrowRight', true)": (14, 1, True),
    "key('ArrowLeft')": (13, 1, True), "key('End')": (14, 1, True),
    "mouse('pointermove', 2, 5)": (14, 1, True), "mouse('click', 3, 6)": (14, 6, True),
    "mouse('pointermove', 1, 2)": (14, 6, True), "mouse('click', 0, 10)": (10, 6, True),
    "mouse('click', 3, 12)": (10, 6, True), "mouse('pointermove', 0, 12)": (10, 6, True),
    "mouse('pointermove', 0, 12, { buttons: 1 })": (12, 6, True),
    "mouse('click', 2, 6)": (12, 12, False), "mouse('pointermove', 2, 3)": (12, 3, False),
    "mouse('pointermove', 2, 7, { pointerType: 'touch' })": (12, 3, False),
    "mouse('click', 2, 7, { pointerType: 'touch' })": (12, 7, True),
    "key('Escape')": (12, 12, False)}
GUIDE = """# A title

What `w` is.

## First

[Open](p.html#string=1&query=15&show=1,3)

Look.

## Second

[Open](p.html#string=2&query=47&key=2)

Look `there`.
"""


def visit(path, actions=(), hash="", width=1280):
    """A page in Chromium, after each action -> what it says, its address; without any message."""
    page = path.with_name("visited.html")
    actions = ", ".join(f"() => {action}" for action in actions)
    page.write_text(path.read_text(encoding="utf-8") + VISIT.replace("ACTIONS", actions),
                    encoding="utf-8")
    done = subprocess.run([CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu",
                           f"--user-data-dir={path.with_name('profile')}", "--dump-dom",
                           "--enable-logging=stderr", f"--window-size={width},900",
                           "--virtual-time-budget=60000", f"{page.as_uri()}#{hash}"],
                          capture_output=True, text=True, timeout=120)
    assert "CONSOLE" not in done.stderr, done.stderr
    log, address = json.loads(html.unescape(re.search(r'<pre id="log">(.*)</pre>', done.stdout)[1]))
    return log, address


@pytest.fixture(scope="module")
def visited(trained, tmp_path_factory):
    """A page of three lanes, two strings and two scenes."""
    home = tmp_path_factory.mktemp("visited")
    (home / "guide.md").write_text(GUIDE, encoding="utf-8")
    runs = trained / "rope", trained / "tra", trained / "tra"
    command(home, "figures.maps", "play", *runs, "--length", 16, 48, "--guide", "guide.md",
            "--out", "p.html")
    return home / "p.html"


needs_chromium = pytest.mark.skipif(not CHROMIUM, reason="needs Chromium")


@pytest.mark.slow
@needs_chromium
def test_the_page_in_a_browser(trained, visited):
    """Keys and pointer choose a query and a key; a held one stays; the numbers are literal's."""
    log, address = visit(visited, ACTIONS)
    assert [(*where, more["held"]) for where, _, more in log[1:]] == list(ACTIONS.values())
    assert "string=1&query=13&" in address and "key=" not in address
    run = load_run(trained / "tra")
    text = maps.sequence(run, "", "", 16, 0)
    layers = maps.look(run.model, text.ids)
    found = maps.heads_of(layers, text.holder[0].numpy())
    layer, head = found["heads"][found["first"]]
    said, sure = maps.predictions(run.model, text)
    for (i, j), numbers, more in log:
        exact = {name: part[head, i, j] for name, part in layers[layer].items()}
        answer = text.labels[text.holder[0, i]] if text.holder[0, i] >= 0 else ""
        sign = "" if not answer else "✓" if said[i] == answer else "✗"
        assert numbers["says"].split() == ["says", said[i], *sign, str(sure[i]), "%"]
        assert not answer or more["outlined"] == pytest.approx(text.holder[0, i].item())
        assert numbers["attention"] == f"{exact['attention']:.3f}"
        assert (numbers["bias"] == "dropped") == np.isinf(exact["bias"])
        assert abs(float(numbers["qk"]) - exact["qk"]) <= .005 + 1e-6
        assert abs(float(numbers["step"]) - exact["step"]) <= .005 + 1e-6
        if np.isfinite(exact["bias"]):
            bias, rate, distance = map(float, re.split(" = | × ", numbers["bias"]))
            assert abs(rate * distance - bias) <= .0051 and abs(exact["bias"] - bias) <= .0051


@pytest.mark.slow
@needs_chromium
@pytest.mark.parametrize("width, large", [(390, 0), (1280, 0), (1920, 1)])
def test_scenes_and_addresses_at_three_widths(visited, width, large):
    """Two scenes and the end; what the address says that is not there is left out."""
    presses = ["press('guided')", "press('next')", "press('‹ back')", "press('end')"]
    log, _ = visit(visited, presses,
                   f"large={large}", width)
    assert all(more["help"] == (not more["scene"]) and more["over"] <= 0 for *_, more in log)
    scenes = [more["scene"] for *_, more in log]
    assert scenes[0] is scenes[4] is False
    assert scenes[1].startswith("1 of 2: First") and scenes[2].startswith("2 of 2: Second")
    assert [where for where, *_ in log[2:3]] == [[46, 1]] and log[2][2]["held"]
    assert [more["shown"] for *_, more in log] == [3, 2, 3, 2, 2]
    log, address = visit(visited, [], "string=9&query=99&key=-1&heads=7.7,x&show=8&scene=3", width)
    assert log[0][0][0] == 14 and log[0][2]["shown"] == 3 and not log[0][2]["held"]
    assert address.startswith("#string=1&query=15&heads=0.") and "scene" not in address
    _, address = visit(visited, [], "string=2&query=5&key=3&heads=0.1,0.0,0.1&show=2&whole=1")
    assert address == "#string=2&query=5&heads=0.1,0.0,0.1&show=2&key=3&whole=1"
