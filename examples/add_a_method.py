"""Add a method of your own, and use it by name wherever normfree takes a method."""

import torch
from torch import nn

import normfree as nf
from normfree.methods import InitContext, Law, Method, Rule


def lecun_(context: InitContext) -> None:
    """Draw weights of variance 1/fan_in; the classifier gets torch's default."""
    for layer in context.plan.hidden():
        fan_in, _ = context.fans(layer)
        context.set_(layer, context.normal(layer, variance=1 / fan_in))
    context.default_classifier_()


@nf.register
def fading(*, power: float = 0.5) -> Method:
    """x' = x + l^-power · f(x): branch l of the network is divided by a power of its index."""
    return Method(
        name="fading",
        summary="every branch divided by a power of its index",
        reference="this example",
        weights_text="plain; N(0, 1/fan_in)",
        rule=Rule(beta=Law(lambda position: position.index**-power, text=f"l^-{power:g}")),
        initializer=lecun_,
    )


def main() -> None:
    # The method has a name and an option now. Compare how the signal travels with other methods.
    points = torch.randn(256, 16, 1, 1, generator=torch.Generator().manual_seed(0))
    for method in ("he_in", "fading", "fading:power=1", "fixup"):
        draw = torch.Generator().manual_seed(0)
        model = nf.build("resmlp-100-64", method, num_classes=2, in_channels=16, size=1, generator=draw)
        verdict = nf.diagnose(model, points).verdict
        print(f"{method:15} {verdict.status:10} forward ×{verdict.forward.total:.3g} over 100 blocks")

    # It converts models, too.
    original = nf.build("resnet20", "batchnorm")
    converted, plan = nf.convert(original, "fading:power=1", torch.randn(8, 3, 32, 32))
    print(plan)
    print("batch norm layers:", sum(isinstance(module, nn.BatchNorm2d) for module in converted.modules()))

    # And it trains, by name, as a method of the library does: here on images that come with the package.
    config = nf.TrainConfig(model="resmlp-8-64", method="fading:power=1", data="fashion14", epochs=2, lr=0.03)
    result = nf.fit(config)
    print(f"fashion14, 2 epochs: {result.test.accuracy:.1%} of the test images")


if __name__ == "__main__":
    main()
