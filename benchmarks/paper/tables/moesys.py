"""Every table and figure of MoESys (arXiv:2205.10034, third version), ours beside it."""

from benchmarks.paper.tables import moesys_words as words
from benchmarks.paper.tables.row import Row

NO_DEEPSPEED = "DeepSpeed's inference operators need a CUDA GPU and were not measured"
STRATEGIES = (
    "the same ratios, one small model for both and the same baseline: 8 experts, four layers, "
    "the table half as large as the other dense parameters, two nodes of two ranks over 30 Mbit/s"
)
DRAWING = "a drawing without figures"

TABLES = (
    Row(
        "Table 1",
        "dense GPT of 0.35 to 175 billion parameters against Megatron-LM",
        "tokens/s over Megatron-LM's: 1.142 (0.35 billion parameters, 8 A100), 1.056 (1.3, 8), "
        "1.117 (6.7, 16), 1.004 (175, 128)",
        "no: Megatron-Core starts on an NVIDIA GPU alone, so DeepSpeed is the peer, on CPU cores "
        "and a small model",
        "moesys-table-1",
        words.dense_training_text,
    ),
    Row(
        "Table 1, at its sizes",
        "the same models on as many A100, estimated from the compiled step",
        "MoESys and Megatron-LM, tokens/s: 291,585 and 255,401 (0.35 billion parameters, 8 A100), "
        "115,682 and 109,537 (1.3, 8), 44,605 and 39,936 (6.7, 16), 14,634 and 14,571 (175, 128)",
        "the same quantity, estimated; parameters split over all GPUs, where the paper has tensor "
        "and pipeline parallelism for 175 billion; sequences of 1,024 tokens, chosen here",
        "paper-estimates",
        words.estimated_dense_text,
    ),
    Row(
        "Table 2",
        "GPT-MoE of 13.9 to 207.2 billion parameters against DeepSpeed-MoE",
        "tokens/s over DeepSpeed's: 1.286 (8 A100), 1.354 (16), 1.368 (32), 1.331 (64), 1.329 "
        "(128); about 12 GB less a GPU",
        "the same ratio, on shapes scaled down and two processes at most",
        "moesys-table-2",
        words.gpt_moe_text,
    ),
    Row(
        "Table 2, at its sizes",
        "the same models on as many A100, estimated from the compiled step",
        "31,085 tokens/s (8 A100), 59,136 (16), 113,456 (32), 209,970 (64), 376,968 (128)",
        "the same quantity, estimated; sequences of 1,024 tokens, which the paper does not say",
        "paper-estimates",
        words.estimated_moe_text,
    ),
    Row(
        "Table 3",
        "elastic training of four tasks",
        "62.6 to 74.0 samples/s a GPU, 1.182 times: 4 A100 1/1/1/1 to 8 A100 4/2/1/1",
        "the same ratio; two devices measured, the paper's eight simulated",
        "moesys-table-3",
        words.table3_text,
    ),
    Row(
        "Table 4",
        "embedding partition",
        "10.9 to 48.1 % less memory, 1.038 to 1.156 times the tokens/s, 8 GPUs, hidden 2,048 to "
        "8,192",
        "no: bytes of the table with its optimizer state, and a step of one layer over 1 Gbit/s, "
        "which the table dominates; the paper's whole models are mostly experts",
        "moesys-table-4",
        words.embedding_text,
    ),
    Row(
        "Table 5, elastic training",
        "elastic training alone",
        "1.150 times the tokens/s a GPU (30,604 to 35,194), 28 to 23 GB",
        "the same ratio, of images/s; the paper's tokens/s are of a model whose tasks it does not "
        "name",
        "moesys-table-3",
        words.elastic_alone_text,
    ),
    Row(
        "Table 5, resource-aware communication",
        "collectives in two levels alone",
        "1.100 times the tokens/s a GPU (30,604 to 33,664), 28 GB as before",
        STRATEGIES,
        "moesys-table-5",
        words.levels_alone_text,
    ),
    Row(
        "Table 5, embedding partition",
        "the partitioned embedding alone",
        "1.014 times the tokens/s a GPU (30,604 to 31,033), 28 to 25 GB",
        STRATEGIES,
        "moesys-table-5",
        words.embedding_alone_text,
    ),
    Row(
        "Table 6",
        "text generation on several devices",
        "tokens/s over DeepSpeed's: 1.058 (10.0 billion parameters, 1 A100), 1.091 (106.5, 8), "
        "1.134 (209.6, 16)",
        f"no: tokens/s without a peer; {NO_DEEPSPEED}, and the paper names neither layers nor "
        "lengths",
        "moesys-table-6",
        words.table6_text,
    ),
    Row(
        "Table 6, one device",
        "text generation on one device against another program",
        "1.058 times DeepSpeed's tokens/s (10.0 billion parameters, 1 A100)",
        f"the same ratio with transformers as the peer; {NO_DEEPSPEED}",
        "moesys-table-6-one-device",
        words.table6_one_device_text,
    ),
)

