"""Programs that mix tokens in every way train as whole sequences do, or are refused by name: a sample of
zoo/sequence/."""
import json
import pathlib

from harness import PYTHON, Case, main, run

TABLE = pathlib.Path(__file__).parent / "sequence_table_run.py"


class Table(Case):
    def check(self, *words, **options):
        """Runs rows of the table; each must end as it is declared."""
        said = self.folder / "outcomes.json"
        status, out, err = run([PYTHON, "-B", "-u", TABLE, "--json", said, *words], **options)
        self.assertIn(status, (0, 1), f"{out[-3000:]}\n{err[-3000:]}")
        outcomes = json.loads(said.read_text())
        self.assertGreater(len(outcomes), 0)
        self.assertEqual([line for line in out.splitlines() if line.startswith("NOT ")], [])
        self.assertEqual(status, 0)
        return outcomes


class Sample(Table):
    def test_two_ranks(self):
        self.check("--sample")

    def test_two_ranks_in_a_ring(self):
        self.check("--sample", "--attention", "ring")

    def test_four_ranks(self):
        self.check("--sample", "--ranks", 4)


class Names(Table):
    def test_the_sample_has_rows_of_every_theme_and_no_name_that_is_none(self):
        from zoo import sequence  # pylint: disable=import-outside-toplevel  # imports torch
        rows = {row.name: row.theme for row in sequence.ROWS}
        self.assertEqual(sequence.SAMPLE - set(rows), set())
        self.assertEqual({rows[name] for name in sequence.SAMPLE}, {theme.__name__.rpartition(".")[2] for theme in sequence.THEMES})
        self.assertGreaterEqual(sum(row.on_four for row in sequence.ROWS) * 3, len(rows))


if __name__ == "__main__":
    main()
