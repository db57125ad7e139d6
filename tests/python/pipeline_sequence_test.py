"""Pipelines whose stages have parts of sequences: DeepSpeed's PipelineModule with sequence_parallel_size, whole
micro-batches. Each rank compares losses, gradients and weights with plain PyTorch."""
import unittest

import pipeline_tensor_test
from harness import Case, main

_COMPARE = """
def compare_sequences(tied=False, stage=1, schedule="1f1b", chunks=1, attention="ulysses", stages=2):
    module = PipelineModule(layers_of(tied), num_stages=stages, loss_fn=loss_of, schedule=schedule, chunks=chunks, partition_method="uniform")
    fill(module.named_parameters())
    data = deepspeed.comm.get_world_size() // stages // 2
    engine, *_ = deepspeed.initialize(model=module, config={
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4 // data, "gradient_clipping": 0.5, "sequence_parallel_size": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "betas": [0.0, 0.95], "eps": 1e-3, "weight_decay": 0.01}},
        "zero_optimization": {"stage": stage}, "trireme": {"sequence_attention": attention}})
    assert engine.dp_world_size == data, engine.dp_world_size
    losses, gradients, weights = trained(tied, 4, 0.5)
    own = {name: p for name, p in module.named_parameters() if not getattr(p, "ds_pipe_replicated", False)}
    for step in range(STEPS):
        numbers = iter(range(step * 4 + engine._dp_rank, (step + 1) * 4, data))
        loss = engine.train_batch(map(batch, numbers))
        near(loss.cpu(), torch.tensor(losses[step]), f"loss of step {step}")
        for name, parameter in own.items():
            gradient = safe_get_full_optimizer_state(parameter, "exp_avg")
            if gradient is not None:
                near(gradient, gradients[step][name], f"gradient of {name} in step {step}")
    for name, parameter in own.items():
        value = safe_get_full_fp32_param(parameter)
        if value is not None:
            near(value, weights[name], name)
    return engine
"""


class Axes(Case):
    def run_program(self, ranks, body):
        program = pipeline_tensor_test._BEGIN + _COMPARE + body + "\nresult = 'compared'\n"
        self.assertEqual(self.on_ranks(ranks, program, as_deepspeed=True), "compared")

    def test_stages_of_parts_at_every_zero_stage(self):
        self.run_program(4, """
for stage in range(4):
    compare_sequences(stage=stage, attention="ring" if stage % 2 else "ulysses").destroy()
""")

    def test_tied_layers_and_other_schedules(self):
        self.run_program(4, """
for schedule, chunks in (("1f1b", 1), ("zb-h1", 1), ("interleaved", 2), ("zb-v", 2)):
    compare_sequences(tied=True, stage=2, schedule=schedule, chunks=chunks).destroy()
""")

    def test_data_parallel_ranks_beside_them_and_an_evaluation(self):
        self.run_program(8, """
engine = compare_sequences(tied=True, stage=3)
before = engine.eval_batch(map(batch, range(100, 102)), num_micro_batches=2).item()
assert abs(before) > 0.1, before
engine.destroy()
""")

    def test_a_degree_that_does_not_divide_the_ranks_is_named(self):
        self.run_program(2, """
try:
    deepspeed.initialize(model=PipelineModule(layers_of(False), num_stages=2, loss_fn=loss_of), config={
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1, "optimizer": {"type": "AdamW"}, "sequence_parallel_size": 2})
    raise SystemExit("it was taken")
except Exception as error:
    assert "sequence_parallel_size" in str(error), error
""")


if __name__ == "__main__":
    main()
