"""
Every table and figure that this repository reproduces, each by one command.

    python reproduce.py                                        what there is, how long it takes
    python reproduce.py cable_table1 --jobs 2                  two trainings at a time
    python reproduce.py lm --rows t5 --seeds 3                 more seeds of one row
    python reproduce.py cable_table1 --scale paper --dry_run   what it would do
    python reproduce.py matrix --add mine --tasks flipflop recall
                                                               your model_mine.py on two tasks

It runs the commands that it prints. A run is a file in results/runs/: what is there is used, what
is absent is made, so after Ctrl-C the same command continues. Then it fills the tables in the pages
of results/, and draws the figures.
"""
import os
import shlex
import signal
import sys
import textwrap

import torch

import experiments
from common.files import ROOT, fail, in_one_line, script, write_json
from common.flags import Parser
from common.names import nearest
from experiments import cells, costs, figures, jobs, pages, runs, search


def parse(argv):
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("entry", nargs="?", help="which table or figure; without it, the list")
    add("--scale", default="cpu", choices=experiments.SCALES,
        help="cpu: minutes a run on two cores; gpu, and paper, the paper's sizes: for a GPU")
    add("--data", default="", metavar="FOLDER", help="of lm_english: its text, a file or folder")
    add("--rows", nargs="+", help="only these rows (default: all)")
    add("--seeds", type=int, default=0, help="how many of every row (default: the entry's)")
    add("--add", metavar="NAME", help="of the matrix: one more model beside its rows; all that it "
                                      "makes is in out/")
    add("--tasks", nargs="+", help="of the matrix: only these (default: all)")
    add("--jobs", type=int, default=1, help="trainings at a time (default: 1)")
    add("--device", default="auto", help="auto, cpu, cuda, mps (default: auto)")
    add("--compile", action="store_true",
        help="train with torch.compile; rounding differs, which can decide whether a run learns")
    add("--dry_run", action="store_true",
        help="print every command, build every model without memory; nothing is run or written")
    parser.set_defaults(source="")  # the sha256 of --data
    args = parser.parse_args(argv)
    if args.entry is None and argv:
        fail("name the table first: python reproduce.py NAME, then the flags")
    if args.jobs < 1 or args.seeds < 0:
        fail("--jobs must be at least 1, --seeds 0 or more")
    return args


def listing():
    """Each paper's entries, what they are, and how long they take."""
    for module in experiments.files():
        print("\n" + module.__doc__.strip().partition("\n")[0])
        for name, entry in experiments.of_file(module).items():
            print(f"  {name}\n{textwrap.indent(textwrap.fill(entry['title'], 92), ' ' * 6)}")
            for scale in experiments.SCALES:
                if scale in entry:
                    said = costs.expected(name, scale, costs.planned(name, scale))
                    print(f"      --scale {scale:5}  {said}")
    print("\nTimes, as measured, or FLOPs, of all runs one after the other; --jobs 2 takes half. "
          "What is there\nis not made anew. Make one with: python reproduce.py NAME --jobs 2")


def planned(args):
    """The runs that the flags ask for, there or not; flags that the entry cannot have end here."""
    name, scale = args.entry, args.scale
    entry, part = experiments.find(name, scale)
    for flag, key in dict(rows="rows", seeds="rows", compile="rows", tasks="tasks",
                          add="tasks").items():
        if getattr(args, flag) and key not in part:
            fail(f"--{flag} is not for {name}")
    for flag in ("rows", "tasks"):
        for word in getattr(args, flag) or []:
            if word not in part[flag]:
                fail(f"{name} has no {word!r} among its {flag}: {nearest(word, part[flag])}")
    if (jobs.FOLDER in part.get("train", "")) != bool(args.data):
        fail(f"--data is not for {name}" if args.data else f"{name} needs a text: --data FOLDER")
    folder = runs.folder_of(name, scale)
    if "panels" in part:
        return search.planned(name, scale, folder)
    if args.add:
        part, folder = cells.with_row(args.add, part), runs.added_folder(name, scale, args.add)
    todo = [job for job in jobs.planned(name, entry, part, args, folder)
            if (not args.rows or job.label in args.rows)
            and (not args.tasks or job.task in args.tasks)]
    if args.add:  # the cheapest task first
        todo.sort(key=lambda job: costs.measured(name, scale, job.task))
    return todo


