"""results/ and README.md hold what the JSON says."""
import json
import re
import shlex
from collections import Counter

import pytest
import torch

import experiments
from common import names
from common.settings import new_settings
from experiments import find, pages, slug
from reproduce import plan
from tests.helpers import ROOT, command, is_png, markdown_tables

PAGES = sorted((ROOT / "results").glob("*.md"))
TEXTS = {path: path.read_text(encoding="utf-8")
         for path in [ROOT / "README.md", ROOT / "GUIDE.md", *PAGES]}
TABLES = {block[2]: block[0] for path in PAGES for block in pages.BLOCK.finditer(TEXTS[path])}


def test_every_table_of_a_page_is_what_the_json_says():
    blocks = [block for path in PAGES for block in pages.BLOCK.finditer(TEXTS[path])]
    for block in blocks:
        name = block[2]
        assert block[0] == pages.filled_block(block, "a page"), (
            f"{name} is not what it would be: run python -m experiments.pages")
    tables = Counter(block[2] for block in blocks)
    for name, entry in experiments.entries().items():
        asked = entry.keys() & {"cpu", "gpu"}
        assert not asked or tables[name] == 1, f"{name} has {tables[name]} tables"


def test_every_run_is_one_of_a_table_and_says_where_it_is_from():
    """
    A file's name is its row's, its seed's; a model's name means what it meant; command, hardware,
    versions, commit and settings.
    """
    seen = 0
    for folder in (ROOT / "results" / "runs").iterdir():
        name, _, scale = folder.name.rpartition(".")
        part = find(name, scale).part
        for path in sorted(folder.rglob("*.json")):
            seen += 1
            text = path.read_text(encoding="utf-8")
            result = json.loads(text, parse_constant=None)
            assert "NaN" not in text and "Infinity" not in text
            assert result["command"].startswith("python ") and "/work" not in text
            environments = [result["environment"]]
            if "panels" in part:
                assert path.stem in map(slug, [*part["panels"], "theorem"])
                environments += [s["environment"] for s in result.get("schemes", {}).values()]
            else:
                run, = result["runs"]
                assert run["label"] in part["rows"] and path.parent.name in (
                    folder.name, *part.get("tasks", ()))
                assert path.stem == f"{slug(run['label'])}-{run['seed']}"
                assert run["config"]["seed"] == run["seed"] and run["train_seconds"] >= 0
                assert run["train_command"].startswith("python train.py ")
                means = names.models()[run["config"]["model"]][1]  # -1 is of block_size
                asked = {f for f in means if f"--{f} " in run["train_command"] or means[f] == -1}
                assert all(run["config"][f] == means[f] for f in means.keys() - asked), path
                environments.append(run["environment"])
            for made in environments:
                assert made["torch"] and made["cpu"] and made["commit"] != "unknown"
    assert seen >= 494


def test_the_rows_of_a_table_have_names_of_their_own():
    for name, entry in experiments.entries().items():
        for scale in entry.keys() & set(experiments.SCALES):
            names = [*map(slug, entry[scale].get("rows", entry[scale].get("panels")))]
            assert len(set(names)) == len(names), name


SCALES = [(name, scale) for name, entry in experiments.entries().items()
          for scale in experiments.SCALES if "rows" in entry.get(scale, {})]


@pytest.mark.slow
@pytest.mark.parametrize("name, scale", SCALES)
def test_every_row_of_a_table_can_be_built(name, scale):
    """Its flags are train.py's, and its model takes them; of its layers four are enough."""
    jobs = plan(find(name, scale), text=("stdlib", ""))
    with torch.device("meta"):
        for job in {(job.label, job.task): job for job in jobs}.values():  # of a row one seed
            config = vars(new_settings(job.trainings[-1][1][2:]))
            config |= dict(n_layer=min(4, config["n_layer"]), vocab_size=99)
            assert sum(p.numel() for p in names.make_model(config).parameters())


