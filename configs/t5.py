"""T5 with experts in every layer, as Lina (USENIX ATC '23) trains its models: 16 experts, top-2.

The sizes beside experts are T5-Base's (arXiv 1910.10683); positions are rotary, where T5 has
relative biases. Of 569 tokens of text the encoder has 512 positions and the decoder 113. The last
29 of 32,128 ids stand for spans.
"""

from jmoe.config import (
    EvaluationConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    RouterConfig,
    TrainConfig,
)

t5_moe = TrainConfig(
    model=ModelConfig(
        vocab_size=32128,
        hidden_size=768,
        num_encoder_layers=12,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=12,
        max_position_embeddings=512,
        intermediate_size=3072,
        moe_intermediate_size=3072,
        num_experts=16,
        num_experts_per_tok=2,
        hidden_act="gelu",
        tie_word_embeddings=True,
        router=RouterConfig(kind="gshard", aux_loss_coef=0.01),
    ),
    optimizer=OptimizerConfig(learning_rate=1e-4, warmup_steps=10_000, weight_decay=0.01),
    mesh=MeshConfig(expert_inter=2, expert_intra=8),
    evaluation=EvaluationConfig(sample_tokens=0),
    num_steps=524_288,
    batch_size=128,
    sequence_length=569,
)
