"""BERT with experts in every layer, as Lina (USENIX ATC '23) trains its models: 16 experts, top-2.

The sizes beside experts are BERT-Base's (arXiv 1810.04805). The last of 30,528 ids stands for
masked tokens.
"""

from jmoe.config import (
    EvaluationConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    RouterConfig,
    TrainConfig,
)

bert_moe = TrainConfig(
    model=ModelConfig(
        vocab_size=30528,
        hidden_size=768,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=12,
        max_position_embeddings=512,
        intermediate_size=3072,
        moe_intermediate_size=3072,
        num_experts=16,
        num_experts_per_tok=2,
        hidden_act="gelu",
        norm="layernorm",
        norm_eps=1e-12,
        position="learned",
        bidirectional=True,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        router=RouterConfig(kind="gshard", aux_loss_coef=0.01),
    ),
    optimizer=OptimizerConfig(learning_rate=1e-4, warmup_steps=10_000, weight_decay=0.01),
    mesh=MeshConfig(expert_inter=2, expert_intra=8),
    evaluation=EvaluationConfig(sample_tokens=0),
    num_steps=1_000_000,
    batch_size=256,
    sequence_length=512,
)
