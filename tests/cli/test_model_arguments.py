"""Noise has the shape that --input gives."""

from pathlib import Path

import pytest

from normfree.cli import model_arguments


def test_length_of_a_sequence_reaches_the_noise_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_arguments, "name_in_folder", lambda _: "decoder-1-16-32-2")
    monkeypatch.setattr("normfree.train.run.loading.noise_for", lambda _, **given: given)
    given = model_arguments.model_inputs("run", tmp_path, "", "7", 2, 3)
    assert given == {"batch": 2, "length": 7, "seed": 3}
    assert model_arguments.model_inputs("run", tmp_path, "", "", 2, 3)["length"] is None
