"""TRA: Understanding Attention Glitches with Threshold Relative Attention"""
from experiments import seeds

COLUMNS = [(split, split, "exact_match") for split in ("iid", "dense", "sparse")]
# Table 1: exact match in % on iid, dense, sparse
TABLE1 = {
    "nope": (100, 0.15, 99.97), "learned": (100, 27.38, 90.61), "t5": (100, 41.2, 70.48),
    "rope": (100, 100, 72.82), "label": (100, 12.58, 86.93), "fox": (100, 100, 93.4),
    "diff": (100, 100, 77.8), "cope": (100, 100, 95.1), "tra": (100, 100, 100)}


MODELS = ("tra", "fox", "cope", "rope", "cable")
SLOW = ("diff", "t5", "learned", "label", "nope", "alibi")  # to learn the task
POST = "--norm post --qk_norm"
EVAL = "--sequences 500 --lengths 64 256 1024"
NOTEBOOK = ("steps, batch and learning rate are those of its authors' notebook; weight decay, "
            "beta2, CoPE's P = 64, 16 labels for every token and the MLP, GELU of 4 times the "
            "width, are ours, where the paper has SwiGLU of twice the width")
SMALL = dict(train="--data flipflop --max_iters 1000", eval=EVAL)
PAPER = dict(note=NOTEBOOK, train="--data flipflop --size paper", eval="--sequences 10000")
SETTING = ("64 tokens, 2 layers, 2 heads, 128 channels, where the paper has 512 tokens, in "
           "training and in the tests. Read at the training length, at 4 and at 16 times it.")


def norms(n, more):
    """Every model with every norm, with and without QK-norm, n seeds each; TRA's own more often."""
    rows = {}
    for model in MODELS:
        for norm in ("post", "pre"):
            for words, flag in ((" qk-norm", "--qk_norm"), ("", "--no-qk_norm")):
                often = more if model == "tra" and words else n
                rows[f"{model} {norm}{words}"] = f"--model {model} --norm {norm} {flag}", often
    rows["tra post qk-norm, 2e-4"] = f"--model tra {POST} --learning_rate 2e-4", more
    return rows


def own(n, n_slow, slow):
    """TRA with its authors' norms, post with QK-norm, the others with pre and none."""
    rows = {"tra": (f"--model tra {POST}", n)}
    rows |= {m: (f"--model {m} --norm pre --no-qk_norm", n) for m in MODELS[1:]}
    return rows | {m: (f"--model {m} --norm pre --no-qk_norm {slow}", n_slow) for m in SLOW}


def parts(n):
    """TRA taken apart (tra_variants.py), and the paper's smallest models (Appendix A)."""
    rows = {"threshold and its count (tra)": (f"--model tra {POST}", n)}
    for words, model in (("threshold, plain distance", "tra_plain"),
                         ("its count, no key dropped", "tra_kept"),
                         ("threshold, no decay", "tra_no_decay"),
                         ("plain distance, no key dropped", "tra_decay")):
        rows[words] = f"--model {model} {POST}", n
    for model in ("tra", "fox"):
        rows[f"{model}, 2 layers, 1 head"] = f"--model {model} {POST} --n_layer 2 --n_head 1", n
    return rows


