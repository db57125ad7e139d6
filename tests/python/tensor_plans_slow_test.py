"""Classes of transformers that have a tp_plan are planned, or refused for a reason that is known."""
import pathlib

import transformers
from harness import Case, main

HERE = pathlib.Path(__file__).parent
# Classes of transformers 5.24.
PLANNED = 348
REASONS = {
    "not built": "transformers cannot make it of a default configuration",
    'tp_plan[…]="moe_tp_experts": this style is not there yet': "experts",
    'tp_plan[…]="mla_kv_a_proj": this style is not there yet': "latent attention",
    "do not divide into": "parts of a model have other numbers of heads, and their features do not divide",
    "have numbers of their own of": "layers have other numbers of heads",
}


class Plans(Case):
    def test_every_class_is_planned_or_refused_by_name(self):
        for ranks in (2, 4):
            rows = self.on_ranks(0, f"import sys; sys.path.insert(0, {str(HERE)!r}); import tensor_plans\n"
                                    f"result = [[name, found, tensor_plans.reason(found)] for name, found in tensor_plans.table({ranks})]", timeout_s=600)
            others = [[name, found] for name, found, why in rows if why != "ok" and not any(known in why for known in REASONS)]
            self.assertEqual(others, [])
            planned = sum(why == "ok" for *_, why in rows)
            if transformers.__version__ == "5.24.0":
                self.assertGreaterEqual(planned, PLANNED)
                self.assertGreater(len(rows), 550)
            else:  # other classes
                self.assertGreater(planned, PLANNED // 2)


if __name__ == "__main__":
    main()
