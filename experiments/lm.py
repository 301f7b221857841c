"""
Language models of every method

One table, small enough for two CPU cores, for CABLE's Tables 1, 3 and 4 and its Figures 1 and 4,
CoPE's Tables 5 and 8 and its Figure 3, and TRA's Table 2 and Figure 4. Each of these has
an entry of its own at the paper's size, in its paper's part of this page.
"""
from experiments import cable, cope, tra

# the learning rate of each family: among these, the one of lm_rates' lowest perplexity
RATES = ("2e-3", "4e-3", "8e-3")
PICKED = dict(learned="4e-3", rope="4e-3", alibi="4e-3", cable="4e-3", cope="4e-3", tra="8e-3")
FAMILIES = dict(
    learned=("learned", "nope", "sinusoidal", "label"), rope=("rope", "diff", "peri"),
    alibi=("alibi", "t5", "kerple", "fire", "relative"),
    cable=("cable", "cable_nw", "k_cable", "fox"),
    cope=("cope", "cope_sep", "cope_relative", "cope_alibi"), tra=("tra", "tra pre"))
OWN = {"cope": "--P 16", "cope_sep": "--P 16", "cope_relative": "--P 16",
       "cope_alibi": "--slopes 0.25,0.0625,0.015625,0.00390625",  # ALiBi's own, as in Table 8
       "tra": "--norm post --qk_norm", "tra pre": "--norm pre --qk_norm",
       "peri": "--norm peri --pe rope"}
NAMES = {"tra pre": "tra", "peri": "perinorm"}  # of rows that are not their model's
THREE_SEEDS = ("cable", "alibi", "rope", "fox", "cope", "tra")
# of what was trained on windows of 256 for STEPS steps, whose validation losses fell the most over
# the last fifth of them: .078, .066, .060 nats
TWICE = ("nope", "label", "learned")
STEPS = 3000  # of 16 windows of 256 bytes: 12 million bytes; see lm_context
SHORT = 375   # the same for lm_rates


def flags(row, rate, more=""):
    words = f"--model {NAMES.get(row, row)} --learning_rate {rate} --min_lr {float(rate) / 10:g}"
    return " ".join(filter(None, (words, OWN.get(row), more)))


def every(rates):
    """{row: (its flags, how many seeds)}"""
    rows, by_row = {}, {row: family for family, names in FAMILIES.items() for row in names}
    for row, family in by_row.items():
        rows[row] = flags(row, rates[family]), 3 if row in THREE_SEEDS else 1
    for row in TWICE:
        longer = f"--max_iters {2 * STEPS} --eval_interval {2 * STEPS // 5}"
        rows[f"{row} x2"] = flags(row, rates[by_row[row]], longer), 1
    for row in ("cope", "relative", "tra"):
        shorter = "--block_size 128 --batch_size 32"
        rows[f"{row}, trained on 128"] = flags(row, rates[by_row[row]], shorter), 1
    longer = "--block_size 2048 --batch_size 2"
    rows["sinusoidal, trained on 2,048"] = flags("sinusoidal", rates["learned"], longer), 1
    return rows


def searched():
    """The first of every family with every rate."""
    return {f"{row}, {rate}": (flags(row, rate), 1) for row in FAMILIES for rate in RATES}


def settings():
    """{row: (its flags, one seed)}: more bytes, longer windows, more layers, more context?"""
    def row(flags, steps):
        words = f"{flags} --learning_rate 4e-3 --min_lr 4e-4"
        return f"{words} --max_iters {steps} --eval_interval {steps // 5}", 1
    return {
        "rope, 3M bytes": row("--model rope", 750),
        "rope, 6M bytes": row("--model rope", 1500),
        "rope, 12M bytes": row("--model rope", 3000),
        "rope, 12M bytes, T = 512": row("--model rope --block_size 512 --batch_size 8", 3000),
        "rope, 6M bytes, 8 layers": row("--model rope --n_layer 8", 1500),
        "cable, 6M bytes": row("--model cable", 1500),
        "cable, 12M bytes": row("--model cable", 3000)}


# the papers' numbers: perplexity on WikiText-103, gpt2 tokens, at the training length; a word where
# a row has no number of its own
PAPERS = {
    "CABLE, Table 1 (1,024)": {
        row: ys[1] for row, ys in cable.TABLE1.items()
    } | {"k_cable": "Figure 4", "sinusoidal, trained on 2,048": "section 6"},
    "the same, read at 15,360": {row: ys[5] for row, ys in cable.TABLE1.items() if len(ys) > 5},
    "CABLE, FineWeb-Edu medium (1,024)": {
        row: ys[1] for row, ys in cable.FINEWEB["medium"].items()},
    "CoPE, Tables 5 and 8 (1,024)": {
        row: y for row, (y,) in cope.ENTRIES["cope_table5"]["published"].items()
    } | dict(cope_sep=23.18, cope_alibi=25.09) | {
        f"{row}, trained on 128": "Figure 3" for row in ("cope", "relative")},
    "CoPE, Table 5, code (4,096)": {
        row: y for row, (y,) in cope.ENTRIES["cope_code"]["published"].items()},
    "TRA, Table 2 (128)": {row: y for row, (y,) in tra.TABLE2.items()} | {
        "tra, trained on 128": "the same length"}}

