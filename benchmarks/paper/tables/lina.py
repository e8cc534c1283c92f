"""Every table and figure of Lina (USENIX ATC '23), ours beside it."""

from benchmarks.paper.tables import lina_words as words
from benchmarks.paper.tables.row import Row

DRAWING = "a drawing without figures"
AGAINST_READY = (
    "the same ratio against our own step in the order of data-parallel frameworks (`ready`), in "
    "place of DeepSpeed's; two nodes of two ranks over a limited link"
)
TWO_DEVICES = "two devices, where no scheduling gains more than the ideal"

TABLES = (
    Row(
        "Table 1",
        "the all-to-alls' share of a step",
        "35.4 to 39.5 % of a training step, 26.2 to 32.5 % of an inference batch (4 and 16 A100, "
        "12 to 36 layers)",
        "no: the share of a training step in which the backward pass waits for all-to-alls, four "
        "layers over a limited link",
        "lina-order",
        words.shares_text,
    ),
    Row(
        "Table 1, at its sizes",
        "the same of the paper's models, estimated from the compiled step",
        "259 and 333 ms, 36.7 and 39.5 % (12 layers, 4 and 16 A100), 589 and 715 ms, 35.4 and "
        "37.6 % (24), 979 and 1,145 ms, 38.2 and 36.8 % (36)",
        "the same quantities, estimated; the paper leaves open the tokens a device (here 8,192) "
        "and the nodes of the 4 GPUs",
        "paper-estimates",
        words.estimated_shares_text,
    ),
    Row(
        "Table 2",
        "the four most popular experts of a layer, in inference",
        "Transformer-XL: layer 4: 5, 7, 8, 10; layer 8: 9, 2, 3, 13; layer 12: 4, 5, 15, 8; "
        "BERT-Large: layer 6: 7, 6, 10, 1; layer 8: 10, 6, 2, 15; layer 12: 1, 8, 10, 14",
        "the same quantity of another model: they differ from layer to layer, in the paper as here",
        "lina-popular-experts",
        words.most_popular_text,
    ),
    Row(
        "Table 3",
        "pipelining efficiency with experts packed: the busy share during all-to-alls",
        "33 to 86 % (Transformer-XL, 4 a device), 36 to 85 % (GPT-2, 2), 34 to 79 % (BERT2GPT2, 2)",
        "the same quantity; over 100 Mbit/s all-to-alls take up to 90 times as long as experts, "
        "and no packing fills them",
        "lina-packing",
        words.pipelining_text,
    ),
    Row(
        "Table 4",
        "utilisation with experts packed; memory",
        "GPU utilisation 66.2 to 83.4 %, 62.3 to 78.2, 63.5 to 82.5; peak memory 72.1 to 100 %, "
        "83.8 to 100, 74.3 to 94.2",
        "no: processor time over wall time and cores, in place of GPUs; packed experts that exceed "
        "the devices move to host memory by themselves (tests/test_train_packing_slow.py)",
        "lina-packing",
        words.utilisation_text,
    ),
    Row(
        "Table 5",
        "inference by the length of a path: time over ideal, plans made anew, accuracy",
        "Transformer-XL, BERT-Large: l = 1: 1.41 and 1.34, 77 and 71 %, 32 and 28 %; l = 3: 1.16 "
        "and 1.07, 26 and 32 %, 60 and 64 %; l = 6: 1.19 and 1.09, 23 and 27 %, 71 and 66 %",
        f"the same quantities, 8 experts; {TWO_DEVICES}",
        "lina-inference",
        words.path_lengths_text,
    ),
    Row(
        "Table 6",
        "other data and models: 95th percentile over the ideal time",
        "BERT on two kinds of reviews 1.08 and 1.11, T5 on two languages 1.04 and 1.08",
        f"the same ratio for other data; the models are decoders, since the engine runs no "
        f"encoders: models like BERT and T5 (presets bert-moe and t5-moe) can only be trained; "
        f"{TWO_DEVICES}",
        "lina-inference",
        words.generality_text,
    ),
)

