"""The synthetic tasks: what they draw, and their scores, by readers that know only the rules."""
import math
import re

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import data.counting
import data.dyck
import data.flipflop
import data.max_retrieval
import data.pairs
import data.recall
import data.selective_copy
import data.set_complement
import data.tomita
from common import names
from tests.helpers import close, rng

TASKS = [name for name in names.task_names()[len(data.text.CORPORA):]
         if name not in ("max_retrieval", "mlm", "retrieval")]


def chi_square(counts, p):
    """How far counts are from p, in standard deviations of the chi-square statistic's own."""
    keep = p > 0
    assert counts[~keep].sum() == 0, "an illegal token was drawn"
    expected = counts.sum() * p[keep]
    statistic = ((counts[keep] - expected) ** 2 / expected).sum()
    freedom = keep.sum() - 1
    return (statistic - freedom) / math.sqrt(2 * max(freedom, 1))


@pytest.mark.parametrize("name", TASKS)
def test_every_task_is_reproducible_and_scores_itself(name):
    cls = names.find_task(name)
    task = cls(**names.pick(cls, cls.defaults["nano"]))
    for split in task.splits:
        x, y = task.tensors(split, 8, rng(3))
        again = task.tensors(split, 8, rng(3))
        assert torch.equal(x, again[0]) and torch.equal(y, again[1])
        assert len(task.show(x[0].numpy())) == x.size(1)
        assert len(set(task.show(range(task.vocab_size)))) == task.vocab_size
        if task.target:
            assert y.min() >= 0
            continue
        logits = F.one_hot(y.clamp(min=0), task.vocab_size).float()
        first = (y[0] != -1).nonzero()[0, 0]
        for wrong in (0, 1):  # perfect answers, then a wrong one in the first sequence
            for metric, (count, out_of) in task.score(logits, x, y).items():
                good = metric in ("exact_match", "accuracy")
                errors = out_of.int() - count.int() if good else count
                assert errors.tolist() == [wrong, *(7 * [0])]
                each = metric in ("glitch_rate", "token_error", "accuracy")
                assert out_of.tolist() == ((y != -1).sum(1) if each else torch.ones(8)).tolist()
            logits[0, first] = -logits[0, first]


@pytest.mark.parametrize("split, reads, p", [
    ("train", 26, 0.8), ("iid", 26, 0.8), ("sparse", 3.5, 0.98), ("dense", 115, 0.1)])
def test_flip_flop_reads_repeat_the_last_write(split, reads, p):
    task = data.flipflop.Task(block_size=512)
    x, y = task.batch(split, 400, rng())
    for row, target in zip(x[:100], y):
        text, memory = "".join(task.show(row)), None
        assert re.fullmatch("w([01][wri])*[01]r", text) and len(text) == 511
        for t in range(0, 511, 2):
            if text[t] == "w":
                memory = text[t + 1]
            if text[t] == "r":
                assert "01"[target[t] - 3] == memory
                assert t + 1 == 511 or text[t + 1] == memory
            else:
                assert target[t] == -1
        assert (target[1::2] == -1).all()
    # the paper's mean reads in a string
    assert (y != -1).sum(1).mean() == pytest.approx(reads, rel=0.06)
    others = x[:, 2:510:2]
    assert (others == 2).mean() == pytest.approx(p, abs=0.01)
    assert (others == 0).mean() == pytest.approx((1 - p) / 2, abs=0.01)
    assert x[:, 1::2].mean() == pytest.approx(3.5, abs=0.02)


@pytest.mark.parametrize("split, blanks", [
    ("train", 16), ("iid", 16), ("dense", 8), ("sparse", 32)])
def test_selective_copy_without_blanks_is_the_output(split, blanks):
    task = data.selective_copy.Task(block_size=65)
    x, y = task.batch(split, 300, rng())
    assert x.shape == y.shape == (300, 32 + blanks)
    for row, target in zip(x, y):
        said, out = row[:16 + blanks], target[target != -1]
        assert (said == 0).sum() == blanks and said[said != 0].tolist() == out.tolist()
        assert row[16 + blanks] == 1 and row[17 + blanks:].tolist() == out[:-1].tolist()
        assert (target[:16 + blanks] == -1).all() and len(out) == 16
    symbols, counts = np.unique(y, return_counts=True)
    assert symbols.tolist() == [-1, *range(2, 16)]
    assert (abs(counts[1:] / 4800 - 1 / 14) < 0.02).all()  # all alike
    assert (x[:, :16 + blanks] == 0).mean(0).std() < 0.06  # blanks are anywhere


