"""experiments/figures.py, and every figure of results/."""
import pytest

from experiments import figures
from tests import helpers
from tests.test_plot import score_row


@pytest.fixture
def drawn(monkeypatch):
    return helpers.drawn(monkeypatch)


def test_the_heat_map_has_the_cells_of_the_table(drawn):
    more = dict(task="a", better="more", form=".1f", least=10)
    columns = {"a: less": more | dict(better="less", form=".2f", logarithmic=True, least=0.1),
               "a: more": more}
    rows = {}
    for label, less, value in (("one", 4.0, 100.0), ("two", 8.0, 50.0), ("mine", 2.0, 12345.6)):
        rows[label] = {"a: less": dict(value=less),
                       "a: more": dict(value=value)}
    rows["three"] = {"a: less": dict(reason="ends"), "a: more": dict(value=7.0, spread=0.25)}
    assert figures.draw(dict(columns=columns, cells=rows, added="mine", runs=[]), "x.png")
    ax, texts = drawn[0].axes[0], {}
    for text in ax.texts:
        x, y = text.get_position()
        texts[x - 0.5, y - 0.5] = text.get_text()
    assert [[texts[x, y] for x in (0, 1)] for y in range(4)] == [
        ["4.00", "100"], ["8.00", "50"], ["2.00", "12,346"], ["ends", "7\n± 0.2"]]
    shares = ax.collections[0].get_array()
    # by the logarithm 4 is halfway from 8 to 2
    assert list(shares[:3, 0]) == [pytest.approx(0.5), 0, 1] and shares[2, 1] == 1
    labels = [label for label in ax.get_yticklabels() if label.get_weight() == "bold"]
    assert [label.get_text() for label in labels] == ["mine"]


def test_a_table_of_many_rows_becomes_a_grid(drawn):
    """Every number is in its cell, the mean over seeds; a length that a row has not is empty."""
    rows = [score_row(f"m{n}", n / 100, n / 50) for n in range(10)]
    rows += [score_row("m3", 0.13, 0.16, seed=2), score_row("ends", 0.5)]
    labels = [f"m{n}" for n in range(10)] + ["ends"]
    result = dict(rows=labels, runs=rows, columns=[("iid", "iid", "exact_match")])
    assert figures.draw(result, "x.png") and not figures.draw(result | dict(rows=["a"]), "x.png")
    ax, = drawn[0].axes
    texts = {tuple(t.get_position()): t.get_text() for t in ax.texts}
    want = {(x + 0.5, y + 0.5): f"{(x + 1) * y}" for x in (0, 1) for y in range(10)}
    want |= {(0.5, 3.5): "8", (1.5, 3.5): "11", (0.5, 10.5): "50", (1.5, 10.5): "-"}
    assert texts == want
    assert [t.get_text() for t in ax.get_yticklabels()] == labels
