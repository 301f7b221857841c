"""CoPE: Contextual Position Encoding, Learning to Count What's Important"""
from itertools import product

from experiments import Row, rows

FIRST = ("the MLP in the first layer alone: no position in the others, which is inferred, as the "
         "paper does not say what they have")
RELEASE = "--dtype float32 --dropout 0.1"  # the release trains like that unless told otherwise
# Appendix C: 10,000 steps, linear decay; "batch size 16" on 8 GPUs is read as 16 on each
FLIPFLOP = ("--data flipflop --size paper --max_iters 10000 --batch_size 128 --learning_rate 3e-4 "
            f"--lr_decay linear --beta2 0.999 {RELEASE}")
SMALL_FLIPFLOP = ("--data flipflop --block_size 256 --batch_size 16 --max_iters 1000 "
                  "--learning_rate 1e-3 --lr_decay linear --beta2 0.999")
SLOW = " --max_iters 2000"  # learned positions and RoPE need more steps than CoPE
SMALL_NOTE = ("strings of 256 tokens and a quarter of the dimensions; learned positions and RoPE "
              "have 2,000 steps, the others 1,000")
FLIPFLOP_NOTE = ("16 strings on each of 8 GPUs are read as 128 a step, and the dimension in its "
                 "tables as the model's; P = 64 and weight decay are ours, the paper names none, "
                 "nor warmup or clipping, of which there is none here; dropout is the release's, "
                 "which divides z by sqrt(d)")
COUNTING = ("size and training, but not norms and MLP, are those of the authors' release, as the "
            "paper has none: there post-norm with LayerNorm and ReLU, here pre-norm with GELU; the "
            "release divides z by sqrt(d), and draws a program's length anew where nothing is set; "
            "tested on 10,000 programs, the release on 1,000")
SMALL_COUNTING = dict(minutes=8, train="--data counting", eval="--sequences 2000")
PAPER_COUNTING = dict(note=COUNTING, train="--data counting --size paper --dtype float32",
                      eval="--sequences 10000")
ERROR_IN_AND_OUT = [("in distribution", "iid", "glitch_rate"),
                    ("out (sparse)", "sparse", "glitch_rate")]


def counting(n, models, variables):
    """Every model with every number of variables, n seeds each."""
    table = {}
    for v in variables:
        table |= {f"{m} {v} var": Row(f"--model {m} --vars {v}", n) for m in models}
    return table


def sized(model, divide, C=256, layers=4, heads=4):
    """The flags of Table 7's row C/layers/heads, the dimension divided."""
    return f"--model {model} --n_embd {C // divide} --n_layer {layers} --n_head {heads}"


def table7(divide, n, slow=""):
    """
    Table 7's rows, the dimension divided; n seeds where the paper gives a spread, else one.
    slow: more flags for learned positions and RoPE.
    """
    table = {}
    for model, C, layers, heads in product(("cope", "learned", "rope"), (256, 128), (4, 2), (4, 2)):
        flags = sized(model, divide, C, layers, heads) + ("" if model == "cope" else slow)
        seeds = n if (C, layers, heads) == (256, 4, 4) else 1
        table[f"{model} {C}/{layers}/{heads}"] = Row(flags, seeds)
    table["learned, hard attention"] = Row(sized("learned_hard", divide) + slow)
    table["cope_mlp"] = Row(sized("cope_mlp", divide))
    table["cope_mlp, first layer"] = Row(sized("cope_mlp_first", divide))
    for name, m in (("1", 1), ("1/4", 1 / 4), ("1/16", 1 / 16)):
        slopes = ",".join(str(m / 2**h) for h in range(4))
        table[f"alibi {name}"] = Row(f"{sized('cope_alibi', divide)} --slopes {slopes}", n)
    table["alibi learned"] = Row(sized("cope_alibi", divide), n)
    return table


def programs(n, *counts):
    """CoPE and relative embeddings with so many training programs, n seeds each."""
    table = {}
    for model in ("cope", "relative"):
        for count in counts:
            flags = f"--model {model} --vars 1 --n_train {count}"
            table[f"{model}, {count:,} programs"] = Row(flags, n)
    return table


def tables_of(n, sizes, dropped):
    """CoPE with so many positions P, as it is and without the keys beyond them, n seeds each."""
    table = {f"P = {P}": Row(f"--model cope --P {P}", n) for P in sizes}
    return table | {f"P = {P}, no key beyond": Row(f"--model cope_drop --P {P}", n)
                    for P in dropped}


