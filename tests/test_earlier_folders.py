"""Folders that an earlier version wrote still load and compute the same numbers."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import normfree as nf
from normfree.conversion.saving import read_plan
from normfree.data.text.prepared_folder import open_prepared
from normfree.methods.method_registry import as_of
from normfree.train import read_config
from thin_resnet import thin_resnet

FOLDERS = Path(__file__).parent / "fixtures" / "release-0.1"
EXPECTED = load_file(FOLDERS / "expected.safetensors") | load_file(FOLDERS / "expected-methods.safetensors")
DEFINITIONS = load_file(FOLDERS / "definitions.safetensors")
IMAGES = torch.randn(4, 1, 14, 14, generator=torch.Generator().manual_seed(0))
RUNS = {  # each with its method in today's spelling
    "run-fixup": "fixup:slow_biases=false",
    "run-nf_adam_ema": "nf:bias=false",
    "run-nf_he": "nf_he:bias=false",
    "run-batchnorm": "batchnorm",
    "run-wn": "wn",
    "run-wn_resnet": "wn:stem_relu=true",
    "run-wn_data": "wn_data",
    "run-wn_hanin": "wn_hanin",
    "run-wn_default": "wn_default:directions=he",
    "run-lsuv": "lsuv:by=layer",
}
TRANSFORMERS = load_file(FOLDERS / "expected-transformers.safetensors")
TOKENS = torch.tensor([[5, 6, 7, 3]]), torch.tensor([[2, 5, 6]])
CONVERSIONS = tuple(name for name in sorted(EXPECTED) if name.startswith("converted-"))


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal up to the order of float32 sums, which depends on the processor."""
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_every_folder_is_tested() -> None:
    others = {"run-converted", "run-stopped", "run-translation", "prepared-pairs"}
    assert {path.name for path in FOLDERS.iterdir() if path.is_dir()} == {*RUNS, *TRANSFORMERS, *CONVERSIONS, *others}


@pytest.mark.parametrize("name", RUNS)
def test_run_loads_and_scores_as_before(name: str) -> None:
    assert read_config(FOLDERS / name).method == RUNS[name]
    assert_same(nf.load(FOLDERS / name)(IMAGES), EXPECTED[name])
    loss, accuracy = EXPECTED[f"{name}.score"].tolist()
    score = nf.evaluate(FOLDERS / name)
    assert score.loss == pytest.approx(loss, rel=1e-4)
    assert score.accuracy == pytest.approx(accuracy, abs=2e-3)


def test_other_weights_are_noticed() -> None:
    """The control: the tolerance tells two models apart."""
    with pytest.raises(AssertionError):
        assert_same(nf.load(FOLDERS / "run-fixup")(IMAGES), EXPECTED["run-wn"])


@pytest.mark.parametrize("name", sorted(DEFINITIONS))
def test_method_of_before_computes_as_before(name: str) -> None:
    """Logits at the start and after two steps of SGD with the method's groups, in float64.

    Weights from data are computed in float32, and the steps enlarge their rounding: 3e-6 of the largest logit was seen.
    """
    method, model = name.rsplit(" ", 1)
    expected = DEFINITIONS[name]
    rounding = 1e-5 * expected.abs().amax((1, 2), keepdim=True)
    assert ((initial_and_trained(model, as_of(method, "0.1", model)) - expected).abs() <= rounding).all()
    if as_of(method, "0.1", model) != method:  # the control: today's definition is another
        change = (initial_and_trained(model, method) - expected).abs()
        assert change.max() > 1e-3
        assert (change > 100 * rounding).any()


def initial_and_trained(model: str, method: str) -> torch.Tensor:
    network = nf.build(model, method, example=IMAGES, generator=torch.Generator().manual_seed(1)).double()
    x = IMAGES.double()
    optimizer = torch.optim.SGD(nf.param_groups(network, lr=0.05, weight_decay=1e-3), momentum=0.9)
    initial = network(x).detach()
    for _ in range(2):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(network(x), torch.arange(4)).backward()
        optimizer.step()
    return torch.stack([initial, network(x).detach()])


@pytest.mark.parametrize("name", CONVERSIONS)
def test_conversion_loads_as_before(name: str) -> None:
    assert_same(nf.load(FOLDERS / name, thin_resnet)(IMAGES), EXPECTED[name])


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("converted-nf", "nf:beta=0.2,bias=false"),
        ("converted-nf_he", "nf_he:beta=0.2,bias=false"),
        ("converted-lsuv", "lsuv:by=layer"),
        ("converted-wn_default", "wn_default:directions=he"),
        ("converted-wn", "wn"),
        ("run-converted", "fixup:bias=true,scale=1.0,branches=true,scalar_lr=0.1,slow_biases=false,transformer=biased"),
    ],
)
def test_conversion_names_its_method_in_todays_spelling(name: str, method: str) -> None:
    assert read_plan(FOLDERS / name).changes.method == method


def test_run_of_a_converted_model_loads_as_before() -> None:
    assert_same(nf.load(FOLDERS / "run-converted", thin_resnet)(IMAGES), EXPECTED["run-converted"])


def test_stopped_run_goes_on_to_the_same_weights(tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(FOLDERS / "run-stopped", run)
    result = nf.fit(read_config(run), out=run, resume=True, picture=False)
    assert (result.status, result.steps) == ("finished", 1350)
    assert_same(nf.load(run)(IMAGES), EXPECTED["run-stopped.resumed"])


def test_translation_loads_as_before() -> None:
    pytest.importorskip("sacrebleu")
    run = FOLDERS / "run-translation"
    assert_same(nf.load(run)(*TOKENS), EXPECTED["run-translation"])
    assert nf.evaluate(run, data_dir=str(FOLDERS / "prepared-pairs")).loss > 0


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformer_loads_and_trains_as_before(name: str, tmp_path: Path) -> None:
    """Training again gives the same weights, so its draws, its scalars and their learning rate are those of before."""
    assert_same(nf.load(FOLDERS / name)(*TOKENS), TRANSFORMERS[name])
    config = read_config(FOLDERS / name).with_changes(data=f"pairs:{FOLDERS / 'prepared-pairs'}")
    nf.fit(config, out=tmp_path, picture=False)
    assert_same(nf.load(tmp_path)(*TOKENS), TRANSFORMERS[name])


@pytest.mark.parametrize("method", ["fixup", "fixup_bounded"])
def test_transformer_of_today_is_another(method: str, tmp_path: Path) -> None:
    """The control: today's definition of the method does not train to the weights of before."""
    name = f"run-transformer-{method}"
    config = read_config(FOLDERS / name).with_changes(data=f"pairs:{FOLDERS / 'prepared-pairs'}", method=method)
    nf.fit(config, out=tmp_path, picture=False)
    with pytest.raises(AssertionError):
        assert_same(nf.load(tmp_path)(*TOKENS), TRANSFORMERS[name])


def test_prepared_text_opens_as_before() -> None:
    data = open_prepared(FOLDERS / "prepared-pairs")
    assert len(data.pairs("train").source) == 40
    assert data.vocabulary_size == 25
