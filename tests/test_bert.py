"""The encoder: attention both ways, padding, masked tokens."""
import math

import numpy as np
import pytest
import torch

import lab.bert.mlm
from common.attention import attention_inputs
from lab.bert import bert
from tests.helpers import ENCODERS, N, close, make, mlp_by_hand, rng, turned


def naive_encoder_attention(q, k, v, real, S, g):
    """One query at a time."""
    y = torch.zeros_like(v)
    for b, h, i in np.ndindex(*q.shape[:3]):
        logit = k[b, h] @ q[b, h, i] / math.sqrt(q.size(3))
        if S is not None:
            S_, g_ = S[b % len(S), h], g[b % len(g), h]
            logit = logit - g_[i] * (S_[i] - S_).abs()
        weights = logit.exp() if real is None else logit.exp() * real[b]
        y[b, h, i] = weights @ v[b, h] / weights.sum()
    return y


@pytest.mark.parametrize("name", ENCODERS)
@torch.no_grad()
def test_an_encoder_by_hand(name, monkeypatch):
    """
    From tokens to a vector, by the weights alone; literal, what runs, and what runs in blocks, on
    the model's own arguments; of a text with padding the vector is that of it alone.
    """
    model = make(name).double()
    idx = torch.randint(1, 61, (7,))
    C, H, T = 32, 4, 7
    pe = name.removeprefix("bert_")
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
        attn = block.attn
        n = N(x, block.ln_1, 1e-6)
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
    mean = score @ x / score.sum()
    assert score.max() > 1.2 * score.min()
    close(model.embed(idx[None])[0], mean / mean.norm(), 1e-5)

    both = torch.randint(1, 61, (2, 20))
    both[1, :7] = idx
    both[1, 7:] = 0
    with attention_inputs(model) as calls:
        close(model.embed(both)[1], mean / mean.norm(), 1e-5)
    for args in calls:
        want = naive_encoder_attention(*args)
        close(bert.literal(*args)[0], want, 1e-12)
        for rows in (64, 2):
            monkeypatch.setattr(bert, "ROWS", rows)
            close(bert.bert_attention(*args), want, 1e-6)  # S is float32


def test_an_empty_text_has_gradients():
    model = make("bert_cable")
    model.embed(torch.tensor([[5, 7, 0], [0, 0, 0]])).sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_masked_tokens_are_scored_alone():
    model = make("bert_cable").double()
    idx = torch.randint(1, 61, (2, 9))
    targets = torch.full((2, 9), -1)
    targets[0, 3] = 5
    targets[1, 7] = 6
    full, nothing = model(idx)
    logits, loss = model(idx, targets)
    assert nothing is None
    close(logits, full[[0, 1], [3, 7]], 1e-12)
    want = -(full[0, 3].log_softmax(-1)[5] + full[1, 7].log_softmax(-1)[6]) / 2
    close(loss, want, 1e-6)
    assert model(idx, torch.full((2, 9), -1))[1] == 0


def test_which_tokens_are_masked(library):
    """
    15 % of the tokens, at every position alike; of them 80 % masked, 10 % another, 10 % kept. The
    vocabulary is the commonest tokens.
    """
    task = lab.bert.mlm.Task(corpus=str(library / "library"), tokenizer="bytes", block_size=40)
    x, y = task.batch("train", 4000, rng(0))
    told = y != -1
    assert (told.sum(1) == 6).all() and (x[~told] > lab.bert.mlm.UNK).all()
    chi2 = ((told.sum(0) - 600) ** 2 / 600).sum() / (1 - 0.15)
    assert chi2 < 39 + 5 * math.sqrt(2 * 39)
    masked = x == lab.bert.mlm.MASK
    kept = told & (x == y)
    other = 0.1 * (1 - 1 / (task.vocab_size - 3))  # another token may be the same one
    for share, want in ((masked[told].mean(), 0.8), (kept[told].mean(), 0.2 - other)):
        assert abs(share - want) < 5 * math.sqrt(want * (1 - want) / told.sum())
    counts = np.bincount(task.text.streams["train"])
    order = sorted(np.flatnonzero(counts), key=lambda t: (-counts[t], t))
    assert [task.table[t] for t in order] == list(range(3, task.vocab_size))
    assert task.table[255] == lab.bert.mlm.UNK