def recalled(words):
    """A recall string -> the pair asked for, and how many tokens it is back. Asserts the rules."""
    *said, key = words
    pairs = {word[0]: word for word in said if word != "."}
    assert len(pairs) == sum(word != "." for word in said) == 8 and re.fullmatch("[a-p]", key)
    assert all(re.fullmatch("[a-p][0-7]", pair) for pair in pairs.values())
    return pairs[key], len(said) - said.index(pairs[key])


@pytest.mark.parametrize("T", [9, 64, 256])
def test_recall_is_what_was_said_about_the_key(T):
    task = data.recall.Task(block_size=T)
    x, y = task.batch("iid", 2000, rng())
    assert x.shape == y.shape == (2000, T) and (y[:, :-1] == -1).all()
    distances = []
    for row, target in zip(x, y):
        pair, distance = recalled(task.show(row))
        assert task.show(target[-1:]) == [pair]
        distances.append(distance)
    # keys, values and places are drawn alike; a pair may be anywhere but at the question
    assert min(distances) == 1 and max(distances) >= 0.95 * (T - 1)
    assert np.mean(distances) == pytest.approx(T / 2, rel=0.05)
    answers = np.bincount(y[:, -1], minlength=task.vocab_size)[17:]
    assert np.bincount(x[:, -1])[1:].std() < 20 and answers.min() > 2
    assert (x[:, :-1] != 0).mean(0).std() < 0.05


@pytest.mark.parametrize("T, m", [(32, 2), (256, 2), (64, 4)])
def test_pairs_is_what_came_after_the_key(T, m):
    task = data.pairs.Task(block_size=T, n_times=m)
    x, y = task.batch("iid", 1000, rng())
    assert x.shape == y.shape == (1000, T)
    back = []
    for row, target in zip(x, y):
        words, want, values, last = task.show(row), [-1] * T, {}, {}
        places = [n for n, word in enumerate(words) if word.isalpha()]
        assert len(places) == 8 * m == sum(word.isdigit() for word in words)
        for n in places:
            key = words[n]
            if key in values:
                want[n] = values[key]
                back.append(n - last[key])
            values[key], last[key] = row[n + 1], n
        assert len(values) == 8 and target.tolist() == want  # so each has one value
    assert min(back) == 2 and len(back) == 8000 * (m - 1)
    if m == 2:
        assert np.mean(back) == pytest.approx(T / 3, rel=0.1)  # of two places drawn at random
        assert np.bincount(y[y != -1])[17:].min() > 400        # of 500, and of no other token
    if T == 256:
        assert (x != 0).mean(0)[2:-2].std() < 0.05 and max(back) > 230


def interpret(words):
    """A counting program -> the answer, and how many operations there are. Asserts the rules."""
    value, words, ops = {}, list(words), 0
    while words[0] != "print":
        ops += 1
        if words[0] == "pass":
            assert words[1] == ";"
            words = words[2:]
        elif words[1] == "++":
            assert words[2] == ";" and value[words[0]] < 10
            value[words[0]] += 1
            words = words[3:]
        else:
            assert words[1:4] == ["=", "0", ";"]
            value[words[0]] = 0
            words = words[4:]
    assert len(words) == 2
    return value[words[1]], ops


@pytest.mark.parametrize("split, share, n", [
    ("train", 0.887, 1), ("iid", 0.887, 3), ("pass100", 0.92, 2), ("pass10", 0.672, 5)])
