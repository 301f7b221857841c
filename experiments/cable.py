"""CABLE: Context-aware Biases for Length Extrapolation"""
from experiments import Row, rows

LENGTHS = (512, 1024, 2048, 4096, 8192, 15360)
# Table 1, lower half: perplexity on WikiText-103 by window length, trained on windows of 1,024
TABLE1 = {
    "cable": (23.70, 22.32, 21.48, 20.94, 20.65, 20.33),
    "cable_nw": (24.32, 23.01, 22.19, 21.70, 21.46, 21.13),
    "alibi": (24.09, 22.74, 22.05, 21.73, 21.58, 21.30),
    "fire": (24.34, 22.90, 22.68, 29.57, 54.89, 104.79),
    "t5": (25.06, 23.60, 27.64, 73.99, 198.64, 411.09),
    "kerple": (23.95, 22.56, 21.72, 21.32, 21.33, 21.58),
    "rope": (23.66, 22.26, 41.40, 114.77, 220.56, 375.62),
    "learned": (24.94, 23.53),
    "sinusoidal": (25.18, 23.73, 172.33, 607.48, 1348.23, 2017.42)}
# Table 1, upper half, and Table 3: FineWeb-Edu; Table 4: WikiText-103. By size
FINEWEB = {
    "medium": {
        "cable": (17.00, 16.52, 15.97, 15.34, 15.41, 15.41),
        "cable_nw": (17.22, 16.73, 16.24, 15.79, 15.97, 16.03),
        "alibi": (17.30, 16.79, 16.56, 16.67, 17.23, 17.46),
        "fire": (17.60, 17.11, 19.60, 101.98, 383.08, 835.92),
        "t5": (17.79, 17.26, 38.32, 243.69, 799.53, 1450.83),
        "kerple": (17.22, 16.70, 16.28, 16.78, 20.32, 26.13),
        "rope": (17.39, 16.89, 38.95, 146.72, 361.26, 691.90),
        "learned": (17.99, 17.47),
        "sinusoidal": (17.98, 17.48, 219.80, 1058.84, 2485.84, 3355.86)},
    "small": {
        "cable": (21.19, 20.63, 20.02, 19.24, 19.31, 19.28),
        "cable_nw": (21.42, 20.89, 20.34, 19.67, 19.81, 19.82),
        "alibi": (21.55, 20.99, 20.67, 21.23, 22.42, 22.89),
        "fire": (21.84, 21.26, 22.48, 53.25, 155.32, 333.91),
        "t5": (22.17, 21.57, 29.37, 131.36, 405.94, 757.36),
        "kerple": (21.46, 20.86, 20.38, 21.11, 26.59, 34.91),
        "rope": (21.43, 20.87, 58.59, 225.78, 554.12, 957.87),
        "learned": (22.16, 21.56),
        "sinusoidal": (22.38, 21.83, 207.53, 956.41, 2376.51, 3589.97)},
    "tiny": {
        "cable": (29.37, 28.73, 27.96, 26.90, 26.97, 26.80),
        "cable_nw": (30.12, 29.57, 28.88, 27.85, 27.92, 27.75),
        "alibi": (29.88, 29.25, 28.82, 28.28, 26.80, 28.52),
        "fire": (30.23, 29.56, 29.60, 37.86, 70.72, 124.29),
        "t5": (30.78, 30.08, 33.81, 86.33, 222.60, 448.08),
        "kerple": (29.60, 28.95, 28.32, 28.31, 32.00, 37.67),
        "rope": (29.44, 28.81, 76.29, 239.95, 452.67, 652.52),
        "learned": (30.73, 30.11),
        "sinusoidal": (30.67, 30.03, 275.28, 1166.46, 2561.54, 3679.78)}}
TABLE4 = {
    "medium": {
        "cable": (20.33, 19.12, 18.36, 17.87, 17.58, 17.36),
        "cable_nw": (20.80, 19.63, 18.91, 18.47, 18.23, 17.95),
        "alibi": (20.80, 19.62, 19.04, 18.91, 18.89, 18.60),
        "fire": (22.18, 20.89, 21.86, 46.60, 106.27, 195.93),
        "t5": (23.33, 22.00, 35.46, 124.19, 363.59, 726.18),
        "kerple": (20.96, 19.73, 19.01, 18.63, 18.61, 18.79),
        "rope": (20.81, 19.60, 20.78, 31.22, 51.54, 91.53),
        "learned": (22.52, 21.23),
        "sinusoidal": (24.16, 22.77, 143.58, 467.51, 1006.37, 1516.97)},
    "small": {
        "cable": (20.93, 19.71, 18.95, 18.47, 18.20, 17.92),
        "cable_nw": (21.34, 20.15, 19.42, 18.98, 18.75, 18.48),
        "alibi": (21.46, 20.22, 19.62, 19.39, 19.29, 19.06),
        "fire": (22.03, 20.74, 21.28, 36.02, 81.77, 163.91),
        "t5": (22.80, 21.49, 33.85, 123.05, 347.22, 659.72),
        "kerple": (21.50, 20.22, 19.45, 19.04, 18.91, 19.00),
        "rope": (21.38, 20.13, 30.14, 63.75, 117.81, 202.23),
        "learned": (22.51, 21.21),
        "sinusoidal": (23.09, 21.73, 163.49, 580.86, 1121.08, 1652.53)}}
# the tiny model's 9,000 steps are about 10 epochs, as the paper says, with 2^17 tokens a step
WIKITEXT = ("--size tiny --data wikitext103 --max_iters 9000 --batch_size 64 "
            "--gradient_accumulation_steps 2")
