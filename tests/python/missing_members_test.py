"""Members of DeepSpeed's engine that are not there are named as the engine's, with what to do instead."""
import torch
import trireme
from harness import Case, main
from trireme.deepspeed import missing_members


class Members(Case):
    @classmethod
    def setUpClass(cls):
        cls.module = torch.nn.Sequential(torch.nn.Linear(2, 2))
        config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
        cls.engine, *_ = trireme.initialize(model=cls.module, config=config)
        cls.addClassCleanup(cls.engine.destroy)

    def text_of(self, name):
        """The AttributeError's."""
        with self.assertRaises(AttributeError) as caught:
            getattr(self.engine, name)
        return str(caught.exception)

    def test_each_is_named_as_the_engines_with_what_to_do_instead(self):
        self.assertEqual(self.text_of("mpu"), "DeepSpeedEngine.mpu is not there in Trireme: the groups of ranks are functions of "
                                              "trireme.utils.groups")
        for name, instead in missing_members.INSTEAD.items():
            with self.subTest(name):
                self.assertEqual(self.text_of(name), f"DeepSpeedEngine.{name} is not there in Trireme: {instead}")
                self.assertFalse(hasattr(self.engine, name))

    def test_the_table_has_none_that_the_engine_has(self):
        self.assertEqual([name for name in missing_members.INSTEAD if hasattr(trireme.DeepSpeedEngine, name)], [],
                         "take these out of python/trireme/deepspeed/missing_members.py")

    def test_an_attribute_of_the_module_comes_first(self):
        self.module.losses = "mine"
        self.addCleanup(delattr, self.module, "losses")
        self.assertEqual(self.engine.losses, "mine")

    def test_a_name_that_nobody_knows_is_neither_the_engines_nor_the_modules(self):
        self.assertEqual(self.text_of("bakward"), "neither the engine nor its module, Sequential, has an attribute 'bakward'")

    def test_a_property_of_the_module_that_fails_says_why_itself(self):
        class Failing(torch.nn.Linear):
            @property
            def ratio(self):
                return self.absent

        engine, *_ = trireme.initialize(model=Failing(2, 2), config={"train_micro_batch_size_per_gpu": 1})
        self.addCleanup(engine.destroy)
        with self.assertRaisesRegex(AttributeError, "'Failing' object has no attribute"):
            _ = engine.ratio


if __name__ == "__main__":
    main()
