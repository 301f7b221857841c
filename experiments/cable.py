"""CABLE: Context-aware Biases for Length Extrapolation"""
from experiments import seeds

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
    return {pe: (f"--model bert_{pe}", n if pe in ENCODERS[:3] else 1) for pe in ENCODERS}


RETRIEVAL = dict(minutes=50, train="--data retrieval", eval="", rows=encoders(3))
RETRIEVAL_PAPER = dict(note=TUNING, train="--data retrieval --size paper", eval="",
                       rows=encoders(1))


def fineweb(size, table):
    """One size on FineWeb-Edu, 2^19 tokens a step."""
    return dict(about=f"CABLE, {table}: GPT-2 {size} on FineWeb-Edu", published=FINEWEB[size],
                paper=dict(train=f"--size {size} --data fineweb_edu", eval=EVAL,
                           published_at=LENGTHS, rows=seeds(1, *FINEWEB[size])))


def wikitext(size, steps, micro_steps):
    """One size on WikiText-103, 2^17 tokens a step: again its steps are its epochs."""
    train = (f"--size {size} --data wikitext103 --max_iters {steps} "
             f"--gradient_accumulation_steps {micro_steps}")
    return dict(about=f"CABLE, Table 4: GPT-2 {size} on WikiText-103", published=TABLE4[size],
                paper=dict(note=BATCH, train=train, eval=EVAL, published_at=LENGTHS,
                           rows=seeds(1, *TABLE4[size])))


