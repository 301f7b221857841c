"""results/ and README.md hold what the JSON says."""
import json
import re
import shlex

import experiments
import runs
from experiments import tables
from tests.helpers import ROOT, command, is_png, markdown_tables


def test_the_page_of_results_is_written_from_the_json():
    assert tables.page() == (ROOT / "results" / "README.md").read_text()


def test_committed_json_is_compact_and_says_where_it_is_from():
    """A run or trial a line; the command, hardware, versions and commit of every measurement."""
    for path in sorted((ROOT / "results").glob("*.json")):
        text = path.read_text()
        result = json.loads(text)
        deepest = max(len(line) - len(line.lstrip(" ")) for line in text.splitlines())
        assert deepest <= 8 and text.count("\n") < 1500, path.name
        assert result["command"].startswith("python "), path.name
        if path.name != "contrast.json":
            made = result["environment"]
            assert made["torch"] and made["commit"] != "unknown" and (made["cpu"] or made["gpu"])
        assert runs.in_lines(result) + "\n" == text, f"{path.name} is not as write_json has it"


PAGES = [ROOT / name for name in ("README.md", "GUIDE.md", "results/README.md",
                                  "results/findings.md")]


def test_every_picture_of_the_pages_is_there():
    for page in PAGES[:3]:
        found = re.findall(r"!\[[^]]*\]\((\S+?)\)", page.read_text())
        assert found
        for picture in found:
            assert is_png(page.parent / picture), picture


def test_every_link_and_every_entry_that_a_page_names_is_there():
    for page in PAGES:
        text = page.read_text()
        links = re.findall(r"\]\(([^)#\s]+)", text)
        assert links
        for link in links:
            assert link.startswith("http") or (page.parent / link).exists(), (page, link)
        named = set(re.findall(r"reproduce\.py\s+([a-z]\w+)", text))
        assert named and named <= set(experiments.known()), page


def test_the_readmes_perplexities_are_those_of_its_run():
    text = " ".join((ROOT / "README.md").read_text().split())
    said = re.search(r"about (\d\.\d\d) in windows of 256 tokens and (\d\.\d\d) in windows", text)
    found = json.loads((ROOT / "results" / "cable_table1.cpu.json").read_text())["runs"][0]
    assert found["model"] == "cable" and found["seed"] == 1337
    assert said.groups() == tuple(f"{found['perplexity'][T]:.2f}" for T in ("256", "4096"))


def test_the_numbers_of_the_front_page_are_those_of_the_json():
    """Every cell of README.md's table is in the table of one result, in its row and column."""
    text = (ROOT / "README.md").read_text()
    text = text.partition("<!-- results -->")[2].partition("<!-- /results -->")[0]
    ours, = markdown_tables(text)
    assert sum(map(len, ours.values())) >= 6
    matching = []
    for path in (ROOT / "results").glob("*.json"):
        result = json.loads(path.read_text())
        if "entry" in result:
            theirs, = markdown_tables(tables.table(result))[:1]
            rows = [ours[name].items() <= theirs.get(name, {}).items() for name in ours]
            matching += [path.name] if all(rows) else []
    assert len(matching) == 1, f"a number is from {matching or 'no'} result"


def test_the_commands_of_the_front_page_have_these_flags(trained):
    """Every script that README.md calls is there, and knows the flags that it is given."""
    text = (ROOT / "README.md").read_text()
    found = re.findall(r"(?:python|torchrun --nproc_per_node \d+) (\w+\.py)([^\n`#]*)", text)
    assert len(found) > 8
    for script, words in found:
        words = shlex.split(words)
        kind = [word for word in words[:1] if script in ("plot.py", "maps.py")]
        known, _ = command(trained, script, *kind, "--help")
        for flag in words:
            assert not flag.startswith("--") or f"{flag} " in known, (script, flag)
