"""
Every table and figure that this repository reproduces, each by one command.

    python reproduce.py                                 lists what there is
    python reproduce.py cable_table1 --scale cpu        trains, evaluates, writes results/cable_table1.cpu.{json,png}
    python reproduce.py cable_table1 --scale cpu --jobs 2   two trainings at a time

It runs the commands it prints, skips what is already done, goes on where a killed run stopped, and rewrites
results/README.md, where our numbers stand beside the paper's.
"""
import dataclasses
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import runs

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

# CABLE, Table 1, lower half: perplexity on WikiText-103 by window length, trained on windows of 1024
CABLE_TABLE1 = {
    "cable": (23.70, 22.32, 21.48, 20.94, 20.65, 20.33), "cable_nw": (24.32, 23.01, 22.19, 21.70, 21.46, 21.13),
    "alibi": (24.09, 22.74, 22.05, 21.73, 21.58, 21.30), "fire": (24.34, 22.90, 22.68, 29.57, 54.89, 104.79),
    "t5": (25.06, 23.60, 27.64, 73.99, 198.64, 411.09), "kerple": (23.95, 22.56, 21.72, 21.32, 21.33, 21.58),
    "rope": (23.66, 22.26, 41.40, 114.77, 220.56, 375.62), "learned": (24.94, 23.53),
    "sinusoidal": (25.18, 23.73, 172.33, 607.48, 1348.23, 2017.42)}
PAPER_LENGTHS = (512, 1024, 2048, 4096, 8192, 15360)

# TRA, Table 1: exact match in % on iid, dense, sparse
TRA_TABLE1 = {
    "nope": (100, 0.15, 99.97), "learned": (100, 27.38, 90.61), "t5": (100, 41.2, 70.48), "rope": (100, 100, 72.82),
    "label": (100, 12.58, 86.93), "fox": (100, 100, 93.4), "diff": (100, 100, 77.8), "cope": (100, 100, 95.1), "tra": (100, 100, 100)}
# CoPE, Table 7: error in % in distribution and out of it; the row's name is dimension, layers, heads
COPE_TABLE7 = {
    "cope 256/4/4": (0.03, 4.9), "cope 256/2/4": (0.0, 13.2), "cope 256/4/2": (0.0, 3.0), "cope 256/2/2": (0.0, 14.6),
    "cope 128/4/4": (0.2, 33.2), "cope 128/2/4": (0.03, 22.3), "cope 128/4/2": (0.03, 14.5), "cope 128/2/2": (0.02, 24.5),
    "learned, hard attention": (50.7, 49.1), "cope_mlp": (0.03, 5.9), "alibi 1": (0.0, 11.4),
    "alibi 1/4": (0.0, 8.7), "alibi 1/16": (0.0, 17.1), "alibi learned": (0.0, 11.4)}
NORMS = {f"{m} {norm}{' qk-norm' * qk}": f"--model {m} --norm {norm} --{'' if qk else 'no-'}qk_norm"
         for m in ("tra", "fox", "cope", "rope") for norm in ("pre", "post") for qk in (True, False)}
# CoPE's flip-flop setting (appendix C): 10,000 steps, linear decay; "batch size 16" on 8 GPUs is read as 16 on each
COPE_FLIPFLOP = "--data flipflop --size paper --max_iters 10000 --batch_size 128 --learning_rate 3e-4 --lr_decay linear --beta2 0.999"


def seeds(n, *models, flags=""):
    """{model: (its train.py flags, how many seeds)}"""
    return {m: (f"--model {m} {flags}".strip(), n) for m in models}


def cope_table7(divide, n):
    """The rows of CoPE's Table 7 with the dimension divided; n seeds where the paper gives a spread."""
    def flags(model, C=256, L=4, H=4):
        return f"--model {model} --n_embd {C // divide} --n_layer {L} --n_head {H}"
    rows = {f"cope {C}/{L}/{H}": (flags("cope", C, L, H), n if (C, L, H) == (256, 4, 4) else 1)
            for C in (256, 128) for L in (4, 2) for H in (4, 2)}
    rows |= {"learned, hard attention": (flags("learned_hard"), 1), "cope_mlp": (flags("cope_mlp"), 1)}
    for name, m in (("1", 1), ("1/4", 1 / 4), ("1/16", 1 / 16)):
        rows[f"alibi {name}"] = flags("cope_alibi") + " --slopes " + ",".join(str(m / 2**h) for h in range(4)), n
    return rows | {"alibi learned": (flags("cope_alibi"), n)}


