"""The page of maps.py play: its numbers, its template, and what it does in a browser."""
import base64
import itertools
import json
import re
import shutil
import subprocess
import zlib

import numpy as np
import pytest

import maps
from common.checkpoint import load_run
from common.names import models
from tests.helpers import INF, ROOT, TINY_RUN, command

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


def page_data(path):
    """What maps.py play wrote into a page: its JSON, and the template around it."""
    before, rest = path.read_text().split('<script type="application/json" id="data">')
    text, _, after = rest.partition("</script>")
    return json.loads(text), before + after


def unpacked(content, string):
    """A string's numbers in a page, as the page reads them -> [lane][head][part] (T, T)."""
    planes = np.frombuffer(zlib.decompress(base64.b64decode(string["numbers"])), np.uint8)
    flat = np.ascontiguousarray(planes.reshape(4, -1).T).view("<i4")[:, 0].astype(float)
    T = len(string["tokens"])
    triangles, lanes = iter(flat.reshape(-1, T * (T + 1) // 2)), []
    for lane in content["lanes"]:
        lanes.append([])
        for _ in lane["heads"]:
            parts = {name: np.zeros((T, T)) for name in lane["kinds"]}
            for part in parts.values():
                part[np.tril_indices(T)] = next(triangles)
            lanes[-1].append(parts)
    assert next(triangles, None) is None
    return lanes


def test_a_page_to_play_with_holds_what_literal_says(trained, home):
    """Every number to two digits, the logit too; lengths and splits crossed; one head or all."""
    for heads in ("sharpest", "all"):
        command(home, "maps.py", "play", trained / "tra", trained / "rope", "--heads", heads,
                "--length", 12, 40, "--split", "dense", "sparse", "--out", "p.html")
        content, _ = page_data(home / "p.html")
        splits = itertools.product(("dense", "sparse"), (12, 40))
        for string, (split, T) in zip(content["strings"], splits, strict=True):
            assert string["name"].split()[0] == split
            lanes = unpacked(content, string)
            for lane, shown, name in zip(content["lanes"], lanes, ("tra", "rope"), strict=True):
                run = load_run(trained / name)
                x, labels = maps.sequence(run, "", split, T, 0)
                layers = maps.look(run.model, x)
                assert string["tokens"] == labels and lane["trained"] == 16
                assert len(lane["heads"]) == (2 if heads == "all" else 1) == len(shown)
                for (layer, head), parts in zip(lane["heads"], shown):
                    shows_these(parts, {k: v[head] for k, v in layers[layer].items()})
                assert lane["equation"] == models()[name][0].EQUATION


def shows_these(parts, exact):
    """One head's whole numbers in a page are the exact ones, as far as a page shows them."""
    seen = np.tri(len(parts["attention"]), dtype=bool)
    exact = exact | dict(carry=exact["qk"] + exact["bias"])
    for name, whole in parts.items():
        unit = 1000 if name == "attention" else 100
        finite = seen & np.isfinite(exact[name])
        if name == "carry":  # of the logit
            whole = np.where(finite, parts["qk"] + parts["bias"] + whole, -2**31)
        assert (np.abs(whole / unit - exact[name])[finite] <= .5 / unit + 1e-9).all(), name
        assert (whole[seen & ~finite] == -2**31).all()


def test_a_page_of_numbers_that_are_large_or_not_finite():
    """Distances of hundreds of thousands; what is infinite, or larger than all, is told apart."""
    exact = dict(qk=np.array([[1.005, 0], [-3.456, 2]]), bias=np.array([[-INF, 0], [-1e30, 7e5]]),
                 step=np.array([[1.0, 0], [np.nan, 1]]), attention=np.full((2, 2), .0004999),
                 distance=np.array([[123456.784, 0], [9e6, 0]]))
    parts = maps.in_units({name: x[None] for name, x in exact.items()}, 0)
    assert parts["distance"].tolist() == [12345678, 9e8, 0] and parts["qk"].tolist()[1] == -346
    assert parts["bias"].tolist() == [-2**31, -2**31, 7e7] and not parts["attention"].any()
    assert parts["step"].tolist() == [100, -2**31, 100] and parts["carry"].tolist() == [0, 0, 0]
    packed = zlib.decompress(base64.b64decode(maps.packed(parts["bias"])))
    assert packed == b"\0\0\x80\0\0\x1d\0\0\x2c\x80\x80\x04"


def test_the_page_that_is_committed_is_the_template_as_it_is():
    """Its numbers are of alibi, fox, cable, cope and tra; nothing comes from the network."""
    _, template = page_data(ROOT / "play.html")
    assert template.count("\n") <= 250 and max(map(len, template.splitlines())) <= 100
    for word in ("http:", "https:", " src=", "import ", "fetch(", "@font-face", "url("):
        assert word not in template, word
    for name in ("play.html", "play_text.html"):
        content, ours = page_data(ROOT / "results" / name)
        assert ours == template
        for string in content["strings"]:
            unpacked(content, string)


def test_a_page_of_a_fork(fork, copy):
    """An edited step; a hostile text in it ends no script."""
    fork("fox", ("bias = -distance", "bias = -3 * distance"),
         ('STEP = "-log f_k', 'STEP = "</script><b>three</b> -log f_k'))
    command(copy, "train.py", "--model", "mine", *TINY_RUN)
    command(copy, "maps.py", "play", "out/mine-flipflop-nano", "--length", 12, "--out", "p.html")
    content, _ = page_data(copy / "p.html")
    parts = unpacked(content, content["strings"][0])[0][0]
    assert np.abs(parts["bias"] + 3 * parts["distance"]).max() < 3
    assert content["lanes"][0]["step"].startswith("</script><b>three</b>")


# appended to a page: what it says at first, and after each of a list of actions
VISIT = """<script>(async () => {
  const until = async test => { while (!test()) await new Promise(f => setTimeout(f, 5)); };
  const key = (key, shiftKey = false) => document.body.dispatchEvent(
    new KeyboardEvent("keydown", { key, shiftKey, bubbles: true }));
  const mouse = (type, svg, token) => {
    const box = document.querySelectorAll("svg")[svg], { left } = box.getBoundingClientRect();
    box.dispatchEvent(new PointerEvent(type, { clientX: left + (token + .5) * cell }));
  };
  const steps = [() => 0, ACTIONS], log = [];
  await until(() => document.querySelector("dd")?.textContent);
  for (const step of steps) {
    await step();
    const numbers = {};
    for (const x of document.querySelectorAll(".lane:last-child [data-kind]"))
      numbers[x.dataset.kind] = x.textContent.replace("−", "-");
    log.push([where.textContent.match(/(?<=query |key )\\d+/g).map(n => n - 1), numbers]);
  }
  make(document.body, "pre", JSON.stringify(log)).id = "log";
})();</script>"""
ACTIONS = {  # what is done -> which query and key of 15 are shown then, and in which string
    "key('Home', true)": (14, 0), "key('ArrowRight', true)": (14, 1), "key('ArrowLeft')": (13, 1),
    "key('Home')": (0, 0), "key('End')": (14, 1), "mouse('pointermove', 0, 9)": (9, 1),
    "mouse('pointermove', 3, 5)": (9, 5), "mouse('click', 0, 10)": (10, 1),
    "mouse('click', 3, 6)": (10, 6), "mouse('click', 3, 12)": (10, 6)}


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM, reason="needs Chromium")
def test_the_page_in_a_browser(trained, home):
    """Keys and pointer choose a query and a key; the numbers that it shows are literal's."""
    runs = trained / "rope", trained / "tra", trained / "tra"
    command(home, "maps.py", "play", *runs, "--length", 16, 48, "--out", "p.html")
    other = ("() => document.querySelectorAll('button')[1].click(), "
             "() => until(() => document.querySelectorAll('.top text').length > 20)")
    actions = ", ".join(f"() => {action}" for action in ACTIONS)
    with (home / "p.html").open("a") as f:
        f.write(VISIT.replace("ACTIONS", f"{actions}, {other}"))
    done = subprocess.run([CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu",
                           f"--user-data-dir={home / 'profile'}", "--virtual-time-budget=60000",
                           "--dump-dom", (home / "p.html").as_uri()],
                          capture_output=True, text=True, timeout=120)
    log = json.loads(re.search(r'<pre id="log">(.*)</pre>', done.stdout)[1])
    assert [tuple(where) for where, _ in log[1:-2]] == list(ACTIONS.values())
    model = load_run(trained / "tra").model
    for entries, T in ((log[:-2], 16), (log[-1:], 48)):
        x, labels = maps.sequence(load_run(trained / "tra"), "", "", T, 0)
        layer, head, _ = maps.sharpest(maps.look(model, x))
        parts = maps.look(model, x)[layer]
        for (i, j), numbers in entries:
            exact = {name: part[head, i, j] for name, part in parts.items()}
            assert numbers["attention"] == f"{exact['attention']:.3f}"
            assert (numbers["bias"] == "dropped") == np.isinf(exact["bias"])
            assert abs(float(numbers["qk"]) - exact["qk"]) <= .005 + 1e-6
            assert abs(float(numbers["step"]) - exact["step"]) <= .005 + 1e-6
