"""results/ and README.md hold what the JSON says."""
import json
import re
import shlex

import pytest
import torch

import lab
from common import names
from common.files import lines_of
from common.settings import new_settings
from lab import find, pages
from reproduce import plan
from tests.helpers import ROOT, command, is_png, markdown_tables

PAGES = sorted((ROOT / "results").rglob("*.md"))
TEXTS = {path: path.read_text(encoding="utf-8")
         for path in [ROOT / "README.md", ROOT / "GUIDE.md", *PAGES]}
BLOCKS = [block for path in PAGES for block in pages.BLOCK.finditer(TEXTS[path])]
SCALES = [(name, scale) for name, entry in lab.entries().items()
          for scale in lab.SCALES if scale in entry]


def test_every_table_of_a_page_is_what_the_json_says():
    for block in BLOCKS:
        assert block[0] == pages.filled_block(block), (
            f"{block[2]} is not what it would be: run python -m lab.pages")
    shown = [block[2] for block in BLOCKS]
    for name, entry in lab.entries().items():
        assert not entry.keys() & {"cpu", "gpu"} or shown.count(name) == 1, name


def test_every_run_is_one_of_a_table_and_says_where_it_is_from():
    """
    A file is one that a table plans, of its row and seed; a model's name means what it meant;
    command, hardware, versions, commit and settings.
    """
    planned = {}
    for name, scale in SCALES:
        jobs = plan(find(name, scale), seeds=10)
        planned |= {job.path: job for job in jobs}
        assert len({job.path for job in jobs}) == len(jobs), name  # rows have names of their own
    paths = sorted((ROOT / "results" / "runs").rglob("*.json"))
    assert len(paths) >= 494
    for path in paths:
        text = path.read_text(encoding="utf-8")
        job = planned[path]
        result = json.loads(text)
        assert text == lines_of(result) + "\n", f"{path} is not as write_json writes it"
        assert result["command"].startswith("python ")
        assert not re.search("/work|NaN|Infinity", text)
        made = [result, *result.get("schemes", {}).values(), *result.get("runs", ())]
        for run in made[1:] if job.trainings else ():
            assert run["label"] == job.label
            assert run.get("task", "") == job.task
            assert path.stem.endswith(f"-{run['seed']}")
            assert run["train_seconds"] >= 0
            assert run["train_command"].startswith("python train.py ")
            means = names.models()[run["config"]["model"]][1]  # -1 is of block_size
            asked = {f for f in means if f"--{f} " in run["train_command"] or means[f] == -1}
            assert all(run["config"][f] == means[f] for f in means.keys() - asked), path
        for environment in [part["environment"] for part in made]:
            assert environment["torch"]
            assert environment["cpu"]
            assert environment["commit"] != "unknown"


@pytest.mark.slow
@pytest.mark.parametrize("name, scale", SCALES)
def test_every_row_of_a_table_can_be_built(name, scale):
    """Its flags are train.py's, and its model takes them; of its layers four are enough."""
    jobs = plan(find(name, scale), text=("stdlib", ""))
    with torch.device("meta"):
        for job in {(job.label, job.task): job for job in jobs if job.trainings}.values():
            config = vars(new_settings(job.trainings[-1][1][2:]))
            config |= dict(n_layer=min(4, config["n_layer"]), vocab_size=99)
            assert sum(p.numel() for p in names.make_model(config).parameters())


def test_every_picture_and_link_is_there():
    headings = {path: {re.sub(r"[^\w -]", "", line.lower()).replace(" ", "-")
                       for line in re.findall("^#+ (.*)$", text, re.M)}
                for path, text in TEXTS.items()}
    for path, text in TEXTS.items():
        for link, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", text):
            other = (path.parent / link).resolve() if link else path
            assert link.startswith("http") or other.exists(), (path, link)
            assert other.suffix != ".png" or is_png(other), (path, link)
            assert not anchor or anchor in headings.get(other, {anchor}), (path, anchor)
        named = re.findall(r"reproduce\.py\s+([a-z]\w+)", text)
        assert set(named) <= lab.entries().keys(), path


def test_the_numbers_of_the_front_page_are_those_of_the_json():
    """Every cell of README.md's table is in the table of a page that its column is from."""
    readme = TEXTS[ROOT / "README.md"]
    ours, = markdown_tables(readme.partition("<!-- results -->")[2].partition("<!-- /results")[0])
    shown = {block[2]: markdown_tables(block[0]) for block in BLOCKS}
    text, rates, recall, with_qk_norm, repairs, bench = (
        shown[name][0] for name in ("lm", "lm_rates_long", "recall_no_qk_norm", "recall",
                                    "bench.repairs", "bench.cpu"))
    recall |= {"tra": {}, "tra pre qk-norm": with_qk_norm["tra"]}  # as their norms are on text
    text["fox open"], recall["fox open"] = rates["fox open, 4e-3"], recall["fox open, 3e-3"]
    repairs["fox open"], bench["fox open"] = repairs["fox"], bench["fox"]
    columns = {"256": (text, "256"), "4,096": (text, "4,096"),
               "recall, 1,024": (recall, "1,024"), "training speed": (bench, "of nope's"),
               "time a token": (repairs, "times nope's")}
    assert len(ours) >= 5
    for label, cells in ours.items():
        for heading, cell in cells.items():
            if heading == "seeds":
                assert cell == f"{text[label]['seeds']}, {recall[label]['seeds']}"
                continue
            theirs, name = columns[heading]
            assert cell == theirs.get(label, {}).get(name, ""), (label, heading)
    said = re.search(r"about (\S+) in windows of 256 tokens and (\S+) in windows of 4,096",
                     " ".join(readme.split()))
    path = ROOT / "results" / "runs" / "cable_table1.cpu" / "cable-1337.json"
    run, = json.loads(path.read_text(encoding="utf-8"))["runs"]
    assert said.groups() == tuple(f"{run['perplexity'][T]:.2f}" for T in ("256", "4096"))


def test_the_commands_of_the_front_page_have_these_flags(trained):
    """Every script that README.md calls is there, and knows the flags that it is given."""
    calls = re.findall(r"(?:python|torchrun --nproc_per_node \d+) (?:-m )?([\w.]+)([^\n`#]*)",
                       TEXTS[ROOT / "README.md"])
    assert len(calls) > 8
    for script, words in calls:
        words = shlex.split(words)
        figure = [word for word in words[:1] if script in ("figures.plot", "figures.maps")]
        said, _ = command(trained, script, *figure, "--help")
        for flag in words:
            assert not flag.startswith("--") or f"{flag} " in said, (script, flag)