# What each entry runs: train.py's and eval.py's flags for all its rows, and {row: (train.py's flags for it, seeds)}.
# columns: heading, split and metric of a synthetic task's table, in the order of the paper's numbers (all in %).
# Entries of one group share their runs.
ENTRIES = {
    "cable_table1": dict(
        about="CABLE, Table 1: perplexity far beyond the training length, every encoding on one backbone",
        paper=CABLE_TABLE1,
        cpu=dict(train="--size nano --data stdlib", eval="",
                 rows=seeds(3, "cable", "alibi", "rope") | seeds(1, "cable_nw", "k_cable", "nope", "learned", "sinusoidal", "t5", "kerple",
                                                                  "fire", "relative", "relative_capped", "label")),
        paper_scale=dict(train="--size tiny --data wikitext103 --max_iters 9000 --batch_size 64 --gradient_accumulation_steps 2",
                         eval="--tokens 0 --lengths " + " ".join(map(str, PAPER_LENGTHS)), rows=seeds(1, *CABLE_TABLE1, "k_cable")),
    ),
    "tra_table1": dict(
        about="TRA, Table 1: flip-flop, exact match (%)",
        paper=TRA_TABLE1, columns=[("iid", "iid", "exact_match"), ("dense", "dense", "exact_match"), ("sparse", "sparse", "exact_match")],
        cpu=dict(train="--data flipflop", eval="--sequences 2000",
                 rows=seeds(3, "tra", "cope", "fox", "rope", "cable") | seeds(1, "diff", "t5", "learned", "label", "nope", "alibi")),
        paper_scale=dict(train="--data flipflop --size paper", eval="--sequences 10000", rows=seeds(4, *reversed(TRA_TABLE1))),
    ),
    "tra_norm": dict(
        about="What of TRA's result is TRA, what post-norm and QK-norm? Flip-flop, exact match (%), at one budget; no paper has this table",
        paper={}, columns=[("iid", "iid", "exact_match"), ("dense", "dense", "exact_match"), ("sparse", "sparse", "exact_match")],
        cpu=dict(train="--data flipflop", eval="--sequences 2000", rows={label: (flags, 1) for label, flags in NORMS.items()}),
        paper_scale=dict(train="--data flipflop --size paper", eval="--sequences 10000",
                         rows={label: (flags, 2) for label, flags in NORMS.items()}),
    ),
    "cope_table2_flipflop": dict(
        about="CoPE, Table 2, left: flip-flop, error (%); the paper does not say whether of reads or of strings, these are wrong reads",
        paper={"learned": (6.8, 21.7), "rope": (1.8, 20.3), "cope": (0.0, 4.9)},
        columns=[("in distribution", "iid", "glitch_rate"), ("out (sparse)", "sparse", "glitch_rate")],
        cpu=dict(train="--data flipflop --lr_decay linear --beta2 0.999", eval="--sequences 2000",
                 rows=seeds(1, "cope", "rope", "learned")),
        paper_scale=dict(train=COPE_FLIPFLOP, eval="--sequences 10000", rows=seeds(3, "cope", "rope", "learned")),
    ),
    "cope_table2_copy": dict(
        about="CoPE, Table 2, right: selective copy, sequences with an error (%)",
        paper={"learned": (16.9, 25.6, 85.2), "rope": (40.1, 100, 100), "cope": (0.0, 0.0, 0.0)},
        columns=[("iid", "iid", "sequence_error"), ("dense", "dense", "sequence_error"), ("sparse", "sparse", "sequence_error")],
        cpu=dict(train="--data selective_copy", eval="--sequences 2000",
                 rows=seeds(1, "cope", flags="--P 64") | seeds(1, "rope", "learned")),
        paper_scale=dict(train="--data selective_copy --size paper", eval="--sequences 10000",
                         rows=seeds(3, "cope", flags="--P 512") | seeds(3, "rope", "learned")),
    ),
    "cope_table3": dict(
        about="CoPE, Table 3: counting with 1, 3 and 5 variables, wrong answers (%)", group="counting",
        paper={f"{m} {v} var": (y,) for m, ys in dict(cope=(0.0, 1.2, 7.4), relative=(1.1, 17.8, 22.4), learned=(5.3, 67.6, 71.5)).items()
               for v, y in zip((1, 3, 5), ys)},
        columns=[("in distribution", "iid", "answer_error")],
        cpu=dict(note="here one variable, programs of up to 32 operations, never the same one twice",
                 train="--data counting", eval="--sequences 2000",
                 rows={f"{m} 1 var": (f"--model {m} --vars 1", 1) for m in ("cope", "relative")}),
        paper_scale=dict(train="--data counting --size paper", eval="--sequences 10000",
                         rows={f"{m} {v} var": (f"--model {m} --vars {v}", 3) for v in (1, 3, 5) for m in ("cope", "relative", "learned")}),
    ),
    "cope_table4": dict(
        about="CoPE, Table 4: counting one variable with more or fewer passes than in training, wrong answers (%)", group="counting",
        paper={"cope 1 var": (0.0, 0.0, 4.0), "relative 1 var": (1.1, 8.8, 34.1)},
        columns=[("pass 50", "iid", "answer_error"), ("pass 100", "pass100", "answer_error"), ("pass 10", "pass10", "answer_error")],
        cpu=dict(train="--data counting", eval="--sequences 2000",
                 rows={f"{m} 1 var": (f"--model {m} --vars 1", 1) for m in ("cope", "relative")}),
        paper_scale=dict(train="--data counting --size paper", eval="--sequences 10000",
                         rows={f"{m} 1 var": (f"--model {m} --vars 1", 3) for m in ("cope", "relative")}),
    ),
    "cope_table7": dict(
        about="CoPE, Table 7: flip-flop, wrong reads (%), by dimension/layers/heads, and other ways to use the count (without the rows of "
              "absolute PE and RoPE by size, and of the MLP in the first layer alone: the paper does not say what its other layers have)",
        paper=COPE_TABLE7, columns=[("in distribution", "iid", "glitch_rate"), ("out (sparse)", "sparse", "glitch_rate")],
        cpu=dict(note="here with a quarter of the dimensions",
                 train="--data flipflop --lr_decay linear --beta2 0.999", eval="--sequences 2000",
                 rows=cope_table7(divide=4, n=1)),
        paper_scale=dict(train=COPE_FLIPFLOP, eval="--sequences 10000", rows=cope_table7(divide=1, n=3)),
    ),
}


