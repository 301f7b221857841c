"""figures/page.py: the numbers of its page, the template, and a scene in a browser."""
import base64
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
def test_an_address_is_a_scene_with_its_models_and_says_which_head_is_not_there(home):
    page = (ROOT / "results" / "play.html").as_uri()
    dom = visited(f"{page}#scene=2", home)
    assert re.findall(r'<section class="lane"(.*?)>', dom) == ["", *[' hidden=""'] * 3, ""]
    assert "Query: token 63 " in dom and "that is not there" not in dom.partition("<script")[0]
    dom = visited(f"{page}#scene=3&heads=1.0,9.9", home)
    assert "Query: token 255 " in dom and "that is not there (9.9)" in dom.partition("<script")[0]
