"""A rank that waits ten seconds for another says so; many exits without destroy()."""
import concurrent.futures
import socket

import harness
from faults_test import Exits
from harness import Case, main


class Late(Case):
    """A rank that waits for one that never comes."""

    def _says(self, rank, command=(), **variables):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        script = self.write(f"late{rank}.py", "import trireme\ntrireme.init_distributed()\n")
        environment = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                       "TRIREME_TIMEOUT_S": "12", **variables}
        status, _, err = harness.run([*(command or [harness.PYTHON, "-B", script])], environment=environment, timeout_s=60)
        self.assertNotEqual(status, 0)
        return port, err

    def test_says_for_whom_it_waits_and_how_to_drop_variables_that_a_shell_has_left(self):
        train = [harness.PROGRAM, "train", "--data", self.write("text.txt", "a line of text\n" * 500)]
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            waits = [pool.submit(self._says, rank, command) for rank, command in ((0, ()), (1, ()), (0, train), (1, train))]
        for rank, wait in zip((0, 1, 0, 1), waits):
            port, err = wait.result()
            self.assertIn(f"rank {rank} of 2 has waited 10 s at 127.0.0.1:{port} for rank {1 - rank}, and goes on waiting, 12 s in all. "
                          f"This process's environment says so: RANK={rank}, WORLD_SIZE=2, MASTER_ADDR=127.0.0.1, MASTER_PORT={port}. "
                          "If no launcher has set that, it is left over in the shell: run the program alone by "
                          "`env -u RANK -u WORLD_SIZE -u MASTER_ADDR -u MASTER_PORT PROGRAM`, or unset them\n", err)
            self.assertEqual(err.count("has waited 10 s"), 1, err)


class Exit(Exits):
    def test_twenty_exits_without_destroy_are_clean(self):
        self.check_without_destroy(20)

    def test_eight_exits_with_a_mesh_are_clean(self):
        self.check_with_a_mesh(8)


if __name__ == "__main__":
    main()
