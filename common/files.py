"""Files that are whole or not there at all, and how a script ends."""
import json
import os
import shutil
import signal
import subprocess
import sys
import traceback
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

for stream in (sys.stdout, sys.stderr):
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="replace")  # a terminal may lack a character


# -----------------------------------------------------------------------------
# how a script ends

def fail(message):
    """A user's mistake: one line, exit code 1."""
    sys.exit(f"error: {message}")


def nearest(word, names):
    """What to say after an unknown word: the nearest names, else all of them."""
    close = get_close_matches(word, names, n=2, cutoff=0.6)
    if close:
        return f"did you mean {' or '.join(close)}?"
    return f"choose from {', '.join(names)}"


def say(words):
    """
    print() that never ends a run. Where nobody reads any more (a closed terminal, a `| tee` that is
    killed with us, a full disk under a log) what follows is said to nobody, by our children too.
    """
    try:
        print(words, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def asked_to_stop():
    """
    Within it Ctrl-C, kill and a closed terminal only add to a list. Yields the list, and a function
    to call at every step: the first kernel that Triton compiles gives these signals to LLVM, and of
    two that come at once, as from `timeout`, the second would end the process. What the shell has
    us ignore stays ignored (nohup); afterwards every signal does what it did before.
    """
    stop, before = [], {}
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)  # Windows has no SIGHUP
        if number and signal.getsignal(number) != signal.SIG_IGN:
            before[number] = signal.getsignal(number)

    def listen():
        for number in before:
            signal.signal(number, lambda *_: stop.append(1))
    listen()
    try:
        yield stop, listen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


SMALLER = dict(  # what to do in a script where memory ends
    train="halve --batch_size, and double --gradient_accumulation_steps",
    eval="take shorter --lengths", sample="take a shorter prompt, or fewer --max_new_tokens")


def in_one_line(kind, error, trace):
    """
    For sys.excepthook. Ctrl-C, a full disk or memory and a ValueError that one of our files raises
    end a script in one line. Anything else, as a bug in your model, keeps its traceback.
    """
    if issubclass(kind, KeyboardInterrupt):
        os._exit(130)
    if issubclass(kind, BrokenPipeError):  # `python sample.py | head`
        os._exit(141)
    last = traceback.extract_tb(trace)[-1]
    file = Path(last.filename)
    ours = file.is_relative_to(ROOT) and "site-packages" not in file.parts  # ./.venv lies in ROOT
    ours = ours and (last.line or "").startswith("raise ")
    message = str(error)
    names = {cls.__name__ for cls in kind.__mro__}  # torch's, which not all of us import
    if names & {"MemoryError", "OutOfMemoryError"} or "can't allocate memory" in message:
        less = SMALLER.get(Path(sys.argv[0]).stem, "ask for less")
        message = f"this does not fit into memory: {less}"
    elif not issubclass(kind, OSError) and not (issubclass(kind, ValueError) and ours):
        sys.__excepthook__(kind, error, trace)
        return
    print(f"error: {message}", file=sys.stderr)


def script(name, *words):
    """
    Run another of our scripts, `eval.py` or the module `figures.plot`, showing the command; where
    it fails, so do we.
    """
    module, words = name.removesuffix(".py"), [*map(str, words)]
    say(f"\n$ python {name if module != name else '-m ' + name} {' '.join(words)}")
    paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])  # from any folder
    env = os.environ | dict(PYTHONPATH=os.pathsep.join(paths))
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a kill ends it, too
    try:
        code = subprocess.run([sys.executable, "-P", "-m", module, *words], env=env).returncode
    finally:
        signal.signal(signal.SIGTERM, before)
    if code:
        sys.exit(code)


# -----------------------------------------------------------------------------
# writing

def write_safely(path, write):
    """write(tmp), then rename: the file is as it was, or whole, after a power cut, too."""
    path = Path(path)
    tmp = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        write(tmp)
        with open(tmp, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(tmp, path)
    except (OSError, RuntimeError) as e:  # which torch.save raises where the disk is full
        room, why = shutil.disk_usage(path.parent).free / 1e6, str(e).splitlines()[0]
        raise OSError(f"could not write {path}, {room:,.1f} MB are free there: {why}") from e
    finally:
        tmp.unlink(missing_ok=True)


def write_text(path, text):
    write_safely(path, lambda tmp: tmp.write_text(text, encoding="utf-8"))


def strict(value):
    """As JSON has it; None for NaN and the infinities."""
    return json.loads(json.dumps(value), parse_constant=lambda name: None)


def write_json(path, value):
    """Indented, strict JSON. Raises OSError."""
    write_text(path, json.dumps(strict(value), indent=1) + "\n")


def write_figure(fig, out):
    """A Matplotlib figure into a file: .png where `out` has no ending."""
    out = Path(out)
    out = out if out.suffix else Path(f"{out}.png")
    kind = out.suffix[1:]
    if kind not in fig.canvas.get_supported_filetypes():
        fail(f"cannot draw {out}: use .png, .pdf or .svg")
    write_safely(out, lambda tmp: fig.savefig(tmp, format=kind, bbox_inches="tight"))
    print(f"drew {out}")


# -----------------------------------------------------------------------------
# reading

def read_json(path):
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        fail(f"could not read {path}, or it is damaged: {e}")


def read_log(folder):
    """The rows of log.jsonl. Raises OSError."""
    return [row for _, row in log_lines(folder)]


def log_lines(folder):
    """Each line of log.jsonl as bytes and as its row, without one that is half written."""
    for line in (Path(folder) / "log.jsonl").read_bytes().splitlines(keepends=True):
        try:
            yield line, json.loads(line)
        except ValueError:
            break
