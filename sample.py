"""
Write text with a trained model, as far beyond its training length as you like.

    python sample.py                                            the newest run on text under out/
    python sample.py out/cable-stdlib-nano --prompt "def " --max_new_tokens 4096
    python sample.py --prompt_file README.md --temperature 0    greedy; long prompts are normal
    python sample.py out/bert_cable-retrieval-nano --prompt "read a file line by line" --data .
                                          an encoder: the files that answer best, and where in them

Text streams to stdout as it comes; the speed goes to stderr.
"""
import codecs
import signal
import sys
import time
from pathlib import Path

import torch

import runs
from data.text import absolute, cut_to, encode, get_encoding, identify, own_files

LONGEST = 32  # training lengths: a file is ranked by so much of it at most
BEST = 10     # files that a search names


@torch.no_grad()
def generate(model, idx, max_new_tokens, temperature=1.0, top_k=0, vocab_size=None):
    """
    idx (B, T) prompt -> yields max_new_tokens times the next token ids (B, 1). temperature 0 is
    greedy; top_k 0 is no limit; vocab_size leaves out padding tokens.
    """
    cache = runs.new_cache(model, idx.size(1) + max_new_tokens)
    for _ in range(max_new_tokens):
        logits = read(model, idx, cache)[:, -1, :vocab_size].float()
        if temperature == 0:
            idx = logits.argmax(-1, keepdim=True)
        else:
            logits = (logits - logits.max()) / temperature
            if top_k:
                kept = logits.topk(min(top_k, logits.size(-1))).values
                logits[logits < kept[:, -1:]] = float("-inf")
            idx = torch.multinomial(logits.softmax(-1), 1)
        yield idx


def read(model, idx, cache):
    """The logits after idx (B, T), which may be a long prompt: it goes through in pieces."""
    T = idx.size(1)
    with runs.Progress(model, "prompt", T, T) as progress:
        for part in idx.split(runs.piece(model), dim=1):
            progress.batch(part.size(1))
            logits = model(part, cache=cache)[0]
    return logits


def make_parser():
    parser = runs.make_parser(description=__doc__)
    add = parser.add_argument
    add("checkpoint", nargs="?", help="run folder or checkpoint file; default: the newest run on "
                                      "text under out/")
    add("--prompt", help="text to continue; default: the beginning of a document")
    add("--prompt_file", help="the same from a file")
    add("--data", help="encoders: the file or folder to search for what answers the prompt")
    add("--max_new_tokens", type=int, default=500, help="tokens to write (default: 500)")
    add("--num_samples", type=int, default=1, help="texts to write (default: 1)")
    add("--temperature", type=float, default=0.8,
        help="0 is greedy, 1 the model's own distribution (default: 0.8)")
    add("--top_k", type=int, default=0, help="only the k likeliest tokens; 0 is all (default: 0)")
    add("--seed", type=int, default=1337, help="of the sampling (default: 1337)")
    runs.add_run_flags(parser, bema="the BEMA weights of a run trained with --bema")
    return parser


def read_prompt(args):
    """The prompt as bytes; None to begin a new document."""
    if None not in (args.prompt, args.prompt_file):
        runs.fail("give --prompt or --prompt_file, not both")
    prompt = None
    if args.prompt is not None:
        prompt = args.prompt.encode("utf-8", "surrogateescape")
    if args.prompt_file is not None:
        try:
            prompt = Path(args.prompt_file).read_bytes()
        except OSError as e:
            runs.fail(f"could not read {args.prompt_file}: {e.strerror}")
    return prompt


def newest_text_run():
    """The last checkpoint of the newest run under out/ that was trained on text."""
    for path in runs.checkpoints():
        try:  # another kind of run does not matter, even if its model is no more
            config = torch.load(path, map_location="cpu", weights_only=True)["config"]
        except Exception:  # not whole, which this says in one line
            config = runs.load_checkpoint(path)["config"]
        if "tokenizer" in config and "corpus" not in config:
            return path
    runs.fail("no run on text in out/ yet; make one with: python train.py --model cable")


def write(model, idx, prompt, encoding, args):
    """Stream one text to stdout, after its prompt. -> tokens written; speed, why it ended."""
    utf8 = codecs.getincrementaldecoder("utf-8")("replace")  # a character may span several tokens
    if prompt is not None:
        print(utf8.decode(prompt), end="", flush=True)
    n, start, ended = 0, 0.0, ""
    try:
        for new in generate(model, idx, args.max_new_tokens, args.temperature, args.top_k,
                            encoding.n_vocab):
            if n == 0:
                start = time.time()  # the clock starts after the prompt
            n += 1
            text = encoding.decode_bytes(new[0].tolist())
            print(utf8.decode(text), end="", flush=True)
    except ValueError as e:  # an encoding that ends
        if not n:
            raise
        ended = f"; {runs.complaint(e)}"
    print(utf8.decode(b"", final=True), flush=True)
    speed = f", {(n - 1) / (time.time() - start):,.0f} tok/s" if n > 1 else ""
    return n, speed + ended