ENTRIES = {
    "tra_table1": dict(
        about="TRA, Table 1: flip-flop, exact match (%), every method with the norms of TRA's "
              "authors, post-norm and QK-norm", published=TABLE1, columns=COLUMNS, group="tra",
        cpu=SMALL | dict(
            rows=seeds(3, *MODELS, flags=POST)
            | seeds(1, *SLOW, flags=f"{POST} --max_iters 4000"),
            reads=[
                "`w 1 i 0 i 1 r 1 i 0 w 0 i 1 r 0`: write a bit, ignore a bit, read the bit last "
                "written. Trained with 80 % `i`, tested on that (iid), on 98 % (sparse: the write "
                "is far back) and on 10 % (dense: many writes to confuse). A string counts when "
                "every read in it is right.",
                SETTING,
                "Far beyond the training length, at 1,024 tokens, FoX and CABLE have 99 to 100 % "
                "of the iid and dense strings right. Of the sparse ones, where the write is far "
                "back, FoX has 33 to 79 and CABLE 54 to 100. CoPE (P = 64) and RoPE have no iid "
                "and no dense string right there.",
                "One seed of TRA has every string right, at 16 times the training length, too (in "
                "the paper all, at its own 512). The two others had not learned the task in 1,000 "
                "steps (82 and 95 % iid at the training length); one of them had 98 % of the iid "
                "strings right at step 200 and 69 at step 400.",
                "Compiled, the same seeds learn it (tra_parts): we suppose that rounding decides. "
                "Of ten uncompiled seeds, these three and those of tra_norm, eight learn it.",
                "The last six rows had 4,000 steps, one seed each. At 64 tokens Diff has every "
                "string right, learned positions every iid and sparse one (dense 76 %), label "
                "99.6 % of the iid (dense 88); ALiBi, T5's bias and no positions (nope) had not "
                "learned the task (63, 63 and 55 % iid).",
                "In the paper, which has no ALiBi here, all have 100 % iid, after 25,000 steps. "
                "At 1,024 tokens none of the six has an iid or dense string right; learned "
                "positions end at 64.",
                "No run was compiled.",
            ]),
        paper=PAPER | dict(rows=seeds(4, *reversed(TABLE1), flags=POST)),
    ),
    "tra_table1_own": dict(
        about="The same, TRA with its authors' norms, post-norm and QK-norm, the others pre-norm "
              "without QK-norm", published=TABLE1, columns=COLUMNS, group="tra",
        cpu=SMALL | dict(rows=own(3, 1, "--max_iters 4000"), reads=[
                     SETTING,
                     "At 1,024 tokens RoPE has .4 to 21 % of the iid strings right (2 to 106 of "
                     "500), with TRA's norms (tra_table1) none; at 256 tokens 93 to 99 % instead "
                     "of 7 to 46.",
                     "CoPE has more of the dense strings right at 256 tokens (29 to 78 %, not 0 "
                     "to 9 as in tra_table1).",
                     "FoX and CABLE each show no difference between the two tables: at 1,024 "
                     "tokens they have 24 to 61 and 72 to 100 % of the sparse strings. With three "
                     "seeds no test gets below p .1.",
                     "The last six rows had 4,000 steps, one seed each. At 64 tokens Diff and "
                     "learned positions have every string right, label 99.4 % or more, ALiBi 98 % "
                     "of the iid; T5's bias and no positions (nope) had not learned the task (65 "
                     "and 66 %).",
                     "In tra_table1, with post-norm and QK-norm, ALiBi had not learned the task "
                     "either (63 %), and at 256 tokens Diff and label have 11 and 21 % of the iid "
                     "strings instead of 52 and 66 (one seed each, one learning rate).",
                     "The runs of TRA are those of tra_table1.",
                 ]),
        paper=PAPER | dict(rows=own(4, 4, "")),
    ),
    "tra_norm": dict(
        about="What of TRA's result is TRA, what post-norm and QK-norm? Flip-flop, exact match "
              "(%); no paper has this table", columns=COLUMNS, group="tra",
        cpu=SMALL | dict(
            rows=norms(3, more=10),
            reads=[
                "TRA's paper does not say that its transformer is post-norm and that queries and "
                "keys are RMS-normalised; its authors' notebook has both.",
                SETTING,
                "Seed 1337 of every row but the last was trained on another processor, uncompiled. "
                "Of seeds 1338 and 1339 TRA, CoPE and post-norm FoX were compiled; TRA's other "
                "seeds, and its row at 2e-4, were not.",
                "TRA with QK-norm, ten seeds: pre-norm has every string right at 16 times the "
                "training length in all ten, post-norm, as its authors have it, in nine; the "
                "tenth had not learned the task in 1,000 steps (63 % iid at the training length).",
                "Uncompiled, post-norm's seed 1338 fails, too (tra_table1): eight of ten.",
                "With a learning rate of 2e-4 instead of 5e-4 post-norm has every string right at "
                "16 times the training length in seven seeds, 99.8 % or more in one, 67 to 96 in "
                "one, and one had not learned the task (58 % iid at the training length).",
                "Pre-norm's ten against seven of post-norm at 2e-4: p .21 (Fisher's exact test). "
                "Two of the ten were compiled; of the others eight of eight. So TRA does not need "
                "post-norm here, and no norm is shown to be safer.",
                "Without QK-norm, three seeds: pre-norm TRA has 97 % or more of all strings right "
                "at 16 times the training length, post-norm in two of three; the third had not "
                "learned the task (35 % iid at the training length).",
                "At 1,024 tokens CABLE has, in all norms and seeds, 99 to 100 % of the iid and "
                "dense strings right, FoX 85 to 100.",
                "They differ in writes that are far away: of the sparse strings CABLE has 56 to "
                "100 %, FoX 22 to 93, and CABLE has more in 11 of 12 pairs of the same norm and "
                "seed (sign test: p .006, if the four norms of a seed were independent).",
                "In four of the pairs FoX was compiled and CABLE not, the lost one among them; "
                "tra_table1's uncompiled FoX has less than CABLE there.",
                "CoPE (P = 64) has no iid string right at 1,024 tokens, in any norm or seed (by "
                "which keys, cope_cut says for pre-norm without QK-norm). One seed of three had "
                "not learned the task with post-norm and QK-norm.",
                "RoPE has no iid string right at 1,024 tokens with QK-norm, in six runs; without "
                "it .2 to 53 %, more in each of the six pairs, in two by 1 and 2 strings of 500 "
                "(sign test: p .03, if the two norms of a seed were independent).",
            ]),
        paper=PAPER | dict(rows=norms(2, more=4)),
    ),
    "tra_parts": dict(
        about="TRA taken apart: which of its two ideas does the work? Flip-flop, exact match (%); "
              "no paper has this table", columns=COLUMNS, group="tra",
        cpu=SMALL | dict(rows=parts(3),
                 reads=[
                     "All with post-norm and QK-norm.", SETTING,
                     "Either idea is enough on this task, beside a slope that the query chooses "
                     "(a fixed one was not tried): with the threshold and a plain distance, or "
                     "with the distance in keys that pass and none dropped, every string is right "
                     "at 16 times the training length, in all three seeds, as in TRA itself.",
                     "With neither (ALiBi with a slope for each query) 98 to 100 % are right at "
                     "the training length, but 14 to 23 % of the sparse strings at 16 times that. "
                     "This task cannot tell which of the two is better.",
                     "The threshold alone, without decay, has not learned the task in 1,000 "
                     "steps: 35 to 55 % of the strings are right at the training length (iid), 2 "
                     "to 3 % of the dense. We suppose that this is because nothing tells which of "
                     "the keys that pass is the last.",
                     "The paper's smallest models, with one head: one seed of TRA has every "
                     "string right, at all lengths, the two others 29 and 89 % (iid) at the "
                     "training length; the paper says that it fully generalises (Appendix A).",
                     "FoX with one head (uncompiled) has learned the task in all three seeds: at "
                     "the training length, where the paper says that it fails (512 tokens), it "
                     "has every string right, at 1,024 tokens 43 to 61 % of the sparse.",
                     "Seed 1337 of TRA, which is stuck in tra_norm, is not stuck here: the same "
                     "settings, but compiled (--compile), by later code and on another processor. "
                     "Nor is 1338, which fails in tra_table1, uncompiled. We suppose that another "
                     "rounding is all it takes.",
                 ]),
        paper=PAPER | dict(rows=parts(4)),
    ),
}