def test_counting_programs_replayed(split, share, n):
    task, short, joined = (data.counting.Task(vars=n, max_ops=40, n_train=300, **fields) for fields
                           in (dict(block_size=162), dict(block_size=20),
                               dict(block_size=162, joined=True)))
    (x, y), (sx, sy), (jx, jy) = (t.batch(split, 300, rng()) for t in (task, short, joined))
    assert task.answer(*map(torch.from_numpy, (x, y))).tolist() == (y.max(1) - 10).tolist()
    lengths, variables, passes = [], set(), 0
    for row, target, cut, cut_target, fewer, other in zip(x, y, sx, sy, jx, jy):
        words = [w for w in task.show(row) if w]
        end = len(words) - 1
        assert (row[end + 1:] == 21).all() and (target != -1).nonzero()[0].tolist() == [end]
        answer, ops = interpret(words)
        assert target[end] - 10 == answer == cut_target.max() - 10 == other.max() - 10
        lengths.append(ops)
        passes += words.count("pass")
        variables |= set(words) & set("abcde")
        # the same program, its beginning cut off
        assert cut[:min(20, end + 1)].tolist() == row[:end + 1][-20:].tolist()
        # and as in the authors' release: `pass;` is one token, `a ++;` two
        fewer = [w for w in joined.show(fewer) if w]
        assert " ".join(fewer).replace(";", " ;").replace("  ", " ").split() == words
        assert (other != -1).nonzero()[0].tolist() == [len(fewer) - 1]
    assert min(lengths) < 6 and max(lengths) == 40 and variables == set("abcde"[:n])
    assert np.mean(lengths) == pytest.approx(21.5, abs=2.5)
    assert passes / sum(lengths) == pytest.approx(share, abs=0.01)


def test_counting_as_in_the_paper():
    paper, cut = data.counting.Task.defaults["paper"], []
    for joined in (False, True):
        task = data.counting.Task(block_size=512, max_ops=512, joined=joined)
        x, y = task.programs(2000, 50, rng())
        cut.append((y[:, -1] != -1).mean())
    assert paper["joined"] and cut == pytest.approx([0.53, 0.127], abs=0.03)
    assert paper["max_iters"] * paper["batch_size"] == 100 * data.counting.Task.n_train
    task = data.counting.Task(n_train=50)  # the programs of the training are fixed
    seen = {tuple(row) for row in task.fixed[0]}
    assert {tuple(row) for row in task.batch("train", 200, rng(1))[0]} <= seen
    assert len({tuple(row) for row in task.batch("iid", 200, rng(1))[0]} & seen) < 20
    assert (data.counting.Task(n_train=50).fixed[0] == task.fixed[0]).all()


def test_set_complement():
    task = data.set_complement.Task(n=9, block_size=3)
    for split, T in (("train", 3), ("iid", 3), ("half", 4), ("full", 8)):
        x, y = task.batch(split, 2000, rng())
        assert x.shape == y.shape == (2000, T) and (x[:, 1:] == y[:, :-1]).all()
        assert all(len({*a, b}) == T + 1 for a, b in zip(x, y[:, -1]))  # without repetition
        p = task.target(torch.from_numpy(x))
        for row, target in zip(x[:20], p):
            for t in range(T):
                want = np.ones(9)
                want[row[:t + 1]] = 0
                assert target[t].numpy() == pytest.approx(want / want.sum())
    counts = np.bincount(task.batch("train", 20000, rng())[0][:, 0], minlength=9)
    assert abs(chi_square(counts, np.ones(9) / 9)) < 4
    # TVD: 0 for the target itself; a distribution that is uniform over all is too far spread
    x, y = (torch.from_numpy(a) for a in task.batch("half", 5, rng()))
    uniform = [1 / 9, 2 / 9, 3 / 9, 4 / 9]
    for logits, want in ((task.target(x).log(), [0, 0, 0, 0]), (torch.zeros(5, 4, 9), uniform)):
        scores = task.score(logits, x, y)
        close(scores["tvd"][0], torch.full((5,), sum(want)), 1e-5)
        close(scores["tvd_last"][0], torch.full((5,), want[-1]), 1e-5)
        assert scores["tvd"][1].tolist() == [4] * 5


def dyck_distributions(row, k, m):
    """What may follow after each token, by the spec's three cases, from a stack of brackets."""
    stack, p = [], np.zeros((len(row), 2 + 2 * k))
    for token, want in zip(row, p):
        if token >= 2 + k:
            assert stack.pop() == token - 2 - k
        elif token >= 2:
            stack.append(token - 2)
        assert len(stack) <= m
        if not stack:
            want[1], want[2:2 + k] = 1 / 2, 1 / (2 * k)
        elif len(stack) < m:
            want[2:2 + k], want[2 + k + stack[-1]] = 1 / (2 * k), 1 / 2
        else:
            want[2 + k + stack[-1]] = 1
    return p


