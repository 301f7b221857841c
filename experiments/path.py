"""PaTH Attention: Position Encoding via Accumulating Householder Transformations"""
from experiments import rows

COLUMNS = [("in distribution", "iid", "glitch_rate"), ("sparse", "sparse", "glitch_rate"),
           ("dense", "dense", "glitch_rate")]
# PaTH's directions come from three tokens, all else of one layer from one: is it that?
TABLE1 = (rows(3, "rope", "stick", "fox", "path", "tra", "cable", "cope")
          | {"path, no convolution": rows(3, "path", flags="--conv 1")["path"]})

ENTRIES = {
    "path_table1": dict(
        title="PaTH, Table 1: flip-flop by one layer of two heads and 64 channels, wrong reads (%)",
        columns=COLUMNS,
        cpu=dict(
            note="256 tokens and 2,000 steps of 32 strings, a learning rate of 1e-3 or 3e-3, all "
                 "pre-norm without QK-norm: the paper does not say",
            minutes=4, eval="--sequences 2000",
            train="--data flipflop --block_size 256 --n_layer 1 --n_head 2 --n_embd 64 "
                  "--batch_size 32 --max_iters 2000 --eval_interval 400 --learning_rate 1e-3 "
                  "--norm pre --no-qk_norm",
            rows=TABLE1 | {f"{label}, 3e-3": row._replace(train=f"{row.train} --learning_rate 3e-3")
                           for label, row in TABLE1.items()})),
}

NUMBERED = {"Table 1": ("path_table1",)}
