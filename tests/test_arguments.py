"""A wrong argument of a public function is one sentence: what was expected, what it got, where, and a remedy."""

import pickle
from collections import UserDict
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import normfree as nf
from normfree.arguments import check_arguments, check_call, check_targets, model_inside
from normfree.diagnostics import coordinate_check
from thin_resnet import thin_resnet
from tiny_images import tiny_images

X = torch.randn(4, 1, 14, 14, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 3, 9, 1])
CONFIG = nf.TrainConfig(model="resmlp-2-8", epochs=1)


@cache
def converted() -> nn.Module:
    return nf.convert(thin_resnet(), "fixup", X, generator=torch.Generator().manual_seed(0))[0]


def refusal(call: Callable[[], Any]) -> str:
    """The message of a refusal, which is one sentence of type ValueError with a remedy."""
    with pytest.raises(ValueError, match=r"expected|unknown") as caught:
        call()
    message = str(caught.value)
    assert type(caught.value) is ValueError
    assert "\n" not in message
    assert ";" in message
    return message


NO_MODEL = "expected a torch.nn.Module as model, got the text 'resnet18'"
MODELS: dict[str, Callable[[Any], Any]] = {
    "convert": lambda model: nf.convert(model, "fixup", X),
    "convert_": lambda model: nf.convert_(model, "fixup", X),
    "discover": lambda model: nf.discover(model, X),
    "diagnose": lambda model: nf.diagnose(model, X, Y),
    "find_lr": lambda model: nf.find_lr(model, [(X, Y)]),
    "fit": lambda model: nf.fit(CONFIG, model=model, data=tiny_images()),
    "fold_": lambda model: nf.fold_(model, X),
    "fold_batchnorm": lambda model: nf.fold_batchnorm(model, X),
    "initialize_": lambda model: nf.initialize_(model, "fixup"),
    "load": lambda model: nf.load("nowhere", model=model),
    "Monitor": lambda model: nf.Monitor(model),
    "param_groups": lambda model: nf.param_groups(model, lr=0.1),
}


@pytest.mark.parametrize("name", MODELS)
def test_model_must_be_a_module(name: str) -> None:
    assert refusal(lambda: MODELS[name]("resnet18")).startswith(NO_MODEL)
    assert "got the class Linear, not an object of it" in refusal(lambda: MODELS[name](nn.Linear))
    assert "got a torch.Tensor of shape (4, 1, 14, 14)" in refusal(lambda: MODELS[name](X))


def test_every_public_function_that_takes_a_model_is_tested() -> None:
    """`build`, `clip_grad_agc_` and `register` take something else, and are tested below."""
    others = {"build", "clip_grad_agc_", "compare", "evaluate", "recipe", "register", "ResidualPlan", "TrainConfig"}
    assert {*nf.__all__} - {"__version__"} == {*MODELS, *others}


INPUTS: dict[str, Callable[[Any], Any]] = {
    "convert": lambda inputs: nf.convert(thin_resnet(), "fixup", inputs),
    "discover": lambda inputs: nf.discover(thin_resnet(), inputs),
    "diagnose": lambda inputs: nf.diagnose(converted(), inputs, Y),
    "find_lr": lambda inputs: nf.find_lr(converted(), [(inputs, Y)]),
    "fold_batchnorm": lambda inputs: nf.fold_batchnorm(thin_resnet(), inputs),
    "Monitor.step": lambda inputs: nf.Monitor(converted()).step(inputs, Y),
}


@pytest.mark.parametrize("name", INPUTS)
def test_inputs_must_be_tensors(name: str) -> None:
    message = refusal(lambda: INPUTS[name](X.numpy()))
    assert "got a numpy.ndarray of shape (4, 1, 14, 14)" in message
    assert "torch.from_numpy" in message
    assert "got None" in refusal(lambda: INPUTS[name](None))


