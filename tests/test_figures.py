"""experiments/figures.py, and every figure of results/."""
import pytest

from experiments import figures
from tests import helpers


@pytest.fixture
def drawn(monkeypatch):
    return helpers.drawn(monkeypatch)


def test_the_heat_map_has_the_cells_of_the_table(drawn):
    more = dict(task="a", better="more", form=".1f", least=10)
    columns = {"a: less": more | dict(better="less", form=".2f", logarithmic=True, least=0.1),
               "a: more": more}
    rows = {}
    for label, less, value in (("one", 4.0, 100.0), ("two", 8.0, 50.0), ("mine", 2.0, 12345.6)):
        rows[label] = {"a: less": dict(value=less, unfinished=label == "two"),
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
    hatched = {(p.get_x(), int(p.get_y())) for p in ax.patches if p.get_hatch()}
    assert hatched == {(0, 1)}
    labels = [label for label in ax.get_yticklabels() if label.get_weight() == "bold"]
    assert [label.get_text() for label in labels] == ["mine"]
