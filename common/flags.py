"""Flags from dataclasses: a field is a flag, the comment behind it its help."""
import argparse
import inspect
import re
from dataclasses import MISSING, dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Literal, get_args, get_type_hints

from common.exits import fail

COMMENT = re.compile(r"^    (\w+): .*?  # (.*)$", re.M)  # behind a dataclass field


class Parser(argparse.ArgumentParser):
    """A mistake ends in one line, without the usage of fifty flags."""
    def __init__(self, **options):
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter,
                         **options)

    def has(self, name):
        return name in self._defaults or f"--{name}" in self._option_string_actions

    def error(self, message):
        if message.endswith("expected one argument"):
            message += ", and one that begins with - after a =, as in --prompt=-foo"
        unknown = re.search(r"unrecognized arguments: (--[\w-]+)|$", message)[1] or ""
        for flag in get_close_matches(unknown, self._option_string_actions, 1, cutoff=0.82):
            message += f"; did you mean {flag}?"
        fail(message)


def add_fields(parser, title, cls):
    """A group of flags: the fields of a dataclass that have no value yet."""
    group = parser.add_argument_group(f"{title} ({cls.__module__})")
    types, comments = get_type_hints(cls), {}
    for base in reversed(cls.__mro__[:-1]):  # object has no source
        source = Path(inspect.getfile(base)).read_text(encoding="utf-8")
        comments |= dict(COMMENT.findall(source))
    for field in fields(cls):
        if not parser.has(field.name):
            about = comments.get(field.name, "")
            made = field.default is MISSING
            default = field.default_factory() if made else field.default
            add_flag(group, field.name, types[field.name], about, default)


def add_flag(parser, name, type_, about, default):
    """--name VALUE; --name and --no-name of a bool; one of the values of a Literal."""
    how = dict(type=type_, metavar="X")
    if type_ is bool:
        how = dict(action=argparse.BooleanOptionalAction)
    elif get_args(type_):
        how = dict(choices=get_args(type_))
    about = about.replace("%", "%%")
    if default != "":
        about += " (default: %(default)s)"
    parser.add_argument(f"--{name}", default=default, help=about, **how)


def add_set(parser):
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE",
                        help="settings that are a choice at test time: repair=yarn, P=32")


@dataclass
class RunFlags:
    """Where a model runs."""
    device: str = "auto"  # auto (cuda, else mps, else cpu), cpu, cuda, cuda:1, mps
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: bfloat16 on a GPU that has it
    kernel: Literal["auto", "off"] = "auto"  # auto: a faster attention that equals the model's own


def add_run_flags(parser, bema=""):
    """The flags of a script that runs a trained model; --bema where its help is given."""
    if bema:
        parser.add_argument("--bema", action="store_true", help=bema)
    add_set(parser)
    add_fields(parser, "run", RunFlags)
