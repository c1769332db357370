"""Every published recipe has a script that writes out all of its flags: they equal --bdlm-recipe, so neither can drift."""

import dataclasses

import pytest

from tests.stand_ins import PYTHON, ROOT, TORCHRUN, parsed, run_script  # first: it readies the platform
from megatron.bdlm.config import RECIPES, BDLMConfig, config_from_args, recipe_values
from megatron.bdlm.data.sft import FinetuneOptions
from megatron.bdlm.training import arguments

SCRIPTS = {path.stem: path for path in sorted((ROOT / "examples" / "recipes").glob("*.sh"))}

MODELS = {"diffusion-gemma": '{"vocab_size": 1024, "full_head_size": 64, "full_key_heads": 2}'}
"""--bdlm-diffusion-gemma, which a checkpoint would say, of the recipe that trains no other model."""


def written(name: str) -> list[str]:
    """The lines of BDLM_ARGS in a recipe's script."""
    text = SCRIPTS[name].read_text()
    return text.partition("BDLM_ARGS=(\n")[2].partition("\n)")[0].split("\n")


def test_every_recipe_has_a_script_and_every_script_a_recipe():
    assert set(SCRIPTS) == set(RECIPES)


def options(name: str) -> list[str]:
    return [line.split()[0].replace("--no-", "--").removeprefix("--").replace("-", "_") for line in written(name)]


def test_all_scripts_write_the_same_flags_in_one_order():
    """All that any recipe sets, so that `diff` of two scripts shows how two objectives differ; a block size where it is not the checkpoint's."""
    assert all(("bdlm_block_size" in options(name)) == ("bdlm_block_size" in RECIPES[name]) for name in SCRIPTS)
    (flags,) = {tuple(option for option in options(name) if option != "bdlm_block_size") for name in SCRIPTS}
    order = [field.name for field in dataclasses.fields(BDLMConfig)]
    assert list(flags) == sorted(flags, key=order.index)
    assert {option for values in RECIPES.values() for option in values} <= {"bdlm_block_size", *flags}


@pytest.mark.parametrize("name", SCRIPTS)
def test_flags_equal_the_recipe(name, tmp_path, monkeypatch):
    (tmp_path / "data" / "tokenizer").mkdir(parents=True)
    model = MODELS.get(name)
    further = () if model is None else ("--bdlm-diffusion-gemma", model)
    done = run_script(SCRIPTS[name], tmp_path, {"torchrun": TORCHRUN}, *further, DEVICE="cpu", NPROC=2, SEQ_LENGTH=1024, RUNS=tmp_path)
    assert done.returncode == 0, done.stderr
    flags = (tmp_path / "node0").read_text().splitlines()
    entry = next(flag for flag in flags if flag.endswith("_bdlm.py"))
    assert "--bdlm-recipe" not in flags
    args = parsed(flags, entry, 2, monkeypatch, FinetuneOptions if entry == "finetune_bdlm.py" else None)
    config = config_from_args(args)
    arguments.check_combination(args, config)
    assert dataclasses.replace(config, bdlm_recipe=name) == BDLMConfig(**recipe_values(name), block_parallel_size=2, bdlm_diffusion_gemma=model)
    assert args.save == args.load == str(tmp_path / f"recipe-{name}" / "checkpoints")
    assert "torchrun" in (tmp_path / f"recipe-{name}" / "launches.log").read_text()


def test_a_dry_run_asks_about_all_nodes_on_one_process(tmp_path):
    python = f"""[[ $* != *--dry-run* ]] || {{ printf '%s\\n' "$LOCAL_WORLD_SIZE" "$@" >"$STAND_IN_LOG/asked"; exit; }}\n{PYTHON}"""
    script = ROOT / "examples" / "03_pretrain.sh"
    done = run_script(script, tmp_path, {"python": python}, DRY_RUN=1, DEVICE="cpu", MODEL="qwen3-30b-a3b", NNODES=2, NPROC=8, CP=8, EP=8, RUNS=tmp_path)
    assert done.returncode == 0, done.stderr
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked[:2] == ["8", "pretrain_bdlm.py"] and asked[-3:] == ["--dry-run", "--dry-run-world-size", "16"]
    assert not (tmp_path / "pretrain-qwen3-30b-a3b").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(DRY_RUN="yes"), "DRY_RUN=yes: a legal value: 0 or 1"),
        (dict(DRY_RUN=1, CUDA_VISIBLE_DEVICES=""), "NPROC says how many a node has. A legal value: NPROC=8"),
    ],
)
def test_what_a_dry_run_refuses(settings, message, tmp_path):
    done = run_script(ROOT / "examples" / "03_pretrain.sh", tmp_path, {}, RUNS=tmp_path, **settings)
    assert done.returncode != 0 and message in done.stderr
