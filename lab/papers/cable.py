"""CABLE: Context-aware Biases for Length Extrapolation"""
from lab import Row, repaired, rows


def encoders(n, *names):
    """An encoding each, in one BERT."""
    return {pe: Row(f"--model bert_{pe}", n) for pe in names}


FIRST = "cable", "alibi", "rope"
ENCODERS = encoders(1, *FIRST, "learned", "sinusoidal", "nope")
OURS = ENCODERS | encoders(3, *FIRST)

# the paper's size: what its Tables 1, 3 and 4 have in common
ENCODINGS = ("cable", "cable_nw", "alibi", "fire", "t5", "kerple", "rope", "learned", "sinusoidal")
LENGTHS = [512, 1024, 2048, 4096, 8192, 15360]
FAR = "--tokens 0 --lengths 512 1024 2048 4096 8192 15360"
DROPOUT = ("no dropout: the paper names none, and has GPT-2's training otherwise, where CoPE's "
           "entries have .1")
STEPS = ("2^17 tokens a step, by which the paper's steps are its epochs; with the 2^19 of its text "
         "they would be four times as many")
MEDIUM = "354M parameters, where the paper's text has 334M"
HEADS = "12 heads, as the paper's 10 do not divide 768"
TINY = ("--size tiny --data wikitext103 --max_iters 9000 --batch_size 64 "
        "--gradient_accumulation_steps 2")


def gpt2(train, *notes, more=()):
    """Perplexity of every encoding, at the lengths that the paper has numbers for."""
    return dict(note="; ".join([*notes, DROPOUT]), train=train, eval=FAR, published_at=LENGTHS,
                rows=rows(1, *ENCODINGS) | dict(more))


FARTHER = rows(1, "k_cable", "k_cable_inside") | {
    "sinusoidal, trained on 8,192": Row(
        "--model sinusoidal --block_size 8192 --batch_size 2 --gradient_accumulation_steps 8")}

ENTRIES = {
    "cable_table1": dict(
        title="CABLE, Table 1: perplexity far beyond the training length",
        cpu=dict(train="--size nano --data stdlib", eval="",
                 rows=rows(3, "cable", "alibi", "rope") | repaired(3, "window", "yarn")),
        paper=gpt2(TINY, STEPS, more=FARTHER)),
    "cable_kernel": dict(
        title="CABLE, Figure 4: K-CABLE, its weight outside the logarithm, as in later code of the "
              "authors, and inside",
        cpu=dict(train="--size nano --data stdlib", eval="--strided",
                 rows=rows(3, "cable", "k_cable", "k_cable_inside")),
        paper=dict(note=f"{STEPS}; {DROPOUT}", train=TINY, eval=f"{FAR} --strided",
                   rows=rows(3, "cable", "k_cable", "k_cable_inside"))),
    "cable_fig5": dict(
        title="CABLE, Figure 5: loss of masked tokens by step, every encoding in one BERT",
        losses=True,
        cpu=dict(train="--data mlm", eval="--split test --sequences 200 --lengths 128 512 2048",
                 rows=OURS),
        paper=dict(
            note="of the paper's two numbers, one epoch and 32 windows a step, the epoch is kept: "
                 "1,400 windows a step; warmup, decay and tokens (gpt2's) are ours",
            train="--data mlm --size paper --batch_size 28 --gradient_accumulation_steps 50",
            eval="--sequences 1000", rows=ENCODERS)),
    "cable_table2": dict(
        title="CABLE, Table 2: finding documents, nDCG@10 (%) by the length that they are cut to",
        begins_with="cable_fig5", cpu=dict(train="--data retrieval", eval="", rows=OURS),
        paper=dict(
            note="trained on MS MARCO with its hard negatives, tested on MLDR; the loss, its "
                 "temperature, the learning rate and its decay are ours, the paper has none; "
                 "so are gpt2's tokens; the plain mean of states is its framework's default; "
                 "there is no dropout; an epoch is as many samples as there are, drawn at "
                 "random: some come twice, a third never",
            train="--data retrieval --size paper --pool mean", eval="", rows=ENCODERS)),
    "cable_table2_mean": dict(
        title="CABLE, Table 2 with the plain mean of a text's last states as its vector",
        begins_with="cable_fig5",
        cpu=dict(note="the runs that are there are older than the flag: made where the mean was "
                      "the only way", train="--data retrieval --pool mean", eval="",
                 rows=encoders(1, *FIRST))),
    "cable_table1_fineweb": dict(
        title="CABLE, Table 1, upper half, and Figure 1: GPT-2 medium on FineWeb-Edu",
        paper=gpt2("--size medium --data fineweb_edu", MEDIUM)),
    "cable_table3_small": dict(
        title="CABLE, Table 3, upper half: GPT-2 small on FineWeb-Edu",
        paper=gpt2("--size small --data fineweb_edu", HEADS)),
    "cable_table3_tiny": dict(
        title="CABLE, Table 3, lower half: GPT-2 tiny on FineWeb-Edu",
        paper=gpt2("--size tiny --data fineweb_edu")),
    "cable_table4_medium": dict(
        title="CABLE, Table 4: GPT-2 medium on WikiText-103",
        paper=gpt2("--size medium --data wikitext103 --max_iters 3000 "
                   "--gradient_accumulation_steps 8", MEDIUM, STEPS)),
    "cable_table4_small": dict(
        title="CABLE, Table 4: GPT-2 small on WikiText-103",
        paper=gpt2("--size small --data wikitext103 --max_iters 5000 "
                   "--gradient_accumulation_steps 4", HEADS, STEPS)),
}
ENTRIES["cable_fig6"] = ENTRIES["cable_table2"] | dict(
    title="CABLE, Figure 6: contrastive loss by step, the runs of cable_table2",
    losses=True, runs="cable_table2")
