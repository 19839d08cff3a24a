"""The seventh set of broken networks, with what a right answer has to say about each.

Each fault is in the network, its initialization, its scale, its precision, or the way its output meets the loss.
The test of the same name trains each beside its healthy twin.
"""

import broken_networks_seventh_images as pictures
import broken_networks_seventh_tables as tables
import broken_networks_seventh_tokens as tokens
from fifth_parts import Broken, scored

LARGE = ["large", "explod", "grow", "blow", "scale", "dominat", "drown"]
SMALL = ["small", "vanish", "shrink", "fade", "scale"]
DEAD = ["zero", "dead", "dies", "constant", "vanish", "no signal"]
CUT = ["no grad", "without grad", "zero grad", "gradient is zero", "not reach", "detach", "cut", "disconnect",
       "blocked", "differentiable"]  # fmt: skip
SAME = ["constant", "alike", "same for", "identical", "does not depend", "collapse", "no variation"]
NAN = ["nan", "finite"]

BROKEN: list[Broken] = [
    Broken(
        "resnet_norms_kept_in_eval",
        pictures.resnet_norms_kept_in_eval,
        {"blocks", "bn"},
        [*LARGE, "eval", "running", "normaliz"],
        "The batch norms stay in evaluation mode from scratch: they normalize nothing, and the stream explodes.",
    ),
    Broken(
        "depthwise_fan_out_ignores_groups",
        pictures.depthwise_fan_out_ignores_groups,
        {"depthwise"},
        SMALL,
        "fan_out ignores the groups: the depthwise weights are eight times too small, and the signal vanishes.",
    ),
    Broken(
        "unet_raw_pixels_in_last_skip",
        pictures.unet_raw_pixels_in_last_skip,
        {"up1", "out", "inputs"},
        [*LARGE, "standardiz", "offset"],
        "The last skip takes 16-bit pixels, which drown the decoder's features.",
    ),
    Broken(
        "audio_film_without_one",
        pictures.audio_film_without_one,
        {"films", "convs"},
        DEAD,
        "The features are multiplied by FiLM's output, which starts at zero, and not by 1 plus it.",
    ),
    Broken(
        "vit_two_zeros_in_branch",
        pictures.vit_two_zeros_in_branch,
        {"blocks"},
        [*CUT, "zero", "dead", "never"],
        "The last projection and the layer scale of each branch are both zero: neither gets a gradient.",
    ),
    Broken(
        "cosine_scores_without_scale",
        pictures.cosine_scores_without_scale,
        {"classes", "output"},
        ["cosine", "bound", "range", "small", "temperature", "scale", "confident"],
        "The scores are cosines from -1 to 1 without a scale: the softmax can never be confident.",
    ),
    Broken(
        "densenet_zero_transition",
        pictures.densenet_zero_transition,
        {"transition"},
        DEAD,
        "The transition's convolution is zero-initialized, and no skip goes around it: the signal dies.",
    ),
    Broken(
        "contrastive_scale_exponentiated_twice",
        pictures.contrastive_scale_exponentiated_twice,
        {"logits", "output"},
        [*LARGE, "saturat", "temperature", "one-hot"],
        "The log-scale is exponentiated twice: the similarities are in the millions, and the softmax is saturated.",
    ),
    Broken(
        "audio_rms_norm_overflows_in_half",
        pictures.audio_rms_norm_overflows_in_half,
        {"norm"},
        [*DEAD, "overflow", "infinit", "half precision", "float16", "fp16"],
        "The norm squares 16-bit samples in float16: the squares overflow, and the norm returns zeros.",
    ),
    Broken(
        "mixer_eps_without_minus",
        pictures.mixer_eps_without_minus,
        {"blocks", "norm"},
        [*SMALL, " eps"],
        "The norms' eps is 1e6 and not 1e-6: each norm divides its input by a thousand.",
    ),
    Broken(
        "lstm_forgets_each_step",
        tokens.lstm_forgets_each_step,
        {"lstm", "inputs"},
        ["forget", " gate", "vanish", "time step", "earlier steps", "last step", "saturat", "not reach", "memory"],
        "The forget gate is closed by its bias: state and gradient vanish within a step.",
    ),
    Broken(
        "gpt_squares_without_norm",
        tokens.gpt_squares_without_norm,
        {"blocks"},
        [*LARGE, *NAN, "overflow", "infinit"],
        "No norm stands before the squared ReLUs: each block squares the size of the stream, until it overflows.",
    ),
    Broken(
        "decoder_attends_to_itself",
        tokens.decoder_attends_to_itself,
        {"encoder"},
        [*CUT, "unused", "not used", "never used", "no use"],
        "The cross-attention takes its keys and values from the decoder: the encoder's output is used nowhere.",
    ),
    Broken(
        "reader_mask_inverted",
        tokens.reader_mask_inverted,
        {"layers"},
        [*NAN, "mask"],
        "The mask hides the words and not the padding: the softmax of a full sentence is NaN.",
    ),
    Broken(
        "series_scaled_in_each_layer",
        tokens.series_scaled_in_each_layer,
        {"layers"},
        LARGE,
        "Each layer multiplies the stream by the square root of the width: it explodes.",
    ),
    Broken(
        "highway_gates_closed",
        tables.highway_gates_closed,
        {"gates", "transforms"},
        [*CUT, "closed", "saturat", "vanish", "small", "dead", "zero"],
        "The gates' bias is -20: every layer carries its input through, and no transform learns.",
    ),
    Broken(
        "gcn_oversmooths",
        tables.gcn_oversmooths,
        {"convs", "norms", "classify"},
        [*SAME, "smooth", "rank", "skip", "residual", "shortcut", "vanish"],
        "Sixteen averages over the neighbours without a skip make all nodes of a graph alike.",
    ),
    Broken(
        "gated_mlp_one_column_unscaled",
        tables.gated_mlp_one_column_unscaled,
        {"inputs", "stem"},
        [*LARGE, "standardiz", "column"],
        "One column of the input is in the thousands; the others are standardized.",
    ),
    Broken(
        "regression_broadcasts_targets",
        tables.regression_broadcasts_targets,
        {"targets", "output", "head", "loss"},
        ["broadcast", "shape", "squeeze"],
        "The output is (128, 1) and the targets (128,): the loss broadcasts them.",
    ),
    Broken(
        "gaussian_head_raw_variance",
        tables.gaussian_head_raw_variance,
        {"head", "output", "loss"},
        [*NAN, "negative", "logarithm"],
        "The variance is a raw output: the logarithm of a negative number makes the loss NaN.",
    ),
    Broken(
        "mlp_layers_in_python_list",
        tables.mlp_layers_in_python_list,
        {"body"},
        [
            "regist",
            "modulelist",
            "python list",
            "no parameters",
            "not parameters",
            "not train",
            "never train",
            "frozen",
        ],
        "The hidden layers are in a Python list: the model does not register them, and no optimizer trains them.",
    ),
    Broken(
        "multilabel_softmax_then_bce",
        tables.multilabel_softmax_then_bce,
        {"labels", "output", "loss"},
        ["softmax", "sum to one", "sum to 1", "sigmoid", "independent"],
        "A softmax makes the probabilities of six independent labels sum to one.",
    ),
    Broken(
        "autoencoder_std_of_a_transformer",
        tables.autoencoder_std_of_a_transformer,
        {f"fc{i}" for i in range(8)},
        SMALL,
        "Weights of standard deviation 0.02 without a norm: the signal vanishes layer by layer.",
    ),
    Broken(
        "hashing_without_straight_through",
        tables.hashing_without_straight_through,
        {"encoder"},
        CUT,
        "The bits are cut hard without a straight-through gradient: the encoder gets none.",
    ),
]

SEVENTH = [scored(case) for case in BROKEN]
