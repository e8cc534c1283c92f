"""Named presets: `PRESETS[name]` is (one line of description, configuration). One file per model
family.
"""

from jmoe.config import TrainConfig
from jmoe.configs.ablations import tiny_buckets, tiny_flat, tiny_replicated, tiny_unfused
from jmoe.configs.bert import bert_moe
from jmoe.configs.fine_tune import fine_tune, fine_tune_dpo, fine_tune_lora
from jmoe.configs.gpt_moe import (
    gpt_175b,
    gpt_moe_8e,
    gpt_moe_16e,
    gpt_moe_32e,
    gpt_moe_64e,
    gpt_moe_128e,
)
from jmoe.configs.mixtral import mixtral_8x7b
from jmoe.configs.olmoe import olmoe_1b_7b
from jmoe.configs.qwen3 import qwen3_30b_a3b
from jmoe.configs.t5 import t5_moe
from jmoe.configs.text import small, tiny
from jmoe.configs.ufo import ufo_17b, ufo_tiny

PRESETS: dict[str, tuple[str, TrainConfig]] = {
    "tiny": ("4M parameters, 8 experts: learns source code in minutes on two CPU cores", tiny),
    "small": ("34M parameters, 8 experts: the same text, under an hour on two CPU cores", small),
    "fine-tune": (
        "a downloaded model (--init-from) on chats (--data.path): all parameters",
        fine_tune,
    ),
    "fine-tune-dpo": ("DPO on pairs of answers, one chosen and one rejected", fine_tune_dpo),
    "fine-tune-lora": ("the same with adapters of rank 16 over the frozen model", fine_tune_lora),
    "ufo-tiny": (
        "0.4M parameters: four image tasks at once, in minutes on two CPU cores (extra: vision)",
        ufo_tiny,
    ),
    "ufo-17b": (
        "VIMER-UFO 2.0's size: 17.0B parameters, 0.6B a task: forty image tasks, to be planned",
        ufo_17b,
    ),
    "olmoe-1b-7b": ("OLMoE 1B-7B: 6.9B parameters, 64 experts, top-8", olmoe_1b_7b),
    "mixtral-8x7b": ("Mixtral 8x7B: 46.7B parameters, 8 experts, top-2", mixtral_8x7b),
    "qwen3-30b-a3b": ("Qwen3 30B-A3B: 30.5B parameters, 128 experts, top-8", qwen3_30b_a3b),
    "gpt-moe-8e": ("MoESys Table 2: 13.9B parameters, 8 experts, top-1", gpt_moe_8e),
    "gpt-moe-16e": ("MoESys Table 2: 26.8B parameters, 16 experts, top-1", gpt_moe_16e),
    "gpt-moe-32e": ("MoESys Table 2: 52.6B parameters, 32 experts, top-1", gpt_moe_32e),
    "gpt-moe-64e": ("MoESys Table 2: 104.1B parameters, 64 experts, top-1", gpt_moe_64e),
    "gpt-moe-128e": ("MoESys Table 2: 207.2B parameters, 128 experts, top-1", gpt_moe_128e),
    "bert-moe": (
        "BERT-Base with 16 experts in every layer: an encoder, on masked tokens",
        bert_moe,
    ),
    "t5-moe": (
        "T5-Base with 16 experts in every layer: an encoder and a decoder, on left-out spans",
        t5_moe,
    ),
    "gpt-175b": ("MoESys Table 1: 174.6B parameters, dense, on 128 devices", gpt_175b),
    "tiny-replicated": ("ablation: dense parameters on every device", tiny_replicated),
    "tiny-unfused": ("ablation: a collective for every dense parameter", tiny_unfused),
    "tiny-flat": ("ablation: collectives that do not know nodes", tiny_flat),
    "tiny-buckets": (
        "ablation: gradients reduced as they come, in buckets of 25 MiB",
        tiny_buckets,
    ),
}
