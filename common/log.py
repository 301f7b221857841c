"""What a training says while it runs: to the terminal, and in log.jsonl."""
import json
from contextlib import suppress

from common.exits import fail, say
from common.files import log_lines, strict

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


def open_log(folder, last):
    """
    log.jsonl, to be continued after iter `last`: what is newer, and a half line, is cut off. Fails
    where another training is at work in this folder (which Windows cannot tell).
    """
    folder.mkdir(parents=True, exist_ok=True)
    log = open(folder / "log.jsonl", "a", buffering=1, encoding="utf-8", newline="\n")
    if fcntl:
        try:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until it is closed, by a kill, too
        except BlockingIOError:
            fail(f"another training is at work in {folder}: name another --out_dir")
        except OSError:
            pass  # a drive of a network that has no locks
    log.truncate(sum(len(line) for line, row in log_lines(folder) if row["iter"] <= last))
    return log


def report(words, log, row):
    """A line for the terminal, a row for the log; where there is no room, training goes on."""
    say(words)
    with suppress(OSError):
        log.write(json.dumps(strict(row)) + "\n")


def in_words(row):
    """What train.validate returns, for the terminal."""
    words = f"val loss {row['val_loss']:.4f}"
    for split, scores in row.get("scores", {}).items():
        words += f" | {split}"
        for metric, rate in scores.items():
            words += f" {metric} {rate:.4f}"
    return words
