"""The eighth set of broken networks, with what a right answer has to say about each.

Each fault is in the network, its initialization, its input's scale, its precision, or its loss.
The test of the same name trains each beside its healthy twin.
"""

import broken_networks_eighth_images as pictures
import broken_networks_eighth_tables as tables
import broken_networks_eighth_tokens as tokens
from fifth_parts import Broken, scored

LARGE = ["large", "explod", "grow", "blow", "scale", "dominat", "drown"]
SMALL = ["small", "vanish", "shrink", "fade", "scale"]
DEAD = ["zero", "dead", "dies", "constant", "vanish", "no signal"]
CUT = ["no grad", "without grad", "zero grad", "gradient is zero", "not reach", "detach", "cut", "disconnect",
       "blocked", "differentiable"]  # fmt: skip
SAME = ["constant", "alike", "same for", "identical", "does not depend", "collapse", "no variation"]
UNUSED = [*CUT, "unused", "not used", "never used", "no use", "no effect"]

BROKEN: list[Broken] = [
    Broken(
        "video_weights_of_std_one",
        pictures.video_weights_of_std_one,
        {"conv1", "conv2", "conv3", "fc"},
        LARGE,
        "All weights have a standard deviation of 1: each layer multiplies the signal by ten or more.",
    ),
    Broken(
        "critic_clips_weights_in_forward",
        pictures.critic_clips_weights_in_forward,
        {"convs", "score"},
        [*SMALL, "clip", "clamp", "overwrit", "in place", "in-place", "forward pass changes", "changed by the forward"],
        "The forward pass clips all parameters to a thousandth: the signal vanishes, and no step can mend it.",
    ),
    Broken(
        "superresolution_divides_by_scale",
        pictures.superresolution_divides_by_scale,
        {"body", "tail"},
        LARGE,
        "The branches are multiplied by 10 and not by the residual scale of 0.1: the stream explodes.",
    ),
    Broken(
        "unet_channels_first_by_reshape",
        pictures.unet_channels_first_by_reshape,
        {"inputs", "down"},
        ["reshape", "view", "permut", "transpos", "scrambl", "layout", "memory order", "channels last", "mix", "axes"],
        "Pictures with the channels last are reshaped and not permuted: pixels and colors are scrambled.",
    ),
    Broken(
        "glimpse_by_argmax",
        pictures.glimpse_by_argmax,
        {"score"},
        [*CUT, "argmax"],
        "The best patch is picked by an argmax: the scores get no gradient.",
    ),
    Broken(
        "detector_prior_without_log",
        pictures.detector_prior_without_log,
        {"objectness", "output"},
        [*CUT, "bias", "offset", "saturat", "constant", "vanish"],
        "The bias that states the prior is -99, without the logarithm: the sigmoid is shut.",
    ),
    Broken(
        "grid_head_on_backbone_data",
        pictures.grid_head_on_backbone_data,
        {"backbone"},
        CUT,
        "The head takes the `.data` of the features: the backbone gets no gradient.",
    ),
    Broken(
        "exposure_summed_in_half",
        pictures.exposure_summed_in_half,
        {"exposure"},
        [*SAME, "overflow", "infinit", "half precision", "float16", "fp16", "zero"],
        "The brightness is summed in float16 and overflows: each picture is divided by infinity.",
    ),
    Broken(
        "vgg_norm_momentum_zero",
        pictures.vgg_norm_momentum_zero,
        {f"norm{i}" for i in range(4)},
        ["momentum", "running", "eval", "statistic"],
        "The batch norms' momentum is 0: their running statistics stay at 0 and 1, and evaluation fails.",
    ),
    Broken(
        "resmlp_head_of_std_one",
        pictures.resmlp_head_of_std_one,
        {"head", "output"},
        [*LARGE, "saturat", "confident"],
        "The head's weights have a standard deviation of 1: the logits are in the tens from the start.",
    ),
    Broken(
        "spectrogram_decibels_into_relu",
        tokens.spectrogram_decibels_into_relu,
        {"inputs", "layers"},
        [*DEAD, "negative", "standardiz", "offset"],
        "All decibels are negative, and the network begins with a ReLU: nothing passes.",
    ),
    Broken(
        "gated_convolutions_without_skip",
        tokens.gated_convolutions_without_skip,
        {"layers"},
        [*SMALL, "skip", "residual", "shortcut"],
        "The residual sums were forgotten: twelve gates in a row each halve the signal or more.",
    ),
    Broken(
        "dilated_loop_keeps_last_layer",
        tokens.dilated_loop_keeps_last_layer,
        {"layers"},
        [*UNUSED, "overwrit", "discard"],
        "The loop feeds each layer the embedding: the output of all layers but the last is thrown away.",
    ),
    Broken(
        "rnn_recurrent_weights_of_std_one",
        tokens.rnn_recurrent_weights_of_std_one,
        {"rnn"},
        [*LARGE, "saturat", "chao"],
        "The recurrent weights have a standard deviation of 1: the states are saturated and chaotic.",
    ),
    Broken(
        "gru_of_raw_prices",
        tokens.gru_of_raw_prices,
        {"inputs", "gru"},
        [*LARGE, "saturat", "standardiz", "normaliz", "offset"],
        "The prices come as they are, near 3000, and saturate all gates.",
    ),
    Broken(
        "memory_softmax_twice",
        tokens.memory_softmax_twice,
        {"attend"},
        ["softmax", "uniform", "temperature", "average"],
        "The attention weights go through a second softmax, which makes them nearly uniform.",
    ),
    Broken(
        "tagger_mask_of_the_diagonal",
        tokens.tagger_mask_of_the_diagonal,
        {"blocks", "output", "inputs"},
        ["mask", "diagonal", "itself", "own position", "other position", "other token", "other step", "other word"],
        "The mask is the identity: each word attends to itself alone.",
    ),
    Broken(
        "events_positions_never_added",
        tokens.events_positions_never_added,
        {"positions"},
        UNUSED,
        "The position embedding is made and never added: the encoder cannot tell the order of the events.",
    ),
    Broken(
        "adapters_zero_twice",
        tables.adapters_zero_twice,
        {f"adapter{i}" for i in range(3)},
        [*CUT, "zero", "never"],
        "Both factors of each adapter start at zero: neither gets a gradient, and the rest is frozen.",
    ),
    Broken(
        "experts_are_copies",
        tables.experts_are_copies,
        {"experts", "gate"},
        ["identical", "symmetr", "copies", "equal", "same weight", "same value", "same gradient", "duplicate", "alike"],
        "The experts are copies of one, and the gate starts at zero: they get equal gradients and stay equal.",
    ),
    Broken(
        "graph_norm_of_single_values",
        tables.graph_norm_of_single_values,
        {"norm", "fc", "output"},
        [*SAME, "single", "one value", "zero"],
        "Each group of the norm is a single value, which becomes zero: the output is the same for all graphs.",
    ),
    Broken(
        "sparse_code_penalty_summed",
        tables.sparse_code_penalty_summed,
        {"loss", "output", "encoder"},
        ["penalty", "dominat", "outweigh", "reduction", "summed", "collapse"],
        "The penalty on the code is a sum over the batch beside a mean error: the code collapses to zero.",
    ),
    Broken(
        "student_divergence_of_probabilities",
        tables.student_divergence_of_probabilities,
        {"classes", "output", "loss"},
        [
            "log_softmax",
            "log-softmax",
            "logsoftmax",
            "log-probabilit",
            "log probabilit",
            "softmax",
            "divergence",
            "negative",
        ],
        "KLDivLoss wants log-probabilities and gets probabilities.",
    ),
    Broken(
        "decoder_without_gain",
        tables.decoder_without_gain,
        {f"fc{i}" for i in range(20)},
        SMALL,
        "Xavier's weights without the gain of ReLU: the variance halves in each of twenty layers.",
    ),
]

EIGHTH = [scored(case) for case in BROKEN]
