"""Ranks that share layers got the same batch, or the argument that differs is named; what is compared, and when."""
from harness import Case, main

_RANKS = """
    import torch, trireme
    from trireme.tensor.inputs import SameInputs
    trireme.init_distributed()
    WORLD = trireme.ranks.world()
    RANK = WORLD.rank

    class Core:  # over the ranks of the job, as a tensor group of all of them
        calls = 0
        def is_part(self, tensor):
            return False
        def check_same_inputs(self, numbers):
            self.calls += 1
            least, most = torch.tensor(numbers), torch.tensor(numbers)
            WORLD.all_reduce(least, "min")
            WORLD.all_reduce(most, "max")
            return next((place for place, (one, other) in enumerate(zip(least, most)) if one != other), None)

    core = Core()
    inputs = SameInputs(core)
    ids = torch.arange(8).view(2, 4)
    def told(*args, **kwargs):
        try:
            return inputs.check(args, kwargs)
        except AssertionError as error:
            return str(error)
"""


class Inputs(Case):
    def test_the_argument_that_differs_is_named(self):
        result = self.on_ranks(2, _RANKS + """
    other = ids.clone()
    other[1, 3] += RANK
    result = [told(ids, labels=other), told({"batch": [ids, other]}), told(ids[:, :4 - RANK]), told(ids, labels=ids.to(torch.int32 if RANK else torch.int64)),
              told(ids, **({"mask": ids} if RANK else {})), told(mask=ids.float() + 0.001 * RANK)]
""")
        for text, words in zip(result, ("labels has other values", "args[0]['batch'][1] has other values", "other tensors (here args[0] [2, 4])",
                                        "other tensors (here args[0] [2, 4], labels [2, 4])", "other tensors (here args[0] [2, 4])", "mask has other values")):
            self.assertIn("Data inconsistency within the TP group: ", text)
            self.assertIn(words, text)
        self.assertEqual(len(result), 6)

    def test_batches_are_compared_at_first_and_where_shapes_change(self):
        result = self.on_ranks(2, _RANKS + """
    calls = []
    for args, kwargs in (((ids,), {}), ((ids + 1 + RANK,), {}), ((ids[:1],), {}), ((ids[:1],), {}), ((ids,), {"a": ids, "b": ids[0]}),
                         ((ids,), {"b": ids[0], "a": ids} if RANK else {"a": ids, "b": ids[0]}), ((torch.zeros(0),), {}), ((), {"use_cache": False})):
        told(*args, **kwargs)
        calls.append(core.calls)
    result = calls
""")
        self.assertEqual(result, [2, 2, 4, 4, 6, 6, 8, 9])


if __name__ == "__main__":
    main()
