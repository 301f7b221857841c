"""maps.py and play.html."""
import base64
import itertools
import json
import os
import re
import select
import shutil
import subprocess
import sys
import time
import types
import zlib

import numpy as np
import pytest
import torch

import bench
import data
import data.flipflop
import maps
import runs
from tests.helpers import (
    EDITS,
    INF,
    ROOT,
    TINY_FLAGS,
    TINY_RUN,
    command,
    complaint,
    drawn,
    is_png,
    labels_of,
    make,
    rng,
)


def test_maps_and_bench_see_the_edited_attention(fork, copy, monkeypatch, capsys):
    """A window of nine keys in the copy of a file: no key beyond it is shown, nor is it fast."""
    monkeypatch.setattr(bench, "extra_memory", lambda *what: None)
    figures = drawn(monkeypatch)
    for edits in ([], EDITS["window"]["fox"]):
        fork("fox", *edits)
        shutil.rmtree(copy / "out", ignore_errors=True)
        command(copy, "train.py", "--model", "mine", *TINY_RUN)
        path = copy / "out" / "mine-flipflop-nano"
        model, *_ = runs.load_run(path / "ckpt.pt", torch.device("cpu"))
        found = maps.look(model, torch.zeros(1, 14, dtype=torch.long))[0]["attention"]
        beyond = np.tril(np.ones((14, 14)), -9)
        assert (found * beyond).sum() == 0 if edits else (found * beyond).sum() > 0
        command(copy, "maps.py", "attention", path, "--length", 14)
        shown = figures.pop().axes[0].images[-1].get_array().filled(0)
        assert (shown[12, 0] == 0) == bool(edits)
        words = "--models", "mine", "--lengths", 50, "--repeats", 1, "--device", "cpu"
        command(copy, "bench.py", "attention", *words, "--out", "b.json")
        rows = json.loads((copy / "b.json").read_text())["attention"]["50"]
        assert {"mine", "mine: literal"} <= rows.keys()
        assert ("mine: kernel" in rows) == (not edits)
        runs.models.cache_clear()
        del sys.modules["model_mine"]
    capsys.readouterr()


def test_maps_of_a_model_without_a_literal_form_show_its_attention(copy):
    """The true one, said in one line; nothing else can be asked for."""
    source = (ROOT / "model_fox.py").read_text().replace("VARIANTS = dict(fox=dict())",
                                                         "VARIANTS = dict(mine=dict())")
    before, _, rest = source.partition("def literal(")
    (copy / "model_mine.py").write_text(before + rest.partition("\n\n\n")[2])
    command(copy, "train.py", "--model", "mine", *TINY_RUN)
    out, _ = command(copy, "maps.py", "attention", "out/mine-flipflop-nano")
    said = "model_mine.py has no literal form: its attention is all that can be shown"
    assert out.splitlines()[0] == said and out.count("\n") == 2
    assert is_png(copy / "out" / "mine-flipflop-nano" / "attention.png")
    said = complaint(copy, "maps.py", "attention", "out/mine-flipflop-nano", "--kinds", "step")
    assert "mine has no step to show, it has attention" in said
    command(copy, "maps.py", "steps", "out/mine-flipflop-nano", "--out", "s.png")
    mine, fox = make("mine"), make("fox")
    fox.load_state_dict(mine.state_dict())
    idx = torch.randint(0, 61, (1, 20))
    for ours, theirs in zip(maps.look(mine, idx), maps.look(fox, idx)):
        assert np.abs(ours["attention"] - theirs["attention"]).max() < 1e-6


def test_within_is_the_share_of_the_last_tokens():
    attention = np.tri(8)[None] / np.arange(1, 9)[:, None]  # all keys alike
    want = np.mean([[n / (i + 1) for n in range(1, 5)] for i in range(4, 8)], axis=0)
    assert maps.within(attention) == pytest.approx(want[None])
    near = np.eye(9)[None]  # every query sees itself alone, and in an odd number of tokens
    assert maps.within(near).tolist() == [[1.0] * 4]


