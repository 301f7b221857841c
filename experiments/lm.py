"""
Language models of every method

One table, small enough for two CPU cores, for CABLE's Tables 1, 3 and 4 and its Figures 1 and 4,
CoPE's Tables 5 and 8 and its Figure 3, and TRA's Table 2 and Figure 4. Each of these has an entry
of its own at the paper's size, in its paper's file.
"""
from experiments import Row, papers, repaired

# the learning rate of each family: among these, the one of lm_rates' lowest perplexity
RATES = ("2e-3", "4e-3", "8e-3")
PICKED = dict(learned="4e-3", rope="4e-3", alibi="4e-3", cable="4e-3", cope="4e-3", tra="8e-3")
FAMILIES = dict(
    learned=("learned", "nope", "sinusoidal", "label"), rope=("rope", "diff", "peri", "path"),
    alibi=("alibi", "t5", "kerple", "fire", "fire_torch_init", "relative"),
    cable=("cable", "cable_nw", "k_cable", "fox"),
    cope=("cope", "cope_sep", "cope_relative", "cope_alibi", "stick"), tra=("tra", "tra pre"))
OWN = {"cope": "--P 16", "cope_sep": "--P 16", "cope_relative": "--P 16",
       "cope_alibi": "--slopes 0.25,0.0625,0.015625,0.00390625",  # ALiBi's own, as in Table 8
       "tra": "--norm post --qk_norm", "tra pre": "--norm pre --qk_norm",
       "peri": "--norm peri --pe rope"}
NAMES = {"tra pre": "tra", "peri": "perinorm"}  # of rows that are not their model's
THREE_SEEDS = ("cable", "alibi", "rope", "fox", "cope", "tra")
# of what was trained on windows of 256 for STEPS steps, whose validation losses fell the most
TWICE = ("nope", "label", "learned")
STEPS = 3000  # of 16 windows of 256 bytes: 12 million bytes; see lm_context
SHORT = 375   # the same for lm_rates


def flags(row, rate, changes=""):
    words = f"--model {NAMES.get(row, row)} --learning_rate {rate} --min_lr {float(rate) / 10:g}"
    return " ".join(filter(None, (words, OWN.get(row), changes)))


def every(rates):
    """Every method at the rate of its family."""
    table, by_row = {}, {row: family for family, names in FAMILIES.items() for row in names}
    for row, family in by_row.items():
        table[row] = Row(flags(row, rates[family]), 3 if row in THREE_SEEDS else 1)
    for row in TWICE:
        longer = f"--max_iters {2 * STEPS} --eval_interval {2 * STEPS // 5}"
        table[f"{row} x2"] = Row(flags(row, rates[by_row[row]], longer))
    for row in ("cope", "relative", "tra"):
        shorter = "--block_size 128 --batch_size 32"
        table[f"{row}, trained on 128"] = Row(flags(row, rates[by_row[row]], shorter))
    longer = "--block_size 2048 --batch_size 2"
    table["sinusoidal, trained on 2,048"] = Row(flags("sinusoidal", rates["learned"], longer))
    return table | repaired(3, "window", "yarn")


def searched():
    """The first of every family with every rate."""
    table = {f"{row}, {rate}": Row(flags(row, rate)) for row in FAMILIES for rate in RATES}
    # of the three 8e-3 was TRA's best, and the highest
    table["tra, 1.6e-2"] = Row(flags("tra", "1.6e-2"))
    for rate in RATES:  # is it the norms, which no other row has?
        table[f"tra, norms of the others, {rate}"] = Row(
            flags("tra", rate, "--norm pre --no-qk_norm"))
    return table


def settings():
    """More bytes, longer windows, more layers, more context?"""
    def row(flags, steps):
        words = f"{flags} --learning_rate 4e-3 --min_lr 4e-4"
        return Row(f"{words} --max_iters {steps} --eval_interval {steps // 5}")
    return {
        "rope, 3M bytes": row("--model rope", 750),
        "rope, 6M bytes": row("--model rope", 1500),
        "rope, 12M bytes": row("--model rope", 3000),
        "rope, 12M bytes, T = 512": row("--model rope --block_size 512 --batch_size 8", 3000),
        "rope, 6M bytes, 8 layers": row("--model rope --n_layer 8", 1500),
        "cable, 6M bytes": row("--model cable", 1500),
        "cable, 12M bytes": row("--model cable", 3000)}


