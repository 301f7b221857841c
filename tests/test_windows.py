"""experiments/windows.py: trained models that read their last W tokens alone."""
import json

import pytest
import torch

import train
from common.names import make_model
from experiments import windows

W, T = 8, 21


@pytest.mark.parametrize("name", ["alibi", "cable", "cope", "fox", "kerple", "nope", "tra"])
def test_one_layer_reads_what_a_model_of_the_last_tokens_reads(name):
    torch.manual_seed(0)
    model = make_model(dict(model=name, block_size=16, vocab_size=11, n_layer=1, n_head=2,
                            n_embd=32)).eval()
    for p in model.parameters():  # also those that start at zero
        torch.nn.init.normal_(p, std=0.3)
    idx = torch.randint(11, (2, T))
    logits, _ = windows.Windowed(model, W)(idx)
    for t in range(T):
        alone, _ = model(idx[:, max(0, t + 1 - W):t + 1])
        torch.testing.assert_close(logits[:, t], alone[:, -1], atol=1e-5, rtol=1e-5)


def test_two_layers_reach_two_windows_back():
    torch.manual_seed(0)
    model = make_model(dict(model="alibi", block_size=16, vocab_size=11, n_layer=2, n_head=2,
                            n_embd=32)).eval()
    idx = torch.randint(11, (1, T))
    logits, _ = windows.Windowed(model, W)(idx)
    for back, reached in ((2 * (W - 1), True), (2 * (W - 1) + 1, False)):
        other = idx.clone()
        other[0, T - 1 - back] = (idx[0, T - 1 - back] + 1) % 11
        changed, _ = windows.Windowed(model, W)(other)
        assert (changed[0, -1] != logits[0, -1]).any() == reached


def test_the_command_has_a_row_for_each_window(tmp_path):
    train.main(["--data", "recall", "--model", "cable", "--max_iters", "1", "--n_layer", "1",
                "--n_embd", "16", "--n_head", "2", "--out_dir", str(tmp_path / "run"),
                "--no-evaluate"])
    out = tmp_path / "window.json"
    windows.main([str(tmp_path / "run"), "--windows", "16", "64", "--lengths", "64",
                  "--amount", "4", "--out", str(out)])
    result = json.loads(out.read_text(encoding="utf-8"))
    assert [row["label"] for row in result["runs"]] == ["cable", "cable, last 16",
                                                        "cable, last 64"]
    whole, _, same = (row["scores"]["64"] for row in result["runs"])
    assert whole == same  # the window is the whole string