# Table 2: WikiText-103, test perplexity in windows of 128
TABLE2 = {"nope": (31.74,), "learned": (31.61,), "t5": (31.27,), "rope": (30.11,),
          "label": (32.09,), "fox": (30.30,), "diff": (29.46,), "cope": (30.20,), "tra": (30.04,)}
LABELS = "--n_label 8192"  # to draw from: the longest window has 4,096 tokens
ENTRIES["tra_table2"] = dict(
    about="TRA, Table 2 and Figure 4: WikiText-103, trained on windows of 128, read in windows of "
          "up to 4,096", published=TABLE2,
    paper=dict(
        note="learning rate, post-norm and QK-norm are those of its authors' flip-flop notebook, "
             "here for all models; CoPE's 64 positions, 8,192 labels, weight decay of .1 and "
             "clipping at 1 are ours; the MLP is GELU of 4 times the width and embeddings are "
             "tied: 51M parameters where the paper has circa 80M",
        train="--data wikitext103 --size tiny --n_layer 8 --block_size 128 --batch_size 64 "
              "--gradient_accumulation_steps 1 --max_iters 100000 --learning_rate 1e-4 --min_lr 0 "
              f"--warmup_iters 0 {POST}",
        eval="--tokens 0 --lengths 128 256 512 1024 2048 4096", published_at=(128,),
        rows=seeds(4, *TABLE2) | seeds(4, "label", flags=LABELS)))

NUMBERED = {
    "Table 1": ("tra_table1", "tra_table1_own", "tra_norm"),
    "Figures 1, 2, 3": ("maps_pair", "maps", "steps"),
    "Table 2": ("tra_table2", "lm"), "Figure 4": ("tra_table2", "lm")}

