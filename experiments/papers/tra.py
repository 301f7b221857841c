"""TRA: Understanding Attention Glitches with Threshold Relative Attention"""
from experiments import Row, rows

COLUMNS = [(split, split, "exact_match") for split in ("iid", "dense", "sparse")]
POST, PLAIN = "--norm post --qk_norm", "--norm pre --no-qk_norm"
NORMS = {"post qk-norm": POST, "post": "--norm post --no-qk_norm",
         "pre qk-norm": "--norm pre --qk_norm", "pre": PLAIN}
SMALL = dict(train="--data flipflop --max_iters 1000",
             eval="--sequences 500 --lengths 64 256 1024")
# CoPE's flip-flop at a quarter of its dimensions (cope_table2_flipflop)
MIDDLE = dict(train="--data flipflop --block_size 256 --batch_size 16 --max_iters 1000 "
                    "--learning_rate 1e-3 --lr_decay linear --beta2 0.999 --n_embd 64 --n_layer 4 "
                    "--n_head 4",
              eval="--sequences 500 --lengths 256 1024",
              note="256 tokens and 1,000 steps, where the paper has 512 and 25,000")


def norms():
    """Every model with every norm, with and without QK-norm; TRA's own more often."""
    table = {}
    for model in ("tra", "fox", "cope", "rope", "cable"):
        for words, flags in NORMS.items():
            seeds = 10 if model == "tra" and "qk-norm" in words else 3
            table[f"{model} {words}"] = Row(f"--model {model} {flags}", seeds)
    return table


ENTRIES = {
    "tra_table1": dict(
        title="TRA, Table 1: flip-flop, exact match (%), every method with the norms of TRA's "
              "authors, post-norm and QK-norm",
        columns=COLUMNS,
        cpu=MIDDLE | dict(rows=rows(3, "tra", "fox", "cope", "rope", "cable", "diff", flags=POST))),
    "tra_table1_own": dict(
        title="TRA, Table 1 with pre-norm and no QK-norm: every method as it comes",
        published="tra_table1", columns=COLUMNS,
        cpu=MIDDLE | dict(rows=rows(3, "fox", "cope", "rope", flags=PLAIN))),
    "tra_norm": dict(
        title="What of TRA's result is TRA, what post-norm and QK-norm? Flip-flop, exact match "
              "(%); no paper has this table",
        columns=COLUMNS, group="tra",
        cpu=SMALL | dict(rows=norms() | {
            "tra post qk-norm, 2e-4": Row(f"--model tra {POST} --learning_rate 2e-4", 10),
            # the two seeds that had not learned it
            "tra post qk-norm, PyTorch's init": Row(f"--model tra_torch_init {POST}", 2),
            "tra post qk-norm, 4 x the steps": Row(f"--model tra {POST} --max_iters 4000", 2)})),
    "tra_parts": dict(
        title="TRA taken apart: which of its two ideas does the work? Flip-flop, exact match (%); "
              "no paper has this table",
        columns=COLUMNS, group="tra",
        cpu=SMALL | dict(rows={
            "threshold and its count (tra)": Row(f"--model tra {POST}", 10),
            "threshold, plain distance": Row(f"--model tra_plain {POST}", 10),
            "its count, no key dropped": Row(f"--model tra_kept {POST}", 10),
            "threshold, no decay": Row(f"--model tra_no_decay {POST}", 10),
            "plain distance, no key dropped": Row(f"--model tra_decay {POST}", 10),
            # the paper's smallest models, its Appendix A
            "tra, 2 layers, 1 head": Row(f"--model tra {POST} --n_layer 2 --n_head 1", 10),
            "fox, 2 layers, 1 head": Row(f"--model fox {POST} --n_layer 2 --n_head 1", 10)})),
}
