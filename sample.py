"""
Write text with a trained model, as far beyond its training length as you like.

    python sample.py                                            the newest run on text under out/
    python sample.py out/cable-stdlib-nano --prompt "def " --max_new_tokens 4096
    python sample.py --prompt_file README.md --temperature 0    greedy; long prompts are normal

Text streams to stdout as it comes; the speed goes to stderr.
"""
import codecs
import re
import sys
import time
from functools import partial

import torch

import data
from common.checkpoint import checkpoints, load_checkpoint, load_run
from common.device import setup
from common.exits import fail, in_one_line, value_errors_fail
from common.flags import Parser, add_run_flags
from common.names import new_cache, trained_on
from data.corpora import read as read_file
from data.text import encode


@torch.no_grad()
def generate(model, idx, max_new_tokens, temperature=1.0, top_k=0, top_p=1.0, vocab_size=None):
    """
    idx (B, T) prompt -> yields max_new_tokens times the next token ids (B, 1). temperature 0 is
    greedy; top_k 0 and top_p 1 are no limit; vocab_size leaves out padding tokens.
    """
    cache = new_cache(model, idx.size(1) + max_new_tokens)
    for _ in range(max_new_tokens):
        logits = read(model, idx, cache)[:, -1, :vocab_size].float()
        if temperature == 0:
            idx = logits.argmax(-1, keepdim=True)
        else:
            p = ((logits - logits.max()) / temperature).softmax(-1)
            idx = torch.multinomial(likeliest(p, top_k, top_p), 1)
        yield idx


def read(model, idx, cache):
    """The last logits of idx (B, T), which may be a long prompt: it goes through in pieces."""
    for part in data.in_pieces(model, idx, cache):
        logits = part
    return logits


def likeliest(p, top_k=0, top_p=1.0):
    """
    Probabilities p (B, n) with zeros instead of all but the top_k likeliest tokens, and all but the
    fewest whose probabilities sum to top_p. Of equal ones the first are kept.
    """
    if not top_k and top_p == 1:
        return p
    p_sorted, order = p.sort(descending=True, stable=True)
    if top_k:
        p_sorted[:, top_k:] = 0
    before = p_sorted.cumsum(-1) - p_sorted
    p_sorted[before >= top_p * p_sorted.sum(-1, keepdim=True)] = 0
    return torch.zeros_like(p).scatter(1, order, p_sorted)


def shown(text):
    """A terminal obeys control characters, so there they are written out, as \\x1b."""
    if not sys.stdout.isatty():
        return text
    return re.sub(r"[\0-\x08\x0b-\x1f\x7f-\x9f]", lambda match: ascii(match[0])[1:-1], text)


def write(model, idx, prompt, encoding, args):
    """Stream one text to stdout, after its prompt. -> tokens written; speed, why it ended."""
    utf8 = codecs.getincrementaldecoder("utf-8")("replace")  # a character may span several tokens
    print(shown(utf8.decode(prompt)), end="", flush=True)
    n, start, ended = 0, 0.0, ""
    try:
        for new in generate(model, idx, args.max_new_tokens, args.temperature, args.top_k,
                            args.top_p, encoding.n_vocab):
            if n == 0:
                start = time.monotonic()  # the clock starts after the prompt
            n += 1
            text = shown(utf8.decode(encoding.decode_bytes(new[0].tolist())))
            print(text, end="", flush=True)
    except ValueError as e:  # positions that end
        if not n:
            fail(e)
        ended = f"; {e}"
    print(utf8.decode(b"", final=True), flush=True)
    speed = f", {(n - 1) / (time.monotonic() - start):,.0f} tok/s" if n > 1 else ""
    return n, speed + ended


# -----------------------------------------------------------------------------

def parse(argv):
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("checkpoint", nargs="?",
        help="run folder or checkpoint file; default: the newest on text under out/")
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", help="text to continue; default: the beginning of a document")
    prompt.add_argument("--prompt_file", help="the same from a file")
    add("--max_new_tokens", type=int, default=500, help="tokens to write (default: 500)")
    add("--num_samples", type=int, default=1, help="texts to write (default: 1)")
    add("--temperature", type=float, default=0.8,
        help="0 is greedy, 1 the model's own distribution (default: 0.8)")
    add("--top_k", type=int, default=0, help="only the k likeliest tokens; 0 is all (default: 0)")
    add("--top_p", type=float, default=1.0,
        help="only the fewest tokens whose probabilities sum to p (default: 1, all)")
    add("--seed", type=int, default=1337, help="of the sampling (default: 1337)")
    add_run_flags(parser, bema="the BEMA weights of a run trained with --bema")
    args = parser.parse_args(argv)
    if args.max_new_tokens < 1 or args.num_samples < 1:
        fail("--max_new_tokens and --num_samples must be at least 1")
    if args.temperature and not 1e-6 <= args.temperature < float("inf"):
        fail("--temperature must be 0, which is greedy, or at least 1e-6, and finite")
    if args.top_k < 0 or not 0 < args.top_p <= 1 or not 0 <= args.seed < 1 << 62:
        fail("--top_k and --seed must be 0 or more, --top_p more than 0 and at most 1")
    return args


def newest_run():
    """The last checkpoint of the newest run on text under out/."""
    for path in checkpoints():
        config = load_checkpoint(path)["config"]
        if trained_on(config).encoding:
            return path
    fail("no run on text in out/ yet; make one with: python train.py --model cable, or name "
         "a folder of results/weights")


def main(argv=None):
    args = parse(argv)
    prompt = (args.prompt or "").encode("utf-8", "surrogateescape")  # "" begins a new document
    if args.prompt_file:
        prompt = read_file(args.prompt_file)
    device, context, where = setup(args)
    torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew for every length: 40 ms a token
    run = load_run(args.checkpoint or newest_run(), device, args.bema, args.set)
    task = trained_on(run.config)
    if not task.encoding:
        fail(f"{run.path} was trained on {run.config['data']} and writes no text")
    with value_errors_fail():
        encoding = task.encoding(run.config)
        ids = encode(encoding, prompt).tolist()
    ids = ids[1:] or ids  # a prompt without the end of text before it; without a prompt that
    T, say = run.config["block_size"], partial(print, file=sys.stderr)
    say(f"{run.path}: {run.config['model']} trained on windows of {T} tokens for "
        f"{run.checkpoint['iter']} iters; {where}; prompt of {len(ids):,} tokens")

    for i in range(args.num_samples):
        if args.num_samples > 1:
            say(f"--- sample {i + 1} of {args.num_samples} ---")
        torch.manual_seed(args.seed + i)
        idx = torch.tensor([ids], device=device)
        with context:
            n, speed = write(run.model, idx, prompt, encoding, args)
        end = len(ids) + n
        say(f"--- {n:,} tokens, up to position {end:,} ({end / T:.1f} x the training length)"
            f"{speed}")


if __name__ == "__main__":
    sys.excepthook = in_one_line
    main()