def test_maps_of_reach(home, trained, monkeypatch):
    """Of a task and of text, longer than in training; one token reaches nowhere."""
    said = complaint(home, "maps.py", "reach", trained / "cable")
    assert "was never prepared here" in said
    for run in ("tra", "learned"):
        out, _ = command(trained, "maps.py", "reach", run, "--length", 12, "--out", home / "r.png")
        assert "r.png" in out and is_png(home / "r.png")
    out, _ = command(trained, "maps.py", "reach", "cable", "learned", "--out", home / "r.png",
                     "--length", 16)
    assert out.count("tokens, trained on") == 2 and is_png(home / "r.png")
    # how much lies farther back than a window of training, 16: of the last half of 39 tokens
    out, _ = command(trained, "maps.py", "reach", "tra", "--length", 40, "--out", home / "r.png")
    _, model, config = maps.load(trained / "tra")
    x, _ = runs.make_task(config | dict(block_size=40)).batch("dense", 1, rng([0, 0]))
    a = maps.look(model, torch.from_numpy(x))[0]["attention"]
    near = sum(a[:, i, i - 15:i + 1].sum(-1) for i in range(20, 39)) / a[:, 20:].sum((1, 2))
    said = re.search(r"farther back: (.*)", out)[1].split()
    assert list(map(float, said)) == pytest.approx(100 - 100 * near, abs=0.06)
    flags = "--data", "flipflop", "--max_iters", 1, "--no-evaluate", *TINY_FLAGS
    command(home, "train.py", "--model", "rope", *flags, "--n_layer", 3, "--out_dir", home / "deep")
    figures = drawn(monkeypatch)
    command(trained, "maps.py", "reach", home / "deep", "tra")
    assert labels_of(figures[0]).count("head 0") == 2  # a legend for each model
    said = complaint(trained, "maps.py", "reach", "cable", "--length", 1)
    assert "reach needs a sequence of two tokens or more" in said


def test_maps_of_what_heads_count(home, trained, monkeypatch):
    """The mean step of every symbol, at scored queries; of text, of every sort of token."""
    path, model, config = maps.load(trained / "tra")
    args = types.SimpleNamespace(split=None, length=12, seed=3, sequences=5, kind="counts",
                                 pairs=False)
    kinds, means = maps.steps_by_kind(model, config, args)
    assert kinds == ["0", "1", "i", "r", "w"] and means.shape == (1, 2, 5)
    task = runs.make_task(config | dict(block_size=12))
    total, times = np.zeros((2, 5)), np.zeros(5)
    for n in range(5):
        x, y = task.batch(task.splits[-1], 1, np.random.default_rng([3, n]))
        step = maps.look(model, torch.from_numpy(x))[0]["step"]
        for i, j in zip(*np.tril_indices(x.shape[1])):
            if y[0, i] != -1:
                kind = kinds.index(task.show(x[0])[j])
                total[:, kind] += step[:, i, j]
                times[kind] += 1
    assert times.min() > 0 and np.allclose(means[0], total / times, atol=1e-6)
    pairs, apart = maps.steps_by_kind(model, config, types.SimpleNamespace(
        **vars(args) | dict(pairs=True)))
    zeros = [apart[0, :, n] for n, pair in enumerate(pairs) if pair in ("w 0", "i 0", "r 0")]
    assert len(zeros) > 1 and all(" " in pair for pair in pairs)
    assert (np.min(zeros, 0) - 1e-6 <= means[0, :, 0]).all()  # their mean lies between them
    assert (means[0, :, 0] <= np.max(zeros, 0) + 1e-6).all()
    labels = "\\n", "  ", "·", " def", "_", "7", "\\t", "+=", "\\n"
    assert maps.sorts_of(labels) == ["line end", "space", "signs", "letters", "letters", "digits",
                                     "space", "signs", "line end"]
    text = "\nif x:\n\ty = {\n 1:\t \r\n\n \t\x0c\n}\na: \\n\n"
    ends = ["line end", "block begins", "block begins", "block begins", "blank line", "blank line",
            "line end", "line end"]
    sorts = maps.sorts_of([repr(character)[1:-1] for character in text])
    assert [sort for sort, character in zip(sorts, text) if character == "\n"] == ends
    labels = ["x:", "\\n\\n", "y", "\\n", ":\\n", "\\n ", "\\n"]  # tokens of several characters
    assert maps.sorts_of(labels) == ["signs", "blank line", "letters", "line end", "block begins",
                                     "blank line", "blank line"]
    with pytest.raises(SystemExit, match="counts nothing"):
        maps.steps_by_kind(make("diff"), config, args)
    monkeypatch.setattr(data.flipflop.Task, "batch", lambda self, *_: (x, np.full_like(y, -1)))
    with pytest.raises(SystemExit, match="nothing is scored in"):
        maps.steps_by_kind(model, config, args)
    monkeypatch.undo()
    command(trained, "maps.py", "counts", "tra", "cable", "--sequences", 2, "--pairs",
            "--out", home / "c.png")
    assert is_png(home / "c.png")
    said = complaint(home, "maps.py", "counts", trained / "tra", "--sequences", 0)
    assert "--sequences must be at least 1" in said


