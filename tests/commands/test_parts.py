"""From a configuration to the plan of a run: clusters of devices, emulated ones, and `plan=auto` in one process."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import DictConfig

from lightning_hybridop.commands.configuration import ConfigurationError, compose_runs
from lightning_hybridop.commands.parts import run_emulation, run_module, run_plan, run_strategy
from lightning_hybridop.commands.recipes import load_recipe
from lightning_hybridop.planning.cluster import ClusterError
from lightning_hybridop.planning.plan import even_plan, save_plan


def configured(*overrides: str) -> DictConfig:
    return compose_runs("fit", overrides)[0].config


def test_the_emulated_cluster_of_the_recipe_has_all_of_its_devices() -> None:
    config = configured("recipe=emulated_3b")

    plan = run_plan(config)
    emulation = run_emulation(config, plan)

    assert [stage.role for stage in plan.stages] == ["zo"] * 2 + ["bp"] * 4
    assert plan.predicted is not None
    assert emulation is not None
    assert emulation.time_scale == 0.5
    assert [stage.role for stage in emulation.stages] == [stage.role for stage in plan.stages]
    # The last stage also has the head; a mini-batch is at least its four micro-batches there.
    last = emulation.stages[-1]
    assert plan.predicted.iteration_seconds > 0.5 * 4 * (last.forward + last.backward)


def test_a_cluster_of_devices_that_is_not_emulated_runs_at_its_own_speed() -> None:
    config = configured("recipe=emulated_3b", "cluster.emulate=false", "use_all=false")

    plan = run_plan(config)

    assert run_emulation(config, plan) is None
    assert all(stage.role == "bp" for stage in plan.stages)  # faster without the boards that only run forward


def test_one_process_has_nothing_to_measure() -> None:
    config = configured("recipe=quickstart", "plan=auto", "cluster=local_1bp", "model.blocks=4")
    plan = run_plan(config)

    assert run_strategy(config, plan).plan == plan


def test_a_plan_file_of_an_emulated_cluster_is_emulated_too(tmp_path: Path) -> None:
    plan = run_plan(configured("recipe=emulated_3b"))
    save_plan(plan, tmp_path / "plan.yaml")
    save_plan(even_plan(blocks=4, stages=2), tmp_path / "other.yaml")
    again = configured("recipe=emulated_3b", f"plan={tmp_path / 'plan.yaml'}")
    other = configured("recipe=emulated_3b", f"plan={tmp_path / 'other.yaml'}")

    emulation = run_emulation(again, run_plan(again))

    assert emulation == run_emulation(configured("recipe=emulated_3b"), plan)
    with pytest.raises(
        ConfigurationError, match=r"The plan is for 4 blocks, but the workload llama-3.2-3b has 28"
    ):
        run_emulation(other, run_plan(other))


def test_what_was_predicted_of_a_plan_elsewhere_is_not_this_runs(tmp_path: Path) -> None:
    plan = run_plan(configured("recipe=emulated_3b"))
    save_plan(plan, tmp_path / "plan.yaml")

    again = run_plan(configured("recipe=emulated_3b", f"plan={tmp_path / 'plan.yaml'}"))

    assert plan.predicted is not None
    assert again == plan
    assert again.predicted is None


def test_a_central_difference_costs_two_passes_and_stays_one_query() -> None:
    forward = run_plan(configured("recipe=emulated_3b", "strategy.queries=4"))
    central = run_plan(configured("recipe=emulated_3b", "strategy.queries=2", "strategy.difference=central"))

    assert (central.queries, central.difference) == (2, "central")
    # The same work, so the same stages.
    assert [(s.first, s.last, s.name) for s in central.stages] == [
        (s.first, s.last, s.name) for s in forward.stages
    ]


def test_a_run_is_planned_for_its_estimator() -> None:
    loss, boundary = (
        run_plan(configured("recipe=emulated_3b", "strategy.queries=4", f"strategy.estimator={estimator}"))
        for estimator in ("loss", "boundary")
    )

    assert (loss.estimator, boundary.estimator) == ("loss", "boundary")
    assert loss.predicted is not None
    assert boundary.predicted is not None
    assert boundary.predicted.iteration_seconds < loss.predicted.iteration_seconds


def test_links_take_what_the_wire_makes_of_a_hidden_state() -> None:
    config = configured("recipe=emulated_3b", "strategy.wire=int8")
    with_int8 = run_plan(config)
    plain = dataclasses.replace(
        with_int8, stages=tuple(dataclasses.replace(stage, wire=None) for stage in with_int8.stages)
    )
    mixed = dataclasses.replace(with_int8, stages=(plain.stages[0], *with_int8.stages[1:]))
    width = config.workload.architecture.hidden
    (first, *rest), (plain_first, *plain_rest), mixed_links = (
        emulation.links
        for plan in (with_int8, plain, mixed)
        if (emulation := run_emulation(config, plan)) is not None
    )

    assert [stage.wire for stage in with_int8.stages] == ["int8"] * len(rest) + ["int8", None]
    # float16 takes two bytes for each of a token's numbers, int8 one, and four for the token.
    assert config.workload.dtype == "float16"
    assert first.transfer == pytest.approx(plain_first.transfer * (width + 4) / (2 * width))
    assert (first.back, first.latency) == (plain_first.back, plain_first.latency)
    assert mixed_links == (plain_first, *rest)
    assert plain_rest != rest


def test_one_device_alone_is_no_pipeline_to_emulate() -> None:
    config = configured(
        "recipe=emulated_3b", "cluster.devices=[{profile: jetson-orin-nx-16gb}]", "use_all=false"
    )

    with pytest.raises(ConfigurationError, match="alone is the fastest of this cluster"):
        run_plan(config)


@pytest.mark.parametrize("override", ["cluster.zo_executor=openvino", "cluster.zo_dtype=bfloat16"])
def test_a_plan_that_processes_make_themselves_is_made_for_torch(override: str) -> None:
    config = configured("recipe=quickstart", "plan=auto", override)

    with pytest.raises(ConfigurationError, match="plan=auto measures torch"):
        run_strategy(config, run_plan(config))


def test_the_executor_of_a_local_cluster_is_that_of_its_zo_stages() -> None:
    config = configured("recipe=quickstart", "cluster.zo_executor=openvino", "cluster.zo_weights=int8")

    stages = run_plan(config).stages

    assert [(stage.executor, stage.weights) for stage in stages] == [("openvino", "int8")] * 2 + [
        ("torch", None)
    ] * 2


def test_adapters_of_another_rank_need_to_know_the_zo_stages() -> None:
    config = configured("recipe=quickstart", "plan=auto", "model.zo_rank=1")

    with pytest.raises(ConfigurationError, match=r"model.zo_rank is set, but with plan=auto"):
        run_module(config, run_plan(config))


HOSTS = "hosts={hosts:[{name:nano,devices:[{device:'cuda:1'},{device:cpu}]},{name:atlas,devices:[{device:'cuda:0'}]}]}"
MODEL = ("model=hf", "model.name=random-4-blocks", "model.blocks=4", "data=headlines", "plan=auto")


@pytest.mark.parametrize(
    ("host", "local_rank", "device"), [("nano", 0, "cuda:1"), ("nano", 1, "cpu"), ("atlas", 0, "cuda:0")]
)
def test_a_process_measures_the_device_that_the_hosts_file_has_for_it(
    monkeypatch: pytest.MonkeyPatch, host: str, local_rank: int, device: str
) -> None:
    monkeypatch.setenv("HYBRIDOP_HOST", host)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    config = configured(HOSTS, *MODEL)

    assert str(run_strategy(config, run_plan(config)).compute_device) == device


def test_a_process_that_the_hosts_file_has_no_device_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    config = configured(HOSTS, *MODEL)
    plan = run_plan(config)

    for host, message in (
        ("atlas", "atlas has 1 device in the hosts file, but at least 2 processes run there; start one for"),
        ("moon", "A process says that it runs on moon, but the hosts are nano, atlas; correct HYBRIDOP_HOST"),
    ):
        monkeypatch.setenv("HYBRIDOP_HOST", host)
        monkeypatch.setenv("LOCAL_RANK", "1")
        with pytest.raises(ClusterError, match=message):
            run_strategy(config, plan)


def test_the_trainer_of_hosts_is_one_for_any_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class TrainerMadeError(Exception):
        pass

    def made(options: DictConfig) -> Callable[..., None]:
        def make(**further: object) -> None:
            if "accelerator" in options:
                raise TrainerMadeError(further.get("accelerator", options.accelerator))

        return make

    fit = load_recipe("fit")
    monkeypatch.setitem(fit.__globals__, "factory", made)  # type: ignore[attr-defined]
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.setenv(name, "0")

    for overrides, accelerator in (((HOSTS, *MODEL), "hybridop"), (MODEL[:-1], "cpu")):
        with pytest.raises(TrainerMadeError, match=f"^{accelerator}$"):
            fit(configured(*overrides), tmp_path)
