"""The tenth set of broken networks, with what a right answer has to say about each.

They are what people ask about in forums: scale and weights at the start, dead or saturated activations, things that
are missing or doubled, cut gradients, wrong normalizers or axes, a loss that does not fit the output, frozen or
unregistered weights, and precision. The test of the same name trains each beside its healthy twin.
"""

import broken_networks_tenth_images as pictures
import broken_networks_tenth_pixels as pixels
import broken_networks_tenth_tables as tables
import broken_networks_tenth_tokens as tokens
from fifth_parts import Broken, scored

SMALL = ["small", "vanish", "shrink", "fade", "too low", "dwindl", " loses", "faint", "weak"]
LARGE = ["large", "explod", "grow", "blow", "huge", "too big", "too high", "overflow", "amplif", "enormous", "wide"]
DEAD = ["zero", "dead", "constant", "vanish", "no signal", "blocked", "is 0", "nothing gets through"]
CUT = ["no grad", "without grad", "zero grad", "gradient is zero", "gradients are zero", "gradient of zero",
       "not reach", "detach", " cut", "disconnect", "blocked", "differentiable", "never receive"]  # fmt: skip
SAME = ["constant", "alike", "same for", "the same", "identical", "not depend", "independent of", "collapse",
        "no variation", "does not vary", "do not vary"]  # fmt: skip
NAN = ["nan", "finite", "infinit", "not a number"]
SPREAD = ["standard deviation", "std ", "variance of", "too wide"]

