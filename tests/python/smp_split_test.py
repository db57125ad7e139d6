"""How smp.step cuts arguments over micro-batches, and what it makes of their results."""
from harness import Case, main

_PROGRAM = """
    import collections, torch
    import trireme.smp as smp
    from trireme.smp.outputs import merged
    from trireme.smp.split import Splitter
    def told(call):
        try:
            return call()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    def plain(value):
        if isinstance(value, torch.Tensor):
            return value.tolist()
        if isinstance(value, dict):
            return {key: plain(one) for key, one in value.items()}
        if isinstance(value, (list, tuple, set)):
            return [plain(one) for one in value]
        return value.outputs and ["outputs", plain(value.outputs)] if isinstance(value, smp.StepOutput) else value
    def split(function, *args, micro_batches=2, whole=(), axes=None, **kwargs):
        return parts_of(function, *args, micro_batches=micro_batches, whole=whole, axes=axes, **kwargs).batches
    def parts_of(function, *args, micro_batches=2, whole=(), axes=None, **kwargs):
        return Splitter(function, whole, axes).split(args, kwargs, micro_batches)
    x = torch.arange(8).reshape(4, 2)
"""


class Inputs(Case):
    def test_tensors_are_cut_along_dim_0_in_any_container(self):
        found = self.on_ranks(0, _PROGRAM + """
    Pair = collections.namedtuple("Pair", "left right")
    class Batch(collections.UserDict):
        note = None
    batch = Batch(ids=x)
    batch.note = "kept"
    def step(model, data, pair, more, *rest, flag=None, **others):
        pass
    parts = split(step, torch.nn.Linear(1, 1), [x, (x, "text")], Pair(x, 3), {"a": x, "b": {"c": x}}, x, 5, flag={x}, batch=batch)
    result = []
    for args, kwargs in parts:
        result.append([type(args[0]).__name__, plain(args[1]), type(args[2]).__name__, plain(args[2]), plain(args[3]), plain(args[4:]), plain(kwargs["flag"]),
                       type(kwargs["batch"]).__name__, kwargs["batch"].note, kwargs["batch"]["ids"].tolist()])
    result.append([batch["ids"].shape[0], parts[0][0][4].data_ptr() == x.data_ptr()])
""")
        for index, half in enumerate(([[0, 1], [2, 3]], [[4, 5], [6, 7]])):
            self.assertEqual(found[index], ["Linear", [half, [half, "text"]], "Pair", [half, 3], {"a": half, "b": {"c": half}}, [half, 5], [half], "Batch", "kept", half])
        self.assertEqual(found[2], [4, True])

    def test_what_is_not_cut_is_the_same_object(self):
        found = self.on_ranks(0, _PROGRAM + """
    model, sizes, words, table = torch.nn.Linear(1, 1), torch.Size([4, 2]), ["a"], {"lr": 0.1}
    parts = split(lambda model, sizes, words, table, mask: None, model, sizes, words, table, x, whole=["mask"])
    result = [[one is other for one, other in zip(args, (model, sizes, words, table, x))] for args, _ in parts]
""")
        self.assertEqual(found, [[True] * 5] * 2)

    def test_axes_and_slices_of_objects(self):
        found = self.on_ranks(0, _PROGRAM + """
    class Own:
        def smp_slice(self, num_mb, mb, axis):
            return [num_mb, mb, axis]
    parts = split(lambda a, b, c: None, x, Own(), c=x.t(), axes={"a": 1, "b": 3, "c": -1})
    result = [[plain(args) for args, _ in parts], split(lambda **names: None, micro_batches=1, x=x, whole=["y"])[0][1]["x"] is x]
""")
        self.assertEqual(found[0], [[[[0], [2], [4], [6]], [2, 0, 3], [[0, 2], [1, 3]]], [[[1], [3], [5], [7]], [2, 1, 3], [[4, 6], [5, 7]]]])
        self.assertTrue(found[1])

    def test_empty_tensors_have_empty_parts(self):
        found = self.on_ranks(0, _PROGRAM + """
    result = [plain(args) for args, _ in split(lambda a: None, torch.empty(0, 3))]
""")
        self.assertEqual(found, [[[]], [[]]])

    def test_the_first_parts_of_a_batch_that_does_not_divide_have_one_more(self):
        found = self.on_ranks(0, _PROGRAM + """
    parts = parts_of(lambda a, b, mask: None, torch.arange(7), {"t": torch.arange(14).reshape(1, 2, 7)}, x, micro_batches=3, whole=["mask"], axes={"b": -1})
    alike = parts_of(lambda a, b: None, torch.arange(6), torch.arange(3), micro_batches=3)
    result = [[plain(args[:2]) for args, _ in parts.batches], parts.samples, parts.shares, alike.samples, alike.shares,
              [[len(one) for one in torch.tensor_split(torch.arange(n), 4)] == parts_of(lambda a: None, torch.arange(n), micro_batches=4).samples for n in (5, 6, 7, 9)]]
""")
        self.assertEqual(found[0], [[[0, 1, 2], {"t": [[[0, 1, 2], [7, 8, 9]]]}], [[3, 4], {"t": [[[3, 4], [10, 11]]]}], [[5, 6], {"t": [[[5, 6], [12, 13]]]}]])
        self.assertEqual(found[1:], [[3, 2, 2], [3 / 7, 2 / 7, 2 / 7], None, None, [True] * 4])

    def test_parts_of_different_sizes_that_might_not_belong_together_are_named(self):
        found = self.on_ranks(0, _PROGRAM + """
    class Own:
        def smp_slice(self, num_mb, mb, axis):
            return 1
    two = lambda a, b: None
    result = [told(lambda: split(two, torch.ones(7), torch.ones(14))), told(lambda: split(two, torch.ones(8), [torch.ones(7)])), told(lambda: split(two, torch.ones(7), Own()))]
""")
        self.assertEqual(found, [
            "ShapeError: smp.step: `a` has 7 in dim 0, which `microbatches` = 2 does not divide, and `b` has 14 in dim 0; micro-batches of different sizes need as many "
            "samples in every tensor that is cut: name those that have none in non_split_inputs, or give a multiple",
            "ShapeError: smp.step: `b[0]` has 7 in dim 0, which `microbatches` = 2 does not divide, and `a` has 8 in dim 0; micro-batches of different sizes need as many "
            "samples in every tensor that is cut: name those that have none in non_split_inputs, or give a multiple",
            "UnsupportedError: smp.step: `a` has 7 in dim 0, which `microbatches` = 2 does not divide, and `b` cuts itself by smp_slice(), which may make parts of other "
            "sizes; give a multiple"])

    def test_defaults_and_methods(self):
        found = self.on_ranks(0, _PROGRAM + """
    class Trainer:
        def step(self, a, b=7):
            pass
    args, kwargs = split(Trainer().step, x)[1]
    of_function, _ = split(Trainer.step, Trainer(), b=x, a=1)[1]
    result = [plain(args), kwargs, plain(of_function[1:])]
""")
        self.assertEqual(found, [[[[4, 5], [6, 7]]], {}, [1, [[4, 5], [6, 7]]]])

    def test_what_cannot_be_cut_is_named(self):
        found = self.on_ranks(0, _PROGRAM + """
    one = lambda data: None
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(1)])
    result = [told(lambda: split(one, {"ids": [torch.ones(1, 2)]})), told(lambda: split(one, torch.tensor(1.0))), told(lambda: split(one, x, axes={"data": 2})),
              told(lambda: split(one, x.to_sparse())), told(lambda: split(one, packed)), told(lambda: split(one, x, whole=["date"])),
              told(lambda: split(one, x, axes={"date": 0})), told(lambda: split(one, x, whole="data")), told(lambda: split(one, x, axes={"data": "0"})),
              told(lambda: split(one, x, axes=[0])), told(lambda: split(one, x, whole=["data"], axes={"data": 0})), told(lambda: split(one))]
""")
        self.assertEqual(found, [
            "ShapeError: smp.step: `data['ids'][0]` has 1 in dim 0, fewer than `microbatches` = 2; give each micro-batch one or more, or name the argument in "
            "non_split_inputs",
            "ShapeError: smp.step: `data` has the shape [], and no dim 0 to cut over 2 micro-batches; name the argument in non_split_inputs, or its dim in "
            "input_split_axes",
            "ShapeError: smp.step: `data` has the shape [4, 2], and no dim 2 to cut over 2 micro-batches; name the argument in non_split_inputs, or its dim in "
            "input_split_axes",
            "UnsupportedError: smp.step: `data` is a sparse or nested tensor, which is not cut; name the argument in non_split_inputs, or give a dense tensor",
            "UnsupportedError: smp.step: `data` is a PackedSequence, whose samples are not in one dim; give padded tensors and lengths, and pack in the function",
            "ConfigError: smp.step(non_split_inputs=…): there is no argument 'date'; the function has data",
            "ConfigError: smp.step(input_split_axes=…): there is no argument 'date'; the function has data",
            "ConfigError: smp.step(non_split_inputs='data'): expected a list of names of arguments",
            "ConfigError: smp.step(input_split_axes={'data': '0'}): expected the number of a dim",
            "ConfigError: smp.step(input_split_axes=[0]): expected a dict, of names of arguments to dims",
            "ConfigError: smp.step: 'data' is in non_split_inputs and in input_split_axes; name it in one of them",
            "TypeError: missing a required argument: 'data'"])


