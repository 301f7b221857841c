"""experiments: Post-Norm's minimal models."""
import math

import pytest
import torch
from torch.nn import functional as F

from experiments import search
from experiments.variants import minimal
from tests.helpers import close


def test_theorem_entry_has_the_specs_numbers():
    numbers = search.theorem()["models"]
    wanted = dict(none=((10, 2.50, 0.62, 0.32), (0.010, 0.341, 0.978)),
                  output=((10, 5.26, 3.48, 14.03), (0.001, 0.029, 0.0)))
    for norm, (precision, tvd) in wanted.items():
        m = numbers[norm]
        assert [round(m["precision"][n - 2], 2) for n in (2, 8, 32, 63)] == list(precision)
        assert [round(m["tvd"][n - 2], 3) for n in (8, 32, 63)] == list(tvd)
        assert m["formula"] == pytest.approx(m["precision"], abs=1e-6 if norm == "none" else 1e-3)
    assert all(m["ranks"] == [63, 63] for m in numbers.values())  # the least that is possible
    for norm, at_32 in (("post", 0.96), ("pre_final", 2.64)):  # the controls, by their own formulas
        m = numbers[norm]
        assert m["formula"] == pytest.approx(m["precision"], abs=1e-6)
        assert m["precision"][0] == pytest.approx(10)
        assert m["precision"][30] == pytest.approx(at_32, abs=0.01)


@pytest.mark.parametrize("n", [4, 9, 40])
def test_theorem_42_bounds_the_ranks_of_what_is_precise(n):
    """Random ones, in the form of GUIDE.md's section 9, and such as have the least rank."""
    torch.manual_seed(n)
    eye = torch.eye(n, dtype=torch.float64)
    for least in [n, n - 1] * 10:
        r, s, w = torch.randn(3, n, 1, dtype=torch.float64)
        g, b = 0.1 + torch.rand(2, n, 1, dtype=torch.float64)
        if least == n - 1:
            r, w = g / n, 0 * w
            s = (g + b) / n - r
        D, B = r + w.T - g * eye, s - w.T - b * eye
        for tokens in ([1], [0, 2], [2, 0]):
            logits = B[tokens[-1]] + D[tokens].mean(0)
            absent = logits[[t for t in range(n) if t not in tokens]]
            assert absent.std() < 1e-9 and (absent[0] - logits[tokens] > 0).all()
        ranks = [torch.linalg.matrix_rank(matrix).item() for matrix in (D, B + D)]
        assert min(ranks) == least >= n - 1


@pytest.mark.parametrize("norm", ["none", *minimal.SCHEMES])
def test_the_minimal_transformer_is_equation_3(norm):
    torch.manual_seed(0)
    model = minimal.MinimalTransformer(7, 5, 2, 3, norm).double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p))

        def N(x, layer):
            return x / (x.square().mean() + 1e-12).sqrt() * layer.weight

        def weight(query, key):
            return math.exp((query @ model.W_Q) @ (key @ model.W_K))
        tokens = [3, 1, 6, 0]
        for t in range(4):
            xs = [model.E[i] for i in tokens[:t + 1]]
            if norm == "peri_init":
                xs = [N(x, model.first) for x in xs]
            seen = xs
            if norm in ("pre", "pre_final", "peri", "peri_init"):
                seen = [N(x, model.before) for x in xs]
            a = [weight(seen[-1], x) for x in seen]
            y = sum(w / sum(a) * (x @ model.W_V @ model.W_O) for w, x in zip(a, seen))
            if norm in ("output", "peri", "peri_init"):
                y = N(y, model.after)
            x = N(xs[-1] + y, model.after) if norm == "post" else xs[-1] + y
            x = N(x, model.last) if norm in ("pre_final", "peri", "peri_init") else x
            close(model(torch.tensor([tokens]))[0, t], x @ model.U, 1e-10)


@pytest.mark.parametrize("norm", ["none", "pre", "post", "peri"])
def test_max_retrieval_ignores_padding_and_order(norm):
    torch.manual_seed(0)
    model = minimal.MaxRetrieval(norm)
    x = torch.cat((torch.rand(3, 9, 1), F.one_hot(torch.randint(0, 10, (3, 9)), 10)), -1)
    padded = torch.cat((x, torch.full((3, 4, 11), -1.0)), 1)
    with torch.no_grad():
        h = model.before(model.enter(x))
        a = torch.exp(h @ model.q)
        z = (a[..., None] * h).sum(1) / a.sum(1, keepdim=True)
        want = model.leave(model.after(z))
        for got in (model(x), model(padded), model(x[:, torch.randperm(9)])):
            close(got, want, 1e-5)
    assert isinstance(model.before, torch.nn.RMSNorm) == (norm in ("pre", "peri"))
    assert isinstance(model.after, torch.nn.RMSNorm) == (norm in ("post", "peri"))