def run(command, env):
    """One command, printed; the output of a failed one is shown. Raises RuntimeError when it fails."""
    print("$ " + shlex.join(command), flush=True)
    done = subprocess.run([sys.executable, *command[1:]], cwd=runs.ROOT, env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)} exited with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def check(out, config, words):
    """The run in out must be the entry's: its flags, and the defaults of its task and model. After a change it is another experiment."""
    flags = {}
    for word in words:
        if word.startswith("--"):
            key, flags[key] = (word[5:], "False") if word.startswith("--no-") else (word[2:], "True")
        else:
            flags[key] = word
    (module, variant), task = runs.find_model(flags["model"]), runs.task_class(flags["data"])
    wanted = {f.name: f.default for cls in (module.GPTConfig, task) for f in dataclasses.fields(cls) if f.name != "vocab_size"}
    wanted |= task.defaults[flags.get("size", next(iter(task.defaults)))] | variant | flags | dict(data=runs.absolute(flags["data"]))
    for k, v in wanted.items():
        if k in config and str(config[k]) != str(v) and not (isinstance(config[k], float) and config[k] == float(v)):
            raise RuntimeError(f"{out} holds a run with {k}={config[k]}, the entry says {v}: move it away, and run this again")


def train_and_eval(out, flags, seed, scale, args, env):
    """One row of a table: out/{ckpt.pt,eval.json}, made now or already there. -> eval.json's dict."""
    device = ["--device", args.device] if args.device != "auto" else []
    start = ["python", "train.py", *flags.split(), *scale["train"].split(), "--seed", str(seed)]
    where = ["--out_dir", str(out), "--no-evaluate"]
    checkpoint = runs.load_checkpoint(out / "ckpt.pt") if (out / "ckpt.pt").exists() else None
    if checkpoint is None:
        shutil.rmtree(out, ignore_errors=True)  # killed before its first checkpoint
        run(start + where + device, env)
        checkpoint = runs.load_checkpoint(out / "ckpt.pt")
    check(out, checkpoint["config"], start[2:])
    if checkpoint["iter"] < checkpoint["config"]["max_iters"]:
        run(["python", "train.py", "--resume", str(out), "--no-evaluate", *device], env)
    evaluated, command = out / "eval.json", ["python", "eval.py", str(out), *scale["eval"].split(), *device]
    try:
        newer = evaluated.stat().st_mtime >= (out / "ckpt.pt").stat().st_mtime
        done = newer and json.loads(evaluated.read_text())["command"] == " ".join(command)
    except (OSError, ValueError, KeyError):  # not there, or half written
        done = False
    if not done:
        run(command, env)
    history = [[r["iter"], r["scores"]] for r in runs.read_log(out) if "scores" in r]
    found = json.loads(evaluated.read_text()) | dict(train_command=shlex.join(start), history=history)
    return found | dict(environment=checkpoint.get("environment", found["environment"]))  # where it was trained, and by which commit


