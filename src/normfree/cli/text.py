"""`normfree translate` and `normfree continue`: the model of a run reads lines of text and writes lines."""

from __future__ import annotations

import sys
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from normfree.cli.options import DEVICE, Plugins, load_plugins

if TYPE_CHECKING:
    from normfree.data.text.vocabulary import Vocabulary
    from normfree.train import TrainConfig

_CHUNK = 512  # lines that are translated together


def translate_lines(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run on pairs.")],
    beam: Annotated[
        int | None, typer.Option("--beam", metavar="N", min=1, help="Beam size (default: the run's).")
    ] = None,
    length_penalty: Annotated[
        float | None,
        typer.Option("--length-penalty", metavar="NUMBER", help="0 favours short translations (default: the run's)."),
    ] = None,
    device: Annotated[str, DEVICE] = "auto",
    plugin: Plugins = None,
) -> None:
    """Translate the lines of standard input with the model of a run.

    For example: echo "Ein Hund läuft im Schnee ." | normfree translate runs/translation
    """
    from normfree.data.text.text_files import decode_lines
    from normfree.train.engine.data_interface import PAIRS
    from normfree.train.text.generation import translate

    load_plugins(plugin)
    config, vocabulary, model = _load_text_run(run, PAIRS, "a run on pairs of sentences", "translation", device)
    lines = decode_lines(sys.stdin.buffer, "on standard input")
    # One line at a time from a keyboard, many from a file.
    while chunk := list(islice(lines, 1 if sys.stdin.isatty() else _CHUNK)):
        found = translate(
            model,
            vocabulary,
            chunk,
            beam=beam or config.beam,
            length_penalty=config.length_penalty if length_penalty is None else length_penalty,
        )
        for line in found:
            typer.echo(line)


def continue_lines(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run on text.")],
    tokens: Annotated[
        int, typer.Option("--tokens", metavar="N", min=1, help="Maximum number of subwords to add to a line.")
    ] = 100,
    temperature: Annotated[
        float,
        typer.Option(
            "--temperature",
            metavar="NUMBER",
            min=0.0,
            help="1 samples from the model; lower values prefer likely words; 0 takes the likeliest.",
        ),
    ] = 0.8,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Seed of the samples.")] = 0,
    device: Annotated[str, DEVICE] = "auto",
    plugin: Plugins = None,
) -> None:
    """Write text by the language model of a run: it continues every line of standard input.

    An empty line starts a new text. To resume a run, see normfree train --resume.

    For example: echo "Once upon a time" | normfree continue runs/book
    """
    import torch

    from normfree.data.text.text_files import decode_lines
    from normfree.train.engine.data_interface import TEXT
    from normfree.train.text.generation import continue_line

    load_plugins(plugin)
    what = "a language model, which is a run on text,"
    config, vocabulary, model = _load_text_run(run, TEXT, what, "language_model", device)
    draws = torch.Generator().manual_seed(seed)
    for line in decode_lines(sys.stdin.buffer, "on standard input"):
        written = continue_line(
            model, vocabulary, line, longest=tokens, temperature=temperature, window=config.block, generator=draws
        )
        typer.echo(written)


def _load_text_run(run: Path, data: str, what: str, recipe: str, device: str) -> tuple[TrainConfig, Vocabulary, Any]:
    """Load the configuration, vocabulary and model of a run; refuse a run on another kind of data."""
    from normfree.nn.devices import device_of
    from normfree.train import load, read_config
    from normfree.train.run.loading import load_vocabulary

    config = read_config(run)
    if not config.data.startswith(data):
        raise ValueError(
            f"expected {what} in '{run}', got one on '{config.data}'; train one with normfree train {recipe}"
        )
    place = device_of(device)
    return config, load_vocabulary(run), load(run, device=str(place))