BATCH = ("2^17 tokens a step, by which the paper's steps are its epochs; with the 2^19 of its text "
         "they would be four times as many")
EVAL = "--tokens 0 --lengths " + " ".join(map(str, LENGTHS))

# Table 2: nDCG@10 on MLDR by document length, trained on 512 tokens, at 1, 2, 4, ... 32 times that
TABLE2 = {
    "cable": (14.96, 15.15, 16.77, 21.36, 24.59, 25.10),
    "alibi": (14.02, 12.88, 14.30, 18.71, 22.86, 23.44),
    "rope": (15.16, 14.41, 10.26, 1.17, 0.12, 0.12),
    "learned": (10.42,),
    "sinusoidal": (13.57, 12.80, 1.03, 0.0, 0.0, 0.0)}
ENCODERS = ("cable", "alibi", "rope", "learned", "sinusoidal", "nope")
TUNING = ("trained on MS MARCO with its hard negatives, tested on MLDR; the loss, its temperature, "
          "the learning rate and its decay are ours, the paper has none; so are gpt2's tokens; "
          "there is no dropout; an epoch is as many samples as there are, drawn at random: some "
          "come twice, a third never")


def encoders(n):
    """cable, alibi and rope with n seeds each, the others with one."""
    return {pe: Row(f"--model bert_{pe}", n if pe in ENCODERS[:3] else 1) for pe in ENCODERS}


RETRIEVAL = dict(minutes=50, train="--data retrieval", eval="", rows=encoders(3))
RETRIEVAL_PAPER = dict(note=TUNING, train="--data retrieval --size paper", eval="",
                       rows=encoders(1))


def fineweb(size, table):
    """One size on FineWeb-Edu, 2^19 tokens a step."""
    return dict(title=f"CABLE, {table}: GPT-2 {size} on FineWeb-Edu", published=FINEWEB[size],
                paper=dict(train=f"--size {size} --data fineweb_edu", eval=EVAL,
                           published_at=LENGTHS, rows=rows(1, *FINEWEB[size])))


def wikitext(size, steps, micro_steps):
    """One size on WikiText-103, 2^17 tokens a step: again its steps are its epochs."""
    train = (f"--size {size} --data wikitext103 --max_iters {steps} "
             f"--gradient_accumulation_steps {micro_steps}")
    return dict(title=f"CABLE, Table 4: GPT-2 {size} on WikiText-103", published=TABLE4[size],
                paper=dict(note=BATCH, train=train, eval=EVAL, published_at=LENGTHS,
                           rows=rows(1, *TABLE4[size])))


def older(title, commits, *models):
    """Table 2 as earlier commits made it, one seed."""
    return dict(title=f"CABLE, Table 2 {title}", published=TABLE2, first="cable_fig5",
                cpu=RETRIEVAL | dict(gone=f"the commits before {commits}, by `python reproduce.py "
                                          f"cable_table2 --seeds 1 --rows {' '.join(models)}`",
                                     rows=rows(1, *models)))


ENTRIES = {
    "cable_table1": dict(
        title="CABLE, Table 1: perplexity far beyond the training length, the first command's run",
        published=TABLE1,
        cpu=dict(train="--size nano --data stdlib", eval="",
                 rows=rows(3, "cable", "alibi", "rope")),
        # the last row is for the paper's conclusion, section 6
        paper=dict(note=BATCH, train=WIKITEXT, eval=EVAL, published_at=LENGTHS,
                   rows=rows(1, *TABLE1, "k_cable", "k_cable_inside") | {
                       "sinusoidal, trained on 8,192": Row(
                           "--model sinusoidal --block_size 8192 --batch_size 2 "
                           "--gradient_accumulation_steps 8")})),
    "cable_table1_fineweb": fineweb("medium", "Table 1, upper half, and Figure 1"),
    "cable_table3_small": fineweb("small", "Table 3, upper half"),
    "cable_table3_tiny": fineweb("tiny", "Table 3, lower half"),
    "cable_table4_medium": wikitext("medium", 3000, 8),
    "cable_table4_small": wikitext("small", 5000, 4),
    "cable_kernel": dict(
        title="CABLE, Figure 4: K-CABLE, with its weight outside the logarithm and inside",
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
              "length that files are cut to", published=TABLE2, first="cable_fig5",
        paper=RETRIEVAL_PAPER, cpu=RETRIEVAL),
    "cable_fig6": dict(
        title="CABLE, Figure 6: contrastive loss by step, the runs of cable_table2", losses=True,
        first="cable_fig5", runs="cable_table2", paper=RETRIEVAL_PAPER, cpu=RETRIEVAL),
    "cable_table2_mean": older("with the plain mean of a text's last states as its vector",
                               "b0ec9f5", "cable", "alibi", "rope"),
    "cable_table2_unscaled": older("with embeddings as small as they start, not times sqrt(C)",
                                   "720e00a", "cable", "alibi"),
}

NUMBERED = {
    "Figure 1": ("cable_table1_fineweb", "lm"), "Figure 2": "a drawing of the method",
    "Table 1": ("cable_table1_fineweb", "cable_table1", "lm"),
    "Figure 3": ("bench.cpu", "bench.generate.cpu"), "Table 2": ("cable_table2",),
    "Figure 4": ("cable_kernel", "lm"), "Figure 5": ("cable_fig5",), "Figure 6": ("cable_fig6",),
    "Table 3": ("cable_table3_small", "cable_table3_tiny", "lm"),
    "Table 4": ("cable_table4_medium", "cable_table4_small", "lm"),
    "Section 6": ("cable_table1", "lm")}
