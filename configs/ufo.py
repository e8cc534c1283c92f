"""Super-networks that learn several image tasks at once, like UFO (SE-MoE, section 4.1; VIMER-UFO
2.0).

`ufo-tiny`: a dense layer, a layer in which tokens choose experts, and two layers routed by task. In
the first layer routed by task, all tasks except digits share expert 0; in the second, each task has
its own expert. Batch sizes are the paper's 512, 256, 128 and 128, divided by 8.

`ufo-17b`: of VIMER-UFO 2.0 only the size is published, 17 billion parameters, 600 million on a
task's path. The shape is an assumption: ViT-H/14 (arXiv:2010.11929) with one feed-forward per task
in each layer, for 40 tasks, and everything else shared. The tasks are an assumption, too: ten data
sets of each of four kinds, in folders, with the paper's ratio of batch sizes.
"""

from jmoe.config import (
    CommConfig,
    OptimizerConfig,
    RouterConfig,
    TaskConfig,
    VisionModelConfig,
    VisionTrainConfig,
)

ufo_tiny = VisionTrainConfig(
    model=VisionModelConfig(
        image_size=16,
        patch_size=4,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=128,
        moe_intermediate_size=128,
        num_experts=4,
        num_experts_per_tok=1,
        mlp_only_layers=(0,),
        task_layers=(2, 3),
        position="learned",
        norm="layernorm",
        router=RouterConfig(kind="sigmoid", aux_loss_coef=0.0),
    ),
    tasks={
        "glyphs": TaskConfig("glyphs", batch_size=64, path=(0, 0)),
        "digits": TaskConfig("digits", batch_size=32, path=(1, 1)),
        "fonts": TaskConfig("fonts", batch_size=16, path=(0, 2)),
        "photographs": TaskConfig("photographs", batch_size=16, path=(0, 3)),
    },
    optimizer=OptimizerConfig(learning_rate=2e-3, warmup_steps=50, weight_decay=0.05),
    comm=CommConfig(schedule="none"),
    num_steps=3000,
    compute_dtype="float32",
)

# images a step of each of a kind's data sets
_KINDS = {"face": 64, "person": 32, "vehicle": 16, "product": 16}
_DATA_SETS = [f"{kind}-{number}" for kind in _KINDS for number in range(10)]

ufo_17b = VisionTrainConfig(
    model=VisionModelConfig(
        image_size=224,
        patch_size=14,
        channels=3,
        hidden_size=1280,
        num_hidden_layers=32,
        num_attention_heads=16,
        num_key_value_heads=16,
        intermediate_size=5120,
        moe_intermediate_size=5120,
        hidden_act="gelu",
        num_experts=len(_DATA_SETS),
        num_experts_per_tok=1,
        task_layers=tuple(range(32)),
        position="learned",
        norm="layernorm",
        router=RouterConfig(kind="sigmoid", aux_loss_coef=0.0),
    ),
    tasks={
        name: TaskConfig(
            f"data/{name}", batch_size=_KINDS[name.partition("-")[0]], path=(number,) * 32
        )
        for number, name in enumerate(_DATA_SETS)
    },
    optimizer=OptimizerConfig(learning_rate=2e-4, warmup_steps=1000, weight_decay=0.05),
    comm=CommConfig(schedule="none"),
    num_steps=100_000,
    remat="layer",
)
