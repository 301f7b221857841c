"""The diff is the lesson: what the model files share is the same, letter for letter."""
import difflib
import inspect
import re
import shutil
import subprocess

import pytest

from tests.helpers import MODEL_FILES, ROOT, module_of

# How many lines a file may add and remove, which ones of model_baseline.py, and words that mark
# those that it adds.
ATTEND = "        y = attention(q, k, v)"
FORWARD = "    def forward(self, x, cache):"
KEEP = ('            k, v = cache.append(f"k{self.layer}", k), '
        'cache.append(f"v{self.layer}", v)')
LOOP, EMBED = "            x = block(x, cache)", "        x = self.drop(self.wte(idx))"
NORM = '    norm: str = "pre"       # pre or post: where the norms sit, see Block'
QK_NORM = "    qk_norm: bool = False   # RMS-normalise q and k per head, without a learned scale"
ZEROS = "                nn.init.zeros_(p)"
LAYERS = "        for block in self.h:"
CHECK = '        if config.norm not in ("pre", "post"):'
REFUSE = '            raise ValueError(f"norm={config.norm!r} is not one of pre, post")'
LN_F = "        self.ln_f = nn.RMSNorm(config.n_embd, eps=1e-6)"
CHANGES = dict(
    classics=(205, [FORWARD, ATTEND, EMBED, LAYERS, LOOP],
              r"\bpe\b|\bpos\b|\bstart\b|capped|n_label|ENCODINGS|tables|for layer, block"),
    cable=(75, [ATTEND], r"w_c|w_s|step|weight: bool|\ba\b|\bS\b"),
    cope=(108, [FORWARD, ATTEND, LAYERS, LOOP],
          r"gates|gate_keys|w_g|pos_emb|\bP\b|share|tables|\bd = |for layer, block"),
    rope=(220, [FORWARD, KEEP, ATTEND, LOOP],
          r"repair|turn|waves|\bat\b|head size|n_embd // |start|ntk|keeps|cache is"
          r"|nope|window|kind|positions|distance|log_n|\bbase\b|share|original_length"
          r"|= self.config$|math.inf and"),
    tra=(72, [NORM, QK_NORM, ATTEND], r"w_f|log_decay|norm: str = \"post\"|qk_norm: bool = True"),
    fox=(45, [ATTEND, ZEROS], r"w_f|log_f|gate_bias"),
    stick=(64, [ATTEND], r"stick_attention|gate_bias"),
    ssmax=(34, [ATTEND], r"learned|\bs\b|self\.s|else:|block_size"),
    path=(116, [ATTEND], r"rank|conv|w_|\bw\b|\bu\b|keys_after|reflected|path_attention|"
          r"groups|torch.promote_types|autocast|cache is not None|x.shape|past"),
    diff=(76, [FORWARD, ATTEND, LOOP],
          r"l_q1|l_init|nn.Parameter|ln_head|rotate|lam\b|\bpos\b|start|\bd = "
          r"|n_head % 4|head size|divis"),
    postnorm=(107, [NORM, FORWARD, CHECK, REFUSE, LN_F, EMBED, LOOP],
              r"norm|SCHEMES|rotate|\bpos\b|\bstart\b|final|first|ln_0|rope|\bpe\b|raise"))
SHARED = ("GPTConfig", "Cache", "CausalSelfAttention", "MLP", "Block", "GPT")


def source_of(path, name):
    """The lines of one of a file's classes and functions; none where it has it not."""
    member = getattr(module_of(path), name, None)
    return inspect.getsource(member).splitlines() if member else []


def code_of(lines, name):
    """Comments may differ, but not those of the configuration, which are a user's help."""
    return lines if name == "GPTConfig" else [line.split("  #")[0].rstrip() for line in lines]


FILES = {path.stem.removeprefix("model_"): path for path in MODEL_FILES}


@pytest.mark.parametrize("method", CHANGES)
def test_the_shared_parts_of_the_model_files_are_the_same(method):
    """Copies are deliberate; copies that drift would be a hidden variable in every table."""
    path, (_, may_change, words), removed = FILES[method], CHANGES[method], []
    for name in SHARED:
        if (method, name) in (("postnorm", "Block"), ("rope", "Cache")):
            continue  # its subject; held to the others' by its outputs
        ours, theirs = (code_of(source_of(p, name), name)
                        for p in (FILES["baseline"], path))
        for line in difflib.ndiff(ours, theirs):
            if line[0] == "-":
                removed.append(line[2:])
            if line[0] == "+" and line[2:]:  # blank lines aside
                assert re.search(words, line), f"{path.name}: {name} adds {line[2:].strip()}"
    assert removed == may_change, f"{path.name} changes other lines of model_baseline.py"


def test_what_several_model_files_have_is_the_same():
    """Their imports, rotate, and attention where it is the plain GPT's."""
    paths = [FILES[method] for method in ("baseline", *CHANGES)]
    plain = [FILES[method] for method in ("baseline", "postnorm", "diff")]
    for name, those in dict(rotate=paths, attention=plain).items():
        sources = {"\n".join(source_of(path, name)) for path in those} - {""}
        assert len(sources) == 1, f"{name} differs between model files"
    head = re.compile(r'"""\n(import math.*?)\n@dataclass\n', re.S)
    chunk = re.compile(r"CHUNK = .*\n\n")  # PaTH's
    texts = (head.search(path.read_text(encoding="utf-8"))[1] for path in paths)
    assert len({chunk.sub("", text) for text in texts}) == 1


@pytest.mark.skipif(not shutil.which("git"), reason="needs git")
def test_the_diff_is_the_lesson():
    for name, (most, *_) in CHANGES.items():
        counted = subprocess.run(
            ["git", "diff", "--no-index", "--numstat", "model_baseline.py", FILES[name]],
            cwd=ROOT, capture_output=True, text=True).stdout.split()
        added, removed = int(counted[0]), int(counted[1])
        assert added + removed <= most, f"{name}: {added} lines added, {removed} removed"
