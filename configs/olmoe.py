"""OLMoE (arXiv:2409.02060); model values from the `config.json` of allenai/OLMoE-1B-7B-0924,
z-loss from the paper.
"""

from jmoe.config import (
    CheckpointConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    RouterConfig,
    TrainConfig,
)

olmoe_1b_7b = TrainConfig(
    model=ModelConfig(
        vocab_size=50304,
        hidden_size=2048,
        num_hidden_layers=16,
        num_attention_heads=16,
        num_key_value_heads=16,
        max_position_embeddings=4096,
        intermediate_size=1024,
        moe_intermediate_size=1024,
        num_experts=64,
        num_experts_per_tok=8,
        norm_eps=1e-5,
        qk_norm="full",
        router=RouterConfig(
            kind="softmax", norm_topk_prob=False, aux_loss_coef=0.01, z_loss_coef=0.001
        ),
    ),
    optimizer=OptimizerConfig(learning_rate=4e-4, warmup_steps=2500),
    mesh=MeshConfig(expert_intra=8),
    checkpoint=CheckpointConfig(every_steps=500),
    num_steps=100_000,
    batch_size=1024,
    sequence_length=4096,
    remat="layer",
)
