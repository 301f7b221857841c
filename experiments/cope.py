"""CoPE: Contextual Position Encoding, Learning to Count What's Important"""
from itertools import product

from experiments import seeds

# Table 7: error in % in distribution and out of it; a row's name has dimension, layers, heads
TABLE7 = {
    "cope 256/4/4": (0.03, 4.9), "cope 256/2/4": (0.0, 13.2), "cope 256/4/2": (0.0, 3.0),
    "cope 256/2/2": (0.0, 14.6), "cope 128/4/4": (0.2, 33.2), "cope 128/2/4": (0.03, 22.3),
    "cope 128/4/2": (0.03, 14.5), "cope 128/2/2": (0.02, 24.5),
    "learned 256/4/4": (6.8, 21.7), "learned 256/2/4": (11.1, 10.6),
    "learned 256/4/2": (0.1, 18.0), "learned 256/2/2": (13.9, 31.5),
    "learned 128/4/4": (5.4, 24.8), "learned 128/2/4": (0.08, 19.9),
    "learned 128/4/2": (0.07, 16.5), "learned 128/2/2": (19.1, 28.6),
    "rope 256/4/4": (1.8, 20.3), "rope 256/2/4": (5.1, 14.7), "rope 256/4/2": (0.02, 19.0),
    "rope 256/2/2": (5.4, 19.8), "rope 128/4/4": (0.1, 8.9), "rope 128/2/4": (0.1, 18.2),
    "rope 128/4/2": (0.02, 17.3), "rope 128/2/2": (14.4, 25.2),
    "learned, hard attention": (50.7, 49.1), "cope_mlp": (0.03, 5.9),
    "cope_mlp, first layer": (0.9, 24.3), "alibi 1": (0.0, 11.4),
    "alibi 1/4": (0.0, 8.7), "alibi 1/16": (0.0, 17.1), "alibi learned": (0.0, 11.4)}
FIRST = ("the MLP in the first layer alone: no position in the others, which is inferred, as the "
         "paper does not say what they have")
# Appendix C: 10,000 steps, linear decay; "batch size 16" on 8 GPUs is read as 16 on each
FLIPFLOP = ("--data flipflop --size paper --max_iters 10000 --batch_size 128 --learning_rate 3e-4 "
            "--lr_decay linear --beta2 0.999")
SMALL_FLIPFLOP = ("--data flipflop --block_size 256 --batch_size 16 --max_iters 1000 "
                  "--learning_rate 1e-3 --lr_decay linear --beta2 0.999")
SLOW = " --max_iters 2000"  # learned positions and RoPE need more steps than CoPE
SMALL_NOTE = ("here strings of 256 tokens and a quarter of the dimensions; learned positions and "
              "RoPE have 2,000 steps, the others 1,000")
FLIPFLOP_NOTE = ("16 strings on each of 8 GPUs are read as 128 a step, and the dimension in its "
                 "tables as the model's; P = 64 and weight decay are ours, the paper names none, "
                 "nor warmup or clipping, of which there is none here")
COUNTING = ("size and training, but not norms and MLP, are those of the authors' release, as the "
            "paper has none: there post-norm with LayerNorm and ReLU, here pre-norm with GELU; "
            "tested on 10,000 programs, the release on 1,000")
ERROR_IN_AND_OUT = [("in distribution", "iid", "glitch_rate"),
                    ("out (sparse)", "sparse", "glitch_rate")]


def counting(n, models, variables):
    """Every model with every number of variables, n seeds each."""
    rows = {}
    for v in variables:
        rows |= {f"{m} {v} var": (f"--model {m} --vars {v}", n) for m in models}
    return rows


def sized(model, divide, C=256, layers=4, heads=4):
    """The flags of Table 7's row C/layers/heads, the dimension divided."""
    return f"--model {model} --n_embd {C // divide} --n_layer {layers} --n_head {heads}"


