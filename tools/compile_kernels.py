"""Compile the Triton kernels for GPUs that are not here, and print what they cost there.

    python tools/compile_kernels.py                                  # compute capability 8.0, 9.0, 10.0, bfloat16
    python tools/compile_kernels.py --capabilities 90 --head-sizes 128 --dtype fp16 --groups 8

Per kernel: registers of a thread, bytes of shared memory, spilled bytes (stack of a thread). Exit code 1 when anything
spills. No GPU is needed; Triton brings its own assembler.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Cost:
    """What a compiled kernel takes."""

    registers: int
    shared: int  # bytes
    stack: int  # bytes of a thread that did not fit registers


def compile_kernel(kernel, dtype: str, head_size: int, groups: int, capability: int) -> Cost:
    """Compile one kernel of triton_diagonal.py.

    Args:
        kernel: a function under `triton.jit`.
        capability: 80, 90 or 100.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from megatron.bdlm.attention.kernels import triton_diagonal as kernels

    sizes = kernels.tile_sizes(head_size, groups)
    fixed = kernels.constants(groups, head_size, head_size, DTYPES[dtype], sizes)
    signature = {}
    for name in kernel.arg_names:
        signature[name] = "constexpr" if name in fixed else argument_type(name, dtype)
    place = {name: (number,) for number, name in enumerate(kernel.arg_names)}
    source = ASTSource(
        fn=kernel, signature=signature, constexprs={place[name]: value for name, value in fixed.items()},
        attrs={place[name]: [["tt.divisibility", 16]] for name, kind in signature.items() if kind[0] == "*" or is_aligned(name)},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": sizes.warps})
    registers, stack = resources(compiled.asm["cubin"])
    return Cost(registers, compiled.metadata.shared, stack)


def argument_type(name: str, dtype: str) -> str:
    """Triton's name of an argument's type: inputs in the model's type, sums in float32, tables and strides in int32."""
    if name in ("Q", "K", "V", "DOUT"):
        return f"*{dtype}"
    if name in ("OUT", "LSE", "DELTA", "DQ", "DK", "DV_OUT"):
        return "*fp32"
    if name in ("INTERVALS", "TILES", "KEY_TILES", "SEEN_BY"):
        return "*i32"
    return "fp32" if name == "scale" else "i32"


def is_aligned(name: str) -> bool:
    """Whether a stride is a multiple of 16, as the launcher finds those of rows of a head's size."""
    return name.endswith(("_row", "_head")) and not name.startswith("lse")


def resources(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of stack) of a kernel, as its assembler noted them."""
    import triton

    program = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        answer = subprocess.run([str(program), "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", answer.stdout)
    if found is None:
        raise RuntimeError(f"cuobjdump says nothing of registers: {answer.stdout}{answer.stderr}")
    return int(found[1]), int(found[2])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capabilities", type=int, nargs="+", default=[80, 90, 100], help="without the dot")
    parser.add_argument("--head-sizes", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--groups", type=int, nargs="+", default=[4], help="query heads per key head")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    args = parser.parse_args()

    os.environ.pop("TRITON_INTERPRET", None)
    from megatron.bdlm.attention.kernels import triton_diagonal as kernels

    spills = 0
    print("capability  head  groups  tile rows x keys, warps  kernel    registers  shared bytes  spilled bytes")
    for capability in args.capabilities:
        for head_size in args.head_sizes:
            for groups in args.groups:
                sizes = kernels.tile_sizes(head_size, groups)
                for name, kernel in kernels.KERNELS.items():
                    cost = compile_kernel(kernel, args.dtype, head_size, groups, capability)
                    spills += cost.stack
                    tile = f"{sizes.rows} x {sizes.keys}, {sizes.warps}"
                    print(
                        f"{capability / 10:10}  {head_size:4}  {groups:6}  {tile:24} {name:9} {cost.registers:9} {cost.shared:13} {cost.stack:14}",
                        flush=True,
                    )
    return 1 if spills else 0


if __name__ == "__main__":
    sys.exit(main())
