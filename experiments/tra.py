"""TRA: Understanding Attention Glitches with Threshold Relative Attention"""
from experiments import Row, rows

COLUMNS = [(split, split, "exact_match") for split in ("iid", "dense", "sparse")]
# the order of the rows of Table 1 of the MOSS workshop paper (the journal version has others)
TABLE1 = ("tra", "cope", "diff", "fox", "label", "rope", "t5", "learned", "nope")
MODELS = ("tra", "fox", "cope", "rope", "cable")
POST, PLAIN = "--norm post --qk_norm", "--norm pre --no-qk_norm"
NOTEBOOK = ("steps, batch and learning rate are those of its authors' notebook, and all test sets "
            "are as large as its sparse one, 160 times 1,000 strings; weight decay, beta2, CoPE's "
            "P = 64, 16 labels for every token and the MLP, GELU of 4 times the width, are ours, "
            "where the paper has SwiGLU of twice the width; the notebook also drops out logits "
            "(.01), and has an untied head, biases and torch's own initialisation")
SMALL = dict(train="--data flipflop --max_iters 1000",
             eval="--sequences 500 --lengths 64 256 1024")
# CoPE's flip-flop at a quarter of its dimensions (cope_table2_flipflop)
MIDDLE = dict(train="--data flipflop --block_size 256 --batch_size 16 --max_iters 1000 "
                    "--learning_rate 1e-3 --lr_decay linear --beta2 0.999 --n_embd 64 --n_layer 4 "
                    "--n_head 4",
              eval="--sequences 500 --lengths 256 1024", minutes=20,
              note="256 tokens and 1,000 steps, where the paper has 512 and 25,000")
PAPER = dict(note=NOTEBOOK, train="--data flipflop --size paper --dtype float32",
             eval="--sequences 160000")


def norms(n, often):
    """Every model with every norm, with and without QK-norm, n seeds each; TRA's own more often."""
    table = {}
    for model in MODELS:
        for norm in ("post", "pre"):
            for words, flag in ((" qk-norm", "--qk_norm"), ("", "--no-qk_norm")):
                seeds = often if model == "tra" and words else n
                table[f"{model} {norm}{words}"] = Row(
                    f"--model {model} --norm {norm} {flag}", seeds)
    table["tra post qk-norm, 2e-4"] = Row(f"--model tra {POST} --learning_rate 2e-4", often)
    # the two seeds that had not learned it
    table["tra post qk-norm, PyTorch's init"] = Row(f"--model tra_torch_init {POST}", 2)
    table["tra post qk-norm, 4 x the steps"] = Row(f"--model tra {POST} --max_iters 4000", 2)
    return table


def parts(n):
    """TRA taken apart (tra_variants.py), and the paper's smallest models (Appendix A)."""
    table = {"threshold and its count (tra)": Row(f"--model tra {POST}", n)}
    for words, model in (("threshold, plain distance", "tra_plain"),
                         ("its count, no key dropped", "tra_kept"),
                         ("threshold, no decay", "tra_no_decay"),
                         ("plain distance, no key dropped", "tra_decay")):
        table[words] = Row(f"--model {model} {POST}", n)
    for model in ("tra", "fox"):
        table[f"{model}, 2 layers, 1 head"] = Row(
            f"--model {model} {POST} --n_layer 2 --n_head 1", n)
    return table


ENTRIES = {
    "tra_table1": dict(
        title="TRA, Table 1: flip-flop, exact match (%), every method with the norms of TRA's "
              "authors, post-norm and QK-norm, trained on 256 tokens",
        columns=COLUMNS,
        cpu=MIDDLE | dict(rows=rows(3, "tra", "fox", "cope", "rope", "cable", "diff", flags=POST)),
        paper=PAPER | dict(rows=rows(4, *TABLE1, flags=POST))),
    "tra_table1_own": dict(
        title="The same, with pre-norm and no QK-norm, as they come",
        published="tra_table1", columns=COLUMNS,
        cpu=MIDDLE | dict(rows=rows(3, "fox", "cope", "rope", flags=PLAIN)),
        paper=PAPER | dict(rows=rows(4, *TABLE1[1:], flags=PLAIN))),
    "tra_norm": dict(
        title="What of TRA's result is TRA, what post-norm and QK-norm? Flip-flop, exact match "
              "(%); no paper has this table", columns=COLUMNS, group="tra",
        cpu=SMALL | dict(rows=norms(3, often=10))),
    "tra_parts": dict(
        title="TRA taken apart: which of its two ideas does the work? Flip-flop, exact match (%); "
              "no paper has this table", columns=COLUMNS, group="tra",
        cpu=SMALL | dict(rows=parts(3))),
    "tra_table2": dict(
        title="TRA, Table 2 and Figure 4: WikiText-103, trained on windows of 128, read in "
              "windows of up to 4,096",
        paper=dict(
            note="learning rate, post-norm, QK-norm and float32 are those of its authors' "
                 "flip-flop notebook, here for all models; CoPE's 64 positions, 8,192 labels, "
                 "weight decay of .1 and clipping at 1 are ours; the MLP is GELU of 4 times the "
                 "width and embeddings are tied: 51M parameters where the paper has circa 80M",
            train="--data wikitext103 --size tiny --n_layer 8 --block_size 128 --batch_size 64 "
                  "--gradient_accumulation_steps 1 --max_iters 100000 --learning_rate 1e-4 "
                  f"--min_lr 0 --warmup_iters 0 --dtype float32 {POST}",
            eval="--tokens 0 --lengths 128 256 512 1024 2048 4096", published_at=(128,),
            # labels to draw from: the longest window has 4,096 tokens
            rows=rows(4, *reversed(TABLE1)) | rows(4, "label", flags="--n_label 8192"))),
}

NUMBERED = {
    "Table 1": ("tra_table1", "tra_table1_own", "tra_norm"),
    "Figures 1, 2, 3": "maps.py on two runs: results/tra.md has the commands",
    "Table 2": ("tra_table2", "lm"), "Figure 4": ("tra_table2", "lm"),
    "Appendix A": ("tra_parts",)}
