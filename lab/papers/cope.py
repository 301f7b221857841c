"""CoPE: Contextual Position Encoding, Learning to Count What's Important"""
from itertools import product

from lab import Row, rows

IN_AND_OUT = [("in distribution", "iid", "glitch_rate"), ("out (sparse)", "sparse", "glitch_rate")]
IN = [("in distribution", "iid", "answer_error")]
COUNTING = dict(train="--data counting", eval="--sequences 2000")
FLIPFLOP = dict(train="--data flipflop --block_size 256 --batch_size 16 --max_iters 1000 "
                      "--learning_rate 1e-3 --lr_decay linear --beta2 0.999",
                eval="--sequences 2000")
LONGER = "--max_ops 128 --joined --block_size 128"  # a quarter of the paper's
NOTE = ("strings of 256 tokens and a quarter of the dimensions; learned positions and RoPE have "
        "2,000 steps, the others 1,000")
FIRST = ("the MLP in the first layer alone: no position in the others, which is inferred, as the "
         "paper does not say what they have")
SLOW = "--max_iters 2000"  # learned positions and RoPE need more steps than CoPE

# the paper's size
PAPER_FLIPFLOP = dict(
    train="--data flipflop --size paper --max_iters 10000 --batch_size 128 --learning_rate 3e-4 "
          "--lr_decay linear --beta2 0.999 --dtype float32 --dropout 0.1",
    eval="--sequences 10000")
PAPER_NOTE = ("16 strings on each of 8 GPUs are read as 128 a step, and the dimension in its "
              "tables as the model's; P = 64 and weight decay are ours, the paper names none, nor "
              "warmup or clipping, of which there is none here; dropout is the release's, which "
              "divides z by sqrt(d)")
PAPER_COUNTING = dict(train="--data counting --size paper --dtype float32",
                      eval="--sequences 10000")
COUNTING_NOTE = ("size and training, but not norms and MLP, are those of the authors' release, as "
                 "the paper has none: there post-norm with LayerNorm and ReLU, here pre-norm with "
                 "GELU; the release divides z by sqrt(d), and draws a program's length anew where "
                 "nothing is set; tested on 10,000 programs, the release on 1,000")
WIKITEXT = ("--data wikitext103 --size small --batch_size 16 --gradient_accumulation_steps 4 "
            "--max_iters 180000 --dropout 0.1")
WIKITEXT_NOTE = ("the learning rate is that of CABLE's paper and the same for all, as this one has "
                 "none: trained as there, but for batch and steps; the dropout of .1 is the "
                 "release's, where CABLE's entries have none")


def size(C, layers=4, heads=4):
    return f"--n_embd {C} --n_layer {layers} --n_head {heads}"


def sizes(share=1, slow="", seeds=1):
    """Table 7's C/layers/heads; C is divided by `share` here. So many seeds of the largest."""
    table = {}
    models = "cope", "learned", "rope"
    for model, C, layers, heads in product(models, (256, 128), (4, 2), (4, 2)):
        flags = f"--model {model} {size(C // share, layers, heads)}"
        largest = (C, layers, heads) == (256, 4, 4)
        if slow and model != "cope":
            flags += f" {slow}"
        table[f"{model} {C}/{layers}/{heads}"] = Row(flags, seeds if largest else 1)
    return table


def counts(C, slow="", seeds=1):
    """Table 7's other ways to use the count, and learned positions with hard attention."""
    table = {"learned, hard attention": Row(f"--model learned_hard {size(C)} {slow}".strip()),
             "cope_mlp": Row(f"--model cope_mlp {size(C)}"),
             "cope_mlp, first layer": Row(f"--model cope_mlp_first {size(C)}")}
    alibi = f"--model cope_alibi {size(C)}"
    return table | {
        "alibi 1": Row(f"{alibi} --slopes 1.0,0.5,0.25,0.125", seeds),
        "alibi 1/4": Row(f"{alibi} --slopes 0.25,0.125,0.0625,0.03125", seeds),
        "alibi 1/16": Row(f"{alibi} --slopes 0.0625,0.03125,0.015625,0.0078125", seeds),
        "alibi learned": Row(alibi, seeds)}


def counting(models, variables, words="", flags=""):
    return {f"{m} {v} var{words}": Row(f"--model {m} --vars {v} {flags}".strip(), 3)
            for v, m in product(variables, models)}


def programs(*numbers):
    """With so many training programs."""
    return {f"{model}, {n:,} programs": Row(f"--model {model} --vars 1 --n_train {n}", 3)
            for model, n in product(("cope", "relative"), numbers)}


def wikitext(table, *notes, lengths="--tokens 0 --lengths 1024", **more):
    return dict(note="; ".join([WIKITEXT_NOTE, *notes]), train=WIKITEXT, eval=lengths,
                rows=table) | more