TARGETS: dict[str, Callable[[Any], Any]] = {
    "diagnose": lambda y: nf.diagnose(converted(), X, y),
    "find_lr": lambda y: nf.find_lr(converted(), [(X, y)]),
    "Monitor.step": lambda y: nf.Monitor(converted()).step(X, y),
}


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize(
    ("targets", "got", "remedy"),
    [
        (Y.float(), "got float32 of shape (4,)", "mse_loss"),
        (Y + 5, "got numbers from 5 to 14", "an output per class"),
        (Y - 1, "got numbers from -1 to 8", "an output per class"),
        (F.one_hot(Y, 10), "got int64 of shape (4, 10)", "pass targets.argmax(1)"),
        (torch.zeros(4, 7), "got float32 of shape (4, 7)", "mse_loss"),
        (Y[:3], "got int64 of shape (3,)", "pass loss="),
        (Y.int(), "got int32 of shape (4,)", "pass loss="),
        (Y.numpy(), "got a ndarray", "pass loss="),
        ([0, 3, 9, 1], "got a list", "pass loss="),
    ],
)
def test_targets_must_fit_the_cross_entropy(name: str, targets: Any, got: str, remedy: str) -> None:
    message = refusal(lambda: TARGETS[name](targets))
    assert "for an output of shape (4, 10): an int64 tensor of shape (4,) with classes from 0 to 9" in message
    assert got in message
    assert remedy in message


@pytest.mark.parametrize(
    ("scores", "targets"),
    [
        (torch.zeros(4, 3), torch.tensor([0, 1, 2, 2])),
        (torch.zeros(4, 3), torch.tensor([0, -100, 2, -100])),
        (torch.zeros(4, 3), torch.full((4,), -100)),
        (torch.zeros(4, 3), torch.tensor([0, 1, 2, 2], dtype=torch.uint8)),
        (torch.zeros(4, 3), torch.full((4, 3), 1 / 3)),
        (torch.zeros(4, 3, 5, 5), torch.ones(4, 5, 5, dtype=torch.long)),
        (torch.zeros(4, 3, 5), torch.ones(4, 5, dtype=torch.long)),
        (torch.zeros(3), torch.tensor(2)),
        (torch.zeros(3), torch.zeros(3)),
        (torch.zeros(4, 3, device="meta"), torch.ones(4, dtype=torch.long, device="meta")),
    ],
)
def test_targets_that_torch_takes_are_taken(scores: Tensor, targets: Tensor) -> None:
    check_targets(scores, targets)
    F.cross_entropy(scores, targets)


LOSSES: dict[str, Callable[[Any, Any], Any]] = {
    "diagnose": lambda y, loss: nf.diagnose(converted(), X, y, loss=loss),
    "find_lr": lambda y, loss: nf.find_lr(converted(), [(X, y)], loss),
    "Monitor.step": lambda y, loss: nf.Monitor(converted(), loss=loss).step(X, y),
}


@pytest.mark.parametrize("name", LOSSES)
def test_loss_must_be_a_function_with_its_targets(name: str) -> None:
    assert "as loss, got the text 'mse'" in refusal(lambda: LOSSES[name](Y, "mse"))
    assert "got the class CrossEntropyLoss, not an object" in refusal(lambda: LOSSES[name](Y, nn.CrossEntropyLoss))
    assert "expected targets for the loss mse_loss, got None" in refusal(lambda: LOSSES[name](None, F.mse_loss))


def test_error_of_a_loss_with_targets_is_its_own() -> None:
    def broken(output: Any, targets: Any) -> Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        nf.diagnose(converted(), X, Y, loss=broken)


