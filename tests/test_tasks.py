"""The synthetic tasks: what they draw, and their scores, by readers that know only the rules."""
import re

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from common import names
from data import text
from tests.helpers import close, rng

TASKS = [name for name in names.task_names()[len(text.CORPORA):]
         if name not in ("max_retrieval", "mlm", "retrieval")]


def task_of(name, **fields):
    return names.find_task(name)(**fields)


@pytest.mark.parametrize("name", TASKS)
def test_every_task_is_reproducible_and_scores_itself(name):
    task = task_of(name)
    assert len(set(task.show(range(task.vocab_size)))) == task.vocab_size
    for split in task.splits:
        x, y = task.tensors(split, 8, rng(3))
        assert all(map(torch.equal, (x, y), task.tensors(split, 8, rng(3))))
        if task.target:
            continue
        logits, first = F.one_hot(y.clamp(min=0), task.vocab_size).float(), (y[0] != -1).nonzero()
        for wrong in (0, 1):  # perfect answers, then a wrong one in the first sequence
            for metric, (count, out_of) in task.score(logits, x, y).items():
                if metric in ("exact_match", "accuracy"):
                    count = out_of.int() - count.int()
                assert count.tolist() == [wrong, *(7 * [0])]
                of_each = metric in ("glitch_rate", "token_error", "accuracy")
                assert torch.equal(out_of, (y != -1).sum(1) if of_each else (y != -1).any(1))
            logits[0, first[0]] *= -1


# -----------------------------------------------------------------------------
# one right answer: the words of a string -> what is right at each, None where nothing is asked

def flipflop(words):
    assert re.fullmatch("w([01][wri])*[01]r", "".join(words))
    want, bit = [], None
    for word, after in zip(words, [*words[1:], None]):
        bit = after if word == "w" else bit
        want.append(bit if word == "r" else None)
        assert word != "r" or after in (bit, None)
    return want


def selective_copy(words):
    middle = words.index("|")
    symbols = [word for word in words[:middle] if word != "_"]
    assert len(symbols) == 16 and words[middle + 1:] == symbols[:-1]
    return [None] * middle + symbols


def recall(words):
    *said, key = words
    pairs = [word for word in said if word != "."]
    of_key = {word[0]: word for word in pairs}
    assert len(pairs) == len(of_key) == 8 and re.fullmatch("([a-p][0-7])+", "".join(pairs))
    return [None] * len(said) + [of_key[key]]


def pairs(words):
    values, want = {}, []
    for word, after in zip(words, [*words[1:], "."]):
        want.append(values.get(word))
        if word.isalpha():
            assert values.setdefault(word, after) == after and after.isdigit()
    assert len(values) == 8
    return want


def counting(words):
    value = {}
    *operations, query = " ".join(words).replace("s;", "s ;").replace("+;", "+ ;").split(" ; ")
    for operation in operations:
        name, *rest = operation.split()
        if rest == ["=", "0"]:
            value[name] = 0
        elif rest == ["++"]:
            value[name] += 1
            assert value[name] <= 10
        else:
            assert operation == "pass"
    end = words.index("print") + 1
    assert query.split() == words[end - 1:end + 1]
    return [None] * end + [str(value[words[end]])] + [None] * (len(words) - end - 1)


@pytest.mark.parametrize("reader, fields", [
    (flipflop, dict(block_size=512)), (selective_copy, dict(block_size=65)), (recall, {}),
    (recall, dict(block_size=9)), (pairs, dict(n_times=4)), (pairs, dict(block_size=256)),
    (counting, dict(vars=3, max_ops=40, block_size=162, n_train=300)),
    (counting, dict(vars=5, max_ops=40, block_size=162, n_train=0, joined=True))])
def test_the_right_answer_follows_from_the_rules(reader, fields):
    task = task_of(reader.__name__, **fields)
    labels = task.show(range(task.vocab_size))
    for split in task.splits:
        for row, target in zip(*task.batch(split, 100, rng(1))):
            said = [labels[t] if t != -1 else None for t in target]
            assert said == reader(task.show(row))


def alike(tokens, n, by=0.1):
    """Whether these are n different tokens that come about equally often."""
    values, counts = np.unique(tokens, return_counts=True)
    return len(values) == n and np.abs(counts / counts.mean() - 1).max() < by