TRAIN = "--data stdlib --size nano --norm pre --no-qk_norm"
LONG = f"{TRAIN} --max_iters {STEPS} --eval_interval {STEPS // 5}"
ENTRIES = {
    "lm": dict(
        about="Language models of every method: perplexity far beyond the training length, strided "
              "perplexity, loss by position",
        also=dict(papers=lambda: PAPERS),
        cpu=dict(
            minutes=28, train=LONG,
            eval="--lengths 256 512 1024 2048 4096 --strided", rows=every(PICKED),
            reads=[
                "Perplexity per byte of Python source, 12 million bytes a run, on the same test "
                "tokens at every window length. CoPE has P = 16, with ALiBi no table. TRA is "
                "post-norm with QK-norm as its authors have it, tra pre pre-norm with QK-norm; "
                "all other methods are pre-norm without QK-norm, but for peri, which has RoPE.",
                "Per byte, all of it. Whether the order is the same with larger tokens, as gpt2's, "
                "was not tried, and larger models, longer training and other text were not either.",
                "The learning rate is its family's, chosen among 2e-3, 4e-3 and 8e-3 by the "
                "validation perplexity of one method in runs an eighth as long: lm_rates. So TRA "
                "has another rate than the others.",
                "CABLE, ALiBi, RoPE, FoX, CoPE and TRA have three seeds, all others one, which "
                "claim no order. Next to nothing is finished: over the last fifth of the steps, "
                "while the learning rate fell, validation perplexity fell by 2.9 (relative, "
                "trained on 128) to 7.5 % (nope), and by 12 % for sinusoidal positions trained on "
                "2,048.",
                "The three whose validation loss fell the most ran again with twice the steps (x2, "
                "compiled). Their perplexity at 256 is 25 (nope), 23 (label) and 14 % (learned) "
                "lower then, so their rows are marked unfinished. Learned positions have 2.42 "
                "then, less than any row with half the text. Sinusoidal positions trained on 2,048 "
                "fell by more, and did not run again.",
                "Compiled were learned, nope, sinusoidal, label, t5, kerple, relative, cable_nw, "
                "k_cable, cope_sep, cope_relative, fire, cope_alibi, x2 and what was trained on "
                "128 and 2,048.",
                "An order at one budget may not hold at another: after a quarter of the text ALiBi "
                "was above RoPE at the training length, in three seeds of each (cable_table1: "
                "4.20, 3.75); here ALiBi's are 2.635 to 2.652, RoPE's 2.629 to 2.745.",
                "CABLE's three seeds are below ALiBi's three at every length (2.55 to 2.59 and "
                "2.63 to 2.65 at 256, 2.34 to 2.38 and 2.41 to 2.44 at 4,096; p .1; of three rates "
                "the same one was the best for both), and below RoPE's at 256 (p .1). The "
                "paper's Table 1 has CABLE below ALiBi, too. Both gain as much from far context: "
                "strided perplexity is 1.0 to 1.1 and .9 to 1.3 % lower at 4,096 than at 512.",
                "Some methods use far context now, which none of the matrix's twelve did after 3 "
                "million bytes. A method whose perplexity falls from 512 to 4,096 in the second "
                "table reads beyond its training length. CoPE's gates with ALiBi's slopes gain "
                "1.6 % there (one seed), ALiBi .9 to 1.3, CABLE 1.0 to 1.1, FoX 0 to .3 (three "
                "each). The fall from 256 to 512 is larger, but may be context within 256: in a "
                "window of 256 a token has only 128 to 255 tokens before it.",
                "TRA stays as it is, within .1 % in three seeds: it survives, and reads no farther "
                "(pre-norm's is .7 % above its lowest, at 512). K-CABLE, CABLE without the query's "
                "weight (cable_nw) and KERPLE are lowest at 512 or 1,024, and rise by 1 to 2 % "
                "after it.",
                "CoPE and its variants with a table rise from 256 to 4,096, by 14 % (cope_sep) to "
                "35 % (trained on 128). All others rise to 2.3 (FIRE) to 37 times (sinusoidal) "
                "what they were; learned positions end at 256.",
                "What was trained on 128 is one seed each, read from 256 on. TRA has 3.07 at 256, "
                "trained on 256 3.14 to 3.20 (three); relative embeddings 2.97, not 2.69 (one); "
                "CoPE 2.71, inside the range of its three seeds (2.59 to 2.75), at 4,096 3.21, "
                "above it (2.71 to 2.91). A step has 32 windows of 128 and 16 of 256, as many "
                "bytes. TRA's and CoPE's runs on 256 were not compiled.",
                "CABLE's paper concludes that a CABLE trained on short windows is better than "
                "sinusoidal positions trained on long ones. Here it is: trained on 256 it has 2.35 "
                "to 2.40 at 2,048 (three seeds), sinusoidal positions trained on 2,048 have 7.67 "
                "(one). But the strided perplexity of these is the same in windows of 256 and "
                "1,024 (7.48, 7.50), and after as many bytes in windows of 256 they have 2.88 at "
                "256. We suppose that they have hardly begun to use order, which says more of "
                "training than of positions.",
                "CABLE's paper has 22.32 at 1,024 and 20.33 at 15,360, 15 times that: 8.9 % less. "
                "Here, in windows that do not overlap, it is 7.8 to 8.4 % less at 16 times the "
                "length (three seeds). 1.0 to 1.1 points of these are surely far context (the "
                "second table, from 512 on); the rest is cold starts and nearer context, and we "
                "cannot tell these apart.",
            ]),
    ),
    "lm_rates": dict(
        about="The learning rates of lm: one method of each family, runs an eighth as long, "
              "perplexity on the validation split",
        cpu=dict(minutes=3, train=f"{TRAIN} --max_iters {SHORT} --eval_interval {SHORT // 5}",
                 eval="--split val --lengths 256", rows=searched(),
                 reads=["4e-3 has the lowest perplexity of every method but TRA, which has it at "
                        "8e-3, the highest rate tried: a higher one may be better still. None was "
                        "finished: validation losses fell by .04 to .10 nats over the last fifth. "
                        "The rates went into PICKED in experiments/lm.py by hand."]),
    ),
    "lm_context": dict(
        about="Where is context worth something inside the training length? Strided perplexity of "
              "the same tokens, each with at least half a window to look back on",
        cpu=dict(minutes=17, train=TRAIN, rows=settings(),
                 eval="--split val --lengths 32 64 128 256 512 --strided",
                 reads=[
                     "T is 256 unless a row says otherwise; all rows see 4,096 bytes a step. With "
                     "more bytes trained on, context becomes worth more: RoPE's strided "
                     "perplexity at 256 is 1.8, 2.6 and 3.9 % below that at 64 after 3, 6 and 12 "
                     "million bytes, CABLE's 5.7 and 11.0 % after 6 and 12.",
                     "Eight layers do not make context worth more (2.4 %, where four have 2.6). "
                     "Trained on windows of 512, RoPE gains 6.3 % from 64 to 256, but .2 % from "
                     "256 to 512. So lm has windows of 256 and 12 million bytes a run.",
                     "CABLE's strided perplexity falls by .2 and by 1.3 % from 256 to 512, which "
                     "may still be context within 256: a token of a strided window of 256 has 128 "
                     "to 255 bytes before it. One seed, validation text, none finished.",
                 ]),
    ),
}

