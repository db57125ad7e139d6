"""More resumes, and more places at which a rank of smp is killed while it saves a checkpoint than
smp_checkpoint_test.py has."""
import smp_checkpoint_test
from harness import main


class Checkpoints(smp_checkpoint_test.Checkpoints):
    resumes = ((2, "None", "before"), (3, "partial=False", "before"), (3, "tag='second'", "after the first step"))


class Killed(smp_checkpoint_test.Killed):
    partial_kills = {("files.write", 1, 1): [1], ("files.write", 2, 0): [1], ("os.rename", 1, 0): [1], ("checkpoints._write_text", 2, 0): [2], ("shutil.rmtree", 1, 0): [2]}
    full_kills = {("files.write", 2, 0): [1], ("os.replace", 1, 0): [1], ("os.replace", 2, 0): [2], ("checkpoints._write_text", 1, 0): [2]}


if __name__ == "__main__":
    main()
