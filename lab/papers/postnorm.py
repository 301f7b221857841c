"""
Post-Norm can Resharpen Attention

By Zsámboki, Levi, Smith, Kagalwala, Kell, Liechty and Wang (arXiv 2510.08341; its first version
has another title). Random searches over small models (section 5.2), far smaller than the paper's.
The ranges of the hyper-parameters are ours, and what a note says. The GPT's weights start as in
every other file here. A panel with "p* itself" is trained on the target distribution, the mean of
the samples that the others draw, and needs far fewer steps.
"""
SCHEMES = "pre", "pre_final", "output", "post", "peri", "peri_init"  # those of model_postnorm.py


def set_panels(shapes, batch_size, **exact):
    """Set complement, measured up to n - 1 tokens; the dots are at n / 2."""
    words = ", p* itself" if exact else ""
    return {f"n = {n}, trained on {T}{words}": dict(
        data="set_complement", n=n, block_size=T, batch_size=batch_size, longest=n - 1,
        at=[n // 2, n // 2], **exact) for n, T in shapes}


def dyck_panels(shapes, batch_size):
    return {f"k = {k}, m = {m}, trained on {T}": dict(
        data="dyck", k=k, m=m, block_size=T, batch_size=batch_size, longest=4 * T,
        at=[T + 1, 4 * T]) for k, m, T in shapes}


def tomita_panels(block_size, batch_size, longest):
    return {f"Tomita {language}, trained on {block_size}": dict(
        data="tomita", language=language, block_size=block_size, batch_size=batch_size,
        longest=longest, at=[block_size + 1, longest]) for language in (3, 7)}


MAXIMUM = {"trained on 5 to 16": dict(
    data="max_retrieval", batch_size=128, longest=16384, at=[1024, 1024])}

ENTRIES = {
    "postnorm_theorem": dict(
        title="Post-Norm, Theorem 4.2: precision of minimal transformers by length, without a "
              "norm, with one on the attention output, and controls: formula, hard-coded, trained",
        metric="precision", schemes=("none", "output", "post", "pre_final"),
        cpu=dict(theorem=True, trials=8, steps=20000,
                 panels=set_panels([(64, 2)], 16, exact=True)),
        paper=dict(note="all sizes are ours; trained on samples, the small runs on the "
                        "distribution itself",
                   trials=25, steps=100000, panels=set_panels([(64, 2)], 32))),
    "postnorm_fig1": dict(
        title="Post-Norm, Figure 1: set complement by minimal transformers, total variation "
              "distance, dots at length n / 2",
        metric="tvd", schemes=SCHEMES,
        cpu=dict(trials=25, steps=20000, panels=set_panels([(16, 1), (16, 2)], 32) | set_panels(
            [(16, 1), (16, 2), (64, 2), (64, 8)], 16, exact=True)),
        paper=dict(note="the paper's four schemes and steps; trials (25), n, batch and length are "
                        "ours",
                   trials=25, steps=1000000, schemes=("pre", "post", "peri", "peri_init"),
                   compile=True, panels=set_panels([(16, 2)], 32))),
    "postnorm_bema": dict(
        title="Post-Norm, section 4.5: does BEMA help where labels are noise? Set complement, the "
              "label one sample of the answer's distribution, total variation distance; no figure "
              "of the paper has EMA beside it",
        metric="tvd", schemes=("pre", "pre_final", "peri"), ema=True,
        cpu=dict(trials=25, steps=100000, panels=set_panels([(16, 4)], 32)),
        paper=dict(note="the paper's steps; trials (25), n, batch and length are ours",
                   trials=25, steps=1000000, compile=True, panels=set_panels([(16, 4)], 32))),
    "postnorm_fig2": dict(
        title="Post-Norm, Figure 2: max retrieval, accuracy, dots at 1,024 items",
        metric="accuracy", schemes=("none", "pre", "post", "peri"),
        cpu=dict(trials=8, steps=2000, panels=MAXIMUM),
        paper=dict(note="the paper's steps and batch; 4 trials of its 100; width, number of "
                        "classes, GELU and the lengths read are ours",
                   trials=4, steps=100000, compile=True, panels=MAXIMUM)),
    "postnorm_fig3": dict(
        title="Post-Norm, Figure 3: bounded Dyck languages, total variation distance, dots beyond "
              "the training length",
        metric="tvd", schemes=SCHEMES,
        cpu=dict(note="trained on 32 tokens", trials=25, steps=1000, panels=dyck_panels(
            [(2, 3, 32), (8, 3, 32), (2, 5, 32)], 32)),
        paper=dict(note="k, m and the lengths are ours", trials=100, steps=100000,
                   panels=dyck_panels([(2, 3, 64), (8, 3, 64), (2, 5, 128), (8, 5, 128)], 64))),
    "postnorm_fig4": dict(
        title="Post-Norm, Figure 4: Tomita languages, ROC AUC of the token that may be illegal, "
              "dots beyond the training length",
        metric="auc", schemes=SCHEMES,
        cpu=dict(note="trained on 32 tokens and measured to 147", trials=25, steps=1000,
                 panels=tomita_panels(32, 16, 147)),
        paper=dict(note="the model, steps, trials, batch, the training length and how likely a "
                        "string is to go on are ours",
                   trials=100, steps=100000, panels=tomita_panels(100, 64, 460))),
}
ENTRIES["postnorm_fig7"] = ENTRIES["postnorm_fig3"] | dict(
    title="Post-Norm, Figure 7: bounded Dyck languages, ROC AUC of the end, dots beyond the "
          "training length",
    runs="postnorm_fig3", metric="auc")
ENTRIES["postnorm_ssmax"] = dict(
    title="Sharper attention instead of a norm? Set complement, trained on up to 8 tokens, total "
          "variation distance; no paper has this figure",
    metric="tvd", runs="postnorm_fig1", schemes=("pre_final", "ssmax", "output", "peri"),
    cpu=dict(trials=25, steps=20000, panels=set_panels([(64, 8)], 16, exact=True)))