def test_maps_of_a_task_and_of_text(trained, home):
    kinds = "--kinds", "qk", "bias"
    for words in (("attention", trained / "tra", "--split", "dense", "--length", 24, *kinds),
                  ("attention", trained / "cable", "--prompt", "f(x): $", "--layer", 0),
                  ("steps", trained / "tra", trained / "rope", "--length", 30, "--seed", 3),
                  ("steps", trained / "cable", "--prompt", "alpha beta")):
        command(home, "maps.py", *words, "--out", "m", draw=True)
        assert is_png(home / "m.png")
        (home / "m.png").unlink()
    shutil.copytree(trained / "tra", home / "tra")
    command(home, "maps.py", "steps", "tra", "--length", 8)
    command(home, "maps.py", "steps", "tra", trained / "rope", "--length", 8)
    assert is_png(home / "tra" / "steps.png") and is_png(home / "out" / "steps.png")


def test_a_map_of_a_long_text_marks_its_lines(trained, monkeypatch):
    figures = drawn(monkeypatch)
    text = "alpha = 1\n\n" + "b" * 40 + "\n    gamma $x\n" + "d" * 20
    command(trained, "maps.py", "attention", "cable", "--prompt", text)
    first, second = [ax for ax in figures[0].axes if ax.get_title()][:2]
    starts = [0, 11, 12, 53, 66]  # the end-of-text token is before them
    assert list(first.get_xticks()) == list(first.get_yticks()) == starts
    marks = [label.get_text() for label in first.get_xticklabels()]
    assert marks == ["", "", "¶", "", ""] and "¶" in figures[0].get_suptitle()
    said = [label.get_text() for label in first.get_yticklabels()]
    assert said == ["·alpha = 1", "", "b" * 24, r"    gamma \$x", "d" * 20]  # the second is blank
    assert not any(label.get_text() for label in second.get_yticklabels())
    command(trained, "maps.py", "attention", "cable", "--prompt", "e\n" * 60)  # no room for all
    said = figures[1].axes[0].get_yticklabels()
    assert [label.get_text() for label in said][:7] == ["·e", "e", "", "e", "", "e", ""]
    command(trained, "maps.py", "attention", "cable", "--prompt", "e" * 90)  # has no lines
    assert len(next(ax for ax in figures[2].axes if ax.get_title()).get_yticks()) > 2


