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
ONE_SEED = ("cable_nw", "k_cable", "nope", "learned", "sinusoidal", "t5", "kerple", "fire",
            "relative", "relative_capped", "label")
# the tiny model's 9,000 steps are about 10 epochs, as the paper says, with 2^17 tokens a step
WIKITEXT = ("--size tiny --data wikitext103 --max_iters 9000 --batch_size 64 "
            "--gradient_accumulation_steps 2")
BATCH = ("2^17 tokens a step, as in the authors' code: with the 2^19 of the paper's text its steps "
         "would not be its epochs")
EVAL = "--tokens 0 --lengths " + " ".join(map(str, LENGTHS))

# Table 2: nDCG@10 on MLDR by document length, trained on 512 tokens, at 1, 2, 4, ... 32 times that
TABLE2 = {
    "cable": (14.96, 15.15, 16.77, 21.36, 24.59, 25.10),
    "alibi": (14.02, 12.88, 14.30, 18.71, 22.86, 23.44),
    "rope": (15.16, 14.41, 10.26, 1.17, 0.12, 0.12),
    "learned": (10.42,),
    "sinusoidal": (13.57, 12.80, 1.03, 0.0, 0.0, 0.0)}
ENCODERS = ("cable", "alibi", "rope", "learned", "sinusoidal", "nope")


def encoders(n):
    """The paper's three rows of long documents with n seeds each, the others with one."""
    return {pe: (f"--model bert_{pe}", n if pe in ENCODERS[:3] else 1) for pe in ENCODERS}


ENTRIES = {
    "cable_table1": dict(
        about="CABLE, Table 1: perplexity far beyond the training length, every encoding on one "
              "backbone",
        published=TABLE1,
        cpu=dict(
            contrast="rope", train="--size nano --data stdlib", eval="",
            rows=seeds(3, "cable", "alibi", "rope") | seeds(1, *ONE_SEED),
            reads=[
                "Perplexity per byte, on the same test tokens at every window length. The last "
                "column is the paper's own ratio for its 44M-parameter model on WikiText-103, "
                "trained on windows of 1,024 and read at 15,360: another model and another text, "
                "so only the direction compares.",
                "CABLE's and ALiBi's perplexity falls as the window grows, RoPE's rises from just "
                "beyond its training length, in all three seeds of each. Longer windows also have "
                "fewer tokens with little to look back on, so a falling curve alone does not show "
                "that far context is used.",
                "Inside the training length CABLE and RoPE differ by less than their seeds do; all "
                "three seeds of ALiBi are above all of theirs.",
                "The other rows have one seed each and claim no order. Relative embeddings have "
                "the lowest perplexity inside the training length and lose it beyond. CABLE_NW "
                "(without the query's weight g) is inside the spread of CABLE's seeds; in the "
                "paper g is worth 0.7 perplexity. K-CABLE stops improving at 1,024 tokens, against "
                "the paper's Figure 4 for shallow models.",
                "nope, learned, sinusoidal, t5 and label have not learned much order from 3 "
                "million tokens: not finished, rather than failed. In the paper, with hundreds of "
                "times as many, learned, sinusoidal and t5 are within 7 % of CABLE at the training "
                "length. Read their rows for the shape beyond 256, not for the level. Sinusoidal "
                "is the worst; we suppose that sines of amplitude 1 drown token embeddings that "
                "start at 0.02.",
                "Learned positions cannot go past their table, and label not past its own (16 "
                "times the training length, --n_label for more): a dash.",
                "The sinusoidal row is of an earlier definition: its embeddings were not times "
                "sqrt(C). lm has it as it is now.",
                "The learning rate was chosen among 2e-3, 4e-3 and 8e-3 by the validation loss of "
                "cable and rope, one seed each; the other models take it as it is.",
            ]),
        paper=dict(note=BATCH, train=WIKITEXT, eval=EVAL, published_at=LENGTHS,
                   rows=seeds(1, *TABLE1, "k_cable", "k_cable_inside")),
    ),
    "cable_kernel": dict(
        about="CABLE, Figure 4: K-CABLE, in both readings of its kernel (model_cable.py); the "
              "figure's numbers are not in the text",
        cpu=dict(minutes=12, train="--size nano --data stdlib", eval="--strided",
                 rows=seeds(3, "cable", "k_cable", "k_cable_inside")),
        paper=dict(note=BATCH, train=WIKITEXT, eval=f"{EVAL} --strided",
                   rows=seeds(3, "cable", "k_cable", "k_cable_inside")),
    ),
    "cable_fig5": dict(
        about="CABLE, Figure 5: loss of masked tokens by step, every encoding in one BERT; the "
              "figure's numbers are not in the text",
        losses=True,
        cpu=dict(minutes=12, train="--data mlm", eval="--sequences 1000 --lengths 128 512 2048",
                 rows=encoders(3)),
        paper=dict(train="--data mlm --size paper", eval="--sequences 1000", rows=encoders(1)),
    ),
    "cable_table2": dict(
        about="CABLE, Table 2: finding the file that a docstring is from, nDCG@10 (%) by the "
              "length that files are cut to", published=TABLE2, first="cable_fig5",
        cpu=dict(minutes=30, train="--data retrieval", eval="", rows=encoders(3)),
        paper=dict(train="--data retrieval --size paper", eval="", rows=encoders(1)),
    ),
    "cable_fig6": dict(
        about="CABLE, Figure 6: contrastive loss by step, the runs of cable_table2; the figure's "
              "numbers are not in the text", losses=True, first="cable_fig5", group="cable_table2",
        cpu=dict(minutes=30, train="--data retrieval", eval="", rows=encoders(3)),
        paper=dict(train="--data retrieval --size paper", eval="", rows=encoders(1)),
    ),
}

SECTIONS = {
    "headline": dict(
        about="The picture of the front page: six rows of the table above",
        commands=["python plot.py lengths results/cable_table1.cpu.json "
                  "--models cable alibi kerple t5 nope rope --out results/headline.png"],
        figures=["headline.png"]),
    "strided": dict(
        about="Does CABLE use what it sees? Perplexity by window length, and of tokens that all "
              "have half a window to look back on",
        commands=["python train.py --model cable",
                  "python eval.py out/cable-stdlib-nano --strided --lengths 128 256 512 1024 2048 "
                  "4096 --out results/strided"],
        json=["strided.json"], table="strided_table", figures=["strided.png"],
        reads=[
            "One run. In windows that do not overlap, perplexity falls with the length; of tokens "
            "that all have half a window of context it is flat from 256 on. So the gain of longer "
            "windows is fewer cold starts, not text that is read from farther away: at this scale "
            "CABLE survives long windows and does not use them.",
        ]),
    "reach": dict(
        about="How far each head of a trained CABLE looks: the share of its attention on the last "
              "n tokens, far beyond its training length",
        commands=["python train.py --model cable",
                  "python maps.py reach out/cable-stdlib-nano --length 2048 "
                  "--out results/reach.png"],
        figures=["reach.png"],
        reads=[
            "One run, one text of 2,048 tokens. Most heads have all of their attention on the last "
            "100 tokens, well within the 256 of training; two look at hundreds, and one of them "
            "hardly decays at all. What is left out on a CPU (kernels/cpu.py) is what the others "
            "do not look at.",
        ]),
}