FIGURES = (
    Row(
        "Figure 1",
        "training, a store of its results, serving in a cloud",
        DRAWING,
        "a run's checkpoint is served as OpenAI's API",
        held_by="tests/test_serve.py",
    ),
    Row(
        "Figure 2",
        "dense parameters split over devices, experts in host memory and on SSD",
        DRAWING,
        "losses are the same to the bit wherever experts and optimizer state are, and only chosen "
        "experts move",
        held_by="tests/training/streamed/test_streamed_step.py",
    ),
    Row(
        "Figure 3",
        "from a trained model to a deployed one: formats, and which experts are kept",
        "six stages, no figures",
        "no figures to compare: bytes and quality after each stage",
        "moesys-deployment",
        words.deployment_text,
    ),
    Row(
        "Figure 3, every stage",
        "one model from its training to two processes that serve it without the repository",
        "six stages, no figures",
        "no figures to compare: bytes and quality at both ends",
        "moesys-deployment-served",
        words.served_text,
    ),
    Row(
        "Figure 4",
        "a decoder of attention and switched feed-forward layers",
        DRAWING,
        "every operation of the decoder against a plain one",
        held_by="tests/models/test_decoder.py",
    ),
    Row(
        "Figure 5",
        "slots of a ring: a layer is copied while another computes",
        DRAWING,
        "every layer comes to its devices in its turn, and slots keep their values meanwhile",
        held_by="tests/offload/test_mesh_ring.py",
    ),
    Row(
        "Figure 6",
        "elastic layouts: 1:1:2 on three ranks, 2:2 on two, 1:1:1:1 on four",
        "the three layouts",
        "the planner gives the paper's layouts",
        held_by="tests/planning/test_elastic.py",
    ),
    Row(
        "Figure 7",
        "two routes of a message between clusters",
        DRAWING,
        "bytes and messages of each level of the network, and a leaf switch for each local rank",
        held_by="tests/benchmarks/comm/test_simulation.py",
    ),
    Row(
        "Figure 8",
        "an all-to-all in two levels, block by block",
        "two nodes of two ranks: each block at its place after both levels",
        "two levels give what one gives, bit for bit, on every split of devices",
        held_by="tests/collectives/test_all_to_all.py",
    ),
    Row(
        "Figure 9",
        "the partitioned embedding: what is exchanged",
        "two all-to-alls forward, one backward, no all-reduce",
        "a compiled lookup and its gradient have three all-to-alls and no reduction",
        held_by="tests/layers/test_embedding.py",
    ),
    Row(
        "Figure 10",
        "parts of a step, all-to-alls flat and in two levels, 26.9 to 80.7 billion parameters",
        "80.7 billion parameters, 32 A100 in 4 nodes: all-to-alls 15.5 % shorter, 1.103 times end "
        "to end; bars without figures",
        "the same ratios, on small layers over 100 Mbit/s, each token sent once a node (dedup): "
        "two levels alone send as much as flat",
        "moesys-figure-10",
        words.exchange_levels_text,
    ),
    Row(
        "Figure 11",
        "Table 5 as bars",
        "the figures of Table 5",
        "as for Table 5; bars in the picture above",
        "moesys-table-5",
        words.strategies_text,
    ),
    Row(
        "Figure 12",
        "inference through a ring of slots against resident weights",
        "nearly the same speed with at least 30 % less GPU memory (58.2 billion parameters, 16 "
        "A100)",
        "the same ratio, of a model of eight layers whose link takes as long as its layers",
        "moesys-figure-12",
        words.ring_text,
    ),
)

SECTIONS = (
    Row(
        "section 3.2.1, Equation 1",
        "slots for the share of a layer's experts that a step activates (4 alpha S / L)",
        "no figures",
        "no figures to compare: against slots for all experts; `--plan` prints the equation",
        "moesys-alpha",
        words.expert_memory_text,
    ),
    Row(
        "section 3.2.2, Algorithms 1 and 2",
        "the host cache's policy as printed (`--tiers.cache-policy moesys`), ours, and almost no "
        "cache",
        "no figures, no values of threshold, beta and K",
        "no figures to compare: hit rates and bytes; the hits are counted on the host, which is "
        "told the chosen experts by the numbers that came with the all-to-all, not on the device",
        "moesys-cache",
        words.cache_text,
    ),
    Row(
        "sections 1 and 6, fused communication",
        "collectives fused and in two levels, against one for each parameter in one level",
        "none of fusion alone",
        "no figures to compare: small layers, two nodes of two ranks",
        "moesys-fusion",
        words.fusion_text,
    ),
    Row(
        "section 5.3, elastic training of language",
        "corpora on devices by their shares (`--data.layout elastic`), experts split over all "
        "devices, against whole corpora on a device",
        "none of language alone",
        "the ratio of Table 3, of tokens/s and with expert parallelism; heads are shared; without "
        "the balance of 4/2/1/1 a device computes rows that do not count",
        "elastic-text",
        words.elastic_text_text,
    ),
    Row(
        "section 5.1, GShard's gating",
        "a token goes to its second expert as often as that one's weight says, against always",
        "no figures",
        "no figures to compare: both losses",
        "second-expert",
        words.second_expert_text,
    ),
    Row(
        "section 5.1, training in float16",
        "losses in float16 with a dynamic loss scale beside float32's",
        "no figures",
        "no figures to compare: both losses",
        "float16",
        words.float16_text,
    ),
    Row(
        "section 5.3.1, VIMER-UFO 2.0",
        "a super-network of image tasks",
        "697 against 425 images/s of PyTorch 1.10, 45 GB, 18 % less memory (32 A100)",
        "no: PyTorch 1.10 does not exist for Python 3.11; the baselines are tasks that are not "
        "balanced, and a dense model a task, which shares and exchanges nothing; of a traced step "
        "of the super-network most is exchange and waiting for the other device",
        "moesys-ufo",
        words.ufo_text,
    ),
)

ROWS = TABLES + FIGURES + SECTIONS
