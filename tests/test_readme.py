"""Every command that README.md shows is understood."""
import re
import shlex

import pytest

from common.checkpoint import load_checkpoint
from common.flags import Parser
from common.settings import check, new_settings, resumed_settings
from tests.helpers import ROOT, main_of

README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"(?:python|torchrun --nproc_per_node \d+) ([\w-][^\n`#]+)", README)
STANDS_IN = {"mine": "cable", "~/notes": str(ROOT), "FOLDER": str(ROOT)}  # what is a reader's own


class Understood(Exception):
    pass


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_front_page_is_parsed_to_its_settings(command, trained, monkeypatch):
    assert len(COMMANDS) > 12
    words = [STANDS_IN.get(word, word) for word in shlex.split(command)]
    script, *words = [word for word in words if word != "-m"]
    if "--resume" in words:
        check(resumed_settings(load_checkpoint(trained / "rope" / "ckpt.pt"), words))
    elif script == "train.py":
        check(new_settings(words))
    else:
        def parse_args(parser, argv, parse=Parser.parse_args):
            parse(parser, argv)
            raise Understood
        monkeypatch.setattr(Parser, "parse_args", parse_args)
        with pytest.raises(Understood):
            main_of(script)(words)
