"""
Language models of every method

One table, small enough for two CPU cores, for CABLE's Tables 1, 3 and 4 and its Figures 1 and 4,
CoPE's Tables 5 and 8 and its Figure 3, and TRA's Table 2 and Figure 4. At the paper's size each of
these has an entry of its own.
"""
from itertools import product

from lab import REPAIRS, Row, repaired, rows

# of three learning rates the one of lm_rates' lowest perplexity, for a method of each family
RATES = ("2e-3", "4e-3", "8e-3")
PICKED = "4e-3"  # of learned, rope, alibi, cable and cope
OF_TRA = "8e-3"
FAMILIES = "learned", "rope", "alibi", "cable", "cope", "tra"
METHODS = (
    "learned", "nope", "sinusoidal", "label",
    "rope", "rope_nope", "rope_window", "rope_nope, no window", "diff", "peri", "path",
    "alibi", "t5", "kerple", "fire", "relative",
    "cable", "cable_nw", "k_cable", "fox",
    "cope", "cope_sep", "cope_val", "cope_relative", "cope_rope", "cope_alibi",
    "cope, a table in each layer", "cope, P = 256", "relative_capped", "stick",
    "tra", "tra pre qk-norm")
POST, PRE = "--norm post --qk_norm", "--norm pre --qk_norm"
OTHERS = "--norm pre --no-qk_norm"  # the norms of all but TRA
MORE = {  # model and flags of those rows that are more than --model ROW
    "cope": "cope --P 16", "cope_sep": "cope_sep --P 16", "cope_relative": "cope_relative --P 16",
    "cope_val": "cope_val --P 16", "cope_rope": "cope_rope --P 16", "cope, P = 256": "cope --P 256",
    "cope, a table in each layer": "cope --P 16 --no-share",
    "cope_alibi": "cope_alibi --slopes 0.25,0.0625,0.015625,0.00390625",  # ALiBi's, as in Table 8
    "tra": f"tra {POST}", "tra pre qk-norm": f"tra {PRE}", "peri": "perinorm --norm peri --pe rope",
    "tra_kept pre qk-norm": f"tra_kept {PRE}", "tra_qk_scale pre qk-norm": f"tra_qk_scale {PRE}",
    "tra pre": f"tra {POST} {OTHERS}",  # the last counts
    "tra, norms of the others": f"tra {POST} {OTHERS}",
    "alibi post qk-norm": f"alibi {POST}", "rope post qk-norm": f"rope {POST}",
    "fox post qk-norm": f"fox {POST}", "fox open": "fox --gate_bias 4",
    "rope, base 1,000": "rope --base 1000", "rope, a quarter turns": "rope --rotary_share 0.25",
    "rope_nope, no window": "rope_nope --window 0",
    "cable x4": "cable --max_iters 12000 --eval_interval 2400"}
THREE_SEEDS = ("cable", "alibi", "rope", "rope_nope", "rope_nope, no window", "rope_window", "fox",
               "cope", "cope_rope", "tra")
WORDS = dict(cable="2e-3", rope="4e-3", alibi="2e-3", fox="2e-3")  # from lm_words_rates

TRAIN = f"--data stdlib --size nano {OTHERS}"
LONG = f"{TRAIN} --max_iters 3000 --eval_interval 600"  # 12 million bytes: see lm_context
SHORT = f"{TRAIN} --max_iters 375 --eval_interval 75"   # an eighth
FAR = "--lengths 256 512 1024 2048 4096 --strided"


def flags(row, rate, more=""):
    model, *own = MORE.get(row, row).split(" ", 1)
    words = f"--model {model} --learning_rate {rate} --min_lr {float(rate) / 10:g}"
    return " ".join([words, *own, more]).strip()


def usual(row, more=""):
    """At the rate of its family."""
    return flags(row, OF_TRA if row.startswith("tra") else PICKED, more)


def at(rates, *names, seeds=1, evaluate=""):
    """Rows at other rates."""
    table = {}
    for row, rate in product(names, rates):
        table[f"{row}, {rate}"] = Row(flags(row, rate), seeds, eval=evaluate)
    return table


