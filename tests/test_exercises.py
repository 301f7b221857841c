"""lab/exercises.py: solutions are right, and the first number that is not is named."""
import math
import re

import pytest
import torch

from lab import exercises
from tests.examples import diff_formula, stick_formula
from tests.helpers import command, complaint


def scores(q, k):
    return q @ k.T / math.sqrt(q.size(1))


def pair_by_pair(term):
    """-> a solution: to every logit of keys j <= i is added term(i, j, logits, what is given)."""
    def solution(q, k, *given):
        logits = scores(q, k)
        before = logits.clone()
        for i, j in torch.ones_like(logits).tril().nonzero():
            logits[i, j] += term(i, j, before, *given)
        return logits
    return solution


def rope(q, k, theta):
    turn = torch.exp(1j * torch.arange(len(q))[:, None] * theta)
    q = torch.complex(*q.chunk(2, -1)) * turn
    k = torch.complex(*k.chunk(2, -1)) * turn
    return (q @ k.conj().T).real / 2


def tra(i, j, logits, delta):
    alive = logits[i, j:i + 1] > 0
    return alive.sum() * delta[i].log() if alive[0] else -math.inf


def cope(q, k, e):
    def term(i, j, logits):
        p = min(logits[i, j:i + 1].sigmoid().sum(), e.size(1) - 1)
        low = math.floor(p)
        high = math.ceil(p)
        step = e[:, high] - e[:, low]
        return q[i] @ (e[:, low] + (p - low) * step)
    return pair_by_pair(term)(q, k)


def weights_of(formula):
    """-> a solution: what values that are one-hot come out as."""
    def solution(q, k, *given):
        v = torch.eye(len(q), dtype=q.dtype)
        q, k, v = (x[None, None] for x in (q, k, v))
        return formula(q, k, v, *given)[0, 0]
    return solution


def path(q, k, w, beta):
    logits = torch.zeros(len(q), len(q), dtype=q.dtype)
    for i in range(len(q)):
        x = q[i]
        for j in reversed(range(i + 1)):
            logits[i, j] = k[j] @ x / math.sqrt(q.size(1))
            x = x - beta[j] * (w[j] @ x) * w[j]
    return logits


SOLUTIONS = dict(
    alibi=pair_by_pair(lambda i, j, _, slope: -slope * (i - j)),
    fox=pair_by_pair(lambda i, j, _, f: f[j + 1:i + 1].log().sum()),
    cable=pair_by_pair(lambda i, j, _, a, g: -g[i] * a[j + 1:i + 1].sum()),
    tra=pair_by_pair(tra), rope=rope, cope=cope, path=path,
    diff=weights_of(diff_formula), stick=weights_of(stick_formula),
    ssmax=pair_by_pair(lambda i, j, logits, s: (s * math.log(i + 1) - 1) * logits[i, j]))


@pytest.mark.parametrize("name", exercises.inputs())
def test_a_solution_is_right_and_a_wrong_number_is_named(name, home, monkeypatch):
    assert "not written yet" in exercises.check(name)
    monkeypatch.setattr(exercises, name, SOLUTIONS[name])
    assert command(home, "lab.exercises", name)[0] == f"{name}: right\n"
    wrong = torch.zeros(7, 7) > 0
    wrong[4, 2] = wrong[2, 5] = True  # key 5 is after query 2
    monkeypatch.setattr(
        exercises, name, lambda *given: SOLUTIONS[name](*given).masked_fill(wrong, 7))
    assert exercises.check(name).startswith("query i = 4, key j = 2: yours is 7")


def test_an_exercise_that_raises_does_not_stop_the_others(home, monkeypatch):
    monkeypatch.setattr(exercises, "rope", lambda *given: 1 / 0)
    monkeypatch.setattr(exercises, "fox", lambda *given: given)
    monkeypatch.setattr(exercises, "cable", SOLUTIONS["cable"])
    out, _ = command(home, "lab.exercises", "rope", "fox", "cable", code=1)
    assert re.fullmatch(r"rope: line \d+: ZeroDivisionError.*\nfox: .*a tuple\ncable: right\n", out)


def test_a_typo_is_told_the_nearest_name(home):
    assert "no exercise 'fxo': did you mean fox?" in complaint(home, "lab.exercises", "fxo")
