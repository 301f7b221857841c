"""
Post-Norm can Resharpen Attention

By Zsámboki, Levi, Smith, Kagalwala, Kell, Liechty and Wang (arXiv 2510.08341; its first version
has another title). Random searches over small models (section 5.2), far smaller than the paper's.
The ranges of the hyper-parameters are ours, and what a note says. The GPT's weights start as in
every other file here. The panels of both scales are in papers.json: p* itself is trained on the
target distribution, the mean of the samples that the others draw, and needs far fewer steps.
"""
from model_postnorm import SCHEMES

ENTRIES = {
    "postnorm_theorem": dict(
        title="Post-Norm, Theorem 4.2: precision of minimal transformers by length, without a "
              "norm, with one on the attention output, and controls: formula, hard-coded, trained",
        metric="precision", schemes=("none", "output", "post", "pre_final"), peak=3e-2,
        theorem=True),
    "postnorm_fig1": dict(
        title="Post-Norm, Figure 1: set complement by minimal transformers, total variation "
              "distance, dots at length n / 2",
        metric="tvd", schemes=SCHEMES, peak=3e-2),
    "postnorm_ssmax": dict(
        title="Sharper attention instead of a norm? Set complement, trained on up to 8 tokens, "
              "total variation distance; no paper has this figure",
        runs="postnorm_fig1", metric="tvd", schemes=("pre_final", "ssmax", "output", "peri"),
        peak=3e-2),
    "postnorm_bema": dict(
        title="Post-Norm, section 4.5: does BEMA help where labels are noise? Set complement, the "
              "label one sample of the answer's distribution, total variation distance; no figure "
              "of the paper has EMA beside it",
        metric="tvd", schemes=("pre", "pre_final", "peri"), peak=3e-2, ema=True),
    "postnorm_fig2": dict(
        title="Post-Norm, Figure 2: max retrieval, accuracy, dots at 1,024 items",
        metric="accuracy", schemes=("none", "pre", "post", "peri")),
    "postnorm_fig3": dict(
        title="Post-Norm, Figure 3: bounded Dyck languages, total variation distance, dots beyond "
              "the training length",
        metric="tvd", metrics=("tvd", "auc"), schemes=SCHEMES),
    "postnorm_fig4": dict(
        title="Post-Norm, Figure 4: Tomita languages, ROC AUC of the token that may be illegal, "
              "dots beyond the training length",
        metric="auc", schemes=SCHEMES),
    "postnorm_fig7": dict(
        title="Post-Norm, Figure 7: bounded Dyck languages, ROC AUC of the end, dots beyond the "
              "training length",
        runs="postnorm_fig3", metric="auc", metrics=("tvd", "auc"), schemes=SCHEMES),
}