# of lm_words, from lm_words_rates
WORDS = dict(cable="2e-3", rope="4e-3", alibi="2e-3", fox="2e-3")


def by_words(rates):
    return {f"{row}, {rate}": Row(flags(row, rate)) for row in WORDS for rate in rates}


# the papers' numbers: perplexity on WikiText-103, gpt2 tokens, at the training length; a word where
# a row has no number of its own
def published(name, n=0):
    """{row: the paper's n-th number}"""
    return {row: ys[n] for row, ys in papers()[name].items() if n < len(ys)}


PAPERS = {
    "CABLE, Table 1 (1,024)": published("cable_table1", 1) | {
        "k_cable": "Figure 4", "sinusoidal, trained on 2,048": "section 6"},
    "the same, read at 15,360": published("cable_table1", 5),
    "CABLE, FineWeb-Edu medium (1,024)": published("cable_table1_fineweb", 1),
    "CoPE, Tables 5 and 8 (1,024)": published("cope_table5") | dict(
        cope_sep=23.18, cope_alibi=25.09) | {
        f"{row}, trained on 128": "Figure 3" for row in ("cope", "relative")},
    "CoPE, Table 5, code (4,096)": published("cope_code"),
    "TRA, Table 2 (128)": published("tra_table2") | {"tra, trained on 128": "the same length"}}

TRAIN = "--data stdlib --size nano --norm pre --no-qk_norm"
IN_WORDS = TRAIN.replace("stdlib", "packages --tokenizer gpt2_8k")
LONG = f"{TRAIN} --max_iters {STEPS} --eval_interval {STEPS // 5}"
ENTRIES = {
    "lm": dict(
        title="Language models of every method: perplexity far beyond the training length, strided "
              "perplexity, loss by position",
        cpu=dict(minutes=28, train=LONG, rows=every(PICKED),
                 eval="--lengths 256 512 1024 2048 4096 --strided")),
    "lm_rates": dict(
        title="The learning rates of lm: one method of each family, runs an eighth as long, "
              "perplexity on the validation split",
        cpu=dict(minutes=3, train=f"{TRAIN} --max_iters {SHORT} --eval_interval {SHORT // 5}",
                 eval="--split val --lengths 256", rows=searched())),
    "lm_sotu": dict(
        title="English: CABLE, RoPE and ALiBi on State of the Union addresses, bytes, as in lm",
        cpu=dict(minutes=28, train=LONG.replace("stdlib", "sotu"),
                 eval="--lengths 256 512 1024 2048 4096 --strided",
                 rows={row: Row(flags(row, PICKED[row]), n)
                       for row, n in dict(cable=3, rope=3, alibi=1).items()}
                 | repaired(3, "window", "yarn"))),
    "lm_words_rates": dict(
        title="The learning rates of lm_words, on the validation split",
        cpu=dict(minutes=8, train=f"{IN_WORDS} --max_iters {SHORT} --eval_interval {SHORT // 5}",
                 eval="--split val --lengths 256",  # 2e-3, the lowest, was the best
                 rows=by_words(RATES) | {"cable, 1e-3": Row(flags("cable", "1e-3"))})),
    "lm_words": dict(
        title="Per word: as lm, Python source in gpt2's first 8,192 tokens, 4 million of them",
        cpu=dict(minutes=17, train=f"{IN_WORDS} --max_iters 1000 --eval_interval 200",
                 eval="--lengths 256 512 1024 2048 4096 --strided",
                 rows={row: Row(flags(row, rate), 3) for row, rate in WORDS.items()}
                 | repaired(3, "window"))),
    "lm_context": dict(
        title="Where is context worth something inside the training length? Strided perplexity of "
              "the same tokens, each with at least half a window to look back on",
        cpu=dict(minutes=17, train=TRAIN, rows=settings(),
                 eval="--split val --lengths 32 64 128 256 512 --strided")),
}
