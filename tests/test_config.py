"""A configuration says what is wrong with it in one line, and means what it says."""

from functools import partial
from pathlib import Path

import jax
import pytest

from jaxshard.models import gpt
from jaxshard.strategy import STRATEGIES
from jaxshard.train.config import Config, ConfigError, dotted_keys, load, parse

CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.toml"))
SMALL = [path for path in CONFIGS if path.stem in STRATEGIES]


def test_there_is_a_config_for_each_strategy():
    built_in = {id(strategy) for strategy in STRATEGIES.values()}
    assert len(SMALL) == len(built_in) == 7
    assert {path.stem for path in CONFIGS} - {path.stem for path in SMALL} == {"gpt2-124m", "llama3-8b"}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_parses(path):
    config = load(path)
    assert config.strategy.resolve() in STRATEGIES.values()
    assert config.run.dir == f"runs/{path.stem}"


def test_small_configs_differ_in_the_strategy_alone():
    texts = {path.stem: path.read_text() for path in SMALL}
    bodies = {
        text.split("\n", 1)[1].replace(f'"{name}"', '""').replace(f"runs/{name}", "") for name, text in texts.items()
    }
    assert len(bodies) == 1


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"run": {"stesp": 3}}, "unknown key run.stesp; did you mean run.steps?"),
        ({"runn": {}}, "unknown key runn; did you mean run?"),
        ({"zzz": 1}, "unknown key zzz; choose from mesh, strategy, model, data, optimizer, precision, run."),
        ({"run": {"steps": "3"}}, "run.steps = '3'; it must be an integer."),
        ({"run": {"steps": 3.0}}, "run.steps = 3.0; it must be an integer."),
        ({"run": {"steps": True}}, "run.steps = True; it must be an integer."),
        ({"run": 3}, "run = 3 must be a section: [run]."),
        ({"model": {"scan": 1}}, "model.scan = 1; it must be true or false."),
        ({"optimizer": {"clip": "no"}}, "optimizer.clip = 'no'; it must be a number."),
        ({"data": {"files": "a.txt"}}, "data.files = 'a.txt'; it must be a list, each item a string."),
        ({"data": {"files": ["a", 1]}}, "data.files = ['a', 1]; it must be a list, each item a string."),
        ({"data": {"format": "int8"}}, "data.format = 'int8'; it must be one of 'text', 'uint16', 'uint32'."),
        ({"data": {"held_out": 1.5}}, "data.held_out = 1.5 is a share; it must lie between 0 and 1."),
        ({"run": {"steps": 0}}, "run.steps = 0; it must be 1 or more."),
        ({"optimizer": {"beta1": 1.0}}, "optimizer.beta1 = 1.0; it must lie in [0, 1)."),
    ],
)  # fmt: skip
def test_mistakes_are_named(table, message):
    with pytest.raises(ConfigError) as raised:
        parse(Config, table)
    assert str(raised.value) == message


def test_values_keep_their_types():
    config = parse(Config, {"optimizer": {"clip": 1}, "data": {"files": ["a", "b"]}, "model": {"kv_heads": 2}})
    assert config.optimizer.clip == 1.0
    assert isinstance(config.optimizer.clip, float)
    assert config.data.files == ("a", "b")
    assert config.model.kv_heads == 2
    assert parse(Config, {}) == Config()


def test_a_strategy_can_be_changed_in_part():
    config = parse(Config, {"strategy": {"name": "fsdp", "prefer": "memory", "regather": False}})
    strategy = config.strategy.resolve()
    assert (strategy.prefer, strategy.regather) == ("memory", False)
    assert strategy.params == STRATEGIES["fsdp"].params


def test_every_key_has_a_dotted_name():
    keys = dotted_keys()
    assert len(keys) == len(set(keys))
    assert {"run.dir", "mesh.devices", "precision.compute", "model.kv_heads"} <= set(keys)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"[run", "is no TOML: "),
        (b"\xff\xfe", "is no TOML: it is not UTF-8 text"),
        (b"[run]\nsteps = 'x'", "run.steps = 'x'; it must be an integer"),
        (b"[model]\nheads = 7", "model.width = 64 does not divide into model.heads = 7 heads"),
        (b"[precision]\ncompute = 'int8'", "Precision(compute='int8')"),
    ],
)
def test_the_file_is_named_with_the_mistake(tmp_path, text, message):
    path = tmp_path / "run.toml"
    path.write_bytes(text)
    with pytest.raises(ConfigError) as raised:
        load(path)
    assert str(path) in str(raised.value)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read .*absent.toml: No such file"):
        load(tmp_path / "absent.toml")


@pytest.mark.parametrize(
    ("name", "size"),
    # GPT-2's vocabulary of 50257 is padded to 50304.
    [("gpt2-124m", 124_439_808 + 47 * 768), ("llama3-8b", 8_030_261_248)],
)
def test_large_models_have_their_published_sizes(name, size):
    model = load(CONFIGS[0].with_name(f"{name}.toml")).model
    shapes = jax.eval_shape(partial(gpt.init, model), jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == size
