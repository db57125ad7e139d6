"""States and files of smp: more optimizers, and more places at which a rank is killed, than smp_state_test.py has."""
import smp_state_test
from harness import main


class States(smp_state_test.States):
    optimizers = ("SGD", "NAdam")


class Files(smp_state_test.Files):
    kills = {("torch.save", 0): [1.0], ("os.fsync", 0): [1.0], ("os.fsync", 1): [1.0], ("files.messages.of_all", 0): [1.0], ("files.messages.of_all", 1): [1.0],
             ("files.messages.value_of", 0): [1.0], ("os.replace", 0): [1.0, "mixture"], ("files.messages.barrier", 1): [2.0], ("files.sync_folder", 1): [2.0, "mixture"]}


if __name__ == "__main__":
    main()
