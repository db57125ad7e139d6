"""The zoo has no program less than it had, and none twice."""
import collections

import zoo
from harness import Case, RankServer, main

RankServer.imports = ("torch._dynamo", "transformers")

# Programs that there are at least, by the tag of a collection. Who adds some raises the number; nobody lowers it.
FLOORS = {"models": 15, "layers": 267, "operators": 197, "loops": 217, "families": 72, "sequence": 1332, "padded": 25, "features": 14, "samples": 10, "optimizers": 28}


class Zoo(Case):
    def test_no_collection_shrinks(self):
        found = self.on_ranks(0, "import zoo; result = {name: sorted(program.tags) for name, program in zoo.programs().items()}")
        counts = collections.Counter(tag for tags in found.values() for tag in tags)
        print(f"{len(found)} programs: " + ", ".join(f"{count} {tag}" for tag, count in counts.most_common()))
        self.assertEqual(set(FLOORS), set(zoo.COLLECTIONS))
        for tag, floor in FLOORS.items():
            with self.subTest(tag):
                self.assertGreaterEqual(counts[tag], floor)
                self.assertEqual(counts[tag], sum(tag in tags for tags in found.values()))

    def test_a_name_is_there_once(self):
        programs = zoo.Collection("models")
        programs.add("one", object)
        with self.assertRaisesRegex(ValueError, "'one' is in the zoo's collection 'models' already"):
            programs.own(lambda tensor, stage: {}, "one")


if __name__ == "__main__":
    main()
