"""One process of a run on this host: `python -m lightning_hybridop.commands.worker <folder>`."""

import os
import select
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from lightning_hybridop.commands.failures import write_failure
from lightning_hybridop.commands.launch import LOGS, SECONDS_TO_END
from lightning_hybridop.commands.recipes import load_recipe
from lightning_hybridop.commands.resuming import CONFIGURATION, go_on_from_newest


def main() -> int:
    """Run the recipe of the folder's configuration; only rank 0 writes to the terminal, the others to `logs/`."""
    folder = Path(sys.argv[1])
    rank = int(os.environ["RANK"])
    config = OmegaConf.load(folder / CONFIGURATION)
    assert isinstance(config, DictConfig)
    logs = folder / LOGS
    logs.mkdir(exist_ok=True)
    log = logs / f"rank_{rank}.log"
    if rank > 0:
        _redirect_output(log)
    _end_with_launcher()
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    try:
        go_on_from_newest(config, folder, restarted=restarted)
        load_recipe("fit")(config, folder)
    except Exception as error:
        write_failure(logs, rank, error)
        with log.open("a", encoding="utf-8") as file:
            traceback.print_exc(file=file)
        if config.debug and rank == 0:
            traceback.print_exc()
        return 1
    return 0


def _redirect_output(log: Path) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    with log.open("ab") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())


def _end_with_launcher() -> None:
    """End this process when it is told to, or when its launcher is gone, even while it waits for a message.

    Python runs signal handlers only between two steps of its own, and a stage that waits for a lost neighbour
    makes none. A thread sees the signal at once, gives ordinary handlers a little time, then ends the process.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    launcher = os.getppid()

    def watch() -> None:
        signals = b""
        while signal.SIGTERM not in signals and os.getppid() == launcher:
            ready, _, _ = select.select([reader], [], [], 1.0)
            signals = os.read(reader, 64) if ready else b""
        time.sleep(SECONDS_TO_END / 2)
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=watch, name="end with launcher", daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())
