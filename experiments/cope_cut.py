"""
What does CoPE do with keys that are far? Copies of trained runs, to be read by eval.py as any run,
not to be resumed. Their tables are cut to the first P positions, and farther keys are on the last
of these; with --drop they have no weight at all, and with --window only the last so many tokens
have one, whatever they count (cope_variants.py).

    python -m experiments.cope_cut out/cope_collapse.cpu/cope-P-* --P 8 --drop --out out/cope_cut
"""
import sys
from functools import partial
from pathlib import Path

import torch

from common.checkpoint import find_checkpoint, load_checkpoint
from common.files import fail, in_one_line, write_safely
from common.flags import Parser


def cut(checkpoint, P, drop, window):
    """The checkpoint of a CoPE run -> one with P positions, far keys dropped."""
    config, weights = dict(checkpoint["config"]), dict(checkpoint["model"])
    for name in [name for name in weights if name.startswith("pos_emb.")]:
        table = weights.pop(name)[:, :P].contiguous()
        weights[f"{name}.pos_emb" if drop or window else name] = table
    config |= dict(P=P, bema=False)
    if drop or window:
        config |= dict(model="cope_window" if window else "cope_drop", drop=drop, window=window)
    return checkpoint | dict(config=config, model=weights, optimizer=None)


def main(argv=None):
    parser = Parser(description=__doc__)
    parser.add_argument("runs", nargs="+", help="run folders or checkpoints of --model cope")
    parser.add_argument("--P", type=int, default=0, help="positions that are left; default: all")
    parser.add_argument("--drop", action="store_true", help="farther keys have no weight")
    parser.add_argument("--window", type=int, default=0, help="keys that have one; default: all")
    parser.add_argument("--out", required=True, help="the folder for the copies")
    args = parser.parse_args(argv)
    for path in map(find_checkpoint, args.runs):
        checkpoint = load_checkpoint(path)
        most = checkpoint["config"].get("P", 0)
        P = args.P or most
        if checkpoint["config"]["model"] != "cope" or not 2 <= P <= most:
            fail(f"{path} has to be a run of cope, with at least --P {max(P, 2)} positions")
        words = [path.parent.name, "drop" if args.drop else "cut", str(P)]
        words += [f"window-{args.window}"] if args.window else []
        folder = Path(args.out) / "-".join(words)
        folder.mkdir(parents=True, exist_ok=True)
        write_safely(folder / "ckpt.pt",
                     partial(torch.save, cut(checkpoint, P, args.drop, args.window)))
        print(f"wrote {folder}")


if __name__ == "__main__":
    sys.excepthook = in_one_line
    main()