def test_coordinate_check_explains_targets_too() -> None:
    def build(width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 4))

    assert "got numbers from 9 to 9" in refusal(
        lambda: coordinate_check(build, [8, 16], torch.randn(4, 8), torch.full((4,), 9))
    )


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: nf.convert(thin_resnet(), None, X), "expected a method or its name as method, got None"),
        (lambda: nf.convert(thin_resnet(), "fixup", X, plan="p"), "expected a ResidualPlan as plan, got the text 'p'"),
        (lambda: nf.convert(thin_resnet(), "fixup", X, heads="fc"), "expected a list of names as heads, got the text"),
        (lambda: nf.convert(thin_resnet(), "fixup", X, heads=["fx"]), "unknown head 'fx' of ThinResNet; did you mean"),
        (lambda: nf.convert(thin_resnet(), "fixup", X, heads=["zzz"]), "; expected one of: fc, "),
        (lambda: nf.build(thin_resnet()), "expected the name of a model as name, got a thin_resnet.ThinResNet"),
        (lambda: nf.build("resnet20", 3), "expected a method or its name as method, got 3"),
        (lambda: nf.build("timm:resnet18"), "create_model('timm:resnet18'), and take out its normalization by"),
        (lambda: nf.build("resnet20", device="gpu"), "expected a device such as cpu or cuda, got 'gpu'"),
        (lambda: nf.register("fixup"), "expected a Method or a function that returns one as registered"),
        (lambda: nf.param_groups(converted(), lr="0.1"), "expected a number as lr, got the text '0.1'"),
        (lambda: nf.clip_grad_agc_("resnet18"), "expected a torch.nn.Module or its parameters as parameters"),
        (lambda: nf.clip_grad_agc_(converted(), None), "expected a number as clipping, got None"),
        (lambda: nf.Monitor(converted(), every="a"), "expected a number as every"),
        (lambda: nf.Monitor(converted(), path="nowhere/x.jsonl"), "expected a file in a folder that exists as path"),
        (lambda: nf.Monitor(converted()).first("explode"), "unknown status 'explode'; did you mean 'exploding'"),
        (lambda: nf.find_lr(converted(), (X, Y)), "write a single batch as a list, [(inputs, targets)]"),
        (lambda: nf.find_lr(converted(), X), "write a single batch as a list, [(inputs, targets)]"),
        (lambda: nf.find_lr(converted(), {"x": X}), "write a single batch as a list, [(inputs, targets)]"),
        (lambda: nf.find_lr(converted(), 3), "expected a list of batches or a DataLoader as batches, got 3"),
        (lambda: nf.find_lr(converted(), [X]), "got neither; pass a list of pairs, [(inputs, targets)], or loss="),
        (lambda: nf.find_lr(converted(), [{"x": X, "labels": Y}]), "got an unexpected keyword argument 'labels'; pass"),
        (lambda: nf.find_lr(converted(), [(X, Y)], optimizer=3), "expected optimizer to be sgd, adam, adamw or"),
        (lambda: nf.diagnose(converted(), (X, X, X)), "got 3 arguments: too many positional arguments; pass"),
        (lambda: nf.fit("spirals"), "expected a TrainConfig as config, got the text 'spirals'; pass normfree.recipe("),
        (lambda: nf.fit({"lr": 0.1}), "expected a TrainConfig as config, got a dict"),
        (lambda: nf.fit(nf.TrainConfig), "got the class TrainConfig, not an object of it"),
        (lambda: nf.fit(CONFIG, data=[(X, Y)]), "expected an ImageSet or prepared text as data, got a list"),
        (lambda: nf.compare("spirals", methods=["fixup"], models=["a"], out="x"), "expected a TrainConfig as config"),
        (lambda: nf.compare(CONFIG, methods="fixup", models=["a"], out="x"), "expected a list of names as methods"),
        (lambda: nf.compare(CONFIG, methods=["fixup"], models="a", out="x"), "expected a list of names as models"),
        (lambda: nf.recipe(3), "expected the name of a recipe as name, got 3"),
        (lambda: nf.load(3), "expected the path of a folder as folder, got 3"),
        (lambda: nf.evaluate(3), "expected the path of a folder as folder, got 3"),
        (lambda: nf.load("nowhere", device="gpu"), "expected a device such as cpu or cuda, got 'gpu'"),
    ],
)
def test_wrong_argument_is_one_sentence(call: Callable[[], Any], says: str) -> None:
    assert says in refusal(call)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_missing_gpu_is_one_sentence() -> None:
    for call in (lambda: nf.load("nowhere", device="cuda"), lambda: nf.build("resnet20", device="cuda")):
        assert "expected a device such as cpu or cuda, got 'cuda'" in refusal(call)