@pytest.mark.parametrize("k, m", [(1, 1), (2, 3), (3, 2)])
def test_dyck_strings_parse_and_have_their_distribution(k, m):
    task = data.dyck.Task(block_size=24, k=k, m=m)
    seen = {}
    for split, T, n in (("train", 24, 2000), ("long", 96, 50)):
        x, y = task.batch(split, n, rng())
        assert x.shape == y.shape == (n, T) and (x[:, 0] == 0).all() and (x[:, 1:] >= 2).all()
        p = task.target(torch.from_numpy(x)).numpy()
        wants = np.array([dyck_distributions(row, k, m) for row in x])
        assert np.abs(p - wants).max() < 1e-6
        assert ((y[:, :-1] == x[:, 1:]) | (y[:, :-1] == 1)).all()
        if split == "train":
            for want, drawn in zip(wants.reshape(-1, 2 + 2 * k), y.flatten()):
                seen.setdefault(tuple(want), np.zeros(2 + 2 * k))[drawn] += 1
    for key, counts in seen.items():
        assert abs(chi_square(counts, np.array(key))) < 5


@pytest.mark.parametrize("language, legal, p_switch, stays", [
    (3, r"(?!.*(?<!1)1(11)*0(00)*1).*", 0, 0.8), (7, "0*1*0*1*", 0, 0.99),
    (3, r"(?!.*(?<!1)1(11)*0(00)*1).*", 0.4, 0.6)])
def test_tomita_strings_match_their_expression(language, legal, p_switch, stays):
    """By a regular expression that knows nothing of automata."""
    task = data.tomita.Task(block_size=60, language=language, p_switch=p_switch)
    x, y = task.batch("train", 2000, rng())
    assert x.shape == y.shape == (2000, 60)
    p = task.target(torch.from_numpy(x)).numpy()
    assert np.abs(p.sum(-1) - 1).max() < 1e-6 and (p[..., 0] == 0).all()
    texts = ["".join(task.show(row[1:])) for row in x]
    assert all(re.fullmatch(legal, text) for text in texts)
    for text, target in zip(texts[:60], p):
        for t in range(1, 60):
            so_far, after = text[:t], target[t]
            for s in "01":
                may_follow = bool(re.fullmatch(legal, so_far + s))
                assert (after[2 + int(s)] > 0) == may_follow, (so_far, s)
            # an odd run of 0s after an odd run of 1s is not over
            ends = language == 7 or not re.search("(?<!1)1(11)*0(00)*$", so_far)
            assert (after[1] > 0) == ends
            if (after[2:] > 0).all():
                same = after[2 + int(so_far[-1])] / after[2:].sum()
                assert same == pytest.approx(stays, abs=1e-5)
    distributions, of = np.unique(p.reshape(-1, 4).round(6), axis=0, return_inverse=True)
    for n, want in enumerate(distributions.astype(np.float64)):
        counts = np.bincount(y.flatten()[of.flatten() == n], minlength=4)
        assert abs(chi_square(counts, want / want.sum())) < 5
    _, y = data.tomita.Task(language=language).batch("train", 4000, rng())
    assert (y == 1).any(1).mean() == pytest.approx(0.5, abs=0.03)  # have ended by 100


def test_max_retrieval_task():
    task = data.max_retrieval.Task()
    for split, T in (("train", 16), ("iid", 16), ("64", 64)):
        x, y = task.batch(split, 500, rng())
        assert x.shape == (500, T, 11) and x.dtype == np.float32 and y.dtype == np.int64
        items = (x[..., 0] >= 0).sum(1)
        assert set(items) == set(range(5, 17)) if T == 16 else (items == T).all()
        for row, n, label in zip(x, items, y):
            labels = row[:n, 1:]
            assert (row[n:] == -1).all()
            assert (labels.sum(1) == 1).all() and (labels.max(1) == 1).all()
            assert row[max(range(n), key=lambda i: row[i, 0]), 1 + label] == 1
    assert abs(x[..., 0].mean() - 0.5) < 0.01
    x, y = task.batch("train", 4000, rng())
    assert abs(chi_square(np.bincount(y, minlength=10), np.ones(10) / 10)) < 4
    logits = torch.eye(10)[torch.from_numpy(y)]
    logits[:1000] = logits[:1000].roll(1, 1)
    assert task.score(logits, x, torch.from_numpy(y))["accuracy"][0].double().mean() == 0.75
