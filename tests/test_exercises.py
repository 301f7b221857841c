"""tests/exercises.py: solutions are right, and the first number that is not is named."""
import math

import pytest
import torch

from tests import exercises
from tests.helpers import command, complaint


def scores(q, k):
    return q @ k.T / math.sqrt(q.size(1))


def alibi(q, k, slope):
    i = torch.arange(len(q))
    return scores(q, k) - slope * (i[:, None] - i)


def rope(q, k, theta):
    angle = torch.arange(len(q))[:, None] * theta
    q, k = (torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones_like(angle), angle)
            for x in (q, k))
    return (q @ k.conj().T).real / 2


def fox(q, k, f):
    logits = scores(q, k)
    for i, j in torch.ones_like(logits).tril().nonzero():
        logits[i, j] += f[j + 1:i + 1].log().sum()
    return logits


def cable(q, k, a, g):
    logits = scores(q, k)
    for i, j in torch.ones_like(logits).tril().nonzero():
        logits[i, j] -= g[i] * a[j + 1:i + 1].sum()
    return logits


def tra(q, k, delta):
    logits = scores(q, k)
    alive = logits > 0
    for i, j in torch.ones_like(logits).tril().nonzero():
        logits[i, j] += alive[i, j:i + 1].sum() * delta[i].log()
    return logits.masked_fill(~alive, -math.inf)


def cope(q, k, e):
    logits, z = scores(q, k), q @ e
    gates = logits.sigmoid()
    for i, j in torch.ones_like(logits).tril().nonzero():
        p = min(gates[i, j:i + 1].sum(), e.size(1) - 1)
        low, high = math.floor(p), math.ceil(p)
        logits[i, j] += (1 - p + low) * z[i, low] + (p - low) * z[i, high]
    return logits


def diff(q, k, lam):
    later = torch.ones(len(q), len(q)).triu(1) > 0
    first, second = (scores(a, b).masked_fill(later, -math.inf).softmax(-1)
                     for a, b in zip(q.chunk(2, 1), k.chunk(2, 1)))
    return first - lam * second


def stick(q, k):
    shares, weights = scores(q, k).sigmoid(), torch.zeros(len(q), len(q), dtype=q.dtype)
    for i in range(len(q)):
        left = 1.0
        for j in reversed(range(i)):
            weights[i, j] = left * shares[i, j]
            left *= 1 - shares[i, j]
    return weights


def path(q, k, w, beta):
    logits = torch.zeros(len(q), len(q), dtype=q.dtype)
    for i in range(len(q)):
        x = q[i]
        for j in reversed(range(i + 1)):
            logits[i, j] = k[j] @ x / math.sqrt(q.size(1))
            x = x - beta[j] * (w[j] @ x) * w[j]
    return logits


def ssmax(q, k, s):
    return s * torch.arange(1, len(q) + 1).log()[:, None] * scores(q, k)


SOLUTIONS = dict(alibi=alibi, rope=rope, fox=fox, cable=cable, tra=tra, cope=cope, diff=diff,
                 stick=stick, path=path, ssmax=ssmax)


@pytest.mark.parametrize("name", exercises.inputs())
def test_a_solution_is_right_and_one_wrong_number_is_named(name, home, monkeypatch):
    assert "not written yet" in exercises.check(name)
    monkeypatch.setattr(exercises, name, SOLUTIONS[name])
    assert command(home, "tests.exercises", name)[0] == f"{name}: right\n"

    def close(q, k, *more):
        answer = SOLUTIONS[name](q, k, *more)
        answer[4, 2], answer[6, 1], answer[2, 5] = 7, 7, 7
        return answer
    monkeypatch.setattr(exercises, name, close)
    assert "query i = 4, key j = 2: yours is 7.0000, literal's is" in exercises.check(name)
    monkeypatch.setattr(exercises, name, lambda q, *_: q)
    assert "shape (7, 7), and returns (7, 4)" in exercises.check(name)


def test_a_typo_is_told_the_nearest_name(home):
    assert "no exercise 'fxo': did you mean fox?" in complaint(home, "tests.exercises", "fxo")