def table(result):
    """A result's JSON -> markdown: mean +- standard deviation over the seeds, the paper's number beside it."""
    return (task_table if "columns" in result else text_table)(result)


def task_table(result):
    """Rates in %. A row of one seed has the 95 % interval that its test sequences allow."""
    rows, paper = {}, result["paper"]
    for r in result["runs"]:
        rows.setdefault(r["label"], []).append(r)
    heads = [h for name, *_ in result["columns"] for h in ([name, "paper"] if paper else [name])]
    text = ["| model | seeds | " + " | ".join(heads) + " |", "|---" * (len(heads) + 2) + "|"]
    for label, rs in rows.items():
        cells = []
        for n, (_, split, metric) in enumerate(result["columns"]):
            found = [scores[split][metric] for r in rs for scores in r["scores"].values() if split in scores]
            ys = [100 * f["value"] for f in found]
            cell = "-" if not ys else f"{statistics.mean(ys):.2f}"
            if len(ys) > 1:
                cell += f" ± {statistics.stdev(ys):.2f}"
            elif ys:
                cell += f" [{100 * found[0]['low']:.2f}, {100 * found[0]['high']:.2f}]"
            cells += [cell, f"{paper[label][n]:g}" if label in paper else "-"] if paper else [cell]
        text.append(f"| {label} | {len(rs)} | {' | '.join(cells)} |")
    return "\n".join(text)


def text_table(result):
    """Perplexity by window length."""
    lengths, paper, rows = result["lengths"], result["paper"], {}
    for r in result["runs"]:
        rows.setdefault(r["model"], []).append(r)
    T = result["runs"][0]["block_size"]
    text = ["| model | seeds | " + " | ".join(f"{n:,}" for n in lengths) + f" | {lengths[-1]:,} / {T:,} | paper: 15,360 / 1,024 |",
            "|---" * (len(lengths) + 4) + "|"]
    for model, rs in rows.items():
        cells = []
        for n in map(str, lengths):
            ys = [r["perplexity"][n] for r in rs if n in r["perplexity"]]
            cells.append("-" if not ys else f"{statistics.mean(ys):.3f}" + (f" ± {statistics.stdev(ys):.3f}" if len(ys) > 1 else ""))
        ratio = [r["perplexity"][str(lengths[-1])] / r["perplexity"][str(T)] for r in rs if str(lengths[-1]) in r["perplexity"]]
        ratio = f"{statistics.mean(ratio):.3f}" if ratio else "-"
        theirs = paper.get(model, ())
        theirs = f"{theirs[5] / theirs[1]:.3f}" if len(theirs) > 5 else "-"
        text.append(f"| {model} | {len(rs)} | {' | '.join(cells)} | {ratio} | {theirs} |")
    return "\n".join(text)


def write_page():
    """results/README.md: every result's command, hardware and table, from the JSON files beside it."""
    page = ["# Results", "", "Written by `reproduce.py` from the JSON files beside this page. ± is the standard deviation over the seeds; "
            "a row of one seed has no spread, or in brackets the 95 % interval of its test sequences.", ""]
    for path in sorted((runs.ROOT / "results").glob("*.json")):
        result = json.loads(path.read_text())
        if "entry" not in result:
            continue
        e, commits = result["environment"], sorted({r["environment"]["commit"] for r in result["runs"]})
        scored = f"{result['tokens']:,} tokens of {result['split']}" if "tokens" in result else f"{result['sequences']:,} sequences a split"
        page += [f"## {path.stem}", "", f"{result['about']}.", "", "```", result["command"], "```", "",
                 f"{e['gpu'] or e['cpu']}, {e['threads']} thread{'s' * (e['threads'] > 1)} a run, torch {e['torch']}, "
                 f"Python {e['python']}, commit {', '.join(commits)}; "
                 f"{result['data']['source']}, {scored}. Each row is `{result['runs'][0]['train_command']}` and so on, "
                 "then `eval.py`.", "", table(result), ""]
        if path.with_suffix(".png").exists():
            page += [f"![{path.stem}]({path.with_suffix('.png').name})", ""]
        if path.with_suffix(".steps.png").exists():
            page += [f"![by training step]({path.with_suffix('.steps.png').name})", ""]
    runs.write_safely(runs.ROOT / "results" / "README.md", lambda tmp: tmp.write_text("\n".join(page)))


