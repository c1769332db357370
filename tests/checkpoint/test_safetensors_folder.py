"""Safetensors folders against the library itself: what is written loads there, what is broken is named."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.bdlm.checkpoint.layout import ConversionError
from megatron.bdlm.checkpoint.safetensors_folder import NewTensor, SafetensorsFolder, TensorInfo, write_folder

TENSORS = {
    "a": torch.randn(3, 4),
    "b": torch.randn(5).bfloat16(),
    "c": torch.randn(2, 2, 2).half(),
    "d": torch.arange(6),
}


def _write(folder, limit):
    groups = [
        [NewTensor(n, TensorInfo(tuple(TENSORS[n].shape), TENSORS[n].dtype)) for n in names]
        for names in ("ab", "c", "d")
    ]
    counted = []
    write_folder(folder, groups, lambda group: {new.name: TENSORS[new.name] for new in group}, limit, counted.append)
    assert sum(counted) == 4


@pytest.mark.parametrize("limit, files", [(10**6, 1), (75, 2), (1, 3)])
def test_the_library_reads_what_is_written(limit, files, tmp_path):
    _write(tmp_path, limit)
    paths = sorted(tmp_path.glob("*.safetensors"))
    assert len(paths) == files
    loaded = {name: tensor for path in paths for name, tensor in load_file(path).items()}
    assert loaded.keys() == TENSORS.keys() and all(torch.equal(loaded[n], TENSORS[n]) for n in TENSORS)
    ours = SafetensorsFolder(tmp_path)
    assert all(torch.equal(ours.read(n), TENSORS[n]) and ours.tensors[n].dtype == TENSORS[n].dtype for n in TENSORS)
    if files > 1:
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == 3 * 4 * 4 + 5 * 2 + 8 * 2 + 6 * 8
        assert index["weight_map"]["d"] == f"model-0000{files}-of-0000{files}.safetensors"


def test_broken_folders_are_named(tmp_path):
    with pytest.raises(ConversionError, match="no .*safetensors file"):
        SafetensorsFolder(tmp_path)
    _write(tmp_path, 1)
    second = tmp_path / "model-00002-of-00003.safetensors"
    second.write_bytes(second.read_bytes()[:-1])
    with pytest.raises(ConversionError, match="model-00002-of-00003.safetensors: not a whole safetensors file"):
        SafetensorsFolder(tmp_path)
    second.unlink()
    with pytest.raises(ConversionError, match="files that are not there: model-00002"):
        SafetensorsFolder(tmp_path)


def test_files_beside_the_model_are_not_read(tmp_path):
    save_file({"x": TENSORS["a"]}, tmp_path / "consolidated.safetensors")
    save_file({"a": TENSORS["a"]}, tmp_path / "model.safetensors")
    assert list(SafetensorsFolder(tmp_path).tensors) == ["a"]


def test_a_tensor_twice_is_refused(tmp_path):
    for name in ("one", "two"):
        save_file({"a": TENSORS["a"]}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ConversionError, match="tensor a is also in one.safetensors"):
        SafetensorsFolder(tmp_path)


def test_wrong_tensor_is_refused(tmp_path):
    groups = [[NewTensor("a", TensorInfo((4, 3), torch.float32))]]
    with pytest.raises(ConversionError, match="a: .3, 4. torch.float32 instead of .4, 3."):
        write_folder(tmp_path, groups, lambda group: TENSORS, 10**6)