RUNS = "out/tra.cpu/"
PICTURED = [f"{RUNS}{name}" for name in (
    "alibi-1337", "fox-norm-pre-no-qk_norm-1337", "cable-norm-pre-no-qk_norm-1337",
    "cope-norm-pre-no-qk_norm-1337", "tra-norm-post-qk_norm-1338")]
PAIR = f"--data flipflop --max_iters 1000 {POST} --n_layer 2 --n_head 1 --seed 1339"
TRAINED = ("The models are runs of tra_norm, 1,000 steps, and `python train.py --data flipflop "
           "--max_iters 1000 --model alibi --out_dir out/tra.cpu/alibi-1337`. TRA has its own "
           "norms, was compiled, and is seed 1338, as 1337 had not learned the task; the others "
           "are pre-norm without QK-norm, seed 1337.")
SECTIONS = {
    "steps": dict(
        about="What counts as one step? Every key's step and distance, seen from the last read of "
              "one flip-flop string",
        commands=[f"python maps.py steps {' '.join(PICTURED)} --out results/steps.png"],
        figures=["steps.png"],
        reads=[
            "Five trained models read the same string, each shown by the head that attends most "
            "sharply at the last `r`. Nobody told them what a step is. In these runs FoX and CABLE "
            "made the `w` their step, FoX its bit as well; CoPE counts every token a little "
            "and `w` most; TRA has thrown out most keys and counts the others. ALiBi cannot "
            "choose.",
            TRAINED,
        ]),
    "play": dict(
        about="The same models to play with: drag the query along a string, in any browser",
        commands=[f"python maps.py play {' '.join(PICTURED)} --split dense sparse --length 64 256 "
                  "--out results/play.html",
                  "python maps.py play out/cable-stdlib-nano --heads all --prompt 'def length(x): "
                  "return len(x)' 'for name in sorted(names): print(names[name])' --out "
                  "results/play_text.html"],
        reads=[
            "Download [play.html](play.html) and open it: one file, no network. Dense and sparse "
            "strings of the training length and of 4 times it; beyond the dashed line no model "
            "was trained. Each layer is shown by the head that attends most sharply at the last "
            "query of the first string; every number is what `literal` says, to two digits.",
            "[play_text.html](play_text.html) is the same for CABLE on Python, every head: which "
            "characters are a step? It is a page of its own, because the lanes of one page read "
            "the same string.",
            TRAINED,
        ]),
    "maps": dict(
        about="What two models attend to on one dense flip-flop string",
        commands=[f"python maps.py attention {PICTURED[4]} --split dense --length 40 "
                  "--kinds attention step --out results/maps_tra.png",
                  f"python maps.py attention {PICTURED[3]} --split dense --length 40 "
                  "--kinds attention step position --out results/maps_cope.png"],
        figures=["maps_tra.png", "maps_cope.png"],
        reads=[
            "TRA's last layer: a yellow square in the lower row is a key that counts, the others "
            "are dropped. CoPE's last layer on the same string: its soft gates, and the attention "
            "by position alone.",
            TRAINED,
        ]),
    "maps_pair": dict(
        about="TRA, Figures 1 to 3: the last layer's attention of a TRA and a FoX (the paper's "
              "FoT) with two layers and one head each, on one sparse flip-flop string",
        commands=[f"python train.py {PAIR} --model tra --compile on --out_dir out/pair/tra",
                  f"python train.py {PAIR} --model fox --out_dir out/pair/fox",
                  *(f"python maps.py attention out/pair/{model} --split sparse --length 64 --kinds "
                    f"attention --out results/maps_pair_{model}.png" for model in ("tra", "fox"))],
        figures=["maps_pair_tra.png", "maps_pair_fox.png"],
        reads=[
            "The only write is at the beginning; the last query, `r`, asks for its bit. TRA has "
            "dropped all other keys and gives it all of its attention; FoX gives it 81 %, the rest "
            "to ignored bits. It is what the paper says of the two. One run each; of the iid "
            "strings TRA's has 98.6 % right, FoX's all. (In tra_parts TRA has 100 % with the same "
            "flags and seed; the commits differ, and we suppose rounding.)",
            "At the paper's size: `python train.py --data flipflop --size paper --n_layer 2 "
            "--n_head 1 --model tra`, the same with fox, then maps.py on both.",
        ]),
}