# section 5.4: 100 epochs of the 118 million gpt2 tokens, 64 windows of 1,024 a step
WIKITEXT = ("--data wikitext103 --size small --batch_size 16 --gradient_accumulation_steps 4 "
            "--max_iters 180000 --dropout 0.1")
GPT2 = ("the learning rate is that of CABLE's paper and the same for all, as this one has none: "
        "trained as there, but for batch and steps; dropout is GPT-2's and the release's")
ALIBI = ",".join(f"{2**-h:.6g}" for h in (1, 2, 3, 4, 5, 6, 7, 8, .5, 1.5, 2.5, 3.5))  # of 12 heads
# section 5.5: 100 billion tokens of code
CODE = ("--data packages --tokenizer gpt2 --size tiny --n_layer 4 --n_head 8 --n_embd 256 "
        "--block_size 4096 --batch_size 8 --gradient_accumulation_steps 16 --max_iters 190735 "
        "--learning_rate 5e-4 --min_lr 5e-5")


def wikitext(title, table):
    """At the paper's size alone."""
    return dict(title=title, group="cope_wikitext",
                paper=dict(note=GPT2, train=WIKITEXT, eval="--tokens 0 --lengths 1024",
                           published_at=(1024,), rows=table))


ENTRIES = {
    "cope_table2_flipflop": dict(
        title="CoPE, Table 2, left: flip-flop, wrong reads (%); the paper does not say of what its "
              "errors are, but a guess has half of them wrong in its Table 7",
        columns=ERROR_IN_AND_OUT, group="cope_flipflop", steps=True,  # as its Figure 5
        cpu=dict(note=SMALL_NOTE, minutes=6, train=SMALL_FLIPFLOP, eval="--sequences 2000",
                 rows={"cope": Row(sized("cope", 4), 3), "rope": Row(sized("rope", 4) + SLOW, 3),
                       "learned": Row(sized("learned", 4) + SLOW, 3)}),
        paper=dict(note=FLIPFLOP_NOTE, train=FLIPFLOP, eval="--sequences 10000",
                   rows=rows(3, "cope", "rope", "learned"))),
    "cope_table2_copy": dict(
        title="CoPE, Table 2, right: selective copy, sequences with an error (%)",
        columns=[(split, split, "sequence_error") for split in ("iid", "dense", "sparse")],
        cpu=dict(minutes=3, train="--data selective_copy", eval="--sequences 2000",
                 rows=rows(3, "cope", flags="--P 64") | rows(3, "rope", "learned")),
        paper=dict(note="batch, optimizer, P and the separator are ours, the paper has none, and "
                        "that an error is a wrong sequence is inferred; dropout is the release's",
                   train=f"--data selective_copy --size paper {RELEASE}",
                   eval="--sequences 10000",
                   rows=rows(3, "cope", flags="--P 512") | rows(3, "rope", "learned"))),
    "cope_table3": dict(
        title="CoPE, Table 3: counting with 1, 3 and 5 variables, wrong answers (%)",
        group="counting",
        columns=[("in distribution", "iid", "answer_error")],
        cpu=SMALL_COUNTING | dict(
            note="one and three variables, programs of up to 32 operations, never the same one "
                 "twice",
            rows=counting(3, ("cope", "relative", "learned"), (1, 3))),
        paper=PAPER_COUNTING | dict(
            rows=counting(3, ("cope", "relative", "learned"), (1, 3, 5)))),
    "cope_table4": dict(
        title="CoPE, Table 4: counting one variable with more or fewer passes than in training, "
              "wrong answers (%)",
        runs="cope_table3", group="counting",
        columns=[("pass 50", "iid", "answer_error"), ("pass 100", "pass100", "answer_error"),
                 ("pass 10", "pass10", "answer_error")],
        cpu=SMALL_COUNTING | dict(rows=counting(3, ("cope", "relative"), (1,))),
        paper=PAPER_COUNTING | dict(rows=counting(3, ("cope", "relative"), (1,)))),
    "cope_fig2": dict(
        title="CoPE, Figure 2: counting, wrong answers (%) by the number of training programs; one "
              "variable here, as the text does not say how many, nor how many programs",
        group="counting", columns=[("in distribution", "iid", "answer_error")],
        cpu=SMALL_COUNTING | dict(note="programs of up to 32 operations",
                                  rows=programs(3, 100, 1000, 10000)),
        paper=PAPER_COUNTING | dict(note=f"{COUNTING}; 15,625 steps for every number of programs",
                                    rows=programs(3, 1000, 2000, 5000, 10000))),
    "cope_table7": dict(
        title="CoPE, Table 7: flip-flop, wrong reads (%), by dimension/layers/heads, and other "
              "ways to use the count",
        columns=ERROR_IN_AND_OUT, group="cope_flipflop",
        cpu=dict(note=f"{SMALL_NOTE}; {FIRST}", minutes=5, train=SMALL_FLIPFLOP,
                 eval="--sequences 2000", rows=table7(divide=4, n=1, slow=SLOW)),
        paper=dict(note=f"{FLIPFLOP_NOTE}; {FIRST}", train=FLIPFLOP, eval="--sequences 10000",
                   rows=table7(divide=1, n=3))),
    "cope_collapse": dict(
        title="CoPE far beyond its training length, by the number of positions P in its table: "
              "flip-flop, exact match (%); no paper has this table",
        columns=[(split, split, "exact_match") for split in ("iid", "dense", "sparse")],
        cpu=dict(minutes=4, train="--data flipflop --max_iters 1000",
                 eval="--sequences 500 --lengths 64 256 1024",
                 rows=tables_of(3, (8, 16, 32, 64), (8, 16)))),
    "cope_table5": wikitext(
        "CoPE, Table 5, left: WikiText-103, test perplexity in windows of 1,024",
        rows(1, "learned", "relative", "cope", "cope_relative")),
    "cope_table8": wikitext(
        "CoPE, Table 8: its parts on WikiText-103, test perplexity",
        rows(1, "cope") | rows(1, "cope_alibi", flags=f"--slopes {ALIBI}") | {
            "val-gates": Row("--model cope_val"), "sep-keys": Row("--model cope_sep"),
            "a table in each layer": Row("--model cope --no-share"),
            "P = 16": Row("--model cope --P 16"), "P = 1,024": Row("--model cope --P 1024")}),
    "cope_fig3": dict(
        title="CoPE, Figure 3: WikiText-103, trained on windows of 1,024 and of 512, read in "
              "longer ones; its numbers are not in the text", group="cope_wikitext",
        paper=dict(note=GPT2 + "; windows of 512 are 128 a step, so as many tokens; the lengths "
                        "read are ours",
                   train=WIKITEXT, eval="--split val --tokens 0 --lengths 512 1024 2048 4096",
                   rows=rows(1, "cope", "relative", "relative_capped") | {
                       f"{m}, trained on 512": Row(f"--model {m} --block_size 512 --batch_size 32")
                       for m in ("cope", "relative", "relative_capped")})),
    "cope_code": dict(
        title="CoPE, Table 5, right: code in windows of 4,096",
        paper=dict(note="its code is not public: here it is that of Python's standard library and "
                        "of seven packages, 35 million tokens, each read 2,800 times; train.py "
                        "--data takes a larger folder; batch, schedule and P are ours; so are "
                        "gpt2's tokens, tied embeddings and GELU, 16 to 17M parameters where the "
                        "paper has 20 to 21M: its perplexities are of other tokens",
                   train=CODE, eval="--tokens 0 --lengths 4096", published_at=(4096,),
                   rows=rows(1, "learned", "rope", "cope", "cope_rope"))),
}

NUMBERED = {
    "Figure 1": "a drawing of the method", "Table 1": "not here: prompts of GPT-4 and Llama",
    "Table 2": ("cope_table2_flipflop", "cope_table2_copy"), "Table 3": ("cope_table3",),
    "Figure 2": ("cope_fig2",), "Table 4": ("cope_table4",),
    "Table 5": ("cope_table5", "cope_code", "lm"), "Figure 3": ("cope_fig3", "lm"),
    "Figures 4, 6": "maps.py on a run of cope_sep: results/cope.md has the commands",
    "Table 6": "not here: the prompts of Table 1", "Table 7": ("cope_table7",),
    "Figure 5": ("cope_table7",), "Table 8": ("cope_table8", "lm"),
    "Table 9": ("cope_table3", "cope_table4"), "Table 10": ("cope_table2_copy",)}
