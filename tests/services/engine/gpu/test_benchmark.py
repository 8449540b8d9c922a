"""`benchmarks.gpu` runs as it is on a GPU, with a tiny model; its figures mean nothing here."""

import subprocess

import torch

from benchmarks import gpu


def test_every_figure_is_measured(capsys, monkeypatch):
    monkeypatch.setattr(gpu, "STEPS_IN_A_ROW", 1)
    shape = gpu.Shape("tiny", 32, 32, 1, 2, 1, 16, 64, has_qk_norm=True)
    work = gpu.Work(torch.device("cpu"), (1, 2), 17, (5, 9), repetitions=1, copy_bytes=1 << 16, matrix_size=16)
    results = gpu.measure(shape, gpu.measure_limits(work), work)
    assert [one.what for one in results] == [
        "prefill 5",
        "prefill 9",
        "decode 1",
        "attention 1",
        "decode 2",
        "attention 2",
    ]
    assert all(one.ratio > 0 for one in results)
    assert "of the limit (aim 0.85)" in capsys.readouterr().out


def test_floors_are_those_of_the_models():
    """Against the published sizes: 8.03 and 0.60 billion parameters, of which embeddings are read by row."""
    qwen, llama = gpu.SHAPES
    assert round(llama.step_bytes / 1e9, 1) == 15.0
    assert round(qwen.step_bytes / 1e9, 2) == 1.19
    assert (llama.token_bytes, qwen.token_bytes) == (128 << 10, 112 << 10)
    assert round(llama.prompt_operations(2048) / 800e12 * 1e3, 1) == 37.1


def test_limits_are_those_of_a_process_with_the_libraries_own_settings(capsys, monkeypatch):
    measured = gpu.Limits("one", 3.2e12, 7e14)

    def run(command, **_):
        monkeypatch.setattr("sys.argv", command[2:])
        monkeypatch.setattr(gpu, "measure_limits", lambda work: measured)
        assert gpu.main() == 0
        return subprocess.CompletedProcess(command, 0, stdout=capsys.readouterr().out)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(subprocess, "run", run)
    assert gpu.limits_of_another_process(3) == measured
    assert str(measured) == "one: copies 3.20 TB/s, multiplies 700 TFLOP/s"


def test_without_a_device_it_says_so(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["gpu"])
    assert gpu.main() == 1
    assert "needs a CUDA device" in capsys.readouterr().err
