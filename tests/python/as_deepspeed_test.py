"""`import deepspeed` that means this package."""
from harness import PYTHON, Case, launch, main, run


class AsDeepspeed(Case):
    def test_is_the_same_modules_under_the_other_name_with_its_version(self):
        result = self.on_ranks(0, """
            import importlib.metadata, importlib.util, sys
            result = {"found": [importlib.util.find_spec("deepspeed") is not None, importlib.metadata.version("deepspeed")]}
            import deepspeed, trireme
            from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus, GatheredParameters
            from deepspeed.ops.adam.cpu_adam import DeepSpeedCPUAdam
            import deepspeed.runtime.engine as engine
            result["same"] = [GatheredParameters is trireme.zero.GatheredParameters, deepspeed.runtime.zero is trireme.zero,
                              DeepSpeedCPUAdam is trireme.ops.adam.DeepSpeedCPUAdam,
                              engine.DeepSpeedEngine is trireme.DeepSpeedEngine, __import__("deepspeed.comm").comm is trireme.comm,
                              trireme.zero.__spec__.name, trireme.ops.adam.__spec__.name]
            result["versions"] = [deepspeed.__version__, deepspeed.__name__, deepspeed.version,
                                  trireme.__version__ != deepspeed.__version__]
            deepspeed.changed = 3
            result["written"] = trireme.changed
            from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
            from deepspeed.moe.layer import MoE
            from deepspeed.pipe import PipelineModule, LayerSpec
            for name, use in (("ulysses", lambda: UlyssesSPAttentionHF.register_with_transformers("x")), ("moe", lambda: MoE(3))):
                try:
                    use()
                except NotImplementedError as error:
                    result[name] = str(error).partition(" ")[0]
            for name in ("deepspeed.nonsense", "deepspeed.zero.nonsense"):
                try:
                    __import__(name)
                except ModuleNotFoundError as error:
                    result[name] = str(error)
            try:
                from deepspeed.ops.adam import Nonsense
            except ImportError as error:
                result["name"] = "Nonsense" in str(error)
        """, as_deepspeed=True)
        self.assertEqual(result["found"], [True, "0.19.8"])
        self.assertEqual(result["same"], [True, True, True, True, True, "trireme.deepspeed.zero", "trireme.deepspeed.ops.adam"])
        self.assertEqual(result["versions"], ["0.19.8", "deepspeed", "0.19.8", True])
        self.assertEqual(result["written"], 3)
        self.assertEqual(result["ulysses"],
                         "deepspeed.runtime.sequence_parallel.ulysses_sp.UlyssesSPAttentionHF.register_with_transformers")
        self.assertEqual(result["moe"], "deepspeed.moe.layer.MoE")
        self.assertIn("deepspeed.nonsense", result["deepspeed.nonsense"])
        self.assertIn("deepspeed.zero.nonsense", result["deepspeed.zero.nonsense"])
        self.assertTrue(result["name"])

    def test_reaches_processes_that_are_started_and_no_others(self):
        script = self.write("spawns.py", """
            import multiprocessing, subprocess, sys
            def child(queue):
                import deepspeed.ops.adam, importlib.metadata
                queue.put((deepspeed.__name__, deepspeed.ops.adam.__name__, importlib.metadata.version("deepspeed")))
            if __name__ == "__main__":
                context = multiprocessing.get_context("spawn")
                queue = context.Queue()
                process = context.Process(target=child, args=(queue,))
                process.start()
                print(queue.get(timeout=60), sys.argv[1:], sys.path[0])
                process.join()
                asked = "import importlib.util, deepspeed; print(deepspeed.__version__, importlib.util.find_spec('deepspeed').name)"
                subprocess.run([sys.executable, "-c", asked], check=True)
        """)
        status, out, err = launch(0, ["-m", "trireme.as_deepspeed", script, "--lr", "1"])
        self.assertEqual(status, 0, err)
        self.assertEqual(out.splitlines(), [f"('deepspeed', 'trireme.deepspeed.ops.adam', '0.19.8') ['--lr', '1'] {self.folder.resolve()}",
                                            "0.19.8 deepspeed"])
        status, _, err = run([PYTHON, "-c", "import trireme, deepspeed"])
        self.assertEqual(status, 1)
        self.assertIn("No module named 'deepspeed'", err)

    def test_runs_modules_and_shows_the_scripts_own_error(self):
        self.write("program.py", """
            import deepspeed, sys
            print(__name__, sys.argv[1:])
            def fails():
                raise KeyError("mine")
            if "fail" in sys.argv:
                fails()
        """)
        status, out, err = launch(0, ["-m", "trireme.as_deepspeed", "-m", "program", "-x"], folder=self.folder)
        self.assertEqual((status, out.strip()), (0, "__main__ ['-x']"), err)
        status, _, err = launch(0, ["-m", "trireme.as_deepspeed", self.folder / "program.py", "fail"])
        self.assertEqual(status, 1)
        self.assertIn('program.py", line 5, in fails', err)
        self.assertTrue(err.strip().endswith("KeyError: 'mine'"), err)
        status, _, err = launch(0, ["-m", "trireme.as_deepspeed"])
        self.assertEqual(status, 1)
        self.assertIn("usage: python -m trireme.as_deepspeed", err)

    def test_a_program_that_is_not_there_is_one_line_and_pythons_status(self):
        for words, line, expected in (
                (["missing.py", "-x"], f"script missing.py: there is no such file in {self.folder.resolve()}; correct its path", 2),
                (["/nowhere/a.py"], "script /nowhere/a.py: there is no such file; correct its path", 2),
                (["-m", "nowhere.train"], "module nowhere.train: there is none of this name in sys.path; correct it, or set PYTHONPATH to its folder", 1)):
            status, out, err = launch(0, ["-m", "trireme.as_deepspeed", *words], folder=self.folder)
            self.assertEqual((status, out, err), (expected, "", f"python -m trireme.as_deepspeed: {line}\n"))
            python = run([PYTHON, *words], folder=self.folder)
            self.assertEqual(python[0], expected)

    def test_install_serves_a_notebook(self):
        result = self.on_ranks(0, """
            from trireme.as_deepspeed import install
            install(); install()
            import deepspeed
            result = [deepspeed.__version__, deepspeed.get_accelerator().device_name()]
        """)
        self.assertEqual(result, ["0.19.8", "cpu"])


if __name__ == "__main__":
    main()
