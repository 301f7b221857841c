"""CABLE: Context-aware Biases for Length Extrapolation"""
from experiments import Row, repaired, rows

# an encoding each, in one BERT
ENCODERS = {pe: Row(f"--model bert_{pe}", 3) for pe in ("cable", "alibi", "rope")}
ENCODERS |= {pe: Row(f"--model bert_{pe}") for pe in ("learned", "sinusoidal", "nope")}

ENTRIES = {
    "cable_table1": dict(
        title="CABLE, Table 1: perplexity far beyond the training length",
        cpu=dict(train="--size nano --data stdlib", eval="",
                 rows=rows(3, "cable", "alibi", "rope") | repaired(3, "window", "yarn"))),
    "cable_kernel": dict(
        title="CABLE, Figure 4: K-CABLE, its weight outside the logarithm, as in later code of the "
              "authors, and inside",
        cpu=dict(train="--size nano --data stdlib", eval="--strided",
                 rows=rows(3, "cable", "k_cable", "k_cable_inside"))),
    "cable_fig5": dict(
        title="CABLE, Figure 5: loss of masked tokens by step, every encoding in one BERT",
        losses=True,
        cpu=dict(train="--data mlm", eval="--split test --sequences 200 --lengths 128 512 2048",
                 rows=ENCODERS)),
    "cable_table2": dict(
        title="CABLE, Table 2: finding documents, nDCG@10 (%) by the length that they are cut to",
        first="cable_fig5", cpu=dict(train="--data retrieval", eval="", rows=ENCODERS)),
    "cable_fig6": dict(
        title="CABLE, Figure 6: contrastive loss by step, the runs of cable_table2",
        losses=True, first="cable_fig5", runs="cable_table2"),
    "cable_table2_mean": dict(
        title="CABLE, Table 2 with the plain mean of a text's last states as its vector",
        published="cable_table2", first="cable_fig5",
        cpu=dict(note="the runs that are there are older than the flag: made where the mean was "
                      "the only way", train="--data retrieval --pool mean", eval="",
                 rows={pe: Row(f"--model bert_{pe}") for pe in ("cable", "alibi", "rope")})),
}