def table7(divide, n, slow=""):
    """
    Table 7's rows, the dimension divided; n seeds where the paper gives a spread, else one.
    slow: more flags for learned positions and RoPE.
    """
    rows = {}
    for model, C, layers, heads in product(("cope", "learned", "rope"), (256, 128), (4, 2), (4, 2)):
        more = "" if model == "cope" else slow
        count = n if (C, layers, heads) == (256, 4, 4) else 1
        rows[f"{model} {C}/{layers}/{heads}"] = sized(model, divide, C, layers, heads) + more, count
    rows["learned, hard attention"] = sized("learned_hard", divide) + slow, 1
    rows["cope_mlp"] = sized("cope_mlp", divide), 1
    rows["cope_mlp, first layer"] = sized("cope_mlp_first", divide), 1
    for name, m in (("1", 1), ("1/4", 1 / 4), ("1/16", 1 / 16)):
        slopes = ",".join(str(m / 2**h) for h in range(4))
        rows[f"alibi {name}"] = f"{sized('cope_alibi', divide)} --slopes {slopes}", n
    rows["alibi learned"] = sized("cope_alibi", divide), n
    return rows


def programs(n, *counts):
    """CoPE and relative embeddings with so many training programs, n seeds each."""
    rows = {}
    for model in ("cope", "relative"):
        for count in counts:
            flags = f"--model {model} --vars 1 --n_train {count}"
            rows[f"{model}, {count:,} programs"] = flags, n
    return rows


COLLAPSED = "out/cope_collapse.cpu/cope-P"


def tables_of(n, sizes, dropped):
    """CoPE with so many positions P, as it is and without the keys beyond them, n seeds each."""
    rows = {f"P = {P}": (f"--model cope --P {P}", n) for P in sizes}
    return rows | {f"P = {P}, no key beyond": (f"--model cope_drop --P {P}", n) for P in dropped}


