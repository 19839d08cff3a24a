"""Names from a file cannot command a terminal, nor break a picture or a page."""

from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

import normfree as nf
from normfree.report import Column, Table, open_console, print_table, to_markdown
from normfree.report.panels import Curve, Panel
from normfree.report.plots import write_plot

NAME = "layer\x1b[2J\x1b]0;title\x07\x9b31m\u202e<img src=x>|cell"


def test_terminal_gets_no_escape_sequences(capsys: pytest.CaptureFixture[str]) -> None:
    from normfree.cli.verbs import run

    print_table(Table(NAME, (Column("name"),), ((NAME,),), caption=NAME))
    open_console().print(NAME, markup=False)
    with pytest.raises(SystemExit):
        run(["check", NAME])
    out, err = capsys.readouterr()
    assert "layer\\x1b[2J" in out
    assert "layer\\x1b[2J" in err
    assert not set("\x1b\x07\x9b\u202e") & set(out + err)


def test_markdown_cell_is_one_cell_of_text() -> None:
    row = to_markdown(Table("", (Column("name"),), ((NAME,),))).splitlines()[-1]
    assert row.endswith("&lt;img src=x>\\|cell |")
    assert "\x1b" not in row


def test_picture_is_well_formed(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    curve = Curve(NAME, (1.0, 2.0))
    write_plot([Panel(NAME, (curve,))], tmp_path / "one.svg", title=NAME)
    ElementTree.parse(tmp_path / "one.svg")


def test_empty_batch_is_one_sentence() -> None:
    with pytest.raises(ValueError, match=r"expected a batch of at least one sample, got one of shape \(0, 3, 32, 32\)"):
        nf.diagnose(nf.build("resnet8", "fixup"), torch.zeros(0, 3, 32, 32))
