"""Small models that learn real text on a CPU."""

from jmoe.config import EvaluationConfig, ModelConfig, OptimizerConfig, RouterConfig, TrainConfig

tiny = TrainConfig(
    model=ModelConfig(
        vocab_size=4096,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        intermediate_size=256,
        moe_intermediate_size=256,
        num_experts=8,
        num_experts_per_tok=2,
        router=RouterConfig(kind="softmax", aux_loss_coef=0.04),
    ),
    optimizer=OptimizerConfig(learning_rate=2e-3, warmup_steps=40),
    num_steps=360,
    batch_size=16,
    sequence_length=256,
)

small = TrainConfig(
    model=ModelConfig(
        vocab_size=4096,
        hidden_size=384,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=512,
        intermediate_size=512,
        moe_intermediate_size=512,
        num_experts=8,
        num_experts_per_tok=2,
        router=RouterConfig(kind="softmax", aux_loss_coef=0.04),
    ),
    optimizer=OptimizerConfig(learning_rate=1.2e-3, warmup_steps=100),
    evaluation=EvaluationConfig(every_steps=100),
    num_steps=1000,
    batch_size=8,
    sequence_length=512,
)
