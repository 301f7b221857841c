"""
Every table and figure that this repository reproduces, each by one command.

    python reproduce.py                                 lists what there is
    python reproduce.py cable_table1 --scale cpu        trains, evaluates, writes results/cable_table1.cpu.{json,png}
    python reproduce.py cable_table1 --scale cpu --jobs 2   two trainings at a time

It runs the commands it prints, skips what is already done, goes on where a killed run stopped, and rewrites
results/README.md, where our numbers stand beside the paper's.
"""
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

# CABLE, Table 1, lower half: perplexity on WikiText-103 by window length, trained on windows of 1024
CABLE_TABLE1 = {
    "cable": (23.70, 22.32, 21.48, 20.94, 20.65, 20.33), "cable_nw": (24.32, 23.01, 22.19, 21.70, 21.46, 21.13),
    "alibi": (24.09, 22.74, 22.05, 21.73, 21.58, 21.30), "fire": (24.34, 22.90, 22.68, 29.57, 54.89, 104.79),
    "t5": (25.06, 23.60, 27.64, 73.99, 198.64, 411.09), "kerple": (23.95, 22.56, 21.72, 21.32, 21.33, 21.58),
    "rope": (23.66, 22.26, 41.40, 114.77, 220.56, 375.62), "learned": (24.94, 23.53),
    "sinusoidal": (25.18, 23.73, 172.33, 607.48, 1348.23, 2017.42)}
PAPER_LENGTHS = (512, 1024, 2048, 4096, 8192, 15360)

# what each entry runs: the flags of train.py and eval.py, and how many seeds of which model
ENTRIES = {
    "cable_table1": dict(
        about="CABLE, Table 1: perplexity far beyond the training length, every encoding on one backbone",
        paper=CABLE_TABLE1,
        cpu=dict(train="--size nano --data stdlib", eval="",
                 models=dict(cable=3, alibi=3, rope=3, cable_nw=1, k_cable=1, nope=1, learned=1, sinusoidal=1, t5=1, kerple=1,
                             fire=1, relative=1, relative_capped=1, label=1)),
        paper_scale=dict(train="--size tiny --data wikitext103 --max_iters 9000 --batch_size 64 --gradient_accumulation_steps 2",
                         eval="--tokens 0 --lengths " + " ".join(map(str, PAPER_LENGTHS)),
                         models={m: 1 for m in CABLE_TABLE1} | dict(k_cable=1)),
    ),
}


def run(command, env):
    """One command, printed; the output of a failed one is shown. Raises RuntimeError when it fails."""
    print("$ " + shlex.join(command), flush=True)
    done = subprocess.run([sys.executable, *command[1:]], cwd=runs.ROOT, env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)} exited with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def train_and_eval(out, model, seed, scale, args, env):
    """One row of a table: out/{ckpt.pt,eval.json}, made now or already there. -> eval.json's dict."""
    device = ["--device", args.device] if args.device != "auto" else []
    start = ["python", "train.py", "--model", model, *scale["train"].split(), "--seed", str(seed), "--out_dir", str(out), "--no-evaluate"]
    checkpoint = runs.load_checkpoint(out / "ckpt.pt") if (out / "ckpt.pt").exists() else None
    if checkpoint is None:
        shutil.rmtree(out, ignore_errors=True)  # killed before its first checkpoint
        run(start + device, env)
    elif checkpoint["iter"] < checkpoint["config"]["max_iters"]:
        run(["python", "train.py", "--resume", str(out), "--no-evaluate", *device], env)
    evaluated = out / "eval.json"
    if not evaluated.exists() or evaluated.stat().st_mtime < (out / "ckpt.pt").stat().st_mtime:
        run(["python", "eval.py", str(out), *scale["eval"].split(), *device], env)
    return json.loads(evaluated.read_text()) | dict(train_command=shlex.join(start[:-3]))


def table(result):
    """A result's JSON -> markdown: mean +- standard deviation over the seeds, by window length."""
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
    page = ["# Results", "", "Written by `reproduce.py` from the JSON files beside this page. A number without a spread is one seed.", ""]
    for path in sorted((runs.ROOT / "results").glob("*.json")):
        result = json.loads(path.read_text())
        if "entry" not in result:
            continue
        e, commits = result["environment"], sorted({r["environment"]["commit"] for r in result["runs"]})
        page += [f"## {path.stem}", "", f"{result['about']}.", "", "```", result["command"], "```", "",
                 f"{e['gpu'] or e['cpu']}, {e['threads']} thread{'s' * (e['threads'] > 1)} a run, torch {e['torch']}, "
                 f"Python {e['python']}, commit {', '.join(commits)}; "
                 f"{result['data']['source']}, {result['tokens']:,} tokens of {result['split']}. Each row is "
                 f"`{result['runs'][0]['train_command']}` and so on, then `eval.py`.", "", table(result), ""]
        if path.with_suffix(".png").exists():
            page += [f"![{path.stem}]({path.with_suffix('.png').name})", ""]
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
                print(f"    --scale {s:6} {sum(e[key]['models'].values())} runs of: train.py --model ... {e[key]['train']}")
        return
    if args.entry not in ENTRIES:
        runs.fail(f"unknown entry {args.entry!r}: {runs.nearest(args.entry, ENTRIES)}")
    if args.jobs < 1 or args.seeds < 0:
        runs.fail("--jobs must be at least 1, --seeds 0 or more")
    entry = ENTRIES[args.entry]
    scale = entry["cpu" if args.scale == "cpu" else "paper_scale"]
    name = f"{args.entry}.{args.scale}"
    todo = [(model, 1337 + s) for model, seeds in scale["models"].items() for s in range(args.seeds or seeds)]
    env = os.environ | ({"OMP_NUM_THREADS": str(max(1, os.cpu_count() // args.jobs))} if args.jobs > 1 else {})

    def one(model_seed):
        model, seed = model_seed
        return train_and_eval(Path("out") / name / f"{model}-{seed}", model, seed, scale, args, env)
    os.chdir(runs.ROOT)
    with ThreadPoolExecutor(args.jobs) as pool:
        futures = [pool.submit(one, m) for m in todo]
        try:
            evals = [f.result() for f in futures]
        except BaseException as e:  # a failed command, or Ctrl-C: what runs is saved, what waits does not begin
            pool.shutdown(cancel_futures=True)
            runs.fail(e) if isinstance(e, RuntimeError) else sys.exit(130)
    result = {k: evals[0][k] for k in ("environment", "dtype", "data", "split", "tokens", "lengths")}
    command = f"python reproduce.py {args.entry} --scale {args.scale}" + f" --seeds {args.seeds}" * bool(args.seeds)
    result |= dict(entry=args.entry, about=entry["about"], command=command, paper=entry["paper"],
                   runs=[e["runs"][0] | dict(train_command=e["train_command"], environment=e["environment"]) for e in evals])
    Path("results").mkdir(exist_ok=True)
    runs.write_json(f"results/{name}.json", result)
    runs.script("plot.py", "lengths", f"results/{name}.json")
    write_page()
    print(table(result) + f"\n\nwrote results/{name}.json and results/README.md")


if __name__ == "__main__":
    runs.run(main)
