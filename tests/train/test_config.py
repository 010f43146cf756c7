"""Settings: read from TOML and `--set`, checked, written back."""

from dataclasses import replace
from functools import reduce
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from pipeloom.ir.errors import ConfigError
from pipeloom.train.config import (
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    PipelineConfig,
    read_config,
    write_config,
)


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "config.toml"
    file.write_text(text)
    return file


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
    assert read_config(None) == Config()


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("name=300", "300"),
        ('name="quoted"', "quoted"),
        ("job=", None),
        ("steps=1_000", 1000),
        ("pipeline.split_backward=true", True),
        *((f"pipeline.device={device}", device) for device in ("auto", "cpu", "cuda", "cuda:1")),
        ("data.paths=one.txt", ("one.txt",)),
        ("data.paths=", ()),
        ('data.paths=["one.txt", "two"]', ("one.txt", "two")),
        ("optimizer.learning_rate=1e-4", 1e-4),
    ],
)
def test_override_values_need_no_quotes(override: str, value: object) -> None:
    key = override.partition("=")[0]
    assert reduce(getattr, key.split("."), read_config(None, [override])) == value


@given(
    st.builds(
        Config,
        name=st.sampled_from(["a", "b-2"]),
        job=st.sampled_from([None, "x.py:f"]),
        steps=st.integers(1, 999),
        model=st.builds(ModelConfig, dropout=st.floats(0, 0.9), tied=st.booleans()),
        data=st.builds(DataConfig, paths=st.lists(st.text(), max_size=2).map(tuple)),
        pipeline=st.builds(
            PipelineConfig, memory=st.sampled_from([None, "2GB"]), ranks=st.sampled_from([None, 2])
        ),
    )
)
def test_what_is_written_reads_back(tmp_path_factory: pytest.TempPathFactory, config: Config) -> None:
    again = read_config(written(tmp_path_factory.mktemp("config"), write_config(config)))
    assert again == config and again.pipeline.unsaid == config.pipeline.unsaid


def test_the_rows_of_a_step_and_its_micro_batches_replace_each_other(tmp_path: Path) -> None:
    """A resumed run went on as if nothing were said where its file had the one, and was given the other."""
    config = read_config(None, ["pipeline.global_batch=32"])
    file = written(tmp_path, write_config(config))
    assert read_config(file) == config and "\nmicrobatches" not in file.read_text()
    fewer = read_config(file, ["pipeline.microbatches=2"]).pipeline
    assert (fewer.microbatches, fewer.global_batch, fewer.rows) == (2, None, 8)
    file.write_text(write_config(replace(config, pipeline=fewer)))
    assert read_config(file, ["pipeline.global_batch=16"]).pipeline.rows == 16
    with pytest.raises(ConfigError, match="both given"):
        read_config(None, ["pipeline.global_batch=16", "pipeline.microbatches=2"])
    file.write_text("[pipeline]\nglobal_batch = 16\nmicrobatches = 2\n")
    with pytest.raises(ConfigError, match="both given"):
        read_config(file)


def test_the_optimizer_may_stand_in_one_line_and_a_dotted_key_in_quotes(tmp_path: Path) -> None:
    text = 'optimizer = "muon+adamw"\n"model.width" = 96\n[model]\nlayers = 2\n'
    config = read_config(written(tmp_path, text), ["optimizer.learning_rate=0.1", "model.heads=3"])
    assert config.optimizer == OptimizerConfig(name="muon+adamw", learning_rate=0.1)
    assert config.model == ModelConfig(width=96, layers=2, heads=3)
    assert read_config(written(tmp_path, write_config(config))) == config


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("step = 3\n", "did you mean steps?"),
        ("[model]\nwidht = 5\n", "did you mean model.width?"),
        ("width = 5\n", "did you mean model.width?"),
        ("[optimiser]\nlearning_rate = 5\n", "did you mean optimizer.learning_rate?"),
        ('[model]\nwidth = "big"\n', "model.width"),
        ("[data]\npaths = [1]\n", "data.paths"),
        ("model = 3\n", "table"),
        ("steps = \n", "TOML"),
        ("steps = 0\n", "steps"),
        ("steps = 1" + 400 * "0" + "\n", "steps"),
        ("steps = 1" + 5000 * "0" + "\n", "digits"),
        ("steps = " + 5000 * "[" + 5000 * "]" + "\n", "deeply"),
        ("[model]\ndropout = 1.0\n", "model.dropout"),
        ("[optimizer]\nlearning_rate = 0.0\n", "optimizer.learning_rate"),
        ('name = "a/b"\n', "a/b"),
        ('optimizer = "muon"\n', "muon+adamw"),
        ("[pipeline]\nranks = 0\n", "ranks"),
        ('[pipeline]\nmemory = "300 apples"\n', "apples"),
        *((f'[pipeline]\ndevice = "{name}"\n', "device") for name in ("gpu", "cuda:", "cpu:1", "9" * 5000)),
        ("[pipeline]\n" + "9" * 5000 + " = 1\n", "999"),
        ('[pipeline]\nranks = "' + "9" * 5000 + '"\n', "ranks"),
    ],
)
def test_a_wrong_file_is_named_with_the_key(tmp_path: Path, text: str, word: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_config(written(tmp_path, text))
    assert "config.toml" in str(caught.value) and word in str(caught.value)
    assert len(caught.value.message) < 400 + len(str(tmp_path))


@pytest.mark.parametrize(
    ("override", "word"),
    [
        ("pipeline.clips=true", "clip_norm"),
        ("modle.width=3", "did you mean model.width?"),
        ("model.width", "has no value"),
        ("model=3", "table"),
        ("steps=many", "'many'"),
        ("zzzzzzzzz=1", "the keys are name, job"),
        ("pipeline.compile=maybe", "true or false"),
        ("optimizer.learning_rate=nan", "> 0"),
        ("pipeline.timeout_s=inf", "<= 10000000"),
        ("model.heads=5", "multiple of model.heads"),
        (f"pipeline.ranks={'9' * 5000}", "ranks"),
        ("data.paths=caf\udce9.txt", "UTF-8"),
        ("pipeline.memory=3Mb", "memory: '3Mb'"),
    ],
)
def test_a_wrong_override_is_said(override: str, word: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_config(None, [override])
    assert word in str(caught.value) and len(caught.value.message) < 400


def test_files_that_cannot_be_read_and_a_table_that_is_set_to_a_number(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="model is set to 3"):
        read_config(written(tmp_path, "model = 3"), ["model.width=5"])
    with pytest.raises(ConfigError, match="none.toml"):
        read_config(tmp_path / "none.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not text"):
        read_config(tmp_path / "bytes.toml")
