"""
Post-Norm can Resharpen Attention

By Zsámboki, Levi, Smith, Kagalwala, Kell, Liechty and Wang (arXiv 2510.08341; its first version
has another title). Random searches over small models (section 5.2), far smaller than the paper's.
The ranges of the hyper-parameters are ours, and what a note says. The GPT's weights start as in
every other file here.
"""
from experiments.variants.minimal import SCHEMES


def set_panels(batch_size, *pairs):
    """Set complement: pairs of n tokens and the length trained on."""
    panels = {}
    for n, T in pairs:
        panels[f"n = {n}, trained on {T}"] = dict(
            data="set_complement", n=n, block_size=T, batch_size=batch_size, longest=n - 1,
            at=(n // 2, n // 2))
    return panels


def exact_panels(batch_size, *pairs):
    """
    The same, trained on the target distribution itself, the mean of the samples that are drawn in
    set_panels: it needs far fewer steps.
    """
    panels = set_panels(batch_size, *pairs)
    return {f"{name}, p* itself": panel | dict(exact=True) for name, panel in panels.items()}


def dyck_panels(batch_size, *kinds):
    """Dyck: kinds of brackets k, greatest depth m, and the length trained on."""
    panels = {}
    for k, m, T in kinds:
        panels[f"k = {k}, m = {m}, trained on {T}"] = dict(
            data="dyck", k=k, m=m, block_size=T, batch_size=batch_size, longest=4 * T,
            at=(T + 1, 4 * T))
    return panels


def tomita_panels(batch_size, T, longest):
    panels = {}
    for n in (3, 7):
        panels[f"Tomita {n}, trained on {T}"] = dict(
            data="tomita", language=n, block_size=T, batch_size=batch_size, longest=longest,
            at=(T + 1, longest))
    return panels


MAX_PANEL = {"trained on 5 to 16": dict(data="max_retrieval", batch_size=128, longest=2**14,
                                        at=(1024, 1024))}
DYCK = dict(trials=25, steps=1000, panels=dyck_panels(32, (2, 3, 32), (8, 3, 32), (2, 5, 32)),
            note="trained on 32 tokens")

ENTRIES = {
    "postnorm_theorem": dict(
        title="Post-Norm, Theorem 4.2: precision of minimal transformers by length, without a "
              "norm, with one on the attention output, and controls: formula, hard-coded, trained",
        metric="precision", schemes=("none", "output", "post", "pre_final"), peak=3e-2,
        theorem=True, cpu=dict(trials=8, steps=20000, panels=exact_panels(16, (64, 2)))),
    "postnorm_fig1": dict(
        title="Post-Norm, Figure 1: set complement by minimal transformers, total variation "
              "distance, dots at length n / 2",
        metric="tvd", schemes=SCHEMES, peak=3e-2,
        cpu=dict(trials=25, steps=20000, panels=set_panels(32, (16, 1), (16, 2))
                 | exact_panels(16, (16, 1), (16, 2), (64, 2), (64, 8)))),
    "postnorm_ssmax": dict(
        title="Sharper attention instead of a norm? Set complement, trained on up to 8 tokens, "
              "total variation distance; no paper has this figure",
        runs="postnorm_fig1", metric="tvd", schemes=("pre_final", "ssmax", "output", "peri"),
        peak=3e-2, cpu=dict(trials=25, steps=20000, panels=exact_panels(16, (64, 8)))),
    "postnorm_bema": dict(
        title="Post-Norm, section 4.5: does BEMA help where labels are noise? Set complement, the "
              "label one sample of the answer's distribution, total variation distance; no figure "
              "of the paper has EMA beside it",
        metric="tvd", schemes=("pre", "pre_final", "peri"), peak=3e-2, ema=True,
        cpu=dict(trials=25, steps=100000, panels=set_panels(32, (16, 4)))),
    "postnorm_fig2": dict(
        title="Post-Norm, Figure 2: max retrieval, accuracy, dots at 1,024 items",
        metric="accuracy", schemes=("none", "pre", "post", "peri"),
        cpu=dict(trials=8, steps=2000, panels=MAX_PANEL)),
    "postnorm_fig3": dict(
        title="Post-Norm, Figure 3: bounded Dyck languages, total variation distance, dots beyond "
              "the training length",
        metric="tvd", metrics=("tvd", "auc"), schemes=SCHEMES, cpu=DYCK),
    "postnorm_fig4": dict(
        title="Post-Norm, Figure 4: Tomita languages, ROC AUC of the token that may be illegal, "
              "dots beyond the training length",
        metric="auc", schemes=SCHEMES,
        cpu=dict(trials=25, steps=1000, panels=tomita_panels(16, 32, 147),
                 note="trained on 32 tokens and measured to 147")),
    "postnorm_fig7": dict(
        title="Post-Norm, Figure 7: bounded Dyck languages, ROC AUC of the end, dots beyond the "
              "training length",
        runs="postnorm_fig3", metric="auc", metrics=("tvd", "auc"), schemes=SCHEMES, cpu=DYCK),
}
