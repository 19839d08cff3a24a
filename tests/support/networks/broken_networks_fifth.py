"""The fifth set of broken networks, with what a right answer has to say about each.

The faults are those that people bring to forums.
The test of the same name trains each beside its healthy twin.
"""

import broken_networks_fifth_images as pictures
import broken_networks_fifth_tables as tables
import fault_cases
from fifth_parts import Broken, Case, Healthy, subject

__all__ = ["BROKEN", "FIFTH", "Broken", "Case", "Healthy"]

LARGE = ["large", "explod", "grow", "blow", "scale", "std", "gain", "init", "variance"]
SMALL = ["small", "vanish", "shrink", "decay", "scale", "gain", "init", "variance", "fade"]
CUT = ["no grad", "no_grad", "without grad", "zero grad", "gradient is zero", "gradient of zero", "not reach", "detach",
       "cut", "disconnect", "blocked", "stop", "never", "not train", "requires_grad"]  # fmt: skip

BROKEN: list[Broken] = [
    Broken(
        "softmax_before_loss",
        pictures.softmax_before_loss,
        {"fc2", "output", "loss", "model"},
        ["softmax", "probabilit"],
        "The model ends in a softmax, and the cross-entropy applies a second one: the loss hardly moves.",
    ),
    Broken(
        "vgg_without_norm",
        pictures.vgg_without_norm,
        {"features", "classifier"},
        [*SMALL, "norm", "constant", "kaiming", "same for all"],
        "Thirteen convolutions with PyTorch's default weights and no normalization: signal and gradient vanish.",
    ),
    Broken(
        "resnet_forgotten_skip",
        pictures.resnet_forgotten_skip,
        {"blocks"},
        ["skip", "residual", "shortcut", "deep", "depth", "vanish", "explod", "grow", "degenerat", "correlat"],
        "The blocks do not add their input: 54 convolutions in a row without a skip connection.",
    ),
    Broken(
        "resnet_one_block_unlike",
        pictures.resnet_one_block_unlike,
        {"blocks.5", "blocks.6"},
        [*LARGE, "unlike", "outlier", "other blocks", "dominat"],
        "The weights of one of eight equal blocks are drawn with standard deviation 1, ten times too large.",
    ),
    Broken(
        "resnet_zero_twice",
        pictures.resnet_zero_twice,
        {"blocks"},
        ["zero", "gate", "shut", "closed", "never", "no gradient", "dead"],
        "Gate and last norm of each branch both start at zero: neither gets a gradient, so no branch ever learns.",
    ),
    Broken(
        "detector_prior_everywhere",
        pictures.detector_prior_everywhere,
        {"head"},
        ["dead", "relu", "bias", "negative", "inactive", "zero"],
        "The prior of the last layer's bias (-4.6) was put on all layers of the head: its ReLUs are dead.",
    ),
    Broken(
        "unet_view_of_scores",
        pictures.unet_view_of_scores,
        {"out", "output", "loss", "model"},
        [
            "reshape",
            "view",
            "permute",
            "transpose",
            "axis",
            "axes",
            "memory order",
            "order of",
            "layout",
            "mix",
            "scrambl",
        ],
        "Scores (N, C, H, W) are reshaped to (N*H*W, C) without a permute: rows mix classes and pixels.",
    ),
    Broken(
        "transfer_all_frozen",
        pictures.transfer_all_frozen,
        {"fc", "backbone", "model", "output", "loss"},
        ["frozen", "freez", "requires_grad", "no gradient", "no parameter", "trainable", "require grad"],
        "The backbone should be frozen, but the new head is frozen as well: nothing can be trained.",
    ),
    Broken(
        "encoder_under_no_grad",
        pictures.encoder_under_no_grad,
        {"encoder", "head", "model"},
        CUT,
        "The encoder runs under no_grad: its weights get no gradient, though they are meant to be trained.",
    ),
    Broken(
        "vae_sample",
        pictures.vae_sample,
        {"encoder", "mu", "logvar", "decoder", "model"},
        [*CUT, "sampl", "reparam"],
        "The latent is drawn with sample() instead of rsample(): the reconstruction has no gradient to the encoder.",
    ),
    Broken(
        "table_raw_columns",
        tables.table_raw_columns,
        {"inputs", "0"},
        ["input", "feature", "column", "standardi", "normaliz", "normalis", "range"],
        "The columns are not standardized: income in the tens of thousands stands beside ratios below one.",
    ),
    Broken(
        "table_price_targets",
        tables.table_price_targets,
        {"targets", "loss", "output", "4"},
        ["target", "label", "standardi", "normaliz", "normalis"],
        "The targets are prices of some hundred thousand and not standardized: loss and gradient are huge.",
    ),
    Broken(
        "mlp_deep_sigmoid",
        tables.mlp_deep_sigmoid,
        {str(i) for i in range(17)},
        [*SMALL, "sigmoid", "saturat", "constant", "same for all"],
        "Eight hidden layers with sigmoids: signal and gradient vanish towards the input.",
    ),
    Broken(
        "regression_broadcast",
        tables.regression_broadcast,
        {"loss", "targets", "output", "4", "model"},
        ["broadcast", "shape", "squeeze"],
        "Outputs (N, 1) meet targets (N,): the loss broadcasts to N x N and pulls all outputs to the mean.",
    ),
    Broken(
        "mlp_constant_init",
        tables.mlp_constant_init,
        {"0", "2", "4", "1", "3"},
        ["constant", "symmetr", "identical", "same", "equal", "rank", "copies", "duplicate"],
        "All weights of a layer are one constant: its units are equal and stay equal.",
    ),
    Broken(
        "mlp_plain_list",
        tables.mlp_plain_list,
        {"layers", "head", "model"},
        ["regist", "list", "parameters()", "not a parameter", "optimizer"],
        "The hidden layers stand in a plain Python list: they are not registered and never trained.",
    ),
    Broken(
        "regression_norm_on_output",
        tables.regression_norm_on_output,
        {"norms.2", "linears.2", "output"},
        ["norm", "constant", "single", "one feature", "same for all", "same output"],
        "A LayerNorm over one feature behind the output: the output is constant whatever comes in.",
    ),
    Broken(
        "multitask_one_head",
        tables.multitask_one_head,
        {"heads"},
        ["shared", "same", "identical", "reuse", "tied", "several times", "more than once", "repeated", "copies"],
        "[head] * 4 makes one head of four: all tasks share the same weights and give the same output.",
    ),
    Broken(
        "recommender_default_embeddings",
        tables.recommender_default_embeddings,
        {"users", "items", "output", "loss", "model"},
        [*LARGE, "saturat", "embedding"],
        "Embeddings of width 64 with standard deviation 1: their products have deviation 8 and saturate the loss.",
    ),
    Broken(
        "lstm_batch_first",
        tables.lstm_batch_first,
        {"lstm"},
        [
            "batch_first",
            "batch axis",
            "batch dim",
            "along the batch",
            "across the batch",
            "axis",
            "axes",
            "samples",
            "examples",
            "transpos",
            "mix",
            "leak",
        ],
        "The input is (batch, time, feature), but the LSTM lacks batch_first=True: it runs along the batch.",
    ),
    Broken(
        "text_inverted_mask",
        tables.text_inverted_mask,
        {"encoder", "inputs", "model"},
        [
            "mask",
            "padding",
            "ignor",
            "attend",
            "not depend",
            "no effect",
            "not reach",
            "unused",
            "do not see",
            "does not see",
        ],
        "The padding mask is inverted: words are hidden and only padding is attended to.",
    ),
    Broken(
        "gpt_tied_default_embedding",
        tables.gpt_tied_default_embedding,
        {"embed", "lm_head", "output", "loss", "ln"},
        [*LARGE, "embedding", "logit", "tied", "saturat"],
        "The head is tied to an embedding with standard deviation 1: logits of deviation 11, a huge first loss.",
    ),
    Broken(
        "graph_too_deep",
        tables.graph_too_deep,
        {"convs", "out"},
        [
            "similar",
            "identical",
            "same",
            "collaps",
            "rank",
            "smooth",
            "alike",
            "skip",
            "residual",
            "deep",
            "depth",
            "correlat",
            "constant",
        ],
        "Sixteen graph convolutions without skips: all nodes get the same features (oversmoothing).",
    ),
    Broken(
        "audio_log_of_zero",
        tables.audio_log_of_zero,
        {"spectrum", "norm", "inputs"},
        ["nan", "infinit", "finite", "non-finite", "log of zero", "log(0)"],
        "Clips begin with digital silence, and the spectrum takes the logarithm of zero: infinite, then NaN.",
    ),
]


def _scored(case: Broken) -> fault_cases.Broken:
    """The case as `benchmarks/diagnosis.py` scores it; "model" names no place, so another one has to be named."""
    places = tuple("input" if place == "inputs" else place for place in sorted(case.place - {"model"}))
    words = tuple(case.words)
    return fault_cases.Broken(case.name, lambda broken: subject(case.make(broken=broken)), places, case.cause, words)


FIFTH = [_scored(case) for case in BROKEN]
