import time
from pathlib import Path

import pytest

from lightning_hybridop.devices import power
from lightning_hybridop.devices.npu_smi import parse_npu_smi
from lightning_hybridop.devices.power import RaplCounter, SampledMeter, host_meter, machine_identity
from tests.devices.test_jetson import hwmon, write
from tests.devices.test_npu_smi import CARD, DEVELOPER_KIT


@pytest.fixture(autouse=True)
def no_npus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(power, "npu_readings", lambda: ())


def rapl(root: Path, zone: str, name: str, microjoules: int, most: int = 1_000_000) -> Path:
    folder = root / "sys/class/powercap" / zone
    write(folder, {"name": name, "energy_uj": f"{microjoules}\n", "max_energy_range_uj": f"{most}\n"})
    return folder


def test_packages_and_memory_are_added_and_their_parts_are_not(tmp_path: Path) -> None:
    package = rapl(tmp_path, "intel-rapl:0", "package-0", 100)
    memory = rapl(tmp_path, "intel-rapl:0:1", "dram", 100)
    core = rapl(tmp_path, "intel-rapl:0:0", "core", 100)
    meter = host_meter(tmp_path)
    assert (meter.source, meter.covers, meter.problem) == ("RAPL", {"cpu"}, None)  # no GPU, no NPU
    (package / "energy_uj").write_text("300100")
    (memory / "energy_uj").write_text("50100")
    (core / "energy_uj").write_text("900000")
    assert meter.joules() == pytest.approx(0.35)


def test_a_counter_that_starts_again_goes_on(tmp_path: Path) -> None:
    zone = rapl(tmp_path, "intel-rapl:0", "package-0", 900_000)
    counter = RaplCounter(zone)
    (zone / "energy_uj").write_text("100000")
    assert counter.joules() == pytest.approx(0.2)
    (zone / "energy_uj").write_text("150000")
    assert counter.joules() == pytest.approx(0.25)


def test_a_refused_counter_is_told_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rapl(tmp_path, "intel-rapl:0", "package-0", 1)

    def refuse(_: object) -> int:
        raise PermissionError

    monkeypatch.setattr(RaplCounter, "_read", refuse)
    problem = host_meter(tmp_path).problem
    assert problem is not None and "may be read by root only; make" in problem
    # Beside other counters as well, which do not include the processors.
    monkeypatch.setattr(power, "npu_readings", lambda: parse_npu_smi(DEVELOPER_KIT))
    meter = host_meter(tmp_path)
    meter.stop()
    assert (meter.source, meter.covers, meter.problem) == ("npu-smi", {"npu"}, problem)


def test_a_host_without_counters_says_so(tmp_path: Path) -> None:
    meter = host_meter(tmp_path)
    assert (meter.meters, meter.covers) == ((), frozenset())
    assert meter.problem is not None and meter.problem.startswith("This host has no counter of energy")


def test_a_varying_power_is_integrated() -> None:
    now, watts = [0.0], [2.0]
    meter = SampledMeter(lambda: watts[0], period=3600.0, clock=lambda: now[0])
    now[0], watts[0] = 1.0, 4.0
    meter.sample()
    assert meter.joules() == 3.0
    now[0] = 1.5
    assert meter.joules() == 5.0
    watts[0] = None  # type: ignore[call-overload]  # a reading that failed
    meter.sample()
    assert meter.joules() == 5.0
    meter.stop()


def test_a_jetson_s_rails_are_sampled_while_the_program_runs(tmp_path: Path) -> None:
    write(tmp_path, {"proc/device-tree/model": "NVIDIA Jetson Orin NX"})
    write(tmp_path, hwmon("1-0040", [("VDD_IN", 5000, 2000)]))
    meter = host_meter(tmp_path)
    assert (meter.source, meter.covers) == ("INA3221 rails", {"cpu", "cuda"})
    began = time.monotonic()
    time.sleep(0.35)
    joules, elapsed = meter.joules(), time.monotonic() - began
    meter.stop()
    assert joules == pytest.approx(10.0 * elapsed, rel=0.2)


def test_npus_are_added_to_their_host_s_own_counters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(power, "npu_readings", lambda: parse_npu_smi(DEVELOPER_KIT))
    rapl(tmp_path, "intel-rapl:0", "package-0", 0)
    meter = host_meter(tmp_path)
    meter.stop()
    assert (meter.source, meter.covers) == ("npu-smi + RAPL", {"npu", "cpu"})
    for text in (CARD, DEVELOPER_KIT + CARD, DEVELOPER_KIT.replace("10.4", " 0.0")):  # a power is unknown
        monkeypatch.setattr(power, "npu_readings", lambda text=text: parse_npu_smi(text))
        meter = host_meter(tmp_path)
        assert (meter.source, meter.covers) == ("RAPL", {"cpu"})


def test_processes_of_one_machine_have_one_identity(tmp_path: Path) -> None:
    write(tmp_path, {"proc/sys/kernel/random/boot_id": "c6a5-d3\n"})
    assert machine_identity(tmp_path) == "c6a5-d3"
    assert machine_identity(tmp_path / "none")
