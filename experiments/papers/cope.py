"""CoPE: Contextual Position Encoding, Learning to Count What's Important"""
from itertools import product

from experiments import Row, rows

IN_AND_OUT = [("in distribution", "iid", "glitch_rate"), ("out (sparse)", "sparse", "glitch_rate")]
IN = [("in distribution", "iid", "answer_error")]
COUNTING = dict(train="--data counting", eval="--sequences 2000")
FLIPFLOP = dict(train="--data flipflop --block_size 256 --batch_size 16 --max_iters 1000 "
                      "--learning_rate 1e-3 --lr_decay linear --beta2 0.999",
                eval="--sequences 2000")
NOTE = ("strings of 256 tokens and a quarter of the dimensions; learned positions and RoPE have "
        "2,000 steps, the others 1,000")
FIRST = ("the MLP in the first layer alone: no position in the others, which is inferred, as the "
         "paper does not say what they have")
SIZE = "--n_embd 64 --n_layer 4 --n_head 4"
SLOW = "--max_iters 2000"  # learned positions and RoPE need more steps than CoPE


def sizes():
    """Table 7's C/layers/heads; here C is a quarter of the paper's."""
    table = {}
    for model, C, layers, heads in product(("cope", "learned", "rope"), (256, 128), (4, 2), (4, 2)):
        flags = f"--model {model} --n_embd {C // 4} --n_layer {layers} --n_head {heads}"
        slow = "" if model == "cope" else f" {SLOW}"
        table[f"{model} {C}/{layers}/{heads}"] = Row(flags + slow)
    return table


def counting(models, variables):
    table = {}
    for v, m in product(variables, models):
        table[f"{m} {v} var"] = Row(f"--model {m} --vars {v}", 3)
    return table


def programs(*counts):
    """With so many training programs."""
    table = {}
    for model, n in product(("cope", "relative"), counts):
        table[f"{model}, {n:,} programs"] = Row(f"--model {model} --vars 1 --n_train {n}", 3)
    return table


ENTRIES = {
    "cope_table2_flipflop": dict(
        title="CoPE, Table 2, left: flip-flop, wrong reads (%); the paper does not say of what its "
              "errors are, but a guess has half of them wrong in its Table 7",
        columns=IN_AND_OUT, group="cope_flipflop", steps=True,  # as its Figure 5
        cpu=FLIPFLOP | dict(note=NOTE, rows={
            "cope": Row(f"--model cope {SIZE}", 3),
            "rope": Row(f"--model rope {SIZE} {SLOW}", 3),
            "learned": Row(f"--model learned {SIZE} {SLOW}", 3)})),
    "cope_table2_copy": dict(
        title="CoPE, Table 2, right: selective copy, sequences with an error (%)",
        columns=[(split, split, "sequence_error") for split in ("iid", "dense", "sparse")],
        cpu=dict(train="--data selective_copy", eval="--sequences 2000",
                 rows=rows(3, "cope", flags="--P 64") | rows(3, "rope", "learned"))),
    "cope_table3": dict(
        title="CoPE, Table 3: counting with 1, 3 and 5 variables, wrong answers (%)",
        columns=IN, group="counting",
        cpu=COUNTING | dict(
            note="one and three variables, programs of up to 32 operations, never the same one "
                 "twice",
            rows=counting(("cope", "relative", "learned"), (1, 3)))),
    "cope_table4": dict(
        title="CoPE, Table 4: counting one variable with more or fewer passes than in training, "
              "wrong answers (%)",
        columns=[("pass 50", "iid", "answer_error"), ("pass 100", "pass100", "answer_error"),
                 ("pass 10", "pass10", "answer_error")],
        runs="cope_table3", group="counting",
        cpu=COUNTING | dict(rows=counting(("cope", "relative"), (1,)))),
    "cope_fig2": dict(
        title="CoPE, Figure 2: counting, wrong answers (%) by the number of training programs; one "
              "variable here, as the text does not say how many, nor how many programs",
        columns=IN, group="counting",
        cpu=COUNTING | dict(note="programs of up to 32 operations",
                            rows=programs(100, 1000, 10000))),
    "cope_table7": dict(
        title="CoPE, Table 7: flip-flop, wrong reads (%), by dimension/layers/heads, and other "
              "ways to use the count",
        columns=IN_AND_OUT, group="cope_flipflop",
        cpu=FLIPFLOP | dict(note=f"{NOTE}; {FIRST}", rows=sizes() | {
            "learned, hard attention": Row(f"--model learned_hard {SIZE} {SLOW}"),
            "cope_mlp": Row(f"--model cope_mlp {SIZE}"),
            "cope_mlp, first layer": Row(f"--model cope_mlp_first {SIZE}"),
            "alibi 1": Row(f"--model cope_alibi {SIZE} --slopes 1.0,0.5,0.25,0.125"),
            "alibi 1/4": Row(f"--model cope_alibi {SIZE} --slopes 0.25,0.125,0.0625,0.03125"),
            "alibi 1/16": Row(
                f"--model cope_alibi {SIZE} --slopes 0.0625,0.03125,0.015625,0.0078125"),
            "alibi learned": Row(f"--model cope_alibi {SIZE}")})),
    "cope_collapse": dict(
        title="CoPE far beyond its training length, by the number of positions P in its table: "
              "flip-flop, exact match (%); no paper has this table",
        columns=[(split, split, "exact_match") for split in ("iid", "dense", "sparse")],
        cpu=dict(train="--data flipflop --max_iters 1000",
                 eval="--sequences 500 --lengths 64 256 1024",
                 rows={f"P = {P}": Row(f"--model cope --P {P}", 3) for P in (8, 16, 32, 64)}
                 | {f"P = {P}, no key beyond": Row(f"--model cope_drop --P {P}", 3)
                    for P in (8, 16)})),
}
