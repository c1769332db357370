"""Import and export hold one layer at a time: their extra memory is a fraction of the model's size."""

import json
import subprocess
import sys

from megatron.bdlm.testing.training_run import REPOSITORY, environment
from tests.checkpoint.tiny import make_model

MEASURE = """
import json, resource, sys
from pathlib import Path
from megatron.bdlm.platform import cpu
cpu.adapt_engine(cpu.enable())
import torch, safetensors, torch.distributed.checkpoint
from megatron.bdlm.checkpoint import huggingface
from megatron.bdlm.checkpoint.torch_dist import CheckpointFolder
from megatron.bdlm.training.arguments import arguments_of

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

folder = Path(sys.argv[1])
small = huggingface.open_source(folder / "small")  # everything that is loaded once is loaded now
huggingface.import_model(small, folder / "a", arguments_of)
huggingface.export_model(CheckpointFolder(folder / "a" / "release"), folder / "b")
torch.zeros(1)
start = peak()
huggingface.import_model(huggingface.open_source(folder / "large"), folder / "c", arguments_of)
imported = peak()
huggingface.export_model(CheckpointFolder(folder / "c" / "release"), folder / "d")
print(json.dumps([imported - start, peak() - start]))
"""


def test_extra_memory_of_a_large_model(tmp_path):
    make_model("llama untied, llama3").save_pretrained(tmp_path / "small")
    large = make_model(
        "llama untied, llama3",
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=14,
        num_attention_heads=8,
        vocab_size=6000,
    )
    large.save_pretrained(tmp_path / "large")
    size = sum(parameter.numel() * 4 for parameter in large.parameters())
    largest = max(parameter.numel() * 4 for parameter in large.parameters())
    assert size > 200 * 2**20 and largest < 13 * 2**20
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path)],
        capture_output=True,
        text=True,
        env=environment(),
        cwd=REPOSITORY,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    imported, exported = json.loads(done.stdout.splitlines()[-1])
    layer = largest + 3 * 2048 * 512 * 4  # what is in flight: an embedding, or the tensors of one layer
    assert max(imported, exported) < 2 * layer + 48 * 2**20 < size / 2, (imported / 2**20, exported / 2**20)
