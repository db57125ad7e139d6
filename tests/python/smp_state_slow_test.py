"""States and files of smp: more optimizers, and more places at which a rank is killed, than smp_state_test.py has."""
import os
import tempfile
import textwrap

import smp_state_test
from harness import RankServer, main
from smp_programs import PRELUDE, Case


class States(smp_state_test.States):
    optimizers = ("SGD", "NAdam")


class Files(smp_state_test.Files):
    kills = {("torch.save", 0): [1.0], ("os.fsync", 0): [1.0], ("os.fsync", 1): [1.0], ("files.messages.of_all", 0): [1.0], ("files.messages.of_all", 1): [1.0],
             ("files.messages.value_of", 0): [1.0], ("os.replace", 0): [1.0, "mixture"], ("files.messages.barrier", 1): [2.0], ("files.sync_folder", 1): [2.0, "mixture"]}


class KillsByTheClock(Case):
    """Twenty ranks are killed, each after another part of the time that a save takes."""

    kills = 20

    _BEGIN = """
    import time
    begin()
    net = nn.Sequential(*(nn.Linear(256, 256) for _ in range(16)))
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    @smp.step
    def train_step(x):
        loss = model(x).square().mean()
        model.backward(loss)
        return loss
    train_step(torch.ones(4, 256))
    optimizer.step()
    optimizer.zero_grad()
    def fill(value):
        with torch.no_grad():
            for _, parameter in model.local_named_parameters():
                parameter.fill_(value)
    def filled():
        '''The one number of all of this rank's parameters, or all numbers.'''
        found = torch.cat([parameter.flatten() for _, parameter in model.local_named_parameters()]).unique().tolist()
        return found[0] if len(found) == 1 else found
    def of_ranks(value):
        return [json.loads(text) for text in smp.state.world.gather(json.dumps(value))]
    def save(value, tag="first"):
        fill(value)
        SAVE
    def load():
        LOAD
        return filled()
"""
    _SAVES = """
    save(0)
    began = time.perf_counter()
    save(1)
    duration = time.perf_counter() - began
    tag = "first" if NUMBER % 4 < 2 else "second"
    smp.barrier()
    if smp.rank() == NUMBER % 2:
        os.posix_spawn("/bin/sh", ["sh", "-c", f"sleep {duration * (NUMBER + 0.5) / KILLS:.6f}; kill -9 {os.getpid()}"], {})
    save(2, tag)
    open(FOLDER + f"/has_saved_{smp.rank()}", "w").close()
    time.sleep(duration + 2)
"""

    def killed(self, call, **replaced):
        """[(what ranks load after a kill, whether the killed rank's save had not ended)]."""
        def program(text, folder, number=0):
            for name, value in {**replaced, "FOLDER": repr(folder), "NUMBER": str(number), "KILLS": str(self.kills)}.items():
                text = text.replace(name, value)
            return text

        outcomes = []
        for number in range(self.kills):
            with tempfile.TemporaryDirectory() as folder:
                script = os.path.join(folder, "saves.py")
                with open(script, "w", encoding="utf-8") as file:
                    file.write(textwrap.dedent(PRELUDE + program(self._BEGIN + self._SAVES, folder, number)))
                status = RankServer.run(2, [script])
                self.assertNotEqual(status[0], 0, f"{call}: {status}")
                had_ended = os.path.exists(f"{folder}/has_saved_{number % 2}")
                found = self.ran(2, program(self._BEGIN, folder) + "    result = of_ranks(told(load))\n")
                outcomes.append((found, had_ended))
        return outcomes

    def assert_kills_were_within(self, outcomes):
        self.assertGreaterEqual(sum(not had_ended for _, had_ended in outcomes), self.kills // 2)

    def test_smp_save_leaves_a_whole_save_or_files_that_are_refused(self):
        outcomes = self.killed("smp.save()", SAVE='smp.save(model.local_state_dict(), FOLDER + "/f")', LOAD='model.load_state_dict(smp.load(FOLDER + "/f"))')
        for found, had_ended in outcomes:
            with self.subTest(found=found, had_ended=had_ended):
                if any(isinstance(one, str) for one in found):
                    for one in found:
                        self.assertRegex(one, r"^CheckpointError: smp.load: the files .* are of 2 saves: .* Save [0-9a-f]{8} is whole: its last files have not got their names; mv ")
                else:
                    self.assertIn(found, [[2.0, 2.0]] if had_ended else [[1.0, 1.0], [2.0, 2.0]])
        self.assert_kills_were_within(outcomes)

    def test_save_checkpoint_leaves_the_old_one_or_the_new_one(self):
        outcomes = self.killed("save_checkpoint()", SAVE='model.save_checkpoint(FOLDER + "/saved", tag, client_state={"value": value})',
                               LOAD='assert model.load_checkpoint(FOLDER + "/saved")[1]["value"] == filled()')
        for found, had_ended in outcomes:
            with self.subTest(found=found, had_ended=had_ended):
                self.assertIn(found, [[2.0, 2.0]] if had_ended else [[1.0, 1.0], [2.0, 2.0]])
        self.assert_kills_were_within(outcomes)


if __name__ == "__main__":
    main()