MOTIVATION = (
    Row(
        "Figure 1",
        "an MoE layer; experts and data in parallel",
        DRAWING,
        "a step on every mesh of devices is one device's",
        held_by="tests/training/fused/test_step.py",
    ),
    Row(
        "Figure 2",
        "the all-to-alls' share of a layer's forward pass",
        "74.9 %, GPU busy 3.7 % of it",
        "the same share, in inference over 1 Gbit/s",
        "lina-inference",
        words.layer_share_text,
    ),
    Row(
        "Figure 3",
        "an all-to-all's bytes and share by the number of experts",
        "bytes linear in the experts; 33.4 % of a step with 2 experts, 44.5 % with 16",
        "the share, estimated, for 4 and 16 experts; top-2 sends a device's tokens twice at any "
        "number of experts, so bytes a device grow as (n - 1) / n",
        "paper-estimates",
        words.share_by_experts_text,
    ),
    Row(
        "Figure 4",
        "how much longer all-to-alls take beside all-reduces",
        "more than 1.83 times in the median, at most 4.14 times (1,500 operations)",
        "the same ratios, over the median of the same all-to-all where all-reduces come after the "
        "last of them (`fixed`); waiting for all-reduces that have begun is counted",
        "lina-contention",
        words.contention_text,
    ),
    Row(
        "Figure 5",
        "the backward pass: all-to-alls and all-reduces at once",
        DRAWING,
        "the order of collectives in a compiled backward pass",
        held_by="tests/training/fused/test_reverse_scan.py",
    ),
    Row(
        "Figure 6",
        "tokens of the most popular expert over those of the least popular one, in inference",
        "4.02 with 4 experts, 5.56 with 16",
        "the same ratio",
        "lina-inference",
        words.popularity_spread_text,
    ),
)

TRAINING = (
    Row(
        "Figure 7",
        "orders of all-to-alls and all-reduces in a backward pass",
        "plain priority is slower than none; all-reduces after all-to-alls are faster; no step "
        "times",
        "the same orders: speed of a step over `ready`, and all-to-alls' end; `fixed` is the "
        "figure's third",
        "lina-ddp",
        words.ddp_text,
    ),
    Row(
        "Figure 8",
        "gradients in chunks between all-to-alls; all-to-alls in chunks beside the experts",
        "all-reduces done 21.7 % sooner, cutting costs 764 us; 1.6 ms of experts hidden",
        "no: whole steps with either, over `ready`",
        "lina-order",
        words.ablation_text,
    ),
    Row(
        "Figures 10 to 15, step time",
        "all-to-alls before all-reduces, in chunks",
        "1.71 times (2 experts), 1.37 (4), 1.73 (8), 1.47 (16) over DeepSpeed",
        AGAINST_READY,
        "lina-order",
        words.step_times_text,
    ),
    Row(
        "Figures 10 to 15, forward pass of a layer",
        "time of a layer in the order `ready` over its in chunks",
        "1.84 times (2 experts), 1.89 (8)",
        AGAINST_READY,
        "lina-layer",
        words.forward_layer_text,
    ),
    Row(
        "Figures 10 to 15, backward pass of a layer",
        "time of a layer in the order `ready` over its in chunks",
        "2.41 times (2 experts), 2.32 (8)",
        AGAINST_READY,
        "lina-layer",
        words.backward_layer_text,
    ),
    Row(
        "Figures 10 to 15, all-to-alls of the backward pass",
        "time until all of them are done, `ready` over chunks",
        "2.21 times (4 experts), 2.39 (8), 2.31 (16)",
        AGAINST_READY,
        "lina-order",
        words.backward_all_to_alls_text,
    ),
    Row(
        "Figures 10 to 15, ablation",
        "each of Lina's means by itself",
        "priority alone 10 to 30 %, 24 % on average; with chunks 1.36 to 1.42 times at 2 to 16 "
        "experts; a fixed order least of all",
        AGAINST_READY,
        "lina-order",
        words.ablation_text,
    ),
    Row(
        "scheduler, a queue at run time",
        "what starting collectives by priority at run time could save over the compiled order",
        "collectives wait in a queue at run time, by priority; no figures of the queue alone",
        "no figures to compare: a bound from traces, not a measured queue: all-to-alls that wait "
        "behind collectives begun after their input was there, and collectives that run alone "
        "though the link rested before; what is under way is not interrupted by a queue either",
        "lina-queue",
        words.queue_text,
    ),
    Row(
        "section 5, experts by load in training",
        "experts that change their devices by popularity (`--comm.balance-every-steps`)",
        "none of training: the paper places experts in inference",
        "no figures to compare: the busiest device's tokens with and without; a device has as many "
        "experts as before",
        "elastic-text",
        words.placed_in_training_text,
    ),
    Row(
        "Figures 10 to 15, partition size",
        "speed of a step over `ready` by the size of a chunk",
        "30 MB chosen; above 50 MB two models slow down, below 10 MB overhead may cost more",
        "the same ratio; sizes scale with a link that is 500 to 2,000 times slower",
        "lina-partition-size",
        words.partition_sizes_text,
    ),
    Row(
        "section 7.2, overheads",
        "cutting collectives into chunks",
        "cutting 1.02 % of a step, transmission 1.7 %",
        "the same quantity, but steps alternate between 1.4 and 2.2 s on two cores, more than "
        "cutting costs",
        "lina-overhead",
        words.gradient_cutting_text,
    ),
)

