"""figures/page.py: the numbers of its page, and the template of those that are committed."""
import base64
import itertools
import json
import zlib

import numpy as np

from common.checkpoint import load_run
from figures import maps, page
from tests.helpers import ROOT, command


def page_data(path):
    """What page.py wrote into a page: its JSON, and the template around it."""
    text = path.read_text(encoding="utf-8")
    before, rest = text.split('<script type="application/json" id="data">')
    content, _, after = rest.partition("</script>")
    return json.loads(content), before + after


def test_a_page_holds_the_numbers_of_the_maps(trained, home):
    """Of every head, to two digits; the last of a list stands for all that follow."""
    command(home, "figures.page", trained / "tra", trained / "rope", "--length", 12, 40,
            "--split", "dense", "sparse", "iid", "--out", "p.html")
    *_, string = page_data(home / "p.html")[0]["strings"]
    numbers = json.loads(zlib.decompress(base64.b64decode(string["numbers"])))
    for heads, shown, name in zip(numbers, string["predictions"], ("tra", "rope")):
        run = load_run(trained / name)
        text = maps.sequence(run, "", "iid", 40, 0)
        layer, = maps.look(run.model, text.ids)
        for head, part in itertools.product((0, 1), page.DIGITS):
            for i, exact in enumerate(layer[part][head]):
                exact = np.where(np.isfinite(exact), exact, np.nan)[:i + 1]
                row = np.array(heads[head][part][i], float)
                np.testing.assert_allclose(row, exact, 0, 0.51 * 10 ** -page.DIGITS[part])
        sure, best = run.model(text.ids)[0][0].softmax(-1).max(-1)
        assert shown["said"] == text.show(best.numpy())
        np.testing.assert_allclose(shown["sure"], 100 * sure.detach(), 0, 0.51)
    for n, token in enumerate(string["tokens"]):
        holder = string["holder"][n]
        assert string["answers"][n] == (string["tokens"][holder] if token == "r" else "")


def test_the_pages_that_are_committed_have_the_template_and_their_guide():
    _, template = page_data(ROOT / "figures" / "page.html")
    for name in ("play", "play_text"):
        content, ours = page_data(ROOT / "results" / f"{name}.html")
        guide = page.guide_of(ROOT / "results" / f"{name}.md")
        assert ours == template and guide.items() <= content.items()
