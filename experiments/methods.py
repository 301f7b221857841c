"""
The table "Which method?" of results/README.md, which python -m experiments.pages fills.

A row is one configuration: its norms are those of its runs on text. A score that was measured with
other norms says with which. Numbers are read from results/, words are written here.
"""
import statistics
from typing import NamedTuple

from common.files import ROOT, fail, read_json
from experiments.papers.matrix import COLUMNS
from experiments.runs import table
from experiments.tables import at_length, markdown

FLAT, BREAKS = 1.02, 1.5  # the ratio of flatness() up to which a method is flat, or rises


class Method(NamedTuple):
    """A row: where its numbers are (nothing was measured where a name is empty), and words."""
    name: str      # its row of lm
    bench: str     # its name in bench.cpu.json (training) and bench.repairs.json (decoding)
    books: str     # its row of lm_books_14M.json
    recall: str    # "entry: row"
    flipflop: str  # "entry: row"
    needs: str
    pick: str
    avoid: str


METHODS = [
    Method("cable", "cable", "cable", "recall_no_qk_norm: cable", "tra_norm: cable pre",
           "a kernel on a GPU", "you train anew: reads far, recalls", "you cannot train anew"),
    Method("alibi", "alibi", "alibi", "recall_no_qk_norm: alibi", "matrix: alibi",
           "a fixed bias", "you train anew, no new parameters", "state has to be kept"),
    Method("kerple", "kerple", "", "recall_no_qk_norm: kerple", "matrix: kerple",
           "a learned bias", "you want ALiBi's bias learned", "rates cannot be searched"),
    Method("fox", "fox", "", "recall_no_qk_norm: fox", "tra_norm: fox pre",
           "a kernel on a GPU", "you follow its paper",
           "it has to recall, and its gate starts closed"),
    Method("stick", "stick", "", "recall_no_qk_norm: stick", "matrix: stick",
           "a kernel that is not here", "state is overwritten",
           "it has to recall, and its gate starts closed"),
    Method("path", "path", "", "recall_no_qk_norm: path", "matrix: path",
           "a kernel that is not here", "one layer has to keep state", "text is far longer"),
    Method("cope", "cope", "cope (1,000 steps)", "recall_no_qk_norm: cope", "tra_norm: cope pre",
           "a kernel on a GPU", "you copy, or count from few programs", "text is far longer"),
    Method("tra", "tra", "tra (2,029 steps)", "", "tra_norm: tra post qk-norm",
           "a kernel on a GPU", "you repeat its paper", "training is short: some seeds fail"),
    Method("tra pre qk-norm", "", "", "recall: tra", "tra_norm: tra pre qk-norm",
           "a kernel on a GPU", "state is overwritten, it has to recall", "the task is small text"),
    Method("nope", "nope", "", "recall_no_qk_norm: nope", "matrix: nope",
           "nothing", "the task is recall alone", "the task is text"),
    Method("rope", "rope", "rope", "recall_no_qk_norm: rope", "flipflop_rope: rope",
           "nothing", "nothing is longer than in training", "a text is longer"),
    Method("rope, window", "rope, window", "rope, window", "recall_no_qk_norm: rope, window",
           "flipflop_rope: rope, window", "a trained RoPE",
           "it has to stay fluent", "it has to recall"),
    Method("rope, rerope", "rope, rerope", "", "recall_no_qk_norm: rope, rerope",
           "flipflop_rope: rope, rerope", "a trained RoPE",
           "it has to recall", "time counts: a token takes 5 x RoPE's"),
    Method("rope, selfextend", "rope, selfextend", "", "recall_no_qk_norm: rope, selfextend",
           "flipflop_rope: rope, selfextend", "a trained RoPE",
           "it has to recall", "text is far longer: ReRoPE rises less"),
    Method("rope, yarn", "rope, yarn", "rope, yarn", "recall_no_qk_norm: rope, yarn",
           "flipflop_rope: rope, yarn", "a trained RoPE",
           "you train on with it", "it is not trained on"),
    Method("rope_nope", "rope_nope", "", "recall_no_qk_norm: rope_nope", "flipflop_rope: rope_nope",
           "layers of two kinds", "you want a quarter of the cache",
           "training is short: recall takes 4 x the steps"),
]
HEADS = ["method", "norms", "evidence", "parameters", "training speed", "time a token",
         "text, 0.8M", "text, 14M", "recall", "flip-flop", "needs", "pick it when", "avoid it when"]


def methods_table():
    train = read_json(ROOT / "results" / "bench.cpu.json")["train"]
    decode = read_json(ROOT / "results" / "bench.repairs.json")["decode"]
    books = read_json(ROOT / "results" / "lm_books_14M.json")["runs"]
    return markdown(HEADS, [cells_of(m, train, decode, books) for m in METHODS])


def cells_of(m, train, decode, books):
    text, norms = runs_of(f"lm: {m.name}")
    speed, time = "", ""
    if m.bench in train:
        speed = f"{train[m.bench]['of_nope']:.2f}"
    if m.bench in decode:
        time = f"{decode[m.bench]['times_nope']:.2f}"
    of_books = [run for run in books if run["label"] == m.books]
    evidence = ("●" if len(text) >= 3 else "○") + ("●" if of_books else "○")
    return [m.name, norms, evidence, f"{text[0]['parameters']:,}", speed, time, flatness(text),
            flatness(of_books),
            score(m.recall, "recall: at 16 x", norms),
            score(m.flipflop, "flip-flop: worst, 16 x", norms), m.needs, m.pick, m.avoid]


def runs_of(where):
    """"entry: row" -> its runs and their norms. Of the matrix: those of flip-flop."""
    entry, _, row = where.partition(": ")
    runs = [run for run in table(entry, "cpu")["runs"]
            if run["label"] == row and run.get("task") in (None, "flipflop")]
    norms = {run["config"]["norm"] + (", QK" if run["config"]["qk_norm"] else "") for run in runs}
    if len(norms) != 1:
        fail(f"{where} is not one configuration: {' and '.join(sorted(norms))}")
    return runs, norms.pop()


def flatness(runs):
    """In a word, and the strided perplexity at 16 times the training length over that at twice."""
    T = runs[0]["block_size"] if runs else 0
    near, far = (at_length(runs, "strided", n * T) for n in (2, 16))
    if not near:
        return ""
    ratio = statistics.mean(y / x for x, y in zip(near, far))
    word = "flat" if ratio < FLAT else "rises" if ratio < BREAKS else "breaks"
    return f"{word}, {ratio:.3f}"


def score(where, column, norms):
    """A column of the matrix, mean over the seeds, and the norms where these are others."""
    if not where:
        return ""
    runs, theirs = runs_of(where)
    read, asked = COLUMNS[column]["read"], COLUMNS[column]["asked"]
    mean = statistics.mean(run["values"][column] if "values" in run else read(run, *asked)
                           for run in runs)
    return f"{mean:.1f}" + (f" ({theirs})" if theirs != norms else "")
