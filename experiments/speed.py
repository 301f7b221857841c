"""Speed, memory and kernels"""

# What the kernels were built to reach, predicted from their instructions before any GPU ran them:
# {(attention, T): (forward, forward and backward)} beside scaled_dot_product_attention in bfloat16
TARGETS = {
    ("cable", 4096): (0.95, 1.05),
    ("cable", 16384): (1.0, 1.1),
    ("fox", 4096): (0.95, 1.05),
    ("fox", 16384): (1.0, 1.1),
    ("cope", 4096): (1.7, 2.6),
    ("cope", 16384): (1.25, 1.4),
    ("cope, gates 0.03", 4096): (7.6, 12),
    ("tra, decay 0.99", 4096): (4, 3.5),
}

SECTIONS = {
    "bench.cpu": dict(
        about="Speed and memory of whole models at nano size",
        commands=["python bench.py train decode --repeats 9 --out results/bench.cpu.json",
                  "python bench.py memory --out memory.json  # the last column"],
        json=["bench.cpu.json"],
        reads=[
            "nope is torch's own scaled_dot_product_attention and nothing else; the models took "
            "turns in one run, so that a noisy machine disturbs all alike. Decoding is one token "
            "after 4,096; peak memory is that of eval.py on one window of 16,384 tokens, without "
            "a T x T matrix: measured earlier, on an AMD EPYC, before kernels/ had a way for CPUs.",
            "K-CABLE, t5, kerple, fire and relative need a gradient through their bias, which "
            "torch's fused CPU attention does not give: they train slower. On the CPU CABLE and "
            "FoX run inside that attention (kernels/cpu.py). On a GPU without Triton, or with "
            "--kernel off, they take 128 query rows at a time, with the bias as a mask: memory "
            "stays linear in T when evaluating, but training stores the rows' biases.",
            "TRA and CoPE have no fused attention on a CPU: every step of theirs is a pass over "
            "the matrix of logits, forward and backward (kernels/cpu_count.py, with derivatives by "
            "hand). Diff runs two maps, and RoPE four times a layer.",
            "CABLE's Figure 3 has the memory of training, too; here is that of reading, and none "
            "of training.",
            "At the paper's sizes, on a GPU: `python bench.py train decode memory --size medium`.",
        ]),
    "bench.generate.cpu": dict(
        about="2,048 tokens written by CABLE over its cache, and by running the whole text again "
              "for every token",
        json=["bench.generate.cpu.json"]),
    "bench.memory.cpu": dict(
        about="Peak memory of eval.py on one window of 16,384 tokens, the methods that came later",
        json=["bench.memory.cpu.json"],
        reads=["The variants of CoPE's Tables 5 and 7 (cope_mlp, cope_relative, cope_rope) were "
               "measured before they moved to experiments/, where plainness comes before speed."]),
    "bench.attention.cpu": dict(
        about="The attention functions alone, B1 H8 d64: time beside torch's "
              "scaled_dot_product_attention in the same run, and peak memory beyond the inputs",
        json=["bench.attention.cpu.json"], figures=["bench.attention.cpu.png"],
        reads=[
            "Gates 0.5 and 0.03 are CoPE's mean gate: how soon its counts are full; decay is TRA's "
            "for one survivor. CABLE and FoX were measured by one more key column, before "
            "kernels/cpu.py left out what has decayed. On the CPU a CoPE or TRA step costs more "
            "than its attention in the plain functions; kernels/cpu_count.py is faster (bench."
            "attention.short).",
            "CoPE's and TRA's plain functions are simpler since (8ecb664): CoPE's counts over all "
            "keys, not until all counts are full, and is slower beyond 256 tokens; TRA's is faster "
            "up to 1,024. Not measured again here.",
        ]),
    "bench.attention.trained.cpu": dict(
        about="The attention of a trained CABLE alone, all four layers: time beside torch's "
              "scaled_dot_product_attention on the same q, k and v, in the same run",
        commands=["python train.py --model cable",
                  "python bench.py attention --run out/cable-stdlib-nano --ways kernel "
                  "--lengths 1024 4096 16384 --out results/bench.attention.trained.cpu.json"],
        json=["bench.attention.trained.cpu.json"], figures=["bench.attention.trained.cpu.png"],
        reads=[
            "`kernel` is kernels/cpu.py: beyond 1,024 keys it leaves out those that have decayed, "
            "so at 16,384 CABLE takes less time than plain attention, forward and backward. Its "
            "output is that of the whole sum to 1e-6. Up to 1,024 keys the kernel has changed "
            "since (f5b20a2: more exact gradients); not measured again.",
            "What has decayed to e^-90 is a denormal number, on which some CPUs are slow; "
            "train.py and the other commands have it flushed to 0.",
            "One token of cached decoding gains nothing: the bound needs the size of every key, "
            "which costs what the attention costs.",
        ]),
    "bench.attention.short.cpu": dict(
        about="The attention functions at shorter lengths, and as the papers write them (literal)",
        json=["bench.attention.short.cpu.json"],
        reads=[
            "unfused is plain attention without positions, in blocks of 64 query rows, a torch "
            "call for every step and autograd. TRA's `kernel`, with derivatives by hand, takes "
            "less than that forward and backward at 1,024 tokens, CoPE's 12 % more (with gates of "
            ".03: 83 %). We suppose that the number of passes over the logits keeps both from "
            "fused attention's time: matrix products and softmax alone, called one by one, are 1.6 "
            "to 1.7 of it.",
            "CoPE's literal is its paper's listing, which flips whole T x T matrices to sum the "
            "gates; what ran took 64 query rows at a time, nearest key first, and stopped where "
            "all counts are full, as the kernel does (the plain function is simpler since: "
            "bench.attention). CABLE's and FoX's kernel has changed since (f5b20a2). One "
            "training was running on the machine's other core."]),
    "bench.kernels": dict(
        about="The Triton kernels by type, head size d and GPU (sm_80: A100, sm_90: H100)",
        json=["bench.kernels.json"],
        reads=[
            "On a GPU the models call Triton kernels by themselves; train.py prints which way "
            "runs and why, --kernel off takes the plain functions, which stay the truth.",
            "Separable (CABLE with and without g, K-CABLE, FoX; ALiBi is the case of equal "
            "steps): flash attention whose bias is a function of S_i - S_j, with S in float32.",
            "Row scan (CoPE, TRA): each row carries its count from tile to tile, leftwards from "
            "the diagonal. CoPE needs gates only until the counts reach P - 1, what is left is "
            "plain flash attention, so it is two kernels, a band and a tail; TRA stops where the "
            "decay has made the rest smaller than float32 can see.",
            "Forward stores the output, one log-sum-exp and one integer a row; backward is one "
            "pass along rows and one down columns, with no atomics: the same gradients every "
            "time.",
            "No GPU was at hand: these kernels have never run on one, and no GPU number is given.",
            "What holds without one: in Triton's interpreter, outputs and all gradients agree "
            "with the plain functions in float64 to 1e-5 of the largest value in float32 (odd "
            "lengths, Tq < Tk, T = 1, head sizes 16 to 128, gates that fill at once or never, "
            "rows without a survivor), and they compile for both GPUs, here with Triton 3.9.",
            "No forward kernel spills, none that uses wgmma is serialized by ptxas (C7515), and "
            "every loop over tiles loads ahead, but for those of CoPE's band, backward along rows, "
            "and down columns in float32 or with gate keys; the instructions are those of that "
            "loop, by nvdisasm.",
            "TRA's and CoPE's counts are matrix products with a triangle of ones, as a scan had "
            "its own layout: on sm_90 a tile of TRA took 1,163 (forward), 1,131 (rows) and 1,297 "
            "(columns) instructions with it.",
            "On a GPU `python bench.py gpu` tests, repeats and times them beside torch.compile "
            "and scaled_dot_product_attention, in ten minutes.",
            "CoPE's and TRA's backward wait for the GPU once a layer, to learn how many band tiles "
            "there are, so they are kept out of CUDA graphs; meanwhile they hold 8 and 4 bytes for "
            "every row and band tile: .54 and .13 GB a head at T = 65,536 if no count ever fills "
            "and nothing decays. The variants in experiments/ and decoding one token at a time "
            "take the plain way.",
        ]),
}