def main():
    parser = runs.make_parser(__doc__)
    parser.add_argument("entry", nargs="?", help="which table or figure; without it, the list")
    parser.add_argument("--scale", default="cpu", choices=["cpu", "paper"],
                        help="cpu: minutes a run on two cores; paper: the paper's sizes, for a GPU (default: cpu)")
    parser.add_argument("--seeds", type=int, default=0, help="seeds of every model; default: as the entry says")
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time (default: 1)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, mps (default: auto)")
    args = runs.parse(parser)
    if args.entry is None:
        for name, e in ENTRIES.items():
            print(f"{name}\n    {e['about']}")
            for s, key in (("cpu", "cpu"), ("paper", "paper_scale")):
                print(f"    --scale {s:6} {sum(n for _, n in e[key]['rows'].values()):3} runs of: train.py --model ... {e[key]['train']}")
        return
    if args.entry not in ENTRIES:
        runs.fail(f"unknown entry {args.entry!r}: {runs.nearest(args.entry, ENTRIES)}")
    if args.jobs < 1 or args.seeds < 0:
        runs.fail("--jobs must be at least 1, --seeds 0 or more")
    entry = ENTRIES[args.entry]
    scale = entry["cpu" if args.scale == "cpu" else "paper_scale"]
    name = f"{args.entry}.{args.scale}"
    todo = [(label, flags, 1337 + s) for label, (flags, n) in scale["rows"].items() for s in range(args.seeds or n)]
    env = os.environ | ({"OMP_NUM_THREADS": str(max(1, os.cpu_count() // args.jobs))} if args.jobs > 1 else {})

    def one(row):
        label, flags, seed = row
        return train_and_eval(folder / f"{label}-{seed}".replace(" ", "-").replace("/", "_"), flags, seed, scale, args, env)
    os.chdir(runs.ROOT)
    folder = Path("out") / f"{entry.get('group', args.entry)}.{args.scale}"
    folder.mkdir(parents=True, exist_ok=True)
    lock = open(folder / "lock", "w")
    try:
        if fcntl:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        runs.fail(f"another reproduce.py is at work in {folder}; wait for it")
    with ThreadPoolExecutor(args.jobs) as pool:
        futures = [pool.submit(one, m) for m in todo]
        try:
            evals = [f.result() for f in futures]
        except BaseException as e:  # a failed command, or Ctrl-C: what runs is saved, what waits does not begin
            pool.shutdown(cancel_futures=True)
            if isinstance(e, RuntimeError):
                runs.fail(e)
            raise
    shared = ("environment", "dtype", "data", "split", "tokens", "lengths", "splits", "sequences")
    result = {k: evals[0][k] for k in shared if k in evals[0]}
    command = f"python reproduce.py {args.entry} --scale {args.scale}" + f" --seeds {args.seeds}" * bool(args.seeds)
    about = ", ".join(filter(None, (entry["about"], scale.get("note"))))
    result |= dict(entry=args.entry, about=about, command=command, paper=entry["paper"],
                   runs=[e["runs"][0] | dict(label=label, **{k: e[k] for k in ("train_command", "environment", "history") if e[k]})
                         for (label, *_), e in zip(todo, evals)])
    if "columns" in entry:
        result["columns"] = entry["columns"]
    Path("results").mkdir(exist_ok=True)
    runs.write_json(f"results/{name}.json", result)
    failed = runs.script("plot.py", "scores" if "columns" in entry else "lengths", f"results/{name}.json")
    if "columns" in entry:
        failed = runs.script("plot.py", "errors", f"results/{name}.json") or failed
    write_page()
    print(table(result) + f"\n\nwrote results/{name}.json and results/README.md")
    sys.exit(failed)


if __name__ == "__main__":
    runs.run(main)
