"""
What does CoPE do with keys that are far? Copies of trained runs, without a step of training, to be
read by eval.py as any run, not to be resumed. Their tables are cut to the first P positions, and
farther keys are on the last of these; with --drop they have no weight at all, and with --window
only the last so many tokens have one, whatever they count (cope_variants.py).

    python -m experiments.cope_cut out/cope_collapse.cpu/cope-P-* --P 8 --drop --out out/cope_cut
"""
import sys
from functools import partial
from pathlib import Path

import torch

import runs


def changed(checkpoint, P, drop, window):
    """The checkpoint of a CoPE run -> one with P positions, far keys dropped. Raises ValueError."""
    config, weights = dict(checkpoint["config"]), dict(checkpoint["model"])
    if config["model"] != "cope":
        raise ValueError(f"is {config['model']}, not cope")
    if not 2 <= P <= config["P"]:
        raise ValueError(f"has {config['P']} positions: --P must be from 2 to that")
    variant = drop or window
    tables = [name for name in weights if name.startswith("pos_emb.")]
    for name in tables:
        table = weights.pop(name)[:, :P].contiguous()
        weights[f"{name}.pos_emb" if variant else name] = table
    config |= dict(P=P, bema=False)
    if variant:
        config |= dict(model="cope_window" if window else "cope_drop", drop=drop, window=window)
    kept = {name: x for name, x in checkpoint.items() if name not in ("optimizer", "bema")}
    return kept | dict(config=config, model=weights)


def main(argv=None):
    parser = runs.make_parser(description=__doc__)
    parser.add_argument("runs", nargs="+", help="run folders or checkpoints of --model cope")
    parser.add_argument("--P", type=int, default=0, help="positions that are left; default: all")
    parser.add_argument("--drop", action="store_true", help="farther keys have no weight")
    parser.add_argument("--window", type=int, default=0, help="keys that have one; default: all")
    parser.add_argument("--out", required=True, help="the folder for the copies")
    args = runs.parse(parser, argv)
    if args.window < 0:
        runs.fail("--window must be 0 or more")
    for run in args.runs:
        path = runs.find_checkpoint(run)
        checkpoint = runs.load_checkpoint(path)
        P = args.P or checkpoint["config"].get("P", 0)
        try:
            copy = changed(checkpoint, P, args.drop, args.window)
        except ValueError as e:
            runs.fail(f"{path} {e}")
        words = [path.parent.name, *(["drop"] if args.drop else []), f"{P}"]
        words += [f"window-{args.window}"] if args.window else []
        folder = Path(args.out) / "-".join(words)
        if (folder / "ckpt.pt").exists():
            runs.fail(f"{folder} holds a run: move it away, or name another --out")
        folder.mkdir(parents=True, exist_ok=True)
        runs.write_safely(folder / "ckpt.pt", partial(torch.save, copy))
        print(f"wrote {folder}")


if __name__ == "__main__":
    sys.excepthook = runs.in_one_line
    main()
