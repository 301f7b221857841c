"""
A window on everyone: trained models that read the last W tokens alone. What do they lose?

    python -m experiments.windows out/matrix.cpu/text/{cable,alibi,fox,cope,tra}-1337 \\
        --windows 256 64 --lengths 256 1024 4096 --amount 65536 --out results/window_text.json

A row for each run as it is, and one for each window. For methods without absolute positions;
RoPE's window is model_rope.py's own.
"""
import shlex
import sys

import torch

from common.checkpoint import load_run
from common.device import environment, setup
from common.files import in_one_line, write_json
from common.flags import Parser, add_run_flags
from common.names import make_task
from data import Options


class Window:
    """A model's Cache that holds the last W tokens alone."""
    def __init__(self, W):
        self.W, self.buf = W, {}
        self.t = 0

    def __setattr__(self, name, value):  # a model counts what it has read: here at most W
        super().__setattr__(name, min(value, self.W) if name == "t" else value)

    def append(self, name, x):
        if name in self.buf:
            x = torch.cat([self.buf[name], x], dim=2)
        self.buf[name] = x[:, :, -self.W:]
        return self.buf[name]


class Windowed(torch.nn.Module):
    """A model of which every attention reads the last W tokens alone, its own among them."""
    def __init__(self, model, W):
        super().__init__()
        self.model, self.W, self.config = model, W, model.config

    def forward(self, idx, targets=None, cache=None):
        cache = Window(self.W)
        logits = [self.model(token, cache=cache)[0] for token in idx.split(1, dim=1)]
        return torch.cat(logits, dim=1), None


def main(argv=None):
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("checkpoints", nargs="+", help="run folders, all of one task")
    add("--windows", type=int, nargs="+", required=True, help="how many tokens are read")
    add("--lengths", type=int, nargs="+", required=True, help="of eval.py")
    add("--amount", type=int, required=True, help="eval.py's --tokens, or --sequences")
    add("--out", required=True, help="a .json")
    add_run_flags(parser)
    args = parser.parse_args(argv)
    device, context, words = setup(args)

    runs = []
    for path in args.checkpoints:
        run = load_run(path, device, changes=args.set)
        name = run.config["model"]
        runs.append(run._replace(name=name))
        for W in args.windows:
            runs.append(run._replace(name=f"{name}, last {W}", model=Windowed(run.model, W)))
    task = make_task(runs[0].config, runs[0].checkpoint["kept"])
    scores = task.evaluate(runs, Options(lengths=args.lengths, amount=args.amount, device=device,
                                         context=context, words=words))
    for row in scores["runs"]:
        row["label"] = row["name"]
    asked = sys.argv[1:] if argv is None else argv
    command = shlex.join(["python", "-m", "experiments.windows", *asked])
    write_json(args.out, dict(command=command, environment=environment()) | scores)


if __name__ == "__main__":
    sys.excepthook = in_one_line
    main()