@pytest.mark.parametrize("split, reads", [
    ("train", 26), ("iid", 26), ("sparse", 3.5), ("dense", 115)])
def test_flip_flop_has_the_papers_mean_of_reads_and_as_many_writes(split, reads):
    x, y = task_of("flipflop", block_size=512).batch(split, 400, rng())
    assert (y != -1).sum(1).mean() == pytest.approx(reads, rel=0.06)
    assert (x == 0).sum(1).mean() == pytest.approx(reads, rel=0.06)
    assert x[:, 1::2].mean() == pytest.approx(3.5, abs=0.02)  # either bit


@pytest.mark.parametrize("split, blanks", [
    ("train", 16), ("iid", 16), ("dense", 8), ("sparse", 32)])
def test_selective_copy_has_its_blanks_anywhere(split, blanks):
    x, y = task_of("selective_copy", block_size=65).batch(split, 2000, rng())
    assert x.shape == (2000, 32 + blanks) and alike(y[y != -1], 14)
    is_blank = (x[:, :16 + blanks] == 0)
    assert (is_blank.sum(1) == blanks).all() and is_blank.mean(0).std() < 0.02


def test_what_recall_asks_for_is_anywhere():
    x, y = task_of("recall").batch("iid", 8000, rng())
    back = 63 - (x[:, :-1] == y[:, -1:]).argmax(1)
    assert alike(back, 63, 0.5) and alike(x[:, -1], 16, 0.2) and alike((y[:, -1] - 17) // 16, 8)
    assert (x[:, :-1] != 0).mean(0).std() < 0.05


def test_pairs_are_anywhere():
    x, y = task_of("pairs", block_size=256).batch("iid", 1000, rng())
    assert ((x != 0).sum(1) == 32).all() and ((y != -1).sum(1) == 8).all()
    assert (x != 0).mean(0)[2:-2].std() < 0.05 and alike(y[y != -1], 16, 0.2)


@pytest.mark.parametrize("split, share", [
    ("train", 0.887), ("iid", 0.887), ("pass100", 0.92), ("pass10", 0.672)])
def test_counting_programs_are_drawn_by_their_weights(split, share):
    task, short = (task_of("counting", block_size=size, vars=3, max_ops=40, n_train=400)
                   for size in (162, 20))
    (x, y), (end_x, end_y) = (task.batch(split, 400, rng()) for task in (task, short))
    ops = (x == 8).sum(1)  # semicolons
    assert {*ops} == {*range(3, 41)} and ops.mean() == pytest.approx(21.5, abs=2.5)
    assert (x == 7).sum() / ops.sum() == pytest.approx(share, abs=0.01)
    assert alike(x[x < 5], 3, 0.2)
    # in fewer tokens it is the end of the same program, with the same answer
    assert (end_y.max(1) == y.max(1)).all()
    for row, at, end in zip(x, y.argmax(1) + 1, end_x):
        assert end[:at].tolist() == row[:at][-20:].tolist()


def test_counting_as_in_the_paper():
    """What is cut, and how many programs; a test has others than the training."""
    Task = names.find_task("counting")
    for joined, share in ((False, 0.53), (True, 0.127)):
        _, y = Task(block_size=512, max_ops=512, joined=joined).programs(2000, 50, rng())
        assert (y[:, -1] != -1).mean() == pytest.approx(share, abs=0.03)
    seen, *others = ({tuple(row) for row in Task(n_train=50).batch(split, 200, rng(n))[0]}
                     for n, split in enumerate(("train", "train", "iid")))
    assert len(seen | others[0]) <= 50 and len((seen | others[0]) & others[1]) < 20


# -----------------------------------------------------------------------------
# a true distribution: the words so far -> {word: probability} of the next

def absent(words):
    left = {str(n) for n in range(9)} - {*words}
    assert len(left) == 9 - len(words)  # without repetition
    return dict.fromkeys(left, 1 / len(left))


def dyck(k, m):
    """By the spec's three cases, from a stack of brackets."""
    def rule(words):
        stack = []
        for word in words[1:]:
            if word in "([{":
                stack.append(word)
            else:
                assert "([{".index(stack.pop()) == ")]}".index(word)
        openers = dict.fromkeys("([{"[:k], 1 / (2 * k))
        if not stack:
            return openers | {"</s>": 1 / 2}
        closer = ")]}"["([{".index(stack[-1])]
        return openers | {closer: 1 / 2} if len(stack) < m else {closer: 1}
    return rule


def tomita(language, stays):
    """By regular expressions that know nothing of automata."""
    legal, end = {3: (r"(?!.*(?<!1)1(11)*0(00)*1).*", 0.0086), 7: ("0*1*0*1*", 0.00684)}[language]

    def rule(words):
        text = "".join(words[1:])
        last = {text[-1:]: stays, "": 1}
        p = {s: last.get(s, 1 - stays) for s in "01" if re.fullmatch(legal, text + s)}
        if not text:
            p = {"0": 0.5, "1": 0.5}
        # an odd run of 0s after an odd run of 1s is not over
        over = language == 7 or not re.search("(?<!1)1(11)*0(00)*$", text)
        ends = end if over else 0
        return {s: (1 - ends) * share / sum(p.values()) for s, share in p.items()} | {"</s>": ends}
    return rule


@pytest.mark.parametrize("name, rule, fields", [
    ("set_complement", absent, dict(n=9, block_size=3)),
    ("dyck", dyck(1, 1), dict(k=1, m=1)), ("dyck", dyck(2, 3), dict(k=2, m=3)),
    ("dyck", dyck(3, 2), dict(k=3, m=2)), ("tomita", tomita(3, 0.8), dict(language=3)),
    ("tomita", tomita(7, 0.99), dict(language=7))])
def test_what_is_drawn_has_its_true_distribution(name, rule, fields):
    task = task_of(name, **dict(block_size=60) | fields)
    labels = task.show(range(task.vocab_size))
    for split in task.splits:
        x, y = task.batch(split, 500, rng())
        assert ((y[:, :-1] == x[:, 1:]) | (y[:, :-1] == 1)).all()  # what follows, or the end
        target = task.target(torch.from_numpy(x)).numpy().astype(float)
        for row, ps in zip(x[:30], target):
            words = task.show(row)
            for t in range(min(80, len(row))):
                want = rule(words[:t + 1])
                assert ps[t] == pytest.approx([want.get(word, 0) for word in labels], abs=1e-6)
        drawn, target = y[..., None] == np.arange(len(labels)), target.round(6)
        for p in np.unique(target):  # of all that have this probability as many are drawn
            share = drawn[target == p]
            assert abs(share.mean() - p) <= 5 * (p * (1 - p) / len(share)) ** 0.5 + 1e-6


def test_half_of_tomitas_strings_end_by_100():
    for language in (3, 7):
        _, y = task_of("tomita", language=language).batch("train", 4000, rng())
        assert (y == 1).any(1).mean() == pytest.approx(0.5, abs=0.03)


def test_total_variation_distance():
    """0 for the target itself; a distribution that is uniform over all is too far spread."""
    task = task_of("set_complement", n=9, block_size=3)
    x, y = task.tensors("half", 5, rng())
    exact, uniform = (task.score(logits, x, y)
                      for logits in (task.target(x).log(), torch.zeros(5, 4, 9)))
    close(exact["tvd"][0], torch.zeros(5), 1e-5)
    close(uniform["tvd"][0] / uniform["tvd"][1], torch.full((5,), 10 / 9 / 4), 1e-5)
    close(uniform["tvd_last"][0], torch.full((5,), 4 / 9), 1e-5)


@pytest.mark.parametrize("split, T", [("train", 16), ("64", 64)])
def test_max_retrieval_asks_for_the_class_of_the_highest(split, T):
    task = task_of("max_retrieval")
    x, y = task.batch(split, 4000, rng())
    items = (x[..., 0] >= 0).sum(1)
    assert x.shape[1] == T and set(items) == (set(range(5, 17)) if T == 16 else {T})
    for row, n, label in zip(x, items, y):
        assert (row[n:] == -1).all() and (row[:n, 1:].sum(1) == 1).all()
        assert max(row[:n].tolist())[1 + label] == 1
    assert alike(y, 10, 0.2)
    right, _ = task.score(torch.eye(10)[np.roll(y, 1)], x, torch.from_numpy(y))["accuracy"]
    assert right.tolist() == (y == np.roll(y, 1)).tolist()
