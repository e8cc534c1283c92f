"""GPT, dense (MoESys, Table 1, arXiv:2205.10034) and with experts in every layer (Table 2).

Table 2 has one expert of every layer and one sequence per GPU: mesh (1, nodes, 8 GPUs in a node).
The paper's totals (13.9, 26.8, 52.6, 104.1 and 207.2 billion parameters) are those of experts in
*every* layer and tied embeddings.
"""

from dataclasses import replace

from jmoe.config import MeshConfig, ModelConfig, OptimizerConfig, RouterConfig, TrainConfig


def gpt_dense(hidden_size: int, num_layers: int, num_heads: int) -> ModelConfig:
    """Return a dense GPT of contexts of 1,024 tokens."""
    return ModelConfig(
        vocab_size=50304,
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        max_position_embeddings=1024,
        intermediate_size=4 * hidden_size,
        num_experts=0,
        num_experts_per_tok=0,
        hidden_act="gelu",
        norm="layernorm",
        norm_eps=1e-5,
        position="learned",
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
    )


def _gpt_moe_preset(num_experts: int) -> TrainConfig:
    return TrainConfig(
        model=replace(
            gpt_dense(4096, 12, 64),
            moe_intermediate_size=16384,
            num_experts=num_experts,
            num_experts_per_tok=1,
            capacity_factor=1.25,
            router=RouterConfig(kind="switch", aux_loss_coef=0.01),
        ),
        optimizer=OptimizerConfig(learning_rate=1.5e-4, warmup_steps=2000),
        mesh=MeshConfig(expert_inter=num_experts // 8, expert_intra=8),
        num_steps=100_000,
        batch_size=num_experts,
        sequence_length=1024,
        remat="layer",
    )


gpt_moe_8e = _gpt_moe_preset(8)
gpt_moe_16e = _gpt_moe_preset(16)
gpt_moe_32e = _gpt_moe_preset(32)
gpt_moe_64e = _gpt_moe_preset(64)
gpt_moe_128e = _gpt_moe_preset(128)

gpt_175b = TrainConfig(
    model=gpt_dense(12288, 96, 96),
    optimizer=OptimizerConfig(learning_rate=6e-5, warmup_steps=2000),
    mesh=MeshConfig(data=128),
    num_steps=100_000,
    batch_size=1536,
    sequence_length=1024,
    remat="layer",
)
