"""Flags from dataclasses: a field is a flag, the comment behind it its help."""
import argparse
import inspect
import re
import sys
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

from common.exits import fail

COMMENT = re.compile(r"^    (\w+): .*?  # (.*)$", re.M)  # behind a dataclass field


class Parser(argparse.ArgumentParser):
    """A mistake ends in one line, without the usage of fifty flags."""
    def __init__(self, **options):
        module = sys.modules["__main__"].__spec__  # of what is run by python -m
        if module:
            options.setdefault("prog", f"python -m {module.name}")
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter,
                         **options)

    def error(self, message):
        if message.endswith("expected one argument"):
            message += ", and one that begins with - after a =, as in --prompt=-foo"
        unknown = re.search(r"unrecognized arguments: (--[\w-]+)|$", message)[1] or ""
        for flag in get_close_matches(unknown, self._option_string_actions, 1, cutoff=0.82):
            message += f"; did you mean {flag}?"
        if unknown and self.epilog:
            message += f". {self.epilog}"
        fail(message)


def peek(argv, name):
    """The value of --name among the flags, before the others are known; None where it is not."""
    parser = Parser(add_help=False)
    parser.add_argument(f"--{name}")
    return getattr(parser.parse_known_args(argv)[0], name)


def add_fields(parser, title, cls, skip=()):
    """A group of flags, a field of a dataclass each."""
    group = parser.add_argument_group(f"{title} ({Path(inspect.getfile(cls)).name})")
    types, comments = get_type_hints(cls), {}
    for base in reversed(cls.__mro__[:-1]):  # object has no source
        source = Path(inspect.getfile(base)).read_text(encoding="utf-8")
        comments |= dict(COMMENT.findall(source))
    for field in fields(cls):
        if field.name not in skip:
            about = comments.get(field.name, "").replace("%", "%%") + " (default: %(default)s)"
            add_flag(group, field.name, types[field.name], about, default=field.default)


def add_flag(parser, name, type_, about, default=None):
    """--name VALUE; --name and --no-name of a bool; one of its values of a Literal."""
    options = dict(type=type_, metavar="X")
    if type_ is bool:
        options = dict(action=argparse.BooleanOptionalAction)
    elif get_origin(type_) is Literal:
        options = dict(choices=get_args(type_), metavar="X")
    parser.add_argument(f"--{name}", help=about, default=default, **options)


def add_set(parser):
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE",
                        help="settings that are a choice at test time: repair=yarn")


def add_run_flags(parser, bema=""):
    """The flags of a script that runs a trained model; --bema where its help is given."""
    if bema:
        parser.add_argument("--bema", action="store_true", help=bema)
    add_set(parser)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, mps")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"),
                        help="auto: bfloat16 on a GPU that has it (default: auto)")
    parser.add_argument("--kernel", default="auto", choices=("auto", "off"),
                        help="auto: a faster attention that equals the model's own (default: auto)")
