"""Mixtral (arXiv:2401.04088); model values from the `config.json` of
mistralai/Mixtral-8x7B-v0.1.
"""

from jmoe.config import (
    CheckpointConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    RouterConfig,
    TrainConfig,
)

mixtral_8x7b = TrainConfig(
    model=ModelConfig(
        vocab_size=32000,
        hidden_size=4096,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=32768,
        intermediate_size=14336,
        moe_intermediate_size=14336,
        num_experts=8,
        num_experts_per_tok=2,
        norm_eps=1e-5,
        rope_theta=1e6,
        router=RouterConfig(kind="softmax", norm_topk_prob=True, aux_loss_coef=0.02),
    ),
    optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=2000),
    mesh=MeshConfig(expert_intra=8),
    checkpoint=CheckpointConfig(every_steps=500),
    num_steps=100_000,
    batch_size=256,
    sequence_length=4096,
    remat="layer",
)