def dry_run(args, todo):
    """Every command; every model, without memory. What cannot be built is named at the end."""
    entry, part = experiments.find(args.entry, args.scale)
    print(entry["title"] + (f". Here: {part['note']}" if "note" in part else ""))
    broken = []
    for job in todo:
        for words in job.commands(args.device):
            print("$ " + shlex.join(words))
        try:
            with torch.device("meta"):
                size = sum(p.numel() for p in job.model().parameters())
            print(f"{job.name}: {size:,} parameters", flush=True)
        except (Exception, SystemExit) as e:  # a model file of yours may fail in any way
            broken.append(f"{job.name} cannot be built: {e}")
    print(f"{args.entry} --scale {args.scale}: {costs.expected(args.entry, args.scale, todo)}")
    if broken:
        fail("\n".join(broken))


def make(args, todo):
    """Makes what is absent -> {name: why it failed}."""
    missing = [job for job in todo if not job.done]
    print(f"{args.entry}: {len(todo)} runs, {len(todo) - len(missing)} of them there", flush=True)
    if args.add:
        folder = os.path.relpath(runs.added_folder(args.entry, args.scale, args.add))
        print(f"after an edit of {args.add} remove {folder}, for what is there is used", flush=True)
    try:
        return jobs.work(missing, args.jobs, args.device)
    except KeyboardInterrupt:
        print("\nstopped; what is finished is kept, and the same command continues", flush=True)
        sys.exit(130)


def finish(args):
    """The pages, and the figure of what is there."""
    entry, _ = experiments.find(args.entry, args.scale)
    result = runs.table(args.entry, args.scale)
    pages.fill()
    if not (result.get("runs") or result.get("panels")):
        return
    pages.show(result)
    out = os.path.relpath(ROOT / "results" / f"{args.entry}.{args.scale}")
    if figures.draw(result, f"{out}.png"):
        return
    words = [os.path.relpath(runs.folder_of(args.entry, args.scale)), "--rows", *result["rows"]]
    if "columns" in entry:
        words += ["--metric", entry["columns"][0][2]]
    run = result["runs"][0]
    figure = "ndcg" if "search" in run else "scores" if "scores" in run else "lengths"
    script("figures.plot", "curves" if "losses" in entry else figure, *words, "--out", f"{out}.png")
    if entry.get("steps"):
        script("figures.plot", "errors", *words, "--out", f"{out}.steps.png")


def finish_added(args, todo):
    """The row that was added beside those that are there: a table and two figures, in out/."""
    result = runs.beside(runs.table(args.entry, args.scale), todo, args.add)
    path = runs.added_folder(args.entry, args.scale, args.add).with_suffix(".json")
    if not result["runs"]:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {key: result[key] for key in ("added", "cells", "runs")})
    pages.show(result)
    print(f"\nwrote {os.path.relpath(path)}")
    figures.draw(result, path.with_suffix(".png"))


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    args = parse(argv)
    if args.entry is None:
        return listing()
    todo = planned(args)
    if args.dry_run:
        return dry_run(args, todo)
    missing = not all(job.done for job in todo)
    if missing:
        costs.need_gpu(args, todo)
    if args.data:
        args.data, args.source = jobs.text_of(args.entry, args.scale, args.data)
        todo = planned(args)
    if missing or args.data:  # what is there may be of another text, too
        jobs.need_one_text(args.entry, args.scale, args.data)
    failed = make(args, todo)
    if args.add:
        finish_added(args, todo)
    else:
        finish(args)
    if failed:
        fail(f"{', '.join(failed)} failed; the rest is kept, and the same command continues")


if __name__ == "__main__":
    sys.excepthook = in_one_line
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    main()