SECTIONS = {
    "lm_papers": dict(
        about="Which rows of lm are which of the papers' tables: perplexity at the training length "
              "and beyond, beside the papers' numbers",
        commands=["python reproduce.py lm --scale cpu --jobs 2"],
        json=["lm.cpu.json"], table="papers_table",
        reads=[
            "The papers' are of larger tokens (gpt2's in CABLE and TRA), models 50 to 150 times "
            "as large and another text: compare the order and the direction, not the level.",
            "CABLE's Figure 1 is the upper half of its Table 1, FineWeb-Edu; its Tables 3 and 4 "
            "are both halves at other sizes (their numbers are in experiments/cable.py); its "
            "Figure 4 is the row k_cable.",
            "CoPE's rows have P = 64, where P = 16 and nothing else changed is better (23.22). Its "
            "Figure 3 is cope and relative read at every length, trained on 256 and on 128, half "
            "of it. Not here, only at the paper's size: that figure's capped relative row; Table "
            "8's gates by values, its table in each layer, its other P; Table 5's CoPE with RoPE.",
            "TRA's Figure 4 is its Table 2 read farther.",
        ]),
    "lm_reach": dict(
        about="How far each head of lm's models looks: the share of its attention on the last n "
              "tokens, in a text of 2,048",
        commands=["python reproduce.py lm --scale cpu --jobs 2",
                  "python maps.py reach out/lm.cpu/{cable-*,alibi-*,fox-*,tra-*-post-qk_norm,"
                  "cope-*-P-16,rope-*}-1337 --length 2048 --out results/lm_reach.png"],
        figures=["lm_reach.png"],
        reads=[
            "One run each, one text. Beyond the 256 tokens of training (dotted) CABLE has one "
            "head that looks there (layer 2, head 2: 35 % of its attention), FoX one (layer 3, "
            "head 1: 14 %), ALiBi one in every layer, that of the flattest slope (36 to 38 %), "
            "TRA none (4 % at most). All their other heads have 3 % or less there.",
            "In these four runs strided perplexity gains from far context where a head looks "
            "there (lm). But in a run of a quarter of the steps the same head of CABLE has 35 % "
            "there, too (reach), and perplexity gains nothing (strided): the share alone is not "
            "the reason.",
            "CoPE and RoPE have no limit of that kind: all heads of CoPE have 13 to 69 % of their "
            "attention beyond 256, all of RoPE's 75 % or more. We suppose that this is why "
            "their perplexity grows.",
        ]),
    "lm_counts": dict(
        about="What each head of lm's models counts: the mean step of every sort of byte",
        commands=["python reproduce.py lm --scale cpu --jobs 2",
                  "python maps.py counts out/lm.cpu/{cable-*,fox-*,cope-*-P-16}-1338 "
                  "--out results/lm_counts.png",
                  "python maps.py counts out/lm.cpu/{cable-*,fox-*,cope-*-P-16}-1339 "
                  "--out results/lm_counts_seeds.png",
                  "python maps.py reach out/lm.cpu/{cable,fox,cope}-*-{1338,1339} --length 2048"],
        figures=["lm_counts.png", "lm_counts_seeds.png"],
        reads=[
            "200 windows of the test split; seeds 1338 and 1339. Seed 1337 was drawn with coarser "
            "sorts, without blank lines; what it shows agrees.",
            "In each of CABLE's three seeds one head of 16 looks beyond the 256 tokens of training "
            "(35, 36 and 40 % of its attention; no other 6 % or more), and it is a head that steps "
            "at ends of lines and hardly anywhere else. It counts blank lines above all: 1.83 "
            "each, another line's end .92 (seed 1338: layer 3, head 0), and 1.37, .10 (1339: layer "
            "2, head 1); .07 or less for all else. In CoPE's paper such heads count paragraphs.",
            "FoX has such a head in two seeds (14 and 13 % of its attention); that of seed 1338 "
            "(layer 3, head 0) steps .41 at a blank line, .23 at another line's end, .07 where a "
            "block begins, and nowhere else. In seed 1339 no head looks beyond 256 (less than .1 "
            "%), and strided perplexity is the same at 512 and 4,096, where in the two others it "
            "falls by .3 and .1 % (lm).",
            "All heads of CoPE look there, with 11 to 52 % of their attention, and none steps at "
            "line ends alone: query and key share the decision. The nearest to it has .92 there, "
            ".79 at blank lines, .87 where a block begins, .70 at a space and .09 at letters (seed "
            "1339: layer 3, head 1).",
        ]),
    "lm_sep": dict(
        about="CoPE, Figures 4 and 6: what the gates count when they have keys of their own "
              "(cope_sep); layer 2 on the first 256 tokens of README's example, and the mean step "
              "of every sort of byte in all layers",
        commands=[f"python train.py {LONG} {flags('cope_sep', PICKED['cope'])} --seed 1337 "
                  "--compile on --out_dir out/cope_sep",
                  "python maps.py attention out/cope_sep --layer 2 --kinds position step "
                  "--length 256 --prompt \"$(sed -n '/^class Task/,/cumsum/p' README.md)\" "
                  "--out results/lm_sep.png",
                  "python maps.py counts out/cope_sep --out results/lm_sep_counts.png"],
        figures=["lm_sep.png", "lm_sep_counts.png"],
        reads=[
            "In the paper such heads count paragraphs and sections. Here one of 16 (layer 2, head "
            "1) counts lines, blank or not: its mean step is .94 at a line's end and where a block "
            "begins, .86 at a blank line, .38 at a space (most of them indent the next line), .21 "
            "at signs, .08 or less at letters and digits. None counts blank lines or blocks alone.",
            "Below, its steps are stripes where lines begin (the ticks), and its positions "
            "blocks: the line that a query is in, the one before, and little beyond.",
            "In plain CoPE the head nearest to that counts spaces as well (lm_counts). One run "
            "each; perplexity is inside the range of CoPE's seeds (lm).",
            "At the paper's size: `python reproduce.py cope_table8 --scale paper --rows sep-keys`, "
            "then maps.py on its run.",
            "Head 3's decision is the query's rather than the key's: at some bytes it counts "
            "nearly all keys, at others nearly none. Heads 0 and 2 count most of everything.",
        ]),
}
