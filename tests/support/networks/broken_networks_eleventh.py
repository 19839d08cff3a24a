"""The eleventh set of broken networks, with what a right answer has to say about each.

They are what people ask about in forums and break in reviews: weights of a wrong spread, saturated activations,
missing factors and shortcuts, cut or reversed gradients, normalizers that do not normalize, wrong axes and masks, a
loss that does not fit the output, weights that are not registered, and precision. The set was written without sight of
the detector and of its tests. The test of the same name trains each beside its healthy twin.
"""

import broken_networks_eleventh_images as pictures
import broken_networks_eleventh_tables as tables
import broken_networks_eleventh_tokens as tokens
from fifth_parts import Broken, scored

LARGE = ["large", "too big", "too strong", "too high", "huge", "explod", "blow", "grow", "amplif", "too wide"]
SMALL = ["small", "tiny", "vanish", "shrink", "shrunk", "decay", "fade", "dies out", "too low", "too weak", "attenuat"]
SPREAD = ["std", "standard deviation", "spread", "variance of the weights", "deviation"]
CUT = ["no gradient", "without gradient", "without a gradient", "zero gradient", "gradient is zero", "gradient of zero",
       "gradients are zero", "get no ", "gets no ", "got no ", "not train", "never train", "not learn", "never learn",
       "not updat", "never updat", "not reach", "never reach", " cut", "detach", "blocked", "frozen"]  # fmt: skip
BLIND = ["independ", "not depend", "never depend", "barely depend", "hardly depend", "same for", "same output",
         "constant", "identical", "ignore", "disconnect", "no information", " lost", " lose"]  # fmt: skip
NAN = [" nan", "(nan", "nans", "not finite", "non-finite", "nonfinite", "infinit", " inf", "-inf"]

