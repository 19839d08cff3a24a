"""Convert a GPT-2 of transformers to a network without layer norm, and train it on the source code of torch."""

import inspect
import math

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import normfree as nf

BYTES = torch.tensor(list(inspect.getsource(torch.nn.functional).encode()))


def batch(seed: int, count: int = 16, length: int = 64) -> dict[str, Tensor]:
    """Return pieces of the text. The model predicts every byte from those before it."""
    starts = torch.randint(len(BYTES) - length, (count,), generator=torch.Generator().manual_seed(seed))
    pieces = torch.stack([BYTES[start : start + length] for start in starts.tolist()])
    return {"input_ids": pieces, "labels": pieces}


def train(model: nn.Module, groups: list[dict[str, object]]) -> str:
    """Train a model for 200 steps, and return its loss in bits per byte at both ends."""
    optimizer = torch.optim.AdamW(groups, weight_decay=0.01)
    model.train()
    losses = []
    for step in range(200):
        loss = model(**batch(seed=step)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item() / math.log(2))
    return f"{losses[0]:.2f} bits per byte at first, {sum(losses[-20:]) / 20:.2f} over the last 20 steps"


def main() -> None:
    # A small GPT-2 with random weights; `from_pretrained` gives a trained one.
    torch.manual_seed(0)
    sizes = {"n_layer": 6, "n_embd": 96, "n_head": 4, "n_positions": 128, "vocab_size": 256}
    plain = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None}
    original = GPT2LMHeadModel(GPT2Config(**sizes, **plain))

    # Convert it. A dict of keyword arguments serves as an example of the input.
    converted, plan = nf.convert(original, "fixup", batch(seed=0))
    print(plan)
    print("layer norms:", sum(isinstance(m, nn.LayerNorm) for m in converted.modules()))

    # The signal, before training. The model computes its own loss, so the batch is all that is needed.
    for name, model in (("layer norm", original), ("fixup", converted)):
        verdict = nf.diagnose(model, batch(seed=0)).verdict
        print(f"{name}: {verdict.word} - {verdict.sentence}")

    # Train both, with the same optimizer and rate.
    print("layer norm:", train(original, [{"params": original.parameters(), "lr": 0.002}]))
    print("fixup:     ", train(converted, nf.param_groups(converted, lr=0.002)))

    # The converted model still is a GPT-2 of transformers, and generates text as one.
    prompt = torch.tensor([list(b"return torch.")])
    text = converted.eval().generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=40, pad_token_id=0)
    print(f"from {prompt.shape[1]} bytes it makes {text.shape[1]}")


if __name__ == "__main__":
    main()