ENTRIES = {
    "cope_table2_flipflop": dict(
        title="CoPE, Table 2, left: flip-flop, wrong reads (%); the paper does not say of what its "
              "errors are, but a guess has half of them wrong in its Table 7",
        columns=IN_AND_OUT, trained_in="cope_flipflop", steps=True,  # as its Figure 5
        cpu=FLIPFLOP | dict(note=NOTE, rows={
            "cope": Row(f"--model cope {size(64)}", 3),
            "rope": Row(f"--model rope {size(64)} {SLOW}", 3),
            "learned": Row(f"--model learned {size(64)} {SLOW}", 3)}),
        paper=PAPER_FLIPFLOP | dict(note=PAPER_NOTE, rows=rows(3, "cope", "rope", "learned"))),
    "cope_table2_copy": dict(
        title="CoPE, Table 2, right: selective copy, sequences with an error (%)",
        columns=[(split, split, "sequence_error") for split in ("iid", "dense", "sparse")],
        cpu=dict(train="--data selective_copy", eval="--sequences 2000",
                 rows=rows(3, "cope", flags="--P 64") | rows(3, "rope", "learned")),
        paper=dict(
            note="batch, optimizer, P and the separator are ours, the paper has none, and that an "
                 "error is a wrong sequence is inferred; dropout is the release's",
            train="--data selective_copy --size paper --dtype float32 --dropout 0.1",
            eval="--sequences 10000",
            rows=rows(3, "rope", "learned") | rows(3, "cope", flags="--P 512"))),
    "cope_table3": dict(
        title="CoPE, Table 3: counting with 1, 3 and 5 variables, wrong answers (%)",
        columns=IN, trained_in="counting",
        cpu=COUNTING | dict(
            note="programs of up to 32 operations, or as a row says, never the same one twice",
            rows=counting(("cope", "relative", "learned"), (1, 3, 5))
            | counting(("cope",), (3,), ", 128 operations", f"{LONGER} --P 129")
            | counting(("relative", "learned"), (3,), ", 128 operations", LONGER)),
        paper=PAPER_COUNTING | dict(
            note=COUNTING_NOTE, rows=counting(("cope", "relative", "learned"), (1, 3, 5)))),
    "cope_table4": dict(
        title="CoPE, Table 4: counting one variable with more or fewer passes than in training, "
              "wrong answers (%)",
        columns=[("pass 50", "iid", "answer_error"), ("pass 100", "pass100", "answer_error"),
                 ("pass 10", "pass10", "answer_error")],
        runs="cope_table3", trained_in="counting",
        cpu=COUNTING | dict(rows=counting(("cope", "relative"), (1,))),
        paper=PAPER_COUNTING | dict(
            note=COUNTING_NOTE, rows=counting(("cope", "relative"), (1,)))),
    "cope_fig2": dict(
        title="CoPE, Figure 2: counting, wrong answers (%) by the number of training programs; one "
              "variable here, as the text does not say how many, nor how many programs",
        columns=IN, trained_in="counting",
        cpu=COUNTING | dict(note="programs of up to 32 operations",
                            rows=programs(100, 1000, 10000)),
        paper=PAPER_COUNTING | dict(
            note=f"{COUNTING_NOTE}; 15,625 steps for every number of programs",
            rows=programs(1000, 2000, 5000, 10000))),
    "cope_table7": dict(
        title="CoPE, Table 7: flip-flop, wrong reads (%), by dimension/layers/heads, and other "
              "ways to use the count",
        columns=IN_AND_OUT, trained_in="cope_flipflop",
        cpu=FLIPFLOP | dict(note=f"{NOTE}; {FIRST}", rows=sizes(4, SLOW) | counts(64, SLOW)),
        paper=PAPER_FLIPFLOP | dict(note=f"{PAPER_NOTE}; {FIRST}",
                                    rows=sizes(seeds=3) | counts(256, seeds=3))),
    "cope_collapse": dict(
        title="CoPE far beyond its training length, by the number of positions P in its table: "
              "flip-flop, exact match (%); no paper has this table",
        columns=[(split, split, "exact_match") for split in ("iid", "dense", "sparse")],
        cpu=dict(train="--data flipflop --max_iters 1000",
                 eval="--sequences 500 --lengths 64 256 1024",
                 rows={f"P = {P}": Row(f"--model cope --P {P}", 3) for P in (8, 16, 32, 64)}
                 | {f"P = {P}, no key beyond": Row(f"--model cope_drop --P {P}", 3)
                    for P in (8, 16)}
                 | {"P = 64, cut to 32": Row(seeds=3, weights_of="P = 64", eval="--set P=32")})),
    "cope_table5": dict(
        title="CoPE, Table 5: WikiText-103, test perplexity in windows of 1,024 (the second "
              "numbers, of code, whose text is not public, have no runs)",
        trained_in="cope_wikitext",
        paper=wikitext(rows(1, "learned", "relative", "cope", "cope_relative"),
                       published_at=[1024])),
    "cope_table8": dict(
        title="CoPE, Table 8: its parts on WikiText-103, test perplexity",
        trained_in="cope_wikitext",
        paper=wikitext(published_at=[1024], table=rows(1, "cope") | {
            "cope_alibi": Row("--model cope_alibi --slopes 0.5,0.25,0.125,0.0625,0.03125,0.015625,"
                              "0.0078125,0.00390625,0.707107,0.353553,0.176777,0.0883883"),
            "val-gates": Row("--model cope_val"),
            "sep-keys": Row("--model cope_sep"),
            "a table in each layer": Row("--model cope --no-share"),
            "P = 16": Row("--model cope --P 16"),
            "P = 1,024": Row("--model cope --P 1024")})),
    "cope_fig3": dict(
        title="CoPE, Figure 3: WikiText-103, trained on windows of 1,024 and of 512, read in "
              "longer ones; its numbers are not in the text",
        trained_in="cope_wikitext",
        paper=wikitext(
            rows(1, "cope", "relative", "relative_capped") | {
                f"{model}, trained on 512": Row(f"--model {model} --block_size 512 --batch_size 32")
                for model in ("cope", "relative", "relative_capped")},
            "windows of 512 are 128 a step, so as many tokens; the lengths read are ours",
            lengths="--split val --tokens 0 --lengths 512 1024 2048 4096")),
}