def every():
    """Every method at the rate of its family."""
    table = {row: Row(usual(row), 3 if row in THREE_SEEDS else 1) for row in METHODS}
    for row in ("nope", "label", "learned"):  # whose validation losses fell the most
        table[f"{row} x2"] = Row(usual(row, "--max_iters 6000 --eval_interval 1200"))
    table["cope, P = 256, cut to 128"] = Row(weights_of="cope, P = 256", eval="--set P=128")
    table["rope_nope, log_n"] = Row(seeds=3, weights_of="rope_nope", eval="--set repair=log_n")
    return table | repaired(3, *REPAIRS)


def at_full_length():
    """
    Rates, the start of a gate, norms and RoPE's base where they count; and whether a passage that
    comes a second time is worth anything (--again).
    """
    one, three = dict(evaluate="--again"), dict(evaluate="--again", seeds=3)
    table = at(("4e-3", "1.6e-2"), "tra", "tra pre qk-norm") | at(["8e-3"], "fox")
    table |= at(["2e-3"], "fox", seeds=3) | at(("2e-3", "4e-3"), "fox open", **three)
    table |= at(["2e-3"], "cable", "alibi", "rope", **three)
    for repair in ("window", "rerope"):
        table[f"rope, 2e-3, {repair}"] = Row(
            seeds=3, weights_of="rope, 2e-3", eval=f"--set repair={repair} --again")
    table |= at(["4e-3"], "tra_kept pre qk-norm", **three)
    table |= at(["2e-3"], "rope_nope", "nope", "cable x4", **one)
    return table | at(["4e-3"], "tra_qk_scale pre qk-norm", "tra pre", "alibi post qk-norm",
                      "rope post qk-norm", "fox post qk-norm", "rope, base 1,000",
                      "rope, a quarter turns", **one)


def trained_on():
    """300 steps in windows of 1,024, after 3,000 in windows of 256."""
    table = {row: Row(f"--model {row}", 3, begins_with=f"{row}, 2e-3")
             for row in ("cable", "alibi", "rope")}
    for repair in ("pi", "yarn"):
        words = f"--model rope --repair {repair} --original_length 256"
        table[f"rope, {repair}"] = Row(words, 3, begins_with="rope, 2e-3")
    return table


def steps(n, words):
    return Row(f"{words} --learning_rate 4e-3 --min_lr 4e-4 --max_iters {n} "
               f"--eval_interval {n // 5}")


# on one GPU; what is asked for first is made first
COMPARED = rows(2, "cable", "rope", "alibi") | repaired(2, "window", "rerope", "yarn", "selfextend")
ENGLISH = "--data FOLDER --block_size 512 --eval_iters 20 --log_interval 100"
FARTHER = "--lengths 512 1024 2048 4096 8192 --strided --tokens 262144"

# {heading: (entry, n)}: whose n-th numbers stand beside the rows of lm in a second table
PAPERS = {
    "CABLE, Table 1 (1,024)": ("cable_table1", 1),
    "the same, read at 15,360": ("cable_table1", 5),
    "CABLE, FineWeb-Edu medium (1,024)": ("cable_table1_fineweb", 1),
    "CoPE, Table 5 (1,024)": ("cope_table5", 0),
    "CoPE, Table 5, code (4,096)": ("cope_table5", 1),
    "TRA, Table 2 (128)": ("tra_table2", 0)}

