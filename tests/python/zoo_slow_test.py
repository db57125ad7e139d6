"""Each program of the zoo that makes no engines trains by what its Program says, so that any axis can train it."""
from harness import Case, RankServer, main

RankServer.imports = ("torch._dynamo", "transformers")


# Programs of evaluation, whose losses have no gradient.
EVALUATE = ("transformer encoder evaluated without gradients", "multihead attention evaluated without gradients", "Llama evaluated without gradients",
            "evaluation without gradients", "evaluation in inference mode")


class Plain(Case):
    def test_each_has_a_model_a_batch_and_a_loss_with_gradients(self):
        found = self.on_ranks(0, """
            import math, torch, zoo
            result, count = {}, 0
            for name, program in zoo.programs().items():
                if program.run or program.unavailable:
                    continue
                count += 1
                try:
                    torch.manual_seed(0)
                    module = program.build()
                    loss = program.loss(module, module, *program.batch(0))
                    loss.backward()
                    if not (math.isfinite(loss.item()) and any(p.grad is not None for p in module.parameters())):
                        result[name] = "the loss is %s, or has no gradient" % loss.item()
                except Exception as error:
                    result[name] = type(error).__name__ + ": " + str(error)
            result["count"] = count
        """, timeout_s=600)
        self.assertGreater(found.pop("count"), 2140)
        # torch has no derivative of that derivative on hosts.
        self.assertIn("derivative for aten::_scaled_dot_product_flash_attention_for_cpu_backward", found.pop("loop_inner_gradient"))
        for name in EVALUATE:
            self.assertIn("does not require grad", found.pop(name))
        self.assertEqual(found, {})


if __name__ == "__main__":
    main()