ENTRIES = {
    "cable_table1": dict(
        about="CABLE, Table 1: perplexity far beyond the training length",
        published=TABLE1,
        cpu=dict(
            contrast="rope", train="--size nano --data stdlib", eval="",
            rows=seeds(3, "cable", "alibi", "rope"),
            reads=[
                "The first command's run, in three seeds, beside ALiBi and RoPE: it stays for what "
                "that command ends with. Table 1 itself, after four times the text, is in lm.",
                "Perplexity per byte, on the same test tokens at every window length. The last "
                "column is the paper's own ratio for its 44M-parameter model on WikiText-103, "
                "trained on windows of 1,024 and read at 15,360: another model and another text, "
                "so only the direction compares.",
                "CABLE's and ALiBi's perplexity falls as the window grows, RoPE's rises from just "
                "beyond its training length, in all three seeds of each. Longer windows also have "
                "fewer tokens with little to look back on, so a falling curve alone does not show "
                "that far context is used.",
                "Inside the training length CABLE and RoPE differ by less than their seeds do; all "
                "three seeds of ALiBi are above all of theirs. None is finished: after as many "
                "bytes each was still falling in the matrix, by 6 to 7 % over the last fifth of "
                "the steps.",
                "The learning rate was chosen among 2e-3, 4e-3 and 8e-3 by the validation loss of "
                "cable and rope, one seed each; ALiBi takes it as it is.",
            ]),
        # the last row is for the paper's conclusion, section 6
        paper=dict(note=BATCH, train=WIKITEXT, eval=EVAL, published_at=LENGTHS,
                   rows=seeds(1, *TABLE1, "k_cable", "k_cable_inside") | {
                       "sinusoidal, trained on 8,192": (
                           "--model sinusoidal --block_size 8192 --batch_size 2 "
                           "--gradient_accumulation_steps 8", 1)}),
    ),
    "cable_table1_fineweb": fineweb("medium", "Table 1, upper half, and Figure 1"),
    "cable_table3_small": fineweb("small", "Table 3, upper half"),
    "cable_table3_tiny": fineweb("tiny", "Table 3, lower half"),
    "cable_table4_medium": wikitext("medium", 3000, 8),
    "cable_table4_small": wikitext("small", 5000, 4),
    "cable_kernel": dict(
        about="CABLE, Figure 4: K-CABLE, in both readings of its kernel (model_cable.py); the "
              "figure's numbers are not in the text",
        cpu=dict(minutes=6, train="--size nano --data stdlib", eval="--strided",
                 rows=seeds(3, "cable", "k_cable", "k_cable_inside"), reads=[
                     "k_cable has g outside the logarithm, k_cable_inside within. At 256 tokens "
                     "k_cable cannot be told from CABLE (three seeds each); k_cable_inside is "
                     "above it in all seeds, barely (3.77 to 3.79, CABLE 3.74 to 3.77; p .1). From "
                     "256 to 4,096 tokens the strided perplexity rises by .1 to .9 % (CABLE), 1.6 "
                     "to 3.0 and .3 to .7: all survive, none reads farther, and g outside loses "
                     "the most in each seed. None was finished.",
                 ]),
        paper=dict(note=BATCH, train=WIKITEXT, eval=f"{EVAL} --strided",
                   rows=seeds(3, "cable", "k_cable", "k_cable_inside")),
    ),
    "cable_fig5": dict(
        about="CABLE, Figure 5: loss of masked tokens by step, every encoding in one BERT; the "
              "figure's numbers are not in the text",
        losses=True,
        cpu=dict(minutes=30, train="--data mlm",
                 eval="--split test --sequences 200 --lengths 128 512 2048",
                 rows=encoders(3), reads=[
                     "Three seeds of CABLE, ALiBi and RoPE, one of the others, one learning rate, "
                     "none finished. CABLE's and RoPE's losses end alike (2.46 to 2.51 and 2.48 to "
                     "2.55 in validation), ALiBi's higher (2.87 to 2.94), those of sinusoidal and "
                     "learned positions and of none highest. The paper has CABLE's lowest.",
                     "Read in windows of 2,048 tokens, 16 times the training length, CABLE names "
                     "65.9 to 66.4 % of the masked tokens, ALiBi 59.6 to 60.1, RoPE 43.4 to 44.4; "
                     "at 128 they have 64.9 to 65.3, 58.1 to 59.0 and 64.0 to 64.7.",
                     "Seed 1337 of CABLE, ALiBi and RoPE is older than the run that cable_table2 "
                     "begins with: same flags and text, another initialization.",
                 ]),
        paper=dict(note="14,000 steps of 32 windows are a quarter of a billion tokens, not the "
                        "epoch of its text; warmup, decay and tokens (gpt2's) are ours",
                   train="--data mlm --size paper", eval="--sequences 1000", rows=encoders(1)),
    ),
    "cable_table2": dict(
        about="CABLE, Table 2: finding the file that a docstring is from, nDCG@10 (%) by the "
              "length that files are cut to", published=TABLE2, first="cable_fig5",
        paper=RETRIEVAL_PAPER, cpu=RETRIEVAL | dict(reads=[
            "The query is a docstring, the document the file that it was taken out of, in "
            "packages that no model has seen. Every column asks the same queries of the same "
            "files, cut to so many tokens; all models were trained on 128. (5 of 1,339 test "
            "queries still stand in their file but for punctuation.)",
            "Three seeds of CABLE, ALiBi and RoPE, each with its own pretraining; one of the "
            "others, whose interval is over documents. Only learned is finished: in the last "
            "quarter of the steps validation losses fell by .13 to .18 (CABLE), .06 to .13 "
            "(ALiBi), .05 to .22 (RoPE) and .12 (sinusoidal). That of nope was lowest at half of "
            "the steps.",
            "At 16 times the training length CABLE has 23.1 to 25.1, 2.4 to 3.9 times what it has "
            "at 1x, ALiBi 24.7 to 25.2, RoPE 4.6 to 12.5. It is what the paper says of RoPE; that "
            "CABLE beats ALiBi did not come: over the same queries ALiBi has 1.0 [-.6, 2.6] more "
            "there, and at 4x each of its seeds has more than any of CABLE's (16.3 to 18.5, 14.0 "
            "to 14.7).",
            "How far RoPE gets differs by seed: nDCG is highest at 4x in two (10.5, 12.3), at 8x "
            "and 16x in one (12.5); at 16x it is .6, 1.0 and 1.7 times that at 1x. In the paper it "
            "falls to almost nothing.",
            "A part of CABLE's and ALiBi's growth is that the answer comes into the text: it "
            "begins in the first 128 tokens for 68 of 800 queries, in 2,048 for 560, and BM25 "
            "grows, too (1.7 times).",
            "Sinusoidal positions fall from 7.8 at 1x to 2.2 at 16x (in the paper from 13.6 to 0); "
            "learned ones end at 128 tokens. By the best window of 128 both find as RoPE does (23 "
            "and 21 at 16x; one seed each).",
            "An encoder without positions (nope, which the paper does not have; one seed) does as "
            "CABLE and ALiBi do at 16x: 24.3. It names 44 % of the masked tokens, CABLE 65, and "
            "its validation loss here is the highest (cable_fig5, cable_fig6). So finding "
            "documents at 16x is no sign that positions extrapolate: these queries do not need "
            "them.",
            "With the plain mean of its tokens as a text's vector RoPE did not fall "
            "(cable_table2_mean, one seed): why it does with learned weights is not known.",
            "Answers that begin beyond 512 tokens are found by CABLE reading 2,048 tokens (30.8 "
            "and 24.2, means of three seeds), hardly by the same models reading the first 128 (4.3 "
            "and 4.9), nor by RoPE reading all (9.7 and 4.7). The best window of 128 does as well "
            "or better, for every encoding, without any extrapolation, at one vector a window.",
            "BM25 alone (39 to 71) is far better than all six encoders. Adding an encoder's rank "
            "to BM25's makes it worse (24 to 58). At 1x no encoder comes near it (5.9 to 9.7). We "
            "suppose that this is because words of the docstring are often words of the code.",
            "Pretraining and fine-tuning together took 25 to 30 minutes a model on one core of the "
            "Intel processor, two at a time; on slower ones up to 59.",
        ])),
    "cable_fig6": dict(
        about="CABLE, Figure 6: contrastive loss by step, the runs of cable_table2; the figure's "
              "numbers are not in the text", losses=True, first="cable_fig5", group="cable_table2",
        paper=RETRIEVAL_PAPER, cpu=RETRIEVAL | dict(reads=[
            "CABLE, ALiBi and RoPE (three seeds each) cannot be told apart by their losses at the "
            "end, in training or validation, where the paper has CABLE's lowest. The validation "
            "losses of learned and sinusoidal positions and of none are higher (one seed each). "
            "Validation is on other packages and without hard negatives: chance is 4.16, of 64 "
            "documents.",
        ])),
}

