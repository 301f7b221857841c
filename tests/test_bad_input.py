"""Bad input: one clear line, exit code not 0, nothing lost."""
import itertools
import json
import math
import os
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch

import runs
import train
from tests.helpers import (
    COMMANDS,
    NAMES,
    TINY,
    TINY_FLAGS,
    command,
    complaint,
    log_of,
    losses,
    make,
)


@pytest.mark.parametrize("flags, says", [
    ("--model cabel", "unknown model 'cabel': did you mean label or cable?"),
    ("--model classics", "model_classics.py does not answer to 'classics' but to learned, sinus"),
    ("--model cable --learning_rat 1", "argument --learning_rat: did you mean --learning_rate?"),
    ("--model rope --log_kernel", "unknown argument --log_kernel"),
    ("--model cable --size nanoo", "unknown size 'nanoo': did you mean nano?"),
    ("--data stdlb", "unknown corpus 'stdlb' (nor is it a file or folder): did you mean stdlib?"),
    ("--max_iters ten", "argument --max_iters: invalid int value: 'ten'"),
    ("--batch_size 0", "--batch_size must be at least 1"),
    ("--learning_rate -1", "--learning_rate must be more than 0"),
    ("--learning_rate inf", "--learning_rate must be more than 0, and finite"),
    ("--min_lr inf", "--min_lr must be 0 or more, and less"),
    ("--learning_rate 1e-4", "--min_lr 0.0004 is more than --learning_rate 0.0001: lower it, too"),
    ("--bema --rho inf", "--rho must be at least 1, and less"),
    (f"--batch_size {10**29}", "--batch_size must be at least 1, and less than 2^31"),
    (f"--gradient_accumulation_steps {10**29}", "--gradient_accumulation_steps must be at least"),
    (f"--n_layer {10**29}", "--n_layer must be at least 1, and at most 10000"),
    (f"--model cope --P {10**29}", "--P must be between -2^31 and 2^31"),
    (f"--model label --n_label {10**29}", "--n_label must be between -2^31 and 2^31"),
    ("--data set_complement --n 1000000000000", "--n must be between -2^31 and 2^31"),
    (f"--data dyck --k {10**29}", "--k must be between -2^31 and 2^31"),
    ("--data flipflop --p_ignore nan", "--p_ignore must be between"),
    ("--device cpu:99", "--device cpu:99: there is one cpu here"),
    ("--data ~nobody/x", "unknown corpus '~nobody/x' (nor is it a file or folder)"),
    ("--lr_decay cos", "--lr_decay must be one of cosine, linear, none"),
    ("--compile yes", "--compile must be one of auto, on, off"),
    ("--seed -1", "--seed must be between 0 and 8388607"),
    ("--n_layer 0", "--n_layer must be at least 1"),
    ("--n_embd 30 --n_head 4", "n_embd=30 is not divisible by n_head=4"),
    ("--model rope --n_embd 12 --n_head 4", "head size 3 is odd"),
    ("--norm peri", "norm='peri' is not one of pre, post"),
    ("--model postnorm --final_norm", "unknown argument --final_norm"),
    ("--model postnorm --norm none", "norm='none' is not one of pre, pre_final, output"),
    ("--model postnorm --pe alibi", "pe='alibi' is not one of rope, nope"),
    ("--model rope --pe abili", "pe=abili: what is called --model rope has rope"),
    ("--dropout 2", "--dropout must be in [0, 1)"),
    ("--dropout nan", "--dropout must be in [0, 1)"),
    ("--bema --kappa 2", "--kappa must be between 0 and 1"),
    ("--bema --eta -1", "--eta must be 0 or more"),
    ("--step tanh", "step='tanh' is not one of relu, softplus"),
    ("--no-causal", "unknown argument --no-causal"),
    ("--tokenizer gtp2", "unknown tokenizer 'gtp2': choose bytes or gpt2"),
    ("--dtype float16", "unknown dtype 'float16'"),
    ("--device cuda", "--device cuda: torch"),
    ("--device gpu", "unknown device 'gpu'"),
    ("--data empty.txt", "empty.txt has no text in it"),
    ("--data short.txt", "short.txt is too short: its"),
    ("--model", "argument --model: expected one argument"),
    ("--data=", "--model, --data and --size need a value"),
    ("--model label --n_label -5", "n_label must be 0"),
    ("--max_tokens -5", "--max_tokens must be 0 (all) or more"),
    ("--resume nowhere", "no checkpoint at nowhere"),
    ("--resume=", "--resume needs a run's folder"),
    ("--data flipflop --block_size 2", "block_size=2 must be even and at least 4"),
    ("--data flipflop --block_size 65", "block_size=65 must be even and at least 4"),
    ("--data flipflop --p_dense 1.5", "p_dense=1.5 must be between 0 and 1"),
    ("--data flip_flop", "unknown corpus 'flip_flop' (nor is it a file or folder): did you mean f"),
    ("--data flipflop --size tiny", "unknown size 'tiny': choose from nano, paper"),
    ("--data selective_copy --block_size 64", "block_size = 4n + 1 with n >= 2 symbols to copy"),
    ("--data recall --block_size 8", "8 pairs and a question do not fit into block_size=8"),
    ("--data recall --n_pairs 17", "n_pairs from 1 to n_keys"),
    ("--data counting --vars 0", "vars=0 must be between 1 and 5"),
    ("--data counting --max_ops 2", "counting needs max_ops from 3 to 10000"),
    ("--data set_complement --n 1", "set complement needs n >= 2"),
    ("--data set_complement --n 8 --block_size 8", "block_size from 1 to n - 1"),
    ("--data dyck --k 0", "dyck needs k, m and block_size of at least 1"),
    ("--data tomita --language 4", "language=4: choose from 3, 7"),
    ("--data tomita --p_end 1.5", "tomita needs p_switch and p_end between 0 and 1"),
    ("--data max_retrieval", "max_retrieval is numbers, not tokens"),
    ("--model cope --P 0", "P=0 must be at least 1"),
    ("--model cope --gates value", "gates='value' is not one of key, val, sep"),
    ("--model cope --slopes 1,2", "unknown argument --slopes"),
    ("--model cope_alibi --n_head 2 --slopes 1,2,3", "slopes='1,2,3' must be n_head=2 numbers"),
    ("--model cope_drop --P 1", "drop needs a table, and P of at least 2"),
    ("--model cope_mlp --drop", "drop needs a table, and P of at least 2"),
    ("--model cope_window --window -1", "window=-1 must be 0 or more"),
    ("--model cope_alibi --slopes 1,two", "slopes='1,two' must be numbers"),
    ("--model cope_alibi --slopes nan,1", "slopes='nan,1' must be numbers"),
    ("--model cope_mlp --slopes 1,2", "slopes='1,2' must be n_head=2 numbers, with position=alibi"),
    ("--model cope_mlp --plus absolute", "plus='absolute' is not one of none, relative, rope"),
    ("--model cope_rope --gates val", "plus=rope turns q and k"),
    ("--model cope_rope --n_embd 12 --n_head 4", "head size 3 is odd"),
    ("--model learned_hard --block_size 16 --data flipflop --p_ignore 2", "p_ignore=2.0 must be"),
    ("--model label --n_label 5 --n_embd 16", "tokens do not fit in n_label=5 labels"),
    ("--model diff --n_embd 16 --n_head 8", "head size 2 is not divisible by 4"),
    ("nonsense", "unexpected argument 'nonsense'"),
])
def test_train_says_what_is_wrong(trained, flags, says, tmp_path):
    if "cuda" in flags and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    words = ["--max_iters", 1, "--no-evaluate", "--out_dir", tmp_path / "run", *flags.split()]
    if "--data" not in flags:
        words += ["--data", "notes"]
        if "--n_" not in flags:
            words += ["--n_head", 2]
    if flags.endswith(("--model", "=")):  # their value is missing
        words = [*words[-4:], *words[:-4]]
    assert says in complaint(trained, "train.py", *words)