def test_unknown_setting_of_a_configuration_is_a_type_error_with_its_name() -> None:
    with pytest.raises(TypeError, match="unknown setting 'learning_rate'; did you mean 'lr'"):
        nf.TrainConfig(learning_rate=0.1)
    assert pickle.loads(pickle.dumps(CONFIG)) == CONFIG


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("learning_rate", "lr"),
        ("wd", "weight_decay"),
        ("steps", "epochs"),
        ("bs", "batch_size"),
        ("Optim", "optimizer"),
    ],
)
def test_common_words_of_settings_lead_to_ours(word: str, name: str) -> None:
    with pytest.raises(ValueError, match=f"unknown setting '{word}'; did you mean '{name}'"):
        nf.recipe("spirals", **{word: 1})


def test_monitor_finds_a_status_and_writes_into_its_folder(tmp_path: Path) -> None:
    monitor = nf.Monitor(converted(), path=tmp_path / "x.jsonl")
    assert monitor.first("exploding") is None
    monitor.step(X, Y)
    assert (tmp_path / "x.jsonl").is_file()


def test_models_with_open_signatures_take_any_inputs() -> None:
    class Open(nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return args, kwargs

    check_call(Open(), (X, X), {"mask": X})
    check_call(torch.compile(nn.Linear(2, 2)), (X,), {})
    check_call(nn.DataParallel(nn.Linear(2, 2)), (X,), {})
    check_call(torch.jit.trace(nn.Linear(14, 2), X), (X,), {})


class Reads(nn.Module):
    """Linear layers over features or words; in training, it may need targets."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.words = nn.Embedding(10, 8) if kind == "words" else None
        self.first, self.out, self.kind = nn.Linear(8, 8), nn.Linear(8, 3), kind

    def forward(self, x: Any, targets: Any = None) -> Tensor:
        if self.kind == "targets" and self.training and targets is None:
            raise AssertionError("targets should not be none when in training mode\nMore about it.")
        x = x if self.words is None else self.words(x).mean(1)
        return self.out(self.first(x).relu())  # type: ignore[no-any-return]


ROWS = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(8) % 3
ONE_BATCH = "expected the inputs of one batch as tensors, got a tuple, a list or a DataLoader in their place"
TYPES = {name: getattr(torch, name) for name in ("uint8", "float16", "float64", "int64", "bool")}


@pytest.mark.parametrize("name", ["diagnose", "Monitor", "find_lr"])
@pytest.mark.parametrize("kind", TYPES)
def test_inputs_of_another_type_than_the_weights_are_named(name: str, kind: str) -> None:
    calls: dict[str, Callable[[Tensor], Any]] = {
        "diagnose": lambda x: nf.diagnose(Reads(), x),
        "Monitor": lambda x: nf.Monitor(Reads()).step(x),
        "find_lr": lambda x: nf.find_lr(Reads(), [(x, LABELS)], steps=10, check=1),
    }
    message = refusal(lambda: calls[name]((ROWS > 0).to(TYPES[kind])))
    assert f"expected inputs of type float32, as the weights have, got {kind}; convert them with" in message
    assert ("scale bytes" in message) is (kind == "uint8")
    calls[name](ROWS)


def test_inputs_of_a_wrong_kind_are_named() -> None:
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(ROWS, LABELS))
    for inputs in ([(ROWS, LABELS)], loader, ([ROWS, ROWS],)):
        assert ONE_BATCH in refusal(lambda given=inputs: nf.diagnose(Reads(), given))
        assert ONE_BATCH in refusal(lambda given=inputs: nf.discover(Reads(), given))
    says = "expected inputs of type int64, the numbers that an embedding looks up, got float32; pass inputs.long()"
    assert says in refusal(lambda: nf.diagnose(Reads("words"), ROWS.abs()))
    assert says in refusal(lambda: nf.discover(Reads("words"), ROWS.abs()))
    nf.diagnose(Reads("words"), ROWS.abs().long())
    assert "check the shape of the example, (8, 7), and" in refusal(lambda: nf.diagnose(Reads(), ROWS[:, 1:]))
    assert "and the targets of the loss apart" in refusal(lambda: nf.diagnose(Reads(), (ROWS, LABELS, LABELS)))


def test_model_that_reads_targets_in_training_mode_asks_for_them() -> None:
    says = (
        "expected the targets that Reads reads in training mode among the inputs, got none (targets should not be none "
        "when in training mode); pass (inputs, targets) as its arguments, or call model.eval()"
    )
    assert refusal(lambda: nf.diagnose(Reads("targets"), ROWS)) == says
    assert refusal(lambda: nf.discover(Reads("targets"), ROWS)) == says
    plan = nf.discover(Reads("targets"), (ROWS, LABELS))
    assert refusal(lambda: nf.diagnose(Reads("targets"), ROWS, plan=plan)) == says
    nf.diagnose(Reads("targets"), (ROWS, LABELS))
    nf.diagnose(Reads("targets").eval(), ROWS)


def in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


def inside_of_parts(model: nn.Module) -> nn.Module:
    for name, child in list(model.named_children()):
        model.add_module(name, torch.compile(child, backend="eager"))
    return model


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "torch.compile": lambda model: torch.compile(model, backend="eager"),  # type: ignore[return-value]
    "compile in place": in_place,
    "DataParallel": nn.DataParallel,
    "AveragedModel": torch.optim.swa_utils.AveragedModel,
    "both": lambda model: torch.compile(torch.optim.swa_utils.AveragedModel(model), backend="eager"),  # type: ignore[return-value]
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("kind", ["original", "converted"])
def test_compiled_and_wrapped_models_are_measured_as_plain_ones(wrapper: str, kind: str) -> None:
    def made() -> nn.Module:
        return deepcopy(converted()) if kind == "converted" else thin_resnet()

    plain, model = made(), WRAPPERS[wrapper](made())
    plain.load_state_dict(model_inside(model).state_dict())
    expected, found = nf.diagnose(plain, X, Y), nf.diagnose(model, X, Y)
    assert found.name == expected.name
    assert found.signal.sums == expected.signal.sums
    assert found.verdict.word == expected.verdict.word
    assert nf.discover(model, X).to_json() == nf.discover(plain, X).to_json()
    record = nf.Monitor(model).measure(X, Y)
    assert record.forward == tuple(expected.signal.series("sum"))
    assert torch.equal(model.eval()(X), plain.eval()(X))
    assert torch.equal(model(X), plain(X))  # compiled code runs again


def test_model_whose_parts_are_compiled_is_measured() -> None:
    plain, model = thin_resnet(), thin_resnet()
    model.load_state_dict(plain.state_dict())
    found = nf.diagnose(inside_of_parts(model), X, Y).signal.series("sum")
    assert found == nf.diagnose(plain, X, Y).signal.series("sum")


class Around(nn.Module):
    """A wrapper of the user's, which does more than to call the model, whose plan has other names."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(2 * x)  # type: ignore[no-any-return]


def test_wrapper_that_does_more_is_measured_as_it_is() -> None:
    model = Around(deepcopy(converted()))
    found = nf.diagnose(model, X).signal
    assert model_inside(model) is model
    assert all(s.name.startswith("module.") for s in found.sums)
    assert [s.sum for s in found.sums] == [s.sum for s in nf.diagnose(model.module, 2 * X).signal.sums]


def scripted(inner: bool) -> nn.Module:
    part = torch.jit.trace(nn.Sequential(nn.Flatten(), nn.Linear(196, 16), nn.ReLU(), nn.Linear(16, 10)).eval(), X)
    return nn.Sequential(part, nn.Linear(10, 10)) if inner else part


@pytest.mark.parametrize("name", ["diagnose", "discover", "Monitor", "find_lr"])
@pytest.mark.parametrize("inner", [False, True])
def test_torchscript_is_refused(name: str, inner: bool) -> None:
    model = scripted(inner)
    if inner and name == "find_lr":  # which only trains the model
        assert nf.find_lr(model, [(X, Y)], steps=10, check=1).suggestion > 0
        return
    place = " at '0'" if inner else ""
    says = f"expected Python modules, got TorchScript{place} in the model; pass the original torch.nn.Module"
    assert says in refusal(lambda: MODELS[name](model))


def cut_off(model: nn.Module) -> nn.Module:
    """The model without its last block."""
    model.layers = model.layers[:-1]  # type: ignore[index,assignment]
    return model


@pytest.mark.parametrize("name", ["diagnose", "convert", "Monitor"])
def test_plan_of_another_model_is_refused(name: str) -> None:
    calls: dict[str, Callable[[nf.ResidualPlan], Any]] = {
        "diagnose": lambda plan: nf.diagnose(thin_resnet(), X, plan=plan),
        "convert": lambda plan: nf.convert(thin_resnet(), "fixup", X, plan=plan),
        "Monitor": lambda plan: nf.Monitor(thin_resnet(), plan=plan).step(X),
    }
    residual = nf.discover(nf.build("resnet8"), torch.randn(2, 3, 32, 32))
    plain = nf.discover(nn.Sequential(nn.Flatten(), nn.Linear(196, 4), nn.ReLU(), nn.Linear(4, 2)), X)
    for plan, what in ((residual, "a sum in 'body.0.0'"), (plain, "the layer '1'")):
        assert f"expected a plan of this model, got one with {what}, which" in refusal(lambda p=plan: calls[name](p))
    calls[name](nf.discover(thin_resnet(), X))


def test_remembered_plan_that_no_longer_fits_is_refused() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.out = nn.Linear(14, 16), nn.Linear(16, 4)
            self.layers = nn.ModuleList(
                nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)) for _ in range(3)
            )

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            for layer in self.layers:
                x = x + layer(x)
            return self.out(x)  # type: ignore[no-any-return]

    x = X[:, 0, 0].repeat(2, 1)
    model = cut_off(nf.convert(Net(), "fixup", x)[0])
    says = "expected the model that its remembered plan describes, got one without the layer 'layers.2.1'"
    assert says in refusal(lambda: nf.diagnose(model, x))
    assert says in refusal(lambda: nf.Monitor(model).step(x))
    assert len(nf.diagnose(model, x, plan=nf.discover(model, x)).signal.sums) == 2


def test_any_mapping_holds_keyword_arguments() -> None:
    inputs = UserDict(x=X)
    assert nf.discover(thin_resnet(), inputs).to_json() == nf.discover(thin_resnet(), X).to_json()
    model = thin_resnet()
    expected = nf.diagnose(model, {"x": X}, Y).signal
    assert nf.diagnose(model, inputs, Y).signal.sums == expected.sums
    assert nf.Monitor(model).measure(inputs, Y).forward == tuple(expected.series("sum"))
    assert nf.find_lr(model, [(inputs, Y)], steps=10, check=1).suggestion > 0
    _, plan = nf.convert(model, "fixup", inputs)
    assert len(plan.branches) == len(expected.sums)
    assert torch.equal(inputs["x"], X)


def test_valid_arguments_pass() -> None:
    check_arguments(plan=None, loss=None, heads=(), lr=np.float64(0.1), parameters=iter([X]), batches=iter([(X, Y)]))
    check_arguments(batches=[X, X], loss=nn.MSELoss(), inputs=(X, None, 3), example={"x": X, "mask": None})
