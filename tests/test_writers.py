from typing import Any

import lightning
from lightning.pytorch.callbacks import BasePredictionWriter, ModelCheckpoint

from lightning_hybridop.writers import restore_writers, silence_writers


class Writer(BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.writes = 0

    def write_on_batch_end(self, *_: Any) -> None:
        self.writes += 1

    def write_on_epoch_end(self, *_: Any) -> None:
        self.writes += 1


def test_silenced_writers_write_nothing_until_they_are_restored() -> None:
    writer = Writer()
    trainer = lightning.Trainer(accelerator="cpu", logger=False, callbacks=[writer, ModelCheckpoint()])

    for silence, writes in ((False, 2), (True, 2), (False, 4)):
        (silence_writers if silence else restore_writers)(trainer)
        writer.write_on_batch_end()
        writer.write_on_epoch_end(trainer, None, [], [])
        assert writer.writes == writes