class Outputs(Case):
    def test_of_tensors(self):
        found = self.on_ranks(0, _PROGRAM + """
    out = merged([torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 6.0]])])
    loss = merged([torch.tensor(1.0), torch.tensor(2.0)])
    uneven = merged([torch.ones(1, 2), torch.ones(3, 2)])
    result = [plain(out.outputs), plain(out.reduce_mean()), plain(out.reduce_sum()), plain(out.concat()), plain(out.stack()), plain(loss.stack()),
              loss.reduce_mean().item(), told(loss.concat), list(uneven.concat().shape), told(uneven.stack), told(uneven.reduce_mean)]
""")
        self.assertEqual(found[:7], [[[[1, 2]], [[3, 6]]], [[2, 4]], [[4, 8]], [[1, 2], [3, 6]], [[[1, 2]], [[3, 6]]], [1, 2], 1.5])
        self.assertEqual(found[7], "ShapeError: StepOutput.concat(): the outputs have no dims to join along; use stack(), reduce_mean() or reduce_sum()")
        self.assertEqual(found[8], [4, 2])
        self.assertEqual(found[9], "ShapeError: StepOutput.stack(): micro-batches have outputs of the shapes [(1, 2), (3, 2)]; read .outputs")
        self.assertEqual(found[10], "ShapeError: StepOutput.reduce_mean(): micro-batches have outputs of the shapes [(1, 2), (3, 2)]; read .outputs")

    def test_a_mean_is_the_sum_in_order_divided_once(self):
        found = self.on_ranks(0, _PROGRAM + """
    torch.manual_seed(1)
    losses = [torch.rand(3) for _ in range(7)]
    expected = (((((losses[0] + losses[1]) + losses[2]) + losses[3]) + losses[4]) + losses[5] + losses[6]) / 7
    result = torch.equal(merged(losses).reduce_mean(), expected)
""")
        self.assertTrue(found)

    def test_a_mean_of_parts_of_different_sizes_is_that_of_samples(self):
        found = self.on_ranks(0, _PROGRAM + """
    made = merged([(torch.tensor(float(n)), [torch.tensor([n])]) for n in (5, 1)], [0.75, 0.25])
    result = [made[0].reduce_mean().item(), made[1][0].reduce_mean().tolist(), made[0].reduce_sum().item()]
""")
        self.assertEqual(found, [4.0, [4.0], 6.0])

    def test_nested_results_keep_their_structure_and_numbers_become_lists(self):
        found = self.on_ranks(0, _PROGRAM + """
    Pair = collections.namedtuple("Pair", "loss count")
    one, two = torch.tensor(1.0), torch.tensor(2.0)
    made = merged([(Pair(one, 3), {"a": [one], "b": None}), (Pair(two, 4), {"a": [two], "b": None})])
    result = [type(made).__name__, type(made[0]).__name__, plain(made), merged([(1, 2), (3, 4)]), merged([5, 6]), merged([None, None]), merged([[1], [1, 2]]),
              told(lambda: merged([(one, 1), (None, 1)])), told(lambda: merged([[one], [one, two]])), told(lambda: merged([{"a": one}, {"b": one}]))]
""")
        outputs = ["outputs", [1, 2]]
        self.assertEqual(found[:7], ["tuple", "Pair", [[outputs, [3, 4]], {"a": [outputs], "b": [None, None]}], [[1, 3], [2, 4]], [5, 6], [None, None], [[1], [1, 2]]])
        self.assertEqual(found[7], "ShapeError: smp.step: the result[0] has tensors in one micro-batch and something else in another (Tensor, NoneType); return the same "
                                   "structure for each, or numbers by .item()")
        self.assertIn("the result has tensors in one micro-batch and something else in another (list of 1, list of 2)", found[8])
        self.assertIn("(dict of 1, dict of 1)", found[9])

    def test_outputs_of_transformers_stay_of_their_class(self):
        found = self.on_ranks(0, _PROGRAM + """
    from transformers.modeling_outputs import CausalLMOutput
    made = merged([CausalLMOutput(loss=torch.tensor(1.0 + m), logits=torch.ones(1, 2)) for m in range(2)])
    result = [type(made).__name__, made.loss.reduce_mean().item(), list(made["logits"].concat().shape), made.hidden_states]
""")
        self.assertEqual(found, ["CausalLMOutput", 1.5, [2, 2], None])


if __name__ == "__main__":
    main()
