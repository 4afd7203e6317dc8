"""A GPU as a guest uses it. The tests that need one are marked."""

from importlib.util import find_spec

import pytest
import torch

from p2ptrain.config import GuestSection, PeerConfig
from p2ptrain.errors import ConfigError, ResourceError
from p2ptrain.node.guest.gpu import Heat, celsius, fitting_gpu, limit_memory
from p2ptrain.node.guest.reasons import Watch, reasons_of
from p2ptrain.node.guest.wishes import Wishes

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


def test_a_hot_gpu_has_to_cool_by_ten_degrees_and_for_a_while_before_the_peer_goes_on() -> None:
    readings = [60.0, 81.0, 82.0, *[75.0] * 7, 81.0, *[70.0] * 6]
    (heat,) = reasons_of(GuestSection(on_battery=True, gpu_celsius=80), iter(readings).__next__)
    wishes = Wishes()
    watch = Watch([heat], wishes)
    watch.start()
    rests = []
    for _ in readings[1:]:
        watch.take(watch.look())
        rests.append(bool(wishes.reasons))
    assert rests == [False, *[True] * 14, False], "75 degrees are too hot to go on"


def test_no_limit_or_no_gpu_gives_no_reason() -> None:
    assert reasons_of(GuestSection(on_battery=True, gpu_celsius=80)) == []
    assert reasons_of(GuestSection(on_battery=True), lambda: 99.0) == []


def test_a_peer_does_not_start_if_the_temperature_cannot_be_read_and_pauses_if_that_fails_later() -> None:
    readings = iter([60.0])

    def read() -> float:
        for reading in readings:
            return reading
        raise ResourceError("the driver is gone")

    heat = Heat(80.0, read)
    assert [heat.look(False), heat.look(False)] == ["", "the GPU's temperature cannot be read"]
    with pytest.raises(ResourceError, match="the driver is gone"):
        Heat(80.0, read).look(False)


@pytest.mark.skipif(find_spec("pynvml") is not None, reason="nvidia-ml-py is installed")
def test_without_nvidia_ml_py_a_limit_is_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"install p2ptrain\[gpu\]"):
        celsius(torch.device("cuda:0"))


def test_a_model_that_does_not_fit_is_refused_with_what_to_do() -> None:
    words = "raise that, close other programs that use the GPU, or train with"
    with pytest.raises(ResourceError, match=words), fitting_gpu():
        raise torch.cuda.OutOfMemoryError("tried to allocate 8.00 GiB")


def test_a_limit_has_a_unit_and_means_nothing_on_a_cpu() -> None:
    config = PeerConfig.load(None, {"role": "trainer", "link": "p2ptrain://x", "resources.max_gpu_memory": "8GB"})
    assert config.resources.max_gpu_memory == 8 * 10**9
    limit_memory(torch.device("cpu"), config.resources.max_gpu_memory)


@pytest.mark.gpu
@needs_gpu
def test_torch_takes_no_more_of_a_gpu_than_the_limit() -> None:
    device = torch.device("cuda:0")
    limit_memory(device, 256 << 20)
    try:
        torch.empty(64 << 20, dtype=torch.uint8, device=device)
        with pytest.raises(ResourceError, match="do not fit"), fitting_gpu():
            torch.empty(512 << 20, dtype=torch.uint8, device=device)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


@pytest.mark.gpu
@needs_gpu
def test_the_temperature_of_a_gpu_can_be_read() -> None:
    pytest.importorskip("pynvml")
    assert 0 < celsius(torch.device("cuda:0")) < 120
