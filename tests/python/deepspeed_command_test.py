"""The command `deepspeed`: made where there is none, and what programs for it find."""
import json
import os
import re

import harness
from harness import PYTHON, Case, free_port, main

PROGRAMS = harness.pathlib.Path(__file__).parent / "programs"


class Command(Case):
    def setUp(self):
        super().setUp()
        self.bin = self.folder / "bin"
        self.bin.mkdir()
        (self.bin / "trireme").symlink_to(harness.PROGRAM)
        self.environment = {"TRIREME_PYTHON": PYTHON, "TRIREME_COMMAND": str(self.bin / "trireme"),
                            "PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}"}

    def command(self, *words, **options):
        return harness.run(words, environment={**self.environment, **options.pop("environment", {})}, folder=self.folder, **options)

    def install(self):
        return self.command("trireme", "deepspeed", "--install")

    def test_is_made_beside_trireme_and_runs_a_script_with_its_flags_and_local_rank(self):
        self.assertEqual(self.install(), (0, f"made {self.bin / 'deepspeed'}\n", ""))
        self.assertEqual(self.install()[0], 0)  # its own it replaces
        self.write("says.py", """
            import os, sys, deepspeed
            # One write, so that the lines of two ranks do not mix.
            sys.stdout.write(f"{sys.argv[1:]} {deepspeed.__version__} {os.environ['RANK']} {os.environ['LOCAL_SIZE']} "
                             f"{deepspeed.get_accelerator().device_count()}\\n")
        """)
        status, out, err = self.command("deepspeed", "--num_gpus", "2", "--launcher", "pdsh", "says.py", "--lr", "1")
        self.assertEqual(status, 0, err)
        self.assertEqual(sorted(out.splitlines()), [f"['--local_rank={rank}', '--lr', '1'] 0.19.8 {rank} 2 2" for rank in (0, 1)])
        status, out, err = self.command("deepspeed", "--no_local_rank", "says.py")
        self.assertEqual((status, out), (0, "[] 0.19.8 0 1 1\n"), err)
        self.assertEqual(self.command("deepspeed", "--num_gpus", "2", "missing.py"),
                         (2, "", f"trireme deepspeed: script missing.py: there is no such file in {self.folder.resolve()}; correct its path\n"))
        status, out, err = self.command("deepspeed", "--no_local_rank", "says.py", environment={"LOCAL_SIZE": "2"})
        self.assertEqual((status, len(out.splitlines())), (0, 2), err)

    def test_is_not_made_where_deepspeed_has_one(self):
        for folder in (self.bin, self.folder / "other"):
            folder.mkdir(exist_ok=True)
            theirs = folder / "deepspeed"
            theirs.write_text("#!/bin/sh\necho theirs\n")
            theirs.chmod(0o755)
            status, _, err = self.command("trireme", "deepspeed", "--install",
                                          environment={"PATH": f"{folder}{os.pathsep}{self.environment['PATH']}"})
            self.assertEqual(status, 2)
            self.assertIn(f"there is a command {theirs} already", err)
            self.assertEqual(theirs.read_text(), "#!/bin/sh\necho theirs\n")
            theirs.unlink()
        self.assertFalse((self.bin / "deepspeed").exists())

    def test_p_tuning_with_checkpointed_layers_over_four_micro_batches_trains_as_plain_pytorch(self):
        self.install()
        lines = [json.dumps({"text": f"who follows {name}? ", "answer": f"{name[::-1]}."}) for name in ("anna", "bob", "carl", "dora")]
        self.write("spo_0.json", "\n".join(lines * 4) + "\n")
        self.write("ds_zero2_no_offload.json", json.dumps({"gradient_clipping": 1.0, "zero_optimization": {
            "stage": 2, "allgather_partitions": True, "allgather_bucket_size": 5e8, "overlap_comm": False, "reduce_scatter": True,
            "reduce_bucket_size": 5e8, "contiguous_gradients": True}}))
        flags = f"""--train_path spo_0.json --model_name_or_path ChatGLM2-6B --per_device_train_batch_size 1 --max_len 64 --max_src_len 32
            --learning_rate 1e-2 --weight_decay 0.1 --num_train_epochs 2 --gradient_accumulation_steps 4 --warmup_ratio 0.1 --mode glm2
            --train_type ptuning --seed 1234 --ds_file ds_zero2_no_offload.json --gradient_checkpointing --show_loss_step 4
            --pre_seq_len 16 --prefix_projection True --output_dir ./output-glm2""".split()
        program = PROGRAMS / "p_tuning.py"
        status, out, err = self.command("deepspeed", "--master_port", free_port(), program, *flags,
                                        environment={"CUDA_VISIBLE_DEVICES": "0"})
        self.assertEqual(status, 0, out + err)
        status, plain, err = self.command(PYTHON, program, *flags, "--plain")
        self.assertEqual(status, 0, plain + err)
        losses, expected = ([float(loss) for loss in re.findall(r"loss ([0-9.]+)", text)] for text in (out, plain))
        self.assertEqual(len(losses), 8, out)
        self.assert_close(losses, expected, 1e-5)  # fp32, printed with six digits
        self.assertLess(losses[-1], losses[0])
        self.assertIn("launched as 0 with 1 seeing 0\n", out)
        self.assertIn("updates 8\n", out)  # 32 samples, 4 to an update
        self.assertTrue((self.folder / "output-glm2/latest").exists())


if __name__ == "__main__":
    main()