def search(model, path, config, checkpoint, prompt, where, device, context):
    """Print the files whose vectors are nearest to the prompt's, each with its best window."""
    if prompt is None or where is None:
        runs.fail(f"{path} is an encoder, which writes no text: give it a --prompt to answer, and "
                  "a file or folder to search with --data")
    asked = prompt.decode("utf-8", "replace").strip("\ufeff").strip()
    if not asked:
        runs.fail("the prompt is empty: a search needs words")
    try:
        encoding = get_encoding(config["tokenizer"])
        table = cut_to(checkpoint["kept"].get("vocabulary", ()))
        texts = read_files(where)
    except ValueError as e:
        runs.fail(e)
    if table.max() >= config["vocab_size"]:
        runs.fail(f"{path} keeps more tokens than its model has")
    T = config["block_size"]
    names = list(texts)
    tokens = [encoding.encode_ordinary(text) for text in texts.values()]
    ours = [table[ids] for ids in tokens]
    query = table[encoding.encode_ordinary(asked)][:min(config["query_size"], T)]
    query = runs.embed(model, [query], device, context)[0]
    most = LONGEST * T
    try:
        score = runs.embed(model, [ids[:most] for ids in ours], device, context) @ query
    except ValueError as e:  # an encoding that ends
        print(runs.complaint(e), file=sys.stderr)
        most = T
        score = runs.embed(model, [ids[:most] for ids in ours], device, context) @ query
    longer = sum(len(ids) > most for ids in ours)
    if longer:
        print(f"{longer} of {len(ours)} files are ranked by their first {most:,} tokens",
              file=sys.stderr)
    for n in (-score).argsort(kind="stable")[:BEST]:
        ids, windows = tokens[n], [ours[n][at:at + T] for at in range(0, len(tokens[n]), T)]
        best = int((runs.embed(model, windows, device, context) @ query).argmax()) * T
        line = encoding.decode(ids[:best]).count("\n") + 1
        said = " ".join(encoding.decode(ids[best:best + T]).split())
        print(f"{score[n]:.3f}  {names[n]}:{line}  {said[:60]}")


def read_files(where):
    """{name: text} of a folder's files, or of one file, without blank ones. Raises ValueError."""
    identify(where)
    files = own_files(absolute(where))
    texts = {name: file.read_text(errors="replace") for name, file in files.items()}
    texts = {name: text for name, text in texts.items() if text.strip("\ufeff").strip()}
    if not texts:
        raise ValueError(f"{where} has no text in it")
    return texts


def main(argv=None):
    args = runs.parse(make_parser(), argv)
    if args.max_new_tokens < 1 or args.num_samples < 1:
        runs.fail("--max_new_tokens and --num_samples must be at least 1")
    if not 0 <= args.temperature < float("inf") or args.top_k < 0:
        runs.fail("--temperature and --top_k must be 0 or more, and finite")
    if 0 < args.temperature < 1e-6:
        runs.fail("--temperature must be 0, which is greedy, or at least 1e-6")
    if not 0 <= args.seed < 1 << 62:
        runs.fail("--seed must be 0 or more, and less than 2^62")
    prompt = read_prompt(args)
    device, context, where = runs.setup(args)
    path = runs.find_checkpoint(args.checkpoint) if args.checkpoint else newest_text_run()
    model, config, checkpoint = runs.load_run(path, device, args.bema)
    kind = runs.kind_of(config)
    if kind == "pairs":
        return search(model, path, config, checkpoint, prompt, args.data, device, context)
    if runs.is_encoder(model):
        runs.fail(f"{path} is an encoder that names masked tokens. To search with it, train it on "
                  f"pairs first: train.py --model {config['model']} --init_from {path.parent} ...")
    if args.data is not None:
        runs.fail(f"--data is for encoders that search; {path} does not")
    if kind != "text":
        runs.fail(f"{path} was trained on {config['data']}, which has no text to write; "
                  "see python eval.py and python maps.py")
    if prompt == b"":
        runs.fail("the prompt is empty; leave it out to begin a new document")
    try:
        encoding = get_encoding(config["tokenizer"])
        if encoding.n_vocab > config["vocab_size"]:
            runs.fail(f"{path} has no room for the {encoding.n_vocab} tokens of its tokenizer")
        ids = [encoding.eot_token]
        if prompt is not None:
            ids = encode(encoding, [prompt])[0].tolist()[1:]
    except ValueError as e:  # the tokenizer cannot be had, or cannot take these bytes
        runs.fail(e)
    print(f"{path}: {config['model']} trained on windows of {config['block_size']} tokens for "
          f"{checkpoint['iter']} iters; {where}; prompt of {len(ids):,} tokens",
          file=sys.stderr, flush=True)

    for i in range(args.num_samples):
        if args.num_samples > 1:
            print(f"--- sample {i + 1} of {args.num_samples} ---", file=sys.stderr, flush=True)
        torch.manual_seed(args.seed + i)
        try:
            with context:
                n, speed = write(model, torch.tensor([ids], device=device), prompt, encoding, args)
        except ValueError as e:  # an encoding that ends
            print(flush=True)
            runs.fail(e)
        end = len(ids) + n
        print(f"--- {n:,} tokens, up to position {end:,} ({end / config['block_size']:.1f} x the "
              f"training length){speed}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.excepthook = runs.in_one_line
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # at once: there is nothing to save
    main()