def test_a_map_shows_what_the_model_computes(trained, monkeypatch):
    """Titles, tokens, and under every token the attention that the literal form has."""
    figures = drawn(monkeypatch)
    command(trained, "maps.py", "attention", "tra", "--length", 12)
    axes = [ax for ax in figures[0].axes if ax.get_title()]
    kinds = "attention", "step", "distance", "position"
    assert [ax.get_title() for ax in axes] == [f"{k}, head {h}" for k in kinds for h in (0, 1)]
    model, config, _ = runs.load_run(trained / "tra" / "ckpt.pt", torch.device("cpu"))
    task = runs.make_task(config | dict(block_size=12))
    x, _ = task.batch("iid", 1, rng(0))
    labels = [t.get_text() for t in axes[0].get_xticklabels()]
    assert labels == task.show(x[0])
    found = maps.look(model, torch.from_numpy(x))[-1]
    alive = found["step"].any(-1)  # a query without a key attends to nothing
    assert np.abs(found["attention"].sum(-1) - alive).max() < 1e-5
    for n, ax in enumerate(axes[:2]):
        shown = ax.images[-1].get_array()
        assert shown.mask[0, 1] and not shown.mask[1, 0]  # what is later is not shown
        assert np.abs(np.tril(shown.filled(0) - found["attention"][n])).max() < 1e-6


def test_position_is_the_attention_if_all_contents_were_alike():
    model, idx = make("alibi"), torch.randint(0, 61, (1, 10))
    parts = maps.look(model, idx)[0]
    steps = np.arange(10)[:, None] - np.arange(10)
    for slope, position in zip((1 / 4, 1 / 16, 1 / 64, 1 / 256), parts["position"]):
        want = np.tril(np.exp(-slope * np.abs(steps)))
        assert np.abs(position - want).max() < 1e-6
    parts = maps.look(make("tra"), idx)[0]
    dropped = np.isinf(parts["bias"]) & np.tri(10, dtype=bool)
    assert dropped.any() and (parts["position"][dropped] == 0).all()
    kept = ~dropped & np.tri(10, dtype=bool)
    tops = parts["position"].max(-1)[kept.any(-1)]
    assert tops == pytest.approx(np.ones(len(tops)))


def test_the_sharpest_head_is_that_of_the_last_query():
    a = np.full((2, 2, 3, 3), 0.1)  # layers, heads, queries, keys
    a[0, 0, -1, 0], a[1, 0, -1, 2] = 0.5, 0.9
    a[0, 1, 0, 0] = a[1, 1, 0, 0] = 1.0  # another query's
    layers = [dict(attention=x) for x in a]
    assert maps.sharpest(layers)[:2] == (1, 0)
    assert maps.heads_to_show(layers, "sharpest") == ([(0, 0), (1, 0)], 1)


def test_steps_has_a_strip_of_attention_of_its_own(trained, home, monkeypatch):
    """For every model: bars of steps, the distances, below them the attention of one head."""
    figures = drawn(monkeypatch)
    flags = "--data", "flipflop", "--max_iters", 1, "--no-evaluate", *TINY_FLAGS
    command(home, "train.py", "--model", "diff", *flags, "--n_embd", 32, "--out_dir", "diff")
    command(home, "maps.py", "steps", trained / "tra", trained / "rope", "diff", "--length", 20)
    fig = figures[0]
    lanes = [ax for ax in fig.axes if ax.get_ylabel().endswith("\nstep")]
    strips = [ax for ax in fig.axes if ax.images]
    assert [ax.get_ylabel() for ax in lanes] == ["tra\nstep", "rope\nstep", "diff\nstep"]
    assert len(strips) == 3
    said = [ax.get_xlabel() or ax.xaxis.label.get_text() for ax in strips]
    assert runs.models()["tra"][0].STEP in said and runs.models()["rope"][0].STEP in said
    for name, lane, strip in zip(("tra", "rope", "diff"), lanes, strips):
        attention = strip.images[0].get_array()
        assert attention.shape == (1, 19) and strip.images[0].get_clim() == (0, 1)
        assert name == "diff" or attention.max() <= 1
        assert len(lane.patches) == (0 if name == "diff" else 19)  # bars
        said = [t.get_text() for t in lane.texts if t.get_text().startswith("no steps")]
        assert len(said) == (name == "diff")
    said = complaint(home, "maps.py", "attention", "diff", "--kinds", "step")
    assert "diff has no step to show, it has attention" in said
    legend = [t.get_text() for t in fig.legends[0].get_texts()]
    assert len(legend) == 3


