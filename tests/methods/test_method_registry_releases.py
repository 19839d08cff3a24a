"""Methods of earlier releases in today's spelling, in memory and in stored files."""

import json
from pathlib import Path

import pytest
import torch

import normfree as nf
from normfree.conversion.saving import PLAN, read_plan, save_converted
from normfree.methods import get
from normfree.methods.method_registry import CHANGES, FIRST_RELEASE, as_of
from normfree.storage.provenance import RELEASE
from normfree.storage.writing import write_sealed_text
from normfree.train import TrainConfig, read_config
from thin_resnet import thin_resnet


@pytest.mark.parametrize(
    ("spec", "model", "today"),
    [
        ("nf", "preact_resnet50", "nf:bias=false"),
        ("nf:beta=1", "", "nf:beta=1,bias=false"),
        ("nf_he", "wrn-16-1", "nf_he:bias=false"),
        ("wn", "resnet110", "wn:stem_relu=true"),
        ("wn", "wrn-40-10", "wn"),
        ("wn", "mlp-20-50", "wn"),
        ("wn", "torchvision:resnet18", "wn"),
        ("wn_default", "resnet20", "wn_default:stem_relu=true,directions=he"),
        ("wn_default", "wrn-40-4", "wn_default:directions=he"),
        ("fixup:scalar_lr=10/L", "wrn-1000-1", "fixup:scalar_lr=10/L,slow_biases=false"),
        ("fixup", "transformer-6-6-512-1024-4", "fixup:slow_biases=false,scalar_lr=0.1,transformer=biased"),
        ("fixup:scalar_lr=1", "decoder-2-16-32-2", "fixup:scalar_lr=1,slow_biases=false,transformer=biased"),
        ("fixup", "timm:vit_tiny_patch16_224", "fixup:slow_biases=false,scalar_lr=0.1,transformer=biased"),
        ("fixup_bounded", "encoder-2-16-32-2", "fixup_bounded:scalar_lr=0.1,transformer=biased"),
        ("lsuv", "wrn-100-1", "lsuv:by=layer"),
        ("lsuv", "mlp-20-50", "lsuv"),
        ("batchnorm", "resnet20", "batchnorm"),
        ("as built", "timm:resnet18", "as built"),
        ("nf:bias=true", "resnet20", "nf:bias=true"),
    ],
)
def test_method_of_release_0_1_in_todays_spelling(spec: str, model: str, today: str) -> None:
    assert as_of(spec, "0.1", model) == today
    assert as_of(spec, RELEASE, model) == spec


@pytest.mark.parametrize("earlier", [row for rows in CHANGES.values() for row in rows])
def test_every_row_restores_another_definition(earlier) -> None:
    spec = f"{earlier.method}:{earlier.options}"
    assert get(spec).options != get(earlier.method).options


def test_releases_end_with_todays() -> None:
    assert [FIRST_RELEASE, *CHANGES][-1] == RELEASE


def test_later_release_is_refused() -> None:
    with pytest.raises(ValueError, match=rf"expected a release of normfree up to {RELEASE}, got '9.9'; install"):
        as_of("nf", "9.9")


def test_stored_configuration_names_its_release(tmp_path: Path) -> None:
    config = TrainConfig(method="nf", model="wrn-10-1")
    file = tmp_path / "config.toml"
    file.write_text(config.to_toml())
    assert file.read_text().splitlines()[0] == f'normfree = "{RELEASE}"'
    assert read_config(tmp_path) == TrainConfig.from_toml(file) == config
    file.write_text(config.to_toml().replace(RELEASE, "0.1"))
    assert read_config(tmp_path) == TrainConfig.from_toml(file) == config.with_changes(method="nf:bias=false")


def test_file_without_a_release_is_the_first_in_a_run_and_todays_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('method = "nf"\n')
    assert read_config(tmp_path).method == "nf:bias=false"
    assert TrainConfig.from_toml(tmp_path / "config.toml").method == "nf"


def test_release_of_a_file_leaves_the_method_of_its_base_alone(tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text('normfree = "0.1"\nlr = 0.2\n')
    assert TrainConfig.from_toml(tmp_path / "my.toml", base=TrainConfig(method="nf")).method == "nf"


def test_explained_settings_name_no_release() -> None:
    assert "normfree =" not in TrainConfig().to_toml(explained=True)


def test_stored_conversion_names_its_release(tmp_path: Path) -> None:
    images = torch.randn(4, 1, 14, 14, generator=torch.Generator().manual_seed(0))
    model, plan = nf.convert(thin_resnet(), "nf", images)
    save_converted(tmp_path / "c", model, plan, example=images)
    record = json.loads((tmp_path / "c" / PLAN).read_text())
    assert record["normfree"] == RELEASE
    assert read_plan(tmp_path / "c").changes.method == "nf:beta=0.2,bias=true"
    assert {a.kind for a in plan.changes.added} >= {"bias per channel"}
    torch.testing.assert_close(nf.load(tmp_path / "c", thin_resnet)(images), model.eval()(images))
    without, _ = nf.convert(thin_resnet(), "nf:bias=false", images)
    assert without.layer1[0].conv1.bias is None is not model.layer1[0].conv1.bias


def test_comparison_does_not_take_a_run_of_an_earlier_definition(tmp_path: Path) -> None:
    settings = {"epochs": 0, "device": "cpu"}
    base = TrainConfig(**settings)
    asked = {"methods": ["nf"], "models": ["resmlp-2-8"], "out": tmp_path}
    nf.compare(base, **asked)
    (folder,) = tmp_path.iterdir()
    text = (folder / "config.toml").read_text()
    write_sealed_text(
        folder / "config.toml", text.replace(f'normfree = "{RELEASE}"\n', "")
    )  # as if release 0.1 had made it
    with pytest.raises(ValueError, match=r"expected a run of 'nf' in '.*', got one of 'nf:bias=false'.*choose another"):
        nf.compare(base, **asked)
