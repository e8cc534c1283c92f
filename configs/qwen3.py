"""Qwen3 with experts (arXiv:2505.09388); model values from the `config.json` of
Qwen/Qwen3-30B-A3B.
"""

from jmoe.config import (
    CheckpointConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    RouterConfig,
    TrainConfig,
)

qwen3_30b_a3b = TrainConfig(
    model=ModelConfig(
        vocab_size=151936,
        hidden_size=2048,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        max_position_embeddings=40960,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        norm_eps=1e-6,
        rope_theta=1e6,
        qk_norm="head",
        router=RouterConfig(kind="softmax", norm_topk_prob=True, aux_loss_coef=0.001),
    ),
    optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=2000),
    mesh=MeshConfig(expert_intra=8),
    checkpoint=CheckpointConfig(every_steps=500),
    num_steps=100_000,
    batch_size=256,
    sequence_length=4096,
    remat="layer",
)
