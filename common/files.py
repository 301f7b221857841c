"""Files that are whole or not there at all."""
import json
import os
import shutil
from pathlib import Path

from common.exits import fail

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


def lines_of(value, newline="\n"):
    """JSON with a key a line, and a list on one line unless a dict is one of its items."""
    inner = f"{newline} "
    if isinstance(value, dict) and value:
        items = [f"{json.dumps(key)}: {lines_of(item, inner)}" for key, item in value.items()]
        return "{" + inner + f",{inner}".join(items) + newline + "}"
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        items = [lines_of(item, inner) for item in value]
        return "[" + inner + f",{inner}".join(items) + newline + "]"
    return json.dumps(value)


def write_json(path, value):
    """Strict JSON, as lines_of lays it out. Raises OSError."""
    write_text(path, lines_of(strict(value)) + "\n")


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
