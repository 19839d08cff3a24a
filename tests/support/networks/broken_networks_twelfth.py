"""The twelfth set of broken networks, with what a right answer has to say about each.

All faults are there before the first step of training: weights too large or too small, a gain or a norm that is
missing, saturated or dead units, cut gradients, equal units, inputs that nobody prepared, precision, a head that does
not fit the targets, and depth. The set was written without sight of the detector and of its tests. The test of the
same name trains each beside its healthy twin.
"""

import broken_networks_twelfth_images as pictures
import broken_networks_twelfth_tables as tables
import broken_networks_twelfth_tokens as tokens
from fifth_parts import Broken, scored

LARGE = ["large", "too big", "too strong", "too high", "huge", "explod", "blow", "grow", "amplif", "too wide", "doubl"]
SMALL = ["small", "tiny", "vanish", "shrink", "shrunk", "decay", "fade", "dies out", "too low", "too weak", "attenuat"]
SPREAD = ["std", "standard deviation", "spread", "variance of the weights", "deviation"]
CUT = ["no gradient", "without gradient", "without a gradient", "zero gradient", "gradient is zero", "gradient of zero",
       "gradients are zero", "get no ", "gets no ", "got no ", "not train", "never train", "not learn", "never learn",
       "not updat", "never updat", "not reach", "never reach", " cut", "detach", "blocked", "frozen"]  # fmt: skip
BLIND = ["independ", "not depend", "never depend", "barely depend", "hardly depend", "same for", "same output",
         "constant", "identical", "ignore", "disconnect", "no information", " lost", " lose"]  # fmt: skip
DEAD = ["dead", "never fire", "never active", "inactive", "not active", "always zero", "all zero", "is zero",
        "are zero", "only zero", "zero for", "zeros", "switched off", "always off"]  # fmt: skip
ALIKE = ["alike", "similar", "collaps", "rank", "correlat", "indistinguish", "tell apart", "same vector", "same value",
         "same direction", "identical"]  # fmt: skip
NAN = [" nan", "(nan", "nans", "not finite", "non-finite", "nonfinite", "not all finite", "infinit", " inf", "-inf"]

