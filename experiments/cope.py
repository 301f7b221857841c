"""CoPE: Contextual Position Encoding, Learning to Count What's Important"""
from experiments import seeds

# Table 7: error in % in distribution and out of it; a row's name is dimension, layers, heads
TABLE7 = {
    "cope 256/4/4": (0.03, 4.9), "cope 256/2/4": (0.0, 13.2), "cope 256/4/2": (0.0, 3.0),
    "cope 256/2/2": (0.0, 14.6), "cope 128/4/4": (0.2, 33.2), "cope 128/2/4": (0.03, 22.3),
    "cope 128/4/2": (0.03, 14.5), "cope 128/2/2": (0.02, 24.5),
    "learned, hard attention": (50.7, 49.1), "cope_mlp": (0.03, 5.9), "alibi 1": (0.0, 11.4),
    "alibi 1/4": (0.0, 8.7), "alibi 1/16": (0.0, 17.1), "alibi learned": (0.0, 11.4)}
WITHOUT = ("without the rows of absolute PE and RoPE by size, and of the MLP in the first layer "
           "alone (the paper does not say what its other layers have)")
# Appendix C: 10,000 steps, linear decay; "batch size 16" on 8 GPUs is read as 16 on each
FLIPFLOP = ("--data flipflop --size paper --max_iters 10000 --batch_size 128 --learning_rate 3e-4 "
            "--lr_decay linear --beta2 0.999")
SMALL_FLIPFLOP = "--data flipflop --lr_decay linear --beta2 0.999"
ERROR_IN_AND_OUT = [("in distribution", "iid", "glitch_rate"),
                    ("out (sparse)", "sparse", "glitch_rate")]


def counting(n, models, variables):
    """Every model with every number of variables, n seeds each."""
    rows = {}
    for v in variables:
        rows |= {f"{m} {v} var": (f"--model {m} --vars {v}", n) for m in models}
    return rows


def table7(divide, n):
    """Table 7's rows, the dimension divided; n seeds where the paper gives a spread, else one."""
    def flags(model, C=256, layers=4, heads=4):
        return f"--model {model} --n_embd {C // divide} --n_layer {layers} --n_head {heads}"

    rows = {}
    for C in (256, 128):
        for layers in (4, 2):
            for heads in (4, 2):
                count = n if (C, layers, heads) == (256, 4, 4) else 1
                rows[f"cope {C}/{layers}/{heads}"] = flags("cope", C, layers, heads), count
    rows["learned, hard attention"] = flags("learned_hard"), 1
    rows["cope_mlp"] = flags("cope_mlp"), 1
    for name, m in (("1", 1), ("1/4", 1 / 4), ("1/16", 1 / 16)):
        slopes = ",".join(str(m / 2**h) for h in range(4))
        rows[f"alibi {name}"] = f"{flags('cope_alibi')} --slopes {slopes}", n
    rows["alibi learned"] = flags("cope_alibi"), n
    return rows


ENTRIES = {
    "cope_table2_flipflop": dict(
        about="CoPE, Table 2, left: flip-flop, error (%); the paper does not say whether of reads "
              "or of strings, these are wrong reads",
        published={"learned": (6.8, 21.7), "rope": (1.8, 20.3), "cope": (0.0, 4.9)},
        columns=ERROR_IN_AND_OUT,
        cpu=dict(minutes=2, train=SMALL_FLIPFLOP, eval="--sequences 2000",
                 rows=seeds(1, "cope", "rope", "learned")),
        paper=dict(train=FLIPFLOP, eval="--sequences 10000",
                   rows=seeds(3, "cope", "rope", "learned")),
    ),
    "cope_table2_copy": dict(
        about="CoPE, Table 2, right: selective copy, sequences with an error (%)",
        published={"learned": (16.9, 25.6, 85.2), "rope": (40.1, 100, 100),
                   "cope": (0.0, 0.0, 0.0)},
        columns=[(split, split, "sequence_error") for split in ("iid", "dense", "sparse")],
        cpu=dict(minutes=3, train="--data selective_copy", eval="--sequences 2000",
                 rows=seeds(1, "cope", flags="--P 64") | seeds(1, "rope", "learned")),
        paper=dict(train="--data selective_copy --size paper", eval="--sequences 10000",
                   rows=seeds(3, "cope", flags="--P 512") | seeds(3, "rope", "learned")),
    ),
    "cope_table3": dict(
        about="CoPE, Table 3: counting with 1, 3 and 5 variables, wrong answers (%)",
        group="counting",
        published={"cope 1 var": (0.0,), "cope 3 var": (1.2,), "cope 5 var": (7.4,),
                   "relative 1 var": (1.1,), "relative 3 var": (17.8,), "relative 5 var": (22.4,),
                   "learned 1 var": (5.3,), "learned 3 var": (67.6,), "learned 5 var": (71.5,)},
        columns=[("in distribution", "iid", "answer_error")],
        cpu=dict(
            note="here one variable, programs of up to 32 operations, never the same one twice",
            train="--data counting", eval="--sequences 2000",
            rows=counting(1, ("cope", "relative"), (1,)),
            reads=[
                "`a = 0 ; pass ; a ++ ; pass ; a ++ ; print a 2`: run a small program in your "
                "head. Programs of up to 32 operations, where the paper has 512; 1,000 steps. "
                "Both errors are small because the programs are short.",
                "One seed each: no order is claimed.",
            ]),
        paper=dict(train="--data counting --size paper", eval="--sequences 10000",
                   rows=counting(3, ("cope", "relative", "learned"), (1, 3, 5))),
    ),
    "cope_table4": dict(
        about="CoPE, Table 4: counting one variable with more or fewer passes than in training, "
              "wrong answers (%)",
        group="counting",
        published={"cope 1 var": (0.0, 0.0, 4.0), "relative 1 var": (1.1, 8.8, 34.1)},
        columns=[("pass 50", "iid", "answer_error"), ("pass 100", "pass100", "answer_error"),
                 ("pass 10", "pass10", "answer_error")],
        cpu=dict(
            train="--data counting", eval="--sequences 2000",
            rows=counting(1, ("cope", "relative"), (1,)),
            reads=[
                "The runs of cope_table3. Pass 100 has more idle operations than training, pass 10 "
                "fewer, and so asks for larger answers, which are rare in short training programs.",
                "One seed each: with fewer passes this CoPE run makes fewer errors than this run "
                "of relative embeddings, as in the paper; whether other seeds agree was not "
                "measured.",
            ]),
        paper=dict(train="--data counting --size paper", eval="--sequences 10000",
                   rows=counting(3, ("cope", "relative"), (1,))),
    ),
    "cope_table7": dict(
        about="CoPE, Table 7: flip-flop, wrong reads (%), by dimension/layers/heads, and other "
              "ways to use the count",
        published=TABLE7, columns=ERROR_IN_AND_OUT,
        cpu=dict(note=f"here with a quarter of the dimensions, {WITHOUT}",
                 minutes=5,  # cope_mlp takes half an hour, the others 2 to 3 minutes
                 train=SMALL_FLIPFLOP, eval="--sequences 2000", rows=table7(divide=4, n=1)),
        paper=dict(note=WITHOUT, train=FLIPFLOP, eval="--sequences 10000",
                   rows=table7(divide=1, n=3)),
    ),
}
