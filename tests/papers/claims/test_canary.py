"""The canary: today's figures are the committed ones, and a change of the code changes those of its probes only."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import normfree as nf
from normfree import theory
from normfree.data.counter_rng import epoch_order
from normfree.data.images import image_set
from normfree.data.images.augment import Augmentation, AugmentParams, augment, cutout, normalize
from normfree.methods import fixup, names
from normfree.methods.initialize import InitContext
from normfree.methods.method import ScalarRate
from normfree.plan import Layer
from normfree.train import RunFolder, TrainConfig
from normfree_papers.claims import canary, canary_training
from normfree_papers.claims.run_training import keep

PLACE, WITHIN = "cpu float32", canary.tolerance("cpu float32")
TEXT, SETTINGS = (
    "transformer-1-1-16-32-2",
    tuple(probe for probe in canary_training.all_probes() if " " not in probe),
)
WATCHED = ("fixup resnet8", "he_in resnet8", "wn mlp-3-16", f"fixup {TEXT}", f"layernorm {TEXT}", "crop", "cutout")


def changed(probes: tuple[str, ...] = WATCHED) -> set[str]:
    """Return the probes that the code, as it is patched now, computes otherwise than committed."""
    return set(canary.differing(canary_training.canary(probes=probes), canary.todays(PLACE, probes), WITHIN))


def test_every_method_and_setting_is_committed() -> None:
    committed = canary.committed_record()[PLACE]["figures"]
    assert set(canary_training.all_probes()) <= set(committed)
    assert {probe.split()[0] for probe in committed if " " in probe} >= set(names())


def test_todays_figures_are_the_committed_ones() -> None:
    once: dict[str, str] = {}  # a method on its first model, and on a Transformer
    for probe in canary_training.all_probes():
        method, _, model = probe.partition(" ")
        if model and "spectralnorm" not in method:
            once.setdefault(f"{method} {TEXT if model == TEXT else ''}", probe)
    assert not changed((*once.values(), "spectralnorm mlp-3-16", *SETTINGS))


@pytest.mark.slow
def test_all_figures_of_today_are_the_committed_ones() -> None:
    assert not changed(tuple(canary.committed_record()[PLACE]["figures"]))


def test_fan_in_for_fan_out_changes_fixup_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fan_in(ctx: InitContext, layer: Layer) -> Tensor:
        return ctx.normal(layer, 2 / ctx.fans(layer)[0])

    monkeypatch.setattr(fixup, "_he_fan_out", fan_in)
    assert changed() == {"fixup resnet8"}  # a Transformer has Xavier's weights


def test_another_exponent_changes_fixup_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(theory, "fixup_scale", lambda branches, layers: branches ** (-0.45))
    assert changed() == {"fixup resnet8", f"fixup {TEXT}"}


def test_another_rate_of_scalars_changes_the_methods_with_slow_scalars(monkeypatch: pytest.MonkeyPatch) -> None:
    factor = ScalarRate.factor
    monkeypatch.setattr(ScalarRate, "factor", lambda *args, **options: 1.05 * factor(*args, **options))
    assert changed() == {"fixup resnet8", f"fixup {TEXT}"}


def test_cutout_before_the_normalization_changes_cutout_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def other_order(
        images: Tensor, params: AugmentParams, settings: Augmentation, mean: Tensor, std: Tensor, rows: Tensor
    ) -> Tensor:
        x = augment(images, params, settings, rows)
        return normalize(cutout(x, params, settings.cutout) if settings.cutout else x, mean, std)

    monkeypatch.setattr(image_set, "augment_and_normalize", other_order)
    assert changed() == {"cutout"}


def test_another_order_of_images_changes_all_probes_of_images(monkeypatch: pytest.MonkeyPatch) -> None:
    def reverse(seed: int, epoch: int, n: int, device: torch.device | str | None = None) -> Tensor:
        return epoch_order(seed, epoch, n, device).flip(0)

    monkeypatch.setattr(image_set, "epoch_order", reverse)
    assert changed() == {probe for probe in WATCHED if TEXT not in probe}


def test_probes_of_a_run() -> None:
    config = TrainConfig(method="fixup:scale=10,bias=false", model="resnet110", mixup=0.7, optimizer="adamw")
    assert canary.probes_of(config) == (
        "fixup:bias=false,scale=10.0 resnet8",
        "mixup",
        "optimizer=adamw",
        "schedule=cosine",
    )
    assert canary.probes_of(replace(config, form="pre"))[0] == "fixup:bias=false,scale=10.0 resnet8 pre"
    assert canary.probes_of(TrainConfig(model="torchvision:resnet50", method="as built")) == ()
    assert canary.probes_of(TrainConfig(model="torchvision:resnet50", method="fixup")) == ()


def test_unknown_probe() -> None:
    with pytest.raises(ValueError, match="got the probe 'fixup resnet9'"):
        canary_training.canary(probes=["fixup resnet9"])


def test_canary_leaves_the_random_generator_as_it_was() -> None:
    before = torch.get_rng_state()
    canary_training.canary(probes=["fixup resnet8", "dropout"])
    assert torch.equal(torch.get_rng_state(), before)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run as `normfree train` leaves it."""
    folder = tmp_path_factory.mktemp("run")
    config = TrainConfig(model="mlp-2-8", method="he_in", epochs=1, crop=1, device="cpu")
    nf.fit(config, data=canary_training.generated_images(), out=folder)
    return folder


def test_a_run_has_no_canary_until_a_claim_keeps_it(trained: Path, tmp_path: Path) -> None:
    assert "canary" not in RunFolder(trained).read_result()
    keep(trained, tmp_path / "kept")
    run = RunFolder(tmp_path / "kept")
    result = run.read_result()
    assert set(result["canary"][PLACE]["figures"]) == {"he_in mlp-3-16", "crop", "schedule=cosine"}
    assert result["canary"][PLACE]["tolerance"] == WITHIN
    assert canary.stale_probes(run.read_config(), result["canary"]) == []


def test_a_run_of_other_code_is_kept_without_a_canary(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NORMFREE_COMMIT", "0" * 40)
    keep(trained, tmp_path / "kept")
    assert "canary" not in RunFolder(tmp_path / "kept").read_result()


def test_a_model_of_another_package_has_no_canary() -> None:
    assert canary_training.record_of(TrainConfig(model="elsewhere:net"), torch.device("cpu")) == {}


def test_stale_probes() -> None:
    config = TrainConfig(model="mlp-20-64", method="he_in", schedule="constant", crop=4)
    record = canary_training.record_of(config, torch.device("cpu"))
    assert canary.stale_probes(config, record) == []
    record[PLACE]["figures"]["crop"][0] *= 1 + 2 * WITHIN
    assert canary.stale_probes(config, record) == ["crop"]
    assert canary.stale_probes(replace(config, flip=True), record) is None, "flip was not tried"
    record[PLACE]["figures"]["crop"] = None
    assert canary.stale_probes(config, record) is None
    assert canary.stale_probes(config, "unknown") is None
    assert canary.stale_probes(TrainConfig(model="elsewhere:net", method="as built"), record) is None


def test_figures_of_another_length_differ() -> None:
    assert canary.differing({"a": [1.0]}, {"a": [1.0, 2.0]}, 0.1) == ["a"]
    assert not canary.differing({"a": [1.0, float("nan")]}, {"a": [1.05, float("nan")]}, 0.1)