ENTRIES = {
    "cope_table2_flipflop": dict(
        about="CoPE, Table 2, left: flip-flop, wrong reads (%); the paper does not say of what its "
              "errors are, but a guess has half of them wrong in its Table 7",
        published={"learned": (6.8, 21.7), "rope": (1.8, 20.3), "cope": (0.0, 4.9)},
        columns=ERROR_IN_AND_OUT, group="cope_flipflop",
        cpu=dict(note=SMALL_NOTE, minutes=6, train=SMALL_FLIPFLOP, eval="--sequences 2000",
                 rows={"cope": (sized("cope", 4), 3), "rope": (sized("rope", 4) + SLOW, 3),
                       "learned": (sized("learned", 4) + SLOW, 3)},
                 reads=[
                     "The paper's result: in distribution no run has more than .02 % of the reads "
                     "wrong, but for one of learned positions, which had not learned the task in "
                     "2,000 steps (13 %). On sparse strings CoPE has 0 to .3 %, RoPE 10 to 16 and "
                     "learned positions 10 and 15 (24 in the run that had not learned it), though "
                     "they had twice CoPE's steps.",
                     "For RoPE more steps do not look like the cure: on sparse strings in "
                     "validation its mean is 17 % at step 700 and 16 at 2,000.",
                     "On sparse strings each of CoPE's three seeds is better than each of the six "
                     "others, by a factor of 30 or more. One learning rate for all.",
                     "A sparse string has its write far back, among next to nothing but ignored "
                     "bits: no training string of 256 tokens is like that. Dense strings, which "
                     "the paper does not have, have 0 % (CoPE), 0 to 2 (RoPE), 1 to 11.",
                     "At 64 tokens nothing can be told apart (tra_norm: pre-norm, CoPE and RoPE "
                     "have 99.6 % or more of the sparse strings right): there one training string "
                     "in 800 is as sparse.",
                 ]),
        paper=dict(note=FLIPFLOP_NOTE, train=FLIPFLOP, eval="--sequences 10000",
                   rows=seeds(3, "cope", "rope", "learned")),
    ),
    "cope_table2_copy": dict(
        about="CoPE, Table 2, right: selective copy, sequences with an error (%)",
        published={"learned": (16.9, 25.6, 85.2), "rope": (40.1, 100, 100),
                   "cope": (0.0, 0.0, 0.0)},
        columns=[(split, split, "sequence_error") for split in ("iid", "dense", "sparse")],
        cpu=dict(
            minutes=3, train="--data selective_copy", eval="--sequences 2000",
            rows=seeds(3, "cope", flags="--P 64") | seeds(3, "rope", "learned"),
            reads=[
                "`_ D _ _ C F _ B | D C F B`: repeat what was said, without the blanks. 32 symbols "
                "here, 256 in the paper, and 2,000 steps for its 100,000. Trained on as many "
                "blanks as symbols (iid), tested with half as many (dense) and twice (sparse), "
                "too.",
                "CoPE alone copies among fewer and more blanks than it has seen: two of three "
                "seeds make at most 3 errors in 2,000 strings. The third was not done: 56 to 57 % "
                "of the strings are wrong in all three test sets, by 2.5 % of their symbols.",
                "Of the dense and sparse strings RoPE and learned positions have none right, in "
                "any seed; in distribution they were still learning. In the paper learned "
                "positions, too, have 74 % of the dense strings right.",
            ]),
        paper=dict(note="batch, optimizer and P are ours, the paper has none, and that an error is "
                        "a wrong sequence is inferred",
                   train="--data selective_copy --size paper", eval="--sequences 10000",
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
            note="here one and three variables, programs of up to 32 operations, never the same "
                 "one twice",
            minutes=8, train="--data counting", eval="--sequences 2000",
            rows=counting(3, ("cope", "relative", "learned"), (1, 3)),
            reads=[
                "`a = 0 ; pass ; a ++ ; pass ; a ++ ; print a 2`: run a small program in your "
                "head. Programs of up to 32 operations, where the paper has 512; 1,000 steps.",
                "With one variable all make next to no errors: of 2,000 answers CoPE has 2 or 3 "
                "wrong, relative embeddings 4 or 5, learned positions 4 to 7 (three seeds; each "
                "of CoPE's is better than each of the six others, the nearest by one answer).",
                "With three variables there is nothing to tell apart: all have 3.8 to 4.4 % "
                "wrong, at answers up to 5 much alike.",
                "Only one program in ten sets a second variable (of 512 operations most do). We "
                "suppose that the errors are nearly half of those, and that none has learned in "
                "1,000 steps to keep two variables apart.",
            ]),
        paper=dict(note=COUNTING, train="--data counting --size paper", eval="--sequences 10000",
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
            minutes=8, train="--data counting", eval="--sequences 2000",
            rows=counting(3, ("cope", "relative"), (1,)),
            reads=[
                "The runs of cope_table3. Pass 100 has more idle operations than training, pass 10 "
                "fewer, and so asks for larger answers, which are rare in short training programs.",
                "Pass 10: CoPE has 9.7 to 13.7 % of the answers wrong, relative embeddings 14.3 "
                "to 18.7: each seed of CoPE is better than each of theirs, the order of the "
                "paper, by less (p .1; the nearest two are within each other's intervals).",
                "Of the 5.1 points of pass 10 between the means 4.0 are at answers of 1 to 3; at "
                "4 to 7 the seeds overlap (7 to 27 % wrong, 12 to 30), and 7.4 % are answers of 8 "
                "to 10, which one training program in 1,600 has and none of these runs gets "
                "right: this does not show that CoPE counts further.",
                "With more idle operations than in training both make next to no error, where the "
                "paper has 8.8 % for relative embeddings.",
            ]),
        paper=dict(note=COUNTING, train="--data counting --size paper", eval="--sequences 10000",
                   rows=counting(3, ("cope", "relative"), (1,))),
    ),
    "cope_fig2": dict(
        about="CoPE, Figure 2: counting, wrong answers (%) by the number of training programs; one "
              "variable here, as the text does not say how many, nor how many programs",
        group="counting", columns=[("in distribution", "iid", "answer_error")],
        cpu=dict(minutes=8, note="here programs of up to 32 operations", train="--data counting",
                 eval="--sequences 2000", rows=programs(3, 100, 1000, 10000),
                 reads=[
                     "From 100 programs, each seen 640 times, CoPE has .8 to 1.4 % of the answers "
                     "wrong and relative embeddings 8.6 to 13.2, from 1,000 .25 to .3 and 1.5 to "
                     "1.8, three seeds each: CoPE needs fewer, as the paper says. From 10,000 the "
                     "two do not differ, .2 to .45 and .3 to .4. One learning rate for both.",
                 ]),
        paper=dict(note=f"{COUNTING}; 15,625 steps for every number of programs",
                   train="--data counting --size paper", eval="--sequences 10000",
                   rows=programs(3, 1000, 2000, 5000, 10000)),
    ),
    "cope_table7": dict(
        about="CoPE, Table 7: flip-flop, wrong reads (%), by dimension/layers/heads, and other "
              "ways to use the count",
        published=TABLE7, columns=ERROR_IN_AND_OUT, group="cope_flipflop",
        cpu=dict(note=f"{SMALL_NOTE}; {FIRST}",
                 minutes=5,  # 2 to 16
                 train=SMALL_FLIPFLOP, eval="--sequences 2000",
                 rows=table7(divide=4, n=1, slow=SLOW),
                 reads=[
                     "On sparse strings CoPE has .8 % of the reads wrong or less in six of eight "
                     "sizes, and 8 and 17 % with two layers and two heads (in the paper the "
                     "fourth and the second worst of eight; its worst, 128/4/4, has .8 here).",
                     "On sparse strings RoPE has 13 to 41 %, learned positions 18 to 37, with "
                     "twice the steps. CoPE is better than either in each of the eight sizes "
                     "(sign test: p .008), but four runs of learned positions and one of RoPE had "
                     "not learned the task in distribution. One seed a size, one learning rate.",
                     "In distribution CoPE and RoPE make next to no errors, but for the smallest "
                     "RoPE (15 %, in the paper 14). Learned positions had not learned the task in "
                     "2,000 steps with 64 channels (13 to 21 %; two other seeds of 256/4/4 had: "
                     "cope_table2_flipflop), with 32 they had.",
                     "ALiBi on CoPE's count does as well as CoPE's own table with m = 1 and with "
                     "learned slopes, worse on sparse strings with 1/4 (7 %); with 1/16 it had "
                     "not learned the task.",
                     "Hard attention with learned positions has not learned it either (36 % in "
                     "distribution, as at step 800; on dense strings it was still getting better, "
                     "33 % at step 800 and 20 at 2,000; in the paper 51).",
                     "An MLP of the count makes no error, in the first layer alone next to none, "
                     "but for 1 % on dense strings. In the paper the MLP in all layers is the best "
                     "of these ways (5.9 % on sparse strings), in the first layer alone the worst "
                     "(24.3). The errors by training step, below, are the paper's Figure 5.",
                 ]),
        paper=dict(note=f"{FLIPFLOP_NOTE}; {FIRST}", train=FLIPFLOP, eval="--sequences 10000",
                   rows=table7(divide=1, n=3)),
    ),
    "cope_collapse": dict(
        about="CoPE far beyond its training length, by the number of positions P in its table: "
              "flip-flop, exact match (%); no paper has this table",
        columns=[(split, split, "exact_match") for split in ("iid", "dense", "sparse")],
        cpu=dict(minutes=4, train="--data flipflop --max_iters 1000",
                 eval="--sequences 500 --lengths 64 256 1024",
                 rows=tables_of(3, (8, 16, 32, 64), (8, 16)),
                 reads=[
                     "Trained on 64 tokens, read at the training length, at 4 and at 16 times it.",
                     "At 1,024 tokens a run has nearly all of the iid strings right (98 % or "
                     "more) or nearly none (less than 8). Two seeds of three with P = 8, one with "
                     "P = 16 and one with P = 32, none with P = 64: no order, by three seeds.",
                     "Seed 1338 has nearly none with any P, so entries that training never "
                     "reaches are not the reason, or not alone: with P = 8 all are reached. "
                     "cope_cut asks which keys do the harm.",
                     "Trained without the keys beyond the table all six runs have 99.6 to 100 % of "
                     "the iid strings right at 1,024 tokens, 70 to 100 of the dense, 47 to 100 of "
                     "the sparse.",
                 ]),
        paper=dict(train="--data flipflop --size paper",
                   eval="--sequences 2000 --lengths 512 2048 8192",
                   rows=tables_of(3, (16, 32, 64, 128, 513), (16, 64))),
    ),
}