BROKEN: list[Broken] = [
    Broken(
        "mlp_dropout_of_keep_probability",
        tables.mlp_dropout_of_keep_probability,
        {"layers.2", "layers.5", "layers.8", "layers.11"},
        ["dropout", "drops", "dropped", "drop rate", "keep prob", "p=0.9", "noise", "noisy", "90%"],
        "Each dropout gets the share to keep, 0.9, as the share to drop: nine units in ten are lost, four times over.",
    ),
    Broken(
        "regressor_error_of_all_pairs",
        tables.regressor_error_of_all_pairs,
        {"loss", "output", "targets", "head"},
        ["broadcast", "shape", "squeeze", "dimension", "pairs", "(128, 1)", "[128, 1]", "different size"],
        "The outputs are a column and the targets a vector: the error is taken of each output with each target.",
    ),
    Broken(
        "recommender_vectors_in_list",
        tables.recommender_vectors_in_list,
        {"interactions"},
        ["regist", "modulelist", "module list", "python list", "plain list", "in a list", "list of", "parameters()",
         "optimizer", "not trained", "never train", "not be trained", "not a parameter", "not parameters",
         "no parameter"],
        "The embeddings are in a plain Python list: no optimizer gets their vectors.",
    ),
    Broken(
        "graph_sums_over_neighbors",
        tables.graph_sums_over_neighbors,
        {f"hops.{i}" for i in range(6)},
        [*LARGE, "degree", "neighbor", "neighbour"],
        "Each hop sums the messages of 14 neighbors and never divides by their number: it grows the signal ninefold.",
    ),
    Broken(
        "clouds_root_of_zero_distance",
        tables.clouds_root_of_zero_distance,
        {"distances", "align"},
        [*NAN, "sqrt", "square root", "undefined", "division by zero"],
        "The distance of a point to itself is the root of zero, whose derivative is infinite: the gradient is NaN.",
    ),
    Broken(
        "separables_depthwise_by_all_channels",
        pictures.separables_depthwise_by_all_channels,
        {name for i in range(6) for name in (f"blocks.{i}", f"blocks.{i}.depthwise")},
        [*SMALL, "fan-in", "fan in", "fan_in", "groups"],
        "The depthwise weights are drawn for a fan-in of all channels: each block shrinks the signal five times.",
    ),
    Broken(
        "torchvision_resnet_every_norm_zero",
        pictures.torchvision_resnet_every_norm_zero,
        {
            "bn1",
            *(f"layer{i}" for i in range(1, 5)),
            *(f"layer{i}.0" for i in range(1, 5)),
            *(f"layer{i}.0.bn1" for i in range(1, 5)),
            *(f"layer{i}.0.downsample.1" for i in range(2, 5)),
        },
        [*DEAD, "gamma"],
        "The weight of every batch norm is zero, not only of the last in each branch: nothing gets through.",
    ),
    Broken(
        "resnet_shortcut_added_again",
        pictures.resnet_shortcut_added_again,
        {f"blocks.{i}" for i in range(12)},
        [*LARGE, "doubl", "twice", "second time", "two skips", "factor of 2", "factor 2"],
        "The blocks add their input and the network adds it again: the signal doubles with each block.",
    ),
    Broken(
        "cnn_gates_begin_shut",
        pictures.cnn_gates_begin_shut,
        {name for i in range(3) for name in (f"blocks.{i}", f"blocks.{i}.gate", f"blocks.{i}.gate.fc2")},
        [*DEAD, "saturat", "shut", "closed", "hardsigmoid", "hard sigmoid"],
        "The bias of -4 shuts the hard sigmoid of each gate: it is exactly zero, and so is its gradient.",
    ),
    Broken(
        "detector_offsets_through_relu",
        pictures.detector_offsets_through_relu,
        {"offsets"},
        ["negative", "below zero", "below 0", "less than zero", "under zero", " range", "positive", "clip", "cut off",
         "cannot reach", "can't reach", "out of reach", "last activation", "final activation", "final relu",
         "last relu", "output activation", "ends in a relu", "ends with a relu", "relu at the end", "at least zero"],
        "The head of the offsets ends in ReLU, but half of the offsets are negative.",
    ),
    Broken(
        "vqvae_no_straight_through",
        pixels.vqvae_no_straight_through,
        {"codebook", "project", "encoder"},
        [*CUT, "straight-through", "straight through", "argmin"],
        "The choice of the nearest code has no gradient and no straight-through estimate: the encoder never learns.",
    ),
    Broken(
        "vae_log_variance_too_wide",
        pixels.vae_log_variance_too_wide,
        {"log_variance"},
        [*LARGE, *SPREAD, "exponent", "exp("],
        "The weights of the log variance are standard normal: it is in the tens, and its exponential is astronomic.",
    ),
    Broken(
        "cnn_group_norm_of_single_values",
        pictures.cnn_group_norm_of_single_values,
        {"neck", "neck.1"},
        [*DEAD, *SAME, "single value", "one value", "single element", "one element", "one pixel", "per group",
         "num_groups", "own mean"],
        "Each group of the norm is one channel of one pixel: less its own mean it is zero for every picture.",
    ),
    Broken(
        "discriminator_softmax_of_one_score",
        pictures.discriminator_softmax_of_one_score,
        {"to_probability", "judge"},
        [*SAME, *CUT, "always 1", "always one", "equal to 1", "equal to one", "all ones", "is 1 for", "softmax",
         "saturat"],
        "A softmax of one score is always 1: there is no gradient. A sigmoid was meant.",
    ),
    Broken(
        "unet_without_activations",
        pixels.unet_without_activations,
        set(),
        ["nonlinear", "non-linear", "no activation", "without activation", "without an activation",
         "activation function", "missing activation", "activations are missing", "lacks an activation", "is linear",
         "are linear", "affine map", "linear map", "linear function", "linear network", "only linear",
         "purely linear", "one linear", "single linear"],
        "There is no activation between the convolutions: the network is one linear map, however deep.",
    ),
    Broken(
        "timm_vit_frozen_at_random",
        pictures.timm_vit_frozen_at_random,
        {"backbone"},
        ["frozen", "freez", "requires_grad", "require grad", "not train", "untrained", "never train", "not learn",
         "never learn", "no grad", "not updated", "never updated"],
        "All weights of the backbone are frozen, at random values: only the head can learn.",
    ),
    Broken(
        "gpt_probabilities_into_cross_entropy",
        tokens.gpt_probabilities_into_cross_entropy,
        {"to_scores", "loss", "output"},
        ["softmax", "probabilit", "sum to 1", "sum to one", "add up to", "expects logits", "not logits",
         "instead of logits", "already normalized"],
        "The network returns probabilities, of which the cross entropy takes the softmax once more.",
    ),
    Broken(
        "gpt_tied_to_standard_normal_words",
        tokens.gpt_tied_to_standard_normal_words,
        {"token_embedding", "head"},
        [*LARGE, *SPREAD, "confident", "tied", "shared", "scale of", "saturat"],
        "The head shares the standard normal embedding: the logits have a standard deviation of 16, the loss is 220.",
    ),
    Broken(
        "encoder_padding_mask_inverted",
        tokens.encoder_padding_mask_inverted,
        {"encoder"},
        [*SAME, *CUT, "mask", "padding", "not attend", "never attend", "ignor", "unused", "no effect", "not used"],
        "The padding mask is inverted: the first token attends to the padding only, and no word reaches the head.",
    ),
    Broken(
        "lstm_runs_over_the_batch",
        tokens.lstm_runs_over_the_batch,
        {"recurrent"},
        ["batch_first", "batch first", "other sample", "other example", "across sample", "across example",
         "across the batch", "over the batch", "along the batch", "between samples", "mixes", "mixed", "leaks",
         "leakage", "batch dimension", "batch axis", "wrong axis", "wrong dim", "transpos", "permut", "swapped",
         "one another", "each other"],
        "The LSTM lacks batch_first: it runs over the samples of the batch and not over the steps.",
    ),
    Broken(
        "gru_weights_of_standard_normal",
        tokens.gru_weights_of_standard_normal,
        {"recurrent"},
        [*LARGE, *SPREAD, "saturat", "chao", "vanish", "orthogonal", "spectral"],
        "All weights of the GRU are standard normal: gates and states are saturated, and the dynamics are chaotic.",
    ),
    Broken(
        "diffusion_gates_and_projections_zero",
        tokens.diffusion_gates_and_projections_zero,
        {"blocks.0", "blocks.1"},
        [*CUT, *DEAD, "never train", "not train", "stuck", "never learn", "not learn", "product of"],
        "The gates and the last projections of the branches are both zero: neither gets a gradient, ever.",
    ),
    Broken(
        "words_of_length_one_in_half",
        tokens.words_of_length_one_in_half,
        {"to_unit_length"},
        [*NAN, "half precision", "half-precision", "in half", "float16", "fp16", "precision", "underflow", " eps",
         "epsilon", "divid", "division"],
        "In half precision the epsilon of 1e-12 is zero: the padding's zero vector over its length is NaN.",
    ),
    Broken(
        "transformers_bert_initializer_range_one",
        tokens.transformers_bert_initializer_range_one,
        {"bert"},
        [*LARGE, *SPREAD, "saturat", "initializer_range", "one-hot", "one hot"],
        "All weights of BERT have the standard deviation 1 and not 0.02: every softmax and tanh is saturated.",
    ),
]  # fmt: skip

TENTH = [scored(case) for case in BROKEN]