BROKEN = [
    Broken(
        "mlp_weights_all_positive",
        tables.mlp_weights_all_positive,
        {"stack"},
        [*LARGE, *SPREAD, "positive", "same sign", "zero mean", "zero-mean", "nonzero mean", "mean of the weight",
         "mean weight", "mean is not", "torch.rand", "uniform", "alike", "rank", "same direction"],
        "The weights are uniform between 0 and 1: all positive, far too large, and all units nearly alike.",
    ),
    Broken(
        "mlp_layer_made_in_forward",
        tables.mlp_layer_made_in_forward,
        {"mixer"},
        ["random", "not regist", "unregist", "isn't regist", "never regist", "no parameter", "without parameter",
         "determin", "stochastic", "differs between", "differs from call", "differ between", "different in",
         "different out", "different each", "changes from", "changes between", "each call", "each forward",
         "every call", "every forward", "each pass", "every pass", "two passes", "newly", "created", "creates",
         "not repeat", "reproduc", "inside forward"],
        "A layer is created inside `forward`: its weights are new random ones in each call and are never trained.",
    ),
    Broken(
        "recommender_probabilities_saturated",
        tables.recommender_probabilities_saturated,
        {"users", "items", "to_probability"},
        [*LARGE, *SPREAD, "saturat", "flat", "0 or 1", "zero or one", "confident", "extreme"],
        "Vectors of length 16 give dot products of about ±16, so that the sigmoid of them is saturated at 0 or 1.",
    ),
    Broken(
        "graph_net_all_nodes_alike",
        tables.graph_net_all_nodes_alike,
        {"convs"},
        ["smooth", "alike", "identical", "same for", "same vector", "same value", "collaps", "similar",
         "indistinguish", "tell apart", "skip", "residual", "shortcut", "averag", "rank", "correlat", "independ",
         "not depend", "barely depend", "hardly depend", "constant", "differences"],
        "Without shortcuts, twelve averages over neighbors make all the nodes of a graph nearly the same.",
    ),
    Broken(
        "flow_scales_begin_at_half",
        tables.flow_scales_begin_at_half,
        {"couplings"},
        [*SMALL, "one half", "by half", "halv", "0.5", "contract", "sigmoid", "below one", "below 1", "less than one"],
        "The scale of each coupling is a sigmoid, at first one half: 24 of them shrink the signal to a 4000th.",
    ),
    Broken(
        "regressor_variance_through_relu",
        tables.regressor_variance_through_relu,
        {"to_variance", "to_spread", "output"},
        [*NAN, "zero variance", "variance of zero", "variance is zero", "variance zero", "log of zero", "log of 0",
         "log(0)", "divi", "softplus", "positive"],
        "The variance goes through ReLU and is zero for half of the rows: its logarithm and the loss are not finite.",
    ),
    Broken(
        "multitask_gradient_reversed_for_both",
        tables.multitask_gradient_reversed_for_both,
        {"passage", "trunk"},
        ["revers", "wrong sign", "other sign", "opposite", "sign of", "flip", "negat", "ascen", "uphill", "minus",
         "wrong gradient", "gradient is wrong", "gradients are wrong", "not the gradient", "incorrect", "finite diff",
         "numerical", "disagree", "wrong direction", "wrong way"],
        "The gradient reversal stands before both heads: the trunk is trained to make the classes' loss larger.",
    ),
    Broken(
        "diffusion_steps_up_to_thousand",
        tables.diffusion_steps_up_to_thousand,
        {"embed_step", "body.0", "inputs"},
        [*LARGE, "dominat", "drown", "range", "999", "1000", "standardiz", "not normaliz", "unnormaliz", "scale"],
        "The time step, up to 999, enters a linear layer as it is and drowns the data beside it.",
    ),
    Broken(
        "contrastive_cosines_as_scores",
        tables.contrastive_cosines_as_scores,
        {"tower_a", "tower_b", "output", "loss"},
        ["cosine", "temperature", "bound", "between -1", "within ±1", "[-1", "range", "small", "scale", "cannot be",
         "cannot fall", "cannot get", "cannot go", "floor", "at least 2", "unit length", "normalized", "lowest"],
        "The scores are cosines without a temperature, within ±1: the cross entropy of 64 pairs stays above 2.",
    ),
    Broken(
        "unet_gan_weights_without_norms",
        pictures.unet_gan_weights_without_norms,
        {"down1", "down2", "down3", "up2", "up1", "to_classes"},
        [*SMALL, *SPREAD, " gain", "0.02", "he's", "kaiming", "he init"],
        "The weights are N(0, 0.02), far too small without normalizers: the signal vanishes from layer to layer.",
    ),
    Broken(
        "resnet_blocks_average_both_paths",
        pictures.resnet_blocks_average_both_paths,
        {"stage"},
        [*SMALL, "one half", "by half", "halv", "averag", "0.5", "0.7", "root of two", "sqrt"],
        "Each block averages the stream and its branch, which shrinks the signal by 0.7 per block.",
    ),
    Broken(
        "generator_weights_without_std",
        pictures.generator_weights_without_std,
        {"to_rgb"},
        [*LARGE, *SPREAD, "saturat", "flat", "±1", "0.02", "extreme"],
        "The last convolution is N(0, 1) and not N(0, 0.02): the tanh behind it is saturated.",
    ),
    Broken(
        "discriminator_normalizes_weight_data",
        pictures.discriminator_normalizes_weight_data,
        {"convs", "to_score"},
        [*CUT, ".data", "unused", "not used"],
        "The spectral norm takes `weight.data`, so that no weight of the discriminator gets a gradient.",
    ),
    Broken(
        "vae_codes_from_sample",
        pictures.vae_codes_from_sample,
        {"encoder", "to_mean", "to_log_variance", "decoder"},
        [*CUT, "rsample", "sample()", "sampling", "sampled", "reparam", "divergence", "kl "],
        "The codes come from `sample` and not `rsample`: no gradient of the pictures' error reaches the encoder.",
    ),
    Broken(
        "detector_prior_of_wrong_sign",
        pictures.detector_prior_of_wrong_sign,
        {"score_conv", "output"},
        ["bias", "prior", "4.6", "confident", "saturat", "offset", "too high", "too large", "above chance",
         "worse than chance", "0.99"],
        "The bias of the scores is +4.6 and not -4.6: every cell begins as an object, and the loss is huge.",
    ),
    Broken(
        "cnn_log_softmax_over_the_batch",
        pictures.cnn_log_softmax_over_the_batch,
        {"log_probabilities", "output"},
        ["over the batch", "across the batch", "along the batch", "of the batch", "in the batch", "batch axis",
         "batch dim", "dim=0", "dim 0", "axis", "dimension", "other samples", "between samples", "across samples",
         "among samples", "mixes samples", "samples depend", "examples", "compete", "sum to one", "sum to 1",
         "not over the classes"],
        "The log softmax is taken over the batch and not over the classes: samples compete with each other.",
    ),
    Broken(
        "timm_convnext_instance_norm_before_pooling",
        pictures.timm_convnext_instance_norm_before_pooling,
        {"norm_pre", "head"},
        [*BLIND, "zero mean", "mean of zero", "mean is zero", "means are zero", "all zero", "always zero", "is zero",
         "are zero", "no gradient", "zero gradient", "gradient is zero", "vanish", "remove", "pooling"],
        "An instance norm makes the mean of each channel zero, and the pooling takes just this mean: nothing is left.",
    ),
    Broken(
        "torchvision_mobilenet_norms_frozen_from_scratch",
        pictures.torchvision_mobilenet_norms_frozen_from_scratch,
        {"features"},
        [*SMALL, "running", "statistic", "not normal", "no normaliz", "without normaliz", "nothing is normal"],
        "The frozen batch norms of a network with random weights normalize nothing: the signal vanishes.",
    ),
    Broken(
        "cnn_fan_in_without_the_kernel",
        pictures.cnn_fan_in_without_the_kernel,
        {"convs"},
        [*LARGE, *SPREAD, "saturat", "clip", "clamp", "at six", "stuck at 6", "limit of 6", "above 6", "fan",
         "kernel", " gain"],
        "The weights are three times too large, and the units are stuck at the two ends of ReLU6.",
    ),
    Broken(
        "rnn_recurrent_weights_near_zero",
        tokens.rnn_recurrent_weights_near_zero,
        {"rnn"},
        [*SMALL, "forget", "forgot", "memory", "near zero", "close to zero", "nearly zero", "almost zero", "early step",
         "earlier step", "first step", "past", "through time", "over time", "orthogonal", "spectral", "remember"],
        "The recurrent weights are within ±0.01: the state forgets each step at once, and no gradient gets back to it.",
    ),
    Broken(
        "decoder_mask_hides_the_token_itself",
        tokens.decoder_mask_hides_the_token_itself,
        {"blocks.0", "blocks.1.attention"},
        [*NAN, "mask", "attend to nothing", "nothing to attend", "diagonal"],
        "The causal mask begins at the diagonal: all scores of the first token are -inf, and their softmax is NaN.",
    ),
    Broken(
        "vit_attends_over_heads",
        tokens.vit_attends_over_heads,
        {"blocks.0", "blocks.1", "blocks.2", "patch_conv"},
        [*BLIND, "no gradient", "zero gradient", "gradient is zero", "not reach", "never reach", " cut", "heads",
         "transpose", "not mix", "never mix", "mixes no", "other tokens", "between tokens", "not see", "alone"],
        "The attention is among the heads of a token: the extra token, from which it classifies, never sees the image.",
    ),
    Broken(
        "transformers_distilbert_gains_drawn_too",
        tokens.transformers_distilbert_gains_drawn_too,
        {"network.distilbert.embeddings", "network.distilbert.transformer"},
        [*SMALL, " gain", "near zero", "close to zero", "nearly zero", "almost zero", "0.02", "normalizer's weight",
         "not one", "not 1", "instead of one", "instead of 1"],
        "The gains of all normalizers are N(0, 0.02) and not one: each layer's output is fifty times too small.",
    ),
    Broken(
        "encoder_squares_overflow_in_half",
        tokens.encoder_squares_overflow_in_half,
        {"blocks.0", "blocks.1", "final_norm"},
        ["overflow", "half precision", "half-precision", "in half", "float16", "fp16", "precision", "65504",
         "65,504", "65 504", "infinit", " inf", "not finite", "squares"],
        "The sum of squares overflows in half precision: the norm divides by infinity and returns zeros.",
    ),
]  # fmt: skip

ELEVENTH = [scored(case) for case in BROKEN]
