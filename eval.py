"""
Score checkpoints: on text by perplexity far beyond the training length, on a task by its errors on
every test set, in retrieval by nDCG@10.

    python eval.py                                   the newest checkpoint
    python eval.py out/cable-* out/rope-*            several, in one table and one figure
    python eval.py --lengths 512 16384 --tokens 0    other lengths, the whole split
    python eval.py out/tra-flipflop-nano --lengths 128 1024 --sequences 10000

Text is cut into windows of 1, 2, 4, 8 and 16 x the training length that do not overlap; **every
length scores the same tokens**. In longer windows fewer tokens have little context, which alone can
make the curve fall; --strided removes that. A task's sequences are drawn anew, the same for every
model. Writes a JSON and a figure.

With --tokens 0, ratios of perplexities (to the first run's, and of strided ones from twice the
training length on) have a 95 % interval over the documents: how much the ratio would vary with
other documents like these. It says nothing about other seeds, and little where one document is most
of the text.
"""
import importlib
import itertools
import json
import shlex
import sys
from pathlib import Path

from common import ROOT, names
from common.checkpoint import check_text, load_run
from common.device import environment, setup
from common.exits import fail, in_one_line, script, value_errors_fail
from common.files import write_json
from common.flags import Parser, add_run_flags
from scoring import Options, describe

UNITS = ("tokens", "sequences", "queries")  # what tasks count: each says which, and how many


def parse(argv):
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("checkpoints", nargs="*",
        help="run folders or checkpoint files; default: the newest under out/")
    add("--lengths", type=int, nargs="+",
        help="window or sequence lengths; default: 1, 2, 4, 8, 16 x the training length on text, "
             "also 32 x in a search, 1 x on a task")
    add("--tokens", type=int,
        help="text: how much of the split to score; 0 is all, by document (default: 131072)")
    add("--strided", action="store_true",
        help="text: also windows that overlap by half, only their second halves scored, so that "
             "every token has at least half a window to look back on")
    add("--again", action="store_true",
        help="text: also how much cheaper a passage is when it comes a second time, by the gap")
    add("--sequences", type=int, help="task: how many to score, per split (default: 2000)")
    add("--queries", type=int, help="search: how many queries to ask (default: 1000)")
    add("--split", default="",
        help="default: test on text and in a search, every test split of a task")
    add("--data", help="text or search: another corpus, file or folder than the run's own")
    add("--out", help="where to write, without extension; default: eval.json and eval.png in the "
                      "run's folder, in out/ for several runs; eval-2, eval-3, ... where another "
                      "command has written these")
    add("--seed", type=int, default=1337,
        help="of a task's sequences, and of models that draw at test time (default: 1337)")
    add_run_flags(parser, bema="score the BEMA weights of runs trained with --bema")
    args = parser.parse_args(argv)
    numbers = [*(args.lengths or ()), args.sequences, args.queries]
    if any(n is not None and n < 1 for n in numbers) or min(args.tokens or 0, args.seed) < 0:
        fail("--lengths, --sequences and --queries must be at least 1, --tokens and --seed 0 or "
             "more")
    return args


def task_of(runs, text):
    """
    The task that all runs are scored on. `text` may name another than the one they were trained on;
    if it does not, theirs has to be the same, known, and as it was.
    """
    first = runs[0]
    name = first.config["data"]
    cls = names.trained_on(first.config)
    flag = names.text_setting(first.config)
    for run in runs:
        if names.trained_on(run.config) is not cls:
            fail(f"{first.path} was trained on {name}, {run.path} on {run.config['data']}: score "
                 "them one by one")
    if text is not None:
        if flag == "data" and names.find_task(text) is not cls:
            fail(f"{first.path} was trained on {name}: it cannot be scored on {text}")
        return names.make_task(first.config | {flag: text}, first.checkpoint["kept"])
    for run in reversed(runs):
        where = run.config[flag]
        if where != first.config[flag]:
            fail(f"{run.path} was trained on {where}, {first.path} on {first.config[flag]}: say "
                 "which to score with --data")
        check_text(run.config, run.checkpoint["source"])
        task = names.make_task(run.config, run.checkpoint["kept"])
        if task.source != run.checkpoint["source"]:
            fail(f"the text behind {where} is not what {run.path} was trained on: its training "
                 "documents may be in this split. To score it all the same, name the text: "
                 f"--data {where}")
    return task  # of the first


def amount_of(args, task, scoring):
    """How many units to score; a flag of another unit is a mistake."""
    for unit in UNITS:
        if getattr(args, unit) is not None and unit != scoring.UNIT:
            fail(f"--{unit} is not for {task.data}, which has --{scoring.UNIT}")
    asked = getattr(args, scoring.UNIT)
    return scoring.AMOUNT if asked is None else asked


def where_to_write(out, runs, command):
    """--out, or eval in the runs' folder; with a number where another command's are there."""
    if out:
        return out
    folder = runs[0].path.parent if len(runs) == 1 else ROOT / "out"
    for n in itertools.count(1):
        path = folder / (f"eval-{n}.json" if n > 1 else "eval.json")
        if not path.exists() or f'"command": {json.dumps(command)}' in path.read_text("utf-8"):
            return path.with_suffix("")


def score_runs(scores, runs):
    """The loop: every run at every length -> what the JSON has of it."""
    rows = []
    for run in runs:
        row = describe(run)
        scores.start(run, row)
        for T in scores.lengths:
            scores.score(run, row, T)
        if scores.finish(run, row):
            rows.append(row)
    return scores.about() | dict(runs=rows)


def main(argv=None):
    args = parse(argv)
    device, context, words = setup(args)
    runs = [load_run(path, device, args.bema, args.set) for path in args.checkpoints or [None]]
    task = task_of(runs, args.data)
    scoring = importlib.import_module(task.scoring)
    options = Options(
        lengths=args.lengths, split=args.split, amount=amount_of(args, task, scoring),
        strided=args.strided, again=args.again, seed=args.seed, device=device, context=context,
        words=words)
    asked = sys.argv[1:] if argv is None else map(str, argv)
    command = shlex.join(["python", "eval.py", *asked])
    out = Path(where_to_write(args.out, runs, command))
    out.parent.mkdir(parents=True, exist_ok=True)  # before hours of scoring, not after

    with value_errors_fail():
        scores = scoring.Scores(task, runs, options)
    scores = score_runs(scores, runs)
    if not scores["runs"]:
        fail("no length could be scored")
    _, dtype, attention = words.split(", ", maxsplit=2)
    about = dict(command=command, environment=environment(), dtype=dtype, bema=args.bema,
                 attention=attention)
    write_json(f"{out}.json", about | scores)
    print(f"wrote {out}.json", flush=True)
    script("figures.plot", scoring.FIGURE, f"{out}.json")


if __name__ == "__main__":
    sys.excepthook = in_one_line
    main()