def page_data(path):
    """What maps.py play wrote into a page: its JSON, and the template around it."""
    before, rest = path.read_text().split('<script type="application/json" id="data">')
    text, _, after = rest.partition("</script>")
    return json.loads(text), before + after


def unpacked(found, string):
    """A string's numbers in a page, as the page reads them -> [lane][head][kind] (T, T)."""
    planes = np.frombuffer(zlib.decompress(base64.b64decode(string["numbers"])), np.uint8)
    flat = np.ascontiguousarray(planes.reshape(4, -1).T).view("<i4")[:, 0].astype(float)
    T, at, lanes = len(string["tokens"]), 0, []
    for lane in found["lanes"]:
        heads = []
        for _ in lane["heads"]:
            parts = {}
            for kind in lane["kinds"]:
                x = flat[at:at + T * (T + 1) // 2]
                at += len(x)
                parts[kind] = np.zeros((T, T))
                parts[kind][np.tril_indices(T)] = x
            heads.append(parts)
        lanes.append(heads)
    assert at == len(flat)
    return lanes


def batch_of_one(task, split):
    """The sequence that maps.py shows: up to the last scored token."""
    x, y = task.batch(split, 1, rng(0))
    return x[:, :np.flatnonzero(y[0] != -1)[-1] + 1]


def test_a_page_to_play_with_holds_what_literal_says(trained, home):
    """Every number to two digits, the logit too; lengths and splits crossed; one head or all."""
    for heads in ("sharpest", "all"):
        command(home, "maps.py", "play", trained / "tra", trained / "rope", "--heads", heads,
                "--length", 12, 40, "--split", "dense", "sparse", "--out", "p.html")
        found, _ = page_data(home / "p.html")
        names = [string["name"] for string in found["strings"]]
        assert [name.split()[0] for name in names] == ["dense"] * 2 + ["sparse"] * 2
        for string, (split, T) in zip(found["strings"], itertools.product(
                ("dense", "sparse"), (12, 40))):
            lanes = unpacked(found, string)
            for lane, shown, name in zip(found["lanes"], lanes, ("tra", "rope")):
                model, config, _ = runs.load_run(trained / name / "ckpt.pt", torch.device("cpu"))
                task = runs.make_task(config | dict(block_size=T))
                x = batch_of_one(task, split)
                layers = maps.look(model, torch.from_numpy(x))
                assert string["tokens"] == task.show(x[0])
                assert len(lane["heads"]) == (2 if heads == "all" else 1) == len(shown)
                for (layer, head), parts in zip(lane["heads"], shown):
                    shows_these(parts, {k: v[head] for k, v in layers[layer].items()})
                assert lane["equation"] == runs.models()[name][0].EQUATION
        assert lane["name"] == "rope" and lane["trained"] == 16 and lane["literal"]


def shows_these(parts, exact):
    """One head's whole numbers in a page are the exact ones, as far as a page shows them."""
    seen = np.tri(len(parts["attention"]), dtype=bool)
    exact = exact | dict(carry=exact["qk"] + exact["bias"]) if "bias" in exact else exact
    for kind, whole in parts.items():
        unit = 1000 if kind == "attention" else 100
        known = seen & np.isfinite(exact[kind])
        if kind == "carry":  # of the logit
            whole = np.where(known, parts["qk"] + parts["bias"] + whole, -2**31)
        assert (np.abs(whole / unit - exact[kind])[known] <= .5 / unit + 1e-9).all(), kind
        assert (whole[seen & ~known] == -2**31).all() and (known.any() or not seen.any())


def test_a_page_of_numbers_that_are_large_or_not_finite():
    """Distances of hundreds of thousands; what is infinite, or larger than all, is told apart."""
    exact = dict(qk=np.array([[1.005, 0], [-3.456, 2]]), bias=np.array([[-INF, 0], [-1e30, 7e5]]),
                 step=np.array([[1.0, 0], [np.nan, 1]]), attention=np.full((2, 2), .0004999),
                 distance=np.array([[123456.784, 0], [9e6, 0]]))
    parts = maps.in_units({kind: x[None] for kind, x in exact.items()}, 0)
    assert parts["distance"].tolist() == [12345678, 9e8, 0] and parts["qk"].tolist()[1] == -346
    assert parts["bias"].tolist() == [-2**31, -2**31, 7e7] and not parts["attention"].any()
    assert parts["step"].tolist() == [100, -2**31, 100] and parts["carry"].tolist() == [0, 0, 0]
    packed = zlib.decompress(base64.b64decode(maps.packed(parts["bias"])))
    assert packed == b"\0\0\x80\0\0\x1d\0\0\x2c\x80\x80\x04"


def test_the_page_that_is_committed_is_the_template_as_it_is():
    """And small enough; its numbers are of alibi, fox, cable, cope and tra, at 1 and 4 lengths."""
    _, template = page_data(ROOT / "play.html")
    assert template.count("\n") <= 250 and max(map(len, template.splitlines())) <= 100
    for word in ("http:", "https:", " src=", "import ", "fetch(", "@font-face", "url("):
        assert word not in template, word
    for name in ("play.html", "play_text.html"):
        path = ROOT / "results" / name
        found, ours = page_data(path)
        assert ours == template and path.stat().st_size < 2_000_000
        for string in found["strings"]:
            unpacked(found, string)
        names = [lane["name"] for lane in found["lanes"]]
        if name == "play.html":
            assert names == ["alibi", "fox", "cable", "cope", "tra"]
            assert {len(s["tokens"]) // 60 for s in found["strings"]} == {1, 4}


def test_a_page_that_would_be_too_large_says_what_to_leave_out(trained, home, monkeypatch):
    monkeypatch.setattr(maps, "PAGE_LIMIT", 1000)
    words = "maps.py", "play", trained / "tra", "--length", 12
    for more, spare in ((("--heads", "all"), "leave out --heads all"), ((), "tokens, by --length"),
                        ((20, "--split", "iid"), "leave out a string"),
                        ((20, "--heads", "all"), "leave out --heads all or a string")):
        said = complaint(home, *words, *more)
        assert "the limit is 0.001: leave out" in said and said.endswith(spare)
    assert not (home / "out").exists()


def test_a_page_of_forks(fork, copy):
    """An edited step, and a file without a literal form: its attention alone; a hostile prompt."""
    fork("fox", ("bias = -distance", "bias = -3 * distance"),
         ('STEP = "-log f_k', 'STEP = "</script><b>three</b> -log f_k'))
    command(copy, "train.py", "--model", "mine", *TINY_RUN)
    words = "maps.py", "play", "out/mine-flipflop-nano", "--length", 12, "--out", "p.html"
    command(copy, *words)
    found, _ = page_data(copy / "p.html")
    parts = unpacked(found, found["strings"][0])[0][0]
    assert np.abs(parts["bias"] + 3 * parts["distance"]).max() < 3
    assert found["lanes"][0]["step"].startswith("</script><b>three</b>")
    source = (copy / "model_mine.py").read_text()
    before, _, rest = source.partition("def literal(")
    (copy / "model_mine.py").write_text(before + rest.partition("\n\n\n")[2])
    runs.models.cache_clear()
    del sys.modules["model_mine"]
    out, _ = command(copy, *words)
    assert "model_mine.py has no literal form: its attention is all" in out
    found, _ = page_data(copy / "p.html")
    assert found["lanes"][0]["kinds"] == ["attention"] and not found["lanes"][0]["literal"]


class Browser:
    """A page in headless Chromium, which is spoken to over a pipe (the DevTools protocol)."""
    NAMES = "chromium", "chromium-browser", "google-chrome", "chrome"
    CODES = dict(Tab=9, End=35, Home=36, ArrowLeft=37, ArrowRight=39)

    def __init__(self, page, home, width=1440):
        down, self.to = os.pipe()
        self.back, up = os.pipe()
        program = next(filter(None, map(shutil.which, self.NAMES)))
        flags = ("--headless=new --no-sandbox --disable-gpu --remote-debugging-pipe "
                 f"--user-data-dir={home / 'profile'}").split()
        self.process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{down} 4>&{up}', "bash", program, *flags],
            pass_fds=(down, up), stderr=subprocess.DEVNULL)
        os.close(down)
        os.close(up)
        self.n, self.rest, self.said, self.session = 0, b"", [], {}
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        found = self.ask("Target.attachToTarget", targetId=target, flatten=True)
        self.session = dict(sessionId=found["sessionId"])
        for domain in ("Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=900,
                 deviceScaleFactor=1, mobile=False)
        self.ask("Page.navigate", url=page.as_uri())
        self.until("document.querySelector('dd')?.textContent")

    def ask(self, method, **params):
        """A command -> its result; what the page says in between is kept in `said`."""
        self.n += 1
        message = dict(id=self.n, method=method, params=params) | self.session
        os.write(self.to, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self.rest:
                assert select.select([self.back], [], [], 60)[0], f"no answer to {method}"
                self.rest += os.read(self.back, 1 << 16)
            one, _, self.rest = self.rest.partition(b"\0")
            one = json.loads(one)
            if one.get("id") == self.n:
                assert "error" not in one, one
                return one["result"]
            self.said.append((one["method"], one["params"]))

    def js(self, text):
        found = self.ask("Runtime.evaluate", expression=text, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, text):
        end = time.time() + 30
        while not self.js(text):
            assert time.time() < end, f"never: {text}"
            time.sleep(.02)

    def key(self, name, shift=False):
        for kind in ("keyDown", "keyUp"):
            self.ask("Input.dispatchKeyEvent", type=kind, key=name, code=name,
                     windowsVirtualKeyCode=self.CODES[name], modifiers=8 * shift)

    def point(self, svg, token, click=False):
        """The mouse over a token of the string (svg 0) or of a lane, 1 and more."""
        box = self.js(f"(b => [b.x, b.y])(document.querySelectorAll('svg')[{svg}]"
                      ".getBoundingClientRect())")
        cell = self.js("parseFloat(page.style.getPropertyValue('--cell'))")
        where = dict(x=box[0] + (token + .5) * cell, y=box[1] + 10)
        self.ask("Input.dispatchMouseEvent", type="mouseMoved", **where)
        for kind in ("mousePressed", "mouseReleased"):
            if click:
                self.ask("Input.dispatchMouseEvent", type=kind, **where,
                         button="left", clickCount=1)

    def numbers(self, lane):
        """What a lane's list and its equation say, by kind."""
        found = self.js(f"[...document.querySelectorAll('.lane')[{lane}].querySelectorAll("
                        "'[data-kind]')].map(x => [x.dataset.kind, x.textContent])")
        return {kind: text.replace("−", "-") for kind, text in found if kind}

    def where(self):
        """The query and the key, from 0."""
        found = re.findall(r"(?:query|key) (\d+)", self.js("where.textContent"))
        return [int(n) - 1 for n in found]

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.to)
        os.close(self.back)


@pytest.mark.slow
@pytest.mark.skipif(not any(map(shutil.which, Browser.NAMES)), reason="needs Chromium")
def test_the_page_in_a_browser(trained, home):
    """Arrow keys, pointer, tab order, head and string; the numbers that it shows are literal's."""
    flags = "--data", "flipflop", "--max_iters", 1, "--no-evaluate", *TINY_FLAGS
    command(home, "train.py", "--model", "diff", *flags, "--n_embd", 32, "--out_dir", "diff")
    command(home, "maps.py", "play", "diff", trained / "rope", trained / "tra", "--heads", "all",
            "--length", 16, 48, "--out", "p.html")
    command(home, "maps.py", "play", trained / "cable", "--prompt", "</script> $", "x\ny",
            "--out", "text.html")
    parts = []
    model, config, _ = runs.load_run(trained / "tra" / "ckpt.pt", torch.device("cpu"))
    for T in (16, 48):
        x = batch_of_one(runs.make_task(config | dict(block_size=T)), "iid")
        parts.append(maps.look(model, torch.from_numpy(x))[0])
    browser = Browser(home / "p.html", home)
    try:
        play_with(browser, parts)
        browser.ask("Page.navigate", url=(home / "text.html").as_uri())
        browser.until("document.querySelectorAll('.top text')[1]?.textContent === '<'")
        name = browser.js("document.querySelector('button').textContent")
        assert name == "</script> $ (12 tokens)"
        asked = [p["request"] for m, p in browser.said if m == "Network.requestWillBeSent"]
        assert {one["url"][:5] for one in asked} <= {"file:", "data:"} and len(asked) >= 2
        loud = "Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"
        assert [said for said in browser.said if said[0] in loud] == []
    finally:
        browser.close()


def play_with(browser, parts):
    """parts: what tra's one layer, the last lane, says about both strings."""
    def shows(string, head):
        i, j = browser.where()
        found, exact = browser.numbers(2), {k: v[head, i, j] for k, v in parts[string].items()}
        assert found.pop("attention") == f"{exact['attention']:.3f}"
        dropped = np.isinf(exact["bias"])
        assert (found.pop("bias") == "dropped") == dropped == (found["logit"] == "-∞")
        exact["logit"] = exact["qk"] + exact["bias"]
        for kind in ("qk", "step", "distance", "logit")[:3 if dropped else 4]:
            assert abs(float(found[kind]) - exact[kind]) <= .005 + 1e-6 and found[kind][-3] == "."
        return dropped

    T, longer = (len(p["qk"][0]) for p in parts)
    assert browser.where()[0] == T - 1 and T > 13
    head = browser.js("document.querySelectorAll('select')[2].selectedIndex")
    kinds = [{shows(0, head)}]
    for key, shift, want in (("Home", True, [T - 1, 0]), ("ArrowRight", True, [T - 1, 1]),
                             ("ArrowLeft", False, [T - 2, 1]), ("Home", False, [0, 0]),
                             ("ArrowLeft", False, [0, 0]), ("End", False, [T - 1, 1])):
        browser.key(key, shift)
        assert browser.where() == want
        shows(0, head)
    browser.point(0, 9)                       # pointing looks, and what was held comes back
    assert browser.where() == [9, 1]
    shows(0, head)
    browser.point(3, 5)
    assert browser.where() == [T - 1, 5]
    browser.point(3, 6, click=True)
    browser.point(0, 10, click=True)
    assert browser.where() == [10, 6]
    browser.point(3, 12, click=True)          # a later key is none
    assert browser.where() == [10, 6]
    for key in range(11):
        browser.point(3, key, click=True)
        kinds.append({shows(0, head)})
    assert set().union(*kinds) == {True, False}
    browser.js("(s => { s.selectedIndex = 1 - s.selectedIndex; s.onchange(); })"
               "(document.querySelectorAll('select')[2])")
    shows(0, 1 - head)
    browser.js("document.querySelectorAll('button')[1].click()")
    browser.until(f"document.querySelectorAll('.top text').length === {longer}")
    assert browser.where()[0] == longer - 1
    shows(1, 1 - head)
    browser.js("document.activeElement.blur(); document.querySelector('main').focus()")
    order = []
    for _ in range(8):
        browser.key("Tab")
        order.append(browser.js("document.activeElement.id || document.activeElement.tagName"))
    wanted = ["BUTTON", "BUTTON", "whole", "string", "SELECT", "SELECT", "SELECT"]
    assert " ".join(wanted) in " ".join(order * 2)
    assert "no steps to show" in browser.js("document.querySelector('.lane').innerText")
    assert browser.js("document.documentElement.scrollWidth <= innerWidth")