# section 5.4: 100 epochs of the 118 million gpt2 tokens, 64 windows of 1,024 a step
WIKITEXT = ("--data wikitext103 --size small --batch_size 16 --gradient_accumulation_steps 4 "
            "--max_iters 180000")
GPT2 = ("the learning rate is that of CABLE's paper and the same for all, as this one has none: "
        "trained as there, but for batch and steps")
ALIBI = ",".join(f"{2**-h:.6g}" for h in (1, 2, 3, 4, 5, 6, 7, 8, .5, 1.5, 2.5, 3.5))  # of 12 heads
# section 5.5: 100 billion tokens of code
CODE = ("--data packages --tokenizer gpt2 --size tiny --n_layer 4 --n_head 8 --n_embd 256 "
        "--block_size 4096 --batch_size 8 --gradient_accumulation_steps 16 --max_iters 190735 "
        "--learning_rate 5e-4 --min_lr 5e-5")
ENTRIES |= {
    "cope_table5": dict(
        about="CoPE, Table 5, left: WikiText-103, test perplexity in windows of 1,024",
        published={"learned": (24.87,), "relative": (23.81,), "cope": (23.46,),
                   "cope_relative": (23.23,)}, group="cope_wikitext",
        paper=dict(note=GPT2, train=WIKITEXT, eval="--tokens 0 --lengths 1024",
                   published_at=(1024,),
                   rows=seeds(1, "learned", "relative", "cope", "cope_relative"))),
    "cope_table8": dict(
        about="CoPE, Table 8: its parts on WikiText-103, test perplexity", group="cope_wikitext",
        published={"cope": (23.46,), "val-gates": (23.33,), "sep-keys": (23.18,),
                   "a table in each layer": (23.58,), "P = 16": (23.22,), "P = 1,024": (23.31,),
                   "cope_alibi": (25.09,)},
        paper=dict(note=GPT2, train=WIKITEXT, eval="--tokens 0 --lengths 1024",
                   published_at=(1024,),
                   rows=seeds(1, "cope") | seeds(1, "cope_alibi", flags=f"--slopes {ALIBI}") | {
                       "val-gates": ("--model cope_val", 1), "sep-keys": ("--model cope_sep", 1),
                       "a table in each layer": ("--model cope --no-share", 1),
                       "P = 16": ("--model cope --P 16", 1),
                       "P = 1,024": ("--model cope --P 1024", 1)})),
    "cope_fig3": dict(
        about="CoPE, Figure 3: WikiText-103, trained on windows of 1,024 and of 512, read in "
              "longer ones; its numbers are not in the text", group="cope_wikitext",
        paper=dict(note=GPT2 + "; windows of 512 are 128 a step, so as many tokens; the lengths "
                        "read are ours",
                   train=WIKITEXT,
                   eval="--split val --tokens 0 --lengths 512 1024 2048 4096",
                   rows=seeds(1, "cope", "relative", "relative_capped") | {
                       f"{m}, trained on 512": (f"--model {m} --block_size 512 --batch_size 32", 1)
                       for m in ("cope", "relative", "relative_capped")})),
    "cope_code": dict(
        about="CoPE, Table 5, right: code in windows of 4,096",
        published={"learned": (4.7,), "rope": (4.1,), "cope": (3.9,), "cope_rope": (4.0,)},
        paper=dict(note="its code is not public: here it is that of Python's standard library and "
                        "of seven packages, 35 million tokens, each read 2,800 times; train.py "
                        "--data takes a larger folder; batch, schedule and P are ours; so are "
                        "gpt2's tokens, tied embeddings and GELU, 16 to 17M parameters where the "
                        "paper has 20 to 21M: its perplexities are of other tokens",
                   train=CODE, eval="--tokens 0 --lengths 4096", published_at=(4096,),
                   rows=seeds(1, "learned", "rope", "cope", "cope_rope"))),
}

