"""Scripts written for smp, which know nothing of Trireme, by `trireme launch --as-smp`: they check themselves, and have
the losses and weights of one process."""
import json
import pathlib

from harness import PROGRAM, PYTHON, Case, main, run

FOLDER = pathlib.Path(__file__).parent / "programs" / "for_smp"


class Scripts(Case):
    """Runs of programs in folders of the test."""

    def report(self, folder, ranks, name, parameters, *words, timeout_s=240):
        """The report of rank 0 of a program, which must end well. `parameters`: smp's configuration; None: the
        program's own."""
        (self.folder / folder).mkdir(exist_ok=True)
        at = self.folder / folder / "report.json"
        at.unlink(missing_ok=True)
        command = [PROGRAM, "launch", "--num_gpus", ranks, "--prefix", "none", "--as-smp", PYTHON, "-B", "-u", FOLDER / f"{name}.py", self.folder / folder, *words]
        status, out, err = run(command, environment=parameters and {"SM_HP_MP_PARAMETERS": json.dumps(parameters)}, timeout_s=timeout_s)
        self.assertEqual(status, 0, out[-6000:] + err[-6000:])
        return json.loads(at.read_text())

    def alone(self, name, micro_batches, *words, **options):
        return self.report("alone", 1, name, {"partitions": 1, "microbatches": micro_batches}, *words, **options)

    def assert_same(self, found, expected):
        """Bit by bit: losses, what evaluation counts, sums of weights."""
        self.assertEqual({key: value for key, value in found.items() if key != "elements"}, {key: value for key, value in expected.items() if key != "elements"})

    def assert_resumes(self, folder, ranks, name, parameters, kind, whole, *words, **options):
        """The second half of a run from the file of its middle is that of the `whole` run, without dropout, which would
        begin anew."""
        found = self.report(folder, ranks, name, parameters, "--dropout", "0", "--resume", kind, *words, **options)
        self.assertEqual(found["losses"], whole["losses"][1:])
        self.assertEqual(found["weights"], whole["weights"])


class Quick(Scripts):
    def test_digits_over_two_stages_and_from_their_parts(self):
        parameters = {"partitions": 2, "microbatches": 4, "pipeline": "interleaved", "memory_weight": 0.3}
        expected = self.alone("mnist", 4, "--dropout", "0")
        found = self.report("stages", 2, "mnist", parameters, "--dropout", "0")
        self.assert_same(found, expected)
        self.assertEqual(len(found["elements"]), 2)
        self.assert_resumes("stages", 2, "mnist", parameters, "partial", found)

    def test_bert_over_two_stages_of_which_the_first_has_data(self):
        expected = self.alone("bert_pretraining", 4)
        found = self.report("stages", 2, "bert_pretraining", {"partitions": 2, "microbatches": 4, "pipeline": "interleaved"})
        self.assert_same(found, expected)
        self.assertEqual(len(found["elements"]), 2)


if __name__ == "__main__":
    main()
