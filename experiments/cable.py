"""CABLE: Context-aware Biases for Length Extrapolation"""
from experiments import Row, repaired, rows

LENGTHS = (512, 1024, 2048, 4096, 8192, 15360)
MODELS = ("cable", "cable_nw", "alibi", "fire", "t5", "kerple", "rope", "learned", "sinusoidal")
# the tiny model's 9,000 steps are about 10 epochs, as the paper says, with 2^17 tokens a step
WIKITEXT = ("--size tiny --data wikitext103 --max_iters 9000 --batch_size 64 "
            "--gradient_accumulation_steps 2")
BATCH = ("2^17 tokens a step, by which the paper's steps are its epochs; with the 2^19 of its text "
         "they would be four times as many")
EVAL = "--tokens 0 --lengths " + " ".join(map(str, LENGTHS))

ENCODERS = ("cable", "alibi", "rope", "learned", "sinusoidal", "nope")
TUNING = ("trained on MS MARCO with its hard negatives, tested on MLDR; the loss, its temperature, "
          "the learning rate and its decay are ours, the paper has none; so are gpt2's tokens; "
          "there is no dropout; an epoch is as many samples as there are, drawn at random: some "
          "come twice, a third never")


def encoders(n, *encodings):
    """cable, alibi and rope with n seeds each, the others with one."""
    return {pe: Row(f"--model bert_{pe}", n if pe in ENCODERS[:3] else 1)
            for pe in encodings or ENCODERS}


RETRIEVAL = dict(minutes=50, train="--data retrieval", eval="", rows=encoders(3))
RETRIEVAL_PAPER = dict(note=TUNING, train="--data retrieval --size paper", eval="",
                       rows=encoders(1))


def fineweb(size, table):
    """One size on FineWeb-Edu, 2^19 tokens a step."""
    return dict(title=f"CABLE, {table}: GPT-2 {size} on FineWeb-Edu",
                paper=dict(train=f"--size {size} --data fineweb_edu", eval=EVAL,
                           published_at=LENGTHS, rows=rows(1, *MODELS)))


def wikitext(size, steps, micro_steps):
    """One size on WikiText-103, 2^17 tokens a step: again its steps are its epochs."""
    train = (f"--size {size} --data wikitext103 --max_iters {steps} "
             f"--gradient_accumulation_steps {micro_steps}")
    return dict(title=f"CABLE, Table 4: GPT-2 {size} on WikiText-103",
                paper=dict(note=BATCH, train=train, eval=EVAL, published_at=LENGTHS,
                           rows=rows(1, *MODELS)))


ENTRIES = {
    "cable_table1": dict(
        title="CABLE, Table 1: perplexity far beyond the training length, the first command's run",
        cpu=dict(train="--size nano --data stdlib", eval="",
                 rows=rows(3, "cable", "alibi", "rope") | repaired(3, "window", "yarn")),
        # the last row is for the paper's conclusion, section 6
        paper=dict(note=BATCH, train=WIKITEXT, eval=EVAL, published_at=LENGTHS,
                   rows=rows(1, *MODELS, "k_cable", "k_cable_inside") | {
                       "sinusoidal, trained on 8,192": Row(
                           "--model sinusoidal --block_size 8192 --batch_size 2 "
                           "--gradient_accumulation_steps 8")})),
    "cable_table1_fineweb": fineweb("medium", "Table 1, upper half, and Figure 1"),
    "cable_table3_small": fineweb("small", "Table 3, upper half"),
    "cable_table3_tiny": fineweb("tiny", "Table 3, lower half"),
    "cable_table4_medium": wikitext("medium", 3000, 8),
    "cable_table4_small": wikitext("small", 5000, 4),
    "cable_kernel": dict(
        title="CABLE, Figure 4: K-CABLE, its weight outside the logarithm, as in later code of the "
              "authors, and inside",
        cpu=dict(minutes=6, train="--size nano --data stdlib", eval="--strided",
                 rows=rows(3, "cable", "k_cable", "k_cable_inside")),
        paper=dict(note=BATCH, train=WIKITEXT, eval=f"{EVAL} --strided",
                   rows=rows(3, "cable", "k_cable", "k_cable_inside"))),
    "cable_fig5": dict(
        title="CABLE, Figure 5: loss of masked tokens by step, every encoding in one BERT",
        losses=True,
        cpu=dict(minutes=30, train="--data mlm", rows=encoders(3),
                 eval="--split test --sequences 200 --lengths 128 512 2048"),
        # an epoch of FineWeb-Edu's 10 billion tokens in 14,000 steps is 1,400 windows of 512 a step
        paper=dict(note="of the paper's two numbers, one epoch and 32 windows a step, the epoch "
                        "is kept: 1,400 windows a step; warmup, decay and tokens (gpt2's) are ours",
                   train="--data mlm --size paper --batch_size 28 "
                         "--gradient_accumulation_steps 50",
                   eval="--sequences 1000", rows=encoders(1))),
    "cable_table2": dict(
        title="CABLE, Table 2: finding the file that a docstring is from, nDCG@10 (%) by the "
              "length that files are cut to", first="cable_fig5",
        paper=RETRIEVAL_PAPER, cpu=RETRIEVAL),
    "cable_fig6": dict(
        title="CABLE, Figure 6: contrastive loss by step, the runs of cable_table2",
        losses=True, first="cable_fig5", runs="cable_table2",
        paper=RETRIEVAL_PAPER, cpu=RETRIEVAL),
    "cable_table2_mean": dict(
        title="CABLE, Table 2 with the plain mean of a text's last states as its vector",
        published="cable_table2", first="cable_fig5",
        cpu=RETRIEVAL | dict(note="the runs that are there are older than the flag: made where the "
                                  "mean was the only way", train="--data retrieval --pool mean",
                             rows=encoders(1, "cable", "alibi", "rope"))),
}

NUMBERED = {
    "Figure 1": ("cable_table1_fineweb", "lm"), "Figure 2": "a drawing of the method",
    "Table 1": ("cable_table1_fineweb", "cable_table1", "lm"),
    "Figure 3": ("bench.cpu", "bench.generate.cpu"), "Table 2": ("cable_table2",),
    "Figure 4": ("cable_kernel", "lm"), "Figure 5": ("cable_fig5",), "Figure 6": ("cable_fig6",),
    "Table 3": ("cable_table3_small", "cable_table3_tiny", "lm"),
    "Table 4": ("cable_table4_medium", "cable_table4_small", "lm"),
    "Section 6": ("cable_table1", "lm")}
