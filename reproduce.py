"""
Every table and figure that this repository reproduces, each by one command.

    python reproduce.py                                     what there is, and how long it takes
    python reproduce.py cable_table1 --scale cpu            trains, evaluates, writes
                                                            results/cable_table1.cpu.{json,png}
    python reproduce.py cable_table1 --scale cpu --jobs 2   two trainings at a time
    python reproduce.py lm --rows t5 --missing              one more row of a committed table
    python reproduce.py postnorm_fig1 --trials 25           a random search
    python reproduce.py cable_table1 --scale paper --dry_run   what it would do, and cost
    python reproduce.py matrix --add mine --jobs 2          your model_mine.py on every task, beside
                                                            all other methods: out/matrix.cpu/mine.*

It runs the commands that it prints, and skips what is done. Ctrl-C saves what runs; the same
command continues. What a table is made of is in experiments/, all tables in results/README.md.
"""
import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from functools import partial

import experiments
import runs
from experiments import dry_run, matrix, tables, trainings

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

EVERY = 30  # seconds between two lines on the progress of one job


# -----------------------------------------------------------------------------
# jobs: several commands at a time, and how far they are

class Board:
    """Runs the commands of all jobs and says how far they are, one line now and then for each."""
    def __init__(self, total, at_once, guess, env, keep_open):
        self.total, self.at_once, self.guess = total, at_once, guess  # guess: seconds of one job
        self.env, self.keep_open = env, keep_open
        self.lock, self.processes, self.stopping = threading.Lock(), set(), False
        self.done, self.took, self.began, self.eta, self.shown = 0, [], {}, {}, {}

    def job(self, name, work):
        """work(run) -> its result; it runs its commands through run(*words)."""
        found = work(partial(self.run, name))
        with self.lock:
            self.done += 1
            if name in self.began:  # something was left to do
                self.took.append(time.time() - self.began.pop(name))
                self.eta.pop(name, None)
                print(f"{self.progress()} {name} is done", flush=True)
        return found

    def run(self, name, *command):
        """One command, printed. Raises RuntimeError, with the end of its output, if it fails."""
        said = deque(maxlen=30)
        with self.lock:
            if self.stopping:
                raise RuntimeError("stopped")
            print("$ " + shlex.join(command), flush=True)
            self.began.setdefault(name, time.time())
            process = subprocess.Popen(
                [sys.executable, *command[1:]], cwd=runs.ROOT, env=self.env, text=True,
                pass_fds=self.keep_open, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            self.processes.add(process)
        for line in process.stdout:
            said.append(line)
            self.show(name, line)
        process.wait()
        with self.lock:
            self.processes.discard(process)
        if process.returncode:
            code = process.returncode
            raise RuntimeError(f"{shlex.join(command)} exited with {code}:\n{''.join(said)}")

    def show(self, name, line):
        """A line of the form `iter 10/750 ... eta 3m20s` is progress."""
        found = re.match(r"iter \d+/\d+ .*\beta (\d+)m(\d+)s", line)
        if not found:
            return
        with self.lock:
            self.eta[name] = 60 * int(found[1]) + int(found[2])
            if time.time() - self.shown.get(name, 0) > EVERY:
                self.shown[name] = time.time()
                print(f"{self.progress()} {name}: {line.rstrip()}", flush=True)

    def progress(self):
        """[done / total, the time that is left by what was measured so far]"""
        now = time.time()
        known = self.took + [now - self.began[name] + eta for name, eta in self.eta.items()]
        each = statistics.mean(known) if known else self.guess
        waiting = self.total - self.done - len(self.began)
        left = waiting * each + sum(self.eta.get(name, each) for name in self.began)
        return f"[{self.done}/{self.total} done, {tables.duration(left / self.at_once)} left]"

    def stop(self):
        """As Ctrl-C does: a training saves and ends."""
        with self.lock:
            self.stopping = True
            for process in self.processes:
                process.send_signal(signal.SIGINT)


def work(jobs, args, guess, keep_open):
    """jobs {name: function(run)} -> their results, args.jobs at a time. Raises RuntimeError."""
    env = dict(os.environ)
    if args.jobs > 1:
        env.setdefault("OMP_NUM_THREADS", str(max(1, os.cpu_count() // args.jobs)))
    board = Board(len(jobs), args.jobs, guess, env, keep_open)
    with ThreadPoolExecutor(args.jobs) as pool:
        futures = [pool.submit(board.job, name, job) for name, job in jobs.items()]
        try:
            for future in as_completed(futures):
                future.result()
        except BaseException:  # a failed command, or Ctrl-C: what runs is saved, all else waits
            board.stop()
            pool.shutdown(cancel_futures=True)
            raise
    return [future.result() for future in futures]


@contextmanager
def locked(folder):
    """One reproduce.py at a time in a folder -> the lock, which its commands keep open, too."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        try:
            if fcntl:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            runs.fail(f"another reproduce.py, or its training, is at work in {folder}; wait for it")
        yield (lock.fileno(),) if fcntl else ()


# -----------------------------------------------------------------------------
# the list, and the command

def listing(entries):
    """Every entry with its time, then the papers' tables and figures as they number them."""
    for name, entry in entries.items():
        print(name)
        print(textwrap.fill(entry["about"], 96, initial_indent="    ", subsequent_indent="    ",
                            break_on_hyphens=False))
        for scale in ("cpu", "paper"):
            if scale in entry:
                print(f"    --scale {scale:6} {tables.expected(name, entry, scale)}")
    for module in experiments.files():
        if hasattr(module, "NUMBERED"):
            print("\n" + module.__doc__.strip().partition("\n")[0])
            for number, here in module.NUMBERED.items():
                if not isinstance(here, str):
                    here = ", ".join(name if name in entries else f"{name} *" for name in here)
                print(f"    {number:16} {here}")
    print("\nTimes are of all jobs one after the other, as measured for results/README.md, which "
          "names the\nmachine (cpu: one thread each); --jobs 2 takes half. What is there already "
          "is not made again.\nMake one with: python reproduce.py NAME --scale cpu --jobs 2\n"
          "* is made by other scripts: results/README.md has the commands")


def parse(argv):
    parser = runs.make_parser(description=__doc__)
    parser.add_argument("entry", nargs="?", help="which table or figure; without it, the list")
    parser.add_argument("--scale", default="cpu", choices=["cpu", "paper"],
                        help="cpu: minutes a run on two cores; paper: the paper's sizes, for a GPU")
    parser.add_argument("--seeds", type=int, default=0,
                        help="how many of every row (default: the entry's)")
    parser.add_argument("--rows", nargs="+", help="only these rows of a table (default: all)")
    parser.add_argument("--missing", action="store_true",
                        help="keep the runs that a table's JSON in results/ has, and add the rows "
                             "and seeds that it has not; of the matrix also what another text or "
                             "another definition has made old")
    parser.add_argument("--trials", type=int, default=0,
                        help="models of every scheme in a random search (default: the entry's)")
    parser.add_argument("--add", metavar="NAME",
                        help="of the matrix: train and score one more model on every task, and "
                             "draw its row beside the committed ones")
    parser.add_argument("--compile", action="store_true",
                        help="train with torch.compile, which on a CPU needs a C++ compiler: with "
                             "some models up to a fifth faster. Rounding differs, which can decide "
                             "whether a run learns (tra_table1)")
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time (default: 1)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, mps (default: auto)")
    parser.add_argument("--dry_run", action="store_true",
                        help="print every command, build every model without memory, and estimate "
                             "FLOPs, memory and GPU hours; nothing is run or written")
    return runs.parse(parser, argv)


def asked_for(args, entries):
    """-> the entry, and its scale as the flags have it; flags that it cannot have end here."""
    if args.entry in experiments.sections():
        runs.fail(f"{args.entry} is no table of reproduce.py: results/README.md says how it was "
                  "made")
    if args.entry not in entries:
        known = [*entries, *experiments.sections()]
        runs.fail(f"unknown entry {args.entry!r}: {runs.nearest(args.entry, known)}")
    if args.jobs < 1 or args.seeds < 0 or args.trials < 0:
        runs.fail("--jobs must be at least 1, --seeds and --trials 0 or more")
    files = experiments.owners(args.entry)
    if len(files) > 1:
        runs.fail(f"{' and '.join(files)} both have {args.entry}: rename it in one of them")
    entry = entries[args.entry]
    if args.scale not in entry:
        runs.fail(f"{args.entry} has no --scale {args.scale}")
    scale = entry[args.scale]
    searching = "panels" in scale
    others = ("seeds", "rows", "compile", "missing") if searching else ("trials",)
    for flag in others:
        if getattr(args, flag):
            runs.fail(f"--{flag} is not for {args.entry}, which has "
                      f"{'trials' if searching else 'seeds'}")
    known = scale.get("rows", {})
    for row in args.rows or []:
        if row not in known:
            runs.fail(f"{args.entry} has no row {row!r}: {runs.nearest(row, known)}")
    if args.add is not None:
        if "tasks" not in scale:
            runs.fail(f"--add is not for {args.entry}, which is no matrix")
        scale = with_row(args, scale)
    if args.missing:
        scale = with_kept(args, entry, scale)
    if args.compile:
        scale = trainings.compiled(scale)
    return entry, scale


def main(argv=None):
    args = parse(argv)
    entries = experiments.known()
    given = sys.argv[1:] if argv is None else argv
    if args.entry is None and given:
        runs.fail("name the table first: python reproduce.py ENTRY, then the flags")
    if args.entry is None:
        return listing(entries)
    entry, scale = asked_for(args, entries)
    if args.dry_run:
        return dry_run.show(args, entry, scale)
    again = shlex.join(["python", "reproduce.py", *given])
    try:
        make(args, entry, scale)
    except KeyboardInterrupt:
        print(f"\nstopped; what is finished is kept. Continue with: {again}", flush=True)
        sys.exit(130)
    except RuntimeError as e:
        runs.fail(f"{e}\nwhat is finished is kept; the same command continues: {again}")


def with_row(args, scale):
    """
    The matrix with --add's row alone, in a folder named by the version of its file. A model that
    is unknown, or in the matrix already, ends here.
    """
    module, variant = runs.models()[args.add]
    if runs.is_encoder(module.GPT):
        runs.fail(f"{args.add} is an encoder, and {args.entry} is of causal models")
    if args.rows:
        runs.fail("--rows is not for --add, which makes one row")
    models = [trainings.options(flags.split())["model"] for flags, _ in scale["rows"].values()]
    if args.add in (*scale["rows"], *models):
        runs.fail(f"{args.add} is in {args.entry} already: {', '.join(scale['rows'])}")
    if args.add == args.entry or not re.fullmatch(r"\w[\w.+-]*", args.add):
        runs.fail(f"{args.add!r} is to be the name of a file, and cannot: rename it in VARIANTS")
    if "block_size" in variant:
        runs.fail(f"VARIANTS gives {args.add} a block_size: its texts would not be the other rows'")
    flags, asked = f"--model {args.add}", set()
    for one in scale["tasks"].values():
        asked |= trainings.options(one["train"].split()).keys()
    for name, value in variant.items():
        if name in asked:  # what the name means goes before what a task asks of all
            flags += trainings.flag(name, value)
    return scale | dict(rows={args.add: (flags, 1)}, fork=module,
                        folder=f"{args.add}-{runs.code_of(module)}")


def with_kept(args, entry, scale):
    """
    A table that keeps the runs of its JSON in results/; one of an older definition ends here. It
    may have fewer rows. Of a matrix, those runs are kept that are what they would be today. Commits
    are not compared: the page names them.
    """
    if args.add:
        runs.fail("--missing is not for --add, which makes one row")
    path = runs.ROOT / "results" / f"{args.entry}.{args.scale}.json"
    if not path.exists():
        return scale
    kept = tables.read(path)
    if "tasks" in scale:
        return scale | dict(kept=kept_of_matrix(args, entry, scale, kept, path))
    why = tables.older(entry, args.scale, kept | dict(command="--rows"))
    if why:
        runs.fail(f"{path} is of an older definition ({why}): without --missing it is made anew")
    labelled = [r | dict(label=r.get("label", r["model"])) for r in kept["runs"]]
    return scale | dict(kept=kept | dict(runs=labelled))


def kept_of_matrix(args, entry, scale, committed, path):
    """-> the runs to keep. What is missing gets as many seeds as these have."""
    for flag in ("rows", "compile", "dry_run"):
        if getattr(args, flag):
            runs.fail(f"--{flag} is not for --missing of {args.entry}, which makes one whole table")
    try:
        kept = matrix.kept(committed, entry, scale)
        most = max(Counter((run["label"], run["task"]) for run in kept).values(), default=0)
    except (KeyError, TypeError, AttributeError):
        runs.fail(f"{path} is damaged: restore or remove it")
    args.seeds = args.seeds or (most if most > 1 else 0)
    print(f"{len(kept)} of {len(committed['runs'])} runs in {path} are what they would be today")
    return kept


def make(args, entry, scale):
    """Runs what is left of an entry, and writes its JSON, its figures and the page."""
    folder = trainings.folder_for(args.entry, entry, args.scale)
    kind, others = tables.kind_of(scale), rows_besides(args, scale)
    with locked(runs.ROOT / folder) as keep_open:
        jobs = kind.jobs(args, entry, scale, folder)
        seconds = tables.measured(args.entry, entry, args.scale)
        guess = statistics.mean(seconds) if seconds else 60 * scale.get("minutes", 5)
        result = kind.collect(entry, scale, work(jobs, args, guess, keep_open))
    command = f"python reproduce.py {args.entry} --scale {args.scale}"
    if kind is trainings:
        command = "\n".join(command + flags for flags in trainings.asked(result, scale))
    else:
        for flag in ("seeds", "trials", "add"):
            if getattr(args, flag):
                command += f" --{flag} {getattr(args, flag)}"
        command += " --compile" if args.compile else ""
        if args.rows:
            command += f" --rows {shlex.join(args.rows)}"
    about = ", ".join(filter(None, (entry["about"], scale.get("note"))))
    result |= dict(entry=args.entry, about=about, command=command)
    for key, function in entry.get("also", {}).items():
        result[key] = function()
    path = f"results/{args.entry}.{args.scale}.json"
    if args.add:
        return beside(args, result, entry, path, folder)
    (runs.ROOT / "results").mkdir(exist_ok=True)
    if others:
        runs.write_json(runs.ROOT / folder / f"{args.entry}.json", result)
        failed = draw(kind, entry, folder / f"{args.entry}.json")
        print(f"{tables.table(result)}\n\nwrote {folder}/{args.entry}.json: {path} keeps its "
              f"{', '.join(others)}, too")
        sys.exit(failed)
    runs.write_json(runs.ROOT / path, result)
    if "contrast" in scale:
        trainings.write_contrast(result, scale["contrast"])
    failed = draw(kind, entry, path)
    tables.write_page()
    print(f"{tables.table(result)}\n\nwrote {path} and results/README.md")
    sys.exit(failed)


def rows_besides(args, scale):
    """What --rows leaves out of the JSON in results/: a part does not replace the whole."""
    path = runs.ROOT / "results" / f"{args.entry}.{args.scale}.json"
    if not args.rows or args.add or "kept" in scale or not path.exists():
        return []
    known = [r.get("label", r["model"]) for r in tables.read(path)["runs"]]
    return [label for label in dict.fromkeys(known) if label not in args.rows]


def draw(kind, entry, path):
    """All figures of a JSON -> the exit code of one that failed, or 0."""
    failed = 0
    for figure in kind.figures(entry):
        failed = runs.script("plot.py", *figure, os.path.relpath(runs.ROOT / path)) or failed
    return failed


def beside(args, result, entry, committed, folder):
    """A row that was added, beside the committed ones: its JSON and figure, both under out/."""
    path, kind = folder / f"{args.add}.json", tables.kind_of(entry[args.scale])
    again = f"python reproduce.py {args.entry} --scale {args.scale} --missing --jobs 2"
    lines = [f"{committed} is not there: the row stands alone. Make the others with: {again}"]
    if (runs.ROOT / committed).exists():
        try:
            old = json.loads((runs.ROOT / committed).read_text())
            commits = sorted({str(run["environment"]["commit"]) for run in old["runs"]})
            result, lines = kind.beside(result, old, entry, entry[args.scale])
            lines += [f"make what is missing with: {again}"] if lines else []
            lines += matrix.of_its_own(args.add, result["runs"])
            lines.append(f"the committed rows are of commits {', '.join(commits)}")
        except (ValueError, KeyError, TypeError, AttributeError):
            lines = [f"{committed} is not what reproduce.py wrote: the row stands alone. Restore "
                     f"or remove it, then make the others with: {again}"]
    runs.write_json(runs.ROOT / path, result | dict(added=args.add))
    failed = draw(kind, entry, path)
    print("\n".join([tables.table(result), "", *lines, f"wrote {path}"]))
    sys.exit(failed)


if __name__ == "__main__":
    sys.excepthook = runs.in_one_line
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    main()
