"""How a script ends: in one line after a mistake, quietly where nobody reads any more."""
import os
import signal
import subprocess
import sys
import traceback
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path

from common import ROOT

for stream in (sys.stdout, sys.stderr):
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="replace")  # a terminal may lack a character


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
