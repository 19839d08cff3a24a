"""Train with differential privacy: opacus refuses batch norm, and takes the converted network."""

import torch
from opacus import PrivacyEngine
from opacus.validators import ModuleValidator
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import normfree as nf


def stripes(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return noisy images of stripes, and which of four directions the stripes have."""
    draw = torch.Generator().manual_seed(seed)
    direction = torch.randint(4, (count,), generator=draw)
    angle = (direction * torch.pi / 4)[:, None, None]
    y, x = torch.meshgrid(torch.arange(12.0), torch.arange(12.0), indexing="ij")
    phase = 2 * torch.pi * torch.rand(count, 1, 1, generator=draw)
    waves = torch.sin(1.2 * (x * angle.cos() + y * angle.sin()) + phase)
    return (waves + 0.5 * torch.randn(count, 12, 12, generator=draw))[:, None], direction


def main() -> None:
    # A ResNet-8 with batch norm, which mixes the images of a batch: no image has a gradient of its own.
    torch.manual_seed(0)
    original = nf.build("resnet8", "batchnorm", num_classes=4, in_channels=1)
    problems = ModuleValidator.validate(original, strict=False)
    print(f"with batch norm opacus finds {len(problems)} problems: {str(problems[0]).partition('. ')[0]}")

    # Without normalization every image has its own gradient.
    images, directions = stripes(1500, seed=1)
    model, _ = nf.convert(original, "fixup", images[:8])
    print(f"converted, it finds {len(ModuleValidator.validate(model, strict=False))}")

    # Clip the gradient of every image, add noise, and count the privacy that is spent.
    engine = PrivacyEngine()
    optimizer = torch.optim.SGD(nf.param_groups(model, lr=0.3), momentum=0.9)
    loader = DataLoader(TensorDataset(images, directions), batch_size=150)
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0
    )
    test_images, test_directions = stripes(1000, seed=2)
    for epoch in range(1, 6):
        for batch, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(batch), labels).backward()
            optimizer.step()
        with torch.no_grad():
            accuracy = (model(test_images).argmax(dim=1) == test_directions).float().mean().item()
        print(f"epoch {epoch}: accuracy {accuracy:.0%}, ε = {engine.get_epsilon(delta=1e-4):.1f} at δ = 1e-4")


if __name__ == "__main__":
    main()