def test_every_table_and_figure_of_a_paper_has_its_verdict():
    """As the papers number them, in the first table of a page."""
    count = dict(cable=(4, 6), cope=(10, 6), tra=(2, 4), postnorm=(0, 7))
    for name, numbers in count.items():
        said = TEXTS[ROOT / "results" / f"{name}.md"].partition("\n## ")[0]
        said = re.sub(r"Figures ([\d, and]+)", lambda m: " ".join(
            f"Figure {n}" for n in re.findall(r"\d+", m[1])), said)
        for kind, n in zip(("Table", "Figure"), numbers):
            wanted = {f"{kind} {i + 1}" for i in range(n)}
            assert wanted <= set(re.findall(rf"{kind} \d+", said)), name


def test_every_picture_and_link_of_a_page_is_there():
    for path, text in TEXTS.items():
        for picture in re.findall(r"!\[[^]]*\]\((\S+?)\)", text):
            assert is_png(path.parent / picture), (path, picture)
        for link in re.findall(r"\]\(([^)#\s]+)", text):
            assert link.startswith("http") or (path.parent / link).exists(), (path, link)
        named = set(re.findall(r"reproduce\.py\s+([a-z]\w+)", text))
        assert named <= set(experiments.entries()), path


def test_every_link_into_a_page_has_its_heading():
    for path, text in TEXTS.items():
        for page, anchor in re.findall(r"\]\(([\w./]*\.md)?#([^)\s]+)\)", text):
            other = (path.parent / page).resolve() if page else path
            headings = re.findall(r"^#+ (.*)$", TEXTS[other], re.M)
            slugs = {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}
            assert anchor in slugs, (path, anchor)


def test_a_verdict_is_one_of_four():
    four = {"holds here", "contradicted here", "too small to tell", "not run"}
    for path in PAGES:
        first = TEXTS[path].partition("\n## ")[0]
        for line in re.findall(r"^\|.*\| verdict \|.*\n\|[-|]+\n((?:\|.*\n)+)", first, re.M):
            said = {row.split(" | ")[1] for row in line.splitlines()}
            assert said <= four, (path, said - four)


def test_the_readmes_perplexities_are_those_of_its_run():
    text = " ".join(TEXTS[ROOT / "README.md"].split())
    said = re.search(r"about (\d\.\d\d) in windows of 256 tokens and (\d\.\d\d) in windows", text)
    path = ROOT / "results" / "runs" / "cable_table1.cpu" / "cable-1337.json"
    run, = json.loads(path.read_text(encoding="utf-8"))["runs"]
    assert said.groups() == tuple(f"{run['perplexity'][T]:.2f}" for T in ("256", "4096"))


def test_the_numbers_of_the_front_page_are_those_of_the_json():
    """Every cell of README.md's table is in the table of a page that its column is from."""
    text = TEXTS[ROOT / "README.md"].partition("<!-- results -->")[2]
    ours, = markdown_tables(text.partition("<!-- /results -->")[0])
    text, rates, recall, with_qk_norm, repairs, bench = (
        markdown_tables(TABLES[name])[0]
        for name in ("lm", "lm_rates_long", "recall_no_qk_norm", "recall", "bench.repairs",
                     "bench.cpu"))
    recall |= {"tra": {}, "tra pre qk-norm": with_qk_norm["tra"]}  # as their norms are on text
    text["fox open"], recall["fox open"] = rates["fox open, 4e-3"], recall["fox open, 3e-3"]
    repairs["fox open"], bench["fox open"] = repairs["fox"], bench["fox"]
    columns = {"256": (text, "256"), "4,096": (text, "4,096"),
               "recall, 1,024": (recall, "1,024"), "training speed": (bench, "of nope's"),
               "time a token": (repairs, "times nope's")}
    assert len(ours) >= 5
    for label, cells in ours.items():
        for heading, cell in cells.items():
            theirs, name = columns[heading]
            assert cell == theirs.get(label, {}).get(name, ""), (label, heading)


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
