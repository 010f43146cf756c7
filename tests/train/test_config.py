"""Settings: read from TOML and `--set`, checked, written back."""

from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from pipeloom.ir.errors import ConfigError
from pipeloom.train.config import Config, DataConfig, ModelConfig, PipelineConfig
from pipeloom.train.config_text import known_keys, read_config, write_config


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "config.toml"
    file.write_text(text)
    return file


def complaint(tmp_path: Path, text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read_config(written(tmp_path, text), overrides)
    return str(caught.value).replace(str(tmp_path) + "/", "")


def test_nothing_given_is_the_default() -> None:
    assert read_config(None) == Config()


def test_overrides_beat_the_file_and_the_file_beats_the_defaults(tmp_path: Path) -> None:
    file = written(tmp_path, 'name = "mine"\n[model]\nwidth = 96\nlayers = 2\n[data]\npaths = ["a", "b"]\n')
    config = read_config(file, ["model.layers=3", "pipeline.memory=300MiB", "optimizer.clip_norm=0"])
    assert config == Config(
        name="mine",
        model=ModelConfig(width=96, layers=3),
        data=DataConfig(paths=("a", "b")),
        pipeline=PipelineConfig(memory="300MiB"),
        optimizer=config.optimizer,
    )
    assert config.optimizer.clip_norm == 0.0


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("name=300", "name", "300"),
        ('name="quoted"', "name", "quoted"),
        ("job=a.py:make", "job", "a.py:make"),
        ("job=", "job", None),
        ("pipeline.split_backward=true", "pipeline.split_backward", True),
        ("data.paths=one.txt", "data.paths", ("one.txt",)),
        ('data.paths=["one.txt", "two"]', "data.paths", ("one.txt", "two")),
        ("optimizer.learning_rate=1e-4", "optimizer.learning_rate", 1e-4),
    ],
)
def test_override_values_need_no_quotes(override: str, key: str, value: object) -> None:
    found: object = read_config(None, [override])
    for name in key.split("."):
        found = getattr(found, name)
    assert found == value


@given(
    st.builds(
        Config,
        name=st.sampled_from(["a", "b-2"]),
        job=st.sampled_from([None, "x.py:f"]),
        steps=st.integers(1, 999),
        model=st.builds(ModelConfig, dropout=st.floats(0, 0.9), tied=st.booleans()),
        data=st.builds(DataConfig, paths=st.lists(st.text(), max_size=2).map(tuple)),
        pipeline=st.builds(PipelineConfig, memory=st.sampled_from([None, "2GB"])),
    )
)
def test_what_is_written_reads_back(tmp_path_factory: pytest.TempPathFactory, config: Config) -> None:
    file = written(tmp_path_factory.mktemp("config"), write_config(config))
    assert read_config(file) == config


def test_a_config_is_written_whole() -> None:
    """Of a table that was given in part, only what was given was written."""
    text = write_config(read_config(None, ["pipeline.ranks=3"]))
    assert "ranks = 3" in text and "microbatches = 8" in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("steps = 5\nstep = 3\n", "config.toml line 2: there is no setting step\nhint: did you mean steps?"),
        (
            "[model]\nlayers = 2\nwidht = 5\n",
            "config.toml line 3: there is no setting model.widht\nhint: did you mean model.width?",
        ),
        (
            "width = 5\n",
            "config.toml line 1: there is no setting width\nhint: did you mean model.width?",
        ),
        (
            "[optimiser]\nlearning_rate = 5\n",
            "config.toml line 2: there is no setting optimiser.learning_rate\n"
            "hint: did you mean optimizer.learning_rate?",
        ),
        (
            '\n[model]\nwidth = "big"\n',
            "config.toml line 3: model.width: expected int, got str\n"
            "hint: model.width is a whole number, by default 128",
        ),
        (
            "[data]\npaths = [1]\n",
            "config.toml line 2: data.paths: expected str, got int\n"
            "hint: data.paths is a list of texts, by default []",
        ),
        ("model = 3\n", "config.toml line 1: model: expected object, got int\nhint: model is a table"),
        ("steps = \n", "config.toml is not valid TOML: Invalid value (at line 1, column 9)\nhint: "),
        ("steps = 0\n", "steps is 0\nhint: use a value above 0"),
        (
            "[model]\nheads = 5\n",
            "model.width 128 is not a multiple of model.heads 5\nhint: all heads have the same width",
        ),
        ("[model]\ndropout = 1.0\n", "model.dropout is 1.0\nhint: use at least 0 and below 1"),
        ('[pipeline]\nmemory = "300 apples"\n', "'300 apples' has the unknown unit 'apples'\nhint: "),
        ('name = "a/b"\n', "name is 'a/b'\nhint: use a plain word"),
        ("steps = 1" + 5000 * "0" + "\n", "config.toml has a number of thousands of digits\nhint: "),
        ("steps = " + 5000 * "[" + 5000 * "]" + "\n", "config.toml is nested too deeply\nhint: "),
        ("steps = 1" + 400 * "0" + "\n", "config.toml line 1: steps is 1.00e+400\nhint: use"),
    ],
)
def test_a_wrong_file_is_one_clear_sentence(tmp_path: Path, text: str, message: str) -> None:
    assert complaint(tmp_path, text).startswith(message)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "modle.width=3",
            "--set modle.width=3: there is no setting modle.width\nhint: did you mean model.width?",
        ),
        ("model.width", "--set 'model.width' has no value\nhint: write --set key=value"),
        ("steps=many", "--set steps=many: steps: expected int, got str\nhint: steps is a whole number"),
        ("zzzzzzzzz=1", "--set zzzzzzzzz=1: there is no setting zzzzzzzzz\nhint: the keys are name, job"),
        (f"steps={10**400}", f"--set steps=1{32 * '0'} … {38 * '0'}: steps is 1.00e+400\nhint: use a whole"),
        ("pipeline.compile=1", "--set pipeline.compile=1: pipeline.compile: expected bool, got int"),
    ],
)
def test_a_wrong_override_is_one_clear_sentence(tmp_path: Path, override: str, message: str) -> None:
    assert complaint(tmp_path, "", override).startswith(message)


def test_a_table_cannot_be_set_to_a_number_and_also_filled(tmp_path: Path) -> None:
    assert complaint(tmp_path, "model = 3", "model.width=5").startswith("model is set to 3")


def test_a_missing_file_and_a_binary_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read config file .*/none.toml: No such file or directory"):
        read_config(tmp_path / "none.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not text"):
        read_config(tmp_path / "bytes.toml")


def test_every_key_is_known_once() -> None:
    assert len(known_keys()) == len(set(known_keys()))
    assert "pipeline.ranks" in known_keys() and "model" not in known_keys()


@pytest.mark.parametrize("line", ['device = "{}"', 'treatments = "{}"', "{} = 1", 'ranks = "{}"'])
def test_long_values_are_cut_short_in_messages(tmp_path: Path, line: str) -> None:
    """A damaged file gave pages of digits."""
    (tmp_path / "c.toml").write_text("[pipeline]\n" + line.format("9" * 5000))
    with pytest.raises(ConfigError) as caught:
        read_config(tmp_path / "c.toml")
    assert len(caught.value.message) < 400