NUMBERED = {
    "Figure 1": ("cable_table1_fineweb", "lm"), "Figure 2": "a drawing of the method",
    "Table 1": ("cable_table1_fineweb", "cable_table1", "lm"),
    "Figure 3": ("bench.cpu", "bench.generate.cpu"), "Table 2": ("cable_table2",),
    "Figure 4": ("cable_kernel", "lm"), "Figure 5": ("cable_fig5",), "Figure 6": ("cable_fig6",),
    "Table 3": ("cable_table3_small", "cable_table3_tiny", "lm"),
    "Table 4": ("cable_table4_medium", "cable_table4_small", "lm"),
    "Section 6": ("cable_table1", "lm")}

SECTIONS = {
    "cable_table2_mean": dict(
        about="CABLE, Table 2 with the plain mean of a text's last states as its vector",
        commands=["python reproduce.py cable_table2 --scale cpu --seeds 1 --rows cable alibi rope"],
        json=["cable_table2_mean.cpu.json"], table="retrieval_table",
        figures=["cable_table2_mean.cpu.png"],
        reads=[
            "The command, by the commits before b0ec9f5; the same text, queries, steps and seed as "
            "cable_table2, but other initial weights, so another pretraining and hard negatives of "
            "its choice, and another processor. One seed each. With learned weights in the mean "
            "nDCG at 16 times the training length is 23.1 to 25.1 instead of 17.8 (CABLE) and 24.7 "
            "to 25.2 instead of 20.6 (ALiBi), three seeds each; at 1x 5.9 to 9.7 instead of 6.5 "
            "and 8.4 to 9.5 instead of 6.8.",
            "RoPE's does not grow beyond 8 times the training length (16.0, 15.7, 15.2, all within "
            "their intervals), while the best of its windows of 128 tokens goes on (16.1, 19.1, "
            "20.5). We suppose that it is the long reading that ends. In the paper it falls to "
            "almost nothing.",
        ]),
    "cable_table2_unscaled": dict(
        about="CABLE, Table 2 with embeddings as small as they start: not times sqrt(C)",
        commands=["python reproduce.py cable_table2 --scale cpu --seeds 1 --rows cable alibi"],
        json=["cable_table2_unscaled.cpu.json"], table="retrieval_table",
        figures=["cable_table2_unscaled.cpu.png"],
        reads=[
            "The command, by the commits before 720e00a. All else is as in cable_table2_mean: the "
            "same text, queries, steps and seed. With embeddings times sqrt(C) nDCG at 16 times "
            "the training length is 17.8 instead of 14.2 (CABLE) and 20.6 instead of 14.1 "
            "(ALiBi), at 1x 6.5 and 6.8 instead of 6.2 and 5.6. One seed each. We suppose that "
            "what a token is then stays visible beside what the layers add.",
        ]),
    "headline": dict(
        about="The picture of the front page: six rows of lm",
        commands=["python plot.py lengths results/lm.cpu.json "
                  "--models cable alibi fox cope t5 rope --out results/headline.png"],
        figures=["headline.png"]),
    "strided": dict(
        about="Does CABLE use what it sees? Perplexity by window length, and of tokens that all "
              "have half a window to look back on",
        commands=["python train.py --model cable",
                  "python eval.py out/cable-stdlib-nano --strided --lengths 128 256 512 1024 2048 "
                  "4096 --out results/strided"],
        json=["strided.json"], table="text_table", figures=["strided.png"],
        reads=[
            "One run. In windows that do not overlap, perplexity falls with the length; of tokens "
            "that all have half a window of context it is flat from 256 on. So the gain of longer "
            "windows is fewer cold starts, not text that is read from farther away: after 3 "
            "million bytes this CABLE survives long windows and does not use them.",
        ]),
    "reach": dict(
        about="How far each head of a trained CABLE looks: the share of its attention on the last "
              "n tokens, far beyond its training length",
        commands=["python train.py --model cable",
                  "python maps.py reach out/cable-stdlib-nano --length 2048 --out "
                  "results/reach.png"],
        figures=["reach.png"],
        reads=[
            "One run, one text of 2,048 tokens. 14 of 16 heads have nine tenths or more of their "
            "attention on the last 100 tokens, well within the 256 of training (dotted); two look "
            "farther, one with 35 % beyond 256, and the model's perplexity gains nothing from them "
            "(strided). What is left out on a CPU (kernels/cpu.py) is what the others do not look "
            "at.",
        ]),
    "counts": dict(
        about="What each head of a trained CABLE counts: the mean step of every sort of token",
        commands=["python train.py --model cable",
                  "python maps.py counts out/cable-stdlib-nano --out results/counts.png"],
        figures=["counts.png"],
        reads=[
            "One run, 200 windows of the test split; numbers are mean steps of a token of that "
            "sort. 14 of 16 heads take their largest mean step at the end of a line or at a space. "
            "Letters are far more, so in several heads they still make up much of the distance. So "
            "it was in two runs of lm_rates, of the same seed and half as long, at 4e-3 (as here) "
            "and 2e-3.",
            "Layer 2's head 2 has steps at line ends and hardly any elsewhere: it counts lines, "
            "and is the head that looks farthest, with 35 % of its attention, on one text, beyond "
            "the 256 tokens of training. In the two other runs no head did that: those that look "
            "farthest take hardly any step at all. Nor did one when the same command ran on "
            "another processor, which rounds otherwise: the same head takes no step at all there, "
            "and has 83 % of its attention beyond 256.",
        ]),
}
