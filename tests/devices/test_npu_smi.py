"""What `npu-smi info` prints, as the vendor's manuals show it for a developer kit, a card and a server's NPUs."""

import time
from pathlib import Path

import pytest

from lightning_hybridop.devices.npu_smi import npu_readings, parse_npu_smi, reading_of

DEVELOPER_KIT = """
+--------------------------------------------------------------------------------------------------------+
| npu-smi 25.2.0                                       Version: 25.2.0                                   |
+-------------------------------+-----------------+------------------------------------------------------+
| NPU     Name                  | Health          | Power(W)     Temp(C)           Hugepages-Usage(page) |
| Chip    Device                | Bus-Id          | AICore(%)    Memory-Usage(MB)                        |
+===============================+=================+======================================================+
| 0       310B4                 | OK              | 10.4          66                15    / 15           |
| 0       0                     | NA              | 87           957   / 3513                            |
+===============================+=================+======================================================+
"""

CARD = """
+-------------------------------+-----------------+------------------------------------------------------+
| NPU     Name                  | Health          | Power(W)     Temp(C)           Hugepages-Usage(page) |
| Chip    Device                | Bus-Id          | AICore(%)    Memory-Usage(MB)                        |
+===============================+=================+======================================================+
| 2       310P3                 | Warning         | NA           45                0     / 0             |
| 0       0                     | 0000:86:00.0    | 0            1853 / 21527                            |
+-------------------------------+-----------------+------------------------------------------------------+
| 2       310P3                 | OK              | NA           NA                0     / 0             |
| 1       1                     | 0000:86:00.0    | 3            1700 / 21527                            |
+===============================+=================+======================================================+
| NPU     Chip                  | Process id      | Process name             | Process memory(MB)        |
+===============================+=================+======================================================+
| 2       0                     | 4711            | python                   | 120                       |
"""

SERVER = """
| 0     910B3               | OK            | 92.3        44                0    / 0             |
| 0                         | 0000:C1:00.0  | 5           0    / 0          3373 / 65536         |
"""


def test_a_developer_kit_has_one_chip_with_its_power_load_and_memory() -> None:
    (reading,) = parse_npu_smi(DEVELOPER_KIT)
    assert (reading.chip, reading.name, reading.health) == (0, "310B4", "OK")
    assert (reading.power, reading.temperature, reading.core_percent) == (10.4, 66.0, 87.0)
    assert (reading.memory_used, reading.memory_total) == (957.0, 3513.0)


def test_a_card_s_chips_are_counted_and_what_is_not_available_is_none() -> None:
    first, second = parse_npu_smi(CARD)
    assert [first.chip, second.chip] == [0, 1]
    assert [first.health, second.health] == ["Warning", "OK"]
    assert (first.power, first.temperature, second.temperature) == (None, 45.0, None)
    assert (second.core_percent, second.memory_used) == (3.0, 1700.0)


def test_a_power_of_zero_is_unknown() -> None:
    (reading,) = parse_npu_smi(DEVELOPER_KIT.replace("10.4", " 0.0"))
    assert (reading.power, reading.temperature) == (None, 66.0)


def test_where_two_memories_are_shown_the_last_holds_the_tensors() -> None:
    (reading,) = parse_npu_smi(SERVER)
    assert (reading.power, reading.memory_used, reading.memory_total) == (92.3, 3373.0, 65536.0)


@pytest.mark.parametrize(
    "text", ["", "no device", DEVELOPER_KIT[:700], "|||\n" * 3, "| | OK | |\n| | | |", "\x00|" * 9]
)
def test_other_text_gives_no_readings_and_no_error(text: str) -> None:
    assert all(reading.power is None for reading in parse_npu_smi(text))


def _tool(folder: Path, script: str) -> None:
    path = folder / "npu-smi"
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(0o755)


def test_the_tool_is_asked_and_never_waited_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "table").write_text(DEVELOPER_KIT, encoding="utf-8")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    _tool(tmp_path, f"cat {tmp_path}/table")
    assert [reading.power for reading in npu_readings()] == [10.4]

    _tool(tmp_path, "exec sleep 30")
    began = time.monotonic()
    assert npu_readings(patience=0.2) == ()
    assert time.monotonic() - began < 10

    _tool(tmp_path, "echo 'DrvMngGetConsoleLogLevel failed' >&2; exit 1")
    assert npu_readings() == ()
    (tmp_path / "npu-smi").write_bytes(b"\x7fELF is of another machine")
    assert npu_readings() == ()


def test_without_the_tool_there_are_no_readings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert npu_readings() == ()


def test_devices_are_numbered_as_the_process_sees_them(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = parse_npu_smi(CARD)
    monkeypatch.delenv("ASCEND_RT_VISIBLE_DEVICES", raising=False)
    assert reading_of(None, readings) == reading_of(0, readings) == readings[0]
    assert reading_of(2, readings) is None
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "1")
    assert reading_of(0, readings) == readings[1]
    assert reading_of(1, readings) is None
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "nonsense")
    assert reading_of(0, readings) is None
