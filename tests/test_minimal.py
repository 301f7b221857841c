"""lab: Post-Norm's minimal models."""
import pytest
import torch
from torch.nn import functional as F

from lab import search
from lab.variants import minimal
from tests.helpers import N, close


def test_theorem_entry_has_the_specs_numbers():
    numbers = search.theorem()["models"]
    for norm, precision in (("none", (10, 2.50, 0.625, 0.32)), ("output", (10, 5.26, 3.48, 14.03))):
        got = [numbers[norm]["precision"][n - 2] for n in (2, 8, 32, 63)]
        assert got == pytest.approx(precision, abs=0.005)
    for norm, m in numbers.items():
        assert m["formula"] == pytest.approx(m["precision"], abs=1e-3 if norm == "output" else 1e-6)
        assert m["ranks"] == [63, 63]  # the least that is possible


@pytest.mark.parametrize("norm", ["none", *minimal.SCHEMES])
def test_the_minimal_transformer_is_equation_3(norm):
    torch.manual_seed(0)
    model = minimal.MinimalTransformer(7, 5, 2, 3, norm).double()
    for p in model.parameters():
        torch.nn.init.normal_(p)
    xs = model.E[[3, 1, 6, 0]]
    if norm == "peri_init":
        xs = N(xs, model.first, 1e-12)
    seen = N(xs, model.before, 1e-12) if norm in ("pre", "pre_final", "peri", "peri_init") else xs
    for t in range(4):
        query = seen[t] @ model.W_Q
        a = [(query @ (x @ model.W_K)).exp() for x in seen[:t + 1]]
        y = sum(w / sum(a) * (x @ model.W_V @ model.W_O) for w, x in zip(a, seen))
        if norm in ("output", "peri", "peri_init"):
            y = N(y, model.after, 1e-12)
        x = N(xs[t] + y, model.after, 1e-12) if norm == "post" else xs[t] + y
        x = N(x, model.last, 1e-12) if norm in ("pre_final", "peri", "peri_init") else x
        close(model(torch.tensor([[3, 1, 6, 0]]))[0, t], x @ model.U, 1e-10)


@pytest.mark.parametrize("norm", ["none", "pre", "post", "peri"])
def test_max_retrieval_is_a_weighted_mean_that_ignores_padding(norm):
    torch.manual_seed(0)
    model = minimal.MaxRetrieval(norm)
    x = torch.cat((torch.rand(3, 9, 1), F.one_hot(torch.randint(0, 10, (3, 9)), 10)), -1)
    padded = torch.cat((x, torch.full((3, 4, 11), -1.0)), 1)
    h = model.enter(x)
    if norm in ("pre", "peri"):
        h = F.rms_norm(h, h.shape[-1:], eps=1e-8)
    z = ((h @ model.q).softmax(-1)[..., None] * h).sum(1)
    if norm in ("post", "peri"):
        z = F.rms_norm(z, z.shape[-1:], eps=1e-8)
    for got in (model(x), model(padded)):
        close(got, model.leave(z), 1e-5)
