"""The encoder: bidirectional attention, masked tokens."""
import itertools
import json
import math
import re

import numpy as np
import pytest
import torch

import data
import data.mlm
import data.text
import model_bert
import runs
from tests.helpers import (
    ENCODER_FLAGS,
    ENCODERS,
    ROOT,
    N,
    close,
    command,
    complaint,
    encoder,
    mlp_by_hand,
    python,
    rng,
)


def naive_encoder_attention(q, k, v, real, S, g):
    """One query, one key, one number at a time."""
    B, H, T, d = q.shape
    y = torch.zeros_like(v)
    for b, h, i in itertools.product(range(B), range(H), range(T)):
        weights = []
        for j in range(T):
            logit = sum(q[b, h, i, n] * k[b, h, j, n] for n in range(d)) / math.sqrt(d)
            if S is not None:
                logit -= g[b % len(g), h, i] * abs(S[b % len(S), h, i] - S[b % len(S), h, j])
            weights.append(logit.exp() if real is None or real[b, j] else 0)
        for j in range(T):
            y[b, h, i] += weights[j] / sum(weights) * v[b, h, j]
    return y


@pytest.mark.parametrize("rows", [64, 2])
@pytest.mark.parametrize("name", ENCODERS)
@torch.no_grad()
def test_an_encoder_attends_both_ways(name, rows, monkeypatch):
    """literal and what runs, on the model's own arguments, with padding and without."""
    monkeypatch.setattr(model_bert, "ROWS", rows)
    model = encoder(name)
    for padded in (0, 2):
        idx = torch.randint(1, 61, (2, 7))
        idx[1, 7 - padded:] = 0
        with runs.spy(model) as calls:
            model(idx)
        for q, k, v, real, S, g in calls:
            assert (real is None) == (padded == 0)
            assert (S is None) == (name not in ("bert_cable", "bert_alibi"))
            want = naive_encoder_attention(q, k, v, real, S, g)
            y, parts = model_bert.literal(q, k, v, real, S, g)
            close(y, want, 1e-12)
            close(model_bert.bert_attention(q, k, v, real, S, g), want, 1e-6)  # S is float32
            assert parts["attention"].shape == (2, 4, 7, 7)


