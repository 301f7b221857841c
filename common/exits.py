"""How a script ends: in one line after a mistake, quietly where nobody reads any more."""
import os
import shlex
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from pathlib import Path

from common import ROOT

for stream in (sys.stdout, sys.stderr):
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="replace")  # a terminal may lack a character


def fail(message):
    """A user's mistake: one line, exit code 1."""
    sys.exit(f"error: {message}")


@contextmanager
def value_errors_fail():
    """Where settings meet a model or a task: these import nothing of ours, and raise ValueError."""
    try:
        yield
    except ValueError as e:
        fail(e)


def nearest(word, names, listed=None):
    """What to say after an unknown word: the nearest names, else all, or those that are listed."""
    close = get_close_matches(word, names, n=2, cutoff=0.6)
    if close:
        return f"did you mean {' or '.join(close)}?"
    return f"choose from {', '.join(listed or names)}"


def in_one_line(kind, error, trace):
    """
    For sys.excepthook. Ctrl-C, files and a disk or memory that is full end a script without a
    traceback. Anything else is a bug, in your model or in ours, and keeps it.
    """
    if issubclass(kind, KeyboardInterrupt):
        os._exit(130)
    if issubclass(kind, BrokenPipeError):  # `python sample.py | head`
        os._exit(141)
    message = str(error)
    no_memory = issubclass(kind, MemoryError) or kind.__name__ == "OutOfMemoryError"  # of a GPU
    if no_memory or "can't allocate memory" in message:  # torch on a CPU
        advice = dict(train="halve --batch_size, and double --gradient_accumulation_steps",
                      sample="take a shorter prompt, or fewer --max_new_tokens")
        advice = advice.get(Path(sys.argv[0]).stem, "take shorter lengths")
        message = f"this does not fit into memory: {advice}"
    elif not issubclass(kind, OSError):
        sys.__excepthook__(kind, error, trace)
        return
    print(f"error: {message}", file=sys.stderr)


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
    Within it Ctrl-C, kill and a closed terminal are only noted; a second Ctrl-C, more than a second
    later, raises KeyboardInterrupt. Yields a function to call at every step -> whether one came. It
    also takes these signals back: the first kernel that Triton compiles gives them to LLVM, and of
    two that come at once, as from `timeout`, the second would end the process. What the shell has
    us ignore stays ignored (nohup); afterwards every signal does what it did before.
    """
    first, before = None, {}

    def note(number, frame):
        nonlocal first
        if first is None:
            first = time.monotonic()
            with suppress(OSError):  # not print(), which may be at work already
                os.write(2, b"stopping and saving; a second Ctrl-C ends at once, unsaved\n")
        elif number == signal.SIGINT and time.monotonic() > first + 1:
            raise KeyboardInterrupt

    for number in signal.Signals:
        heard = number.name in ("SIGINT", "SIGTERM", "SIGHUP")
        if heard and signal.getsignal(number) != signal.SIG_IGN:
            before[number] = signal.getsignal(number)

    def asked():
        for number in before:
            signal.signal(number, note)
        return first is not None
    asked()
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def script(name, *words):
    """
    Run another of our scripts, `eval.py` or the module `figures.plot`, showing the command; where
    it fails, so do we.
    """
    module, words = name.removesuffix(".py"), [*map(str, words)]
    say(f"\n$ python {name if module != name else '-m ' + name} {shlex.join(words)}")
    paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])  # from any folder
    env = os.environ | dict(PYTHONPATH=os.pathsep.join(paths))
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a kill ends it, too
    try:
        code = subprocess.run([sys.executable, "-P", "-m", module, *words], env=env).returncode
    finally:
        signal.signal(signal.SIGTERM, before)
    if code:
        sys.exit(code)
