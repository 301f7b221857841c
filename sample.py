"""
Write text with a trained model, as far beyond its training length as you like.

    python sample.py                                            the newest checkpoint under out/
    python sample.py out/cable-stdlib-nano --prompt "def " --max_new_tokens 4096
    python sample.py --prompt_file README.md --temperature 0    greedy; long prompts are the normal case

Text streams to stdout as it comes; the speed goes to stderr.
"""
import codecs
import sys
import time
from pathlib import Path

import torch

import runs
from data.text import encode, get_encoding


@torch.no_grad()
def generate(model, idx, max_new_tokens, temperature=1.0, top_k=0, vocab_size=None, cached=True):
    """
    idx (B, T) prompt -> yields max_new_tokens times the next token ids (B, 1). temperature 0 is greedy; top_k 0 is no limit;
    vocab_size leaves out padding tokens. cached=False runs the whole text again for every token, for comparison.
    """
    cache, piece = runs.new_cache(model, idx.size(1) + max_new_tokens) if cached else None, runs.piece(model)
    new, text = idx, idx
    for _ in range(max_new_tokens):
        if cached:
            for part in new.split(piece, dim=1):  # a long prompt goes in piece by piece
                logits = model(part, cache=cache)[0]
        else:
            logits = model(text)[0]
        logits = logits[:, -1, :vocab_size].float()
        if temperature == 0:
            new = logits.argmax(-1, keepdim=True)
        else:
            logits = (logits - logits.max()) / temperature
            if top_k:
                logits[logits < logits.topk(min(top_k, logits.size(-1))).values[:, -1:]] = float("-inf")
            new = torch.multinomial(logits.softmax(-1), 1)
        yield new
        if not cached:
            text = torch.cat((text, new), 1)


def main():
    parser = runs.make_parser(__doc__)
    parser.add_argument("checkpoint", nargs="?", help="run folder or checkpoint file; default: the newest under out/")
    parser.add_argument("--prompt", help="text to go on from; default: the beginning of a document")
    parser.add_argument("--prompt_file", help="the same from a file")
    parser.add_argument("--max_new_tokens", type=int, default=500, help="tokens to write (default: 500)")
    parser.add_argument("--num_samples", type=int, default=1, help="texts to write (default: 1)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 is greedy, 1 the model's own distribution (default: 0.8)")
    parser.add_argument("--top_k", type=int, default=0, help="only the k likeliest tokens; 0 is all (default: 0)")
    parser.add_argument("--seed", type=int, default=1337, help="of the sampling (default: 1337)")
    parser.add_argument("--bema", action="store_true", help="the BEMA weights of a run trained with --bema")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, mps (default: auto)")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 (default: auto)")
    parser.add_argument("--kernel", default="auto", help="Triton attention: auto (on cuda, where there is one), off (default: auto)")
    args = runs.parse(parser)
    if args.max_new_tokens < 1 or args.num_samples < 1 or not 0 <= args.temperature < float("inf") or args.top_k < 0:
        runs.fail("--max_new_tokens and --num_samples must be at least 1, --temperature and --top_k 0 or more")
    if not 0 <= args.seed < 1 << 62:
        runs.fail("--seed must be 0 or more, and less than 2^62")
    sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character shows a ?
    prompt = None if args.prompt is None else args.prompt.encode("utf-8", "surrogateescape")
    if args.prompt_file:
        if args.prompt is not None:
            runs.fail("give --prompt or --prompt_file, not both")
        try:
            prompt = Path(args.prompt_file).read_bytes()
        except OSError as e:
            runs.fail(f"could not read {args.prompt_file}: {e.strerror}")
    if prompt == b"":
        runs.fail("the prompt is empty; leave it out to begin a new document")

    device = runs.pick_device(args.device)
    context, dtype = runs.autocast(device, args.dtype)
    path = runs.find_checkpoint(args.checkpoint)
    model, config, checkpoint = runs.load_run(path, device, args.bema)
    if "tokenizer" not in config:
        runs.fail(f"{path} was trained on {config['data']}, which has no text to write; see python eval.py and python plot.py maps")
    try:
        encoding = get_encoding(config["tokenizer"])
        ids = [encoding.eot_token] if prompt is None else encode(encoding, [prompt])[0].tolist()[1:]
    except ValueError as e:  # the tokenizer cannot be had, or cannot take these bytes
        runs.fail(e)
    kernel = runs.use_kernel(args.kernel, model, device, dtype)
    print(f"{path}: {config['model']} trained on windows of {config['block_size']} tokens for {checkpoint['iter']} iters; "
          f"{device}, {dtype}, {kernel}; prompt of {len(ids):,} tokens", file=sys.stderr, flush=True)

    for i in range(args.num_samples):
        if args.num_samples > 1:
            print(f"--- sample {i + 1} of {args.num_samples} ---", file=sys.stderr, flush=True)
        torch.manual_seed(args.seed + i)
        utf8 = codecs.getincrementaldecoder("utf-8")("replace")  # a character may span several tokens
        if prompt is not None:
            print(utf8.decode(prompt), end="", flush=True)
        idx, start, n = torch.tensor([ids], device=device), None, 0
        try:
            with context:
                for new in generate(model, idx, args.max_new_tokens, args.temperature, args.top_k, encoding.n_vocab):
                    start, n = start or time.time(), n + 1  # the clock starts after the prompt
                    print(utf8.decode(encoding.decode_bytes(new[0].tolist())), end="", flush=True)
        except ValueError as e:  # an encoding that ends
            print(flush=True)
            runs.fail(e)
        print(utf8.decode(b"", final=True), flush=True)
        rate = f", {(n - 1) / (time.time() - start):,.0f} tok/s" if n > 1 else ""
        print(f"--- {n:,} tokens, up to position {len(ids) + n:,} ({(len(ids) + n) / config['block_size']:.1f} x "
              f"the training length){rate}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    runs.run(main)