@pytest.mark.parametrize("name", ENCODERS)
@torch.no_grad()
def test_an_encoder_by_hand(name):
    """From tokens to a vector, by the weights alone."""
    model, idx = encoder(name), torch.randint(1, 61, (7,))
    C, H, T, pe = 32, 4, 7, name.removeprefix("bert_")
    pos = torch.arange(T, dtype=torch.float64)
    x = model.wte.weight[idx]
    if pe == "learned":
        x = x + model.wpe.weight[:T]
    x = x * math.sqrt(C)
    if pe == "sinusoidal":
        waves = [(math.sin, math.cos)[c % 2] for c in range(C)]
        sines = [[wave(p / 10000 ** (c // 2 * 2 / C)) for c, wave in enumerate(waves)]
                 for p in range(T)]
        x = x + torch.tensor(sines, dtype=torch.float64)
    for block in model.h:
        attn, n = block.attn, N(x, block.ln_1, 1e-6)
        q, k, v = (n @ attn.c_attn.weight.T).view(1, T, 3, H, C // H).permute(2, 0, 3, 1, 4)
        S = g = None
        if pe == "rope":  # channels c and c + 4 are a pair
            turn = torch.exp(1j * pos[:, None] * 10000.0 ** (-torch.arange(4) / 4))
            q, k = ((torch.complex(z[..., :4], z[..., 4:]) * turn) for z in (q, k))
            q, k = (torch.cat((z.real, z.imag), -1) for z in (q, k))
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
    model.w_p.weight.zero_()
    close(model.embed(idx[None])[0], x.mean(0) / x.mean(0).norm(), 1e-5)
    fresh = runs.make_model(dict(model=name))
    assert fresh.h[0].mlp.c_proj.weight.std().item() == pytest.approx(0.02 / 8 ** .5, rel=0.05)


@pytest.mark.parametrize("name", ENCODERS)
@torch.no_grad()
def test_padding_changes_nothing(name):
    """Vectors and gradients of a batch are those of its texts one by one, however far padded."""
    model = encoder(name)
    texts = [torch.randint(1, 61, (n,)) for n in (1, 5, 13, 20)]
    idx = torch.zeros(4, 24, dtype=torch.long)
    for row, text in zip(idx, texts):
        row[:len(text)] = text
    for width in (20, 24):
        for row, text in zip(model.embed(idx[:, :width]), texts):
            close(row, model.embed(text[None])[0], 1e-6)
    assert (model.embed(idx).norm(dim=1) - 1).abs().max() < 1e-6
    empty = model.embed(torch.zeros(1, 5, dtype=torch.long))
    assert torch.equal(empty, torch.zeros_like(empty))
    with torch.enable_grad():  # of a text without tokens too, no NaN
        model.embed(torch.cat((idx, 0 * idx[:1]))).sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_masked_tokens_are_scored_alone():
    model = encoder("bert_cable")
    idx, targets = torch.randint(1, 61, (2, 9)), torch.full((2, 9), -1)
    targets[0, 3], targets[1, 7] = 5, 6
    full, nothing = model(idx)
    logits, loss = model(idx, targets)
    assert nothing is None and logits.shape == (2, 61)
    close(logits, full[[0, 1], [3, 7]], 1e-12)
    want = -(full[0, 3].log_softmax(-1)[5] + full[1, 7].log_softmax(-1)[6]) / 2
    close(loss, want, 1e-6)
    assert model(idx, torch.full((2, 9), -1))[1] == 0


@pytest.mark.slow
@pytest.mark.parametrize("pe", [one["pe"] for one in model_bert.VARIANTS.values()])
def test_an_encoder_reads_16384_tokens(pe):
    """In less than 1.5 GB, torch and all."""
    code = f"""if True:
        import torch, model_bert, runs
        torch.set_num_threads(1)
        model = model_bert.GPT(model_bert.GPTConfig(pe="{pe}", block_size=16384))
        with torch.no_grad():
            model.embed(torch.randint(1, 8195, (1, 16384)))
        print(runs.peak_memory(torch.device("cpu")))"""
    peak = python(code, ROOT)
    assert float(peak) < 1.5


def test_the_share_of_masked_tokens(library):
    """15 % of the tokens, at every position alike; of them 80 % masked, 10 % another, 10 % kept."""
    task = data.mlm.Task(corpus=str(library / "library"), tokenizer="bytes", block_size=40)
    x, y = task.batch("train", 4000, rng(0))
    told = y != -1
    assert (told.sum(1) == 6).all() and (x[~told] > data.text.UNK).all()
    by_position = told.sum(0)
    chi2 = ((by_position - 600) ** 2 / 600).sum() / (1 - 0.15)
    assert chi2 < 39 + 5 * math.sqrt(2 * 39)
    masked, kept = x == data.text.MASK, told & (x == y)
    other = 0.1 * (1 - 1 / (task.vocab_size - 3))  # another token may be the same one
    for share, want in ((masked[told].mean(), 0.8), (kept[told].mean(), 0.2 - other)):
        assert abs(share - want) < 5 * math.sqrt(want * (1 - want) / told.sum())
    assert (x[told & ~masked] > data.text.UNK).all()


def test_masked_windows_stay_in_their_document(tmp_path, monkeypatch):
    monkeypatch.setattr(data.text, "PREPARED", tmp_path / "prepared")
    (tmp_path / "notes").mkdir()
    for n in range(12):  # every document has a byte of its own
        (tmp_path / "notes" / f"{n}.txt").write_text(chr(97 + n) * (7 + 9 * n))
    task = data.mlm.Task(corpus=str(tmp_path / "notes"), tokenizer="bytes", block_size=30)
    windows = task.windows("train", 500, rng(0))
    for row in windows:
        real = row[row != data.text.PAD]
        assert len(set(real)) == 1 and (row[len(real):] == data.text.PAD).all() and len(real)
    assert (windows == data.text.PAD).any() and (windows != data.text.PAD).all(1).any()


def test_masked_windows_begin_anywhere_and_long_documents_have_more(tmp_path, monkeypatch):
    monkeypatch.setattr(data.text, "PREPARED", tmp_path / "prepared")
    (tmp_path / "notes").mkdir()
    for n in range(20):  # half of them 10 times as long, where a token is its place
        text = "".join(map(chr, range(32, 122))) if n % 2 else 9 * "~"
        (tmp_path / "notes" / f"{n}.txt").write_text(text)
    task = data.mlm.Task(corpus=str(tmp_path / "notes"), tokenizer="bytes", block_size=10)
    names = np.asarray(task.kept["vocabulary"])
    first = names[task.windows("train", 2000, rng(0))[:, 0] - data.text.UNK - 1]
    long, lengths = first != ord("~"), task.documents["train"][1]
    assert abs(long.mean() - (lengths == 90).sum() * 90 / lengths.sum()) < 0.05
    assert len(set(first[long].tolist())) == 81  # all places of a whole window


def test_the_vocabulary_is_the_commonest_tokens(library):
    task = data.mlm.Task(corpus=str(library / "library"), tokenizer="bytes", max_vocab=5)
    stream = task.text.tokens("train")
    common = [token for token, _ in sorted(
        ((t, (stream == t).sum()) for t in set(stream.tolist())), key=lambda p: (-p[1], p[0]))[:5]]
    assert task.vocab_size == 8 and task.kept["vocabulary"].tolist() == common
    assert [task.table[t] for t in common] == [3, 4, 5, 6, 7]
    assert task.table[255] == data.text.UNK
    task.adopt(dict(vocabulary=torch.tensor([9, 8])))  # a checkpoint's goes before
    assert task.vocab_size == 5 and task.table[8] == 4
    for wrong in ([-1], [70000], []):
        with pytest.raises(ValueError, match="vocabulary"):
            task.adopt(dict(vocabulary=torch.tensor(wrong, dtype=torch.long)))


def test_what_an_encoder_refuses(library, trained):
    common = *ENCODER_FLAGS, "--max_iters", 1, "--no-evaluate"
    command(library, "train.py", "--data", "mlm", *common, "--out_dir", "m")
    command(library, "train.py", "--data", "retrieval", "--model", "bert_learned", *common,
            "--query_size", 16, "--out_dir", "r")
    start = "train.py", "--data", "retrieval", "--query_size", 16, *common
    (library / "empty").mkdir()
    for words, said in (
            ((*start, "--model", "cable"), "retrieval needs an encoder, which reads both ways"),
            (("train.py", "--model", "bert_rope", "--data", "library"), "needs a causal model"),
            ((*start, "--batch_size", 1), "needs a --batch_size of at least 2 for each"),
            ((*start, "--init_from", "m", "--n_embd", 32), "its n_embd is 16, the new run's 32"),
            ((*start, "--init_from", "m", "--model", "bert_rope"), "its model is bert_cable, "),
            ((*start, "--init_from", "gone"), "no checkpoint at gone"),
            ((*start, "--init_from", trained / "cable"), "its model is cable, the new run's bert_"),
            ((*start, "--temperature", 0), "temperature=0.0 must be more than 0"),
            (("sample.py", "r"), "is an encoder, which writes no text"),
            (("sample.py", "r", "--prompt", "", "--data", "library"), "the prompt is empty: a"),
            (("sample.py", "r", "--prompt", " \n ", "--data", "library"), "the prompt is empty: a"),
            (("sample.py", "r", "--prompt", "x", "--data", "empty"), "has no text in it"),
            (("sample.py", "r", "--prompt", "x", "--data", "gone"), "no such corpus"),
            (("sample.py", "m", "--prompt", "x", "--data", "library"),
             "pairs first: train.py --model bert_cable --init_from m ..."),
            (("sample.py", "r", "--prompt", "\ufeff\xa0", "--data", "library"), "is empty: a"),
            (("sample.py", trained / "cable", "--data", "library"), "--data is for encoders"),
            (("maps.py", "attention", "m"), "is an encoder, which sees later tokens, too"),
            (("eval.py", "r", "--sequences", 3), "--sequences is for a synthetic task"),
            (("eval.py", "m", "--queries", 3), "--queries is for a search")):
        assert said in complaint(library, *words), words
    out, err = command(library, "sample.py", "r", "--prompt", "x", "--data", "library")
    assert len(out.splitlines()) == 10
    assert re.search("learned positions end at .*\n.* files are ranked by their first 32 tok", err)
    out, _ = command(library, "eval.py", "r", "--lengths", 32, 512)  # windows can be read
    assert re.search(r"\nwhole +\S+ ± \S+ +-\n", out)
    assert re.search(r"\nwindows( +\d\S+ ± \S+){2}\n", out)
    (library / "one").mkdir()
    (library / "one" / "a.py").write_text("x = 1\n")
    (library / "short").mkdir()
    for n in range(9):
        (library / "short" / f"{n}.py").write_text(f"x = {n}\n")
    (library / "few").mkdir()
    for n in range(14):  # one in val, and all that is asked is of it
        (library / "few" / f"{n}.py").write_text("\n".join(
            f'def f_{n}_{k}():\n    """Say the word {k} of the file {n}."""\n    return {k}\n'
            for k in range(2)))
    for folder, said in (("empty", "has no text in it"), ("one", "has too few documents"),
                         ("short", "has too few pairs of query and document"),
                         ("few", "has a single document to search in its test split")):
        assert said in complaint(library, *start, "--corpus", folder)
    (library / "library" / "0.py").write_text("changed = 1\n")
    assert "is not what r" in complaint(library, "eval.py", "r")
    command(library, "eval.py", "r", "--data", "library", "--lengths", 32)  # named: all the same
    found = json.loads((library / "r" / "eval.json").read_text())
    assert found["data"]["corpus"] == str(library / "library")
    assert "no such corpus" in complaint(library, "eval.py", "r", "--data", "mlm")
    assert "score them one by one" in complaint(library, "eval.py", "m", "r")
    said = complaint(library, "eval.py", trained / "cable", "r", "--data", "library")
    assert "score them one by one" in said
    assert "too large to search" in complaint(library, *start, "--corpus", "fineweb_edu")
