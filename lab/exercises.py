"""
Exercises that check themselves: write a method's logits, and have them held to its model file.

    python -m lab.exercises          which there are, and which of them are right
    python -m lab.exercises cable    holds `cable` below to `literal` in model_cable.py

Fill in a function below. It is given one head's queries and keys, a row a token, and returns a
(T, T) tensor: row i is a query, column j a key. Only j <= i is looked at; loops are welcome.
GUIDE.md derives every one; the solutions are the `literal` of the model files.
"""
import sys
import traceback

import torch

import model_cable
import model_cope
import model_tra
import rivals.classics
import rivals.diff
import rivals.fox
import rivals.path
import rivals.rope
import rivals.ssmax
import rivals.stick
from common.exits import fail, in_one_line, nearest
from common.flags import Parser

T, D, P = 7, 4, 5  # tokens, the size of a head, positions in CoPE's table


# -----------------------------------------------------------------------------
# yours: q and k are (T, d)

def alibi(q, k, slope):
    """Logits: q_i . k_j / sqrt(d), less slope for each of the tokens j + 1 to i."""


def rope(q, k, theta):
    """
    Logits: channels c and c + d/2 of q_i are turned by the angle i theta_c, theta (d/2,), those of
    k_j by j theta_c; then their product, over sqrt(d).
    """


def fox(q, k, f):
    """Logits: q_i . k_j / sqrt(d), and the log of the gates f (T,) of the tokens j + 1 to i."""


def cable(q, k, a, g):
    """
    Logits: q_i . k_j / sqrt(d), less g_i times the distance, the sum of the steps of the tokens
    j + 1 to i; token t's step is a_t, and a and g are (T,).
    """


def tra(q, k, delta):
    """
    Logits: -inf where q_i . k_j <= 0; elsewhere q_i . k_j / sqrt(d), and log delta_i for each of
    the keys j to i that are left, key j among them; delta is (T,).
    """


def cope(q, k, e):
    """
    Logits: q_i . k_j / sqrt(d), and q_i . e[p]. p is the sum of the gates sigmoid(q_i . k_k /
    sqrt(d)) of the tokens k from j to i, at most P - 1; e (d, P) has a column for every whole
    number, and between two of them you interpolate.
    """


def diff(q, k, lam):
    """
    Not logits but weights: the softmax of the first halves of q and k, less lam times that of the
    second halves, each over the keys j <= i, and over sqrt(d/2).
    """


def stick(q, k):
    """
    Not logits but weights: going from key i - 1 back to key 0, each takes the share
    sigmoid(q_i . k_j / sqrt(d)) of what the nearer ones have left; key i itself has weight 0.
    """


def path(q, k, w, beta):
    """
    Logits: k_j^T H_(j+1) ... H_i q_i / sqrt(d), with H_t = I - beta_t w_t w_t^T; w (T, d) has unit
    vectors, beta is (T,).
    """


def ssmax(q, k, s):
    """Logits: q_i . k_j / sqrt(d), times s and the logarithm of how many keys query i sees."""


# -----------------------------------------------------------------------------
# what they are given, and held to

def inputs():
    """-> {name: what it is given after q and k; its model file; literal's arguments after v}"""
    torch.manual_seed(0)
    a, g, f, delta = torch.rand(4, T, dtype=torch.float64)
    e = torch.randn(D, P, dtype=torch.float64)
    turn = rivals.rope.Turn("", D, T, T)
    bias = rivals.classics.ALiBi(rivals.classics.GPTConfig(n_head=1)).double()
    w = torch.nn.functional.normalize(torch.randn(T, D, dtype=torch.float64), dim=1)
    beta = 2 * torch.rand(T, dtype=torch.float64)
    road = a.cumsum(0)[None, None]
    gates = f.log().cumsum(0)[None, None]
    decay = delta.log()[None, None]
    return dict(
        alibi=([bias.slopes.item()], rivals.classics, [bias.bias]),
        rope=([turn.theta], rivals.rope, [torch.arange(T), turn]),
        fox=([f], rivals.fox, [gates]),
        cable=([a, g], model_cable, [road, g[None, None]]),
        tra=([delta], model_tra, [decay]),
        cope=([e], model_cope, [e]),
        diff=([0.35], rivals.diff, [0.35]),
        stick=([], rivals.stick, []),
        path=([w, beta], rivals.path, [w[None, None], beta[None, None]]),
        ssmax=([0.6], rivals.ssmax, [torch.tensor([0.6], dtype=torch.float64)]))


def check(name):
    """-> what is wrong with the function of this name, or nothing."""
    mine, module, theirs = inputs()[name]
    torch.manual_seed(1)
    q, k, v = torch.randn(3, T, D, dtype=torch.float64)
    try:
        answer = globals()[name](q.clone(), k.clone(), *mine)
    except Exception as e:  # a reader's own; the other exercises are checked all the same
        lines = [f.lineno for f in traceback.extract_tb(e.__traceback__) if f.filename == __file__]
        return f"line {lines[-1]}: {type(e).__name__}: {e}"
    if answer is None:
        return f"not written yet: fill in {name} in lab/exercises.py, and return what it says"
    if getattr(answer, "shape", None) != (T, T):
        got = tuple(answer.shape) if torch.is_tensor(answer) else f"a {type(answer).__name__}"
        return f"it should return a tensor of shape ({T}, {T}), and returns {got}"
    if name == "rope":  # whose literal begins with what is turned
        waves = theirs[1].waves(theirs[0])
        q, k = (module.turned(x[None, None], waves)[0, 0] for x in (q, k))
    q, k, v = (x[None, None] for x in (q, k, v))
    _, parts = module.literal(q, k, v, *theirs)
    want = parts["qk"] + parts["bias"]
    if name in ("diff", "stick"):
        want = parts["attention"]
    want = want[0, 0]
    right = torch.isclose(answer.double(), want, rtol=0, atol=1e-6)
    for i, j in (~right).tril().nonzero().tolist():  # the first
        return (f"query i = {i}, key j = {j}: yours is {answer[i, j]:.7g}, "
                f"literal's is {want[i, j]:.7g}")
    return ""


def main(argv=None):
    parser = Parser(description=__doc__)
    parser.add_argument("names", nargs="*", help="default: all")
    names = parser.parse_args(argv).names or inputs()
    for name in names:
        if name not in inputs():
            fail(f"there is no exercise {name!r}: {nearest(name, inputs())}")
    wrong = {name: check(name) for name in names}
    for name, why in wrong.items():
        print(f"{name}: {why or 'right'}")
    sys.exit(any(wrong.values()))


if __name__ == "__main__":
    sys.excepthook = in_one_line
    main()