SECTIONS = {
    "cope_cut": dict(
        about="Which keys does CoPE fail by? The runs of cope_collapse, not trained any more: "
              "with the first 8 positions alone, farther keys on the last of them (cope) or "
              "without any weight (cope_drop); second table: without the keys beyond their own "
              "table; third: with the last 64 keys alone, whatever they count",
        commands=["python reproduce.py cope_collapse --compile",
                  f"python -m experiments.cope_cut {COLLAPSED}-{{16,32,64}}-* --P 8 "
                  "--out out/cope_cut",
                  f"python -m experiments.cope_cut {COLLAPSED}-* --P 8 --drop --out out/cope_cut",
                  f"python -m experiments.cope_cut {COLLAPSED}-{{16,32,64}}-* --drop "
                  "--out out/cope_cut_end",
                  f"python -m experiments.cope_cut {COLLAPSED}-* --window 64 "
                  "--out out/cope_cut_window",
                  "python eval.py out/cope_cut/* --sequences 200 --lengths 64 256 1024 "
                  "--out results/cope_cut  # and so for cope_cut_end, cope_cut_window"],
        json=["cope_cut.json", "cope_cut_end.json", "cope_cut_window.json"],
        table="lengths_table", figures=["cope_cut.png"],
        reads=[
            "Each row is over runs of three seeds and of P = 16, 32 and 64, in two of them of P = "
            "8, too. Eight of the twelve runs of cope_collapse have less than 8 % of the iid "
            "strings right at 1,024 tokens. With keys more than 7 counted steps away dropped all "
            "twelve have 95 to 100 %, of the dense 72 to 100, of the sparse 56 to 100.",
            "So those eight fail by the attention on far keys. The table's end is not all of it: "
            "dropped only beyond its own table, three of the eight have 100 % (iid), the others 0 "
            "to 54.",
            "Nor is it the table's length: with the farther keys on entry 7 instead, 0 to 9 % of "
            "all nine, the two that had 100 included, though at 256 tokens it helps six of nine "
            "and harms one.",
            "Dropping costs a little where little was wrong: dense 96 to 90 (P = 16, seed 1339), "
            "sparse 67 to 56 (P = 8, seed 1339).",
            "That there are fewer keys does much of it: with the last 64 tokens alone, as in "
            "training, the eight have 64 to 99 % (iid). But then a write that is farther is gone: "
            "all twelve have 18 to 28 % of the sparse strings. A count can leave out what is far "
            "and keep a write that is far in tokens.",
            "8 positions were chosen among 4, 8, 12 and 16 by 24 to 40 other strings a set.",
        ]),
    "cope_counts": dict(
        about="Which token is a step? Runs of cope_collapse with P = 16: the mean step of every "
              "pair of tokens, which tells written bits from ignored ones",
        commands=["python reproduce.py cope_collapse --compile",
                  f"python maps.py counts {COLLAPSED}-16-* --pairs --split iid "
                  "--out results/cope_counts.png"],
        figures=["cope_counts.png"],
        reads=[
            "Two seeds count, in layer 1, what was written: the bit after a `w` is .98 to 1.00 of "
            "a step, an ignored bit .01 to .21 in three heads of four; seed 1338 counts reads as "
            "well. Both fail on long strings. Seed 1339, which does not, has no such head. In "
            "layer 0 nearly every pair has a step, so the count passes the table soon.",
            "Steps as one would write them by hand are thus no sign that CoPE will read long "
            "strings. One P, three seeds, 200 strings.",
        ]),
}

NUMBERED = {
    "Figure 1": "a drawing of the method", "Table 1": "not here: prompts of GPT-4 and Llama",
    "Table 2": ("cope_table2_flipflop", "cope_table2_copy"), "Table 3": ("cope_table3",),
    "Figure 2": ("cope_fig2",), "Table 4": ("cope_table4",),
    "Table 5": ("cope_table5", "cope_code", "lm"), "Figure 3": ("cope_fig3", "lm"),
    "Figures 4, 6": ("lm_sep",),
    "Table 6": "not here: the prompts of Table 1", "Table 7": ("cope_table7",),
    "Figure 5": ("cope_table7",), "Table 8": ("cope_table8", "lm"),
    "Table 9": ("cope_table3", "cope_table4"), "Table 10": ("cope_table2_copy",)}
