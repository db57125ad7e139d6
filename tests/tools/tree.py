"""A small source tree in a temporary folder, for the checks of tools/ to look at."""
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent

# Files with every function at which a walk of count_concepts begins
BEGINNINGS = {"src/engine/beginnings.cpp": """namespace trireme {
struct ModelEngine {
  void forward() {}
};
struct WeightStore {
  void before_access() {}
  void after_write() {}
};
struct GradientStore {
  void accept() {}
};
struct PipelineEngine {
  void train_batch() {}
};
struct SequenceParallel {
  void cut() {}
};
struct AxisPass {
  void run() {}
};
struct Training {
  void save() {}
};
void read_config() {}
}
""", "src/engine/engine.cpp": """struct Engine {
  void backward() {}
  void step() {}
};
"""}


class Tree:
    def __init__(self, test, files):
        folder = tempfile.TemporaryDirectory()
        test.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        for name, text in files.items():
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def run(self, tool, *flags):
        """(exit status, what was printed) of tools/`tool` on this tree."""
        done = subprocess.run([sys.executable, "-B", ROOT / "tools" / tool, "--root", self.root, *flags], text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        return done.returncode, done.stdout
