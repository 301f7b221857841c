"""The encoder: attention both ways, padding, masked tokens, and what it refuses."""
import itertools
import math

import numpy as np
import pytest
import torch

import encoders.mlm
from common.attention import attention_inputs
from encoders import bert
from tests.helpers import ENCODERS, N, close, make, mlp_by_hand, rng, turned


def naive_encoder_attention(q, k, v, real, S, g):
    """One query, one key at a time."""
    B, H, T, d = q.shape
    y = torch.zeros_like(v)
    for b, h, i in itertools.product(range(B), range(H), range(T)):
        weights = []
        for j in range(T):
            logit = q[b, h, i] @ k[b, h, j] / math.sqrt(d)
            if S is not None:
                logit -= g[b % len(g), h, i] * abs(S[b % len(S), h, i] - S[b % len(S), h, j])
            weights.append(logit.exp() if real is None or real[b, j] else 0)
        for j in range(T):
            y[b, h, i] += weights[j] / sum(weights) * v[b, h, j]
    return y


@pytest.mark.parametrize("name", ENCODERS)
@torch.no_grad()
def test_an_encoder_attends_both_ways(name, monkeypatch):
    """literal and what runs, on the model's own arguments, with padding and without."""
    model = make(name).double()
    for padded in (0, 2):
        idx = torch.randint(1, 61, (2, 7))
        idx[1, 7 - padded:] = 0
        with attention_inputs(model) as calls:
            model(idx)
        for q, k, v, real, S, g in calls:
            assert (real is None) == (padded == 0)
            assert (S is None) == (name not in ("bert_cable", "bert_alibi"))
            want = naive_encoder_attention(q, k, v, real, S, g)
            y, parts = bert.literal(q, k, v, real, S, g)
            close(y, want, 1e-12)
            for rows in (64, 2):
                monkeypatch.setattr(bert, "ROWS", rows)
                close(bert.bert_attention(q, k, v, real, S, g), want, 1e-6)  # S is float32
            assert parts["attention"].shape == (2, 4, 7, 7)


@pytest.mark.parametrize("name", ENCODERS)
@torch.no_grad()
def test_an_encoder_by_hand(name):
    """From tokens to a vector, by the weights alone."""
    model, idx = make(name).double(), torch.randint(1, 61, (7,))
    C, H, T, pe = 32, 4, 7, name.removeprefix("bert_")
    pos = torch.arange(T, dtype=torch.float64)
    x = model.wte.weight[idx]
    if pe == "learned":
        x = x + model.wpe.weight[:T]
    x = x * math.sqrt(C)
    if pe == "sinusoidal":
        for t, c in np.ndindex(T, C):
            wave = math.cos if c % 2 else math.sin
            x[t, c] += wave(t / 10000 ** (c // 2 * 2 / C))
    for block in model.h:
        attn, n = block.attn, N(x, block.ln_1, 1e-6)
        q, k, v = (n @ attn.c_attn.weight.T).view(1, T, 3, H, C // H).permute(2, 0, 3, 1, 4)
        S = g = None
        if pe == "rope":
            q, k = turned(q, range(T)), turned(k, range(T))
        if pe == "alibi":
            S = pos.expand(1, H, T)
            g = torch.tensor([1 / 4, 1 / 16, 1 / 64, 1 / 256])[None, :, None].expand(1, H, T)
        if pe == "cable":
            step = (n @ attn.w_c.weight.T + attn.w_c.bias).clamp(min=0)
            S = step.T.cumsum(-1)[None]
            g = (n @ attn.w_s.weight.T + attn.w_s.bias).exp().add(1).log().T[None]
        y = naive_encoder_attention(q, k, v, None, S, g)
        x = x + y.transpose(1, 2).reshape(T, C) @ attn.c_proj.weight.T
        x = x + mlp_by_hand(N(x, block.ln_2, 1e-6), block.mlp)
    x = N(x, model.ln_f, 1e-6)
    score = (x @ model.w_p.weight[0]).exp()
    mean = sum(s * state for s, state in zip(score, x)) / score.sum()
    assert score.max() > 1.2 * score.min()
    close(model.embed(idx[None])[0], mean / mean.norm(), 1e-5)


@pytest.mark.parametrize("name", ENCODERS)
@torch.no_grad()
def test_padding_changes_nothing(name):
    """Vectors and gradients of a batch are those of its texts one by one, however far padded."""
    model = make(name).double()
    texts = [torch.randint(1, 61, (n,)) for n in (1, 5, 13, 20)]
    idx = torch.zeros(4, 24, dtype=torch.long)
    for row, text in zip(idx, texts):
        row[:len(text)] = text
    for row, text in zip(model.embed(idx), texts):
        close(row, model.embed(text[None])[0], 1e-6)
    assert (model.embed(idx).norm(dim=1) - 1).abs().max() < 1e-6
    with torch.enable_grad():  # of a text without tokens too, no NaN
        model.embed(torch.cat((idx, 0 * idx[:1]))).sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_masked_tokens_are_scored_alone():
    model = make("bert_cable").double()
    idx, targets = torch.randint(1, 61, (2, 9)), torch.full((2, 9), -1)
    targets[0, 3], targets[1, 7] = 5, 6
    full, nothing = model(idx)
    logits, loss = model(idx, targets)
    assert nothing is None and logits.shape == (2, 61)
    close(logits, full[[0, 1], [3, 7]], 1e-12)
    want = -(full[0, 3].log_softmax(-1)[5] + full[1, 7].log_softmax(-1)[6]) / 2
    close(loss, want, 1e-6)
    assert model(idx, torch.full((2, 9), -1))[1] == 0


def test_the_share_of_masked_tokens(library):
    """15 % of the tokens, at every position alike; of them 80 % masked, 10 % another, 10 % kept."""
    task = encoders.mlm.Task(corpus=str(library / "library"), tokenizer="bytes", block_size=40)
    x, y = task.batch("train", 4000, rng(0))
    told = y != -1
    assert (told.sum(1) == 6).all() and (x[~told] > encoders.mlm.UNK).all()
    by_position = told.sum(0)
    chi2 = ((by_position - 600) ** 2 / 600).sum() / (1 - 0.15)
    assert chi2 < 39 + 5 * math.sqrt(2 * 39)
    masked, kept = x == encoders.mlm.MASK, told & (x == y)
    other = 0.1 * (1 - 1 / (task.vocab_size - 3))  # another token may be the same one
    for share, want in ((masked[told].mean(), 0.8), (kept[told].mean(), 0.2 - other)):
        assert abs(share - want) < 5 * math.sqrt(want * (1 - want) / told.sum())
    assert (x[told & ~masked] > encoders.mlm.UNK).all()


def test_the_vocabulary_is_the_commonest_tokens(library):
    task = encoders.mlm.Task(corpus=str(library / "library"), tokenizer="bytes", max_vocab=5)
    counts = np.bincount(task.text.streams["train"])
    commonest = sorted(range(len(counts)), key=lambda t: (-counts[t], t))[:5]
    assert task.vocab_size == 8 and task.kept["vocabulary"].tolist() == commonest
    assert [task.table[t] for t in commonest] == [3, 4, 5, 6, 7]
    assert task.table[255] == encoders.mlm.UNK
