"""Boards as folders: the files that Linux and NVIDIA's drivers show on a Jetson, with numbers written by hand."""

from pathlib import Path

import pytest

from lightning_hybridop.devices.jetson import board_power, gpu_load, jetson_model, rails, unified_memory


def write(root: Path, files: dict[str, str]) -> None:
    for place, text in files.items():
        path = root / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def hwmon(chip: str, channels: list[tuple[str, int, int]]) -> dict[str, str]:
    folder = f"sys/bus/i2c/drivers/ina3221/{chip}/hwmon/hwmon3"
    files = {}
    for number, (label, millivolts, milliamperes) in enumerate(channels, start=1):
        files[f"{folder}/in{number}_label"] = f"{label}\n"
        files[f"{folder}/in{number}_input"] = f"{millivolts}\n"
        files[f"{folder}/curr{number}_input"] = f"{milliamperes}\n"
    return files


def test_an_orin_nano_s_power_is_that_of_the_rail_that_feeds_it(tmp_path: Path) -> None:
    write(tmp_path, {"proc/device-tree/model": "NVIDIA Jetson Orin Nano Developer Kit\x00"})
    write(
        tmp_path,
        hwmon("1-0040", [("VDD_IN", 5000, 1400), ("VDD_CPU_GPU_CV", 4980, 500), ("VDD_SOC", 4990, 300)]),
    )
    # The sum of the shunts has a label as well, and no current.
    write(tmp_path, {"sys/bus/i2c/drivers/ina3221/1-0040/hwmon/hwmon3/in7_label": "sum of shunt voltages"})

    assert jetson_model(tmp_path) == "NVIDIA Jetson Orin Nano Developer Kit"
    assert [rail.name for rail in rails(tmp_path)] == ["VDD_IN", "VDD_CPU_GPU_CV", "VDD_SOC"]
    assert rails(tmp_path)[1].power == pytest.approx(2.49)
    assert board_power(tmp_path) == pytest.approx(7.0)


def test_an_agx_s_rails_add_up(tmp_path: Path) -> None:
    write(
        tmp_path,
        hwmon("1-0040", [("VDD_GPU_SOC", 20000, 100), ("VDD_CPU_CV", 20000, 50), ("VIN_SYS_5V0", 5000, 800)]),
    )
    write(tmp_path, hwmon("1-0041", [("NC", 0, 0), ("VDDQ_VDD2_1V8AO", 5000, 200), ("NC", 0, 0)]))
    assert len(rails(tmp_path)) == 6
    assert board_power(tmp_path) == pytest.approx(2.0 + 1.0 + 4.0)


@pytest.mark.parametrize("rail", ["VDD_IN", "VDD_CPU_CV"])
def test_a_power_of_zero_is_unknown(tmp_path: Path, rail: str) -> None:
    write(tmp_path, hwmon("1-0040", [(rail, 5000, 0)]))
    assert [read.power for read in rails(tmp_path)] == [0.0]
    assert board_power(tmp_path) is None


def test_jetpack_4_s_driver_gives_milliwatts_and_is_counted_once(tmp_path: Path) -> None:
    folder = tmp_path / "sys/bus/i2c/drivers/ina3221x/6-0040"
    write(
        folder,
        {
            "iio:device0/rail_name_0": "POM_5V_IN",
            "iio:device0/in_power0_input": "3100",
            "iio:device0/rail_name_1": "POM_5V_GPU",
            "iio:device0/in_power1_input": "900",
            "iio:device0/rail_name_2": "POM_5V_CPU",
            "iio:device0/in_power2_input": "no number",
        },
    )
    (folder / "iio_device").symlink_to("iio:device0")
    assert [(rail.name, rail.power) for rail in rails(tmp_path)] == [("POM_5V_IN", 3.1), ("POM_5V_GPU", 0.9)]
    assert board_power(tmp_path) == 3.1


@pytest.mark.parametrize(
    "place",
    ["sys/devices/gpu.0/load", "sys/devices/platform/17000000.gpu/load", "sys/devices/57000000.gpu/load"],
)
def test_the_load_of_the_gpu_is_in_thousandths(tmp_path: Path, place: str) -> None:
    assert gpu_load(tmp_path) is None
    write(tmp_path, {place: "437\n"})
    assert gpu_load(tmp_path) == 0.437


def test_memory_is_what_linux_can_give(tmp_path: Path) -> None:
    assert unified_memory(tmp_path) is None
    write(
        tmp_path, {"proc/meminfo": "MemTotal:  100 kB\nMemFree:  7 kB\nMemAvailable:  40 kB\nHugePages: 3\n"}
    )
    assert unified_memory(tmp_path) == (40 * 1024, 100 * 1024)


def test_another_machine_is_no_jetson(tmp_path: Path) -> None:
    write(tmp_path, {"proc/device-tree/model": "Raspberry Pi 5"})
    assert jetson_model(tmp_path) is None
    assert board_power(tmp_path) is None
    assert rails(tmp_path) == ()
    write(tmp_path, {"etc/nv_tegra_release": "# R35 (release)"})
    assert jetson_model(tmp_path) == "NVIDIA Jetson"