ENTRIES = {
    "lm": dict(
        title="Language models of every method: perplexity far beyond the training length, strided "
              "perplexity, loss by position",
        papers=PAPERS, cpu=dict(train=LONG, eval=FAR, rows=every()),
        drawn=("cable", "alibi", "fox", "rope_nope", "rope, window", "rope, rerope", "cope",
               "tra pre qk-norm", "rope, yarn", "learned", "nope", "rope")),
    "lm_rates": dict(
        title="The learning rates of lm: one method of each family, runs an eighth as long, "
              "perplexity on the validation split",
        cpu=dict(train=SHORT, eval="--split val --lengths 256", rows=at(RATES, *FAMILIES)
                 # of the three 8e-3 was TRA's best, and the highest
                 | at(["1.6e-2"], "tra")
                 # is it the norms, which no other row has?
                 | at(RATES, "tra, norms of the others"))),
    "lm_rates_long": dict(
        title="Runs of full length at other learning rates, with other starts, norms and bases",
        cpu=dict(train=LONG, eval=FAR, rows=at_full_length())),
    "lm_trained_on": dict(
        title="Trained on at a greater length: 300 steps in windows of 1,024 after 3,000 in "
              "windows of 256, RoPE plain and with two repairs",
        begins_with="lm_rates_long", cpu=dict(
            train=TRAIN + " --block_size 1024 --batch_size 4 --max_iters 300 --eval_interval 60 "
                  "--learning_rate 1e-3 --min_lr 1e-4", eval=FAR, rows=trained_on())),
    "lm_sotu": dict(
        title="English: as lm, on State of the Union addresses, in bytes",
        cpu=dict(train=LONG.replace("stdlib", "sotu"), eval=FAR,
                 rows={row: Row(words.train, 3) for row, words in every().items()
                       if row in ("cable", "rope", "alibi", "fox", "tra pre qk-norm")}
                 | repaired(3, "window", "yarn"))),
    "lm_english": dict(
        title="English, 14M parameters: perplexity far beyond the training length, on a text of "
              "yours; here on the books of books.txt",
        gpu=dict(train=f"{ENGLISH} --tokenizer gpt2_8k --n_layer 6 --n_head 6 --n_embd 384 "
                       "--batch_size 128 --max_iters 2400 --learning_rate 2e-3 --min_lr 2e-4 "
                       "--warmup_iters 200 --eval_interval 800", eval=FARTHER,
                 rows=COMPARED | rows(2, "tra", "fox", "cope") | {
                     "tra pre qk-norm": Row("--model tra --norm pre --qk_norm", 2),
                     "rope_nope": Row("--model rope_nope --nope_every 3", 2)})),
    "lm_english_tiny": dict(
        title="English, 45M parameters: as lm_english, in gpt2's tokens, 98 million of them",
        gpu=dict(train=f"{ENGLISH} --size tiny --batch_size 64 --gradient_accumulation_steps 2 "
                       "--max_iters 1500 --learning_rate 1e-3 --min_lr 1e-4 --warmup_iters 150 "
                       "--eval_interval 500", eval=FARTHER, rows=COMPARED)),
    "lm_words_rates": dict(
        title="The learning rates of lm_words, on the validation split",
        cpu=dict(train=SHORT.replace("stdlib", "packages --tokenizer gpt2_8k"),
                 eval="--split val --lengths 256",  # 2e-3, the lowest, was the best
                 rows=at(RATES, *WORDS) | at(["1e-3"], "cable"))),
    "lm_words": dict(
        title="Per word: as lm, Python source in gpt2's first 8,192 tokens, 4 million of them",
        cpu=dict(train=f"--data packages --tokenizer gpt2_8k --size nano {OTHERS} "
                       "--max_iters 1000 --eval_interval 200", eval=FAR,
                 rows={row: Row(flags(row, rate), 3) for row, rate in WORDS.items()}
                 | repaired(3, "window"))),
    "lm_drope": dict(
        title="RoPE dropped after its training (DroPE): 300 steps more without positions, beside "
              "300 with",
        begins_with="lm", cpu=dict(
            train=TRAIN + " --max_iters 300 --eval_interval 60 --learning_rate 4e-3 --min_lr 4e-4",
            eval=FAR, rows={"rope, then nope": Row("--model nope", 3, begins_with="rope"),
                            "rope, then rope": Row("--model rope", 3, begins_with="rope"),
                            "rope, then rope, window": Row(
                                seeds=3, weights_of="rope, then rope",
                                eval="--set repair=window")})),
    "lm_context": dict(
        title="Where is context worth something inside the training length? Strided perplexity of "
              "the same tokens, each with at least half a window to look back on",
        cpu=dict(train=TRAIN, eval="--split val --lengths 32 64 128 256 512 --strided", rows={
            "rope, 3M bytes": steps(750, "--model rope"),
            "rope, 6M bytes": steps(1500, "--model rope"),
            "rope, 12M bytes": steps(3000, "--model rope"),
            "rope, 6M bytes, 8 layers": steps(1500, "--model rope --n_layer 8"),
            "cable, 6M bytes": steps(1500, "--model cable"),
            "cable, 12M bytes": steps(3000, "--model cable")})),
}