def damaged(trained, folder):
    """Checkpoints that are cut off, no checkpoint, another model's, of a model that is gone."""
    whole = (trained / "cable" / "ckpt.pt").read_bytes()
    (folder / "cut.pt").write_bytes(whole[:len(whole) // 2])
    (folder / "text.pt").write_text("not a checkpoint")
    torch.save({"weights": torch.ones(3)}, folder / "strange.pt")
    for name, model in (("other", "rope"), ("gone", "cabel")):
        checkpoint = torch.load(trained / "cable" / "ckpt.pt", weights_only=True)
        checkpoint["config"]["model"] = model
        torch.save(checkpoint, folder / f"{name}.pt")


def test_bad_checkpoints(trained, tmp_path):
    damaged(trained, tmp_path)
    for name in ("cut", "text", "strange"):
        for script in ("sample.py", "eval.py"):
            said = complaint(trained, script, tmp_path / f"{name}.pt")
            assert "is not a whole checkpoint" in said
    assert "do not fit --model rope" in complaint(trained, "sample.py", tmp_path / "other.pt")
    assert "unknown model 'cabel': did" in complaint(trained, "sample.py", tmp_path / "gone.pt")
    assert "no checkpoint at nowhere" in complaint(trained, "eval.py", "nowhere")


def set_config(**changes):
    return lambda checkpoint: checkpoint["config"].update(changes)


def set_weights(change):
    """The first of the weights, changed."""
    def changed(checkpoint):
        name = next(iter(checkpoint["model"]))
        checkpoint["model"][name] = change(checkpoint["model"][name])
    return changed


FOREIGN = {  # what was changed in a checkpoint of ours, and what is said about it
    "layers": (set_config(n_layer=10**9), "n_layer=1000000000 with"),
    "width": (set_config(n_embd=10**9, n_head=1), "n_embd=1000000000 with weights of"),
    "heads": (set_config(n_head=10**15), "n_head=1000000000000000 with"),
    "one more layer": (set_config(n_layer=2), "do not fit --model cable"),
    "words for numbers": (set_config(n_layer="1"), "n_layer='1' is no int"),
    "numbers for words": (set_config(tokenizer=3), "tokenizer=3 is no str"),
    "a list": (set_config(dropout=[0.0]), "dropout of type list"),
    "a truth": (set_config(block_size=True), "block_size=True is no int"),
    "nan": (set_config(dropout=math.nan), "dropout=nan"),
    "30 digits": (set_config(block_size=10**30), "block_size=1000"),
    "numbers": (set_config(data="max_retrieval"), "its data is max_retrieval: numbers, not tokens"),
    "an odd name": (set_config(**{"a b": 1}), "a setting called 'a b'"),
    "another size": (set_config(n_embd=8), "do not fit --model cable"),
    "a bad choice": (set_config(norm="no"), "norm='no' is not one of pre, post"),
    "no seed": (lambda c: c["config"].pop("seed"), "its config has no seed"),
    "no tokenizer": (lambda c: c["config"].pop("tokenizer"), "its config has no tokenizer"),
    "no weights": (lambda c: c["model"].clear(), "with 0 tensors of weights"),
    "nan weights": (set_weights(lambda x: x * math.nan), "are not finite"),
    "another shape": (set_weights(lambda x: x[:1].contiguous()), "do not fit --model cable"),
    "one number": (set_weights(lambda x: torch.zeros(()).expand(10**9, 10**9)), "not a plain"),
    "whole numbers": (set_weights(torch.Tensor.long), "are not a plain tensor"),
    "a number": (set_weights(lambda x: 3), "are not a plain tensor"),
    "config": (lambda c: c.update(config=3), "is not a whole checkpoint"),
    "iter": (lambda c: c.update(iter="2"), "is not a whole checkpoint"),
    "a step before the first": (lambda c: c.update(iter=-1), "it has iter=-1"),
    "seconds": (lambda c: c.update(seconds=math.nan), "it has seconds=nan"),
    "bema": (lambda c: c.update(bema=3), "cannot be used"),
    "other bema": (lambda c: c.update(bema=dict(start=dict(x=torch.ones(2)))), "BEMA weights x"),
    "etc": (set_config(data="/etc/passwd"), "/etc/passwd is not what"),
    "usr": (set_config(data="/usr"), "was never prepared here"),
}


@pytest.mark.parametrize("what", FOREIGN)
def test_foreign_checkpoints_are_refused_before_anything_is_built(what, trained, tmp_path):
    change, says = FOREIGN[what]
    checkpoint = torch.load(trained / "cable" / "ckpt.pt", weights_only=True)
    change(checkpoint)
    torch.save(checkpoint, tmp_path / "ckpt.pt")
    before = sorted((trained / "prepared").iterdir())
    scripts = [("eval.py",), ("train.py", "--resume")]
    if what not in ("etc", "usr"):  # a sample needs no text
        scripts += [("sample.py",), ("maps.py", "attention")]
    for words in scripts:
        assert says in complaint(trained, *words, tmp_path)
    assert sorted((trained / "prepared").iterdir()) == before


def test_a_foreign_optimizer_and_settings_of_training(trained, tmp_path):
    shutil.copytree(trained / "notes", tmp_path / "notes")
    for change, says in (
            (lambda c: c["optimizer"]["state"][0].update(exp_avg=torch.ones(3)), "does not fit"),
            (lambda c: c.update(optimizer=3), "the optimizer's state in"),
            (set_config(bema=True), "the BEMA weights in"),
            (set_config(learning_rate="fast"), "learning_rate='fast' is no float"),
            (set_config(evaluate=1), "evaluate=1 is no bool")):
        checkpoint = torch.load(trained / "cable" / "ckpt.pt", weights_only=True)
        change(checkpoint)
        torch.save(checkpoint, tmp_path / "ckpt.pt")
        assert says in complaint(trained, "train.py", "--resume", tmp_path, "--max_iters", 3)


def test_the_text_of_a_checkpoint_from_elsewhere_has_to_be_named(trained, home):
    """Its path may be there: it is not read unless it was prepared here, or is named."""
    shutil.copytree(trained / "cable", home / "run")
    said = complaint(home, "eval.py", "run", "--lengths", 16)
    assert "name the text: --data" in said and not (home / "prepared").exists()
    command(home, "eval.py", "run", "--lengths", 16, "--data", "notes")
    command(home, "train.py", "--resume", "run", "--data", "notes", "--max_iters", 3,
            "--no-evaluate")


@pytest.mark.parametrize("name", NAMES)
def test_shapes_are_known_before_a_model_is_built(name):
    state = torch.get_rng_state()
    config = TINY | runs.models()[name][1] | dict(model=name)
    if name == "learned_hard":
        config["block_size"] = 16
    ours = runs.shapes(config)
    assert torch.equal(state, torch.get_rng_state())
    assert ours == {n: x.shape for n, x in runs.make_model(config).state_dict().items()}


@pytest.mark.parametrize("flags, says", [
    ("cable --n_layer 3", "--n_layer 3 contradicts the run being resumed, which has n_layer=1"),
    ("cable --log_interval 0", "--log_interval must be at least 1"),
    ("cable --max_iters 1", "--max_iters 1: the run is at iter 2 already"),
    ("cable --model rope", "--model rope contradicts the run being resumed, which has model=cable"),
    ("cable --seed 3", "--seed 3 contradicts the run being resumed"),
    ("cable --no_such_flag 1", "unknown argument --no_such_flag"),
    ("rope --data counting", "--data counting contradicts the run being resumed, which has data="),
])
def test_a_resumed_run_cannot_become_another(trained, flags, says):
    assert says in complaint(trained, "train.py", "--resume", *flags.split())


def test_a_folder_that_holds_a_run_is_not_overwritten(trained):
    before = (trained / "cable" / "ckpt.pt").read_bytes()
    said = complaint(trained, "train.py", "--data", "notes", *TINY_FLAGS, "--out_dir", "cable")
    assert "cable already holds a run; continue it with --resume cable" in said
    assert (trained / "cable" / "ckpt.pt").read_bytes() == before


def refused_while_locked(home, *words):
    """Another process is at work in the folder run: it is left as it was."""
    before = (home / "run" / "log.jsonl").read_text()
    with open(home / "run" / "lock", "w") as lock:
        train.fcntl.flock(lock, train.fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError) as e:
            command(home, "train.py", *words)
    with pytest.raises(SystemExit, match="error: another process is at work in this folder"):
        runs.in_one_line(e.type, e.value, None)
    assert (home / "run" / "log.jsonl").read_text() == before


def test_a_living_run_is_not_resumed_a_second_time(home):
    """Its log has lines that are newer than its checkpoint: they are the living run's."""
    command(home, "train.py", "--data", "notes", "--max_iters", 2, "--no-evaluate", *TINY_FLAGS,
            "--out_dir", "run")
    with open(home / "run" / "log.jsonl", "a") as log:
        log.write('{"iter": 3, "loss": 1.0}\n')
    refused_while_locked(home, "--resume", "run", "--max_iters", 4)
    command(home, "train.py", "--resume", "run", "--max_iters", 4, "--no-evaluate")
    assert set(losses(home / "run")[0]) == {1, 2, 3, 4}


def test_a_run_that_ended_before_its_first_checkpoint_starts_again(home):
    flags = "--data", "notes", "--max_iters", 2, "--no-evaluate", *TINY_FLAGS
    (home / "run").mkdir()
    for text in ("", '{"iter": 1, "loss": 9}\n'):
        (home / "run" / "log.jsonl").write_text(text)
        said = complaint(home, "train.py", "--resume", "run")
        assert "ended before its first; start it again with --out_dir run" in said
    refused_while_locked(home, *flags, "--out_dir", "run")
    command(home, "train.py", *flags, "--out_dir", "run")
    assert set(losses(home / "run")[0]) == {1, 2} and losses(home / "run")[0][1] != 9
    assert "already holds a run" in complaint(home, "train.py", *flags, "--out_dir", "run")


def test_a_checkpoint_without_its_log_is_not_overwritten(home, trained):
    flags = "--data", "notes", "--max_iters", 1, "--no-evaluate", *TINY_FLAGS
    for out in ("run", "out/cable-notes-nano"):
        (home / out).mkdir(parents=True)
        shutil.copy(trained / "cable" / "ckpt.pt", home / out)
    assert "already holds a run" in complaint(home, "train.py", *flags, "--out_dir", "run")
    command(home, "train.py", "--model", "cable", *flags)
    for out in ("run", "out/cable-notes-nano"):
        assert [path.name for path in (home / out).iterdir()] == ["ckpt.pt"]
        assert (home / out / "ckpt.pt").read_bytes() == (trained / "cable/ckpt.pt").read_bytes()
    assert (home / "out/cable-notes-nano-2/ckpt.pt").exists()


def test_a_model_whose_positions_end_is_trained_and_evaluated_without_an_error(home):
    """What it could write is written."""
    out, err = command(home, "train.py", "--model", "learned", "--data", "notes", "--max_iters", 1,
                       *TINY_FLAGS)
    assert "error" not in out + err
    assert re.search(r"--- 16 tokens, .*; learned positions end at block_size=16; 17 ", err)
    assert (home / "out/learned-notes-nano/eval.json").exists()


@pytest.mark.parametrize("model", ["learned", "relative"])
def test_a_table_of_positions_cannot_begin_with_one_of_another_length(home, trained, model):
    flags = "--model", model, "--data", "notes", "--max_iters", 1, "--no-evaluate", *TINY_FLAGS
    command(home, "train.py", *flags, "--out_dir", "run")
    said = complaint(home, "train.py", *flags, "--block_size", 8, "--init_from", "run")
    assert "--init_from run: its block_size is 16, the new run's 8" in said
    said = complaint(home, "train.py", *flags, "--block_size", 8, "--n_embd", 32, "--init_from",
                     "run")
    assert "--init_from run: its n_embd is 16, the new run's 32" in said


DYCK_PANEL = json.dumps(dict(data="dyck", k=2, m=3, block_size=16, batch_size=2, longest=32,
                             at=[17, 32]))


@pytest.mark.parametrize("words, says", [
    ("sample.py cable --prompt=", "the prompt is empty"),
    ("sample.py cable --prompt_file gone.txt", "could not read gone.txt"),
    ("sample.py cable --prompt_file empty.txt", "the prompt is empty"),
    ("sample.py cable --prompt_file ''", "could not read "),
    ("sample.py cable --prompt x --prompt_file empty.txt", "--prompt or --prompt_file, not both"),
    ("sample.py cable --max_new_tokens 0", "--max_new_tokens and --num_samples must be at least 1"),
    ("sample.py cable --temperature nan", "--temperature and --top_k must be 0 or more"),
    ("sample.py cable --temperature 1e-300", "--temperature must be 0, which is greedy, or at"),
    ("sample.py cable --max_new_tokens 1000000000000", "--max_new_tokens must be at most 2147"),
    ("sample.py cable --device cpu:99", "--device cpu:99: there is one cpu here"),
    (f"eval.py cable --lengths 16 {10**29}", "--lengths must be at most 2147483647"),
    ("eval.py cable --data=", "--data needs a value"),
    (f"bench.py decode --context {10**29}", "--context must be at most 2147483647"),
    ("plot.py lengths types.json", "types.json cannot be drawn (ValueError: "),
    ("plot.py lengths deep.json", "is not a file that eval.py"),
    ("plot.py errors rope --out x ''", "unexpected argument ''"),
    ("sample.py cable --seed -1", "--seed must be 0 or more"),
    ("sample.py learned --prompt 'more than sixteen'", "learned positions end at block_size=16"),
    ("sample.py rope", "was trained on flipflop, which has no text to write"),
    ("eval.py learned --lengths 40", "no length could be scored"),
    ("eval.py cable --lengths 99999", "are too few for a window of 99999"),
    ("eval.py cable --split tset", "unknown split 'tset': did you mean test?"),
    ("eval.py tra --split desne", "unknown split 'desne': did you mean dense?"),
    ("eval.py cable --lengths 0", "--lengths, --sequences and --queries must be at least 1"),
    ("eval.py cable --tokens -1", "--tokens and --seed 0 or more"),
    ("eval.py cable --data flipflop", "notes, not on flipflop: it can be scored on"),
    ("eval.py cable --data gone", "unknown corpus 'gone' (nor is it a file or folder)"),
    ("eval.py rope --data notes", "rope/ckpt.pt was trained on flipflop, not on"),
    ("eval.py rope cable", "was trained on"),
    ("eval.py cable --sequences 5", "--sequences is for a synthetic task; text has --tokens"),
    ("eval.py cable --tokens 30 --lengths 16 32 --strided", "are too few for a window of 32"),
    ("eval.py rope --strided", "--strided is for text"),
    ("eval.py rope --tokens 100", "--tokens is for text; a synthetic task has --sequences"),
    ("eval.py rope --lengths 7", "block_size=7 must be even"),
    ("eval.py rope --bema", "has no BEMA weights: it was trained without --bema"),
    ("eval.py cable --kernel on", "unknown kernel 'on': choose from auto, off"),
    ("eval.py cable --dtype half", "unknown dtype 'half'"),
    ("plot.py", "the following arguments are required: kind"),
    ("plot.py maps", "invalid choice: 'maps'"),
    ("plot.py lengths cable/log.jsonl", "is not a file that eval.py"),
    ("plot.py lengths odd.json", "is not a file that eval.py"),
    ("plot.py scores odd.json", "is not a file that eval.py"),
    ("plot.py trials odd.json", "is not a file that eval.py"),
    ("plot.py attention odd.json", "is not a file that eval.py"),
    ("plot.py positions odd.json", "has no tvd or auc by position"),
    ("plot.py curves odd.json", "is not a file that eval.py"),
    ("plot.py curves nowhere", "could not read"),
    ("plot.py curves cable --out x.xyz", "use .png, .pdf or .svg"),
    ("plot.py errors cable", "no scores by step in there"),
    ("plot.py errors rope --metric exact_mach", "has no exact_mach: did you mean exact_match?"),
    ("maps.py attention learned", "learned positions end at block_size=16"),
    ("maps.py attention cable --split val", "--split is for synthetic tasks"),
    ("maps.py attention rope --kinds steps", "invalid choice: 'steps'"),
    ("maps.py attention rope --prompt x", "flipflop has no text: leave out --prompt"),
    ("maps.py attention rope --leng 16", "unknown argument --leng"),
    ("maps.py attention rope --split desne", "unknown split 'desne': did you mean dense?"),
    ("maps.py attention cable --layer 5", "--layer 5: the model has layers 0 to 0"),
    ("maps.py attention cable --length -1", "--seed and --length must be 0 or more"),
    ("maps.py attention cable --prompt abc --out x.xyz", "use .png, .pdf or .svg"),
    ("maps.py steps rope cable", "these runs read different sequences"),
    ("maps.py play rope cable", "these runs read different sequences"),
    ("maps.py play learned --prompt 'more than sixteen'", "learned positions end at block_size=16"),
    ("maps.py play tra --out x.png", "cannot write x.png: use .html"),
    ("maps.py play tra --length 16 -1", "--seed and --length must be 0 or more"),
    ("maps.py play tra --split iid desne", "unknown split 'desne': did you mean dense?"),
    ("maps.py play tra --heads some", "invalid choice: 'some'"),
    ("reproduce.py cable_tabel1", "unknown entry 'cable_tabel1': did you mean cable_table"),
    ("reproduce.py cable_table1 --jobs 0", "--jobs must be at least 1"),
    ("reproduce.py --rows t5 cable_table1", "name the table first: python reproduce.py ENTRY"),
    ("reproduce.py --seeds 2", "name the table first: python reproduce.py ENTRY"),
    ("reproduce.py postnorm_fig1 --seeds 2", "--seeds is not for postnorm_fig1, which has trials"),
    ("reproduce.py postnorm_fig1 --rows peri", "--rows is not for postnorm_fig1, which has trials"),
    ("reproduce.py postnorm_fig1 --compile", "--compile is not for postnorm_fig1, which has"),
    ("reproduce.py postnorm_fig1 --missing", "--missing is not for postnorm_fig1, which has"),
    ("reproduce.py cable_table1 --trials 2", "--trials is not for cable_table1, which has seeds"),
    ("experiments.minimal --scheme peri --out x.json --panel 1 --trials 0", "must be at least 1"),
    ("experiments.minimal --scheme peri --out x.json --panel '{}'", "--panel has no data"),
    ("experiments.minimal --scheme perri --out x.json --panel '{}'", "did you mean peri?"),
    ("experiments.minimal --scheme peri --out x.json --peak -1 --panel '{}'", "--peak between 0"),
    ("experiments.minimal --scheme peri --out x.json --panel "
     "'{\"data\": \"recall\", \"batch_size\": 1, \"longest\": 9, \"at\": [1, 2]}'",
     "recall has no true distribution"),
    (f"experiments.minimal --scheme none --out x.json --panel '{DYCK_PANEL}'",
     "--scheme none do not fit: norm='none' is not one of"),
    (f"experiments.minimal --scheme pre --seed -1 --out x.json --panel '{DYCK_PANEL}'",
     "--seed -1 must be from 0"),
    ("experiments.minimal --scheme pre --out x.json --panel "
     + f"'{DYCK_PANEL}'".replace("[17, 32]", "5"), "--panel and --scheme pre do not fit"),
    ("experiments.minimal --scheme pre --out x.json --panel "
     + f"'{DYCK_PANEL}'".replace("[17, 32]", "[17, 99]"), "at has to be [from, to], two lengths"),
    ("experiments.minimal --scheme pre --out x.json --panel "
     + f"'{DYCK_PANEL}'".replace('"longest": 32', '"longest": "32"'), "longest has to be a whole"),
    ("bench.py decod", "unknown 'decod': did you mean decode?"),
    ("bench.py train --models cabel", "unknown model 'cabel': did you mean label or cable?"),
    ("bench.py train --size nan", "unknown 'nan': did you mean nano?"),
    ("bench.py train --beside nop", "unknown model 'nop': did you mean nope?"),
    ("bench.py generate --length -5", "--length must be 0"),
    ("bench.py attention --length 5", "attention takes --lengths"),
    ("bench.py attention --ways compield", "unknown 'compield': did you mean compiled?"),
    ("bench.py train --run cable", "--run is for attention"),
    ("bench.py attention --run cable --models cable", "--run is a model already"),
])
def test_bad_requests(trained, words, says):
    before = sorted(path.name for path in trained.rglob("*"))
    assert says in complaint(trained, *shlex.split(words))
    if "learned" not in words:  # which is found out while it is scored
        assert sorted(path.name for path in trained.rglob("*")) == before


def test_a_changed_corpus_stops_a_resume_and_a_moved_one_does_not(home):
    flags = "--model", "cable", "--data", "notes", "--max_iters", 2, "--no-evaluate", *TINY_FLAGS
    command(home, "train.py", *flags, "--out_dir", "run")
    shutil.copytree(home / "notes", home / "moved")
    command(home, "train.py", "--resume", "run", "--data", "moved", "--max_iters", 3,
            "--no-evaluate")
    assert max(losses(home / "run")[0]) == 3
    (home / "moved" / "0.txt").write_text("something else " * 60)
    again = "train.py", "--resume", "run", "--max_iters", 4
    assert "has changed since" in complaint(home, *again)
    assert "is not what run/ckpt.pt was trained on" in complaint(home, "eval.py", "run")
    assert torch.load(home / "run" / "ckpt.pt", weights_only=True)["iter"] == 3


def test_every_validation_comes_with_a_line_about_the_steps_before_it(home):
    """Else the time of steps since the last line would be lost when the clock starts anew."""
    command(home, "train.py", "--data", "notes", "--max_iters", 7, "--no-evaluate", *TINY_FLAGS,
            "--eval_interval", 3, "--log_interval", 5, "--out_dir", "run")
    log = log_of(home / "run")
    assert [row["iter"] for row in log if "loss" in row] == [3, 5, 6, 7]
    assert [row["iter"] for row in log if "val_loss" in row] == [3, 6, 7]


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which(os.environ.get("CXX", "g++")), reason="no C++ compiler")
def test_a_compiled_training_has_the_same_losses(home):
    """Of the models whose attention goes through kernels/ on a CPU, and of one whose does not."""
    found = {}
    for model, compiled in itertools.product(("cable", "tra", "rope"), ("on", "off")):
        run = f"{model}-{compiled}"
        said, _ = command(home, "train.py", "--model", model, "--data", "notes", "--max_iters", 3,
                          "--no-evaluate", *TINY_FLAGS, "--compile", compiled, "--out_dir", run)
        assert ("torch.compile" in said) == (compiled == "on")
        found[run] = [row["loss"] for row in log_of(home / run) if "loss" in row]
    for model in ("cable", "tra", "rope"):
        assert len(found[f"{model}-on"]) == 3
        assert found[f"{model}-on"] == pytest.approx(found[f"{model}-off"], abs=1e-3)


def test_compiling_needs_a_compiler(home, monkeypatch):
    monkeypatch.setattr(train, "CXX", "g+++")
    flags = "--data", "notes", *TINY_FLAGS, "--compile", "on", "--out_dir", "run"
    assert "there is no g+++ here" in complaint(home, "train.py", *flags)
    assert not (home / "run").exists()


def test_an_exploding_loss_is_named(home):
    flags = "--learning_rate", "1e30", "--grad_clip", 0, "--warmup_iters", 1
    said = complaint(home, "train.py", "--data", "notes", "--max_iters", 40, "--no-evaluate",
                     *TINY_FLAGS, *flags, "--out_dir", "run")
    assert "error: the loss is" in said and "try a lower --learning_rate" in said
    assert not (home / "run" / "ckpt.pt").exists()


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    """The last step may break them after a loss that was finite."""
    model = make("nope")
    next(model.parameters()).data[0] = math.nan
    with pytest.raises(SystemExit, match="weights are not finite at iter 3; try a lower"):
        train.save(tmp_path, True, model, None, dict(iter=3))
    assert not list(tmp_path.iterdir())


def test_a_disk_that_fills_up_leaves_the_previous_checkpoint(home, monkeypatch):
    flags = "--data", "notes", "--max_iters", 2, "--no-evaluate", *TINY_FLAGS
    command(home, "train.py", *flags, "--out_dir", "run")
    before = {path.name: path.read_bytes() for path in (home / "run").glob("*.pt")}
    whole = torch.save

    def half(value, path):
        whole(value, path)
        path.write_bytes(path.read_bytes()[:1000])
        raise RuntimeError("[enforce fail at inline_container.cc] . unexpected pos\nmore lines")
    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(OSError, match=r"could not write run/(best|ckpt).pt \(disk full, or a "
                       r"limit reached: it needs 0.\d MB, [\d,.]+ MB are free; the previous one"):
        command(home, "train.py", "--resume", "run", "--max_iters", 5, "--no-evaluate")
    assert {path.name: path.read_bytes() for path in (home / "run").glob("*.pt")} == before
    assert not list((home / "run").glob("*tmp*"))


def test_what_ends_a_script_is_said_in_one_line_or_not_at_all(monkeypatch, capfd):
    """Ctrl-C, a full disk; a mistake of ours keeps its traceback."""
    for error, code in ((KeyboardInterrupt(), 130), (OSError("no space"), "error: no space")):
        with pytest.raises(SystemExit) as e:
            runs.in_one_line(type(error), error, None)
        assert e.value.code == code
    assert capfd.readouterr().err == ""
    for error in (MemoryError("1 TiB"), torch.OutOfMemoryError("CUDA out of memory"),
                  RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried")):
        with pytest.raises(SystemExit, match="error: this does not fit into memory; try smaller"):
            runs.in_one_line(type(error), error, None)
    mistake = ZeroDivisionError("ours")
    runs.in_one_line(type(mistake), mistake, None)
    assert "ZeroDivisionError: ours" in capfd.readouterr().err
    for script, module in COMMANDS.items():
        source = Path(module.__file__).read_text()
        end = source[source.index('\nif __name__ == "__main__":\n'):]
        assert end.index("sys.excepthook = runs.in_one_line\n") < end.index("    main()\n"), script
