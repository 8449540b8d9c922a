from pathlib import Path

import pytest
import torch

from services.engine.kernels import library as library_module
from services.engine.kernels import ready
from services.engine.kernels.build import source_digest
from services.engine.kernels.library import Kernels, check_arithmetic, open_kernels

FLAGS = {level.name: level.features for level in ready.LEVELS}
NEWER = "sse4_2 avx512_vnni"


def cpu(folder: Path, *features: str) -> Path:
    file = folder / "cpuinfo"
    file.write_text(
        f"processor\t: 0\nmodel name\t: something\nflags\t\t: {NEWER} {' '.join(features)}\n\nprocessor\t: 1\n"
    )
    return file


@pytest.fixture
def libraries(tmp_path: Path) -> Path:
    folder = tmp_path / "libraries"
    folder.mkdir()
    for level in ready.LEVELS:
        (folder / f"{level.name}-{source_digest()}.so").write_bytes(b"")
    return folder


@pytest.mark.parametrize("level", FLAGS)
def test_a_processor_gets_the_best_library_that_it_can_run(tmp_path: Path, libraries: Path, level: str) -> None:
    found = ready.ready_library(libraries, cpu_info=cpu(tmp_path, *FLAGS[level]))
    assert found == libraries / f"{level}-{source_digest()}.so"


@pytest.mark.parametrize("level", FLAGS)
def test_one_feature_that_is_missing_rules_a_library_out(tmp_path: Path, libraries: Path, level: str) -> None:
    for feature in FLAGS[level]:
        found = ready.ready_library(libraries, cpu_info=cpu(tmp_path, *(FLAGS[level] - {feature})))
        assert found is None or FLAGS[found.name.rpartition("-")[0]] <= FLAGS[level] - {feature}


def test_libraries_of_other_sources_are_not_taken(tmp_path: Path, libraries: Path) -> None:
    for path in libraries.iterdir():
        path.rename(path.with_name(path.name.replace(source_digest(), "0" * 32)))
    assert ready.ready_library(libraries, cpu_info=cpu(tmp_path, *FLAGS["avx2"])) is None


def test_without_libraries_or_facts_of_the_processor_there_is_none(tmp_path: Path, libraries: Path) -> None:
    assert ready.ready_library(tmp_path / "nothing") is None
    assert ready.ready_library(libraries, cpu_info=tmp_path / "nothing") is None
    assert ready.ready_library(libraries, cpu_info=cpu(tmp_path)) is None


def test_a_library_made_ready_is_loaded_where_no_compiler_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest kind of processor's, compiled with less effort; it computes what it should."""
    (oldest,) = (level for level in ready.LEVELS if level.name == "avx2")
    if not oldest.features <= ready.processor_features():
        pytest.skip("this processor has no AVX2")
    monkeypatch.setattr(ready, "LEVELS", [ready.Level(oldest.name, (*oldest.flags, "-O1"), oldest.features)])
    ready.make_libraries(tmp_path / "libraries")
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    path = ready.ready_library(tmp_path / "libraries")
    monkeypatch.setattr(library_module, "ready_library", lambda: path)
    kernels = open_kernels(cache_dir=tmp_path / "cache")
    assert isinstance(kernels, Kernels)
    assert kernels.arithmetic == f"avx2/{source_digest()}"
    torch.set_num_threads(2)
    check_arithmetic(kernels)
    assert not (tmp_path / "cache").exists()