BROKEN = [
    Broken(
        "vgg_one_convolution_times_hundred",
        pictures.vgg_one_convolution_times_hundred,
        {"features.conv5", "features.relu5"},
        [*LARGE, *SPREAD, "jump", "times he", " gain"],
        "The weights of the fifth convolution are a hundred times too large, and so are the scores and the first loss.",
    ),
    Broken(
        "autoencoder_tanh_weights_uniform",
        pictures.autoencoder_tanh_weights_uniform,
        {"encoder", "decoder"},
        [*LARGE, *SPREAD, "saturat", "flat", "±1", "-1 or 1", "extreme", "xavier", "glorot"],
        "The weights are uniform between -1 and 1, far too large for tanh: its units are saturated.",
    ),
    Broken(
        "unet_last_block_dead",
        pictures.unet_last_block_dead,
        {"up1"},
        [*DEAD, *CUT, *BLIND, "bias", "negative", "below zero"],
        "The biases of -10 before the ReLU of the last block keep all of its units at zero.",
    ),
    Broken(
        "densenet_pixels_up_to_255",
        pictures.densenet_pixels_up_to_255,
        {"inputs", "stem"},
        [*LARGE, "255", "standardiz", "standardis", "not normal", "unnormal", "normalize the input", "range", "raw",
         "scale", "pixel", "bytes", "mean", "offset", "center", "centre"],
        "The pixels are from 0 to 255 and not standardized; nothing in the network takes this scale away.",
    ),
    Broken(
        "timm_vit_queries_and_keys_times_thirty",
        pictures.timm_vit_queries_and_keys_times_thirty,
        {"blocks"},
        [*LARGE, *SPREAD, "saturat", "one-hot", "one hot", "one token", "single token", "other token", "entropy",
         "sharp", "peak", "concentrat", "winner", "softmax", "attention weights", "scores"],
        "Queries and keys are thirty times too large: the softmax of the attention is saturated at one token.",
    ),
    Broken(
        "torchvision_swin_bias_of_counts",
        pictures.torchvision_swin_bias_of_counts,
        {"head", "output", "loss"},
        [*LARGE, "bias", "prior", "count", "first loss", "initial loss", "loss starts", "loss begins", "above chance",
         "worse than chance", "confident", "one class", "same class", "single class", "offset", "saturat"],
        "The bias of the head holds counts of the classes, not logs of their shares: the first loss is over 200.",
    ),
    Broken(
        "equalized_discriminator_scaled_twice",
        pictures.equalized_discriminator_scaled_twice,
        {"convs"},
        [*SMALL, *SPREAD, "twice", " gain", "fan", "he's", "kaiming", "unit variance"],
        "He's factor is in the weights and in each call as well: the signal becomes ten times smaller per layer.",
    ),
    Broken(
        "two_streams_motion_gain_zero",
        pictures.two_streams_motion_gain_zero,
        {"motion"},
        [*DEAD, *CUT, *BLIND, " gain", "gamma", "zero weight", "weight of zero", "zero-init"],
        "The gain of the stream's last norm is zero, and a ReLU follows: it returns zeros and gets no gradient.",
    ),
    Broken(
        "autoencoder_decoder_frozen",
        pictures.autoencoder_decoder_frozen,
        {"decoder"},
        [*CUT, "requires_grad", "freez", "froze", "trainable", "does not require", "fixed"],
        "The decoder has random weights that do not require gradients, so that it is never trained.",
    ),
    Broken(
        "pointnet_weights_without_gain",
        tables.pointnet_weights_without_gain,
        {"points"},
        [*SMALL, *SPREAD, *BLIND, *ALIKE, " gain", "he's", "kaiming", "he init"],
        "The weights lack the gain of ReLU: the signal vanishes over 24 layers, and all clouds look the same.",
    ),
    Broken(
        "tabular_transformer_missing_values",
        tables.tabular_transformer_missing_values,
        {"inputs"},
        [*NAN, "missing"],
        "Some values of the table are NaN.",
    ),
    Broken(
        "contrastive_inputs_far_from_zero",
        tables.contrastive_inputs_far_from_zero,
        {"inputs", "encoder", "projector", "output"},
        [*LARGE, *ALIKE, *BLIND, "offset", "mean", "center", "centre", "standardiz", "standardis", "not normal",
         "unnormal", "shift", "far from zero", "away from zero", "300", "range", "scale", "same score", "all equal"],
        "The inputs are around 300 with a spread of 1: all of them look the same, and so do all scores.",
    ),
    Broken(
        "factorization_both_tables_zero",
        tables.factorization_both_tables_zero,
        {"users", "items"},
        [*CUT, *DEAD, "all-zero", "zero vector", "saddle", "symmetr", "constant", "identical"],
        "The vectors of users and of items are all zero: the gradient of each is the other, and so zero forever.",
    ),
    Broken(
        "gcn_isolated_nodes_divide_by_zero",
        tables.gcn_isolated_nodes_divide_by_zero,
        {"conv1"},
        [*NAN, "divi", "isolated", "degree", "self-loop", "zero to the", "no neighbor", "without neighbor"],
        "The degree of a node without neighbors is zero, and its power -0.5 is infinite: the nodes become NaN.",
    ),
    Broken(
        "residual_mlp_multiplies_shortcut",
        tables.residual_mlp_multiplies_shortcut,
        {"blocks"},
        [*SMALL, "multipl", "skip", "residual", "shortcut", "product", "not added", "times its"],
        "The blocks multiply the shortcut with the branch: the signal vanishes from block to block.",
    ),
    Broken(
        "color_field_layer_norm_of_two_coordinates",
        tables.color_field_layer_norm_of_two_coordinates,
        {"enter_norm", "enter"},
        [*BLIND, *ALIKE, "two values", "two features", "two columns", "two channels", "two numbers", "two entries",
         "2 values", "2 features", "2 columns", "2 channels", "2 numbers", "2 entries", "width of 2", "width 2",
         "±1", "-1 and 1", "-1 or 1", "sign", "distinct", "binary", "discard", "destroy", "remov", "information",
         "too few", "only few", "wrong axis", "saturat"],
        "A layer norm over two numbers leaves 1 and -1: all that is left of a place is which number is larger.",
    ),
    Broken(
        "memory_attention_detached",
        tables.memory_attention_detached,
        {"to_query", "to_key"},
        [*CUT],
        "The attention weights are detached, so that queries and keys get no gradient.",
    ),
    Broken(
        "gpt_block_forgets_skip",
        tokens.gpt_block_forgets_skip,
        {"blocks.2"},
        [*SMALL, *ALIKE, "skip", "residual", "shortcut", "not added", "replac", "identity path", "unlike", "averag",
         " lost", " lose", "no sum"],
        "The attention of the third block has no shortcut: the mean over the tokens takes the place of the tokens.",
    ),
    Broken(
        "music_decoder_of_deep_post_norm_layers",
        tokens.music_decoder_of_deep_post_norm_layers,
        {"layers"},
        [*SMALL, *ALIKE, *BLIND, "post-norm", "post norm", "postnorm", "post-ln", "pre-norm", "pre-ln", "norm_first",
         "after the sum", "after each sum", "after the addition", "after each addition", "on the stream", "the norm in",
         "warmup", "warm-up", "warm up", "too deep", "depth"],
        "The norms stand after the sums of 48 layers: such depth hardly trains without a warmup.",
    ),
    Broken(
        "keywords_eps_lost_in_half",
        tokens.keywords_eps_lost_in_half,
        {"frame_norm"},
        [*NAN, "half", "float16", "fp16", "precision", "eps", "0 / 0", "0/0", "divi", "zero variance", "underflow"],
        "An eps of 1e-8 is zero in half precision: silent frames give 0 / 0, which is NaN.",
    ),
    Broken(
        "lstm_all_weights_equal",
        tokens.lstm_all_weights_equal,
        {"lstm", "head"},
        [*ALIKE, *SPREAD, "equal", "same ", "constant", "symmetr", "copies", "duplicate", "distinct", "one unit",
         "not random"],
        "All weights are 0.1, so that all units are the same and stay the same.",
    ),
    Broken(
        "transformers_roberta_positions_drown_words",
        tokens.transformers_roberta_positions_drown_words,
        {"network.roberta.embeddings"},
        [*LARGE, *SMALL, *SPREAD, *BLIND, "drown", "dominat", "outweigh", "swamp", "position", "imbalance", "alike"],
        "The vectors of positions are 250 times larger than those of words: their sum hardly depends on the words.",
    ),
    Broken(
        "heartbeats_norms_left_out",
        tokens.heartbeats_norms_left_out,
        {"blocks"},
        [*LARGE, "no norm", "without norm", "without a norm", "missing norm", "not normal", "unnormal", "no batch norm",
         "batch norm is missing", "norm is missing", "per block"],
        "Without normalizers, the variance of the stream doubles in each of 16 blocks with He's weights.",
    ),
    Broken(
        "forecaster_relu_on_output",
        tokens.forecaster_relu_on_output,
        {"to_value", "output"},
        ["relu", "negative", "below zero", "non-negative", "nonnegative", "positive", "less than zero", "range",
         "cannot reach", "targets", "clip", "clamp", "cut off", "half of", "dead", "sign"],
        "A ReLU on the output makes it positive or zero, but half of the targets are negative.",
    ),
]  # fmt: skip

TWELFTH = [scored(case) for case in BROKEN]