INFERENCE = (
    Row(
        "Figure 9",
        "experts of the next layer, guessed from a token's path",
        "41.94 % among one, 54.59 % among two",
        "the same share, among two of 16 experts",
        "lina-popularity",
        words.path_guesses_text,
    ),
    Row(
        "Figure 16",
        "time of a batch with even placement over Lina's",
        "median 1.36 to 1.54 times, 95th percentile 1.82 and 1.68 (16 experts)",
        f"the same ratios; {TWO_DEVICES}; 16 devices are simulated",
        "lina-inference",
        words.inference_text,
    ),
    Row(
        "Figures 17 to 19, 95th percentile of a layer's time",
        "even placement over Lina's",
        "1.77 to 1.87 times (Transformer-XL), 1.58 to 1.81 (BERT-Large)",
        f"the same ratio; {TWO_DEVICES}",
        "lina-inference",
        words.layer_time_tail_text,
    ),
    Row(
        "Figures 17 to 19, 95th percentile of an all-to-all",
        "even placement over Lina's, by layer",
        "mean 1.96, at most 2.50",
        f"the same ratio; {TWO_DEVICES}",
        "lina-inference",
        words.all_to_all_tail_text,
    ),
    Row(
        "Figures 17 to 19, accuracy by layer",
        "whether the most popular experts were estimated",
        "58.41 % (Transformer-XL), 54.16 % (BERT-Large) over all layers, more in later ones",
        "the same quantity, 8 experts",
        "lina-inference",
        words.accuracy_by_layer_text,
    ),
    Row(
        "section 7.3, ablation",
        "a batch without estimation, and without plans made anew",
        "without estimation 18.6 and 24.0 % slower in the median; without plans made anew 26.7 and "
        "33.1 % in the 95th percentile",
        f"the same ratio, of medians; {TWO_DEVICES}",
        "lina-inference",
        words.without_parts_text,
    ),
    Row(
        "section 7.3, overheads",
        "planning a batch's experts",
        "6.2 ms; 1.45 ms where nothing changes",
        "the same quantity",
        "lina-inference",
        words.planning_time_text,
    ),
)

ROWS = TABLES + MOTIVATION + TRAINING + INFERENCE
