"""
What does CoPE do with keys that are farther than its table? Copies of trained runs, without a step
of training: their tables cut to the first P positions, farther keys on the last of these, or, with
--drop, without any weight (cope_variants.py). eval.py reads them as any run.

    python -m experiments.cope_cut out/cope_collapse.cpu/cope-P-* --P 8 --drop --out out/cope_cut
"""
import sys
from functools import partial
from pathlib import Path

import torch

import runs


def shorter(checkpoint, P, drop):
    """The checkpoint of a CoPE run with P positions, farther keys dropped or on the last one."""
    config, weights = dict(checkpoint["config"]), dict(checkpoint["model"])
    if config["model"] != "cope":
        raise ValueError(f"is {config['model']}, not cope")
    if not 2 <= P <= config["P"]:
        raise ValueError(f"has {config['P']} positions: --P must be from 2 to that")
    config["P"] = P
    for name in [name for name in weights if name.startswith("pos_emb.")]:
        table = weights.pop(name)[:, :P].contiguous()
        weights[f"{name}.pos_emb" if drop else name] = table
    if drop:
        config |= dict(model="cope_drop", position="embedding", plus="none", slopes="",
                       first=False, drop=True)
    kept = {name: x for name, x in checkpoint.items() if name not in ("optimizer", "bema")}
    return kept | dict(config=config, model=weights)


def main(argv=None):
    parser = runs.make_parser(description=__doc__)
    parser.add_argument("runs", nargs="+", help="run folders or checkpoints of --model cope")
    parser.add_argument("--P", type=int, required=True, help="positions that are left")
    parser.add_argument("--drop", action="store_true", help="farther keys have no weight")
    parser.add_argument("--out", required=True, help="the folder for the copies")
    args = runs.parse(parser, argv)
    for run in args.runs:
        path = runs.find_checkpoint(run)
        try:
            copy = shorter(runs.load_checkpoint(path), args.P, args.drop)
        except ValueError as e:
            runs.fail(f"{path} {e}")
        name = f"{path.parent.name}-{'dropped' if args.drop else 'cut'}-{args.P}"
        folder = Path(args.out) / name
        folder.mkdir(parents=True, exist_ok=True)
        runs.write_safely(folder / "ckpt.pt", partial(torch.save, copy))
        print(f"wrote {folder}")


if __name__ == "__main__":
    sys.excepthook = runs.in_one_line
    main()
